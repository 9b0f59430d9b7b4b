"""The conversion report: every linear layer, weight of experts and other matrix, converted or skipped and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat, _versions
from torchao_blockwise._compat import hugging_face
from torchao_blockwise.conversion.filters import skip_reason
from torchao_blockwise.conversion.handlers import why_not_convertible
from torchao_blockwise.conversion.model_index import ModelIndex
from torchao_blockwise.conversion.state_dicts import is_converted
from torchao_blockwise.conversion.weights import expert_weights, matrices
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor, TrainingConfig, fsdp
from torchao_blockwise.tensors.config import check_config

CONVERTED, SKIPPED, CANNOT, REPLACED = "converted", "skipped", "cannot convert", "replaced"


def aligned(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], total: tuple[str, ...] | None, words: int) -> str:
    """A table in columns, of which the first `words` are words and the others numbers; `total` is its last line."""
    last = [] if total is None else [total]
    widths = [max(map(len, column)) for column in zip(header, *rows, *last)]
    rule = tuple("-" * width for width in widths)

    def line(row: tuple[str, ...]) -> str:
        cells = [c.ljust(w) if i < words else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))]
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, (header, rule, *rows, *(x for total in last for x in (rule, total)))))


@dataclass(frozen=True)
class LayerReport:
    """One linear layer, or one weight outside of linear layers.

    fqn: of the layer, or of the weight ("layers.0.experts.down_proj").
    status: "converted", "skipped", "cannot convert" or "replaced"; reason says why, or to what format.
    shape: (out_features, in_features), (N, K), or (experts, N, K).
    bytes_before: the high-precision weight. bytes_after: the Parameter, and the payload that FSDP2 gathers of it.
    quantized_bytes: the quantized ones of these; 0 for a master weight by itself, which is quantized where it is read.
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
    """All linear layers and experts of a model; print it for a table, `to_dict()` for data.

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
        title = "dry run: what quantize_ would do\n" if self.dry_run else ""
        hint = "" if t["converted"] else "\nnothing is converted; filter_fn=recommended_layers(model) takes experts too"
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
    """Every `nn.Linear`, all experts and other matrices of `model`: converted or skipped, why, shape and bytes.

    Other Parameters [N, K], except those of embeddings and norms, are shown too: as skipped, unless they were converted
    by name.
    """
    adapters = hugging_face.adapters_in(model)
    return _report([(name, m, w, *_state(m, w, adapters)) for name, _, m, w in _layers(model)], dry_run=False)


def dry_run(
    model: nn.Module, config: TrainingConfig, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> ConversionReport:
    """The report that `quantize_(model, config, filter_fn)` would leave behind; changes nothing.

    Layers that would make `quantize_` raise have the status "cannot convert".
    Raises TypeError for what is no config, as its class.
    """
    check_config("dry_run", config)
    _versions.check()
    selected = _compat.default_filter() if filter_fn is None else filter_fn
    index, adapters = ModelIndex(model), hugging_face.adapters_in(model)

    def state(fqn: str, module: nn.Module, weight: torch.Tensor) -> tuple[str, str, TrainingConfig | None]:
        if _is_matrix(module, weight):
            return _state(module, weight, adapters)
        if module in adapters or not selected(module, fqn):
            return SKIPPED, _why_skipped(module, weight, adapters), None
        reason = why_not_convertible(module, config, model, index=index)
        return (CONVERTED, _format(config), config) if reason is None else (CANNOT, reason, None)

    return _report([(name, m, weight, *state(fqn, m, weight)) for name, fqn, m, weight in _layers(model)], dry_run=True)


def _layers(model: nn.Module) -> Iterator[tuple[str, str, nn.Module, torch.Tensor]]:
    """(name in the report, fqn of the module, module, weight) of linear layers, experts and other matrices."""
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield fqn, fqn, module, module.weight
        else:
            for name, weight in (expert_weights(module) | matrices(module)).items():
                yield f"{fqn}.{name}".lstrip("."), fqn, module, weight


# By name of a class that multiplies by matrices in a way that no conversion replaces.
_NEVER_CONVERTED = {
    "MultiheadAttention": "nn.MultiheadAttention multiplies by it itself, without an nn.Linear",
    "Conv1D": "Conv1D holds its weight transposed; replace it by nn.Linear",
}
_BY_NAME = "no nn.Linear's; if F.linear multiplies by it, FqnToConfig converts it by name"


def _is_matrix(module: nn.Module, weight: torch.Tensor) -> bool:
    return any(weight is matrix for matrix in matrices(module).values())


def _why_skipped(module: nn.Module, weight: torch.Tensor, adapters: set[nn.Module]) -> str:
    if module in adapters:
        return "PEFT's adapter, which stays in high precision"
    if _is_matrix(module, weight):
        return _NEVER_CONVERTED.get(type(module).__name__, _BY_NAME)
    return skip_reason(module) or "not selected"


def _state(module: nn.Module, weight: torch.Tensor, adapters: set[nn.Module]) -> tuple[str, str, TrainingConfig | None]:
    weight = _compat.local_of(weight)
    if isinstance(weight, MasterWeightTensor):
        return CONVERTED, _format(weight.config), weight.config
    if isinstance(weight, QuantizedTensor):
        return CONVERTED, f"{weight.fmt.name}, no master", weight.config
    if is_converted(module) and not _is_matrix(module, weight):
        return REPLACED, "was converted, weight replaced", None
    return SKIPPED, _why_skipped(module, weight, adapters), None


def _format(config: TrainingConfig) -> str:
    return config.weight_format.name + ("" if config.master_weights else ", no master")


def _report(
    states: Iterable[tuple[str, nn.Module, torch.Tensor, str, str, TrainingConfig | None]], dry_run: bool
) -> ConversionReport:
    layers: list[LayerReport] = []
    # By id, and held, so that no id is used again.
    seen = {}
    totals = dict.fromkeys(("layers", "converted", "bytes_before", "bytes_after", "quantized_bytes"), 0)
    for fqn, module, weight, status, reason, config in states:
        dtype = str(weight.dtype).removeprefix("torch.")
        # A lazy layer knows no shape of its weight yet, but its features.
        shape = (module.out_features, module.in_features) if isinstance(module, nn.Linear) else tuple(weight.shape)
        layer = LayerReport(fqn, status, reason, shape, dtype, *_bytes(weight, shape, status, config))
        layers.append(layer)
        totals["layers"] += 1
        totals["converted"] += status == CONVERTED
        if id(weight) not in seen:
            seen[id(weight)] = weight
            for name in ("bytes_before", "bytes_after", "quantized_bytes"):
                totals[name] += getattr(layer, name)
    return ConversionReport(tuple(layers), totals, dry_run)


def _bytes(
    weight: torch.Tensor, shape: tuple[int, ...], status: str, config: TrainingConfig | None
) -> tuple[int, int, int]:
    """(before, after, quantized)."""
    before = math.prod(shape) * weight.dtype.itemsize
    if isinstance(weight, QuantizedTensor):
        return before, weight.nbytes, weight.nbytes
    if status != CONVERTED or config is None:
        return before, before, 0
    is_stored = not config.master_weights or fsdp.is_gathered_quantized(weight)
    quantized = config.weight_format.nbytes(*shape, scale_per_matrix=config.scale_per_expert) if is_stored else 0
    return before, (before if config.master_weights else 0) + quantized, quantized
