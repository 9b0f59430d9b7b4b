"""Show which layers of a Hugging Face model quantize_ converts, why it skips others, and the memory of a step.

MODEL is a config.json, a folder that contains one, or a model id that is in the Hugging Face cache. The model is built
on the meta device, so any size takes seconds and no memory. Nothing is downloaded.

The filter is recommended_layers(model, config); each --filter excludes more layers. The first line of the report shows
the filter.

filters:
  skip_fqns=PATTERN,..    names to exclude, such as "*.gate"
  min_features=N
  keep_last_blocks=N      or a fraction of the blocks, such as 0.15

exit code: 0 success, 1 a layer cannot be converted, 2 invalid arguments
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import conversion
from torchao_blockwise._names import did_you_mean
from torchao_blockwise.cli.inputs import UsageError, meta_model, show
from torchao_blockwise.conversion import Filter, keep_last_blocks, min_features, skip_fqns
from torchao_blockwise.conversion.report import CANNOT
from torchao_blockwise.diagnostics import memory_report

HELP = "show what quantize_ and fuse do to a Hugging Face model"

_RECIPES = {"fp8": conversion.BlockwiseFP8TrainingConfig, "nvfp4": conversion.NVFP4TrainingConfig}
_FILTERS: dict[str, Callable[[nn.Module, str], Filter]] = {
    "skip_fqns": lambda model, value: skip_fqns(*value.split(",")),
    "min_features": lambda model, value: min_features(int(value)),
    "keep_last_blocks": lambda model, value: keep_last_blocks(model, float(value) if "." in value else int(value)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="config.json, its folder, or a model id in the cache")
    parser.add_argument("--recipe", choices=_RECIPES, default="fp8", help="default: fp8")
    parser.add_argument("--filter", action="append", default=[], metavar="NAME=VALUE", help="exclude more layers")
    parser.add_argument("--fuse", action="store_true", help="let layers that read the same input share its copies")
    parser.add_argument("--tokens", type=int, help="predict the memory of a step with a sequence of this length")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    if args.tokens is not None and args.tokens < 1:
        raise UsageError(f"--tokens must be 1 or more, got {args.tokens}")
    model, config = meta_model(args.model), _RECIPES[args.recipe]()
    filter_fn = conversion.recommended_layers(model, config)
    for text in args.filter:
        filter_fn &= _filter(model, text)
    report = conversion.dry_run(model, config, filter_fn)
    can = all(layer.status != CANNOT for layer in report.layers)
    if can:
        with warnings.catch_warnings():
            # Warnings about ranks do not apply here.
            warnings.simplefilter("ignore")
            quantize_(model, config, filter_fn)
        report = conversion.conversion_report(model)
    fusion = None if not args.fuse else conversion.fuse(model) if can else conversion.fusion_report(model)
    what = f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters, {filter_fn!r}"
    memory = memory_report(model, *_batch(model, args.tokens)) if can else None
    parts = {"conversion": report, "fusion": fusion, "memory": memory}
    made = {name: part for name, part in parts.items() if part is not None}
    data = {"model": what, **{name: part.to_dict() for name, part in made.items()}}
    show("\n\n".join((what, *map(str, made.values()))), data if args.json else None)
    return 0 if can else 1


def _batch(model: nn.Module, tokens: int | None) -> tuple[dict[str, torch.Tensor], ...]:
    """Return the batch for a step: a sequence, with labels for a language model; empty if `tokens` is None."""
    if tokens is None:
        return ()
    name, takes = type(model).__name__, getattr(model, "main_input_name", "input_ids")
    if takes != "input_ids":
        remedy = "leave it out, or call torchao_blockwise.diagnostics.memory_report with a batch"
        raise UsageError(f"--tokens needs a model of token ids, but {name} takes {takes}; {remedy}")
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    batch = {"input_ids": ids}
    if name.endswith(("ForCausalLM", "ForConditionalGeneration")):
        batch["labels"] = ids
    if getattr(model.config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids
    return (batch,)


def _filter(model: nn.Module, text: str) -> Filter:
    name, _, value = text.partition("=")
    if name not in _FILTERS:
        known = ", ".join(_FILTERS)
        raise UsageError(f"--filter must be one of {known}, got {name}{did_you_mean(name, _FILTERS)}")
    try:
        return _FILTERS[name](model, value)
    except ValueError as error:
        raise UsageError(f"--filter {text}: {error}") from None
