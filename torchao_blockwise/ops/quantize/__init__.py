"""Quantise: one read of a high-precision tensor to its rowwise and columnwise block-scaled copies."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import (
    FP8_1X128,
    FP8_128X128,
    HIGH_PRECISION_DTYPES,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockFormat,
    get_format,
    global_scale_of,
)
from torchao_blockwise.ops.backend import Backend, get_backend, pick, why_no_triton
from torchao_blockwise.ops.library import define_op
from torchao_blockwise.ops.operand import operand
from torchao_blockwise.ops.padding import padded_size, with_zero_tokens, without_padding
from torchao_blockwise.ops.quantize import reference
from torchao_blockwise.ops.sharding import shards_on_blocks

_KERNEL_FORMATS = (FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16)


def quantize(
    x: torch.Tensor,
    fmt: BlockFormat | str,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    power_of_2_scales: bool = False,
    tensor_amax: torch.Tensor | None = None,
    padded: bool = False,
    backend: Backend | str | None = None,
):
    """Quantise `x` block by block: scale = max(amax, fmt.min_amax) / fmt.element.max, qdata = rne(x / scale).

    x: [.., M, K] bf16 | f16 | f32, any strides; leading dims are independent matrices.
    rowwise: blocks along K. Returns (qdata [.., M, K], scale, global_scale); FP8_1X128 scales are [.., ⌈K/128⌉, M],
        all others [.., M blocks, K blocks]. 4-bit payload is packed two a byte: [.., M, ⌈K/2⌉] uint8.
    columnwise: `x` with its last two dims swapped, quantised rowwise, contiguous: qdata [.., K, M]. For square blocks
        that is the exact transpose of the rowwise result.
    power_of_2_scales: FP8 only; rounds the encode factor down to a power of two.
    tensor_amax: NVFP4 only; the amax to derive the tensor scale from, where `x` is a part of the tensor. f32 scalar.
    padded: the columnwise copy is that of `x` with zero rows behind, up to a multiple of 32: for products of two such
        copies, to which they add nothing. Without it, M that is no such multiple costs a copy.
    backend: AUTO (default), or one by name.
    With rowwise and columnwise both: (rowwise result, columnwise result), from one read of `x`.
    A zero block decodes to zeros. A block with NaN decodes to NaN, one with Inf to no finite number; in NVFP4 either
    makes the whole tensor NaN. Bits do not depend on the backend. Not differentiable.

    Raises TypeError for a dtype, ValueError for a shape, format, option or backend that does not exist.
    Source: DeepSeek-V3 report (arXiv 2412.19437) §3.3; NVFP4 pretraining (arXiv 2509.25149).
    """
    fmt = get_format(fmt)
    _check(x, fmt, rowwise, columnwise, power_of_2_scales, tensor_amax)
    backend = get_backend(backend).value
    if torch.is_grad_enabled() and x.requires_grad:
        x = x.detach()
    amax_bits = global_scale = None
    if fmt.has_global_scale:
        amax_bits = tensor_amax_bits_op(x) if tensor_amax is None else tensor_amax.view(torch.int32)
        global_scale = global_scale_op(amax_bits)
    if rowwise and columnwise:
        q, s, qt, st = quantize_both_op(x, amax_bits, fmt.name, power_of_2_scales, backend, padded)
        return operand(fmt, q, s, global_scale), operand(fmt, qt, st, global_scale)
    q, s = quantize_op(x, amax_bits, fmt.name, columnwise, power_of_2_scales, backend, padded)
    return operand(fmt, q, s, global_scale)


def _check(x, fmt, rowwise, columnwise, power_of_2_scales, tensor_amax):
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"quantize: x must be bfloat16, float16 or float32, got {x.dtype}; cast it first")
    if x.dim() < 2:
        raise ValueError(f"quantize: x must have at least 2 dims [.., M, K], got shape {list(x.shape)}; reshape it")
    if not (rowwise or columnwise):
        raise ValueError("quantize: nothing to compute; ask for rowwise, columnwise or both")
    if power_of_2_scales and not fmt.has_power_of_2_scales:
        raise ValueError(f"quantize: {fmt.name} has no power_of_2_scales; its block scales are {fmt.scale_dtype}")
    if tensor_amax is not None and not fmt.has_global_scale:
        raise ValueError(f"quantize: {fmt.name} has no tensor scale; leave tensor_amax out")
    if tensor_amax is not None and (tensor_amax.dtype != torch.float32 or tensor_amax.dim() != 0):
        shape = list(tensor_amax.shape)
        raise ValueError(f"quantize: tensor_amax must be a float32 scalar, got {tensor_amax.dtype} of shape {shape}")


def _pick(x: torch.Tensor, fmt: BlockFormat, backend: str) -> Backend:
    # Below sm_89 there is no conversion to e4m3 in hardware.
    reasons = {Backend.TRITON: why_no_triton(x.device, min_capability=(8, 9)), Backend.REFERENCE: None}
    if fmt not in _KERNEL_FORMATS and reasons[Backend.TRITON] is None:
        reasons[Backend.TRITON] = f"{fmt.name} has no kernel yet"
    return pick("quantize", backend, reasons, expected=Backend.TRITON if x.is_cuda else None)


def _quantize(x, amax_bits, format, columnwise, power_of_2_scales, backend, padded=False):
    fmt, amax = get_format(format), _amax(amax_bits)
    if _pick(x, fmt, backend) is Backend.TRITON:
        from torchao_blockwise.ops.quantize import kernels_triton as triton

        copy = triton.quantize(x, fmt, amax, not columnwise, columnwise, power_of_2_scales)
        return copy if padded or not columnwise else without_padding(copy, fmt, x.shape[-2])
    if columnwise:
        return reference.quantize(_columns(x, fmt, padded), fmt, amax, power_of_2_scales)
    return reference.quantize(x, fmt, amax, power_of_2_scales)


def _quantize_both(x, amax_bits, format, power_of_2_scales, backend, padded=False):
    fmt, amax = get_format(format), _amax(amax_bits)
    if _pick(x, fmt, backend) is Backend.TRITON:
        from torchao_blockwise.ops.quantize import kernels_triton as triton

        q, s, qt, st = triton.quantize(x, fmt, amax, True, True, power_of_2_scales)
        return q, s, *((qt, st) if padded else without_padding((qt, st), fmt, x.shape[-2]))
    rowwise = reference.quantize(x, fmt, amax, power_of_2_scales)
    return *rowwise, *reference.quantize(_columns(x, fmt, padded), fmt, amax, power_of_2_scales)


def _columns(x: torch.Tensor, fmt: BlockFormat, padded: bool) -> torch.Tensor:
    return (with_zero_tokens(x) if padded else x).mT


def _amax(bits: torch.Tensor | None) -> torch.Tensor | None:
    return None if bits is None else bits.view(torch.float32)


def _quantize_fake(x, amax_bits, format, columnwise, power_of_2_scales, backend, padded=False):
    fmt = get_format(format)
    return _new_columnwise(x, fmt, padded) if columnwise else fmt.new_empty(x, *x.shape)


def _quantize_both_fake(x, amax_bits, format, power_of_2_scales, backend, padded=False):
    fmt = get_format(format)
    return *fmt.new_empty(x, *x.shape), *_new_columnwise(x, fmt, padded)


def _new_columnwise(x: torch.Tensor, fmt: BlockFormat, padded: bool):
    *batch, rows, columns = x.shape
    return fmt.new_empty(x, *batch, columns, padded_size(rows) if padded else rows)


def _tensor_amax_bits(x):
    return reference.tensor_amax(x).view(torch.int32)


def _tensor_amax_bits_fake(x):
    return x.new_empty((), dtype=torch.int32)


def _global_scale(amax_bits):
    return global_scale_of(_amax(amax_bits))


def _global_scale_fake(amax_bits):
    return amax_bits.new_empty((), dtype=torch.float32)


def _global_scale_sharding(amax_bits):
    from torch.distributed.tensor import Replicate

    return [([Replicate()], [Replicate()])]


def _amax_sharding(x):
    from torch.distributed.tensor import Partial, Replicate, Shard

    rules = [([Replicate()], [Replicate()])]
    return rules + [([Partial("max")], [Shard(dim)]) for dim in range(len(x.shape))]


def _copy_placements(x, fmt: BlockFormat, columnwise: bool, dim: int):
    """Placements of (qdata, scale) where `x` is sharded on `dim`."""
    from torch.distributed.tensor import Shard

    ndim = len(x.shape)
    last, row = ndim - 1, ndim - 2
    if columnwise and dim >= row:
        dim = last if dim == row else row
    scale_dim = dim
    if fmt.transposed_scales and dim >= row:
        scale_dim = last if dim == row else row
    return [Shard(dim), Shard(scale_dim)]


def _rules(x, amax_bits, fmt: BlockFormat, copies: tuple[bool, ...], padded: tuple[bool, ...], others: int):
    """x replicated, or sharded on a dim whose shards end on block borders; without an amax NVFP4 needs all of x.

    padded: the argument, which is not there at its default. others: how many arguments are no tensors beside it.
    """
    from torch.distributed.tensor import Replicate, Shard

    amax, options = None if amax_bits is None else Replicate(), [None] * (others + len(padded))
    rules = [([Replicate()] * 2 * len(copies), [Replicate(), amax, *options])]
    for dim in range(len(x.shape)):
        # A shard that is padded by itself is another one than in the whole.
        whole = not any(padded) or dim != len(x.shape) - 2 or x.shape[dim] % (padded_size(1) * x.mesh.size()) == 0
        if whole and all(shards_on_blocks(x, dim, fmt, columnwise) for columnwise in copies):
            outputs = [p for columnwise in copies for p in _copy_placements(x, fmt, columnwise, dim)]
            rules.append((outputs, [Shard(dim), amax, *options]))
    return rules


def _quantize_sharding(x, amax_bits, format, columnwise, power_of_2_scales, backend, *padded):
    return _rules(x, amax_bits, get_format(format), (columnwise,), padded, 4)


def _quantize_both_sharding(x, amax_bits, format, power_of_2_scales, backend, *padded):
    return _rules(x, amax_bits, get_format(format), (False, True), padded, 3)


quantize_op = define_op(
    "quantize(Tensor x, Tensor? amax_bits, str format, bool columnwise, bool power_of_2_scales, str backend,"
    " bool padded=False) -> (Tensor, Tensor)",
    _quantize,
    _quantize_fake,
    _quantize_sharding,
)
quantize_both_op = define_op(
    "quantize_both(Tensor x, Tensor? amax_bits, str format, bool power_of_2_scales, str backend, bool padded=False)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _quantize_both,
    _quantize_both_fake,
    _quantize_both_sharding,
)
# Bits, because a MAX over ranks loses a NaN among floats; as integers magnitudes keep their order, NaN above all.
tensor_amax_bits_op = define_op(
    "tensor_amax_bits(Tensor x) -> Tensor", _tensor_amax_bits, _tensor_amax_bits_fake, _amax_sharding
)
global_scale_op = define_op(
    "global_scale(Tensor amax_bits) -> Tensor", _global_scale, _global_scale_fake, _global_scale_sharding
)
