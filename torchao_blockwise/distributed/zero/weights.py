"""Primary weights: quantized Parameters, whose masters only an optimizer has, and what ranks exchange of them.

    masters of my range ─ cast ─▶ my payload entries ─ one all-gather of bytes ─▶ whole payloads, merged at the edges
    whole gradients of a rank ─ one reduce-scatter (ZeRO-2) ─▶ mean of my range, f32, added to my masters' gradients

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
from torchao_blockwise.distributed.rank_consistency import check_same_once, naming_absent
from torchao_blockwise.tensors import QuantizedShard, QuantizedTensor
from torchao_blockwise.tensors.pending_master import PendingMaster

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
        """The part that this rank holds of the weight; another object after a move."""
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
    def is_split(self) -> bool:
        """Whether the ranks of ZeRO divide the weight's elements."""
        return self.master.dim() == 1

    @property
    def lengths(self) -> list[int]:
        """Elements that each rank has."""
        return [end - start for start, end in itertools.pairwise(self.edges)]

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return what the master covers of a tensor in the weight's shape; a view where that is contiguous."""
        return whole.reshape(-1)[self.edges[self.rank] : self.edges[self.rank + 1]] if self.is_split else whole


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
        quantized, masters = [w.quantized for w in here], [w.master.detach().view(-1) for w in here]
        starts = [w.edges[w.rank] for w in here]
        if group is None:
            write_masters(_CAST, quantized, masters, starts, None)
            continue
        of_ranks = list(zip(*map(_bytes_of_ranks, here)))
        sent = torch.zeros(max(map(sum, of_ranks)), dtype=torch.uint8, device=device)
        write_masters(_CAST, quantized, masters, starts, group, _pieces(sent, of_ranks[here[0].rank]))
        received = _gathered(sent, group, f"gather {len(here)} quantized weights")
        _merge(here, [_pieces(buffer, lengths) for buffer, lengths in zip(received, of_ranks)])


def _shard_group(weight: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks over which FSDP2 has split a weight; None where each has all of it."""
    dims = [i for i, placement in enumerate(weight.placements) if placement.is_shard()]  # type: ignore[attr-defined]
    return weight.device_mesh.get_group(dims[-1]) if dims else None  # type: ignore[attr-defined]


def _pieces(buffer: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    """Parts of weights that lie one after the other in a rank's buffer, which is as long as the largest rank's."""
    return buffer[: sum(lengths)].split(list(lengths))


def _bytes_of_ranks(w: PrimaryWeight) -> list[int]:
    """Bytes of the payload that each rank sends."""
    columns, fmt = w.weight.shape[-1], w.quantized.fmt
    return [ops.shard_entries(start, n, columns, fmt)[1] for start, n in zip(w.edges, w.lengths)]


def _merge(weights: Sequence[PrimaryWeight], of_ranks: Sequence[Sequence[torch.Tensor]]) -> None:
    """Write the ranks' bytes to whole payloads; at the edges two ranks may share a byte."""
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
def reduce_gradients(
    weights: Sequence[PrimaryWeight], others: Sequence[torch.Tensor], group: dist.ProcessGroup, subject: str
) -> None:
    """Average over the ranks of `group`: each master's gradient takes its part, `others` whole gradients in place.

    weights: split over `group`. Their gradients, this rank's own, are added to their masters' and dropped.
    others: parameters that each rank steps whole; gradients that are averaged already stay as they are.
    Each rank's gradient is divided by the number of ranks and then summed, in f32 for `weights`, in the gradient's
    dtype for `others`: with two ranks the bits of an all-reduce in that dtype, with more of another order of summation.
    Raises ValueError if ranks have gradients of different parameters, RuntimeError for a rank that does not come.
    """
    with_grad = [w for w in weights if w.weight.grad is not None]
    grads = [p.grad for p in others if p.grad is not None]
    # Once for a set of parameters: gradients are summed by position.
    names, shapes = [w.name for w in with_grad], [tuple(grad.shape) for grad in grads]
    entries = [f"a gradient of {name}" for name in names]
    entries += [f"a gradient of shape {list(shape)} of a parameter without a master" for shape in shapes]
    check_same_once(subject, group, (*names, *shapes), entries)
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
    """Scale averaged gradients by min(1, max_norm / (norm + 1e-6)), as PyTorch does; the norm before, on all ranks.

    norm² = Σ over ranks of ‖parts‖² + ‖others‖², f32.
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
    # Zeros, because the padding of a short range travels too.
    sent = torch.zeros(len(of_ranks), max(map(sum, of_ranks)), dtype=torch.float32, device=weights[0].weight.device)
    targets = zip(*(_pieces(buffer, lengths) for buffer, lengths in zip(sent, of_ranks)))
    for weight, of_weight in zip(weights, targets):
        grad = weight.weight.grad
        assert grad is not None, "chosen by it"
        for target, values in zip(of_weight, grad.reshape(-1).split(weight.lengths)):
            target.copy_(values)
        weight.weight.grad = None
    received = torch.empty_like(sent[0])
    with naming_absent("MasterWeightOptimizer", f"average the gradients of {len(weights)} weights", group):
        _compat.reduce_scatter(received, sent.div_(len(of_ranks)).view(-1), group)
    for weight, mean in zip(weights, _pieces(received, of_ranks[weights[0].rank])):
        weight.master.grad = mean.clone() if weight.master.grad is None else weight.master.grad.add_(mean)


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
    names = list(x.parts()) if isinstance(x, QuantizedTensor) else x.__tensor_flatten__()[0]
    for name in names:
        yield from _plain_tensors(getattr(x, name))
