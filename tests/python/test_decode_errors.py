"""Refused calls of attention_decode: the argument is named, and no cache has changed."""

import numpy as np
import pytest
from harness import DECODE_BACKENDS, decode

import onchip

F4, I4 = np.float32, np.int32


def zeros(*shape, dtype=F4):
    return np.zeros(shape, dtype)


def contiguous():
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.standard_normal(shape).astype(F4)  # noqa: E731
    return dict(
        q=draw(2, 3, 4, 16),
        k_cache=draw(3, 10, 2, 16),
        v_cache=draw(3, 10, 2, 12),
        cache_seqlens=np.array([4, 8], I4),
        k_new=draw(2, 2, 2, 16),
        v_new=draw(2, 2, 2, 12),
    )


def paged():
    call = contiguous()
    call["page_table"] = np.array([[2, 0, 9], [1, 2**30, -3]], I4)
    call["cache_seqlens"] = np.array([14, 3], I4)
    return call


def rotating():
    return dict(contiguous(), rotary_cos=zeros(10, 4), rotary_sin=zeros(10, 4))


def packed():
    call = contiguous()
    for name in ("q", "k_new", "v_new"):
        call[name] = call[name].reshape(-1, *call[name].shape[2:])
    return dict(call, cu_seqlens_q=np.array([0, 3, 6], I4), cu_seqlens_kv=np.array([0, 2, 4], I4))


CALLS = dict(contiguous=contiguous, paged=paged, rotating=rotating, packed=packed)

# (call, argument that the message names, what to change)
WRONG = {
    "q of rank 3": ("contiguous", "q", dict(q=zeros(2, 4, 16))),
    "q of integers": ("contiguous", "q", dict(q=zeros(2, 3, 4, 16, dtype=I4))),
    "cache of rank 3": ("contiguous", "k_cache", dict(k_cache=zeros(3, 10, 16))),
    "cache of another dtype": (
        "contiguous",
        "k_cache",
        dict(k_cache=zeros(3, 10, 2, 16, dtype="f8")),
    ),
    "head_dim of the cache": ("contiguous", "k_cache", dict(k_cache=zeros(3, 10, 2, 15))),
    "caches of two capacities": ("contiguous", "v_cache", dict(v_cache=zeros(3, 9, 2, 12))),
    "caches of two numbers of slots": ("contiguous", "v_cache", dict(v_cache=zeros(2, 10, 2, 12))),
    "head_dim_qk of 577": (
        "contiguous",
        "q",
        dict(q=zeros(2, 3, 4, 577), k_cache=zeros(3, 10, 2, 577)),
    ),
    "head_dim_v of 513": ("contiguous", "v_cache", dict(v_cache=zeros(3, 10, 2, 513))),
    "heads that do not divide": ("contiguous", "num_heads_q", dict(q=zeros(2, 3, 5, 16))),
    "fewer slots than rows": (
        "contiguous",
        "k_cache",
        dict(k_cache=zeros(1, 10, 2, 16), v_cache=zeros(1, 10, 2, 12)),
    ),
    "no lengths": ("contiguous", "cache_seqlens", dict(cache_seqlens=None)),
    "lengths of int64": ("contiguous", "cache_seqlens", dict(cache_seqlens=np.array([4, 8]))),
    "lengths of another batch": ("contiguous", "cache_seqlens", dict(cache_seqlens=[1, 2, 3])),
    "lengths of rank 2": ("contiguous", "cache_seqlens", dict(cache_seqlens=zeros(2, 1, dtype=I4))),
    "length of no 32 bits": ("contiguous", "cache_seqlens", dict(cache_seqlens=[4, 2**31])),
    "negative length": ("contiguous", r"cache_seqlens\[0\]", dict(cache_seqlens=[-1, 2])),
    "a full cache": ("contiguous", r"cache_seqlens\[1\]", dict(cache_seqlens=[8, 9])),
    "beyond the cache": (
        "contiguous",
        r"cache_seqlens\[0\]",
        dict(cache_seqlens=[11, 1], k_new=None, v_new=None),
    ),
    "beyond the pages": ("paged", r"cache_seqlens\[0\]", dict(cache_seqlens=[29, 1])),
    "length 1 over the pages": (
        "paged",
        r"cache_seqlens\[0\]",
        dict(cache_seqlens=[31, 1], k_new=None, v_new=None),
    ),
    "more new rows than room": (
        "contiguous",
        "k_new",
        dict(k_new=zeros(2, 11, 2, 16), v_new=zeros(2, 11, 2, 12)),
    ),
    "a page that there is not": ("paged", r"page_table\[1, 1\]", dict(cache_seqlens=[14, 9])),
    "a negative page": (
        "paged",
        r"page_table\[1, 2\]",
        dict(cache_seqlens=[14, 20], page_table=np.array([[2, 0, 9], [1, 1, -3]], I4)),
    ),
    "page table of int64": ("paged", "page_table", dict(page_table=np.array([[2, 0], [1, 1]]))),
    "page table of rank 1": ("paged", "page_table", dict(page_table=zeros(2, dtype=I4))),
    "page table of another batch": ("paged", "page_table", dict(page_table=zeros(3, 3, dtype=I4))),
    "slot that there is not": ("contiguous", r"cache_slot\[1\]", dict(cache_slot=[0, 3])),
    "slot below -1": ("contiguous", r"cache_slot\[0\]", dict(cache_slot=[-2, 1])),
    "slot below -1 with pages": ("paged", r"cache_slot\[0\]", dict(cache_slot=[-2, 1])),
    "slots of another batch": ("contiguous", "cache_slot", dict(cache_slot=[0])),
    "slots of int64": ("contiguous", "cache_slot", dict(cache_slot=np.array([0, 1]))),
    "one slot for two appends": ("contiguous", r"cache_slot\[.\]", dict(cache_slot=[1, 1])),
    "a slot that another appends to": (
        "contiguous",
        r"cache_slot\[1\]",
        dict(cache_slot=[1, 1], seqlens_kv=[2, 0]),
    ),
    "one page for two appends": (
        "paged",
        r"page_table\[., .\]",
        dict(page_table=np.array([[2, 0], [0, 1]], I4)),
    ),
    "a page that another appends to": (
        "paged",
        r"page_table\[1, 0\]",
        dict(page_table=np.array([[2, 0], [0, 1]], I4), cache_seqlens=[14, 5], seqlens_kv=[2, 0]),
    ),
    "one page twice in a sequence": (
        "paged",
        r"page_table\[0, .\]",
        dict(page_table=np.array([[2, 2], [0, 1]], I4)),
    ),
    "new keys alone": ("contiguous", "v_new", dict(v_new=None)),
    "new values alone": ("contiguous", "k_new", dict(k_new=None)),
    "new keys of another dtype": (
        "contiguous",
        "k_new",
        dict(k_new=zeros(2, 2, 2, 16, dtype="f8")),
    ),
    "new keys of rank 3": ("contiguous", "k_new", dict(k_new=zeros(2, 2, 16))),
    "new keys of query heads": ("contiguous", "k_new", dict(k_new=zeros(2, 2, 4, 16))),
    "new values of another length": ("contiguous", "v_new", dict(v_new=zeros(2, 3, 2, 12))),
    "new lengths beyond the new rows": ("contiguous", r"seqlens_kv\[1\]", dict(seqlens_kv=[1, 3])),
    "new lengths without new rows": (
        "contiguous",
        "seqlens_kv",
        dict(seqlens_kv=[1, 1], k_new=None, v_new=None),
    ),
    "boundaries without new rows": ("packed", "cu_seqlens_kv", dict(k_new=None, v_new=None)),
    "boundaries beyond the new rows": (
        "packed",
        r"cu_seqlens_kv\[2\]",
        dict(cu_seqlens_kv=[0, 2, 5]),
    ),
    "boundaries of another batch": ("packed", "cache_seqlens", dict(cu_seqlens_q=[0, 6])),
    "cosines alone": ("rotating", "rotary_sin", dict(rotary_sin=None)),
    "sines alone": ("rotating", "rotary_cos", dict(rotary_cos=None)),
    "sines of another shape": ("rotating", "rotary_sin", dict(rotary_sin=zeros(10, 3))),
    "sines of another dtype": ("rotating", "rotary_sin", dict(rotary_sin=zeros(10, 4, dtype="f2"))),
    "tables of another dtype": (
        "rotating",
        "rotary_cos",
        dict(rotary_cos=zeros(10, 4, dtype="f8"), rotary_sin=zeros(10, 4, dtype="f8")),
    ),
    "more pairs than channels": (
        "rotating",
        "rotary_cos",
        dict(rotary_cos=zeros(10, 9), rotary_sin=zeros(10, 9)),
    ),
    "too few positions": (
        "rotating",
        "rotary_cos",
        dict(rotary_cos=zeros(9, 4), rotary_sin=zeros(9, 4)),
    ),
    "queries before position 0": (
        "rotating",
        r"cache_seqlens\[0\]",
        dict(cache_seqlens=[0, 8]),
    ),
    "query beyond the tables": (
        "rotating",
        r"q_positions\[1, 2\]",
        dict(q_positions=np.array([[0, 1, 2], [7, 8, 10]])),
    ),
    "negative position": (
        "rotating",
        r"q_positions\[0, 0\]",
        dict(q_positions=np.array([[-1, 1, 2], [7, 8, 9]])),
    ),
    "positions of another shape": (
        "rotating",
        "q_positions",
        dict(q_positions=zeros(2, 2, dtype=I4)),
    ),
    "positions of floats": ("rotating", "q_positions", dict(q_positions=zeros(2, 3))),
    "positions without tables": (
        "contiguous",
        "q_positions",
        dict(q_positions=zeros(2, 3, dtype=I4)),
    ),
    "interleaved without tables": (
        "contiguous",
        "rotary_interleaved",
        dict(rotary_interleaved=True),
    ),
    "interleaved by number": ("rotating", "rotary_interleaved", dict(rotary_interleaved=2)),
    "mask of the new rows": ("contiguous", "mask", dict(mask=zeros(2, 1, 3, 2, dtype=bool))),
    "bias shorter than a sequence": ("contiguous", "bias", dict(bias=zeros(1, 4, 3, 9))),
    "bias of other queries": ("contiguous", "bias", dict(bias=zeros(1, 4, 2, 10))),
    "segments shorter than a sequence": (
        "contiguous",
        "kv_segment_ids",
        dict(q_segment_ids=zeros(2, 3, dtype=I4), kv_segment_ids=zeros(2, 9, dtype=I4)),
    ),
    "segments of one side": (
        "contiguous",
        "kv_segment_ids",
        dict(q_segment_ids=zeros(2, 3, dtype=I4)),
    ),
    "sink of kv heads": ("contiguous", "sink", dict(sink=zeros(2))),
    "scale nan": ("contiguous", "scale", dict(scale=float("inf"))),
    "backend unknown": ("contiguous", "backend", dict(backend="cpus")),
}


@pytest.mark.parametrize("what", WRONG)
def test_calls_that_break_the_contract(decode_backend, what):
    call, argument, change = WRONG[what]
    arguments = {**CALLS[call](), "backend": decode_backend, **change}
    before = {name: x.copy() for name, x in arguments.items() if isinstance(x, np.ndarray)}
    for refused in (onchip.ops.attention_decode, explained):
        with pytest.raises(
            onchip.InvalidArgument, match=rf"^attention_decode: {argument}"
        ) as caught:
            refused(**arguments)
        assert "got " in str(caught.value) and "wanted " in str(caught.value)
    for name, x in before.items():
        np.testing.assert_array_equal(arguments[name], x)


def explained(**arguments):
    return onchip.explain("attention_decode", **arguments)


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_are_legal_without_the_change(decode_backend, call):
    arguments = CALLS[call]()
    assert explained(**arguments, backend=decode_backend).startswith(
        f"attention_decode: {decode_backend}"
    )
    decode(decode_backend, **arguments)


def test_outputs_and_inputs_may_not_lie_in_a_cache_that_is_written(decode_backend):
    call = contiguous()
    call["k_new"] = call["k_cache"][:2, :2]
    with pytest.raises(onchip.InvalidArgument, match="k_cache: got memory it shares with k_new"):
        decode(decode_backend, **call)
    call = contiguous()
    call["v_cache"] = call["k_cache"][..., 2:14]
    with pytest.raises(onchip.InvalidArgument, match="k_cache: got memory it shares with v_cache"):
        decode(decode_backend, **call)
    call = contiguous()
    call["k_cache"] = np.broadcast_to(call["k_cache"][:1], (3, 10, 2, 16))
    call["k_cache"].flags.writeable = True
    with pytest.raises(
        onchip.InvalidArgument, match="k_cache: got an output whose elements overlap"
    ):
        decode(decode_backend, **call)


def test_caches_that_are_only_read_may_be_anything(decode_backend):
    call = {**contiguous(), "k_new": None, "v_new": None}
    wanted = decode(decode_backend, **call)
    for name in ("k_cache", "v_cache"):
        call[name] = np.asfortranarray(call[name])
        call[name].flags.writeable = False
    again = decode(decode_backend, **call)
    np.testing.assert_array_equal(again[0], wanted[0])
    call["v_cache"] = call["k_cache"] = np.broadcast_to(zeros(16), (3, 10, 2, 16))
    assert (decode(decode_backend, **call)[0] == 0).all()


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_caches_that_cannot_be_written(decode_backend, name):
    call = contiguous()
    call[name].flags.writeable = False
    with pytest.raises(onchip.InvalidArgument, match=f"{name}: got a read-only array"):
        decode(decode_backend, **call)
    call = contiguous()
    call[name] = np.asfortranarray(call[name])
    with pytest.raises(onchip.InvalidArgument, match=f"{name}: got innermost stride"):
        decode(decode_backend, **call)


def test_new_values_beside_values_in_keys(decode_backend):
    call = contiguous()
    call["v_cache"] = call["k_cache"][..., :12]
    with pytest.raises(onchip.InvalidArgument, match="v_new: got a tensor, with v_cache inside"):
        decode(decode_backend, **call)


def test_dropout_is_no_option():
    with pytest.raises(TypeError, match="dropout_p"):
        onchip.ops.attention_decode(**contiguous(), dropout_p=0.5)


def test_tf32_is_refused_with_every_backends_reason():
    with pytest.raises(onchip.Unsupported) as caught:
        onchip.ops.attention_decode(**contiguous(), precision="tf32")
    assert all(f"{name}: " in str(caught.value) for name in DECODE_BACKENDS)


@pytest.mark.parametrize("hint", ["deterministic", "batch_invariant", "check"])
def test_promises_that_hold_anyway_are_accepted(decode_backend, hint):
    o, lse = decode(decode_backend, **contiguous())
    same = decode(decode_backend, **contiguous(), **{hint: True})
    np.testing.assert_array_equal(same[0], o)
    np.testing.assert_array_equal(same[1], lse)


def test_shapes_alone_are_explained():
    spec = onchip.ArraySpec
    text = onchip.explain(
        "attention_decode",
        spec((16, 1, 64, 128), "bfloat16"),
        spec((100000, 16, 8, 128), "bfloat16"),
        spec((100000, 16, 8, 128), "bfloat16"),
        cache_seqlens=[7] * 16,
        page_table=np.arange(32, dtype=I4).reshape(16, 2),
        k_new=spec((16, 1, 8, 128), "bfloat16"),
        v_new=spec((16, 1, 8, 128), "bfloat16"),
    )
    assert text.startswith(f"attention_decode: {DECODE_BACKENDS[-1]}\n")
    with pytest.raises(onchip.InvalidArgument, match=r"^attention_decode: cache_seqlens\[3\]"):
        onchip.explain(
            "attention_decode",
            spec((4, 1, 8, 64), "float32"),
            spec((4, 20, 8, 64), "float32"),
            spec((4, 20, 8, 64), "float32"),
            cache_seqlens=[1, 2, 3, 21],
        )
