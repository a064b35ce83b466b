"""Random calls of the linear operators: any shapes, packed or not, states of any layout, the
operators' own options."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .cases import DTYPES, Chooser, Integer, described, draw

# Tensors in order, by shape: "key" rows [Hk, dk], "value" rows [Hv, dv], "scalar" rows [Hv],
# "channel" rows [Hv, dk], "slots" rows [Hv, M]; "_rows": num_householder of them a token; "head"
# [Hv], "head_key" [Hv, dk]. Of scans: "width" rows [D], "groups" rows [groups, dk], or [dk] for all
# channels, "per_channel" [D], "per_channel_key" [D, dk].
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
    "hgrn": {"x": "width", "log_decay": "width"},
    "mamba1": {
        "u": "width",
        "delta": "width",
        "A": "per_channel_key",
        "B": "groups",
        "C": "groups",
        "D": "per_channel",
        "z": "width",
        "delta_bias": "per_channel",
    },
    "rwkv4": {"k": "width", "v": "width", "log_decay": "per_channel", "u": "per_channel"},
}
SCANS = ("hgrn", "mamba1", "rwkv4")
NO_MATRIX = ("hgrn", "rwkv4")  # no state_layout: their states are vectors

OPTIONAL = {
    "simple_gla": ("log_decay",),
    "mamba1": ("D", "z", "delta_bias"),
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
        initial = "" if self.initial_state is None else ", initial_state"
        return _described(self.tensors, initial, self.options)

    @property
    def dtype(self):
        return self.d_o.dtype

    def map_arrays(self, change):
        """The same case with every array x replaced by change(x)."""
        return replace(
            self,
            tensors=_changed(change, self.tensors),
            d_o=change(self.d_o),
            initial_state=_changed(change, self.initial_state),
            d_final_state=_changed(change, self.d_final_state),
            options=_changed(change, self.options),
        )


@dataclass(frozen=True)
class LinearStepCase:
    op: str
    tensors: dict  # of one token: no time axis
    state: Any  # the pool, an array or a tuple of them
    state_indices: np.ndarray | None
    options: dict = field(repr=False)

    def __repr__(self):
        dtypes = "/".join(str(part.dtype) for part in _parts(self.state))
        slots = f", {len(_parts(self.state)[0])} slots of {dtypes}, {described(self.state_indices)}"
        return _described(self.tensors, slots, self.options)

    def map_arrays(self, change):
        """The same case with every array x replaced by change(x)."""
        return replace(
            self,
            tensors=_changed(change, self.tensors),
            state=_changed(change, self.state),
            state_indices=_changed(change, self.state_indices),
        )


def _described(tensors: dict, states: str, options: dict) -> str:
    named = ", ".join(f"{name}={described(x)}" for name, x in tensors.items())
    return f"{named}{states}, { {name: described(value) for name, value in options.items()} }"


def _changed(change: Any, value: Any) -> Any:
    """Every array in the value replaced."""
    if isinstance(value, tuple) and any(isinstance(x, np.ndarray) for x in value):
        return tuple(_changed(change, x) for x in value)
    if isinstance(value, dict):
        return {name: _changed(change, x) for name, x in value.items()}
    return change(value) if isinstance(value, np.ndarray) else value


def _parts(state: Any) -> tuple:
    return state if isinstance(state, tuple) else (state,)


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
    if op == "mamba1":
        return ({"delta_softplus": False} if choose.chance(30) else {}), 1, False
    if op == "rwkv4":
        return {}, 3, True
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
    elif positive and name in ("q", "k") and op != "rwkv4":
        x = np.abs(x) + 0.01
    return x


class _Drawn:
    """What the cases of forward and backward and those of a step have in common: sizes, options
    and tensors whose rows lie in these axes."""

    def __init__(self, op: str, choose: Chooser, dtypes: Sequence[Any]) -> None:
        self.op, self.choose = op, choose
        self.dtype = np.dtype(choose.pick(dtypes))
        self.wide = np.dtype(np.float64 if self.dtype == np.float64 else np.float32)
        self.gate_dtype = choose.pick([self.dtype, self.wide])
        self.heads_k = choose.integer(1, 2)
        self.heads_v = self.heads_k * choose.integer(1, 3)
        self.dk, self.dv = choose.integer(1, 40), choose.integer(1, 40)
        self.slots = choose.integer(1, 20)
        self.options, self.parts, self.positive = _own_options(op, choose)
        if self.positive:
            # Of one channel, keys drop out of the quotient: their gradients are rounding alone.
            self.dk, self.dv = max(self.dk, 4), max(self.dv, 4)
        if choose.chance(25):
            self.options["scale"] = choose.pick([1.0, 0.1])
        self.layout = choose.pick(["kv", "vk"])
        if op not in NO_MATRIX:
            self.options["state_layout"] = self.layout

    @property
    def channels(self) -> int:
        return self.heads_v * self.dv

    def output(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        return (*rows, self.channels) if self.op in SCANS else (*rows, self.heads_v, self.dv)

    def tensors(self, rows: tuple[int, ...], more_rows: tuple[int, ...]) -> dict[str, Any]:
        """`more_rows`: the rows' axes where a token has several."""
        heads_k, heads_v, dk, dv = self.heads_k, self.heads_v, self.dk, self.dv
        choose, op = self.choose, self.op
        shapes = {
            "key": (*rows, heads_k, dk),
            "value": (*rows, heads_v, dv),
            "scalar": (*rows, heads_v),
            "channel": (*rows, heads_v, dk),
            "slots": (*rows, heads_v, self.slots),
            "key_rows": (*more_rows, heads_k, dk),
            "value_rows": (*more_rows, heads_v, dv),
            "scalar_rows": (*more_rows, heads_v),
            "head": (heads_v,),
            "head_key": (heads_v, dk),
            "width": (*rows, self.channels),
            "groups": (*rows, *choose.pick([(), (heads_k,)]), dk),
            "per_channel": (self.channels,),
            "per_channel_key": (self.channels, dk),
        }
        raw = op in RAW_GATES and choose.chance(50)
        if raw:
            self.options |= _raw_options(choose)
        tensors = {}
        for name, kind in TENSORS[op].items():
            if name in OPTIONAL.get(op, ()) and choose.chance(40):
                continue
            if name == "A_log" and not raw:
                continue
            if name == "dt_bias" and op in RAW_GATES and not (raw and choose.chance(70)):
                continue
            operand = name in ("q", "k", "v", "r", "x", "B", "C", "z") or (op, name) == (
                "mamba1",
                "u",
            )
            x = _values(choose.rng, op, name, shapes[kind], self.positive, raw)
            if op == "mamba1" and name == "delta" and not self.options.get("delta_softplus", True):
                x = np.abs(x)  # a step back in time would grow
            if name == "delta_bias":
                x = np.abs(x)
            tensors[name] = x.astype(self.dtype if operand else self.gate_dtype)
        return tensors

    def state(self, count: int, parts: int, dtype: Any) -> Any:
        """Of `count` sequences."""
        key, value = self.dk, self.dv
        pairs = [(key, value)]
        if self.op == "gsa":
            pairs = [(key, self.slots), (self.slots, value)]
        shapes: list[tuple[int, ...]] = [
            (count, self.heads_v, *(p if self.layout == "kv" else p[::-1])) for p in pairs
        ]
        shapes += [(count, self.heads_v, key), (count, self.heads_v)]
        if self.op in SCANS:
            shapes = [(count, self.channels)] * 3
        if self.op == "mamba1":
            pair = (key, self.channels)
            shapes = [(count, *(pair if self.layout == "kv" else pair[::-1]))]
        drawn = [draw(self.choose.rng, shape, dtype) for shape in shapes[:parts]]
        if self.positive and parts > 1:
            drawn[1] = np.abs(drawn[1])
        return drawn[0] if parts == 1 else tuple(drawn)


def linear_case(
    op: str, integer: Integer, dtypes: Sequence[Any] = DTYPES, longest: int | None = None
) -> LinearCase:
    choose = Chooser(integer)
    rng = choose.rng
    if longest is None:
        # Within a chunk, about one, over a few.
        longest = choose.pick([5, 70, 200])
    drawn = _Drawn(op, choose, dtypes)
    options, wide = drawn.options, drawn.wide
    num_seqs = integer(1, 3)
    if choose.chance(40):
        lengths = rng.integers(0, longest + 1, num_seqs)
        rows: tuple[int, ...] = (int(lengths.sum()) + integer(0, 3),)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        options["cu_seqlens"] = starts.astype(choose.pick([np.int32, np.int64]))
    else:
        length = integer(1, longest)
        rows, lengths = (num_seqs, length), np.full(num_seqs, length)
    if choose.chance(25):
        options["seqlens"] = rng.integers(0, lengths + 1).astype(np.int32)
    if choose.chance(40):
        options["chunk_len"] = choose.pick([16, 64, 128])

    each = options.get("num_householder", 1)
    tensors = drawn.tensors(rows, (*rows[:-1], rows[-1] * each))
    # The quotient of a first token's sums without a state depends on neither query nor key.
    carried = choose.chance(50) or drawn.positive
    initial = drawn.state(num_seqs, drawn.parts, wide) if carried else None
    d_final = None
    if choose.chance(50):
        # A stabiliser has no gradient.
        d_final = drawn.state(num_seqs, min(drawn.parts, 2), wide)
        d_final = (*d_final, None) if drawn.parts == 3 else d_final
    d_o = draw(rng, drawn.output(rows), drawn.dtype)
    return LinearCase(op, tensors, d_o, initial, d_final, options)


def linear_step_case(
    op: str, integer: Integer, dtypes: Sequence[Any] = DTYPES, longest: int | None = None
) -> LinearStepCase:
    """One token for each row of a batch (`longest` says nothing here), from a pool of any float
    dtype that may have more slots than rows."""
    choose = Chooser(integer)
    drawn = _Drawn(op, choose, dtypes)
    batch = integer(1, 4)
    each = drawn.options.get("num_householder", 1)
    tensors = drawn.tensors((batch,), (batch, each))
    indices, slots = None, batch
    if choose.chance(60):
        slots = batch + integer(0, 3)
        indices = choose.rng.permutation(slots)[:batch].astype(np.int32)
        indices[choose.rng.random(batch) < 0.2] = -1
    narrow = choose.pick(["float32", "float32", "float16", "bfloat16"])
    stored = drawn.wide if drawn.wide == np.float64 else np.dtype(narrow)
    state = drawn.state(slots, drawn.parts, stored)
    return LinearStepCase(op, tensors, state, indices, drawn.options)
