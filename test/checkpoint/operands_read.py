"""What products read of weights, and that files hold these bytes."""

from __future__ import annotations

import torch
from exported_models import digest

from torchao_blockwise import _compat
from torchao_blockwise.diagnostics import live_memory

PRODUCTS = ("torchao_blockwise::matmul", "torchao_blockwise::grouped_matmul")


class OperandsRead(live_memory.LiveMemory):
    """Under it `operands` get (payload, scale, tensor scale or None) of each product's weight, as kernels get them."""

    def __init__(self):
        super().__init__()
        self.operands: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _compat.schema_of(func).name in PRODUCTS:
            self.operands.append(tuple(None if x is None else x.detach().clone() for x in args[4:7]))
        return super().__torch_dispatch__(func, types, args, kwargs)


def assert_files_hold(operands, found: dict[str, torch.Tensor]) -> None:
    """Each quantized weight of the files is an operand by SHA-256, with its scales; and all operands are there."""
    read = set()
    for qdata, scale, tensor_scale in operands:
        if tensor_scale is not None:
            scale = scale.repeat_interleave(16, -2)[..., : qdata.shape[-2], :]
        factor = None if tensor_scale is None else tensor_scale.reshape(1).reciprocal()
        read.add((digest(qdata), digest(scale), None if factor is None else digest(factor)))
    packed = any(name.endswith("_packed") for name in found)
    ends = ("_packed", "_scale", "_global_scale") if packed else ("", "_scale_inv")
    weights = [name.removesuffix(ends[1]) for name in found if name.endswith(ends[1]) and "global" not in name]
    held = {tuple(digest(found[name + end]) for end in ends) + (None,) * (3 - len(ends)) for name in weights}
    assert held and held == read
