"""The product of a quantized operand with a layer's weight, whatever the weight is carried by."""

from __future__ import annotations

import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import BlockFormat, Groups, Operand
from torchao_blockwise.ops.backend import Backend, Implementation
from torchao_blockwise.ops.op import define_op
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor
from torchao_blockwise.tensors.weight_operands import weight_operand


def weight_product(
    a: Operand,
    weight: MasterWeightTensor | QuantizedTensor,
    config,
    *,
    columnwise: bool,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    amax_groups: str = "",
    groups: Groups | None = None,
    rounded_to: torch.dtype | None = None,
) -> torch.Tensor:
    """a · wᵀ for `output` (columnwise=False), a · w for `grad_input` (columnwise=True).

    a: [T, K] or [T, N]. weight: [N, K]. Returns [T, N] or [T, K] of `out_dtype`.
    amax_groups: the process groups over which the weight is split, as `amax_over` takes them.
    groups: of experts, whose weight is [E, N, K]: which rows of `a` belong to each; without bias.
    rounded_to: the dtype that a master weight is rounded to first, if another than its own.
    The quantized copy of a master weight dies inside this call, outside of `weights_unchanged`.
    """
    if isinstance(weight, MasterWeightTensor):
        # Compiled, the weight: its values would be an input of the graph beside it, which sees no change inside.
        hp = weight if torch.compiler.is_compiling() else weight.hp
        recipe = config.weight_format, config.power_of_2_scales, columnwise, amax_groups, rounded_to
        return master_matmul_op(a, hp, *recipe, out_dtype, bias, groups, config.backend)
    if weight.original is not None and not torch.compiler.is_compiling():
        weight.original.free()
    # PyTorch 2.11 may trace a layer by autograd, where nothing is compiling, and tensors are not plain.
    if not columnwise or torch.compiler.is_compiling() or type(a.qdata) is not torch.Tensor:
        # Not `weight.operand()`: compilers take only tensors from a method, and do not always know `fmt`.
        fmt = config.weight_format if torch.compiler.is_compiling() else weight.fmt
        b = Operand(*weight.operand_tensors(), fmt.name)
        if columnwise:
            return transposed_matmul_op(a, b, weight.shape[-1], out_dtype, groups, config.backend)
    else:
        b = weight.columnwise_operand(backend=ops.casting_backend(config.backend))
    return _product(a, b, out_dtype, bias, groups, config.backend)


def _product(a: Operand, b: Operand, out_dtype, bias, groups: Groups | None, backend: Backend) -> torch.Tensor:
    if groups is None:
        return ops.matmul(a, b, out_dtype=out_dtype, bias=bias, backend=backend)
    assert bias is None, "grouped products have no bias"
    return ops.grouped_matmul(a, b, groups, out_dtype=out_dtype, backend=backend)


def weight_gradient(
    dy_columnwise: Operand,
    x_columnwise: Operand,
    weight,
    config,
    dtype: torch.dtype,
    groups: Groups | None = None,
) -> torch.Tensor | None:
    """dyᵀ · x [N, K] of `dtype`, both operands quantized along tokens; None where it went into `weight.main_grad`.

    groups: of experts: the operands are those of `ops.grouped_quantize`, and the product is [E, N, K].
    A weight with an attribute `main_grad`, of its shape in f32, has the product added there in the pass that computes
    it, and `weight.grad_added_to_main_grad` set, as Megatron-LM's optimizers expect. `.grad` stays as it is, and its
    hooks do not run: a gradient that is added later is written once and read twice more. In eager mode alone: a
    compiled layer gives `.grad`.
    """
    main_grad = None if torch.compiler.is_compiling() else getattr(weight, "main_grad", None)
    operands, backend = (dy_columnwise, x_columnwise), config.backend
    if main_grad is None and groups is None:
        return ops.matmul(*operands, out_dtype=dtype, backend=backend)
    if main_grad is None:
        return ops.grouped_matmul(*operands, groups, along="k", out_dtype=dtype, backend=backend)
    if groups is None:
        ops.add_matmul_(main_grad, *operands, backend=backend)
    else:
        ops.add_grouped_matmul_(main_grad, *operands, groups, backend=backend)
    weight.grad_added_to_main_grad = True
    return None


def _master_matmul(
    a, hp, fmt, power_of_2_scales, columnwise, amax_groups, rounded_to, out_dtype, bias, groups, products_by
) -> torch.Tensor:
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


# One operation from the master's values to the product: the quantized copy is never a value of a compiled graph, which
# could hold it from forward to backward, and a scope that keeps it is asked when the graph runs. It serves experts too:
# checkpoint policies name one operation.
@define_op((Implementation(Backend.AUTO, _master_matmul),))
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
