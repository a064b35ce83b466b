"""Scans: recurrences of numbers, one or a few a channel, without heads.

HGRN, Mamba's selective scan, RWKV-4.

What they have in common stands in `onchip.ops`; docs/semantics.md, section 3, is the contract.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from onchip._linear import calls

ArrayT = TypeVar("ArrayT")

__all__ = [
    "HgrnGradients",
    "Mamba1Gradients",
    "Rwkv4Gradients",
    "hgrn_backward",
    "hgrn_forward",
    "hgrn_step",
    "mamba1_backward",
    "mamba1_forward",
    "mamba1_step",
    "rwkv4_backward",
    "rwkv4_forward",
    "rwkv4_step",
]


class HgrnGradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor; dinitial_state None
    without an initial state."""

    dx: ArrayT
    dlog_decay: ArrayT
    dinitial_state: Any


def hgrn_forward(
    x: ArrayT,
    log_decay: object,
    *,
    scale: float | None = None,
    initial_state: object | None = None,
    output_final_state: bool = False,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    check: bool = False,
    backend: str | None = None,
) -> tuple[ArrayT, ArrayT | None]:
    """HGRN's gated linear recurrence, elementwise.

    h_t = alpha_t h_{t-1} + x_t, o_t = scale h_t (Qin et al. 2023; there x is (1 - alpha) times the
    input).

    Args:
        x: [batch, T, D], float.
        log_decay: [batch, T, D], float, at most 0.
        scale: None: 1.
        The other options: see onchip.ops; the state is [N, D].

    Returns:
        (o, final_state or None). o: x's shape and dtype. final_state: [N, D].
    """
    return calls.forward(calls.HGRN, locals())


def hgrn_backward(
    d_o: object,
    x: ArrayT,
    log_decay: object,
    *,
    d_final_state: object | None = None,
    scale: float | None = None,
    initial_state: object | None = None,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    check: bool = False,
    backend: str | None = None,
) -> HgrnGradients[ArrayT]:
    """Gradients of `hgrn_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to hgrn_forward.
    """
    return HgrnGradients(*calls.backward(calls.HGRN, locals()))


def hgrn_step(
    x: ArrayT,
    log_decay: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    scale: float | None = None,
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `hgrn_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, [slots, D], read and written in place (see
    onchip.ops). Returns o, [batch, D].
    """
    o: ArrayT = calls.step(calls.HGRN, locals())
    return o


class Mamba1Gradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor, None where there was none; dinitial_state None
    without an initial state."""

    du: ArrayT
    ddelta: ArrayT
    dA: ArrayT
    dB: ArrayT
    dC: ArrayT
    dD: ArrayT | None
    dz: ArrayT | None
    ddelta_bias: ArrayT | None
    dinitial_state: Any


def mamba1_forward(
    u: ArrayT,
    delta: object,
    A: object,
    B: object,
    C: object,
    *,
    D: object | None = None,
    z: object | None = None,
    delta_bias: object | None = None,
    delta_softplus: bool = True,
    scale: float | None = None,
    initial_state: object | None = None,
    output_final_state: bool = False,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "vk",
    check: bool = False,
    backend: str | None = None,
) -> tuple[ArrayT, ArrayT | None]:
    """Mamba's selective scan: a state of N numbers a channel, the decays from the time step.

    delta' = softplus(delta + delta_bias), h_t[d, n] = exp(delta'_d A[d, n]) h_{t-1}[d, n] +
    delta'_d B_t[n] u_t[d], y_t[d] = scale sum_n C_t[n] h_t[d, n] + D[d] u_t[d], then y_t silu(z_t)
    (Gu & Dao 2023). mamba_ssm's selective_scan_fn has the same names, its rows [batch, D, T], and
    delta_softplus=False by default.

    Args:
        u: [batch, T, D], float.
        delta: [batch, T, D], float: the raw time step.
        A: [D, N], float, below 0; N at most 256.
        B: [batch, T, N], or [batch, T, groups, N], where channel d reads group d // (D // groups);
            u's dtype.
        C: B's shape, u's dtype.
        D: [D], float: weight of u in the output. None: no such term.
        z: [batch, T, D], float: gate of the output. None: no gate.
        delta_bias: [D], float: added to delta. None: 0.
        delta_softplus: delta' = softplus(delta + delta_bias); False: delta + delta_bias, which has
            to be at least 0 where A is below 0. softplus(x) is x above 20.
        scale: None: 1.
        The other options: see onchip.ops; check refuses an A above 0, and the state is
            [sequences, D, N] with state_layout "vk", the default, and [sequences, N, D] with "kv".

    Returns:
        (y, final_state or None). y: u's shape and dtype.
    """
    return calls.forward(calls.MAMBA1, locals())


def mamba1_backward(
    d_o: object,
    u: ArrayT,
    delta: object,
    A: object,
    B: object,
    C: object,
    *,
    d_final_state: object | None = None,
    D: object | None = None,
    z: object | None = None,
    delta_bias: object | None = None,
    delta_softplus: bool = True,
    scale: float | None = None,
    initial_state: object | None = None,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "vk",
    check: bool = False,
    backend: str | None = None,
) -> Mamba1Gradients[ArrayT]:
    """Gradients of `mamba1_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to mamba1_forward.
    """
    return Mamba1Gradients(*calls.backward(calls.MAMBA1, locals()))


def mamba1_step(
    u: ArrayT,
    delta: object,
    A: object,
    B: object,
    C: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    D: object | None = None,
    z: object | None = None,
    delta_bias: object | None = None,
    delta_softplus: bool = True,
    scale: float | None = None,
    state_layout: str = "vk",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `mamba1_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops).
    Returns o, [batch, D].
    """
    o: ArrayT = calls.step(calls.MAMBA1, locals())
    return o


class Rwkv4Gradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor; dinitial_state None
    without an initial state."""

    dk: ArrayT
    dv: ArrayT
    dlog_decay: ArrayT
    du: ArrayT
    dinitial_state: Any


def rwkv4_forward(
    k: ArrayT,
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
    check: bool = False,
    backend: str | None = None,
) -> tuple[ArrayT, Any | None]:
    """RWKV-4's wkv: a weighted mean of the values so far, with weights that decay.

    o_t = scale (P_{t-1} + e^(u + k_t) v_t) / (Q_{t-1} + e^(u + k_t)), then P_t = e^log_decay
    P_{t-1} + e^k_t v_t and Q_t = e^log_decay Q_{t-1} + e^k_t (Peng et al. 2023; there log_decay is
    -w, in checkpoints -exp(time_decay), and u is time_first). Exponents are relative to a running
    maximum, so no k overflows. Where nothing has a weight, o is 0.

    Args:
        k: [batch, T, D], float: the logarithm of each value's weight.
        v: [batch, T, D], float.
        log_decay: [D], float, at most 0: one for all tokens. A very small one alone is no reset:
            what counts is the weight beside the token's own.
        u: [D], float: bonus of the token itself.
        scale: None: 1.
        The other options: see onchip.ops; the state is (numerator, denominator, maximum), each
            [N, D]: P = numerator e^maximum, Q likewise. None: (0, 0, -inf).

    Returns:
        (o, final_state or None). o: v's shape and dtype. final_state: a tuple of three, each
            [N, D]; the maximum is max(log_decay + maximum, k), token by token.
    """
    return calls.forward(calls.RWKV4, locals())


def rwkv4_backward(
    d_o: object,
    k: ArrayT,
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
    check: bool = False,
    backend: str | None = None,
) -> Rwkv4Gradients[ArrayT]:
    """Gradients of `rwkv4_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.
    The final maximum counts as a constant, without a gradient in d_final_state; that of the initial
    one is <numerator, dnumerator> + <denominator, ddenominator>.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to rwkv4_forward.
    """
    return Rwkv4Gradients(*calls.backward(calls.RWKV4, locals()))


def rwkv4_step(
    k: ArrayT,
    v: object,
    log_decay: object,
    u: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    scale: float | None = None,
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `rwkv4_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, a tuple of three, each [slots, D], read and
    written in place (see onchip.ops). Returns o, [batch, D].
    """
    o: ArrayT = calls.step(calls.RWKV4, locals())
    return o
