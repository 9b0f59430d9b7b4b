"""What torch.compile's on-disk caches may assume about a tensor subclass."""

from __future__ import annotations

import hashlib

import torch
from torchao.utils import TorchAOBaseTensor


def stable_hash(x: TorchAOBaseTensor) -> str:
    """Hash of all that a compiled graph may depend on: the type, its attributes, and its inner tensors.

    A config is an attribute, and its repr names all of its fields.
    """
    names, attributes = x.__tensor_flatten__()
    inner = [_described(getattr(x, name)) for name in names]
    kind = type(x).__module__, type(x).__qualname__
    described = repr((kind, sorted(attributes.items()), names, inner, x.requires_grad, x.is_inference()))
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


def _described(inner: torch.Tensor) -> tuple[object, ...]:
    own = inner._stable_hash_for_caching() if hasattr(inner, "_stable_hash_for_caching") else ""
    layout = inner.dtype, tuple(inner.shape), inner.stride(), inner.storage_offset(), str(inner.device)
    return type(inner).__qualname__, own, layout, inner.requires_grad, inner.is_inference()
