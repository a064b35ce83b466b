"""The operators as PyTorch functions, on CUDA and CPU tensors, differentiable.

    import onchip.torch
    o = onchip.torch.attention(q, k, v, causal=True)

Results come from PyTorch's allocators and work goes to its current stream, without waiting for the
GPU: calls may be captured in a CUDA graph and replayed. Inside `torch.compile` the operators
`torch.ops.onchip.attention_forward` and `attention_backward` stand in the graph.
"""

from onchip.torch import nn
from onchip.torch._attention import attention
from onchip.torch._decode import attention_decode
from onchip.torch._sdpa import scaled_dot_product_attention

__all__ = ["attention", "attention_decode", "nn", "scaled_dot_product_attention"]
