"""The conversion report: whether each linear layer, expert weight and other matrix is converted, and why not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat, _versions
from torchao_blockwise._compat import hugging_face
from torchao_blockwise.conversion.filters import SKIP_REASON, FilterFn
from torchao_blockwise.conversion.handlers import planned_layers
from torchao_blockwise.conversion.state_dicts import is_converted
from torchao_blockwise.conversion.weights import expert_weights, held_parameters, matrices
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard, QuantizedTensor, TrainingConfig
from torchao_blockwise.tensors.config import check_config

CONVERTED, SKIPPED, CANNOT, REPLACED = "converted", "skipped", "cannot convert", "replaced"

# {name of a class whose GEMMs cannot be converted: the reason}
_NEVER_CONVERTED = {
    "MultiheadAttention": "nn.MultiheadAttention uses it directly, without an nn.Linear",
    "Conv1D": "Conv1D stores its weight transposed; replace it with nn.Linear",
}
_BY_NAME = "not in an nn.Linear; if the model passes it to F.linear, FqnToConfig converts it by name"


def aligned(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], total: tuple[str, ...] | None, words: int) -> str:
    """Format a table. The first `words` columns are left-aligned, the others right-aligned. total: the last line."""
    widths = [max(map(len, column)) for column in zip(header, *rows, *([] if total is None else [total]))]
    rule = tuple("-" * width for width in widths)
    lines = [header, rule, *rows, *([] if total is None else [rule, total])]
    sides = ["<" if i < words else ">" for i in range(len(header))]
    return "\n".join("  ".join(map("{:{}{}}".format, line, sides, widths)).rstrip() for line in lines)


@dataclass(frozen=True)
class LayerReport:
    """A linear layer, or a weight outside linear layers.

    fqn: the name of the layer, or of the weight ("layers.0.experts.down_proj").
    status: "converted", "skipped", "cannot convert" or "replaced". reason: why, or the format of a converted weight.
    shape: (out_features, in_features), (N, K), or (experts, N, K).
    bytes_before: size of the high-precision weight. bytes_after: size of the Parameter and, under FSDP2, of its
        quantized payload. quantized_bytes: the quantized part of bytes_after. It is 0 for a master weight without
        FSDP2, which each GEMM quantizes and frees.
    """

    fqn: str
    status: str
    reason: str
    shape: tuple[int, ...]
    dtype: str
    bytes_before: int
    bytes_after: int
    quantized_bytes: int


@dataclass(frozen=True)
class ConversionReport:
    """All linear layers and experts of a model. Print it for a table; `to_dict()` returns the data.

    A weight that several layers share is counted once in the totals.
    """

    layers: tuple[LayerReport, ...]
    totals: dict[str, int]
    dry_run: bool = False

    def to_dict(self) -> dict[str, Any]:
        """{"layers": [{...}], "totals": {...}, "dry_run": bool} of plain Python values, ready for JSON."""
        layers = [{**asdict(layer), "shape": list(layer.shape)} for layer in self.layers]
        return {"layers": layers, "totals": dict(self.totals), "dry_run": self.dry_run}

    def __str__(self) -> str:
        header: tuple[str, ...] = ("layer", "status", "why / format", "shape", "dtype", "before", "after", "quantized")
        rows = [
            (
                layer.fqn or "(the model itself)",
                layer.status,
                layer.reason,
                "×".join(map(str, layer.shape)),
                layer.dtype,
                human_bytes(layer.bytes_before),
                human_bytes(layer.bytes_after),
                human_bytes(layer.quantized_bytes) if layer.quantized_bytes else "-",
            )
            for layer in self.layers
        ]
        t = self.totals
        total: tuple[str, ...] = ("total", f"{t['converted']} of {t['layers']}", "converted", "", "")
        total += tuple(human_bytes(t[k]) for k in ("bytes_before", "bytes_after", "quantized_bytes"))
        title = "dry run: the result of quantize_, without converting\n" if self.dry_run else ""
        hint = "" if t["converted"] else "\nno layer is converted; filter_fn=recommended_layers(model) includes experts"
        return title + aligned(header, rows, total, words=5) + hint


def human_bytes(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    power = min((max(count, 1).bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB" if power else f"{count} B"


def conversion_report(model: nn.Module) -> ConversionReport:
    """Return status, reason, shape and bytes of every `nn.Linear`, all experts and other matrices of `model`.

    Other Parameters [N, K], except those of embeddings and norms, are listed as skipped unless they were converted by
    name.
    """
    return _report(model)


def dry_run(model: nn.Module, config: TrainingConfig, filter_fn: FilterFn | None = None) -> ConversionReport:
    """Return the conversion report as it would be after `quantize_(model, config, filter_fn)`, without converting.

    Layers for which `quantize_` would raise an error have the status "cannot convert".
    Raises TypeError unless `config` is an instance of a training config.
    """
    check_config("dry_run", config)
    _versions.check()
    chosen = filter_fn or _compat.default_filter()
    return _report(model, planned_layers(model, config, chosen, held_parameters(model)), config)


def _report(model: nn.Module, plan: Mapping[str, str | None] | None = None, planned: Any = None) -> ConversionReport:
    """plan: for a dry run, {layer: why it cannot be converted or None}. planned: the config of the others."""
    adapters = hugging_face.adapters_in(model)
    layers: list[LayerReport] = []
    # The key is the weight, so that a shared weight is counted once.
    counted: dict[torch.Tensor, LayerReport] = {}
    for fqn, module in model.named_modules():
        others = matrices(module)
        is_linear = isinstance(module, nn.Linear)
        own = {"weight": module.weight} if isinstance(module, nn.Linear) else expert_weights(module)
        for name, weight in (own | others).items():
            if plan is not None and fqn in plan and name not in others:
                why = plan[fqn]
                status, reason, config = (CONVERTED, _format(planned), planned) if why is None else (CANNOT, why, None)
            else:
                status, reason, config = _state(module, weight, name in others, module in adapters)
            dtype = str(weight.dtype).removeprefix("torch.")
            # The weight of a lazy layer has no shape yet, but the layer knows its features.
            shape = (module.out_features, module.in_features) if isinstance(module, nn.Linear) else tuple(weight.shape)
            fqn_of_row = fqn if is_linear else f"{fqn}.{name}".lstrip(".")
            layer = LayerReport(fqn_of_row, status, reason, shape, dtype, *_bytes(weight, shape, config))
            layers.append(layer)
            counted.setdefault(weight, layer)
    totals = {"layers": len(layers), "converted": sum(layer.status == CONVERTED for layer in layers)}
    for total in ("bytes_before", "bytes_after", "quantized_bytes"):
        totals[total] = sum(getattr(layer, total) for layer in counted.values())
    return ConversionReport(tuple(layers), totals, dry_run=plan is not None)


def _state(
    module: nn.Module, weight: torch.Tensor, is_other: bool, is_adapter: bool
) -> tuple[str, str, TrainingConfig | None]:
    """Return status, reason or format, and config of a weight.

    is_other: whether it is a matrix of a module that is not an `nn.Linear`. is_adapter: whether it belongs to PEFT.
    """
    local: Any = _compat.local_of(weight)
    if isinstance(local, (MasterWeightTensor, QuantizedTensor)):
        config = local.config
        # `quantize_` sets a config; a program can assign a quantized tensor without one.
        why = f"{local.fmt.name}, no master" if config is None else _format(config)
        return CONVERTED, why, config
    if is_converted(module) and not is_other:
        return REPLACED, "its weight was replaced after the conversion", None
    if is_adapter:
        return SKIPPED, "PEFT adapter, kept in high precision", None
    if is_other:
        return SKIPPED, _NEVER_CONVERTED.get(type(module).__name__, _BY_NAME), None
    return SKIPPED, vars(module).get(SKIP_REASON) or "not selected", None


def _format(config: TrainingConfig) -> str:
    blocks = ", grad_weight 1x128" if getattr(config, "grad_weight_blocks", "") == "1x128" else ""
    return config.weight_format.name + blocks + ("" if config.master_weights else ", no master")


def _bytes(weight: torch.Tensor, shape: tuple[int, ...], config: TrainingConfig | None) -> tuple[int, int, int]:
    """Return (bytes_before, bytes_after, quantized_bytes). config: None for a weight that is not converted."""
    before, is_quantized = math.prod(shape) * weight.dtype.itemsize, isinstance(weight, QuantizedTensor)
    if config is None:
        quantized = weight.nbytes if is_quantized else 0
        return before, quantized or before, quantized
    # FSDP2 leaves the weights of its root module gathered, in place of the shards of masters.
    shard = getattr(_compat.local_of(weight), "shard", None)
    is_stored = not config.master_weights or is_quantized or isinstance(shard, QuantizedShard)
    quantized = config.weight_format.nbytes(*shape, scale_per_matrix=config.scale_per_expert) if is_stored else 0
    return before, (before if config.master_weights else 0) + quantized, quantized
