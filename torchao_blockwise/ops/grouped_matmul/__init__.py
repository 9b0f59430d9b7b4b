"""Grouped matmul: a product of two block-scaled operands for each expert, in one launch, accumulated in fp32.

    along "m"   output, grad_input    rows of a belong to experts, each of which has a matrix in b

                    a [M, K]    ·    b [E, N, K]ᵀ    =    out [M, N]         out[m] = a[m] @ b[g].T   for m in group g

    along "k"   grad_weight           the contraction runs over the tokens of one expert

                    a [N, P]    ·    b [K, P]ᵀ       =    out [E, N, K]      out[g] = a[:, group g] @ b[:, group g].T

Where groups end is known on the device alone: shapes and launches depend on the number of tokens and of experts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from torchao_blockwise.formats import (
    FP8_1X128,
    FP8_128X128,
    HIGH_PRECISION_DTYPES,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockFormat,
    get_format,
)
from torchao_blockwise.ops.backend import Backend, get_backend, pick, why_no_gluon, why_no_triton
from torchao_blockwise.ops.group_tables.layout import check_group_tables
from torchao_blockwise.ops.grouped_matmul import reference
from torchao_blockwise.ops.groups import check_group_ends
from torchao_blockwise.ops.library import define_op
from torchao_blockwise.ops.matmul import check_sum, count_change
from torchao_blockwise.ops.operand import format_of, is_operand

_ALONG = ("m", "k")
_KERNEL_PAIRS = {
    "m": {
        (FP8_1X128.name, FP8_128X128.name),
        (FP8_1X128.name, FP8_1X128.name),
        (NVFP4_1X16.name, NVFP4_16X16.name),
        (NVFP4_1X16.name, NVFP4_1X16.name),
    },
    "k": {(FP8_1X128.name, FP8_1X128.name), (NVFP4_1X16.name, NVFP4_1X16.name)},
}


def grouped_matmul(
    a,
    b,
    group_ends: torch.Tensor,
    *,
    along: str = "m",
    out_dtype: torch.dtype,
    backend: Backend | str | None = None,
    group_tables: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[m] = a[m] @ b[g].T for the rows m of each group g (along "m"), or out[g] = a[:, g] @ b[:, g].T (along "k").

    Sums and scales as in `matmul`, with one-row blocks in a.
    group_ends: [E] int32, cumulative, on the operands' device: group g is tokens [group_ends[g-1], group_ends[g]), and
        tokens after the last group belong to none. Any sizes. On a CPU the values are checked; on a GPU they are never
        read by the host, and clamped to max over i <= g of clamp(group_ends[i], 0, M).
    along "m": a is a result of `quantize` or `grouped_quantize`, qdata [M, K], and b of a [E, N, K], of the same
        element and block length. Returns [M, N] `out_dtype`; rows after the last group are zeros, whatever a holds.
    along "k": a and b are columnwise results of `grouped_quantize` with the same group_ends, of a [M, N] and a [M, K]:
        qdata [N, P] and [K, P], where P tokens hold each group padded to whole blocks. Returns [E, N, K] `out_dtype`;
        that of an empty group is zeros.
    out_dtype: bf16 | f16 | f32. backend: AUTO (default), or one by name.
    group_tables: a result of `ops.group_tables` of these ends, M and the format of a, made once for all operations on
        them; else each makes its own. Along "k", M is the number of tokens before they were padded.
    NaN and Inf propagate inside their group. Not differentiable.

    Raises TypeError for an operand or dtype, ValueError for shapes, devices, group ends or a backend that cannot run.
    Source: DeepSeek-V3 report (arXiv 2412.19437) §3.3.2 for the promotion of partial sums to fp32.
    """
    _check("grouped_matmul", a, b, along, out_dtype)
    backend = get_backend(backend).value
    formats = a.format_name, b.format_name
    return grouped_matmul_op(*a, *b, group_ends, *formats, along, out_dtype, backend, group_tables)


def add_grouped_matmul_(
    out: torch.Tensor,
    a,
    b,
    group_ends: torch.Tensor,
    *,
    backend: Backend | str | None = None,
    group_tables: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[g] += a[:, g] @ b[:, g].T, in fp32: experts' gradients added to what other microbatches left.

    out: [E, N, K] f32, contiguous, changed in place and returned; that of an empty group is neither read nor written.
    a, b, group_ends, group_tables: as in `grouped_matmul` along "k".
    Gluon and Triton kernels read and write `out` once, where a tile ends; other backends make the product first.
    Raises TypeError and ValueError like `grouped_matmul`, and for another `out`.
    """
    _check("add_grouped_matmul_", a, b, "k", torch.float32)
    wanted = [group_ends.numel(), a.qdata.shape[0], b.qdata.shape[0]]
    check_sum("add_grouped_matmul_", out, wanted, a.qdata.device)
    formats = a.format_name, b.format_name
    add_grouped_matmul_op(out, *a, *b, group_ends, *formats, get_backend(backend).value, group_tables)
    count_change(out)
    return out


def _check(op: str, a, b, along: str, out_dtype: torch.dtype) -> None:
    for name, x in (("a", a), ("b", b)):
        if not is_operand(x):
            raise TypeError(f"{op}: {name} must be a result of quantize, got {type(x).__name__}; quantize it first")
    if out_dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"{op}: out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if along not in _ALONG:
        raise ValueError(f'{op}: along must be "m" (groups of rows) or "k" (groups of the contraction), got {along!r}')
    a_fmt, b_fmt = format_of(a), format_of(b)
    if a_fmt.element is not b_fmt.element or a_fmt.block[1] != b_fmt.block[1]:
        raise ValueError(f"{op}: {a_fmt.name} · {b_fmt.name} differ in element or block length along the contraction")
    for name, fmt in (("a", a_fmt), ("b", b_fmt))[: 1 if along == "m" else 2]:
        if fmt.block[0] > 1:
            raise ValueError(
                f'{op}: along "{along}" groups end anywhere, and would cut blocks of {fmt.block[0]} rows; quantize'
                f" {name} in one-row blocks, got {fmt.name}"
            )
    b_dims, b_shape = (3, "[E, N, K]") if along == "m" else (2, "[K, P]")
    for name, x, dims, shape in (("a", a, 2, "[M, K]" if along == "m" else "[N, P]"), ("b", b, b_dims, b_shape)):
        if x.qdata.dim() != dims:
            got = f"payload of shape {list(x.qdata.shape)}"
            raise ValueError(f'{op}: along "{along}" {name} must be {shape}, got {got}')
    if a.qdata.shape[-1] != b.qdata.shape[-1]:
        got = f"{list(a.qdata.shape)} and {list(b.qdata.shape)}"
        raise ValueError(f"{op}: a and b must agree in their last dim, the contraction, got payloads {got}")
    if along == "k" and a.qdata.shape[1] * a_fmt.element.per_byte % a_fmt.block[1]:
        raise ValueError(
            f'{op}: along "k" tokens are padded to whole blocks of {a_fmt.block[1]}, got payloads of'
            f" {a.qdata.shape[1]} columns; quantize a and b by grouped_quantize(..., columnwise=True)"
        )
    if a.qdata.device != b.qdata.device:
        raise ValueError(f"{op}: a is on {a.qdata.device}, b on {b.qdata.device}; move one of them")


def _check_groups(op: str, a, b, group_ends, group_tables, a_fmt: BlockFormat, along: str) -> None:
    """In operations and their fakes: what has values is here, and what is traced is not."""
    # Along "k" the tokens are padded, and the number of columns is a bound of the ends.
    tokens = a.shape[0] if along == "m" else a.shape[1] * a_fmt.element.per_byte
    check_group_ends(op, group_ends, tokens, a.device)
    check_group_tables(op, group_tables, group_ends, tokens, a_fmt.block[1], padded=along == "k")
    if along == "m" and group_ends.shape[0] != b.shape[0]:
        got = f"{group_ends.shape[0]} ends for payload of shape {list(b.shape)}"
        raise ValueError(f"{op}: group_ends must have one end for each matrix of b [E, N, K], got {got}")


def candidates(
    device: torch.device,
    a_shape: Sequence[int],
    b_shape: Sequence[int],
    a_fmt: BlockFormat,
    b_fmt: BlockFormat,
    along: str,
) -> dict[Backend, str | None]:
    """The backends of a product of payloads of these shapes, in AUTO's order, each with why it cannot run, or None."""
    why_triton = why_no_triton(device)
    if why_triton is None and (a_fmt.name, b_fmt.name) not in _KERNEL_PAIRS[along]:
        why_triton = f'{a_fmt.name} · {b_fmt.name} has no kernel along "{along}"'
    # Along "m" Gluon's kernel took half the time of Triton's at every shape and routing measured on an H200.
    return {
        Backend.GLUON: _why_no_gluon(device, a_shape, b_shape, a_fmt, b_fmt, along),
        Backend.TRITON: why_triton,
        Backend.REFERENCE: None,
    }


def _why_no_gluon(
    device: torch.device, a_shape, b_shape, a_fmt: BlockFormat, b_fmt: BlockFormat, along: str
) -> str | None:
    reason = why_no_gluon(device)
    if reason is not None:
        return reason
    from torchao_blockwise.ops.grouped_matmul import kernels_gluon as gluon

    return gluon.why_not(a_shape, b_shape, a_fmt, b_fmt, along)


def _pick(
    op: str, device: torch.device, a_shape, b_shape, a_format: str, b_format: str, along: str, backend: str
) -> Backend:
    reasons = candidates(device, a_shape, b_shape, get_format(a_format), get_format(b_format), along)
    return pick(op, backend, reasons, expected=Backend.TRITON if device.type == "cuda" else None)


# Choosing takes microseconds of every product, and somebody waits for them where tensors are a GPU's.
_pick_on_gpu = functools.lru_cache(maxsize=4096)(_pick)


def _choose(op: str, a, b, a_format: str, b_format: str, along: str, backend: str) -> Backend:
    pick_one = _pick_on_gpu if a.is_cuda else _pick
    return pick_one(op, a.device, a.shape, b.shape, a_format, b_format, along, backend)


def _grouped_matmul(
    a, a_scale, a_global, b, b_scale, b_global, group_ends, a_format, b_format, along, out_dtype, backend,
    group_tables=None,
):  # fmt: skip
    a_fmt, b_fmt = get_format(a_format), get_format(b_format)
    _check_groups("grouped_matmul", a, b, group_ends, group_tables, a_fmt, along)
    chosen = _choose("grouped_matmul", a, b, a_format, b_format, along, backend)
    arguments = a, a_scale, a_global, b, b_scale, b_global, group_ends, a_fmt, b_fmt, along, out_dtype
    if chosen is Backend.GLUON:
        from torchao_blockwise.ops.grouped_matmul import kernels_gluon as gluon

        return gluon.grouped_matmul(*arguments, group_tables=group_tables)
    if chosen is Backend.TRITON:
        from torchao_blockwise.ops.grouped_matmul import kernels_triton as triton

        return triton.grouped_matmul(*arguments)
    return reference.grouped_matmul(*arguments)


def _add_grouped_matmul(
    out, a, a_scale, a_global, b, b_scale, b_global, group_ends, a_format, b_format, backend, group_tables=None
):
    a_fmt, b_fmt = get_format(a_format), get_format(b_format)
    _check_groups("add_grouped_matmul_", a, b, group_ends, group_tables, a_fmt, "k")
    chosen = _choose("add_grouped_matmul_", a, b, a_format, b_format, "k", backend)
    arguments = a, a_scale, a_global, b, b_scale, b_global, group_ends, a_fmt, b_fmt
    if chosen is Backend.GLUON:
        from torchao_blockwise.ops.grouped_matmul import kernels_gluon as gluon

        gluon.add_grouped_matmul(out, *arguments, group_tables=group_tables)
    elif chosen is Backend.TRITON:
        from torchao_blockwise.ops.grouped_matmul import kernels_triton as triton

        triton.add_grouped_matmul(out, *arguments)
    else:
        reference.add_grouped_matmul(out, *arguments)


def _grouped_matmul_fake(
    a, a_scale, a_global, b, b_scale, b_global, group_ends, a_format, b_format, along, out_dtype, backend,
    group_tables=None,
):  # fmt: skip
    _check_groups("grouped_matmul", a, b, group_ends, group_tables, get_format(a_format), along)
    shape = (a.shape[0], b.shape[1]) if along == "m" else (group_ends.shape[0], a.shape[0], b.shape[0])
    return a.new_empty(shape, dtype=out_dtype)


def _add_grouped_matmul_fake(
    out, a, a_scale, a_global, b, b_scale, b_global, group_ends, a_format, b_format, backend, group_tables=None
):
    _check_groups("add_grouped_matmul_", a, b, group_ends, group_tables, get_format(a_format), "k")


grouped_matmul_op = define_op(
    "grouped_matmul(Tensor a, Tensor a_scale, Tensor? a_global, Tensor b, Tensor b_scale, Tensor? b_global,"
    " Tensor group_ends, str a_format, str b_format, str along, ScalarType out_dtype, str backend,"
    " Tensor? group_tables=None) -> Tensor",
    _grouped_matmul,
    _grouped_matmul_fake,
)
add_grouped_matmul_op = define_op(
    "add_grouped_matmul_(Tensor(a!) out, Tensor a, Tensor a_scale, Tensor? a_global, Tensor b, Tensor b_scale,"
    " Tensor? b_global, Tensor group_ends, str a_format, str b_format, str backend, Tensor? group_tables=None) -> ()",
    _add_grouped_matmul,
    _add_grouped_matmul_fake,
)
