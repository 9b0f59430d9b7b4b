"""Whole weights of a model that ranks share, a few at a time, and parts of whole ones; what ranks agree on."""

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
# Of whole tensors that travel together, so held next to the model: a layer of models of 8 billion parameters.
_BUCKET_BYTES = 256 * 2**20


def is_shared(model: nn.Module) -> bool:
    """Whether ranks hold parts of the model, which is made ready to be gathered; a collective where FSDP2 shards it.

    What FSDP2 has left gathered is sharded again, and the quantized payload of shards is that of their values now.
    """
    if dist.is_available():
        from torch.distributed.fsdp import FSDPModule

        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.reshard()
        if sharded:
            sync_weight_scales(model)
    return any(_compat.local_of(p) is not p for p in model.parameters())


class _Piece(NamedTuple):
    """A whole tensor x; or a DTensor x, this rank's part, the shape of all parts, and what makes the whole of them."""

    x: Any
    part: torch.Tensor | None = None
    shape: torch.Size = torch.Size()
    make: Callable[[torch.Tensor], torch.Tensor] = lambda gathered: gathered


def wholes(tensors: Iterable[tuple[torch.Tensor, bool]]) -> Iterator[torch.Tensor]:
    """Each tensor, whole, in this order; on all ranks, with the bytes that one device would have.

    tensors: (tensor, whether its values are wanted).
    What FSDP2 gathers quantized travels so: a byte an element in FP8, half a byte in NVFP4 where rows split evenly.
    Other parts of master weights, those that tensor parallelism splits as well, and where values are wanted all travel
    in high precision. A few travel together, of _BUCKET_BYTES at most: most take longer to ask for than to send.
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
    # FSDP2's ranks have payload and scales; under tensor parallelism as well they are those of a part.
    if isinstance(shard, QuantizedShard) and not values and shard.part.shape == x.shape:
        return _piece_of_shard(x, shard)
    hp = local.hp.to(fsdp.gathered_dtype(local))
    return _Piece(x, hp, x.shape, lambda gathered: MasterWeightTensor(gathered, local.config))


def _piece_of_shard(x: Any, shard: QuantizedShard) -> _Piece:
    layout, element = shard.part, shard.fmt.element
    payload, stored = shard.qdata.view(torch.uint8), shard.qdata.dtype
    if shard.ready is not None:
        # Weights may be asked for on another stream.
        torch.cuda.current_stream(payload.device).wait_event(shard.ready)
    # Ranks may cut other dims than rows between any two codes.
    as_codes = layout.dim > 0 and element.per_byte > 1

    def quantized(gathered: torch.Tensor) -> QuantizedTensor:
        qdata = element.pack(gathered) if as_codes else gathered.view(stored)
        return fsdp.quantized(qdata, layout, shard.scale, shard.global_scale, layout.dtype)

    if as_codes:
        payload = element.unpack(payload, shard.shape[-1]).contiguous()
    shape = x.shape if layout.dim else torch.Size((*x.shape[:-1], payload.shape[-1]))
    return _Piece(x, payload, shape, quantized)


def _made(pieces: list[_Piece]) -> Iterator[torch.Tensor]:
    """The whole tensors of the pieces; each is let go of when the next is asked for."""
    gathered = _gathered(pieces)
    for piece in pieces:
        parts = gathered.pop(0)
        yield piece.x if parts is None else piece.make(parts)


def _gathered(pieces: list[_Piece]) -> list[torch.Tensor | None]:
    """All ranks' parts of each piece, None of a whole tensor."""
    from torch.distributed.tensor import DTensor, Shard

    gathered: list[torch.Tensor | None] = [None] * len(pieces)
    together: dict[Any, list[int]] = {}
    for i, (x, part, shape, _) in enumerate(pieces):
        if part is None:
            continue
        mesh = x.device_mesh
        if mesh.ndim == 1 and x.placements == (Shard(0),) and x.shape[0] % mesh.size() == 0:
            # All parts one behind another are the whole tensor. One call takes tensors of a group and a device.
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
    """This rank's part of `whole`, placed as the DTensor `x`; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None).to_local()


def agreed_by_all(shared: bool, work: Callable[[], _T]) -> _T:
    """Return `work()` on this rank; an error of the first rank that has one is raised on all."""
    if not shared:
        return work()
    result, raised = None, None
    try:
        result = work()
    except Exception as error:
        raised = error
    said: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, raised)
    for failed in said:
        if failed is not None:
            raise failed
    return result  # type: ignore[return-value]  # it raised nothing


def agreed(shared: bool, work: Callable[[], _T]) -> _T | None:
    """Return `work()` on the first rank, None on others; its error is raised on all."""
    return agreed_by_all(shared, work if not shared or dist.get_rank() == 0 else lambda: None)
