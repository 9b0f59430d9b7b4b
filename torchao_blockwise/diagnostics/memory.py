"""Memory of training a model, by kind of tensor, compared with the same model before its conversion.

The prediction runs a training step with fake tensors, which have shapes but no memory. The measurement runs a real
step, which is undone. Both count the bytes of storages, each once, from the operation that allocates it.
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
from torchao_blockwise.diagnostics import steps
from torchao_blockwise.diagnostics.steps import Loss
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard, QuantizedTensor

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
    """Bytes of a training step; None if they were not counted.

    weights: Parameters between steps, with the quantized shards that FSDP2 gathers. buffers: the model's buffers.
    gradients: gradients of Parameters.
    copies: the peak of quantized copies of weights, which GEMMs make.
    saved: tensors that autograd saves in a forward pass, without Parameters, buffers and the batch.
    states: optimizer states, and masters of quantized Parameters.
    gathered: what each rank receives in a forward pass under FSDP2, if all Parameters are sharded.
    peak: weights, buffers, and the peak of what forward and backward allocate.
    allocated: the peak reported by PyTorch's allocator, on a GPU.
    """

    weights: int
    buffers: int
    states: int | None
    gathered: int | None
    gradients: int
    copies: int | None = None
    saved: int | None = None
    peak: int | None = None
    allocated: int | None = None


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a model's training step. Print it for a table; `to_dict()` returns the data.

    unconverted: for the same model with plain Parameters in the same dtypes. dtypes: of these, as "float32".
    predicted: for this model. measured: by a real step, None if none was run. notes: predictions that failed, and why.
    """

    unconverted: Bytes
    dtypes: str
    predicted: Bytes
    measured: Bytes | None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, ready for JSON; bytes as {"weights": ..., "gradients": ...}."""
        return {**asdict(self), "notes": list(self.notes)}

    def __str__(self) -> str:
        columns = {
            f"unconverted, {self.dtypes}": self.unconverted,
            "predicted": self.predicted,
            "measured": self.measured,
        }
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
    accumulate: bool = False,
) -> MemoryReport:
    """Return the bytes that a training step of `model` takes, predicted and measured, and those without conversion.

    model: converted or not, fused, with experts, with checkpointing; on a CPU, a GPU, or on the meta device, which
        gives a prediction only. For a model sharded by FSDP2 or other DTensors, bytes are those of this rank.
    batch: the arguments of the model; a single mapping is passed as keyword arguments. Without a batch nothing is run,
        and activations and quantized copies are left out.
    loss: output of the model -> a scalar; default the output's `loss`, or else the sum of all returned tensors.
    optimizer: a class or an optimizer, whose states after a step are predicted.
    accumulate: whether an optimizer step has several microbatches, as with `gradient_accumulation_steps` of Trainer.
        Gradients then exist before a forward and backward pass.

    The model does not change: gradients, buffers, RNG states and training modes are restored. It runs in training mode,
    under the caller's autocast. On a GPU, the measured step runs twice, and the first run is not counted.
    Raises ValueError for a sharded model with a batch, and if no output of the model requires a gradient.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    weights, buffers = list(model.parameters()), list(model.buffers())
    if batch and any(_compat.local_of(p) is not p for p in weights):
        raise ValueError("memory_report: this model is sharded; call it before fully_shard, or without a batch")
    columns = {
        "the unconverted model": _at_rest(weights, buffers, optimizer, is_converted=False),
        "the prediction": _at_rest(weights, buffers, optimizer, is_converted=True),
    }
    notes, measured, microbatches = [], None, 2 if accumulate else 1
    with steps.undone(model) if batch else contextlib.nullcontext():
        for name in columns if batch else ():
            try:
                step = steps.run_fake_step(model, batch, loss, name == "the prediction", microbatches)
                columns[name] = _with_step(columns[name], step)
            except steps.NothingToDifferentiate:
                raise
            except Exception as error:
                # For example, the model reads values. The real step can still be measured.
                notes.append(f"activations are missing from {name}: {type(error).__name__}: {error}".splitlines()[0])
        if batch and not any(p.is_meta for p in weights):
            measured = _measured(model, batch, loss, columns["the prediction"], microbatches)
    dtypes = " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in weights}))
    return MemoryReport(columns["the unconverted model"], dtypes, columns["the prediction"], measured, tuple(notes))


def _with_step(at_rest: Bytes, step: dict[str, int]) -> Bytes:
    return replace(at_rest, **{**step, "peak": at_rest.weights + at_rest.buffers + step["peak"]})


def _measured(model: nn.Module, batch: Sequence[Any], loss: Loss | None, at_rest: Bytes, microbatches: int) -> Bytes:
    """Return the bytes of a real step; on a GPU those of the second step, with the allocator's peak."""
    at_rest = replace(at_rest, states=None, gathered=None)
    is_on_gpu = any(p.is_cuda for p in model.parameters())
    for _ in range(1 + is_on_gpu):
        tensors, before = steps.replacements(model, torch.Tensor.detach, torch.clone), 0
        if is_on_gpu:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        step = _with_step(at_rest, steps.run_step(model, tensors, batch, loss, microbatches))
    if not is_on_gpu:
        return step
    return replace(step, allocated=step.weights + step.buffers + torch.cuda.max_memory_allocated() - before)


# --- bytes that do not depend on activations --------------------------------------------------------------------------


def _at_rest(
    weights: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], optimizer: Optimizer, is_converted: bool
) -> Bytes:
    """Return this rank's bytes without activations: one gradient for each trained Parameter."""
    local: list[Any] = [_compat.local_of(p) for p in weights]
    trained = [x for p, x in zip(weights, local) if p.requires_grad]
    if is_converted:
        # Of a master weight, FSDP2 keeps the quantized shard that it gathers.
        shards = [shard for x in local if isinstance(shard := getattr(x, "shard", None), QuantizedShard)]
        held, payload = [*weights, *shards], sum(map(_payload_bytes, weights))
    else:
        held, payload = [_plain(x) for x in local], sum(p.numel() * p.dtype.itemsize for p in weights)
        trained = [_plain(x) for x in trained]
    # The optimizer keeps an fp32 master of a quantized Parameter.
    masters = [x for x in trained if isinstance(x, QuantizedTensor)]
    return Bytes(
        weights=steps.nbytes_of(held),
        buffers=steps.nbytes_of(buffers),
        states=_states(trained, optimizer) + sum(x.numel() * torch.float32.itemsize for x in masters),
        gathered=payload,
        gradients=sum(x.numel() * x.dtype.itemsize for x in trained),
    )


def _plain(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _payload_bytes(weight: torch.Tensor) -> int:
    """Return the bytes of a weight that FSDP2 gathers; scales are already known to all ranks."""
    local: Any = _compat.local_of(weight)
    if not isinstance(local, (MasterWeightTensor, QuantizedTensor)):
        return weight.numel() * weight.dtype.itemsize
    return math.prod(local.fmt.qdata_shape(*weight.shape)) * local.fmt.element.storage_dtype.itemsize


def _states(weights: Sequence[torch.Tensor], optimizer: Optimizer) -> int:
    """Return the bytes of an optimizer's states after a step with such weights, run on the meta device."""
    quantized = [isinstance(p, QuantizedTensor) for p in weights]
    dtypes = [torch.float32 if is_quantized else p.dtype for p, is_quantized in zip(weights, quantized)]
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
        # Fused optimizers have no meta kernels, but the same states.
        options = {name: value for name, value in optimizer.defaults.items() if name in known and name != "fused"}
    made = make(stepped, **options)
    # PyTorch 2.11 reads the count of steps, a tensor on the default device.
    with torch.device("cpu"):
        made.step()
    return steps.nbytes_of([x for state in made.state.values() for x in state.values() if isinstance(x, torch.Tensor)])
