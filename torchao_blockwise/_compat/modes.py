"""Dispatch modes, fake tensors, hooks and CUDA graphs: what intercepts or records operations."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# Other names of this module than its own.
__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "is_traceable_wrapper_subclass"]


def without_modes() -> AbstractContextManager[Any]:
    """A context in which no dispatch mode intercepts operations.

    For example, selective checkpointing is a mode that counts operations, and would count those of an observer too.
    """
    return _python_dispatch._disable_current_modes()


def storage_of(x: torch.Tensor) -> int:
    """Return a number that is unique among live storages."""
    return x.untyped_storage()._cdata


# Whether one of PyTorch's profilers runs.
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
# Whether a transform of `torch.func` is active.
has_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
# Whether autograd computes a batch of gradients at once (`is_grads_batched`, `vectorize`).
has_batched_gradients: Callable[[], bool] = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C._dispatch_key_parse("VmapMode")
)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_is_tracing = torch._C._is_tracing
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SEQUENCES = (tuple, list)


def is_traced() -> bool:
    """Whether a compiler traces operations, as `torch.compiler.is_compiling` tells except in PyTorch 2.11.

    There, operations that a tensor subclass overrides by `__torch_function__` may be traced without it.
    """
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def is_intercepted(values: Iterable[Any]) -> bool:
    """Whether an operation on `values` must go through PyTorch's dispatcher.

    That is so for a compiler, a mode (selective checkpointing, a FLOP counter, fake tensors), a profiler, a transform
    of `torch.func`, and for tensors that are subclasses or on the meta device.
    values: tensors, tuples and lists that begin with one, and others.
    """
    # `is_compiling` comes first, because compilers cannot trace the other calls.
    if torch.compiler.is_compiling() or _dispatch_modes() or _function_modes() or is_profiling():
        return True
    if has_transforms() or _is_tracing():
        return True
    for value in values:
        while isinstance(value, _SEQUENCES) and value:
            value = value[0]
        if isinstance(value, torch.Tensor) and (type(value) not in _PLAIN or value.is_meta):
            return True
    return False


def runs_alone(module: torch.nn.Module) -> bool:
    """Whether `module` has no hooks and uses the forward pass of its class."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return not ("forward" in module.__dict__ or any(hooks))


def is_capturing(x: torch.Tensor) -> bool:
    """Whether a CUDA graph captures operations on `x`, or inductor does the warm-up run for its CUDA graphs.

    `torch.compile(mode="reduce-overhead")` begins with that run, in the memory pool of its graphs. Inductor frees the
    pool afterwards, and raises if a tensor that it does not know is still alive in it.
    """
    return x.is_cuda and (torch.cuda.is_current_stream_capturing() or _is_first_run(x.device))


def _is_first_run(device: torch.device) -> bool:
    # Imported only if something was compiled in this mode.
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        manager = trees.get_manager(device.index, create_if_none_exists=False)
    except AssertionError:
        # PyTorch 2.11 raises in a thread without CUDA graphs.
        return False
    # Inductor runs and records its graphs on this stream, and nothing else there.
    return manager is not None and bool(torch.cuda.current_stream(device) == manager.stream)
