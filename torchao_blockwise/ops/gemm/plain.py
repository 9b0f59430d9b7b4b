"""Matmul: the NT GEMM of two block-scaled operands, a[M, K] @ b[N, K].T, accumulated in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchao_blockwise.formats import E2M1, HIGH_PRECISION_DTYPES, Operand
from torchao_blockwise.ops.backend import (
    Backend,
    Implementation,
    compute_capability,
    kernels,
    why_no_gluon,
    why_no_kernels,
)
from torchao_blockwise.ops.gemm import FP8_PAIRS, KERNEL_PAIRS, cublas, deepgemm, reference
from torchao_blockwise.ops.operands import check_operand, new_output
from torchao_blockwise.ops.registry import Operation, operand

# Up to this number of tokens, AUTO prefers Gluon for `grad_weight`.
_GLUON_TOKENS = 256
# Up to this number of rows, AUTO prefers Triton for NVFP4 without FP4 tensor cores.
_DECODED_ROWS = 64


def matmul(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    backend: Backend | str | None = None,
) -> torch.Tensor:
    """a @ b.T = Σ over blocks k of (qa_k · qb_kᵀ) · scale_a · scale_b [· global scales] + bias, rounded once.

    a, b: results of `quantize`, qdata [M, K] and [N, K], with the same element and the same block length along K:
        FP8_1X128 with FP8_128X128 or FP8_1X128, NVFP4_1X16 with NVFP4_16X16 or NVFP4_1X16.
    out_dtype: bf16 | f16 | f32.
    bias: [N] bf16 | f16 | f32 or None, added in fp32.
    backend: AUTO (default), or the name of a backend.
    Returns [M, N] in `out_dtype`. Any M, N and K, including 0. NaN and Inf propagate. Not differentiable.

    Raises TypeError for an operand or dtype, ValueError for shapes, devices or a backend that cannot run.
    Source: DeepSeek-V3 report (arXiv 2412.19437) §3.3.2 for the promotion of partial sums to fp32.
    """
    _check(a, b, out_dtype, bias)
    return matmul_op(a, b, out_dtype, bias, backend)


def add_matmul_(out: torch.Tensor, a: Operand, b: Operand, *, backend: Backend | str | None = None) -> torch.Tensor:
    """out += a @ b.T, in fp32: add a weight's gradient to that of other microbatches.

    out: [M, N] f32, contiguous, changed in place and returned. a, b: as in `matmul`.
    Gluon and Triton kernels read and write `out` once, at the end of a tile; other backends compute the GEMM first.
    Raises TypeError and ValueError like `matmul`, and for another `out`.
    """
    _check(a, b, torch.float32, None)
    check_sum("add_matmul_", out, [a.qdata.shape[0], b.qdata.shape[0]], a.qdata.device)
    add_matmul_op(out, a, b, backend)
    count_change(out)
    return out


def check_sum(op: str, out: torch.Tensor, wanted: list[int], device: torch.device) -> None:
    """Raise ValueError unless a result of this shape can be added to `out`."""
    if out.dtype != torch.float32 or list(out.shape) != wanted or not out.is_contiguous() or out.device != device:
        got = f"{out.dtype} of shape {list(out.shape)} on {out.device}" + ", not contiguous" * (not out.is_contiguous())
        raise ValueError(f"{op}: out must be a contiguous float32 tensor of shape {wanted} on {device}, got {got}")


def count_change(out: torch.Tensor) -> None:
    """Increment the version counter of `out`, because operations run below autograd, where nothing does."""
    if not (torch.compiler.is_compiling() or out.is_inference()):
        torch.autograd.graph.increment_version(out)


def check_operands(op: str, a: Operand, b: Operand, out_dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError unless the operands can be multiplied, regardless of their shapes."""
    a_fmt, b_fmt = check_operand(op, "a", a), check_operand(op, "b", b)
    if out_dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"{op}: out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if a_fmt.element is not b_fmt.element or a_fmt.block[1] != b_fmt.block[1]:
        raise ValueError(
            f"{op}: {a.format_name} · {b.format_name} differ in element or block length along the contraction"
        )
    if a.qdata.device != b.qdata.device:
        raise ValueError(f"{op}: a is on {a.qdata.device}, b on {b.qdata.device}; move one of them")


def _check(a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None) -> None:
    check_operands("matmul", a, b, out_dtype)
    a_shape, b_shape = a.qdata.shape, b.qdata.shape
    for name, x in (("a", a), ("b", b)):
        if x.qdata.dim() != 2:
            raise ValueError(f"matmul: {name} must be a matrix, got payload of shape {list(x.qdata.shape)}")
        if x.global_scale is not None and x.global_scale.dim():
            got = f"shape {list(x.global_scale.shape)}"
            raise ValueError(f"matmul: global_scale of {name} must be a scalar, got {got}; use grouped_matmul")
    if a_shape[1] != b_shape[1]:
        got = f"{list(a_shape)} and {list(b_shape)}"
        raise ValueError(f"matmul: a [M, K] and b [N, K] must agree in K, got payloads {got}")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != b_shape[0] or bias.dtype not in HIGH_PRECISION_DTYPES):
        got = f"{bias.dtype} of shape {list(bias.shape)}"
        raise ValueError(f"matmul: bias must be a float vector of {b_shape[0]} elements, got {got}")


# --- backends ---------------------------------------------------------------------------------------------------------


def why_no_gluon_gemm(a: Operand, b: Operand, pairs: set[tuple[str, str]]) -> str | None:
    """Return why the Gluon kernel cannot multiply these, or None if it can. pairs: the supported pairs of formats."""
    reason = why_no_gluon(a.qdata.device)
    if reason is None and (a.format_name, b.format_name) not in pairs:
        wanted = " or ".join(sorted(" · ".join(pair) for pair in pairs))
        return f"the kernels support {wanted}, got {a.format_name} · {b.format_name}"
    if reason is None and 0 in (*a.qdata.shape, *b.qdata.shape):
        got = f"{list(a.qdata.shape)} and {list(b.qdata.shape)}"
        return f"TMA does not support empty tensors, got payloads of shape {got}"
    return reason


def why_no_triton_gemm(a: Operand, b: Operand, *_: object) -> str | None:
    """Return why the Triton kernels cannot multiply these, or None if they can."""
    reason = why_no_kernels(a)
    if reason is None and (a.format_name, b.format_name) not in KERNEL_PAIRS:
        return f"{a.format_name} · {b.format_name} has no kernel"
    return reason


def _preferred(
    a: Operand, b: Operand, out_dtype: torch.dtype | None = None, bias: torch.Tensor | None = None
) -> Backend | None:
    """Return the backend that AUTO prefers to those above it in the table; it warns if this backend cannot run.

    In NVFP4 without FP4 tensor cores, Triton is preferred up to 64 rows: it reads 4 bits per element, which matters
    most with few rows. Otherwise Gluon is preferred to cuBLASLt; GPUs other than Hopper support at most one of the two.

    FP8 GEMMs have two rules. If b has square blocks (`output`, `grad_input`, and `grad_weight` with such blocks), Gluon
    is preferred, or DeepGEMM if it is installed and faster. If b has one-row blocks (`grad_weight`, where K is the
    number of tokens), Gluon is preferred up to 256 tokens. docs/kernels.md compares these rules with one backend.
    """
    capability = compute_capability(a.qdata.device)
    if capability == (0, 0):
        return None
    if a.format.element is E2M1:
        return Backend.TRITON if capability < (10, 0) and a.qdata.shape[0] <= _DECODED_ROWS else Backend.CUBLAS
    if capability != (9, 0):
        return Backend.TRITON
    if b.format.block[0] > 1:
        return Backend.DEEP_GEMM if deepgemm.pays(a, b, out_dtype, bias) else Backend.GLUON
    return Backend.GLUON if a.qdata.shape[1] <= _GLUON_TOKENS else Backend.CUBLAS


def count_flops(a: Operand, b: Operand, *_: object) -> int:
    """Return the FLOPs of a @ b.T: 2 · M · N · K, including the zeros with which K was padded."""
    m, n, k = a.qdata.shape[0], b.qdata.shape[-2], a.qdata.shape[1] * a.format.element.per_byte
    return 2 * m * n * k


def adding_rows(table: Sequence[Implementation], *last: object) -> list[Implementation]:
    """Return the table of an operation (out, *operands) that adds a GEMM to `out`, given the table of the GEMM.

    last: the GEMM's arguments after the operands. For a row named "module:function", "module:add_matmul" is a kernel
    that adds; the results of other rows are added.
    """

    def adding(row: Implementation) -> Implementation:
        def add(out: torch.Tensor, *operands: object) -> None:
            out.add_(row.function(*operands, *last))

        def why_not(out: torch.Tensor, *operands: object) -> str | None:
            return row.reason((*operands, *last))

        run = f"{row.run.partition(':')[0]}:add_matmul" if isinstance(row.run, str) else add
        return row._replace(run=run, why_not=why_not)

    return [adding(row) for row in table]


_TABLE = [
    kernels(Backend.GLUON, f"{__package__}.kernels_gluon:matmul", lambda a, b, *_: why_no_gluon_gemm(a, b, FP8_PAIRS)),
    kernels(Backend.CUBLAS, f"{__package__}.cublas:matmul", cublas.why_not),
    kernels(Backend.TRITON, f"{__package__}.kernels_triton:matmul", why_no_triton_gemm),
    # Only if `_preferred` returns it.
    kernels(Backend.DEEP_GEMM, deepgemm.matmul, deepgemm.why_not),
    Implementation(Backend.REFERENCE, reference.matmul),
]


matmul_op = Operation(
    f"matmul({operand('a')}, {operand('b')}, ScalarType out_dtype, Tensor? bias, str backend) -> Tensor",
    takes=(Operand, Operand, None, None),
    table=_TABLE,
    fake=lambda a, b, out_dtype, bias: new_output(a, b, out_dtype),
    preferred_backend=_preferred,
    flops=count_flops,
)
add_matmul_op = Operation(
    f"add_matmul_(Tensor(a!) out, {operand('a')}, {operand('b')}, str backend) -> ()",
    takes=(None, Operand, Operand),
    table=adding_rows(_TABLE, torch.float32, None),
    preferred_backend=lambda out, *ab: _preferred(*ab),
    flops=lambda out, *ab: count_flops(*ab),
)
