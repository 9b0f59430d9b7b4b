"""Products through cuBLASLt: FP8 block scaling on Hopper (sm_90), NVFP4 on Blackwell (sm_100 and later).

Both go through `torch.nn.functional.scaled_mm`. Scales are re-laid here, where they are used:

    FP8     1×128 scales [K/128, M] are passed as [M, K/128] with strides (1, M), as they lie at rest;
            128×128 scales [N/128, K/128] with the K blocks padded to a multiple of 4.
    NVFP4   one e4m3 scale a row and 16 columns, swizzled in tiles of 128 rows × 4 scales.

The NVFP4 path has not run on Blackwell hardware yet; its layout is tested against the documented index formula.
Source: cuBLAS manual, "Scaling factors layouts".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchao_blockwise import _compat
from torchao_blockwise.formats import E2M1, E4M3, FP8_1X128, BlockFormat
from torchao_blockwise.ops.backend import compute_capability

_SWIZZLE_ROWS, _SWIZZLE_COLUMNS = 128, 4
_ALIGNMENT_BYTES = 16


def expected(capability: tuple[int, int], fmt: BlockFormat) -> bool:
    """Whether cuBLASLt scales blocks of this format on GPUs of this capability."""
    return capability == (9, 0) if fmt.element is E4M3 else capability[0] >= 10


def why_not(a, b, a_fmt: BlockFormat, b_fmt: BlockFormat, out_dtype: torch.dtype) -> str | None:
    """Why cuBLASLt cannot compute this product, or None if it can."""
    if not a.is_cuda:
        return f"it needs a CUDA device, got {a.device.type}"
    capability = compute_capability(a.device)
    if not expected(capability, a_fmt):
        wanted = "sm_90" if a_fmt.element is E4M3 else "sm_100 or newer"
        return f"{a_fmt.element.name} block scaling needs {wanted}, got sm_{capability[0]}{capability[1]}"
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if cuda < (12, 9):
        return f"block scaling needs CUDA 12.9 or newer, got {torch.version.cuda}"
    if a_fmt.block[0] != 1:
        return f"the first operand must have one-row blocks, got {a_fmt.name}"
    if out_dtype not in (torch.bfloat16, torch.float32):
        return f"out_dtype must be bfloat16 or float32, got {out_dtype}"
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    if 0 in (m, n, k):
        return f"it has no empty products, got M={m}, N={n}, K={k}"
    if k % _ALIGNMENT_BYTES or n % _ALIGNMENT_BYTES:
        return f"N and the bytes of K must be multiples of {_ALIGNMENT_BYTES}, got N={n}, K={k}"
    if a_fmt is FP8_1X128 and (m % 4 or (b_fmt is FP8_1X128 and n % 4)):
        return f"rows must be multiples of 4, got M={m}, N={n}"
    return None


def matmul(a, a_scale, a_global, b, b_scale, b_global, a_fmt, b_fmt, out_dtype, bias):
    """[M, N] product; arguments as in `reference.matmul`, within what `why_not` admits."""
    scaling, swizzle = _compat.scaling_types()
    if a_fmt.element is E2M1:
        k = a.shape[1] * E2M1.per_byte
        out = F.scaled_mm(
            a.view(torch.float4_e2m1fn_x2),
            b.view(torch.float4_e2m1fn_x2).t(),
            [swizzle_scales(rowwise_scales(a_scale, a_fmt, a.shape[0]), k), a_global],
            [scaling.BlockWise1x16, scaling.TensorWise],
            [swizzle_scales(rowwise_scales(b_scale, b_fmt, b.shape[0]), k), b_global],
            [scaling.BlockWise1x16, scaling.TensorWise],
            swizzle_a=[swizzle.SWIZZLE_32_4_4, swizzle.NO_SWIZZLE],
            swizzle_b=[swizzle.SWIZZLE_32_4_4, swizzle.NO_SWIZZLE],
            output_dtype=out_dtype if bias is None else torch.float32,
        )
    else:
        b_one_row = b_fmt.block[0] == 1
        out = F.scaled_mm(
            a,
            b.t(),
            a_scale.t(),
            scaling.BlockWise1x128,
            b_scale.t() if b_one_row else pad_k_blocks(b_scale).t(),
            scaling.BlockWise1x128 if b_one_row else scaling.BlockWise128x128,
            output_dtype=out_dtype if bias is None else torch.float32,
        )
    # The bias comes before the only rounding, so the product waits for it in fp32.
    return out if bias is None else out.add_(bias).to(out_dtype)


def pad_k_blocks(scale: torch.Tensor) -> torch.Tensor:
    """128×128 scales [N/128, K/128] with the K blocks padded with ones to a multiple of 4."""
    missing = -scale.shape[1] % 4
    return F.pad(scale, (0, missing), value=1.0) if missing else scale


def rowwise_scales(scale: torch.Tensor, fmt: BlockFormat, rows: int) -> torch.Tensor:
    """One scale a row and 16 columns, [rows, K/16], from a grid whose tiles may span several rows."""
    return scale.view(torch.uint8).repeat_interleave(fmt.block[0], dim=0)[:rows].view(scale.dtype)


def swizzle_scales(scale: torch.Tensor, k: int) -> torch.Tensor:
    """Scales [rows, ⌈k/16⌉] in the order that Blackwell's tensor cores read, flat, zero padded.

    Scale (r, c) lies at byte  tile(r//128, c//4)·512 + (r%32)·16 + (r%128//32)·4 + c%4,  tiles row-major.
    """
    rows, columns = scale.shape
    assert columns == (k + 15) // 16
    row_tiles = (rows + _SWIZZLE_ROWS - 1) // _SWIZZLE_ROWS
    column_tiles = (columns + _SWIZZLE_COLUMNS - 1) // _SWIZZLE_COLUMNS
    padding = (0, column_tiles * _SWIZZLE_COLUMNS - columns, 0, row_tiles * _SWIZZLE_ROWS - rows)
    padded = F.pad(scale.view(torch.uint8), padding)
    tiles = padded.view(row_tiles, 4, 32, column_tiles, _SWIZZLE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)
