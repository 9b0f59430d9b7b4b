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


REFUSED = {
    "int64": (torch.tensor([1, 2]), TypeError, "op: group_ends must be int32, got torch.int64; use group_ends.int()"),
    "two dims": (
        int32([[1, 2]]),
        ValueError,
        r"op: group_ends must be \[E\] with at least one group, got shape \[1, 2\]",
    ),
    "a scalar": (int32(1), ValueError, r"got shape \[\]"),
    "no groups": (int32([]), ValueError, r"got shape \[0\]"),
    "strided": (int32([1, 1, 2, 2])[::2], ValueError, r"must be contiguous, got stride \(2,\); use .contiguous"),
    "elsewhere": (int32([1, 2]).to("meta"), ValueError, "must be on the tokens' device cpu, got meta; move it"),
    "negative": (
        int32([-1, 2]),
        ValueError,
        r"lie in \[0, 9\], the number of tokens, got group_ends\[0\] = -1 after 0",
    ),
    "decreasing": (int32([1, 5, 5, 4, 3]), ValueError, r"must not decrease .* got group_ends\[3\] = 4 after 5"),
    "beyond": (int32([1, 5, 10, 12]), ValueError, r"got group_ends\[2\] = 10 after 5; pass the cumulative sum"),
}


@pytest.mark.parametrize("group_ends, error, message", REFUSED.values(), ids=REFUSED)
def test_malformed_ends_are_refused(group_ends, error, message):
    with pytest.raises(error, match=message):
        check_group_ends("op", group_ends, 9, CPU)


def test_without_values_only_the_rest_is_checked():
    check_group_ends("op", int32([5, 4]).to("meta"), 3, torch.device("meta"))
    with pytest.raises(TypeError, match="must be int32"):
        check_group_ends("op", torch.tensor([5, 4], device="meta"), 3, torch.device("meta"))


def test_traces_with_symbolic_tokens():
    """The number of padded tokens follows the number of tokens, by one graph."""

    def pad(x, ends):
        return x.new_zeros(padded_tokens(x.shape[0], ends.shape[0], 16)), padded_ends(ends, x.shape[0], 16)

    traced = make_fx(pad, tracing_mode="symbolic")(torch.zeros(40), int32([3, 40]))
    for tokens in (40, 3, 100):
        zeros, ends = traced(torch.zeros(tokens), int32([3, tokens]))
        assert zeros.shape == (padded_tokens(tokens, 2, 16),)
        assert ends.tolist() == padded_ends(int32([3, tokens]), tokens, 16).tolist()
