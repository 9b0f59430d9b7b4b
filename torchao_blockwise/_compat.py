"""Names that PyTorch and torchao do not promise to keep: each is used here and nowhere else."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree  # noqa: F401  # imported from here


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported; cheap, imports nothing."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def has_gluon() -> bool:
    """Whether Triton's Gluon for Hopper is there, in a version whose names are known: 3.6 or newer."""
    if not has_triton():
        return False
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)


# What `torch.nn.functional.grouped_mm` calls, and tensor subclasses are asked about; models call it too.
grouped_mm = torch._grouped_mm


def grouped_products_of_others() -> list:
    """Operations of libraries in use that do what `grouped_mm` does to (x, weight, offs).

    transformers takes its own where it takes `grouped_mm` not to compile: of weights other than bfloat16.
    """
    op = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return [] if op is None else [op, op.default]


@functools.cache
def has_deep_gemm() -> bool:
    """Whether the package deep_gemm is installed; imports nothing: it loads CUDA libraries."""
    return importlib.util.find_spec("deep_gemm") is not None


def deep_gemm() -> types.ModuleType:
    """The package deep_gemm, which promises no interface to keep."""
    return importlib.import_module("deep_gemm")


def scaling_codes(*names: str) -> list[int]:
    """What `scaled_mm` takes for scalings and swizzles that `torch.nn.functional.scaled_mm` knows by these names."""
    from torch.nn.functional import ScalingType, SwizzleType

    return [(getattr(ScalingType, name, None) or getattr(SwizzleType, name)).value for name in names]


def scaled_mm(a, b, a_scales, a_scalings, a_swizzles, b_scales, b_scalings, b_swizzles, out_dtype) -> torch.Tensor:
    """`torch.nn.functional.scaled_mm` of lists and codes, without the 4 µs that it takes to make these."""
    return torch._scaled_mm_v2(
        a, b, a_scales, a_scalings, a_swizzles, b_scales, b_scalings, b_swizzles, None, out_dtype, (), False
    )


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


def make_wrapper(cls, shape, *, inner: torch.Tensor | None = None, **options) -> torch.Tensor:
    """A tensor of the subclass `cls` that reports `shape` and `options` and has no storage of its own.

    inner: what it holds, and as which it counts changes under inference mode, so that it can be a view of its like.
    """
    if inner is None or not torch.is_inference_mode_enabled() or inner.is_inference():
        return torch.Tensor._make_wrapper_subclass(cls, shape, **options)
    with torch.inference_mode(False):
        return torch.Tensor._make_wrapper_subclass(cls, shape, **options)


def decomposed(op, args, kwargs):
    """What an operation that is made of others gives, by those; NotImplemented where it is none, or none is asked for.

    Under inference mode tensor subclasses are asked about `mT` and `to`, elsewhere about what these are made of.
    """
    return op.decompose(*args, **kwargs) if torch.is_inference_mode_enabled() else NotImplemented


def schema_of(op):
    """The schema of an operator overload."""
    return op._schema


def is_capturing(x: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured that would record operations on `x`."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def capture_id(x: torch.Tensor) -> int | None:
    """What tells the capture of a CUDA graph that would record operations on `x` from all others.

    0 where there is none, None where the driver does not say which.
    """
    if not is_capturing(x):
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
    try:
        get = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    failed = get(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return None if failed else number.value


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


_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms_active = torch._C._are_functorch_transforms_active
_jit_tracing = torch._C._get_tracing_state


def is_watched() -> bool:
    """Whether something may want to see operations: a compiler, a mode, a transform, a profiler or a trace."""
    return (
        torch.compiler.is_compiling()
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or _transforms_active()
        or torch.autograd.profiler._is_profiler_enabled
        or _jit_tracing() is not None
    )


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


class FsdpParameter(NamedTuple):
    """A parameter as FSDP2 shards it: of dim `dim` this rank holds [rank · ⌈n / ranks⌉, ...) in `local`.

    shape: of what the group holds together. dtype: what the mixed precision policy gathers in. mesh_ranks: every rank
    that shards or replicates it. modules: those that hold the very parameter. split_groups: over which tensor
    parallelism has split what the groups of FSDP2 hold.
    """

    source: object
    name: str
    shape: tuple[int, ...]
    dim: int
    rank: int
    ranks: int
    group: torch.distributed.ProcessGroup | None
    mesh_ranks: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    modules: tuple[torch.nn.Module, ...]
    split_groups: tuple[torch.distributed.ProcessGroup, ...]

    @property
    def local(self) -> torch.Tensor:
        """This rank's part; another tensor after a load, a move or FSDP2's first forward pass."""
        return self.source._sharded_local_tensor  # type: ignore[attr-defined]

    @property
    def parameter(self) -> torch.Tensor:
        """The DTensor that optimizers know."""
        return self.source.sharded_param  # type: ignore[attr-defined]


def fsdp_state_of(module: torch.nn.Module):
    """FSDP2's state of a module that `fully_shard` was called on, else None."""
    from torch.distributed.fsdp import FSDPModule

    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def fsdp_scope(state):
    """(owner, states): the states below the root of `state`, and what they share; None before a first forward pass."""
    context = state._state_ctx
    return (context, tuple(context.all_states)) if context.all_states else None


def fsdp_notes(owner) -> dict:
    """A dict that lives as long as `owner`, a state or what states share.

    A weak dictionary would not do: what is noted holds the model, which holds the owner.
    """
    return vars(owner).setdefault("torchao_blockwise", {})


def fsdp_parameters(states, names: dict[torch.Tensor, str]) -> list[FsdpParameter]:
    """The parameters that these FSDP2 states shard, in one order on every rank.

    names: of parameters, where FSDP2 does not know them yet.
    """
    found = []
    for group in _fsdp_groups(states):
        # Idempotent; it may put new tensors in the place of those that `fully_shard` made.
        group.lazy_init()
        for p in group.fsdp_params:
            info, mesh = p._module_info, p.mesh_info
            sharded = hasattr(mesh, "shard_process_group")
            parameter = FsdpParameter(
                source=p,
                name=p._param_fqn or names.get(p.sharded_param, info.param_name),
                shape=tuple(p._orig_size),
                dim=p.fsdp_placement.dim,
                rank=mesh.shard_mesh_rank if sharded else 0,
                ranks=mesh.shard_mesh_size if sharded else 1,
                group=mesh.shard_process_group if sharded else None,
                mesh_ranks=tuple(mesh.mesh.mesh.flatten().tolist()),
                dtype=p.mp_policy.param_dtype or p.sharded_param.dtype,
                device=p.device,
                modules=(info.module, *info.shared_modules),
                split_groups=tuple(
                    p.sharded_param.device_mesh.get_group(i)
                    for i, placement in enumerate(p.sharded_param.placements)
                    if i >= mesh.mesh.ndim and placement.is_shard()
                ),
            )
            found.append(parameter)
    return found


def fsdp_reduces_gradients(states) -> bool:
    """Whether a backward pass leaves gradients that an optimizer can step with: `set_requires_gradient_sync`."""
    return any(group.reduce_grads for group in _fsdp_groups(states))


def fsdp_partial_reshards(states) -> list[tuple[torch.nn.Module, list[torch.Tensor]]]:
    """The modules that reshard to fewer ranks than share their parameters (`reshard_after_forward=int`), and shards."""
    found = []
    for state in states:
        groups = [g for g in _fsdp_groups((state,)) if g.post_forward_mesh_info not in (None, g.mesh_info)]
        if groups:
            shards = [p._sharded_local_tensor for group in groups for p in group.fsdp_params]
            found.append((state._modules[0], shards))
    return found


def _fsdp_groups(states) -> list:
    groups: list = []
    for state in states:
        # A list since torch 2.12.
        several = getattr(state, "_fsdp_param_groups", None)
        groups += [state._fsdp_param_group] if several is None else several
    return [group for group in groups if group is not None]


def watch_fsdp(before_gathers: Callable, after_backward: Callable) -> None:
    """Have FSDP2 call `before_gathers(state)` where an iteration begins and `after_backward(state)` where it ends.

    Begins: a forward pass of a root, by whatever method it is entered, or `unshard()` by hand outside of one. FSDP2 has
    no hook there: module hooks come after its own, which gather, or are left out by `register_fsdp_forward_method`.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    if not (hasattr(FSDPState, "_root_pre_forward") and hasattr(FSDPState, "_root_post_backward_final_callback")):
        # Another FSDP2 than the supported ones: gathers ask for `sync_weight_scales` by hand.
        return
    root_pre_forward, unshard = FSDPState._root_pre_forward, FSDPModule.unshard
    final_callback = FSDPState._root_post_backward_final_callback

    @functools.wraps(root_pre_forward)
    def watched_root_pre_forward(self, *args, **kwargs):
        # What the method itself begins with: it decides which state is the root.
        self._lazy_init()
        if self._state_ctx.iter_forward_root is None:
            before_gathers(self)
        return root_pre_forward(self, *args, **kwargs)

    @functools.wraps(unshard)
    def watched_unshard(self, *args, **kwargs):
        state = self._get_fsdp_state()
        if state._state_ctx.iter_forward_root is None:
            before_gathers(state)
        return unshard(self, *args, **kwargs)

    @functools.wraps(final_callback)
    def watched_final_callback(self, *args, **kwargs):
        final_callback(self, *args, **kwargs)
        after_backward(self)

    FSDPState._root_pre_forward = watched_root_pre_forward
    FSDPModule.unshard = watched_unshard
    FSDPState._root_post_backward_final_callback = watched_final_callback


def flattens_for_fsdp1() -> bool:
    """Whether `FullyShardedDataParallel`, FSDP1, is on the stack and makes one flat tensor of parameters."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.fsdp._flat_param":
            return True
        frame = frame.f_back
    return False


class FsdpRows(NamedTuple):
    """Which part of a parameter FSDP2 gives this rank: of dim `dim` [rank · ⌈n / ranks⌉, ...), gathered in `dtype`."""

    name: str
    dim: int
    rank: int
    ranks: int
    dtype: torch.dtype
    offloaded: bool


def shard_fsdp_parameters(kind: type, shard_of: Callable) -> None:
    """Have FSDP2 hold `shard_of(parameter, FsdpRows)`, of the dtype and the rows' shape, of parameters of `kind`.

    By itself it would slice and pad them, which has no meaning where a slice cuts blocks.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    wanted = ("reset_sharded_param", "to_sharded_dtensor", "_setattr_on_modules", "_init_extensions")
    if not all(hasattr(FSDPParam, name) for name in wanted):
        # Another FSDP2 than the supported ones: it slices, and slices that cut blocks are refused.
        return
    init, reset = FSDPParam.__init__, FSDPParam.reset_sharded_param
    signature = inspect.signature(init)

    @functools.wraps(init)
    def watched_init(self, param, module_info, *args, **kwargs):
        if not isinstance(local_of(param), kind):
            return init(self, param, module_info, *args, **kwargs)
        if local_of(param) is not param:
            raise ValueError(
                f"fully_shard: {module_info.param_name} is quantised and split by tensor parallelism; convert with "
                "master_weights=True to have both"
            )
        # FSDP2 slices what takes no memory, and is then given the shard.
        stand_in = torch.nn.Parameter(
            torch.empty(param.shape, dtype=param.dtype, device="meta"), requires_grad=param.requires_grad
        )
        # By which FSDP2 finds parameters that two groups share.
        vars(stand_in).update({k: v for k, v in vars(param).items() if k.startswith("_fsdp")})
        given = signature.bind(self, stand_in, module_info, *args, **kwargs)
        place = given.arguments.get("shard_placement_fn")
        if place is not None:
            given.arguments["shard_placement_fn"] = lambda _: place(param)
        init(*given.args, **given.kwargs)
        vars(param).update({k: v for k, v in vars(stand_in).items() if k.startswith("_fsdp")})
        mesh = self.mesh_info
        rows = FsdpRows(
            name=module_info.param_name,
            dim=self.fsdp_placement.dim,
            rank=getattr(mesh, "shard_mesh_rank", 0),
            ranks=getattr(mesh, "shard_mesh_size", 1),
            dtype=self.mp_policy.param_dtype or param.dtype,
            offloaded=self.offload_to_cpu,
        )
        with torch.no_grad():
            local = self.to_sharded_dtensor(shard_of(param, rows))
        self.sharded_param = torch.nn.Parameter(local, requires_grad=param.requires_grad)
        self._setattr_on_modules(self.sharded_param)
        self._init_extensions()

    @functools.wraps(reset)
    def watched_reset(self):
        param = getattr(self._module_info.module, self._module_info.param_name)
        if not isinstance(local_of(param), kind):
            return reset(self)
        # There is no padding to renew.
        self.sharded_param, self._sharding_spec = param, param._spec

    FSDPParam.__init__, FSDPParam.reset_sharded_param = watched_init, watched_reset


def functional_gathers() -> set:
    """The operations by which DTensor gathers the shards of a tensor."""
    if not torch.distributed.is_available():
        return set()
    from torch.distributed import _functional_collectives  # noqa: F401  # defines them

    gathers = torch.ops._c10d_functional
    return {
        gathers.all_gather_into_tensor.default,
        gathers.wait_tensor.default,
        gathers._wrap_tensor_autograd.default,
    }


def waited(x: torch.Tensor) -> torch.Tensor:
    """`x` itself in the place of a tensor that waits for a collective when it is used."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x


def local_of(x: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, the very object; another tensor itself."""
    return getattr(x, "_local_tensor", x)


def with_local(x: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` as what this rank holds of a DTensor that is placed as `x`, or `local` itself where `x` is none.

    `DTensor.from_local` would move offloaded values to the device of the mesh.
    """
    if not hasattr(x, "_local_tensor"):
        return local
    from torch.distributed.tensor import DTensor

    spec = x._spec
    if spec.tensor_meta is not None and spec.tensor_meta.dtype != local.dtype:
        spec = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)


# What `torch.distributed.tensor.distribute_module` sets on a module when it is done with it.
DISTRIBUTED_MARK = "_distribute_module_applied"


def wait_for(work) -> None:
    """Wait for a collective by the handle that its operation returned, which is an empty one where there is no need.

    A synchronous collective of NCCL runs on the current stream, and so before whatever uses its results.
    """
    from torch.distributed import Work

    handle = Work.unbox(work)
    if handle is not None:
        handle.wait()


def max_over_ranks(x: torch.Tensor, group: str) -> torch.Tensor:
    """The elementwise maximum over the ranks of the process group of that name; can be compiled."""
    from torch.distributed import _functional_collectives  # noqa: F401  # defines them

    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_reduce(x, "max", group))


def in_backward() -> bool:
    """Whether the autograd engine runs a backward pass in this thread, recomputation included."""
    return torch._C._current_graph_task_id() != -1


def default_store():
    """The key-value store that the ranks of `torch.distributed` met at."""
    return torch.distributed.distributed_c10d._get_default_store()


def nccl_timeout(group):
    """What a collective of `group` on a GPU may take, after which NCCL ends the process; None where it has no NCCL."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    return backend.options._timeout if backend.name() == "nccl" else None


def keeping_version(x: torch.Tensor):
    """A context in which changes of `x` are not counted: it gets back the values that autograd saved."""
    return torch.autograd._unsafe_preserve_version_counter(x)
