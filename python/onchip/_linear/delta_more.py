"""Delta rules that erase by vectors of their own, or several times a token.

What they have in common stands in `onchip.ops`; docs/semantics.md, section 3, is the contract.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from onchip._linear import calls

ArrayT = TypeVar("ArrayT")

__all__ = [
    "CombaGradients",
    "GatedDeltaProductGradients",
    "Gdn2Gradients",
    "comba_backward",
    "comba_forward",
    "comba_step",
    "gated_delta_product_backward",
    "gated_delta_product_forward",
    "gated_delta_product_step",
    "gdn2_backward",
    "gdn2_forward",
    "gdn2_step",
]


class CombaGradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor, None where there was none; dinitial_state None
    without an initial state."""

    dq: ArrayT
    dk: ArrayT
    dv: ArrayT
    dp: ArrayT
    dlog_decay: ArrayT | None
    dbeta: ArrayT
    dinitial_state: Any


def comba_forward(
    q: ArrayT,
    k: object,
    v: object,
    p: object,
    log_decay: object | None,
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
    """The delta rule with an erase vector of its own that reads before the decay (Comba).

    S_t = alpha_t S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T, o_t = scale S_t^T q_t (Hu et al.
    2025). qk_l2norm leaves p as it is.

    Args:
        q: [batch, T, Hk, dk], float.
        k: [batch, T, Hk, dk], q's dtype.
        v: [batch, T, Hv, dv], q's dtype; Hv is a multiple of Hk.
        p: [batch, T, Hk, dk], float: what is read to be erased.
        log_decay: [batch, T, Hv], float, at most 0; or [Hv], the same for all tokens; or None: no
            decay.
        beta: [batch, T, Hv], float.
        qk_l2norm: first q / sqrt(|q|^2 + 1e-6), k likewise.
        scale: None: dk ** -0.5.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: v's shape and dtype.
    """
    return calls.forward(calls.COMBA, locals())


def comba_backward(
    d_o: object,
    q: ArrayT,
    k: object,
    v: object,
    p: object,
    log_decay: object | None,
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
) -> CombaGradients[ArrayT]:
    """Gradients of `comba_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to comba_forward.
    """
    return CombaGradients(*calls.backward(calls.COMBA, locals()))


def comba_step(
    q: ArrayT,
    k: object,
    v: object,
    p: object,
    log_decay: object | None,
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
    """One token of `comba_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops).
    Returns o, shaped and typed as v.
    """
    o: ArrayT = calls.step(calls.COMBA, locals())
    return o


class Gdn2Gradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor; dinitial_state None
    without an initial state."""

    dq: ArrayT
    dk: ArrayT
    dv: ArrayT
    dlog_decay: ArrayT
    db: ArrayT
    dw: ArrayT
    dinitial_state: Any


def gdn2_forward(
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object,
    b: object,
    w: object,
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
    """The delta rule with gates a channel for decay, erase and write.

    S_t = (I - k_t (b_t * k_t)^T) Diag(alpha_t) S_{t-1} + k_t (w_t * v_t)^T, o_t = scale S_t^T q_t;
    * is elementwise.

    Args:
        q: [batch, T, Hk, dk], float.
        k: [batch, T, Hk, dk], q's dtype.
        v: [batch, T, Hv, dv], q's dtype; Hv is a multiple of Hk.
        log_decay: [batch, T, Hv, dk], float, at most 0.
        b: [batch, T, Hv, dk], float: how much of each channel is erased.
        w: [batch, T, Hv, dv], float: how much of each value is written.
        qk_l2norm: first q / sqrt(|q|^2 + 1e-6), k likewise.
        scale: None: dk ** -0.5.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: v's shape and dtype.
    """
    return calls.forward(calls.GDN2, locals())


def gdn2_backward(
    d_o: object,
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object,
    b: object,
    w: object,
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
) -> Gdn2Gradients[ArrayT]:
    """Gradients of `gdn2_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to gdn2_forward.
    """
    return Gdn2Gradients(*calls.backward(calls.GDN2, locals()))


def gdn2_step(
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object,
    b: object,
    w: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    qk_l2norm: bool = False,
    scale: float | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `gdn2_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops).
    Returns o, shaped and typed as v.
    """
    o: ArrayT = calls.step(calls.GDN2, locals())
    return o


class GatedDeltaProductGradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor, None where there was none; dinitial_state None
    without an initial state."""

    dq: ArrayT
    dk: ArrayT
    dv: ArrayT
    dlog_decay: ArrayT | None
    dbeta: ArrayT
    dinitial_state: Any


def gated_delta_product_forward(
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object | None,
    beta: object,
    *,
    num_householder: int,
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
    """Several delta rules a token: a product of Householder-like factors (DeltaProduct).

    From S = alpha_t S_{t-1}, for each of the num_householder rows j of token t: S = (I - beta_j k_j
    k_j^T) S + beta_j k_j v_j^T; then S_t = S, o_t = scale S_t^T q_t (Siems et al. 2025). cu_seqlens
    and seqlens count tokens.

    Args:
        q: [batch, T, Hk, dk], float.
        k: [batch, T num_householder, Hk, dk], q's dtype.
        v: [batch, T num_householder, Hv, dv], q's dtype; Hv is a multiple of Hk.
        log_decay: [batch, T, Hv], float, at most 0; or [Hv], the same for all tokens; or None: no
            decay.
        beta: [batch, T num_householder, Hv], float.
        num_householder: rows of k, v and beta a token.
        qk_l2norm: first q / sqrt(|q|^2 + 1e-6), k likewise.
        scale: None: dk ** -0.5.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: [batch, T, Hv, dv], q's dtype.
    """
    return calls.forward(calls.GATED_DELTA_PRODUCT, locals())


def gated_delta_product_backward(
    d_o: object,
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object | None,
    beta: object,
    *,
    d_final_state: object | None = None,
    num_householder: int,
    qk_l2norm: bool = False,
    scale: float | None = None,
    initial_state: object | None = None,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> GatedDeltaProductGradients[ArrayT]:
    """Gradients of `gated_delta_product_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to gated_delta_product_forward.
    """
    return GatedDeltaProductGradients(*calls.backward(calls.GATED_DELTA_PRODUCT, locals()))


def gated_delta_product_step(
    q: ArrayT,
    k: object,
    v: object,
    log_decay: object | None,
    beta: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    num_householder: int,
    qk_l2norm: bool = False,
    scale: float | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `gated_delta_product_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis ([batch, num_householder, ..] of k, v and beta); state is a pool,
    read and written in place (see onchip.ops). Returns o: [batch, Hv, dv], q's dtype.
    """
    o: ArrayT = calls.step(calls.GATED_DELTA_PRODUCT, locals())
    return o
