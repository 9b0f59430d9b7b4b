"""Writing a model's weights for inference engines: the bytes that a forward pass now would read."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat, ops
from torchao_blockwise._names import did_you_mean
from torchao_blockwise.checkpoint.files import Folder
from torchao_blockwise.checkpoint.fused_layers import shared_amaxes
from torchao_blockwise.checkpoint.gathering import agreed, is_shared, wholes
from torchao_blockwise.checkpoint.layouts import (
    FP8,
    FP8_UE8M0,
    LAYOUTS,
    MODELOPT,
    SCALE_FMT,
    UE8M0_MODEL_TYPE,
    Layout,
    hf_quant_config,
)
from torchao_blockwise.checkpoint.model_tensors import (
    Part,
    Written,
    all_parts_on_disk,
    has_power_of_2_scales,
    is_converted,
    tensors_of,
    unwrapped,
    weights_of_embeddings,
    written,
)
from torchao_blockwise.checkpoint.plain_layers import check_read, plain_layers, warn_of_fused, warn_of_ragged
from torchao_blockwise.formats import BlockFormat, Operand
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor

SHARD_BYTES = 5 * 2**30


def export(
    model: nn.Module,
    directory: str | os.PathLike[str],
    format: str = FP8.name,
    *,
    tokenizer_from: str | os.PathLike[str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `model` as inference engines and transformers load it, its converted weights quantized.

    Of a converted weight the payload and scales are the bytes that a layer's product would read now: a master weight
    quantized, a quantized Parameter as it is. All else is written in its dtype. Tensors are named as transformers
    names them, experts one by one; torch.compile, checkpoint_wrapper, DDP or a module of yours around the model do not
    change names.
    directory: is made whole or not at all: safetensors files, an index of several, and where `model` has a config its
        config.json with `quantization_config`.
    format: "fp8_block", blocks of 128×128 as in DeepSeek-V3's files, with `scale_fmt: "ue8m0"` in config.json where all
        weights train with `power_of_2_scales`; "fp8_block_ue8m0", these scales in e8m0, for DeepSeek-V4 and models
        without a config; "nvfp4_compressed_tensors" and "nvfp4_modelopt", as vLLM reads NVFP4 weights next
        to activations in high precision.
    tokenizer_from: a folder whose tokenizer's files are copied; default the one that the model was loaded from.
    shard_bytes: how large a file may become before the next one is begun; at most that is held on the CPU.
    Where FSDP2, tensor or expert parallelism shard the model, all ranks call it, and the first one writes: weights are
    gathered a few at a time, and the bytes are those of the model on one device.

    An expert's up projection that begins inside of a block, as its width is not a multiple of 128, has no separate
    blocks: it is quantized again, from the weight's values, and a warning says so. So are, in NVFP4, weights that
    engines fuse (q, k and v; gate and up; all experts') where their tensor scales differ: all get the largest one's;
    and weights whose amax is below 3.2e-35, which get the least tensor scale that engines can read.
    Raises ValueError for another format, for one that engines do not read for this model ("fp8_block_ue8m0" of a
    Llama), for a model without weights of that format, for weights of another one, for
    experts of a layer in one tensor under a name that no reader quantizes (GraniteMoe's input_linear), for
    converted weights with NaN or Inf, and for a directory that is the working one or a mount point; FileExistsError
    for one that is not empty; OSError where it cannot be written. On all ranks.
    """
    weights, shared = QuantizedWeights("export", model, format), is_shared(model)
    folder = agreed(shared, lambda: Folder(directory, shard_bytes))
    if tied := [n for n in weights_of_embeddings(weights.model) if is_converted(tensors_of(weights.model)[n])]:
        warnings.warn(
            f"export: {tied[0]} is an embedding's as well, and engines read these in high precision, so that it is "
            "written in it; leave the layer that shares it unconverted (recommended_layers(model))",
            stacklevel=2,
        )
    failed: Exception | None = None
    try:
        for name, x in weights.tensors(check_finite):
            # A rank whose disk is full goes on with the others, who wait for its parts, and says so at the end.
            if folder is not None and failed is None:
                try:
                    folder.add(name, x)
                except Exception as error:
                    failed = error
    except BaseException:
        if folder is not None:
            folder.discard()
        raise

    def finish() -> None:
        assert folder is not None
        with folder:
            if failed is not None:
                raise failed
            _write_others(weights, folder, tokenizer_from)

    agreed(shared, finish)
    if requantized := weights.requantized:
        why = "begin inside of a block of the Parameter that they are a part of"
        if weights.layout.format.has_global_scale:
            why += ", or are fused by engines with others of another tensor scale, or are too small for one,"
        names = ", ".join(dict.fromkeys(re.sub(r"\.\d+\b", ".*", name) for name in requantized))
        warnings.warn(f"export: {len(requantized)} weights {why} and are quantized again: {names}", stacklevel=2)


def _write_others(weights: QuantizedWeights, folder: Folder, tokenizer_from: str | os.PathLike[str] | None) -> None:
    """Configs, and the tokenizer's files."""
    config: Any = getattr(weights.model, "config", None)
    if hasattr(config, "save_pretrained"):
        with folder.writing():
            config.save_pretrained(folder.path)
        content = json.loads((folder.path / "config.json").read_text())
        converted = [_compat.local_of(x) for x in tensors_of(weights.model).values() if is_converted(x)]
        write_settings(folder, content, weights.layout, weights.written, all(map(has_power_of_2_scales, converted)))
    generation = getattr(weights.model, "generation_config", None)
    if generation is not None:
        with folder.writing():
            generation.save_pretrained(folder.path)
    source = tokenizer_from if tokenizer_from is not None else getattr(config, "_name_or_path", "")
    if source and Path(source).is_dir():
        folder.copy_tokenizer(Path(source))


class QuantizedWeights:
    """The tensors of a model's files: an iterable of (name, tensor), which may be gone through again.

    requantized: names of weights that the last pass quantized for the files.
    """

    def __init__(self, op: str, given: nn.Module, format: str) -> None:
        self._given, self.model = given, unwrapped(op, given)
        self.layout = _layout_for(op, self.model, format)
        tensors = tensors_of(self.model)
        self._parts = all_parts_on_disk(self.model, tensors)
        self.written = [*written(self.model, tensors, self._parts)]
        check_read(op, self.model, self.written)
        self.requantized: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        is_shared(self._given)
        return self.tensors()

    def metadata(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """{name: (dtype, shape)} in the order of the tensors, which nobody gathers for it."""
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        tensors = tensors_of(self.model)
        for x in self.written:
            plain = {x.name: (tensors[x.own[0]].dtype, x.shape)}
            found |= self.layout.described(x.name, x.shape) if x.is_quantized else plain
        return found

    def tensors(self, check: Callable[[str, Operand], None] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor), one weight at a time, of a model that is ready to be gathered.

        check: is called with each weight that is quantized, before parts of it are given.
        """
        layout, self.requantized = self.layout, []
        rows = layout.format.block[0]
        amaxes = shared_amaxes(self.model) if layout.format.has_global_scale else {}
        tensors, embeddings = tensors_of(self.model), weights_of_embeddings(self.model)
        wanted = (
            (x, name in embeddings or name in amaxes or any(part.cuts(rows) for part in self._parts[name]))
            for name, x in tensors.items()
        )
        for name, x in zip(tensors, wholes(wanted), strict=True):
            parts, is_weight = self._parts[name], isinstance(x, (MasterWeightTensor, QuantizedTensor))
            if name in embeddings or not is_weight:
                plain = _values(x).to(tensors[name].dtype) if is_weight else x
                yield from ((part.name, part.of(plain.detach())) for part in parts)
                continue
            if name in amaxes:
                self.requantized.extend(part.name for part in parts)
                weight = _quantized_again(_values(x), x, layout.format, amaxes[name])
            else:
                weight = x.quantized() if isinstance(x, MasterWeightTensor) else x.operand()  # type: ignore[attr-defined]
            if check is not None:
                check(name, weight)
            for part in parts:
                if part.cuts(rows):
                    self.requantized.append(part.name)
                    own = _quantized_again(part.of(_values(x)), x, layout.format, amaxes.get(name))
                    yield from layout.tensors(Part(part.name), own)
                else:
                    yield from layout.tensors(part, weight)


def quantized_weights(model: nn.Module, format: str = FP8.name) -> QuantizedWeights:
    """The tensors that `export` would write: (name, tensor) one by one, for an engine that takes weights over.

    Tensors are whole and on the model's device; each is a new one, or the Parameter's memory. Where ranks share the
    model all of them go through the iterable in lockstep, and what FSDP2 shards is gathered quantized. `metadata()` of
    it has names, dtypes and shapes beforehand, `checksums` of it what a receiver can compare. Nothing waits for a look
    at values, so that a weight with NaN is given as one.
    Raises ValueError as `export` does.
    """
    return QuantizedWeights("quantized_weights", model, format)


def _layout_for(op: str, model: nn.Module, format: str) -> Layout:
    """The format of this name; raises ValueError for another, and for a model that it cannot hold."""
    if format not in LAYOUTS:
        raise ValueError(
            f"{op}: format must be one of {', '.join(LAYOUTS)}, got {format!r}{did_you_mean(format, LAYOUTS)}"
        )
    layout, found = LAYOUTS[format], 0
    check_model(op, model, layout)
    for name, x in tensors_of(model).items():
        if not is_converted(x):
            continue
        weight: Any = _compat.local_of(x)
        fmt = weight.fmt if weight.config is None else weight.config.weight_format
        if fmt is not layout.format:
            raise ValueError(
                f"{op}: {name} trains in {fmt.name}, and {layout.name} holds {layout.format.name}; convert the "
                "model with another config, or unconvert it and call save_pretrained"
            )
        if layout.power_of_2_scales and not has_power_of_2_scales(weight):
            raise ValueError(
                f"{op}: {name} trains with scales that are no powers of two, and {layout.name} holds only such; "
                f"convert the model with power_of_2_scales=True, or export it as {FP8.name}"
            )
        if weight.dim() > 2 and _has_scales_of_experts(weight):
            raise ValueError(
                f"{op}: each expert of {name} trains with a separate tensor scale (scale_per_expert), and "
                "engines run all experts with one; unconvert(model), and convert it with scale_per_expert=False"
            )
        found += 1
    if not found:
        raise ValueError(
            f"{op}: no weight of {type(model).__name__} is converted; call quantize_ first, or save_pretrained"
        )
    return layout


def check_model(op: str, model: nn.Module, layout: Layout) -> None:
    """Raise ValueError for a model whose config says that engines do not read such files of it."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if layout is FP8_UE8M0 and isinstance(model_type, str) and not model_type.startswith(UE8M0_MODEL_TYPE):
        option = " and --power-of-2-scales" if op == "convert" else ""
        raise ValueError(
            f"{op}: {layout.name} is for models whose engines read scales called `scale` (model_type "
            f"{UE8M0_MODEL_TYPE}), and {type(model).__name__} has model_type {model_type}; choose "
            f'{FP8.name}{option}, which writes scale_fmt: "ue8m0" for scales that are powers of two'
        )


def check_finite(name: str, weight: Operand) -> None:
    """Raise ValueError where a quantized weight does not stand for numbers; its device is waited for."""
    scale = weight.scale if weight.global_scale is None else weight.global_scale
    # A quantized Parameter may have got codes from files, with their scales.
    if bool(weight.format.element.has_nan(weight.qdata) | ~scale.float().isfinite().all()):
        raise ValueError(
            f"export: {name} has NaN or Inf among its values, so that what they are quantized to decodes to NaN; "
            "export an earlier state of the model, or repair the weight"
        )


def _values(weight: Any) -> torch.Tensor:
    return weight.hp if isinstance(weight, MasterWeightTensor) else weight.dequantize()


def _has_scales_of_experts(weight: Any) -> bool:
    if isinstance(weight, QuantizedTensor):
        return weight.global_scale is not None and weight.global_scale.dim() > 0
    return bool(weight.config.scale_per_expert)


def _quantized_again(values: torch.Tensor, weight: Any, fmt: BlockFormat, tensor_amax: torch.Tensor | None) -> Operand:
    power_of_2 = has_power_of_2_scales(weight)
    made = ops.quantize(values.detach(), fmt, power_of_2_scales=power_of_2, tensor_amax=tensor_amax).rowwise
    assert made is not None
    return made


def write_settings(
    folder: Folder, config: dict[str, Any], layout: Layout, tensors: Sequence[Written], power_of_2_scales: bool
) -> None:
    """config.json with what engines must know of the format, and what else of files they ask for.

    tensors: all of the files. Warns of those that engines refuse or transformers misreads.
    power_of_2_scales: whether all quantized weights have them.
    """
    # NVFP4's files have scales for each row.
    block = None if layout.format.has_global_scale else layout.format.block[0]
    warn_of_fused(tensors, block)
    if block is not None:
        warn_of_ragged(tensors, block)
    settings = layout.settings(plain_layers(tensors)) | (SCALE_FMT if power_of_2_scales else {})
    folder.write_json("config.json", config | {"quantization_config": settings})
    if layout is MODELOPT:
        folder.write_json("hf_quant_config.json", hf_quant_config(settings))
