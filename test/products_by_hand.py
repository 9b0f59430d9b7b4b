"""Products of a model in low precision, composed by hand: what a converted model must equal, bit for bit."""

import torch
import torch.nn.functional as F
from helpers import linear_by_hand
from torch import nn
from torch.overrides import TorchFunctionMode

from torchao_blockwise import ops
from torchao_blockwise.nn.activations import NormInput

# Of norms.
EPS = 1e-5


def grouped_by_hand(x, hp, ends, dy, config, rounding=None):
    """(output, grad_input, grad_weight) of experts, composed of the operations that the layer promises."""

    def quantize(t, **kwargs):
        return ops.quantize(t, config.activation_format, groups=ends, **scales, **kwargs)

    hadamard = getattr(config, "hadamard", False)
    own = getattr(config, "scale_per_expert", False)
    scales = {"power_of_2_scales": config.power_of_2_scales, "scale_per_group": own}
    w = ops.quantize(hp, config.weight_format, **scales).rowwise
    output = ops.grouped_matmul(quantize(x).rowwise, w, ends, out_dtype=config.out_dtype or x.dtype)
    of_dy = quantize(dy, columnwise=True, hadamard=hadamard, stochastic=rounding)
    w_columnwise = ops.transpose(w, columns=hp.shape[2])
    grad_input = ops.grouped_matmul(of_dy.rowwise, w_columnwise, ends, out_dtype=x.dtype)
    of_x = quantize(x, rowwise=False, columnwise=config.grad_weight_format, hadamard=hadamard)
    copies = of_dy.columnwise, of_x.columnwise
    return output, grad_input, ops.grouped_matmul(*copies, ends, along="k", out_dtype=hp.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, *options):
        ctx.save_for_backward(x, weight, bias)
        ctx.options = options
        # No view, since models change outputs in place.
        return linear_by_hand(x, weight, bias, x.new_zeros(*x.shape[:-1], weight.shape[0]), *options)[0].clone()

    @staticmethod
    def backward(ctx, dy):
        return *linear_by_hand(*ctx.saved_tensors, dy, *ctx.options)[1:], None, None


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mat2, ends, *options):
        weight = mat2.mT.contiguous()
        ctx.save_for_backward(x, weight, ends)
        ctx.options = options
        return grouped_by_hand(x, weight, ends, x.new_zeros(x.shape[0], mat2.shape[2]), *options)[0]

    @staticmethod
    def backward(ctx, dy):
        _, grad_x, grad_weight = grouped_by_hand(*ctx.saved_tensors, dy.contiguous(), *ctx.options)
        return grad_x, grad_weight.mT, None, None, None


class Norm(torch.autograd.Function):
    """The output of a norm in the dtype that GEMMs take, and gradients by PyTorch's kernels."""

    @staticmethod
    def forward(ctx, x, weight, bias, dtype):
        x2d = x.reshape(-1, x.shape[-1])
        statistics = ops.norm_statistics(x2d, "rms" if bias is None else "layer", EPS)
        ctx.prepared, ctx.shape = (x2d, *statistics, weight, bias), x.shape
        return ops.normalize(ops.Norm(x2d, weight, bias, *statistics, dtype)).view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        needs = [True, True, ctx.prepared[-1] is not None]
        grad_x, *grads = NormInput.backward(dy.reshape(-1, dy.shape[-1]), ctx.prepared, None, needs)
        return grad_x.view(ctx.shape), *grads, None


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.shape, rows = gate.shape, [t.reshape(-1, t.shape[-1]) for t in (gate, up)]
        ctx.save_for_backward(*rows)
        return ops.swiglu(*rows).view(gate.shape)

    @staticmethod
    def backward(ctx, dh):
        grads = ops.swiglu_backward(dh.reshape(-1, dh.shape[-1]), *ctx.saved_tensors)
        return tuple(grad.view(ctx.shape) for grad in grads)


class ProductsByHand(TorchFunctionMode):
    """In this mode `F.linear` and `bmm` with one of `weights`, and each `F.grouped_mm`, are composed by hand.

    Random bits are those of weights that have their place in `weights` in a model, in backward pass number `use`.
    """

    def __init__(self, weights: list[nn.Parameter], config, use: int = 0):
        super().__init__()
        self.places, self.config, self.use = {id(w): i for i, w in enumerate(weights)}, config, use

    def options(self, weight) -> tuple:
        if not self.config.stochastic_rounding:
            return self.config, None
        stream = 4 * self.places[id(weight)]
        return self.config, ops.StochasticRounding(self.config.seed, stream, self.use)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear and id(args[1]) in self.places:
            x, weight, bias = (*args, kwargs.get("bias"))[:3]
            return _Linear.apply(x, weight, bias, *self.options(weight))
        if func is torch._grouped_mm:
            return _GroupedMM.apply(*args[:2], kwargs["offs"], *self.options(args[1]._base))
        if func is torch.bmm:
            x, mat2 = args
            weight = mat2 if mat2._base is None else mat2._base
            if id(weight) in self.places:
                ends = torch.full((len(x),), x.shape[1]).cumsum(0, dtype=torch.int32)
                return _GroupedMM.apply(x.flatten(0, 1), mat2, ends, *self.options(weight)).view(*x.shape[:2], -1)
        return func(*args, **kwargs)
