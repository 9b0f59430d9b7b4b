"""Grouped NVFP4 GEMMs on Blackwell (sm_100): CUTLASS kernels, through `torch.nn.functional.scaled_grouped_mm`.

    a [M, K]       payload, without a copy: a group may start at any row
    its scales     swizzled (kernels_blackwell.py), each group padded to tiles of 128 rows
    b [E, N, K]    a matrix and one row of swizzled scales for each expert
    ends [E]       of the groups, on the device, where the kernels compute all offsets
    out [M, N]     bf16; the kernels do not write rows after the last group, so they are set to zero here

Only along "m". Along "k", TMA needs groups that start at multiples of 16 bytes, 32 tokens, but ours start at multiples
of 16 tokens, so both operands would have to be copied. The output would be bf16, but gradients are summed in fp32, and
it would not be written for experts without tokens.

This has not run on Blackwell hardware yet. A test decodes the arguments according to the documented layouts.
Source: PyTorch, aten/src/ATen/native/cuda/GroupedBlas.cpp; MSLK, include/mslk/gemm/cutlass/grouped_common.cuh.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from torchao_blockwise.formats import E2M1, Groups, Operand
from torchao_blockwise.ops.backend import architecture, compute_capability, why_no_kernels
from torchao_blockwise.ops.padding import ROW_BYTES, aligned_rows

_BLACKWELL = 10
# Each group is prepared by one thread of a single block.
_MAX_GROUPS = 1024


def why_not(a: Operand, b: Operand, groups: Groups, along: str, out_dtype: torch.dtype) -> str | None:
    """Return why these kernels cannot compute this GEMM, or None if they can. Arguments as in the op."""
    device = a.qdata.device
    if compute_capability(device)[0] != _BLACKWELL:
        return f"the kernels are for Blackwell GPUs (sm_100), got {architecture(device)}"
    if a.format.element is not E2M1:
        return f"the kernels support only e2m1 elements, got {a.format_name} · {b.format_name}"
    if along != "m":
        return f'the kernels support only along "m", got along "{along}"'
    if out_dtype != torch.bfloat16:
        return f"out_dtype must be bfloat16, got {out_dtype}"
    (m, k), (experts, n, _) = a.qdata.shape, b.qdata.shape
    if 0 in (m, n, k):
        return f"the kernels do not support empty GEMMs, got M={m}, N={n}, K={k}"
    if n % ROW_BYTES or k % ROW_BYTES:
        return f"N and the bytes of packed K must be multiples of {ROW_BYTES}, got N={n}, K={k}"
    if experts > _MAX_GROUPS:
        return f"the kernels support at most {_MAX_GROUPS} groups, got {experts}"
    return _why_not_built(device) or why_no_kernels(a)


@functools.cache
def _why_not_built(device: torch.device) -> str | None:
    """Return why this build of PyTorch lacks these kernels, or None: call it with no rows, for which no kernel runs."""
    one, ends = torch.ones(1, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    a, b, a_scale, b_scale = (
        torch.zeros(shape, dtype=torch.uint8, device=device) for shape in ((0, 16), (1, 16, 16), (0, 4), (1, 512))
    )
    try:
        _scaled_grouped_mm(a, b, [a_scale, one], [b_scale, one], ends)
    except (RuntimeError, ValueError) as error:
        return f"PyTorch {torch.__version__} has none: {str(error).splitlines()[0]}"
    return None


def _scaled_grouped_mm(
    a: torch.Tensor, b: torch.Tensor, a_scales: list[torch.Tensor], b_scales: list[torch.Tensor], ends: torch.Tensor
) -> torch.Tensor:
    """a [M, K/2] · b [E, N, K/2], both e2m1 as bytes. a_scales, b_scales: block scales as bytes, tensor scale."""
    scalings = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    swizzles = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    (a_scale, a_global), (b_scale, b_global) = a_scales, b_scales
    return F.scaled_grouped_mm(  # type: ignore[attr-defined]
        a.view(torch.float4_e2m1fn_x2),
        b.view(torch.float4_e2m1fn_x2).mT,
        [a_scale.view(torch.float8_e4m3fn), a_global],
        scalings,
        [b_scale.view(torch.float8_e4m3fn), b_global],
        scalings,
        swizzles,
        swizzles,
        offs=ends,
        output_dtype=torch.bfloat16,
    )


def grouped_matmul(a: Operand, b: Operand, groups: Groups, along: str, out_dtype: torch.dtype) -> torch.Tensor:
    """Return the GEMM, [M, N], if `why_not` returns None. Arguments as in the op."""
    from torchao_blockwise.ops.gemm.kernels_blackwell import swizzled_scales, swizzled_scales_of_groups, zero_tail_

    assert a.global_scale is not None and b.global_scale is not None
    a_scale, ends = swizzled_scales_of_groups(a, groups.ends)
    # The kernels read one tensor scale for each group: the product of both, which PyTorch computes.
    a_scales = [a_scale, a.global_scale.expand(ends.shape[0])]
    b_scales = [swizzled_scales(b), b.global_scale]
    qa, qb = aligned_rows(a.qdata), aligned_rows(b.qdata.flatten(0, -2)).view(b.qdata.shape)
    out = _scaled_grouped_mm(qa, qb, a_scales, b_scales, ends)
    zero_tail_(out, ends)
    return out
