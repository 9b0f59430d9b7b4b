"""The operator library: how an operation gets its schema, implementation, fake and sharding rule."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchao_blockwise import _compat

NAMESPACE = "torchao_blockwise"
_library = torch.library.Library(NAMESPACE, "DEF")


def define_op(schema: str, implementation: Callable, fake: Callable, sharding: Callable | None = None):
    """Define `torchao_blockwise::<schema>` and return its overload.

    implementation: runs on every device and chooses a backend by itself; below autograd, so it is not differentiable.
    fake: shapes and dtypes for torch.compile and meta tensors.
    sharding: DTensor rule, as `torch.distributed.tensor.experimental.register_sharding` takes it.
    Raises RuntimeError if the name is defined already.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    if sharding is not None and torch.distributed.is_available():
        _compat.register_sharding(op, sharding)
    return op
