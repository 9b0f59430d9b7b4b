"""What torch.compile's on-disk cache may assume about a tensor subclass."""

from __future__ import annotations

import hashlib

import torch


def stable_hash(x: torch.Tensor) -> str:
    """Hash of all that a compiled graph may depend on: the type, its attributes, and its inner tensors' metadata."""
    names, attributes = x.__tensor_flatten__()
    inner = [getattr(x, name) for name in names]
    layout = [(t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), str(t.device)) for t in inner]
    described = repr((type(x).__qualname__, sorted(attributes.items()), names, layout, x.requires_grad))
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()
