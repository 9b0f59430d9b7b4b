"""Layers that inference engines fuse: q, k and v; gate and up; all experts'. In NVFP4 they share one tensor scale.

An engine concatenates their weights and keeps one tensor scale. Each trained with its own, so that those without the
largest amax are quantized for the file with it. So are weights too small for a tensor scale that engines can read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.checkpoint.model_tensors import is_converted, tensors_of
from torchao_blockwise.formats import NVFP4_16X16
from torchao_blockwise.ops.backend import Backend
from torchao_blockwise.ops.quantization.operations import tensor_amax_bits_op
from torchao_blockwise.tensors import MasterWeightTensor
from torchao_blockwise.tensors.fsdp import gathered_dtype

# Layers that vLLM fuses, by the last parts of their names in files, in its order. Of 0.33.0, read on 2026-11-26:
# `packed_modules_mapping` and the stacked weights of all its models, except convolutions and what it runs in high
# precision always (wk + weights_proj and wkv + wgate of indexers, hyper-connections).
FUSED_BY_ENGINES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq", "wk", "wv"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("q", "k", "v"),
    ("query", "key", "value"),
    ("query_net", "key_net", "value_net"),
    ("c_fc_0", "c_fc_1"),
    ("fc1", "fc3"),
    ("wq_a", "wkv"),
    ("wq_du", "wk_dv", "wv_dv", "wr_du"),
    # Where some of them are missing, or another layer is next to them.
    ("q_proj", "k_proj"),
    ("k_proj", "v_proj"),
    ("key_net", "value_net"),
    ("key_proj", "value_proj"),
    ("gate_proj", "dense_h_to_4h"),
    ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
    ("q_proj", "k_proj", "v_proj", "g_proj"),
    ("q_proj", "k_proj", "v_proj", "gate_proj"),
    ("q_proj", "k_proj", "v_proj", "o_gate_proj"),
    ("q_proj", "k_proj", "v_proj", "output_gate_proj"),
    ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj"),
    ("q_proj", "k_proj", "v_proj", "index_qk_proj"),
    ("q_proj", "k_proj", "v_proj", "b_proj"),
    ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"),
    ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
    ("q_proj", "k_proj", "v_proj", "sparse_indexer_q", "sparse_indexer_k", "sparse_indexer_z", "g_proj"),
)
# The amax of a tensor whose scale is one, and of one whose scale is the least normal number.
TENSOR_MAX = NVFP4_16X16.element.max * NVFP4_16X16.scale_max
_LEAST = TENSOR_MAX * torch.finfo(torch.float32).smallest_normal
_EXPERT = re.compile(r"\bexperts\.\d+\.")


def fused_layers(names: Iterable[str]) -> dict[str, str]:
    """{name of a weight: that of all layers which engines fuse with it; its own name where there are none}.

    names: all weights of a model, or of its files: layers are fused where all of a row of `FUSED_BY_ENGINES` are there,
    and the longest such row counts. Experts that are modules of a list count as one weight.
    """
    whole = {name: _EXPERT.sub("experts.*.", name) for name in names}
    split = {name: name.removesuffix(".weight").rpartition(".")[::2] for name in whole.values()}
    layers: dict[str, set[str]] = {}
    for path, last in split.values():
        layers.setdefault(path, set()).add(last)
    fused: dict[str, str] = {}
    for name, (path, last) in split.items():
        rows = (row for row in FUSED_BY_ENGINES if last in row and layers[path].issuperset(row))
        row = max(rows, key=len, default=())
        fused[name] = f"{path}.{'+'.join(row)}".lstrip(".") if row else name
    return {name: fused[of_all] for name, of_all in whole.items()}


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
    weights = {name: x for name, x in tensors_of(model).items() if is_converted(x)}
    if not weights:
        return {}
    # As bits of |fp32|, whose largest is NaN where there is one.
    own = _amax_bits([*weights.values()])
    groups, numbers = fused_layers(weights), dict[str, int]()
    of_group = torch.tensor([numbers.setdefault(groups[name], len(numbers)) for name in weights], device=own.device)
    largest = own.new_zeros(len(numbers)).scatter_reduce(0, of_group, own, "amax")[of_group]
    wanted = storable(largest.view(torch.float32))
    differs = (wanted.view(torch.int32) != own).tolist()
    return {name: amax.to(x.device) for (name, x), amax, is_other in zip(weights.items(), wanted, differs) if is_other}


def _amax_bits(weights: list[Any]) -> torch.Tensor:
    """The amaxes of whole weights, |fp32| viewed as int32 [weights]."""
    bits: list[torch.Tensor] = []
    placed: dict[Any, list[int]] = {}
    for i, weight in enumerate(weights):
        local: Any = _compat.local_of(weight)
        if not isinstance(local, MasterWeightTensor):
            # Decoded again it is within one rounding of the amax that it was made of, and equal where scales are.
            # Shards have the tensor scale of all.
            bits.append((local.global_scale * TENSOR_MAX).view(torch.int32))
            continue
        values = local.hp.detach().to(gathered_dtype(local))
        bits.append(tensor_amax_bits_op(values, None, False, Backend.AUTO))
        if local is not weight:
            placed.setdefault((weight.device_mesh, weight.placements), []).append(i)
    for (mesh, placements), alike in placed.items():
        largest = _largest_of_ranks(torch.stack([bits[i] for i in alike]), mesh, placements)
        for i, amax in zip(alike, largest, strict=True):
            bits[i] = amax
    return torch.stack([amax.to(bits[0].device) for amax in bits])


def _largest_of_ranks(bits: torch.Tensor, mesh: Any, placements: tuple[Any, ...]) -> torch.Tensor:
    """Over all ranks that hold parts of weights which are placed so."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    held = [p if p.is_replicate() else Partial("max") for p in placements]
    amaxes = DTensor.from_local(bits, mesh, held, run_check=False)
    return amaxes.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
