"""Grouped matmul: a GEMM of two block-scaled operands for each expert, in one launch, accumulated in fp32.

    along "m"   output, grad_input    each row of a belongs to an expert, which has a matrix in b

                    a [M, K]    ·    b [E, N, K]ᵀ    =    out [M, N]         out[m] = a[m] @ b[g].T   for m in group g

    along "k"   grad_weight           the contraction runs over the tokens of one expert

                    a [N, P]    ·    b [K, P]ᵀ       =    out [E, N, K]      out[g] = a[:, group g] @ b[:, group g].T

Only the device knows where groups end, so shapes and launches depend only on the numbers of tokens and experts.
"""

from __future__ import annotations

import torch

from torchao_blockwise.formats import E2M1, FP8_1X128, FP8_128X128, Groups, Operand
from torchao_blockwise.ops.backend import Backend, Implementation, compute_capability, kernels
from torchao_blockwise.ops.gemm import FP8_PAIRS, NVFP4_PAIRS, cutlass, plain
from torchao_blockwise.ops.groups.ends import as_groups
from torchao_blockwise.ops.groups.tables.layout import check_groups
from torchao_blockwise.ops.operands import new_output
from torchao_blockwise.ops.registry import Operation, groups, operand

# The formats that the Gluon kernel supports along each dim: FP8, and NVFP4, which is decoded first.
_GLUON_PAIRS = {
    "m": {(FP8_1X128.name, FP8_128X128.name)} | NVFP4_PAIRS,
    "k": FP8_PAIRS | NVFP4_PAIRS,
}
# In NVFP4 on Hopper, AUTO decodes before the GEMM if each decoded element is used in at least this number of
# multiplications, because decoding moves 4 more bytes per element: bf16 is written and read again. On an H100, along
# "m", it took 1.2 times as long as decoding in the kernel at 118 (128 tokens an expert), and 0.7 times above 200 (256
# tokens).
_DECODED_WORK = 150


def grouped_matmul(
    a: Operand,
    b: Operand,
    groups: Groups | torch.Tensor,
    *,
    along: str = "m",
    out_dtype: torch.dtype,
    backend: Backend | str | None = None,
) -> torch.Tensor:
    """out[m] = a[m] @ b[g].T for the rows m of each group g (along "m"), or out[g] = a[:, g] @ b[:, g].T (along "k").

    The GEMM is computed as in `matmul`; a has one-row blocks.
    groups: a result of `make_groups` for M and the format of a, or only the ends, [E] int32, cumulative, on the
        operands' device: group g is tokens [ends[g-1], ends[g]), and tokens after the last group belong to none. Sizes
        are arbitrary. On a CPU, the values are checked. On a GPU, the host never reads them, and end g is the maximum
        over i <= g of clamp(ends[i], 0, M). Along "k", M is the number of tokens before padding.
    along "m": a is a result of `quantize` for a tensor [M, K], and b for a tensor [E, N, K], with the same element and
        block length. Returns [M, N] in `out_dtype`; rows after the last group are zeros.
    along "k": a and b are columnwise results of `quantize` with the same groups, for tensors [M, N] and [M, K]: qdata
        [N, P] and [K, P], where each group is padded to whole blocks; b has one-row or square blocks. Returns [E, N, K]
        in `out_dtype`, zeros for empty groups.
    out_dtype: bf16 | f16 | f32. backend: AUTO (default), or the name of a backend.
    NaN and Inf propagate within their group. Not differentiable.

    Raises TypeError for an operand or dtype, ValueError for shapes, devices, group ends or a backend that cannot run.
    Source: DeepSeek-V3 report (arXiv 2412.19437) §3.3.2 for the promotion of partial sums to fp32.
    """
    _check("grouped_matmul", a, b, along, out_dtype)
    return grouped_matmul_op(a, b, as_groups(groups), along, out_dtype, backend)


def add_grouped_matmul_(
    out: torch.Tensor, a: Operand, b: Operand, groups: Groups | torch.Tensor, *, backend: Backend | str | None = None
) -> torch.Tensor:
    """out[g] += a[:, g] @ b[:, g].T, in fp32: add gradients of experts to those of other microbatches.

    out: [E, N, K] f32, contiguous, changed in place and returned; empty groups are neither read nor written.
    a, b, groups: as in `grouped_matmul` along "k".
    Gluon and Triton kernels read and write `out` once, at the end of a tile; other backends compute the GEMM first.
    Raises TypeError and ValueError like `grouped_matmul`, and for another `out`.
    """
    _check("add_grouped_matmul_", a, b, "k", torch.float32)
    groups = as_groups(groups)
    wanted = [groups.ends.numel(), a.qdata.shape[0], b.qdata.shape[0]]
    plain.check_sum("add_grouped_matmul_", out, wanted, a.qdata.device)
    add_grouped_matmul_op(out, a, b, groups, backend)
    plain.count_change(out)
    return out


def _check(op: str, a: Operand, b: Operand, along: str, out_dtype: torch.dtype) -> None:
    plain.check_operands(op, a, b, out_dtype)
    if along not in _GLUON_PAIRS:
        raise ValueError(f'{op}: along must be "m" (groups of rows) or "k" (groups of the contraction), got {along!r}')
    if along == "m" and a.format.block[0] > 1:
        raise ValueError(
            f'{op}: along "m", a must have one-row blocks, because groups may end at any row, got {a.format.name}; '
            "quantize a in a format with one-row blocks"
        )
    b_dims, b_shape = (3, "[E, N, K]") if along == "m" else (2, "[K, P]")
    for name, x, dims, shape in (("a", a, 2, "[M, K]" if along == "m" else "[N, P]"), ("b", b, b_dims, b_shape)):
        if x.qdata.dim() != dims:
            got = f"payload of shape {list(x.qdata.shape)}"
            raise ValueError(f'{op}: along "{along}" {name} must be {shape}, got {got}')
    if a.qdata.shape[-1] != b.qdata.shape[-1]:
        got = f"{list(a.qdata.shape)} and {list(b.qdata.shape)}"
        raise ValueError(f"{op}: a and b must agree in their last dim, the contraction, got payloads {got}")
    if along == "k" and a.qdata.shape[1] * a.format.element.per_byte % a.format.block[1]:
        raise ValueError(
            f'{op}: along "k" tokens are padded to whole blocks of {a.format.block[1]}, got payloads of'
            f" {a.qdata.shape[1]} columns; quantize a and b with groups=..., columnwise=True"
        )


def _check_groups(op: str, a: Operand, b: Operand, groups: Groups, along: str) -> None:
    """Check groups in operations and their fakes, because traced groups have no values."""
    fmt = a.format
    # Along "k" the tokens are padded, and the number of columns is a bound of the ends.
    tokens = a.qdata.shape[0] if along == "m" else a.qdata.shape[1] * fmt.element.per_byte
    check_groups(op, groups, tokens, a.qdata.device, fmt.block[1], padded=along == "k")
    for name, x in (("a", a), ("b", b)):
        if x.global_scale is not None and x.global_scale.dim() and x.global_scale.shape != groups.ends.shape:
            got = f"{list(x.global_scale.shape)} for {groups.ends.shape[0]} ends"
            raise ValueError(f"{op}: global_scale of {name} must be a scalar or one for each group, got {got}")
    if along == "m" and groups.ends.shape[0] != b.qdata.shape[0]:
        got = f"{groups.ends.shape[0]} ends for payload of shape {list(b.qdata.shape)}"
        raise ValueError(f"{op}: group_ends must have one end for each matrix of b [E, N, K], got {got}")


# --- backends ---------------------------------------------------------------------------------------------------------


def _preferred(a: Operand, b: Operand, *_: object) -> Backend | None:
    """Return the backend that AUTO prefers to those above it in the table.

    In NVFP4 on Hopper, this is Triton, which reads 4 bits per element, if each decoded element would be used in too few
    multiplications: along "m" if experts have at most about `_DECODED_WORK` tokens on average (the host knows only the
    average), along "k" if there are at most that many features.
    """
    if a.format.element is not E2M1 or compute_capability(a.qdata.device) != (9, 0):
        return None
    (rows, width), columns = a.qdata.shape, b.qdata.shape[-2]
    work = rows * columns * width
    return None if work >= _DECODED_WORK * (a.qdata.numel() + b.qdata.numel()) else Backend.TRITON


# Along "m", the Gluon kernel took half the time of the Triton kernel for all shapes and routings measured on an H200.
_TABLE = [
    kernels(
        Backend.GLUON,
        f"{__package__}.kernels_gluon:grouped_matmul",
        lambda a, b, groups, along, *_: plain.why_no_gluon_gemm(a, b, _GLUON_PAIRS[along]),
    ),
    kernels(Backend.CUTLASS, cutlass.grouped_matmul, cutlass.why_not),
    kernels(Backend.TRITON, f"{__package__}.kernels_triton:grouped_matmul", plain.why_no_triton_gemm),
    Implementation(Backend.REFERENCE, f"{__package__}.reference:grouped_matmul"),
]


# The host does not know the sizes of groups, so FLOPs count all rows of a, and along "k" all padded tokens.
grouped_matmul_op = Operation(
    f"grouped_matmul({operand('a')}, {operand('b')}, {groups()}, str along, ScalarType out_dtype, str backend)"
    " -> Tensor",
    takes=(Operand, Operand, Groups, None, None),
    table=_TABLE,
    fake=lambda a, b, groups, along, out_dtype: new_output(a, b, out_dtype, groups, along),
    check=lambda a, b, groups, along, out_dtype: _check_groups("grouped_matmul", a, b, groups, along),
    preferred_backend=_preferred,
    flops=plain.count_flops,
)
add_grouped_matmul_op = Operation(
    f"add_grouped_matmul_(Tensor(a!) out, {operand('a')}, {operand('b')}, {groups()}, str backend) -> ()",
    takes=(None, Operand, Operand, Groups),
    table=plain.adding_rows(_TABLE, "k", torch.float32),
    check=lambda out, a, b, groups: _check_groups("add_grouped_matmul_", a, b, groups, "k"),
    preferred_backend=lambda out, *ab: _preferred(*ab),
    flops=lambda out, *ab: plain.count_flops(*ab),
)
