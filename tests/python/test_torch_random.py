"""Random calls, any options together: onchip.torch gives the bits of onchip.ops, both passes."""

import ml_dtypes
import numpy as np
import pytest
from cases import cases
from harness import assert_same_bits
from hypothesis import given

import onchip

torch = pytest.importorskip("torch")

import onchip.torch  # noqa: E402

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def to_torch(array):
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_numpy(tensor):
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


@given(case=cases())
def test_random_calls_equal_onchip_ops(case):
    tensors = [to_torch(x).requires_grad_() for x in case.tensors]
    options = {
        name: to_torch(x) if isinstance(x, np.ndarray) else x for name, x in case.options.items()
    }
    inputs = [*tensors]
    for name in ("bias", "sink"):
        if name in options:
            inputs.append(options[name].requires_grad_())
    o, lse = onchip.torch.attention(*tensors, **options, return_lse=True)
    wanted_o, wanted_lse = onchip.ops.attention_forward(*case.tensors, **case.options)
    assert_same_bits((to_numpy(o), to_numpy(lse)), (wanted_o, wanted_lse))
    outputs, cotangents = [o], [to_torch(case.d_o)]
    if case.d_lse is not None:
        outputs.append(lse)
        cotangents.append(to_torch(case.d_lse))
    gradients = torch.autograd.grad(outputs, inputs, cotangents)
    wanted = onchip.ops.attention_backward(
        case.d_o, *case.tensors, wanted_o, wanted_lse, d_lse=case.d_lse, **case.options
    )
    got = iter(to_numpy(x) for x in gradients)
    assert_same_bits([None if x is None else next(got) for x in wanted], wanted)
