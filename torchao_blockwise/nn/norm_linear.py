"""A norm and the linear layer behind it, as one layer: what the norm gives is quantized in the pass that computes it.

    forward    x → statistics [T]; x → y = norm(x), never in memory: rowwise (· wᵀ = output), and columnwise, saved
    backward   dy → rowwise (· w = gradient of y → PyTorch's backward of the norm), columnwise (· columnwise y)

What is saved: x, the statistics and one byte an element of y.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat, ops
from torchao_blockwise.formats import Operand
from torchao_blockwise.nn import steps
from torchao_blockwise.nn.contraction import cast_options, gradients, output, quantize
from torchao_blockwise.nn.converted import ConvertedLinear
from torchao_blockwise.nn.observation import seen
from torchao_blockwise.nn.weight_products import Contraction, Readable
from torchao_blockwise.nn.weights import are_plain, check_linear, config_of, is_fp8_weight

aten = torch.ops.aten
_KINDS = {nn.RMSNorm: "rms", nn.LayerNorm: "layer"}


class NormLinear(nn.Module):
    """linear(norm(x)): an `nn.RMSNorm` or `nn.LayerNorm`, then an `nn.Linear`, fused where the linear trains in FP8.

    norm: what to normalize by, "rms" or "layer". eps, bias, device, dtype: as in the modules; RMSNorm and the linear
        share `bias` of the linear alone, a LayerNorm has a bias of its own.

    x: [.., in_features] bf16 | f16 | f32 -> [.., out_features]; any number of tokens, 0 included.
    The modules stay what they are, children named `norm` and `linear`, and so do their names in state dicts
    (`norm.weight`, `linear.weight`, ..): `quantize_` converts the linear as any other. Until it does, in NVFP4, and
    where a parameter is a shard (FSDP2 on a child, tensor parallel), the layer runs one module after the other. Fused,
    it runs neither: hooks belong on the NormLinear itself.

    The output is that of the two modules bit for bit, given the statistics: y is computed in fp32 and rounded once, to
    the dtype of x or autocast's. Gradients are the composed ones; that of the norm is PyTorch's own.
    Raises ValueError for another norm, TypeError for another dtype.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.2.3 and §3.3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        norm: str = "rms",
        eps: float | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        if norm == "rms":
            self.norm: nn.Module = nn.RMSNorm(in_features, eps=eps, **made)
        elif norm == "layer":
            self.norm = nn.LayerNorm(in_features, eps=1e-5 if eps is None else eps, **made)
        else:
            raise ValueError(f"NormLinear: norm must be 'rms' or 'layer', got {norm!r}")
        self.linear = nn.Linear(in_features, out_features, bias=bias, **made)

    @classmethod
    def from_modules(cls, norm: nn.RMSNorm | nn.LayerNorm, linear: nn.Linear) -> NormLinear:
        """The layer made of these very modules, converted or not; nothing is copied.

        Raises TypeError for modules of other kinds, ValueError unless the norm is over the linear's in_features.
        """
        if type(norm) not in _KINDS or not isinstance(linear, nn.Linear):
            got = f"{type(norm).__name__} and {type(linear).__name__}"
            raise TypeError(f"NormLinear: it is made of an nn.RMSNorm or nn.LayerNorm and an nn.Linear, got {got}")
        if tuple(norm.normalized_shape) != (linear.in_features,):
            raise ValueError(
                f"NormLinear: the norm must be over in_features={linear.in_features}, "
                f"got normalized_shape={tuple(norm.normalized_shape)}"
            )
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.norm, self.linear = norm, linear
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm: Any = self.norm
        linear = self.linear
        norm_bias = getattr(norm, "bias", None)
        is_plain_linear = type(linear).forward in (nn.Linear.forward, ConvertedLinear.forward)
        if not (is_plain_linear and is_fp8_weight(linear.weight) and are_plain(x, norm.weight, norm_bias, linear.bias)):
            return linear(norm(x))
        # What PyTorch takes for an RMSNorm without one.
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        with _compat.no_torch_function():
            check_linear(x, linear.weight, linear.bias)
            modules = norm.weight, norm_bias, linear.weight, linear.bias, _KINDS[type(norm)], eps
            return steps.apply(_NormLinear, x, *modules, steps.compute_dtype(x))


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kind: str,
        eps: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        config = config_of(weight)
        how = Contraction(config)
        x2d = steps.as_rows(x)
        needs_norm, needs_weight = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
        save_quantized = needs_weight and config.saves_quantized_activations
        args = x2d, (kind, eps, norm_weight, norm_bias), bias, how, dtype, save_quantized
        out, statistics, columnwise = steps.named(_forward, weight, *args)
        needs_x = needs_norm or (needs_weight and not save_quantized)
        saved = (x2d, *statistics, norm_weight, norm_bias) if needs_x else (None,) * 5
        steps.save_for_backward(ctx, (weight,), *saved, *(columnwise.tensors if save_quantized else ()))
        ctx.config, ctx.dtype, ctx.x_shape = config, dtype, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.seen = seen(weight, lambda: ops.normalize(x2d, statistics, norm_weight, norm_bias, dtype=dtype), how)
        return steps.as_shape_of(out, x)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        steps.refuse_second_order("NormLinear")
        weight, *norm, copy = steps.take_saved(ctx, 6)
        *needs, needs_weight, needs_bias = ctx.needs_input_grad[:5]
        dy = steps.as_rows(grad_output)
        if ctx.seen is not None:
            ctx.seen(dy)
        args = tuple(norm), copy, Contraction(ctx.config), (*needs, needs_weight), (ctx.dtype, weight.dtype)
        # By name: in a compiler of PyTorch 2.11 a starred list is a tuple.
        grad_x, grad_norm_weight, grad_norm_bias, grad_weight = steps.named(_backward, weight, dy, *args)
        grad_x = None if grad_x is None else grad_x.view(ctx.x_shape)
        grad_bias = steps.grad_bias(dy, ctx.bias_dtype) if needs_bias else None
        return grad_x, grad_norm_weight, grad_norm_bias, grad_weight, grad_bias, None, None, None


def _forward(
    weight: Readable,
    x: torch.Tensor,
    norm: tuple[Any, ...],
    bias: torch.Tensor | None,
    how: Contraction,
    dtype: torch.dtype,
    columnwise: bool,
) -> tuple[torch.Tensor, ops.NormStatistics, Operand | None]:
    """(output, statistics of the norm, the columnwise copy of y or None). norm: kind, eps, weight and bias."""
    kind, eps, norm_weight, norm_bias = norm
    backend = ops.casting_backend(how.config.backend)
    statistics = ops.norm_statistics(x, kind, eps, backend=backend)
    options = cast_options(how.config, True, columnwise)
    y = ops.norm_quantize(x, options, statistics, norm_weight, norm_bias, dtype=dtype, backend=backend)
    return output(y.rowwise, weight, how, how.config.out_dtype or dtype, bias), statistics, y.columnwise


def _backward(
    weight: Readable,
    dy: torch.Tensor,
    norm: tuple[Any, ...],
    y_copy: list[Any],
    how: Contraction,
    needs: tuple[bool, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x, of the norm's weight and bias, and of the weight, those that are needed.

    norm: x, mean, rstd, the norm's weight and bias. dtypes: of y, of the weight.
    """
    *needs_norm, needs_weight = needs
    x, mean, rstd, norm_weight, norm_bias = norm

    def anew() -> Operand:
        options, statistics = cast_options(how.config, False, True), ops.NormStatistics(mean, rstd)
        backend = ops.casting_backend(how.config.backend)
        vectors = norm_weight, norm_bias
        return ops.norm_quantize(x, options, statistics, *vectors, dtype=dtypes[0], backend=backend).columnwise

    grad_y, grad_weight = gradients(
        [*quantize(dy, how, rowwise=any(needs_norm), columnwise=needs_weight)],
        steps.columnwise_of(y_copy, how.config, anew),
        dy.shape[0],
        weight,
        how,
        dtypes,
        weight_first=True,
    )
    if grad_y is None:
        return None, None, None, grad_weight
    grad_x, grad_norm_weight, grad_norm_bias = norm_backward(grad_y, x, mean, rstd, norm_weight, norm_bias, needs_norm)
    return grad_x, grad_norm_weight, grad_norm_bias, grad_weight


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    needs: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Gradients of x, weight and bias of a norm over the rows of `x` [T, K], those that are needed; the others None.

    By PyTorch's own kernels. They take tensors of one dtype, on a CPU of fp32 with fp32 statistics, so all is fp32
    where dtypes differ; RMSNorm has a backward kernel on GPUs alone.
    """
    inputs: list[Any] = [dy, x, weight, bias]
    if not (x.is_cuda and all(t is None or t.dtype == x.dtype for t in inputs)):
        inputs = [None if t is None else t.float() for t in inputs]
    dy32, x32, weight32, bias32 = inputs
    shape = [x.shape[-1]]
    if mean is not None:
        statistics = mean[:, None], rstd[:, None]
        grads = aten.native_layer_norm_backward(dy32, x32, shape, *statistics, weight32, bias32, list(needs))
    elif x.is_cuda:
        grads = aten._fused_rms_norm_backward(dy32, x32, shape, rstd[:, None], weight32, list(needs[:2]))
    else:
        grads = _rms_norm_backward(dy32, x32, rstd[:, None], weight32)
    like: tuple[Any, ...] = (x, weight, bias)
    return [g.to(t.dtype) if need else None for g, t, need in zip((*grads, None), like, needs)]


def _rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    normalized = x * rstd
    grad = dy if weight is None else dy * weight
    grad_x = rstd * (grad - normalized * (grad * normalized).mean(-1, keepdim=True))
    return grad_x, (dy * normalized).sum(0)
