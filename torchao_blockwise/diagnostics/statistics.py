"""What quantization does to a tensor, as numbers that add up: over passes, and over ranks.

A tensor in high precision and its quantized copy give a `Tally`: counts and sums, which add, and maxima. Everything is
computed on the tensor's device, and nothing is read back. Rows are taken some at a time, so that little memory is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from torchao_blockwise.formats import BlockFormat, Groups, Operand
from torchao_blockwise.ops.dequantization import decode_blocks
from torchao_blockwise.ops.groups.ends import clamped_ends, padded_rows
from torchao_blockwise.ops.quantization.reference import value_of_blocks

# Indices into the three tensors of a tally. After the last count comes the histogram of scales.
ELEMENTS, ZEROS, UNDERFLOWS, SATURATED, NONFINITE, HISTOGRAM = range(6)
AMAX, LARGEST_SCALE, SMALLEST_SCALE, FIRST_NONFINITE = range(4)
VALUES, DECODED, ERROR = range(3)

# One bin for each power of two that fp32 has; scale s is in bin e + 127 for 2^e <= s < 2^(e+1).
BINS = 256
EXPONENT_BIAS, _MANTISSA_BITS = 127, 23
COUNTS, MAXIMA, SUMS = HISTOGRAM + BINS, 4, 3
# What is larger than any maximum that is stored with its sign changed: a MAX of these is a MIN.
NEVER = 2**62
# A value that was clipped lies further above the largest element than fp32 rounds scales by.
_CLIPPED = 1 + 2.0**-12
_CHUNK = 2**24
_MAGNITUDE = 2**31 - 1


class Tally(NamedTuple):
    """Of one tensor, or of many: `merge` adds them.

    counts: int64 [COUNTS]. maxima: int64 [MAXIMA], bits of fp32 magnitudes, which keep their order as integers, NaN
        above all; minima have their sign changed. sums: f64 [SUMS], squares of the values, of what was decoded, and of
        the error.
    """

    counts: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def empty(cls, device: torch.device, *shape: int) -> Tally:
        """Of no tensor; `shape` of them."""
        maxima = torch.full((*shape, MAXIMA), -NEVER, dtype=torch.int64, device=device)
        maxima[..., :SMALLEST_SCALE] = 0
        sums = torch.zeros((*shape, SUMS), dtype=torch.float64, device=device)
        return cls(torch.zeros((*shape, COUNTS), dtype=torch.int64, device=device), maxima, sums)

    def at(self, *index: int) -> Tally:
        """One of many, as a view."""
        return Tally(self.counts[index], self.maxima[index], self.sums[index])

    def merge(self, other: Tally) -> None:
        """Add `other` to this."""
        self.counts.add_(other.counts)
        torch.maximum(self.maxima, other.maxima, out=self.maxima)
        self.sums.add_(other.sums)


class TokenSquares(NamedTuple):
    """Σ of squares of each token, f64 [P]: of its values, and of the error of its quantized copy along tokens."""

    values: torch.Tensor
    error: torch.Tensor


def tally(
    x: torch.Tensor, copy: Operand, order: int, *, columnwise: bool = False, groups: Groups | None = None
) -> tuple[Tally, TokenSquares]:
    """What `copy` loses of `x`.

    x: [.., M, K] bf16 | f16 | f32. copy: a result of `ops.quantize` for it, the columnwise one where it says so, or of
        of tokens in `groups`; rows after the last group are not counted.
    order: a number that says when `x` was seen, for the first one with NaN or Inf.
    Elements that are NaN or Inf are counted, and make the sums NaN.
    """
    matrices = [x[None]] if x.dim() == 2 else [x.flatten(0, -3)]
    result = Tally.empty(x.device)
    tokens = None
    for matrix, part in ((m, q) for batch in matrices for m, q in zip(batch, _operands(copy, batch.shape[0]))):
        found = _tally_matrix(matrix, part, order, columnwise, groups, result)
        tokens = found if tokens is None else TokenSquares(tokens.values + found.values, tokens.error + found.error)
    if tokens is None:
        empty = result.sums.new_zeros(x.shape[-2])
        tokens = TokenSquares(empty, empty)
    return result, tokens


def _operands(copy: Operand, batch: int) -> Iterator[Operand]:
    """Of each matrix in a batch."""
    qdata, scale = (t[None] if t.dim() == 2 else t.flatten(0, -3) for t in (copy.qdata, copy.scale))
    # One of all matrices, or of each.
    of_matrices = copy.global_scale if copy.qdata.dim() > 2 and copy.global_scale is not None else None
    each = None if of_matrices is None or not of_matrices.dim() else of_matrices.flatten()
    for index in range(batch):
        one = copy._replace(qdata=qdata[index], scale=scale[index])
        yield one if each is None else one._replace(global_scale=each[index])


def _tally_matrix(
    x: torch.Tensor, copy: Operand, order: int, columnwise: bool, groups: Groups | None, result: Tally
) -> TokenSquares:
    """Add x [M, K] to `result`."""
    if groups is not None and copy.global_scale is not None:
        # As it meets the grid of block scales.
        of_grid = value_of_blocks(copy.global_scale, x.shape[0], groups.ends, copy.format.block[1], columnwise)
        copy = copy._replace(global_scale=of_grid)
    fmt, source, in_groups = copy.format, None, None
    if groups is not None and columnwise:
        source = padded_rows(groups.ends, x.shape[0], fmt.block[1])
        in_groups = (source < x.shape[0])[None]
    elif groups is not None:
        in_groups = (torch.arange(x.shape[0], device=x.device) < clamped_ends(groups.ends, x.shape[0])[-1])[:, None]
    matrix = x.mT if columnwise else x
    rows, columns = matrix.shape[0], matrix.shape[1] if source is None else source.shape[0]
    step = max(1, _CHUNK // max(1, columns) // fmt.block[0]) * fmt.block[0]
    by_token = result.sums.new_zeros((2, columns if columnwise else rows))
    for start in range(0, rows, step):
        values = matrix[start : start + step].float()
        if source is not None:
            values = torch.cat((values, values.new_zeros(values.shape[0], 1)), 1)[:, source]
        counted = None if in_groups is None else in_groups if columnwise else in_groups[start : start + step]
        if counted is not None:
            values = values.masked_fill(~counted, 0)
        decoded, is_largest = _decode(copy, start, values.shape[0], columns)
        error = values - decoded
        _add(result, values, decoded, error, is_largest, counted)
        squares = torch.stack([torch.linalg.vector_norm(t, dim=0 if columnwise else 1, dtype=torch.float64).square()
                               for t in (values, error)])  # fmt: skip
        if columnwise:
            by_token += squares
        else:
            by_token[:, start : start + step] = squares
    result.sums[VALUES] += by_token[0].sum()
    result.sums[ERROR] += by_token[1].sum()
    bad = result.counts[NONFINITE] > 0
    first = torch.where(bad, -order, result.maxima[FIRST_NONFINITE])
    result.maxima[FIRST_NONFINITE] = torch.maximum(result.maxima[FIRST_NONFINITE], first)
    _add_scales(result, copy)
    return TokenSquares(by_token[0], by_token[1])


def _decode(copy: Operand, start: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, whether they are the largest element of the format) of some rows of an operand [R, columns], f32."""
    fmt = copy.format
    first = start // fmt.block[0]
    scales = slice(first, first + fmt.grid(rows, columns)[0])
    scale = copy.scale[:, scales] if fmt.transposed_scales else copy.scale[scales]
    qdata = copy.qdata[start : start + rows]
    # Behind the columns there may be padding.
    held = qdata.shape[-1] * fmt.element.per_byte
    decoded = decode_blocks(qdata, scale, fmt, held)[:, :columns]
    is_largest = fmt.element.decode(qdata, held)[:, :columns].abs() == fmt.element.max
    factor = copy.global_scale
    if factor is not None and factor.dim() == 1:
        factor = factor.repeat_interleave(fmt.block[1])[:columns]
    elif factor is not None and factor.dim() == 2:
        factor = factor[start : start + rows]
    return (decoded if factor is None else decoded * factor), is_largest


def _add(
    result: Tally,
    values: torch.Tensor,
    decoded: torch.Tensor,
    error: torch.Tensor,
    is_largest: torch.Tensor,
    counted: torch.Tensor | None,
) -> None:
    if not values.numel():
        return
    zero, magnitude = values == 0, values.abs()
    count = torch.full_like(result.counts[0], values.numel())
    if counted is not None:
        zero, count = zero & counted, counted.sum() * (values.numel() // counted.numel())
    underflow = (decoded == 0) & (values != 0)
    saturated = is_largest & (magnitude > decoded.abs() * _CLIPPED)
    found = [count, *(t.sum() for t in (zero, underflow, saturated, ~values.isfinite()))]
    result.counts[:HISTOGRAM] += torch.stack(found)
    # A NaN may come out of it with a sign.
    amax = (magnitude.max().view(torch.int32) & _MAGNITUDE).long()
    result.maxima[AMAX] = torch.maximum(result.maxima[AMAX], amax)
    result.sums[DECODED] += torch.linalg.vector_norm(decoded, dtype=torch.float64).square()


def _add_scales(result: Tally, copy: Operand) -> None:
    """Block scales as they decode; those of blocks of zeros, padding among them, are in bin 0 and no extremes."""
    scale = copy.scale.float()
    if not scale.numel():
        return
    is_zero = (scale <= _scale_of_zeros(copy.format, scale)).flatten()
    if copy.global_scale is not None:
        scale = scale * copy.global_scale
    scale = scale.flatten()
    bits = (scale.view(torch.int32) & _MAGNITUDE).long()
    bins = (bits >> _MANTISSA_BITS).masked_fill(is_zero, 0)
    result.counts[HISTOGRAM:].scatter_add_(0, bins, torch.ones_like(bins))
    for index, extreme in (
        (LARGEST_SCALE, bits.masked_fill(is_zero, 0).max()),
        (SMALLEST_SCALE, (-bits).masked_fill(is_zero, -NEVER).max()),
    ):
        result.maxima[index] = torch.maximum(result.maxima[index], extreme)


def _scale_of_zeros(fmt: BlockFormat, like: torch.Tensor) -> torch.Tensor:
    zero = like.new_zeros(())
    # Of both ways to round scales the larger one.
    ways = (False, True) if fmt.has_power_of_2_scales else (False,)
    amax = torch.ones_like(zero) if fmt.has_global_scale else None
    return torch.stack([fmt.compute_scales(zero, amax, way).scale.float() for way in ways]).max()


# --- the gradient of a weight -----------------------------------------------------------------------------------------
# dw = Σ over tokens of dy · x. Its norm is estimated from random projections, which add up over tokens, passes and
# ranks as gradients do: with signs u, v and r, s = Σ r · (u·dy) · (v·x) has the mean square |dw|². It costs some floats
# a token, where dw itself would be a product in high precision, with x saved for it.

PROBES = 64


def project(x: torch.Tensor, seed: int, first: int = 0) -> torch.Tensor:
    """x [T, K] times random signs [K, PROBES], f32: columns `first` and later of a tensor that may be split."""
    columns = torch.arange(first, first + x.shape[1], device=x.device)
    out = x.new_zeros((x.shape[0], PROBES), dtype=torch.float32)
    signs = _signs(columns, seed)
    step = max(1, _CHUNK // max(1, x.shape[1]))
    for start in range(0, x.shape[0], step):
        out[start : start + step] = x[start : start + step].float() @ signs
    return out


def gradient_probes(
    x: torch.Tensor, dy: torch.Tensor, groups: Groups | None, seed: int, first_group: int
) -> torch.Tensor:
    """Σ over tokens of r · dy · x, of projections [T, PROBES]: f64 [PROBES]. r: signs of each group, 0 in none."""
    products = dy.double() * x.double()
    if groups is not None:
        tokens = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
        ends = clamped_ends(groups.ends, x.shape[0])
        group = torch.searchsorted(ends, tokens, right=True)
        inside = group < ends.numel()
        signs = _signs(group + first_group, seed).double()
        products = torch.where(inside[:, None], products * signs, 0)
    return products.sum(0)


def gradient_noise(x: TokenSquares, dy: TokenSquares) -> torch.Tensor:
    """Σ |error|² that quantizing x and dy along tokens makes in dw, if errors of tokens are independent; f64."""
    return (dy.error * x.values + dy.values * x.error).sum()


def _signs(index: torch.Tensor, seed: int) -> torch.Tensor:
    """±1 f32 [n, PROBES], decided by index and seed alone: the bits of a hash."""
    start = (seed + 1) * 0x2545F4914F6CDD1D % 2**63
    mixed = (index.long() + 1) * 0x1E3779B97F4A7C15 + start
    for shift, factor in ((31, 0x7FB5D329728EA185), (27, 0x01DADEF4BC2DD44D), (33, 1)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    bits = (mixed[:, None] >> torch.arange(PROBES, device=index.device)) & 1
    return (2 * bits - 1).float()
