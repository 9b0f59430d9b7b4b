"""Merge: bytes that two shards share take a nibble of each; which bytes hold a shard."""

from __future__ import annotations

import pytest
import torch
from shard_cases import backends, payload, quantize

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_128X128, NVFP4_16X16
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor


@backends
def test_merge_leaves_what_no_shard_covers(backend, device):
    target = torch.full((2, 3), 0x1B, dtype=torch.uint8, device=device)  # [2, 5]
    pieces = [torch.tensor([0x76, 0x54], dtype=torch.uint8, device=device)]
    # Elements 1, 2 of the first row: high nibble of byte 0, low nibble of byte 1.
    ops.merge_shards_([target], [pieces], [[1]], [[2]], [5], NVFP4_16X16, backend=backend)
    assert target.tolist() == [[0x7B, 0x14, 0x1B], [0x1B] * 3]


@backends
def test_merge_of_single_elements(backend, device):
    """Every byte is two ranks' or a row's end; gathered in any order, with empty ranks between, padded to a length."""
    w = random_tensor(3, 5, device=device)
    q = quantize(w, NVFP4_16X16, torch.float32)
    codes = NVFP4_16X16.element.unpack(q.qdata, 5).flatten().tolist()
    order = [7, 0, 14, 3, 1, 2, 4, 5, 6, 13, 12, 8, 9, 10, 11]
    pieces, starts, lengths = [], [], []
    for element in order:
        odd = element % 5 % 2
        byte = codes[element] << 4 * odd | (0xF << 4 * (1 - odd))
        byte &= 0xF if element % 5 == 4 else 0xFF
        pieces.append(torch.tensor([byte, 0xEE], dtype=torch.uint8, device=device))
        starts.append(element)
        lengths.append(1)
    pieces.insert(4, torch.empty(0, dtype=torch.uint8, device=device))
    starts.insert(4, 2)
    lengths.insert(4, 0)
    target = payload(NVFP4_16X16, (3, 5), device=device)
    ops.merge_shards_([target], [pieces], [starts], [lengths], [5], NVFP4_16X16, backend=backend)
    assert_bitwise_equal(target, q.qdata)


def test_no_byte_is_written_twice():
    """Programs of one launch run in any order, so a byte that two shards share is one program's alone."""
    triton = pytest.importorskip("torchao_blockwise.ops.shards.merge.kernels_triton")
    target = payload(NVFP4_16X16, (5, 7))
    starts, lengths = [0, 3, 4, 4, 12, 13], [3, 1, 0, 8, 1, 22]
    pieces = [torch.zeros(14, dtype=torch.uint8) for _ in starts]
    written = []
    for _, _, place, entries, first_mask, *_ in triton._merge_rows(target, pieces, starts, lengths, 7, NVFP4_16X16):
        first = place - target.data_ptr()
        written += range(first + (first_mask == 0), first + entries)
    assert sorted(written) == list(range(target.numel()))


@pytest.mark.parametrize(
    ("fmt", "start", "n", "columns", "expected"),
    (
        (FP8_128X128, 7, 9, 5, (7, 9)),
        (NVFP4_16X16, 0, 8, 4, (0, 4)),
        (NVFP4_16X16, 3, 6, 16, (1, 4)),
        (NVFP4_16X16, 3, 1, 16, (1, 1)),
        (NVFP4_16X16, 5, 5, 5, (3, 3)),
        (NVFP4_16X16, 4, 2, 5, (2, 2)),
        (NVFP4_16X16, 9, 0, 5, (0, 0)),
    ),
    ids=str,
)
def test_shard_entries(fmt, start, n, columns, expected):
    assert ops.shard_entries(start, n, columns, fmt) == expected


@pytest.mark.parametrize("backend", ("auto", "reference", "triton"))
def test_nothing_to_merge_is_no_error(backend):
    assert ops.merge_shards_([], [], [], [], [], "fp8_128x128", backend=backend) is None
