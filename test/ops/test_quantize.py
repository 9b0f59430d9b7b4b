"""ops.quantize: kernels against the reference, invariants, special values, any number of tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantize_cases import (
    SQUARE,
    backends,
    canonical,
    check_against_reference,
    columnwise_of,
    dtypes,
    formats,
    fp8_formats,
    nvfp4_formats,
    rowwise_of,
    shapes,
    special_input,
)

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, BlockFormat, Operand
from torchao_blockwise.ops.padding import aligned_rows
from torchao_blockwise.testing import (
    assert_bitwise_equal,
    assert_operands_equal,
    random_tensor,
    relative_error,
    shape_id,
)

# --- one result, whatever computes it ---------------------------------------------------------------------------------


@backends
@shapes
@formats
def test_shapes_match_reference(fmt, shape, backend, device):
    check_against_reference(special_input(shape, fmt, torch.bfloat16, device), fmt, backend)


@backends
@dtypes
@formats
def test_dtypes_match_reference(fmt, dtype, backend, device):
    check_against_reference(special_input((65, 200), fmt, dtype, device), fmt, backend)


@backends
@dtypes
@formats
def test_a_dtype_gives_the_bits_of_its_fp32_copy(fmt, dtype, backend, device):
    x = special_input((33, 150), fmt, dtype, device)
    assert_operands_equal(rowwise_of(x, fmt, backend=backend), rowwise_of(x.float(), fmt, backend="reference"))


LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second column": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "every second row": lambda x: x.repeat_interleave(2, dim=-2)[..., ::2, :],
    "offset of one": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "column slice": lambda x: torch.cat((x, x), dim=-1)[..., : x.shape[-1]],
    "expanded rows": lambda x: x[..., :1, :].expand(x.shape),
    "batch last": lambda x: x.unsqueeze(-1).expand(*x.shape, 3).permute(2, 0, 1),
}


@backends
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@formats
def test_strides_do_not_matter(fmt, layout, backend, device):
    x = layout(random_tensor(40, 144, dtype=torch.bfloat16, device=device))
    check_against_reference(x, fmt, backend)


@backends
@fp8_formats
def test_power_of_2_scales_match_reference(fmt, backend, device):
    x = special_input((63, 500), fmt, torch.bfloat16, device)
    check_against_reference(x, fmt, backend, power_of_2_scales=True)


@backends
@formats
@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")), ids=str)
def test_special_numbers_match_reference(value, fmt, backend, device):
    x = random_tensor(33, 260, device=device)
    x[0, 0] = x[20, 129] = value
    x[20, 130] = 0.0
    check_against_reference(x, fmt, backend)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(0, 40), columns=st.integers(0, 150), seed=st.integers(0, 99), power=st.integers(-40, 38))
@formats
@backends
def test_any_shape_and_magnitude(backend, fmt, rows, columns, seed, power, device):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, columns, generator=generator).double() * 10.0**power).float().to(device)
    check_against_reference(x, fmt, backend)


# --- other ways through the kernels, selected by their tables ---------------------------------------------------------


def set_tables(monkeypatch, **tables) -> None:
    kernels = pytest.importorskip("torchao_blockwise.ops.quantization.kernels_triton")
    for name, value in tables.items():
        monkeypatch.setattr(kernels, name, value)


def test_both_copies_of_one_row_blocks_take_a_launch_each(monkeypatch, machine, device):
    kernels = pytest.importorskip("torchao_blockwise.ops.quantization.kernels_triton")
    launches = machine.launches_of(kernels, happen=False)
    set_tables(monkeypatch, _FP8_ROWWISE_TILE=(32, 128, 4, 16), _FP8_COLUMNWISE_TILE=(128, 128, 4, 16))
    x = torch.zeros(144, 272, dtype=torch.bfloat16, device=device)
    for fmt in (FP8_1X128, FP8_128X128):
        ops.quantize(x, fmt, columnwise=True, backend="triton")
    # 5 × 3 tiles of 32 rows, and 2 × 3 whole ones; of square blocks 2 × 3 tiles for both.
    assert [launch.grid for launch in launches] == [15, 6, 6]
    copies = [(launch.options["ROWWISE"], launch.options["COLUMNWISE"]) for launch in launches]
    assert copies == [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize("tile", ((128, 128, 4, 16), (128, 32, 2, 8)), ids=lambda tile: "x".join(map(str, tile[:2])))
@shapes
def test_columnwise_tiles_of_other_widths_match_reference(shape, tile, monkeypatch, device):
    set_tables(monkeypatch, _FP8_COLUMNWISE_TILE=tile)
    check_against_reference(special_input(shape, FP8_1X128, torch.bfloat16, device), FP8_1X128, "triton")


# --- invariants -------------------------------------------------------------------------------------------------------


@backends
@shapes
@pytest.mark.parametrize("fmt", SQUARE, ids=lambda f: f.name)
def test_square_columnwise_is_the_transpose_of_rowwise(fmt, shape, backend, device):
    x = special_input(shape, fmt, torch.bfloat16, device)
    rowwise, columnwise = ops.quantize(x, fmt, columnwise=True, backend=backend)
    assert_operands_equal(ops.transpose(rowwise, columns=shape[-1], backend="reference"), columnwise)


@backends
@formats
def test_leading_dims_are_independent_matrices(fmt, backend, device):
    x = random_tensor(2, 3, 20, 40, device=device)
    amax = x.abs().amax() if fmt.has_global_scale else None
    whole = rowwise_of(x, fmt, backend=backend, tensor_amax=amax)
    for i in range(2):
        for j in range(3):
            part = rowwise_of(x[i, j], fmt, backend="reference", tensor_amax=amax)
            assert_operands_equal(whole._replace(qdata=whole.qdata[i, j], scale=whole.scale[i, j]), part)


@backends
@nvfp4_formats
def test_tensor_amax_gives_a_part_the_bits_it_has_in_the_whole(fmt, backend, device):
    x = random_tensor(64, 96, dtype=torch.bfloat16, device=device)
    amax = torch.ops.torchao_blockwise.tensor_amax_bits(x, None, False, "auto").view(torch.float32)
    assert amax == x.abs().max()
    whole = rowwise_of(x, fmt, backend="reference")
    part = rowwise_of(x[16:48, 32:64], fmt, backend=backend, tensor_amax=amax)
    block_rows, block_columns = fmt.block
    scale = whole.scale[16 // block_rows : 48 // block_rows, 32 // block_columns : 64 // block_columns]
    assert_bitwise_equal(part.qdata, whole.qdata[16:48, 16:32], "qdata")
    assert_bitwise_equal(part.scale, scale, "scale")
    assert_bitwise_equal(part.global_scale, whole.global_scale, "global_scale")


@backends
@formats
def test_ragged_blocks_see_no_memory_outside(fmt, backend, device):
    poisoned = torch.full((140, 300), float("nan"), device=device)
    poisoned[3:130, 7:270] = random_tensor(127, 263, device=device)
    x = poisoned[3:130, 7:270]
    check_against_reference(x, fmt, backend)
    assert ops.dequantize(rowwise_of(x, fmt, backend=backend), columns=263).isfinite().all()


@backends
@formats
@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")), ids=str)
def test_nan_and_inf_never_become_finite(value, fmt, backend, device):
    x = random_tensor(140, 300, device=device)
    x[130, 280] = value
    decoded = ops.dequantize(rowwise_of(x, fmt, backend=backend))
    poisoned = torch.zeros_like(x, dtype=torch.bool)
    if fmt.has_global_scale:
        poisoned[:] = True
    else:
        poisoned[128 if fmt.is_square else 130 : 140 if fmt.is_square else 131, 256:] = True
    assert torch.equal(~decoded.isfinite(), poisoned)
    columnwise = columnwise_of(x, fmt, backend=backend)
    assert not ops.dequantize(columnwise)[280, 130].isfinite()


@backends
@formats
@pytest.mark.parametrize("zero", (0.0, -0.0), ids=str)
def test_zeros_decode_to_zeros(zero, fmt, backend, device):
    q = rowwise_of(torch.full((20, 130), zero, device=device), fmt, backend=backend)
    assert ops.dequantize(q).tolist() == [[0.0] * 130] * 20
    sign_bit = {8: 0x80, 4: 0x88}[fmt.element.bits]
    assert (q.qdata.view(torch.uint8) == (sign_bit if str(zero) == "-0.0" else 0)).all()


@backends
@formats
def test_input_is_left_alone_and_outputs_are_contiguous(fmt, backend, device):
    x = random_tensor(40, 144, device=device).mT.contiguous().mT
    before = x.clone()
    for tokens in (40, 37):
        for padded in (False, True):
            for q in ops.quantize(x[:tokens], fmt, columnwise=True, padded=padded, backend=backend):
                assert q.qdata.is_contiguous() and q.scale.is_contiguous()
    assert torch.equal(x, before)


# --- any number of tokens ---------------------------------------------------------------------------------------------

# The last: eight of the highest tiles, and a row.
TOKENS = pytest.mark.parametrize("tokens", (1, 15, 16, 17, 127, 129, 1025))


def quantize_padded(x: torch.Tensor, fmt: BlockFormat) -> Operand:
    """The columnwise copy of `x` with zero rows behind, by hand."""
    zeros = x.new_zeros(*x.shape[:-2], -x.shape[-2] % 32, x.shape[-1])
    return columnwise_of(torch.cat((x, zeros), -2), fmt, backend="reference")


@backends
@TOKENS
@formats
def test_padded_is_quantizing_with_zero_tokens_behind(fmt, tokens, backend, device):
    x = special_input((tokens, 32), fmt, torch.bfloat16, device)
    rowwise, columnwise = ops.quantize(x, fmt, columnwise=True, padded=True, backend=backend)
    assert_operands_equal(canonical(rowwise), canonical(rowwise_of(x, fmt, backend="reference")))
    assert_operands_equal(canonical(columnwise), canonical(quantize_padded(x, fmt)))
    assert columnwise.qdata.shape[-1] == fmt.element.packed(-(-tokens // 32) * 32)
    alone = columnwise_of(x, fmt, padded=True, backend=backend)
    assert_operands_equal(canonical(alone), canonical(columnwise))


@backends
@pytest.mark.parametrize("shape", ((2, 3, 21, 40), (0, 16), (17, 0)), ids=shape_id)
@pytest.mark.parametrize("value", (1.0, float("nan"), float("inf")), ids=str)
@formats
def test_padded_batches_and_special_numbers(fmt, value, shape, backend, device):
    x = random_tensor(*shape, device=device)
    if x.numel():
        x[..., -1, 3] = value
    got = columnwise_of(x, fmt, padded=True, backend=backend)
    assert_operands_equal(canonical(got), canonical(quantize_padded(x, fmt)))


@formats
def test_padded_payload_goes_into_products_as_it_lies(fmt, device):
    x = random_tensor(17, 48, device=device)
    for padded in (False, True):
        q = columnwise_of(x, fmt, padded=padded)
        assert (aligned_rows(q.qdata) is q.qdata) == padded


@pytest.mark.parametrize("tokens", (1, 17, 48, 129))
@pytest.mark.parametrize("backend", ("reference", "triton"))
@pytest.mark.parametrize("fmt", (FP8_1X128, NVFP4_1X16), ids=lambda f: f.name)
def test_padding_adds_nothing_to_a_product(fmt, backend, tokens, device):
    x, dy = random_tensor(tokens, 40, device=device), random_tensor(tokens, 24, device=device, seed=1)

    def product(padded):
        copies = [columnwise_of(t, fmt, padded=padded, backend=backend) for t in (dy, x)]
        return ops.matmul(*copies, out_dtype=torch.float32, backend=backend)

    assert relative_error(product(True), product(False)) < 1e-6


@backends
@formats
def test_tensors_that_require_grad_give_the_same_bits(fmt, backend, device):
    x = random_tensor(33, 150, device=device)
    with torch.no_grad():
        q = rowwise_of(x.clone().requires_grad_(), fmt, backend=backend)
    assert_operands_equal(q, rowwise_of(x, fmt, backend="reference"))
