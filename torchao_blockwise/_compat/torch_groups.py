"""Process groups with processes of other programs; PyTorch promises groups of its own ranks alone."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store


def group_with_others(store: Store, size: int, name: str, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """A group of `size` processes that meet at `store`, in which this one is rank 0; needs no default group.

    SGLang makes the same of it on its side (srt/utils, `init_custom_process_group`).
    """
    ours = dist.group.WORLD
    device = getattr(ours, "bound_device_id", None)
    if device is not None:
        # Else the new group would be split from the default one, which has none of the others.
        ours.bound_device_id = None  # type: ignore[union-attr]
    try:
        group, _ = distributed_c10d._new_process_group_helper(
            size,
            0,
            [],
            dist.Backend(backend),
            PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]  # a string by another name
            timeout=timeout,
        )
    finally:
        if device is not None:
            ours.bound_device_id = device  # type: ignore[union-attr]
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group
