"""GEMMs with cuBLASLt: FP8 block scaling on Hopper (sm_90), NVFP4 on Blackwell (sm_100 and later).

Both call the operation behind `torch.nn.functional.scaled_mm`. Scales are converted to its layouts in each call:

    FP8     1×128 scales [K/128, M] are passed as [M, K/128] with strides (1, M), without a copy;
            128×128 scales [N/128, K/128] with the K blocks padded to a multiple of 4;
            rows of a padded to a multiple of 4.
    NVFP4   e4m3 scales of 1×16 blocks, swizzled (kernels_blackwell.py), followed by the tensor scales.

On GPUs without FP4 tensor cores, NVFP4 is decoded to bf16 first (kernels_decode.py) and multiplied by cuBLAS.

Rows of both operands are padded to 16 bytes, with a copy if K does not fill them, usually because it counts tokens.

The NVFP4 path has not run on Blackwell hardware yet. A test decodes its arguments according to the documented layout.
Source: cuBLAS manual, "1D Block Scaling Factors Layout"; PyTorch, aten/src/ATen/native/cuda/ScaledBlas.cpp.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from torchao_blockwise.formats import E2M1, BlockFormat, Operand
from torchao_blockwise.ops.backend import compute_capability, why_no_kernels
from torchao_blockwise.ops.gemm import KERNEL_PAIRS
from torchao_blockwise.ops.padding import ROW_BYTES, aligned_rows

# Rows of scales lie 16 bytes apart.
_SCALE_ROWS = 4


def _decodes(a: Operand) -> bool:
    """Whether operands are decoded to bf16 first: NVFP4 on GPUs without FP4 tensor cores."""
    return a.format.element is E2M1 and (0, 0) < compute_capability(a.qdata.device) < (10, 0)


def why_not(a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None) -> str | None:
    """Return why cuBLASLt cannot compute this GEMM, or None if it can."""
    device, (m, k), n = a.qdata.device, a.qdata.shape, b.qdata.shape[0]
    decodes, a_fmt = _decodes(a), a.format
    if not decodes:
        why = _why_never(device.type, compute_capability(device), torch.version.cuda, a_fmt, b.format, out_dtype)
        if why is not None:
            return why
    if 0 in (m, n, k):
        return f"cuBLASLt does not support empty GEMMs, got M={m}, N={n}, K={k}"
    if n % ROW_BYTES and not decodes:
        # M and K may be anything: rows are padded.
        return f"N must be a multiple of {ROW_BYTES}, got N={n}"
    # Triton's kernels decode NVFP4, and swizzle its scales.
    return why_no_kernels(a) if a_fmt.element is E2M1 else None


@functools.cache
def _why_never(
    device: str,
    capability: tuple[int, int],
    version: str | None,
    a_fmt: BlockFormat,
    b_fmt: BlockFormat,
    out_dtype: torch.dtype,
) -> str | None:
    """Return why it supports no GEMM of these formats, whatever the shape; cached, because it takes 3 µs."""
    if device != "cuda":
        return f"cuBLASLt needs a CUDA device, got {device}"
    is_fp4 = a_fmt.element is E2M1
    if capability < (10, 0) if is_fp4 else capability != (9, 0):
        wanted = "sm_100 or newer" if is_fp4 else "sm_90"
        return f"{a_fmt.element.name} block scaling needs {wanted}, got sm_{capability[0]}{capability[1]}"
    cuda = tuple(int(part) for part in (version or "0.0").split(".")[:2])
    if cuda < (12, 9):
        return f"block scaling needs CUDA 12.9 or newer, got {version}"
    if (a_fmt.name, b_fmt.name) not in KERNEL_PAIRS:
        return f"cuBLASLt does not support {a_fmt.name} · {b_fmt.name}"
    if out_dtype not in (torch.bfloat16, torch.float32):
        return f"out_dtype must be bfloat16 or float32, got {out_dtype}"
    return None


def matmul(a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the GEMM, [M, N], if `why_not` returns None. Arguments as in the op."""
    if _decodes(a):
        from torchao_blockwise.ops.gemm import kernels_decode

        return kernels_decode.matmul(a, b, out_dtype, bias)
    product_dtype = out_dtype if bias is None else torch.float32
    (qa, a_scale, a_global), a_fmt, (qb, b_scale, b_global), b_fmt = a.tensors, a.format, b.tensors, b.format
    m = qa.shape[0]
    qa, qb = aligned_rows(qa), aligned_rows(qb)
    if a_fmt.element is E2M1:
        from torchao_blockwise.ops.gemm.kernels_blackwell import swizzled_scales

        assert a_global is not None and b_global is not None
        # Their tiles are 64 elements wide and so end where those of rows padded to 32 elements do.
        a_scales, b_scales = [swizzled_scales(a), a_global], [swizzled_scales(b), b_global]
        qa, qb = qa.view(torch.float4_e2m1fn_x2), qb.view(torch.float4_e2m1fn_x2)
        a_scalings = b_scalings = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
        swizzles = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    else:
        one_row = b_fmt.block[0] == 1
        if not one_row and (missing := -b_scale.shape[1] % _SCALE_ROWS):
            b_scale = F.pad(b_scale, (0, missing), value=1.0)
        if missing := -m % _SCALE_ROWS:
            qa = F.pad(qa.view(torch.uint8), (0, 0, 0, missing)).view(qa.dtype)
            a_scale = F.pad(a_scale, (0, missing))
        a_scales, b_scales = [a_scale.t()], [b_scale.t()]
        a_scalings = [F.ScalingType.BlockWise1x128]
        b_scalings = a_scalings if one_row else [F.ScalingType.BlockWise128x128]
        swizzles = []
    scaled = a_scales, a_scalings, b_scales, b_scalings, swizzles, swizzles
    out = F.scaled_mm(qa, qb.t(), *scaled, output_dtype=product_dtype)
    if a_fmt.element is not E2M1:
        out = out[:m]
    # The bias comes before the only rounding, so the result waits for it in fp32.
    return out if bias is None else out.add_(bias).to(out_dtype)


def add_matmul(out: torch.Tensor, a: Operand, b: Operand) -> None:
    """out f32 += a · bᵀ."""
    if _decodes(a):
        from torchao_blockwise.ops.gemm import kernels_decode

        kernels_decode.add_matmul(out, a, b)
    else:
        out.add_(matmul(a, b, torch.float32, None))
