"""Private names of FSDP2, used only here.

FSDP2's methods are wrapped when the first weight is made (`install`), not at import.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

# The methods of FSDP2 that are wrapped, or called by the wrappers.
_NEEDED = (
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp.FSDPModule.unshard",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_pre_forward",
)
# FSDP2's state of a module to which `fully_shard` was applied.
State: TypeAlias = "FSDPState"
_before_gathers: Callable[[State], None] = lambda state: None  # noqa: E731


@functools.cache
def install() -> None:
    """Wrap FSDP2's methods, once in a process. If one is missing, nothing is wrapped and gathers raise later."""
    if torch.distributed.is_available() and why_unknown() is None:
        _watch()


def why_unknown() -> str | None:
    """Return why FSDP2 of the installed PyTorch cannot shard converted weights, with the remedy, or None if it can."""
    missing = [path for path in _NEEDED if torch.distributed.is_available() and not _exists(path)]
    if not missing:
        return None
    return (
        f"FSDP2 of PyTorch {torch.__version__} has no {' and no '.join(missing)}, which quantizing shards needs; use a "
        "PyTorch that has it (2.11 to 2.15 do), or shard the model without fully_shard"
    )


def _exists(path: str) -> bool:
    try:
        return pkgutil.resolve_name(path) is not None
    except (ImportError, AttributeError):
        return False


class FsdpParameter(NamedTuple):
    """A parameter that FSDP2 shards: of dim `dim` (size n) this rank holds [rank · ⌈n / ranks⌉, ...) in `local`.

    shape: of the parameter within the FSDP2 group. dtype: the dtype in which the mixed precision policy gathers.
    mesh_ranks: all ranks that shard or replicate it. modules: the modules that hold the parameter. split_groups,
    split_dims: the process groups over which tensor or expert parallelism splits the parameter further, and the dim of
    each. offloaded: whether the offload policy keeps the shard on the CPU.
    """

    source: FSDPParam
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
    offloaded: bool
    split_dims: tuple[int, ...] = ()

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard. It may be a different tensor after a load, a move or FSDP2's first forward pass."""
        return self.source._sharded_local_tensor

    @property
    def parameter(self) -> torch.Tensor:
        """The DTensor that optimizers hold."""
        return self.source.sharded_param


def state_of(module: torch.nn.Module) -> FSDPState | None:
    """Return FSDP2's state of a module to which `fully_shard` was applied, else None."""
    if not torch.distributed.is_available():
        return None
    from torch.distributed.fsdp import FSDPModule

    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def places_of_shards(modules: Iterable[torch.nn.Module]) -> set[tuple[torch.nn.Module, str]]:
    """Return (module, attribute) of the parameters that FSDP2 shards in these modules, and swaps during a pass."""
    states = [state for state in map(state_of, modules) if state is not None]
    infos = [p._module_info for group in _groups_of(states) for p in group.fsdp_params]
    places = {(info.module, info.param_name) for info in infos}
    return places.union(*(zip(info.shared_modules, info.shared_param_names) for info in infos))


def release_held_gathers(states: Iterable[FSDPState], kinds: tuple[type, ...]) -> None:
    """Release parameters that an earlier pass has left gathered, in groups with a shard of one of `kinds`.

    With `reshard_after_forward=False`, the default of a root, FSDP2 keeps them until a backward pass, and would use
    them again even if the shards have changed.
    """
    for group in _groups_of(states):
        if group.is_unsharded and any(isinstance(p._sharded_local_tensor, kinds) for p in group.fsdp_params):
            group._to_sharded()


def scope_of(state: FSDPState) -> tuple[object, tuple[FSDPState, ...]] | None:
    """Return (object that the states share, all states below the root of `state`); None before the first forward."""
    context = state._state_ctx
    return (context, tuple(context.all_states)) if context.all_states else None


def notes_of(owner: object) -> dict[str, Any]:
    """Return a dict that lives as long as `owner`, a state or the object that states share.

    A weak dictionary would leak, since its values hold the model, which holds the owner.
    """
    return vars(owner).setdefault("torchao_blockwise", {})


def parameters_of(states: Iterable[FSDPState], names: Mapping[torch.Tensor, str]) -> list[FsdpParameter]:
    """Return the parameters that these FSDP2 states shard, in the same order on every rank.

    names: names of parameters, used if FSDP2 has not set them yet.
    """
    return [_described(p, names) for group in _groups_of(states) for p in group.fsdp_params]


def lazy_init(states: Iterable[FSDPState]) -> None:
    """Let FSDP2 read the current content of its parameters; it may replace its tensors by new ones."""
    for group in _groups_of(states):
        group.lazy_init()


def _described(p: FSDPParam, names: Mapping[torch.Tensor, str]) -> FsdpParameter:
    info = p._module_info
    # Typed as Any for attributes that their declared types lack.
    mesh: Any = p.mesh_info
    dtensor: Any = p.sharded_param
    sharded = hasattr(mesh, "shard_process_group")
    split = [
        (dtensor.device_mesh.get_group(i), placement.dim)
        for i, placement in enumerate(dtensor.placements)
        if i >= mesh.mesh.ndim and placement.is_shard()
    ]
    return FsdpParameter(
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
        split_groups=tuple(group for group, _ in split),
        offloaded=p.offload_to_cpu,
        split_dims=tuple(dim for _, dim in split),
    )


def modules_of(state: FSDPState) -> tuple[torch.nn.Module, ...]:
    """Return the modules of the `fully_shard` call that made this state."""
    return tuple(state._modules)


def partial_reshards(states: Iterable[FSDPState]) -> list[tuple[torch.nn.Module, list[torch.Tensor]]]:
    """Return (module, its shards) for modules that reshard to a smaller group (`reshard_after_forward=int`)."""
    found = []
    for state in states:
        groups = [g for g in _groups_of((state,)) if g.post_forward_mesh_info not in (None, g.mesh_info)]
        if groups:
            shards = [p._sharded_local_tensor for group in groups for p in group.fsdp_params]
            found.append((state._modules[0], shards))
    return found


def _groups_of(states: Iterable[FSDPState]) -> list[FSDPParamGroup]:
    groups: list[FSDPParamGroup | None] = []
    for state in states:
        # A list since torch 2.12.
        several = getattr(state, "_fsdp_param_groups", None)
        groups += [state._fsdp_param_group] if several is None else several
    return [group for group in groups if group is not None]


def before_gathers(call: Callable[[FSDPState], None]) -> None:
    """Register `call(state)` to run where an FSDP2 pass begins, after `install`."""
    global _before_gathers
    _before_gathers = call


def _watch() -> None:
    """Wrap FSDP2's methods to call the function of `before_gathers` where a pass begins.

    A pass begins with a forward pass of a root, through any method, or with `unshard()` outside of one. FSDP2 has no
    hook there: module hooks run after FSDP2's own, which gather, and `register_fsdp_forward_method` skips them.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    root_pre_forward, unshard = FSDPState._root_pre_forward, FSDPModule.unshard

    @functools.wraps(root_pre_forward)
    def watched_root_pre_forward(self: FSDPState, *args: Any, **kwargs: Any) -> Any:
        # `_root_pre_forward` begins with this call, which determines the root state.
        self._lazy_init()
        if self._state_ctx.iter_forward_root is None:
            _before_gathers(self)
        return root_pre_forward(self, *args, **kwargs)

    @functools.wraps(unshard)
    def watched_unshard(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        state = self._get_fsdp_state()
        if state._state_ctx.iter_forward_root is None:
            _before_gathers(state)
        return unshard(self, *args, **kwargs)

    FSDPState._root_pre_forward = watched_root_pre_forward  # type: ignore[method-assign]
    FSDPModule.unshard = watched_unshard  # type: ignore[method-assign]


def check_not_flattened(x: torch.Tensor, layer: str) -> None:
    """Raise NotImplementedError if `x` is a view of a flat parameter of `FullyShardedDataParallel` (FSDP1).

    layer: the name of the layer whose weight `x` has replaced.
    """
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FlatParameter

        if isinstance(x._base, FlatParameter):
            raise NotImplementedError(
                f"FullyShardedDataParallel (FSDP1) has flattened the weight of {layer} into a plain tensor, and the "
                "layer would train in high precision; use torch.distributed.fsdp.fully_shard (FSDP2), or leave the "
                "layer unconverted"
            )
