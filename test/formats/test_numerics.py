"""numerics.md in plain Python, element by element, against the codecs and `ops.quantize`, bit for bit.

Nothing of the package's arithmetic is used here: numbers are rounded by exact tables in fp64, fp32 steps are numpy's.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchao_blockwise import ops
from torchao_blockwise.formats import E2M1, E4M3, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, BlockFormat
from torchao_blockwise.testing import random_tensor

f32 = np.float32
F32_MAX, F32_TINY = np.finfo(f32).max, np.finfo(f32).smallest_subnormal
NAN_CODE = 0x7F
FP8_FORMATS = (FP8_1X128, FP8_128X128)
NVFP4_FORMATS = (NVFP4_1X16, NVFP4_16X16)


# --- the oracle: elements ---------------------------------------------------------------------------------------------


def e4m3_magnitude(code: int) -> float:
    """1 sign, 4 exponent (bias 7), 3 mantissa bits; code 0x7f is NaN and not asked for. Exact in fp64."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa / 2**9 if exponent == 0 else (8 + mantissa) / 8 * 2.0 ** (exponent - 7)


TABLES = {
    E4M3: np.array([e4m3_magnitude(code) for code in range(NAN_CODE)]),
    E2M1: np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
}
MIDDLES = {element: (table[:-1] + table[1:]) / 2 for element, table in TABLES.items()}
NAN_CODES = {E4M3: NAN_CODE, E2M1: 0}


def rne(y, element) -> np.ndarray:
    """Codes of fp32 values: the nearest entries, at ties those with even codes; NaN has no sign."""
    magnitude = np.abs(np.asarray(y, np.float64))
    below, through = (np.searchsorted(MIDDLES[element], magnitude, side) for side in ("left", "right"))
    signed = np.where(below % 2 == 0, below, through) + np.signbit(y) * (1 << (element.bits - 1))
    return np.where(np.isnan(y), NAN_CODES[element], signed).astype(np.uint8)


# --- the oracle: blocks -----------------------------------------------------------------------------------------------


def amax(values: np.ndarray) -> f32:
    """max |v|, 0 for nothing; NaN where any is NaN."""
    return np.abs(values).max(initial=f32(0))


def fp8_block(block: np.ndarray, power_of_2_scales: bool) -> tuple[np.ndarray, f32]:
    """(codes, scale) of a block: S = 448 / max(amax, 1e-12), q = e4m3(x · S), scale = 1 / S."""
    a = amax(block)
    a = a if np.isnan(a) else max(a, f32(1e-12))
    encode = f32(np.float64(448) / np.float64(a))
    if power_of_2_scales and encode > 0:
        encode = f32(2.0 ** math.floor(math.log2(float(encode))))
    return rne(block * encode, E4M3), f32(1) / encode


def nvfp4_block(block: np.ndarray, g: f32) -> tuple[np.ndarray, int]:
    """(e2m1 codes, e4m3 code of the block scale D) of a block in a tensor with amax g."""
    encode_tensor = min(f32(2688) / g, F32_MAX) if g > 0 else f32(1)
    scaled_amax = amax(block) * (encode_tensor * (f32(1) / f32(6)))
    scale_code = int(rne(scaled_amax, E4M3))
    d = f32("nan") if scale_code == NAN_CODE else f32(TABLES[E4M3][scale_code])
    encode = min(f32(1) / (d * (f32(1) / encode_tensor)), F32_MAX) if d > 0 else F32_MAX
    return rne(block * encode, E2M1), scale_code


def nvfp4_global_scale(g: f32) -> f32:
    if not np.isfinite(g):
        return f32("nan")
    return f32(1) if g == 0 else g / f32(2688)


def blocks_of(fmt: BlockFormat, shape: tuple[int, int]):
    """((grid row, grid column), slices of the block) for every block, ragged ones included."""
    rows, columns = fmt.block
    for i, top in enumerate(range(0, shape[0], rows)):
        for j, left in enumerate(range(0, shape[1], columns)):
            yield (i, j), (slice(top, top + rows), slice(left, left + columns))


@np.errstate(all="ignore")
def oracle(x: np.ndarray, fmt: BlockFormat, power_of_2_scales: bool = False):
    """(element codes [M, K], stored scales [row blocks, column blocks]) of `x`, by explicit loops."""
    is_fp8 = fmt in FP8_FORMATS
    grid = fmt.grid(*x.shape)
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros(grid, f32 if is_fp8 else np.uint8)
    g = amax(x)
    for index, block in blocks_of(fmt, x.shape):
        result = fp8_block(x[block], power_of_2_scales) if is_fp8 else nvfp4_block(x[block], g)
        codes[block], scales[index] = result
    return codes, scales


# --- comparison -------------------------------------------------------------------------------------------------------


def tensor(values) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=f32))


def quantized_codes(q, columns: int) -> np.ndarray:
    """Element codes [M, columns] of a quantized operand, nibbles unpacked."""
    payload = q.qdata.view(torch.uint8).numpy()
    if q.format.element is not E2M1:
        return payload
    unpacked = np.zeros((payload.shape[0], 2 * payload.shape[1]), np.uint8)
    unpacked[:, 0::2], unpacked[:, 1::2] = payload % 16, payload // 16
    return unpacked[:, :columns]


def stored_scales(q) -> np.ndarray:
    """[row blocks, column blocks]: fp32 scales, or the codes of e4m3 ones."""
    scale = q.scale.T if q.format.transposed_scales else q.scale
    return scale.numpy() if scale.dtype is torch.float32 else scale.view(torch.uint8).numpy()


def check(values, fmt: BlockFormat, power_of_2_scales: bool = False):
    """`ops.quantize` gives the oracle's bits; NaN scales are NaN, whatever their payload. Returns the operand."""
    x = np.asarray(values, dtype=f32)
    q = ops.quantize(tensor(x), fmt, power_of_2_scales=power_of_2_scales, backend="reference").rowwise
    codes, scales = oracle(x, fmt, power_of_2_scales)
    np.testing.assert_array_equal(stored_scales(q), scales)
    np.testing.assert_array_equal(quantized_codes(q, x.shape[1]), codes)
    if fmt in NVFP4_FORMATS:
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(q.global_scale.numpy(), nvfp4_global_scale(amax(x)))
    return q


@np.errstate(over="ignore")
def neighbours(values) -> list[f32]:
    """Each value with the fp32 numbers just below and above, both signs."""
    near = [n for v in map(f32, values) for n in (np.nextafter(v, f32(-np.inf)), v, np.nextafter(v, f32(np.inf)))]
    return near + [-n for n in near]


# --- elements ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", (E4M3, E2M1), ids=lambda e: e.name)
def test_every_code_is_decoded(element):
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)
    payload = codes[0::2] | codes[1::2] << 4 if element is E2M1 else codes
    values = element.decode(payload.view(element.storage_dtype), len(codes)).tolist()
    table = TABLES[element].tolist()
    for sign, half in ((1, values[: len(codes) // 2]), (-1, values[len(codes) // 2 :])):
        assert [abs(v) for v in half[: len(table)]] == table
        assert all(math.copysign(1, v) == sign for v in half[: len(table)])
        assert all(map(math.isnan, half[len(table) :]))


@pytest.mark.parametrize("element", TABLES, ids=lambda e: e.name)
def test_every_midpoint_is_rounded_to_even_what_is_larger_saturates_and_nan_has_no_sign(element):
    """All codes, all midpoints, their neighbors, and what lies outside."""
    outside = [TABLES[element][-1] * factor for factor in (1.01, 1.035, 1.0625, 2, 1e30)]
    inside = [*TABLES[element], *MIDDLES[element], F32_TINY, np.finfo(f32).tiny]
    values = [*neighbours([*inside, *outside]), f32("inf"), -f32("inf"), f32("nan"), -f32("nan")]
    assert len(values) % 2 == 0
    got = element.unpack(element.encode(tensor(values)), len(values)).view(torch.uint8).tolist()
    assert got == rne(values, element).tolist()


# --- quantize ---------------------------------------------------------------------------------------------------------

SHAPES = ((1, 1), (3, 300), (17, 33), (130, 7))
formats = pytest.mark.parametrize("fmt", FP8_FORMATS + NVFP4_FORMATS, ids=lambda fmt: fmt.name)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@formats
def test_random_values(fmt, shape):
    x = random_tensor(*shape, seed=sum(shape)).numpy()
    check(x, fmt)
    if fmt in FP8_FORMATS:
        q = check(x, fmt, power_of_2_scales=True)
        assert set(torch.frexp(q.scale).mantissa.flatten().tolist()) == {0.5}


def one_block_rows(*rows) -> np.ndarray:
    """Each row of numbers becomes a 1x128 block, cycled."""
    return np.array([np.resize(np.array(row, dtype=f32), 128) for row in rows], dtype=f32)


FP8_AMAX_EDGES = (0.0, F32_TINY, 1e-38, 9.9e-13, 1e-12, 1.01e-12, 447.9, 448, 448.1, 1e30, F32_MAX)
power_of_2 = pytest.mark.parametrize("power_of_2_scales", (False, True), ids=("div", "pow2"))


@power_of_2
@np.errstate(all="ignore")
def test_fp8_amax_edges(power_of_2_scales):
    for v in filter(np.isfinite, neighbours(FP8_AMAX_EDGES)):
        check(one_block_rows([v, v / f32(3), -v, 0.0, -0.0]), FP8_1X128, power_of_2_scales)


@power_of_2
def test_fp8_nan_and_inf_stay_in_their_block(power_of_2_scales):
    nan, inf = f32("nan"), f32("inf")
    rows = one_block_rows([1.0, nan, 2.0], [1.0, inf], [-inf, inf, nan], [1.0, 2.0])
    decoded = ops.dequantize(check(rows, FP8_1X128, power_of_2_scales))
    assert not decoded[:3].isfinite().any()
    assert decoded[3].isfinite().all()


NVFP4_TENSORS = {
    "zero": [0.0],
    "negative zero": [-0.0],
    "denormal g": [F32_TINY, -F32_TINY],
    "denormal decode": [1e-38, 3e-39],
    "S overflows": [5e-36, 7.9e-36, -1e-36],
    "FLT_MAX": [F32_MAX, -1.0, 1e20],
    "block scales round to 0": [6.0] + [0.0] * 15 + [1e-6, -1e-6, 0.0, -0.0] * 4 + [-1e-3] * 16 + [5.2e-6] * 16,
    "smallest block scales": [2688.0] + [0.0] * 15 + [6 * 2.0**-10] * 16 + [6 * 2.0**-9] * 16 + [0.03] * 16,
    "amax of 6 * 448": [2688.0, 448.0, 6.0, 1.0],
    "NaN": [1.0, float("nan"), -2.0],
    "Inf": [1.0, float("inf"), -2.0],
    "-Inf and NaN": [float("-inf"), float("nan"), 0.0],
}


@pytest.mark.parametrize("fmt", NVFP4_FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("values", NVFP4_TENSORS.values(), ids=NVFP4_TENSORS.keys())
def test_nvfp4_special_tensors(values, fmt):
    row = np.resize(np.array(values, dtype=f32), 96)
    x = np.stack([row, np.roll(row, 16), np.zeros(96, f32)])
    q = check(x, fmt)
    if not np.isfinite(x).all():
        assert ops.dequantize(q).isnan().all()


@pytest.mark.parametrize("seed", range(4))
def test_nvfp4_block_scales_at_ties_of_e4m3(seed):
    """Block amaxes with A · (S · fl(1/6)) at a midpoint or an ulp next to it: the order of the products shows."""
    g = f32(np.random.default_rng(seed).uniform(1, 9))
    factor = (f32(2688) / g) * (f32(1) / f32(6))
    ties = [f32(m) / factor for m in MIDDLES[E4M3][-60:]]
    amaxes = [np.nextafter(t, f32(9)) if i == 1 else t for t in ties for i in range(2)]
    amaxes += [np.nextafter(t, f32(0)) for t in ties]
    x = np.zeros((1 + len(amaxes), 16), f32)
    x[0, 0], x[1:, 0] = g, amaxes
    check(x, NVFP4_1X16)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.sampled_from(FP8_FORMATS + NVFP4_FORMATS))
def test_any_values(values, fmt):
    check([values], fmt)


@np.errstate(all="ignore")
@formats
def test_decode_multiplies_element_scale_and_global_scale_in_this_order(fmt):
    x = random_tensor(18, 150, seed=3).numpy()
    codes, scales = oracle(x, fmt)
    decoded = ops.dequantize(ops.quantize(tensor(x), fmt, backend="reference").rowwise).numpy()
    table = TABLES[fmt.element]
    sign_bit = 8 if fmt in NVFP4_FORMATS else 128
    global_scale = nvfp4_global_scale(amax(x)) if fmt in NVFP4_FORMATS else f32(1)
    for (i, j), block in blocks_of(fmt, x.shape):
        scale = scales[i, j] if fmt in FP8_FORMATS else f32(TABLES[E4M3][scales[i, j]])
        for code, got in zip(codes[block].flat, decoded[block].flat):
            value = f32(table[code % sign_bit]) * (f32(-1) if code >= sign_bit else f32(1)) * scale
            assert got == value * global_scale
