"""`model.bfloat16()`, `.to(..)` and the like, of modules that hold converted weights.

PyTorch swaps such a Parameter for another (`torch.utils.swap_tensors`), refuses where a graph still holds it, and has
then changed half of the model. A plain Parameter stays what it is and takes other `data`, which is done here too: what
holds it (an optimizer, the reducer of DistributedDataParallel, a graph) goes on holding the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor


def move_whole() -> None:
    """Make modules take converted weights along whole, or refuse before anything changed; called by a conversion."""
    _compat.wrap_module_apply(_apply)


def _apply(apply: Callable[..., Any], module: nn.Module, fn: Callable[..., Any], recurse: bool) -> nn.Module:
    """`apply(module, fn, recurse)`, which is PyTorch's, but for converted weights."""
    tables = [_compat.parameters_of(m) for m in (module.modules() if recurse else [module])]
    converted = [
        (table, name, p) for table in tables for name, p in table.items() if p is not None and _is_converted(p)
    ]
    places = [(table, name, weight) for table, name, weight in converted if _takes_data(fn, name, weight)]
    # PyTorch passes over what is None.
    for table, name, _ in places:
        table[name] = None
    try:
        apply(module, fn, recurse)
    finally:
        for table, name, weight in places:
            table[name] = weight
    for weight in {id(weight): weight for _, _, weight in places}.values():
        _move(weight, fn)
    return module


def _is_converted(p: object) -> TypeGuard[nn.Parameter]:
    return isinstance(p, (MasterWeightTensor, QuantizedTensor))


def _takes_data(fn: Callable[..., Any], name: str, weight: nn.Parameter) -> bool:
    """Whether `weight` can take what `fn` makes of it as data; PyTorch swaps what moves to or from the meta device.

    Raises what `fn` raises of a part without elements, and where PyTorch would refuse to swap.
    """
    with torch.no_grad():
        moved = fn(weight.detach()[:0])
    takes = weight.is_meta == moved.is_meta
    if not takes and _compat.is_held(weight):
        raise RuntimeError(
            f"{name} {list(weight.shape)} cannot move from {weight.device} to {moved.device} while a graph or another "
            "object holds it, and nothing was changed; drop outputs and losses (del output, loss) before"
        )
    return takes


def _move(weight: nn.Parameter, fn: Callable[..., Any]) -> None:
    grad, weight.grad = weight.grad, None
    with torch.no_grad():
        new = fn(weight)
        if new is not weight:
            with _compat.no_torch_function():
                weight.data = new
            vars(weight).update(vars(new))
        if grad is not None:
            grad.data = fn(grad)
    weight.grad = grad
