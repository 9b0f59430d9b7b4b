"""Layers as inference engines look them up: those that they fuse, and those that files name as not quantized.

Engines fuse q, k and v; gate and up; and all experts. In NVFP4, fused weights share one tensor scale.

Engines and transformers assume that all layers are quantized, except those that config.json names. The names come from
the tensors that are written, not from the classes of modules: a router may be a plain Parameter, and files may have
layers that the model does not build. Engines look up a layer by its name in the files, transformers by its name in the
model; if these differ, both are listed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable

from torchao_blockwise._names import shown
from torchao_blockwise.checkpoint.layouts import COMPRESSED_TENSORS, Layout
from torchao_blockwise.checkpoint.model_tensors import DIMS_OF_EXPERTS, Part

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
# Matches path.experts in path.experts.3.up_proj.weight: engines look up all of its experts together.
_EXPERTS = re.compile(r"(.*\bexperts)\.\d+\.")
_NUMBER = re.compile(r"\.\d+\b")
# The names under which transformers and vLLM read one tensor with all experts as quantized.
READ_EXPERTS = (".gate_up_proj", ".gate_proj", ".up_proj", ".down_proj")


def fused_layers(names: Iterable[str]) -> dict[str, str]:
    """Return {name of a weight: name of the layer into which engines fuse it, or its layer}.

    names: all weights of a model or of its files. Layers are fused if all names in a row of `FUSED_BY_ENGINES` exist;
        the longest such row counts. Experts that are modules of a list count together.
    """
    split = {name: _EXPERTS.sub(r"\1.*.", name).removesuffix(".weight").rpartition(".")[::2] for name in names}
    layers: dict[str, set[str]] = {}
    for path, last in split.values():
        layers.setdefault(path, set()).add(last)
    fused: dict[str, str] = {}
    for name, (path, last) in split.items():
        rows = (row for row in FUSED_BY_ENGINES if last in row and layers[path].issuperset(row))
        row: tuple[str, ...] = max(rows, key=len, default=(last,))
        fused[name] = f"{path}.{'+'.join(row)}".lstrip(".")
    return fused


def plain_layers(tensors: Iterable[Part]) -> tuple[list[str], list[str]]:
    """Return (layers, modules of experts) of all unquantized tensors with two or more dims, by name.

    A Parameter next to quantized layers is listed by its own name, since its module's name would match them too. Other
    tensors of a quantized layer, such as biases of experts, are not listed: readers look them up with the layer.
    """
    tensors = [x for x in tensors if len(x.shape) > 1]
    quantized = {name for x in tensors if x.is_quantized for name in (x.name, *x.own)}
    quantized_layers = {_layer(name) for name in quantized}
    linears: set[str] = set()
    experts: set[str] = set()
    for x in tensors:
        for name in () if x.is_quantized else (x.name, *x.own):
            layer = _layer(name)
            if layer in quantized_layers:
                continue
            if _is_of_experts(x):
                experts.add(layer)
            elif name.endswith(".weight") or (layer and not any(other.startswith(layer) for other in quantized)):
                linears.add(layer)
            else:
                linears.add(name)
    return sorted(linears), sorted(experts)


def _is_of_experts(x: Part) -> bool:
    """Whether it is an expert's weight, or that of all experts of a layer."""
    is_whole = len(x.shape) == DIMS_OF_EXPERTS and min(x.shape) > 1 and not x.name.endswith(".weight")
    return is_whole or _EXPERTS.match(x.name) is not None


def _layer(name: str) -> str:
    """Return the name of the module that engines look up for this tensor."""
    if match := _EXPERTS.match(name):
        return match[1]
    return name.removesuffix(".weight") if name.endswith(".weight") else name.rpartition(".")[0]


def warn_of_readers(tensors: Iterable[Part], layout: Layout) -> None:
    """Warn about layers for which engines refuse the files, or which transformers dequantizes to wrong values.

    Engines refuse fused layers, and experts of one module, if only some are quantized. vLLM also refuses fused layers
    if the rows of any but the last are not a multiple of the block's; NVFP4 files have scales for each row.
    transformers computes the height of a block as the number of rows over the number of rows of scales. That is right
    if the block divides the rows, or if there is only one row of scales. Else its values are wrong, or it raises. The
    same holds for columns. It does not decode a tensor that holds all experts of a layer. It takes a layer for one that
    is not quantized if its name ends with the name of such a layer. In NVFP4, it ignores the tensor scale of experts.
    Source: transformers 5.23, integrations/finegrained_fp8.py, `Fp8Dequantize`; integrations/compressed_tensors.py,
    `CompressedTensorsDequantize`.
    """
    block = None if layout.format.has_global_scale else layout.format.block[0]
    tensors = sorted(x for x in tensors if len(x.shape) > 1)
    fused = fused_layers(x.name for x in tensors)
    kinds: dict[str, set[bool]] = {}
    ragged: dict[str, int] = {}
    for x in tensors:
        group = fused[x.name]
        kinds.setdefault(_layer(x.name) if _is_of_experts(x) else group, set()).add(x.is_quantized)
        *followed, _ = group.rpartition(".")[2].split("+")
        last = x.name.removesuffix(".weight").rpartition(".")[2]
        if block is not None and x.is_quantized and last in followed and x.shape[-2] % block:
            ragged.setdefault(group, x.shape[-2])
    found = []
    if mixed := [group for group, quantized in kinds.items() if len(quantized) > 1]:
        found.append(
            f"engines fuse {shown(mixed)} and need all or none of its weights quantized, but only some of them are "
            "converted; convert all of them or none (filter_fn)"
        )
    if ragged:
        groups = shown([f"{group} ({rows} rows)" for group, rows in ragged.items()])
        layers = (_layer((*x.own, x.name)[0]) for x in tensors if fused[x.name] in ragged)
        patterns = ", ".join(dict.fromkeys(f'"{_NUMBER.sub(".*", layer)}"' for layer in layers))
        found.append(
            f"vLLM fuses {groups} and refuses files if the rows of any but the last are not a multiple of {block}; "
            f"leave these layers unconverted (skip_fqns({patterns}); convert: --skip)"
        )
    cut = [x for x in tensors if x.is_quantized and block and any(n > block and n % block for n in x.shape[-2:])]
    if cut:
        found.append(
            "if transformers dequantizes the files, as it does without an FP8 GPU, it raises or loads wrong values for "
            f"{shown([f'{x.name} {list(x.shape)}' for x in cut])}, because it supports dims above {block} only if "
            "they are multiples of it; use checkpoint.load instead, or leave these layers unconverted"
        )
    if whole := [x.name for x in tensors if x.is_quantized and block and len(x.shape) == DIMS_OF_EXPERTS]:
        found.append(
            "if transformers dequantizes the files, as it does without an FP8 GPU, it loads the codes of "
            f"{shown(whole)} as values, because each holds all experts of a layer; use checkpoint.load instead, or "
            "leave these experts unconverted"
        )
    plain = [name for names in plain_layers(tensors) for name in names]
    quantized = {_layer(x.name) for x in tensors if x.is_quantized and block}
    if alike := sorted((layer, name) for layer in quantized for name in plain if layer.endswith(name)):
        found.append(
            "on an FP8 GPU, transformers loads the codes of "
            f"{shown([layer for layer, _ in alike])} as values, because the name ends with that of a layer that is not "
            f"converted, {shown([name for _, name in alike])}; convert both or neither (filter_fn; convert: --skip)"
        )
    if layout is COMPRESSED_TENSORS and (experts := [x.name for x in tensors if x.is_quantized and _is_of_experts(x)]):
        found.append(
            f"transformers loads wrong values for {shown(experts)}, because it ignores the tensor scales of experts; "
            "read the files with from_pretrained of torchao_blockwise.integrations.transformers, or with "
            "checkpoint.load"
        )
    for what in found:
        # At the call of `export`.
        warnings.warn(f"export: {what}", stacklevel=6)
