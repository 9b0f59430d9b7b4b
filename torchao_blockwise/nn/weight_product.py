"""The product of a quantised operand with a layer's weight, whatever the weight is carried by."""

from __future__ import annotations

import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import get_format
from torchao_blockwise.ops.library import define_op
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor
from torchao_blockwise.tensors.weight_cache import quantized_weight


def weight_product(
    a,
    weight: MasterWeightTensor | QuantizedTensor,
    config,
    *,
    columnwise: bool,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a · wᵀ for `output` (columnwise=False), a · w for `grad_input` (columnwise=True).

    a: operand [T, K] or [T, N]. weight: [N, K]. Returns [T, N] or [T, K] of `out_dtype`.
    A columnwise copy of the weight that is not cached dies inside this call.
    """
    if isinstance(weight, MasterWeightTensor):
        return master_matmul_op(
            *a,
            weight.hp,
            a.format_name,
            config.weight_format.name,
            config.power_of_2_scales,
            columnwise,
            config.columnwise == "cached",
            out_dtype,
            bias,
            config.backend.value,
        )
    if columnwise:
        b = weight.columnwise_operand(backend=ops.casting_backend(config.backend))
    else:
        b = weight.operand()
    return ops.matmul(a, b, out_dtype=out_dtype, bias=bias, backend=config.backend)


def _master_matmul(
    a, a_scale, a_global, hp, a_format, weight_format, power_of_2, columnwise, keep_columnwise, out_dtype, bias, backend
):
    b = quantized_weight(
        hp,
        get_format(weight_format),
        columnwise=columnwise,
        keep_columnwise=keep_columnwise,
        power_of_2_scales=power_of_2,
        backend=ops.casting_backend(backend),
    )
    return ops.matmul(ops.operand(a_format, a, a_scale, a_global), b, out_dtype=out_dtype, bias=bias, backend=backend)


def _master_matmul_fake(
    a, a_scale, a_global, hp, a_format, weight_format, power_of_2, columnwise, keep_columnwise, out_dtype, bias, backend
):
    return a.new_empty((a.shape[0], hp.shape[1 if columnwise else 0]), dtype=out_dtype)


# One operation from the master's values to the product: the quantised copy is never a value of a compiled graph, so
# the cache that outlives the graph can own it.
master_matmul_op = define_op(
    "master_matmul(Tensor a, Tensor a_scale, Tensor? a_global, Tensor hp, str a_format, str weight_format,"
    " bool power_of_2_scales, bool columnwise, bool keep_columnwise, ScalarType out_dtype, Tensor? bias, str backend)"
    " -> Tensor",
    _master_matmul,
    _master_matmul_fake,
)
