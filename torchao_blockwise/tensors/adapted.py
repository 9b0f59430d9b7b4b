"""A quantized weight and an adapter: their sum is a high-precision weight, which GEMMs quantize again, or is merged."""

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


@implements(torch.ops.aten.add_.Tensor, torch.ops.aten.sub_.Tensor)
def _merge(func: Operation, weight: torch.Tensor, delta: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
    """`weight += alpha · delta` of a frozen weight, as LoRA merges: decoded, added to, and quantized again.

    Refused where the weight trains: an optimizer's small steps would be rounded away.
    """
    frozen = (
        isinstance(weight, QuantizedTensor)
        and weight.pending_master is None
        and not (weight.trains or weight.requires_grad)
    )
    if not frozen or isinstance(delta, TorchAOBaseTensor):
        layer = getattr(weight, "layer", "") or "a quantized weight"
        raise NotImplementedError(
            f"{func} of {layer}: a plain delta can be added, as LoRA does, only to a weight that was frozen when "
            "it was converted; to train it, step torchao_blockwise.distributed.MasterWeightOptimizer("
            "torch.optim.AdamW, model, lr=...), or keep high-precision weights (master_weights=True); to merge, "
            "weight.copy_(weight.dequantize() + delta)"
        )
    return weight.copy_(func(weight.dequantize(), delta, alpha=alpha))
