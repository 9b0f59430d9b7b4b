"""GEMMs with the DeepGEMM library on Hopper: a in 1×128 blocks, b in 128×128 blocks, bf16 output.

    a's scales [K/128, M] are passed as [M, K/128] with strides (1, M), without a copy; M is padded to a multiple of 4
    b's scales [N/128, K/128] are passed as they are

Like our kernels, it promotes partial sums to fp32 every 128 of K. It supports neither a bias nor another dtype of the
output. It is not used for `grad_weight` with one-row blocks: its kernel for them adds to an fp32 tensor in memory, and
is slower. If the layer's input is quantized in square blocks, `grad_weight` is the same GEMM as `output`.
"""

from __future__ import annotations

import torch

from torchao_blockwise._compat import deep_gemm_library
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, Operand
from torchao_blockwise.ops.backend import architecture, compute_capability
from torchao_blockwise.ops.padding import aligned_rows

_PAIR = (FP8_1X128.name, FP8_128X128.name)
# TMA needs rows aligned to 16 bytes, in fp8 and in bf16.
_K_MULTIPLE, _N_MULTIPLE = 16, 8
# AUTO selects it for at least this number of multiplications, if M, N and K are at least this large. There it is 4-10 %
# faster, but its host overhead is 0.1-0.4 ms larger, as long as a step of smaller layers. With 1024 rows or columns it
# can take three times as long.
_MIN_MULTIPLICATIONS, _MIN_SIDE = 2**38, 2048


def why_not(a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None) -> str | None:
    """Return why DeepGEMM cannot compute this GEMM, or None if it can."""
    device = a.qdata.device
    if compute_capability(device) != (9, 0):
        return f"DeepGEMM needs a Hopper GPU (sm_90), got {architecture(device)}"
    if (a.format_name, b.format_name) != _PAIR:
        return f"DeepGEMM supports {_PAIR[0]} · {_PAIR[1]}, got {a.format_name} · {b.format_name}"
    if out_dtype != torch.bfloat16 or bias is not None:
        return f"DeepGEMM supports bfloat16 without bias, got {out_dtype}{'' if bias is None else ' and a bias'}"
    (m, k), n = a.qdata.shape, b.qdata.shape[0]
    if 0 in (m, n, k) or k % _K_MULTIPLE or n % _N_MULTIPLE:
        wanted = f"K must be a multiple of {_K_MULTIPLE} and N of {_N_MULTIPLE}"
        return f"{wanted}, and none may be 0, got M={m}, N={n}, K={k}"
    product = deep_gemm_library.product_on(device.index)
    return product if isinstance(product, str) else None


def pays(a: Operand, b: Operand, out_dtype: torch.dtype | None, bias: torch.Tensor | None) -> bool:
    """Whether AUTO prefers it to Gluon: it can run, and the GEMM is large enough to hide its host overhead."""
    (m, k), n = a.qdata.shape, b.qdata.shape[0]
    return (
        out_dtype == torch.bfloat16
        and min(m, n, k) >= _MIN_SIDE
        and m * n * k >= _MIN_MULTIPLICATIONS
        and deep_gemm_library.why_absent() is None
        and why_not(a, b, out_dtype, bias) is None
    )


def matmul(a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the GEMM, [M, N], if `why_not` returns None. Arguments as in the op."""
    out = a.qdata.new_empty((a.qdata.shape[0], b.qdata.shape[0]), dtype=out_dtype)
    scale = aligned_rows(a.scale)
    # One view with well-defined strides also for a single row, for which those of a transpose may be arbitrary.
    a_scale = scale.as_strided((len(out), len(scale)), (1, scale.shape[1]))
    product = deep_gemm_library.product_on(out.get_device())
    assert callable(product)
    with torch.cuda.device_of(out):
        product((aligned_rows(a.qdata), a_scale), (aligned_rows(b.qdata), b.scale.contiguous()), out)
    return out
