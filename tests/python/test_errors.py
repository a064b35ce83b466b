"""Refused calls.

One that breaks the contract: InvalidArgument that names operator, argument, got and wanted, on
every backend alike, before anything is written. A legal one that a backend cannot take:
Unsupported.
"""

import numpy as np
import pytest
from harness import BACKENDS, BACKWARD_BACKENDS, BFLOAT16, backward, draw, draw_qkv, forward

import onchip

F4, I4 = np.float32, np.int32


def base(packed=False):
    rng = np.random.default_rng(1)
    shapes = ((2, 6, 4, 16), (2, 8, 2, 16), (2, 8, 2, 12))
    q, k, v = (rng.standard_normal(shape).astype(F4) for shape in shapes)
    if packed:
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        lengths = dict(
            cu_seqlens_q=np.array([0, 6, 12], I4), cu_seqlens_kv=np.array([0, 8, 16], I4)
        )
        return dict(q=q, k=k, v=v, **lengths)
    return dict(q=q, k=k, v=v)


def zeros(*shape, dtype=F4):
    return np.zeros(shape, dtype)


# (argument that the message must name, what to change in a good dense call)
DENSE = {
    "q of rank 3 without cu_seqlens": ("q", dict(q=zeros(12, 4, 16))),
    "q of rank 5": ("q", dict(q=zeros(1, 2, 6, 4, 16))),
    "k of rank 3": ("k", dict(k=zeros(16, 2, 16))),
    "batch of k": ("k", dict(k=zeros(3, 8, 2, 16))),
    "length of v": ("v", dict(v=zeros(2, 9, 2, 12))),
    "heads of v": ("v", dict(v=zeros(2, 8, 4, 12))),
    "head_dim of k": ("k", dict(k=zeros(2, 8, 2, 15))),
    "head_dim_qk of 257": ("q", dict(q=zeros(2, 6, 4, 257), k=zeros(2, 8, 2, 257))),
    "head_dim_v of 257": ("v", dict(v=zeros(2, 8, 2, 257))),
    "heads that do not divide": ("num_heads_q", dict(q=zeros(2, 6, 3, 16))),
    "more kv heads than query heads": ("num_heads_q", dict(q=zeros(2, 6, 1, 16))),
    "queries without kv heads": ("num_heads_q", dict(k=zeros(2, 8, 0, 16), v=zeros(2, 8, 0, 12))),
    "q of integers": ("q", dict(q=zeros(2, 6, 4, 16, dtype=I4))),
    "k of another dtype": ("k", dict(k=zeros(2, 8, 2, 16, dtype=np.float16))),
    "v of another dtype": ("v", dict(v=zeros(2, 8, 2, 12, dtype=np.float64))),
    "complex q": ("q", dict(q=zeros(2, 6, 4, 16, dtype=np.complex64))),
    "scale nan": ("scale", dict(scale=float("nan"))),
    "scale inf": ("scale", dict(scale=float("inf"))),
    "softcap negative": ("softcap", dict(softcap=-1.0)),
    "softcap nan": ("softcap", dict(softcap=float("nan"))),
    "softcap inf": ("softcap", dict(softcap=float("inf"))),
    "window left below -1": ("window", dict(window=(-2, 0))),
    "window right below -1": ("window", dict(window=(0, -5))),
    "window of one": ("window", dict(window=(1,))),
    "window of three": ("window", dict(window=(1, 2, 3))),
    "alignment unknown": ("alignment", dict(alignment="middle")),
    "precision unknown": ("precision", dict(precision="fp8")),
    "backend unknown": ("backend", dict(backend="cpus")),
    "bias of rank 3": ("bias", dict(bias=zeros(4, 6, 8))),
    "bias of two heads": ("bias", dict(bias=zeros(1, 2, 6, 8))),
    "bias too long": ("bias", dict(bias=zeros(1, 1, 6, 9))),
    "bias of integers": ("bias", dict(bias=zeros(1, 1, 6, 8, dtype=I4))),
    "mask of floats": ("mask", dict(mask=zeros(1, 1, 6, 8))),
    "mask of bytes": ("mask", dict(mask=zeros(1, 1, 6, 8, dtype=np.uint8))),
    "mask of the wrong batch": ("mask", dict(mask=zeros(3, 1, 6, 8, dtype=bool))),
    "mask transposed": ("mask", dict(mask=zeros(1, 1, 8, 6, dtype=bool))),
    "slopes of kv heads": ("alibi_slopes", dict(alibi_slopes=zeros(2))),
    "slopes of the wrong batch": ("alibi_slopes", dict(alibi_slopes=zeros(3, 4))),
    "slopes of rank 3": ("alibi_slopes", dict(alibi_slopes=zeros(1, 2, 4))),
    "sink of kv heads": ("sink", dict(sink=zeros(2))),
    "sink of rank 2": ("sink", dict(sink=zeros(2, 4))),
    "sink of integers": ("sink", dict(sink=zeros(4, dtype=I4))),
    "segments of one side": ("kv_segment_ids", dict(q_segment_ids=zeros(2, 6, dtype=I4))),
    "segments of the other side": ("q_segment_ids", dict(kv_segment_ids=zeros(2, 8, dtype=I4))),
    "segments of the wrong length": (
        "kv_segment_ids",
        dict(q_segment_ids=zeros(2, 6, dtype=I4), kv_segment_ids=zeros(2, 6, dtype=I4)),
    ),
    "segments of floats": (
        "q_segment_ids",
        dict(q_segment_ids=zeros(2, 6), kv_segment_ids=zeros(2, 8)),
    ),
    "segments of int64": (
        "q_segment_ids",
        dict(q_segment_ids=zeros(2, 6, dtype=np.int64), kv_segment_ids=zeros(2, 8, dtype=np.int64)),
    ),
    "dropout without state": ("dropout_rng", dict(dropout_p=0.5)),
    "dropout state of three": (
        "dropout_rng",
        dict(dropout_p=0.5, dropout_rng=zeros(3, dtype=np.int64)),
    ),
    "dropout state of int32": ("dropout_rng", dict(dropout_p=0.5, dropout_rng=zeros(2, dtype=I4))),
    "dropout of nearly everything": (
        "dropout_p",
        dict(dropout_p=1 - 2**-18, dropout_rng=zeros(2, dtype=np.int64)),
    ),
    "lengths of the wrong batch": ("seqlens_q", dict(seqlens_q=zeros(3, dtype=I4))),
    "lengths of floats": ("seqlens_kv", dict(seqlens_kv=zeros(2))),
    "kv boundaries alone": ("cu_seqlens_q", dict(cu_seqlens_kv=np.array([0, 16], I4))),
    "negative hint": ("max_seqlen_q", dict(max_seqlen_q=-7)),
}

PACKED = {
    "q of rank 4": ("q", dict(q=zeros(2, 6, 4, 16))),
    "boundaries of rank 2": ("cu_seqlens_q", dict(cu_seqlens_q=zeros(3, 1, dtype=I4))),
    "no boundary": ("cu_seqlens_q", dict(cu_seqlens_q=zeros(0, dtype=I4))),
    "boundaries of floats": ("cu_seqlens_q", dict(cu_seqlens_q=np.array([0, 6, 12], F4))),
    "boundaries of int16": ("cu_seqlens_q", dict(cu_seqlens_q=np.array([0, 6, 12], np.int16))),
    "another number of sequences": ("cu_seqlens_kv", dict(cu_seqlens_kv=np.array([0, 16], I4))),
    "bias shorter than a sequence": ("bias", dict(bias=zeros(2, 1, 5, 8))),
    "mask shorter than a sequence": ("mask", dict(mask=zeros(1, 1, 6, 7, dtype=bool))),
    "bias of the wrong batch": ("bias", dict(bias=zeros(3, 1, 6, 8))),
    "segments of rank 2": (
        "q_segment_ids",
        dict(q_segment_ids=zeros(2, 6, dtype=I4), kv_segment_ids=zeros(2, 8, dtype=I4)),
    ),
    "lengths of the wrong number": ("seqlens_kv", dict(seqlens_kv=zeros(1, dtype=I4))),
}


def assert_contract_error(error, operator, argument):
    assert isinstance(error, ValueError)
    message = str(error)
    assert message.startswith(f"{operator}: {argument}"), message
    assert "got " in message and "wanted " in message, message


@pytest.mark.parametrize("what", DENSE)
def test_dense_calls_that_break_the_contract(backend, what):
    argument, change = DENSE[what]
    arguments = {**base(), "backend": backend, **change}
    with pytest.raises(onchip.InvalidArgument) as caught:
        onchip.ops.attention_forward(**arguments)
    assert_contract_error(caught.value, "attention_forward", argument)


@pytest.mark.parametrize("what", PACKED)
def test_packed_calls_that_break_the_contract(backend, what):
    argument, change = PACKED[what]
    arguments = {**base(packed=True), "backend": backend, **change}
    with pytest.raises(onchip.InvalidArgument) as caught:
        onchip.ops.attention_forward(**arguments)
    assert_contract_error(caught.value, "attention_forward", argument)


@pytest.mark.parametrize("what", DENSE)
def test_backward_checks_the_same_contract(what):
    argument, change = DENSE[what]
    arguments = {**base(), "backend": "reference", **change}
    q, k, v = (arguments.pop(name) for name in "qkv")
    o, lse = zeros(2, 6, 4, 12), zeros(2, 4, 6)
    with pytest.raises(onchip.InvalidArgument) as caught:
        onchip.ops.attention_backward(o, q, k, v, o, lse, **arguments)
    assert_contract_error(caught.value, "attention_backward", argument)


BACKWARD = {
    "d_o of another shape": ("d_o", dict(d_o=zeros(2, 6, 4, 16))),
    "d_o of another dtype": ("d_o", dict(d_o=zeros(2, 6, 4, 12, dtype=np.float64))),
    "o of another shape": ("o", dict(o=zeros(2, 5, 4, 12))),
    "lse rows first": ("lse", dict(lse=zeros(2, 6, 4))),
    "lse of q's dtype": ("lse", dict(lse=zeros(2, 4, 6, dtype=BFLOAT16))),
    "lse of fp64": ("lse", dict(lse=zeros(2, 4, 6, dtype=np.float64))),
    "d_lse rows first": ("d_lse", dict(d_lse=zeros(2, 6, 4))),
    "d_lse of fp64": ("d_lse", dict(d_lse=zeros(2, 4, 6, dtype=np.float64))),
}


@pytest.mark.parametrize("what", BACKWARD)
def test_backward_calls_that_break_the_contract(what):
    argument, change = BACKWARD[what]
    arguments = dict(d_o=zeros(2, 6, 4, 12), o=zeros(2, 6, 4, 12), lse=zeros(2, 4, 6), **base())
    with pytest.raises(onchip.InvalidArgument) as caught:
        onchip.ops.attention_backward(**{**arguments, **change})
    assert_contract_error(caught.value, "attention_backward", argument)


MERGE = {
    "o1 of rank 2": ("o1", dict(o1=zeros(6, 4))),
    "o1 of integers": ("o1", dict(o1=zeros(2, 6, 4, 12, dtype=I4))),
    "o2 of another shape": ("o2", dict(o2=zeros(2, 6, 4, 11))),
    "o2 of another dtype": ("o2", dict(o2=zeros(2, 6, 4, 12, dtype=np.float16))),
    "lse1 rows first": ("lse1", dict(lse1=zeros(2, 6, 4))),
    "lse2 of another dtype": ("lse2", dict(lse2=zeros(2, 4, 6, dtype=np.float64))),
    "backend unknown": ("backend", dict(backend="gpu")),
}


@pytest.mark.parametrize("what", MERGE)
def test_merge_calls_that_break_the_contract(what):
    argument, change = MERGE[what]
    o, lse = zeros(2, 6, 4, 12), zeros(2, 4, 6)
    with pytest.raises(onchip.InvalidArgument) as caught:
        onchip.ops.merge(**{**dict(o1=o, lse1=lse, o2=o, lse2=lse), **change})
    assert_contract_error(caught.value, "merge", argument)


def test_the_nearest_legal_choice_is_named():
    with pytest.raises(onchip.InvalidArgument, match="reference") as caught:
        forward("cpus", **base())
    assert all(name in str(caught.value) for name in BACKENDS)


@pytest.mark.parametrize("value", [None, 3.0, "text", [[1.0]]], ids=repr)
def test_what_is_no_array_is_refused_by_name(value):
    with pytest.raises((onchip.InvalidArgument, TypeError), match=r"\bq\b"):
        onchip.ops.attention_forward(**{**base(), "q": value})


def test_options_are_keywords():
    arguments = base()
    with pytest.raises(TypeError):
        onchip.ops.attention_forward(arguments["q"], arguments["k"], arguments["v"], 0.5)
    with pytest.raises(TypeError):
        onchip.ops.attention_forward(**arguments, causl=True)


@pytest.mark.parametrize("name", sorted(set(BACKENDS) - set(BACKWARD_BACKENDS)))
def test_a_backend_without_a_backward_says_so(name):
    rng = np.random.default_rng(2)
    q, k, v = draw_qkv(rng, F4)
    o, lse = forward(name, q, k, v)
    with pytest.raises(onchip.Unsupported, match=f"{name}: ") as caught:
        backward(name, draw(rng, o.shape, F4), q, k, v, o, lse)
    assert isinstance(caught.value, NotImplementedError)
    assert str(caught.value).startswith("attention_backward")


@pytest.mark.parametrize("name", ["cuda.sm90", "cuda.sm80"])
def test_a_backend_without_the_operator_is_unsupported(name):
    """The name is a legal one: what it cannot do is no wrong argument."""
    o, lse = zeros(2, 6, 4, 12), zeros(2, 4, 6)
    with pytest.raises(onchip.Unsupported) as caught:
        onchip.ops.merge(o, lse, o, lse, backend=name)
    assert str(caught.value) == (
        "merge: the forced backend does not take this call:\n"
        f"  {name}: it does not have this operator"
    )
    text = onchip.explain("merge", o, lse, o, lse)
    assert f"\n  {name}: rejected: it does not have this operator\n" in text


def test_tf32_is_refused_with_every_backends_reason():
    arguments = base()
    with pytest.raises(onchip.Unsupported) as caught:
        onchip.ops.attention_forward(**arguments, precision="tf32")
    message = str(caught.value)
    assert message.startswith("attention_forward")
    assert all(f"{name}: " in message for name in BACKENDS), message


def test_tf32_is_for_fp32():
    arguments = {name: x.astype(np.float64) for name, x in base().items()}
    with pytest.raises(onchip.InvalidArgument, match="precision"):
        onchip.ops.attention_forward(**arguments, precision="tf32")


@pytest.mark.parametrize("hint", ["deterministic", "batch_invariant", "check"])
def test_promises_that_hold_anyway_are_accepted(backend, hint):
    arguments = base()
    o, lse = forward(backend, **arguments)
    same = forward(backend, **arguments, **{hint: True})
    np.testing.assert_array_equal(same[0], o)
    np.testing.assert_array_equal(same[1], lse)


def test_a_refused_call_leaves_the_next_one_alone():
    arguments = base()
    wanted = onchip.ops.attention_forward(**arguments)
    with pytest.raises(onchip.InvalidArgument):
        onchip.ops.attention_forward(**{**arguments, "softcap": -1.0})
    again = onchip.ops.attention_forward(**arguments)
    np.testing.assert_array_equal(again[0], wanted[0])


def test_no_backend_named_picks_one(backend):
    o, _ = onchip.ops.attention_forward(**base())
    forced_o, _ = forward(backend, **base())
    assert o.shape == forced_o.shape and o.dtype == forced_o.dtype
