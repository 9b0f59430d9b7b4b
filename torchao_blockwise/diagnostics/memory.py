"""Memory: bytes that training a model takes, by what takes them, beside the same model in bf16.

Predicted without values: the model's step runs on fake tensors, which have shapes and no memory. Measured by a real
step, which is undone. Both count the same way: storages, each once, from the operation that makes it on.
"""

from __future__ import annotations

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
    bf16_of,
    fake_of,
    nbytes_of,
    real_of,
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
    """Bytes of a training step; None for what was not looked at.

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
    copies: int | None = None
    gradients: int | None = None
    saved: int | None = None
    peak: int | None = None
    allocated: int | None = None

    def with_step(self, step: Step) -> Bytes:
        """The same with what a step took."""
        peak = self.weights + self.buffers + step.held_before + step.peak
        return replace(self, copies=step.copies, gradients=step.gradients, saved=step.saved, peak=peak)


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
    """The bytes that a training step of `model` takes, predicted and measured, beside bf16 of the same model.

    model: converted or not, fused, with experts, with checkpointing; on a CPU, a GPU, or on the meta device, where the
        prediction is all.
    batch: what the model is called with; one mapping is keyword arguments. Without it nothing is run: what depends on
        activations is left out, and the largest weight's copy stands for the copies.
    loss: what the model returns -> a scalar; default its `loss`, or else the sum of all that it returns.
    optimizer: whose states are counted: an optimizer that has stepped, or a class, whose states are those after a step.

    Of the model nothing changes: gradients, buffers, random states, training modes. It runs in training mode, under the
    caller's autocast. On a GPU the measured step runs twice, and the first one is not counted.
    Raises ValueError for a model that ranks share, and where nothing that the model returns asks for a gradient.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    weights = list(model.parameters())
    if batch and any(_compat.local_of(p) is not p for p in weights):
        raise ValueError("memory_report: ranks share this model; ask before fully_shard, or without a batch")
    at_rest, plain = _at_rest(model, optimizer), _at_rest_in_bf16(model, optimizer)
    fp32 = sum(p.nbytes for p in weights if p.dtype is torch.float32 and not isinstance(p, QuantizedTensor))
    notes = []
    if fp32:
        notes.append(
            f"{human_bytes(fp32)} of the weights are float32, which the column bf16 counts in bf16; call it with "
            "model.bfloat16() to see the difference that the recipe makes by itself"
        )
    if not batch:
        plain, at_rest = _without_step(plain, weights, in_bf16=True), _without_step(at_rest, weights)
        return MemoryReport(plain, at_rest, None, tuple(notes))
    columns, measured = [plain, at_rest], None
    with undone(model):
        for i, (name, make) in enumerate({"bf16": bf16_of, "the prediction": fake_of}.items()):
            try:
                columns[i] = columns[i].with_step(run_step(make(model, batch), loss))
            except NothingToDifferentiate:
                raise
            except Exception as error:
                # Code that asks for values, say. What is real can be measured all the same.
                notes.append(f"{name} needs values: {type(error).__name__}: {error}".splitlines()[0])
        if not any(p.is_meta for p in weights):
            step, allocated = _measured_step(model, batch, loss)
            measured = replace(at_rest.with_step(step), states=_states_there_are(optimizer), gathered=None)
            if allocated is not None:
                measured = replace(measured, allocated=measured.weights + measured.buffers + allocated)
    return MemoryReport(columns[0], columns[1], measured, tuple(notes))


def _measured_step(model: nn.Module, batch: Sequence[Any], loss: Loss | None) -> tuple[Step, int | None]:
    """(a real step, the allocator's peak of it beyond what was there before); on a GPU of a second one."""
    if not any(p.is_cuda for p in model.parameters()):
        return run_step(real_of(model, batch), loss), None
    run_step(real_of(model, batch), loss)
    run = real_of(model, batch)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = run_step(run, loss)
    return step, torch.cuda.max_memory_allocated() - before


# --- what depends on no activation ------------------------------------------------------------------------------------


def _at_rest(model: nn.Module, optimizer: Optimizer) -> Bytes:
    weights = list(model.parameters())
    trained = [p for p in weights if p.requires_grad]
    # The optimizer of a quantized Parameter steps an fp32 master.
    masters = [p for p in trained if isinstance(_compat.local_of(p), QuantizedTensor)]
    others = [p for p in trained if not isinstance(_compat.local_of(p), QuantizedTensor)]
    states = _states([(p, torch.float32) for p in masters] + [(p, p.dtype) for p in others], optimizer)
    states += sum(p.numel() * torch.float32.itemsize for p in masters)
    buffers = nbytes_of(list(model.buffers()))
    return Bytes(nbytes_of(weights), buffers, states, gathered=sum(_payload_bytes(p) for p in weights))


def _at_rest_in_bf16(model: nn.Module, optimizer: Optimizer) -> Bytes:
    weights = sum(_bf16_bytes(p) for p in model.parameters())
    states = _states([(p, torch.bfloat16) for p in model.parameters() if p.requires_grad], optimizer)
    return Bytes(weights, sum(_bf16_bytes(x) for x in model.buffers()), states, gathered=weights)


def _without_step(column: Bytes, weights: Sequence[torch.Tensor], in_bf16: bool = False) -> Bytes:
    """A gradient for each trained Parameter, and the largest copy of a weight: there is one at once."""
    copies = 0 if in_bf16 else max((_copy_bytes(p) for p in weights), default=0)
    trained = [p for p in weights if p.requires_grad]
    gradients = sum(_bf16_bytes(p) if in_bf16 else p.numel() * p.dtype.itemsize for p in trained)
    return replace(column, copies=copies, gradients=gradients)


def _bf16_bytes(x: torch.Tensor) -> int:
    return x.numel() * (torch.bfloat16.itemsize if x.is_floating_point() else x.dtype.itemsize)


def _format_of(weight: torch.Tensor) -> BlockFormat | None:
    weight = _compat.local_of(weight)
    if isinstance(weight, MasterWeightTensor):
        return weight.config.weight_format
    return weight.fmt if isinstance(weight, QuantizedTensor) else None


def _payload_bytes(weight: torch.Tensor) -> int:
    """What FSDP2 gathers of a weight; scales and amaxes are known to all ranks by then."""
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


def _states(weights: Sequence[tuple[torch.Tensor, torch.dtype]], optimizer: Optimizer) -> int:
    """Bytes of an optimizer's states after a step of such weights, taken on the meta device."""
    stepped = [nn.Parameter(torch.empty(p.shape, dtype=dtype, device="meta")) for p, dtype in weights]
    if not stepped:
        return 0
    for p in stepped:
        p.grad = torch.empty_like(p)
    made = _maker(optimizer)(stepped)
    made.step()
    return _bytes_of_states(made)


def _maker(optimizer: Optimizer) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    if isinstance(optimizer, MasterWeightOptimizer):
        optimizer = optimizer.inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    cls: Any = type(optimizer)
    known = inspect.signature(cls).parameters
    # Fused steps have no meta kernels, and the same states.
    options = {name: value for name, value in optimizer.defaults.items() if name in known and name != "fused"}
    return lambda weights: cls(weights, **options)


def _states_there_are(optimizer: Optimizer) -> int | None:
    """Bytes of the states of an optimizer that has stepped, and of masters that it has beside the model."""
    if not isinstance(optimizer, torch.optim.Optimizer) or not optimizer.state:
        return None
    if not isinstance(optimizer, MasterWeightOptimizer):
        return _bytes_of_states(optimizer)
    of_model = {id(p) for group in optimizer.param_groups for p in group["params"]}
    stepped = [p for group in optimizer.inner.param_groups for p in group["params"]]
    return _bytes_of_states(optimizer.inner) + nbytes_of([p for p in stepped if id(p) not in of_model])


def _bytes_of_states(optimizer: torch.optim.Optimizer) -> int:
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    return nbytes_of(states)
