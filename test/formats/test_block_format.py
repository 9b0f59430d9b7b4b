"""BlockFormat: the registry and the grids. test/ops/test_extending.py makes a new one, which runs at once."""

import dataclasses

import pytest

from torchao_blockwise.formats import (
    FORMATS,
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockFormat,
    get_format,
    register_format,
)


def test_registered_formats():
    assert list(FORMATS) == ["fp8_1x128", "fp8_128x128", "nvfp4_1x16", "nvfp4_16x16"]
    for fmt, block in zip(FORMATS.values(), [(1, 128), (128, 128), (1, 16), (16, 16)], strict=True):
        assert fmt.block == block and fmt.is_square == (block[0] > 1)
        assert get_format(fmt.name) is get_format(fmt) is fmt and repr(fmt) == f"BlockFormat({fmt.name})"


def test_unknown_and_taken_names():
    message = "unknown block format 'mxfp8'; the formats are fp8_1x128, fp8_128x128, nvfp4_1x16, nvfp4_16x16"
    for name in ("mxfp8", dataclasses.replace(FP8_1X128, name="mxfp8")):
        with pytest.raises(ValueError, match=f"^{message}$"):
            get_format(name)
    with pytest.raises(ValueError, match=r"^register_format: fp8_1x128 is already registered; choose another name$"):
        register_format(FP8_1X128)
    assert FORMATS["fp8_1x128"] is FP8_1X128


@pytest.mark.parametrize(
    ("fmt", "shape", "qdata", "scale", "nbytes"),
    (
        (FP8_1X128, (3, 129), (3, 129), (2, 3), 3 * 129 + 4 * 6),
        (FP8_1X128, (5, 3, 129), (5, 3, 129), (5, 2, 3), 5 * (3 * 129 + 4 * 6)),
        (FP8_128X128, (129, 128), (129, 128), (2, 1), 129 * 128 + 4 * 2),
        (NVFP4_1X16, (3, 17), (3, 9), (3, 2), 3 * 9 + 6 + 4),
        (NVFP4_16X16, (7, 17, 33), (7, 17, 17), (7, 2, 3), 7 * (17 * 17 + 6) + 4),
        (NVFP4_16X16, (0, 16), (0, 8), (0, 1), 4),
        (FP8_1X128, (3, 0), (3, 0), (0, 3), 0),
    ),
    ids=lambda p: p.name if isinstance(p, BlockFormat) else "x".join(map(str, p)) if isinstance(p, tuple) else str(p),
)
def test_shapes_of_payload_and_scales(fmt, shape, qdata, scale, nbytes):
    assert (fmt.qdata_shape(*shape), fmt.scale_shape(*shape), fmt.nbytes(*shape)) == (qdata, scale, nbytes)
