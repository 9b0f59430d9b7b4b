"""Memory: bytes that training a model takes, by what takes them, compared with the same model in bf16.

Predicted without values: the model's step runs on fake tensors, which have shapes and no memory. Measured by a real
step, which is undone. Both count the same way: storages, each once, from the operation that makes it on.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.conversion.report import aligned, human_bytes
from torchao_blockwise.diagnostics.steps import (
    Loss,
    NothingToDifferentiate,
    Step,
    fake_inputs,
    nbytes_of,
    real_inputs,
    run_step,
    undone,
)
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor

Optimizer: TypeAlias = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]

ROWS = {
    "weights": "weights",
    "buffers": "buffers",
    "copies": "quantized copies, at once",
    "gradients": "gradients",
    "saved": "saved for backward",
    "states": "optimizer states",
    "gathered": "gathered by FSDP2",
    "peak": "peak of forward and backward",
    "allocated": "the same by the allocator",
}


@dataclass(frozen=True)
class Bytes:
    """Bytes of a training step; None where they were not counted.

    weights: Parameters between steps. buffers: the model's. gradients: of Parameters.
    copies: the most of quantized copies of weights that are there at once, inside of products.
    saved: what autograd saves in a forward pass, without Parameters, buffers and the batch.
    states: the optimizer's, and its masters of quantized Parameters.
    gathered: what each rank receives in a forward pass under FSDP2, if all Parameters are sharded.
    peak: weights, buffers, and the most that forward and backward make and hold at once.
    allocated: the peak by PyTorch's allocator, on a GPU.
    """

    weights: int
    buffers: int
    states: int | None
    gathered: int | None
    copies: int
    gradients: int
    saved: int | None = None
    peak: int | None = None
    allocated: int | None = None


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a model's training step; print it for a table, `to_dict()` for data.

    bf16: of the same model with all Parameters in bf16. predicted: of the model as it is. measured: what a step took,
    None where none was run. notes: what could not be looked at, and why; weights in float32.
    """

    bf16: Bytes
    predicted: Bytes
    measured: Bytes | None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """{"bf16": {...}, "predicted": {...}, "measured": {...} or None, "notes": [...]}, ready for JSON."""
        return {**asdict(self), "notes": list(self.notes)}

    def __str__(self) -> str:
        columns = {"bf16": self.bf16, "predicted": self.predicted, "measured": self.measured}
        shown = {name: asdict(column) for name, column in columns.items() if column is not None}
        rows = []
        for key, name in ROWS.items():
            cells = [column[key] for column in shown.values()]
            if any(cell for cell in cells):
                rows.append((name, *("-" if cell is None else human_bytes(cell) for cell in cells)))
        notes = "".join(f"\nnote: {note}" for note in self.notes)
        return aligned(("what", *shown), rows, None, words=1) + notes


def memory_report(
    model: nn.Module,
    *batch: Any,
    loss: Loss | None = None,
    optimizer: Optimizer = torch.optim.AdamW,
) -> MemoryReport:
    """The bytes that a training step of `model` takes, predicted and measured, compared with the same model in bf16.

    model: converted or not, fused, with experts, with checkpointing; on a CPU, a GPU, or on the meta device, where the
        prediction is all.
    batch: what the model is called with; one mapping is keyword arguments. Without it nothing is run: what depends on
        activations is left out, and the largest weight's copy stands for the copies.
    loss: what the model returns -> a scalar; default its `loss`, or else the sum of all that it returns.
    optimizer: whose states are predicted, those after a step: a class, or an optimizer.

    Of the model nothing changes: gradients, buffers, random states, training modes. It runs in training mode, under the
    caller's autocast. On a GPU the measured step runs twice, and the first one is not counted.
    Raises ValueError for a model that ranks share, and where nothing that the model returns asks for a gradient.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    weights = list(model.parameters())
    if batch and any(_compat.local_of(p) is not p for p in weights):
        raise ValueError("memory_report: ranks share this model; ask before fully_shard, or without a batch")
    columns = {"bf16": _at_rest_in_bf16(model, optimizer), "the prediction": _at_rest(model, optimizer)}
    fp32 = sum(p.nbytes for p in weights if p.dtype is torch.float32 and not isinstance(p, QuantizedTensor))
    notes, measured = [], None
    if fp32:
        notes.append(
            f"{human_bytes(fp32)} of the weights are float32, which the column bf16 counts in bf16; call it with "
            "model.bfloat16() to see the difference that the recipe makes by itself"
        )
    with undone(model) if batch else contextlib.nullcontext():
        for name, dtype in zip(columns, (torch.bfloat16, None)) if batch else ():
            try:
                columns[name] = _with_step(columns[name], run_step(model, fake_inputs(model, batch, dtype), loss))
            except NothingToDifferentiate:
                raise
            except Exception as error:
                # Code that asks for values, say. What is real can be measured all the same.
                notes.append(f"{name} needs values: {type(error).__name__}: {error}".splitlines()[0])
        if batch and not any(p.is_meta for p in weights):
            measured = _measured(model, batch, loss, columns["the prediction"])
    return MemoryReport(columns["bf16"], columns["the prediction"], measured, tuple(notes))


def _with_step(at_rest: Bytes, step: Step) -> Bytes:
    return replace(at_rest, **{**step._asdict(), "peak": at_rest.weights + at_rest.buffers + step.peak})


def _measured(model: nn.Module, batch: Sequence[Any], loss: Loss | None, at_rest: Bytes) -> Bytes:
    """Bytes of a real step; on a GPU of the second one, with the allocator's peak."""
    at_rest = replace(at_rest, states=None, gathered=None)
    if not any(p.is_cuda for p in model.parameters()):
        return _with_step(at_rest, run_step(model, real_inputs(model, batch), loss))
    run_step(model, real_inputs(model, batch), loss)
    inputs, before = real_inputs(model, batch), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = _with_step(at_rest, run_step(model, inputs, loss))
    return replace(step, allocated=step.weights + step.buffers + torch.cuda.max_memory_allocated() - before)


# --- what depends on no activation ------------------------------------------------------------------------------------


def _at_rest(model: nn.Module, optimizer: Optimizer) -> Bytes:
    """A gradient for each trained Parameter; the largest copy of a weight, as there is one at once."""
    weights = list(model.parameters())
    trained = [p for p in weights if p.requires_grad]
    # The optimizer of a quantized Parameter steps an fp32 master.
    masters = [p for p in trained if isinstance(_compat.local_of(p), QuantizedTensor)]
    dtypes = [torch.float32 if isinstance(_compat.local_of(p), QuantizedTensor) else p.dtype for p in trained]
    return Bytes(
        weights=nbytes_of(weights),
        buffers=nbytes_of(list(model.buffers())),
        states=_states(trained, dtypes, optimizer) + sum(p.numel() * torch.float32.itemsize for p in masters),
        gathered=sum(_payload_bytes(p) for p in weights),
        copies=max((_copy_bytes(p) for p in weights), default=0),
        gradients=sum(p.numel() * p.dtype.itemsize for p in trained),
    )


def _at_rest_in_bf16(model: nn.Module, optimizer: Optimizer) -> Bytes:
    trained = [p for p in model.parameters() if p.requires_grad]
    weights, buffers, gradients = (sum(map(_bf16_bytes, x)) for x in (model.parameters(), model.buffers(), trained))
    states = _states(trained, [torch.bfloat16] * len(trained), optimizer)
    return Bytes(weights, buffers, states, gathered=weights, copies=0, gradients=gradients)


def _bf16_bytes(x: torch.Tensor) -> int:
    return x.numel() * (torch.bfloat16.itemsize if x.is_floating_point() else x.dtype.itemsize)


def _format_of(weight: torch.Tensor) -> BlockFormat | None:
    weight = _compat.local_of(weight)
    if isinstance(weight, MasterWeightTensor):
        return weight.config.weight_format
    return weight.fmt if isinstance(weight, QuantizedTensor) else None


def _payload_bytes(weight: torch.Tensor) -> int:
    """Bytes of a weight that FSDP2 gathers; scales and amaxes are known to all ranks by then."""
    fmt = _format_of(weight)
    if fmt is None:
        return weight.numel() * weight.dtype.itemsize
    return math.prod(fmt.qdata_shape(*weight.shape)) * fmt.element.storage_dtype.itemsize


def _copy_bytes(weight: torch.Tensor) -> int:
    """The copy that a product makes: of a master the quantized one, of a quantized weight the transposed one."""
    fmt = _format_of(weight)
    if fmt is None:
        return 0
    local = _compat.local_of(weight)
    if isinstance(local, MasterWeightTensor):
        return fmt.nbytes(*weight.shape, scale_per_matrix=local.config.scale_per_expert)
    # The transposed one shares the tensor scale.
    return fmt.nbytes(*weight.shape) - torch.float32.itemsize * fmt.has_global_scale


def _states(weights: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], optimizer: Optimizer) -> int:
    """Bytes of an optimizer's states after a step of such weights, taken on the meta device."""
    stepped = [nn.Parameter(torch.empty(p.shape, dtype=dtype, device="meta")) for p, dtype in zip(weights, dtypes)]
    if not stepped:
        return 0
    for p in stepped:
        p.grad = torch.empty_like(p)
    optimizer = optimizer.inner if isinstance(optimizer, MasterWeightOptimizer) else optimizer
    make: Any = optimizer
    options: dict[str, Any] = {}
    if isinstance(optimizer, torch.optim.Optimizer):
        make = type(optimizer)
        known = inspect.signature(make).parameters
        # Fused steps have no meta kernels, and the same states.
        options = {name: value for name, value in optimizer.defaults.items() if name in known and name != "fused"}
    made = make(stepped, **options)
    made.step()
    return nbytes_of([x for state in made.state.values() for x in state.values() if isinstance(x, torch.Tensor)])
