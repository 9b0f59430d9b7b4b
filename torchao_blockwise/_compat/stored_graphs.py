"""What keeps graphs apart that torch.compile stores on disk: of other recipes, and of other versions of this package.

Inductor finds a stored graph by a hash of the traced one and of its inputs. A tensor of ours hashes itself
(`tensors.base`), but PyTorch asks a DTensor alone, which answers for its placement and not for what it holds. And
operations of ours are known by name: shapes and strides that an older version gave them would be taken for today's.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_done: set[str] = set()


def keep_graphs_apart() -> None:
    """Have stored graphs found by what DTensors hold and by this package's version; runs when a weight is made.

    Importing the package changes nothing of PyTorch; whatever compiles a graph with tensors of ours makes one first.
    """
    if "version" not in _done:
        _done.add("version")
        config, version = torch.compiler.config, sys.modules["torchao_blockwise"].__version__
        config.cache_key_tag = f"{config.cache_key_tag} torchao_blockwise={version}".strip()
    if "dtensors" not in _done and (module := sys.modules.get("torch.distributed.tensor")) is not None:
        _done.add("dtensors")
        _hash_what_dtensors_hold(module.DTensor)


def _hash_what_dtensors_hold(dtensor: Any) -> None:
    """Add to the hash of a DTensor that of what it holds, where that hashes itself. `dtensor` is the class."""
    hash_of_placement = getattr(dtensor, "_stable_hash_for_caching", None)
    if hash_of_placement is None:
        # Without a hash of its own PyTorch flattens it, down to what it holds.
        return

    @functools.wraps(hash_of_placement)
    def hash_of_all(x: DTensor) -> str:
        local = x._local_tensor
        own = local._stable_hash_for_caching() if hasattr(local, "_stable_hash_for_caching") else ""
        return hash_of_placement(x) + own

    dtensor._stable_hash_for_caching = hash_of_all
