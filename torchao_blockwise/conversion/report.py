"""The conversion report: whether each linear layer, expert weight and other matrix is converted, and why not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat, _versions
from torchao_blockwise._compat import hugging_face
from torchao_blockwise.conversion.filters import skip_reason
from torchao_blockwise.conversion.handlers import why_not_convertible
from torchao_blockwise.conversion.state_dicts import is_converted
from torchao_blockwise.conversion.weights import expert_weights, held_parameters, matrices
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard, QuantizedTensor, TrainingConfig
from torchao_blockwise.tensors.config import check_config

CONVERTED, SKIPPED, CANNOT, REPLACED = "converted", "skipped", "cannot convert", "replaced"

# Status, reason or format, and the config of a converted weight.
_State = tuple[str, str, TrainingConfig | None]

# {name of a class whose GEMMs cannot be converted: the reason}
_NEVER_CONVERTED = {
    "MultiheadAttention": "nn.MultiheadAttention uses it directly, without an nn.Linear",
    "Conv1D": "Conv1D stores its weight transposed; replace it with nn.Linear",
}
_BY_NAME = "not in an nn.Linear; if the model passes it to F.linear, FqnToConfig converts it by name"


def aligned(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], total: tuple[str, ...] | None, words: int) -> str:
    """Format a table. The first `words` columns are left-aligned, the others right-aligned. total: the last line."""
    last = [] if total is None else [total]
    widths = [max(map(len, column)) for column in zip(header, *rows, *last)]
    rule = tuple("-" * width for width in widths)

    def line(row: tuple[str, ...]) -> str:
        cells = [c.ljust(w) if i < words else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))]
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, (header, rule, *rows, *(x for total in last for x in (rule, total)))))


@dataclass(frozen=True)
class LayerReport:
    """A linear layer, or a weight outside of linear layers.

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
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def conversion_report(model: nn.Module) -> ConversionReport:
    """Return status, reason, shape and bytes of every `nn.Linear`, all experts and other matrices of `model`.

    Other Parameters [N, K], except those of embeddings and norms, are listed as skipped unless they were converted by
    name.
    """
    return _report(model)


def dry_run(
    model: nn.Module, config: TrainingConfig, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> ConversionReport:
    """Return the conversion report as it would be after `quantize_(model, config, filter_fn)`, without converting.

    Layers for which `quantize_` would raise have the status "cannot convert".
    Raises TypeError unless `config` is an instance of a training config.
    """
    check_config("dry_run", config)
    _versions.check()
    selected = _compat.default_filter() if filter_fn is None else filter_fn
    held = held_parameters(model)

    def planned(module: nn.Module, fqn: str) -> _State | None:
        if not selected(module, fqn):
            return None
        reason = why_not_convertible(module, config, held)
        return (CONVERTED, _format(config), config) if reason is None else (CANNOT, reason, None)

    return _report(model, planned)


def _report(model: nn.Module, planned: Callable[[nn.Module, str], _State | None] | None = None) -> ConversionReport:
    """planned: returns the state of a module after the conversion, or None if its state does not change."""
    adapters = hugging_face.adapters_in(model)
    layers: list[LayerReport] = []
    # The key is the weight, so that a shared weight is counted once.
    counted: dict[torch.Tensor, LayerReport] = {}
    for fqn, module in model.named_modules():
        others = matrices(module)
        is_linear = isinstance(module, nn.Linear)
        own = {"weight": module.weight} if isinstance(module, nn.Linear) else expert_weights(module)
        for name, weight in (own | others).items():
            state = None if planned is None or name in others or module in adapters else planned(module, fqn)
            status, reason, config = state or _state(module, weight, name in others, module in adapters)
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
    return ConversionReport(tuple(layers), totals, dry_run=planned is not None)


def _state(module: nn.Module, weight: torch.Tensor, is_other: bool, is_adapter: bool) -> _State:
    """Return the current state of a weight.

    is_other: whether it is a matrix of a module that is not an `nn.Linear`. is_adapter: whether it belongs to PEFT.
    """
    local = _compat.local_of(weight)
    if isinstance(local, MasterWeightTensor):
        return CONVERTED, _format(local.config), local.config
    if isinstance(local, QuantizedTensor):
        return CONVERTED, f"{local.fmt.name}{_blocks(local.config)}, no master", local.config
    if is_converted(module) and not is_other:
        return REPLACED, "its weight was replaced after the conversion", None
    if is_adapter:
        return SKIPPED, "PEFT adapter, kept in high precision", None
    if is_other:
        return SKIPPED, _NEVER_CONVERTED.get(type(module).__name__, _BY_NAME), None
    return SKIPPED, skip_reason(module) or "not selected", None


def _format(config: TrainingConfig) -> str:
    return config.weight_format.name + _blocks(config) + ("" if config.master_weights else ", no master")


def _blocks(config: TrainingConfig | None) -> str:
    return ", grad_weight 128x128" if config is not None and config.grad_weight_format.is_square else ""


def _bytes(weight: torch.Tensor, shape: tuple[int, ...], config: TrainingConfig | None) -> tuple[int, int, int]:
    """Return (bytes_before, bytes_after, quantized_bytes). config: None for a weight that is not converted."""
    before = math.prod(shape) * weight.dtype.itemsize
    if isinstance(weight, QuantizedTensor):
        return before, weight.nbytes, weight.nbytes
    if config is None:
        return before, before, 0
    is_stored = not config.master_weights or isinstance(
        getattr(_compat.local_of(weight), "shard", None), QuantizedShard
    )
    quantized = config.weight_format.nbytes(*shape, scale_per_matrix=config.scale_per_expert) if is_stored else 0
    return before, (before if config.master_weights else 0) + quantized, quantized
