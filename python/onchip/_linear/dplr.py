"""Transitions diagonal plus rank one: S_t = (Diag(alpha_t) + b_t a_t^T) S_{t-1} + k_t v_t^T.

What they have in common stands in `onchip.ops`; docs/semantics.md, section 3, is the contract.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from onchip._linear import calls

ArrayT = TypeVar("ArrayT")

__all__ = [
    "IplrGradients",
    "Rwkv7Gradients",
    "iplr_backward",
    "iplr_forward",
    "iplr_step",
    "rwkv7_backward",
    "rwkv7_forward",
    "rwkv7_step",
]


class Rwkv7Gradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor; dinitial_state None
    without an initial state."""

    dr: ArrayT
    dlog_decay: ArrayT
    dk: ArrayT
    dv: ArrayT
    da: ArrayT
    db: ArrayT
    dinitial_state: Any


def rwkv7_forward(
    r: ArrayT,
    log_decay: object,
    k: object,
    v: object,
    a: object,
    b: object,
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
    """RWKV-7: a transition that is diagonal plus rank one.

    S_t = Diag(alpha_t) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T, o_t = scale S_t^T r_t (Peng et
    al. 2025; there a is -kappa, b is kappa * eta).

    Args:
        r: [batch, T, Hk, dk], float.
        log_decay: [batch, T, Hv, dk], float, at most 0.
        k: [batch, T, Hk, dk], r's dtype.
        v: [batch, T, Hv, dv], r's dtype; Hv is a multiple of Hk.
        a: [batch, T, Hk, dk], float: reads the state again.
        b: [batch, T, Hk, dk], float: writes what a read.
        scale: None: 1.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: v's shape and dtype.
    """
    return calls.forward(calls.RWKV7, locals())


def rwkv7_backward(
    d_o: object,
    r: ArrayT,
    log_decay: object,
    k: object,
    v: object,
    a: object,
    b: object,
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
) -> Rwkv7Gradients[ArrayT]:
    """Gradients of `rwkv7_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to rwkv7_forward.
    """
    return Rwkv7Gradients(*calls.backward(calls.RWKV7, locals()))


def rwkv7_step(
    r: ArrayT,
    log_decay: object,
    k: object,
    v: object,
    a: object,
    b: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    scale: float | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `rwkv7_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops).
    Returns o, shaped and typed as v.
    """
    o: ArrayT = calls.step(calls.RWKV7, locals())
    return o


class IplrGradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor; dinitial_state None
    without an initial state."""

    dq: ArrayT
    dk: ArrayT
    dv: ArrayT
    da: ArrayT
    db: ArrayT
    dinitial_state: Any


def iplr_forward(
    q: ArrayT,
    k: object,
    v: object,
    a: object,
    b: object,
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
    """A transition that is the identity plus rank one.

    S_t = S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T, o_t = scale S_t^T q_t.

    Args:
        q: [batch, T, Hk, dk], float.
        k: [batch, T, Hk, dk], q's dtype.
        v: [batch, T, Hv, dv], q's dtype; Hv is a multiple of Hk.
        a: [batch, T, Hk, dk], float: reads the state again.
        b: [batch, T, Hk, dk], float: writes what a read.
        scale: None: dk ** -0.5.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: v's shape and dtype.
    """
    return calls.forward(calls.IPLR, locals())


def iplr_backward(
    d_o: object,
    q: ArrayT,
    k: object,
    v: object,
    a: object,
    b: object,
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
) -> IplrGradients[ArrayT]:
    """Gradients of `iplr_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to iplr_forward.
    """
    return IplrGradients(*calls.backward(calls.IPLR, locals()))


def iplr_step(
    q: ArrayT,
    k: object,
    v: object,
    a: object,
    b: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    scale: float | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `iplr_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops).
    Returns o, shaped and typed as v.
    """
    o: ArrayT = calls.step(calls.IPLR, locals())
    return o
