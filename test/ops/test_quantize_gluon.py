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
    "f32": (zeros(16, 16, dtype=torch.float32), "the kernel supports only 16-bit dtypes, got torch.float32"),
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
    assert gluon_tiles.why_not(x) == "Triton's interpreter does not support Gluon"


# --- when it is taken -------------------------------------------------------------------------------------------------


@pytest.fixture
def taken(machine):
    """Launches of the kernel, none of which happens; every device will do."""
    machine.runs_gluon()
    return machine.launches_of(gluon_tiles, happen=False)


def settled(launch) -> tuple:
    """All of a launch except its tensors: grid, sizes, power of 2, columns and warps, of bf16."""
    options = launch.options
    assert options["DTYPE"] is gluon_tiles.DTYPES[torch.bfloat16] and options["BLOCK"] == FP8_1X128.block[1]
    return launch.grid, *launch.numbers, options["POWER_OF_2"], options["COLUMNS"], options["num_warps"]


def bf16(*shape, device) -> torch.Tensor:
    return random_tensor(*shape, dtype=torch.bfloat16, device=device)


def assert_same_memory(got, *expected) -> None:
    """Of the kernel's pointers, which may be None."""
    assert [t is not None and t.data_ptr() for t in got] == [t is not None and t.data_ptr() for t in expected]


@pytest.mark.parametrize("backend", ("auto", "gluon"))
@pytest.mark.parametrize("rowwise", (True, False), ids=("both", "columnwise"))
def test_is_taken_where_it_can(rowwise, backend, taken, monkeypatch, device):
    name, build = ("BOTH", (128, 8)) if rowwise else ("COLUMNWISE", (64, 2))
    monkeypatch.setattr(gluon, name, build)
    # Padded, and padded and then cut.
    for tokens, padded, width in ((32, False, 32), (33, True, 64), (33, False, 64)):
        x = bf16(tokens, 48, device=device)
        options = {"columnwise": True, "power_of_2_scales": True, "backend": backend, "padded": padded}
        copies = ops.quantize(x, FP8_1X128, rowwise=rowwise, **options)
        launch = taken.pop()
        assert settled(launch) == (1, tokens, 48, width, 48, True, *build)
        of_rows = copies.rowwise.tensors[:2] if rowwise else (None, None)
        assert_same_memory(launch.tensors[:3], x, *of_rows)
        assert copies.columnwise.qdata.shape == (48, tokens if not padded else width)
        if padded or tokens == width:
            assert_same_memory(launch.tensors[3:], *copies.columnwise.tensors[:2], None)


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
        "quantize: backend gluon cannot run: the kernels always compute the columnwise copy, but it is not requested;"
        " choose another, or auto"
    )


def test_is_taken_for_tokens_in_groups(taken, device):
    x = bf16(17, 16, device=device)
    ends = torch.tensor([5, 15], dtype=torch.int32, device=device)
    for rowwise, build in ((True, gluon.BOTH), (False, gluon.COLUMNWISE)):
        copies = ops.quantize(x, FP8_1X128, groups=ends, rowwise=rowwise, columnwise=True)
        launch = taken.pop()
        assert settled(launch) == (3, 17, 16, 256, 16, False, *build)
        *tensors, blocks = launch.tensors
        parts = [None, None] if copies.rowwise is None else copies.rowwise.tensors[:2]
        assert_same_memory(tensors, x, *parts, *copies.columnwise.tensors[:2])
        assert copies.columnwise.qdata.shape == (16, 256)
        # The tokens as a whole; each group; those of no group.
        assert blocks.tolist() == [[0, 15, 17, 0], [0, 5, 5, 0], [5, 15, 15, 0], [15, 15, 17, 0]]
    ops.quantize(x.float(), FP8_1X128, groups=ends, columnwise=True)
    assert taken == []


@pytest.mark.parametrize("rowwise", (True, False), ids=("both", "columnwise"))
def test_square_blocks_are_tiles(rowwise, taken, device):
    x = bf16(33, 144, device=device)
    copies = ops.quantize(x, FP8_1X128, rowwise=rowwise, columnwise=FP8_128X128, padded=True)
    launch = taken.pop()
    assert settled(launch) == (2, 33, 144, 64, 144, False, *gluon.BOTH) and launch.options["SQUARE"]
    assert copies.columnwise.format is FP8_128X128 and copies.columnwise.scale.shape == (2, 1)


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
