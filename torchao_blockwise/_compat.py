"""Names that PyTorch and torchao do not promise to keep: each is used here and nowhere else."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import types

import torch
from torch.utils import _pytree as pytree  # noqa: F401  # imported from here


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported; cheap, imports nothing."""
    return importlib.util.find_spec("triton") is not None


def scaling_types():
    """(ScalingType, SwizzleType) of `torch.nn.functional.scaled_mm`."""
    from torch.nn.functional import ScalingType, SwizzleType

    return ScalingType, SwizzleType


def quantize_call():
    """(model, filter_fn) of the `torchao.quantization.quantize_` call that is on the stack, or (None, None).

    torchao hands a handler one module at a time. To refuse a model before its first layer changes, and to name the
    layer, a handler must see the whole call; torchao offers no hook for that, so this reads it off the stack.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "quantize_" and frame.f_globals.get("__name__") == "torchao.quantization.quant_api":
            return frame.f_locals.get("model"), frame.f_locals.get("filter_fn")
        frame = frame.f_back
    return None, None


def default_filter():
    """The filter_fn that `torchao.quantization.quantize_` uses when none is given."""
    from torchao.quantization import quantize_

    return inspect.signature(quantize_).parameters["filter_fn"].default


def allow_config_module(module: str) -> None:
    """Let `torchao.core.config.config_from_dict` rebuild configs that are defined in `module`."""
    from torchao.core import config

    config.ALLOWED_AO_MODULES.add(module)


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The parameters that `module` itself holds by name; shared ones under each name."""
    return module._parameters


def state_dict_hooks_of(module: torch.nn.Module) -> list:
    """The hooks that run when `module` has filled a state dict."""
    return list(module._state_dict_hooks.values())


def make_wrapper(cls, shape, **options) -> torch.Tensor:
    """A tensor of the subclass `cls` that reports `shape` and `options` and has no storage of its own."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, **options)


def schema_of(op):
    """The schema of an operator overload."""
    return op._schema


def is_capturing(x: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured that would record operations on `x`."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def version_of(x: torch.Tensor) -> int:
    """How often `x` or an alias of it was changed in place."""
    return x._version


def is_held(x: torch.Tensor) -> bool:
    """Whether something beside its Python object holds `x`, so that `torch.utils.swap_tensors` would refuse it."""
    if x._use_count() == 1:
        return False
    if x._use_count() > 2 or not (x.is_leaf and x.requires_grad):
        return True
    # A gradient accumulator may be the second holder; asking for it makes one, a third holder, if there is none.
    accumulator = torch.autograd.graph.get_gradient_edge(x).node
    return accumulator is None or x._use_count() > 2


def no_torch_function():
    """A context in which `__torch_function__` of subclasses is not called, for use inside of it."""
    return torch._C.DisableTorchFunctionSubclass()


def counting_changes():
    """A context for `__torch_dispatch__`: operations on inner tensors count changes, and views share their counts.

    PyTorch excludes the kernels that keep version counters while a subclass dispatches.
    """
    exclude = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.ADInplaceOrView)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude)


def register_sharding(op, rule) -> None:
    """Give `op` a DTensor sharding rule whose answers are cached by all of the op's arguments.

    By itself PyTorch caches by the arguments from the first integer on, and would give one format another's rule.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(op)(rule)
    arguments = schema_of(op).arguments
    first_option = next((i for i, arg in enumerate(arguments) if "Tensor" not in str(arg.type)), len(arguments))
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op].static_argnum = first_option
