"""Merging partial results.

Public reports: vllm #27491, flash-attention pull request #978, flashinfer #4051.
"""

from itertools import pairwise

import numpy as np
import pytest
from harness import DTYPES, draw, draw_qkv, dtype_name, forward

import onchip
from onchip.oracle import compare


def check_merge(merge_backend, o1, lse1, o2, lse2):
    result = onchip.ops.merge(o1, lse1, o2, lse2, backend=merge_backend)
    compare.judge_merge(result, o1, lse1, o2, lse2)
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
def test_two_halves_equal_one_pass(merge_backend, dtype, with_sink):
    q, k, v = draw_qkv(np.random.default_rng(1), dtype, 2, 4, 6, heads=(4, 2))
    mask = np.ones((1, 1, 4, 6), bool)
    mask[0, 0, 0, :3] = False  # an empty first part
    mask[0, 0, 1] = False  # two empty parts
    mask[0, 0, 2, 3:] = False  # an empty second part
    sink = np.array([0.5, -1, 3, 0], np.float32) if with_sink else None
    whole_o, whole_lse = forward(merge_backend, q, k, v, mask=mask, sink=sink)
    first = forward(merge_backend, q, k[:, :3], v[:, :3], mask=mask[..., :3], sink=sink)
    second = forward(merge_backend, q, k[:, 3:], v[:, 3:], mask=mask[..., 3:])
    for parts in [(*first, *second), (*second, *first)]:
        o, lse = check_merge(merge_backend, *parts)
        compare.assert_same_value("o", o, whole_o)
        compare.assert_same_value("lse", lse, whole_lse)
        assert not o[:, 1].astype(np.float64).any()
        if sink is None:
            assert np.isneginf(lse[:, :, 1]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("gap", [0, 30, 1e3, 1e5], ids=str)
def test_parts_of_very_different_weight(merge_backend, dtype, gap):
    rng = np.random.default_rng(2)
    o1, o2 = (draw(rng, (1, 33, 3, 20), dtype) for _ in range(2))
    lse1, lse2 = (draw(rng, (1, 3, 33), compare.lse_dtype(dtype)) for _ in range(2))
    lse1 += np.where(rng.random(lse1.shape) < 0.5, gap, -gap).astype(lse1.dtype)
    check_merge(merge_backend, o1, lse1, o2, lse2)


@pytest.mark.parametrize("value", [np.finfo(np.float32).min, -1e30, 1e30, 3e38], ids=str)
def test_huge_finite_weights(merge_backend, value):
    rng = np.random.default_rng(3)
    o1, o2 = (draw(rng, (1, 5, 1, 4), np.float32) for _ in range(2))
    lse1, lse2 = np.full((1, 1, 5), value, np.float32), np.full((1, 1, 5), value, np.float32)
    lse2[..., 2] = 0
    lse2[..., 3] = -np.inf
    check_merge(merge_backend, o1, lse1, o2, lse2)


def test_many_parts_in_any_order(merge_backend):
    q, k, v = draw_qkv(np.random.default_rng(4), np.float32, 1, 20, 90)
    whole_o, whole_lse = forward(merge_backend, q, k, v)
    cuts = [0, 1, 33, 33, 64, 90]
    parts = [forward(merge_backend, q, k[:, a:b], v[:, a:b]) for a, b in pairwise(cuts)]
    for order in [range(5), (4, 2, 0, 1, 3)]:
        o, lse = parts[order[0]]
        for index in order[1:]:
            o, lse = check_merge(merge_backend, o, lse, *parts[index])
        compare.assert_same_value("o", o, whole_o)
        compare.assert_same_value("lse", lse, whole_lse)


def test_packed_and_strided_parts(merge_backend):
    rng = np.random.default_rng(5)
    o1, o2 = (draw(rng, (2, 17, 8), np.float32).transpose(1, 0, 2) for _ in range(2))
    lse1, lse2 = (draw(rng, (17, 2), np.float32).T for _ in range(2))
    o, lse = check_merge(merge_backend, o1, lse1, o2, lse2)
    copies = [np.ascontiguousarray(x) for x in (o1, lse1, o2, lse2)]
    compare.assert_bitwise("o", o, check_merge(merge_backend, *copies)[0])
    compare.assert_bitwise("lse", lse, check_merge(merge_backend, *copies)[1])


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 0, 4)], ids=str)
def test_zero_sizes(merge_backend, shape):
    o = np.zeros(shape, np.float32)
    lse = np.zeros((shape[0], shape[2], shape[1]), np.float32)
    check_merge(merge_backend, o, lse, o, lse)


def test_a_part_without_keys_has_no_influence_whatever_its_output_holds(merge_backend):
    rng = np.random.default_rng(6)
    o1, o2 = (draw(rng, (1, 3, 1, 4), np.float32) for _ in range(2))
    lse1, lse2 = (draw(rng, (1, 1, 3), np.float32) for _ in range(2))
    o1[0, 1], lse1[0, 0, 1] = 7, -np.inf
    o, lse = check_merge(merge_backend, o1, lse1, o2, lse2)
    compare.assert_bitwise("o", o[0, 1], o2[0, 1])
    assert lse[0, 0, 1] == lse2[0, 0, 1]
