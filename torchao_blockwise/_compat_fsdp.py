"""Names of FSDP2 that PyTorch does not promise to keep: each is used here and nowhere else."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import NamedTuple

import torch

from torchao_blockwise import _compat


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


def state_of(module: torch.nn.Module):
    """FSDP2's state of a module that `fully_shard` was called on, else None."""
    if not torch.distributed.is_available():
        return None
    from torch.distributed.fsdp import FSDPModule

    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def places_of_shards(modules) -> set[tuple[torch.nn.Module, str]]:
    """(module, attribute) of the parameters that FSDP2 shards in these modules; it swaps them where they are used."""
    states = [state for state in map(state_of, modules) if state is not None]
    infos = [p._module_info for group in _groups_of(states) for p in group.fsdp_params]
    places = {(info.module, info.param_name) for info in infos}
    return places.union(*(zip(info.shared_modules, info.shared_param_names) for info in infos))


def release_held_gathers(states, kinds: tuple[type, ...]) -> None:
    """Let go of the gathered parameters that a pass before has left, in groups with a shard of one of `kinds`.

    FSDP2 holds them with `reshard_after_forward=False`, a root's default, until a backward pass, and would use them
    again whatever became of the shards.
    """
    for group in _groups_of(states):
        if group.is_unsharded and any(isinstance(p._sharded_local_tensor, kinds) for p in group.fsdp_params):
            group._to_sharded()


def scope_of(state):
    """(owner, states): the states below the root of `state`, and what they share; None before a first forward pass."""
    context = state._state_ctx
    return (context, tuple(context.all_states)) if context.all_states else None


def notes_of(owner) -> dict:
    """A dict that lives as long as `owner`, a state or what states share.

    A weak dictionary would not do: what is noted holds the model, which holds the owner.
    """
    return vars(owner).setdefault("torchao_blockwise", {})


def parameters_of(states, names: dict[torch.Tensor, str]) -> list[FsdpParameter]:
    """The parameters that these FSDP2 states shard, in one order on every rank.

    names: of parameters, where FSDP2 does not know them yet.
    """
    found = []
    for group in _groups_of(states):
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


def modules_of(state) -> tuple[torch.nn.Module, ...]:
    """The modules that one call of `fully_shard` made this state for."""
    return tuple(state._modules)


def partial_reshards(states) -> list[tuple[torch.nn.Module, list[torch.Tensor]]]:
    """The modules that reshard to fewer ranks than share their parameters (`reshard_after_forward=int`), and shards."""
    found = []
    for state in states:
        groups = [g for g in _groups_of((state,)) if g.post_forward_mesh_info not in (None, g.mesh_info)]
        if groups:
            shards = [p._sharded_local_tensor for group in groups for p in group.fsdp_params]
            found.append((state._modules[0], shards))
    return found


def _groups_of(states) -> list:
    groups: list = []
    for state in states:
        # A list since torch 2.12.
        several = getattr(state, "_fsdp_param_groups", None)
        groups += [state._fsdp_param_group] if several is None else several
    return [group for group in groups if group is not None]


def watch(before_gathers: Callable) -> None:
    """Have FSDP2 call `before_gathers(state)` where a pass begins.

    That is a forward pass of a root, by whatever method it is entered, or `unshard()` by hand outside of one. FSDP2 has
    no hook there: module hooks come after its own, which gather, or are left out by `register_fsdp_forward_method`.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    if not hasattr(FSDPState, "_root_pre_forward"):
        # Another FSDP2 than the supported ones: gathers ask for `sync_weight_scales` by hand.
        return
    root_pre_forward, unshard = FSDPState._root_pre_forward, FSDPModule.unshard

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

    FSDPState._root_pre_forward = watched_root_pre_forward
    FSDPModule.unshard = watched_unshard


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


def shard_parameters(kind: type, shard_of: Callable) -> None:
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
        if not isinstance(_compat.local_of(param), kind):
            return init(self, param, module_info, *args, **kwargs)
        if _compat.local_of(param) is not param:
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
        if not isinstance(_compat.local_of(param), kind):
            return reset(self)
        # There is no padding to renew.
        self.sharded_param, self._sharding_spec = param, param._spec

    FSDPParam.__init__, FSDPParam.reset_sharded_param = watched_init, watched_reset
