"""NVFP4 GEMMs on GPUs without FP4 tensor cores: operands are decoded to bf16, multiplied by cuBLAS, and scaled.

    a, b  4 bits ──decode──▶ bf16, exact ──cuBLAS──▶ Σ in fp32 ──· both tensor scales, + bias──▶ output, rounded once

An element times its block scale has six significant bits, so it is exact in bf16. The decoded operands and the fp32
sums exist only during this GEMM. Decoding in the GEMM kernel moves fewer bytes, but reaches a quarter of the FLOP/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import Operand
from torchao_blockwise.ops.device.elements import E2M1_FACTOR, decode_e2m1, decode_e4m3, from_f32, to_f32
from torchao_blockwise.ops.launch import ceil_div, launch

# Rows and bytes of a tile of payload, and warps; elements of the output that a program scales, and warps.
_TILE, _TILE_WARPS = (16, 256), 2
_CHUNK, _CHUNK_WARPS = 2048, 4


@triton.jit
def _decode_kernel(
    q_ptr,  # [matrices, M, BYTES] two codes a byte
    s_ptr,  # [matrices, ⌈M/ROWS⌉, COLUMNS] e4m3 bytes
    out_ptr,  # [matrices, M, BYTES] int32: two bf16 a word
    M,
    stride_q,
    BYTES,
    COLUMNS,
    ROWS: tl.constexpr,  # of a block,
    BLOCK: tl.constexpr,  # and its columns
    TILE_M: tl.constexpr,
    TILE_BYTES: tl.constexpr,
):
    tiles_m, tiles_k = tl.cdiv(M, TILE_M), tl.cdiv(BYTES, TILE_BYTES)
    tile, tile_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    matrix, tile_m = (tile // tiles_m).to(tl.int64), tile % tiles_m
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_BYTES + tl.arange(0, TILE_BYTES)
    mask = (rows < M)[:, None] & (columns < BYTES)[None, :]
    wide = matrix * M + rows
    codes = tl.load(q_ptr + wide[:, None] * stride_q + columns[None, :], mask=mask, other=0)
    blocks = tile_k * (2 * TILE_BYTES // BLOCK) + tl.arange(0, 2 * TILE_BYTES // BLOCK)
    at = (matrix * tl.cdiv(M, ROWS) + rows // ROWS)[:, None] * COLUMNS + blocks[None, :]
    scales = tl.load(s_ptr + at, mask=(rows < M)[:, None] & (blocks < COLUMNS)[None, :], other=0)
    scale = to_f32(decode_e4m3(scales, 1.0)) * E2M1_FACTOR
    PER_BLOCK: tl.constexpr = BLOCK // 2
    each = tl.broadcast_to(scale[:, :, None], (TILE_M, 2 * TILE_BYTES // BLOCK, PER_BLOCK))
    each = tl.reshape(each, (TILE_M, TILE_BYTES))
    even = (to_f32(decode_e2m1(codes)) * each).to(tl.int32, bitcast=True)
    odd = (to_f32(decode_e2m1(codes >> 4)) * each).to(tl.int32, bitcast=True)
    # The bits that bf16 does not have are zero.
    words = ((even >> 16) & 0xFFFF) | (odd & -65536)
    tl.store(out_ptr + wide[:, None] * BYTES + columns[None, :], words, mask=mask)


@triton.jit
def _scale_kernel(
    sums_ptr,  # [M, N] f32
    a_global_ptr,
    b_global_ptr,
    bias_ptr,  # [N] or None
    out_ptr,  # [M, N]
    N,
    size,
    ACCUMULATE: tl.constexpr,  # whether sums are added to what `out` holds
    CHUNK: tl.constexpr,
):
    offs = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = offs < size
    y = tl.load(sums_ptr + offs, mask=inside, other=0.0) * (tl.load(a_global_ptr) * tl.load(b_global_ptr))
    if bias_ptr is not None:
        y += to_f32(tl.load(bias_ptr + offs % N, mask=inside, other=0.0))
    if ACCUMULATE:
        y += tl.load(out_ptr + offs, mask=inside, other=0.0)
    tl.store(out_ptr + offs, from_f32(y, out_ptr.dtype.element_ty), mask=inside)


def decode(x: Operand) -> torch.Tensor:
    """Return x [.., M, packed(K)] in bf16, exact, without its tensor scale: [.. · M, 2 · packed(K)]."""
    (*_, M, size), fmt = x.qdata.shape, x.format
    qdata = x.qdata.flatten(0, -2)
    qdata = qdata if qdata.stride(1) == 1 else qdata.contiguous()
    scale = x.scale.contiguous()
    out = torch.empty((qdata.shape[0], 2 * size), dtype=torch.bfloat16, device=qdata.device)
    rows, columns = _TILE
    tiles = qdata.shape[0] // M * ceil_div(M, rows) * ceil_div(size, columns)
    launch(
        _decode_kernel, tiles, qdata, (scale, torch.uint8), (out, torch.int32),
        M, qdata.stride(0), size, scale.shape[-1],
        ROWS=fmt.block[0], BLOCK=fmt.block[1], TILE_M=rows, TILE_BYTES=columns, num_warps=_TILE_WARPS,
    )  # fmt: skip
    return out


def matmul(a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the GEMM, [M, N], on a GPU and not empty. Arguments as in the op."""
    sums = _sums(a, b)
    out = sums if out_dtype == torch.float32 else sums.new_empty(sums.shape, dtype=out_dtype)
    _scale(sums, a, b, bias, out, accumulate=False)
    return out


def add_matmul(out: torch.Tensor, a: Operand, b: Operand) -> None:
    """out [M, N] f32 += a @ b.T."""
    _scale(_sums(a, b), a, b, None, out, accumulate=True)


def _sums(a: Operand, b: Operand) -> torch.Tensor:
    """The GEMM in fp32, without tensor scales."""
    return torch.mm(decode(a), decode(b).t(), out_dtype=torch.float32)


def _scale(
    sums: torch.Tensor, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor, accumulate: bool
) -> None:
    """out = or += sums · both tensor scales + bias."""
    launch(
        _scale_kernel, ceil_div(out.numel(), _CHUNK), sums, a.global_scale, b.global_scale,
        None if bias is None else bias.contiguous(), out, out.shape[1], out.numel(),
        ACCUMULATE=accumulate, CHUNK=_CHUNK, num_warps=_CHUNK_WARPS,
    )  # fmt: skip
