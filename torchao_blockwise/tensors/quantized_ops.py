"""Operations on quantized tensors: views, copies and adapters. They are exact on payload and scales, or raise.

Payload and scales are copied bit for bit. High-precision values that are copied in are quantized like the target.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torchao.utils import TorchAOBaseTensor

from torchao_blockwise import _compat
from torchao_blockwise._compat import Operation
from torchao_blockwise.tensors.base import layers_of
from torchao_blockwise.tensors.config import config_of_groups
from torchao_blockwise.tensors.master_weight import MasterWeightTensor
from torchao_blockwise.tensors.pending_master import PendingMaster
from torchao_blockwise.tensors.quantized import QuantizedTensor, as_bits, implements, map_tensors, source_for
from torchao_blockwise.tensors.transposed_weight import TransposedWeight, swaps_last_dims

aten = torch.ops.aten


# --- views ------------------------------------------------------------------------------------------------------------


@implements(aten.slice.Tensor)
def _slice(
    func: Operation, x: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedTensor:
    dim = dim % x.dim()
    size = x.shape[dim]
    start, end, _ = slice(start, end).indices(size)
    end = max(start, end)
    if dim < x.dim() - 2:
        return _by_matrices(func, x, dim, start, end, step)
    if step != 1:
        raise NotImplementedError(f"slice: steps other than 1 cut blocks, got step={step}; dequantize() first")
    axis = dim - x.dim()
    block = x.fmt.block[axis]
    if start % block or (end % block and end != size):
        raise ValueError(
            f"slice: [{start}:{end}] of dim {dim} (size {size}) cuts blocks of {block}; "
            f"slice on multiples of {block}, or dequantize() first (fully_shard: convert with master_weights=True)"
        )
    per_entry = x.fmt.element.per_byte if axis == -1 else 1
    packed_end = x.fmt.element.packed(end) if axis == -1 else end
    qdata = func(x.qdata, dim, start // per_entry, packed_end)
    scale = func(x.scale, dim, start // block, (end + block - 1) // block)
    return x._make(qdata=qdata, scale=scale, columns=end - start if axis == -1 else None)


@implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Operation, x: QuantizedTensor, sizes: int | Sequence[int], dim: int = 0) -> list[QuantizedTensor]:
    length = x.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    ends = itertools.accumulate(sizes)
    return [_slice(aten.slice.Tensor, x, dim, end - size, end) for size, end in zip(sizes, ends)]


@implements(aten.unbind.int)
def _unbind(func: Operation, x: QuantizedTensor, dim: int = 0) -> list[QuantizedTensor]:
    return [_select(aten.select.int, x, dim, index) for index in range(x.shape[dim])]


@implements(aten.select.int)
def _select(func: Operation, x: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    if dim % x.dim() >= x.dim() - 2:
        raise NotImplementedError(
            f"select: dim {dim} would cut blocks; slice at block boundaries, or dequantize() first"
        )
    return _by_matrices(func, x, dim % x.dim(), index)


def _by_matrices(func: Operation, x: QuantizedTensor, *args: int) -> QuantizedTensor:
    """Apply `func`, which changes only leading dims, to all parts except a tensor scale of the whole tensor."""
    return x._make(**{name: func(part, *args) for name, part in x.parts().items() if part.dim()})


@implements(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(func: Operation, x: QuantizedTensor, size: Sequence[int]) -> QuantizedTensor:
    """Change leading dims and, if no block is cut, rows; the last dim must not change."""
    size = list(size)
    if size.count(-1) == 1:
        known = math.prod(n for n in size if n != -1)
        size[size.index(-1)] = x.numel() // known if known else 0
    rows, columns = x.shape[-2:]
    block_rows = x.fmt.block[0]
    keeps_columns = len(size) >= 2 and size[-1] == columns and math.prod(size) == x.numel()
    if not keeps_columns or (size[-2] != rows and (rows % block_rows or size[-2] % block_rows)):
        raise ValueError(
            f"view: {layers_of([x])} {list(x.shape)} as {size} would cut blocks of {block_rows}x{x.fmt.block[1]}; keep "
            f"the last dim, and rows in multiples of {block_rows}, dequantize() first, or exclude the layer "
            "(DistributedDataParallel: init_sync=False; FullyShardedDataParallel: use "
            "torch.distributed.fsdp.fully_shard)"
        )
    global_scale = x.global_scale
    if global_scale is not None and global_scale.dim():
        if math.prod(size[:-2]) != global_scale.numel():
            raise ValueError(
                f"view: {list(x.shape)} as {size} would join matrices with separate tensor scales; keep the last two "
                "dims, or dequantize() first"
            )
        global_scale = global_scale.view(size[:-2])
    qdata = x.qdata.view(*size[:-1], x.qdata.shape[-1])
    scale = x.scale.view(x.fmt.scale_shape(*size))
    config = config_of_groups(x.config) if x.config is not None and x.dim() == 2 < len(size) else None
    return x._make(qdata=qdata, scale=scale, global_scale=global_scale, config=config)


@implements(aten.as_strided.default)
def _as_strided(
    func: Operation, x: QuantizedTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> QuantizedTensor:
    """Return an alias with the same size and strides, which FSDP2 needs. Other strides would cut blocks."""
    if list(size) != list(x.shape) or list(stride) != list(x.stride()) or storage_offset:
        raise NotImplementedError(
            f"as_strided: size and strides must be the tensor's own, {list(x.shape)} and {list(x.stride())}, got "
            f"{list(size)} and {list(stride)}; dequantize() first"
        )
    return map_tensors(x, lambda t: t.detach())


@implements(aten.t.default, aten.transpose.int, aten.permute.default)
def _transpose(func: Operation, x: QuantizedTensor, *dims: Any) -> QuantizedTensor | TransposedWeight:
    """Return a view with the last two dims swapped, for `.T` and `.mT`; a `TransposedWeight` for experts."""
    if swaps_last_dims(func, (x, *dims)):
        return TransposedWeight(x) if x.dim() == 3 else x.transposed_view()
    raise NotImplementedError(f"{func}: only the last two dims can be swapped, got {dims}")


# --- copies -----------------------------------------------------------------------------------------------------------


@implements(
    aten.detach.default, aten.alias.default, aten.clone.default, aten.contiguous.default, aten.lift_fresh.default,
    aten._pin_memory.default, of_shards=True,
)  # fmt: skip
def _map_op(func: Operation, x: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    result = map_tensors(x, lambda t: func(t, *args, **kwargs))
    if func is aten.clone.default:
        result.inherit(x, copied=True)
    if func in (aten.detach.default, aten.alias.default):
        result.pending_master = x.pending_master
        # `weight.data` belongs to a weight that trains, although it does not require grad itself.
        result.trains = x.trains or x.requires_grad
    return result


@implements(aten.empty_like.default, of_shards=True)
def _empty_like(
    func: Operation, x: QuantizedTensor, *, dtype: torch.dtype | None = None, **kwargs: Any
) -> QuantizedTensor:
    kwargs.pop("memory_format", None)
    empty = map_tensors(x, lambda t: func(t, **kwargs))._make(dtype=dtype)
    empty.pending_master = x.pending_master and PendingMaster()
    return empty


@implements(aten._to_copy.default, of_shards=True)
def _to_copy(
    func: Operation,
    x: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **kwargs: Any,
) -> QuantizedTensor:
    """Move to another device, or report another dtype; the payload does not change."""
    moved = map_tensors(x, lambda t: t.to(device, non_blocking=non_blocking, copy=True))._make(dtype=dtype)
    moved.pending_master = x.pending_master and x.pending_master.moved(device)
    return moved


@implements(
    aten.full_like.default, aten.ones_like.default, aten.rand_like.default, aten.zeros_like.default,
    aten.new_empty.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default, of_shards=True,
)  # fmt: skip
def _plain(func: Operation, x: QuantizedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return plain tensors, for optimizer states and the like."""
    if func is aten.new_empty.default and not args[0]:
        # Programs that copy a tensor through its storage call this first.
        raise TypeError(
            f"new_empty: cannot copy through the storage, as async_save does: the memory of a {type(x).__name__} holds "
            f"{x.fmt.name} blocks, not its values; use weight.dequantize(), or model.state_dict()"
        )
    kwargs.pop("memory_format", None)
    like = torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)
    return func(like, *args, **kwargs)


@implements(aten.copy_.default)
def _copy_(func: Operation, x: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> QuantizedTensor:
    """Copy the bytes of a tensor of the same kind, or quantize high-precision values like `x`; never copy from
    quantized to high precision."""
    if not isinstance(x, QuantizedTensor):
        raise NotImplementedError(
            f"copy_: the source is a {type(src).__name__} ({layers_of([src])}), but the target a plain tensor; copy "
            "from source.dequantize() (fully_shard: convert with master_weights=True; torch.autograd.graph.save_on_cpu:"
            " pin_memory=False)"
        )
    src = source_for("copy_", x, src)
    # Count the change, because layers save the payload for backward, which must then raise.
    with _compat.counting_changes():
        for mine, theirs in zip(x.parts().values(), src.parts().values()):
            mine.copy_(theirs, non_blocking=non_blocking)
    return x


@implements(aten.equal.default, of_shards=True)
def _equal(func: Operation, x: torch.Tensor, y: torch.Tensor) -> bool:
    if not (isinstance(x, QuantizedTensor) and isinstance(y, QuantizedTensor)):
        return False
    same_kind = type(x) is type(y) and x.shape == y.shape and x.fmt is y.fmt
    return same_kind and all(func(as_bits(a), as_bits(b)) for a, b in zip(x.parts().values(), y.parts().values()))


@implements(aten.is_pinned.default, of_shards=True)
def _is_pinned(func: Operation, x: QuantizedTensor, *args: Any) -> bool:
    return x.qdata.is_pinned()


# --- collectives ------------------------------------------------------------------------------------------------------
#
# `distribute_tensor` sends a layer's shards from one rank to all. Payload and scales are sent separately, as integers.


def _scatter(
    func: Operation, outputs: list[QuantizedTensor], inputs: list[list[QuantizedTensor]], *options: Any
) -> tuple[list[QuantizedTensor], torch.ScriptObject]:
    # Only the sending rank has inputs.
    works = [
        func([as_bits(part)], [[as_bits(x.parts()[name]) for x in of_ranks] for of_ranks in inputs], *options)[1]
        for name, part in outputs[0].parts().items()
    ]
    return outputs, _last(works)


def _broadcast(
    func: Operation, tensors: list[QuantizedTensor], *options: Any
) -> tuple[list[QuantizedTensor], torch.ScriptObject]:
    """Broadcast the payload. An optimizer that is created afterwards begins with it on all ranks, also on the source.

    Raises NotImplementedError if an optimizer has the master weight already, which would not follow.
    """
    pending = tensors[0].pending_master
    if pending is not None and pending.is_owned:
        raise NotImplementedError(
            f"{func}: the optimizer has the master weight of {layers_of(tensors)}, which a broadcast does not change; "
            "load the state dicts of one rank, of model and optimizer, on all ranks"
        )
    if pending is not None:
        pending.free()
    return tensors, _last([func([as_bits(part)], *options)[1] for part in tensors[0].parts().values()])


def _last(works: list[torch.ScriptObject]) -> torch.ScriptObject:
    """Wait for all handles except the last, and return that one, because the caller waits for only one."""
    for work in works[:-1]:
        _compat.wait_for(work)
    return works[-1]


if torch.distributed.is_available():
    implements(torch.ops.c10d.scatter_.default)(_scatter)
    implements(torch.ops.c10d.broadcast_.default)(_broadcast)


# --- adapters ---------------------------------------------------------------------------------------------------------


@implements(aten.baddbmm.default)
def _add_adapter(
    func: Operation, weight: torch.Tensor, b: torch.Tensor, a: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> MasterWeightTensor:
    """Return beta · weight + alpha · b @ a for experts [E, N, K], which PEFT computes on every use of an adapter.

    The small factors are multiplied in high precision. The weight is decoded while the sum is alive.
    """
    if not isinstance(weight, QuantizedTensor) or weight.config is None:
        raise NotImplementedError(
            f"{func}: an adapter b @ a can be added only to a converted weight; dequantize() it first"
        )
    hp = torch.baddbmm(weight.dequantize(), b, a, beta=beta, alpha=alpha)
    return MasterWeightTensor(hp, dataclasses.replace(weight.config, master_weights=True)).inherit(weight)


@implements(aten.add_.Tensor, aten.sub_.Tensor)
def _merge(func: Operation, weight: torch.Tensor, delta: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
    """`weight += alpha · delta` for a frozen weight, as LoRA merges: decode, add and quantize again.

    It raises if the weight trains, because rounding would lose the small steps of an optimizer.
    """
    is_frozen = isinstance(weight, QuantizedTensor) and not (weight.trains or weight.requires_grad)
    if not is_frozen or isinstance(delta, TorchAOBaseTensor):
        layer = getattr(weight, "layer", "") or "a quantized weight"
        raise NotImplementedError(
            f"{func} of {layer}: a plain delta can be added, as LoRA does, only to a frozen weight; to merge, call "
            "weight.requires_grad_(False) first; to train it, use torchao_blockwise.distributed.MasterWeightOptimizer("
            "torch.optim.AdamW, model, lr=...), or keep high-precision weights (master_weights=True)"
        )
    return weight.copy_(func(weight.dequantize(), delta, alpha=alpha))
