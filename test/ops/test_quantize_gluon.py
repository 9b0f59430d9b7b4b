"""Copies of one-row FP8 blocks by the Gluon kernel: what it takes, when it is taken, and its bits on a GPU.

Its bits without a GPU: test_compiled_kernels.py.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from grouped_copies import assert_copies_equal

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128
from torchao_blockwise.testing import random_tensor, shape_id, with_special_values

pytest.importorskip("triton")

from torchao_blockwise.ops.device import gluon_tiles
from torchao_blockwise.ops.quantization import kernels_gluon as gluon


def zeros(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


TAKEN = {
    "one run": zeros(16, 16),
    "f16": zeros(48, 272, dtype=torch.float16),
    "any number of tokens": zeros(17, 32),
    "rows apart": zeros(32, 64)[:, 16:48],
    "no rows": zeros(0, 64),
}
REFUSED = {
    "f32": (zeros(16, 16, dtype=torch.float32), "the kernel takes elements of 16 bits, got torch.float32"),
    "a batch": (zeros(2, 16, 16), "the kernel takes one matrix, got shape [2, 16, 16]"),
    "ragged K": (zeros(16, 24), "got shape [16, 24]"),
    "ragged rows apart": (zeros(16, 40)[:, :32], "strides [40, 1]"),
    "transposed": (zeros(16, 32).mT, "strides [1, 32]"),
    "off 16 bytes": (zeros(16, 64)[:, 4:36], "address 0x"),
}


@pytest.mark.parametrize("x", TAKEN.values(), ids=TAKEN)
def test_takes(x, machine):
    machine.runs_gluon((9, 0))
    assert gluon_tiles.why_not_this(x) is gluon_tiles.why_not(x, x) is None


@pytest.mark.parametrize(("x", "reason"), REFUSED.values(), ids=REFUSED)
def test_refuses(x, reason, machine):
    machine.runs_gluon((9, 0))
    assert reason in gluon_tiles.why_not_this(x)
    # Whichever of several inputs it is.
    good = TAKEN["one run"]
    for inputs in ((x,), (x, good), (good, x)):
        assert reason in gluon_tiles.why_not(*inputs)


def test_refuses_dtypes_that_differ_and_other_machines(machine):
    x, y = TAKEN["one run"], TAKEN["f16"]
    for capability, reason in (
        ((8, 9), "the kernel needs sm_90 or newer, got sm_89"),
        ((9, 0), "the kernel takes inputs of one dtype, got torch.bfloat16 and torch.float16"),
        ((10, 0), "the kernel takes inputs of one dtype, got torch.bfloat16 and torch.float16"),
    ):
        machine.runs_gluon(capability)
        assert gluon_tiles.why_not(x, y) == reason
    machine.runs_gluon((9, 0), interprets=True)
    assert gluon_tiles.why_not(x) == "Triton's interpreter does not know Gluon"


# --- when it is taken -------------------------------------------------------------------------------------------------


@pytest.fixture
def taken(machine):
    """Launches of the kernel, none of which happens; every device will do."""
    machine.runs_gluon()
    return machine.launches_of(gluon_tiles, happen=False)


def bf16(*shape, device) -> torch.Tensor:
    return random_tensor(*shape, dtype=torch.bfloat16, device=device)


TAKEN_WITH = {
    "by name": {"backend": "gluon"},
    "padded": {"padded": True},
    "powers of 2": {"power_of_2_scales": True},
    "groups": {"groups": (5, 15)},
    "square blocks": {"columnwise": FP8_128X128},
}


@pytest.mark.parametrize("rowwise", (True, False), ids=("both", "columnwise"))
@pytest.mark.parametrize("options", TAKEN_WITH.values(), ids=TAKEN_WITH)
def test_is_taken(options, rowwise, taken, device):
    """By a launch that reads the input where it lies; what it writes is compared where the kernel runs."""
    x, options = bf16(33, 48, device=device), {"columnwise": True, **options}
    if "groups" in options:
        options["groups"] = torch.tensor(options["groups"], dtype=torch.int32, device=device)
    copies = ops.quantize(x, FP8_1X128, rowwise=rowwise, **options)
    (launch,) = taken
    of_rows = copies.rowwise.tensors[:2] if rowwise else (None, None)
    for got, wanted in zip(launch.tensors, (x, *of_rows)):
        assert got is wanted is None or got.data_ptr() == wanted.data_ptr()
    is_square = options["columnwise"] is FP8_128X128
    assert bool(launch.options.get("SQUARE")) == is_square
    assert launch.options["num_warps"] == (gluon.BOTH if rowwise or is_square else gluon.COLUMNWISE)[1]
    assert launch.options["DTYPE"] is gluon_tiles.DTYPES[torch.bfloat16]
    assert launch.options["POWER_OF_2"] == options.get("power_of_2_scales", False)
    tokens = 256 if "groups" in options else 64 if "padded" in options else 33
    assert copies.columnwise.qdata.shape == (48, tokens)
    assert copies.columnwise.format is (FP8_128X128 if is_square else FP8_1X128)


def test_is_not_taken_where_it_cannot_or_another_is_named(taken, device):
    for x, options in (
        (bf16(16, 32, device=device), {"backend": "triton", "columnwise": True}),
        (bf16(16, 32, device=device), {"backend": "triton", "columnwise": True, "rowwise": False}),
        (bf16(16, 32, device=device), {}),
        (bf16(33, 150, device=device), {"columnwise": True}),
    ):
        quantize = functools.partial(ops.quantize, x, FP8_1X128)
        assert_copies_equal(quantize(**options), quantize(**options | {"backend": "reference"}))
        assert taken == []
    with pytest.raises(ValueError) as error:
        ops.quantize(bf16(16, 32, device=device), FP8_1X128, backend="gluon")
    assert str(error.value) == (
        "quantize: backend gluon cannot run: the kernels make columnwise copies, with or without the rowwise one;"
        " choose another, or auto"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("power_of_2_scales", (False, True), ids=("any scale", "power of 2"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("warps", (4, 8, 16))
@pytest.mark.parametrize("shape", ((16, 16), (1, 16), (127, 272), (1041, 2064), (0, 16), (16, 0)), ids=shape_id)
def test_bits_on_a_gpu(shape, warps, dtype, power_of_2_scales, monkeypatch):
    x = with_special_values(random_tensor(*shape, dtype=dtype, device="cuda"), FP8_1X128)
    if x.numel() > 2**10:
        x[5, 11], x[21, 30], x[-1, -1] = float("nan"), float("inf"), -float("inf")
    reason = gluon_tiles.why_not(x)
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(gluon, "BOTH", (128, warps))
    monkeypatch.setattr(gluon, "COLUMNWISE", (64, warps))
    quantize = functools.partial(ops.quantize, x, FP8_1X128, power_of_2_scales=power_of_2_scales)
    for rowwise, columnwise in itertools.product((True, False), (True, FP8_128X128)):
        copies = {"rowwise": rowwise, "columnwise": columnwise}
        assert_copies_equal(quantize(**copies, backend="gluon"), quantize(**copies, backend="reference"))
