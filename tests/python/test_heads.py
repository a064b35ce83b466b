"""Head dimensions and grouped heads, on and off the tile.

Public reports: flash-attention #28, #67, #1238, #2198, pytorch #90413, #127523, vllm #4127,
flashinfer #528, flash-linear-attention #941, #1033, #1031, tokamax #316, jax #27224, #23819.
"""

import numpy as np
import pytest
from harness import (
    BFLOAT16,
    DTYPES,
    assert_same_bits,
    check,
    draw,
    draw_qkv,
    dtype_name,
    forward,
)

import onchip

HEAD_DIMS = [1, 3, 7, 8, 20, 33, 40, 72, 80, 96, 100, 112, 120, 128, 136, 192, 224, 256]


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=dtype_name)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_head_dims(backend, dim, dtype):
    for dim_v in sorted({dim, 1, 64, 128}):
        q, k, v = draw_qkv(
            np.random.default_rng(dim), dtype, 1, 34, 37, heads=(2, 1), dims=(dim, dim_v)
        )
        check(backend, q, k, v, causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_a_value_narrower_or_wider_than_the_key(backend, dtype):
    for dims in [(192, 128), (64, 256), (256, 1)]:
        q, k, v = draw_qkv(np.random.default_rng(1), dtype, 1, 20, 70, dims=dims)
        check(backend, q, k, v)


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ((64, 320), "v: got head_dim_v = 320, wanted head_dim_v at most 256; nearest legal: 256"),
        ((257, 64), "q: got head_dim_qk = 257, wanted head_dim_qk at most 256"),
        ((576, 512), "q: got head_dim_qk = 576, wanted head_dim_qk at most 256"),
    ],
    ids=str,
)
def test_beyond_the_limits_is_refused_by_name(backend, dims, words):
    q, k, v = draw_qkv(np.random.default_rng(2), np.float32, 1, 8, dims=dims)
    with pytest.raises(onchip.InvalidArgument, match=f"^attention_forward: {words}"):
        forward(backend, q, k, v)


@pytest.mark.parametrize("dim_v", [129, 192, 256])
def test_more_value_columns_change_nothing_in_the_first(backend, dim_v):
    rng = np.random.default_rng(3)
    q, k, wide = draw_qkv(rng, np.float32, 1, 64, heads=(4, 2), dims=(64, dim_v))
    o, lse, _ = check(backend, q, k, wide)
    narrow_o, narrow_lse = forward(backend, q, k, wide[..., :128])
    assert_same_bits((o[..., :128], lse), (narrow_o, narrow_lse))


@pytest.mark.parametrize(
    "heads", [(1, 1), (4, 4), (4, 2), (8, 1), (9, 3), (21, 7), (6, 2)], ids=str
)
def test_grouped_heads(backend, heads):
    rng = np.random.default_rng(4)
    q, k, v = draw_qkv(rng, np.float32, 2, 33, 40, heads=heads)
    o, lse, gradients = check(backend, q, k, v, causal=True)
    group = heads[0] // heads[1]
    expanded = check(backend, q, k.repeat(group, axis=2), v.repeat(group, axis=2), causal=True)
    assert_same_bits((o, lse), expanded[:2])
    if gradients is not None:
        assert_same_bits(gradients[:1], expanded[2][:1])


@pytest.mark.parametrize("seqlen_kv", [8, 16, 32, 64, 128, 192])
@pytest.mark.parametrize("more", [0, 1])
def test_all_ones(backend, seqlen_kv, more):
    """o = 1, dQ = dK = 0, dV = Sq / Sk."""
    seqlen_q = seqlen_kv + more
    q, k, v = (
        np.ones((1, length, 1, 64), np.float32) for length in (seqlen_q, seqlen_kv, seqlen_kv)
    )
    _, _, gradients = check(backend, q, k, v, d_o=np.ones_like(q))
    for _ in range(10):
        assert_same_bits(forward(backend, q, k, v), forward(backend, q, k, v))
    if gradients is not None:
        # As close as fp32's own term of section 5: the weights come from an lse rounded to fp32.
        np.testing.assert_allclose(gradients.dv, seqlen_q / seqlen_kv, rtol=1e-5)


@pytest.mark.parametrize(
    "lengths", [(192, 192), (193, 191), (1, 1025), (63, 65), (64, 64), (65, 63)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_lengths_around_the_tile(backend, lengths, dtype):
    q, k, v = draw_qkv(np.random.default_rng(5), dtype, 1, *lengths, heads=(2, 1), dims=(24, 24))
    check(backend, q, k, v)
    check(backend, q, k, v, causal=True)


def test_a_long_sequence_off_the_tile(backend):
    q, k, v = draw_qkv(np.random.default_rng(6), np.float32, 1, 4092, heads=(1, 1), dims=(8, 8))
    o, lse, _ = check(backend, q, k, v, causal=True)
    assert_same_bits(forward(backend, q, k, v, causal=True), (o, lse))


@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_more_than_65535_of_something(backend, axis):
    """Grid limits of devices must not show. Public report: pytorch #177985."""
    many = 65537
    batch, heads = (many, 1) if axis == "batch" else (1, many)
    rng = np.random.default_rng(7)
    q, k, v = draw_qkv(rng, np.float32, batch, 2, 2, heads=(heads, heads), dims=(8, 8))
    bias = draw(rng, (batch, heads, 2, 2), np.float32)
    if axis == "heads":
        check(backend, q, k, v, bias=bias)
        return
    # One batch entry a head of the transposed problem: the oracle loops over the batch in Python.
    as_heads = [x.transpose(2, 1, 0, 3) for x in (q, k, v)]
    o, lse, gradients = check(backend, *as_heads, bias=bias.transpose(1, 0, 2, 3))
    assert_same_bits(
        forward(backend, q, k, v, bias=bias), (o.transpose(2, 1, 0, 3), lse.transpose(1, 0, 2))
    )
    if gradients is not None:
        d_o = draw(np.random.default_rng(o.size), o.shape, o.dtype).transpose(2, 1, 0, 3)
        result = onchip.ops.attention_backward(
            d_o,
            q,
            k,
            v,
            o.transpose(2, 1, 0, 3),
            lse.transpose(1, 0, 2),
            bias=bias,
            backend=backend,
        )
        assert_same_bits(
            result[:4],
            [
                *(x.transpose(2, 1, 0, 3) for x in gradients[:3]),
                gradients.dbias.transpose(1, 0, 2, 3),
            ],
        )
