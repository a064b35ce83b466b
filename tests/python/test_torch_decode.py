"""onchip.torch.attention_decode, and flash_attn's function over a cache, on CPU tensors."""

import math

import pytest

import onchip

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_cases import draw, same  # noqa: E402

import onchip.torch  # noqa: E402
from onchip.compat.flash_attn import flash_attn_func, flash_attn_with_kvcache  # noqa: E402
from onchip.torch import attention_decode  # noqa: E402

OPERATOR = torch.ops.onchip.attention_decode


@pytest.fixture(autouse=True)
def _poisoned_memory():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def tables(dtype=torch.float32, rotary_dim=8, positions=64):
    frequency = 100.0 ** -(torch.arange(rotary_dim // 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def dense(dtype=torch.float32):
    return (
        draw((3, 2, 4, 16), dtype, 1),
        draw((5, 20, 2, 16), dtype, 2),
        draw((5, 20, 2, 8), dtype, 3),
    )


def new(dtype=torch.float32):
    return dict(k_new=draw((3, 2, 2, 16), dtype, 4), v_new=draw((3, 2, 2, 8), dtype, 5))


LENGTHS = int32(7, 0, 18)
SLOTS = int32(4, -1, 0)
PAGES = int32(*range(20)).reshape(4, 5).flip(0)[:3].contiguous()


def paged(dtype=torch.float32):
    q, k, v = dense(dtype)
    return q, k.reshape(20, 5, 2, 16), v.reshape(20, 5, 2, 8)


CASES = {
    "read": (dense, dict(cache_seqlens=LENGTHS + 1, cache_slot=SLOTS)),
    "append": (dense, dict(cache_seqlens=LENGTHS, cache_slot=SLOTS, causal=True, **new())),
    "paged": (paged, dict(cache_seqlens=LENGTHS, page_table=PAGES, causal=True, **new())),
    "rotary": (
        dense,
        dict(
            cache_seqlens=LENGTHS,
            rotary_cos=tables()[0],
            rotary_sin=tables()[1],
            rotary_interleaved=True,
            q_positions=torch.arange(6).reshape(3, 2),
            window=(9, 0),
            **new(),
        ),
    ),
    "options": (
        dense,
        dict(
            cache_seqlens=LENGTHS,
            softcap=2.0,
            bias=draw((3, 1, 2, 20), torch.float16, 6),
            sink=draw((4,), seed=7),
            alibi_slopes=draw((4,), seed=8).abs(),
            batch_invariant=True,
            **new(),
        ),
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    make, options = CASES[request.param]
    return make, options


def run(function, make, options):
    """What the function returns, and the caches after it."""
    q, k_cache, v_cache = (x.clone() for x in make())
    o, lse = function(q, k_cache, v_cache, **options)
    return o, lse, k_cache, v_cache


def all_same(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        same(one, other)


def with_lse(*tensors, **options):
    return attention_decode(*tensors, **options, return_lse=True)


def test_equals_the_operator_on_arrays(case):
    got = run(with_lse, *case)
    all_same(got, run(onchip.ops.attention_decode, *case))
    make, options = case
    same(attention_decode(*make(), **options), got[0])
    written = any(not torch.equal(a, b) for a, b in zip(got[2:], make()[1:], strict=True))
    assert written == ("k_new" in options)


def test_sequences_of_integers():
    make, options = CASES["append"]
    lists = {name: options[name].tolist() for name in ("cache_seqlens", "cache_slot")}
    all_same(run(with_lse, make, options | lists), run(with_lse, make, options))
    for wrong in (["a", 1, 2], [0.5] * 3, [2**40] * 3, 7, None):
        with pytest.raises(onchip.InvalidArgument, match="attention_decode: cache_seqlens: got"):
            attention_decode(*make(), **(options | dict(cache_seqlens=wrong)))


def arguments_of(make, options):
    given = dict(alignment="bottom_right", window_left=-1, window_right=-1, softcap=0.0)
    flags = ("causal", "deterministic", "batch_invariant", "check", "rotary_interleaved")
    given |= dict.fromkeys(flags, False)
    given |= dict(zip(("q", "k_cache", "v_cache"), (x.clone() for x in make()), strict=True))
    given |= options
    if "window" in given:
        given["window_left"], given["window_right"] = given.pop("window")
    return tuple(given.get(argument.name) for argument in OPERATOR.default._schema.arguments)


def test_opcheck(case):
    torch.library.opcheck(OPERATOR, arguments_of(*case))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(case, dynamic):
    """In a graph that uses the caches before and after they are written."""

    def step(q, k_cache, v_cache, **options):
        k_cache.mul_(2)
        o, lse = attention_decode(2 * q, k_cache, v_cache, **options, return_lse=True)
        return o + v_cache.sum(), lse.exp()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for got, wanted in zip(run(compiled, *case), run(step, *case), strict=True):
        torch.testing.assert_close(got, wanted)


def test_whoever_watches_sees_the_operator():
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen = []
    wanted = run(with_lse, *CASES["append"])
    with Watch():
        got = run(with_lse, *CASES["append"])
    assert OPERATOR.default in seen
    all_same(got, wanted)


def test_meta_tensors():
    q, k_cache, v_cache = (x.to("meta") for x in dense())
    o, lse = with_lse(q, k_cache, v_cache, cache_seqlens=LENGTHS.to("meta"))
    assert (o.shape, lse.shape, o.device.type) == ((3, 2, 4, 8), (3, 4, 2), "meta")


def test_gradients_are_refused():
    q, k_cache, v_cache = dense()
    q.requires_grad_()
    with pytest.raises(onchip.Unsupported, match=r"no gradient: call it under torch\.no_grad"):
        attention_decode(q, k_cache, v_cache, cache_seqlens=[1, 2, 3])
    with torch.no_grad():
        attention_decode(q, k_cache, v_cache, cache_seqlens=[1, 2, 3])


@pytest.mark.parametrize("watched", [False, True])
def test_a_graph_that_keeps_a_cache_notices_the_append(watched):
    class Pass(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    q, *caches = dense()
    for cache in caches:
        kept = (torch.ones_like(cache, requires_grad=True) * cache).sum()
        with Pass() if watched else torch.no_grad():
            attention_decode(q, *caches, cache_seqlens=LENGTHS, **new())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()
    kept = (torch.ones_like(caches[0], requires_grad=True) * caches[0]).sum()
    attention_decode(q, *caches, cache_seqlens=LENGTHS)  # appends nothing
    kept.backward()
    with torch.inference_mode():
        caches = [cache.clone() for cache in caches]
        attention_decode(q, *caches, cache_seqlens=LENGTHS, **new())


def test_refusals():
    q, k_cache, v_cache = dense()
    for change, words in (
        (dict(k_cache=k_cache.numpy()), "k_cache: got ndarray, wanted a torch tensor"),
        (dict(window={1, 2}), "window: got"),
        (dict(cache_seqlens=[1, 2, 21]), "cache_seqlens"),
        (dict(k_cache=k_cache.double()), "k_cache: got float64"),
    ):
        given = dict(q=q, k_cache=k_cache, v_cache=v_cache, cache_seqlens=[1, 2, 3]) | change
        with pytest.raises(onchip.InvalidArgument, match=f"attention_decode: {words}"):
            attention_decode(**given)


# ---- flash_attn_with_kvcache


def kv_inputs(seqlen_q=3, seqlen_new=3, dtype=torch.float64):
    return (
        draw((2, seqlen_q, 4, 16), dtype, 1),
        draw((2, 20, 2, 16), dtype, 2),
        draw((2, 20, 2, 16), dtype, 3),
        draw((2, seqlen_new, 2, 16), dtype, 4),
        draw((2, seqlen_new, 2, 16), dtype, 5),
    )


def one_by_one(q, k_cache, v_cache, k, v, lengths, **options):
    """Each sequence's cached rows and new ones in one tensor."""
    parts = []
    for n, length in enumerate(lengths):
        keys, values = (
            torch.cat([cache[n, :length], rows[n]])[None]
            for cache, rows in ((k_cache, k), (v_cache, v))
        )
        parts.append(flash_attn_func(q[n : n + 1], keys, values, **options))
    return torch.cat(parts)


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window_size=(4, 0), softcap=2.0)])
def test_append_and_attend(options):
    q, k_cache, v_cache, k, v = kv_inputs()
    wanted = one_by_one(q, k_cache, v_cache, k, v, [5, 11], **options)
    kept = k_cache.clone()
    got = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=int32(5, 11), **options)
    close(got, wanted)
    same(k_cache[0, 5:8], k[0])
    same(v_cache[1, 11:14], v[1])
    same(k_cache[0, :5], kept[0, :5])
    same(k_cache[0, 8:], kept[0, 8:])
    again, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=int32(8, 14), return_softmax_lse=True, **options
    )
    same(again, got)
    assert lse.shape == (2, 4, 3)


def test_lengths_of_every_kind():
    q, k_cache, v_cache, *_ = kv_inputs()
    close(flash_attn_with_kvcache(q, k_cache, v_cache), flash_attn_func(q, k_cache, v_cache))
    wanted = flash_attn_func(q, k_cache[:, :9], v_cache[:, :9])
    close(flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=9), wanted)
    same(
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=int32(9, 9)),
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=9),
    )


def test_pages_and_slots():
    q, k_cache, v_cache, *_ = kv_inputs()
    wanted = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=int32(13, 20))
    order = torch.tensor([3, 6, 0, 5, 1, 7, 2, 4])
    k_pages, v_pages = (torch.empty(8, 5, 2, 16, dtype=torch.float64) for _ in range(2))
    k_pages[order], v_pages[order] = (x.reshape(8, 5, 2, 16) for x in (k_cache, v_cache))
    table = order.reshape(2, 4).to(torch.int32)
    options = dict(cache_seqlens=int32(13, 20), block_table=table)
    close(flash_attn_with_kvcache(q, k_pages, v_pages, **options), wanted)
    whole = flash_attn_with_kvcache(q, k_pages, v_pages, block_table=table)
    close(whole, flash_attn_with_kvcache(q, k_cache, v_cache))
    swapped = flash_attn_with_kvcache(
        q.flip(0), k_cache, v_cache, cache_seqlens=int32(20, 13), cache_batch_idx=int32(1, 0)
    )
    close(swapped, wanted.flip(0))


def rotated(x, cos, sin, positions, interleaved):
    """By hand: channels in pairs, [batch, seqlen, heads, dim]."""
    half = cos.shape[1]
    cos, sin = (t[positions][:, :, None] for t in (cos, sin))
    x = x.clone()
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2].clone(), x[..., 1 : 2 * half : 2].clone()
        x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = x[..., :half].clone(), x[..., half : 2 * half].clone()
        x[..., :half], x[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin
    return x


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_rotary(interleaved, causal, seqlen_q):
    """Without a mask that tells its rows apart, all of q stands at cache_seqlens."""
    cos, sin = tables(torch.float64)
    q, k_cache, v_cache, k, v = kv_inputs(seqlen_q)
    lengths = torch.tensor([5, 11])
    at_q = lengths[:, None] + (torch.arange(seqlen_q) if causal else torch.zeros(seqlen_q).long())
    at_k = lengths[:, None] + torch.arange(3)
    wanted = one_by_one(
        rotated(q, cos, sin, at_q, interleaved),
        k_cache,
        v_cache,
        rotated(k, cos, sin, at_k, interleaved),
        v,
        lengths,
        causal=causal,
    )
    got = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cos,
        sin,
        int32(5, 11),
        causal=causal,
        rotary_interleaved=interleaved,
    )
    close(got, wanted)
    close(k_cache[0, 5:8], rotated(k, cos, sin, at_k, interleaved)[0])


def test_options_of_the_softmax():
    q, k_cache, v_cache, *_ = kv_inputs()
    slopes = draw((4,), torch.float32, 8).abs()
    options = dict(softmax_scale=1 / math.pi, causal=True, softcap=3.0, alibi_slopes=slopes)
    close(
        flash_attn_with_kvcache(q, k_cache, v_cache, **options),
        flash_attn_func(q, k_cache, v_cache, **options),
    )


def test_what_is_refused():
    q, k_cache, v_cache, k, v = kv_inputs()
    with pytest.raises(onchip.Unsupported, match="num_splits: got 4"):
        flash_attn_with_kvcache(q, k_cache, v_cache, num_splits=4)
    with pytest.raises(onchip.Unsupported, match="cache_leftpad"):
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_leftpad=int32(0, 0))
    with pytest.raises(onchip.InvalidArgument, match="cache_seqlens: got None with k"):
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v)
    for wrong in (int32(1, 21), int32(1, 18)):
        with pytest.raises(onchip.InvalidArgument, match="cache_seqlens"):
            flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=wrong)
