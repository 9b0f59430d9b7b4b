"""The three GEMMs of a weight, for every layer: quantize, multiply, in the order in which less lives at once.

    forward    x → rowwise [T, K] (· wᵀ = output), and columnwise [K, T], saved
    backward   dy → rowwise [T, N] (· w columnwise = grad_input), and columnwise [N, T] (· x columnwise = grad_weight)

Every operand is quantized for the contraction it takes part in. A layer says how its activation is computed and what it
saves; all else is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import BlockFormat, CastOptions, Copies, Groups, Operand
from torchao_blockwise.nn.sharded_linear import WHOLE, AmaxGroups
from torchao_blockwise.ops import replay
from torchao_blockwise.ops.backend import Backend, Implementation
from torchao_blockwise.ops.op import define_op
from torchao_blockwise.tensors import (
    BlockwiseFP8TrainingConfig,
    MasterWeightTensor,
    NVFP4TrainingConfig,
    QuantizedTensor,
)
from torchao_blockwise.tensors.weight_operands import amax_over, is_split, kept_weights, weight_operand


class Contraction(NamedTuple):
    """How the products of one weight are computed.

    config: of the weight.
    groups: of experts, whose weight is [E, N, K]: which rows of an activation belong to each; without bias.
    split: the process groups over which each tensor is split that is given here in parts.
    rounded_to: the dtype that a master weight is rounded to first, if another than its own.
    transposed: whether the weight lies as [.., K, N] in memory.
    """

    config: Any
    groups: Groups | None = None
    split: AmaxGroups = WHOLE
    rounded_to: torch.dtype | None = None
    transposed: bool = False


replay.settle(AmaxGroups, BlockwiseFP8TrainingConfig, NVFP4TrainingConfig)


def cast_options(config, rowwise: bool, columnwise: bool) -> CastOptions:
    """How a layer of this config quantizes an activation or its gradient."""
    return CastOptions(config.activation_format, rowwise, columnwise, config.power_of_2_scales, padded=True)


def quantize(x: torch.Tensor, how: Contraction, *, rowwise: bool, columnwise: bool, over: str = "") -> Copies:
    """Copies of x [T, K], none where none are asked for. over: the process groups over which `x` is split."""
    if not (rowwise or columnwise):
        return Copies(None, None)
    return ops.quantize_by(
        x,
        cast_options(how.config, rowwise, columnwise),
        how.groups,
        tensor_amax=amax_over(x, over),
        backend=ops.casting_backend(how.config.backend),
    )


def output(x: Operand, weight, how: Contraction, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] · wᵀ (+ bias) = [T, N] of `dtype`."""
    return _product_of(x, weight, how, how.transposed, dtype, bias)


def grad_input(dy: Operand, weight, how: Contraction, dtype: torch.dtype) -> torch.Tensor:
    """dy [T, N] · w = [T, K] of `dtype`."""
    return _product_of(dy, weight, how, not how.transposed, dtype, None)


def grad_weight(dy: Operand, x: Operand, weight, how: Contraction, dtype: torch.dtype) -> torch.Tensor | None:
    """dyᵀ · x, both quantized along tokens, as the weight lies; None where it went into `weight.main_grad`."""
    operands = (x, dy) if how.transposed else (dy, x)
    main_grad, backend = main_grad_of(weight), how.config.backend
    if main_grad is None and how.groups is None:
        return ops.matmul(*operands, out_dtype=dtype, backend=backend)
    if main_grad is None:
        return ops.grouped_matmul(*operands, how.groups, along="k", out_dtype=dtype, backend=backend)
    if how.groups is None:
        ops.add_matmul_(main_grad, *operands, backend=backend)
    else:
        ops.add_grouped_matmul_(main_grad, *operands, how.groups, backend=backend)
    weight.grad_added_to_main_grad = True
    return None


def main_grad_of(weight) -> torch.Tensor | None:
    """What the gradient of `weight` is added to in place of `.grad`, if it has such an attribute, `main_grad`.

    Of its shape, in f32; the product is added in the pass that computes it, and `weight.grad_added_to_main_grad` is
    set, as Megatron-LM's optimizers expect. `.grad` stays as it is, and its hooks do not run: a gradient that is added
    later is written once and read twice more. In eager mode alone: a compiled layer gives `.grad`.
    """
    return None if torch.compiler.is_compiling() else getattr(weight, "main_grad", None)


def values_of(weight):
    """What products read of a weight: a master weight's values, else the weight itself.

    Compiled, the weight: its values would be an input of the graph beside it, which sees no change inside.
    """
    if isinstance(weight, MasterWeightTensor) and not torch.compiler.is_compiling():
        return weight.hp
    return weight


def gradients(
    dy: list[Operand | None],
    x_columnwise: Callable[[], Operand],
    weight,
    how: Contraction,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    weight_first: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(grad_input, grad_weight) of dy's copies [rowwise, columnwise], each where its copy is there.

    The copies are taken out of the list, and `x_columnwise` is asked when its product is next: each operand goes when
    its product is done. Together they would be most of a step's memory.
    dtypes: of the two gradients. weight_first: which product comes first; see `weight_comes_first`.
    """
    columnwise, rowwise = dy.pop(), dy.pop()
    grads: dict[str, torch.Tensor | None] = {"input": None, "weight": None}
    for product in ("weight", "input") if weight_first else ("input", "weight"):
        if product == "input" and rowwise is not None:
            grads[product] = grad_input(rowwise, weight, how, dtypes[0])
            rowwise = None
        if product == "weight" and columnwise is not None:
            grads[product] = grad_weight(columnwise, x_columnwise(), weight, how, dtypes[1])
            columnwise = None
    return grads["input"], grads["weight"]


def weight_comes_first(dy: torch.Tensor, how: Contraction) -> bool:
    """Whether less lives at once where grad_weight is computed before grad_input.

    With grad_input first its result is there beside copies of all tokens, those of dy and the saved one of x; with
    grad_weight first that is there beside the columnwise copy of the weight: up to 23 % of a layer's peak with many
    tokens (32768 of 4096 → 14336), up to 10 % the other way with few. A compiled graph has one order for any number of
    tokens, and so have ranks that ask each other for amaxes, whose parts may differ in size.
    """
    tokens, features = dy.shape
    return not torch.compiler.is_compiling() and how.split == WHOLE and tokens > features


# --- a product with the weight ----------------------------------------------------------------------------------------


def _product_of(a: Operand, weight, how: Contraction, columnwise: bool, dtype, bias) -> torch.Tensor:
    """a · wᵀ, or with the columnwise copy of the weight a · w, whatever carries the weight: its `values_of` do too.

    The quantized copy of a master weight dies inside this call, outside of `weights_unchanged`.
    """
    config, groups = how.config, how.groups
    if not isinstance(weight, QuantizedTensor):
        recipe = config.weight_format, config.power_of_2_scales, columnwise, how.split.weight, how.rounded_to
        return master_matmul_op(a, values_of(weight), *recipe, dtype, bias, groups, config.backend)
    if weight.original is not None and not torch.compiler.is_compiling():
        weight.original.free()
    # PyTorch 2.11 may trace a layer by autograd, where nothing is compiling, and tensors are not plain.
    if not columnwise or torch.compiler.is_compiling() or type(a.qdata) is not torch.Tensor:
        # Not `weight.operand()`: compilers take only tensors from a method, and do not always know `fmt`.
        fmt = config.weight_format if torch.compiler.is_compiling() else weight.fmt
        qdata, scale, global_scale = weight.operand_tensors()
        b = Operand(qdata, scale, global_scale, fmt.name)
        if columnwise:
            return transposed_matmul_op(a, b, weight.shape[-1], dtype, groups, config.backend)
    else:
        b = weight.columnwise_operand(backend=ops.casting_backend(config.backend))
    return _product(a, b, dtype, bias, groups, config.backend)


def _product(a: Operand, b: Operand, out_dtype, bias, groups: Groups | None, backend: Backend) -> torch.Tensor:
    if groups is None:
        return ops.matmul(a, b, out_dtype=out_dtype, bias=bias, backend=backend)
    assert bias is None, "grouped products have no bias"
    return ops.grouped_matmul(a, b, groups, out_dtype=out_dtype, backend=backend)


def master_matmul(
    a, hp, fmt, power_of_2_scales, columnwise, amax_groups, rounded_to, out_dtype, bias, groups, products_by
) -> torch.Tensor:
    """Arguments as in the op."""
    b = weight_operand(
        hp,
        fmt,
        columnwise=columnwise,
        power_of_2_scales=power_of_2_scales,
        backend=ops.casting_backend(products_by),
        amax_groups=amax_groups,
        rounded_to=rounded_to,
    )
    return _product(a, b, out_dtype, bias, groups, products_by)


def _has_no_scope(*args: Any) -> bool:
    """Whether arguments alone decide what `master_matmul` does: no scope keeps copies, no ranks share the weight."""
    return replay.on_device(*args) and not kept_weights and not is_split(*args)


# One operation from the master's values to the product: the quantized copy is never a value of a compiled graph, which
# could hold it from forward to backward, and a scope that keeps it is asked when the graph runs. It serves experts too:
# checkpoint policies name one operation.
@define_op((Implementation(Backend.AUTO, master_matmul),), replayed=_has_no_scope)
def master_matmul_op(
    a: Operand,
    hp: torch.Tensor,
    fmt: BlockFormat,
    power_of_2_scales: bool,
    columnwise: bool,
    amax_groups: str,
    rounded_to: torch.dtype | None,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    groups: Groups | None,
    products_by: Backend,
) -> torch.Tensor:
    return a.qdata.new_empty((a.qdata.shape[0], hp.shape[-1 if columnwise else -2]), dtype=out_dtype)


def _transposed_matmul(a, weight, columns, out_dtype, groups, products_by) -> torch.Tensor:
    b = ops.transpose(weight, columns=columns, backend=ops.casting_backend(products_by))
    return _product(a, b, out_dtype, None, groups, products_by)


# One operation in graphs, for the same reason: PyTorch's partitioner would as soon hold the transposed copy as the
# payload, and would not see that the payload changed.
@define_op((Implementation(Backend.AUTO, _transposed_matmul),))
def transposed_matmul_op(
    a: Operand,
    weight: Operand,
    columns: int,
    out_dtype: torch.dtype,
    groups: Groups | None,
    products_by: Backend,
) -> torch.Tensor:
    return a.qdata.new_empty((a.qdata.shape[0], columns), dtype=out_dtype)
