"""Tensor scales of layers that inference engines fuse: q, k and v; gate and up; all experts'.

An engine concatenates their weights and keeps one tensor scale. Each trained with its own, so that those without the
largest amax are quantized for the file with it. So are weights too small for a tensor scale that engines can read.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.checkpoint.fused_layers import fused_layers
from torchao_blockwise.checkpoint.names import tensors_of
from torchao_blockwise.formats import NVFP4_16X16
from torchao_blockwise.ops.backend import Backend
from torchao_blockwise.ops.quantization import tensor_amax_bits_op
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor
from torchao_blockwise.tensors.fsdp import gathered_dtype

# Its tensor scale is the least normal number.
_LEAST = NVFP4_16X16.element.max * NVFP4_16X16.scale_max * torch.finfo(torch.float32).smallest_normal


def storable(amax: torch.Tensor) -> torch.Tensor:
    """The amaxes, f32, that tensor scales in files are derived from: `amax`, but the least that such a scale holds.

    Below it amax / 2688 is subnormal, which kernels of engines may take for zero, and its reciprocal infinite. A weight
    of zeros stays one, NaN stays NaN.
    """
    return torch.where(amax > 0, amax.clamp(min=_LEAST), amax)


def shared_amaxes(model: nn.Module) -> dict[str, torch.Tensor]:
    """{name: the amax that its tensor scale is to be derived from} of weights that do not have that scale yet.

    A collective where ranks share the model: one for all weights that are placed alike. Devices are waited for once.
    """
    weights: dict[str, Any] = {
        name: held
        for name, held in tensors_of(model).items()
        if isinstance(_compat.local_of(held), (MasterWeightTensor, QuantizedTensor))
    }
    if not weights:
        return {}
    own = _amax_bits(list(weights.values()))
    wanted = storable(_largest_of(own, [*fused_layers(weights).values()]).view(torch.float32))
    others = (wanted.view(torch.int32) != own).tolist()
    return {
        name: amax.to(held.device)
        for (name, held), amax, other in zip(weights.items(), wanted.unbind(), others, strict=True)
        if other
    }


def _largest_of(bits: torch.Tensor, groups: Sequence[Hashable]) -> torch.Tensor:
    """For each weight the largest amax of its group; of bits, whose largest is NaN where there is one."""
    numbers: dict[Hashable, int] = {}
    of_group = torch.tensor([numbers.setdefault(group, len(numbers)) for group in groups], device=bits.device)
    return bits.new_zeros(len(numbers)).scatter_reduce(0, of_group, bits, "amax")[of_group]


def _amax_bits(weights: list[Any]) -> torch.Tensor:
    """The amaxes of whole weights as the bits of |fp32|, int32 [weights]."""
    bits = [_local_amax_bits(_compat.local_of(weight)) for weight in weights]
    device = bits[0].device
    placed: dict[tuple[Any, ...], list[int]] = {}
    for i, weight in enumerate(weights):
        local = _compat.local_of(weight)
        # Shards of quantized Parameters have the tensor scale of all.
        if local is not weight and isinstance(local, MasterWeightTensor):
            placed.setdefault((weight.device_mesh, weight.placements), []).append(i)
    for (mesh, placements), alike in placed.items():
        together = _largest_of_ranks(torch.stack([bits[i] for i in alike]), mesh, placements)
        for i, amax in zip(alike, together.unbind(), strict=True):
            bits[i] = amax
    return torch.stack([amax.to(device) for amax in bits])


def _local_amax_bits(local: Any) -> torch.Tensor:
    """Of what this rank has, int32 []."""
    if not isinstance(local, MasterWeightTensor):
        # Decoded again it is within one rounding of the amax that it was made of, and equal where scales are.
        scale: torch.Tensor = local.global_scale
        return (scale * (local.fmt.element.max * local.fmt.scale_max)).view(torch.int32)
    return tensor_amax_bits_op(local.hp.detach().to(gathered_dtype(local)), None, False, Backend.AUTO)


def _largest_of_ranks(bits: torch.Tensor, mesh: Any, placements: tuple[Any, ...]) -> torch.Tensor:
    """Over all ranks that hold parts of weights which are placed so."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    held = [p if p.is_replicate() else Partial("max") for p in placements]
    amaxes = DTensor.from_local(bits, mesh, held, run_check=False)
    return amaxes.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
