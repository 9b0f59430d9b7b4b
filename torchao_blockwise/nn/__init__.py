"""Layers that train with quantized weights, activations and gradients."""

from torchao_blockwise.nn.expert_layer import SwiGLUExperts, swiglu_experts
from torchao_blockwise.nn.gemms import sac_save_list
from torchao_blockwise.nn.grouped_layer import grouped_linear
from torchao_blockwise.nn.layer import linear
from torchao_blockwise.nn.norm_linear import NormLinear
from torchao_blockwise.nn.permutation import permute, unpermute
from torchao_blockwise.nn.swiglu_layer import SwiGLUMLP, swiglu_linear
from torchao_blockwise.nn.weights import config_of

__all__ = [
    "NormLinear",
    "SwiGLUExperts",
    "SwiGLUMLP",
    "config_of",
    "grouped_linear",
    "linear",
    "permute",
    "sac_save_list",
    "swiglu_experts",
    "swiglu_linear",
    "unpermute",
]
