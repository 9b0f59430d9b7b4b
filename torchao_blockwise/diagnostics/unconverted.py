"""Observe GEMMs of layers that are not converted, by intercepting PyTorch functions in the layers' forward passes.

Converted layers report what they quantize themselves; for others, a GEMM is attributed to a layer by its weight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from torchao_blockwise import _compat

# A function of x, the weight, the ends of groups or None, and the result.
SeesProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]


class _Products(TorchFunctionMode):
    def __init__(self, see: SeesProduct) -> None:
        super().__init__()
        self._see, self._grouped = see, (_compat.grouped_mm, *_compat.grouped_products_of_others())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.linear:
            x, weight = (*args, *(kwargs[name] for name in ("input", "weight") if name in kwargs))[:2]
            self._see(x, weight, None, out)
        elif func in self._grouped:
            ends = args[2] if len(args) > 2 else kwargs.get("offs")
            # Without ends this is a batched GEMM, which has no low-precision version.
            if ends is not None and args[0].dim() == 2:
                self._see(args[0], args[1], ends, out)
        return out


def watch_products(modules: Iterable[nn.Module], see: SeesProduct) -> ExitStack:
    """Call `see` for linear and grouped GEMMs in the forward passes of `modules` until the stack is closed."""
    stack = ExitStack()
    # For each thread: the depth of nested modules that are running, and the mode that the outermost one entered.
    running = threading.local()

    def enter(module: nn.Module, args: Any) -> None:
        running.depth = getattr(running, "depth", 0) + 1
        if running.depth == 1:
            running.mode = _Products(see)
            running.mode.__enter__()

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        running.depth -= 1
        if running.depth == 0:
            running.mode.__exit__(None, None, None)

    for module in modules:
        stack.callback(module.register_forward_pre_hook(enter).remove)
        stack.callback(module.register_forward_hook(leave, always_call=True).remove)
    return stack
