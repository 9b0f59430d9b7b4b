"""The product of a quantised operand with a layer's weight, whatever the weight is carried by."""

from __future__ import annotations

import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import get_format
from torchao_blockwise.ops.library import define_op
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor
from torchao_blockwise.tensors.weight_operands import weight_operand


def weight_product(
    a,
    weight: MasterWeightTensor | QuantizedTensor,
    config,
    *,
    columnwise: bool,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    amax_groups: str = "",
    group_ends: torch.Tensor | None = None,
    rounded_to: torch.dtype | None = None,
    group_tables: torch.Tensor | None = None,
) -> torch.Tensor:
    """a · wᵀ for `output` (columnwise=False), a · w for `grad_input` (columnwise=True).

    a: operand [T, K] or [T, N]. weight: [N, K]. Returns [T, N] or [T, K] of `out_dtype`.
    amax_groups: the process groups over which the weight is split, as `amax_over` takes them.
    group_ends: of experts, whose weight is [E, N, K]: which rows of `a` belong to each, as `ops.grouped_matmul` takes
        it; without bias. group_tables: those of these groups, if they are made, as it takes them.
    rounded_to: the dtype that a master weight is rounded to first, if another than its own.
    The quantized copy of a master weight dies inside this call, outside of `weights_unchanged`.
    """
    if isinstance(weight, MasterWeightTensor):
        return master_matmul_op(
            *a,
            # Compiled, the weight: its values would be an input of the graph beside it, which sees no change inside.
            weight if torch.compiler.is_compiling() else weight.hp,
            a.format_name,
            config.weight_format.name,
            config.power_of_2_scales,
            columnwise,
            out_dtype,
            bias,
            config.backend.value,
            amax_groups,
            group_ends,
            rounded_to,
            group_tables,
        )
    if weight.original is not None and not torch.compiler.is_compiling():
        weight.original.free()
    # PyTorch 2.11 may trace a layer by autograd, where nothing is compiling, and tensors are not plain.
    if columnwise and (torch.compiler.is_compiling() or type(a.qdata) is not torch.Tensor):
        b, columns = weight.operand(), weight.shape[-1]
        return transposed_matmul_op(
            *a, *b, columns, a.format_name, b.format_name, out_dtype, config.backend.value, group_ends, group_tables
        )
    b = weight.columnwise_operand(backend=ops.casting_backend(config.backend)) if columnwise else weight.operand()
    return _product(a, b, group_ends, out_dtype, bias, config.backend, group_tables)


def _product(a, b, group_ends, out_dtype, bias, backend, group_tables):
    if group_ends is None:
        return ops.matmul(a, b, out_dtype=out_dtype, bias=bias, backend=backend)
    assert bias is None, "grouped products have no bias"
    return ops.grouped_matmul(a, b, group_ends, out_dtype=out_dtype, backend=backend, group_tables=group_tables)


def weight_gradient(
    dy_columnwise,
    x_columnwise,
    weight,
    config,
    dtype: torch.dtype,
    group_ends: torch.Tensor | None = None,
    group_tables: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """dyᵀ · x [N, K] of `dtype`, both operands quantised along tokens; None where it went into `weight.main_grad`.

    group_ends: of experts: the operands are those of `ops.grouped_quantize`, and the product is [E, N, K].
    group_tables: as in `weight_product`.
    A weight with an attribute `main_grad`, of its shape in f32, has the product added there in the pass that computes
    it, and `weight.grad_added_to_main_grad` set, as Megatron-LM's optimizers expect. `.grad` stays as it is, and its
    hooks do not run. In eager mode alone: a compiled layer gives `.grad`.
    """
    main_grad = None if torch.compiler.is_compiling() else getattr(weight, "main_grad", None)
    backend = config.backend
    groups = {"backend": backend, "group_tables": group_tables}
    if main_grad is None and group_ends is None:
        return ops.matmul(dy_columnwise, x_columnwise, out_dtype=dtype, backend=backend)
    if main_grad is None:
        return ops.grouped_matmul(dy_columnwise, x_columnwise, group_ends, along="k", out_dtype=dtype, **groups)
    if group_ends is None:
        ops.add_matmul_(main_grad, dy_columnwise, x_columnwise, backend=backend)
    else:
        ops.add_grouped_matmul_(main_grad, dy_columnwise, x_columnwise, group_ends, **groups)
    weight.grad_added_to_main_grad = True
    return None


def _master_matmul(
    a,
    a_scale,
    a_global,
    hp,
    a_format,
    weight_format,
    power_of_2,
    columnwise,
    out_dtype,
    bias,
    backend,
    amax_groups="",
    group_ends=None,
    rounded_to=None,
    group_tables=None,
):
    b = weight_operand(
        hp,
        get_format(weight_format),
        columnwise=columnwise,
        power_of_2_scales=power_of_2,
        backend=ops.casting_backend(backend),
        amax_groups=amax_groups,
        rounded_to=rounded_to,
    )
    return _product(ops.operand(a_format, a, a_scale, a_global), b, group_ends, out_dtype, bias, backend, group_tables)


def _master_matmul_fake(
    a,
    a_scale,
    a_global,
    hp,
    a_format,
    weight_format,
    power_of_2,
    columnwise,
    out_dtype,
    bias,
    backend,
    amax_groups="",
    group_ends=None,
    rounded_to=None,
    group_tables=None,
):
    return a.new_empty((a.shape[0], hp.shape[-1 if columnwise else -2]), dtype=out_dtype)


# One operation from the master's values to the product: the quantized copy is never a value of a compiled graph, which
# could hold it from forward to backward, and a scope that keeps it is asked when the graph runs.
master_matmul_op = define_op(
    "master_matmul(Tensor a, Tensor a_scale, Tensor? a_global, Tensor hp, str a_format, str weight_format,"
    " bool power_of_2_scales, bool columnwise, ScalarType out_dtype, Tensor? bias, str backend,"
    " str amax_groups='', Tensor? group_ends=None, ScalarType? rounded_to=None,"
    " Tensor? group_tables=None) -> Tensor",
    _master_matmul,
    _master_matmul_fake,
)


def _transposed_matmul(
    a,
    a_scale,
    a_global,
    qdata,
    scale,
    global_scale,
    columns,
    a_format,
    weight_format,
    out_dtype,
    backend,
    group_ends=None,
    group_tables=None,
):
    rowwise = ops.operand(weight_format, qdata, scale, global_scale)
    b = ops.transpose(rowwise, columns=columns, backend=ops.casting_backend(backend))
    return _product(ops.operand(a_format, a, a_scale, a_global), b, group_ends, out_dtype, None, backend, group_tables)


def _transposed_matmul_fake(a, a_scale, a_global, qdata, scale, global_scale, columns, *options):
    return a.new_empty((a.shape[0], columns), dtype=options[2])


# One operation in graphs, for the same reason: PyTorch's partitioner would as soon hold the transposed copy as the
# payload, and would not see that the payload changed.
transposed_matmul_op = define_op(
    "transposed_matmul(Tensor a, Tensor a_scale, Tensor? a_global, Tensor qdata, Tensor scale, Tensor? global_scale,"
    " SymInt columns, str a_format, str weight_format, ScalarType out_dtype, str backend, Tensor? group_ends=None,"
    " Tensor? group_tables=None) -> Tensor",
    _transposed_matmul,
    _transposed_matmul_fake,
)
