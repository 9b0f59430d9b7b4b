"""Group tables: where groups of tokens lie, in the forms that kernels ask for; one launch for all steps of a layer.

    int32 [entries, 4]

    schedule along "k"     header, then an entry for each group           (group, its first block, its last and one, 0)
    schedules along "m"    one for each height of tiles; header, then an entry for each row of tiles
                                                       (group, the group's first row of tiles, its first token, its end)
    blocks                 an entry for all tokens, then one for each block       (first, live, end, 0)

    group 0: 5 tokens, 1: none, 2: 9; one token in no group; blocks and tiles of 8 tokens
        "k"      (3, 2, ..)   (2, 1, 3, 0)  (0, 0, 1, 0)  (1, 1, 1, 0)
        "m"      (4, ..)      (0, 0, 0, 5)  (2, 1, 5, 14) (2, 1, 5, 14) (-1, 3, 14, 15)
        blocks   (0, 14, 15)  (0, 5, 5)     (5, 14, 14)   (13, 14, 14)  (14, 14, 15)

Schedules lead persistent programs of a grouped GEMM, which take the tiles in turn. The header along "k" holds how
many groups there are, and how many have tokens: longer groups come before shorter ones, so what programs have at the
end, when others have none, is short, and where sums are added, empty groups are left out. Along "m" it holds how
many entries follow. There a group's first tile begins up to 3 tokens before the group: the copy engine moves the
tokens' scales, f32, from multiples of 16 bytes on only (others are an illegal instruction on an H200). The tokens of no
group are one group behind the last, -1.

Blocks (ops/device/groups.py) lead what quantizes: each group starts one.

Without tables, each producer and consumer of a GEMM would read all ends and sum them up for each tile. All depend
only on the ends and on the number of tokens, so layers make them once, and save them for backward. They are no cache,
which would know them by the identity of the ends, and be stale where a CUDA graph is replayed in part. Ends that
decrease or lie outside the tokens are clamped as everywhere: no entry leads outside the tensors.
"""

from __future__ import annotations

import torch

from torchao_blockwise.formats import BlockFormat, Groups, get_format
from torchao_blockwise.ops.backend import Backend, Implementation, kernels
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
    table=[
        kernels(Backend.TRITON, f"{__name__}.kernels_triton:group_tables"),
        Implementation(Backend.REFERENCE, reference.group_tables),
    ],
    fake=_fake,
    check=lambda ends, tokens, fmt: check_group_ends("make_groups", ends, tokens, ends.device),
)
