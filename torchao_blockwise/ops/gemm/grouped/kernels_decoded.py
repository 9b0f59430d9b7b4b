"""Grouped NVFP4 products on Hopper, which has no FP4 tensor cores: decoded to bf16 first, then multiplied in bf16.

    a, b  4 bits ──decode──▶ bf16, exact ──Gluon, by groups──▶ Σ in fp32 · both tensor scales ──▶ out, rounded once

An element times its block scale has six significant bits, so bf16 holds it. Both operands in bf16, 2 bytes an element,
live for this product alone: for weights of experts as much as a copy of them in high precision. PyTorch's grouped
product in bf16 would not do: it rounds before the tensor scales could be applied.
"""

from __future__ import annotations

import torch

from torchao_blockwise.formats import Groups, Operand
from torchao_blockwise.ops.gemm.builds import Build
from torchao_blockwise.ops.gemm.grouped.kernels_gluon import Factors, launch_along_k, multiply
from torchao_blockwise.ops.gemm.plain.kernels_decode import decode
from torchao_blockwise.ops.gemm.rows import aligned_rows


def grouped_matmul(
    a: Operand, b: Operand, groups: Groups, along: str, out_dtype: torch.dtype, build: Build | None = None
) -> torch.Tensor:
    """Product of what the table admits. Arguments as in the op; build: the default is the FP8 kernels' choice."""
    return multiply(_factors(a, b), groups, along, out_dtype, build)


def add_grouped_matmul(out: torch.Tensor, a: Operand, b: Operand, groups: Groups, build: Build | None = None) -> None:
    """out [E, N, K] f32 += the groups' products, in the one pass that they take; empty groups are not touched."""
    launch_along_k(out, _factors(a, b), groups, True, build)


def _factors(a: Operand, b: Operand) -> Factors:
    assert a.global_scale is not None and b.global_scale is not None
    da, db = aligned_rows(decode(a)), aligned_rows(decode(b))
    a_scale, b_scale = a.global_scale, b.global_scale
    if a_scale.dim() or b_scale.dim():
        # One scale a group, so that a tile loads one.
        a_scale = b_scale = a_scale * b_scale
    return Factors(da, a_scale, db, b_scale, a.format, True)
