"""Tables of addresses: rows become programs, and the same rows are the same table."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")


def test_a_table_is_found_again():
    from torchao_blockwise.ops.device import tables

    cpu = torch.device("cpu")
    rows = [(2, 11, 12), (0, 13, 14), (3, 15, 16)]
    table = tables.make_table(rows, cpu)
    assert table.tensor.tolist() == [[0, 11, 12], [2, 15, 16]] and (table.rows, table.programs) == (2, 5)
    assert tables.make_table(iter(rows), cpu).tensor is table.tensor
    assert tables.make_table([(2, 11, 12), (3, 15, 17)], cpu).tensor is not table.tensor
    assert tables.make_table([(0, 1, 2)], cpu) is None
    for i in range(2 * tables._MAX_TABLES):
        tables.make_table([(1, i)], cpu)
    assert len(tables._tables) == tables._MAX_TABLES
