"""Linear attention with a decay a channel: S_t = Diag(alpha_t) S_{t-1} + k_t v_t^T.

What they have in common stands in `onchip.ops`; docs/semantics.md, section 3, is the contract.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from onchip._linear import calls

ArrayT = TypeVar("ArrayT")

__all__ = [
    "GlaGradients",
    "Hgrn2Gradients",
    "Rwkv6Gradients",
    "gla_backward",
    "gla_forward",
    "gla_step",
    "hgrn2_backward",
    "hgrn2_forward",
    "hgrn2_step",
    "rwkv6_backward",
    "rwkv6_forward",
    "rwkv6_step",
]


class GlaGradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor; dinitial_state None
    without an initial state."""

    dq: ArrayT
    dk: ArrayT
    dv: ArrayT
    dlog_decay: ArrayT
    dinitial_state: Any


def gla_forward(
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
    """Gated linear attention: a decay a channel of the keys.

    S_t = Diag(alpha_t) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t (Yang et al. 2024).

    Args:
        q: [batch, T, Hk, dk], float.
        k: [batch, T, Hk, dk], q's dtype.
        v: [batch, T, Hv, dv], q's dtype; Hv is a multiple of Hk.
        log_decay: [batch, T, Hv, dk], float, at most 0.
        scale: None: dk ** -0.5.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: v's shape and dtype.
    """
    return calls.forward(calls.GLA, locals())


def gla_backward(
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
) -> GlaGradients[ArrayT]:
    """Gradients of `gla_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to gla_forward.
    """
    return GlaGradients(*calls.backward(calls.GLA, locals()))


def gla_step(
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
    """One token of `gla_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops).
    Returns o, shaped and typed as v.
    """
    o: ArrayT = calls.step(calls.GLA, locals())
    return o


class Rwkv6Gradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor; dinitial_state None
    without an initial state."""

    dr: ArrayT
    dk: ArrayT
    dv: ArrayT
    dlog_decay: ArrayT
    du: ArrayT
    dinitial_state: Any


def rwkv6_forward(
    r: ArrayT,
    k: object,
    v: object,
    log_decay: object,
    u: object,
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
    """RWKV-6: the read comes before the decay, with a bonus for the token itself.

    o_t = scale (S_{t-1} + Diag(u) k_t v_t^T)^T r_t, S_t = Diag(alpha_t) S_{t-1} + k_t v_t^T (Peng
    et al. 2024).

    Args:
        r: [batch, T, Hk, dk], float.
        k: [batch, T, Hk, dk], r's dtype.
        v: [batch, T, Hv, dv], r's dtype; Hv is a multiple of Hk.
        log_decay: [batch, T, Hv, dk], float, at most 0.
        u: [Hv, dk], float: the bonus of the token at hand.
        scale: None: dk ** -0.5.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: v's shape and dtype.
    """
    return calls.forward(calls.RWKV6, locals())


def rwkv6_backward(
    d_o: object,
    r: ArrayT,
    k: object,
    v: object,
    log_decay: object,
    u: object,
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
) -> Rwkv6Gradients[ArrayT]:
    """Gradients of `rwkv6_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to rwkv6_forward.
    """
    return Rwkv6Gradients(*calls.backward(calls.RWKV6, locals()))


def rwkv6_step(
    r: ArrayT,
    k: object,
    v: object,
    log_decay: object,
    u: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    scale: float | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `rwkv6_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops).
    Returns o, shaped and typed as v.
    """
    o: ArrayT = calls.step(calls.RWKV6, locals())
    return o


class Hgrn2Gradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor; dinitial_state None
    without an initial state."""

    dq: ArrayT
    dv: ArrayT
    dlog_decay: ArrayT
    dinitial_state: Any


def hgrn2_forward(
    q: ArrayT,
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
    """HGRN2: what is written at a channel is what the decay leaves free.

    S_t = Diag(alpha_t) S_{t-1} + (1 - alpha_t) v_t^T, o_t = scale S_t^T q_t (Qin et al. 2024).

    Args:
        q: [batch, T, Hk, dk], float.
        v: [batch, T, Hv, dv], q's dtype; Hv is a multiple of Hk.
        log_decay: [batch, T, Hv, dk], float, at most 0.
        scale: None: dk ** -0.5.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: v's shape and dtype.
    """
    return calls.forward(calls.HGRN2, locals())


def hgrn2_backward(
    d_o: object,
    q: ArrayT,
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
) -> Hgrn2Gradients[ArrayT]:
    """Gradients of `hgrn2_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to hgrn2_forward.
    """
    return Hgrn2Gradients(*calls.backward(calls.HGRN2, locals()))


def hgrn2_step(
    q: ArrayT,
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
    """One token of `hgrn2_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops).
    Returns o, shaped and typed as v.
    """
    o: ArrayT = calls.step(calls.HGRN2, locals())
    return o
