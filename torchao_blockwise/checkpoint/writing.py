"""Write a model's weights for inference engines: the quantized bytes that a forward pass would use now."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchao_blockwise import _compat, ops
from torchao_blockwise._compat import hugging_face
from torchao_blockwise._names import did_you_mean
from torchao_blockwise.checkpoint.engine_layers import READ_EXPERTS, plain_layers, warn_of_readers
from torchao_blockwise.checkpoint.files import Folder
from torchao_blockwise.checkpoint.gathering import gather, on_all_ranks, prepare_gather, shared_amaxes
from torchao_blockwise.checkpoint.layouts import FP8, FP8_UE8M0, LAYOUTS, MODELOPT, SCALE_FMT, UE8M0_MODEL_TYPE, Layout
from torchao_blockwise.checkpoint.model_tensors import (
    DIMS_OF_EXPERTS,
    Part,
    check_read_as_stored,
    format_of,
    has_power_of_2_scales,
    is_converted,
    parts_on_disk,
    tensors_of,
    unwrapped,
)
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
    """Write `model` for inference engines and transformers, with its converted weights quantized.

    For a converted weight, the files contain the payload and scales that a GEMM would read now: a master weight is
    quantized, and a quantized Parameter is written unchanged. All other tensors are written in their dtype. Tensors
    have the names that transformers uses, with separate tensors for each expert. torch.compile, checkpoint_wrapper, DDP
    or your own module around the model do not change names.
    directory: written atomically: safetensors files, an index if there are several, and if `model` has a config its
        config.json with `quantization_config`.
    format: "fp8_block", blocks of 128×128 as in DeepSeek-V3's files, with `scale_fmt: "ue8m0"` in config.json if all
        weights train with `power_of_2_scales`; "fp8_block_ue8m0", the same with scales in e8m0, for DeepSeek-V4 and
        models without a config; "nvfp4_compressed_tensors" and "nvfp4_modelopt", which vLLM reads as NVFP4 weights with
        activations in high precision.
    tokenizer_from: a folder whose tokenizer files are copied; default the folder that the model was loaded from.
    shard_bytes: the size at which a new file is started; at most this much is held on the CPU.
    If the model is sharded by FSDP2, tensor or expert parallelism, all ranks must call it, and the first one writes.
    Weights are gathered one at a time, and the files are bitwise identical to those of the model on one device.

    If the width of an expert is not a multiple of 128, its up projection begins inside a block and is quantized again
    from the weight's values, with a warning. In NVFP4, the same happens to weights that engines fuse (q, k and v; gate
    and up; all experts) if their tensor scales differ: all get the largest one. Weights with an amax below 3.2e-35 get
    the smallest tensor scale that engines can read.
    Raises on all ranks: ValueError for an unknown format, for one that engines do not read for this model
    ("fp8_block_ue8m0" for a Llama), for a model without converted weights or with weights in another format, for the
    experts of a layer in one tensor under a name that no reader quantizes (GraniteMoe's input_linear), for converted
    weights with NaN or Inf, and for a directory that is the working directory or a mount point; FileExistsError for a
    directory that is not empty; OSError if it cannot be written.
    """
    weights, shared = QuantizedWeights("export", model, format), prepare_gather(model)
    is_first = not shared or dist.get_rank() == 0
    folder = on_all_ranks(shared, lambda: Folder(directory, shard_bytes) if is_first else None)
    tensors = tensors_of(weights.model)
    if tied := [x.own[0] for x in weights.written if is_converted(tensors[x.own[0]]) and not x.is_quantized]:
        warnings.warn(
            f"export: {tied[0]} is also the weight of an embedding, which engines read in high precision, so it is "
            "written in high precision; leave the layer that shares it unconverted (recommended_layers(model))",
            stacklevel=2,
        )
    pairs = weights.pairs(are_checked=True)

    def write() -> None:
        with folder or nullcontext():
            try:
                for name, x in pairs:
                    if folder is not None:
                        folder.add(name, x)
            except Exception:
                # If its disk is full, the rank still takes part in the collectives.
                for _ in pairs:
                    pass
                raise
            if folder is None:
                return
            config: Any = getattr(weights.model, "config", None)
            generation: Any = getattr(weights.model, "generation_config", None)
            for x in (config, generation):
                if hasattr(x, "save_pretrained"):
                    x.save_pretrained(folder.path)
            if (file := folder.path / "config.json").exists():
                content = json.loads(file.read_text()) | hugging_face.class_in_config(weights.model)
                weights.write_settings(folder, content)
            source = tokenizer_from if tokenizer_from is not None else getattr(config, "_name_or_path", "")
            if source and Path(source).is_dir():
                folder.copy_tokenizer(Path(source))

    on_all_ranks(shared, write)
    if requantized := weights.requantized:
        why = "they begin inside a block of their Parameter"
        if weights.layout.format.has_global_scale:
            why += ", are fused by engines with weights of another tensor scale, or are too small for a tensor scale"
        names = ", ".join(dict.fromkeys(re.sub(r"\.\d+\b", ".*", name) for name in requantized))
        warnings.warn(f"export: {len(requantized)} weights are quantized again, because {why}: {names}", stacklevel=2)


class QuantizedWeights:
    """The tensors that `export` writes for a model: an iterable of (name, tensor) that can be iterated repeatedly.

    written: what the files hold.
    requantized: the names of the weights that the last iteration quantized again.
    """

    def __init__(self, op: str, given: nn.Module, format: str) -> None:
        self._given, self.model = given, unwrapped(op, given)
        check_read_as_stored(op, self.model)
        converted = {name: x for name, x in tensors_of(self.model).items() if is_converted(x)}
        self.layout = _layout_for(op, self.model, format, converted)
        self._parts = parts_on_disk(self.model)
        self.written = [part for parts in self._parts.values() for part in parts]
        for x in self.written if hugging_face.is_model(self.model) else ():
            if x.is_quantized and len(x.shape) == DIMS_OF_EXPERTS and not x.name.endswith(READ_EXPERTS):
                layer = x.own[0].rpartition(".")[0]
                raise ValueError(
                    f"{op}: {x.name} holds all experts of a layer under a name that readers treat as high precision: "
                    f'they would load its codes as values; leave it unconverted (skip_fqns("{layer}"); for all layers '
                    f'"*.{layer.rpartition(".")[2]}"; convert: --skip)'
                )
        self.has_power_of_2_scales = all(map(has_power_of_2_scales, converted.values()))
        self.requantized: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        prepare_gather(self._given)
        return self.pairs()

    def metadata(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return {name: (dtype, shape)} in the order of the tensors, without gathering them."""
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        tensors = tensors_of(self.model)
        for x in self.written:
            plain = {x.name: (tensors[x.own[0]].dtype, x.shape)}
            found |= self.layout.described(x.name, x.shape) if x.is_quantized else plain
        return found

    def quantization_config(self) -> dict[str, Any]:
        """Return the `quantization_config` that `export` writes to config.json: the settings for an engine.

        It lists the layers that are not quantized, and marks scales that are powers of two.
        """
        settings = self.layout.quantization_config(*plain_layers(self.written))
        return settings | (SCALE_FMT if self.has_power_of_2_scales else {})

    def write_settings(self, folder: Folder, config: dict[str, Any]) -> None:
        """Write config.json with the settings, and warn about layers that engines refuse or transformers misreads."""
        warn_of_readers(self.written, self.layout)
        settings = self.quantization_config()
        folder.write_json("config.json", config | {"quantization_config": settings})
        if self.layout is MODELOPT:
            # Model Optimizer writes it next to config.json.
            quantization = {name: settings[name] for name in ("quant_algo", "group_size")}
            quantization |= {"kv_cache_quant_algo": None, "exclude_modules": settings["ignore"]}
            folder.write_json("hf_quant_config.json", {"producer": settings["producer"], "quantization": quantization})

    def pairs(self, are_checked: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor), one weight at a time; the model must be prepared for gathering.

        are_checked: raise ValueError if a quantized weight has NaN or Inf; synchronizes for each weight.
        """
        layout, self.requantized = self.layout, []
        rows = layout.format.block[0]
        names = {name: parts[0].name for name, parts in self._parts.items()}
        amaxes = shared_amaxes(self.model, names) if layout.format.has_global_scale else {}
        for name, own in tensors_of(self.model).items():
            parts, is_quantized = self._parts[name], self._parts[name][0].is_quantized
            needs_values = not is_quantized or name in amaxes or any(part.cuts(rows) for part in parts)
            x: Any = gather(own, needs_values)
            values: Any = x.hp if isinstance(x, MasterWeightTensor) else x
            if needs_values and isinstance(x, QuantizedTensor):
                values = x.dequantize()
            if not is_quantized:
                yield from ((part.name, part.of(values.to(own.dtype).detach()).contiguous()) for part in parts)
                continue
            if name in amaxes:
                weight = _quantized_again(values, x, layout.format, amaxes[name])
            else:
                weight = x.quantized() if isinstance(x, MasterWeightTensor) else x.operand()
            if are_checked:
                check_finite(name, weight)
            for part in parts:
                if name in amaxes or part.cuts(rows):
                    self.requantized.append(part.name)
                if part.cuts(rows):
                    again = _quantized_again(part.of(values), x, layout.format, amaxes.get(name))
                    yield from layout.tensors(Part(part.name), again)
                else:
                    yield from layout.tensors(part, weight)


def quantized_weights(model: nn.Module, format: str = FP8.name) -> QuantizedWeights:
    """Iterate over the tensors that `export` would write, as (name, tensor), to send them to an inference engine.

    Tensors are unsharded and on the model's device; each is new or shares the Parameter's memory. If the model is
    sharded, all ranks must iterate in lockstep, and FSDP2 gathers weights in quantized form. `metadata()` of the result
    returns names, dtypes and shapes in advance, and `quantization_config()` returns the settings with which to start an
    engine. The receiver can compare `checksums` of the result. Values are not checked for NaN, because that would
    synchronize.
    Raises ValueError as `export` does.
    """
    return QuantizedWeights("quantized_weights", model, format)


def _layout_for(op: str, model: nn.Module, format: str, converted: dict[str, torch.Tensor]) -> Layout:
    """Return the format with this name; raise ValueError for an unknown name and for a model that it cannot hold."""
    if format not in LAYOUTS:
        raise ValueError(
            f"{op}: format must be one of {', '.join(LAYOUTS)}, got {format!r}{did_you_mean(format, LAYOUTS)}"
        )
    layout, model_type = LAYOUTS[format], getattr(getattr(model, "config", None), "model_type", None)
    if layout is FP8_UE8M0 and isinstance(model_type, str) and not model_type.startswith(UE8M0_MODEL_TYPE):
        raise ValueError(
            f"{op}: {layout.name} is for models whose engines read scales called `scale` (model_type "
            f"{UE8M0_MODEL_TYPE}), and {type(model).__name__} has model_type {model_type}; choose {FP8.name} (convert: "
            'with --power-of-2-scales), which writes scale_fmt: "ue8m0" for scales that are powers of two'
        )
    if not converted:
        raise ValueError(
            f"{op}: no weight of {type(model).__name__} is converted; call quantize_ first, or save_pretrained"
        )
    for name, x in converted.items():
        fmt: Any = format_of(x)
        if fmt is not layout.format:
            raise ValueError(
                f"{op}: {name} trains in {fmt.name}, but {layout.name} stores {layout.format.name}; convert the "
                "model with another config, or unconvert it and call save_pretrained"
            )
        if layout is FP8_UE8M0 and not has_power_of_2_scales(x):
            raise ValueError(
                f"{op}: {name} trains with scales that are not powers of two, but {layout.name} stores only powers of "
                f"two; convert the model with power_of_2_scales=True, or export it as {FP8.name}"
            )
        local: Any = _compat.local_of(x)
        is_master, scale = isinstance(local, MasterWeightTensor), getattr(local, "global_scale", None)
        if x.dim() > 2 and (local.config.scale_per_expert if is_master else scale is not None and scale.dim()):
            raise ValueError(
                f"{op}: each expert of {name} trains with a separate tensor scale (scale_per_expert), but engines use "
                "one for all experts; call unconvert(model), and convert it with scale_per_expert=False"
            )
    return layout


def check_finite(name: str, weight: Operand) -> None:
    """Raise ValueError if a quantized weight decodes to NaN or Inf; synchronizes with its device."""
    scale = weight.scale if weight.global_scale is None else weight.global_scale
    # The codes and scales of a quantized Parameter may come from files.
    if bool(weight.format.element.has_nan(weight.qdata) | ~scale.float().isfinite().all()):
        raise ValueError(
            f"export: {name} has NaN or Inf, so its quantized values decode to NaN; export an earlier state of the "
            "model, or repair the weight"
        )


def _quantized_again(values: torch.Tensor, weight: Any, fmt: BlockFormat, tensor_amax: torch.Tensor | None) -> Any:
    power_of_2 = has_power_of_2_scales(weight)
    return ops.quantize(values.detach(), fmt, power_of_2_scales=power_of_2, tensor_amax=tensor_amax).rowwise
