"""SwiGLU and the linear layer behind it, and the whole SwiGLU MLP: activations are quantised as they are computed.

swiglu_linear   gate, up → h = silu(gate) · up, never in memory: rowwise (· wᵀ = output), and columnwise, saved
SwiGLUMLP       x → gate_up → h → down; backward computes the gradient of gate_up and quantises it in the one pass,
                and its two GEMMs take it from there
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from torchao_blockwise import _compat, ops
from torchao_blockwise.formats import Groups, Operand
from torchao_blockwise.nn import fused, steps
from torchao_blockwise.nn.linear import check_linear, config_of
from torchao_blockwise.nn.weight_product import weight_product


def swiglu_linear(
    gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """(silu(gate) · up) @ weight.T + bias; the product is quantised in the pass that computes it.

    gate, up: [.., H] bf16 | f16 | f32, of one shape and dtype, any strides: halves of one projection will do.
    weight: [N, H]. bias: [N] or None. Returns [.., N], as `linear` does.
    With a weight that trains in blockwise FP8, h = silu(gate) · up is computed in fp32 and rounded once to the dtype of
    gate, or autocast's, to which gate and up are cast first; saved are gate, up and one byte an element of h. Another
    weight, in NVFP4 or plain, runs F.linear(F.silu(gate) * up, ..).
    Raises TypeError for dtypes, ValueError for shapes.
    Source: GLU Variants Improve Transformer (arXiv 2002.05202); DeepSeek-V3 report (arXiv 2412.19437), §3.2.3.
    """
    if not (fused.is_fp8_weight(weight) and fused.are_plain(gate, up, bias)):
        return F.linear(F.silu(gate) * up, weight, bias)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        got = f"{gate.dtype} {list(gate.shape)} and {up.dtype} {list(up.shape)}"
        raise ValueError(f"swiglu_linear: gate and up must agree in shape and dtype, got {got}")
    with _compat.no_torch_function():
        dtype = steps.compute_dtype(gate)
        gate, up = gate.to(dtype), up.to(dtype)
        check_linear(gate, weight, bias)
        return _SwiGLULinear.apply(gate, up, weight, bias)


class SwiGLUMLP(nn.Module):
    """down(silu(gate) · up) with (gate | up) = gate_up(x): the MLP of Llama and DeepSeek with one merged projection.

    gate_up: `nn.Linear(dim, 2 · hidden)`, whose first `hidden` rows are the gate's. down: `nn.Linear(hidden, dim)`.
    x: [.., dim] bf16 | f16 | f32 -> [.., dim]. State dict names: `gate_up.weight`, `down.weight` (and biases).
    Where both linears train in blockwise FP8 and gate_up has no bias, the MLP is one autograd function: every operand
    is quantised in the pass that computes it, forward and backward. Saved are FP8 copies of x and h and gate_up(x).
    Else it runs gate_up, then `swiglu_linear`. Hooks belong on the SwiGLUMLP itself.
    Raises ValueError or TypeError as `linear` does.
    """

    def __init__(self, dim: int, hidden: int, *, bias: bool = False, device=None, dtype: torch.dtype | None = None):
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=bias, device=device, dtype=dtype)
        self.down = nn.Linear(hidden, dim, bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_modules(cls, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> SwiGLUMLP:
        """The MLP with the values of three linears, not converted yet; gate and up are copied into one.

        Raises ValueError unless their features fit, TypeError for a converted gate or up.
        """
        if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):
            raise ValueError(f"SwiGLUMLP: gate and up must agree in features and bias, got {gate} and {up}")
        if down.in_features != gate.out_features:
            raise ValueError(f"SwiGLUMLP: down must take {gate.out_features} features, got {down}")
        parameters = [p for m in (gate, up) for p in m.parameters(recurse=False)]
        if not fused.are_plain(*parameters):
            kinds = sorted({type(p).__name__ for p in parameters})
            raise TypeError(f"SwiGLUMLP: gate and up must hold plain Parameters, got {kinds}; convert the SwiGLUMLP")
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        made = {"device": gate.weight.device, "dtype": gate.weight.dtype}
        self.gate_up = nn.Linear(gate.in_features, 2 * gate.out_features, bias=gate.bias is not None, **made)
        self.down = down
        with torch.no_grad():
            for name, merged in self.gate_up.named_parameters():
                merged.copy_(torch.cat((getattr(gate, name), getattr(up, name))))
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, down = self.gate_up, self.down
        converted = fused.is_fp8_weight(gate_up.weight) and fused.is_fp8_weight(down.weight)
        if not converted or gate_up.bias is not None or not fused.are_plain(x, down.bias):
            gate, up = gate_up(x).chunk(2, -1)
            return swiglu_linear(gate, up, down.weight, down.bias)
        with _compat.no_torch_function():
            x = x.to(steps.compute_dtype(x))
            check_linear(x, gate_up.weight, None)
            configs = config_of(gate_up.weight), config_of(down.weight)
            return SwiGLUFunction.apply(x, gate_up.weight, down.weight, down.bias, None, configs, ("", ""))


class _SwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, weight, bias):
        config = config_of(weight)
        needs_inputs, needs_weight = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[2]
        save_quantized = needs_weight and config.saves_quantized_activations
        gate2d, up2d = map(steps.as_rows, (gate, up))
        options = fused.cast_options(config, True, save_quantized)
        rowwise, columnwise = ops.swiglu_quantize(gate2d, up2d, options, backend=ops.casting_backend(config.backend))
        out_dtype = config.out_dtype or gate.dtype
        out = weight_product(rowwise, weight, config, columnwise=False, out_dtype=out_dtype, bias=bias)
        needs_both = needs_inputs or (needs_weight and not save_quantized)
        saved = (gate2d, up2d) if needs_both else (None, None)
        steps.save_for_backward(ctx, (weight,), *saved, *steps.fields(columnwise))
        ctx.config, ctx.save_quantized, ctx.shape = config, save_quantized, gate.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return steps.as_shape_of(out, gate)

    @staticmethod
    def backward(ctx, grad_output):
        steps.refuse_second_order("swiglu_linear")
        config = ctx.config
        weight, gate, up, *columnwise = steps.take_saved(ctx)
        needs_gate, needs_up, needs_weight, needs_bias = ctx.needs_input_grad
        dy = steps.as_rows(grad_output)
        dgate = dup = grad_weight = grad_bias = None
        dy_rowwise, dy_columnwise = fused.quantized(dy, config, rowwise=needs_gate or needs_up, columnwise=needs_weight)
        if needs_weight:
            h_columnwise = _h_columnwise(config, columnwise if ctx.save_quantized else None, gate, up)
            grad_weight = fused.grad_weight(dy_columnwise, h_columnwise, weight, config)
            del h_columnwise
        del dy_columnwise, columnwise
        if needs_gate or needs_up:
            dh = fused.grad_input(dy_rowwise, weight, config, gate.dtype)
            del dy_rowwise
            gradients = ops.swiglu_backward(dh, gate, up, backend=ops.casting_backend(config.backend))
            dgate, dup = (
                g.view(ctx.shape) if need else None for g, need in zip(gradients, (needs_gate, needs_up))
            )  # fmt: skip
        if needs_bias:
            grad_bias = steps.grad_bias(dy, ctx.bias_dtype)
        return dgate, dup, grad_weight, grad_bias


class SwiGLUFunction(torch.autograd.Function):
    """down(silu(gate) · up) with (gate | up) = gate_up(x), every operand quantised in the pass that computes it.

    apply(x [.., K], *weights, bias of down or None, None, configs, amax_groups)
    apply(x [M, K], *weights [E, ..], None, group_ends, configs, amax_groups)    of experts, by whom rows are sorted
    configs, amax_groups: of each weight, as `weight_product` takes them.
    """

    @staticmethod
    def forward(ctx, x, gate_up_weight, down_weight, down_bias, group_ends, configs, amax_groups):
        ctx.configs, ctx.amax_groups = configs, amax_groups
        (inner, outer), (inner_groups, outer_groups) = configs, amax_groups
        needs_x, needs_gate_up, needs_down, *_ = ctx.needs_input_grad
        save_x = needs_gate_up and inner.saves_quantized_activations
        save_h = needs_down and outer.saves_quantized_activations
        x2d = steps.as_rows(x)
        groups = fused.groups_of(group_ends, x2d.shape[0], inner, outer)
        x_rowwise, x_columnwise = fused.quantized(x2d, inner, rowwise=True, columnwise=save_x, groups=groups)
        out_dtype = inner.out_dtype or x.dtype
        gate_up = weight_product(
            x_rowwise,
            gate_up_weight,
            inner,
            columnwise=False,
            out_dtype=out_dtype,
            amax_groups=inner_groups,
            groups=groups,
        )
        del x_rowwise
        options, backend = fused.cast_options(outer, True, save_h), ops.casting_backend(outer.backend)
        gate, up = gate_up.chunk(2, 1)
        h_rowwise, h_columnwise = ops.swiglu_quantize(gate, up, options, groups=groups, backend=backend)
        del gate, up
        out_dtype = outer.out_dtype or x.dtype
        out = weight_product(
            h_rowwise, down_weight, outer, columnwise=False, out_dtype=out_dtype, bias=down_bias,
            amax_groups=outer_groups, groups=groups,
        )  # fmt: skip
        steps.save_for_backward(
            ctx,
            (gate_up_weight, down_weight),
            *(groups or (None, None)),
            x2d if needs_gate_up and not save_x else None,
            gate_up if needs_x or needs_gate_up or (needs_down and not save_h) else None,
            *steps.fields(x_columnwise),
            *steps.fields(h_columnwise),
        )
        ctx.save_x, ctx.save_h, ctx.x_shape, ctx.x_dtype = save_x, save_h, x.shape, x.dtype
        ctx.bias_dtype = None if down_bias is None else down_bias.dtype
        return steps.as_shape_of(out, x)

    @staticmethod
    def backward(ctx, grad_output):
        gate_up_weight, down_weight, group_ends, tables, x, gate_up, *copies = steps.take_saved(ctx)
        groups = fused.saved_groups(group_ends, tables)
        steps.refuse_second_order("SwiGLUMLP" if group_ends is None else "swiglu_experts")
        (inner, outer), (inner_groups, outer_groups) = ctx.configs, ctx.amax_groups
        needs_x, needs_gate_up, needs_down, needs_bias, *_ = ctx.needs_input_grad
        dy = steps.as_rows(grad_output)
        grad_x = grad_gate_up = grad_down = grad_bias = None
        x_copies, h_copies = copies[:3], copies[3:]
        del copies
        gate, up = (None, None) if gate_up is None else gate_up.chunk(2, 1)
        dtype = None if gate_up is None else gate_up.dtype
        del gate_up
        dy_rowwise, dy_columnwise = fused.quantized(
            dy, outer, rowwise=needs_x or needs_gate_up, columnwise=needs_down, groups=groups
        )
        if needs_down:
            h_columnwise = _h_columnwise(outer, h_copies if ctx.save_h else None, gate, up, groups)
            grad_down = fused.grad_weight(dy_columnwise, h_columnwise, down_weight, outer, groups=groups)
            del h_columnwise
        # Each copy goes when its product is done: together they would be most of a step's memory. The gradient of
        # gate_up comes last, beside two copies in low precision: with dx last a columnwise copy of gate_up would be
        # there too, with the gradient of down last the copies of dy and h all the time.
        del dy_columnwise, h_copies
        if needs_x or needs_gate_up:
            dh = fused.grad_input(dy_rowwise, down_weight, outer, dtype, amax_groups=outer_groups, groups=groups)
            del dy_rowwise
            options, backend = fused.cast_options(inner, needs_x, needs_gate_up), ops.casting_backend(inner.backend)
            rowwise, columnwise = ops.swiglu_backward_quantize(dh, gate, up, options, groups=groups, backend=backend)
            del dh, gate, up
        if needs_x:
            grad_x = fused.grad_input(
                rowwise, gate_up_weight, inner, ctx.x_dtype, amax_groups=inner_groups, groups=groups
            ).view(ctx.x_shape)
            del rowwise
        if needs_gate_up:
            if ctx.save_x:
                x_columnwise = steps.operand_of(x_copies, inner)
            else:
                x_columnwise = fused.quantized(x, inner, rowwise=False, columnwise=True, groups=groups).columnwise
            grad_gate_up = fused.grad_weight(columnwise, x_columnwise, gate_up_weight, inner, groups=groups)
        if needs_bias:
            grad_bias = steps.grad_bias(dy, ctx.bias_dtype)
        return grad_x, grad_gate_up, grad_down, grad_bias, None, None, None


def _h_columnwise(config, saved, gate, up, groups: Groups | None = None) -> Operand:
    """The columnwise copy of silu(gate) · up: the saved one, or made again from what was saved in its place."""
    if saved is not None:
        return steps.operand_of(saved, config)
    options, backend = fused.cast_options(config, False, True), ops.casting_backend(config.backend)
    return ops.swiglu_quantize(gate, up, options, groups=groups, backend=backend).columnwise
