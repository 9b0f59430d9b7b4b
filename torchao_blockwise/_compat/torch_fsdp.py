"""Names of FSDP2 that PyTorch does not promise to keep: each is used here and nowhere else.

An import wraps nothing: that is done where a model is converted (`install`).
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

# What is wrapped of FSDP2, or called by what wraps it.
_NEEDED = (
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp.FSDPModule.unshard",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_pre_forward",
)
# FSDP2's state of a module that `fully_shard` was called on.
State: TypeAlias = "FSDPState"
_installed = False
_before_gathers: Callable[[State], None] = lambda state: None  # noqa: E731


def install() -> None:
    """Wrap what must be wrapped of FSDP2, once a process; nothing where it lacks a name: gathers are refused then."""
    global _installed
    if not _installed and torch.distributed.is_available() and why_unknown() is None:
        _watch()
        _installed = True


def why_not_installed() -> str | None:
    """Why FSDP2 must not be given converted weights, with the remedy, or None if it may be."""
    if _installed:
        return None
    return why_unknown() or (
        "what it calls for such weights is installed where a model is converted, and none was in this process; call "
        "torchao_blockwise.distributed.sync_weight_scales(model) on all ranks"
    )


def why_unknown() -> str | None:
    """Why this PyTorch's FSDP2 cannot shard converted weights, with the remedy, or None if it can."""
    missing = [path for path in _NEEDED if torch.distributed.is_available() and not _exists(path)]
    if not missing:
        return None
    return (
        f"FSDP2 of PyTorch {torch.__version__} has no {' and no '.join(missing)}, by which shards are quantized; "
        "take a PyTorch that has it (2.11 to 2.15 do), or another way than fully_shard to split the model"
    )


def _exists(path: str) -> bool:
    try:
        return pkgutil.resolve_name(path) is not None
    except (ImportError, AttributeError):
        return False


class FsdpParameter(NamedTuple):
    """A parameter as FSDP2 shards it: of dim `dim` this rank holds [rank · ⌈n / ranks⌉, ...) in `local`.

    shape: of what the group holds together. dtype: what the mixed precision policy gathers in. mesh_ranks: every rank
    that shards or replicates it. modules: those that hold the very parameter. split_groups, split_dims: over which
    tensor or expert parallelism has split what the groups of FSDP2 hold, and in which dim each. offloaded: its policy
    keeps the shard on the CPU.
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
        """This rank's part; another tensor after a load, a move or FSDP2's first forward pass."""
        return self.source._sharded_local_tensor

    @property
    def parameter(self) -> torch.Tensor:
        """The DTensor that optimizers know."""
        return self.source.sharded_param


def state_of(module: torch.nn.Module) -> FSDPState | None:
    """FSDP2's state of a module that `fully_shard` was called on, else None."""
    if not torch.distributed.is_available():
        return None
    from torch.distributed.fsdp import FSDPModule

    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def places_of_shards(modules: Iterable[torch.nn.Module]) -> set[tuple[torch.nn.Module, str]]:
    """(module, attribute) of the parameters that FSDP2 shards in these modules; it swaps them where they are used."""
    states = [state for state in map(state_of, modules) if state is not None]
    infos = [p._module_info for group in _groups_of(states) for p in group.fsdp_params]
    places = {(info.module, info.param_name) for info in infos}
    return places.union(*(zip(info.shared_modules, info.shared_param_names) for info in infos))


def release_held_gathers(states: Iterable[FSDPState], kinds: tuple[type, ...]) -> None:
    """Let go of the gathered parameters that a pass before has left, in groups with a shard of one of `kinds`.

    FSDP2 holds them with `reshard_after_forward=False`, a root's default, until a backward pass, and would use them
    again whatever became of the shards.
    """
    for group in _groups_of(states):
        if group.is_unsharded and any(isinstance(p._sharded_local_tensor, kinds) for p in group.fsdp_params):
            group._to_sharded()


def scope_of(state: FSDPState) -> tuple[object, tuple[FSDPState, ...]] | None:
    """(owner, states): the states below the root of `state`, and what they share; None before a first forward pass."""
    context = state._state_ctx
    return (context, tuple(context.all_states)) if context.all_states else None


def notes_of(owner: object) -> dict[str, Any]:
    """A dict that lives as long as `owner`, a state or what states share.

    A weak dictionary would not do: what is noted holds the model, which holds the owner.
    """
    return vars(owner).setdefault("torchao_blockwise", {})


def parameters_of(states: Iterable[FSDPState], names: Mapping[torch.Tensor, str]) -> list[FsdpParameter]:
    """The parameters that these FSDP2 states shard, in one order on every rank.

    names: of parameters, where FSDP2 does not know them yet.
    """
    return [_described(p, names) for group in _groups_of(states) for p in group.fsdp_params]


def lazy_init(states: Iterable[FSDPState]) -> None:
    """Have FSDP2 take what its parameters hold now; it may put new tensors in the place of those that it made."""
    for group in _groups_of(states):
        group.lazy_init()


def _described(p: FSDPParam, names: Mapping[torch.Tensor, str]) -> FsdpParameter:
    info = p._module_info
    # Attributes that their declared types do not have.
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
    """The modules that one call of `fully_shard` made this state for."""
    return tuple(state._modules)


def partial_reshards(states: Iterable[FSDPState]) -> list[tuple[torch.nn.Module, list[torch.Tensor]]]:
    """The modules that reshard to fewer ranks than share their parameters (`reshard_after_forward=int`), and shards."""
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
    """Have `call(state)` called where a pass of FSDP2 begins, once it is installed."""
    global _before_gathers
    _before_gathers = call


def _watch() -> None:
    """Have FSDP2 call what `before_gathers` was given where a pass begins.

    That is a forward pass of a root, by whatever method it is entered, or `unshard()` by hand outside of one. FSDP2 has
    no hook there: module hooks come after its own, which gather, or are left out by `register_fsdp_forward_method`.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    root_pre_forward, unshard = FSDPState._root_pre_forward, FSDPModule.unshard

    @functools.wraps(root_pre_forward)
    def watched_root_pre_forward(self: FSDPState, *args: Any, **kwargs: Any) -> Any:
        # What the method itself begins with: it decides which state is the root.
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
    """Raise NotImplementedError where `x` is a view of what `FullyShardedDataParallel` (FSDP1) made of parameters.

    layer: whose weight `x` has replaced.
    """
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FlatParameter

        if isinstance(x._base, FlatParameter):
            raise NotImplementedError(
                f"FullyShardedDataParallel (FSDP1) has flattened the weight of {layer} into a plain tensor, and the "
                "layer would train in high precision; use torch.distributed.fsdp.fully_shard (FSDP2), or leave the "
                "layer unconverted"
            )
