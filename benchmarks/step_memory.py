"""What a layer's step has allocated on a GPU, by parts, as PyTorch's allocator counts it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

import torch

# To find a moment in which nothing else frees memory.
_ATTEMPTS = 3


class StepMemory(NamedTuple):
    """Bytes of a layer and of its step, without the step's inputs and what others have allocated.

    weights: of the layer between steps.
    gradients: of the weights and of x, after backward.
    held: between forward and backward, without weights; y is held by the caller.
    step: at its peak, with everything above. What the layer saves of x is x itself in high precision, which counts as
        an input here.
    step_owning_x: the peak of a step that makes x, so that x lives as long as the layer needs it: what a model holds
        whose next layer needs no x.
    """

    weights: int
    gradients: int
    held: int
    step: int
    step_owning_x: int


class Allocator:
    """The bytes that PyTorch has allocated on the current GPU, and the most that they were since `reset`."""

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()


def allocator_of(device: torch.device) -> Allocator | None:
    """What counts the bytes on `device`; None where nothing does."""
    return Allocator() if device.type == "cuda" else None


def step_memory(make: Callable, x: torch.Tensor, dy: torch.Tensor) -> StepMemory | None:
    """The memory of a step of the layer that `make` gives; None on devices without PyTorch's allocator.

    make: () -> Layer, a new one, which alone is counted: others, of other recipes, may be there.
    x, dy: inputs that exist, x with requires_grad. Everything that runs once, as libraries' workspaces do, should have
    run before.
    """
    allocator = allocator_of(x.device)
    if allocator is None:
        return None
    for _ in range(_ATTEMPTS):
        gc.collect()
        before = allocator.allocated()
        memory = _step_memory(make, x, dy, allocator)
        gc.collect()
        # Otherwise others' tensors were freed meanwhile, by a thread of autograd that was late, say.
        if allocator.allocated() == before:
            break
    return memory


def _step_memory(make: Callable, x: torch.Tensor, dy: torch.Tensor, allocator: Allocator) -> StepMemory:
    base = allocator.allocated()
    layer = make()

    def forget():
        for t in (x, *layer.weights):
            t.grad = None

    def step(own_x: bool = False) -> int:
        """Bytes between forward and backward; gradients of the step before are freed first."""
        forget()
        y = layer.call(x.clone() if own_x else x)
        held = allocator.allocated()
        y.backward(dy)
        return held

    def peak(own_x: bool) -> int:
        forget()
        allocator.reset()
        step(own_x)
        return allocator.peak() - base

    for _ in range(2):
        # A weight that is quantized itself has its values until a product has used it.
        step()
    after = allocator.allocated()
    forget()
    resident = allocator.allocated()
    held = step() - resident
    peaks = peak(False), peak(True)
    forget()
    return StepMemory(resident - base, after - resident, held, *peaks)
