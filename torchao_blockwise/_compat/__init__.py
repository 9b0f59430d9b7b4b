"""Private names of PyTorch and torchao, used only in this folder."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
import torch.utils._pytree

from torchao_blockwise._compat import torch_fsdp

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

pytree = torch.utils._pytree

# An operator overload, the first argument of `__torch_dispatch__`.
Operation: TypeAlias = "torch._ops.OpOverload[..., Any]"
# The other arguments of `__torch_function__` and `__torch_dispatch__`.
Function: TypeAlias = Callable[..., Any]
Types: TypeAlias = Sequence[type]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]

_Wrapper = TypeVar("_Wrapper", bound=torch.Tensor)
_F = TypeVar("_F", bound=Callable[..., Any])


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; does not import it."""
    return importlib.util.find_spec("triton") is not None


# Copies many tensors in few launches; exists in torch 2.11 to 2.13.
foreach_copy_ = torch._foreach_copy_

# `torch.nn.functional.grouped_mm` calls it and dispatches it to tensor subclasses; models call it too.
grouped_mm = torch._grouped_mm


def grouped_products_of_others() -> list[Operation]:
    """Return operations of imported libraries that compute the same as `grouped_mm` from (x, weight, offs).

    transformers uses its own if it expects that `grouped_mm` does not compile: for weights other than bfloat16.
    """
    op = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return [] if op is None else [op, op.default]


def jagged_like(x: Any, values: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor with the sequences of the jagged tensor `x`, and other values."""
    return torch.nested.nested_tensor_from_jagged(
        values, x.offsets(), x.lengths(), x._ragged_idx, x._maybe_min_seqlen, x._maybe_max_seqlen
    )


def quantize_call() -> tuple[Any, Any, str | None]:
    """Return (model, filter_fn, name of the calling module) of the `quantize_` call on the stack, or three Nones.

    torchao passes a handler one module at a time. To refuse a model before its first layer changes, and to name the
    layer, a handler needs the arguments of `quantize_`. torchao (0.17, 0.18) does not pass them on, so this reads the
    stack.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "quantize_" and frame.f_globals.get("__name__") == "torchao.quantization.quant_api":
            caller = None if frame.f_back is None else frame.f_back.f_globals.get("__name__")
            return frame.f_locals.get("model"), frame.f_locals.get("filter_fn"), caller
        frame = frame.f_back
    return None, None, None


def default_filter() -> Callable[[torch.nn.Module, str], bool]:
    """Return the default filter_fn of `torchao.quantization.quantize_`."""
    from torchao.quantization import quantize_

    return inspect.signature(quantize_).parameters["filter_fn"].default


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return the parameters that `module` directly holds, by name; shared ones under each name."""
    return module._parameters


def saved_buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers that `module` directly holds, by name."""
    left_out = module._non_persistent_buffers_set
    return {name: x for name, x in module._buffers.items() if x is not None and name not in left_out}


def state_dict_hooks_of(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Return the state dict hooks of `module`, which run after it has filled a state dict."""
    return list(module._state_dict_hooks.values())


def remove_state_dict_hooks(module: torch.nn.Module, hooks: Collection[Callable[..., Any]]) -> None:
    """Remove these `state_dict` and `load_state_dict` hooks from `module`."""
    for registered in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for key in [key for key, hook in registered.items() if getattr(hook, "hook", hook) in hooks]:
            del registered[key]


def make_wrapper(
    cls: type[_Wrapper], inner: torch.Tensor, shape: Sequence[int], strides: Sequence[int] | None = None, **options: Any
) -> _Wrapper:
    """Return a tensor of the subclass `cls` around `inner`, with this shape and these options, and without storage.

    By default, it has the dtype of `inner`. If `inner` is not an inference tensor, neither is the wrapper, so that it
    counts changes and can be a view of such tensors under inference mode too.
    """
    if not torch.compiler.is_dynamo_compiling():
        _keep_graphs_apart()
        torch_fsdp.install()
    options = {"strides": strides, "dtype": inner.dtype, "device": inner.device, **options}
    if not torch.is_inference_mode_enabled() or inner.is_inference():
        return torch.Tensor._make_wrapper_subclass(cls, shape, **options)
    with torch.inference_mode(False):
        return torch.Tensor._make_wrapper_subclass(cls, shape, **options)


@functools.cache
def _keep_graphs_apart() -> None:
    """Distinguish graphs in torch.compile's disk cache by recipe and by version of this package, once in a process.

    Inductor finds a stored graph by a hash of the traced graph and its inputs. Tensor subclasses of this package
    provide a hash (`tensors.base`), but the hash of a DTensor covers only its placement and not its local tensor. And
    operations are hashed by name, so a graph stored by an older version, with other shapes and strides, could be
    reused. This runs when a weight is made, since importing the package must not change PyTorch.
    """
    config, version = torch.compiler.config, sys.modules["torchao_blockwise"].__version__
    config.cache_key_tag = f"{config.cache_key_tag} torchao_blockwise={version}".strip()
    if not torch.distributed.is_available():
        return
    from torch.distributed.tensor import DTensor

    dtensor: Any = DTensor
    # Without such a method, PyTorch 2.11 flattens the DTensor, and hashes its local tensor.
    if hash_of_placement := getattr(dtensor, "_stable_hash_for_caching", None):
        dtensor._stable_hash_for_caching = lambda x: (
            hash_of_placement(x) + getattr(x._local_tensor, "_stable_hash_for_caching", str)()
        )


def never_compiled(function: _F) -> _F:
    """Mark `function` so that Dynamo compiles neither it nor its callees when code that runs eagerly calls it."""
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
    return function


def reduced_wrapper(x: torch.Tensor) -> tuple[Any, ...]:
    """Return the result of PyTorch's `__reduce_ex__` for a tensor subclass without storage, with any storage offset."""
    size, strides, offset = tuple(x.size()), x.stride(), x.storage_offset()
    args = (type(x), x.dtype, size, strides, offset, x.layout, x.device, x.requires_grad)
    rebuild, state = torch._utils._rebuild_wrapper_subclass, torch._utils._get_obj_state(x)
    return torch._tensor._rebuild_from_type_v2, (rebuild, type(x), args, state)


def decomposed(op: Operation, args: Args, kwargs: Kwargs) -> Any:
    """Run a composite operation by its decomposition, or return NotImplemented if there is none or it is not needed.

    Under inference mode composite operations such as `mT` and `to` are dispatched to tensor subclasses; otherwise
    PyTorch decomposes them first.
    """
    return op.decompose(*args, **kwargs) if torch.is_inference_mode_enabled() else NotImplemented


def schema_of(op: Operation) -> torch.FunctionSchema:
    """Return the schema of an operator overload."""
    return op._schema


@functools.cache
def is_view(op: Operation) -> bool:
    """Whether `op` returns views of its argument."""
    aliases = [value.alias_info for value in schema_of(op).returns]
    return not schema_of(op).is_mutable and aliases != [] and None not in aliases


def version_of(x: torch.Tensor) -> int:
    """Return the version counter of `x`: the number of in-place changes of `x` and its aliases."""
    return x._version


def is_held(x: torch.Tensor) -> bool:
    """Whether `x` has owners besides its Python object, so that `torch.utils.swap_tensors` would refuse it."""
    holders: Callable[[], int] = x._use_count  # type: ignore[attr-defined]
    if holders() == 1:
        return False
    if holders() > 2 or not (x.is_leaf and x.requires_grad):
        return True
    # The second owner may be a gradient accumulator. If there is none, `get_gradient_edge` creates one, a third owner.
    accumulator = torch.autograd.graph.get_gradient_edge(x).node
    return accumulator is None or holders() > 2


# A context in which `__torch_function__` of subclasses is not called.
no_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass


def counting_changes() -> AbstractContextManager[object]:
    """A context for `__torch_dispatch__` in which operations on inner tensors update version counters.

    PyTorch excludes the kernels that maintain version counters while a subclass dispatches.
    """
    exclude = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.ADInplaceOrView)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude)


def all_to_all(x: torch.Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> torch.Tensor:
    """Exchange rows of `x`, differentiably. received, sent: rows from and to each rank.

    PyTorch 2.13 deprecates the public function with a warning, and names this one.
    """
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    return waited(all_to_all_single_autograd(x, received, sent, group))


def waited(x: torch.Tensor) -> torch.Tensor:
    """Wait for the collective that computes `x`, if there is one, and return a plain tensor."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x


def local_of(x: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, the same object; any other tensor unchanged."""
    return getattr(x, "_local_tensor", x)


def with_local(x: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor with this local tensor and the placement of `x`, or `local` if `x` is not a DTensor.

    `DTensor.from_local` would move offloaded values to the device of the mesh.
    """
    if not hasattr(x, "_local_tensor"):
        return local
    from torch.distributed.tensor import DTensor

    spec = x._spec  # type: ignore[attr-defined]
    if spec.tensor_meta is not None and spec.tensor_meta.dtype != local.dtype:
        spec = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)


def wait_for(work: torch.ScriptObject) -> None:
    """Wait for a collective by the handle that its operation returned, which may be empty.

    The handle is empty for a synchronous NCCL collective, which runs on the current stream.
    """
    from torch.distributed import Work

    handle = Work.unbox(work)
    if handle is not None:
        handle.wait()


def max_over_ranks(x: torch.Tensor, group: str) -> torch.Tensor:
    """Return the elementwise maximum over the ranks of the process group with this name; can be compiled."""
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_reduce(x, "max", group))


def in_backward() -> bool:
    """Whether a backward pass, including recomputation, runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def default_store() -> Any:
    """Return the key-value store with which `torch.distributed` was initialized."""
    return torch.distributed.distributed_c10d._get_default_store()


def keeping_version(x: torch.Tensor) -> AbstractContextManager[None]:
    """A context that preserves the version counter of `x`, for restoring the values that autograd saved."""
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(x)
