"""Layers: how a layer trains with quantised weights, activations and gradients."""

from torchao_blockwise.nn.linear import config_of, linear

__all__ = ["config_of", "linear"]
