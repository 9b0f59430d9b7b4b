"""NVFP4 products of operands that are decoded to bf16 first: the decoding, the scaling, and both around cuBLAS."""

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import NVFP4_1X16, NVFP4_16X16, Operand
from torchao_blockwise.ops.backend import why_no_triton
from torchao_blockwise.ops.gemm import cublas
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor, relative_error, shape_id

decoded = pytest.importorskip("torchao_blockwise.ops.gemm.kernels_decode")
reason = why_no_triton(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

FORMATS = pytest.mark.parametrize("fmt", (NVFP4_1X16, NVFP4_16X16), ids=lambda fmt: fmt.name)
# Of a product in bf16 of fp32 sums: half a unit in the last place, and the order of the sums.
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2**-17}


def operand(fmt, *shape, device, dtype=torch.bfloat16) -> Operand:
    return ops.quantize(random_tensor(*shape, dtype=dtype, device=device), fmt, backend="reference").rowwise


def without_global_scale(x: Operand) -> Operand:
    return x._replace(global_scale=torch.ones_like(x.global_scale))


@pytest.fixture
def multiplies(monkeypatch, device):
    """A CPU has no product of bf16 in fp32: there it is made of fp32 values, whose products are exact."""
    if device == "cpu":
        monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.float() @ b.float())


@FORMATS
@pytest.mark.parametrize("shape", [(1, 2), (16, 32), (33, 50), (128, 256), (40, 272), (17, 1000)], ids=shape_id)
def test_decodes_exactly(fmt, shape, device):
    x = operand(fmt, *shape, device=device)
    wanted = ops.dequantize(without_global_scale(x), dtype=torch.float32)
    got = decoded.decode(x)
    assert got.dtype == torch.bfloat16
    assert_bitwise_equal(got.float(), wanted)


@FORMATS
def test_decodes_matrices_one_below_the_other(fmt, device):
    """Blocks of square formats begin again with each expert."""
    for rows in (1, 16, 24, 33):
        x = operand(fmt, 3, rows, 50, device=device)
        each = [decoded.decode(x._replace(qdata=x.qdata[e], scale=x.scale[e])) for e in range(3)]
        assert_bitwise_equal(decoded.decode(x), torch.cat(each))


@FORMATS
def test_every_code_and_every_scale(fmt, device):
    """All 16 codes under all 256 block scales, NaN among them."""
    rows, columns = 256 * fmt.block[0], 16
    qdata = torch.arange(8, dtype=torch.uint8, device=device) * 0x22 + 0x10
    scale = torch.arange(256, dtype=torch.uint8, device=device)[:, None].view(torch.float8_e4m3fn)
    x = Operand(qdata.expand(rows, 8).contiguous(), scale, torch.ones((), device=device), fmt.name)
    assert {code for byte in qdata.tolist() for code in (byte & 15, byte >> 4)} == set(range(16))
    wanted = ops.dequantize(x, dtype=torch.float32)
    torch.testing.assert_close(decoded.decode(x).float(), wanted, rtol=0, atol=0, equal_nan=True)
    assert wanted.isnan().sum() == 2 * columns * fmt.block[0]


def test_rows_of_any_stride(device):
    x = operand(NVFP4_1X16, 40, 64, device=device)
    wide = torch.zeros(40, 50, dtype=torch.uint8, device=device)
    wide[:, :32] = x.qdata
    assert_bitwise_equal(decoded.decode(x._replace(qdata=wide[:, :32])), decoded.decode(x))


@pytest.mark.parametrize("b_fmt", (NVFP4_1X16, NVFP4_16X16), ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
@pytest.mark.parametrize("shape", [(1, 1, 2), (33, 17, 50), (64, 48, 160), (300, 130, 512)], ids=shape_id)
@pytest.mark.usefixtures("multiplies")
def test_product(shape, bias, dtype, b_fmt, device):
    m, n, k = shape
    x, y = (torch.randn(rows, k, dtype=torch.bfloat16, device=device) for rows in (m, n))
    a, b = (ops.quantize(t, fmt, backend="reference").rowwise for t, fmt in ((x, NVFP4_1X16), (y, b_fmt)))
    bias = torch.randn(n, dtype=torch.bfloat16, device=device) if bias else None
    got = decoded.matmul(a, b, dtype, bias)
    wanted = ops.matmul(a, b, out_dtype=torch.float32, bias=bias, backend="reference")
    assert got.dtype == dtype and relative_error(got.float(), wanted) < TOLERANCE[dtype]


@pytest.mark.usefixtures("multiplies")
def test_is_added(device):
    a, b = operand(NVFP4_1X16, 33, 64, device=device), operand(NVFP4_1X16, 20, 64, device=device)
    out = torch.randn(33, 20, device=device)
    wanted = out + decoded.matmul(a, b, torch.float32, None)
    decoded.add_matmul(out, a, b)
    # The compiler may contract the product with the tensor scales and the sum.
    torch.testing.assert_close(out, wanted, rtol=2**-20, atol=2**-20 * wanted.abs().max().item())


@pytest.mark.usefixtures("multiplies")
def test_cublas_decodes_for_gpus_without_fp4_tensor_cores(device, monkeypatch):
    monkeypatch.setattr(cublas, "compute_capability", lambda device: (9, 0))
    a, b = operand(NVFP4_1X16, 33, 64, device=device), operand(NVFP4_16X16, 20, 64, device=device)
    bias, totals = torch.randn(20, device=device), [torch.ones(33, 20, device=device) for _ in range(2)]
    assert_bitwise_equal(cublas.matmul(a, b, torch.bfloat16, bias), decoded.matmul(a, b, torch.bfloat16, bias))
    for total, by in zip(totals, (cublas, decoded)):
        by.add_matmul(total, a, b)
    assert_bitwise_equal(*totals)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 1408, 2048), (257, 4096, 7168), (1000, 999, 1008)], ids=shape_id)
def test_large_products(shape, device):
    m, n, k = shape
    a, b = (ops.quantize(random_tensor(r, k, device=device), f).rowwise for r, f in ((m, NVFP4_1X16), (n, NVFP4_16X16)))
    got = ops.matmul(a, b, out_dtype=torch.float32, backend="cublas")
    wanted = ops.matmul(a, b, out_dtype=torch.float32, backend="triton")
    assert relative_error(got, wanted) < 2**-14
