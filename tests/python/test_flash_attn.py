"""onchip.compat.flash_attn on CPU tensors, beside the plain formula, and what people have reported
of those functions."""

import numpy as np
import pytest

import onchip
from onchip.oracle import compare

torch = pytest.importorskip("torch")
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_cases import draw, same  # noqa: E402

from onchip.compat import flash_attn  # noqa: E402
from onchip.compat.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

INF = float("inf")


@pytest.fixture(autouse=True)
def _poisoned_memory():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def dense(rows=(7, 9), heads=(4, 2), dim=16, dtype=torch.float64, batch=2):
    return [
        draw((batch, rows[n > 0], heads[n > 0], dim), dtype, seed)
        for seed, n in enumerate((0, 1, 1))
    ]


def plain(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """By torch's own arithmetic, differentiable: o and lse of a dense batch."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    rows, keys = scores.shape[-2:]
    distance = torch.arange(keys) - (torch.arange(rows)[:, None] + keys - rows)
    if slopes is not None:
        scores = scores - slopes.reshape(-1, slopes.shape[-1], 1, 1) * distance.abs()
    left, right = window
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        visible &= distance <= 0
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    scores = scores.masked_fill(~visible, -INF)
    lse = scores.logsumexp(-1)
    weights = torch.where(visible, (scores - lse[..., None]).exp(), 0)
    return (weights @ v).transpose(1, 2), lse


def gradients(function, tensors):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    result = function(*leaves)
    o = result[0] if isinstance(result, tuple) else result
    return o.detach(), *torch.autograd.grad(o, leaves, draw(o.shape, o.dtype, 30))


def close(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


# Empty rows are compared apart: the plain formula's gradient is NaN there.
OPTIONS = {
    "plain": ({}, {}),
    "causal": (dict(causal=True), dict(causal=True)),
    "scale": (dict(softmax_scale=0.2), dict(scale=0.2)),
    "window": (dict(window_size=(2, 1)), dict(window=(2, 1))),
    "left window": (dict(window_size=(3, -1)), dict(window=(3, -1))),
    "causal window": (dict(causal=True, window_size=(3, 5)), dict(causal=True, window=(3, 5))),
    "softcap": (dict(softcap=1.5, deterministic=True), dict(softcap=1.5)),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rows", [(7, 9), (1, 9), (8, 8)])
def test_dense(name, rows):
    """A02: bottom-right."""
    given, wanted = OPTIONS[name]
    close(
        gradients(lambda *x: flash_attn_func(*x, **given), dense(rows)),
        gradients(lambda *x: plain(*x, **wanted), dense(rows)),
    )


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_alibi(shape):
    slopes = draw(shape, torch.float32, 7).abs()
    close(
        gradients(lambda *x: flash_attn_func(*x, causal=True, alibi_slopes=slopes), dense()),
        gradients(lambda *x: plain(*x, causal=True, slopes=slopes.double()), dense()),
    )


def test_positional_arguments():
    """In the order of flash_attn 2.x."""
    q, k, v = dense()
    slopes = draw((4,), torch.float32, 7).abs()
    got = flash_attn_func(q, k, v, 0.0, 0.3, True, (4, 0), 2.0, slopes, True, True)
    wanted = plain(q, k, v, 0.3, True, (4, 0), 2.0, slopes.double())
    close(got[:2], wanted)
    assert got[2] is None
    cu_q, cu_k = torch.tensor([0, 7, 14]), torch.tensor([0, 9, 18])
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    o, lse, _ = flash_attn_varlen_func(
        *flat, cu_q, cu_k, 7, 9, 0.0, 0.3, True, (4, 0), 2.0, slopes, True, True, None
    )
    close((o.unflatten(0, (2, 7)), lse.unflatten(1, (2, 7)).transpose(0, 1)), wanted)


def test_packed_parts_are_views():
    q, k, v = dense((9, 9), (2, 2))
    options = dict(causal=True, return_attn_probs=True)
    wanted = flash_attn_func(q, k, v, **options)[:2]
    kv, qkv = torch.stack([k, v], 2), torch.stack([q, k, v], 2)
    for got in (
        flash_attn_kvpacked_func(q, kv, **options),
        flash_attn_qkvpacked_func(qkv, **options),
    ):
        for one, other in zip(got[:2], wanted, strict=True):
            same(one, other)
    grads = gradients(lambda x: flash_attn_qkvpacked_func(x, causal=True), [qkv])
    apart = gradients(lambda *x: flash_attn_func(*x, causal=True), [q, k, v])
    same(grads[0], apart[0])
    same(grads[1], torch.stack(apart[1:], 2))


def test_varlen_is_each_sequence_alone():
    lengths_q, lengths_k = [3, 0, 5, 1], [4, 2, 5, 0]
    cu_q, cu_k = (
        torch.tensor([0, *np.cumsum(x)], dtype=torch.int32) for x in (lengths_q, lengths_k)
    )
    tensors = [draw((9, 4, 8), torch.float64, 1)] + [
        draw((11, 2, 8), torch.float64, seed) for seed in (2, 3)
    ]

    def varlen(q, k, v):
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 5, causal=True)

    def one_by_one(q, k, v):
        parts = []
        for n in range(4):
            rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
            parts.append(flash_attn_func(q[None, rows], k[None, keys], v[None, keys], causal=True))
        return torch.cat([x[0] for x in parts])

    close(gradients(varlen, tensors), gradients(one_by_one, tensors))
    q, k, v = tensors
    kv = torch.stack([k, v], 1)
    same(flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 5, 5, causal=True), varlen(*tensors))
    qkv = torch.stack([k, k, v], 1)
    same(
        flash_attn_varlen_qkvpacked_func(qkv, cu_k, 5, causal=True),
        flash_attn_varlen_func(k, k, v, cu_k, cu_k, 5, 5, causal=True),
    )


# ---- what people have reported


@pytest.mark.parametrize("rows", [(5, 2), (65, 64), (257, 128)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_more_queries_than_keys(rows, dtype):
    """A01: rows that see nothing are 0 with lse -inf, and add nothing to any gradient."""
    tensors = dense(rows, (2, 2), 64, dtype, 1)
    empty = rows[0] - rows[1]
    o, lse, _ = flash_attn_func(*tensors, causal=True, return_attn_probs=True)
    assert not o[:, :empty].any() and torch.isneginf(lse[..., :empty]).all()
    got = gradients(lambda *x: flash_attn_func(*x, causal=True), tensors)
    assert not got[1][:, :empty].any()
    q, k, v = tensors

    def last(q, k, v):
        o = flash_attn_func(q[:, empty:], k, v, causal=True)
        return torch.cat([o.new_zeros(1, empty, *o.shape[2:]), o], 1)

    for one, other in zip(got, gradients(last, (q, k, v)), strict=True):
        error = (one - other).abs().max()  # sums may be cut elsewhere
        assert error <= 4 * torch.finfo(dtype).eps * other.abs().max()


def test_window_edges():
    """A11: the widest windows are causal; (w, 0) sees w + 1 keys; (0, 0) returns v."""
    tensors = dense((130, 130), (2, 2), dtype=torch.float64, batch=1)
    causal = flash_attn_func(*tensors, causal=True)
    for window in ((130, 0), (129, 0), (-1, 0)):
        close([flash_attn_func(*tensors, window_size=window)], [causal])
    same(flash_attn_func(*tensors, window_size=(0, 0)), tensors[2])
    ones = [torch.zeros_like(tensors[0]), torch.zeros_like(tensors[1]), tensors[2]]
    for left in (1, 15, 16, 63, 64):
        _, lse, _ = flash_attn_func(*ones, window_size=(left, 0), return_attn_probs=True)
        seen = torch.arange(1, 131).clamp(max=left + 1).double().log().expand(1, 2, -1)
        torch.testing.assert_close(lse, seen)


def test_window_with_more_queries_than_keys():
    """A12"""
    tensors = dense((129, 32), (2, 2), batch=1)
    o, lse, _ = flash_attn_func(*tensors, window_size=(32, 64), return_attn_probs=True)
    assert not o[:, :33].any() and torch.isneginf(lse[..., :33]).all()
    assert lse[..., 33:].isfinite().all()
    _, dq, dk, dv = gradients(lambda *x: flash_attn_func(*x, window_size=(32, 64)), tensors)
    assert not dq[:, :33].any()
    q, k, v = tensors
    q = q.clone()
    q[:, :33] = 1e3
    again = gradients(lambda *x: flash_attn_func(*x, window_size=(32, 64)), (q, k, v))
    same(again[2], dk)
    same(again[3], dv)


@pytest.mark.parametrize("softcap", [0.0, 1.0, 15.0, 50.0])
@pytest.mark.parametrize("packed", [False, True])
def test_softcap(softcap, packed):
    """A13: c tanh(S / c), and its gradient, dense and packed."""
    rows = (20, 37)
    tensors = dense(rows, batch=1)
    tensors = [10 * tensors[0], 10 * tensors[1], tensors[2]]

    def function(q, k, v):
        if not packed:
            return flash_attn_func(q, k, v, causal=True, softcap=softcap)
        cu_q, cu_k = torch.tensor([0, rows[0]]), torch.tensor([0, rows[1]])
        flat = [x[0] for x in (q, k, v)]
        o = flash_attn_varlen_func(*flat, cu_q, cu_k, *rows, causal=True, softcap=softcap)
        return o[None]

    wanted = gradients(lambda *x: plain(*x, causal=True, softcap=softcap), tensors)
    for one, other in zip(gradients(function, tensors), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def judged(q, k, v, lse_and_o, **options):
    """By the contract's own measure, in bfloat16 too."""
    arrays = [
        x.view(torch.int16).numpy().view("bfloat16") if x.dtype == torch.bfloat16 else x.numpy()
        for x in (q, k, v, lse_and_o[0])
    ]
    compare.judge_forward((arrays[3], lse_and_o[1].numpy()), *arrays[:3], **options)


def test_one_query_for_some_sequences():
    """A17: max_seqlen_q of 1 is no shortcut."""
    q = draw((2, 9, 64), torch.bfloat16, 1)
    k, v = (draw((8, 3, 64), torch.bfloat16, seed) for seed in (2, 3))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 1, 2], [0, 3, 3, 8]))
    o, lse, _ = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 1, 5, softmax_scale=1.0, causal=True, return_attn_probs=True
    )
    judged(
        q,
        k,
        v,
        (o, lse),
        scale=1.0,
        causal=True,
        cu_seqlens_q=cu_q.numpy(),
        cu_seqlens_kv=cu_k.numpy(),
    )


def test_fewer_tokens_than_sequences():
    """A18"""
    q = draw((1, 21, 120), torch.float32, 1)
    k, v = draw((1, 7, 120), torch.float32, 2), draw((1, 7, 120), torch.float32, 3)
    cu = torch.tensor([0, 0, 0, 0, 1], dtype=torch.int32)
    o = flash_attn_varlen_func(q, k, v, cu, cu, 1, 1, softmax_scale=120**0.5)
    same(o, v.repeat_interleave(3, 1))


def test_lengths_that_lie():
    """A21: a wrong hint changes nothing; offsets that go down or too far are an error."""
    q, k, v = (draw((300, 2, 16), torch.float32, seed) for seed in range(3))
    cu = torch.tensor([0, 300])
    wanted = flash_attn_varlen_func(q, k, v, cu, cu, 300, 300, causal=True)
    for hint in (128, 1, None):
        same(flash_attn_varlen_func(q, k, v, cu, cu, hint, hint, causal=True), wanted)
    for wrong in ([0, 200, 100], [0, 301], [-1, 300]):
        wrong = torch.tensor(wrong)
        with pytest.raises(onchip.InvalidArgument, match="cu_seqlens_q"):
            flash_attn_varlen_func(q, k, v, wrong, wrong, 300, 300)


def test_dropout_against_its_own_mask():
    """A38: v = 1 reads the mask out; o and all gradients are the formula's with that very mask."""
    q, k, _ = dense((64, 64), (2, 2), batch=1)
    v = torch.eye(64, dtype=torch.float64)[None, :, None].expand(1, 64, 2, 64)

    def seeded(*x):
        torch.manual_seed(2)
        return flash_attn_func(*x, 0.25, causal=True)

    weights, _ = plain(q, k, v, causal=True)
    visible = weights != 0
    kept = (seeded(q, k, v) != 0) & visible
    rate, count = kept.sum() / visible.sum(), visible.sum()
    assert abs(rate - 0.75) < 5 * (0.25 * 0.75 / count) ** 0.5
    mask = kept.permute(0, 2, 1, 3).double() / 0.75

    def formula(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(64, 64).triu(1).bool(), -INF)
        return (scores.softmax(-1) * mask @ v).transpose(1, 2)

    tensors = [q, k, draw((1, 64, 2, 16), torch.float64, 8)]
    close(gradients(seeded, tensors), gradients(formula, tensors))
    torch.manual_seed(2)
    first, second = (flash_attn_func(q, k, v, 0.25) for _ in range(2))
    assert not torch.equal(first, second)
    same(flash_attn_func(q, k, v, 0.0), flash_attn_func(q, k, v))


@pytest.mark.parametrize("shift", [1, 3])
def test_addresses_off_by_an_element(shift):
    """A14"""
    tensors = dense(dtype=torch.bfloat16)
    moved = []
    for x in tensors:
        buffer = torch.full((x.numel() + shift,), float("nan"), dtype=x.dtype)
        moved.append(buffer[shift:].view(x.shape).copy_(x))
    for one, other in zip(
        gradients(flash_attn_func, moved), gradients(flash_attn_func, tensors), strict=True
    ):
        same(one, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_varlen_with_dropout(reentrant):
    """A48"""
    qkv = draw((30, 3, 2, 16), torch.float64, 1)
    cu = torch.tensor([0, 11, 11, 30], dtype=torch.int32)

    def body(x):
        return flash_attn_varlen_qkvpacked_func(2 * x, cu, 19, 0.3, causal=True)

    results = []
    for call in (body, lambda x: checkpoint(body, x, use_reentrant=reentrant)):
        torch.manual_seed(9)
        leaf = qkv.clone().requires_grad_()
        call(leaf).square().sum().backward()
        results.append(leaf.grad)
    same(*results)


def test_lse_has_a_gradient():
    tensors = dense()
    leaves = [x.requires_grad_() for x in tensors]

    def total(o, lse, *_):
        return o.sin().sum() + lse.cos().sum()

    got = torch.autograd.grad(total(*flash_attn_func(*leaves, return_attn_probs=True)), leaves)
    close(got, torch.autograd.grad(total(*plain(*leaves)), leaves))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    def dense_call(q, k, v):
        return flash_attn_func(q, k, v, causal=True, window_size=(4, 0))

    def varlen_call(qkv):
        return flash_attn_varlen_qkvpacked_func(qkv, cu, 9, causal=True)

    cu = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    for function, tensors in (
        (dense_call, dense()),
        (varlen_call, [draw((9, 3, 2, 16), torch.float64, 1)]),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        close(gradients(compiled, tensors), gradients(function, tensors))


def test_refusals():
    q, k, v = dense()
    with pytest.raises(onchip.Unsupported, match="return_attn_probs: got True with dropout_p"):
        flash_attn_func(q, k, v, 0.1, return_attn_probs=True)
    cu = torch.tensor([0, 4])
    with pytest.raises(onchip.Unsupported, match="block_table: got a table"):
        flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 4, 4, block_table=cu[None])
    for function, argument in (
        (lambda x: flash_attn_kvpacked_func(q, x), "kv"),
        (lambda x: flash_attn_qkvpacked_func(x), "qkv"),
    ):
        for wrong in (q, q[0, 0], None):
            with pytest.raises(onchip.InvalidArgument, match=f"{argument}: got"):
                function(wrong)
    slopes = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(onchip.InvalidArgument, match="alibi_slopes"):
        flash_attn_func(q, k, v, alibi_slopes=slopes)


def test_every_name_has_its_description():
    for name in flash_attn.__all__:
        assert getattr(flash_attn, name).__doc__
