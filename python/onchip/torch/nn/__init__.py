"""Layers made of the operators."""

from onchip.torch.nn._attention import Attention

__all__ = ["Attention"]
