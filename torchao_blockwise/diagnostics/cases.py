"""Every operation on small inputs, made by the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchao_blockwise.formats import (
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockFormat,
    CastOptions,
    Groups,
    Operand,
    Place,
    hadamard_number,
)
from torchao_blockwise.ops import (
    dequantization,
    fused,
    grouped_quantize,
    make_groups,
    quantization,
    quantize,
    randomization,
    shards,
    transposition,
)
from torchao_blockwise.ops.gemm import grouped, plain
from torchao_blockwise.ops.groups import permutation, tables
from torchao_blockwise.ops.groups.tables.layout import HEIGHTS, layout_of
from torchao_blockwise.ops.registry import Operation
from torchao_blockwise.ops.shards.flat import WHOLE, Shards, block_count
from torchao_blockwise.ops.transposition import many

# Tokens are more than the rows up to which plain products choose another backend, and no multiple of a block.
TOKENS, FEATURES_IN, FEATURES_OUT = 520, 384, 256
# One expert has no tokens, and the last tokens have no expert.
ENDS = (100, 100, 390, 500)
TOP_K = 2


class Case(NamedTuple):
    """An operation and what it is called with.

    of: formats, or what else tells the case from others of the operation.
    args: whole values, without the backend. exact: whether all backends give the same bits.
    defined: what of a result, on the CPU, is defined.
    """

    op: Operation
    of: str
    args: Sequence[Any]
    exact: bool = True
    defined: Callable[[torch.Tensor], torch.Tensor] = lambda x: x


def cases(device: torch.device) -> list[Case]:
    """A case or more of each operation, with inputs on `device`."""
    numbers = torch.Generator().manual_seed(0)

    def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers, device="cpu").to(device=device, dtype=dtype)

    x, dy, w = values(TOKENS, FEATURES_IN), values(TOKENS, FEATURES_OUT), values(FEATURES_OUT, FEATURES_IN)
    experts = values(len(ENDS), FEATURES_OUT, FEATURES_IN)
    ends = torch.tensor(ENDS, dtype=torch.int32, device=device)
    found = [*_norm_cases(x, values), *_swiglu_cases(x, values), *_permutation_cases(x, values, device)]
    for fmt, weight_fmt in ((FP8_1X128, FP8_128X128), (NVFP4_1X16, NVFP4_16X16)):
        found += _cast_cases(x, w, fmt, weight_fmt)
        found += _product_cases(x, dy, w, fmt, weight_fmt)
        found += _group_cases(x, dy, experts, ends, fmt, weight_fmt)
        found += _shard_cases(w, weight_fmt)
    return sorted(found, key=lambda case: case.op.name)


def _amax_bits(x: torch.Tensor, fmt: BlockFormat) -> torch.Tensor | None:
    return x.abs().max().float().view(torch.int32) if fmt.has_global_scale else None


def _rowwise(x: torch.Tensor, fmt: BlockFormat) -> Operand:
    return quantize(x, fmt, backend="reference").rowwise


def _quantize(
    of: str,
    x: torch.Tensor,
    amax_bits: torch.Tensor | None,
    options: CastOptions,
    groups: Groups | None = None,
    key: torch.Tensor | None = None,
) -> Case:
    place = Place(operand=int(key is not None and options.columnwise))
    op = quantization.quantize_both_op if options.rowwise and options.columnwise else quantization.quantize_op
    return Case(op, of, (x, amax_bits, options, groups, key, place))


def _cast_cases(x: torch.Tensor, w: torch.Tensor, fmt: BlockFormat, weight_fmt: BlockFormat) -> list[Case]:
    both, columnwise = CastOptions(fmt, True, True, padded=True), CastOptions(fmt, False, True, padded=True)
    quantized = _rowwise(w, weight_fmt)
    two = [quantized.qdata] * 2, [quantized.scale] * 2, [FEATURES_IN] * 2, weight_fmt
    found = [
        _quantize(f"{weight_fmt.name} of a weight", w, _amax_bits(w, weight_fmt), CastOptions(weight_fmt)),
        _quantize(f"{fmt.name} columnwise", x, _amax_bits(x, fmt), columnwise),
        _quantize(fmt.name, x, _amax_bits(x, fmt), both),
        Case(dequantization.dequantize_op, weight_fmt.name, (quantized, FEATURES_IN, torch.bfloat16)),
        Case(transposition.transpose_op, weight_fmt.name, (quantized, FEATURES_IN)),
        Case(many.transpose_many_op, weight_fmt.name, two),
    ]
    if fmt.has_global_scale:
        found += [
            Case(quantization.tensor_amax_bits_op, fmt.name, (x, None, False)),
            Case(quantization.global_scale_op, fmt.name, (_amax_bits(x, fmt),)),
            *_randomized_cases(x, None, fmt),
        ]
    return found


def _randomized_cases(x: torch.Tensor, groups: Groups | None, fmt: BlockFormat) -> list[Case]:
    number, key, bits = hadamard_number(True), torch.tensor([1, 2, 3, 5], device=x.device), _amax_bits(x, fmt)
    in_groups = " in groups" * (groups is not None)
    rowwise, columnwise = CastOptions(fmt), CastOptions(fmt, False, True, padded=True, hadamard=number)
    return [
        *(
            Case(
                randomization.hadamard_amax_bits_op,
                f"{fmt.name}{in_groups}{', one each' * per_group}",
                (x, number, groups, per_group),
            )
            for per_group in ((False, True) if in_groups else (False,))
        ),
        *(
            _quantize(f"{fmt.name} randomized{' columnwise' * one.columnwise}{in_groups}", x, bits, one, groups, key)
            for one in (rowwise, columnwise)
        ),
    ]


def _product_cases(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, fmt: BlockFormat, weight_fmt: BlockFormat
) -> list[Case]:
    a, b = (
        quantize(t, fmt, rowwise=False, columnwise=True, padded=True, backend="reference").columnwise for t in (dy, x)
    )
    output = _rowwise(x, fmt), _rowwise(w, weight_fmt)
    main_grad = torch.zeros(FEATURES_OUT, FEATURES_IN, device=x.device)
    by_row, by_token = f"{fmt.name} · {weight_fmt.name}", f"{fmt.name} · {fmt.name}"
    return [
        Case(plain.matmul_op, by_row, (*output, torch.bfloat16, None), exact=False),
        Case(plain.matmul_op, by_token, (a, b, torch.bfloat16, None), exact=False),
        Case(plain.add_matmul_op, by_token, (main_grad, a, b), exact=False),
    ]


def _group_cases(
    x: torch.Tensor,
    dy: torch.Tensor,
    experts: torch.Tensor,
    ends: torch.Tensor,
    fmt: BlockFormat,
    weight_fmt: BlockFormat,
) -> list[Case]:
    groups = make_groups(ends, TOKENS, fmt, backend="reference")
    a, b = (
        grouped_quantize(t, groups, fmt, rowwise=False, columnwise=True, backend="reference").columnwise
        for t in (dy, x)
    )
    output = _rowwise(x, fmt), _rowwise(experts, weight_fmt)
    main_grad = torch.zeros(experts.shape, device=x.device)
    options = CastOptions(fmt, True, True, padded=True)
    by_row, by_token = f"{fmt.name} · {weight_fmt.name}", f"{fmt.name} · {fmt.name}"
    found = [
        Case(tables.group_tables_op, fmt.name, (ends, TOKENS, fmt), defined=lambda x: _used_entries(x, fmt)),
        _quantize(f"{fmt.name} in groups", x, _amax_bits(x, fmt), options, groups),
        Case(grouped.grouped_matmul_op, by_row, (*output, groups, "m", torch.bfloat16), exact=False),
        Case(grouped.grouped_matmul_op, by_token, (a, b, groups, "k", torch.bfloat16), exact=False),
        Case(grouped.add_grouped_matmul_op, by_token, (main_grad, a, b, groups), exact=False),
    ]
    if fmt.has_global_scale:
        found.append(Case(quantization.tensor_amax_bits_op, f"{fmt.name} in groups", (x, ends, False)))
        found += _randomized_cases(x, groups, fmt)
        found += _scaled_group_cases(x, dy, experts, ends, groups, (fmt, weight_fmt))
    return found


def _scaled_group_cases(
    x: torch.Tensor,
    dy: torch.Tensor,
    experts: torch.Tensor,
    ends: torch.Tensor,
    groups: Groups,
    formats: tuple[BlockFormat, BlockFormat],
) -> list[Case]:
    """Of groups, and of experts, that have a tensor scale each."""
    fmt, weight_fmt = formats
    options = CastOptions(fmt, True, True, padded=True, scale_per_group=True)
    each = torch.arange(1, len(ENDS) + 1, device=x.device).float()
    key, name = torch.tensor([1, 2, 3, 5], device=x.device), f"{fmt.name}, a scale each"
    a, b = (
        grouped_quantize(t, groups, fmt, columnwise=True, scale_per_group=True, backend="reference") for t in (dy, x)
    )
    w = quantize(experts, weight_fmt, scale_per_group=True, backend="reference").rowwise
    by_row, by_token = (b.rowwise, w, groups, "m"), (a.columnwise, b.columnwise, groups, "k")
    of_weight, bits = CastOptions(weight_fmt, scale_per_group=True), each.view(torch.int32)
    rowwise, columnwise = (options._replace(rowwise=row, columnwise=not row) for row in (True, False))
    return [
        Case(quantization.tensor_amax_bits_op, f"{fmt.name} in groups, one each", (x, ends, True)),
        Case(quantization.tensor_amax_bits_op, f"{weight_fmt.name} of experts, one each", (experts, None, True)),
        Case(quantization.global_scale_op, name, (bits,)),
        _quantize(f"{weight_fmt.name} of experts, a scale each", experts, bits, of_weight),
        _quantize(f"{fmt.name} in groups, a scale each", x, bits, options, groups),
        *(
            _quantize(f"{name}, randomized{' columnwise' * one.columnwise}", x, bits, one, groups, key)
            for one in (rowwise, columnwise)
        ),
        Case(grouped.grouped_matmul_op, f"{name}, by row", (*by_row, torch.bfloat16), exact=False),
        Case(grouped.grouped_matmul_op, f"{name}, by token", (*by_token, torch.bfloat16), exact=False),
    ]


def _used_entries(entries: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """Of tables of groups what is read: behind a schedule's last entry there may be anything."""
    at = layout_of(TOKENS, len(ENDS), fmt.block[1])
    firsts = [at.rows_of(tile) for tile in HEIGHTS]
    schedules = [entries[first : first + 1 + int(entries[first, 0])] for first in firsts]
    return torch.cat([entries[: at.rows], *schedules, entries[at.blocks :]])


def _norm_cases(x: torch.Tensor, values: Callable[..., torch.Tensor]) -> list[Case]:
    rstd = x.float().square().mean(-1).rsqrt()
    normed = fused.Norm(x, values(FEATURES_IN), None, None, rstd, x.dtype)
    return [
        Case(fused.norm_statistics_op, "RMSNorm", (x, False, 1e-5), exact=False),
        Case(fused.normalize_op, "RMSNorm", (normed,)),
        Case(fused.norm_quantize_op, FP8_1X128.name, (normed, CastOptions(FP8_1X128, True, True, padded=True))),
    ]


def _swiglu_cases(x: torch.Tensor, values: Callable[..., torch.Tensor]) -> list[Case]:
    up, dh = values(*x.shape), values(*x.shape)
    options = CastOptions(FP8_1X128, True, True, padded=True)
    no_groups: Groups | None = None
    return [
        Case(fused.swiglu_op, "bfloat16", (x, up)),
        Case(fused.swiglu_backward_op, "bfloat16", (dh, x, up)),
        Case(fused.swiglu_quantize_op, FP8_1X128.name, (x, up, options, no_groups)),
        Case(fused.swiglu_backward_quantize_op, FP8_1X128.name, (dh, x, up, options, no_groups)),
    ]


def _permutation_cases(x: torch.Tensor, values: Callable[..., torch.Tensor], device: torch.device) -> list[Case]:
    first = torch.arange(TOKENS, device=device) % len(ENDS)
    ids = torch.stack([(first + k) % len(ENDS) for k in range(TOP_K)], 1)
    source = ids.flatten().argsort(stable=True).int()
    y, weights = values(TOKENS * TOP_K, FEATURES_IN), values(TOKENS, TOP_K).abs().float()
    return [
        Case(permutation.permute_op, "bfloat16", (x, ids, len(ENDS))),
        Case(permutation.unpermute_op, "bfloat16", (y, source, TOP_K, weights)),
        Case(permutation.unpermute_backward_op, "bfloat16", (x, y, source, TOP_K, weights), exact=False),
    ]


def _shard_cases(w: torch.Tensor, fmt: BlockFormat) -> list[Case]:
    """Of a weight that two ranks split in the middle of a row."""
    cut = w.numel() // 2 + 1
    parts, starts, shape = [w.flatten()[:cut], w.flatten()[cut:]], [0, cut], [1, *w.shape]
    whole = _rowwise(w, fmt)
    blocks = block_count(w.shape, fmt)
    part = Shards([parts[1].clone()], starts[1:], shape, [0], torch.bfloat16, fmt)
    amax_bits = torch.zeros(blocks, dtype=torch.int32, device=w.device)
    # Of any magnitudes: what is compared is what backends make of them.
    of_blocks = torch.arange(1, blocks + 1, device=w.device).float()
    encode = torch.zeros(blocks, device=w.device)
    global_scales = [torch.zeros((), device=w.device)] if fmt.has_global_scale else []
    scales, qdata = [torch.zeros_like(whole.scale)], [torch.zeros_like(whole.qdata)]
    written = encode, scales, global_scales, of_blocks.view(torch.int32), [0], fmt, False
    # The first row of blocks, and what is below it is another rank's.
    rows_of_blocks = Shards([w[: fmt.block[0]].flatten()], [0], shape, [0], torch.bfloat16, fmt)
    at_once = (qdata, amax_bits, rows_of_blocks, fmt.has_power_of_2_scales, WHOLE)
    once = [] if fmt.has_global_scale else [Case(shards.whole_block_cast_op, fmt.name, at_once)]
    return [
        *once,
        Case(shards.partial_block_amax_op, fmt.name, (amax_bits, part)),
        Case(shards.block_scales_op, fmt.name, written),
        Case(shards.partial_cast_op, fmt.name, (qdata, part, of_blocks, WHOLE)),
    ]
