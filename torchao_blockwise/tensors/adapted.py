"""A quantized weight and an adapter of it: the sum is a weight in high precision, which products quantize again."""

from __future__ import annotations

import dataclasses

import torch
from torchao.utils import TorchAOBaseTensor

from torchao_blockwise._compat.torch_types import Operation
from torchao_blockwise.tensors.master_weight import MasterWeightTensor
from torchao_blockwise.tensors.quantized import QuantizedTensor, implements
from torchao_blockwise.tensors.rounding import carry_key


@implements(torch.ops.aten.baddbmm.default)
def _add_adapter(
    func: Operation, weight: torch.Tensor, b: torch.Tensor, a: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> MasterWeightTensor:
    """beta · weight + alpha · b @ a for a stack of experts [E, N, K], as PEFT adapts one on every use.

    The small factors are multiplied in high precision, and the weight is decoded for as long as the sum lives.
    """
    factors = any(isinstance(factor, TorchAOBaseTensor) for factor in (b, a))
    if factors or not isinstance(weight, QuantizedTensor) or weight.config is None:
        raise NotImplementedError(
            f"{func}: an adapter b @ a is added to a converted weight alone, and its factors are plain tensors; "
            "call .dequantize() on what is quantized first"
        )
    hp = torch.baddbmm(weight.dequantize(), b, a, beta=beta, alpha=alpha)
    total = MasterWeightTensor(hp, dataclasses.replace(weight.config, master_weights=True))
    total.layer = weight.layer
    carry_key(weight, total)
    return total
