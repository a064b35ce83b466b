"""From the arguments of an operator in Python to a call of the C library, and back."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from onchip import _native
from onchip._kinds import CPU, ArraySpec, Kind, kind_of, result_kind_of
from onchip._values import pair
from onchip.errors import InvalidArgument

Arguments = dict[str, Any]
Views = Mapping[str, _native.Tensor]


class Output(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str


class Operator(NamedTuple):
    name: str
    # The first decides the library and device of the results.
    arrays: tuple[str, ...]
    optional_arrays: tuple[str, ...]
    # Also arrays, or sequences of integers, which become int64 arrays in host memory.
    integer_arrays: tuple[str, ...]
    outputs: Callable[[Views], list[Output]]
    # Likewise; sequences become int32 arrays.
    index_arrays: tuple[str, ...] = ()
    # These arrays are written in place; where the array `written_with` is given, if it names one.
    in_place: tuple[str, ...] = ()
    written_with: str = ""
    # Names that the C struct has others for.
    fields: Mapping[str, str] = {}

    def field(self, name: str) -> str:
        return self.fields.get(name, name)


def lse_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """By the shape of q. Of a rank that attention does not take, anything: q itself is refused
    before it is looked at."""
    if len(shape) == 4:
        return (shape[0], shape[2], shape[1])
    if len(shape) == 3:
        return (shape[1], shape[0])
    return ()


def _like(name: str, view: _native.Tensor) -> Output:
    return Output(name, view.shape, view.dtype)


def _attention_outputs(q: _native.Tensor, v: _native.Tensor) -> list[Output]:
    lse_dtype = "float64" if q.dtype == "float64" else "float32"
    return [
        Output("o", q.shape[:-1] + v.shape[-1:], q.dtype),
        Output("lse", lse_shape(q.shape), lse_dtype),
    ]


def _forward_outputs(views: Views) -> list[Output]:
    return _attention_outputs(views["q"], views["v"])


def _backward_outputs(views: Views) -> list[Output]:
    return [
        _like("d" + name, views[name]) for name in ("q", "k", "v", "bias", "sink") if name in views
    ]


def _merge_outputs(views: Views) -> list[Output]:
    return [_like("o", views["o1"]), _like("lse", views["lse1"])]


_OPTION_ARRAYS = ("bias", "mask", "alibi_slopes", "q_segment_ids", "kv_segment_ids", "sink")
_OPTION_INTEGERS = ("dropout_rng", "cu_seqlens_q", "cu_seqlens_kv", "seqlens_q", "seqlens_kv")

ATTENTION_FORWARD = Operator(
    "attention_forward", ("q", "k", "v"), _OPTION_ARRAYS, _OPTION_INTEGERS, _forward_outputs
)
ATTENTION_BACKWARD = Operator(
    "attention_backward",
    ("q", "d_o", "k", "v", "o", "lse"),
    ("d_lse", *_OPTION_ARRAYS),
    _OPTION_INTEGERS,
    _backward_outputs,
)
MERGE = Operator("merge", ("o1", "lse1", "o2", "lse2"), (), (), _merge_outputs)


def _decode_outputs(views: Views) -> list[Output]:
    return _attention_outputs(views["q"], views["v_cache"])


_DECODE_OPTION_INTEGERS = tuple(name for name in _OPTION_INTEGERS if name != "dropout_rng")

ATTENTION_DECODE = Operator(
    "attention_decode",
    ("q", "k_cache", "v_cache"),
    ("k_new", "v_new", "rotary_cos", "rotary_sin", *_OPTION_ARRAYS),
    ("q_positions", *_DECODE_OPTION_INTEGERS),
    _decode_outputs,
    index_arrays=("cache_seqlens", "page_table", "cache_slot"),
    in_place=("k_cache", "v_cache"),
    written_with="k_new",
)


def _integers(op: Operator, name: str, value: Any) -> Any:
    """Sequences of integers as an array in host memory; anything else as it is."""
    if isinstance(value, ArraySpec):
        if value.device == "cpu":
            raise InvalidArgument(
                f"{op.name}: {name}: got an ArraySpec in host memory, wanted the values, which a "
                "call looks at, or an ArraySpec on a GPU"
            )
        return value
    if not isinstance(value, (list, tuple, range)):
        return value
    code, bits = ("i", 32) if name in op.index_arrays else ("q", 64)
    try:
        return array(code, value)
    except (TypeError, OverflowError) as error:
        raise InvalidArgument(
            f"{op.name}: {name}: got a {type(value).__name__} ({error}), "
            f"wanted integers of {bits} bits or an integer array"
        ) from None


def window_bounds(op: str, window: Any) -> tuple[Any, Any]:
    return pair(op, "window", window, "(left, right), -1 for no bound")


def _split_window(op: Operator, arguments: Arguments) -> None:
    if "window" in arguments:
        left, right = window_bounds(op.name, arguments.pop("window"))
        arguments["window_left"], arguments["window_right"] = left, right


class Prepared(NamedTuple):
    call: _native.Call
    stream: int
    outputs: list[Output]
    # What had to be copied, as explain says it: "q (innermost stride 64)".
    copies: list[str]


def _readable(
    op: Operator, name: str, kind: Kind, value: Any, stream: int, copies: list[str], dry: bool
) -> _native.Tensor:
    """The array's memory in a layout that the C library takes."""
    view = kind.view(op.name, name, value, stream)
    if view.layout_problem is None:
        return view
    copies.append(f"{name} ({view.layout_problem})")
    if dry:
        return _native.shape(op.name, name, view.shape, view.dtype, *view.device)
    if view.device[0] == CPU:
        return view.contiguous()
    return kind.view(op.name, name, kind.contiguous(value), stream)


def _in_place(op: Operator, name: str, kind: Kind, value: Any, stream: int) -> _native.Tensor:
    """The array's memory, for writing: no copy can stand in for it."""
    view = kind.writable(op.name, name, value, stream)
    if view.layout_problem is not None:
        because = f": {op.written_with} is given" if op.written_with else ""
        raise InvalidArgument(
            f"{op.name}: {name}: got {view.layout_problem}, wanted innermost stride 1 at "
            f"an address of whole elements{because}, so it is written in place"
        )
    return view


def _prepare(
    op: Operator, arguments: Arguments, dry: bool, unwanted: Sequence[str] = ()
) -> Prepared:
    """The C call with every input in place and a shape for each output but the unwanted ones.

    dry: the call will not be run, so no large array is copied.
    """
    arguments = dict(arguments)
    _split_window(op, arguments)
    writes = not op.written_with or arguments.get(op.written_with) is not None
    first = op.arrays[0]
    stream = kind_of(arguments[first]).stream(arguments[first])
    copies: list[str] = []
    views: dict[str, _native.Tensor] = {}
    for name in op.arrays + op.optional_arrays:
        value = arguments.pop(name)
        if value is None and name in op.optional_arrays:
            continue
        if writes and name in op.in_place:
            views[name] = _in_place(op, name, kind_of(value), value, stream)
            continue
        views[name] = _readable(op, name, kind_of(value), value, stream, copies, dry)
    for name in op.integer_arrays + op.index_arrays:
        value = _integers(op, name, arguments.pop(name))
        if value is None:
            continue
        # Their values are facts that a plan looks at, so they are copied even in a dry call; those
        # in host memory always: what was checked has to hold during the run, whoever writes there.
        view = _readable(op, name, kind_of(value), value, stream, copies, False)
        views[name] = view.copy() if view.device[0] == CPU else view
    outputs = [output for output in op.outputs(views) if output.name not in unwanted]
    device = views[first].device
    for output in outputs:
        views[output.name] = _native.shape(
            op.name, output.name, output.shape, output.dtype, *device
        )
    fields = {op.field(name): view for name, view in views.items()}
    return Prepared(_native.Call(op.name, {**arguments, **fields}), stream, outputs, copies)


def run(op: Operator, arguments: Arguments, unwanted: Sequence[str] = ()) -> dict[str, Any]:
    """Runs the call; its results by name, without those unwanted."""
    first = op.arrays[0]
    example = arguments[first]
    kind = result_kind_of(op.name, first, example)
    prepared = _prepare(op, arguments, False, unwanted)
    call = prepared.call
    # Planned with shapes in place of outputs: a call that is refused allocates nothing.
    call.plan()

    def writable(name: str, made: Any, dtype: str) -> _native.Tensor:
        return _native.tensor(op.name, name, kind.memory(made), dtype, True, prepared.stream)

    results = {o.name: kind.empty(o.shape, o.dtype, example) for o in prepared.outputs}
    call.bind(
        {op.field(o.name): writable(o.name, results[o.name], o.dtype) for o in prepared.outputs}
    )
    workspace = None
    if call.workspace_bytes:
        length = call.workspace_bytes + call.workspace_alignment - 1
        # One byte an element, of a dtype that every library has.
        made = kind.empty((length,), "bool", example)
        workspace = writable("workspace", made, "bool")
    call.run(workspace, prepared.stream)
    return {name: kind.result(made, example) for name, made in results.items()}


def explain(op: Operator, arguments: Arguments) -> str:
    """What the library says about the call, then the copies that Python would make."""
    prepared = _prepare(op, arguments, dry=True)
    text = prepared.call.explain()
    return text + "".join(f"copied: {copy}\n" for copy in prepared.copies)
