"""Distinguish graphs in torch.compile's disk cache by recipe and by version of this package.

Inductor finds a stored graph by a hash of the traced graph and its inputs. Tensor subclasses of this package provide a
hash (`tensors.base`), but the hash of a DTensor covers only its placement and not its local tensor. And operations are
hashed by name, so a graph stored by an older version, with other shapes and strides, could be reused.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch


@functools.cache
def keep_graphs_apart() -> None:
    """Add the local tensors of DTensors and this package's version to the keys of the cache, once in a process.

    It runs when a weight is made and not at import, since importing the package must not change PyTorch.
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
