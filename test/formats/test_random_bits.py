"""Philox, the bytes of blocks, and rounding by them: known answers, and neighbors by each of the 256 bytes."""

from itertools import pairwise

import pytest
import torch

from torchao_blockwise.formats import E2M1, E2M1_VALUES, StochasticRounding, block_bytes, key_of, philox

CPU = torch.device("cpu")
# Random123's known answers of Philox4x32-10: (key, counter, words).
KNOWN = (
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 2, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize("key, counter, words", KNOWN)
def test_philox_gives_the_known_answers(key, counter, words):
    made = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(word) for word in made) == words


def test_a_block_s_bytes_are_the_words_in_little_endian_order():
    (seed0, seed1), counter, words = KNOWN[2]
    block, stream, use = counter[0] | counter[1] << 32, counter[2], counter[3]
    signed = block - 2**64 if block >> 63 else block
    key = key_of(StochasticRounding(seed0 | seed1 << 32, stream, use), CPU)
    made = block_bytes(torch.tensor([[signed]]), key, 0)
    assert bytes(made.flatten().tolist()) == b"".join(word.to_bytes(4, "little") for word in words)
    # The columnwise copy has the next stream.
    less = key_of(StochasticRounding(seed0 | seed1 << 32, stream - 1, use), CPU)
    assert torch.equal(block_bytes(torch.tensor([[signed]]), less, 1), made)


@pytest.mark.parametrize("numbers", ({"seed": -1}, {"seed": 2**64}, {"stream": 2**32}, {"use": -1}, {"use": 2**32},
                                     {"expert": 2**32}), ids=str)  # fmt: skip
def test_numbers_of_more_bits_are_refused(numbers):
    with pytest.raises(ValueError, match="must be from 0 to 2"):
        key_of(StochasticRounding(**{"seed": 0, "stream": 0, "use": 0, **numbers}), CPU)


def _decoded(y: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    return E2M1.decode(E2M1.encode_stochastically(y, random), y.shape[-1])


def test_rounding_takes_a_neighbor_with_the_probability_of_the_distance():
    """All 256 bytes once: the number of those that round up is what the formula says, whatever the value."""
    random = torch.arange(256, dtype=torch.uint8)
    steps = {low: high - low for low, high in pairwise(E2M1_VALUES)}
    for low, step in steps.items():
        for part in (0.0, 1 / 512, 1 / 256, 0.25, 0.3, 0.5, 0.75, 255 / 256, 0.999):
            v = low + part * step
            for sign in (1.0, -1.0):
                values = _decoded(torch.full((256,), sign * v), random)
                assert set(values.tolist()) <= {sign * low, sign * (low + step)}
                up = (values.abs() > low).sum().item()
                assert up == sum(part + u / 256 >= 1 for u in range(256)), (v, up)


def test_values_of_the_grid_never_move_and_large_ones_saturate():
    for u in (0, 1, 128, 255):
        y = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
        assert torch.equal(_decoded(y, torch.full_like(y, u, dtype=torch.uint8)), y)
        far = torch.tensor([6.1, 7.9, 1e30, float("inf"), -float("inf"), -9.0])
        assert _decoded(far, torch.full_like(far, u, dtype=torch.uint8)).tolist() == [6, 6, 6, 6, -6, -6]
    zeros = torch.tensor([float("nan"), -0.0])
    assert E2M1.encode_stochastically(zeros, torch.full((2,), 255, dtype=torch.uint8)).tolist() == [8 << 4]


def test_the_sum_is_rounded_where_an_integer_carry_would_not_be():
    """0.25 - 2^-26 and half a step are 0.5 in fp32, so the value goes up; the exact sum stays below."""
    y, random = torch.tensor([0.25 - 2**-26, -(0.25 - 2**-26)]), torch.full((2,), 128, dtype=torch.uint8)
    assert _decoded(y, random).tolist() == [0.5, -0.5]
    assert (y.double().abs() + 0.25 < 0.5).all()
