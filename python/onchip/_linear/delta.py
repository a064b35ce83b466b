"""Delta rules, whose writes replace what a key held, under a decay a head or a channel.

What they have in common stands in `onchip.ops`; docs/semantics.md, section 3, is the contract.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from onchip._linear import calls

ArrayT = TypeVar("ArrayT")

__all__ = [
    "DeltaRuleGradients",
    "GatedDeltaRuleGradients",
    "KdaGradients",
    "delta_rule_backward",
    "delta_rule_forward",
    "delta_rule_step",
    "gated_delta_rule_backward",
    "gated_delta_rule_forward",
    "gated_delta_rule_step",
    "kda_backward",
    "kda_forward",
    "kda_step",
]


class DeltaRuleGradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor; dinitial_state None
    without an initial state."""

    dq: ArrayT
    dk: ArrayT
    dv: ArrayT
    dbeta: ArrayT
    dinitial_state: Any


def delta_rule_forward(
    q: ArrayT,
    k: object,
    v: object,
    beta: object,
    *,
    qk_l2norm: bool = False,
    scale: float | None = None,
    initial_state: object | None = None,
    output_final_state: bool = False,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> tuple[ArrayT, ArrayT | None]:
    """The delta rule: what the state holds at a key is replaced, by a part beta.

    S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = scale S_t^T q_t (Schlag et al.
    2021; Yang et al. 2024).

    Args:
        q: [batch, T, Hk, dk], float.
        k: [batch, T, Hk, dk], q's dtype.
        v: [batch, T, Hv, dv], q's dtype; Hv is a multiple of Hk.
        beta: [batch, T, Hv], float.
        qk_l2norm: first q / sqrt(|q|^2 + 1e-6), k likewise.
        scale: None: dk ** -0.5.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: v's shape and dtype.
    """
    return calls.forward(calls.DELTA_RULE, locals())


def delta_rule_backward(
    d_o: object,
    q: ArrayT,
    k: object,
    v: object,
    beta: object,
    *,
    d_final_state: object | None = None,
    qk_l2norm: bool = False,
    scale: float | None = None,
    initial_state: object | None = None,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> DeltaRuleGradients[ArrayT]:
    """Gradients of `delta_rule_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to delta_rule_forward.
    """
    return DeltaRuleGradients(*calls.backward(calls.DELTA_RULE, locals()))


def delta_rule_step(
    q: ArrayT,
    k: object,
    v: object,
    beta: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    qk_l2norm: bool = False,
    scale: float | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `delta_rule_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops).
    Returns o, shaped and typed as v.
    """
    o: ArrayT = calls.step(calls.DELTA_RULE, locals())
    return o


class GatedDeltaRuleGradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor, None where there was none; dinitial_state None
    without an initial state."""

    dq: ArrayT
    dk: ArrayT
    dv: ArrayT
    dlog_decay: ArrayT | None
    dbeta: ArrayT
    dA_log: ArrayT | None
    ddt_bias: ArrayT | None
    dinitial_state: Any


def gated_delta_rule_forward(
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object | None,
    beta: object,
    *,
    A_log: object | None = None,
    dt_bias: object | None = None,
    qk_l2norm: bool = False,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    initial_state: object | None = None,
    output_final_state: bool = False,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> tuple[ArrayT, ArrayT | None]:
    """The delta rule with one decay a token and head (Gated DeltaNet).

    S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = scale S_t^T q_t (Yang et
    al. 2025).

    Args:
        q: [batch, T, Hk, dk], float.
        k: [batch, T, Hk, dk], q's dtype.
        v: [batch, T, Hv, dv], q's dtype; Hv is a multiple of Hk.
        log_decay: [batch, T, Hv], float, at most 0; or [Hv], the same for all tokens; or None: no
            decay.
        beta: [batch, T, Hv], float.
        A_log: [Hv], float. Given, log_decay and beta are raw: log_decay' = -e^A_log
            softplus(log_decay + dt_bias), beta' = sigmoid(beta); softplus(x) is x above 20. None:
            they are used as they are.
        dt_bias: [Hv], float: with A_log. None: 0.
        qk_l2norm: first q / sqrt(|q|^2 + 1e-6), k likewise.
        lower_bound: with A_log: log_decay' = lower_bound sigmoid(e^A_log (log_decay + dt_bias))
            instead; below 0.
        allow_neg_eigval: with A_log: beta' = 2 sigmoid(beta).
        scale: None: dk ** -0.5.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: v's shape and dtype.
    """
    return calls.forward(calls.GATED_DELTA_RULE, locals())


def gated_delta_rule_backward(
    d_o: object,
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object | None,
    beta: object,
    *,
    d_final_state: object | None = None,
    A_log: object | None = None,
    dt_bias: object | None = None,
    qk_l2norm: bool = False,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    initial_state: object | None = None,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> GatedDeltaRuleGradients[ArrayT]:
    """Gradients of `gated_delta_rule_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to gated_delta_rule_forward.
    """
    return GatedDeltaRuleGradients(*calls.backward(calls.GATED_DELTA_RULE, locals()))


def gated_delta_rule_step(
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object | None,
    beta: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    A_log: object | None = None,
    dt_bias: object | None = None,
    qk_l2norm: bool = False,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `gated_delta_rule_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops).
    Returns o, shaped and typed as v.
    """
    o: ArrayT = calls.step(calls.GATED_DELTA_RULE, locals())
    return o


class KdaGradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor, None where there was none; dinitial_state None
    without an initial state."""

    dq: ArrayT
    dk: ArrayT
    dv: ArrayT
    dlog_decay: ArrayT
    dbeta: ArrayT
    dA_log: ArrayT | None
    ddt_bias: ArrayT | None
    dinitial_state: Any


def kda_forward(
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object,
    beta: object,
    *,
    A_log: object | None = None,
    dt_bias: object | None = None,
    qk_l2norm: bool = False,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    initial_state: object | None = None,
    output_final_state: bool = False,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> tuple[ArrayT, ArrayT | None]:
    """The delta rule with a decay a channel of the keys (Kimi Delta Attention).

    S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T, o_t = scale S_t^T q_t
    (Kimi Team 2025).

    Args:
        q: [batch, T, Hk, dk], float.
        k: [batch, T, Hk, dk], q's dtype.
        v: [batch, T, Hv, dv], q's dtype; Hv is a multiple of Hk.
        log_decay: [batch, T, Hv, dk], float, at most 0.
        beta: [batch, T, Hv], float.
        A_log: [Hv], float. Given, log_decay and beta are raw: log_decay' = -e^A_log
            softplus(log_decay + dt_bias), beta' = sigmoid(beta); softplus(x) is x above 20. None:
            they are used as they are.
        dt_bias: [Hv, dk], float: with A_log. None: 0.
        qk_l2norm: first q / sqrt(|q|^2 + 1e-6), k likewise.
        lower_bound: with A_log: log_decay' = lower_bound sigmoid(e^A_log (log_decay + dt_bias))
            instead; below 0.
        allow_neg_eigval: with A_log: beta' = 2 sigmoid(beta).
        scale: None: dk ** -0.5.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: v's shape and dtype.
    """
    return calls.forward(calls.KDA, locals())


def kda_backward(
    d_o: object,
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object,
    beta: object,
    *,
    d_final_state: object | None = None,
    A_log: object | None = None,
    dt_bias: object | None = None,
    qk_l2norm: bool = False,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    initial_state: object | None = None,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> KdaGradients[ArrayT]:
    """Gradients of `kda_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to kda_forward.
    """
    return KdaGradients(*calls.backward(calls.KDA, locals()))


def kda_step(
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object,
    beta: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    A_log: object | None = None,
    dt_bias: object | None = None,
    qk_l2norm: bool = False,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `kda_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops).
    Returns o, shaped and typed as v.
    """
    o: ArrayT = calls.step(calls.KDA, locals())
    return o
