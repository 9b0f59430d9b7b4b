"""Ends of groups: what padded groups look like, against one loop over the groups; refusals by name of the bad index."""

from __future__ import annotations

import pytest
import torch
from grouped_copies import int32
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from torchao_blockwise.ops.groups.ends import check_group_ends, clamped_ends, padded_ends, padded_rows, padded_tokens

CPU = torch.device("cpu")
GROUPS = {
    "one": ([5], 5),
    "empty ones": ([0, 0, 3, 3, 3, 20, 20], 20),
    "one token": ([0, 1, 1], 1),
    "whole blocks": ([16, 48, 64], 64),
    "ragged": ([7, 24, 57, 58], 58),
    "all to one": ([0, 0, 33, 33], 33),
    "tokens after the last": ([3, 9], 40),
    "all of them after the last": ([0, 0], 17),
    "no tokens": ([0, 0, 0], 0),
}
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


def test_traces_with_symbolic_tokens():
    """The number of padded tokens follows the number of tokens, by one graph."""

    def pad(x, ends):
        return x.new_zeros(padded_tokens(x.shape[0], ends.shape[0], 16)), padded_ends(ends, x.shape[0], 16)

    traced = make_fx(pad, tracing_mode="symbolic")(torch.zeros(40), int32([3, 40]))
    for tokens in (40, 3, 100):
        zeros, ends = traced(torch.zeros(tokens), int32([3, tokens]))
        assert zeros.shape == (padded_tokens(tokens, 2, 16),)
        assert ends.tolist() == padded_ends(int32([3, tokens]), tokens, 16).tolist()
