"""Copies of quantized tensors, between devices and between formats; what is made like one, or compared with one.

Payload and scales are copied bit for bit. High-precision values that are copied in are quantized as the target is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchao_blockwise import _compat
from torchao_blockwise._compat import torch_fsdp
from torchao_blockwise._compat.torch_types import Operation
from torchao_blockwise.formats import HIGH_PRECISION_DTYPES
from torchao_blockwise.tensors.pending_master import PendingMaster
from torchao_blockwise.tensors.quantized import QuantizedTensor, as_bits, implements, map_tensors
from torchao_blockwise.tensors.rounding import carry_key
from torchao_blockwise.tensors.state_values import plain_values, same_bits

aten = torch.ops.aten


@implements(
    aten.detach.default, aten.alias.default, aten.clone.default, aten.contiguous.default, aten._pin_memory.default
)
def _map_op(func: Operation, x: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    result = map_tensors(x, lambda t: func(t, *args, **kwargs))
    if func is aten.clone.default:
        carry_key(x, result, copied=True)
    if func in (aten.detach.default, aten.alias.default):
        result.pending_master = x.pending_master
        # `weight.data` is of a weight that trains, though it asks for no gradient itself.
        result.trains = x.trains or x.requires_grad
    return result


@implements(aten.lift_fresh.default)
def _same(func: Operation, x: QuantizedTensor) -> QuantizedTensor:
    return x


@implements(aten.empty_like.default)
def _empty_like(
    func: Operation, x: QuantizedTensor, *, dtype: torch.dtype | None = None, **kwargs: Any
) -> QuantizedTensor:
    kwargs.pop("memory_format", None)
    empty = map_tensors(x, lambda t: func(t, **kwargs))
    empty = empty._make(empty.qdata, empty.scale, dtype=_float_dtype(func, x, dtype))
    empty.pending_master = x.pending_master and PendingMaster()
    return empty


@implements(aten._to_copy.default)
def _to_copy(
    func: Operation,
    x: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **kwargs: Any,
) -> QuantizedTensor:
    moved = map_tensors(x, lambda t: t.to(device, non_blocking=non_blocking, copy=True))
    moved = moved._make(moved.qdata, moved.scale, dtype=_float_dtype(func, x, dtype))
    moved.pending_master = x.pending_master and x.pending_master.moved(device)
    return moved


def _float_dtype(func: Operation, x: QuantizedTensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that a copy reports; its payload stays as it is."""
    if dtype is not None and dtype not in HIGH_PRECISION_DTYPES:
        name = type(x).__name__
        raise TypeError(f"{func}: a {name} can report bfloat16, float16 or float32, got {dtype}; dequantize() it first")
    return x.dtype if dtype is None else dtype


@implements(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.rand_like.default)
def _plain_like(
    func: Operation,
    x: QuantizedTensor,
    *args: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    memory_format: torch.memory_format | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Optimizer states and the like are plain tensors."""
    plain = torch.empty(x.shape, dtype=dtype or x.dtype, device=device or x.device)
    return func(plain, *args, **kwargs)


@implements(aten.new_zeros.default, aten.new_empty.default, aten.new_ones.default, aten.new_full.default)
def _plain_new(
    func: Operation,
    x: QuantizedTensor,
    size: Sequence[int],
    *args: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    if func is aten.new_empty.default and not size:
        # What programs begin with that copy a tensor by its storage.
        raise TypeError(
            f"new_empty: a copy by storage, as async_save makes it: the memory of a {type(x).__name__} holds "
            f"{x.fmt.name} blocks, not its values; take weight.dequantize(), or model.state_dict()"
        )
    like = torch.empty((), dtype=x.dtype, device=x.device)
    return func(like, size, *args, dtype=dtype, device=device, **kwargs)


@implements(aten.copy_.default)
def _copy_(func: Operation, x: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> QuantizedTensor:
    """From a tensor of the same kind: its bytes. From high precision: quantized as `x` is. Never to high precision."""
    if not isinstance(x, QuantizedTensor):
        # An FSDP2 that is not prepared copies parts of what it shards.
        reason = torch_fsdp.why_not_installed()
        raise NotImplementedError(
            f"copy_: the source is a {type(src).__name__}, the target a plain tensor; copy from source.dequantize()"
            + (f" (fully_shard: {reason})" if reason is not None else "")
        )
    src = source_for("copy_", x, src)
    # Layers save the payload for backward, and a change before that is to be refused.
    with _compat.counting_changes():
        for mine, theirs in zip(x._tensors(), src._tensors()):
            mine.copy_(theirs, non_blocking=non_blocking)
    return x


def source_for(op: str, x: QuantizedTensor, src: torch.Tensor) -> QuantizedTensor:
    """`src`, about to be copied, as a tensor of the kind of `x`: quantized if it is not, another format refused."""
    if x.shape != src.shape:
        raise ValueError(f"{op}: the target has shape {list(x.shape)}, the source {list(src.shape)}")
    hp = None
    if not isinstance(src, QuantizedTensor):
        hp = src.to(x.device)
        # Rounded to the reported dtype first, as masters are; what is no such dtype is refused.
        src = x._requantize(hp.to(x.dtype) if hp.dtype in HIGH_PRECISION_DTYPES else hp)
    if type(src) is not type(x) or src.fmt is not x.fmt:
        raise ValueError(f"{op}: formats differ, {x.fmt.name} from {src.fmt.name}; copy from source.dequantize()")
    shapes = [None if y.global_scale is None else list(y.global_scale.shape) for y in (x, src)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{op}: tensor scales differ, {shapes[0]} from {shapes[1]}: one of all experts, or one for each "
            "(scale_per_expert); copy from source.dequantize()"
        )
    if x.pending_master is not None:
        if hp is not None and x.pending_master.is_owned and hp.dtype == x.dtype and same_bits(hp, plain_values(x)):
            # What a state dict has of it: a checkpoint that comes after the optimizer's masters leaves those.
            return x
        x.pending_master.note_copy(hp, zip(x._tensors(), src._tensors()))
    return src


@implements(aten.equal.default)
def _equal(func: Operation, x: torch.Tensor, y: torch.Tensor) -> bool:
    if not (isinstance(x, QuantizedTensor) and isinstance(y, QuantizedTensor)):
        return False
    same_kind = type(x) is type(y) and x.shape == y.shape and x.fmt is y.fmt
    return same_kind and all(func(as_bits(a), as_bits(b)) for a, b in zip(x._tensors(), y._tensors()))


@implements(aten.is_pinned.default)
def _is_pinned(func: Operation, x: QuantizedTensor, *args: Any) -> bool:
    return x.qdata.is_pinned()
