"""The calls of the linear operators: each is a row of one table, as in the C library, with its own
names for the tensors and states of one to three parts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from onchip import _calls
from onchip._calls import Arguments, Operator, Output, Views
from onchip._values import choice, flag, number, pair
from onchip.errors import InvalidArgument

_STATE_PARTS = 3


class Row(NamedTuple):
    name: str
    # Tensors by the operator's own names, in its order, to the roles of the C struct.
    tensors: Mapping[str, str]
    optional: tuple[str, ...] = ()
    state_parts: Callable[[Arguments], int] = lambda options: 1
    default_layout: str = "kv"
    # The tensor whose last axis is the number of slots between the state's two matrices.
    slots: str | None = None
    # Rows [.., D] without heads, and a state a channel.
    is_scan: bool = False

    def named(self, role: str) -> str:
        return next(name for name, own in self.tensors.items() if own == role)

    @property
    def first(self) -> str:
        """The tensor whose axes before the last two, of a scan before the last, are the rows'."""
        return self.named("v" if self.is_scan else "q")

    def output_shape(self, first: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
        """By the shapes of `first` and of the values."""
        return tuple(values) if self.is_scan else (*first[:-2], *values[-2:])


def _mlstm_parts(options: Arguments) -> int:
    if options.get("gate") == "exp":
        return 3
    return 2 if options.get("normalize") else 1


_QKV = {"q": "q", "k": "k", "v": "v"}
_GATED = {**_QKV, "log_decay": "gate"}
_DELTA = {**_GATED, "beta": "beta"}

LINEAR_ATTENTION = Row(
    "linear_attention",
    _QKV,
    state_parts=lambda options: 2 if options.get("normalize") else 1,
)
RETENTION = Row("retention", _QKV)
LIGHTNING_ATTENTION = Row("lightning_attention", _GATED)
SIMPLE_GLA = Row("simple_gla", _GATED, optional=("log_decay",))
MAMBA2 = Row(
    "mamba2",
    {
        "x": "v",
        "dt": "gate",
        "A": "rate",
        "B": "k",
        "C": "q",
        "D": "skip",
        "z": "z",
        "dt_bias": "dt_bias",
    },
    optional=("D", "z", "dt_bias"),
    default_layout="vk",
)
MLSTM = Row(
    "mlstm",
    {**_QKV, "i": "beta", "f": "gate"},
    state_parts=_mlstm_parts,
)

GLA = Row("gla", _GATED)
RWKV6 = Row("rwkv6", {"r": "q", "k": "k", "v": "v", "log_decay": "gate", "u": "u"})
HGRN2 = Row("hgrn2", {"q": "q", "v": "v", "log_decay": "gate"})
DELTA_RULE = Row("delta_rule", {**_QKV, "beta": "beta"})
GATED_DELTA_RULE = Row(
    "gated_delta_rule",
    {**_DELTA, "A_log": "rate", "dt_bias": "dt_bias"},
    optional=("log_decay", "A_log", "dt_bias"),
)
KDA = Row("kda", {**_DELTA, "A_log": "rate", "dt_bias": "dt_bias"}, optional=("A_log", "dt_bias"))
COMBA = Row("comba", {**_QKV, "p": "a", "log_decay": "gate", "beta": "beta"}, ("log_decay",))
GDN2 = Row("gdn2", {**_GATED, "b": "a", "w": "b"})
GATED_DELTA_PRODUCT = Row("gated_delta_product", _DELTA, optional=("log_decay",))
RWKV7 = Row("rwkv7", {"r": "q", "log_decay": "gate", "k": "k", "v": "v", "a": "a", "b": "b"})
IPLR = Row("iplr", {**_QKV, "a": "a", "b": "b"})
GSA = Row(
    "gsa",
    {**_QKV, "s": "a", "log_decay": "gate"},
    state_parts=lambda options: 2,
    slots="s",
)
HGRN = Row("hgrn", {"x": "v", "log_decay": "gate"}, is_scan=True)
MAMBA1 = Row(
    "mamba1",
    {
        "u": "v",
        "delta": "gate",
        "A": "rate",
        "B": "k",
        "C": "q",
        "D": "skip",
        "z": "z",
        "delta_bias": "dt_bias",
    },
    optional=("D", "z", "delta_bias"),
    default_layout="vk",
    is_scan=True,
)
RWKV4 = Row(
    "rwkv4",
    {"k": "beta", "v": "v", "log_decay": "gate", "u": "u"},
    state_parts=lambda options: 3,
    is_scan=True,
)

ROWS = (
    LINEAR_ATTENTION,
    RETENTION,
    LIGHTNING_ATTENTION,
    SIMPLE_GLA,
    MAMBA2,
    MLSTM,
    GLA,
    RWKV6,
    HGRN2,
    DELTA_RULE,
    GATED_DELTA_RULE,
    KDA,
    COMBA,
    GDN2,
    GATED_DELTA_PRODUCT,
    RWKV7,
    IPLR,
    GSA,
    HGRN,
    MAMBA1,
    RWKV4,
)


def part_names(state: str) -> list[str]:
    """What `prepared` calls the parts of a state that is given as a tuple."""
    return [f"{state}[{part}]" for part in range(_STATE_PARTS)]


def _split_state(op_name: str, arguments: Arguments, state: str) -> list[str]:
    """A state of one part is an array; one of several a tuple of arrays. Returns their names."""
    value = arguments.pop(state)
    if not isinstance(value, (tuple, list)):
        arguments[state] = value
        return [state]
    if not 1 <= len(value) <= _STATE_PARTS:
        raise InvalidArgument(
            f"{op_name}: {state}: got {len(value)} parts, wanted 1 to {_STATE_PARTS}"
        )
    names = part_names(state)[: len(value)]
    arguments.update(zip(names, value, strict=True))
    return names


def limits(op_name: str, limit: Any) -> tuple[float, float]:
    wanted = "(lower, upper) in order"
    lower, upper = (
        number(op_name, "dt_limit", x) for x in pair(op_name, "dt_limit", limit, wanted)
    )
    if lower > upper:
        raise InvalidArgument(f"{op_name}: dt_limit: got ({lower}, {upper}), wanted {wanted}")
    return lower, upper


def _seen_by_python(op_name: str, arguments: Arguments) -> Arguments:
    """The options that shapes of states follow from, or that the C library has another name for."""
    made = dict(arguments)
    if "output_final_state" in made:
        made["output_final_state"] = flag(op_name, "output_final_state", made["output_final_state"])
    # None: mlstm's follows from its gate.
    if "normalize" in made and not (made["normalize"] is None and "gate" in made):
        made["normalize"] = flag(op_name, "normalize", made["normalize"])
    if "gate" in made:
        made["gate"] = choice(op_name, "gate", made["gate"], ("exp", "sigmoid"))
    if "state_layout" in made:
        made["state_layout"] = choice(op_name, "state_layout", made["state_layout"], ("kv", "vk"))
    if "dt_limit" in made:
        made["dt_min"], made["dt_max"] = limits(op_name, made.pop("dt_limit"))
    if "delta_softplus" in made:  # mamba1's word for what mamba2 has too
        made["dt_softplus"] = flag(op_name, "delta_softplus", made.pop("delta_softplus"))
    return made


class _Shapes(NamedTuple):
    """What the shapes of outputs follow from; of ranks that the operator does not take, anything:
    the call is refused before they are looked at."""

    row: Row
    options: Arguments

    def state_dtype(self, views: Views) -> str:
        return "float64" if views[self.row.first].dtype == "float64" else "float32"

    def scan_state(self, views: Views, channels: int, sequences: int) -> list[tuple[int, ...]]:
        row = (sequences, channels)
        if "q" not in self.row.tensors.values():
            return [row] * self.row.state_parts(self.options)
        numbers = views[self.row.named("q")].shape[-1:]
        layout = self.options.get("state_layout") or self.row.default_layout
        return [(*row, *numbers) if layout == "vk" else (sequences, *numbers, channels)]

    def final_state(self, views: Views) -> list[Output]:
        q, v = views[self.row.first], views[self.row.named("v")]
        fewest = 2 if self.row.is_scan else 3
        if len(q.shape) < fewest or len(v.shape) < fewest:
            return []
        if "cu_seqlens" in views:
            lengths = views["cu_seqlens"].shape
            sequences = max(lengths[0] - 1, 0) if lengths else 0
        else:
            sequences = q.shape[0]
        parts = self.row.state_parts(self.options)
        dtype = self.state_dtype(views)
        names = part_names("final_state")[:parts]
        if self.row.is_scan:
            own = self.scan_state(views, v.shape[-1], sequences)
            return [Output(name, shape, dtype) for name, shape in zip(names, own, strict=True)]
        heads, dk, dv = v.shape[-2], q.shape[-1], v.shape[-1]
        layout = self.options.get("state_layout") or self.row.default_layout
        matrix = (dv, dk) if layout == "vk" else (dk, dv)
        shapes = [(sequences, heads, *matrix), (sequences, heads, dk), (sequences, heads)]
        if self.row.slots is not None:
            slots = views[self.row.slots].shape[-1:]
            matrices = ((dk, *slots), (*slots, dv))
            shapes = [(sequences, heads, *(m[::-1] if layout == "vk" else m)) for m in matrices]
        named = zip(names, shapes[:parts], strict=True)
        return [Output(name, shape, dtype) for name, shape in named]

    def o(self, views: Views) -> Output:
        first, v = views[self.row.first], views[self.row.named("v")]
        return Output("o", self.row.output_shape(first.shape, v.shape), first.dtype)

    def forward(self, views: Views) -> list[Output]:
        outputs = [self.o(views)]
        if self.options.get("output_final_state"):
            outputs += self.final_state(views)
        return outputs

    def backward(self, views: Views) -> list[Output]:
        tensors = [(name, "d" + name) for name in self.row.tensors]
        states = [(name, "d" + name) for name in ["initial_state", *part_names("initial_state")]]
        return [
            Output(gradient, views[name].shape, views[name].dtype)
            for name, gradient in tensors + states
            if name in views
        ]

    def step(self, views: Views) -> list[Output]:
        return [self.o(views)]


_STATES = {
    "forward": ("initial_state",),
    "backward": ("initial_state", "d_final_state"),
    "step": ("state",),
}


def prepared(row: Row, phase: str, given: Arguments) -> tuple[Operator, Arguments]:
    """The operator with its results' shapes, and the arguments, as `_calls.run` takes them."""
    name = f"{row.name}_{phase}"
    arguments = _seen_by_python(name, given)
    shapes = _Shapes(row, dict(arguments))
    arguments.pop("output_final_state", None)
    states = [part for state in _STATES[phase] for part in _split_state(name, arguments, state)]
    required = tuple(tensor for tensor in row.tensors if tensor not in row.optional)
    fields = {tensor: f"inputs.{role}" for tensor, role in row.tensors.items()}
    fields |= {f"d{tensor}": f"gradients.{role}" for tensor, role in row.tensors.items()}
    fields |= {
        state: f"{state}[0]"
        for state in ("initial_state", "d_final_state", "dinitial_state", "state")
    }
    op = Operator(
        name,
        required + (("d_o",) if phase == "backward" else ()),
        row.optional + tuple(states),
        () if phase == "step" else ("cu_seqlens", "seqlens"),
        {"forward": shapes.forward, "backward": shapes.backward, "step": shapes.step}[phase],
        index_arrays=("state_indices",) if phase == "step" else (),
        in_place=tuple(states) if phase == "step" else (),
        fields=fields,
    )
    return op, arguments


def _joined(results: Mapping[str, Any], state: str) -> Any:
    if state in results:
        return results[state]
    parts = [results[name] for name in part_names(state) if name in results]
    return parts[0] if len(parts) == 1 else tuple(parts) or None


def forward(row: Row, given: Arguments) -> tuple[Any, Any]:
    """(o, final state or None)."""
    results = _calls.run(*prepared(row, "forward", given))
    return results["o"], _joined(results, "final_state")


def backward(row: Row, given: Arguments) -> list[Any]:
    """The gradient of each tensor in order, None where there was none, and of the initial state."""
    results = _calls.run(*prepared(row, "backward", given))
    return [results.get(f"d{name}") for name in row.tensors] + [_joined(results, "dinitial_state")]


def step(row: Row, given: Arguments) -> Any:
    return _calls.run(*prepared(row, "step", given))["o"]


def explain(row: Row, phase: str, given: Arguments) -> str:
    return _calls.explain(*prepared(row, phase, given))
