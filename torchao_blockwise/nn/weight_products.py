"""A product with a weight, whatever carries it: a master weight, a quantized one, or their parts in a compiled graph.

The quantized copy of a master weight dies inside the product. In a compiled graph it is no value, so that nothing can
hold it from forward to backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import BlockFormat, Groups, Operand
from torchao_blockwise.nn.sharded_linear import WHOLE, AmaxGroups
from torchao_blockwise.ops.backend import Backend, Implementation, get_backend
from torchao_blockwise.ops.registry import Operation, by_name, groups, operand
from torchao_blockwise.tensors import (
    MasterWeightTensor,
    QuantizedTensor,
    TrainingConfig,
)
from torchao_blockwise.tensors.weight_operands import weight_operand


@by_name(activation_format=BlockFormat, weight_format=BlockFormat, backend=Backend)
class Recipe(NamedTuple):
    """What of a config, and of how a weight lies, decides products, as a compiled graph says it."""

    activation_format: BlockFormat
    weight_format: BlockFormat
    power_of_2_scales: bool
    hadamard_number: int
    four_over_six: bool
    scale_per_expert: bool
    transposed: bool
    backend: Backend


class Contraction(NamedTuple):
    """How the products of one weight are computed.

    config: of the weight.
    groups: of experts, whose weight is [E, N, K]: which rows of an activation belong to each; without bias.
    split: the process groups over which each tensor is split that is given here in parts.
    rounded_to: the dtype that a master weight is rounded to first, if another than its own.
    transposed: whether the weight lies as [.., K, N] in memory.
    """

    config: TrainingConfig
    groups: Groups | None = None
    split: AmaxGroups = WHOLE
    rounded_to: torch.dtype | None = None
    transposed: bool = False


class WeightValues(NamedTuple):
    """What products read of a weight.

    values: of a master weight, high precision [.., N, K]; of a quantized one its payload, with `scale`, `global_scale`
        and the name of its format. columns: K. rounded_to: as in `Contraction`.
    """

    values: torch.Tensor
    scale: torch.Tensor | None
    global_scale: torch.Tensor | None
    format_name: str
    columns: int
    rounded_to: torch.dtype | None


# What products read a weight from: a weight of ours, a master weight's values, or its parts.
Readable: TypeAlias = torch.Tensor | WeightValues


def values_of(weight: Readable) -> Readable:
    """What products read of a weight: a master weight's values, else the weight itself.

    Compiled, the weight: its values would be an input of the graph beside it, which sees no change inside.
    """
    if isinstance(weight, MasterWeightTensor) and not torch.compiler.is_compiling():
        return weight.hp
    return weight


def weight_product(
    a: Operand, weight: Readable, how: Contraction, columnwise: bool, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    """a · wᵀ, or with the columnwise copy of the weight a · w, whatever carries the weight: its `values_of` do too.

    The quantized copy of a master weight dies inside this call, outside of `weights_unchanged`.
    """
    config, groups, products_by = how.config, how.groups, get_backend(how.config.backend)
    if isinstance(weight, QuantizedTensor):
        if weight.original is not None and not torch.compiler.is_compiling():
            weight.original.free()
        # PyTorch 2.11 may trace a layer by autograd, where nothing is compiling, and tensors are not plain.
        if columnwise and not torch.compiler.is_compiling() and type(a.qdata) is torch.Tensor:
            b = weight.columnwise_operand(backend=ops.casting_backend(config.backend))
            return _product(a, b, dtype, bias, groups, products_by)
    payload = _payload_of(weight, config)
    if payload is None:
        values = weight.values if isinstance(weight, WeightValues) else values_of(weight)
        options = config.weight_format, config.power_of_2_scales, config.scale_per_expert
        recipe = *options, columnwise, how.split.weight, how.rounded_to
        return master_matmul_op(a, values, *recipe, dtype, bias, groups, products_by)
    b, columns = payload
    if columnwise:
        return transposed_matmul_op(a, b, columns, dtype, groups, products_by)
    return _product(a, b, dtype, bias, groups, products_by)


def _payload_of(weight: Readable, config: TrainingConfig) -> tuple[Operand, int] | None:
    """(rowwise operand, its columns) of a weight that is quantized already, None for a master weight."""
    if isinstance(weight, WeightValues):
        if weight.scale is None:
            return None
        return Operand(weight.values, weight.scale, weight.global_scale, weight.format_name), weight.columns
    if not isinstance(weight, QuantizedTensor):
        return None
    # Not `weight.operand()`: compilers take only tensors from a method, and do not always know `fmt`.
    fmt = config.weight_format if torch.compiler.is_compiling() else weight.fmt
    qdata, scale, global_scale = weight.operand_tensors()
    return Operand(qdata, scale, global_scale, fmt.name), weight.shape[-1]


def _product(
    a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None, groups: Groups | None, backend: Backend
) -> torch.Tensor:
    if groups is None:
        return ops.matmul(a, b, out_dtype=out_dtype, bias=bias, backend=backend)
    assert bias is None, "grouped products have no bias"
    return ops.grouped_matmul(a, b, groups, out_dtype=out_dtype, backend=backend)


def master_matmul(
    a: Operand,
    hp: torch.Tensor,
    fmt: BlockFormat,
    power_of_2_scales: bool,
    scale_per_group: bool,
    columnwise: bool,
    amax_groups: str,
    rounded_to: torch.dtype | None,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    groups: Groups | None,
    products_by: Backend,
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
        scale_per_group=scale_per_group,
    )
    return _product(a, b, out_dtype, bias, groups, products_by)


def product_flops(tokens: int, weight: Sequence[int]) -> int:
    """Floating point operations of one of the three products: 2 · tokens · N · K for a weight [.., N, K].

    Of experts too, whose numbers of tokens are on the device: each token counts as one of an expert.
    """
    return 2 * tokens * weight[-2] * weight[-1]


# One operation from the master's values to the product: the quantized copy is never a value of a compiled graph, which
# could hold it from forward to backward, and a scope that keeps it is asked when the graph runs. It serves experts too:
# checkpoint policies name one operation.
master_matmul_op = Operation(
    f"master_matmul({operand('a')}, Tensor hp, str fmt, bool power_of_2_scales, bool scale_per_group, bool columnwise, "
    f"str amax_groups, ScalarType? rounded_to, ScalarType out_dtype, Tensor? bias, {groups('Tensor?')}, "
    "str products_by) -> Tensor",
    takes=(Operand, None, BlockFormat, *[None] * 7, Groups, Backend),
    table=[Implementation(Backend.AUTO, master_matmul)],
    fake=lambda a, hp, fmt, power_of_2_scales, scale_per_group, columnwise, amax_groups, rounded_to, out_dtype, *_: (
        a.qdata.new_empty((a.qdata.shape[0], hp.shape[-1 if columnwise else -2]), dtype=out_dtype)
    ),
    flops=lambda a, hp, *_: product_flops(a.qdata.shape[0], hp.shape),
)


def transposed_matmul(
    a: Operand, weight: Operand, columns: int, out_dtype: torch.dtype, groups: Groups | None, products_by: Backend
) -> torch.Tensor:
    b = ops.transpose(weight, columns=columns, backend=ops.casting_backend(products_by))
    return _product(a, b, out_dtype, None, groups, products_by)


# One operation in graphs, for the same reason: PyTorch's partitioner would as soon hold the transposed copy as the
# payload, and would not see that the payload changed.
transposed_matmul_op = Operation(
    f"transposed_matmul({operand('a')}, {operand('weight')}, SymInt columns, ScalarType out_dtype, "
    f"{groups('Tensor?')}, str products_by) -> Tensor",
    takes=(Operand, Operand, None, None, Groups, Backend),
    table=[Implementation(Backend.AUTO, transposed_matmul)],
    fake=lambda a, weight, columns, out_dtype, *_: a.qdata.new_empty((a.qdata.shape[0], columns), dtype=out_dtype),
    flops=lambda a, weight, columns, *_: product_flops(a.qdata.shape[0], (weight.qdata.shape[-2], columns)),
)
