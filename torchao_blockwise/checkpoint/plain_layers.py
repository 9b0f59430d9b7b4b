"""The names under which engines and transformers find what files have in high precision.

They take all other layers for quantized. So the names come from the tensors that are written, not from the classes of
modules: a router may be a plain Parameter, and files may have layers that the model does not build. Engines look a
layer up by its name in the files, transformers by its own; both are given where they differ.
"""

from __future__ import annotations

import bisect
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from torchao_blockwise.checkpoint.files import shown
from torchao_blockwise.checkpoint.fused_layers import fused_layers
from torchao_blockwise.checkpoint.model_tensors import DIMS_OF_EXPERTS, Written

# Of path.experts.3.up_proj.weight: path.experts, one layer to engines.
_EXPERTS = re.compile(r"(.*\bexperts)\.\d+\.")
_NUMBER = re.compile(r"\.\d+\b")
# Names of all experts' weights in one tensor, as transformers and vLLM read them quantized.
_READ = (".gate_up_proj", ".gate_proj", ".up_proj", ".down_proj")


class PlainLayers(NamedTuple):
    """Names of layers that have one weight, and of modules of experts."""

    linears: list[str]
    experts: list[str]

    @property
    def names(self) -> list[str]:
        return [*self.linears, *self.experts]


def check_read(op: str, model: nn.Module, tensors: Iterable[Written]) -> None:
    """Raise ValueError where files of a model of transformers have experts under names that readers do not quantize."""
    if not hasattr(model, "_tied_weights_keys"):
        return
    for x in tensors:
        if x.is_quantized and len(x.shape) == DIMS_OF_EXPERTS and not x.name.endswith(_READ):
            layer = x.own[0].rpartition(".")[0]
            raise ValueError(
                f"{op}: {x.name} holds all experts of a layer under a name that readers take for high precision, so "
                f'that they would load its codes as values; leave it unconverted (skip_fqns("{layer}"); for all '
                f'layers "*.{layer.rpartition(".")[2]}"; convert: --skip)'
            )


def plain_layers(tensors: Iterable[Written]) -> PlainLayers:
    """The layers of all tensors of two or more dims that are not quantized.

    A Parameter that lies among layers that are quantized is named itself, as its module's name would stand for them
    too. What a quantized layer has next to its weight, as biases of experts, has no name: it is asked about with it.
    """
    tensors = [x for x in tensors if len(x.shape) > 1]
    quantized = sorted({name for x in tensors if x.is_quantized for name in (x.name, *x.own)})
    quantized_layers = {_layer(name) for name in quantized}
    linears: set[str] = set()
    experts: set[str] = set()
    for x in tensors:
        for name in () if x.is_quantized else dict.fromkeys((x.name, *x.own)):
            layer = _layer(name)
            if layer in quantized_layers:
                continue
            if _is_of_experts(x):
                experts.add(layer)
            elif name.endswith(".weight") or (layer and not _begins_one_of(quantized, layer)):
                linears.add(layer)
            else:
                linears.add(name)
    return PlainLayers(sorted(linears), sorted(experts))


def _is_of_experts(x: Written) -> bool:
    """Whether it is an expert's weight, or that of all experts of a layer."""
    is_whole = len(x.shape) == DIMS_OF_EXPERTS and min(x.shape) > 1 and not x.name.endswith(".weight")
    return is_whole or _EXPERTS.match(x.name) is not None


def _layer(name: str) -> str:
    """The module that engines look up for a tensor of this name."""
    if match := _EXPERTS.match(name):
        return match[1]
    return name.removesuffix(".weight") if name.endswith(".weight") else name.rpartition(".")[0]


def _begins_one_of(names: list[str], start: str) -> bool:
    """Whether one of the sorted names begins so."""
    i = bisect.bisect_left(names, start)
    return i < len(names) and names[i].startswith(start)


def warn_of_fused(tensors: Sequence[Written], block: int | None) -> None:
    """Warn of layers that engines fuse, and of experts of one module, which engines refuse.

    They do where some are quantized and some are not, and where the rows of another than the last are no multiple of
    `block`; None where each row has its own scales.
    """
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
    if mixed := [group for group, found in kinds.items() if len(found) > 1]:
        _warn(
            f"engines fuse {shown(mixed)} and want all of it quantized or nothing, but some weights are not "
            "converted; convert all (filter_fn), or none"
        )
    if ragged:
        groups = shown([f"{group} ({rows} rows)" for group, rows in ragged.items()])
        layers = (_layer((*x.own, x.name)[0]) for x in tensors if fused[x.name] in ragged)
        patterns = ", ".join(dict.fromkeys(f'"{_NUMBER.sub(".*", layer)}"' for layer in layers))
        _warn(
            f"vLLM fuses {groups} and refuses files where the rows of all but the last are no multiple of {block}; "
            f"leave these layers unconverted (skip_fqns({patterns}); convert: --skip)"
        )


def warn_of_ragged(tensors: Iterable[Written], block: int) -> None:
    """Warn of weights whose blocks transformers' dequantizing reader takes for others.

    It takes rows divided by rows of scales for the height of a block. That is `block` where it divides the rows, and of
    no account where there is one row of scales; else its values are wrong, or it raises. So with columns.
    Source: transformers 5.23, integrations/finegrained_fp8.py, `Fp8Dequantize`.
    """
    quantized = sorted(x for x in tensors if x.is_quantized)
    if ragged := [x for x in quantized if any(n > block and n % block for n in x.shape[-2:])]:
        _warn(
            "where transformers dequantizes files, as it does without an FP8 GPU, it raises or loads wrong values for "
            f"{shown([f'{x.name} {list(x.shape)}' for x in ragged])}: it reads dims above {block} only if they are "
            "multiples of it; use checkpoint.load there, or leave these layers unconverted"
        )


def _warn(what: str) -> None:
    """Warn at the call of `export`."""
    warnings.warn(f"export: {what}", stacklevel=9)
