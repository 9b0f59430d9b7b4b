"""Gradients of split masters: each rank's own gradients in, the mean over ranks of what this rank steps out (ZeRO-2).

    whole gradients of a rank ─ one reduce-scatter ─▶ mean of my range, f32, added to my masters' gradients

The ranks' ranges lie one after the other in one buffer; whole gradients are dropped as soon as they are in it.

It runs when it is asked for, or in `step`, and not in hooks of backward: one collective for all weights, after one
microbatch or after several.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchao_blockwise import _compat
from torchao_blockwise.distributed.rank_consistency import check_same_once, naming_absent
from torchao_blockwise.distributed.zero.weights import Pieces, PrimaryWeight


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
    _check_agreement(subject, [w.name for w in with_grad], [tuple(grad.shape) for grad in grads], group)
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
    ranks = dist.get_world_size(group)
    pieces = Pieces([w.lengths for w in weights])
    # Zeros, because the padding of a short range travels too.
    sent = torch.zeros(ranks, pieces.chunk, dtype=torch.float32, device=weights[0].weight.device)
    of_ranks = [pieces.of(buffer, rank) for rank, buffer in enumerate(sent)]
    for weight, *targets in zip(weights, *of_ranks):
        flat = weight.weight.grad.reshape(-1)
        for target, values in zip(targets, flat.split(weight.lengths)):
            target.copy_(values)
        weight.weight.grad = None
    received = torch.empty(pieces.chunk, dtype=torch.float32, device=sent.device)
    with naming_absent("MasterWeightOptimizer", f"average the gradients of {len(weights)} weights", group):
        _compat.reduce_scatter(received, sent.div_(ranks).view(-1), group)
    for weight, mean in zip(weights, pieces.of(received, weights[0].rank)):
        weight.master.grad = mean.clone() if weight.master.grad is None else weight.master.grad.add_(mean)


def _check_agreement(subject: str, names: list[str], shapes: list[tuple[int, ...]], group: dist.ProcessGroup) -> None:
    """Once for a set of parameters: their gradients are summed by position."""
    entries = [f"a gradient of {name}" for name in names]
    entries += [f"a gradient of shape {list(shape)} of a parameter without a master" for shape in shapes]
    check_same_once(subject, group, (*names, *shapes), entries)
