"""Stand-ins for PyTorch's NVFP4 products, which no CPU has: they demand what its sources do and multiply what they get.

Layouts are written out as the cuBLAS manual has them: a byte's place is a formula of its row and column. Demands are
those of aten/src/ATen/native/cuda/ScaledBlas.cpp and GroupedBlas.cpp, and of the kernels behind the second one (MSLK,
gemm/cutlass/grouped_common.cuh).
"""

import torch
from torch.nn.functional import ScalingType, SwizzleType

MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
TWO_LEVELS = [ScalingType.BlockWise1x16.value, ScalingType.TensorWise.value]
SWIZZLES = [SwizzleType.SWIZZLE_32_4_4.value, SwizzleType.NO_SWIZZLE.value]


def round_up(x: int, step: int) -> int:
    return -(-x // step) * step


def swizzled_at(rows: int, columns: int) -> torch.Tensor:
    """The place of each scale of a matrix of scales, int64 [rows, columns]."""
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    tile = (r // 128) * -(-columns // 4) + c // 4
    return tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4


def decoded(payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 [rows, 2 · bytes]; the first element of a byte is in its low bits, and 16 elements share a scale."""
    codes = payload.view(torch.uint8)
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    return (1 - 2 * (codes >> 3)) * MAGNITUDES[codes & 7] * scale.double().repeat_interleave(16, 1)


def scales_of(flat: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales [rows, columns] of a matrix, out of swizzled ones; those that pad them are zeros."""
    at, flat = swizzled_at(rows, columns), flat.view(torch.uint8)
    rest = torch.ones_like(flat, dtype=torch.bool)
    rest[at] = False
    assert not flat[rest].any()
    return flat[at].view(torch.float8_e4m3fn)


def _check_payload(a: torch.Tensor, b: torch.Tensor) -> None:
    """a [M, K/2], b [.., K/2, N] transposed."""
    for x in (a, b.mT):
        assert x.dtype is torch.float4_e2m1fn_x2 and x.is_contiguous()
        assert x.shape[-1] % 16 == 0 and x.data_ptr() % 16 == 0
    assert a.shape[-1] == b.shape[-2] and b.shape[-1] % 16 == 0


def _check_scales(scales: list, scalings: list, swizzles: list) -> tuple[torch.Tensor, torch.Tensor]:
    (scale, global_scale), two = scales, (scalings, swizzles)
    assert two == (TWO_LEVELS, SWIZZLES)
    assert scale.dtype is torch.float8_e4m3fn and scale.is_contiguous() and global_scale.dtype is torch.float32
    return scale, global_scale


def scaled_mm(a, b, a_scales, a_scalings, a_swizzles, b_scales, b_scalings, b_swizzles, out_dtype):
    """In the place of `_compat.scaled_mm`."""
    _check_payload(a, b)
    columns = a.shape[1] * 2 // 16
    factors, alpha = [], 1.0
    for x, *how in ((a, a_scales, a_scalings, a_swizzles), (b.mT, b_scales, b_scalings, b_swizzles)):
        scale, global_scale = _check_scales(*how)
        assert scale.numel() == round_up(x.shape[0], 128) * round_up(columns, 4) and global_scale.numel() == 1
        factors.append(decoded(x, scales_of(scale, x.shape[0], columns)))
        alpha = alpha * global_scale
    return (factors[0] @ factors[1].mT * alpha.double()).to(out_dtype)


def scaled_grouped_mm(a, b, a_scales, b_scales, scalings, swizzles, ends, out_dtype):
    """In the place of `_compat.scaled_grouped_mm`, for groups of rows; rows of none are left as they were, NaN here."""
    _check_payload(a, b)
    (m, k), (experts, _, n) = a.shape, b.shape
    columns = k * 2 // 16
    padded = round_up(columns, 4)
    a_scale, a_global = _check_scales(a_scales, scalings, swizzles)
    b_scale, b_global = _check_scales(b_scales, scalings, swizzles)
    assert out_dtype is torch.bfloat16 and experts <= 1024
    assert ends.dtype is torch.int32 and ends.shape == (experts,) and ends.is_contiguous()
    # Of a's as many rows as the groups have tiles, and no host asks how many.
    assert a_scale.dim() == 2 and a_scale.shape[0] >= m
    assert b_scale.shape == (experts, padded * round_up(n, 128))
    alpha = a_global * b_global
    assert alpha.shape == (experts,) and alpha.is_contiguous()
    out, flat, first, begin = torch.full((m, n), torch.nan), a_scale.view(torch.uint8).flatten(), 0, 0
    for g, end in enumerate(ends.tolist()):
        size = end - begin
        bytes_of_group = round_up(size, 128) * padded
        if size > 0:
            x = decoded(a[begin:end], scales_of(flat[first : first + bytes_of_group], size, columns))
            y = decoded(b[g].mT, scales_of(b_scale[g], n, columns))
            out[begin:end] = (x @ y.mT * alpha[g].double()).float()
        first, begin = first + bytes_of_group, end
    assert not flat[first:].any(), "scales of rows of no group"
    return out.to(out_dtype)
