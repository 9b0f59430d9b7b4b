"""Differentiable permute and unpermute: each is the backward of the other."""

from __future__ import annotations

from typing import Any

import torch

from torchao_blockwise import ops
from torchao_blockwise.nn.derivatives import refuse_second_order


def permute(x: torch.Tensor, expert_ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`ops.permute`, differentiable in `x`: (tokens [T · top_k, H], source, group_ends)."""
    return _Permute.apply(x, expert_ids, experts)


def unpermute(y: torch.Tensor, source: torch.Tensor, top_k: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """`ops.unpermute`, differentiable in `y` and `weights`: [T, H]. `y` is saved if `weights` requires grad."""
    return _Unpermute.apply(y, source, top_k, weights)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, expert_ids: torch.Tensor, experts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, source, group_ends = ops.permute(x, expert_ids, experts)
        ctx.save_for_backward(source)
        ctx.top_k = expert_ids.shape[1]
        ctx.mark_non_differentiable(source, group_ends)
        return tokens, source, group_ends

    @staticmethod
    def backward(ctx: Any, grad_tokens: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:
        refuse_second_order("permute")
        (source,) = ctx.saved_tensors
        return ops.unpermute(grad_tokens, source, ctx.top_k), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, source: torch.Tensor, top_k: int, weights: torch.Tensor | None
    ) -> torch.Tensor:
        needs_weights = weights is not None and ctx.needs_input_grad[3]
        ctx.save_for_backward(source, weights, y if needs_weights else None)
        ctx.top_k = top_k
        return ops.unpermute(y, source, top_k, weights)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_order("unpermute")
        source, weights, y = ctx.saved_tensors
        grad_y, grad_weights = ops.unpermute_backward(grad_output, y, source, ctx.top_k, weights)
        return (
            grad_y if ctx.needs_input_grad[0] else None,
            None,
            None,
            None if grad_weights is None else grad_weights.to(weights.dtype),
        )
