"""`onchip explain`: a call given by its shapes."""

import inspect
import math
from array import array
from collections.abc import Iterable
from typing import Annotated, Any

import onchip
from onchip.cli.signature import parameters, refuse_unused
from onchip.errors import InvalidArgument

_DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3",
}


def _integers(name: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise InvalidArgument(
            f"explain: {name}: got {text!r}, wanted integers with commas between them"
        ) from None


class _Shapes:
    """Array specs of one dtype and device from the texts of the command line."""

    def __init__(self, dtype: str, device: str) -> None:
        self.dtype = _DTYPES.get(dtype, dtype)
        self.device = device
        self.lse_dtype = "float64" if self.dtype == "float64" else "float32"

    def of(self, shape: Iterable[int], dtype: str | None = None) -> onchip.ArraySpec:
        return onchip.ArraySpec(tuple(shape), dtype or self.dtype, self.device)

    def parse(self, name: str, text: str | None, dtype: str | None = None) -> Any:
        shape = _integers(name, text)
        return None if shape is None else self.of(shape, dtype)

    def indices(self, values: list[int] | None) -> Any:
        """On a GPU their values are the call's own affair."""
        if values is None or self.device == "cpu":
            return values
        return self.of((len(values),), "int32")

    def pages(self, columns: int, lengths: list[int], page_size: int) -> Any:
        """A page table: each sequence's pages lie behind those of the one before."""
        if self.device != "cpu":
            return self.of((len(lengths), columns), "int32")
        values = array("i", [0] * (len(lengths) * columns))
        page = 0
        for row, length in enumerate(lengths):
            for entry in range(min(columns, -(-length // max(page_size, 1)))):
                values[row * columns + entry] = page
                page += 1
        return memoryview(values).cast("B").cast("i", (len(lengths), columns))

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """Positions, whose values a call looks at in host memory."""
        if self.device != "cpu" or 0 in shape:
            return self.of(shape, "int32")
        return memoryview(array("i", [0] * math.prod(shape))).cast("B").cast("i", shape)

    def lse_of(self, o: onchip.ArraySpec) -> onchip.ArraySpec:
        rows_and_heads = tuple(o.shape)[:-1]
        return self.of(rows_and_heads[:-2] + rows_and_heads[-2:][::-1], self.lse_dtype)


_ATTENTION = ("attention_forward", "attention_backward")
_WITH_FLAGS = (*_ATTENTION, "attention_decode", "merge")
_EVERYWHERE = {"operator", "dtype", "device", "arrays", "options"}
# Flags that stand for arguments of other names.
_SPELLED = {
    "window_left": "window",
    "window_right": "window",
    "segment_ids": "q_segment_ids",
    "rotary_dim": "rotary_cos",
}


# Arrays of linear operators that have the shape of another where they are not given.
_AS = {"k": "q", "v": "k", "d_o": "v"}


def _refuse_unused(operator: str, given: dict[str, Any]) -> None:
    """What the operator's function in onchip.ops has no argument for."""
    arguments = set(inspect.signature(getattr(onchip.ops, operator)).parameters)
    refuse_unused(
        "explain",
        operator,
        {
            p.name: (given[p.name], p.default)
            for p in parameters(explain)
            if p.name not in _EVERYWHERE and _SPELLED.get(p.name, p.name) not in arguments
        },
    )


def _pairs(name: str, text: str | None) -> Iterable[tuple[str, str]]:
    for word in (text or "").split():
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise InvalidArgument(f"explain: {name}: got {word!r}, wanted <name>=<value>")
        yield key, value


def _option(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float, lambda value: [int(part) for part in value.split(",")]):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _named(shapes: _Shapes, arrays: str | None, options: str | None) -> dict[str, Any]:
    """Arguments by their names in onchip.ops; an array given twice is one in parts."""
    found: dict[str, Any] = {}
    for name, value in _pairs("arrays", arrays):
        shape, _, own = value.partition(":")
        # States are kept in float32.
        default = shapes.lse_dtype if name.endswith("state") else shapes.dtype
        spec = shapes.parse(name, shape, _DTYPES.get(own, own) or default)
        before = found.get(name)
        if before is None:
            found[name] = spec
        else:
            parts = (before,) if isinstance(before, onchip.ArraySpec) else before
            found[name] = (*parts, spec)
    return found | {name: _option(value) for name, value in _pairs("options", options)}


def _how_to_give(operator: str, arguments: dict[str, Any]) -> str:
    """The options that bring what a call lacks."""
    flags = {p.name: f"{p.flag} {p.metavar}" for p in parameters(explain)}
    ways: dict[str, list[str]] = {}
    takes = inspect.signature(getattr(onchip.ops, operator)).parameters
    for p in takes.values():
        if p.default is not p.empty or p.name in arguments or _AS.get(p.name) in takes:
            continue
        if p.name in flags:
            ways[flags[p.name]] = []
        elif p.annotation is int:
            ways.setdefault("--options", []).append(f"{p.name}=N")
        else:
            ways.setdefault("--arrays", []).append(f"{p.name}=SHAPE")
    texts = [f"{way} '{' '.join(pairs)}'" if pairs else way for way, pairs in ways.items()]
    return f"; give {' '.join(texts)}" if texts else ""


def _explained(operator: str, arguments: dict[str, Any]) -> str:
    try:
        return onchip.explain(operator, **arguments)
    except TypeError as error:
        hint = _how_to_give(operator, arguments)
        raise InvalidArgument(f"explain: {operator}: {error}{hint}") from None


def _explain_other(
    operator: str, shapes: _Shapes, named: dict[str, Any], given: dict[str, Any]
) -> str:
    """An operator without flags of its own: those whose names it has, k as q and v as k where they
    are missing, and the gradient of a result as v."""
    takes = inspect.signature(getattr(onchip.ops, operator)).parameters
    arguments = {
        p.name: given[p.name]
        for p in parameters(explain)
        if p.name in takes and given[p.name] != p.default
    }
    for name in arguments.keys() & {"cu_seqlens", "seqlens"}:
        arguments[name] = _integers(name, arguments[name])
    for name in arguments.keys() & {"q", "k", "v", "bias"}:
        arguments[name] = shapes.parse(name, arguments[name])
    arguments |= named
    for name, other in _AS.items():
        if name in takes and other in arguments:
            arguments.setdefault(name, arguments[other])
    return _explained(operator, arguments)


def explain(
    operator: Annotated[str, "a function of onchip.ops"],
    *,
    q: Annotated[str | None, "batch,seqlen_q,heads,dim, or total,heads,dim", "SHAPE"] = None,
    k: Annotated[str | None, "absent: as q", "SHAPE"] = None,
    v: Annotated[str | None, "absent: as k", "SHAPE"] = None,
    o1: Annotated[str | None, "merge: of each part", "SHAPE"] = None,
    d_lse: Annotated[bool, "backward: with a gradient of lse"] = False,
    k_cache: Annotated[
        str | None, "decode: slots,capacity,heads,dim, or pages,page_size,heads,dim", "SHAPE"
    ] = None,
    v_cache: Annotated[str | None, "decode: absent: as k_cache", "SHAPE"] = None,
    cache_seqlens: Annotated[str | None, "decode: lengths before the call", "N,N,.."] = None,
    k_new: Annotated[str | None, "decode: of what is appended", "SHAPE"] = None,
    v_new: Annotated[str | None, "decode: absent: as k_new with v_cache's dim", "SHAPE"] = None,
    page_table: Annotated[
        int | None, "decode: with a table of so many pages a sequence", "N"
    ] = None,
    cache_slot: Annotated[str | None, "decode: slots, -1 to skip", "N,N,.."] = None,
    rotary_dim: Annotated[int | None, "decode: with rotation of so many channels", "N"] = None,
    rotary_interleaved: Annotated[bool, "decode: pairs of neighbours"] = False,
    q_positions: Annotated[bool, "decode: with positions of the queries"] = False,
    arrays: Annotated[
        str | None,
        "any array by its name in onchip.ops: 'beta=2,64,8 log_decay=2,64,8:fp32'; a name given "
        "twice is a tuple",
        "'NAME=SHAPE[:DTYPE] ..'",
    ] = None,
    options: Annotated[
        str | None,
        "any other argument by its name in onchip.ops: 'state_layout=vk chunk_len=64'",
        "'NAME=VALUE ..'",
    ] = None,
    dtype: Annotated[
        str, "of arrays: fp64, fp32, fp16, bf16, or as float64; absent: fp32", "DTYPE"
    ] = "float32",
    device: Annotated[str, "cpu, cuda or cuda:N", "DEVICE"] = "cpu",
    scale: Annotated[float | None, "absent: head_dim ** -0.5, or the operator's own", "X"] = None,
    causal: Annotated[bool, "query i sees keys j <= i + off"] = False,
    alignment: Annotated[str, "bottom_right or top_left", "WORD"] = "bottom_right",
    window_left: Annotated[int, "keys back; -1: no bound", "N"] = -1,
    window_right: Annotated[int, "keys ahead; -1: no bound", "N"] = -1,
    softcap: Annotated[float, "0: none", "X"] = 0.0,
    bias: Annotated[str | None, "with a bias", "SHAPE"] = None,
    mask: Annotated[str | None, "with a boolean mask", "SHAPE"] = None,
    alibi_slopes: Annotated[str | None, "with slopes", "SHAPE"] = None,
    segment_ids: Annotated[bool, "with q_segment_ids and kv_segment_ids"] = False,
    sink: Annotated[bool, "with a sink"] = False,
    dropout_p: Annotated[float, "in [0, 1)", "X"] = 0.0,
    cu_seqlens_q: Annotated[str | None, "where packed sequences start: 0,100,300", "N,N,.."] = None,
    cu_seqlens_kv: Annotated[str | None, "absent: as of q", "N,N,.."] = None,
    cu_seqlens: Annotated[
        str | None, "linear: where packed sequences start: 0,100,300", "N,N,.."
    ] = None,
    seqlens_q: Annotated[str | None, "rows in use of each sequence", "N,N,.."] = None,
    seqlens_kv: Annotated[str | None, "absent: as of q", "N,N,.."] = None,
    seqlens: Annotated[str | None, "linear: rows in use of each sequence", "N,N,.."] = None,
    max_seqlen_q: Annotated[int | None, "a hint", "N"] = None,
    max_seqlen_kv: Annotated[int | None, "a hint", "N"] = None,
    precision: Annotated[str | None, "tf32", "WORD"] = None,
    deterministic: Annotated[bool, "backward bitwise repeatable"] = False,
    batch_invariant: Annotated[bool, "bits do not depend on the rest of the call"] = False,
    check: Annotated[bool, "validate values on a GPU too"] = False,
    backend: Annotated[str | None, "force one by name", "NAME"] = None,
) -> str:
    """Which backend would take a call given by its shapes, and why each other one would not.

    Each operator takes the flags whose names its function in onchip.ops has, and everything else by
    --arrays and --options.

    onchip explain attention_forward --dtype bf16 --q 2,1024,16,128 --k 2,1024,4,128 --causal

    onchip explain gated_delta_rule_forward --q 2,64,4,16 --v 2,64,8,32 --arrays
    "log_decay=2,64,8 beta=2,64,8"
    """
    given = locals()
    if operator not in onchip.ops.__all__:
        return onchip.explain(operator)  # refuses the name
    _refuse_unused(operator, given)
    shapes = _Shapes(dtype, device)
    named = _named(shapes, arrays, options)
    if operator not in _WITH_FLAGS:
        return _explain_other(operator, shapes, named, given)

    def array(name: str, wanted: str | None = "its shape", default: Any = None) -> Any:
        """By its flag, or in --arrays; required unless `wanted` is None."""
        spec = named.get(name) or shapes.parse(name, given[name])
        if spec is None and wanted is not None:
            raise InvalidArgument(f"explain: {name}: got nothing, wanted {wanted}")
        return spec or default

    if operator == "merge":
        part = array("o1", "the shape of a part")
        lse = shapes.lse_of(part)
        arguments = {"o1": part, "lse1": lse, "o2": part, "lse2": lse, "backend": backend}
        return _explained(operator, arguments | named)
    q_spec = array("q")
    arguments = {
        "q": q_spec,
        "scale": scale,
        "causal": causal,
        "alignment": alignment,
        "window": (window_left, window_right),
        "softcap": softcap,
        "bias": shapes.parse("bias", bias),
        "mask": shapes.parse("mask", mask, "bool"),
        "alibi_slopes": shapes.parse("alibi_slopes", alibi_slopes, "float32"),
        "q_segment_ids": shapes.of(q_spec.shape[:-2], "int32") if segment_ids else None,
        "sink": shapes.of(q_spec.shape[-2:-1], "float32") if sink else None,
        "cu_seqlens_q": _integers("cu_seqlens_q", cu_seqlens_q),
        "cu_seqlens_kv": _integers("cu_seqlens_kv", cu_seqlens_kv),
        "seqlens_q": _integers("seqlens_q", seqlens_q),
        "seqlens_kv": _integers("seqlens_kv", seqlens_kv),
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_kv": max_seqlen_kv,
        "precision": precision,
        "deterministic": deterministic,
        "batch_invariant": batch_invariant,
        "check": check,
        "backend": backend,
    }
    if operator == "attention_decode":
        lengths = _integers("cache_seqlens", cache_seqlens)
        if lengths is None:
            raise InvalidArgument("explain: cache_seqlens: got nothing, wanted the lengths")
        k_spec = array("k_cache")
        v_spec = array("v_cache", None, k_spec)
        new = array("k_new", None)
        new_v = array("v_new", None)
        if new is not None and new_v is None:
            new_v = shapes.of(new.shape[:-1] + v_spec.shape[-1:])
        rows = k_spec.shape[0] * k_spec.shape[1] if len(k_spec.shape) > 1 else 0
        if rotary_dim is not None:
            # As many positions as the cache has rows, and one for each query.
            table = shapes.of((rows + max(q_spec.shape), rotary_dim // 2))
            arguments |= {"rotary_cos": table, "rotary_sin": table}
        appended = 0 if new is None else new.shape[0 if len(new.shape) == 3 else 1]
        longest = max(lengths, default=0) + appended
        if segment_ids:
            arguments["kv_segment_ids"] = shapes.of((len(lengths), longest), "int32")
        if page_table is not None:
            arguments["page_table"] = shapes.pages(
                page_table, [length + appended for length in lengths], k_spec.shape[1]
            )
        arguments |= {
            "k_cache": k_spec,
            "v_cache": v_spec,
            "cache_seqlens": shapes.indices(lengths),
            "k_new": new,
            "v_new": new_v,
            "cache_slot": shapes.indices(_integers("cache_slot", cache_slot)),
            "rotary_interleaved": rotary_interleaved,
            "q_positions": shapes.zeros(q_spec.shape[:-2]) if q_positions else None,
        }
        return _explained(operator, arguments | named)
    k_spec = array("k", None, q_spec)
    v_spec = array("v", None, k_spec)
    if segment_ids:
        arguments["kv_segment_ids"] = shapes.of(k_spec.shape[:-2], "int32")
    if operator == "attention_backward":
        o = shapes.of(q_spec.shape[:-1] + v_spec.shape[-1:])
        lse = shapes.lse_of(o)
        arguments |= {"d_o": o, "o": o, "lse": lse, "d_lse": lse if d_lse else None}
    arguments |= {
        "k": k_spec,
        "v": v_spec,
        "dropout_p": dropout_p,
        "dropout_rng": (0, 0) if dropout_p else None,
    }
    return _explained(operator, arguments | named)
