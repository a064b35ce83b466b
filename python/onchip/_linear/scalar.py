"""Linear attention with one decay a head: S_t = alpha_t S_{t-1} + k_t v_t^T.

What they have in common stands in `onchip.ops`; docs/semantics.md, section 3, is the contract.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from onchip._linear import calls

ArrayT = TypeVar("ArrayT")

__all__ = [
    "LightningAttentionGradients",
    "LinearAttentionGradients",
    "RetentionGradients",
    "SimpleGlaGradients",
    "lightning_attention_backward",
    "lightning_attention_forward",
    "lightning_attention_step",
    "linear_attention_backward",
    "linear_attention_forward",
    "linear_attention_step",
    "retention_backward",
    "retention_forward",
    "retention_step",
    "simple_gla_backward",
    "simple_gla_forward",
    "simple_gla_step",
]


class LinearAttentionGradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor; dinitial_state None
    without an initial state."""

    dq: ArrayT
    dk: ArrayT
    dv: ArrayT
    dinitial_state: Any


def linear_attention_forward(
    q: ArrayT,
    k: object,
    v: object,
    *,
    normalize: bool = False,
    scale: float | None = None,
    initial_state: object | None = None,
    output_final_state: bool = False,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> tuple[ArrayT, Any | None]:
    """Linear attention without decay.

    S_t = S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t (Katharopoulos et al. 2020, without their
    feature map). With normalize also z_t = z_{t-1} + k_t and o_t = scale S_t^T q_t / (scale q_t.z_t
    + 1e-10).

    Args:
        q: [batch, T, Hk, dk], float.
        k: [batch, T, Hk, dk], q's dtype.
        v: [batch, T, Hv, dv], q's dtype; Hv is a multiple of Hk.
        normalize: divide by the sum of the weights; the state is then (S, z), z [N, Hv, dk].
        scale: None: dk ** -0.5.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: v's shape and dtype. final_state: S, or (S, z).
    """
    return calls.forward(calls.LINEAR_ATTENTION, locals())


def linear_attention_backward(
    d_o: object,
    q: ArrayT,
    k: object,
    v: object,
    *,
    d_final_state: object | None = None,
    normalize: bool = False,
    scale: float | None = None,
    initial_state: object | None = None,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> LinearAttentionGradients[ArrayT]:
    """Gradients of `linear_attention_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to linear_attention_forward.
    """
    return LinearAttentionGradients(*calls.backward(calls.LINEAR_ATTENTION, locals()))


def linear_attention_step(
    q: ArrayT,
    k: object,
    v: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    normalize: bool = False,
    scale: float | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `linear_attention_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops), a
    tuple where it has several parts. Returns o, shaped and typed as v.
    """
    o: ArrayT = calls.step(calls.LINEAR_ATTENTION, locals())
    return o


class RetentionGradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor; dinitial_state None
    without an initial state."""

    dq: ArrayT
    dk: ArrayT
    dv: ArrayT
    dinitial_state: Any


def retention_forward(
    q: ArrayT,
    k: object,
    v: object,
    *,
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
    """Retention: linear attention with a fixed decay a head.

    S_t = alpha_h S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t with log alpha_h = log(1 - 2^(-5-h))
    for the value heads h = 0 .. Hv-1 (Sun et al. 2023).

    Args:
        q: [batch, T, Hk, dk], float.
        k: [batch, T, Hk, dk], q's dtype.
        v: [batch, T, Hv, dv], q's dtype; Hv is a multiple of Hk.
        scale: None: dk ** -0.5.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: v's shape and dtype.
    """
    return calls.forward(calls.RETENTION, locals())


def retention_backward(
    d_o: object,
    q: ArrayT,
    k: object,
    v: object,
    *,
    d_final_state: object | None = None,
    scale: float | None = None,
    initial_state: object | None = None,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> RetentionGradients[ArrayT]:
    """Gradients of `retention_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to retention_forward.
    """
    return RetentionGradients(*calls.backward(calls.RETENTION, locals()))


def retention_step(
    q: ArrayT,
    k: object,
    v: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    scale: float | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `retention_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops).
    Returns o, shaped and typed as v.
    """
    o: ArrayT = calls.step(calls.RETENTION, locals())
    return o


class LightningAttentionGradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor; dinitial_state None
    without an initial state."""

    dq: ArrayT
    dk: ArrayT
    dv: ArrayT
    dlog_decay: ArrayT
    dinitial_state: Any


def lightning_attention_forward(
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object,
    *,
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
    """Lightning attention: linear attention with a given decay a head.

    S_t = alpha_h S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t (Qin et al. 2024).

    Args:
        q: [batch, T, Hk, dk], float.
        k: [batch, T, Hk, dk], q's dtype.
        v: [batch, T, Hv, dv], q's dtype; Hv is a multiple of Hk.
        log_decay: [Hv], float: log alpha_h, at most 0.
        scale: None: dk ** -0.5.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: v's shape and dtype.
    """
    return calls.forward(calls.LIGHTNING_ATTENTION, locals())


def lightning_attention_backward(
    d_o: object,
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object,
    *,
    d_final_state: object | None = None,
    scale: float | None = None,
    initial_state: object | None = None,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> LightningAttentionGradients[ArrayT]:
    """Gradients of `lightning_attention_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to lightning_attention_forward.
    """
    return LightningAttentionGradients(*calls.backward(calls.LIGHTNING_ATTENTION, locals()))


def lightning_attention_step(
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    scale: float | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `lightning_attention_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops).
    Returns o, shaped and typed as v.
    """
    o: ArrayT = calls.step(calls.LIGHTNING_ATTENTION, locals())
    return o


class SimpleGlaGradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor, None where there was none; dinitial_state None
    without an initial state."""

    dq: ArrayT
    dk: ArrayT
    dv: ArrayT
    dlog_decay: ArrayT | None
    dinitial_state: Any


def simple_gla_forward(
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object | None,
    *,
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
    """Gated linear attention with one decay a token and head.

    S_t = alpha_t S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t (Yang et al. 2024, with a scalar gate).

    Args:
        q: [batch, T, Hk, dk], float.
        k: [batch, T, Hk, dk], q's dtype.
        v: [batch, T, Hv, dv], q's dtype; Hv is a multiple of Hk.
        log_decay: [batch, T, Hv], float, at most 0; or [Hv], the same for all tokens; or None: no
            decay.
        scale: None: dk ** -0.5.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: v's shape and dtype.
    """
    return calls.forward(calls.SIMPLE_GLA, locals())


def simple_gla_backward(
    d_o: object,
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object | None,
    *,
    d_final_state: object | None = None,
    scale: float | None = None,
    initial_state: object | None = None,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> SimpleGlaGradients[ArrayT]:
    """Gradients of `simple_gla_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to simple_gla_forward.
    """
    return SimpleGlaGradients(*calls.backward(calls.SIMPLE_GLA, locals()))


def simple_gla_step(
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object | None,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    scale: float | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `simple_gla_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops).
    Returns o, shaped and typed as v.
    """
    o: ArrayT = calls.step(calls.SIMPLE_GLA, locals())
    return o
