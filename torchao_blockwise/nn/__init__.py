"""Layers: how a layer trains with quantised weights, activations and gradients."""

from torchao_blockwise.nn.linear import config_of, linear
from torchao_blockwise.nn.norm_linear import NormLinear
from torchao_blockwise.nn.swiglu_linear import SwiGLUMLP, swiglu_linear

__all__ = ["NormLinear", "SwiGLUMLP", "config_of", "linear", "swiglu_linear"]
