"""Primary weights, which are quantized Parameters whose masters only an optimizer has, and their collectives.

    masters of a rank ─ cast ─▶ payload entries ─ one all-gather of bytes ─▶ whole payloads, merged at the edges
    gradients of a rank ─ one reduce-scatter (ZeRO-2) ─▶ mean of its range, f32, added to its masters' gradients

ZeRO concatenates the weights to one flat range of elements, which is divided evenly over the ranks, also inside of
weights, rows, blocks and bytes. FSDP2 gives each rank rows of each weight. The master is a DTensor with the placement
of the weight, and nothing is gathered before the layer is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from torchao_blockwise import _compat, ops
from torchao_blockwise.distributed.cast import cast_of_shard
from torchao_blockwise.distributed.fsdp import cast_shards
from torchao_blockwise.distributed.master_weights import write_masters
from torchao_blockwise.distributed.rank_consistency import check_same_once, name_absent_ranks
from torchao_blockwise.tensors import QuantizedShard, QuantizedTensor
from torchao_blockwise.tensors.pending_master import PendingMaster

# The caller in errors.
NAME = "MasterWeightOptimizer"


@dataclass(eq=False)
class PrimaryWeight:
    """A quantized Parameter and the fp32 master of the elements that this rank steps.

    weight: a QuantizedTensor, or the DTensor of FSDP2 around a QuantizedShard.
    master: [.., N, K], a DTensor if the weight is one; with ZeRO flat [edges[rank + 1] - edges[rank]].
    edges: rank r has the elements [edges[r], edges[r + 1]) of the flat weight; (0, numel) without ZeRO.
    """

    name: str
    weight: torch.Tensor
    edges: tuple[int, ...]
    rank: int
    master: torch.Tensor = field(init=False)

    @property
    def quantized(self) -> QuantizedTensor:
        """This rank's tensor of the weight; another object after a move."""
        return _compat.local_of(self.weight)  # type: ignore[return-value]

    @property
    def shard(self) -> QuantizedShard | None:
        """FSDP2's shard, if it shards the weight."""
        return quantized if isinstance(quantized := self.quantized, QuantizedShard) else None

    @property
    def pending(self) -> PendingMaster:
        """Loaded values that the master does not have yet."""
        if self.quantized.pending_master is None:
            self.quantized.pending_master = PendingMaster()
        return self.quantized.pending_master

    @property
    def is_split(self) -> bool:
        """Whether ZeRO splits the master."""
        return self.master.dim() == 1

    @property
    def lengths(self) -> list[int]:
        """The number of elements of each rank."""
        return [end - start for start, end in itertools.pairwise(self.edges)]

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the elements of the master in a tensor of the weight's shape; a view if that is contiguous."""
        return whole.reshape(-1)[self.edges[self.rank] : self.edges[self.rank + 1]] if self.is_split else whole


def flat_edges(sizes: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Return, of each tensor of `sizes` in an evenly divided concatenation, where ranks begin, and its end."""
    chunk = -(-sum(sizes) // ranks)
    begins = itertools.accumulate(sizes, initial=0)
    return [
        (*(min(max(rank * chunk - begin, 0), size) for rank in range(ranks)), size)
        for begin, size in zip(begins, sizes)
    ]


@torch.no_grad()
def write_weights(weights: Sequence[PrimaryWeight], group: dist.ProcessGroup | None) -> None:
    """Quantize masters into weights, bitwise identical to unsharded ones; a collective if masters are split.

    group: ranks that split the masters, or None. One all-reduce of amaxes and one all-gather of payload per device; for
        weights that FSDP2 shards, one all-reduce per shard group.
    """
    shards = [(w, w.shard, _compat.local_of(w.master.detach())) for w in weights]
    cast_shards([(_shard_group(w.weight), x, cast_of_shard(x, values)) for w, x, values in shards if x is not None])
    weights = [w for w in weights if w.shard is None]
    for device in dict.fromkeys(w.weight.device for w in weights):
        here = [w for w in weights if w.weight.device == device]
        quantized, masters = [w.quantized for w in here], [w.master.detach().view(-1) for w in here]
        starts = [w.edges[w.rank] for w in here]
        if group is None:
            write_masters(NAME, quantized, masters, starts, None)
            continue
        of_ranks = list(zip(*map(_bytes_of_ranks, here)))
        sent = torch.zeros(max(map(sum, of_ranks)), dtype=torch.uint8, device=device)
        write_masters(NAME, quantized, masters, starts, group, _pieces(sent, of_ranks[here[0].rank]))
        received = _gathered(sent, group, f"gather {len(here)} quantized weights")
        _merge(here, [_pieces(buffer, lengths) for buffer, lengths in zip(received, of_ranks)])


def _shard_group(weight: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the group over which FSDP2 splits a weight; None if each rank has all of it."""
    dims = [i for i, placement in enumerate(weight.placements) if placement.is_shard()]  # type: ignore[attr-defined]
    return weight.device_mesh.get_group(dims[-1]) if dims else None  # type: ignore[attr-defined]


def _pieces(buffer: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    """Split the concatenated parts of weights in a rank's buffer, which has the length of the largest rank's."""
    return buffer[: sum(lengths)].split(list(lengths))


def _bytes_of_ranks(w: PrimaryWeight) -> list[int]:
    """Return the number of payload bytes that each rank sends."""
    columns, fmt = w.weight.shape[-1], w.quantized.fmt
    return [ops.shard_entries(start, n, columns, fmt)[1] for start, n in zip(w.edges, w.lengths)]


def _merge(weights: Sequence[PrimaryWeight], of_ranks: Sequence[Sequence[torch.Tensor]]) -> None:
    """Merge the bytes of all ranks into whole payloads; two ranks may share a byte at their edge."""
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
    """Return [ranks, n], the buffers that ranks have sent."""
    received = sent.new_empty(dist.get_world_size(group), sent.numel())
    with name_absent_ranks(NAME, what, group):
        # The older name warns since PyTorch 2.13.
        (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(received.view(-1), sent, group=group)
    return received


def gather_parts(weight: PrimaryWeight, part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the unsharded tensor [.., N, K] of which each rank has `part`; a collective if ZeRO splits it."""
    if not weight.is_split:
        return part
    assert group is not None, "ranks that split it"
    lengths = weight.lengths
    sent = part.new_zeros(max(lengths))
    sent[: part.numel()] = part
    received = _gathered(sent, group, f"gather the parts of {weight.name}")
    return torch.cat([r[:n] for r, n in zip(received, lengths)]).view(weight.weight.shape)


@torch.no_grad()
def reduce_gradients(
    weights: Sequence[PrimaryWeight], others: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Average gradients over the ranks of `group`: shards go to the masters of `weights`, `others` change in place.

    weights: split over `group`. Shards are added to the gradients of masters, and the unsharded gradients are dropped.
    others: parameters that each rank steps unsharded; gradients that are averaged already do not change.
    Gradients are divided by the number of ranks and then summed, in f32 for `weights`, in the gradient's dtype for
    `others`. With two ranks this is bitwise identical to an all-reduce; with more ranks sums have another order.
    Raises ValueError if ranks have gradients of different parameters, RuntimeError if a rank is missing.
    """
    with_grad = [w for w in weights if w.weight.grad is not None]
    grads = [p.grad for p in others if p.grad is not None]
    # Gradients are summed by position. Ranks compare each set of parameters once.
    entries = [f"a gradient of {w.name}" for w in with_grad]
    entries += [f"a gradient of shape {list(grad.shape)} of a parameter without a master" for grad in grads]
    check_same_once(NAME, group, tuple(entries), entries)
    for device in dict.fromkeys(w.weight.device for w in with_grad):
        _reduce_scatter([w for w in with_grad if w.weight.device == device], group)
    for kind in dict.fromkeys((grad.device, grad.dtype) for grad in grads):
        alike = [grad for grad in grads if (grad.device, grad.dtype) == kind]
        flat = torch.cat([grad.reshape(-1) for grad in alike]).div_(dist.get_world_size(group))
        dist.all_reduce(flat, group=group)
        for grad, mean in zip(alike, flat.split([grad.numel() for grad in alike])):
            grad.copy_(mean.view(grad.shape))


@torch.no_grad()
def clip_gradients(
    weights: Sequence[PrimaryWeight], others: Sequence[torch.Tensor], group: dist.ProcessGroup, max_norm: float
) -> torch.Tensor:
    """Scale averaged gradients by min(1, max_norm / (norm + 1e-6)), as PyTorch does, and return the norm before.

    norm² = Σ over ranks of ‖shards‖² + ‖others‖², f32.
    """
    masters = [w.master for w in weights if w.master.grad is not None]
    wholes = [p for p in others if p.grad is not None]
    device = (masters or wholes)[0].device
    squares, square = (
        torch.nn.utils.get_total_norm([p.grad for p in some if p.grad is not None]).to(device, torch.float32).square()
        for some in (masters, wholes)
    )
    dist.all_reduce(squares, group=group)
    norm = (squares + square).sqrt()
    torch.nn.utils.clip_grads_with_norm_([*masters, *wholes], max_norm, norm)
    return norm


def _reduce_scatter(weights: Sequence[PrimaryWeight], group: dist.ProcessGroup) -> None:
    of_ranks = list(zip(*(w.lengths for w in weights)))
    # Zeros, because the padding of shorter ranges is reduced as well.
    sent = torch.zeros(len(of_ranks), max(map(sum, of_ranks)), dtype=torch.float32, device=weights[0].weight.device)
    targets = zip(*(_pieces(buffer, lengths) for buffer, lengths in zip(sent, of_ranks)))
    for weight, of_weight in zip(weights, targets):
        grad = weight.weight.grad
        assert grad is not None, "chosen by it"
        for target, values in zip(of_weight, grad.reshape(-1).split(weight.lengths)):
            target.copy_(values)
        weight.weight.grad = None
    received = torch.empty_like(sent[0])
    with name_absent_ranks(NAME, f"average the gradients of {len(weights)} weights", group):
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce_scatter(received, sent.div_(len(of_ranks)).view(-1), group=group)
    for weight, mean in zip(weights, _pieces(received, of_ranks[weights[0].rank])):
        weight.master.grad = mean.clone() if weight.master.grad is None else weight.master.grad.add_(mean)


@torch.no_grad()
def broadcast_from_first(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Broadcast the values of the first rank of `group`."""
    for x in tensors:
        for plain in _plain_tensors(x.detach()):
            if plain.numel():
                # As bytes, because gloo does not support fp8.
                dense = plain.contiguous()
                dist.broadcast(dense.view(-1).view(torch.uint8), group=group, group_src=0)
                if dense is not plain:
                    plain.copy_(dense)


def _plain_tensors(x: torch.Tensor) -> Iterator[torch.Tensor]:
    if not hasattr(x, "__tensor_flatten__"):
        yield x
        return
    # Without the key of its random bits, which each rank has separately.
    names = list(x.parts()) if isinstance(x, QuantizedTensor) else x.__tensor_flatten__()[0]
    for name in names:
        yield from _plain_tensors(getattr(x, name))
