"""Views of quantized tensors: exact on payload and scales, on borders of blocks, or refused with a remedy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from torchao_blockwise._compat.torch_types import Operation
from torchao_blockwise.tensors.quantized import QuantizedTensor, implements, map_tensors
from torchao_blockwise.tensors.transposed_weight import TransposedWeight, swaps_last_dims

aten = torch.ops.aten


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
    return x._make(qdata, scale, columns=end - start if axis == -1 else None)


@implements(aten.split.Tensor)
def _split(func: Operation, x: QuantizedTensor, size: int, dim: int = 0) -> list[QuantizedTensor]:
    length = x.shape[dim]
    return [_slice(aten.slice.Tensor, x, dim, start, min(start + size, length)) for start in range(0, length, size)]


@implements(aten.split_with_sizes.default)
def _split_with_sizes(func: Operation, x: QuantizedTensor, sizes: Sequence[int], dim: int = 0) -> list[QuantizedTensor]:
    ends = list(itertools.accumulate(sizes))
    return [_slice(aten.slice.Tensor, x, dim, end - size, end) for size, end in zip(sizes, ends)]


@implements(aten.unbind.int)
def _unbind(func: Operation, x: QuantizedTensor, dim: int = 0) -> list[QuantizedTensor]:
    return [_select(aten.select.int, x, dim, index) for index in range(x.shape[dim])]


@implements(aten.select.int)
def _select(func: Operation, x: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    if dim % x.dim() >= x.dim() - 2:
        raise NotImplementedError(
            f"select: dim {dim} runs through blocks; slice on their borders or dequantize() first"
        )
    return _by_matrices(func, x, dim % x.dim(), index)


@implements(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(func: Operation, x: QuantizedTensor, size: Sequence[int]) -> QuantizedTensor:
    """Regroup leading dims; rows may join them where no block straddles, the last dim stays."""
    size = _infer_size(list(size), x.numel())
    rows, columns = x.shape[-2:]
    block_rows = x.fmt.block[0]
    keeps_columns = len(size) >= 2 and size[-1] == columns and math.prod(size) == x.numel()
    if not keeps_columns or (size[-2] != rows and (rows % block_rows or size[-2] % block_rows)):
        raise ValueError(
            f"view: {list(x.shape)} as {size} would cut blocks of {block_rows}x{x.fmt.block[1]}; keep the last dim, "
            f"and rows in multiples of {block_rows}, or dequantize() first (DistributedDataParallel: init_sync=False; "
            "FullyShardedDataParallel: use torch.distributed.fsdp.fully_shard)"
        )
    of_matrices = _scale_of_matrices(x)
    if of_matrices is not None:
        if math.prod(size[:-2]) != of_matrices.numel():
            raise ValueError(
                f"view: {list(x.shape)} as {size} would join matrices that have a tensor scale each; keep the last two "
                "dims, or dequantize() first"
            )
        of_matrices = of_matrices.view(size[:-2])
    scale_rows = x.fmt.grid(size[-2], columns)[0]
    qdata = x.qdata.view(*size[:-1], x.qdata.shape[-1])
    scale = x.scale.view(*size[:-2], scale_rows, x.scale.shape[-1])
    return x._make(qdata, scale, global_scale=of_matrices)


def _scale_of_matrices(x: QuantizedTensor) -> torch.Tensor | None:
    """The tensor scales of the matrices [.., N, K] of `x`, [..]; None where it has one for all, or none."""
    return x.global_scale if x.global_scale is not None and x.global_scale.dim() else None


def _by_matrices(func: Operation, x: QuantizedTensor, *args: int) -> QuantizedTensor:
    """`func`, which changes leading dims only, of all parts."""
    of_matrices = _scale_of_matrices(x)
    of_matrices = None if of_matrices is None else func(of_matrices, *args)
    return x._make(func(x.qdata, *args), func(x.scale, *args), global_scale=of_matrices)


def _infer_size(size: list[int], numel: int) -> list[int]:
    if size.count(-1) == 1:
        known = math.prod(s for s in size if s != -1)
        size[size.index(-1)] = numel // known if known else 0
    return size


@implements(aten.as_strided.default)
def _as_strided(
    func: Operation, x: QuantizedTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> QuantizedTensor:
    """The same tensor again: FSDP2 asks for it. Other strides would cut blocks."""
    if list(size) != list(x.shape) or list(stride) != list(x.stride()) or storage_offset:
        raise NotImplementedError(
            f"as_strided: only with the tensor's own size {list(x.shape)} and strides {list(x.stride())}, got "
            f"{list(size)} and {list(stride)}; dequantize() first"
        )
    return map_tensors(x, lambda t: t.detach())


@implements(aten.unsqueeze.default)
def _unsqueeze(func: Operation, x: QuantizedTensor, dim: int) -> QuantizedTensor:
    dim = dim % (x.dim() + 1)
    if dim > x.dim() - 2:
        raise ValueError(f"unsqueeze: dim {dim} lies inside the blocks; use a dim of at most {x.dim() - 2}")
    return _by_matrices(func, x, dim)


@implements(aten.t.default)
def _t(func: Operation, x: QuantizedTensor) -> QuantizedTensor:
    return x.transposed_view()


@implements(aten.transpose.int)
def _transpose(func: Operation, x: QuantizedTensor, dim0: int, dim1: int) -> QuantizedTensor | TransposedWeight:
    """A view with the last two dims swapped; of experts a `TransposedWeight`."""
    if swaps_last_dims(func, (x, dim0, dim1)):
        return TransposedWeight(x)
    if {dim0 % x.dim(), dim1 % x.dim()} != {x.dim() - 2, x.dim() - 1}:
        raise NotImplementedError(f"transpose: only the last two dims can be swapped, got {dim0} and {dim1}")
    return x.transposed_view()


@implements(aten.permute.default)
def _permute(func: Operation, x: QuantizedTensor, dims: Sequence[int]) -> QuantizedTensor | TransposedWeight:
    """What `.T` calls."""
    if [d % x.dim() for d in dims] != [*range(x.dim() - 2), x.dim() - 1, x.dim() - 2]:
        raise NotImplementedError(f"permute: only the last two dims can be swapped, got {list(dims)}")
    return _transpose(aten.transpose.int, x, -2, -1)
