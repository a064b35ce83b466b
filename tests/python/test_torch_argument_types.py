"""Arguments of the wrong type: every function and layer of onchip.torch, and what is made of them.
One message, whether or not PyTorch's dispatcher is on the way."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from argument_cases import RIGHT, calls, refusals  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import onchip.torch  # noqa: E402
from onchip.compat import flash_attn  # noqa: E402
from onchip.torch import nn  # noqa: E402


def as_tensors(value):
    if isinstance(value, tuple):
        return tuple(as_tensors(part) for part in value)
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def _calls():
    """(function, good call) by the name that messages have."""
    made = {}
    for name, call in calls().items():
        function = getattr(onchip.torch, name.removesuffix("_forward"), None)
        if function is not None and not name.endswith("_backward"):
            made[name] = (function, {key: as_tensors(value) for key, value in call.items()})
    made["attention_forward"] = (onchip.torch.attention, made["attention_forward"][1])
    q = torch.randn(2, 4, 5, 8)
    made["scaled_dot_product_attention"] = (
        onchip.torch.scaled_dot_product_attention,
        dict(query=q, key=q, value=q),
    )
    return made


CALLS = _calls()
LAYERS = {
    "Attention": dict(embed_dim=16, num_heads=2),
    "GatedDeltaNet": dict(embed_dim=16, num_heads=2, head_dim=4),
    "Mamba2": dict(embed_dim=64),
    "MLSTM": dict(embed_dim=16, num_heads=2),
    "RetNet": dict(embed_dim=16, num_heads=2),
}


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_every_function_is_here():
    names = {function.__name__ for function, _ in CALLS.values()}
    assert names == set(onchip.torch.__all__) - {"nn"}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_types_are_refused_by_name(name):
    assert refusals(name, *CALLS[name]) == []


@pytest.mark.parametrize("name", CALLS)
def test_wrong_types_are_refused_before_the_dispatcher(name):
    with Watching():
        assert refusals(name, *CALLS[name]) == []


def test_wrong_types_are_refused_where_gradients_are_wanted():
    q = torch.randn(2, 5, 4, 8, requires_grad=True)
    assert refusals("attention_forward", onchip.torch.attention, dict(q=q, k=q, v=q)) == []
    simple_gla = onchip.torch.simple_gla
    given = dict(q=q, k=q, v=q, log_decay=None)
    assert refusals("simple_gla_forward", simple_gla, given) == []


def test_a_flag_of_a_number_and_of_numpy():
    q = torch.randn(2, 4, 5, 8)
    for value in RIGHT["flag"]:
        got = onchip.torch.scaled_dot_product_attention(q, q, q, is_causal=value)
        wanted = onchip.torch.scaled_dot_product_attention(q, q, q, is_causal=bool(value))
        assert torch.equal(got, wanted)
        with Watching():
            o = onchip.torch.attention(q, q, q, causal=value, scale=np.float32(0.5))
        assert torch.equal(o, onchip.torch.attention(q, q, q, causal=bool(value), scale=0.5))


def test_deterministic_is_looked_at_where_all_is():
    q = torch.randn(2, 5, 4, 8)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(onchip.InvalidArgument, match="attention_forward: deterministic: got"):
            onchip.torch.attention(q, q, q, deterministic="yes")
    finally:
        torch.use_deterministic_algorithms(False)


def test_compiled_calls_take_the_numbers_of_shapes():
    def function(q, factor):
        scale = factor * q.shape[-1] ** -0.5
        return onchip.torch.attention(
            q, q, q, scale=scale, max_seqlen_q=q.shape[1], window=(q.shape[1], 0)
        )

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="eager")
    for length in (5, 9):
        q = torch.randn(1, length, 2, 8)
        assert torch.equal(compiled(q, 0.5), function(q, 0.5))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_refuse_wrong_types_as_they_are_made(name):
    found = refusals(name, getattr(nn, name), LAYERS[name])
    # Which backends there are is known to the operators alone.
    assert [x for x in found if x != "backend = wrong value 0 (str): accepted"] == []


@pytest.mark.parametrize("name", LAYERS)
def test_layers_refuse_wrong_types_in_a_call(name):
    layer = getattr(nn, name)(**LAYERS[name])
    call = dict(x=torch.randn(2, 3, LAYERS[name]["embed_dim"]))
    assert (
        refusals(
            "(Attention|attention_forward)" if name == "Attention" else name, layer.forward, call
        )
        == []
    )
    if name != "Attention":
        assert refusals(name, layer.new_state, dict(num_seqs=2)) == []
        rows = dict(rows=[0, 1])
        assert refusals("RecurrentState", layer.new_state(2).select, rows) == []


def test_the_gated_norm():
    assert refusals("GatedRMSNorm", nn.GatedRMSNorm, dict(dim=8)) == []
    x = torch.randn(2, 8)
    forward = nn.GatedRMSNorm(8).forward
    assert refusals("(GatedRMSNorm|rms_norm_gated_forward)", forward, dict(x=x, gate=x)) == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, "float32"], ids=str)
def test_layers_take_floating_point_dtypes(dtype):
    with pytest.raises(onchip.InvalidArgument, match=r"^MLSTM: dtype: got .*, wanted a floating"):
        nn.MLSTM(16, 2, dtype=dtype)


def _flash_calls():
    q = torch.randn(2, 5, 4, 8)
    lengths = torch.tensor([5, 6], dtype=torch.int32)
    caches = dict(k_cache=torch.randn(2, 9, 4, 8), v_cache=torch.randn(2, 9, 4, 8))
    return {
        "flash_attn_func": dict(q=q, k=q, v=q),
        "flash_attn_kvpacked_func": dict(q=q, kv=torch.stack([q, q], 2)),
        "flash_attn_qkvpacked_func": dict(qkv=torch.stack([q, q, q], 2)),
        "flash_attn_with_kvcache": dict(q=q, **caches, cache_seqlens=lengths),
    }


@pytest.mark.parametrize("name", _flash_calls())
def test_flash_attn(name):
    """Keys and values, and what the functions have the same word for, may be refused by the
    operator that takes them on."""
    operator = "attention_decode" if name.endswith("kvcache") else "attention_forward"
    function, call = getattr(flash_attn, name), _flash_calls()[name]
    others = {"k", "v", "cache_leftpad", "cache_batch_idx"}
    assert refusals(f"({name}|{operator})", function, call, leave_out=others) == []
