"""Transformed and stochastically rounded copies: kernels against the reference, parts against the whole."""

from __future__ import annotations

import pytest
import torch
from quantize_cases import backends, canonical, dtypes

from torchao_blockwise import ops
from torchao_blockwise.formats import (
    FP8_1X128,
    NVFP4_1X16,
    NVFP4_16X16,
    Operand,
    StochasticRounding,
    hadamard_number,
    hadamard_transform,
)
from torchao_blockwise.ops.quantization import hadamard_amax_bits_op
from torchao_blockwise.testing import assert_operands_equal, random_tensor, shape_id

SHAPES = ((1, 1), (16, 16), (17, 33), (65, 200), (0, 16), (16, 0), (40, 257))
shapes = pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
ROUNDING = StochasticRounding(2**63 + 5, 2**32 - 1, 7)
HOW = {
    "hadamard": {"hadamard": True},
    "other signs": {"hadamard": [-1] * 16},
    "stochastic": {"stochastic": ROUNDING},
    "both": {"hadamard": True, "stochastic": ROUNDING},
}
how = pytest.mark.parametrize("how", HOW.values(), ids=HOW)


def _same(a, b) -> None:
    for one, other in zip(a, b, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_operands_equal(canonical(one), canonical(other))


# --- kernels against the reference ------------------------------------------------------------------------------------


@how
@shapes
def test_kernels_match_the_reference(shape, how, device):
    x = random_tensor(*shape, device=device)
    for padded in (False, True):
        made = ops.quantize(x, NVFP4_1X16, columnwise=True, padded=padded, backend="triton", **how)
        _same(made, ops.quantize(x, NVFP4_1X16, columnwise=True, padded=padded, backend="reference", **how))


@dtypes
def test_dtypes_match_the_reference(dtype, device):
    x = random_tensor(50, 70, dtype=dtype, device=device)
    made = ops.quantize(x, NVFP4_1X16, columnwise=True, backend="triton", **HOW["both"])
    _same(made, ops.quantize(x, NVFP4_1X16, columnwise=True, backend="reference", **HOW["both"]))


@pytest.mark.parametrize("value", (float("nan"), float("inf"), 0.0, -0.0, 1e-40, 3e38))
def test_special_values_match_the_reference(value, device):
    x = random_tensor(40, 40, dtype=torch.float32, device=device)
    x[3, 5] = x[20:36, 7] = value
    made = ops.quantize(x, NVFP4_1X16, columnwise=True, backend="triton", **HOW["both"])
    _same(made, ops.quantize(x, NVFP4_1X16, columnwise=True, backend="reference", **HOW["both"]))
    if value != value or value == float("inf"):
        assert all(ops.dequantize(copy, dtype=torch.float32).isnan().all() for copy in made)


def test_strided_inputs_match_the_reference(device):
    x = random_tensor(40, 70, device=device)
    for view in (x.mT, x[:, ::3], x[::2, 5:60]):
        made = ops.quantize(view, NVFP4_1X16, columnwise=True, backend="triton", **HOW["both"])
        _same(made, ops.quantize(view.contiguous(), NVFP4_1X16, columnwise=True, backend="reference", **HOW["both"]))


ENDS = ([17], [0, 13, 13, 40], [3, 3, 30, 48], [48, 48], [0, 0])


@pytest.mark.parametrize("ends", ENDS, ids=str)
@how
def test_kernels_match_the_reference_in_groups(how, ends, device):
    x, groups = random_tensor(48, 70, device=device), torch.tensor(ends, dtype=torch.int32, device=device)
    made = ops.quantize(x, NVFP4_1X16, groups=groups, columnwise=True, backend="triton", **how)
    _same(made, ops.quantize(x, NVFP4_1X16, groups=groups, columnwise=True, backend="reference", **how))
    with_tables = ops.make_groups(groups, 48, NVFP4_1X16, backend="triton")
    _same(ops.quantize(x, NVFP4_1X16, groups=with_tables, columnwise=True, backend="triton", **how), made)


# --- what it is -------------------------------------------------------------------------------------------------------


@backends
def test_a_transformed_copy_is_the_copy_of_the_transform(backend, device):
    x = random_tensor(50, 70, device=device)
    made = ops.quantize(x, NVFP4_1X16, columnwise=True, hadamard=True, backend=backend)
    transformed = hadamard_transform(x, hadamard_number(True))
    plain = ops.quantize(transformed, NVFP4_1X16, rowwise=False, columnwise=True, backend="reference")
    assert_operands_equal(made.columnwise, plain.columnwise)
    assert_operands_equal(made.rowwise, ops.quantize(x, NVFP4_1X16, backend="reference").rowwise)
    assert made.rowwise.global_scale.item() != made.columnwise.global_scale.item()


@backends
def test_the_same_numbers_give_the_same_bits_and_other_uses_others(backend, device):
    x = random_tensor(64, 64, device=device)

    def rounded(**changed):
        rounding = ROUNDING._replace(**changed)
        return ops.quantize(x, NVFP4_1X16, columnwise=True, stochastic=rounding, backend=backend)

    _same(rounded(), rounded())
    _same(rounded(use=torch.tensor(7, device=device)), rounded())
    for changed in ({"use": 8}, {"seed": 1}, {"stream": 1}):
        for one, other in zip(rounded(**changed), rounded(), strict=True):
            assert not torch.equal(one.qdata, other.qdata)
            assert torch.equal(one.scale.view(torch.uint8), other.scale.view(torch.uint8))


@backends
def test_rounding_is_right_in_the_mean(backend, device):
    """Over uses the mean of what is decoded is the tensor, where it does not saturate: within 1/256 step and 5 σ."""
    x, uses = random_tensor(16, 64, device=device).float(), 48 if backend == "triton" else 256
    total = torch.zeros_like(x)
    for use in range(uses):
        made = ops.quantize(x, NVFP4_1X16, stochastic=StochasticRounding(3, 4, use), backend=backend)
        decoded = ops.dequantize(made.rowwise, dtype=torch.float32)
        total += decoded
    # Where a scale was rounded down, a block's largest values are more than 6 of it.
    scale = (made.rowwise.scale.float() * made.rowwise.global_scale).repeat_interleave(16, 1)
    x = x.clamp(-6 * scale, 6 * scale)
    error = (total / uses - x) / (2 * scale)
    assert error.abs().max() < 0.5 * 5 / uses**0.5 + 1 / 128
    assert error.mean().abs() < 0.5 * 5 / (uses * x.numel()) ** 0.5 + 1 / 256
    nearest = ops.dequantize(ops.quantize(x, NVFP4_1X16, backend=backend).rowwise, dtype=torch.float32)
    assert (total / uses - x).norm() < (nearest - x).norm()


# --- a part has the bits of the whole ---------------------------------------------------------------------------------


@backends
def test_amaxes_lie_in_memory_of_their_own(backend, device):
    """As compilers hold them to: an amax behind another one is not aligned as an allocation is."""
    amaxes = hadamard_amax_bits_op(
        random_tensor(40, 64, device=device), hadamard_number(True), None, False, ops.get_backend(backend)
    )
    assert all(amax.storage_offset() == 0 for amax in amaxes)
    assert len({amax.untyped_storage().data_ptr() for amax in amaxes}) == 2


def _amaxes(x):
    transformed = hadamard_transform(x, hadamard_number(True))
    return x.float().abs().max(), transformed.float().abs().max()


def _columnwise_part(part, rounding: StochasticRounding, amaxes, backend: str) -> Operand:
    options = {"rowwise": False, "columnwise": True, "hadamard": True, "tensor_amax": amaxes, "backend": backend}
    return ops.quantize(part, NVFP4_1X16, stochastic=rounding, **options).columnwise


@backends
def test_parts_of_the_rows_have_the_bits_of_the_whole(backend, device):
    x = random_tensor(80, 70, device=device)
    whole = ops.quantize(x, NVFP4_1X16, columnwise=True, hadamard=True, stochastic=ROUNDING, backend=backend)
    amaxes, chunks = _amaxes(x), 5
    for first, end in ((0, 32), (32, 48), (48, 80)):
        part = x[first:end]
        rowwise = ROUNDING._replace(start=(first, 0))
        made = ops.quantize(part, NVFP4_1X16, stochastic=rowwise, tensor_amax=amaxes[0], backend=backend).rowwise
        _same((made,), (_slice(whole.rowwise, slice(first, end), slice(None)),))
        columnwise = ROUNDING._replace(stream=0, start=(0, first // 16), grid=chunks)
        # One more than 2^32 - 1.
        made = _columnwise_part(part, columnwise._replace(stream=2**32 - 1), amaxes, backend)
        _same((made,), (_slice(whole.columnwise, slice(None), slice(first, end)),))


@backends
def test_parts_of_the_columns_have_the_bits_of_the_whole(backend, device):
    x = random_tensor(33, 96, device=device)
    whole = ops.quantize(x, NVFP4_1X16, columnwise=True, hadamard=True, stochastic=ROUNDING, backend=backend)
    amaxes = _amaxes(x)
    for first, end in ((0, 16), (16, 64), (64, 96)):
        part = x[:, first:end]
        rowwise = ROUNDING._replace(start=(0, first // 16), grid=6)
        made = ops.quantize(part, NVFP4_1X16, stochastic=rowwise, tensor_amax=amaxes[0], backend=backend).rowwise
        _same((made,), (_slice(whole.rowwise, slice(None), slice(first, end)),))
        made = _columnwise_part(part, ROUNDING._replace(start=(first, 0)), amaxes, backend)
        _same((made,), (_slice(whole.columnwise, slice(first, end), slice(None)),))


def _slice(copy: Operand, rows: slice, columns: slice) -> Operand:
    def over(length: int) -> slice:
        return slice(*(None if end is None else end // length for end in (columns.start, columns.stop)))

    return copy._replace(qdata=copy.qdata[rows, over(2)].contiguous(), scale=copy.scale[rows, over(16)].contiguous())


@backends
def test_each_group_has_the_bits_that_it_has_by_itself(backend, device):
    x, ends = random_tensor(80, 64, device=device), [0, 20, 20, 53, 70]
    amaxes = _amaxes(x)
    groups = torch.tensor(ends, dtype=torch.int32, device=device)
    given = {"columnwise": True, "hadamard": True, "tensor_amax": amaxes, "backend": backend}
    rounding = ROUNDING._replace(expert=2)
    made = ops.quantize(x, NVFP4_1X16, groups=groups, stochastic=rounding, **given)
    first, padded = 0, 0
    for group, end in enumerate(ends):
        part = x[first:end]
        alone = torch.tensor([end - first], dtype=torch.int32, device=device)
        own = rounding._replace(expert=2 + group)
        by_itself = ops.quantize(part, NVFP4_1X16, groups=alone, stochastic=own, **given)
        width = -(-(end - first) // 16) * 16
        _same((by_itself.rowwise,), (_slice(made.rowwise, slice(first, end), slice(None)),))
        of_group = _slice(made.columnwise, slice(None), slice(padded, padded + width))
        _same((_slice(by_itself.columnwise, slice(None), slice(0, width)),), (of_group,))
        first, padded = end, padded + width


# --- refusals ---------------------------------------------------------------------------------------------------------

X = torch.randn(32, 32)
REFUSED = {
    "fp8 transformed": (
        lambda: ops.quantize(X, FP8_1X128, columnwise=True, hadamard=True),
        "hadamard is for nvfp4_1x16",
    ),
    "fp8 rounded": (lambda: ops.quantize(X, FP8_1X128, stochastic=ROUNDING), "stochastic is for nvfp4_1x16"),
    "square": (lambda: ops.quantize(X, NVFP4_16X16, stochastic=ROUNDING), "stochastic is for nvfp4_1x16"),
    "rowwise": (lambda: ops.quantize(X, NVFP4_1X16, hadamard=True), "not asked for"),
    "three dims": (lambda: ops.quantize(X[None], NVFP4_1X16, stochastic=ROUNDING), r"must be \[M, K\]"),
    "both copies of a part": (
        lambda: ops.quantize(X, NVFP4_1X16, columnwise=True, stochastic=ROUNDING._replace(start=(16, 0))),
        "one after the other",
    ),
    "one amax": (
        lambda: ops.quantize(X, NVFP4_1X16, columnwise=True, hadamard=True, tensor_amax=X.max()),
        "tensor_amax must be two",
    ),
    "two amaxes": (
        lambda: ops.quantize(X, NVFP4_1X16, stochastic=ROUNDING, tensor_amax=(X.max(), X.max())),
        "tensor_amax must be two",
    ),
    "two amaxes of a plain copy": (
        lambda: ops.quantize(X, NVFP4_1X16, tensor_amax=(X.max(), X.max())),
        "tensor_amax must be two",
    ),
    "no number": (lambda: ops.quantize(X, NVFP4_1X16, stochastic=StochasticRounding(-1, 0, 0)), "seed must be"),
}


@pytest.mark.parametrize("call, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
