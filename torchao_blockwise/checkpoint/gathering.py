"""Gather the weights of a sharded model and the amaxes of fused layers, and raise the errors of one rank on all ranks.

In NVFP4 an engine keeps one tensor scale for fused layers, but each weight trained with a separate one. So the weights
with a smaller amax are quantized again for the file, with the scale of the largest amax. Weights too small for a tensor
scale that engines can read are quantized again as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.checkpoint.engine_layers import fused_layers
from torchao_blockwise.checkpoint.layouts import TENSOR_MAX, clamp_to_normal_scale
from torchao_blockwise.checkpoint.model_tensors import is_converted, tensors_of
from torchao_blockwise.distributed import sync_weight_scales
from torchao_blockwise.nn.sharded_linear import contiguous_dtensor
from torchao_blockwise.ops.backend import Backend
from torchao_blockwise.ops.quantization.operations import tensor_amax_bits_op
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard, fsdp

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


def gather(x: Any, needs_values: bool) -> torch.Tensor:
    """Return the weight, gathered, on all ranks, bitwise identical to the unsharded model's.

    Weights that FSDP2 gathers quantized are sent quantized: one byte per element in FP8, half a byte in NVFP4 if rows
    split evenly. All others are sent in high precision: weights whose values are needed, and those that tensor
    parallelism splits as well.
    """
    local: Any = _compat.local_of(x)
    shard = local if isinstance(local, QuantizedShard) else getattr(local, "shard", None)
    if local is x:
        return local
    # With tensor parallelism in addition, FSDP2's payload and scales cover only a part of the weight.
    if isinstance(shard, QuantizedShard) and (local is shard or (not needs_values and shard.part.shape == x.shape)):
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
        return fsdp.quantized(qdata, (layout, shard.scale, shard.global_scale), layout.dtype)
    if isinstance(local, MasterWeightTensor):
        return MasterWeightTensor(_gather(local.hp.to(fsdp.gathered_dtype(local)), x, x.shape), local.config)
    return _gather(local, x, x.shape)


def _gather(part: torch.Tensor, x: Any, shape: torch.Size) -> torch.Tensor:
    """Return the tensor of `shape` of which each rank holds `part`, placed as the DTensor `x`."""
    return contiguous_dtensor(part.detach(), x.device_mesh, x.placements, shape).full_tensor()


def shared_amaxes(model: nn.Module, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return {name: amax for the tensor scale in the files} for the weights whose own tensor scale differs from it.

    names: {name: name in the files}, by which engines fuse layers.
    If the model is sharded this is a collective: one for all weights with the same placement. Synchronizes once.
    """
    weights = {name: x for name, x in tensors_of(model).items() if is_converted(x)}
    # The amax of each unsharded weight, |fp32| viewed as int32: the maximum is NaN if there is one.
    bits: list[torch.Tensor] = []
    placed: dict[Any, list[int]] = {}
    weight: Any
    for i, weight in enumerate(weights.values()):
        local: Any = _compat.local_of(weight)
        if isinstance(local, MasterWeightTensor):
            values = local.hp.detach().to(fsdp.gathered_dtype(local))
            bits.append(tensor_amax_bits_op(values, None, False, Backend.AUTO))
            if local is not weight:
                placed.setdefault((weight.device_mesh, weight.placements), []).append(i)
        else:
            # The decoded scale is within one rounding of the original amax, and equal scales decode to equal amaxes.
            # A shard has the tensor scale of the unsharded weight.
            bits.append((local.global_scale * TENSOR_MAX).view(torch.int32))
    own = torch.stack([amax.to(bits[0].device) for amax in bits])
    for (mesh, placements), alike in placed.items():
        from torch.distributed.tensor import DTensor, Partial

        held = [p if p.is_replicate() else Partial("max") for p in placements]
        own[alike] = DTensor.from_local(own[alike], mesh, held, run_check=False).full_tensor().to(own.device)
    stored = [names[name] for name in weights]
    groups, numbers = fused_layers(stored), dict[str, int]()
    of_group = torch.tensor([numbers.setdefault(groups[name], len(numbers)) for name in stored], device=own.device)
    largest = own.new_zeros(len(numbers)).scatter_reduce(0, of_group, own, "amax")[of_group]
    wanted = clamp_to_normal_scale(largest.view(torch.float32))
    differs = (wanted.view(torch.int32) != own).tolist()
    return {name: amax.to(x.device) for (name, x), amax, is_other in zip(weights.items(), wanted, differs) if is_other}


def on_all_ranks(shared: bool, work: Callable[[], _T]) -> _T:
    """Return `work()` of this rank; if it raises on a rank, raise the error of the first such rank on all ranks."""
    if not shared:
        return work()
    result = raised = None
    try:
        result = work()
    except Exception as error:
        raised = error
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, raised)
    if (first := next(filter(None, errors), None)) is not None:
        raise first
    return result  # type: ignore[return-value]  # it raised nothing
