"""AUTO's choice for a grouped product on Hopper, and the bits of NVFP4 products that are decoded to bf16 there."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from grouped_products import PAIRS, Case, assert_close_to_each_group
from product_budgets import out_dtypes

from torchao_blockwise import _compat
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, Operand
from torchao_blockwise.ops import backend
from torchao_blockwise.ops.backend import Backend, choose
from torchao_blockwise.ops.gemm.grouped import _first, add_grouped_matmul_op, grouped_matmul_op

GPU = torch.device("cuda:0")
NVFP4 = {"m": (NVFP4_1X16, NVFP4_16X16), "k": (NVFP4_1X16, NVFP4_1X16)}
FP8 = {"m": (FP8_1X128, FP8_128X128), "k": (FP8_1X128, FP8_1X128)}
every_direction = pytest.mark.parametrize("along", NVFP4)


@pytest.fixture
def gpu(machine):
    """A machine with a Hopper GPU, to be changed, and no reason why a kernel could not run on it."""
    machine.has_gpu_of((9, 0))
    machine.has_triton()
    machine.has_gluon()
    machine.without_interpreter()
    machine.warns_anew()
    return machine


def choice(along: str, a_shape, b_shape, pair=NVFP4, named=Backend.AUTO):
    """The row that computes a product of operands of these shapes on a GPU."""

    def operand(fmt, shape):
        shape = torch.Size(fmt.qdata_shape(*shape))
        payload = SimpleNamespace(shape=shape, device=GPU, is_cuda=True, numel=shape.numel)
        return Operand(payload, None, None, fmt.name)

    args = *map(operand, pair[along], (a_shape, b_shape)), None, along, torch.bfloat16
    return choose("grouped_matmul", grouped_matmul_op.table, named, args, _first)


# (compute capability, direction, shapes of a and b, module): along "m" by tokens an expert, along "k" by features.
CHOSEN = [
    *(((9, 0), "m", (tokens, 2048), (128, 1536, 2048), "triton") for tokens in (1, 16384)),
    *(((9, 0), "m", (tokens, 2048), (128, 1536, 2048), "gluon") for tokens in (32768, 2**20)),
    *(((9, 0), "k", (64, tokens), (2048, tokens), "triton") for tokens in (64, 65536)),
    *(((9, 0), "k", (768, tokens), (2048, tokens), "gluon") for tokens in (64, 65536)),
    *((other, "m", (2048, 4096), (8, 2048, 4096), "triton") for other in ((8, 0), (8, 9), (12, 0))),
    *((other, "k", (2048, 4096), (2048, 4096), "triton") for other in ((8, 0), (8, 9), (12, 0))),
]


@pytest.mark.parametrize(("capability", "along", "a_shape", "b_shape", "module"), CHOSEN, ids=str)
def test_nvfp4_is_chosen_in_silence(capability, along, a_shape, b_shape, module, gpu):
    gpu.has_gpu_of(capability)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = choice(along, a_shape, b_shape)
    assert row.run.endswith(f"kernels_{module}:grouped_matmul")


@pytest.mark.parametrize("kernels", (None, "this build has none"))
def test_blackwell_takes_pytorchs_kernels_for_rows_where_they_are_built(kernels, gpu):
    gpu.has_gpu_of((10, 0))
    gpu.patch.setattr(_compat, "why_no_scaled_grouped_mm", lambda device: kernels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows, tokens = choice("m", (2048, 4096), (8, 2048, 4096)), choice("k", (2048, 4096), (2048, 4096))
    assert rows.backend is (Backend.TRITON if kernels else Backend.CUTLASS) and tokens.backend is Backend.TRITON


@every_direction
def test_fp8_is_multiplied_by_gluon(along, gpu):
    shapes = (2048, 4096), (8, 2048, 4096) if along == "m" else (2048, 4096)
    for named in (Backend.AUTO, Backend.GLUON):
        assert choice(along, *shapes, FP8, named).run.endswith("kernels_gluon:grouped_matmul")
    wrong = {"m": FP8["k"], "k": FP8["m"]}
    wanted, got = (" · ".join(fmt.name for fmt in pair[along]) for pair in (FP8, wrong))
    match = f'gluon cannot run: along "{along}" the kernels multiply {wanted}, got {got}'
    with pytest.raises(ValueError, match=match):
        choice(along, *shapes, wrong, Backend.GLUON)


@every_direction
def test_why_not_gluon(along, gpu):
    b_shape = (8, 2048, 4096) if along == "m" else (2048, 4096)
    empty = (8, 0, 4096) if along == "m" else (0, 4096)
    for pair in (NVFP4, FP8):
        for shapes in (((0, 4096), b_shape), ((2048, 4096), empty)):
            payloads = [list(fmt.qdata_shape(*shape)) for fmt, shape in zip(pair[along], shapes)]
            match = re.escape("the copy engine has no empty tensors, got payloads of shape {} and {}".format(*payloads))
            with pytest.raises(ValueError, match=match):
                choice(along, *shapes, pair, Backend.GLUON)
        gpu.patch.setattr(backend, "interpreting", lambda: True)
        with pytest.raises(ValueError, match="Triton's interpreter does not know Gluon"):
            choice(along, (2048, 4096), b_shape, pair, Backend.GLUON)
        gpu.without_interpreter()
    gpu.has_gluon(False)
    assert choice(along, (2048, 4096), b_shape).backend is Backend.TRITON
    with pytest.raises(ValueError, match="they need Gluon"):
        choice(along, (2048, 4096), b_shape, NVFP4, Backend.GLUON)


def test_what_adds_to_a_sum_is_computed_by_the_same_rows():
    rows = [row.run.replace(":add_", ":") for row in add_grouped_matmul_op.table if isinstance(row.run, str)]
    # CUTLASS's kernels make no such product.
    assert rows == [row.run for row in grouped_matmul_op.table if row.backend is not Backend.CUTLASS]


ROUTINGS = {
    "ragged": ([130, 1, 64, 17], 70),
    "mixed": ([1000, 0, 3, 517, 2048, 128, 64, 1], 300),
    "90 experts": ([1, 0, 130] * 30, 5),
}


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.gpu
@every_direction
@out_dtypes
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("n", "k"), ((256, 512), (131, 257), (576, 1104)), ids=str)
def test_decoded_products_on_the_gpu(hopper, n, k, routing, out_dtype, along):
    case = Case(along, NVFP4[along], ROUTINGS[routing], "cuda", n, k)
    # What the kernel leaves out shows as what was there before.
    torch.full((len(case.sizes) * n * k + case.tokens * n,), float("nan"), device="cuda")
    assert_close_to_each_group(case, case.run(out_dtype, backend="gluon"), "gluon")


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
def test_decoded_products_are_added_on_the_gpu(hopper, routing):
    case = Case("k", PAIRS["k"][1], ROUTINGS[routing], "cuda", 264, 272)
    start = torch.randn(len(case.sizes), 264, 272, device="cuda")
    out = case.add(start.clone(), backend="gluon")
    full = [g for g, size in enumerate(case.sizes) if size]
    empty = [g for g, size in enumerate(case.sizes) if not size]
    assert torch.equal(out[empty], start[empty])
    wanted = start[full] + case.run(backend="gluon")[full]
    torch.testing.assert_close(out[full], wanted, rtol=2.0**-20, atol=1e-6)
