"""Random calls of the linear operators: any shapes, packed or not, states of any layout, the
operators' own options."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .cases import DTYPES, Chooser, Integer, described, draw

# Tensors in order, by shape: "key" rows [Hk, dk], "value" rows [Hv, dv], "scalar" rows [Hv],
# "channel" rows [Hv, dk], "slots" rows [Hv, M]; "_rows": num_householder of them a token; "head"
# [Hv], "head_key" [Hv, dk].
TENSORS = {
    "linear_attention": {"q": "key", "k": "key", "v": "value"},
    "retention": {"q": "key", "k": "key", "v": "value"},
    "lightning_attention": {"q": "key", "k": "key", "v": "value", "log_decay": "head"},
    "simple_gla": {"q": "key", "k": "key", "v": "value", "log_decay": "scalar"},
    "mamba2": {
        "x": "value",
        "dt": "scalar",
        "A": "head",
        "B": "key",
        "C": "key",
        "D": "head",
        "z": "value",
        "dt_bias": "head",
    },
    "mlstm": {"q": "key", "k": "key", "v": "value", "i": "scalar", "f": "scalar"},
    "gla": {"q": "key", "k": "key", "v": "value", "log_decay": "channel"},
    "rwkv6": {"r": "key", "k": "key", "v": "value", "log_decay": "channel", "u": "head_key"},
    "hgrn2": {"q": "key", "v": "value", "log_decay": "channel"},
    "delta_rule": {"q": "key", "k": "key", "v": "value", "beta": "scalar"},
    "gated_delta_rule": {
        "q": "key",
        "k": "key",
        "v": "value",
        "log_decay": "scalar",
        "beta": "scalar",
        "A_log": "head",
        "dt_bias": "head",
    },
    "kda": {
        "q": "key",
        "k": "key",
        "v": "value",
        "log_decay": "channel",
        "beta": "scalar",
        "A_log": "head",
        "dt_bias": "head_key",
    },
    "comba": {
        "q": "key",
        "k": "key",
        "v": "value",
        "p": "key",
        "log_decay": "scalar",
        "beta": "scalar",
    },
    "gdn2": {
        "q": "key",
        "k": "key",
        "v": "value",
        "log_decay": "channel",
        "b": "channel",
        "w": "value",
    },
    "gated_delta_product": {
        "q": "key",
        "k": "key_rows",
        "v": "value_rows",
        "log_decay": "scalar",
        "beta": "scalar_rows",
    },
    "rwkv7": {
        "r": "key",
        "log_decay": "channel",
        "k": "key",
        "v": "value",
        "a": "key",
        "b": "key",
    },
    "iplr": {"q": "key", "k": "key", "v": "value", "a": "key", "b": "key"},
    "gsa": {"q": "key", "k": "key", "v": "value", "s": "slots", "log_decay": "slots"},
}

OPTIONAL = {
    "simple_gla": ("log_decay",),
    "mamba2": ("D", "z", "dt_bias"),
    "comba": ("log_decay",),
    "gated_delta_product": ("log_decay",),
}
RAW_GATES = ("gated_delta_rule", "kda")  # A_log, and what needs it

# Their states grow with keys that are longer than 1.
SHORT_KEYS = (
    "delta_rule",
    "gated_delta_rule",
    "kda",
    "comba",
    "gdn2",
    "gated_delta_product",
    "rwkv7",
    "iplr",
)


@dataclass(frozen=True)
class LinearCase:
    op: str
    # By the operator's names; those left out are not there.
    tensors: dict
    d_o: np.ndarray
    initial_state: Any  # an array, a tuple of them, or None
    d_final_state: Any
    options: dict = field(repr=False)

    def __repr__(self):
        tensors = ", ".join(f"{name}={described(x)}" for name, x in self.tensors.items())
        options = {name: described(value) for name, value in self.options.items()}
        initial = "" if self.initial_state is None else ", initial_state"
        return f"{tensors}{initial}, {options}"

    @property
    def dtype(self):
        return self.d_o.dtype

    def map_arrays(self, change):
        """The same case with every array x replaced by change(x)."""

        def changed(value):
            if isinstance(value, tuple) and any(isinstance(x, np.ndarray) for x in value):
                return tuple(changed(x) for x in value)
            if isinstance(value, dict):
                return {name: changed(x) for name, x in value.items()}
            return change(value) if isinstance(value, np.ndarray) else value

        return replace(
            self,
            tensors=changed(self.tensors),
            d_o=change(self.d_o),
            initial_state=changed(self.initial_state),
            d_final_state=changed(self.d_final_state),
            options=changed(self.options),
        )


def _own_options(op: str, choose: Chooser) -> tuple[dict[str, Any], int, bool]:
    """Options, parts of the state, and whether queries and keys are to be positive: normalised
    forms are judged away from the zeros of their denominators."""
    if op == "linear_attention" and choose.chance(40):
        return {"normalize": True}, 2, True
    if op == "mamba2":
        options: dict[str, Any] = {}
        if choose.chance(30):
            options["dt_softplus"] = False
            options["dt_limit"] = (0.0, 9.0)
        elif choose.chance(40):
            options["dt_limit"] = (0.3, 1.1)
        return options, 1, False
    if op == "mlstm":
        if choose.chance(40):
            return {"gate": "sigmoid"}, 1, False
        return {"eps": choose.pick([0.0, 0.25])}, 3, True
    options = {}
    if op == "gsa":
        return options, 2, False
    if op == "gated_delta_product":
        options["num_householder"] = choose.pick([1, 2, 3])
    if op in SHORT_KEYS and op not in ("rwkv7", "iplr") and choose.chance(40):
        options["qk_l2norm"] = True
    return options, 1, False


def _raw_options(choose: Chooser) -> dict[str, Any]:
    options: dict[str, Any] = {"allow_neg_eigval": True} if choose.chance(40) else {}
    if choose.chance(40):
        options["lower_bound"] = -5.0
    return options


def _values(
    rng: np.random.Generator, op: str, name: str, shape: Any, positive: bool, raw: bool
) -> Any:
    x = rng.standard_normal(shape)
    if name == "log_decay" and not raw:
        x = -0.5 * np.abs(x)
        x[rng.random(shape) < 0.03] = -np.inf  # a new segment
        x[rng.random(shape) < 0.03] = 0.0
    elif (name == "beta" and not raw) or (op == "gdn2" and name == "b"):
        x = 1 / (1 + np.exp(-x))
    elif name in ("k", "p", "a", "b") and op in SHORT_KEYS:
        x = 0.5 * x / np.sqrt(shape[-1])
    elif name == "A":
        x = -np.exp(0.5 * x)
    elif name == "A_log":
        x = 0.3 * x
    elif name == "f":
        x = x + 1.5
    elif positive and name in ("q", "k"):
        x = np.abs(x) + 0.01
    return x


def linear_case(
    op: str, integer: Integer, dtypes: Sequence[Any] = DTYPES, longest: int | None = None
) -> LinearCase:
    choose = Chooser(integer)
    rng = choose.rng
    if longest is None:
        # Within a chunk, about one, over a few.
        longest = choose.pick([5, 70, 200])
    dtype = np.dtype(choose.pick(dtypes))
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    gate_dtype = choose.pick([dtype, wide])
    heads_k = integer(1, 2)
    heads_v = heads_k * integer(1, 3)
    dk, dv, slots = integer(1, 40), integer(1, 40), integer(1, 20)
    num_seqs = integer(1, 3)
    options, parts, positive = _own_options(op, choose)

    if choose.chance(40):
        lengths = rng.integers(0, longest + 1, num_seqs)
        rows = (int(lengths.sum()) + integer(0, 3),)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        options["cu_seqlens"] = starts.astype(choose.pick([np.int32, np.int64]))
    else:
        length = integer(1, longest)
        rows, lengths = (num_seqs, length), np.full(num_seqs, length)
    if choose.chance(25):
        options["seqlens"] = rng.integers(0, lengths + 1).astype(np.int32)
    if choose.chance(25):
        options["scale"] = choose.pick([1.0, 0.1])
    if choose.chance(40):
        options["chunk_len"] = choose.pick([16, 64, 128])
    layout = choose.pick(["kv", "vk"])
    options["state_layout"] = layout

    each = options.get("num_householder", 1)
    more_rows = (*rows[:-1], rows[-1] * each)
    shapes = {
        "key": (*rows, heads_k, dk),
        "value": (*rows, heads_v, dv),
        "scalar": (*rows, heads_v),
        "channel": (*rows, heads_v, dk),
        "slots": (*rows, heads_v, slots),
        "key_rows": (*more_rows, heads_k, dk),
        "value_rows": (*more_rows, heads_v, dv),
        "scalar_rows": (*more_rows, heads_v),
        "head": (heads_v,),
        "head_key": (heads_v, dk),
    }
    raw = op in RAW_GATES and choose.chance(50)
    if raw:
        options |= _raw_options(choose)
    tensors = {}
    for name, kind in TENSORS[op].items():
        if name in OPTIONAL.get(op, ()) and choose.chance(40):
            continue
        if name == "A_log" and not raw:
            continue
        if name == "dt_bias" and op in RAW_GATES and not (raw and choose.chance(70)):
            continue
        operand = name in ("q", "k", "v", "r", "x", "B", "C", "z")
        x = _values(rng, op, name, shapes[kind], positive, raw)
        tensors[name] = x.astype(dtype if operand else gate_dtype)

    matrix = (dk, dv) if layout == "kv" else (dv, dk)
    state_shapes: list[tuple[int, ...]] = [
        (num_seqs, heads_v, *matrix),
        (num_seqs, heads_v, dk),
        (num_seqs, heads_v),
    ]

    if op == "gsa":
        pair = ((dk, slots), (slots, dv))
        state_shapes = [(num_seqs, heads_v, *(p if layout == "kv" else p[::-1])) for p in pair]

    def state(count: int) -> Any:
        drawn = [draw(rng, shape, wide) for shape in state_shapes[:count]]
        if positive and count > 1:
            drawn[1] = np.abs(drawn[1])
        return drawn[0] if count == 1 else tuple(drawn)

    initial = state(parts) if choose.chance(50) else None
    d_final = None
    if choose.chance(50):
        # The stabiliser of mlstm's exponential gate has no gradient.
        d_final = (*state(2), None) if parts == 3 else state(parts)
    d_o = draw(rng, (*rows, heads_v, dv), dtype)
    return LinearCase(op, tensors, d_o, initial, d_final, options)
