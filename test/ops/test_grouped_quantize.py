"""ops.quantize and SwiGLU of tokens in groups: each group as if quantized alone, and nothing else written."""

from __future__ import annotations

import pytest
import torch
from grouped_copies import (
    COPIES,
    GROUPS,
    assert_copies_equal,
    backends,
    copies,
    each_group_alone,
    few_groups,
    formats,
    groups,
    int32,
    tokens_of,
)

from torchao_blockwise import ops
from torchao_blockwise.formats import (
    FP8_1X128,
    NVFP4_1X16,
    CastOptions,
)
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

# --- each group alone -------------------------------------------------------------------------------------------------


@backends
@formats
@groups
def test_each_group_is_quantized_alone(ends, tokens, fmt, backend, guarded, device):
    x = tokens_of(ends, tokens, 144, fmt, device=device)
    got = ops.quantize(x, fmt, groups=int32(ends, device), columnwise=True, backend=backend)
    assert_copies_equal(got, each_group_alone(x, ends, fmt))
    for operand in got:
        assert operand.qdata.is_contiguous() and operand.scale.is_contiguous()


@backends
@copies
@formats
@few_groups
def test_columns_that_are_no_whole_blocks(ends, tokens, fmt, copies, backend, guarded, device):
    x, options = tokens_of(ends, tokens, 75, fmt, device=device), {"rowwise": copies[0], "columnwise": copies[1]}
    got = ops.quantize(x, fmt, groups=int32(ends, device), **options, backend=backend)
    assert_copies_equal(got, each_group_alone(x, ends, fmt, *copies))


@backends
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=lambda d: str(d)[6:])
@formats
def test_dtypes(fmt, dtype, backend, device):
    ends, tokens = GROUPS["tail"]
    x = tokens_of(ends, tokens, 144, fmt, dtype, device)
    got = ops.quantize(x, fmt, groups=int32(ends, device), columnwise=True, backend=backend)
    assert_copies_equal(got, each_group_alone(x, ends, fmt))


@backends
@formats
def test_strides_do_not_matter(fmt, backend, device):
    ends, tokens = GROUPS["tail"]
    x = tokens_of(ends, tokens, 144, fmt, device=device)
    expected = each_group_alone(x, ends, fmt)
    for strided in (x.mT.contiguous().mT, torch.cat((x, x), 1)[:, :144], x.repeat_interleave(2, 0)[::2]):
        got = ops.quantize(strided, fmt, groups=int32(ends, device), columnwise=True, backend=backend)
        assert_copies_equal(got, expected)


@backends
def test_power_of_2_scales(backend, device):
    ends, tokens = GROUPS["tail"]
    x, options = tokens_of(ends, tokens, 144, device=device), {"columnwise": True, "power_of_2_scales": True}
    got = ops.quantize(x, FP8_1X128, groups=int32(ends, device), **options, backend=backend)
    assert_copies_equal(got, each_group_alone(x, ends, FP8_1X128, power_of_2_scales=True))


@backends
def test_nan_stays_in_its_group(backend, device):
    """In FP8; beside it, in the same block of 128 tokens, another group is finite."""
    x = random_tensor(40, 32, device=device)
    x[10, 3] = float("nan")
    rowwise, columnwise = ops.quantize(x, FP8_1X128, groups=int32([20, 40], device), columnwise=True, backend=backend)
    assert ops.dequantize(rowwise).isnan().any(1).nonzero().flatten().tolist() == [10]
    decoded = ops.dequantize(columnwise)
    assert decoded[3, 10].isnan() and decoded[:, 128:].isfinite().all()


@backends
def test_nvfp4_takes_the_amax_of_what_is_in_groups(backend, device):
    x = random_tensor(40, 32, device=device)
    x[30:] = 1e9
    ends = int32([20, 30], device)
    got = ops.quantize(x, NVFP4_1X16, groups=ends, backend=backend).rowwise
    alone = ops.quantize(x[:30], NVFP4_1X16, backend="reference").rowwise
    assert_bitwise_equal(got.global_scale, alone.global_scale)
    amax = torch.tensor(1e3, device=device)
    given = ops.quantize(x, NVFP4_1X16, groups=ends, tensor_amax=amax, backend=backend).rowwise
    assert_bitwise_equal(given.qdata[:30], ops.quantize(x[:30], NVFP4_1X16, tensor_amax=amax).rowwise.qdata)


# --- SwiGLU in groups -------------------------------------------------------------------------------------------------


def gate_up_dh(ends, tokens, width, device):
    gate_up = tokens_of(ends, tokens, 2 * width, device=device)
    dh = tokens_of(ends, tokens, width, device=device)
    return *(gate_up / 64).chunk(2, 1), dh


# Kernels of SwiGLU take long to interpret: groups one way, ways one grouping.
SWIGLU = [(name, 48, "both") for name in ("ragged", "empty", "tail of a token", "all tail", "no tokens")]
SWIGLU += [("tail", width, copies) for width in (48, 128) for copies in COPIES]


@backends
@pytest.mark.parametrize("name, width, copies", SWIGLU, ids=lambda value: str(value))
def test_swiglu_is_quantized_in_groups(name, width, copies, backend, guarded, device):
    (ends, tokens), copies = GROUPS[name], COPIES[copies]
    gate, up, dh = gate_up_dh(ends, tokens, width, device)
    options = CastOptions(FP8_1X128, *copies)
    h = ops.swiglu(gate, up, backend="reference")
    got = ops.swiglu_quantize(gate, up, options, groups=int32(ends, device), backend=backend)
    assert_copies_equal(got, each_group_alone(h, ends, FP8_1X128, *copies))
    merged = torch.cat(ops.swiglu_backward(dh, gate, up, backend="reference"), 1)
    got = ops.swiglu_backward_quantize(dh, gate, up, options, groups=int32(ends, device), backend=backend)
    assert_copies_equal(got, each_group_alone(merged, ends, FP8_1X128, *copies))


@backends
@pytest.mark.parametrize("fmt, width", ((NVFP4_1X16, 48), (FP8_1X128, 75)), ids=("nvfp4_1x16", "ragged"))
def test_swiglu_runs_as_two_operations_in_groups(fmt, width, backend, device):
    ends, tokens = GROUPS["tail"]
    gate, up, dh = gate_up_dh(ends, tokens, width, device)
    options, of = CastOptions(fmt, columnwise=True), {"groups": int32(ends, device), "backend": backend}
    h = ops.swiglu(gate, up, backend="reference")
    assert_copies_equal(ops.swiglu_quantize(gate, up, options, **of), each_group_alone(h, ends, fmt))
    merged = torch.cat(ops.swiglu_backward(dh, gate, up, backend="reference"), 1)
    got = ops.swiglu_backward_quantize(dh, gate, up, options, **of)
    assert_copies_equal(got, each_group_alone(merged, ends, fmt))
