"""Ends of groups: how padded groups lie, against one loop over the groups. Refusals: test_refusals.py."""

from __future__ import annotations

import pytest
import torch
from grouped_copies import GROUPS, int32
from hypothesis import given, settings
from hypothesis import strategies as st

from torchao_blockwise.ops.groups.ends import check_group_ends, clamped_ends, padded_ends, padded_rows, padded_tokens

CPU = torch.device("cpu")
groups = pytest.mark.parametrize("ends, tokens", GROUPS.values(), ids=GROUPS)
blocks = pytest.mark.parametrize("block", (16, 128))


def check_padding(ends: list[int], tokens: int, block: int) -> None:
    rows, padded = [], []
    for start, end in zip([0, *ends], ends):
        rows += range(start, end)
        rows += [tokens] * (-len(rows) % block)
        padded.append(len(rows))
    size = padded_tokens(tokens, len(ends), block)
    assert size % block == 0 and len(rows) <= size < tokens + min(len(ends), tokens) * block + block
    got = padded_ends(int32(ends), tokens, block)
    assert got.dtype == torch.int32 and got.tolist() == padded
    assert padded_rows(int32(ends), tokens, block).tolist() == rows + [tokens] * (size - len(rows))


@blocks
@groups
def test_padding(ends, tokens, block):
    check_padding(ends, tokens, block)
    check_group_ends("op", int32(ends), tokens, CPU)


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=20), after=st.integers(0, 40))
def test_padding_of_any_sizes(sizes, after):
    check_padding(torch.tensor(sizes).cumsum(0).tolist(), sum(sizes) + after, 16)


def test_the_bound_is_reached():
    """By groups of one token each, and by as many groups as there are tokens."""
    assert padded_tokens(4, 4, 16) == padded_tokens(4, 300, 16) == 64
    assert padded_ends(int32([1, 2, 3, 4]), 4, 16).tolist() == [16, 32, 48, 64]


def test_malformed_ends_are_clamped():
    assert clamped_ends(int32([-3, 5, 2, 99, 7, -1]), 10).tolist() == [0, 5, 5, 10, 10, 10]
    assert clamped_ends(int32([-3, 5]), 0).tolist() == [0, 0]
    assert padded_ends(int32([-3, 5, 2, 99, 7]), 10, 16).tolist() == [0, 16, 16, 32, 32]
    rows = padded_rows(int32([-3, 5, 2, 99, 7]), 10, 16)
    assert rows[:5].tolist() == [0, 1, 2, 3, 4] and rows[16:21].tolist() == [5, 6, 7, 8, 9]
    assert rows.unique().tolist() == list(range(11))
