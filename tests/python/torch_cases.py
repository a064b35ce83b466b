"""What the tests of onchip.torch share: inputs, and options that exercise every argument."""

import pytest
import torch

import onchip.torch

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def draw(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def dense(dtype=torch.float32, heads=(4, 2), dims=(16, 24), rows=(33, 45)):
    return (
        draw((2, rows[0], heads[0], dims[0]), dtype, 1),
        draw((2, rows[1], heads[1], dims[0]), dtype, 2),
        draw((2, rows[1], heads[1], dims[1]), dtype, 3),
    )


def packed(dtype=torch.float32):
    return draw((50, 4, 16), dtype, 1), draw((61, 2, 16), dtype, 2), draw((61, 2, 8), dtype, 3)


PACKED = dict(
    cu_seqlens_q=torch.tensor([0, 20, 20, 48], dtype=torch.int32),
    cu_seqlens_kv=torch.tensor([0, 1, 30, 61], dtype=torch.int64),
)
CASES = {
    "plain": (dense, {}),
    "causal": (dense, dict(causal=True, alignment="top_left", scale=0.3)),
    "window": (dense, dict(window=(7, 0), softcap=3.0, deterministic=True, batch_invariant=True)),
    "tensors": (
        dense,
        dict(
            bias=draw((2, 1, 33, 45), torch.float16, 4),
            mask=draw((1, 4, 1, 45), seed=5) > 0,
            alibi_slopes=draw((2, 4), seed=6),
            q_segment_ids=torch.ones((2, 33), dtype=torch.int32),
            kv_segment_ids=(torch.arange(90).reshape(2, 45) % 2).to(torch.int32),
            sink=draw((4,), seed=7),
            seqlens_kv=torch.tensor([45, 12]),
        ),
    ),
    "dropout": (dense, dict(dropout_p=0.25, dropout_rng=torch.tensor([5, 6]), check=True)),
    "packed": (packed, dict(causal=True, max_seqlen_q=28, max_seqlen_kv=31, **PACKED)),
}


def same(got, wanted):
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    assert torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def leaves(tensors, options):
    """The same call with everything differentiable a leaf that wants its gradient."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    options = dict(options)
    for name in ("bias", "sink"):
        if name in options:
            options[name] = options[name].detach().clone().requires_grad_()
    return tensors, options


def wanted_gradients(tensors, options):
    return [*tensors, *(options[name] for name in ("bias", "sink") if name in options)]


def as_operator_arguments(tensors, options):
    """For torch.ops.onchip.attention_forward, by its schema."""
    given = {"alignment": "bottom_right", "window_left": -1, "window_right": -1}
    given |= {"softcap": 0.0, "dropout_p": 0.0}
    given |= dict.fromkeys(("causal", "deterministic", "batch_invariant", "check"), False)
    given |= dict(zip("qkv", tensors, strict=True)) | options
    if "window" in given:
        given["window_left"], given["window_right"] = given.pop("window")
    schema = torch.ops.onchip.attention_forward.default._schema
    return tuple(given.get(argument.name) for argument in schema.arguments)


# Of CASES.
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Results and workspace start as NaN: what a kernel fails to write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def cotangents(o, lse, seed=20):
    return draw(o.shape, o.dtype, seed), draw(lse.shape, lse.dtype, seed + 1)


def run(tensors, options, function=onchip.torch.attention):
    """o, lse and the gradients under fixed cotangents of both."""
    tensors, options = leaves(tensors, options)
    o, lse = function(*tensors, **options, return_lse=True)
    torch.autograd.backward((o, lse), cotangents(o, lse))
    gradients = [x.grad for x in wanted_gradients(tensors, options)]
    return o.detach(), lse.detach(), *gradients


def all_same(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        same(one, other)
