"""Copies of one-row FP8 blocks by the Gluon kernel: when it is taken, and its bits on a GPU.

What it takes: test_gluon_tiles.py. Its bits without a GPU: test_compiled_kernels.py.
"""

from __future__ import annotations

import functools

import pytest
import torch

from torchao_blockwise import _compat, ops
from torchao_blockwise.formats import FP8_1X128
from torchao_blockwise.testing import assert_operands_equal, random_tensor, shape_id, with_special_values

pytest.importorskip("triton")
if not _compat.has_gluon():
    pytest.skip("needs Gluon of Triton 3.6 or newer", allow_module_level=True)

from torchao_blockwise.ops.device import gluon_tiles
from torchao_blockwise.ops.quantization import kernels_gluon as gluon


@pytest.fixture
def taken(machine):
    """Launches of the kernel, none of which happens; every device will do."""
    machine.runs_gluon()
    return machine.launches_of(gluon_tiles, happen=False)


def settled(launch) -> tuple:
    """What settles a launch but for its tensors: grid, sizes, power of 2, columns and warps, of bf16."""
    options = launch.options
    assert options["DTYPE"] is gluon_tiles.DTYPES[torch.bfloat16] and options["BLOCK"] == FP8_1X128.block[1]
    return launch.grid, *launch.numbers, options["POWER_OF_2"], options["COLUMNS"], options["num_warps"]


def bf16(*shape, device) -> torch.Tensor:
    return random_tensor(*shape, dtype=torch.bfloat16, device=device)


def assert_same_memory(got, *expected) -> None:
    """Of the kernel's pointers, which may be None."""
    assert [t is not None and t.data_ptr() for t in got] == [t is not None and t.data_ptr() for t in expected]


def assert_copies_equal(got, expected) -> None:
    for copy, wanted in zip(got, expected, strict=True):
        assert (copy is None) == (wanted is None)
        if copy is not None:
            assert_operands_equal(copy, wanted)


def test_triton_by_name_is_triton_alone(taken, device):
    x = bf16(16, 32, device=device)
    for rowwise in (True, False):
        quantize = functools.partial(ops.quantize, x, FP8_1X128, rowwise=rowwise, columnwise=True)
        assert_copies_equal(quantize(backend="triton"), quantize(backend="reference"))
    assert taken == []


@pytest.mark.parametrize("backend", ("auto", "gluon"))
def test_is_taken_where_it_can(backend, taken, monkeypatch, device):
    monkeypatch.setattr(gluon, "BOTH", (128, 8))
    x = bf16(32, 48, device=device)
    rowwise, columnwise = ops.quantize(x, FP8_1X128, columnwise=True, power_of_2_scales=True, backend=backend)
    (launch,) = taken
    assert settled(launch) == (1, 32, 48, 32, 48, True, 128, 8)
    assert_same_memory(launch.tensors, x, *rowwise.tensors[:2], *columnwise.tensors[:2], None)


@pytest.mark.parametrize("backend", ("auto", "gluon"))
def test_is_taken_for_the_columnwise_copy_alone(backend, taken, monkeypatch, device):
    monkeypatch.setattr(gluon, "COLUMNWISE", (64, 2))
    x = bf16(32, 48, device=device)
    options = {"rowwise": False, "columnwise": True, "power_of_2_scales": True, "backend": backend}
    columnwise = ops.quantize(x, FP8_1X128, **options).columnwise
    (launch,) = taken
    assert settled(launch) == (1, 32, 48, 32, 48, True, 64, 2)
    assert_same_memory(launch.tensors, x, None, None, *columnwise.tensors[:2], None)


def test_the_columnwise_copy_is_padded_if_asked_and_cut_otherwise(taken, device):
    x = bf16(33, 48, device=device)
    for padded, tokens in ((True, 64), (False, 33)):
        columnwise = ops.quantize(x, FP8_1X128, rowwise=False, columnwise=True, padded=padded).columnwise
        launch = taken.pop()
        assert settled(launch)[:5] == (1, 33, 48, 64, 48) and columnwise.qdata.shape == (48, tokens)
        assert (launch.tensors[3].data_ptr() == columnwise.qdata.data_ptr()) == padded


def test_is_not_taken_for_the_rowwise_copy_alone(taken, device):
    x = bf16(16, 32, device=device)
    assert_copies_equal(ops.quantize(x, FP8_1X128), ops.quantize(x, FP8_1X128, backend="reference"))
    assert taken == []
    with pytest.raises(ValueError) as error:
        ops.quantize(x, FP8_1X128, backend="gluon")
    assert str(error.value) == (
        "quantize: backend gluon cannot run: the kernels make columnwise copies, with or without the rowwise one;"
        " choose another, or auto"
    )


def test_two_launches_where_it_cannot(taken, device):
    quantize = functools.partial(ops.quantize, bf16(33, 150, device=device), FP8_1X128, columnwise=True)
    assert_copies_equal(quantize(), quantize(backend="reference"))
    assert taken == []


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


@pytest.mark.gpu
@pytest.mark.parametrize("power_of_2_scales", (False, True), ids=("any scale", "power of 2"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("warps", (4, 8, 16))
@pytest.mark.parametrize(
    "shape", ((16, 16), (128, 128), (1, 16), (127, 272), (1041, 2064), (0, 16), (16, 0)), ids=shape_id
)
def test_bits_on_a_gpu(shape, warps, dtype, power_of_2_scales, monkeypatch):
    x = with_special_values(random_tensor(*shape, dtype=dtype, device="cuda"), FP8_1X128)
    if x.numel() > 2**10:
        x[5, 11], x[21, 30], x[-1, -1] = float("nan"), float("inf"), -float("inf")
    reason = gluon_tiles.why_not(x)
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(gluon, "BOTH", (128, warps))
    monkeypatch.setattr(gluon, "COLUMNWISE", (64, warps))
    quantize = functools.partial(ops.quantize, x, FP8_1X128, columnwise=True, power_of_2_scales=power_of_2_scales)
    for rowwise in (True, False):
        assert_copies_equal(quantize(rowwise=rowwise, backend="gluon"), quantize(rowwise=rowwise, backend="reference"))
