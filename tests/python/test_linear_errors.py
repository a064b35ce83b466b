"""Refused calls of the linear operators: InvalidArgument that names operator, argument, got and
wanted, on every backend alike, before anything is written."""

import re

import numpy as np
import pytest
from linear_cases import (
    BACKENDS,
    KEYWORDS,
    TENSORS,
    VARIANTS,
    Sizes,
    draw,
    draw_state,
    forward,
    step,
    variant_id,
)

import onchip

GLA = next(v for v in VARIANTS if v.op == "simple_gla")
MLSTM = next(v for v in VARIANTS if v.op == "mlstm")
SIZES = Sizes()


def base(variant=GLA, lead=None):
    return draw(np.random.default_rng(1), variant, SIZES, np.float32, lead)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


# Name: (argument that the message must name, a tensor or option to change).
DENSE = {
    "q of rank 3": ("q", dict(q=zeros(5, 2, 3))),
    "q of rank 5": ("q", dict(q=zeros(1, 2, 5, 2, 3))),
    "q of integers": ("q", dict(q=zeros(2, 5, 2, 3, dtype=np.int32))),
    "k of another length": ("k", dict(k=zeros(2, 6, 2, 3))),
    "k of another dtype": ("k", dict(k=zeros(2, 5, 2, 3, dtype=np.float16))),
    "k of value heads": ("k", dict(k=zeros(2, 5, 4, 3))),
    "dk of 257": ("q", dict(q=zeros(2, 5, 2, 257), k=zeros(2, 5, 2, 257))),
    "dv of 513": ("v", dict(v=zeros(2, 5, 4, 513))),
    "v of heads that do not divide": ("v", dict(v=zeros(2, 5, 3, 2))),
    "v of fewer heads": ("v", dict(v=zeros(2, 5, 1, 2))),
    "v of another batch": ("v", dict(v=zeros(1, 5, 4, 2))),
    "log_decay of a channel": ("log_decay", dict(log_decay=zeros(2, 5, 4, 3))),
    "log_decay of key heads": ("log_decay", dict(log_decay=zeros(2, 5, 2))),
    "log_decay a head of key heads": ("log_decay", dict(log_decay=zeros(2))),
    "log_decay of integers": ("log_decay", dict(log_decay=zeros(2, 5, 4, dtype=np.int64))),
    "initial_state transposed": ("initial_state", dict(initial_state=zeros(2, 4, 2, 3))),
    "initial_state of key heads": ("initial_state", dict(initial_state=zeros(2, 2, 3, 2))),
    "initial_state of one sequence": ("initial_state", dict(initial_state=zeros(1, 4, 3, 2))),
    "initial_state of float64": (
        "initial_state",
        dict(initial_state=zeros(2, 4, 3, 2, dtype=np.float64)),
    ),
    "initial_state of float16": (
        "initial_state",
        dict(initial_state=zeros(2, 4, 3, 2, dtype=np.float16)),
    ),
    "initial_state of two parts": (
        "initial_state[1]",
        dict(initial_state=(zeros(2, 4, 3, 2), zeros(2, 4, 3))),
    ),
    "initial_state of four parts": ("initial_state", dict(initial_state=(None,) * 4)),
    "scale nan": ("scale", dict(scale=float("nan"))),
    "scale inf": ("scale", dict(scale=float("inf"))),
    "chunk_len 8": ("chunk_len", dict(chunk_len=8)),
    "chunk_len negative": ("chunk_len", dict(chunk_len=-16)),
    "state_layout unknown": ("state_layout", dict(state_layout="dkdv")),
    "check of two": ("check", dict(check=2)),
    "backend unknown": ("backend", dict(backend="numpy")),
    "cu_seqlens on dense tensors": ("q", dict(cu_seqlens=[0, 5])),
    "seqlens too long": ("seqlens[1]", dict(seqlens=[5, 6])),
    "seqlens negative": ("seqlens[0]", dict(seqlens=[-1, 5])),
    "seqlens of three": ("seqlens", dict(seqlens=[1, 2, 3])),
    "seqlens of floats": ("seqlens", dict(seqlens=np.zeros(2))),
}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("on", [None, *BACKENDS], ids=str)
def test_refused(name, on):
    argument, change = DENSE[name]
    call = dict(base(), backend=on) | change
    with pytest.raises(onchip.InvalidArgument) as refusal:
        onchip.ops.simple_gla_forward(**call)
    message = str(refusal.value)
    assert message.startswith(f"simple_gla_forward: {argument}: got "), message
    assert "wanted" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(v=zeros(2, 5, 5, 2)), "v: got 5 heads, .* nearest legal: 6"),
        (dict(chunk_len=31), "chunk_len: got 31, .* nearest legal: 32"),
        (dict(chunk_len=-3), "chunk_len: got -3, .* nearest legal: 16"),
        (dict(v=zeros(2, 5, 4, 600)), "v: got dv = 600, wanted dv at most 512; nearest legal: 512"),
    ],
    ids=str,
)
def test_the_nearest_legal_choice_is_named(change, words):
    with pytest.raises(onchip.InvalidArgument, match=f"^simple_gla_forward: {words}$"):
        onchip.ops.simple_gla_forward(**(base() | change))


def test_the_widest_heads():
    sizes = Sizes(batch=1, length=3, heads_k=1, heads_v=1, dk=256, dv=512)
    tensors = draw(np.random.default_rng(4), GLA, sizes, np.float32, None)
    for on in BACKENDS:
        o, _ = onchip.ops.simple_gla_forward(**tensors, backend=on)
        assert o.shape == (1, 3, 1, 512) and np.isfinite(o).all()


PACKED = {
    "cu_seqlens that falls": ("cu_seqlens[2]", dict(cu_seqlens=[0, 7, 3, 10])),
    "cu_seqlens past the end": ("cu_seqlens[1]", dict(cu_seqlens=[0, 11])),
    "cu_seqlens negative": ("cu_seqlens[0]", dict(cu_seqlens=[-1, 10])),
    "cu_seqlens empty": ("cu_seqlens", dict(cu_seqlens=[])),
    "states of another count": (
        "initial_state",
        dict(cu_seqlens=[0, 4, 10], initial_state=zeros(3, 4, 3, 2)),
    ),
    "batch axis": ("q", dict(cu_seqlens=[0, 10], q=zeros(1, 10, 2, 3))),
}


@pytest.mark.parametrize("name", PACKED)
def test_refused_packed(name):
    argument, change = PACKED[name]
    call = dict(base(lead=(10,))) | change
    with pytest.raises(onchip.InvalidArgument) as refusal:
        onchip.ops.simple_gla_forward(**call)
    assert str(refusal.value).startswith(f"simple_gla_forward: {argument}: got ")


def mlstm(**change):
    return onchip.ops.mlstm_forward(**(base(MLSTM) | change))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("gate", dict(gate="relu")),
        ("normalize", dict(normalize=False)),
        ("normalize", dict(normalize=3)),
        ("eps", dict(eps=-1.0)),
        ("eps", dict(eps=0.1, gate="sigmoid")),
        ("i", dict(i=zeros(2, 5, 4, 3))),
        ("f", dict(f=None)),
        ("initial_state[1]", dict(initial_state=zeros(2, 4, 3, 2))),
        (
            "initial_state[2]",
            dict(initial_state=(zeros(2, 4, 3, 2), zeros(2, 4, 3), zeros(2, 4, 1))),
        ),
        (
            "initial_state[2]",
            dict(
                gate="sigmoid",
                normalize=True,
                initial_state=(zeros(2, 4, 3, 2), zeros(2, 4, 3), zeros(2, 4)),
            ),
        ),
    ],
)
def test_refused_by_mlstm(argument, change):
    with pytest.raises(onchip.InvalidArgument) as refusal:
        mlstm(**change)
    assert str(refusal.value).startswith(f"mlstm_forward: {argument}: got "), refusal.value


def test_the_stabiliser_has_no_gradient():
    tensors = base(MLSTM)
    state = draw_state(np.random.default_rng(2), MLSTM, SIZES, 2, np.float32)
    with pytest.raises(onchip.InvalidArgument, match=r"mlstm_backward: d_final_state\[2\]: got"):
        onchip.ops.mlstm_backward(tensors["v"], **tensors, d_final_state=state)


def mamba2(**change):
    variant = next(v for v in VARIANTS if v.op == "mamba2" and v.id == "full")
    return onchip.ops.mamba2_forward(**(base(variant) | change))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("dt_limit", dict(dt_limit=(1.0, 0.5))),
        ("dt_limit", dict(dt_limit=(1.0,))),
        ("dt_limit", dict(dt_limit=0.5)),
        ("dt_limit", dict(dt_limit=(float("nan"), 1.0))),
        ("dt_limit", dict(dt_limit="01")),
        ("dt_limit", dict(dt_limit={0.0, 1.0})),
        ("initial_state", dict(initial_state=())),
        ("A", dict(A=zeros(4, 3))),
        ("A", dict(A=zeros(2))),
        ("B", dict(B=zeros(2, 5, 4, 3))),
        ("D", dict(D=zeros(4, 3))),
        ("z", dict(z=zeros(2, 5, 4, 3))),
        ("dt_bias", dict(dt_bias=zeros(3))),
        ("dt_softplus", dict(dt_softplus="yes")),
        ("x", dict(x=zeros(2, 5, 3, 2))),
    ],
)
def test_refused_by_mamba2(argument, change):
    with pytest.raises(onchip.InvalidArgument) as refusal:
        mamba2(**change)
    assert str(refusal.value).startswith(f"mamba2_forward: {argument}: got "), refusal.value


@pytest.mark.parametrize("value", ["no", [], 2, 1.5, np.ones(2), None], ids=repr)
def test_flags_that_python_looks_at_are_checked(value):
    u, rate, rows = zeros(2, 5, 4), zeros(4, 3), zeros(2, 5, 3)
    v = zeros(2, 5, 1, 3)
    calls = {
        "simple_gla_forward: output_final_state": lambda: onchip.ops.simple_gla_forward(
            v, v, v, None, output_final_state=value
        ),
        "causal_conv1d_forward: output_final_state": lambda: onchip.ops.causal_conv1d_forward(
            u, rate, output_final_state=value
        ),
        "mamba1_forward: delta_softplus": lambda: onchip.ops.mamba1_forward(
            u, u, rate, rows, rows, delta_softplus=value
        ),
    }
    for start, call in calls.items():
        with pytest.raises(onchip.InvalidArgument) as refusal:
            call()
        assert str(refusal.value).startswith(f"{start}: got "), refusal.value


def test_flags_that_python_looks_at_are_flags():
    v = np.ones((2, 5, 1, 3), np.float32)
    for value in (True, 1, np.True_):
        assert onchip.ops.simple_gla_forward(v, v, v, None, output_final_state=value)[1] is not None
    for value in (False, 0, np.False_):
        assert onchip.ops.simple_gla_forward(v, v, v, None, output_final_state=value)[1] is None


STEP = {
    "a time axis": ("q", dict(q=zeros(2, 1, 2, 3))),
    "no state": ("state", dict(state=None)),
    "state of another batch": ("state", dict(state=zeros(3, 4, 3, 2))),
    "state of integers": ("state", dict(state=zeros(2, 4, 3, 2, dtype=np.int32))),
    "indices beyond the pool": ("state_indices[1]", dict(state_indices=[0, 2])),
    "indices below -1": ("state_indices[0]", dict(state_indices=[-2, 0])),
    "a slot twice": ("state_indices", dict(state_indices=[1, 1])),
    "indices of int64": ("state_indices", dict(state_indices=np.zeros(2, np.int64))),
    "indices of three": ("state_indices", dict(state_indices=[0, 1, -1])),
    "a state that cannot be written": ("state", dict(state="frozen")),
    "a state with gaps inside": ("state", dict(state=zeros(2, 4, 3, 4)[..., ::2])),
}


@pytest.mark.parametrize("name", STEP)
def test_refused_steps_write_nothing(name):
    argument, change = STEP[name]
    state = draw_state(np.random.default_rng(3), GLA, SIZES, 2, np.float32)
    before = state.copy()
    if isinstance(change.get("state"), str):
        state.flags.writeable = False
        change = {}
    call = dict(base(lead=(2,)), state=state) | change
    with pytest.raises(onchip.InvalidArgument) as refusal:
        onchip.ops.simple_gla_step(**call)
    assert str(refusal.value).startswith(f"simple_gla_step: {argument}: got "), refusal.value
    np.testing.assert_array_equal(state, before)


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_arguments_an_operator_does_not_have(variant):
    tensors = base(variant)
    with pytest.raises(TypeError):
        forward(None, variant, tensors, causal=True)
    with pytest.raises(TypeError):
        step(None, variant, tensors, state=None, cu_seqlens=[0, 1])


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_explain_names_the_backends(variant):
    positional = [name for name in TENSORS[variant.op] if name not in KEYWORDS]
    tensors = dict.fromkeys(positional) | base(variant)
    text = onchip.explain(f"{variant.op}_forward", **tensors, **variant.options)
    assert text.startswith(f"{variant.op}_forward: ") and "\n  reference: " in text
    specs = {
        name: x if x is None else onchip.ArraySpec(x.shape, "float32")
        for name, x in tensors.items()
    }
    assert onchip.explain(f"{variant.op}_forward", **specs, **variant.options) == text


def test_on_a_gpu_no_backend_takes_it_yet():
    q = onchip.ArraySpec((2, 5, 2, 3), "float32", "cuda")
    text = onchip.explain("retention_forward", q, q, q)
    assert "no backend takes this call" in text and "CPU tensors only" in text


# ---- scans ---------------------------------------------------------------------------------------

SCAN = {v.op: v for v in reversed(VARIANTS) if v.op in ("hgrn", "mamba1", "rwkv4")}
REFUSED_SCANS = [
    ("hgrn", "x", dict(x=zeros(2, 5, 4, 2))),
    ("hgrn", "x", dict(x=zeros(8))),
    ("hgrn", "x", dict(x=zeros(2, 5, 8, dtype=np.int32))),
    ("hgrn", "x", dict(cu_seqlens=[0, 5])),
    ("hgrn", "log_decay", dict(log_decay=zeros(8))),
    ("hgrn", "log_decay", dict(log_decay=zeros(2, 5, 7))),
    ("hgrn", "initial_state", dict(initial_state=zeros(2, 8, 1))),
    ("hgrn", "initial_state", dict(initial_state=zeros(8, 2))),
    ("hgrn", "initial_state[1]", dict(initial_state=(zeros(2, 8), zeros(2, 8)))),
    ("mamba1", "u", dict(u=zeros(2, 5, 7))),
    ("mamba1", "delta", dict(delta=zeros(2, 5, 1))),
    ("mamba1", "A", dict(A=zeros(3, 8))),
    ("mamba1", "A", dict(A=zeros(8))),
    ("mamba1", "C", dict(C=zeros(2, 5, 257), B=zeros(2, 5, 257), A=zeros(8, 257))),
    ("mamba1", "B", dict(B=zeros(2, 5, 3))),
    ("mamba1", "B", dict(B=zeros(2, 5, 2, 4))),
    ("mamba1", "B", dict(B=zeros(2, 5, 2, 3, dtype=np.float64))),
    ("mamba1", "C", dict(C=zeros(2, 3))),
    ("mamba1", "C", dict(C=zeros(2, 5, 2, 1, 3))),
    ("mamba1", "u", dict(C=zeros(2, 5, 3, 3))),
    ("mamba1", "D", dict(D=zeros(8, 1))),
    ("mamba1", "z", dict(z=zeros(2, 5, 4))),
    ("mamba1", "delta_bias", dict(delta_bias=zeros(1))),
    ("mamba1", "delta_softplus", dict(delta_softplus="yes")),
    ("mamba1", "state_layout", dict(state_layout="nd")),
    ("mamba1", "initial_state", dict(initial_state=zeros(2, 3, 8))),
    ("mamba1", "initial_state", dict(initial_state=zeros(2, 8, 3), state_layout="kv")),
    ("rwkv4", "v", dict(v=zeros(2, 5, 4, 2))),
    ("rwkv4", "k", dict(k=zeros(2, 4, 8))),
    ("rwkv4", "log_decay", dict(log_decay=zeros(2, 5, 8))),
    ("rwkv4", "u", dict(u=zeros(8, 1))),
    ("rwkv4", "initial_state[1]", dict(initial_state=zeros(2, 8))),
    ("rwkv4", "initial_state[2]", dict(initial_state=(zeros(2, 8), zeros(2, 8), zeros(2)))),
    ("rwkv4", "scale", dict(scale=float("inf"))),
]


@pytest.mark.parametrize(("op", "argument", "change"), REFUSED_SCANS)
def test_refused_by_scans(op, argument, change):
    tensors = base(SCAN[op]) | change
    with pytest.raises(onchip.InvalidArgument) as refusal:
        getattr(onchip.ops, f"{op}_forward")(**tensors)
    message = str(refusal.value)
    assert message.startswith(f"{op}_forward: {argument}: got ") and "wanted" in message, message


def test_shapes_of_scans_are_said_in_their_own_words():
    with pytest.raises(onchip.InvalidArgument, match=r"wanted \[batch, T, D\] \(no cu_seqlens\)"):
        onchip.ops.hgrn_forward(zeros(5, 8), zeros(5, 8))
    tensors = base(SCAN["mamba1"])
    for change, words in (
        (dict(A=zeros(8, 4)), r"\[D, N\] = \[8, 3\]"),
        (dict(B=zeros(2, 5, 3)), r"\[batch, T, groups, N\] = \[2, 5, 2, 3\]"),
        (dict(C=zeros(2, 5, 3, 3)), "8 channels, wanted a multiple of C's 3 groups"),
        (dict(initial_state=zeros(2, 3, 8)), r"\[num_seqs, D, N\] = \[2, 8, 3\]"),
    ):
        with pytest.raises(onchip.InvalidArgument, match=words):
            onchip.ops.mamba1_forward(**(tensors | change))


@pytest.mark.parametrize("op", ["hgrn", "rwkv4"])
def test_vectors_have_no_layout(op):
    with pytest.raises(TypeError, match="state_layout"):
        getattr(onchip.ops, f"{op}_forward")(**base(SCAN[op]), state_layout="vk")


def test_the_maximum_has_no_gradient():
    tensors = base(SCAN["rwkv4"])
    state = draw_state(np.random.default_rng(2), SCAN["rwkv4"], SIZES, 2, np.float32)
    with pytest.raises(onchip.InvalidArgument, match=r"rwkv4_backward: d_final_state\[2\]: got"):
        onchip.ops.rwkv4_backward(tensors["v"], **tensors, d_final_state=state)


def blamed(refusal):
    """The argument that a message is about."""
    return str(refusal.value).split(": ")[1]


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
@pytest.mark.parametrize("on", [None, *BACKENDS], ids=str)
def test_a_tensor_of_another_rank_is_blamed(on, variant):
    """One axis too many, in every tensor in turn."""
    tensors = base(variant)
    for name, x in tensors.items():
        with pytest.raises(onchip.InvalidArgument) as refusal:
            forward(on, variant, tensors | {name: x[..., None]})
        assert f"{variant.op}_forward: " in str(refusal.value)
        assert "got " in str(refusal.value) and "wanted " in str(refusal.value)
        # C's other rank is a legal one, groups, whose number u then does not fit to.
        groups = name == "C" and variant.id == "one_group"
        assert blamed(refusal) == ("u" if groups else name), refusal.value
        assert re.search(rf"\b{name}\b", str(refusal.value)), refusal.value


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_a_tensor_of_no_rank_is_blamed(variant):
    tensors = base(variant)
    for name in tensors:
        with pytest.raises(onchip.InvalidArgument) as refusal:
            forward(None, variant, tensors | {name: zeros()})
        assert blamed(refusal) == name, refusal.value


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_a_tensor_of_another_dtype_is_blamed(variant):
    tensors = base(variant)
    for name, x in tensors.items():
        with pytest.raises(onchip.InvalidArgument) as refusal:
            forward(None, variant, tensors | {name: x.astype(np.int32)})
        assert blamed(refusal) == name, refusal.value


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_a_tensor_of_another_size_is_named(variant):
    """One element more along each axis. Sizes are q's and v's (gsa's slots s's): where one of those
    is the odd one out, another is blamed, and the message says whose sizes it goes by."""
    tensors = base(variant)
    first = next(name for name in ("q", "r", "C", variant.values) if name in tensors)
    for name, x in tensors.items():
        for axis in range(x.ndim):
            pads = [(0, 1 if a == axis else 0) for a in range(x.ndim)]
            changed = tensors | {name: np.pad(x, pads)}
            try:
                forward(None, variant, changed)
            except onchip.InvalidArgument as error:
                message = str(error)
            else:
                # A dv of its own is legal where nothing else has it.
                assert name == variant.values and axis == x.ndim - 1, (name, axis)
                continue
            by = message.split(": ")[1]
            assert by == name or name in (first, variant.values, "s"), message
            assert re.search(rf"\b{name}\b", message), message


def test_gsas_slots_are_those_of_s():
    tensors = base(next(v for v in VARIANTS if v.op == "gsa"))
    wrong = tensors["log_decay"][..., :3]
    for change, words in (
        (dict(log_decay=tensors["log_decay"][..., None]), "log_decay: got shape [2, 5, 4, 4, 1]"),
        (dict(log_decay=wrong), "log_decay: got shape [2, 5, 4, 3]"),
        (dict(s=tensors["s"][0]), "s: got shape [5, 4, 4], wanted [batch, T, Hv, M]"),
    ):
        with pytest.raises(onchip.InvalidArgument) as refusal:
            onchip.ops.gsa_forward(**(tensors | change))
        assert str(refusal.value).startswith(f"gsa_forward: {words}"), refusal.value


@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_raw_gates_come_with_what_they_are_of(op):
    tensors = base(next(v for v in VARIANTS if v.op == op and v.id == "raw"))
    function = getattr(onchip.ops, f"{op}_forward")
    with pytest.raises(
        onchip.InvalidArgument, match=f"^{op}_forward: dt_bias: got .*, wanted A_log"
    ):
        function(**(tensors | dict(A_log=None)))
    if op == "gated_delta_rule":
        words = "log_decay: got A_log without log_decay, wanted a tensor beside A_log"
        with pytest.raises(onchip.InvalidArgument, match=f"^{op}_forward: {words}$"):
            function(**(tensors | dict(log_decay=None)))
