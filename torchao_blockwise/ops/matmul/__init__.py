"""Matmul: the NT product of two block-scaled operands, a[M, K] @ b[N, K].T, accumulated in fp32."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from torchao_blockwise.formats import (
    E4M3,
    FP8_1X128,
    FP8_128X128,
    HIGH_PRECISION_DTYPES,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockFormat,
    get_format,
)
from torchao_blockwise.ops.backend import Backend, compute_capability, get_backend, pick, why_no_gluon, why_no_triton
from torchao_blockwise.ops.library import define_op
from torchao_blockwise.ops.matmul import cublas, reference
from torchao_blockwise.ops.operand import format_of, is_operand

_KERNEL_PAIRS = {
    (FP8_1X128.name, FP8_128X128.name),
    (FP8_1X128.name, FP8_1X128.name),
    (NVFP4_1X16.name, NVFP4_16X16.name),
    (NVFP4_1X16.name, NVFP4_1X16.name),
}
# Up to so many tokens AUTO takes Gluon for `grad_weight`.
_GLUON_TOKENS = 256


def matmul(
    a,
    b,
    *,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    backend: Backend | str | None = None,
) -> torch.Tensor:
    """a @ b.T = Σ over blocks k of (qa_k · qb_kᵀ) · scale_a · scale_b [· global scales] + bias, rounded once.

    a: a result of `quantize`, qdata [M, K]; b: likewise, qdata [N, K]. Both hold the same element and the same block
        length along K: FP8_1X128 · FP8_128X128 or · FP8_1X128, NVFP4_1X16 · NVFP4_16X16 or · NVFP4_1X16.
    out_dtype: bf16 | f16 | f32.
    bias: [N] bf16 | f16 | f32 or None, added in fp32.
    backend: AUTO (default), or one by name.
    Returns [M, N] `out_dtype`. Any M, N and K, 0 included. NaN and Inf propagate. Not differentiable.

    Raises TypeError for an operand or dtype, ValueError for shapes, devices or a backend that cannot run.
    Source: DeepSeek-V3 report (arXiv 2412.19437) §3.3.2 for the promotion of partial sums to fp32.
    """
    _check(a, b, out_dtype, bias)
    return matmul_op(*a, *b, a.format_name, b.format_name, out_dtype, bias, get_backend(backend).value)


def add_matmul_(out: torch.Tensor, a, b, *, backend: Backend | str | None = None) -> torch.Tensor:
    """out += a @ b.T, in fp32: a weight's gradient added to what other microbatches left.

    out: [M, N] f32, contiguous, changed in place and returned. a, b: as in `matmul`.
    Gluon and Triton kernels read and write `out` once, where a tile ends; other backends make the product first.
    Raises TypeError and ValueError like `matmul`, and for another `out`.
    """
    _check(a, b, torch.float32, None)
    check_sum("add_matmul_", out, [a.qdata.shape[0], b.qdata.shape[0]], a.qdata.device)
    add_matmul_op(out, *a, *b, a.format_name, b.format_name, get_backend(backend).value)
    count_change(out)
    return out


def check_sum(op: str, out: torch.Tensor, wanted: list[int], device: torch.device) -> None:
    """Raise ValueError unless products of this shape can be added to `out`."""
    if out.dtype != torch.float32 or list(out.shape) != wanted or not out.is_contiguous() or out.device != device:
        got = f"{out.dtype} of shape {list(out.shape)} on {out.device}" + ", not contiguous" * (not out.is_contiguous())
        raise ValueError(f"{op}: out must be a contiguous float32 tensor of shape {wanted} on {device}, got {got}")


def count_change(out: torch.Tensor) -> None:
    """Let autograd see that `out` was changed: below it, where operations run, nothing counts changes."""
    if not (torch.compiler.is_compiling() or out.is_inference()):
        torch.autograd.graph.increment_version(out)


def _check(a, b, out_dtype, bias):
    for name, x in (("a", a), ("b", b)):
        if not is_operand(x):
            raise TypeError(f"matmul: {name} must be a result of quantize, got {type(x).__name__}; quantize it first")
        if x.qdata.dim() != 2:
            raise ValueError(f"matmul: {name} must be a matrix, got payload of shape {list(x.qdata.shape)}")
    if out_dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"matmul: out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    a_fmt, b_fmt = format_of(a), format_of(b)
    if a_fmt.element is not b_fmt.element or a_fmt.block[1] != b_fmt.block[1]:
        raise ValueError(f"matmul: {a_fmt.name} · {b_fmt.name} differ in element or block length along K")
    if a.qdata.shape[1] != b.qdata.shape[1]:
        got = f"{list(a.qdata.shape)} and {list(b.qdata.shape)}"
        raise ValueError(f"matmul: a [M, K] and b [N, K] must agree in K, got payloads {got}")
    if a.qdata.device != b.qdata.device:
        raise ValueError(f"matmul: a is on {a.qdata.device}, b on {b.qdata.device}; move one of them")
    if bias is not None and (
        bias.dim() != 1 or bias.shape[0] != b.qdata.shape[0] or bias.dtype not in HIGH_PRECISION_DTYPES
    ):
        got = f"{bias.dtype} of shape {list(bias.shape)}"
        raise ValueError(f"matmul: bias must be a float vector of {b.qdata.shape[0]} elements, got {got}")


def candidates(
    device: torch.device,
    a_shape: Sequence[int],
    b_shape: Sequence[int],
    a_fmt: BlockFormat,
    b_fmt: BlockFormat,
    out_dtype,
) -> dict[Backend, str | None]:
    """The backends of a product of payloads of these shapes, in AUTO's order, each with why it cannot run, or None."""
    why_triton = why_no_triton(device)
    if why_triton is None and (a_fmt.name, b_fmt.name) not in _KERNEL_PAIRS:
        why_triton = f"{a_fmt.name} · {b_fmt.name} has no kernel"
    reasons = {
        Backend.CUBLAS: cublas.why_not(device, a_shape, b_shape, a_fmt, b_fmt, out_dtype),
        Backend.GLUON: _why_no_gluon(device, a_shape, b_shape, a_fmt, b_fmt),
        Backend.TRITON: why_triton,
        Backend.REFERENCE: None,
    }
    if _gluon_is_first(a_fmt, b_fmt, a_shape[1] * a_fmt.element.per_byte):
        return {Backend.GLUON: reasons[Backend.GLUON], **reasons}
    return reasons


def _gluon_is_first(a_fmt: BlockFormat, b_fmt: BlockFormat, k: int) -> bool:
    """Whether AUTO asks Gluon before cuBLASLt; GPUs other than Hopper have at most one of the two.

    Two rules for the two kinds of FP8 products: with square blocks in b (`output`, `grad_input`) Gluon, with one-row
    blocks (`grad_weight`, where k counts tokens) Gluon up to 256 tokens. docs/design.md says what they cost.
    """
    return a_fmt.element is E4M3 and (b_fmt.block[0] > 1 or k <= _GLUON_TOKENS)


def _why_no_gluon(device: torch.device, a_shape, b_shape, a_fmt: BlockFormat, b_fmt: BlockFormat) -> str | None:
    reason = why_no_gluon(device)
    if reason is not None:
        return reason
    from torchao_blockwise.ops.matmul import kernels_gluon as gluon

    return gluon.why_not(a_shape, b_shape, a_fmt, b_fmt)


def _pick(
    device: torch.device, a_shape, b_shape, a_format: str, b_format: str, out_dtype: torch.dtype, backend: str
) -> Backend:
    a_fmt, b_fmt = get_format(a_format), get_format(b_format)
    reasons = candidates(device, a_shape, b_shape, a_fmt, b_fmt, out_dtype)
    expected = None
    if device.type == "cuda":
        has_blocks = cublas.expected(compute_capability(device), a_fmt)
        expected = next(iter(reasons)) if has_blocks else Backend.TRITON
    return pick("matmul", backend, reasons, expected=expected)


# Choosing takes microseconds of every product, and somebody waits for them where tensors are a GPU's.
_pick_on_gpu = functools.lru_cache(maxsize=4096)(_pick)


def _choose(a, b, a_format: str, b_format: str, out_dtype: torch.dtype, backend: str) -> Backend:
    pick_one = _pick_on_gpu if a.is_cuda else _pick
    return pick_one(a.device, a.shape, b.shape, a_format, b_format, out_dtype, backend)


def _matmul(a, a_scale, a_global, b, b_scale, b_global, a_format, b_format, out_dtype, bias, backend):
    a_fmt, b_fmt = get_format(a_format), get_format(b_format)
    chosen = _choose(a, b, a_format, b_format, out_dtype, backend)
    if chosen is Backend.CUBLAS:
        implementation = cublas.matmul
    elif chosen is Backend.TRITON:
        from torchao_blockwise.ops.matmul import kernels_triton as triton

        implementation = triton.matmul
    elif chosen is Backend.GLUON:
        from torchao_blockwise.ops.matmul import kernels_gluon as gluon

        implementation = gluon.matmul
    else:
        implementation = reference.matmul
    return implementation(a, a_scale, a_global, b, b_scale, b_global, a_fmt, b_fmt, out_dtype, bias)


def _add_matmul(out, a, a_scale, a_global, b, b_scale, b_global, a_format, b_format, backend):
    a_fmt, b_fmt = get_format(a_format), get_format(b_format)
    chosen = _choose(a, b, a_format, b_format, torch.float32, backend)
    operands = a, a_scale, a_global, b, b_scale, b_global, a_fmt, b_fmt
    if chosen is Backend.GLUON:
        from torchao_blockwise.ops.matmul import kernels_gluon as gluon

        gluon.add_matmul(out, *operands)
    elif chosen is Backend.TRITON:
        from torchao_blockwise.ops.matmul import kernels_triton as triton

        triton.matmul(*operands, torch.float32, None, out)
    else:
        implementation = cublas.matmul if chosen is Backend.CUBLAS else reference.matmul
        out.add_(implementation(*operands, torch.float32, None))


def _add_matmul_fake(out, a, a_scale, a_global, b, b_scale, b_global, a_format, b_format, backend):
    """It returns nothing."""


def _matmul_fake(a, a_scale, a_global, b, b_scale, b_global, a_format, b_format, out_dtype, bias, backend):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _matmul_sharding(a, a_scale, a_global, b, b_scale, b_global, a_format, b_format, out_dtype, bias, backend):
    """Rows of a, rows of b (on block borders), or the contraction (on block borders, no bias; gives partial sums)."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    a_fmt, b_fmt = get_format(a_format), get_format(b_format)
    ranks = a.mesh.size()

    def optional(spec, placement):
        return None if spec is None else placement

    def rule(out, a_dim, b_dim, bias_placement):
        def placements(dim, fmt):
            scale_dim = dim if dim is None or not fmt.transposed_scales else 1 - dim
            return [Replicate() if d is None else Shard(d) for d in (dim, scale_dim)]

        inputs = [*placements(a_dim, a_fmt), optional(a_global, Replicate())]
        inputs += [*placements(b_dim, b_fmt), optional(b_global, Replicate())]
        return [out], [*inputs, None, None, None, optional(bias, bias_placement), None]

    rules = [rule(Replicate(), None, None, Replicate())]
    if a.shape[0] % (ranks * a_fmt.block[0]) == 0:
        rules.append(rule(Shard(0), 0, None, Replicate()))
    if b.shape[0] % (ranks * b_fmt.block[0]) == 0:
        rules.append(rule(Shard(1), None, 0, Shard(0)))
    if bias is None and a.shape[1] * a_fmt.element.per_byte % (ranks * a_fmt.block[1]) == 0:
        rules.append(rule(Partial(), 1, 1, None))
    return rules


matmul_op = define_op(
    "matmul(Tensor a, Tensor a_scale, Tensor? a_global, Tensor b, Tensor b_scale, Tensor? b_global,"
    " str a_format, str b_format, ScalarType out_dtype, Tensor? bias, str backend) -> Tensor",
    _matmul,
    _matmul_fake,
    _matmul_sharding,
)
add_matmul_op = define_op(
    "add_matmul_(Tensor(a!) out, Tensor a, Tensor a_scale, Tensor? a_global, Tensor b, Tensor b_scale,"
    " Tensor? b_global, str a_format, str b_format, str backend) -> ()",
    _add_matmul,
    _add_matmul_fake,
)
