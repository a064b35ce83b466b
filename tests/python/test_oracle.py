"""The oracle against formulas written a second time, and against its own finite differences."""

import math

import numpy as np
import pytest

from onchip.oracle import attention
from onchip.oracle.attention import EXTENDED
from onchip.oracle.philox import dropout_keep, dropout_threshold, philox4x32_10


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, wanted):
    """The vectors published with Random123 (tests/kat_vectors)."""
    assert [int(word) for word in philox4x32_10(counter, key)] == wanted


def test_dropout_mask_one_pair_at_a_time():
    p, seed, offset, sequence, heads = 0.3, -0x123456789ABCDEF, 77, 2, 3
    keep = dropout_keep(p, (seed, offset), sequence, heads, 40, 37)
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    for h, i, j in [
        (0, 0, 0),
        (1, 7, 9),
        (2, 8, 1),
        (2, 39, 36),
        (1, 15, 16),
        (0, 16, 15),
        (1, 23, 31),
    ]:
        block_i = 8 * math.floor(i / 16) + i % 8
        block_j = 4 * math.floor(j / 16) + math.floor((j % 8) / 2)
        words = philox4x32_10((offset, sequence * heads + h, block_i, block_j), key)
        bits = sum(int(word) << (32 * n) for n, word in enumerate(words))
        field = 4 * (math.floor(i / 8) % 2) + 2 * (math.floor(j / 8) % 2) + j % 2
        drawn = (bits >> (16 * field)) & 0xFFFF
        assert keep[h, i, j] == (drawn >= dropout_threshold(p))


def test_dropout_reads_every_field_once():
    """Within 16 x 16 pairs, 32 Philox calls give 256 different fields: no two pairs share one."""
    i, j = np.meshgrid(np.arange(16), np.arange(16), indexing="ij")
    block = (8 * (i // 16) + i % 8) * 1000 + 4 * (j // 16) + (j % 8) // 2
    field = 4 * (i // 8 % 2) + 2 * (j // 8 % 2) + j % 2
    assert len(set(zip(block.ravel().tolist(), field.ravel().tolist(), strict=True))) == 256


def loops_forward(q, k, v, o):
    """One (batch, head, row) at a time, keys one after the other, sums by math.fsum."""
    batch, seqlen_q, heads_q, dim = q.shape
    seqlen_kv, heads_kv = k.shape[1], k.shape[2]
    scale = o["scale"] if o.get("scale") is not None else 1 / math.sqrt(dim)
    out = np.zeros((batch, seqlen_q, heads_q, v.shape[3]))
    lse = np.full((batch, heads_q, seqlen_q), -np.inf)
    offset = seqlen_kv - seqlen_q if o.get("alignment", "bottom_right") == "bottom_right" else 0

    segments = o.get("q_segment_ids")

    def at(array, b, h, i, j):
        index = zip((b, h, i, j), array.shape, strict=True)
        return array[tuple(0 if size == 1 else x for x, size in index)]

    for b in range(batch):
        for h in range(heads_q):
            for i in range(seqlen_q):
                logits = {}
                for j in range(seqlen_kv):
                    if o.get("causal") and j > i + offset:
                        continue
                    left, right = o.get("window", (-1, -1))
                    if (left >= 0 and j < i + offset - left) or (
                        right >= 0 and j > i + offset + right
                    ):
                        continue
                    if o.get("mask") is not None and not at(o["mask"], b, h, i, j):
                        continue
                    if segments is not None and segments[b, i] != o["kv_segment_ids"][b, j]:
                        continue
                    g = h // (heads_q // heads_kv)
                    s = scale * math.fsum(q[b, i, h, d] * k[b, j, g, d] for d in range(dim))
                    if o.get("softcap"):
                        s = o["softcap"] * math.tanh(s / o["softcap"])
                    if o.get("bias") is not None:
                        s += at(o["bias"], b, h, i, j)
                    if o.get("alibi_slopes") is not None:
                        slopes = o["alibi_slopes"]
                        slope = slopes[h] if slopes.ndim == 1 else slopes[b, h]
                        s -= slope * abs(i + offset - j)
                    if s > -math.inf:
                        logits[j] = s
                terms = list(logits.values())
                if o.get("sink") is not None:
                    terms.append(float(o["sink"][h]))
                if not terms:
                    continue
                top = max(terms)
                lse[b, h, i] = top + math.log(math.fsum(math.exp(s - top) for s in terms))
                for j, s in logits.items():
                    out[b, i, h] += math.exp(s - lse[b, h, i]) * v[b, j, h // (heads_q // heads_kv)]
    return out, lse


def random_case(seed, batch=2, seqlen_q=5, seqlen_kv=7, heads=(4, 2), dims=(3, 2)):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, seqlen_q, heads[0], dims[0]))
    k = rng.standard_normal((batch, seqlen_kv, heads[1], dims[0]))
    v = rng.standard_normal((batch, seqlen_kv, heads[1], dims[1]))
    bias = rng.standard_normal((1, heads[0], seqlen_q, seqlen_kv))
    bias[0, 1, :, 2] = -np.inf
    everything = dict(
        bias=bias,
        mask=rng.random((batch, 1, 1, seqlen_kv)) < 0.8,
        alibi_slopes=rng.random((batch, heads[0])),
        q_segment_ids=rng.integers(0, 2, (batch, seqlen_q), dtype=np.int32),
        kv_segment_ids=rng.integers(0, 2, (batch, seqlen_kv), dtype=np.int32),
        sink=rng.standard_normal(heads[0]),
        softcap=1.5,
        window=(4, 3),
    )
    return q, k, v, everything


OPTION_SETS = [
    (),
    ("scale",),
    ("causal",),
    ("causal", "top_left"),
    ("window",),
    ("window", "causal", "top_left"),
    ("softcap",),
    ("bias",),
    ("mask",),
    ("alibi_slopes",),
    ("q_segment_ids",),
    ("sink",),
    ("sink", "mask", "causal"),
    ("bias", "softcap", "window", "alibi_slopes", "sink"),
    ("bias", "mask", "q_segment_ids", "sink", "causal", "scale"),
]


def options_of(names, everything):
    chosen = {name: everything[name] for name in names if name in everything}
    if "q_segment_ids" in names:
        chosen["kv_segment_ids"] = everything["kv_segment_ids"]
    if "scale" in names:
        chosen["scale"] = -0.7
    if "causal" in names:
        chosen["causal"] = True
    if "top_left" in names:
        chosen["alignment"] = "top_left"
    return chosen


@pytest.mark.parametrize("names", OPTION_SETS, ids="+".join)
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (1, 4)])
def test_forward_is_the_formula_in_loops(names, lengths):
    q, k, v, everything = random_case(1, seqlen_q=lengths[0], seqlen_kv=lengths[1])
    options = options_of(names, everything)
    o, lse = attention.attention_forward(q, k, v, **options)
    wanted_o, wanted_lse = loops_forward(q, k, v, options)
    np.testing.assert_allclose(o, wanted_o, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-13, atol=1e-14)
    extended, _ = attention.attention_forward(q, k, v, arithmetic=EXTENDED, **options)
    assert extended.dtype == np.longdouble
    np.testing.assert_allclose(o, extended.astype(np.float64), rtol=1e-13, atol=1e-14)


def differences(loss, x, step=1e-6):
    """Central differences of a scalar function in extended precision."""
    x = x.astype(np.longdouble)
    gradient = np.zeros(x.shape, np.longdouble)
    for index in np.ndindex(x.shape):
        if not np.isfinite(x[index]):
            continue
        centre = x[index]
        x[index] = centre + step
        above = loss(x)
        x[index] = centre - step
        below = loss(x)
        x[index] = centre
        gradient[index] = (above - below) / (2 * step)
    return gradient.astype(np.float64)


@pytest.mark.parametrize(
    "names", [*OPTION_SETS, ("dropout",), ("dropout", "sink", "bias")], ids="+".join
)
def test_backward_is_the_forwards_finite_differences(names):
    q, k, v, everything = random_case(2, batch=2, seqlen_q=4, seqlen_kv=5)
    options = options_of(names, everything)
    if "dropout" in names:
        options.update(dropout_p=0.4, dropout_rng=np.array([12345, 6], np.int64))
    rng = np.random.default_rng(3)
    d_o = rng.standard_normal((*q.shape[:3], v.shape[3]))
    d_lse = rng.standard_normal((q.shape[0], q.shape[2], q.shape[1]))

    def loss(**changed):
        tensors = {"q": q, "k": k, "v": v} | {n: x for n, x in changed.items() if n in "qkv"}
        extra = {n: x for n, x in changed.items() if n not in "qkv"}
        o, lse = attention.attention_forward(**tensors, arithmetic=EXTENDED, **{**options, **extra})
        return (o * d_o).sum() + (np.where(np.isfinite(lse), lse, 0) * d_lse).sum()

    gradients = attention.attention_backward(d_o, q, k, v, d_lse=d_lse, **options)
    inputs = {"q": q, "k": k, "v": v, "bias": options.get("bias"), "sink": options.get("sink")}
    for name, x in inputs.items():
        got = getattr(gradients, f"d{name}")
        if x is None:
            assert got is None
            continue
        wanted = differences(lambda changed, name=name: loss(**{name: changed}), x)
        np.testing.assert_allclose(got, wanted, rtol=1e-8, atol=1e-9, err_msg=f"d{name}")


def packed_case(seed=5):
    rng = np.random.default_rng(seed)
    lengths_q, lengths_kv = [3, 0, 1, 6], [5, 2, 0, 4]
    slots_q, slots_kv = [4, 0, 1, 8], [5, 3, 2, 4]
    cu_q = np.concatenate([[0], np.cumsum(slots_q)]).astype(np.int32)
    cu_kv = np.concatenate([[0], np.cumsum(slots_kv)]).astype(np.int64)
    q = rng.standard_normal((cu_q[-1], 4, 3))
    k = rng.standard_normal((cu_kv[-1], 2, 3))
    v = rng.standard_normal((cu_kv[-1], 2, 5))
    options = dict(
        cu_seqlens_q=cu_q,
        cu_seqlens_kv=cu_kv,
        seqlens_q=np.array(lengths_q, np.int32),
        seqlens_kv=np.array(lengths_kv, np.int32),
        bias=rng.standard_normal((1, 4, 6, 1)),
        mask=rng.random((4, 1, 6, 5)) < 0.7,
        causal=True,
        sink=rng.standard_normal(4),
        dropout_p=0.25,
        dropout_rng=np.array([9, 1], np.int64),
    )
    return q, k, v, options


def test_packed_is_a_loop_over_sequences():
    q, k, v, options = packed_case()
    del options["dropout_p"], options["dropout_rng"]  # its mask depends on the sequence's index
    d_o = np.random.default_rng(6).standard_normal((*q.shape[:2], v.shape[2]))
    o, lse = attention.attention_forward(q, k, v, **options)
    gradients = attention.attention_backward(d_o, q, k, v, **options)
    used_q, used_kv = np.zeros(len(q), bool), np.zeros(len(k), bool)
    dbias, dsink = np.zeros_like(options["bias"]), np.zeros(4)
    for n in range(4):
        len_q, len_kv = options["seqlens_q"][n], options["seqlens_kv"][n]
        rows_q = slice(options["cu_seqlens_q"][n], options["cu_seqlens_q"][n] + len_q)
        rows_kv = slice(options["cu_seqlens_kv"][n], options["cu_seqlens_kv"][n] + len_kv)
        used_q[rows_q], used_kv[rows_kv] = True, True
        alone = dict(
            bias=options["bias"][:, :, :len_q],
            mask=options["mask"][n : n + 1, :, :len_q, :len_kv],
            causal=True,
            sink=options["sink"],
        )
        parts = (q[None, rows_q], k[None, rows_kv], v[None, rows_kv])
        wanted_o, wanted_lse = attention.attention_forward(*parts, **alone)
        np.testing.assert_allclose(o[rows_q], wanted_o[0], rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(lse[:, rows_q], wanted_lse[0], rtol=1e-13, atol=1e-14)
        wanted = attention.attention_backward(d_o[None, rows_q], *parts, **alone)
        np.testing.assert_allclose(gradients.dq[rows_q], wanted.dq[0], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(gradients.dk[rows_kv], wanted.dk[0], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(gradients.dv[rows_kv], wanted.dv[0], rtol=1e-12, atol=1e-13)
        dbias[:, :, :len_q] += wanted.dbias
        dsink += wanted.dsink
    np.testing.assert_allclose(gradients.dbias, dbias, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(gradients.dsink, dsink, rtol=1e-12, atol=1e-13)
    assert not o[~used_q].any() and np.isneginf(lse[:, ~used_q]).all()
    assert not gradients.dq[~used_q].any()
    assert not gradients.dk[~used_kv].any() and not gradients.dv[~used_kv].any()


def test_packed_backward_is_finite_differences():
    q, k, v, options = packed_case()
    d_o = np.random.default_rng(7).standard_normal((*q.shape[:2], v.shape[2]))
    gradients = attention.attention_backward(d_o, q, k, v, **options)

    def loss(bias, sink):
        changed = {**options, "bias": bias, "sink": sink}
        return (attention.attention_forward(q, k, v, arithmetic=EXTENDED, **changed)[0] * d_o).sum()

    bias, sink = options["bias"], options["sink"]
    wanted = differences(lambda x: loss(x, sink), bias)
    np.testing.assert_allclose(gradients.dbias, wanted, rtol=1e-8, atol=1e-9)
    wanted = differences(lambda x: loss(bias, x), sink)
    np.testing.assert_allclose(gradients.dsink, wanted, rtol=1e-8, atol=1e-9)


def test_excluded_pairs_add_nothing_whatever_they_hold():
    q, k, v, _ = random_case(8)
    d_o = np.random.default_rng(9).standard_normal((*q.shape[:3], v.shape[3]))
    clean_o, clean_lse = attention.attention_forward(q, k, v, causal=True)
    clean = attention.attention_backward(d_o, q, k, v, causal=True)
    k[:, 5], v[:, 5] = np.nan, np.inf  # read by rows 3 and 4 of 5 (offset 2)
    o, lse = attention.attention_forward(q, k, v, causal=True)
    gradients = attention.attention_backward(d_o, q, k, v, causal=True)
    np.testing.assert_array_equal(o[:, :3], clean_o[:, :3])
    np.testing.assert_array_equal(lse[:, :, :3], clean_lse[:, :, :3])
    assert np.isnan(o[:, 3:]).all() and np.isnan(lse[:, :, 3:]).all()
    np.testing.assert_allclose(gradients.dq[:, :3], clean.dq[:, :3], rtol=1e-13)
    assert np.isnan(gradients.dq[:, 3:]).all()
    assert np.isnan(gradients.dv[:, :5]).all(), "a NaN probability of a visible pair does spread"


def test_merge_is_one_pass():
    q, k, v, _ = random_case(10, seqlen_kv=6)
    visible = np.ones((1, 1, 5, 6), bool)
    visible[0, 0, 0, :3] = False
    visible[0, 0, 1] = False
    whole_o, whole_lse = attention.attention_forward(q, k, v, mask=visible)
    first = attention.attention_forward(q, k[:, :3], v[:, :3], mask=visible[..., :3])
    second = attention.attention_forward(q, k[:, 3:], v[:, 3:], mask=visible[..., 3:])
    o, lse = attention.merge(*first, *second)
    np.testing.assert_allclose(o, whole_o, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-13)
    assert not o[:, 1].any() and np.isneginf(lse[:, :, 1]).all()
