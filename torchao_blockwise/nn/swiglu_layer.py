"""SwiGLU and the linear layer behind it, and the whole SwiGLU MLP: activations are quantized as they are computed.

swiglu_linear   gate, up → h = silu(gate) · up, never in memory: rowwise (· wᵀ = output), and columnwise, saved
SwiGLUMLP       x → gate_up → h → down; backward computes the gradient of gate_up and quantizes it in the one pass,
                and its two GEMMs take it from there
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchao_blockwise import _compat, ops
from torchao_blockwise.formats import Groups, Operand
from torchao_blockwise.nn.activations import Input, SwiGLUInput, as_rows
from torchao_blockwise.nn.gemms import AmaxGroups, GemmSpec, cast_options, gradients, quantize, weight_gemm, with_groups
from torchao_blockwise.nn.layer import (
    Layer,
    as_shape_of,
    cast_for_compute,
    grad_bias,
    groups_of,
    operand_of,
    profiled,
    refuse_second_order,
    save_for_backward,
    take_saved,
)
from torchao_blockwise.nn.observation import observe_gemm
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
        gate, up = cast_for_compute(gate), cast_for_compute(up)
        check_linear(gate, weight, bias)
        config = config_of(weight)
        spec = GemmSpec(None, config, gate.dtype, config.out_dtype or gate.dtype)
        layer = "swiglu_linear", SwiGLUInput, spec, weight, bias, None, None, None
        return Layer.apply(*layer, torch.is_grad_enabled(), gate, up)


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
            x = cast_for_compute(x)
            check_linear(x, gate_up.weight, None)
            configs = config_of(gate_up.weight), config_of(down.weight)
            return run_mlp("SwiGLUMLP", x, gate_up.weight, down.weight, down.bias, configs)


def run_mlp(
    name: str,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    bias: torch.Tensor | None,
    configs: Sequence[TrainingConfig],
    amax_groups: Sequence[str] = ("", ""),
    rounding_keys: Sequence[torch.Tensor | None] = (None, None),
    group_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """down(silu(gate) · up) + bias with (gate | up) = gate_up(x), of experts where there are `group_ends`.

    name: of the layer, in errors and profiles. bias: of down.
    configs, amax_groups, rounding_keys: of each weight; the process groups are those over which it is split.
    """
    inner_config, outer_config = configs
    inner_over, outer_over = (AmaxGroups(weight=over) for over in amax_groups)
    hidden_dtype = inner_config.out_dtype or x.dtype
    specs = (
        GemmSpec(None, inner_config, x.dtype, hidden_dtype, amax_groups=inner_over),
        GemmSpec(None, outer_config, hidden_dtype, outer_config.out_dtype or x.dtype, amax_groups=outer_over),
    )
    saves = torch.is_grad_enabled()
    return _MLP.apply(name, specs, x, gate_up, down, bias, group_ends, *rounding_keys, saves)


class _MLP(torch.autograd.Function):
    """Every operand is quantized in the pass that computes it, the gradient of (gate | up) too."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        specs: tuple[GemmSpec, GemmSpec],
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        bias: torch.Tensor | None,
        group_ends: torch.Tensor | None,
        inner_key: torch.Tensor | None,
        outer_key: torch.Tensor | None,
        saves: bool,
    ) -> torch.Tensor:
        inner, outer = specs
        _, _, needs_x, needs_gate_up, needs_down, *_ = ctx.needs_input_grad
        saves_x = saves and needs_gate_up and inner.config.saves_quantized_activations
        saves_h = saves and needs_down and outer.config.saves_quantized_activations
        with profiled(name, "forward"):
            rows = as_rows(x)
            if group_ends is not None:
                groups = groups_of(group_ends, rows.shape[0], inner.config, outer.config)
                inner, outer = with_groups(inner, groups), with_groups(outer, groups)
            rowwise, x_copy = quantize(rows, inner, rowwise=True, columnwise=saves_x)
            gate_up = weight_gemm(rowwise, gate_up_weight, inner, False, inner.out_dtype)
            del rowwise
            halves = gate_up.chunk(2, 1)
            rowwise, h_copy = SwiGLUInput.quantize(halves, outer, True, saves_h)
            out = weight_gemm(rowwise, down_weight, outer, False, outer.out_dtype, bias)
            ctx.seen = (
                observe_gemm(gate_up_weight, lambda: rows, inner),
                observe_gemm(down_weight, lambda: SwiGLUInput.values(halves, outer), outer),
            )
        out = out if x.dim() == 2 else as_shape_of(out, x)
        if not saves:
            return out
        save_for_backward(
            ctx,
            (gate_up_weight, down_weight),
            *(inner.groups or (None, None)),
            inner_key,
            outer_key,
            gate_up if needs_x or needs_gate_up or (needs_down and not saves_h) else None,
            *(x_copy.tensors if saves_x else (rows if needs_gate_up else None,)),
            *(h_copy.tensors if saves_h else ()),
        )
        ctx.layer, ctx.specs = name, (with_groups(inner, None), with_groups(outer, None))
        ctx.saves_x, ctx.saves_h, ctx.x_shape = saves_x, saves_h, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        refuse_second_order(ctx.layer)
        with profiled(ctx.layer, "backward"):
            grads = _mlp_gradients(ctx, grad_output)
        return None, None, *grads, *[None] * 4


def _mlp_gradients(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, of gate_up's weight, of down's and of the bias, those that are needed."""
    gate_up_weight, down_weight, ends, tables, inner_key, outer_key, gate_up, saved = take_saved(ctx, 7)
    (inner, outer), dy = ctx.specs, as_rows(grad_output)
    if ends is not None:
        groups = Groups(ends, tables)
        inner, outer = with_groups(inner, groups), with_groups(outer, groups)
    needs_x, needs_gate_up, needs_down, needs_bias = ctx.needs_input_grad[2:6]
    inner_seen, outer_seen = ctx.seen
    if outer_seen is not None:
        outer_seen(dy)
    if inner_seen is not None and gate_up is not None:
        inner_seen(_grad_of_gate_up(down_weight, dy, gate_up, outer))
    x_saved, h_saved = (saved[:3], saved[3:]) if ctx.saves_x else (saved[:1], saved[1:])
    halves = [] if gate_up is None else [*gate_up.chunk(2, 1)]
    saved.clear()
    del gate_up

    def x_columnwise() -> Operand:
        if ctx.saves_x:
            return operand_of(x_saved, inner.config)
        return Input.quantize([x_saved.pop()], inner, False, True).columnwise

    def h_columnwise() -> Operand:
        if ctx.saves_h:
            return operand_of(h_saved, outer.config)
        return SwiGLUInput.quantize(halves, outer, False, True).columnwise

    inner_bits, outer_bits = ops.next_rounding_bits(inner_key, dy), ops.next_rounding_bits(outer_key, dy)
    tokens, bias_grad = dy.shape[0], grad_bias(dy, ctx.bias_dtype) if needs_bias else None
    needs_h = needs_x or needs_gate_up
    dh, grad_down = gradients(
        [*quantize(dy, outer, rowwise=needs_h, columnwise=needs_down, is_input=False, rounding_bits=outer_bits)],
        h_columnwise,
        tokens,
        down_weight,
        outer,
        SwiGLUInput.weight_first,
    )
    if dh is None:
        return None, None, grad_down, bias_grad
    options = cast_options(inner.config, needs_x, needs_gate_up, is_input=False)
    backend = ops.casting_backend(inner.config.backend)
    gate, up = halves
    halves.clear()
    made = ops.swiglu_backward_quantize(
        dh, gate, up, options, groups=inner.groups, rounding_bits=inner_bits, backend=backend
    )
    dgate_up = [*made]
    del dh, gate, up, made
    # The gradient of gate_up comes last, next to two copies in low precision: with dx last a columnwise copy of gate_up
    # would be there too, with the gradient of down last the copies of dy and h all the time.
    grad_x, grad_gate_up = gradients(dgate_up, x_columnwise, tokens, gate_up_weight, inner, False)
    return None if grad_x is None else grad_x.view(ctx.x_shape), grad_gate_up, grad_down, bias_grad


def _grad_of_gate_up(
    down_weight: torch.Tensor, dy: torch.Tensor, gate_up: torch.Tensor, outer: GemmSpec
) -> torch.Tensor:
    """The gradient that backward quantizes as it computes it, in high precision, for observers."""
    rowwise, _ = quantize(dy, outer, rowwise=True, columnwise=False)
    dh = weight_gemm(rowwise, down_weight, outer, True, gate_up.dtype)
    return torch.cat(ops.swiglu_backward(dh, *gate_up.chunk(2, 1)), 1)
