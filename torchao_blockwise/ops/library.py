"""The operator library: how an operation gets its schema, implementation, fake and sharding rule."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchao_blockwise import _compat

NAMESPACE = "torchao_blockwise"
_PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))
_library = torch.library.Library(NAMESPACE, "DEF")


def define_op(schema: str, implementation: Callable, fake: Callable, sharding: Callable | None = None):
    """Define `torchao_blockwise::<schema>` and return what calls it.

    A call takes the operation's overload through PyTorch's dispatcher where anything can see that it does: compilers,
    modes, profilers, tensor subclasses, meta tensors, autograd. Plain tensors that nothing watches go straight to the
    implementation, which saves 2 to 4 µs a call.

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
    types = [str(argument.type) for argument in _compat.schema_of(op).arguments]
    if _compat.schema_of(op).is_mutable or "List[Tensor]" in types:
        # What changes its arguments is for functionalisation to see; lists take longer to look through than they save.
        return op
    tensors = [i for i, name in enumerate(types) if "Tensor" in name]

    def call(*args):
        if _compat.is_watched() or args[0].is_meta:
            return op(*args)
        wants_grad = torch.is_grad_enabled()
        for i in tensors:
            x = args[i]
            if type(x) not in _PLAIN or (wants_grad and x is not None and x.requires_grad):
                return op(*args)
        return implementation(*args)

    call.__name__ = name
    call.overload = op  # type: ignore[attr-defined]  # for what must have the operation itself
    return call
