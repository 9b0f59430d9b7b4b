"""The three GEMMs of a weight, which all layers share.

    forward    x → rowwise [T, K] (· wᵀ = output), and columnwise [K, T], saved
    backward   dy → rowwise [T, N] (· w columnwise = grad_input), and columnwise [N, T] (· x columnwise = grad_weight)

Every operand is quantized along the dimension that its GEMM contracts. The quantized copy of a master weight is freed
after its GEMM. In a graph, quantization and GEMM are one operation, so that no compiler can keep the copy from forward
to backward. With `save_weights="quantized"`, forward quantizes both copies in one read, and the layer saves one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchao_blockwise import ops
from torchao_blockwise._compat import Operation as TorchOperation
from torchao_blockwise._compat import modes
from torchao_blockwise.formats import CastOptions, Copies, Groups, Operand, Place, RoundingBits
from torchao_blockwise.ops.backend import Backend, Implementation
from torchao_blockwise.ops.gemm.grouped import grouped_matmul_op
from torchao_blockwise.ops.gemm.plain import matmul_op
from torchao_blockwise.ops.operands import new_output
from torchao_blockwise.ops.quantization.operations import hadamard_amax_bits_op, tensor_amax_bits_op
from torchao_blockwise.ops.registry import OPTIONS, Operation, groups, operand
from torchao_blockwise.tensors import MasterWeightTensor, TrainingConfig
from torchao_blockwise.tensors.weight_operands import (
    amax_over,
    amaxes_over,
    kept_copies,
    weight_operand,
    weight_options,
)
from torchao_blockwise.tensors.weight_uses import note_gemm


class AmaxGroups(NamedTuple):
    """The process groups over which each tensor is split, in the format of `amax_over`."""

    x: str = ""
    weight: str = ""
    grad_output: str = ""


WHOLE = AmaxGroups()


class GemmSpec(NamedTuple):
    """How the GEMMs of one weight are computed.

    groups: for a weight [E, N, K], the rows of an activation that belong to each expert; such layers have no bias.
    config: the config of the weight.
    dtype: the dtype of the activation before quantization, and of its gradient. out_dtype: the dtype of the output.
    rounded_to: the dtype to which a master weight is rounded first, if it is not its own.
    transposed: whether the weight is stored as [.., K, N].
    amax_groups: the groups of tensors that are split over ranks. places: if the output's gradient is a part of a
        larger one, the positions of its copies in it.
    """

    groups: Groups | None
    config: TrainingConfig
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    rounded_to: torch.dtype | None = None
    transposed: bool = False
    amax_groups: AmaxGroups = WHOLE
    places: tuple[Place, Place] | None = None


def cast_options(config: TrainingConfig, rowwise: bool, columnwise: bool, is_input: bool = True) -> CastOptions:
    """Return how a layer of this config quantizes its input, or the gradient of its output."""
    return CastOptions(
        config.activation_format,
        rowwise,
        columnwise,
        power_of_2_scales=config.power_of_2_scales,
        padded=True,
        hadamard=config.hadamard_number if columnwise else 0,
        scale_per_group=config.scale_per_expert,
        columnwise_format_name=config.grad_weight_format.name if is_input else "",
    )


def quantize(
    x: torch.Tensor, spec: GemmSpec, options: CastOptions, amax_groups: str, bits: RoundingBits | None = None
) -> Copies:
    """Return the requested copies of x [T, K].

    amax_groups: the process groups over which `x` is split. bits: the random bits of stochastic rounding.
    """
    amax: Any = None
    if amax_groups:
        amax = amaxes_over(x, amax_groups, options.hadamard) if options.hadamard else amax_over(x, amax_groups)
    backend = ops.casting_backend(spec.config.backend)
    return ops.quantize_by(x, options, spec.groups, tensor_amax=amax, rounding_bits=bits, backend=backend)


def weight_copies(weight: Any, spec: GemmSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the copy of a master weight for output, and the tensors of that for grad_input, from one read.

    They are the weight itself and no tensors if backward quantizes it again, or need not.
    """
    if not isinstance(weight, MasterWeightTensor) or spec.rounded_to is not None:
        return weight, ()
    compiling = torch.compiler.is_compiling()
    if not compiling and kept_copies(weight.hp) is not None:
        return weight, ()
    # As in `weight_gemm`, a graph reads the weight itself.
    x, options = weight if compiling else weight.hp, weight_options(spec.config, True, True)
    rowwise, columnwise = ops.quantize_by(x, options, backend=ops.casting_backend(spec.config.backend))
    return (columnwise, rowwise[:3]) if spec.transposed else (rowwise, columnwise[:3])


def weight_gemm(
    a: Operand,
    weight: torch.Tensor | Operand,
    spec: GemmSpec,
    columnwise: bool,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a · wᵀ (+ bias) in `out_dtype`, or a · w if the columnwise copy of the weight is used.

    weight: the weight, or this copy of it.
    """
    config = spec.config
    backend: Any = config.backend
    traced = modes.is_intercepted(a[:1])
    if isinstance(weight, MasterWeightTensor):
        # A graph reads the weight itself: its values would be a second input, whose changes the graph would not see.
        hp = weight if torch.compiler.is_compiling() else weight.hp
        multiply: Callable[..., torch.Tensor] = master_matmul_op if traced else _master_matmul
        options, over = weight_options(config, not columnwise, columnwise), spec.amax_groups.weight
        return multiply(a, hp, options, over, spec.rounded_to, out_dtype, bias, spec.groups, backend)
    if isinstance(weight, Operand):
        b, columns, columnwise = weight, a.qdata.shape[1], False
    else:
        quantized: Any = weight
        if quantized.pending_master is not None and not torch.compiler.is_compiling():
            quantized.pending_master.free()
        # Not `weight.operand()`: in compiled code methods can return only tensors, and `fmt` is not always known.
        fmt = config.weight_format if torch.compiler.is_compiling() else quantized.fmt
        qdata, scale, global_scale = quantized.operand_tensors()
        b, columns = Operand(qdata, scale, global_scale, fmt.name), quantized.shape[-1]
    multiply = quantized_matmul_op if traced else _quantized_matmul
    return multiply(a, b, columns, columnwise, out_dtype, bias, spec.groups, backend)


def grad_weight(
    dy: Operand, x: Operand, tokens: int, weight: torch.Tensor, spec: GemmSpec, out_dtype: torch.dtype
) -> torch.Tensor | None:
    """Return dyᵀ · x, both quantized along tokens, in the layout of the weight, or None if it was added to
    `weight.main_grad`.

    In eager mode, the gradient is added to `weight.main_grad` (f32, in the weight's shape) if that exists, and
    `weight.grad_added_to_main_grad` is set, as Megatron-LM's optimizers expect. `.grad` does not change, and its hooks
    do not run. A compiled layer returns the gradient.
    """
    # Kernels support square blocks only in b.
    transposes = spec.transposed and spec.config.grad_weight_format.is_square
    a, b = (x, dy) if spec.transposed and not transposes else (dy, x)
    groups = spec.groups
    backend: Any = spec.config.backend
    main_grad = None if torch.compiler.is_compiling() else getattr(weight, "main_grad", None)
    if main_grad is None or transposes:
        multiply = grad_weight_op if modes.is_intercepted(a[:1]) else _grad_weight
        grad = multiply(a, b, groups, tokens, out_dtype if main_grad is None else torch.float32, backend)
        grad = grad.mT if transposes else grad
        if main_grad is None:
            return grad
        main_grad.add_(grad)
    elif groups is None:
        ops.add_matmul_(main_grad, a, b, backend=backend)
    else:
        ops.add_grouped_matmul_(main_grad, a, b, groups, backend=backend)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return None


def weight_comes_first(dy: torch.Tensor, spec: GemmSpec) -> bool:
    """Whether peak memory is lower if grad_weight is computed before grad_input.

    If grad_input is first, its result exists together with copies of all tokens: those of dy and the saved one of x.
    If grad_weight is first, its result exists together with the columnwise copy of the weight. The right order saves
    up to 23 % of a layer's peak with many tokens (32768 of 4096 → 14336), and up to 10 % with few. The weights and
    gradients of experts are E matrices, so for them grad_input is first. The order must not depend on the number of
    tokens in a compiled graph, or if ranks with parts of different sizes reduce amaxes together.
    """
    if torch.compiler.is_compiling() or spec.groups is not None or spec.amax_groups != WHOLE:
        return False
    tokens, features = dy.shape
    return tokens > features


# --- operations of graphs ---------------------------------------------------------------------------------------------


def gemm_flops(tokens: int, weight: Sequence[int]) -> int:
    """Return the floating point operations of one of the three GEMMs: 2 · tokens · N · K for a weight [.., N, K].

    This also holds for experts: each token counts once.
    """
    return 2 * tokens * weight[-2] * weight[-1]


def _recorded(multiply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `multiply` to record a GEMM with an unknown weight, because graphs do not know the weight."""

    def run(*args: Any) -> torch.Tensor:
        note_gemm(None)
        return multiply(*args)

    return run


def _master_matmul(
    a: Operand,
    hp: torch.Tensor,
    options: CastOptions,
    amax_groups: str,
    rounded_to: torch.dtype | None,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    groups: Groups | None,
    backend: Backend,
) -> torch.Tensor:
    casts_by = ops.casting_backend(backend)
    b = weight_operand(hp, options, amax_groups=amax_groups, rounded_to=rounded_to, backend=casts_by)
    if groups is None:
        return matmul_op(a, b, out_dtype, bias, backend)
    return grouped_matmul_op(a, b, groups, "m", out_dtype, backend)


# One operation from the master's values to the output. The quantized copy is never a value of a compiled graph, which
# could keep it from forward to backward, and `weights_unchanged` is checked when the graph runs. Experts use the same
# operation, so that checkpoint policies need to name only one.
master_matmul_op = Operation(
    f"master_matmul({operand('a')}, Tensor hp, {OPTIONS}, str amax_groups, ScalarType? rounded_to, "
    f"ScalarType out_dtype, Tensor? bias, {groups('Tensor?')}, str products_by) -> Tensor",
    takes=(Operand, None, CastOptions, *[None] * 4, Groups, None),
    table=[Implementation(Backend.AUTO, _recorded(_master_matmul))],
    fake=lambda a, hp, options, amax_groups, rounded_to, out_dtype, *_: a.qdata.new_empty(
        (a.qdata.shape[0], hp.shape[-1 if options.columnwise else -2]), dtype=out_dtype
    ),
    flops=lambda a, hp, *_: gemm_flops(a.qdata.shape[0], hp.shape),
)


def _quantized_matmul(
    a: Operand,
    weight: Operand,
    columns: int,
    columnwise: bool,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    groups: Groups | None,
    backend: Backend,
) -> torch.Tensor:
    b = ops.transpose(weight, columns=columns, backend=ops.casting_backend(backend)) if columnwise else weight
    if groups is None:
        return matmul_op(a, b, out_dtype, bias, backend)
    return grouped_matmul_op(a, b, groups, "m", out_dtype, backend)


# One operation in graphs for the same reason: otherwise PyTorch's partitioner could save the transposed copy instead of
# the payload, and would not notice that the payload changed.
quantized_matmul_op = Operation(
    f"quantized_matmul({operand('a')}, {operand('weight')}, SymInt columns, bool columnwise, ScalarType out_dtype, "
    f"Tensor? bias, {groups('Tensor?')}, str products_by) -> Tensor",
    takes=(Operand, Operand, None, None, None, None, Groups, None),
    table=[Implementation(Backend.AUTO, _recorded(_quantized_matmul))],
    fake=lambda a, weight, columns, columnwise, out_dtype, *_: a.qdata.new_empty(
        (a.qdata.shape[0], columns if columnwise else weight.qdata.shape[-2]), dtype=out_dtype
    ),
    flops=lambda a, weight, columns, *_: gemm_flops(a.qdata.shape[0], (weight.qdata.shape[-2], columns)),
)


def _grad_weight(
    a: Operand, b: Operand, groups: Groups | None, tokens: int, out_dtype: torch.dtype, products_by: Backend
) -> torch.Tensor:
    if groups is None:
        return matmul_op(a, b, out_dtype, None, products_by)
    return grouped_matmul_op(a, b, groups, "k", out_dtype, products_by)


# The operations of GEMMs do not know how many tokens are padding, so they could not count FLOPs.
grad_weight_op = Operation(
    f"grad_weight({operand('a')}, {operand('b')}, {groups('Tensor?')}, SymInt tokens, ScalarType out_dtype, "
    "str products_by) -> Tensor",
    takes=(Operand, Operand, Groups, None, None, None),
    table=[Implementation(Backend.AUTO, _grad_weight)],
    fake=lambda a, b, groups, tokens, out_dtype, _: new_output(a, b, out_dtype, groups, "k"),
    flops=lambda a, b, groups, tokens, *_: gemm_flops(tokens, (a.qdata.shape[0], b.qdata.shape[0])),
)


def sac_save_list() -> list[TorchOperation]:
    """Return the most expensive operations, whose results selective activation checkpointing should save.

    These are the `output` GEMMs of all layers, including experts, and in NVFP4 the amax of each tensor and of its
    transform: four bytes, but computing it reads the whole tensor. Quantized copies are recomputed, like norms and
    activations. Pass the list to `torch.utils.checkpoint.create_selective_checkpoint_contexts`, optionally together
    with PyTorch's operations. Works in eager and compiled mode.
    """
    multiply = master_matmul_op, quantized_matmul_op, matmul_op, grouped_matmul_op
    return [op.overload for op in (*multiply, tensor_amax_bits_op, hadamard_amax_bits_op)]
