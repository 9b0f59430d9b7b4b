"""Whole weights of a model that ranks share, one at a time: a collective of all who hold a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.tensors import BlockwiseFP8Tensor, MasterWeightTensor, QuantizedShard

_T = TypeVar("_T")


def is_shared(model: nn.Module) -> bool:
    """Whether ranks hold parts of the model; what FSDP2 has left gathered is sharded again."""
    if dist.is_available():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    return any(_compat.local_of(p) is not p for p in model.parameters())


def is_first() -> bool:
    """Whether this process is the first rank, or the only one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def whole(x: torch.Tensor) -> torch.Tensor:
    """`x`, or all of what it is a part of; on all ranks, as one quantizes it on one device.

    Master weights are gathered in high precision and rounded as FSDP2 rounds what it gathers; quantized rows travel as
    bytes.
    """
    local: Any = _compat.local_of(x)
    if local is x:
        return x
    if isinstance(local, MasterWeightTensor):
        hp = _gathered(x, local.hp)
        dtype = hp.dtype if local.shard is None else local.shard.layout.dtype
        return MasterWeightTensor(hp.to(dtype), local.config)
    if isinstance(local, QuantizedShard):
        qdata = _gathered(x, local.qdata.view(torch.uint8)).view(local.qdata.dtype)
        dtype, power_of_2 = local.part.dtype, local.power_of_2_scales
        return BlockwiseFP8Tensor(qdata, local.scale, dtype, power_of_2, local.config)
    return _gathered(x, local)


def _gathered(x: Any, part: torch.Tensor) -> torch.Tensor:
    """All ranks' parts, which lie as those of the DTensor `x` do."""
    from torch.distributed.tensor import DTensor

    shape, stride = x.shape, torch.empty(x.shape, device="meta").stride()
    placed = DTensor.from_local(part.detach(), x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride)
    return placed.full_tensor()


def agreed(shared: bool, work: Callable[[], _T]) -> _T | None:
    """What `work` gives on the first rank, None on others; what it raises there is raised on all."""
    if not shared:
        return work()
    result, raised = None, None
    if is_first():
        try:
            result = work()
        except Exception as error:
            raised = error
    said = [raised]
    dist.broadcast_object_list(said)
    if said[0] is not None:
        raise said[0]
    return result
