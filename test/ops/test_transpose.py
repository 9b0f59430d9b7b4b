"""ops.transpose: exact, involutive, equal to quantizing the transpose; refusals."""

import pytest
import torch
from quantize_cases import backends, rowwise_of

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_128X128, NVFP4_16X16, Operand
from torchao_blockwise.testing import SHAPES, assert_bitwise_equal, assert_operands_equal, random_tensor, shape_id

formats = pytest.mark.parametrize("fmt", (FP8_128X128, NVFP4_16X16), ids=lambda f: f.name)
shapes = pytest.mark.parametrize("shape", (*SHAPES, (3, 40, 130), (2, 17, 33), (2, 0, 16)), ids=shape_id)


def check(fmt, *shape: int, backend: str, device) -> None:
    """The transpose is the quantized transpose, in separate memory; twice is the identity."""
    x = random_tensor(*shape, device=device)
    q, transposed = (rowwise_of(t, fmt, backend="reference") for t in (x, x.mT.contiguous()))
    once = ops.transpose(q, columns=shape[-1], backend=backend)
    assert_operands_equal(once, transposed)
    assert once.qdata.is_contiguous() and once.scale.is_contiguous()
    assert_operands_equal(ops.transpose(once, columns=shape[-2], backend=backend), q)
    if x.numel():
        assert once.qdata.data_ptr() != q.qdata.data_ptr() and once.scale.data_ptr() != q.scale.data_ptr()


@backends
@shapes
@formats
def test_is_quantizing_the_transpose(fmt, shape, backend, device):
    check(fmt, *shape, backend=backend, device=device)


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


def random_operand(fmt, *shape, device) -> Operand:
    """Any bytes and any scales: every block has its scale."""
    qdata = torch.randint(0, 256, fmt.qdata_shape(*shape), dtype=torch.uint8, device=device)
    grid = *fmt.scale_shape(*shape), fmt.scale_dtype.itemsize
    scale = torch.randint(0, 256, grid, dtype=torch.uint8, device=device).view(fmt.scale_dtype).squeeze(-1)
    global_scale = torch.ones((), device=device) if fmt.has_global_scale else None
    return Operand(qdata.view(fmt.element.storage_dtype), scale, global_scale, fmt.name)


# --- ways through the kernels -----------------------------------------------------------------------------------------

# Format, shape, bytes before the payload in memory, the kernel that moves it: scales too, in one launch. "": PyTorch's.
WAYS = [
    *((FP8_128X128, shape, 0, "quads") for shape in ((16, 16), (528, 400), (3, 272, 528), (2, 16, 272))),
    *((FP8_128X128, (48, 272), offset, "quads" if offset == 16 else "") for offset in (1, 2, 4, 8, 16)),
    *((FP8_128X128, shape, 0, "") for shape in ((150, 272), (2, 37, 302))),
    *((NVFP4_16X16, shape, 0, "pairs") for shape in ((272, 144), (150, 272), (2, 37, 302))),
]


@pytest.mark.parametrize("least", (0, 64 << 20), ids=("small", "large"))
@pytest.mark.parametrize(("fmt", "shape", "offset", "kernel"), WAYS)
def test_kernels_by_shape_and_address(fmt, shape, offset, kernel, least, device, machine, monkeypatch):
    kernels = pytest.importorskip("torchao_blockwise.ops.transposition.kernels_triton")
    monkeypatch.setattr(kernels, "_QUADS_TILES", {0: kernels._QUADS_TILES[least]})
    launches, q = machine.launches_of(kernels), random_operand(fmt, *shape, device=device)
    memory = torch.empty(q.qdata.numel() + 16, dtype=torch.uint8, device=device)
    assert memory.data_ptr() % 16 == 0
    moved = memory[offset : offset + q.qdata.numel()].view(q.qdata.shape).copy_(q.qdata.view(torch.uint8))
    got = ops.transpose(q._replace(qdata=moved.view(q.qdata.dtype)), columns=shape[-1], backend="triton")
    assert_operands_equal(got, ops.transpose(q, columns=shape[-1], backend="reference"))
    assert [launch.kernel.fn.__name__ for launch in launches] == [f"_transpose_{kernel}_kernel"] * bool(kernel)


@backends
@formats
def test_matrices_may_lie_apart(fmt, backend, device):
    q = random_operand(fmt, 5, 48, 272, device=device)
    apart = q._replace(qdata=q.qdata[::2], scale=q.scale[::2])
    together = q._replace(qdata=q.qdata[::2].contiguous(), scale=q.scale[::2].contiguous())
    assert_operands_equal(ops.transpose(apart, backend=backend), ops.transpose(together, backend="reference"))
