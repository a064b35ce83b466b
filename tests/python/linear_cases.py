"""What the tests of the linear operators share: every operator with its tensors and variants, how
inputs are drawn, how a call is made and judged."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
from harness import BFLOAT16

import onchip
from onchip.oracle import linear_compare
from onchip.oracle.linear_cases import NO_MATRIX, SCANS, SHORT_KEYS, TENSORS
from onchip.oracle.linear_compare import parts_of

# Each is forced by name, for the operators that it takes; None: all.
SCALAR_DECAY = (
    "linear_attention",
    "retention",
    "lightning_attention",
    "simple_gla",
    "mamba2",
    "mlstm",
)
DELTA_RULES = ("delta_rule", "gated_delta_rule", "kda", "comba", "gdn2", "gated_delta_product")
BACKENDS: Mapping = {"reference": None, "cpu": (*SCALAR_DECAY, *DELTA_RULES)}
DTYPES = [np.float64, np.float32, np.float16, BFLOAT16]

CONSTANT_SHAPES = ("head", "head_value", "head_key", "per_channel", "per_channel_key")
KEYWORDS = ("D", "z", "A_log", "dt_bias", "delta_bias")  # never positional


class Variant(NamedTuple):
    op: str
    id: str
    options: Mapping = MappingProxyType({})
    without: tuple = ()  # tensors left out
    shapes: Mapping = MappingProxyType({})  # in place of those above
    parts: int = 1  # of the state
    positive: bool = False  # queries and keys, so that no denominator is near 0

    def tensors(self):
        return {
            name: self.shapes.get(name, shape)
            for name, shape in TENSORS[self.op].items()
            if name not in self.without
        }

    @property
    def each(self):
        """Rows a token of k, v and beta."""
        return self.options.get("num_householder", 1)

    def layout(self, options):
        return options.get("state_layout", "vk" if self.op in ("mamba1", "mamba2") else "kv")

    def with_layout(self, layout):
        """The option, where the operator has it."""
        return {} if self.op in NO_MATRIX else dict(state_layout=layout)

    @property
    def values(self):
        """The name of what is written."""
        return next(name for name in ("x", "v", "u") if name in TENSORS[self.op])


VARIANTS = [
    Variant("linear_attention", "plain"),
    Variant("linear_attention", "normalised", dict(normalize=True), parts=2, positive=True),
    Variant("retention", "plain"),
    Variant("lightning_attention", "plain"),
    Variant("simple_gla", "plain"),
    Variant("simple_gla", "head", shapes={"log_decay": "head"}),
    Variant("simple_gla", "no_decay", without=("log_decay",)),
    Variant("mamba2", "plain", without=("D", "z", "dt_bias")),
    Variant("mamba2", "full"),
    Variant("mamba2", "limits", dict(dt_limit=(0.3, 1.1)), shapes={"D": "head_value"}),
    Variant("mamba2", "linear_dt", dict(dt_softplus=False, dt_limit=(0.0, 9.0)), without=("z",)),
    Variant("mlstm", "exp", parts=3),
    Variant("mlstm", "exp_eps", dict(eps=0.25), parts=3),
    Variant("mlstm", "sigmoid", dict(gate="sigmoid")),
    Variant("mlstm", "sigmoid_normalised", dict(gate="sigmoid", normalize=True, eps=0.1), parts=2),
    Variant("gla", "plain"),
    Variant("rwkv6", "plain"),
    Variant("hgrn2", "plain"),
    Variant("delta_rule", "plain"),
    Variant("delta_rule", "l2norm", dict(qk_l2norm=True)),
    Variant("gated_delta_rule", "plain", without=("A_log", "dt_bias")),
    Variant("gated_delta_rule", "no_decay", without=("log_decay", "A_log", "dt_bias")),
    Variant("gated_delta_rule", "head", without=("A_log", "dt_bias"), shapes={"log_decay": "head"}),
    Variant("gated_delta_rule", "raw", dict(qk_l2norm=True)),
    Variant("gated_delta_rule", "raw_negative", dict(allow_neg_eigval=True), without=("dt_bias",)),
    Variant("gated_delta_rule", "bounded", dict(lower_bound=-5.0, qk_l2norm=True)),
    Variant("kda", "plain", dict(qk_l2norm=True), without=("A_log", "dt_bias")),
    Variant("kda", "raw", dict(allow_neg_eigval=True)),
    Variant("kda", "bounded", dict(lower_bound=-5.0, qk_l2norm=True)),
    Variant("comba", "plain"),
    Variant("comba", "no_decay", dict(qk_l2norm=True), without=("log_decay",)),
    Variant("gdn2", "plain"),
    Variant("gdn2", "l2norm", dict(qk_l2norm=True)),
    Variant("gated_delta_product", "one", dict(num_householder=1)),
    Variant("gated_delta_product", "two", dict(num_householder=2, qk_l2norm=True)),
    Variant("gated_delta_product", "three", dict(num_householder=3), without=("log_decay",)),
    Variant("rwkv7", "plain"),
    Variant("iplr", "plain"),
    Variant("gsa", "plain", parts=2),
    Variant("hgrn", "plain"),
    Variant("mamba1", "full"),
    Variant(
        "mamba1",
        "one_group",
        without=("D", "z", "delta_bias"),
        shapes={"B": "one_group", "C": "one_group"},
    ),
    Variant("mamba1", "linear_delta", dict(delta_softplus=False), without=("z",)),
    Variant("rwkv4", "plain", parts=3, positive=True),
]


def variant_id(variant):
    return f"{variant.op}-{variant.id}"


def calls_of(variants):
    """(backend, variant) for every backend that takes it."""
    return [
        (backend, variant)
        for backend, taken in BACKENDS.items()
        for variant in variants
        if taken is None or variant.op in taken
    ]


def call_id(value):
    return value if isinstance(value, str) else variant_id(value)


every_call = pytest.mark.parametrize(("on", "variant"), calls_of(VARIANTS), ids=call_id)


def calls_with(**properties):
    """The calls of the variants with these operators (op=(..)) or state parts (parts=..)."""
    chosen = [
        variant
        for variant in VARIANTS
        if variant.op in properties.get("op", (variant.op,))
        and variant.parts == properties.get("parts", variant.parts)
    ]
    return pytest.mark.parametrize(("on", "variant"), calls_of(chosen), ids=call_id)


class Sizes(NamedTuple):
    batch: int = 2
    length: int = 5
    heads_k: int = 2
    heads_v: int = 4
    dk: int = 3
    dv: int = 2
    slots: int = 4

    @property
    def channels(self):
        """Of a scan."""
        return self.heads_v * self.dv


def _shape(kind, s, lead, each, is_step):
    rows = {
        "key": (s.heads_k, s.dk),
        "value": (s.heads_v, s.dv),
        "scalar": (s.heads_v,),
        "channel": (s.heads_v, s.dk),
        "slots": (s.heads_v, s.slots),
        "width": (s.channels,),
        "groups": (s.heads_k, s.dk),
        "one_group": (s.dk,),
    }
    if kind.endswith("_rows"):
        lead = (*lead, each) if is_step else (*lead[:-1], lead[-1] * each)
        kind = kind.removesuffix("_rows")
    if kind in rows:
        return (*lead, *rows[kind])
    constants = {
        "head": (s.heads_v,),
        "head_value": (s.heads_v, s.dv),
        "head_key": (s.heads_v, s.dk),
        "per_channel": (s.channels,),
        "per_channel_key": (s.channels, s.dk),
    }
    return constants[kind]


def _values(rng, variant, name, shape):
    """Keys of length about 1/2 and gates in their range: no recurrence grows."""
    x = rng.standard_normal(shape)
    raw = "A_log" in variant.tensors()
    if name == "log_decay" and not raw:
        return -np.abs(x) * 0.5
    if name == "beta" and not raw:
        return 1 / (1 + np.exp(-x))
    if name == "b" and variant.op == "gdn2":
        return 1 / (1 + np.exp(-x))
    if name in ("k", "p", "a", "b") and variant.op in SHORT_KEYS:
        return 0.5 * x / np.sqrt(max(shape[-1], 1))
    if name == "A_log":
        return 0.3 * x
    if name == "A":
        return -np.exp(0.5 * x)
    if name == "f":
        return x + 1.5
    if name in ("delta", "delta_bias") and not variant.options.get("delta_softplus", True):
        return np.abs(x)  # a step back in time would grow
    if variant.positive and name in ("q", "k") and variant.op != "rwkv4":
        return np.abs(x) + 0.01
    return x


def draw(rng, variant, sizes=None, dtype=np.float64, lead=None, is_step=False):
    """Tensors by name, rounded to the dtype; constants and gates too. `lead`: the tokens' axes."""
    s = sizes or Sizes()
    lead = (s.batch, s.length) if lead is None else lead
    return {
        name: _values(rng, variant, name, _shape(kind, s, lead, variant.each, is_step)).astype(
            dtype
        )
        for name, kind in variant.tensors().items()
    }


def draw_state(rng, variant, sizes, count, dtype=np.float64, layout="kv"):
    """A state of `count` sequences: an array, or a tuple of them."""
    dtype = np.float64 if dtype == np.float64 else np.float32
    s = sizes
    matrix = (s.dk, s.dv) if layout == "kv" else (s.dv, s.dk)
    shapes = [(count, s.heads_v, *matrix), (count, s.heads_v, s.dk), (count, s.heads_v)]
    if variant.op == "gsa":
        pair = ((s.dk, s.slots), (s.slots, s.dv))
        shapes = [(count, s.heads_v, *(p if layout == "kv" else p[::-1])) for p in pair]
    if variant.op in SCANS:
        shapes = [(count, s.channels)] * 3
    if variant.op == "mamba1":
        pair = (s.dk, s.channels)
        shapes = [(count, *(pair if layout == "kv" else pair[::-1]))]
    parts = tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes[: variant.parts])
    if variant.positive:
        parts = (parts[0], np.abs(parts[1]), *parts[2:])
    return parts if len(parts) > 1 else parts[0]


def empty_state(variant, like):
    """What no initial state means, in the shapes of a state."""
    parts = tuple(np.zeros_like(part) for part in parts_of(like))
    if variant.op == "rwkv4":
        parts = (*parts[:2], np.full_like(parts[2], -np.inf))
    return parts if len(parts) > 1 else parts[0]


def of_head(kind, x, h, sizes):
    """A tensor's part of value head h, where there are as many key heads; of a scan's group."""
    channels = slice(h * sizes.dv, (h + 1) * sizes.dv)
    if kind in ("width", "per_channel"):
        return x[..., channels]
    if kind == "per_channel_key":
        return x[channels]
    if kind == "one_group":
        return x
    if kind in ("scalar", "scalar_rows", "head"):
        return x[..., h : h + 1]
    return x[..., h : h + 1, :]


def _split(variant, tensors):
    """Positional tensors (None for those left out) and keyword-only ones."""
    positional = [tensors.get(name) for name in TENSORS[variant.op] if name not in KEYWORDS]
    return positional, {name: tensors[name] for name in KEYWORDS if name in tensors}


def forward(backend, variant, tensors, **options):
    positional, keyword = _split(variant, tensors)
    function = getattr(onchip.ops, f"{variant.op}_forward")
    return function(*positional, **keyword, **variant.options, **options, backend=backend)


def backward(backend, variant, d_o, tensors, **options):
    positional, keyword = _split(variant, tensors)
    function = getattr(onchip.ops, f"{variant.op}_backward")
    return function(d_o, *positional, **keyword, **variant.options, **options, backend=backend)


def step(backend, variant, tensors, **options):
    positional, keyword = _split(variant, tensors)
    function = getattr(onchip.ops, f"{variant.op}_step")
    return function(*positional, **keyword, **variant.options, **options, backend=backend)


def output_shape(variant, tensors):
    return linear_compare.output_shape(tensors)


def dtype_of(variant, tensors):
    return tensors[variant.values].dtype


def d_final_of(rng, variant, final):
    """A gradient for the final state: a stabiliser has none."""
    parts = tuple(rng.standard_normal(p.shape).astype(p.dtype) for p in parts_of(final)[:2])
    if variant.parts == 3:
        return (*parts, None)
    return parts if len(parts) > 1 else parts[0]


def rows_of(variant, tensors):
    """Names of the tensors that have a row a token, or several."""
    kinds = variant.tensors()
    return [name for name in tensors if kinds[name] not in CONSTANT_SHAPES]


def with_rows(variant, tensors, change):
    """The same call with every tensor of rows changed."""
    rows = rows_of(variant, tensors)
    return {name: change(x) if name in rows else x for name, x in tensors.items()}


def with_tokens(variant, tensors, begin, end, axis=1):
    """The same call on tokens begin to end."""
    kinds = variant.tensors()

    def cut(name, x):
        each = variant.each if kinds[name].endswith("_rows") else 1
        span = slice(begin * each, end * each)
        return x[(slice(None),) * axis + (span,)]

    rows = rows_of(variant, tensors)
    return {name: cut(name, x) if name in rows else x for name, x in tensors.items()}


def token(variant, tensors, t):
    """The tensors of a step: token t without its axis."""
    kinds = variant.tensors()

    def take(name, x):
        if not kinds[name].endswith("_rows"):
            return x[:, t]
        return x[:, t * variant.each : (t + 1) * variant.each]

    rows = rows_of(variant, tensors)
    return {name: take(name, x) if name in rows else x for name, x in tensors.items()}


def exact(x):
    return None if x is None else np.asarray(x).astype(np.float64)


def exact_state(state):
    parts = tuple(exact(part) for part in parts_of(state))
    return None if not parts else parts if isinstance(state, tuple) else parts[0]


def check_forward(backend, variant, tensors, *, initial_state=None, **options):
    """Run, judge against the plain loop over tokens, return (o, final state)."""
    o, final = forward(
        backend,
        variant,
        tensors,
        initial_state=initial_state,
        output_final_state=True,
        **options,
    )
    plain = {k: v for k, v in options.items() if k not in ("chunk_len", "check")}
    linear_compare.judge_forward(
        variant.op, (o, final), tensors, initial_state=initial_state, **variant.options, **plain
    )
    return o, final


def check_backward(backend, variant, d_o, tensors, *, initial_state=None, **options):
    """Run, judge against the reference in float64 (which test_linear_gradients.py holds against
    differences), return the gradients."""
    got = backward(backend, variant, d_o, tensors, initial_state=initial_state, **options)
    d_final = options.pop("d_final_state", None)
    want = backward(
        "reference",
        variant,
        exact(d_o),
        {name: exact(x) for name, x in tensors.items()},
        initial_state=exact_state(initial_state),
        d_final_state=exact_state(d_final),
        **options,
    )
    linear_compare.judge_gradients(got, want, tensors, dtype_of(variant, tensors))
    return got
