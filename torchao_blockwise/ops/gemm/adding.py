"""Products that are added to what is there: their table of backends, made from that of the products themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchao_blockwise.ops.backend import Implementation


def adding_rows(table: Sequence[Implementation], *last: object) -> list[Implementation]:
    """The table of an operation (out, *operands) -> out += product, from the table of (*operands, *last) -> product.

    A row named "module:function" has a kernel that adds, "module:add_function"; of another row what it gives is added.
    """

    def adding(row: Implementation) -> Implementation:
        def add(out: torch.Tensor, *operands: object) -> None:
            out.add_(row.function(*operands, *last))

        def why_not(out: torch.Tensor, *operands: object) -> str | None:
            return row.reason((*operands, *last))

        run = row.run.replace(":", ":add_") if isinstance(row.run, str) else add
        return row._replace(run=run, why_not=why_not)

    return [adding(row) for row in table]
