"""Products of a model in low precision, composed by hand: what a converted model must equal, bit for bit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from helpers import linear_by_hand
from torch import nn
from torch.overrides import TorchFunctionMode

from torchao_blockwise import ops


def grouped_by_hand(x, hp, ends, dy, config):
    """(output, grad_input, grad_weight) of experts, composed of the operations that the layer promises."""

    def quantize(t, **kwargs):
        options = {"power_of_2_scales": config.power_of_2_scales, **kwargs}
        return ops.quantize(t, config.activation_format, groups=ends, **options)

    w = ops.quantize(hp, config.weight_format, power_of_2_scales=config.power_of_2_scales).rowwise
    output = ops.grouped_matmul(quantize(x).rowwise, w, ends, out_dtype=config.out_dtype or x.dtype)
    w_columnwise = ops.transpose(w, columns=hp.shape[2])
    grad_input = ops.grouped_matmul(quantize(dy).rowwise, w_columnwise, ends, out_dtype=x.dtype)
    formats = config.activation_format, config.grad_weight_format
    columnwise = (quantize(t, rowwise=False, columnwise=fmt).columnwise for t, fmt in zip((dy, x), formats))
    return output, grad_input, ops.grouped_matmul(*columnwise, ends, along="k", out_dtype=hp.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, config):
        ctx.save_for_backward(x, weight, bias)
        ctx.config = config
        return linear_by_hand(x, weight, bias, x.new_zeros(*x.shape[:-1], weight.shape[0]), config)[0]

    @staticmethod
    def backward(ctx, dy):
        return *linear_by_hand(*ctx.saved_tensors, dy, ctx.config)[1:], None


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mat2, ends, config):
        weight = mat2.mT.contiguous()
        ctx.save_for_backward(x, weight, ends)
        ctx.config = config
        return grouped_by_hand(x, weight, ends, x.new_zeros(x.shape[0], mat2.shape[2]), config)[0]

    @staticmethod
    def backward(ctx, dy):
        _, grad_x, grad_weight = grouped_by_hand(*ctx.saved_tensors, dy.contiguous(), ctx.config)
        return grad_x, grad_weight.mT, None, None


class ProductsByHand(TorchFunctionMode):
    """In this mode `F.linear` with one of `weights`, and each `F.grouped_mm`, is composed by hand of plain tensors."""

    def __init__(self, weights: list[nn.Parameter], config):
        super().__init__()
        self.weights, self.config = {id(w) for w in weights}, config

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear and id(args[1]) in self.weights:
            x, weight, bias = (*args, kwargs.get("bias"))[:3]
            return _Linear.apply(x, weight, bias, self.config)
        if func is torch._grouped_mm:
            return _GroupedMM.apply(*args[:2], kwargs["offs"], self.config)
        return func(*args, **kwargs)
