"""Permute and unpermute in eager torch: the bit oracle."""

from __future__ import annotations

import torch

_INT16_MAX = torch.iinfo(torch.int16).max


def route(expert_ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(source, group_ends): assignments in the order of their experts, and where each expert's end."""
    # Half the bits, half the passes of a radix sort.
    dtype = torch.int16 if experts <= _INT16_MAX else torch.int32
    # Of no expert, below or above: -1 and `experts` leave the same remainder, `experts`.
    ids = expert_ids.flatten().clamp(-1, experts).remainder(experts + 1).to(dtype)
    ids, source = ids.sort(stable=True)
    numbers = torch.arange(experts, dtype=dtype, device=ids.device)
    return source.int(), torch.searchsorted(ids, numbers, right=True, out_int32=True)


def permute(x: torch.Tensor, expert_ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, source, group_ends); see `ops.permute`."""
    source, group_ends = route(expert_ids, experts)
    return x[source // expert_ids.shape[1]], source, group_ends


def unpermute(y: torch.Tensor, source: torch.Tensor, top_k: int, weights: torch.Tensor | None) -> torch.Tensor:
    """out[t] = Σ_k weights[t, k] · y[row of assignment t · top_k + k], in fp32, one k after the other."""
    numbers = torch.arange(source.numel(), dtype=source.dtype, device=source.device)
    row_of = torch.empty_like(source).scatter_(0, source.long(), numbers)
    terms = y[row_of.view(-1, top_k)].float()  # [T, top_k, H]
    if weights is not None:
        terms = terms * weights.float()[..., None]
    out = terms[:, 0]
    for k in range(1, top_k):
        out = out + terms[:, k]
    return out.to(y.dtype)


def unpermute_backward(
    grad_output: torch.Tensor, y: torch.Tensor | None, source: torch.Tensor, top_k: int, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """grad_y and, where there is a y, grad_weights; see `ops.unpermute_backward`."""
    grad_y = grad_output[source // top_k]
    grad_weights = None
    if y is not None:
        dots = (grad_y.float() * y.float()).sum(1)
        grad_weights = torch.empty_like(dots).scatter_(0, source.long(), dots).view(-1, top_k)
    if weights is not None:
        scale = weights.float().flatten()[source]
        grad_y = (grad_y.float() * scale[:, None]).to(grad_output.dtype)
    return grad_y, grad_weights
