"""Operators on the same recurrence with gates of their own: Mamba-2 and the mLSTM.

What they have in common stands in `onchip.ops`; docs/semantics.md, section 3, is the contract.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from onchip._linear import calls

ArrayT = TypeVar("ArrayT")

__all__ = [
    "Mamba2Gradients",
    "MlstmGradients",
    "mamba2_backward",
    "mamba2_forward",
    "mamba2_step",
    "mlstm_backward",
    "mlstm_forward",
    "mlstm_step",
]


class Mamba2Gradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor, None where there was none; dinitial_state None
    without an initial state."""

    dx: ArrayT
    ddt: ArrayT
    dA: ArrayT
    dB: ArrayT
    dC: ArrayT
    dD: ArrayT | None
    dz: ArrayT | None
    ddt_bias: ArrayT | None
    dinitial_state: Any


def mamba2_forward(
    x: ArrayT,
    dt: object,
    A: object,
    B: object,
    C: object,
    *,
    D: object | None = None,
    z: object | None = None,
    dt_bias: object | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
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
    """Mamba-2's state space: one decay a token and head, from the time step.

    dt' = clamp(softplus(dt + dt_bias)), S_t = exp(dt' A) S_{t-1} + dt' B_t x_t^T, y_t = scale S_t^T
    C_t + D x_t, then y_t silu(z_t) (Dao & Gu 2024). Head h reads group h // (Hv // groups).

    Args:
        x: [batch, T, Hv, dv], float.
        dt: [batch, T, Hv], float: the raw time step.
        A: [Hv], float, below 0.
        B: [batch, T, groups, dk], x's dtype; Hv is a multiple of groups.
        C: [batch, T, groups, dk], x's dtype.
        D: [Hv] or [Hv, dv], float: weight of x in the output. None: no such term.
        z: [batch, T, Hv, dv], float: gate of the output. None: no gate.
        dt_bias: [Hv], float: added to dt. None: 0.
        dt_softplus: dt' = clamp(softplus(dt + dt_bias)); False: clamp(dt + dt_bias). softplus(x) is
            x above 20.
        dt_limit: the clamp's bounds; its slope is 1 at them.
        scale: None: 1.
        The other options: see onchip.ops.

    Returns:
        (y, final_state or None). y: x's shape and dtype. The state is [N, Hv, dv, dk] by default.
    """
    return calls.forward(calls.MAMBA2, locals())


def mamba2_backward(
    d_o: object,
    x: ArrayT,
    dt: object,
    A: object,
    B: object,
    C: object,
    *,
    d_final_state: object | None = None,
    D: object | None = None,
    z: object | None = None,
    dt_bias: object | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    scale: float | None = None,
    initial_state: object | None = None,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "vk",
    check: bool = False,
    backend: str | None = None,
) -> Mamba2Gradients[ArrayT]:
    """Gradients of `mamba2_forward`, which recomputes its states.

    The chain rule through the recurrence, exactly, the states carried in and out included.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to mamba2_forward.
    """
    return Mamba2Gradients(*calls.backward(calls.MAMBA2, locals()))


def mamba2_step(
    x: ArrayT,
    dt: object,
    A: object,
    B: object,
    C: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    D: object | None = None,
    z: object | None = None,
    dt_bias: object | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    scale: float | None = None,
    state_layout: str = "vk",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `mamba2_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops).
    Returns o, shaped and typed as x.
    """
    o: ArrayT = calls.step(calls.MAMBA2, locals())
    return o


class MlstmGradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor; dinitial_state None
    without an initial state."""

    dq: ArrayT
    dk: ArrayT
    dv: ArrayT
    di: ArrayT
    df: ArrayT
    dinitial_state: Any


def mlstm_forward(
    q: ArrayT,
    k: object,
    v: object,
    i: object,
    f: object,
    *,
    gate: str = "exp",
    normalize: bool | None = None,
    eps: float = 0.0,
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
    """The matrix memory of the xLSTM.

    With lf = logsigmoid(f) (Beck et al. 2024):
    gate "exp": m_t = max(lf_t + m_{t-1}, i_t), C_t = e^(lf_t + m_{t-1} - m_t) C_{t-1} + e^(i_t -
    m_t) k_t v_t^T, n_t likewise with k_t alone, h_t = scale C_t^T q_t / (max(|scale q_t.n_t|,
    e^-m_t) + eps).
    gate "sigmoid" (Beck et al. 2025): C_t = sigmoid(f_t) C_{t-1} + sigmoid(i_t) k_t v_t^T, h_t =
    scale C_t^T q_t; with normalize divided by max(|scale q_t.n_t|, 1) + eps.

    Args:
        q: [batch, T, Hk, dk], float.
        k: [batch, T, Hk, dk], q's dtype.
        v: [batch, T, Hv, dv], q's dtype; Hv is a multiple of Hk.
        i: [batch, T, Hv], float: the raw input gate.
        f: [batch, T, Hv], float: the raw forget gate.
        gate: "exp": the input gate is e^i; "sigmoid": sigmoid(i).
        normalize: divide by the normaliser. None: True for the exponential gate, which has no other
            form, False for the sigmoid.
        eps: added to the denominator.
        scale: None: dk ** -0.5.
        The other options: see onchip.ops.

    Returns:
        (o, final_state or None). o: v's shape and dtype. final_state: (C, n, m) for the exponential
            gate, n [N, Hv, dk], m [N, Hv]; (C, n) for the normalised sigmoid gate; else C. Without
            an initial state C, n and m_0 are 0.
    """
    return calls.forward(calls.MLSTM, locals())


def mlstm_backward(
    d_o: object,
    q: ArrayT,
    k: object,
    v: object,
    i: object,
    f: object,
    *,
    d_final_state: object | None = None,
    gate: str = "exp",
    normalize: bool | None = None,
    eps: float = 0.0,
    detach_normalizer: bool = False,
    scale: float | None = None,
    initial_state: object | None = None,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> MlstmGradients[ArrayT]:
    """Gradients of `mlstm_forward`, which recomputes its states.

    Exact, the normaliser included. m counts as a constant: d_final_state is (dC, dn, None), and the
    gradient of m_0 is <C_0, dC_0> + <n_0, dn_0>.

    Args:
        d_o: gradient of o, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape. None: zero.
        The tensors and options: as given to mlstm_forward.
        detach_normalizer: take the denominator as a constant, as a norm behind it would.
    """
    return MlstmGradients(*calls.backward(calls.MLSTM, locals()))


def mlstm_step(
    q: ArrayT,
    k: object,
    v: object,
    i: object,
    f: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    gate: str = "exp",
    normalize: bool | None = None,
    eps: float = 0.0,
    scale: float | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """One token of `mlstm_forward` for each sequence of a batch, for decoding.

    The tensors have no time axis; state is a pool, read and written in place (see onchip.ops), a
    tuple where it has several parts. Returns o, shaped and typed as v.
    """
    o: ArrayT = calls.step(calls.MLSTM, locals())
    return o
