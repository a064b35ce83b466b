"""Gated slot attention: two linear attentions with a softmax between them.

What they have in common stands in `onchip.ops`; docs/semantics.md, section 3, is the contract.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from onchip._linear import calls

ArrayT = TypeVar("ArrayT")

__all__ = [
    "GsaGradients",
    "gsa_backward",
    "gsa_forward",
    "gsa_step",
]


class GsaGradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor; dinitial_state None
    without an initial state."""

    dq: ArrayT
    dk: ArrayT
    dv: ArrayT
    ds: ArrayT
    dlog_decay: ArrayT
    dinitial_state: Any


def gsa_forward(
    q: ArrayT,
    k: object,
    v: object,
    s: object,
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
) -> tuple[ArrayT, Any | None]:
    """Gated slot attention: attention over M slots, each a decaying sum of tokens.

    K_t = K_{t-1} Diag(alpha_t) + k_t s_t^T, V_t = Diag(alpha_t) V_{t-1} + s_t v_t^T, o_t = V_t^T
    softmax(scale K_t^T q_t) (Zhang et al. 2024).

    Args:
        q: [batch, T, Hk, dk], float.
        k: [batch, T, Hk, dk], q's dtype.
        v: [batch, T, Hv, dv], q's dtype; Hv is a multiple of Hk.
        s: [batch, T, Hv, M], float: what each of M slots takes of the token.
        log_decay: [batch, T, Hv, M], float, at most 0.
        scale: None: dk ** -0.5.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: v's shape and dtype. final_state: (K, V), [N, Hv, dk, M] and
            [N, Hv, M, dv], both transposed with "vk".
    """
    return calls.forward(calls.GSA, locals())


def gsa_backward(
    d_o: object,
    q: ArrayT,
    k: object,
    v: object,
    s: object,
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
) -> GsaGradients[ArrayT]:
    """Gradients of `gsa_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to gsa_forward.
    """
    return GsaGradients(*calls.backward(calls.GSA, locals()))


def gsa_step(
    q: ArrayT,
    k: object,
    v: object,
    s: object,
    log_decay: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    scale: float | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `gsa_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops), a
    tuple where it has several parts. Returns o, shaped and typed as v.
    """
    o: ArrayT = calls.step(calls.GSA, locals())
    return o
