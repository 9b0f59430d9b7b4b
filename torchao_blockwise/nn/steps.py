"""Steps that every layer here takes, fused or not, around its GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchao_blockwise import _compat, ops
from torchao_blockwise._compat import modes
from torchao_blockwise.formats import Groups, Operand
from torchao_blockwise.nn.contraction import operand_of
from torchao_blockwise.ops.backend import may_have_kernels
from torchao_blockwise.tensors import QuantizedTensor, TrainingConfig


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of what a layer computes of `x`: autocast's, else that of `x`."""
    device = x.device.type
    # There is no autocast for meta tensors, and asking for its state raises.
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def cast_for_compute(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype of `compute_dtype`; integers are left for the layer to refuse."""
    # A cast that changes nothing returns the same tensor, which in a graph of DDP's optimizer then has two names: it
    # cannot compile a part of the graph that takes one tensor twice.
    dtype = compute_dtype(x) if x.is_floating_point() else x.dtype
    return x if x.dtype == dtype else x.to(dtype)


class _NoGraph:
    """What stands for the context of an autograd function where there will be no backward."""

    needs_input_grad = (False,) * 8

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


def apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    """`function.apply(*args)`; where gradients are off its forward alone, told that no gradient is needed.

    By itself a function is told which inputs ask for gradients, also where they are off: in evaluation, and in the
    first pass of reentrant checkpointing.
    """
    if torch.is_grad_enabled():
        return function.apply(*args)
    return function.forward(_NoGraph(), *args)


def named(work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)`, under a name in profiles, such as `torchao_blockwise.linear_layer.forward`."""
    if torch.compiler.is_compiling() or not modes.is_profiling():
        return work(*args)
    name = f"{work.__module__.rpartition('.')[2]}.{work.__name__.lstrip('_')}"
    with torch.profiler.record_function(f"torchao_blockwise.{name}"):
        return work(*args)


def save_for_backward(ctx: Any, weights: tuple[Any, ...], *tensors: torch.Tensor | None) -> None:
    """Keep `weights` and what else backward reads, so that a weight which changes before is refused there.

    A compiled graph reads the payload of a quantized weight, so there its tensors are saved beside it: PyTorch checks
    those that were saved by name, and not what a graph reads besides.
    """
    held: list[torch.Tensor | None] = []
    if torch.compiler.is_compiling():
        quantized = [weight for weight in weights if isinstance(weight, QuantizedTensor)]
        held = [x for weight in quantized for x in (weight.qdata, weight.scale, weight.global_scale)]
    ctx.save_for_backward(*weights, *tensors, *held)
    ctx.read_in_backward = len(weights) + len(tensors)


def take_saved(ctx: Any, named: int) -> tuple[Any, ...]:
    """What `save_for_backward` was given: so many by themselves, the others in a list; see `_compat.take_saved`.

    All of it lives on in the caller alone.
    """
    saved = _compat.take_saved(ctx)[: ctx.read_in_backward]
    return *saved[:named], list(saved[named:])


def taken(saved: list[Any]) -> tuple[Any, ...]:
    """What is in the list, which is empty then: it lives on in the caller alone."""
    held = tuple(saved)
    saved.clear()
    return held


def columnwise_of(saved: list[Any], config: TrainingConfig, anew: Callable[..., Operand]) -> Callable[[], Operand]:
    """What gives the columnwise copy of an activation: that which was saved, or `anew` of what was saved in its place.

    saved: the copy's `tensors`, or another number of them. It is emptied.
    """

    def columnwise() -> Operand:
        is_copy = len(saved) == 3
        held = taken(saved)
        return operand_of(held, config) if is_copy else anew(*held)

    return columnwise


def saved_groups(group_ends: torch.Tensor | None, tables: torch.Tensor | None) -> Groups | None:
    """Groups from what was saved of them for backward."""
    return None if group_ends is None else Groups(group_ends, tables)


def groups_of(group_ends: torch.Tensor | None, tokens: int, *configs: TrainingConfig) -> Groups | None:
    """The groups of so many tokens, with tables for all operations of a layer of these configs, forward and backward.

    Without tables where operations need none, or make their own because configs differ in format or backend.
    """
    if group_ends is None:
        return None
    wanted, *others = ((config.activation_format, ops.casting_backend(config.backend)) for config in configs)
    fmt, backend = wanted
    needs_none = backend is ops.Backend.REFERENCE or not may_have_kernels(group_ends.device)
    if needs_none or any(other != wanted for other in others):
        return Groups(group_ends)
    return ops.make_groups(group_ends, tokens, fmt, backend=backend)


def grad_bias(dy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Σ of dy [T, N] over tokens, in fp32, rounded to `dtype`."""
    return dy.sum(0, dtype=torch.float32).to(dtype)


def refuse_second_order(layer: str) -> None:
    """Raise NotImplementedError in a backward that is itself to be differentiated."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{layer}: backward through backward (create_graph=True) is not defined in low precision; "
            "keep the layers that need it in high precision (filter_fn)"
        )


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` [.., K] as [T, K]; K may be 0."""
    if x.dim() == 2:
        return x  # and not a second name of it; see `cast_for_compute`
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def as_shape_of(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`out` [T, N] with the leading dims of `x` [.., K]."""
    # No view: hooks of FSDP2 hang on outputs, and an in-place operation on a view of one would leave them behind.
    if x.dim() == 2:
        return out
    return torch.ops.aten._unsafe_view.default(out, [*x.shape[:-1], out.shape[-1]])
