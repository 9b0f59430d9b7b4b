"""Transformed and stochastically rounded copies: what they are, and parts against the whole."""

import pytest
import torch
from quantize_cases import BOTH, ROUNDING, assert_same, backends

from torchao_blockwise import ops
from torchao_blockwise.formats import NVFP4_1X16, Operand, hadamard_number, hadamard_transform
from torchao_blockwise.testing import assert_operands_equal, random_tensor


def _quantize(x, **options):
    return ops.quantize(x, NVFP4_1X16, **{"columnwise": True} | options)


@backends
def test_a_transformed_copy_is_the_copy_of_the_transform(backend, device):
    x = random_tensor(50, 70, device=device)
    made = _quantize(x, hadamard=True, backend=backend)
    plain = _quantize(hadamard_transform(x, hadamard_number(True)), rowwise=False, backend="reference")
    assert_operands_equal(made.columnwise, plain.columnwise)
    assert_operands_equal(made.rowwise, ops.quantize(x, NVFP4_1X16, backend="reference").rowwise)
    assert made.rowwise.global_scale.item() != made.columnwise.global_scale.item()


@backends
def test_the_same_numbers_give_the_same_bits_and_other_uses_others(backend, device):
    x = random_tensor(64, 64, device=device)

    def rounded(**changed):
        return _quantize(x, stochastic=ROUNDING._replace(**changed), backend=backend)

    assert_same(rounded(), rounded())
    assert_same(rounded(use=torch.tensor(7, device=device)), rounded())
    for changed in ({"use": 8}, {"seed": 1}, {"stream": 1}):
        for one, other in zip(rounded(**changed), rounded(), strict=True):
            assert not torch.equal(one.qdata, other.qdata)
            assert torch.equal(one.scale.view(torch.uint8), other.scale.view(torch.uint8))


@backends
def test_zeros_behind_the_last_group_stay_zeros(backend, device):
    """A transform may make -0 of them."""
    ends = torch.tensor([16, 20], dtype=torch.int32, device=device)
    options = {"groups": ends, "hadamard": [-1] * 16, "backend": backend}
    made = _quantize(random_tensor(50, 40, device=device), **options).columnwise
    assert made.qdata[:, :16].any() and not made.qdata[:, 16:].any()


# --- a part of a tensor ---------------------------------------------------------------------------------

# Of x [80, 96]: rows and columns of each part.
PARTS = {"rows": ((0, 32), (32, 48), (48, 80)), "columns": ((0, 16), (16, 64), (64, 96))}


def _slice(copy: Operand, rows: slice, columns: slice) -> Operand:
    def over(length: int) -> slice:
        return slice(*(None if end is None else end // length for end in (columns.start, columns.stop)))

    return copy._replace(qdata=copy.qdata[rows, over(2)].contiguous(), scale=copy.scale[rows, over(16)].contiguous())


@backends
@pytest.mark.parametrize("along", PARTS)
def test_parts_have_the_bits_of_the_whole(along, backend, device):
    x, every = random_tensor(80, 96, device=device), slice(None)
    whole = _quantize(x, backend=backend, **BOTH)
    amaxes = x.abs().max().float(), hadamard_transform(x, hadamard_number(True)).abs().max().float()
    for first, end in PARTS[along]:
        # The place of a part in the whole rowwise copy [80, 96] and in the columnwise one [96, 80].
        part, inside, at, grid = x[first:end], (slice(first, end), every), (first, 0), None
        if along == "columns":
            part, inside, at, grid = x[:, first:end], (every, slice(first, end)), (0, first // 16), 96 // 16
        rounding = ROUNDING._replace(start=at, grid=grid)
        options = {"stochastic": rounding, "tensor_amax": amaxes[0], "backend": backend}
        made = ops.quantize(part, NVFP4_1X16, **options).rowwise
        assert_same((made,), (_slice(whole.rowwise, *inside),))
        at, grid = ((0, first // 16), 80 // 16) if along == "rows" else ((first, 0), None)
        # Its stream is one more.
        rounding = ROUNDING._replace(start=at, grid=grid)
        options = {"stochastic": rounding, "tensor_amax": amaxes, "hadamard": True, "backend": backend}
        assert_same((_quantize(part, rowwise=False, **options).columnwise,), (_slice(whole.columnwise, *inside[::-1]),))
