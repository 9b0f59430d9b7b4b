"""Random bits for stochastic rounding. They depend on the position of the element, not on the launch that rounds it.

One call of Philox4x32-10 returns the 16 bytes for one 1×16 block: byte i of its little-endian words is for element i.

    key = seed (64 bits)      counter = (block, low word; block, high word; stream; use), 32 bits each

Blocks are numbered row by row in the whole tensor. So the bits are the same on any device, for any tile, and for a part
of the tensor whose position is given.
Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC'11).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchao_blockwise.formats.elements import constant

_WORD = 1 << 32
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
RANDOM_BITS = 8


class StochasticRounding(NamedTuple):
    """The random bits with which a copy in e2m1 is rounded.

    seed: 64 bits. stream: 32 bits, a different one for each tensor of a model; the columnwise copy of the same call
        uses the next one.
    use: how many times the stream was used before, 32 bits; a number, or an int64 scalar on the tensor's device.
    start: (row, block column) of this part in the block grid of the whole copy. grid: block columns of the whole copy,
        or None for those of the part. In a columnwise copy, rows are features and block columns run along the tokens.
    expert: for tokens in groups, the index of the first group's expert among all experts; each group then has its own
        grid, in which `start` counts.
    """

    seed: int
    stream: int
    use: int | torch.Tensor = 0
    start: tuple[int, int] = (0, 0)
    grid: int | None = None
    expert: int = 0


class Place(NamedTuple):
    """The position of a copy's blocks in the whole copy, as an argument of operations; see `StochasticRounding`.

    operand: number that is added to the stream. grid: -1 for that of the part.
    """

    operand: int = 0
    row: int = 0
    column: int = 0
    grid: int = -1


class RoundingBits(NamedTuple):
    """The random bits of both copies of one cast. key: a result of `key_of`."""

    key: torch.Tensor
    rowwise: Place = Place()
    columnwise: Place = Place(operand=1)


def key_of(rounding: StochasticRounding, device: torch.device) -> torch.Tensor:
    """Return (seed, stream, use, expert) as kernels read them: int64 [4] on `device`.

    Raises ValueError if a number has too many bits.
    """
    seed, stream, use, expert = *rounding[:3], rounding.expert
    counted = 0 if isinstance(use, torch.Tensor) else use
    numbers = {"seed": (seed, 64), "stream": (stream, 32), "use": (counted, 32), "expert": (expert, 32)}
    for name, (number, bits) in numbers.items():
        if not 0 <= number < 1 << bits:
            raise ValueError(f"stochastic: {name} must be from 0 to 2^{bits} - 1, got {number}")
    signed = seed - (1 << 64) if seed >> 63 else seed
    key = constant((signed, stream, counted, expert), torch.int64, device)
    if isinstance(use, torch.Tensor):
        key[2] = use
    return key


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the four words of Philox4x32-10 for a counter of four words and a key of two, all int64 in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) % _WORD, (k1 + _KEY_STEPS[1]) % _WORD
    return c0, c1, c2, c3


def _product(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (high, low) words of a product of words, computed in halves because int64 would overflow."""
    low, high = x * (factor & 0xFFFF), x * (factor >> 16)
    upper = (low >> 16) + high
    return upper >> 16, ((upper & 0xFFFF) << 16) | (low & 0xFFFF)


def block_bytes(block: torch.Tensor, key: torch.Tensor, operand: int) -> torch.Tensor:
    """Return the random bytes, uint8 [.., 16], of blocks [..], 64-bit numbers as int64. key: a result of `key_of`."""
    seed, stream, use, _ = key.unbind()
    counter = block & (_WORD - 1), (block >> 32) & (_WORD - 1), (stream + operand) % _WORD, use % _WORD
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (seed & (_WORD - 1), (seed >> 32) & (_WORD - 1)))), -1)
    shifts = torch.arange(0, 32, RANDOM_BITS, device=block.device)
    return ((words[..., None] >> shifts) & 0xFF).flatten(-2).to(torch.uint8)
