"""The random Hadamard transform: an orthogonal matrix, in the order of sums that is specified."""

import pytest
import torch
import torch.nn.functional as F

from torchao_blockwise.formats import DEFAULT_SIGNS, hadamard_number, hadamard_transform


@pytest.mark.parametrize("signs", (DEFAULT_SIGNS, (1,) * 16, (-1, 1) * 8))
def test_the_sums_are_those_of_butterflies_of_stride_1_2_4_8(signs):
    """Those of the product with diag(signs) · H16 / 4, in chunks of 16 rows of which the last is padded."""
    x = torch.randn(37, 3) * torch.exp(4 * torch.randn(37, 3))
    chunks = []
    for chunk in F.pad(x, (0, 0, 0, 11)).split(16):
        values = [(sign * row).clone() for sign, row in zip(signs, chunk)]
        for stride in (1, 2, 4, 8):
            values = [
                values[i] + values[i + stride] if not i & stride else values[i - stride] - values[i] for i in range(16)
            ]
        chunks.append(0.25 * torch.stack(values))
    assert torch.equal(hadamard_transform(x, hadamard_number(signs)), torch.cat(chunks))
    assert hadamard_transform(x.bfloat16(), hadamard_number(True)).dtype is torch.bfloat16
