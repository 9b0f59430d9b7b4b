"""The autograd function of every layer with one weight, and `linear`: output = activation(inputs) · weightᵀ + bias.

forward     prepare the inputs ▶ quantize the activation, rowwise and columnwise ▶ output GEMM
saved       the weight, the columnwise copy (one byte an element in FP8), and what the inputs' gradients need
backward    quantize grad_output, rowwise and columnwise ▶ the two GEMMs ▶ gradients of the inputs
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F

from torchao_blockwise import _compat, ops
from torchao_blockwise._compat import modes
from torchao_blockwise.formats import Copies, Groups, Operand, Place
from torchao_blockwise.nn.activations import Input, as_rows
from torchao_blockwise.nn.gemms import (
    WHOLE,
    AmaxGroups,
    GemmSpec,
    gradients,
    quantize,
    weight_comes_first,
    weight_gemm,
    with_groups,
)
from torchao_blockwise.nn.observation import observe_gemm
from torchao_blockwise.nn.sharded_linear import sharded_linear
from torchao_blockwise.nn.weights import WEIGHTS, check_linear, config_of, rounding_key_of
from torchao_blockwise.ops.backend import may_have_kernels
from torchao_blockwise.tensors import (
    BlockwiseFP8Tensor,
    MasterWeightTensor,
    NVFP4Tensor,
    QuantizedTensor,
    TrainingConfig,
    TransposedWeight,
)


class Layer(torch.autograd.Function):
    """The output [.., N] of a layer, differentiable in the weight, the bias and the inputs.

    name: of the layer, in errors and profiles. kind: how its activation is made of `inputs`, whose last dims are cut
        off for the output's leading ones.
    spec: without groups; they come from `group_ends`. rounding_key: see `ops.next_rounding_bits`.
    copies: of the activation, where another layer made them. saves: whether backward may run; `torch.is_grad_enabled()`
        of the caller.
    """

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        kind: type[Input],
        spec: GemmSpec,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rounding_key: torch.Tensor | None,
        group_ends: torch.Tensor | None,
        copies: Copies | None,
        saves: bool,
        *inputs: Any,
    ) -> torch.Tensor:
        x = inputs[0]
        stored: Any = weight
        needs_weight = saves and ctx.needs_input_grad[3]
        saves_copy = needs_weight and spec.config.saves_quantized_activations
        with profiled(name, "forward"):
            if group_ends is not None:
                stored, rounded_to = source_of(weight)
                groups = groups_of(group_ends, x.shape[0], spec.config)
                spec = GemmSpec(groups, spec.config, spec.dtype, spec.out_dtype, rounded_to, spec.transposed)
            prepared = kind.prepare(inputs, spec)
            if copies is None:
                copies = kind.quantize(prepared, spec, True, saves_copy)
            out = weight_gemm(copies.rowwise, stored, spec, spec.transposed, spec.out_dtype, bias)
            seen = observe_gemm(stored, lambda: kind.values(prepared, spec), spec)
        if x.dim() != 2:
            out = as_shape_of(out, x)
        if not saves:
            return out
        saves_prepared = (needs_weight and not saves_copy) or (kind.reads_prepared and any(ctx.needs_input_grad[9:]))
        save_for_backward(
            ctx,
            # Of a cast the values themselves, whose changes autograd counts.
            (stored if spec.rounded_to is None else stored.hp,),
            rounding_key,
            *(spec.groups or (None, None)),
            *(prepared if saves_prepared else ()),
            *(copies.columnwise[:3] if saves_copy else ()),
        )
        ctx.layer, ctx.kind, ctx.seen = name, kind, seen
        ctx.spec = spec if spec.groups is None else with_groups(spec, None)
        ctx.saves_copy, ctx.x_shape, ctx.x_dtype = saves_copy, x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.is_transposed = isinstance(weight, TransposedWeight)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        # A constant grad_output would leave the second gradient out silently, so this does not wait for one.
        refuse_second_order(ctx.layer)
        kind: type[Input] = ctx.kind
        weight, rounding_key, ends, tables, saved = take_saved(ctx, 4)
        spec = ctx.spec if ends is None else with_groups(ctx.spec, Groups(ends, tables))
        weight = weight if spec.rounded_to is None else MasterWeightTensor(weight, spec.config)
        needs_weight, needs_bias, needs = ctx.needs_input_grad[3], ctx.needs_input_grad[4], ctx.needs_input_grad[9:]
        needs_inputs = any(needs)
        copy = saved[-3:] if ctx.saves_copy else []
        prepared = saved[:-3] if ctx.saves_copy else saved[:]
        saved.clear()

        def x_columnwise() -> Operand:
            if ctx.saves_copy:
                return operand_of(copy, spec.config)
            made = kind.quantize(prepared, spec, False, True).columnwise
            if not (needs_inputs and kind.reads_prepared):
                prepared.clear()
            return made

        with profiled(ctx.layer, "backward"):
            dy = as_rows(grad_output)
            if ctx.seen is not None:
                ctx.seen(dy)
            copies = {"rowwise": needs_inputs, "columnwise": needs_weight}
            bits = ops.next_rounding_bits(rounding_key, grad_output, spec.places) if any(copies.values()) else None
            over = spec.amax_groups.grad_output
            grad, grad_weight = gradients(
                [*quantize(dy, spec, **copies, is_input=False, amax_groups=over, rounding_bits=bits)],
                x_columnwise,
                dy.shape[0],
                weight,
                spec,
                weight_comes_first(dy, spec) if kind.weight_first is None else kind.weight_first,
            )
            grads: list[torch.Tensor | None] = [None] * len(needs)
            if grad is not None:
                for i, one in enumerate(kind.backward(grad, prepared, spec, needs)):
                    if one is not None and i < kind.leading:
                        one = one if one.shape == ctx.x_shape else one.view(ctx.x_shape)
                        one = one if one.dtype == ctx.x_dtype else one.to(ctx.x_dtype)
                    grads[i] = one
            if grad_weight is not None and ctx.is_transposed:
                grad_weight = grad_weight.transpose(-2, -1)
            bias_grad = grad_bias(dy, ctx.bias_dtype) if needs_bias else None
        return None, None, None, grad_weight, bias_grad, *[None] * 4, *grads


def linear(
    x: torch.Tensor,
    weight: MasterWeightTensor | BlockwiseFP8Tensor | NVFP4Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias with `output`, `grad_input` and `grad_weight` in the weight's low precision.

    x: [.., K] bf16 | f16 | f32. weight: [N, K]. bias: [N] or None. All three may be DTensors; see `nn.sharded_linear`.
    Returns [.., N] of config.out_dtype, else of autocast's dtype, else of x's. Gradients: x's dtype, the weight's, the
    bias's. Any number of tokens, 0 included; any N and K. `F.linear` and `nn.Linear` come here by themselves.
    A weight with an attribute `main_grad` [N, K] f32 has its gradient added there and not to `.grad`; in eager mode.
    Raises TypeError for a dtype, ValueError for shapes, devices or a weight whose blocks cannot be transposed.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3.
    """
    if not isinstance(weight, WEIGHTS):
        return sharded_linear(local_linear, x, weight, bias)
    return local_linear(x, weight, bias, weight)


def local_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    like: torch.Tensor,
    amax_groups: AmaxGroups = WHOLE,
    places: tuple[Place, Place] | None = None,
) -> torch.Tensor:
    """`linear` of one device; tensors may be parts of others.

    like: the weight or what it was detached from. places: of the copies of the output's gradient in the whole's.
    """
    # Else each shape, dtype and device that is read of a weight goes through Python, 10 µs a call in all.
    with _compat.no_torch_function():
        x = cast_for_compute(x)
        check_linear(x, weight, bias)
        config = config_of(like)
        spec = GemmSpec(None, config, x.dtype, config.out_dtype or x.dtype, amax_groups=amax_groups, places=places)
        key = rounding_key_of(like) if config.stochastic_rounding else None
        return Layer.apply("linear", Input, spec, weight, bias, key, None, None, torch.is_grad_enabled(), x)


@MasterWeightTensor.implements_torch_function(F.linear)
@BlockwiseFP8Tensor.implements_torch_function(F.linear)
@NVFP4Tensor.implements_torch_function(F.linear)
def _linear_function(func: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """`linear` for `F.linear`, refusing a quantized input."""
    x, weight, bias = _by_names_of_torch(*args, **(kwargs or {}))
    if not isinstance(weight, WEIGHTS):
        raise TypeError(f"linear: x is a {type(x).__name__}, weight a plain tensor; quantized tensors are weights")
    return local_linear(x, weight, bias, weight)


def _by_names_of_torch(input: Any, weight: Any, bias: torch.Tensor | None = None) -> tuple[Any, Any, Any]:
    return input, weight, bias


# --- steps that all layers share --------------------------------------------------------------------------------------


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that a layer computes in: autocast's, else that of `x`; integers are left for the layer to refuse."""
    device = x.device.type
    # Meta tensors have no autocast, and asking for its state raises.
    if device != "meta" and torch.is_autocast_enabled(device) and x.is_floating_point():
        return torch.get_autocast_dtype(device)
    return x.dtype


def cast_for_compute(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype of `compute_dtype`."""
    # A cast that changes nothing returns the same tensor, which in a graph of DDP's optimizer then has two names: it
    # cannot compile a part of the graph that takes one tensor twice.
    dtype = compute_dtype(x)
    return x if x.dtype == dtype else x.to(dtype)


def profiled(layer: str, step: str) -> AbstractContextManager[Any]:
    """A context that profiles show under a name such as `torchao_blockwise.linear.forward`."""
    if torch.compiler.is_compiling() or not modes.is_profiling():
        return contextlib.nullcontext()
    return torch.profiler.record_function(f"torchao_blockwise.{layer}.{step}")


def save_for_backward(ctx: Any, weights: tuple[Any, ...], *tensors: torch.Tensor | None) -> None:
    """Keep `weights` and what else backward reads, so that a weight which changes before is refused there.

    A compiled graph reads the payload of a quantized weight, so there its tensors are saved too: PyTorch checks those
    that were saved by name, and not what a graph reads besides.
    """
    held: list[torch.Tensor | None] = []
    if torch.compiler.is_compiling():
        quantized = [weight for weight in weights if isinstance(weight, QuantizedTensor)]
        held = [x for weight in quantized for x in (weight.qdata, weight.scale, weight.global_scale)]
    ctx.save_for_backward(*weights, *tensors, *held)
    ctx.read_in_backward = len(weights) + len(tensors)


def take_saved(ctx: Any, named: int) -> tuple[Any, ...]:
    """The tensors that `save_for_backward` kept: the first `named` by themselves, the others in a list.

    All of it lives on in the caller only; see `_compat.take_saved`.
    """
    saved = _compat.take_saved(ctx)[: ctx.read_in_backward]
    return *saved[:named], list(saved[named:])


def operand_of(tensors: list[Any], config: TrainingConfig) -> Operand:
    """The operand of an activation from its tensors (qdata, scale, global_scale), which are taken out of the list."""
    qdata, scale, global_scale = tensors
    tensors.clear()
    return Operand(qdata, scale, global_scale, config.grad_weight_format.name)


def source_of(weight: Any) -> tuple[torch.Tensor, torch.dtype | None]:
    """(the weight that GEMMs of experts read, as it is stored; the dtype that its values are rounded to first).

    Of a cast master weight the one that it was cast from, so that the copy can go.
    """
    stored = weight.weight if isinstance(weight, TransposedWeight) else weight
    if not isinstance(stored, MasterWeightTensor):
        return stored, None
    hp, rounded_to = stored.source
    if rounded_to is None:
        return stored, None
    source = MasterWeightTensor(hp, stored.config)
    source.layer = stored.layer
    return source, rounded_to


def groups_of(group_ends: torch.Tensor, tokens: int, *configs: TrainingConfig) -> Groups:
    """The groups of `tokens` tokens, with tables for all operations of a layer of these configs, forward and backward.

    Without tables where operations need none, or make their own because configs differ in format or backend.
    """
    wanted, *others = ((config.activation_format, ops.casting_backend(config.backend)) for config in configs)
    fmt, backend = wanted
    needs_none = backend is ops.Backend.REFERENCE or not may_have_kernels(group_ends.device)
    if needs_none or any(other != wanted for other in others):
        return Groups(group_ends)
    return ops.make_groups(group_ends, tokens, fmt, backend=backend)


def grad_bias(dy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Σ of dy [T, N] over tokens, in fp32, rounded to `dtype`."""
    return dy.sum(0, dtype=torch.float32).to(dtype)


def refuse_second_order(layer: str) -> None:
    """Raise NotImplementedError in a backward that is itself to be differentiated."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{layer}: backward through backward (create_graph=True) is not defined in low precision; "
            "keep the layers that need it in high precision (filter_fn)"
        )


def as_shape_of(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`out` [T, N] with the leading dims of `x` [.., K], which has others than `out`."""
    # No view: hooks of FSDP2 hang on outputs, and an in-place operation on a view of one would leave them behind.
    return torch.ops.aten._unsafe_view.default(out, [*x.shape[:-1], out.shape[-1]])
