"""Layers made of the operators."""

import torch.serialization

from onchip.torch.nn._attention import Attention
from onchip.torch.nn._gated_delta_net import GatedDeltaNet
from onchip.torch.nn._mamba2 import Mamba2
from onchip.torch.nn._mlstm import MLSTM
from onchip.torch.nn._norms import GatedRMSNorm
from onchip.torch.nn._recurrent import RecurrentState
from onchip.torch.nn._retnet import RetNet

__all__ = [
    "MLSTM",
    "Attention",
    "GatedDeltaNet",
    "GatedRMSNorm",
    "Mamba2",
    "RecurrentState",
    "RetNet",
]

# A state that was saved by torch.save names its public place, and torch.load takes it as it does
# tensors (weights_only) once this package is imported.
RecurrentState.__module__ = __name__
torch.serialization.add_safe_globals([RecurrentState])
