"""Tensor scales of layers that inference engines run as one: q, k and v; gate and up; all experts'.

An engine concatenates their weights and keeps one tensor scale. Where training gave them several, those
without the largest amax are quantized for the file with it.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.checkpoint.names import tensors_of
from torchao_blockwise.ops.backend import Backend
from torchao_blockwise.ops.quantization import tensor_amax_bits_op
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor

# What an engine concatenates, by the last parts of names.
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
_EXPERT = re.compile(r"\bexperts\.\d+\.")


def group_of(name: str) -> str:
    """What layers have in common that engines run as one; a layer of its own has its name."""
    name = _EXPERT.sub("experts.*.", name)
    path, _, last = name.removesuffix(".weight").rpartition(".")
    return next((f"{path}.{'+'.join(names)}" for names in _FUSED if last in names), name)


def shared_amaxes(model: nn.Module) -> dict[str, torch.Tensor]:
    """{name: the amax that its tensor scale is to be derived from} of weights that do not have that scale yet.

    A collective where ranks share the model.
    """
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, held in tensors_of(model).items():
        local: Any = _compat.local_of(held)
        if isinstance(local, (MasterWeightTensor, QuantizedTensor)):
            groups.setdefault(group_of(name), {})[name] = _amax_bits(held, local)
    return {name: amax for group in groups.values() for name, amax in _raised(group)}


def _raised(group: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The largest amax, for each that has another."""
    names, bits = list(group), torch.stack(list(group.values()))
    largest = bits.amax()
    others = (bits != largest).tolist()
    return [(name, largest.view(torch.float32)) for name, other in zip(names, others, strict=True) if other]


def _amax_bits(held: torch.Tensor, local: Any) -> torch.Tensor:
    """The amax of the whole weight as the bits of |fp32|, int32 []."""
    if not isinstance(local, MasterWeightTensor):
        # Decoded again it is within one rounding of the amax that it was made of, and equal where scales are.
        scale: torch.Tensor = local.global_scale
        return (scale * (local.fmt.element.max * local.fmt.scale_max)).view(torch.int32)
    dtype = local.hp.dtype if local.shard is None else local.shard.layout.dtype
    bits = tensor_amax_bits_op(local.hp.detach().to(dtype), Backend.AUTO)
    if local is held:
        return bits
    from torch.distributed.tensor import DTensor, Partial, Replicate

    sharded: Any = held
    placements = [p if p.is_replicate() else Partial("max") for p in sharded.placements]
    placed = DTensor.from_local(bits, sharded.device_mesh, placements, run_check=False)
    return placed.redistribute(placements=[Replicate()] * sharded.device_mesh.ndim).to_local()
