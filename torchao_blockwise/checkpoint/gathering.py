"""Gather the weights of a sharded model, one at a time, and raise the errors of one rank on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.distributed import sync_weight_scales
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard, QuantizedTensor, fsdp

_T = TypeVar("_T")


def reshard(model: nn.Module) -> bool:
    """Reshard the Parameters that FSDP2 has left gathered, and return whether the model is sharded."""
    if dist.is_available():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    return any(_compat.local_of(p) is not p for p in model.parameters())


def prepare_gather(model: nn.Module) -> bool:
    """Prepare the model for gathering and return whether it is sharded; a collective if FSDP2 shards it.

    Parameters that FSDP2 has left gathered are resharded, and shards are quantized from their current values.
    """
    is_sharded = reshard(model)
    if is_sharded:
        sync_weight_scales(model)
    return is_sharded


def gather_weights(tensors: Iterable[tuple[torch.Tensor, bool]]) -> Iterator[torch.Tensor]:
    """Yield each tensor, gathered, in this order and on all ranks, bitwise identical to the unsharded model's.

    tensors: (tensor, whether its high-precision values are needed).
    Weights that FSDP2 gathers quantized are sent quantized: one byte an element in FP8, half a byte in NVFP4 if rows
    split evenly. All others are sent in high precision: weights whose values are needed, and those that tensor
    parallelism splits as well.
    """
    for x, values in tensors:
        local: Any = _compat.local_of(x)
        shard = local if isinstance(local, QuantizedShard) else getattr(local, "shard", None)
        if local is x:
            yield x
        # With tensor parallelism in addition, FSDP2's payload and scales cover only a part of the weight.
        elif isinstance(shard, QuantizedShard) and (local is shard or (not values and shard.part.shape == x.shape)):
            yield _gather_quantized(x, shard)
        elif isinstance(local, MasterWeightTensor):
            hp = local.hp.to(fsdp.gathered_dtype(local))
            yield MasterWeightTensor(_gather(hp, x, x.shape), local.config)
        else:
            yield _gather(local, x, x.shape)


def _gather_quantized(x: Any, shard: QuantizedShard) -> QuantizedTensor:
    layout, element, payload = shard.part, shard.fmt.element, shard.qdata.view(torch.uint8)
    if shard.ready is not None:
        # The current stream may not be the one that quantized the weight.
        torch.cuda.current_stream(payload.device).wait_event(shard.ready)
    # A split of another dim than rows may fall between two codes of one byte.
    if layout.dim > 0 and element.per_byte > 1:
        qdata = element.pack(_gather(element.unpack(payload, shard.shape[-1]).contiguous(), x, x.shape))
    else:
        shape = x.shape if layout.dim else torch.Size((*x.shape[:-1], payload.shape[-1]))
        qdata = _gather(payload, x, shape).view(shard.qdata.dtype)
    return fsdp.quantized(qdata, fsdp.Gather(layout, shard.scale, shard.global_scale), layout.dtype)


def _gather(part: torch.Tensor, x: Any, shape: torch.Size) -> torch.Tensor:
    """Return the tensor of `shape` of which each rank holds `part`, placed as the DTensor `x`."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    placed = DTensor.from_local(part.detach(), x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride)
    return placed.full_tensor()


def shard_of(whole: torch.Tensor, x: Any) -> torch.Tensor:
    """Return this rank's part of `whole`, placed as the DTensor `x`, without communication."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None).to_local()


def on_all_ranks(shared: bool, work: Callable[[], _T]) -> _T:
    """Return `work()` of this rank; if it raises on a rank, raise the error of the first such rank on all ranks."""
    if not shared:
        return work()
    result, raised = None, None
    try:
        result = work()
    except Exception as error:
        raised = error
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, raised)
    for error_of_rank in errors:
        if error_of_rank is not None:
            raise error_of_rank
    return result  # type: ignore[return-value]  # it raised nothing


def on_first_rank(shared: bool, work: Callable[[], _T]) -> _T | None:
    """Return `work()` on the first rank and None on the others; an error is raised on all ranks."""
    return on_all_ranks(shared, work if not shared or dist.get_rank() == 0 else lambda: None)
