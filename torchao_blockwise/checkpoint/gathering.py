"""Gather the weights of a sharded model, a few at a time, and raise the errors of one rank on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.distributed import sync_weight_scales
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard, QuantizedTensor, fsdp

_T = TypeVar("_T")
# The bytes of gathered tensors held at once, in addition to the model: about a layer of a model with 8 billion
# parameters.
_BUCKET_BYTES = 256 * 2**20


def reshard(model: nn.Module) -> bool:
    """Reshard the Parameters that FSDP2 has left gathered, and return whether the model is sharded."""
    if dist.is_available():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    return any(_compat.local_of(p) is not p for p in model.parameters())


def prepare_gather(model: nn.Module) -> bool:
    """Prepare the model for gathering and return whether it is sharded; a collective if FSDP2 shards it.

    Parameters that FSDP2 has left gathered are resharded, and shards are quantized from their current values.
    """
    is_sharded = reshard(model)
    if is_sharded:
        sync_weight_scales(model)
    return is_sharded


class _Piece(NamedTuple):
    """A tensor to gather. x: an unsharded tensor, or a DTensor, for which the other fields are set.

    part: what this rank sends. shape: of the gathered parts. make: builds the weight from the gathered parts.
    """

    x: Any
    part: torch.Tensor | None = None
    shape: torch.Size = torch.Size()
    make: Callable[[torch.Tensor], torch.Tensor] = lambda gathered: gathered


def gather_weights(tensors: Iterable[tuple[torch.Tensor, bool]]) -> Iterator[torch.Tensor]:
    """Yield each tensor, gathered, in this order and on all ranks, bitwise identical to the unsharded model's.

    tensors: (tensor, whether its high-precision values are needed).
    Weights that FSDP2 gathers quantized are sent quantized: one byte an element in FP8, half a byte in NVFP4 if rows
    split evenly. All others are sent in high precision: weights whose values are needed, and those that tensor
    parallelism splits as well. Collectives are coalesced up to _BUCKET_BYTES, since launching most of them takes longer
    than sending the data.
    """
    waiting: list[_Piece] = []
    held = 0
    for x, values in tensors:
        piece = _piece_of(x, values)
        nbytes = 0 if piece.part is None else piece.shape.numel() * piece.part.element_size()
        if waiting and held + nbytes > _BUCKET_BYTES:
            yield from _made(waiting)
            waiting, held = [], 0
        waiting.append(piece)
        held += nbytes
    yield from _made(waiting)


def _piece_of(x: torch.Tensor, values: bool) -> _Piece:
    local: Any = _compat.local_of(x)
    if local is x:
        return _Piece(x)
    if isinstance(local, QuantizedShard):
        return _piece_of_shard(x, local)
    if not isinstance(local, MasterWeightTensor):
        return _Piece(x, local, x.shape)
    shard = local.shard
    # With tensor parallelism in addition, FSDP2's payload and scales cover only a part of the weight.
    if isinstance(shard, QuantizedShard) and not values and shard.part.shape == x.shape:
        return _piece_of_shard(x, shard)
    hp = local.hp.to(fsdp.gathered_dtype(local))
    return _Piece(x, hp, x.shape, lambda gathered: MasterWeightTensor(gathered, local.config))


def _piece_of_shard(x: Any, shard: QuantizedShard) -> _Piece:
    layout, element = shard.part, shard.fmt.element
    payload, stored = shard.qdata.view(torch.uint8), shard.qdata.dtype
    if shard.ready is not None:
        # The current stream may not be the one that quantized the weight.
        torch.cuda.current_stream(payload.device).wait_event(shard.ready)
    # A split of another dim than rows may fall between two codes of one byte.
    as_codes = layout.dim > 0 and element.per_byte > 1

    def quantized(gathered: torch.Tensor) -> QuantizedTensor:
        qdata = element.pack(gathered) if as_codes else gathered.view(stored)
        return fsdp.quantized(qdata, layout, shard.scale, shard.global_scale, layout.dtype)

    if as_codes:
        payload = element.unpack(payload, shard.shape[-1]).contiguous()
    shape = x.shape if layout.dim else torch.Size((*x.shape[:-1], payload.shape[-1]))
    return _Piece(x, payload, shape, quantized)


def _made(pieces: list[_Piece]) -> Iterator[torch.Tensor]:
    """Gather the pieces and yield each tensor; its memory is released when the next one is requested."""
    gathered = _gathered(pieces)
    for piece in pieces:
        parts = gathered.pop(0)
        yield piece.x if parts is None else piece.make(parts)


def _gathered(pieces: list[_Piece]) -> list[torch.Tensor | None]:
    """Return the gathered parts of each piece, None for an unsharded tensor."""
    from torch.distributed.tensor import DTensor, Shard

    gathered: list[torch.Tensor | None] = [None] * len(pieces)
    together: dict[Any, list[int]] = {}
    for i, (x, part, shape, _) in enumerate(pieces):
        if part is None:
            continue
        mesh = x.device_mesh
        if mesh.ndim == 1 and x.placements == (Shard(0),) and x.shape[0] % mesh.size() == 0:
            # The concatenated parts are the tensor. One call takes tensors of one process group and one device.
            together.setdefault((mesh.get_group(), part.device), []).append(i)
        else:
            stride = torch.empty(shape, device="meta").stride()
            placed = DTensor.from_local(part.detach(), mesh, x.placements, run_check=False, shape=shape, stride=stride)
            gathered[i] = placed.full_tensor()
    for (group, _), alike in together.items():
        parts = [pieces[i].part.detach().contiguous() for i in alike]  # type: ignore[union-attr]  # they have one
        outs = [part.new_empty(pieces[i].shape) for i, part in zip(alike, parts, strict=True)]
        # One call takes one dtype.
        as_bytes = ([x.view(torch.uint8) for x in xs] for xs in (outs, parts))
        group.allgather_into_tensor_coalesced(*as_bytes).wait()
        for i, out in zip(alike, outs, strict=True):
            gathered[i] = out
    return gathered


def shard_of(whole: torch.Tensor, x: Any) -> torch.Tensor:
    """Return this rank's part of `whole`, placed as the DTensor `x`, without communication."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None).to_local()


def on_all_ranks(shared: bool, work: Callable[[], _T]) -> _T:
    """Return `work()` of this rank; if it raises on a rank, raise the error of the first such rank on all ranks."""
    if not shared:
        return work()
    result, raised = None, None
    try:
        result = work()
    except Exception as error:
        raised = error
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, raised)
    for error_of_rank in errors:
        if error_of_rank is not None:
            raise error_of_rank
    return result  # type: ignore[return-value]  # it raised nothing


def on_first_rank(shared: bool, work: Callable[[], _T]) -> _T | None:
    """Return `work()` on the first rank and None on the others; an error is raised on all ranks."""
    return on_all_ranks(shared, work if not shared or dist.get_rank() == 0 else lambda: None)
