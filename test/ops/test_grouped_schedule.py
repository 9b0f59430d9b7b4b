"""Schedules of grouped products, by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from torchao_blockwise.formats import FP8_1X128
from torchao_blockwise.ops.groups import clamped_ends, padded_tokens

schedule = pytest.importorskip("torchao_blockwise.ops.grouped_matmul.schedule")


def groups_of(group_ends: torch.Tensor, tokens: int) -> list[tuple[int, int]]:
    ends = clamped_ends(group_ends, tokens).tolist()
    return list(zip([0, *ends], ends))


def check_schedules(group_ends, tokens: int, device: str):
    """Against a loop over the groups."""
    groups = groups_of(group_ends, tokens)
    group_ends = group_ends.to(device)
    for tile in (64, 256):
        wanted = []
        for g, (start, end) in [*enumerate(groups), (-1, (groups[-1][1], tokens))]:
            # Scales are copied from multiples of 16 bytes on.
            tiles = -(-(end - start // 4 * 4) // tile) if end > start else 0
            wanted += [[g, len(wanted), start, end]] * tiles
        found = schedule.schedule_rows(group_ends, tokens, tile).tolist()
        assert found[: 1 + len(wanted)] == [[len(wanted), 0, 0, 0], *wanted]
    block, first, wanted = FP8_1X128.block[1], 0, []
    # All that is known of the tokens, and with room behind the last group.
    padded = padded_tokens(tokens, len(groups), block) + block
    for g, (start, end) in enumerate(groups_of(group_ends, padded)):
        blocks = -(-(end - start) // block)
        wanted.append((-blocks, [g, *(min(n, padded // block) for n in (first, first + blocks)), 0]))
        first += blocks
    wanted.sort(key=lambda entry: entry[0])
    for empty in (True, False):
        entries = [entry for length, entry in wanted if empty or length]
        found = schedule.schedule_groups(group_ends, padded, block, empty).tolist()
        assert found[: 1 + len(entries)] == [[len(entries), 0, 0, 0], *entries]


@pytest.mark.parametrize(
    ("sizes", "rest"),
    (
        ((70, 1, 200, 65), 0),
        ((256, 128), 0),
        ((0, 130, 0, 0, 64, 0), 0),
        ((33, 0, 129), 100),
        ((0, 0), 70),
        ((257,), 1),
        ((0, 1), 0),
        ((5, 400, 60, 140), 0),
    ),
    ids=str,
)
def test_schedules(device, sizes, rest):
    check_schedules(torch.tensor(sizes).cumsum(0).int(), sum(sizes) + rest, device)


@pytest.mark.parametrize("ends", [(200, 100, 300), (-5, 130, 131), (60, 2**31 - 1, 0), (-(2**31), -1, -7)], ids=str)
def test_malformed_ends_are_clamped(device, ends):
    check_schedules(torch.tensor(ends, dtype=torch.int32), 300, device)


@pytest.mark.parametrize("experts", [1, 2, 37])
def test_schedules_of_random_sizes(device, experts):
    sizes = torch.randint(0, 400, (experts,), generator=torch.Generator().manual_seed(experts))
    check_schedules(sizes.cumsum(0).int(), int(sizes.sum()) + 77, device)


def test_one_long_group_fills_several_chunks_of_its_schedule(device):
    check_schedules(torch.tensor([1, 40_000], dtype=torch.int32), 40_001, device)


@pytest.mark.gpu
def test_schedules_of_many_groups(device):
    sizes = torch.randint(0, 400, (511,), generator=torch.Generator().manual_seed(0))
    check_schedules(sizes.cumsum(0).int(), int(sizes.sum()) + 77, device)
