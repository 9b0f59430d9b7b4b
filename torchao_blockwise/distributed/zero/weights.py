"""Primary weights: quantized Parameters, whose masters an optimizer alone has, and what ranks exchange of them.

    masters of my range ─ cast ─▶ my payload entries ─ one all-gather of bytes ─▶ whole payloads, merged at the edges

ZeRO-1's split: the weights of a call lie one after the other in one flat range of elements, which the ranks divide
evenly, wherever that cuts weights, rows, blocks or bytes. FSDP2's split: each rank has rows of each weight and its
master, a DTensor placed as the weight; nothing is gathered before the layer is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from torchao_blockwise import _compat, ops
from torchao_blockwise.distributed.cast import shard_part
from torchao_blockwise.distributed.fsdp import cast_shards
from torchao_blockwise.distributed.master_weights import write_masters
from torchao_blockwise.distributed.rank_consistency import naming_absent
from torchao_blockwise.tensors import QuantizedShard, QuantizedTensor
from torchao_blockwise.tensors.pending_master import PendingMaster
from torchao_blockwise.tensors.quantized import parts_of

# What errors of the cast name.
_CAST = "cast_master_weights"


@dataclass(eq=False)
class PrimaryWeight:
    """A quantized Parameter and the fp32 master of the elements that this rank steps.

    weight: a QuantizedTensor, or the DTensor of FSDP2 around a QuantizedShard.
    master: [.., N, K], a DTensor where the weight is one; under ZeRO's split flat [edges[rank + 1] - edges[rank]].
    edges: rank r has the elements [edges[r], edges[r + 1]) of the flat weight; (0, numel) without that split.
    """

    name: str
    weight: torch.Tensor
    edges: tuple[int, ...]
    rank: int
    master: torch.Tensor = field(init=False)

    @property
    def quantized(self) -> QuantizedTensor:
        """What this rank holds of the weight; another object after a move."""
        return _compat.local_of(self.weight)  # type: ignore[return-value]

    @property
    def shard(self) -> QuantizedShard | None:
        """FSDP2's, if it shards the weight."""
        return quantized if isinstance(quantized := self.quantized, QuantizedShard) else None

    @property
    def pending(self) -> PendingMaster:
        """The values that are yet to become the master's."""
        if self.quantized.pending_master is None:
            self.quantized.pending_master = PendingMaster()
        return self.quantized.pending_master

    @property
    def flat_master(self) -> torch.Tensor:
        return _compat.local_of(self.master.detach()).view(-1)

    @property
    def is_split(self) -> bool:
        """Whether the ranks of ZeRO divide the weight's elements."""
        return self.master.dim() == 1

    @property
    def range(self) -> slice:
        return slice(self.edges[self.rank], self.edges[self.rank + 1])

    @property
    def lengths(self) -> list[int]:
        """Elements that each rank has."""
        return [end - start for start, end in itertools.pairwise(self.edges)]

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """What the master covers of a tensor in the weight's shape; a view where that is contiguous."""
        return whole.reshape(-1)[self.range] if self.is_split else whole


def flat_edges(sizes: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Where each rank begins in tensors of `sizes` elements laid end to end and divided evenly, and each one's end."""
    chunk = -(-sum(sizes) // ranks)
    begins = itertools.accumulate(sizes, initial=0)
    return [
        (*(min(max(rank * chunk - begin, 0), size) for rank in range(ranks)), size)
        for begin, size in zip(begins, sizes)
    ]


@torch.no_grad()
def write_weights(weights: Sequence[PrimaryWeight], group: dist.ProcessGroup | None) -> None:
    """Quantize the masters into the weights, bit for bit what quantizing them whole gives; a collective where split.

    group: ranks that split the masters, or None. One all-reduce of amaxes and one all-gather of payload a device; of
        weights that FSDP2 shards, one all-reduce a shard group.
    """
    shards = [(w, w.shard, _compat.local_of(w.master.detach())) for w in weights]
    cast_shards([(_shard_group(w.weight), x, shard_part(x, values)) for w, x, values in shards if x is not None])
    weights = [w for w in weights if w.shard is None]
    for device in dict.fromkeys(w.weight.device for w in weights):
        here = [w for w in weights if w.weight.device == device]
        quantized, masters = [w.quantized for w in here], [w.flat_master for w in here]
        starts = [w.range.start for w in here]
        if group is None:
            write_masters(_CAST, quantized, masters, starts, None)
            continue
        # Bytes of each weight's payload that each rank sends.
        pieces = Pieces([_entries(w) for w in here])
        sent = torch.zeros(pieces.chunk, dtype=torch.uint8, device=device)
        write_masters(_CAST, quantized, masters, starts, group, pieces.of(sent, here[0].rank))
        _merge(here, pieces, _gathered(sent, group, f"gather {len(here)} quantized weights"))


def _shard_group(weight: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks over which FSDP2 has split a weight; None where each has all of it."""
    dims = [i for i, placement in enumerate(weight.placements) if placement.is_shard()]  # type: ignore[attr-defined]
    return weight.device_mesh.get_group(dims[-1]) if dims else None  # type: ignore[attr-defined]


class Pieces:
    """Where weights lie in a buffer a rank: one after the other, each with as many entries as that rank has of it.

    entries: of each weight, for each rank. chunk: length of the largest rank's buffer, which is that of all.
    """

    def __init__(self, entries: Sequence[Sequence[int]]):
        self.begins = [list(itertools.accumulate(of_rank, initial=0)) for of_rank in zip(*entries)]
        self.chunk = max(of_rank[-1] for of_rank in self.begins)

    def of(self, buffer: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """The piece of each weight in the buffer of `rank`."""
        return [buffer[begin:end] for begin, end in itertools.pairwise(self.begins[rank])]


def _entries(w: PrimaryWeight) -> list[int]:
    columns, fmt = w.weight.shape[-1], w.quantized.fmt
    return [ops.shard_entries(start, n, columns, fmt)[1] for start, n in zip(w.edges, w.lengths)]


def _merge(weights: Sequence[PrimaryWeight], pieces: Pieces, received: torch.Tensor) -> None:
    """Write the ranks' payload entries to whole payloads; at the edges two ranks may share a byte."""
    of_ranks = [pieces.of(buffer, rank) for rank, buffer in enumerate(received)]
    for fmt in dict.fromkeys(w.quantized.fmt for w in weights):
        of_format = [(i, w) for i, w in enumerate(weights) if w.quantized.fmt is fmt]
        owners = [[rank for rank, n in enumerate(w.lengths) if n] for _, w in of_format]
        ops.merge_shards_(
            [w.quantized.qdata for _, w in of_format],
            [[of_ranks[rank][i] for rank in ranks] for (i, _), ranks in zip(of_format, owners)],
            [[w.edges[rank] for rank in ranks] for (_, w), ranks in zip(of_format, owners)],
            [[w.lengths[rank] for rank in ranks] for (_, w), ranks in zip(of_format, owners)],
            [w.weight.shape[-1] for _, w in of_format],
            fmt,
        )


def _gathered(sent: torch.Tensor, group: dist.ProcessGroup, what: str) -> torch.Tensor:
    """[ranks, n]: what each rank has sent."""
    received = sent.new_empty(dist.get_world_size(group), sent.numel())
    with naming_absent("MasterWeightOptimizer", what, group):
        _compat.all_gather(received.view(-1), sent, group)
    return received


def gather_parts(weight: PrimaryWeight, part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The whole tensor [.., N, K] of which each rank has the part of its master; a collective where split."""
    if not weight.is_split:
        return part
    assert group is not None, "ranks that split it"
    lengths = weight.lengths
    sent = part.new_zeros(max(lengths))
    sent[: part.numel()] = part
    received = _gathered(sent, group, f"gather the parts of {weight.name}")
    return torch.cat([r[:n] for r, n in zip(received, lengths)]).view(weight.weight.shape)


@torch.no_grad()
def send_from_first(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank of `group` the values of its first rank, bit for bit."""
    for x in tensors:
        for plain in _plain_tensors(x.detach()):
            if plain.numel():
                # As bytes: gloo knows no fp8.
                dense = plain.contiguous()
                dist.broadcast(dense.view(-1).view(torch.uint8), group=group, group_src=0)
                if dense is not plain:
                    plain.copy_(dense)


def _plain_tensors(x: torch.Tensor) -> Iterator[torch.Tensor]:
    if not hasattr(x, "__tensor_flatten__"):
        yield x
        return
    # Not the key of its random bits: each rank has its own.
    names = parts_of(x) if isinstance(x, QuantizedTensor) else x.__tensor_flatten__()[0]
    for name in names:
        yield from _plain_tensors(getattr(x, name))
