"""Any strides, any base address.

Public reports: flash-attention #355, #91, pytorch #187506, #112577, #191937, FlagGems #5896.
"""

import numpy as np
import pytest
from harness import (
    BFLOAT16,
    DTYPES,
    assert_same_bits,
    backward,
    check,
    draw,
    draw_qkv,
    dtype_name,
    forward,
)


@pytest.fixture
def dense():
    rng = np.random.default_rng(1)
    q, k, v = draw_qkv(rng, np.float32, 2, 33, 45, heads=(4, 2), dims=(20, 24))
    return q, k, v, draw(rng, (2, 33, 4, 24), np.float32)


def test_output_gradient_with_all_strides_zero(grad_backend, dense):
    q, k, v, d_o = dense
    o, lse = forward(grad_backend, q, k, v)
    wanted = backward(grad_backend, np.ones_like(d_o), q, k, v, o, lse)
    ones = np.broadcast_to(np.float32(1), d_o.shape)
    assert_same_bits(backward(grad_backend, ones, q, k, v, o, lse), wanted)


def test_output_gradient_that_is_part_of_another(grad_backend, dense):
    q, k, v, d_o = dense
    o, lse = forward(grad_backend, q, k, v)
    wanted = backward(grad_backend, d_o, q, k, v, o, lse)
    for axis in range(4):
        joined = np.concatenate([d_o, np.full_like(d_o, np.nan)], axis)
        part = joined[tuple(slice(0, n) for n in d_o.shape)]
        assert_same_bits(backward(grad_backend, part, q, k, v, o, lse), wanted)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 1, 0, 3), (3, 2, 1, 0), (0, 2, 3, 1)], ids=str)
def test_output_gradient_stored_in_another_order(grad_backend, dense, order):
    q, k, v, d_o = dense
    o, lse = forward(grad_backend, q, k, v)
    wanted = backward(grad_backend, d_o, q, k, v, o, lse)
    stored = np.ascontiguousarray(d_o.transpose(order)).transpose(np.argsort(order))
    assert_same_bits(backward(grad_backend, stored, q, k, v, o, lse), wanted)


@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 2, 3, 1), (3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_inputs_stored_in_another_order(backend, which, order, dtype):
    """Orders that end in another axis than the last have an innermost stride that is not 1."""
    rng = np.random.default_rng(2)
    tensors = dict(zip("qkv", draw_qkv(rng, dtype, 2, 17, 21, heads=(4, 2)), strict=True))
    o, lse, gradients = check(backend, **tensors)
    d_o = draw(np.random.default_rng(o.size), o.shape, o.dtype)
    for name in which:
        stored = np.ascontiguousarray(tensors[name].transpose(order))
        tensors[name] = stored.transpose(np.argsort(order))
    assert_same_bits(forward(backend, **tensors), (o, lse))
    if gradients is not None:
        result = backward(backend, d_o, **tensors, o=o, lse=lse)
        assert_same_bits(result, gradients)


@pytest.mark.parametrize("seqlen_kv", [33, 65, 97])
def test_keys_and_values_shared_by_stride_zero(backend, seqlen_kv):
    rng = np.random.default_rng(3)
    q, k, v = draw_qkv(rng, BFLOAT16, 2, 20, seqlen_kv, heads=(4, 1))
    mask = rng.random((1, 1, 20, seqlen_kv)) < 0.7
    shared_k, shared_v = (np.broadcast_to(x, (2, seqlen_kv, 4, 16)) for x in (k, v))
    o, lse, gradients = check(backend, q, shared_k, shared_v, mask=mask)
    copies = check(backend, q, shared_k.copy(), shared_v.copy(), mask=mask)
    assert_same_bits((o, lse), copies[:2])
    if gradients is not None:
        assert_same_bits(gradients, copies[2])


def test_one_row_shared_by_a_whole_axis(backend):
    q, k, v = draw_qkv(np.random.default_rng(4), np.float32, 1, 1, heads=(1, 1))
    shape = (3, 19, 2, 16)
    views = [np.broadcast_to(x, shape) for x in (q, k, v)]
    result = forward(backend, *views)
    assert_same_bits(result, forward(backend, *(x.copy() for x in views)))


def test_overlapping_views(backend):
    """Rows one element apart: a sliding view over one buffer."""
    buffer = draw(np.random.default_rng(5), (200,), np.float32)
    view = np.lib.stride_tricks.sliding_window_view(buffer, 16)[:100].reshape(1, 100, 1, 16)
    assert view.strides[1] == view.itemsize
    assert_same_bits(forward(backend, view, view, view), forward(backend, *(view.copy(),) * 3))


def test_backwards_strides(backend, dense):
    q, k, v, _ = dense
    for axis in range(4):
        flipped = [np.flip(np.ascontiguousarray(np.flip(x, axis)), axis) for x in (q, k, v)]
        assert all(x.strides[axis] < 0 for x in flipped)
        assert_same_bits(
            forward(backend, *flipped, causal=True), forward(backend, q, k, v, causal=True)
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_base_addresses_off_every_vector_width(backend, dtype, shift):
    rng = np.random.default_rng(6)
    tensors = draw_qkv(rng, dtype, 1, 20, 37, dims=(32, 32))
    o, lse, gradients = check(backend, *tensors)
    shifted = []
    for x in tensors:
        buffer = np.empty(x.size + shift, dtype)
        buffer[shift:] = x.ravel()
        shifted.append(buffer[shift:].reshape(x.shape))
    assert_same_bits(forward(backend, *shifted), (o, lse))
    if gradients is not None:
        d_o = draw(np.random.default_rng(o.size), o.shape, o.dtype)
        assert_same_bits(backward(backend, d_o, *shifted, o, lse), gradients)


@pytest.mark.parametrize("name", ["bias", "mask", "alibi_slopes", "q_segment_ids", "sink"])
def test_options_with_strides(backend, dense, name):
    q, k, v, _ = dense
    rng = np.random.default_rng(7)
    options = {
        "bias": dict(bias=draw(rng, (45, 33, 4, 2), np.float32).T),
        "mask": dict(mask=(rng.random((45, 33, 4, 2)) < 0.6).T),
        "alibi_slopes": dict(alibi_slopes=np.abs(draw(rng, (4, 2), np.float32)).T),
        "q_segment_ids": dict(
            q_segment_ids=rng.integers(0, 2, (33, 2), dtype=np.int32).T,
            kv_segment_ids=rng.integers(0, 2, (2, 90), dtype=np.int32)[:, ::2],
        ),
        "sink": dict(sink=draw(rng, (8,), np.float32)[::-2]),
    }[name]
    strided = check(backend, q, k, v, **options)
    copies = {key: np.ascontiguousarray(value) for key, value in options.items()}
    assert_same_bits(strided[:2], forward(backend, q, k, v, **copies))


def test_o_and_lse_given_to_backward_may_be_strided(grad_backend, dense):
    q, k, v, d_o = dense
    o, lse = forward(grad_backend, q, k, v)
    wanted = backward(grad_backend, d_o, q, k, v, o, lse)
    other_o = np.ascontiguousarray(o.transpose(3, 1, 2, 0)).transpose(3, 1, 2, 0)
    other_lse = np.ascontiguousarray(lse.T).T
    assert_same_bits(backward(grad_backend, d_o, q, k, v, other_o, other_lse), wanted)
