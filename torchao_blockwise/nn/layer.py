"""The autograd function of every layer, and `linear`: output = activation(inputs) · weightᵀ + bias.

forward     prepare the inputs ▶ quantize the activation, rowwise and columnwise ▶ output GEMM
saved       the weight, the columnwise copy (one byte per element in FP8), and what the inputs' gradients need
backward    quantize grad_output, rowwise and columnwise ▶ the two GEMMs ▶ gradients of the inputs

An MLP has two such steps: the output of the first is the input of the second, whose backward computes and quantizes
the gradient of that output in one pass.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F

from torchao_blockwise import _compat, ops
from torchao_blockwise._compat import modes
from torchao_blockwise.formats import Copies, Groups, Operand, Place
from torchao_blockwise.nn.activations import Input, as_rows, observe_gemm
from torchao_blockwise.nn.derivatives import refuse_second_order, refuse_transforms, warn_in_backward
from torchao_blockwise.nn.gemms import (
    WHOLE,
    AmaxGroups,
    GemmSpec,
    cast_options,
    grad_weight,
    weight_comes_first,
    weight_copies,
    weight_gemm,
)
from torchao_blockwise.nn.sharded_linear import sharded_linear
from torchao_blockwise.nn.weights import WEIGHTS, check_linear, config_of, in_layer, rounding_key_of
from torchao_blockwise.ops.backend import may_have_kernels
from torchao_blockwise.tensors import (
    BlockwiseFP8Tensor,
    MasterWeightTensor,
    NVFP4Tensor,
    QuantizedTensor,
    TrainingConfig,
    TransposedWeight,
)
from torchao_blockwise.tensors.config import QUANTIZED

if TYPE_CHECKING:
    from torchao_blockwise.nn.fused_modules import SharedInput

# The kind of a GEMM's activation, and the GEMM's spec, without groups.
Step: TypeAlias = tuple[type[Input], GemmSpec]


class Layer(torch.autograd.Function):
    """Run the steps of a layer. The output [.., N] is differentiable in inputs, weights and biases.

    name: the layer's name in errors and profiles. steps: the first step reads the inputs, each other step the output of
        the previous one.
    group_ends: for experts. copies: copies of the first activation, if another layer has already quantized it.
    saves: whether backward may run; `torch.is_grad_enabled()` of the caller.
    tensors: the inputs of the first step, then (weight, bias, rounding key) of each step; only the last has a bias.
        See `ops.next_rounding_bits` for the key.
    """

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        steps: Sequence[Step],
        group_ends: torch.Tensor | None,
        copies: Copies | None,
        saves: bool,
        *tensors: Any,
    ) -> torch.Tensor:
        x, weights_at, needs = tensors[0], len(tensors) - 3 * len(steps), ctx.needs_input_grad[5:]
        inputs, groups, bias = tensors[:weights_at], None, None
        saved: list[list[Any]] = []
        observers, written = [], []
        with profiled(name, "forward"):
            if group_ends is not None:
                groups = groups_of(group_ends, x.shape[0], [spec.config for _, spec in steps])
            for i, (kind, spec) in enumerate(steps):
                at = weights_at + 3 * i
                weight: Any
                weight, bias, rounding_key = tensors[at : at + 3]
                if groups is not None:
                    weight, spec = stored_weight(weight, spec.rounded_to), GemmSpec(groups, *spec[1:])
                prepared = kind.prepare(inputs, spec)
                saves_copy = saves and needs[at] and spec.config.save_activations == QUANTIZED
                if copies is None:
                    copies = kind.quantize(prepared, spec, cast_options(spec.config, True, saves_copy))
                b, weight_copy = weight, ()
                if saves and spec.config.save_weights == QUANTIZED and any(needs[:at]):
                    b, weight_copy = weight_copies(weight, spec)
                out = weight_gemm(copies.rowwise, b, spec, spec.transposed, spec.out_dtype, bias)
                observers.append(observe_gemm(weight, kind, prepared, spec, saves))
                if saves:
                    # Backward writes to these. They are not only saved, because hooks on saved tensors may copy them
                    # (checkpointing, offloading). A compiled graph writes to the saved key.
                    compiles = torch.compiler.is_compiling()
                    with_main_grad = weight if not compiles and hasattr(weight, "main_grad") else None
                    written.append((with_main_grad, None if compiles else rounding_key))
                    saves_prepared = (needs[at] and not saves_copy) or (kind.is_computed and any(needs[:at]))
                    # For a cast, save the values themselves, because autograd counts their changes.
                    saved.append([weight if spec.rounded_to is None else weight.hp, rounding_key, *weight_copy])
                    saved.append([*prepared] if saves_prepared else [])
                    saved.append([*copies.columnwise[:3]] if saves_copy else [])
                copies = b = None
                if i + 1 < len(steps):
                    inputs = out.chunk(2, 1)
        if x.dim() != 2:
            # Not a view: FSDP2 registers hooks on outputs, and an in-place operation on a view would lose them.
            out = torch.ops.aten._unsafe_view.default(out, [*x.shape[:-1], out.shape[-1]])
        if saves:
            save_for_backward(ctx, [[*(groups or (None, None))], *saved])
            ctx.layer, ctx.steps, ctx.weights_at = name, steps, weights_at
            ctx.observers, ctx.written = observers, written
            ctx.x_shape, ctx.x_dtype, ctx.bias_dtype = x.shape, x.dtype, None if bias is None else bias.dtype
            ctx.is_transposed = isinstance(tensors[weights_at], TransposedWeight)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        # Raise before any computation: with a constant grad_output, the second gradient would silently be missing.
        refuse_second_order(ctx.layer)
        (ends, tables), *saved = take_saved(ctx)
        groups = None if ends is None else Groups(ends, tables)
        needs, last = ctx.needs_input_grad[5:], len(ctx.steps) - 1
        grads: list[torch.Tensor | None] = [None] * len(needs)
        with profiled(ctx.layer, "backward"):
            dy = as_rows(grad_output)
            # The gradient of the next step's activation, its kind, and the matrices that it is computed from.
            grad: Any = dy
            behind: type[Input] = Input
            prepared: list[Any] = []
            for i in range(last, -1, -1):
                at = ctx.weights_at + 3 * i
                wanted = any(needs[:at]), needs[at]
                if not any(wanted):
                    grad = None
                    break
                kind, spec = ctx.steps[i]
                spec = spec if groups is None else GemmSpec(groups, *spec[1:])
                weights = saved[3 * i]
                saved_key, (owner, key) = weights.pop(1), ctx.written[i]
                bits = ops.next_rounding_bits(saved_key if key is None else key, grad_output, spec.places)
                if ctx.observers[i] is not None:
                    parts: Any = behind.backward(grad, prepared, spec, (True, True))
                    ctx.observers[i](parts[0] if len(parts) == 1 else torch.cat(parts, 1))
                options = cast_options(spec.config, *wanted, is_input=False)
                quantized = [*behind.backward_quantize(grad, prepared, spec, options, bits)]
                prepared.clear()
                behind, prepared, grad = kind, saved[3 * i + 1], None
                # In an MLP, the gradient of the first weight comes last, when only two low-precision copies exist.
                # Before grad_input, it would exist together with a columnwise copy of the weight, too.
                weight_first = kind.is_computed or (last == 0 and weight_comes_first(dy, spec))
                activation = prepared, saved[3 * i + 2]
                grad, grads[at] = gradients(
                    quantized, kind, activation, dy.shape[0], weights, spec, weight_first, owner
                )
            if grad is not None:
                for j, one in enumerate(behind.backward(grad, prepared, spec, needs)):
                    if one is not None and j < behind.leading:
                        one = one if one.shape == ctx.x_shape else one.view(ctx.x_shape)
                        one = one if one.dtype == ctx.x_dtype else one.to(ctx.x_dtype)
                    grads[j] = one
            weight_grad = grads[ctx.weights_at]
            if weight_grad is not None and ctx.is_transposed:
                grads[ctx.weights_at] = weight_grad.transpose(-2, -1)
            if needs[-2]:
                # Σ over tokens in fp32.
                grads[-2] = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return *[None] * 5, *grads


def gradients(
    dy: list[Operand | None],
    kind: type[Input],
    activation: tuple[list[Any], list[Any]],
    tokens: int,
    weights: list[Any],
    spec: GemmSpec,
    weight_first: bool,
    owner: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (gradient of the activation, gradient of the weight) for dy's copies [rowwise, columnwise]; None without
    the copy.

    activation: the saved (prepared matrices, columnwise copy) of the activation, each empty if it was not saved. Lists
        are emptied as early as possible, so that each operand is freed after its GEMM: together, they would be most of
        a step's memory.
    tokens: T, without the zeros that pad columnwise copies.
    weights: the weight, and the tensors of its saved copy, if there is one.
    weight_first: whether grad_weight comes first; see `weight_comes_first`.
    owner: the weight that forward read, if it had a `main_grad`.
    """
    columnwise, rowwise = dy.pop(), dy.pop()
    grad = grad_w = None
    weight = weights.pop(0)
    if not isinstance(weight, WEIGHTS):
        # The values of a cast's source, or a copy that `save_on_cpu` made.
        weight = MasterWeightTensor(weight, spec.config)
    owner = weight if owner is None else owner
    dtype, keeps = spec.rounded_to or weight.dtype, kind.is_computed and rowwise is not None
    if weight_first and columnwise is not None:
        grad_w = grad_weight(columnwise, columnwise_of(kind, activation, spec, keeps), tokens, owner, spec, dtype)
        columnwise = None
    if rowwise is not None:
        b: Any = weight
        if weights:
            qdata, scale, global_scale = weights
            b = Operand(qdata, scale, global_scale, spec.config.weight_format.name)
            qdata = scale = global_scale = None
            weights.clear()
        grad = weight_gemm(rowwise, b, spec, not spec.transposed, spec.dtype)
        rowwise = b = None
    if columnwise is not None:
        grad_w = grad_weight(columnwise, columnwise_of(kind, activation, spec, keeps), tokens, owner, spec, dtype)
    return grad, grad_w


def columnwise_of(kind: type[Input], activation: tuple[list[Any], list[Any]], spec: GemmSpec, keeps: bool) -> Operand:
    """Return the columnwise copy of an activation: the saved one, or the activation quantized again.

    keeps: whether the prepared matrices are needed afterwards.
    """
    prepared, copy = activation
    if copy:
        qdata, scale, global_scale = copy
        copy.clear()
        return Operand(qdata, scale, global_scale, spec.config.grad_weight_format.name)
    made = kind.quantize(prepared, spec, cast_options(spec.config, False, True)).columnwise
    if not keeps:
        prepared.clear()
    return made


def linear(
    x: torch.Tensor,
    weight: MasterWeightTensor | BlockwiseFP8Tensor | NVFP4Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute x @ weight.T + bias, with all three GEMMs in the weight's low precision.

    x: [.., K] bf16 | f16 | f32. weight: [N, K]. bias: [N] or None. All three may be DTensors; see `nn.sharded_linear`.
    Returns [.., N] in config.out_dtype, or else autocast's dtype, or else the dtype of x. Gradients have the dtypes of
    x, weight and bias. Any number of tokens (including 0), N and K is supported. `F.linear` and `nn.Linear` call this
    function for converted weights. In eager mode, the gradient of a weight with an attribute `main_grad` [N, K] f32 is
    added to `main_grad` instead of `.grad`.
    Raises TypeError for dtypes, ValueError for shapes, devices or a weight whose blocks cannot be transposed.
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
    shared: SharedInput | None = None,
) -> torch.Tensor:
    """Run `linear` on one device; the tensors may be shards.

    like: the weight, or the tensor that it was detached from. places: see `GemmSpec`.
    shared: the copies of `x` that several layers share.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"linear: x must be a tensor, got a {type(x).__name__}{in_layer(like)}")
    if x.layout is torch.jagged:
        # A nested tensor holds the tokens of all its sequences in one matrix.
        return _compat.jagged_like(x, local_linear(x.values(), weight, bias, like, amax_groups, places, shared))
    # Otherwise each access to a weight's shape, dtype or device runs Python code, 10 µs a call in total.
    with _compat.no_torch_function():
        x = cast_for_compute(x)
        check_linear(x, weight, bias)
        config = config_of(like)
        spec = GemmSpec(None, config, x.dtype, config.out_dtype or x.dtype, amax_groups=amax_groups, places=places)
        key = rounding_key_of(like) if config.stochastic_rounding else None
        copies = None if shared is None else shared.take(x, spec)
        return Layer.apply("linear", [(Input, spec)], None, copies, torch.is_grad_enabled(), x, weight, bias, key)


def _f_linear(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Run `linear` for `F.linear`, whose names of arguments these are; raise for a quantized input."""
    if not isinstance(weight, WEIGHTS):
        raise TypeError(
            f"linear: x must be a plain tensor, got a {type(input).__name__} with a plain weight; only a weight can be "
            "a quantized tensor"
        )
    warn_in_backward(weight)
    return local_linear(input, weight, bias, weight)


for _kind in WEIGHTS:
    _kind.implements_torch_function(F.linear)(lambda func, types, args, kwargs: _f_linear(*args, **(kwargs or {})))


# --- steps that all layers share --------------------------------------------------------------------------------------


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype that a layer computes in: that of autocast, or else that of `x`. (Layers refuse integers.)

    Raises NotImplementedError inside transforms of `torch.func`.
    """
    refuse_transforms()
    device = x.device.type
    # Meta tensors have no autocast, and asking for its state raises.
    if device != "meta" and torch.is_autocast_enabled(device) and x.is_floating_point():
        return torch.get_autocast_dtype(device)
    return x.dtype


def cast_for_compute(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype of `compute_dtype`."""
    # `to` with the same dtype returns the same tensor, and DDP's optimizer cannot compile a subgraph that takes one
    # tensor twice.
    dtype = compute_dtype(x)
    return x if x.dtype == dtype else x.to(dtype)


def profiled(layer: str, step: str) -> AbstractContextManager[Any]:
    """Return a context that profiles show as `torchao_blockwise.{layer}.{step}`."""
    if modes.is_traced() or not modes.is_profiling():
        return contextlib.nullcontext()
    return torch.profiler.record_function(f"torchao_blockwise.{layer}.{step}")


def save_for_backward(ctx: Any, parts: list[list[Any]]) -> None:
    """Save lists of the tensors that backward reads, so that it raises if a weight has changed.

    A compiled graph reads the payload of a quantized weight, so its inner tensors are saved too: PyTorch checks only
    saved tensors for changes.
    """
    held: list[torch.Tensor | None] = []
    if torch.compiler.is_compiling():
        quantized = [x for part in parts for x in part if isinstance(x, QuantizedTensor)]
        held = [x for weight in quantized for x in (weight.qdata, weight.scale, weight.global_scale)]
    ctx.sizes = list(map(len, parts))
    ctx.save_for_backward(*itertools.chain(*parts), *held)


def take_saved(ctx: Any) -> list[list[Any]]:
    """Return the lists of `save_for_backward`. Unless `retain_graph` is set, only the caller keeps them alive."""
    saved = iter(ctx.saved_tensors)
    if not torch.compiler.is_compiling():
        # By default, the context would keep all saved tensors alive until backward has returned.
        ctx.maybe_clear_saved_tensors()
    return [[*itertools.islice(saved, size)] for size in ctx.sizes]


def stored_weight(weight: Any, rounded_to: torch.dtype | None) -> torch.Tensor:
    """Return the stored weight that GEMMs read; for a cast, the weight before the cast, so that the cast can be freed.

    rounded_to: the dtype of the cast.
    """
    stored: Any = weight.weight if isinstance(weight, TransposedWeight) else weight
    if rounded_to is None:
        return stored
    source = MasterWeightTensor(stored.source[0], stored.config)
    source.layer = stored.layer
    return source


def groups_of(group_ends: torch.Tensor, tokens: int, configs: Sequence[TrainingConfig]) -> Groups:
    """Return the groups of `tokens` tokens, with tables for all operations of a layer, forward and backward.

    There are no tables if operations need none, or create them because configs differ in format or backend.
    """
    wanted, *others = ((config.activation_format, ops.casting_backend(config.backend)) for config in configs)
    fmt, backend = wanted
    needs_none = backend is ops.Backend.REFERENCE or not may_have_kernels(group_ends.device)
    if needs_none or any(other != wanted for other in others):
        return Groups(group_ends)
    return ops.make_groups(group_ends, tokens, fmt, backend=backend)
