"""Models of transformers that train, from checkpoints in FP8, NVFP4 or high precision; see `from_pretrained`."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from torchao_blockwise._compat import hugging_face
from torchao_blockwise._names import shown
from torchao_blockwise.checkpoint.files import SETTINGS
from torchao_blockwise.checkpoint.gathering import on_all_ranks
from torchao_blockwise.checkpoint.model_tensors import Part, is_converted, tensors_of, unwrapped
from torchao_blockwise.checkpoint.reading import check, fill, warn_of_scales, why_requantized
from torchao_blockwise.checkpoint.stored_weights import StoredWeights
from torchao_blockwise.conversion import custom, linears_and_experts, recommended_layers
from torchao_blockwise.conversion.weights import weights_of
from torchao_blockwise.formats import HIGH_PRECISION_DTYPES
from torchao_blockwise.integrations.recipes import RECIPES, convert, nearest, training_config
from torchao_blockwise.tensors import BlockwiseFP8TrainingConfig, TrainingConfig

_TRAINABLE = ("full", "adapters")


def from_pretrained(
    path: str | os.PathLike[str],
    recipe: str | TrainingConfig | None,
    trainable: str = "full",
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    parallelize: Callable[[PreTrainedModel], object] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Return a trainable transformers model from a folder in FP8, NVFP4 or high precision.

    path: a folder with config.json and safetensors files in a format that `checkpoint.load` reads. The model's class is
        the one that config.json names.
    recipe: "fp8", "nvfp4" or a training config. If the files are in the recipe's format, the layers that they quantize
        are converted, and "fp8" uses power-of-two scales if theirs are powers of two. Otherwise the
        `recommended_layers` are. None decodes all weights and converts none.
    trainable: "full": all Parameters train, and converted ones are master weights with the decoded values. They
        quantize to the codes of the files again; a warning names weights for which this is impossible. Scales that are
        not powers of two may change in the last place of `dtype`. An NVFP4 weight has the tensor scale of its values
        until `checkpoint.export` unifies those of joined layers.
        "adapters": no Parameter trains; add adapters with PEFT. Converted weights are quantized Parameters with the
        payload and scales of the files, bitwise identical. Weights of plain files are quantized.
    dtype: of master weights, and of all weights that are not quantized. Default: that of config.json, or else bfloat16.
        The parts that transformers keeps in fp32 stay in fp32.
    device: of the weights. With "meta", the model has no values, for ranks that receive them from another rank.
    filter_fn: leaves out further layers, for example `skip_fqns("*.q_proj")`; their weights are decoded.
    parallelize: called on all ranks with the converted model, before its weights are loaded, to call `fully_shard`.
        Each rank then reads all files, one weight at a time, and keeps its shards. Without it, each rank has the whole
        model.
    options: passed to transformers when it creates the model, such as `attn_implementation`.

    The model is in evaluation mode, as transformers' own `from_pretrained` returns it. In addition to the model, one
    weight at a time is in memory, and the pages of the open files. Files are read as by `checkpoint.load`: safetensors
    only, and code that comes with a checkpoint is not run.
    Raises FileNotFoundError for a folder without a checkpoint; ValueError for an unknown recipe, for files in another
    quantization format, and with "adapters" for files that the recipe's Parameters cannot hold unchanged; and the
    errors of `checkpoint.load`.
    """
    if trainable not in _TRAINABLE:
        raise ValueError(f"from_pretrained: {nearest('trainable', trainable, _TRAINABLE)}")
    if not (recipe is None or isinstance(recipe, TrainingConfig) or recipe in RECIPES):
        raise ValueError(f"from_pretrained: {nearest('recipe', recipe, [*RECIPES, 'None'])}")
    if dtype not in (None, *HIGH_PRECISION_DTYPES):
        raise ValueError(f"from_pretrained: dtype must be bfloat16, float16 or float32, got {dtype}")
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"from_pretrained: {folder} is not a folder; download it, for example with "
            f"huggingface_hub.snapshot_download({str(path)!r}), and pass the folder that this returns"
        )
    several = parallelize is not None and dist.is_available() and dist.is_initialized()
    model, weights, parts = on_all_ranks(
        several, lambda: _converted_model(folder, recipe, trainable == "adapters", dtype, filter_fn, options)
    )
    if parallelize is not None:
        parallelize(model)
    hugging_face.materialize(model, torch.device(device))
    if torch.device(device).type != "meta":
        fill(unwrapped("from_pretrained", model), weights, parts)
    return model.eval()


def _converted_model(
    folder: Path,
    recipe: str | TrainingConfig | None,
    keeps_payload: bool,
    dtype: torch.dtype | None,
    filter_fn: Callable[[nn.Module, str], bool] | None,
    options: dict[str, Any],
) -> tuple[PreTrainedModel, StoredWeights, dict[str, list[Part]]]:
    """Return the converted model on the meta device, the weights in the folder, and the parts of each of its tensors.

    Everything is checked: the model has no memory yet, and config.json may name any size.
    """
    weights = StoredWeights(folder)
    stored = {fmt for name in weights.names if (fmt := weights.format(name)) is not None}
    config: Any = None if recipe is None else replace(training_config(recipe), master_weights=not keeps_payload)
    if config is not None and keeps_payload and stored - {config.weight_format}:
        raise ValueError(
            f"from_pretrained: {folder} has weights in {' and '.join(sorted(fmt.name for fmt in stored))}, but "
            f"trainable='adapters' keeps weights unchanged, and the recipe is in {config.weight_format.name}; "
            "choose the recipe of the files, trainable='full', or recipe=None to decode them"
        )
    model = hugging_face.model_on_meta(_model_config(folder), dtype, options)
    if (folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    if keeps_payload:
        model.requires_grad_(False)
    parts = check(model, weights)
    if config is None:
        return model, weights, parts
    if isinstance(recipe, str) and isinstance(config, BlockwiseFP8TrainingConfig) and config.weight_format in stored:
        config = replace(config, power_of_2_scales=all(weights.has_power_of_2_scales.values()))
    _convert(model, config, weights, parts, filter_fn)
    _check_payloads(model, weights, parts, keeps_payload)
    warn_of_scales(model, weights, parts)
    return model, weights, parts


def _model_config(folder: Path) -> PreTrainedConfig:
    """Return the config of the model in high precision; code in the folder is not run."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"from_pretrained: the installed transformers has no model for config.json of {folder} ({error}); "
            "upgrade transformers, or create the model yourself, convert it, and call checkpoint.load"
        ) from error
    for part in (config, config.get_text_config(decoder=True)):
        vars(part).pop(SETTINGS, None)
    return config


def _convert(
    model: PreTrainedModel,
    config: TrainingConfig,
    weights: StoredWeights,
    parts: dict[str, list[Part]],
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> None:
    """Convert the layers that the files quantize in the format of `config`; if there are none, the recommended ones."""
    in_format = {
        id(x)
        for name, x in tensors_of(model).items()
        if any(weights.format(part.name) is config.weight_format for part in parts[name])
    }
    if in_format:
        chosen = linears_and_experts() & custom(
            lambda module, fqn: any(id(p) in in_format for p in weights_of(module).values()),
            "not quantized in the files",
        )
    else:
        chosen = recommended_layers(model, config)
    convert(model, config, chosen if filter_fn is None else chosen & filter_fn)


def _check_payloads(
    model: PreTrainedModel, weights: StoredWeights, parts: dict[str, list[Part]], keeps_payload: bool
) -> None:
    """Raise if converted weights cannot keep the payload of the files, or warn if they train with another one."""
    reasons = {
        name: why
        for name, x in tensors_of(model).items()
        if is_converted(x)
        and any(weights.format(part.name) is not None for part in parts[name])
        and (why := why_requantized(x, parts[name], weights)) is not None
    }
    if not reasons:
        return
    layers = shown(list(dict.fromkeys(re.sub(r"\.\d+\b", ".*", name) for name in reasons)))
    why = next(iter(reasons.values()))
    if keeps_payload:
        raise ValueError(
            f"from_pretrained: {why}, so quantized Parameters cannot represent {layers} of "
            f"{weights.files.path} unchanged, as trainable='adapters' requires; choose trainable='full' or "
            "recipe=None, which decode them, or leave these layers out (filter_fn=skip_fqns(...))"
        )
    warnings.warn(
        f"from_pretrained: {why}, so master weights of {layers} are the decoded values of {weights.files.path}, "
        "but quantize to different codes",
        stacklevel=6,
    )
