"""ops.transpose: exact, involutive, equal to quantizing the transpose; refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, Operand
from torchao_blockwise.testing import SHAPES, assert_bitwise_equal, assert_operands_equal, random_tensor, shape_id

formats = pytest.mark.parametrize("fmt", (FP8_128X128, NVFP4_16X16), ids=lambda f: f.name)
backends = pytest.mark.parametrize("backend", ("reference", "triton"))
shapes = pytest.mark.parametrize("shape", (*SHAPES, (3, 40, 130), (2, 17, 33), (2, 0, 16)), ids=shape_id)


def quantize(x, fmt) -> Operand:
    return ops.quantize(x, fmt, backend="reference").rowwise


@backends
@shapes
@formats
def test_is_quantizing_the_transpose(fmt, shape, backend, device):
    x = random_tensor(*shape, device=device)
    transposed = ops.transpose(quantize(x, fmt), columns=shape[-1], backend=backend)
    assert_operands_equal(transposed, quantize(x.mT.contiguous(), fmt))
    assert transposed.qdata.is_contiguous() and transposed.scale.is_contiguous()


@backends
@shapes
@formats
def test_twice_is_the_identity(fmt, shape, backend, device):
    q = quantize(random_tensor(*shape, device=device), fmt)
    once = ops.transpose(q, columns=shape[-1], backend=backend)
    assert_operands_equal(ops.transpose(once, columns=shape[-2], backend=backend), q)


@backends
@formats
def test_decodes_to_the_transpose(fmt, backend, device):
    q = quantize(random_tensor(48, 200, device=device), fmt)
    assert_bitwise_equal(ops.dequantize(ops.transpose(q, backend=backend)), ops.dequantize(q).mT)


@backends
@formats
def test_moves_every_code_untouched(fmt, backend, device):
    """All 256 bytes, NaN codes and negative zeros too, and scales that no quantization would give."""
    payload = torch.arange(256, dtype=torch.uint8, device=device).repeat(32, 1)
    qdata = payload.view(fmt.element.storage_dtype)
    columns = 256 * fmt.element.per_byte
    scale = torch.zeros(fmt.scale_shape(32, columns), dtype=fmt.scale_dtype, device=device)
    scale.view(torch.uint8)[:] = torch.arange(scale.nbytes, device=device).view(scale.view(torch.uint8).shape) % 251
    q = Operand(qdata, scale, torch.tensor(float("nan")) if fmt.has_global_scale else None, fmt.name)
    got = ops.transpose(q, backend=backend)
    for row in (0, 1, 31):
        bits, shift = fmt.element.bits, fmt.element.bits * (row % fmt.element.per_byte)
        codes = got.qdata.view(torch.uint8)[:, row // fmt.element.per_byte].int() >> shift & (1 << bits) - 1
        expected = [code >> s & (1 << bits) - 1 for code in range(256) for s in range(0, 8, bits)]
        assert codes.tolist() == expected
    assert_bitwise_equal(got.scale, scale.mT.contiguous(), "scale")


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(0, 70), columns=st.integers(0, 150))
@formats
@backends
def test_any_shape(backend, fmt, rows, columns, device):
    x = random_tensor(rows, columns, device=device)
    got = ops.transpose(quantize(x, fmt), columns=columns, backend=backend)
    assert_operands_equal(got, quantize(x.mT.contiguous(), fmt))


@pytest.fixture
def launches(machine):
    """Launches of the kernels."""
    return machine.launches_of(pytest.importorskip("torchao_blockwise.ops.transposition.kernels_triton"))


def random_operand(fmt, *shape, device) -> Operand:
    """Any bytes and any scales: every block has a scale of its own."""
    qdata = torch.randint(0, 256, fmt.qdata_shape(*shape), dtype=torch.uint8, device=device)
    grid = *fmt.scale_shape(*shape), fmt.scale_dtype.itemsize
    scale = torch.randint(0, 256, grid, dtype=torch.uint8, device=device).view(fmt.scale_dtype).squeeze(-1)
    global_scale = torch.ones((), device=device) if fmt.has_global_scale else None
    return Operand(qdata.view(fmt.element.storage_dtype), scale, global_scale, fmt.name)


def assert_transposed(got, q, columns):
    assert_operands_equal(got, ops.transpose(q, columns=columns, backend="reference"))


@pytest.mark.parametrize("least", (0, 64 << 20), ids=("small", "large"))
@pytest.mark.parametrize("shape", ((16, 16), (272, 144), (528, 400), (3, 272, 528), (2, 16, 272)), ids=shape_id)
def test_rows_on_16_bytes_move_four_bytes_at_a_time(shape, least, device, launches, monkeypatch):
    kernels = pytest.importorskip("torchao_blockwise.ops.transposition.kernels_triton")
    monkeypatch.setattr(kernels, "_QUADS_TILES", {0: kernels._QUADS_TILES[least]})
    q = random_operand(FP8_128X128, *shape, device=device)
    assert_transposed(ops.transpose(q, backend="triton"), q, shape[-1])
    assert [launch.kernel for launch in launches] == [kernels._transpose_quads_kernel]


@pytest.mark.parametrize(
    ("rows", "columns", "tile"), ((8192, 8176, (256, 128, 4)), (8192, 8192, (256, 256, 8))), ids=("below", "from")
)
def test_tiles_are_large_from_64_mi_elements_on(rows, columns, tile, machine):
    kernels = pytest.importorskip("torchao_blockwise.ops.transposition.kernels_triton")
    launches = machine.launches_of(kernels, happen=False)
    empty = FP8_128X128.new_empty(torch.empty(0), rows, columns)
    kernels.transpose(Operand(*empty, None, FP8_128X128.name), columns)
    (launch,) = launches
    options = launch.options
    assert (options["TILE_M"], options["TILE_K"], options["num_warps"]) == tile


@pytest.mark.parametrize("shape", ((272, 144), (150, 272), (272, 150), (2, 37, 302)), ids=shape_id)
@formats
def test_scales_move_in_the_launch_of_the_payload(fmt, shape, device, launches):
    q = random_operand(fmt, *shape, device=device)
    assert_transposed(ops.transpose(q, backend="triton"), q, shape[-1])
    assert len(launches) == 1


@pytest.mark.parametrize("offset", (1, 2, 4, 8, 16))
def test_payload_may_begin_anywhere(offset, device, launches):
    q = random_operand(FP8_128X128, 48, 272, device=device)
    memory = torch.empty(q.qdata.numel() + 16, dtype=torch.uint8, device=device)
    assert memory.data_ptr() % 16 == 0
    moved = memory[offset : offset + q.qdata.numel()].view(48, 272).copy_(q.qdata.view(torch.uint8))
    moved = q._replace(qdata=moved.view(q.qdata.dtype))
    assert_transposed(ops.transpose(moved, backend="triton"), q, 272)
    assert ("quads" in launches[0].kernel.fn.__name__) == (offset == 16)


@backends
@formats
def test_matrices_may_lie_apart(fmt, backend, device):
    q = random_operand(fmt, 5, 48, 272, device=device)
    apart = q._replace(qdata=q.qdata[::2], scale=q.scale[::2])
    together = q._replace(qdata=q.qdata[::2].contiguous(), scale=q.scale[::2].contiguous())
    assert_transposed(ops.transpose(apart, backend=backend), together, 272)


@backends
@formats
@pytest.mark.parametrize("shape", ((1, 128), (128, 1), (128, 128)), ids=shape_id)
def test_shares_no_memory_with_its_input(fmt, shape, backend, device):
    q = quantize(random_tensor(*shape, device=device), fmt)
    got = ops.transpose(q, columns=shape[-1], backend=backend)
    assert got.qdata.data_ptr() != q.qdata.data_ptr()
    assert got.scale.data_ptr() != q.scale.data_ptr()


@pytest.mark.parametrize("fmt", (FP8_1X128, NVFP4_1X16), ids=lambda f: f.name)
def test_refuses_one_row_blocks(fmt):
    with pytest.raises(ValueError) as error:
        ops.transpose(quantize(torch.ones(2, 32), fmt))
    assert str(error.value) == (
        f"transpose: x in {fmt.name} has blocks of 1x{fmt.block[1]}, a transpose would need other scales; "
        "quantize the high-precision tensor with columnwise=True"
    )


SQUARE = quantize(torch.ones(2, 32), NVFP4_16X16)
REFUSALS = {
    "tensor": (
        lambda: ops.transpose(torch.ones(2, 32)),
        TypeError("transpose: x must be a result of quantize, got Tensor; quantize it first"),
    ),
    "plain tuple": (
        lambda: ops.transpose(tuple(SQUARE)),
        TypeError("transpose: x must be a result of quantize, got tuple; quantize it first"),
    ),
    "columns": (
        lambda: ops.transpose(SQUARE, columns=30),
        ValueError("transpose: x with a payload of shape [2, 16] does not hold columns=30"),
    ),
    "backend without an implementation": (
        lambda: ops.transpose(SQUARE, backend="cublas"),
        ValueError("transpose: backend cublas has no implementation; choose one of triton, reference, or auto"),
    ),
}


@pytest.mark.parametrize(("call", "expected"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(call, expected):
    with pytest.raises(type(expected)) as error:
        call()
    assert str(error.value) == str(expected)
