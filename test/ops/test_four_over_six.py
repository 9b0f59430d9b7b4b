"""Four over six: kernels against the reference, the reference against the rule, parts against the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantize_cases import backends, canonical, dtypes

from torchao_blockwise import ops
from torchao_blockwise.formats import (
    E2M1,
    E2M1_VALUES,
    FP8_1X128,
    NVFP4_1X16,
    NVFP4_16X16,
    StochasticRounding,
    hadamard_number,
    hadamard_transform,
)
from torchao_blockwise.testing import assert_bitwise_equal, assert_operands_equal, random_tensor, shape_id

SHAPES = ((1, 1), (16, 16), (17, 33), (33, 136), (0, 16), (16, 0), (40, 129))
ROUNDING = StochasticRounding(2**63 + 5, 2**32 - 1, 7)
HOW = {
    "nearest": {},
    "hadamard": {"hadamard": True},
    "stochastic": {"stochastic": ROUNDING},
    "both": {"hadamard": True, "stochastic": ROUNDING},
}
how = pytest.mark.parametrize("how", HOW.values(), ids=HOW)


def quantize(x, **options):
    return ops.quantize(x, NVFP4_1X16, four_over_six=True, **options)


def same(a, b) -> None:
    for one, other in zip(a, b, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_operands_equal(canonical(one), canonical(other))


def magnitudes(*shape: int, device: str, dtype=torch.bfloat16) -> torch.Tensor:
    """Rows of many magnitudes, so that blocks have scales from 0 to the largest."""
    return random_tensor(*shape, dtype=dtype, device=device) * 2.0 ** -torch.arange(shape[0], device=device)[:, None]


# --- kernels against the reference ------------------------------------------------------------------------------------


@how
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_kernels_match_the_reference(shape, how, device):
    for x in (random_tensor(*shape, device=device), magnitudes(*shape, device=device)):
        made = quantize(x, columnwise=True, padded=True, backend="triton", **how)
        same(made, quantize(x, columnwise=True, padded=True, backend="reference", **how))


@dtypes
@how
def test_dtypes_match_the_reference(how, dtype, device):
    x = random_tensor(50, 70, dtype=dtype, device=device)
    made = quantize(x, columnwise=True, backend="triton", **how)
    same(made, quantize(x, columnwise=True, backend="reference", **how))


@pytest.mark.parametrize("value", (float("nan"), float("inf"), 0.0, -0.0, 1e-40, 3e38))
@how
def test_special_values_match_the_reference(how, value, device):
    x = random_tensor(40, 20, dtype=torch.float32, device=device)
    x[3, 5] = x[20:36, 7] = value
    made = quantize(x, columnwise=True, backend="triton", **how)
    same(made, quantize(x, columnwise=True, backend="reference", **how))
    if value != value or value == float("inf"):
        assert all(ops.dequantize(copy, dtype=torch.float32).isnan().all() for copy in made)


@pytest.mark.parametrize("ends", ([17], [0, 13, 13, 40], [48, 48], [0, 0]), ids=str)
@how
def test_kernels_match_the_reference_in_groups(how, ends, device):
    x, groups = random_tensor(48, 70, device=device), torch.tensor(ends, dtype=torch.int32, device=device)
    options = {"columnwise": True, "four_over_six": True, **how}
    made = ops.grouped_quantize(x, groups, NVFP4_1X16, backend="triton", **options)
    same(made, ops.grouped_quantize(x, groups, NVFP4_1X16, backend="reference", **options))


# --- the rule ---------------------------------------------------------------------------------------------------------


def by_hand(block: np.ndarray, g: np.float32) -> tuple[float, list[float]]:
    """(block scale, values before it) by the formulas of docs/numerics.md, a number at a time."""
    f = np.float32
    encode_of = f(6 * 256) / g
    candidates = []
    for enlarged in (f(1), f(1.5)):
        wanted = np.abs(block).max() * (encode_of * (f(1) / f(6))) * enlarged
        D = f(torch.tensor(min(wanted, f(448))).to(torch.float8_e4m3fn).float().item())
        e = f(1) / (D * (f(1) / encode_of))
        values = []
        for x in block:
            v = np.abs(x * e)
            # The nearest of the grid; of two that are as near the one with the even code.
            code = min(range(8), key=lambda i: (abs(float(v) - E2M1_VALUES[i]), i % 2))
            values.append(f(np.copysign(E2M1_VALUES[code], x)))
        errors = [np.abs(q * D * (g / f(1536)) - x) for q, x in zip(values, block, strict=True)]
        while len(errors) > 1:
            errors = [a + b for a, b in zip(errors[::2], errors[1::2], strict=True)]
        candidates.append((errors[0], D, values))
    six, four = candidates
    return (four if four[0] < six[0] else six)[1:]


@backends
def test_each_block_is_the_rule_by_hand(backend, device):
    x = random_tensor(40, 32, dtype=torch.float32, device=device) * torch.logspace(-2, 0, 40, device=device)[:, None]
    made, g = quantize(x, backend=backend).rowwise, np.float32(x.abs().max().item())
    decoded = E2M1.decode(made.qdata.cpu(), 32)
    largest = set()
    for row in range(40):
        for block in range(2):
            columns = slice(16 * block, 16 * block + 16)
            scale, values = by_hand(x[row, columns].cpu().numpy(), g)
            assert made.scale[row, block].float().item() == scale
            assert decoded[row, columns].tolist() == values
            largest.add(max(map(abs, values)))
    assert {4.0, 6.0} <= largest


@backends
def test_a_block_takes_what_it_loses_less_by(backend, device):
    # Multiples of a quarter of the amax are exact by the one, of a sixth by the other.
    quarters, sixths = torch.tensor([6.0, 4.5, 3.0, 1.5] * 4), torch.tensor([6.0, 4.0, 3.0, 1.0] * 4)
    x = torch.stack((quarters, sixths, torch.zeros(16))).to(device)
    made = quantize(x, backend=backend).rowwise
    assert made.scale.float().flatten().tolist() == [384, 256, 0]
    assert made.global_scale.item() == 6 / 1536
    assert_bitwise_equal(ops.dequantize(made, dtype=torch.float32), x)


@backends
def test_of_equal_errors_the_first_is_taken(backend, device):
    # 6 · 2^-20 of an amax of 6: both scales are 0, and all is lost by either.
    x = torch.full((2, 16), 6.0, device=device)
    x[1] = 2.0**-20
    made = quantize(x, backend=backend).rowwise
    # A lone value is its amax: exact by both.
    assert made.scale.float().flatten().tolist() == [256, 0]


@how
@backends
def test_it_loses_less(backend, how, device):
    x = random_tensor(64, 256, dtype=torch.float32, device=device)
    nearest = {name: value for name, value in how.items() if name != "stochastic"}
    wanted = hadamard_transform(x, hadamard_number(True)) if "hadamard" in how else x
    plain = ops.quantize(x, NVFP4_1X16, columnwise=True, backend=backend, **nearest)
    made = quantize(x, columnwise=True, backend=backend, **nearest)
    for one, other, values in zip(made, plain, (x, wanted.mT), strict=True):
        error, before = ((ops.dequantize(q, dtype=torch.float32) - values).norm() for q in (one, other))
        assert error < 0.97 * before


@how
@backends
def test_random_bits_have_no_part_in_the_choice(backend, how, device):
    x = random_tensor(64, 96, device=device)
    made = quantize(x, columnwise=True, backend=backend, **how)
    nearest = {name: value for name, value in how.items() if name != "stochastic"}
    for one, other in zip(made, quantize(x, columnwise=True, backend=backend, **nearest), strict=True):
        assert_bitwise_equal(one.scale.view(torch.uint8), other.scale.view(torch.uint8))
        assert torch.equal(one.qdata, other.qdata) == ("stochastic" not in how)


# --- a part has the bits of the whole ---------------------------------------------------------------------------------


@backends
def test_parts_have_the_bits_of_the_whole(backend, device):
    x = random_tensor(80, 96, device=device)
    whole, amax = quantize(x, columnwise=True, backend=backend), x.abs().max().float()
    for rows, columns in ((slice(0, 32), slice(0, 96)), (slice(32, 80), slice(16, 64))):
        part = quantize(x[rows, columns], columnwise=True, tensor_amax=amax, backend=backend)
        for got, of, (first, second) in zip(part, whole, ((rows, columns), (columns, rows)), strict=True):
            over = [slice(second.start // n, second.stop // n) for n in (2, 16)]
            assert_bitwise_equal(got.qdata, of.qdata[first, over[0]].contiguous())
            assert_bitwise_equal(got.scale.view(torch.uint8), of.scale.view(torch.uint8)[first, over[1]].contiguous())
            assert_bitwise_equal(got.global_scale, of.global_scale)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", (FP8_1X128, NVFP4_16X16), ids=lambda fmt: fmt.name)
def test_other_formats_are_refused(fmt):
    with pytest.raises(ValueError, match=f"quantize: four_over_six is for nvfp4_1x16, got {fmt.name}; leave it out"):
        ops.quantize(torch.zeros(16, 16), fmt, four_over_six=True)
