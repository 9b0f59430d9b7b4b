"""The random Hadamard transform: an orthogonal matrix, in the order of sums that is specified."""

import pytest
import torch
import torch.nn.functional as F

from torchao_blockwise.formats import DEFAULT_SIGNS, hadamard_number, hadamard_transform


@pytest.mark.parametrize("signs", (DEFAULT_SIGNS, (1,) * 16, (-1, 1) * 8))
def test_it_is_the_product_with_an_orthogonal_matrix(signs):
    h = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    matrix = torch.tensor(signs, dtype=torch.float32).diag() @ h / 4
    assert torch.equal(matrix.T @ matrix, torch.eye(16))
    # Small integers: every sum is exact. The last chunk is padded.
    x = torch.randint(-64, 64, (37, 5)).float()
    wanted = [matrix.T @ chunk for chunk in F.pad(x, (0, 0, 0, 11)).split(16)]
    assert torch.equal(hadamard_transform(x, hadamard_number(signs)), torch.cat(wanted))


def test_the_sums_are_those_of_butterflies_of_stride_1_2_4_8():
    x = torch.randn(16, 3) * torch.exp(4 * torch.randn(16, 3))
    values = [(sign * row).clone() for sign, row in zip(DEFAULT_SIGNS, x)]
    for stride in (1, 2, 4, 8):
        values = [
            values[i] + values[i + stride] if not i & stride else values[i - stride] - values[i] for i in range(16)
        ]
    assert torch.equal(hadamard_transform(x, hadamard_number(True)), 0.25 * torch.stack(values))
    assert hadamard_transform(x.bfloat16(), hadamard_number(True)).dtype is torch.bfloat16


@pytest.mark.parametrize("hadamard", ((1,) * 15, (2,) * 16, [0] * 16))
def test_other_signs_are_refused(hadamard):
    with pytest.raises(ValueError, match="16 signs of 1 and -1"):
        hadamard_number(hadamard)
