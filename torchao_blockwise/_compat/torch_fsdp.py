"""Private names of FSDP2, used only here.

FSDP2's methods are wrapped when the first weight is made (`install`), not at import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

# FSDP2's state of a module to which `fully_shard` was applied.
State: TypeAlias = "FSDPState"
# Called where an FSDP2 pass begins; distributed/fsdp.py sets it.
before_gathers: Callable[[State], None] = lambda state: None  # noqa: E731


@functools.cache
def install() -> str | None:
    """Wrap FSDP2's methods to call `before_gathers` where a pass begins; return why that is impossible, or None.

    A pass begins with a forward pass of a root, through any method, or with `unshard()` outside of one. FSDP2 has no
    hook there: module hooks run after FSDP2's own, which gather, and `register_fsdp_forward_method` skips them.
    """
    if not torch.distributed.is_available():
        return None
    try:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

        root_pre_forward, unshard = FSDPState._root_pre_forward, FSDPModule.unshard
    except (AttributeError, ImportError) as error:
        return (
            f"quantizing shards needs private names that FSDP2 of PyTorch {torch.__version__} does not have ({error}); "
            "use PyTorch 2.11 to 2.15, or shard the model without fully_shard"
        )

    @functools.wraps(root_pre_forward)
    def watched_root_pre_forward(self: FSDPState, *args: Any, **kwargs: Any) -> Any:
        # `_root_pre_forward` begins with this call, which determines the root state.
        self._lazy_init()
        if self._state_ctx.iter_forward_root is None:
            before_gathers(self)
        return root_pre_forward(self, *args, **kwargs)

    @functools.wraps(unshard)
    def watched_unshard(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        state = self._get_fsdp_state()
        if state._state_ctx.iter_forward_root is None:
            before_gathers(state)
        return unshard(self, *args, **kwargs)

    FSDPState._root_pre_forward = watched_root_pre_forward  # type: ignore[method-assign]
    FSDPModule.unshard = watched_unshard  # type: ignore[method-assign]
    return None


class FsdpParameter:
    """A parameter that FSDP2 shards: of dim `dim` (size n) this rank holds [rank · ⌈n / ranks⌉, ...) in `local`.

    names: names of parameters, used if FSDP2 has not set them yet.
    shape: of the parameter within the FSDP2 group. dtype: the dtype in which the mixed precision policy gathers.
    mesh_ranks: all ranks that shard or replicate it. places: (module, attribute) of each module that holds it. splits:
    (process group, dim) of each further split, by tensor or expert parallelism.
    """

    def __init__(self, source: FSDPParam, names: Mapping[torch.Tensor, str]):
        # Typed as Any for attributes that their declared types lack.
        mesh: Any = source.mesh_info
        dtensor: Any = source.sharded_param
        info = source._module_info
        self._source = source
        self.name = source._param_fqn or names.get(dtensor, info.param_name)
        self.shape = tuple(source._orig_size)
        self.dim = source.fsdp_placement.dim
        # A mesh that only replicates has none of these.
        self.rank: int = getattr(mesh, "shard_mesh_rank", 0)
        self.ranks: int = getattr(mesh, "shard_mesh_size", 1)
        self.group: torch.distributed.ProcessGroup | None = getattr(mesh, "shard_process_group", None)
        self.mesh_ranks: tuple[int, ...] = tuple(mesh.mesh.mesh.flatten().tolist())
        self.dtype: torch.dtype = source.mp_policy.param_dtype or dtensor.dtype
        self.device = source.device
        self.places = (info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names)
        self.splits = [
            (dtensor.device_mesh.get_group(i), placement.dim)
            for i, placement in enumerate(dtensor.placements)
            if i >= mesh.mesh.ndim and placement.is_shard()
        ]

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard. It may be a different tensor after a load, a move or FSDP2's first forward pass."""
        return self._source._sharded_local_tensor

    @property
    def parameter(self) -> torch.Tensor:
        """The DTensor that optimizers hold."""
        return self._source.sharded_param


def states_of(modules: Iterable[torch.nn.Module]) -> list[FSDPState]:
    """Return FSDP2's states, each once, of those of `modules` to which `fully_shard` was applied."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return list(dict.fromkeys(module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule)))


def release_held_gathers(states: Iterable[FSDPState], kinds: tuple[type, ...]) -> None:
    """Release parameters that an earlier pass has left gathered, in groups with a shard of one of `kinds`.

    With `reshard_after_forward=False`, the default of a root, FSDP2 keeps them until a backward pass, and would use
    them again even if the shards have changed.
    """
    for group in _groups_of(states):
        if group.is_unsharded and _has_shard(group, kinds):
            group._to_sharded()


def scope_of(state: FSDPState) -> tuple[object, tuple[FSDPState, ...]] | None:
    """Return (object that the states share, all states below the root of `state`); None before the first forward."""
    context = state._state_ctx
    return (context, tuple(context.all_states)) if context.all_states else None


def parameters_of(states: Iterable[FSDPState], names: Mapping[torch.Tensor, str]) -> list[FsdpParameter]:
    """Return the parameters that these FSDP2 states shard, in the same order on every rank."""
    return [FsdpParameter(p, names) for group in _groups_of(states) for p in group.fsdp_params]


def lazy_init(states: Iterable[FSDPState]) -> None:
    """Let FSDP2 read the current content of its parameters; it may replace its tensors by new ones."""
    for group in _groups_of(states):
        group.lazy_init()


def module_of(state: FSDPState) -> Any:
    """Return the first module of the `fully_shard` call that made this state, an `FSDPModule`."""
    return state._modules[0]


def partial_reshards(states: Iterable[FSDPState], kinds: tuple[type, ...]) -> list[Any]:
    """Return modules with a shard of one of `kinds` that reshard to fewer ranks (`reshard_after_forward=int`)."""
    groups = [group for group in _groups_of(states) if _has_shard(group, kinds)]
    return [group.modules[0] for group in groups if group.post_forward_mesh_info not in (None, group.mesh_info)]


def _has_shard(group: FSDPParamGroup, kinds: tuple[type, ...]) -> bool:
    return any(isinstance(p._sharded_local_tensor, kinds) for p in group.fsdp_params)


def _groups_of(states: Iterable[FSDPState]) -> list[FSDPParamGroup]:
    groups: list[FSDPParamGroup | None] = []
    for state in states:
        # A list since torch 2.12.
        several = getattr(state, "_fsdp_param_groups", None)
        groups += [state._fsdp_param_group] if several is None else several
    return [group for group in groups if group is not None]


def check_not_flattened(x: torch.Tensor, layer: str) -> None:
    """Raise NotImplementedError if `x` is a view of a flat parameter of `FullyShardedDataParallel` (FSDP1).

    layer: the name of the layer whose weight `x` has replaced.
    """
    # How PyTorch itself recognizes a FlatParameter.
    if getattr(x._base, "_is_flat_param", False):
        raise NotImplementedError(
            f"FullyShardedDataParallel (FSDP1) has flattened the weight of {layer} into a plain tensor, and the layer "
            "would train in high precision; use torch.distributed.fsdp.fully_shard (FSDP2), or leave the layer "
            "unconverted"
        )
