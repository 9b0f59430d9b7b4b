"""Layers that inference engines fuse: q, k and v; gate and up; all experts. In NVFP4 they share one tensor scale.

An engine concatenates their weights and keeps one tensor scale, but each weight trained with a separate one. So the
weights with a smaller amax are quantized again for the file, with the scale of the largest amax. Weights too small for
a tensor scale that engines can read are quantized again as well.
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

# Layers that vLLM fuses, by the last parts of their names in files, in vLLM's order. Source: vLLM 0.33.0, read on
# 2026-11-26, `packed_modules_mapping` and the stacked weights of all models. Left out are convolutions and layers that
# always run in high precision (wk + weights_proj and wkv + wgate of indexers, hyper-connections).
_QKV = ("q_proj", "k_proj", "v_proj")
FUSED_BY_ENGINES: tuple[tuple[str, ...], ...] = (
    _QKV,
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
    # Models in which some of these layers are missing, or that fuse another layer with them.
    ("q_proj", "k_proj"),
    ("k_proj", "v_proj"),
    ("key_net", "value_net"),
    ("key_proj", "value_proj"),
    ("gate_proj", "dense_h_to_4h"),
    ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
    *((*_QKV, x) for x in ("g_proj", "gate_proj", "o_gate_proj", "output_gate_proj", "index_qk_proj", "b_proj")),
    (*_QKV, "index_q_proj", "index_k_proj"),
    (*_QKV, "b_proj", "f_a_proj"),
    (*_QKV, "b_proj", "f_a_proj", "g_a_proj"),
    (*_QKV, "sparse_indexer_q", "sparse_indexer_k", "sparse_indexer_z", "g_proj"),
)
# The amax that leads to a tensor scale of one, and the amax that leads to the smallest normal number.
TENSOR_MAX = NVFP4_16X16.element.max * NVFP4_16X16.scale_max
_LEAST = TENSOR_MAX * torch.finfo(torch.float32).smallest_normal
_EXPERT = re.compile(r"\bexperts\.\d+\.")


def fused_layers(names: Iterable[str]) -> dict[str, str]:
    """Return {name of a weight: name of the layer into which engines fuse it, or its own name}.

    names: all weights of a model or of its files. Layers are fused if all names in a row of `FUSED_BY_ENGINES` exist;
        the longest such row counts. Experts that are modules of a list count as one weight.
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


def clamp_to_normal_scale(amax: torch.Tensor) -> torch.Tensor:
    """Return the amaxes, f32, from which the tensor scales in files are derived: `amax`, clamped to a normal scale.

    For a smaller amax the scale amax / 2688 is subnormal: kernels of engines may flush it to zero, and its reciprocal
    is infinite. Zero stays zero, NaN stays NaN.
    """
    return torch.where(amax > 0, amax.clamp(min=_LEAST), amax)


def shared_amaxes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return {name: amax for the tensor scale in the files} for the weights whose own tensor scale differs from it.

    If the model is sharded this is a collective: one for all weights with the same placement. Synchronizes once.
    """
    weights = {name: x for name, x in tensors_of(model).items() if is_converted(x)}
    # |fp32| viewed as int32: the maximum is NaN if there is one.
    own = _amax_bits([*weights.values()])
    groups, numbers = fused_layers(weights), dict[str, int]()
    of_group = torch.tensor([numbers.setdefault(groups[name], len(numbers)) for name in weights], device=own.device)
    largest = own.new_zeros(len(numbers)).scatter_reduce(0, of_group, own, "amax")[of_group]
    wanted = clamp_to_normal_scale(largest.view(torch.float32))
    differs = (wanted.view(torch.int32) != own).tolist()
    return {name: amax.to(x.device) for (name, x), amax, is_other in zip(weights.items(), wanted, differs) if is_other}


def _amax_bits(weights: list[Any]) -> torch.Tensor:
    """Return the amax of each unsharded weight, |fp32| viewed as int32 [weights]."""
    bits: list[torch.Tensor] = []
    placed: dict[Any, list[int]] = {}
    for i, weight in enumerate(weights):
        local: Any = _compat.local_of(weight)
        if not isinstance(local, MasterWeightTensor):
            # The decoded scale is within one rounding of the original amax, and equal scales decode to equal amaxes.
            # A shard has the tensor scale of the unsharded weight.
            bits.append((local.global_scale * TENSOR_MAX).view(torch.int32))
            continue
        values = local.hp.detach().to(gathered_dtype(local))
        bits.append(tensor_amax_bits_op(values, None, False, Backend.AUTO))
        if local is not weight:
            placed.setdefault((weight.device_mesh, weight.placements), []).append(i)
    of_weights = torch.stack([amax.to(bits[0].device) for amax in bits])
    for (mesh, placements), alike in placed.items():
        from torch.distributed.tensor import DTensor, Partial

        held = [p if p.is_replicate() else Partial("max") for p in placements]
        largest = DTensor.from_local(of_weights[alike], mesh, held, run_check=False).full_tensor()
        of_weights[alike] = largest.to(of_weights.device)
    return of_weights
