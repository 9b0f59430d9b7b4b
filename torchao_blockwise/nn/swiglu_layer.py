"""SwiGLU and the linear layer behind it, and the whole SwiGLU MLP: activations are quantized as they are computed.

swiglu_linear   gate, up → h = silu(gate) · up, never in memory: rowwise (· wᵀ = output), and columnwise, saved
SwiGLUMLP       x → gate_up → h → down; backward computes the gradient of gate_up and quantizes it in the one pass,
                and its two GEMMs take it from there
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchao_blockwise import _compat, ops
from torchao_blockwise.formats import Copies, Draws, Groups, Operand
from torchao_blockwise.nn import steps
from torchao_blockwise.nn.contraction import cast_options, grad_input, gradients, output, quantize, quantized_output
from torchao_blockwise.nn.observation import seen
from torchao_blockwise.nn.sharded_linear import AmaxGroups
from torchao_blockwise.nn.weight_products import Contraction, Readable
from torchao_blockwise.nn.weights import are_plain, check_linear, config_of, is_fp8_weight
from torchao_blockwise.tensors import TrainingConfig


def swiglu_linear(
    gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """(silu(gate) · up) @ weight.T + bias; the product is quantized in the pass that computes it.

    gate, up: [.., H] bf16 | f16 | f32, of one shape and dtype, any strides: halves of one projection will do.
    weight: [N, H]. bias: [N] or None. Returns [.., N], as `linear` does.
    With a weight that trains in blockwise FP8, h = silu(gate) · up is computed in fp32 and rounded once to the dtype of
    gate, or autocast's, to which gate and up are cast first; saved are gate, up and one byte an element of h. Another
    weight, in NVFP4 or plain, runs F.linear(F.silu(gate) * up, ..).
    Raises TypeError for dtypes, ValueError for shapes.
    Source: GLU Variants Improve Transformer (arXiv 2002.05202); DeepSeek-V3 report (arXiv 2412.19437), §3.2.3.
    """
    if not (is_fp8_weight(weight) and are_plain(gate, up, bias)):
        return F.linear(F.silu(gate) * up, weight, bias)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        got = f"{gate.dtype} {list(gate.shape)} and {up.dtype} {list(up.shape)}"
        raise ValueError(f"swiglu_linear: gate and up must agree in shape and dtype, got {got}")
    with _compat.no_torch_function():
        gate, up = steps.cast_for_compute(gate), steps.cast_for_compute(up)
        check_linear(gate, weight, bias)
        return steps.apply(_SwiGLULinear, gate, up, weight, bias)


class SwiGLUMLP(nn.Module):
    """down(silu(gate) · up) with (gate | up) = gate_up(x): the MLP of Llama and DeepSeek with one merged projection.

    gate_up: `nn.Linear(dim, 2 · hidden)`, whose first `hidden` rows are the gate's. down: `nn.Linear(hidden, dim)`.
    x: [.., dim] bf16 | f16 | f32 -> [.., dim]. State dict names: `gate_up.weight`, `down.weight` (and biases).
    Where both linears train in blockwise FP8 and gate_up has no bias, the MLP is one autograd function: every operand
    is quantized in the pass that computes it, forward and backward. Saved are FP8 copies of x and h and gate_up(x).
    Else it runs gate_up, then `swiglu_linear`. Hooks belong on the SwiGLUMLP itself.
    Raises ValueError or TypeError as `linear` does.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
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
        if not are_plain(*parameters):
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
        converted = is_fp8_weight(gate_up.weight) and is_fp8_weight(down.weight)
        if not converted or gate_up.bias is not None or not are_plain(x, down.bias):
            gate, up = gate_up(x).chunk(2, -1)
            return swiglu_linear(gate, up, down.weight, down.bias)
        with _compat.no_torch_function():
            x = steps.cast_for_compute(x)
            check_linear(x, gate_up.weight, None)
            configs = config_of(gate_up.weight), config_of(down.weight)
            return steps.apply(
                SwiGLUFunction, x, gate_up.weight, down.weight, down.bias, None, configs, ("", ""), None, None
            )


class _SwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        how = Contraction(config_of(weight))
        needs_inputs, needs_weight = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[2]
        save_quantized = needs_weight and how.config.saves_quantized_activations
        gate2d, up2d = map(steps.as_rows, (gate, up))
        out, columnwise = steps.named(_linear_forward, weight, gate2d, up2d, bias, how, save_quantized)
        needs_both = needs_inputs or (needs_weight and not save_quantized)
        saved = (gate2d, up2d) if needs_both else (None, None)
        steps.save_for_backward(ctx, (weight,), *saved, *(columnwise.tensors if save_quantized else ()))
        ctx.how, ctx.shape = how, gate.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.dtypes = gate.dtype, weight.dtype
        ctx.seen = seen(weight, lambda: ops.swiglu(gate2d, up2d), how)
        return steps.as_shape_of(out, gate)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        steps.refuse_second_order("swiglu_linear")
        weight, gate, up, copy = steps.take_saved(ctx, 3)
        needs_gate, needs_up, needs_weight, needs_bias = ctx.needs_input_grad
        dy, needs = steps.as_rows(grad_output), (needs_gate or needs_up, needs_weight)
        if ctx.seen is not None:
            ctx.seen(dy)
        both, grad_weight = steps.named(_linear_backward, weight, dy, gate, up, copy, ctx.how, needs, ctx.dtypes)
        dgate, dup = (g.view(ctx.shape) if need else None for g, need in zip(both, (needs_gate, needs_up)))
        grad_bias = steps.grad_bias(dy, ctx.bias_dtype) if needs_bias else None
        return dgate, dup, grad_weight, grad_bias


def _linear_forward(
    weight: Readable,
    gate: torch.Tensor,
    up: torch.Tensor,
    bias: torch.Tensor | None,
    how: Contraction,
    columnwise: bool,
) -> tuple[torch.Tensor, Operand | None]:
    """(output, the columnwise copy of h or None)."""
    h = _quantized_swiglu((gate, up), how, True, columnwise)
    return output(h.rowwise, weight, how, how.config.out_dtype or gate.dtype, bias), h.columnwise


def _linear_backward(
    weight: Readable,
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    h_copy: list[Any],
    how: Contraction,
    needs: tuple[bool, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[tuple[torch.Tensor | None, torch.Tensor | None], torch.Tensor | None]:
    """((gradient of gate, of up), gradient of the weight), those that are needed."""
    dh, grad_weight = gradients(
        [*quantize(dy, how, rowwise=needs[0], columnwise=needs[1])],
        _h_columnwise(how, h_copy, [gate, up]),
        dy.shape[0],
        weight,
        how,
        dtypes,
        weight_first=True,
    )
    if dh is None:
        return (None, None), grad_weight
    return ops.swiglu_backward(dh, gate, up, backend=ops.casting_backend(how.config.backend)), grad_weight


class SwiGLUFunction(torch.autograd.Function):
    """down(silu(gate) · up) with (gate | up) = gate_up(x), every operand quantized in the pass that computes it.

    apply(x [.., K], *weights, bias of down or None, None, configs, amax_groups, *keys)
    apply(x [M, K], *weights [E, ..], None, group_ends, configs, amax_groups, *keys)    of experts, rows sorted by them
    configs: of each weight. amax_groups: the process groups over which each is split, as `amax_over` takes them.
    keys: of the random bits that their gradients are rounded by, or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        down_bias: torch.Tensor | None,
        group_ends: torch.Tensor,
        configs: Sequence[TrainingConfig],
        amax_groups: Sequence[str],
        inner_key: torch.Tensor | None,
        outer_key: torch.Tensor | None,
    ) -> torch.Tensor:
        x2d, weights = steps.as_rows(x), (gate_up_weight, down_weight)
        groups = steps.groups_of(group_ends, x2d.shape[0], *configs)
        inner, outer = both = _contractions(configs, amax_groups, groups)
        needs_x, needs_gate_up, needs_down, *_ = ctx.needs_input_grad
        save_x = needs_gate_up and inner.config.saves_quantized_activations
        save_h = needs_down and outer.config.saves_quantized_activations
        out, gate_up, x_copy, h_copy = steps.named(_mlp_forward, *weights, x2d, down_bias, both, save_x, save_h)
        steps.save_for_backward(
            ctx,
            weights,
            *(groups or (None, None)),
            inner_key,
            outer_key,
            x2d if needs_gate_up and not save_x else None,
            gate_up if needs_x or needs_gate_up or (needs_down and not save_h) else None,
            *(x_copy.tensors if save_x else ()),
            *(h_copy.tensors if save_h else ()),
        )
        ctx.configs, ctx.amax_groups = configs, amax_groups
        ctx.save_x, ctx.x_shape, ctx.x_dtype = save_x, x.shape, x.dtype
        ctx.bias_dtype = None if down_bias is None else down_bias.dtype
        ctx.inner_seen = seen(gate_up_weight, x2d, inner)
        ctx.outer_seen = seen(down_weight, lambda: ops.swiglu(*gate_up.chunk(2, 1)), outer)
        return steps.as_shape_of(out, x)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        *weights, group_ends, tables, inner_key, outer_key, x, gate_up, copies = steps.take_saved(ctx, 8)
        steps.refuse_second_order("SwiGLUMLP" if group_ends is None else "swiglu_experts")
        both = _contractions(ctx.configs, ctx.amax_groups, steps.saved_groups(group_ends, tables))
        *needs, needs_bias = ctx.needs_input_grad[:4]
        dy = steps.as_rows(grad_output)
        if ctx.outer_seen is not None:
            ctx.outer_seen(dy)
        if ctx.inner_seen is not None and gate_up is not None:
            ctx.inner_seen(_grad_of_gate_up(weights[1], dy, gate_up, both[1]))
        x_saved, h_saved = ([x], copies) if not ctx.save_x else (copies[:3], copies[3:])
        halves = [] if gate_up is None else [*gate_up.chunk(2, 1)]
        dtypes = ctx.x_dtype, dy.dtype if gate_up is None else gate_up.dtype, *(weight.dtype for weight in weights)
        del copies, gate_up
        draws = ops.draws_for(inner_key, dy), ops.draws_for(outer_key, dy)
        args = x_saved, halves, h_saved, both, (tuple(needs), dtypes), draws
        grad_x, *grads = steps.named(_mlp_backward, *weights, dy, *args)
        grad_bias = steps.grad_bias(dy, ctx.bias_dtype) if needs_bias else None
        grad_x = None if grad_x is None else grad_x.view(ctx.x_shape)
        return grad_x, *grads, grad_bias, None, None, None, None, None


def _mlp_forward(
    gate_up_weight: Readable,
    down_weight: Readable,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    both: tuple[Contraction, Contraction],
    save_x: bool,
    save_h: bool,
) -> tuple[torch.Tensor, torch.Tensor, Operand | None, Operand | None]:
    """(output, gate_up(x), the columnwise copies of x and of h or None)."""
    inner, outer = both
    gate_up, x_copy = quantized_output(x, gate_up_weight, inner, inner.config.out_dtype or x.dtype, columnwise=save_x)
    h = _quantized_swiglu(gate_up.chunk(2, 1), outer, True, save_h)
    out = output(h.rowwise, down_weight, outer, outer.config.out_dtype or x.dtype, bias)
    return out, gate_up, x_copy, h.columnwise


def _mlp_backward(
    gate_up_weight: Readable,
    down_weight: Readable,
    dy: torch.Tensor,
    x_saved: list[Any],
    gate_and_up: list[Any],
    h_copy: list[Any],
    both: tuple[Contraction, Contraction],
    asked: tuple[tuple[bool, ...], tuple[torch.dtype, ...]],
    draws: tuple[Draws | None, ...],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x, of gate_up's weight and of down's, those that are needed.

    asked: which are, and dtypes: of x, of gate_up(x), of the weights. What is in the lists goes when it was used.
    """
    inner, outer = both
    (needs_x, needs_gate_up, needs_down), (x_dtype, dtype, gate_up_dtype, down_dtype) = asked

    def x_anew(x: torch.Tensor) -> Operand:
        return quantize(x, inner, rowwise=False, columnwise=True).columnwise

    dh, grad_down = gradients(
        [*quantize(dy, outer, rowwise=needs_x or needs_gate_up, columnwise=needs_down, draws=draws[1])],
        _h_columnwise(outer, h_copy, gate_and_up),
        dy.shape[0],
        down_weight,
        outer,
        (dtype, down_dtype),
        weight_first=True,
    )
    if dh is None:
        return None, None, grad_down
    options, backend = cast_options(inner.config, needs_x, needs_gate_up), ops.casting_backend(inner.config.backend)
    gate, up = steps.taken(gate_and_up)
    dgate_up = [
        *ops.swiglu_backward_quantize(dh, gate, up, options, groups=inner.groups, draws=draws[0], backend=backend)
    ]
    del dh, gate, up
    # The gradient of gate_up comes last, beside two copies in low precision: with dx last a columnwise copy of gate_up
    # would be there too, with the gradient of down last the copies of dy and h all the time.
    x_columnwise = steps.columnwise_of(x_saved, inner.config, x_anew)
    dtypes, tokens = (x_dtype, gate_up_dtype), dy.shape[0]
    grads = gradients(dgate_up, x_columnwise, tokens, gate_up_weight, inner, dtypes, weight_first=False)
    return *grads, grad_down


def _grad_of_gate_up(
    down_weight: Readable, dy: torch.Tensor, gate_up: torch.Tensor, outer: Contraction
) -> torch.Tensor:
    """What backward quantizes as it computes it, in high precision: for who looks at it."""
    copies = quantize(dy, outer, rowwise=True, columnwise=False)
    dh = grad_input(copies.rowwise, down_weight, outer, gate_up.dtype)
    return torch.cat(ops.swiglu_backward(dh, *gate_up.chunk(2, 1)), 1)


def _contractions(
    configs: Sequence[TrainingConfig], amax_groups: Sequence[str], groups: Groups | None
) -> tuple[Contraction, Contraction]:
    """Of gate_up and of down."""
    inner, outer = (Contraction(config, groups, AmaxGroups(weight=over)) for config, over in zip(configs, amax_groups))
    return inner, outer


def _quantized_swiglu(gate_and_up: Sequence[torch.Tensor], how: Contraction, rowwise: bool, columnwise: bool) -> Copies:
    """Copies of h = silu(gate) · up."""
    gate, up = gate_and_up
    options, backend = cast_options(how.config, rowwise, columnwise), ops.casting_backend(how.config.backend)
    return ops.swiglu_quantize(gate, up, options, groups=how.groups, backend=backend)


def _h_columnwise(how: Contraction, saved: list[Any], gate_and_up: list[Any]) -> Callable[[], Operand]:
    """What gives the columnwise copy of h: the saved one, or one made again; gate and up are needed afterwards."""
    return steps.columnwise_of(saved, how.config, lambda: _quantized_swiglu(gate_and_up, how, False, True).columnwise)
