"""The operators as PyTorch functions, on CUDA and CPU tensors, differentiable.

    import onchip.torch
    o = onchip.torch.attention(q, k, v, causal=True)
    o, state = onchip.torch.simple_gla(q, k, v, log_decay, output_final_state=True)
    o = onchip.torch.simple_gla_step(q, k, v, log_decay, state=state)

Results come from PyTorch's allocators and work goes to its current stream, without waiting for the
GPU: calls may be captured in a CUDA graph and replayed. Inside `torch.compile` the operators
of `torch.ops.onchip` (`attention_forward`, `attention_backward`, ...) stand in the graph.
"""

from onchip.torch import nn
from onchip.torch._attention import attention
from onchip.torch._decode import attention_decode
from onchip.torch._linear import (
    causal_conv1d,
    causal_conv1d_step,
    comba,
    comba_step,
    delta_rule,
    delta_rule_step,
    gated_delta_product,
    gated_delta_product_step,
    gated_delta_rule,
    gated_delta_rule_step,
    gdn2,
    gdn2_step,
    gla,
    gla_step,
    gsa,
    gsa_step,
    hgrn2,
    hgrn2_step,
    iplr,
    iplr_step,
    kda,
    kda_step,
    l2norm,
    lightning_attention,
    lightning_attention_step,
    linear_attention,
    linear_attention_step,
    mamba2,
    mamba2_step,
    mlstm,
    mlstm_step,
    retention,
    retention_step,
    rms_norm_gated,
    rwkv6,
    rwkv6_step,
    rwkv7,
    rwkv7_step,
    simple_gla,
    simple_gla_step,
)
from onchip.torch._sdpa import scaled_dot_product_attention

__all__ = [
    "attention",
    "attention_decode",
    "causal_conv1d",
    "causal_conv1d_step",
    "comba",
    "comba_step",
    "delta_rule",
    "delta_rule_step",
    "gated_delta_product",
    "gated_delta_product_step",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gdn2",
    "gdn2_step",
    "gla",
    "gla_step",
    "gsa",
    "gsa_step",
    "hgrn2",
    "hgrn2_step",
    "iplr",
    "iplr_step",
    "kda",
    "kda_step",
    "l2norm",
    "lightning_attention",
    "lightning_attention_step",
    "linear_attention",
    "linear_attention_step",
    "mamba2",
    "mamba2_step",
    "mlstm",
    "mlstm_step",
    "nn",
    "retention",
    "retention_step",
    "rms_norm_gated",
    "rwkv6",
    "rwkv6_step",
    "rwkv7",
    "rwkv7_step",
    "scaled_dot_product_attention",
    "simple_gla",
    "simple_gla_step",
]
