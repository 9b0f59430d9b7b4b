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
# Of whole tensors that travel together, so of what is held beside the model: a layer of 8 billion parameters' models.
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
    """This rank's part of a tensor, and what makes the whole tensor of all parts.

    of: the DTensor, or the whole tensor where there are no parts. columns: of all parts, where these are not those of
    `of`.
    """

    of: Any
    part: torch.Tensor | None = None
    columns: int | None = None
    make: Callable[[torch.Tensor], torch.Tensor] = lambda gathered: gathered

    @property
    def shape(self) -> torch.Size:
        """Of all parts."""
        return self.of.shape if self.columns is None else torch.Size((*self.of.shape[:-1], self.columns))

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return 0 if self.part is None else self.shape.numel() * self.part.element_size()

    @property
    def lies_in_rows(self) -> bool:
        """Whether all parts one behind another are the whole tensor, as FSDP2 makes most of them."""
        from torch.distributed.tensor import Shard

        mesh = self.of.device_mesh
        return mesh.ndim == 1 and self.of.placements == (Shard(0),) and self.of.shape[0] % mesh.size() == 0


def wholes(tensors: Iterable[tuple[torch.Tensor, bool]]) -> Iterator[torch.Tensor]:
    """Each tensor, or all of what it is a part of, in this order; on all ranks, as one quantizes it on one device.

    tensors: (tensor, whether its values are wanted).
    What FSDP2 gathers quantized travels so: a byte an element in FP8, half a byte in NVFP4 where it shards rows.
    Other parts of master weights, those that tensor parallelism splits as well, and where values are wanted all travel
    in high precision. A few travel together, of _BUCKET_BYTES at most: most take longer to ask for than to send.
    """
    waiting: list[_Piece] = []
    held = 0
    for x, values in tensors:
        piece = _piece_of(x, values)
        if waiting and held + piece.nbytes > _BUCKET_BYTES:
            yield from _made(waiting)
            waiting, held = [], 0
        waiting.append(piece)
        held += piece.nbytes
    yield from _made(waiting)


def _piece_of(x: torch.Tensor, values: bool) -> _Piece:
    local: Any = _compat.local_of(x)
    if local is x:
        return _Piece(x)
    if isinstance(local, MasterWeightTensor):
        shard = local.shard
        if not values and isinstance(shard, QuantizedShard) and not travels_in_high_precision(x):
            return _piece_of_shard(x, shard)
        hp = local.hp.to(fsdp.gathered_dtype(local))
        return _Piece(x, hp, make=lambda gathered: MasterWeightTensor(gathered, local.config))
    if isinstance(local, QuantizedShard):
        return _piece_of_shard(x, local)
    return _Piece(x, local)


def travels_in_high_precision(x: torch.Tensor) -> bool:
    """Whether `wholes` gathers the master weight `x` in high precision: FSDP2's ranks alone keep payload and scales.

    Under tensor parallelism as well they are those of a part.
    """
    local: Any = _compat.local_of(x)
    if local is x or not isinstance(local, MasterWeightTensor):
        return False
    shard = local.shard
    return not isinstance(shard, QuantizedShard) or shard.part.shape != x.shape


def _piece_of_shard(x: Any, shard: QuantizedShard) -> _Piece:
    layout, element = shard.part, shard.fmt.element
    payload, stored = shard.qdata.view(torch.uint8), shard.qdata.dtype
    if shard.ready is not None:
        # Whoever asks for weights may do so on a stream of its own.
        torch.cuda.current_stream(payload.device).wait_event(shard.ready)
    # Ranks may cut other dims than rows between any two codes.
    as_codes = layout.dim > 0 and element.per_byte > 1

    def quantized(gathered: torch.Tensor) -> QuantizedTensor:
        qdata = element.pack(gathered) if as_codes else gathered.view(stored)
        return fsdp.quantized(qdata, layout, shard.scale, shard.global_scale, layout.dtype)

    if as_codes:
        payload = element.unpack(payload, shard.shape[-1]).contiguous()
    return _Piece(x, payload, None if layout.dim else payload.shape[-1], quantized)


def _made(pieces: list[_Piece]) -> Iterator[torch.Tensor]:
    """The whole tensors of the pieces; each is let go of when the next is asked for."""
    gathered = _gathered(pieces)
    for piece in pieces:
        parts = gathered.pop(0)
        yield piece.of if parts is None else piece.make(parts)


def _gathered(pieces: list[_Piece]) -> list[torch.Tensor | None]:
    """All ranks' parts of each piece, which lie as those of its DTensor do; None of what is whole."""
    gathered: list[torch.Tensor | None] = [None] * len(pieces)
    together: dict[Any, list[int]] = {}
    for i, piece in enumerate(pieces):
        if piece.part is not None and piece.lies_in_rows:
            # Its group, and what one call takes: tensors of a device.
            together.setdefault((piece.of.device_mesh.get_group(), piece.part.device), []).append(i)
        elif piece.part is not None:
            gathered[i] = _by_dtensor(piece)
    for (group, _), alike in together.items():
        parts = [pieces[i].part.detach().contiguous() for i in alike]  # type: ignore[union-attr]  # they have one
        for i, part in zip(alike, parts, strict=True):
            gathered[i] = part.new_empty(pieces[i].shape)
        # One call takes one dtype.
        outs, ins = ([x.view(torch.uint8) for x in xs] for xs in ([gathered[i] for i in alike], parts))  # type: ignore[union-attr]
        group.allgather_into_tensor_coalesced(outs, ins).wait()
    return gathered


def _by_dtensor(piece: _Piece) -> torch.Tensor:
    """Parts of any placement; it takes longer than the bytes do."""
    from torch.distributed.tensor import DTensor

    assert piece.part is not None
    x, part, stride = piece.of, piece.part.detach(), torch.empty(piece.shape, device="meta").stride()
    placed = DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, shape=piece.shape, stride=stride)
    return placed.full_tensor()


def shard_of(whole: torch.Tensor, x: Any) -> torch.Tensor:
    """This rank's part of `whole`, placed as the DTensor `x`; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None).to_local()


def agreed_by_all(shared: bool, work: Callable[[], _T]) -> _T:
    """What `work` gives on this rank; what it raises on the first rank where it does is raised on all."""
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
    """What `work` gives on the first rank, None on others; what it raises there is raised on all."""
    return agreed_by_all(shared, work if not shared or dist.get_rank() == 0 else lambda: None)
