"""The operations that selective activation checkpointing should save."""

from __future__ import annotations

from torchao_blockwise._compat.torch_types import Operation
from torchao_blockwise.nn.gemms import master_matmul_op, quantized_matmul_op
from torchao_blockwise.ops.gemm.grouped import grouped_matmul_op
from torchao_blockwise.ops.gemm.plain import matmul_op
from torchao_blockwise.ops.quantization.operations import hadamard_amax_bits_op, tensor_amax_bits_op

_PRODUCTS = (master_matmul_op, quantized_matmul_op, matmul_op, grouped_matmul_op)
# Four bytes, for which a whole tensor is read.
_AMAXES = (tensor_amax_bits_op, hadamard_amax_bits_op)


def sac_save_list() -> list[Operation]:
    """The operations whose results a policy of selective activation checkpointing should save: those that cost most.

    Products of `output` of all layers, dense and of experts, and in NVFP4 the largest value of each tensor and of its
    transform. Quantized copies are not among them: they are made again, as norms and activations are.
    A new list, for `torch.utils.checkpoint.create_selective_checkpoint_contexts`, by itself or with PyTorch's.
    Eager and compiled.
    """
    return [op.overload for op in (*_PRODUCTS, *_AMAXES)]
