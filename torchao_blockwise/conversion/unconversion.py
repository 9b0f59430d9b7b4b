"""Undo conversions: converted layers become plain ones, with their current values."""

from __future__ import annotations

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.conversion.filters import forget_skip_reason
from torchao_blockwise.conversion.handlers import swap, why_not_swappable
from torchao_blockwise.conversion.state_dicts import keep_state_dicts_no_longer
from torchao_blockwise.conversion.weights import held_parameters
from torchao_blockwise.nn.converted import ConvertedModule, restore_class
from torchao_blockwise.nn.fused_modules import FusedModule
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor
from torchao_blockwise.tensors.state_values import plain_values

_FSDP: tuple[type, ...] = ()
if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule

    _FSDP = (FSDPModule,)


@torch.no_grad()
def unconvert(model: nn.Module) -> nn.Module:
    """Turn every converted layer and fused module of `model` into a plain one again, in place; return `model`.

    Parameters stay the same objects, with their gradients, hooks and attributes, so an existing optimizer still trains
    them. A master weight keeps its values. A quantized Parameter gets its master's values, in the weight's dtype, if a
    `MasterWeightOptimizer` has one (that optimizer cannot be used afterwards; make another one), else the decoded
    values. The model can be converted again.
    Raises ValueError, before any change, for weights that are sharded or that something else holds.
    """
    weights = {
        p: held[0][0]
        for p, held in held_parameters(model).items()
        if isinstance(_compat.local_of(p), (MasterWeightTensor, QuantizedTensor))
    }
    sharded = any(isinstance(module, _FSDP) for module in model.modules())
    reasons = {fqn: _why_not(p, sharded) for p, fqn in weights.items()}
    failures = [f"  {fqn}: {reason}" for fqn, reason in reasons.items() if reason is not None]
    if failures:
        raise ValueError(
            f"unconvert: {len(failures)} of {len(weights)} weights cannot be made plain, and nothing was changed:\n"
            + "\n".join(failures)
        )
    for p in weights:
        swap(p, _plain(p))
    for module in model.modules():
        forget_skip_reason(module)
        keep_state_dicts_no_longer(module)
        if isinstance(module, FusedModule):
            restore_class(module)
        if isinstance(module, ConvertedModule):
            restore_class(module)
    return model


def _why_not(weight: nn.Parameter, sharded: bool) -> str | None:
    if sharded or _compat.local_of(weight) is not weight:
        return "it is sharded; load model.state_dict() into an unconverted model that is sharded in the same way"
    return why_not_swappable(weight)


def _plain(weight: torch.Tensor) -> torch.Tensor:
    if isinstance(weight, MasterWeightTensor):
        return weight.hp
    assert isinstance(weight, QuantizedTensor)
    master = None if weight.pending_master is None else weight.pending_master.master(weight)
    return plain_values(weight) if master is None else master.to(weight.dtype, copy=True)
