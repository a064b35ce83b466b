"""What the layers around linear attention need beside it: short causal convolution, norms.

docs/semantics.md, section 3, is the contract.
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from onchip import _calls
from onchip._calls import Arguments, Operator, Output, Views
from onchip._values import flag

ArrayT = TypeVar("ArrayT")

__all__ = [
    "CausalConv1dGradients",
    "RmsNormGatedGradients",
    "causal_conv1d_backward",
    "causal_conv1d_forward",
    "causal_conv1d_step",
    "l2norm_backward",
    "l2norm_forward",
    "rms_norm_gated_backward",
    "rms_norm_gated_forward",
]


def _like(name: str, views: Views, of: str) -> Output:
    return Output(name, views[of].shape, views[of].dtype)


def _gradients(views: Views, names: Sequence[str]) -> list[Output]:
    return [_like(f"d{name}", views, name) for name in names if name in views]


def _conv_outputs(views: Views) -> list[Output]:
    x, weight = views["x"], views["weight"]
    sequences = x.shape[0] if x.shape else 0
    if "cu_seqlens" in views:
        lengths = views["cu_seqlens"].shape
        sequences = max(lengths[0] - 1, 0) if lengths else 0
    return [
        _like("y", views, "x"),
        Output("final_state", (sequences, *weight.shape), x.dtype),
    ]


_LENGTHS = ("cu_seqlens", "seqlens")
_CONV_FORWARD = Operator(
    "causal_conv1d_forward", ("x", "weight"), ("bias", "initial_state"), _LENGTHS, _conv_outputs
)
_CONV_BACKWARD = Operator(
    "causal_conv1d_backward",
    ("x", "d_y", "weight"),
    ("bias", "initial_state", "d_final_state"),
    _LENGTHS,
    lambda views: _gradients(views, ("x", "weight", "bias", "initial_state")),
)
_CONV_STEP = Operator(
    "causal_conv1d_step",
    ("x", "weight", "state"),
    ("bias",),
    (),
    lambda views: [_like("y", views, "x")],
    index_arrays=("state_indices",),
    in_place=("state",),
)
_L2_FORWARD = Operator("l2norm_forward", ("x",), (), (), lambda views: [_like("y", views, "x")])
_L2_BACKWARD = Operator(
    "l2norm_backward", ("x", "d_y"), (), (), lambda views: _gradients(views, ("x",))
)
_RMS_FORWARD = Operator(
    "rms_norm_gated_forward",
    ("x",),
    ("gate", "weight"),
    (),
    lambda views: [_like("y", views, "x")],
)
_RMS_BACKWARD = Operator(
    "rms_norm_gated_backward",
    ("x", "d_y"),
    ("gate", "weight"),
    (),
    lambda views: _gradients(views, ("x", "gate", "weight")),
)

OPERATORS = (
    _CONV_FORWARD,
    _CONV_BACKWARD,
    _CONV_STEP,
    _L2_FORWARD,
    _L2_BACKWARD,
    _RMS_FORWARD,
    _RMS_BACKWARD,
)


def explain(op: Operator, arguments: Arguments) -> str:
    arguments = dict(arguments)
    if "output_final_state" in arguments:
        flag(op.name, "output_final_state", arguments.pop("output_final_state"))
    return _calls.explain(op, arguments)


class CausalConv1dGradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor; None where there was none."""

    dx: ArrayT
    dweight: ArrayT
    dbias: ArrayT | None
    dinitial_state: ArrayT | None


def causal_conv1d_forward(
    x: ArrayT,
    weight: object,
    *,
    bias: object | None = None,
    activation: str | None = None,
    initial_state: object | None = None,
    output_final_state: bool = False,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    backend: str | None = None,
) -> tuple[ArrayT, ArrayT | None]:
    """A short causal convolution of each channel by itself:
    y_t = f(bias + sum_j weight[:, j] x_(t - W + 1 + j)).

    Inputs before a sequence's first are those of its state, or 0; none comes from another sequence.

    Args:
        x: [batch, T, D], float; packed (with cu_seqlens) [total, D].
        weight: [D, W], float.
        bias: [D], float. None: 0.
        activation: f: None or "silu".
        initial_state: [N, D, W], x's dtype: the last W inputs, the latest last; N is batch, or the
            number of packed sequences. None: zeros.
        output_final_state: also return the state after each sequence.
        cu_seqlens: [num_seqs + 1]: where each packed sequence begins.
        seqlens: [num_seqs]: used rows of each sequence; y is 0 beyond them.
        backend: force one by name.

    Returns:
        (y, final_state or None). y: x's shape and dtype.
    """
    arguments = dict(locals())
    final = flag(_CONV_FORWARD.name, "output_final_state", arguments.pop("output_final_state"))
    unwanted = () if final else ("final_state",)
    results = _calls.run(_CONV_FORWARD, arguments, unwanted)
    return results["y"], results.get("final_state")


def causal_conv1d_backward(
    d_y: object,
    x: ArrayT,
    weight: object,
    *,
    d_final_state: object | None = None,
    bias: object | None = None,
    activation: str | None = None,
    initial_state: object | None = None,
    cu_seqlens: object | Sequence[int] | None = None,
    seqlens: object | Sequence[int] | None = None,
    backend: str | None = None,
) -> CausalConv1dGradients[ArrayT]:
    """Gradients of `causal_conv1d_forward` by the chain rule, from its inputs alone.

    Args:
        d_y: gradient of y, in its shape and dtype.
        d_final_state: gradient of the final state, in its shape and dtype. None: zero.
        The tensors and options: as given to causal_conv1d_forward.
    """
    results = _calls.run(_CONV_BACKWARD, locals())
    return CausalConv1dGradients(
        results["dx"], results["dweight"], results.get("dbias"), results.get("dinitial_state")
    )


def causal_conv1d_step(
    x: ArrayT,
    weight: object,
    *,
    state: object,
    state_indices: object | Sequence[int] | None = None,
    bias: object | None = None,
    activation: str | None = None,
    backend: str | None = None,
) -> ArrayT:
    """One token of `causal_conv1d_forward` for each sequence of a batch, for decoding.

    Args:
        x: [batch, D], float.
        state: [slots, D, W], x's dtype: a pool, read and written in place.
        state_indices: int32 [batch]: the slot of each row, no slot twice; -1 skips the row: its y
            is 0 and no state changes. None: row n has slot n.
        The others: as in causal_conv1d_forward.

    Returns:
        y, shaped and typed as x.
    """
    y: ArrayT = _calls.run(_CONV_STEP, locals())["y"]
    return y


def l2norm_forward(x: ArrayT, *, eps: float = 1e-6, backend: str | None = None) -> ArrayT:
    """y = x / sqrt(sum x^2 + eps) over the last axis.

    Args:
        x: [.., D], float, of any rank from 1.
        eps: above 0.
        backend: force one by name.
    """
    y: ArrayT = _calls.run(_L2_FORWARD, locals())["y"]
    return y


def l2norm_backward(
    d_y: object, x: ArrayT, *, eps: float = 1e-6, backend: str | None = None
) -> ArrayT:
    """The gradient of x in `l2norm_forward`: (d_y - y (y.d_y)) / sqrt(sum x^2 + eps).

    Args:
        d_y: gradient of y, in its shape and dtype.
        The others: as given to l2norm_forward.
    """
    dx: ArrayT = _calls.run(_L2_BACKWARD, locals())["dx"]
    return dx


class RmsNormGatedGradients(NamedTuple, Generic[ArrayT]):
    """Each in the shape and dtype of its tensor; None where there was none."""

    dx: ArrayT
    dgate: ArrayT | None
    dweight: ArrayT | None


def rms_norm_gated_forward(
    x: ArrayT,
    *,
    gate: object | None = None,
    weight: object | None = None,
    activation: str | None = None,
    gate_first: bool = False,
    group_size: int | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> ArrayT:
    """y = x / sqrt(mean x^2 + eps) weight g(gate) over the last axis (Zhang & Sennrich 2019).

    Args:
        x: [.., D], float, of any rank from 1.
        gate: x's shape, float. None: no gate.
        weight: [D], float. None: 1.
        activation: g, where there is a gate: "silu" or "sigmoid".
        gate_first: the norm is that of x g(gate), as in Mamba-2; nothing is multiplied behind it
            but the weight.
        group_size: the mean is over groups of so many channels, a divisor of D. None: D.
        eps: above 0.
        backend: force one by name.
    """
    y: ArrayT = _calls.run(_RMS_FORWARD, locals())["y"]
    return y


def rms_norm_gated_backward(
    d_y: object,
    x: ArrayT,
    *,
    gate: object | None = None,
    weight: object | None = None,
    activation: str | None = None,
    gate_first: bool = False,
    group_size: int | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> RmsNormGatedGradients[ArrayT]:
    """Gradients of `rms_norm_gated_forward` by the chain rule.

    Args:
        d_y: gradient of y, in its shape and dtype.
        The others: as given to rms_norm_gated_forward.
    """
    results = _calls.run(_RMS_BACKWARD, locals())
    return RmsNormGatedGradients(results["dx"], results.get("dgate"), results.get("dweight"))
