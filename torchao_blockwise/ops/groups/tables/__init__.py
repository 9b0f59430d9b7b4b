"""Group tables: the positions of groups of tokens in the forms that kernels need; one launch for all steps of a layer.

    int32 [entries, 4]

    schedule along "k"     header, then an entry for each group           (group, its first block, its last and one, 0)
    schedules along "m"    one for each height of tiles; header, then an entry for each row of tiles
                                                       (group, the group's first row of tiles, its first token, its end)
    blocks                 an entry for all tokens, then one for each block       (first, live, end, 0)

    group 0: 5 tokens, 1: none, 2: 9; one token in no group; blocks and tiles of 8 tokens
        "k"      (3, 2, ..)   (2, 1, 3, 0)  (0, 0, 1, 0)  (1, 1, 1, 0)
        "m"      (4, ..)      (0, 0, 0, 5)  (2, 1, 5, 14) (2, 1, 5, 14) (-1, 3, 14, 15)
        blocks   (0, 14, 15)  (0, 5, 5)     (5, 14, 14)   (13, 14, 14)  (14, 14, 15)

Persistent programs of a grouped GEMM compute tiles in the order of a schedule. Along "k", the header contains the
number of groups, and of those with tokens. Longer groups come before shorter ones, so that the last tiles of programs
are short. If gradients are accumulated, empty groups are skipped. Along "m", the header contains the number of entries.
There, the first tile of a group starts up to 3 tokens before the group, because TMA copies the f32 scales of tokens
only from multiples of 16 bytes (otherwise, it is an illegal instruction on an H200). The tokens after the last group
are another group, -1.

Kernels that quantize read the table of blocks (ops/device/groups.py): each group starts a block.

Without tables, each producer and consumer of a GEMM would read and sum all ends for each tile. Tables depend only on
the ends and the number of tokens, so layers compute them once, and save them for backward. A cache with the identity of
the ends as its key would be stale if a part of a CUDA graph is replayed. Invalid ends are clamped, as everywhere, so
that no entry leads outside the tensors.
"""

from __future__ import annotations

import torch

from torchao_blockwise.formats import BlockFormat, Groups, get_format
from torchao_blockwise.ops.backend import Backend, triton_and_reference
from torchao_blockwise.ops.groups.ends import check_group_ends, check_row_blocks
from torchao_blockwise.ops.groups.tables import reference
from torchao_blockwise.ops.groups.tables.layout import FIELDS, layout_of
from torchao_blockwise.ops.registry import Operation


def make_groups(
    ends: torch.Tensor, tokens: int, fmt: BlockFormat | str, *, backend: Backend | str | None = None
) -> Groups:
    """Return groups of `tokens` tokens, with tables of their positions, for all operations on these tokens.

    With only the ends, each operation computes the tables that it needs, in another launch.
    ends: int32 [E], cumulative, on the tokens' device, as in `quantize`.
    fmt: the format of the tokens, fp8_1x128 or nvfp4_1x16.
    Tables are int32 [entries, 4] on that device, which only kernels read. The number of entries depends on `tokens` and
    E. If the values of the ends change, the tables must be computed again.
    Raises TypeError for a dtype, ValueError for invalid shapes, ends, format or backend.
    """
    fmt = get_format(fmt)
    check_row_blocks("make_groups", fmt)
    return Groups(ends, group_tables_op(ends, tokens, fmt, backend))


def _fake(ends: torch.Tensor, tokens: int, fmt: BlockFormat) -> torch.Tensor:
    return ends.new_empty((layout_of(tokens, ends.shape[0], fmt.block[1]).length, FIELDS))


group_tables_op = Operation(
    "group_tables(Tensor ends, SymInt tokens, str fmt, str backend) -> Tensor",
    table=triton_and_reference(f"{__name__}.kernels_triton", reference.group_tables),
    fake=_fake,
    check=lambda ends, tokens, fmt: check_group_ends("make_groups", ends, tokens, ends.device),
)
