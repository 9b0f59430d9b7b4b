"""Formats, shapes and inputs for tests of ops.quantize, and kernels against the reference."""

import math
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F

from torchao_blockwise import ops
from torchao_blockwise.formats import (
    FORMATS,
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockFormat,
    Operand,
    StochasticRounding,
)
from torchao_blockwise.testing import (
    SHAPES,
    assert_operands_equal,
    random_tensor,
    shape_id,
    with_special_values,
)

ROUNDING = StochasticRounding(2**63 + 5, 2**32 - 1, 7)
BOTH = MappingProxyType({"hadamard": True, "stochastic": ROUNDING})
WAYS = {
    **{name: (fmt, {}) for name, fmt in FORMATS.items()},
    **{f"{fmt.name} powers of 2": (fmt, {"power_of_2_scales": True}) for fmt in (FP8_1X128, FP8_128X128)},
    "columnwise squares": (FP8_1X128, {"columnwise": FP8_128X128}),
    "columnwise squares, powers of 2": (FP8_1X128, {"columnwise": FP8_128X128, "power_of_2_scales": True}),
    "transformed": (NVFP4_1X16, {"hadamard": True}),
    "other signs": (NVFP4_1X16, {"hadamard": [-1] * 16}),
    "rounded": (NVFP4_1X16, {"stochastic": ROUNDING}),
    "both": (NVFP4_1X16, BOTH),
}
# Matrices in other memory and of other dtypes.
INPUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second column": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "every second row": lambda x: x.repeat_interleave(2, dim=-2)[..., ::2, :],
    "offset of one": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "column slice": lambda x: torch.cat((x, x), dim=-1)[..., : x.shape[-1]],
    "in memory of NaN": lambda x: F.pad(x, (7, 30, 3, 10), value=float("nan"))[3:-10, 7:-30],
    "expanded rows": lambda x: x[..., :1, :].expand(x.shape),
    "f16": lambda x: x.half(),
    "f32": lambda x: x.float() * 1.0001,
}
formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
nvfp4_formats = pytest.mark.parametrize("fmt", (NVFP4_1X16, NVFP4_16X16), ids=lambda f: f.name)
shapes = pytest.mark.parametrize("shape", (*SHAPES, (2, 3, 130), (2, 17, 33), (2, 0, 16)), ids=shape_id)
backends = pytest.mark.parametrize("backend", ("reference", "triton"))
# The reference of transforms and of rounding is what kernels are compared with: of those one backend.
ways = pytest.mark.parametrize(
    ("way", "backend"),
    [(way, "reference") for way in (*FORMATS, "columnwise squares")] + [(way, "triton") for way in WAYS],
)


def special_input(shape, fmt: BlockFormat, dtype, device: str) -> torch.Tensor:
    """Random values of many magnitudes with a zero, a subnormal, a huge and a negative zero block."""
    return with_special_values(random_tensor(*shape, dtype=dtype, device=device), fmt)


def canonical(q: Operand) -> Operand:
    """The operand with one bit pattern for every fp32 NaN: an fp32 NaN's payload is the hardware's choice."""
    parts = (t if t is None or t.dtype != torch.float32 else t.masked_fill(t.isnan(), float("nan")) for t in q.tensors)
    return Operand(*parts, q.format_name)


def rowwise_of(x: torch.Tensor, fmt: BlockFormat, **options) -> Operand:
    copies = ops.quantize(x, fmt, **options | {"columnwise": False})
    assert copies.columnwise is None
    return copies.rowwise


def columnwise_of(x: torch.Tensor, fmt: BlockFormat, **options) -> Operand:
    copies = ops.quantize(x, fmt, **{"columnwise": True} | options, rowwise=False)
    assert copies.rowwise is None
    return copies.columnwise


def assert_same(got, expected) -> None:
    """Copies, of which some may be None, are bitwise identical, and those in `got` contiguous."""
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert a.qdata.is_contiguous() and a.scale.is_contiguous()
            assert_operands_equal(canonical(a), canonical(b))


def check_against_reference(x: torch.Tensor, way: str, backend: str) -> None:
    """Rowwise, columnwise and both together are bitwise identical to the reference's rowwise of `x` and its transpose.

    Of a transform or random bits those of the reference's copies, padded or not: a transpose would have others.
    """
    fmt, options = WAYS[way]
    if options.keys() & BOTH.keys():
        for padded in (False, True):
            made, wanted = (
                ops.quantize(t, fmt, columnwise=True, padded=padded, backend=b, **options)
                for t, b in ((x, backend), (x.contiguous(), "reference"))
            )
            assert_same(made, wanted)
        return
    matrices = (x, fmt), (x.mT.contiguous(), options.get("columnwise", fmt))
    expected = [rowwise_of(*matrix, backend="reference", **options) for matrix in matrices]
    assert_same(ops.quantize(x, fmt, **{"columnwise": True} | options, backend=backend), expected)
    assert_same([f(x, fmt, backend=backend, **options) for f in (rowwise_of, columnwise_of)], expected)


# Amaxes of blocks whose scales are from 2^-6 to 448 where the largest one is the tensor's: its scale is 2^-4 then.
LEAST, LARGEST = 0.5, 2688.0 * 2.0**-4


def nvfp4_input(shape) -> torch.Tensor:
    """bf16 of many magnitudes, with the amax of a 16×16 block in all its rows and columns; ties and zeros, signed."""
    rows, columns = shape
    amax = torch.logspace(math.log10(LEAST), math.log10(LARGEST), rows * columns // 256).view(rows // 16, -1)
    # The scale of ties: 6 is the largest value.
    amax[0, 0] = 6.0
    amax = amax.repeat_interleave(16, 0).repeat_interleave(16, 1)
    x = random_tensor(rows, columns, seed=4).float().clamp(-1, 1) * amax
    x[:16, :16] = torch.tensor([-0.25, 0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 3.5, 5, -5, 0.0, -0.0, 1.5, -3, 4, -0.75])
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    return torch.where((i + j) % 16 == 0, amax, x).bfloat16()
