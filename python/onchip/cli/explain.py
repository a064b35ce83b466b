"""`onchip explain`: a call given by its shapes."""

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

    def required(self, name: str, text: str | None, wanted: str) -> Any:
        spec = self.parse(name, text)
        if spec is None:
            raise InvalidArgument(f"explain: {name}: got nothing, wanted {wanted}")
        return spec

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


_COMMON = {"operator", "dtype", "device", "backend"}
_MERGE = {"o1"}
_BACKWARD = {"d_lse"}
_DECODE = {
    *("k_cache", "v_cache", "cache_seqlens", "k_new", "v_new", "page_table", "cache_slot"),
    *("rotary_dim", "rotary_interleaved", "q_positions"),
}
_FORWARD_ALONE = {"k", "v", "dropout_p"}  # not of attention_decode


_OTHERS = {"arrays", "options"}  # of every operator that has no flags of its own
_WITH_FLAGS = ("attention_forward", "attention_backward", "attention_decode", "merge")


def _taken(operator: str) -> set[str]:
    """The parameters of `explain` that the operator has a use for."""
    if operator == "merge":
        return _COMMON | _MERGE
    if operator not in _WITH_FLAGS:
        return _COMMON | _OTHERS
    options = {p.name for p in parameters(explain)} - _MERGE - _BACKWARD - _DECODE - _OTHERS
    if operator == "attention_decode":
        return (options - _FORWARD_ALONE) | _DECODE
    return options | _BACKWARD if operator == "attention_backward" else options


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


def _explain_other(
    operator: str, shapes: _Shapes, arrays: str | None, options: str | None, backend: str | None
) -> str:
    """By the names of its function in onchip.ops; an array given twice is one in parts."""
    given: dict[str, Any] = {}
    for name, value in _pairs("arrays", arrays):
        shape, _, own = value.partition(":")
        # States are kept in float32.
        default = shapes.lse_dtype if name.endswith("state") else shapes.dtype
        spec = shapes.parse(name, shape, _DTYPES.get(own, own) or default)
        before = given.get(name)
        if before is None:
            given[name] = spec
        else:
            parts = (before,) if isinstance(before, onchip.ArraySpec) else before
            given[name] = (*parts, spec)
    given |= {name: _option(value) for name, value in _pairs("options", options)}
    try:
        return onchip.explain(operator, **given, backend=backend)
    except TypeError as error:
        raise InvalidArgument(f"explain: {operator}: {error}") from None


def explain(
    operator: Annotated[str, "a function of onchip.ops"],
    *,
    q: Annotated[str | None, "shape of q: batch,seqlen_q,heads,dim, or total,heads,dim"] = None,
    k: Annotated[str | None, "shape of k; absent: as q"] = None,
    v: Annotated[str | None, "shape of v; absent: as k"] = None,
    o1: Annotated[str | None, "merge: shape of each part"] = None,
    d_lse: Annotated[bool, "backward: with a gradient of lse"] = False,
    k_cache: Annotated[str | None, "decode: slots,capacity,heads,dim, or pages,page,.."] = None,
    v_cache: Annotated[str | None, "decode: absent: as k_cache"] = None,
    cache_seqlens: Annotated[str | None, "decode: values, lengths before the call"] = None,
    k_new: Annotated[str | None, "decode: shape of what is appended"] = None,
    v_new: Annotated[str | None, "decode: absent: as k_new with v_cache's dim"] = None,
    page_table: Annotated[int | None, "decode: with a table of so many pages a sequence"] = None,
    cache_slot: Annotated[str | None, "decode: values, -1 to skip"] = None,
    rotary_dim: Annotated[int | None, "decode: with rotation of so many channels"] = None,
    rotary_interleaved: Annotated[bool, "decode: pairs of neighbours"] = False,
    q_positions: Annotated[bool, "decode: with positions of the queries"] = False,
    arrays: Annotated[str | None, "linear: as 'q=2,64,4,16 ..', or name=shape:dtype"] = None,
    options: Annotated[str | None, "linear: as 'state_layout=vk chunk_len=64'"] = None,
    dtype: Annotated[str, "float64 float32 float16 bfloat16, or fp64 fp32 fp16 bf16"] = "float32",
    device: Annotated[str, "cpu, cuda or cuda:N"] = "cpu",
    scale: Annotated[float | None, "of q.k; absent: head_dim_qk ** -0.5"] = None,
    causal: Annotated[bool, "query i sees keys j <= i + off"] = False,
    alignment: Annotated[str, "bottom_right or top_left"] = "bottom_right",
    window_left: Annotated[int, "-1: no bound"] = -1,
    window_right: Annotated[int, "-1: no bound"] = -1,
    softcap: Annotated[float, "0: none"] = 0.0,
    bias: Annotated[str | None, "shape of bias"] = None,
    mask: Annotated[str | None, "shape of mask"] = None,
    alibi_slopes: Annotated[str | None, "shape of alibi_slopes"] = None,
    segment_ids: Annotated[bool, "with q_segment_ids and kv_segment_ids"] = False,
    sink: Annotated[bool, "with a sink"] = False,
    dropout_p: Annotated[float, "in [0, 1)"] = 0.0,
    cu_seqlens_q: Annotated[str | None, "values, e.g. 0,100,300"] = None,
    cu_seqlens_kv: Annotated[str | None, "values"] = None,
    seqlens_q: Annotated[str | None, "values"] = None,
    seqlens_kv: Annotated[str | None, "values"] = None,
    max_seqlen_q: Annotated[int | None, "a hint"] = None,
    max_seqlen_kv: Annotated[int | None, "a hint"] = None,
    precision: Annotated[str | None, "tf32"] = None,
    deterministic: Annotated[bool, "backward bitwise repeatable"] = False,
    batch_invariant: Annotated[bool, "bits do not depend on the rest of the call"] = False,
    check: Annotated[bool, "validate values on a GPU too"] = False,
    backend: Annotated[str | None, "force one by name"] = None,
) -> str:
    """Which backend would take a call given by its shapes, and why each other one would not.

    onchip explain attention_forward --dtype bf16 --q 2,1024,16,128 --k 2,1024,4,128 --causal

    onchip explain retention_forward --arrays "q=2,64,4,16 k=2,64,4,16 v=2,64,8,32"
    """
    given = locals()
    if operator not in onchip.ops.__all__:
        return onchip.explain(operator)  # refuses the name
    taken = _taken(operator)
    refuse_unused(
        "explain",
        operator,
        {p.name: (given[p.name], p.default) for p in parameters(explain) if p.name not in taken},
    )
    shapes = _Shapes(dtype, device)
    if operator == "merge":
        part = shapes.required("o1", o1, "the shape of a part")
        lse = shapes.lse_of(part)
        return onchip.explain("merge", part, lse, part, lse, backend=backend)
    if operator not in _WITH_FLAGS:
        return _explain_other(operator, shapes, arrays, options, backend)
    q_spec = shapes.required("q", q, "its shape")
    flags: dict[str, Any] = {
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
        k_spec = shapes.required("k_cache", k_cache, "its shape")
        v_spec = shapes.parse("v_cache", v_cache) or k_spec
        new = shapes.parse("k_new", k_new)
        new_v = shapes.parse("v_new", v_new)
        if new is not None and new_v is None:
            new_v = shapes.of(new.shape[:-1] + v_spec.shape[-1:])
        rows = k_spec.shape[0] * k_spec.shape[1] if len(k_spec.shape) > 1 else 0
        if rotary_dim is not None:
            # As many positions as the cache has rows, and one for each query.
            table = shapes.of((rows + max(q_spec.shape), rotary_dim // 2))
            flags |= {"rotary_cos": table, "rotary_sin": table}
        appended = 0 if new is None else new.shape[0 if len(new.shape) == 3 else 1]
        longest = max(lengths, default=0) + appended
        if segment_ids:
            flags["kv_segment_ids"] = shapes.of((len(lengths), longest), "int32")
        if page_table is not None:
            flags["page_table"] = shapes.pages(
                page_table, [length + appended for length in lengths], k_spec.shape[1]
            )
        return onchip.explain(
            *(operator, q_spec, k_spec, v_spec),
            cache_seqlens=shapes.indices(lengths),
            k_new=new,
            v_new=new_v,
            cache_slot=shapes.indices(_integers("cache_slot", cache_slot)),
            rotary_interleaved=rotary_interleaved,
            q_positions=shapes.zeros(q_spec.shape[:-2]) if q_positions else None,
            **flags,
        )
    k_spec = shapes.parse("k", k) or q_spec
    inputs = [q_spec, k_spec, shapes.parse("v", v) or k_spec]
    if segment_ids:
        flags["kv_segment_ids"] = shapes.of(k_spec.shape[:-2], "int32")
    if operator == "attention_backward":
        o = shapes.of(q_spec.shape[:-1] + inputs[2].shape[-1:])
        lse = shapes.lse_of(o)
        inputs = [o, *inputs, o, lse]
        flags["d_lse"] = lse if d_lse else None
    rng = (0, 0) if dropout_p else None
    return onchip.explain(operator, *inputs, **flags, dropout_p=dropout_p, dropout_rng=rng)
