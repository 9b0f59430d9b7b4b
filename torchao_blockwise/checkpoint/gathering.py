"""Whole weights of a model that ranks share, one at a time, and parts of whole ones; what ranks agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.distributed import sync_weight_scales
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard, QuantizedTensor, fsdp
from torchao_blockwise.tensors.fsdp import WeightShard

_T = TypeVar("_T")


def is_shared(model: nn.Module) -> bool:
    """Whether ranks hold parts of the model, which is made ready to be gathered; a collective where FSDP2 shards it.

    What FSDP2 has left gathered is sharded again, and the quantized payload of shards is that of their values now.
    """
    if dist.is_available():
        from torch.distributed.fsdp import FSDPModule

        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.reshard()
        if sharded:
            sync_weight_scales(model)
    return any(_compat.local_of(p) is not p for p in model.parameters())


def is_first() -> bool:
    """Whether this process is the first rank, or the only one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def whole(x: torch.Tensor, values: bool = False) -> torch.Tensor:
    """`x`, or all of what it is a part of; on all ranks, as one quantizes it on one device.

    What FSDP2 gathers quantized travels so: a byte an element in FP8, half a byte in NVFP4 where rows split evenly.
    Other parts of master weights, those that tensor parallelism splits as well, and with `values` all travel in high
    precision.
    """
    local: Any = _compat.local_of(x)
    if local is x:
        return x
    if isinstance(local, MasterWeightTensor):
        shard = local.shard
        if not values and shard is not None and not travels_in_high_precision(x):
            return _whole_payload(x, shard)
        dtype = local.hp.dtype if shard is None else shard.layout.dtype
        return MasterWeightTensor(_gathered(x, local.hp.to(dtype)), local.config)
    if isinstance(local, QuantizedShard):
        payload = local.qdata.view(torch.uint8)
        qdata = _gathered(x, payload, payload.shape[-1]).view(local.qdata.dtype)
        return fsdp.quantized(qdata, local.part, local.scale, local.global_scale, local.part.dtype)
    return _gathered(x, local)


def travels_in_high_precision(x: torch.Tensor) -> bool:
    """Whether `whole` gathers the master weight `x` in high precision: FSDP2's ranks alone keep payload and scales.

    Under tensor parallelism as well they are those of a part.
    """
    local: Any = _compat.local_of(x)
    if local is x or not isinstance(local, MasterWeightTensor):
        return False
    shard = local.shard
    if shard is None or shard.payload is None or not shard.layout.quantized:
        return True
    return shard.layout.shape != tuple(x.shape)


def _whole_payload(x: Any, shard: WeightShard) -> QuantizedTensor:
    """The whole weight from what its ranks keep for FSDP2 to gather."""
    layout, element = shard.layout, shard.layout.config.weight_format.element
    assert shard.payload is not None and shard.scale is not None, "made together"
    part = shard.payload.view(layout.payload_shape).narrow(layout.dim, 0, layout.local_shape[layout.dim])
    gathered = _gathered(x, part, part.shape[-1] if layout.packs else None)
    qdata = gathered.view(element.storage_dtype) if layout.travels_as_stored else element.pack(gathered)
    return fsdp.quantized(qdata, layout, shard.scale, shard.global_scale, layout.dtype)


def _gathered(x: Any, part: torch.Tensor, columns: int | None = None) -> torch.Tensor:
    """All ranks' parts, which lie as those of the DTensor `x` do; of `columns`, where these are not those of `x`."""
    from torch.distributed.tensor import DTensor, Shard

    mesh, shape = x.device_mesh, x.shape if columns is None else torch.Size((*x.shape[:-1], columns))
    if mesh.ndim == 1 and x.placements == (Shard(0),) and x.shape[0] % mesh.size() == 0:
        # What FSDP2 makes of most weights. DTensor's way there takes longer than the bytes do.
        gathered = part.new_empty(shape)
        dist.all_gather_into_tensor(gathered, part.detach().contiguous(), group=mesh.get_group())
        return gathered
    stride = torch.empty(shape, device="meta").stride()
    placed = DTensor.from_local(part.detach(), x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride)
    return placed.full_tensor()


def shard_of(whole: torch.Tensor, x: Any) -> torch.Tensor:
    """This rank's part of `whole`, placed as the DTensor `x`; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None).to_local()


def agreed_by_all(shared: bool, work: Callable[[], _T]) -> _T:
    """What `work` gives on this rank; what it raises on the first rank where it does is raised on all."""
    if not shared:
        return work()
    result, raised = None, None
    try:
        result = work()
    except Exception as error:
        raised = error
    said: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, raised)
    for failed in said:
        if failed is not None:
            raise failed
    return result  # type: ignore[return-value]  # it raised nothing


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
