"""Grouped products along "m" by the package deep_gemm, where it is installed (sgl-deep-gemm 0.1.4 or newer), on sm_90.

Its contiguous kernel wants groups that begin on tiles, as rows of one operand, and the group of each row, of which it
reads the first of each tile; -1 leaves a tile out. So rows are copied, on the device alone, twice:

    a [M, K] ──gather──▶ [P, K], each group padded to tiles ──product──▶ [P, N] ──scatter──▶ out [M, N], zeros elsewhere

Rows that pad a group hold some other token, and what is computed of them goes nowhere.

Along "k" its kernel for sm_90 wants the groups' sizes on the host, which knows them only after waiting for the GPU.
It has not run on a GPU yet; what it is called with is tested against what its interface checks.
"""

from __future__ import annotations

import torch

from torchao_blockwise import _compat
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, BlockFormat
from torchao_blockwise.ops.backend import compute_capability
from torchao_blockwise.ops.groups import padded_ends, padded_rows

# What its kernel checks or its copies by TMA need.
_K_MULTIPLE, _N_MULTIPLE = FP8_1X128.block[1], 64


def why_not(device, a_shape, b_shape, a_fmt: BlockFormat, b_fmt: BlockFormat, along: str, out_dtype) -> str | None:
    """Why DeepGEMM cannot compute this product of payloads a [M, K] and b [E, N, K], or None if it can."""
    capability = compute_capability(device)
    if capability != (9, 0):
        got = f"sm_{capability[0]}{capability[1]}" if device.type == "cuda" else device.type
        return f"it needs a Hopper GPU (sm_90), got {got}"
    if along == "k":
        return 'along "k" it needs the sizes of the groups on the host, and reading them would wait for the GPU'
    if (a_fmt, b_fmt) != (FP8_1X128, FP8_128X128):
        return f"it multiplies {FP8_1X128.name} · {FP8_128X128.name}, got {a_fmt.name} · {b_fmt.name}"
    if out_dtype != torch.bfloat16:
        return f"it writes bfloat16, got {out_dtype}"
    (m, k), n = a_shape, b_shape[1]
    if 0 in (m, n, k):
        return f"it has no empty products, got M={m}, N={n}, K={k}"
    if k % _K_MULTIPLE or n % _N_MULTIPLE:
        return f"K must be a multiple of {_K_MULTIPLE} and N of {_N_MULTIPLE}, got N={n}, K={k}"
    if not _compat.has_deep_gemm():
        return "deep_gemm is not installed (pip install sgl-deep-gemm==0.1.4 apache-tvm-ffi==0.1.11)"
    return None


def grouped_matmul(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    a_global: torch.Tensor | None,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_global: torch.Tensor | None,
    group_ends: torch.Tensor,
    a_fmt: BlockFormat,
    b_fmt: BlockFormat,
    along: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Arguments and result as in the op."""
    deep_gemm = _compat.deep_gemm()
    tokens, (groups, n, _) = a.shape[0], b.shape
    tile = deep_gemm.get_mk_alignment_for_contiguous_layout()
    rows = padded_rows(group_ends, tokens, tile)
    source = rows.clamp(max=tokens - 1)
    position = torch.arange(len(rows), dtype=torch.int32, device=a.device)
    group = torch.searchsorted(padded_ends(group_ends, tokens, tile), position, right=True, out_int32=True)
    group = torch.where(group < groups, group, -1)

    padded = a.view(torch.uint8)[source].view(a.dtype)
    padded_scale = a_scale[:, source]
    products = a.new_empty((len(rows), n), dtype=out_dtype)
    # Scales of a as [P, K/128] with rows side by side, as its TMA reads them.
    operands = (padded, padded_scale.t()), (b.contiguous(), b_scale.contiguous())
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*operands, products, group)
    # Rows of no token are all written behind the last one, and cut off.
    out = a.new_zeros((tokens + 1, n), dtype=out_dtype)
    out[rows] = products
    return out[:tokens]


def add_grouped_matmul(*arguments) -> None:
    raise AssertionError("nothing picks DeepGEMM along k")
