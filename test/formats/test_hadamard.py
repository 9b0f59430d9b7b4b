"""The random Hadamard transform: an orthogonal matrix, in the order of sums that is specified."""

from __future__ import annotations

import pytest
import torch

from torchao_blockwise.formats import DEFAULT_SIGNS, hadamard_number, hadamard_transform


def _matrix(signs) -> torch.Tensor:
    h = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)], dtype=torch.float64)
    return torch.tensor(signs, dtype=torch.float64).diag() @ h / 4


@pytest.mark.parametrize("signs", (DEFAULT_SIGNS, (1,) * 16, (-1, 1) * 8))
def test_it_is_the_product_with_the_matrix(signs):
    # Small integers: every sum is exact.
    x = torch.randint(-64, 64, (48, 5)).float()
    y = hadamard_transform(x, hadamard_number(signs)).double()
    wanted = torch.cat([(chunk.double().T @ _matrix(signs)).T for chunk in x.split(16)])
    assert torch.equal(y, wanted)


def test_products_stay_what_they_are():
    x, dy = torch.randint(-9, 9, (37, 6)).float(), torch.randint(-9, 9, (37, 4)).float()
    number = hadamard_number(True)
    product = hadamard_transform(x, number).T @ hadamard_transform(dy, number)
    assert hadamard_transform(x, number).shape == (48, 6)
    assert torch.allclose(product, x.T @ dy, atol=1e-3)


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
