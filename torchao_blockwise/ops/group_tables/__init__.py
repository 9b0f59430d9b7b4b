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

Schedules lead persistent programs of a grouped product, which take the tiles in turn. The header along "k" holds how
many groups there are, and how many have tokens: longer groups come before shorter ones, so what programs have at the
end, when others have none, is short, and where products are added, empty groups are left out. Along "m" it holds how
many entries follow. There a group's first tile begins up to 3 tokens before the group: the copy engine moves the
tokens' scales, f32, from multiples of 16 bytes on only (others are an illegal instruction on an H200). The tokens of no
group are one group behind the last, -1.

Blocks (ops/triton_group_blocks.py) lead what quantises: each group starts one.

Without tables, each producer and consumer of a product would read all ends and sum them up for each tile. All depend on
the ends and on the number of tokens alone, so layers make them once. Ends that decrease or lie outside the tokens are
clamped as everywhere: no entry leads outside the tensors.
"""

from __future__ import annotations

import torch

from torchao_blockwise.formats import BlockFormat, get_format
from torchao_blockwise.ops.backend import Backend, get_backend
from torchao_blockwise.ops.fused import pick_kernel
from torchao_blockwise.ops.group_tables import reference
from torchao_blockwise.ops.group_tables.layout import FIELDS, layout_of
from torchao_blockwise.ops.groups import check_group_ends, check_row_blocks
from torchao_blockwise.ops.library import define_op


def group_tables(
    group_ends: torch.Tensor, tokens: int, fmt: BlockFormat | str, *, backend: Backend | str | None = None
) -> torch.Tensor:
    """Tables of where groups lie among `tokens` tokens, which operations on them take as `group_tables`.

    Each of these operations makes what it needs of them itself, in a launch of its own, unless it is given them.
    group_ends: int32 [E], cumulative, on the tokens' device, as in `grouped_quantize`.
    fmt: what the tokens are quantised to, of one-row blocks, fp8_1x128 | nvfp4_1x16.
    Returns int32 [entries, 4] on that device, for kernels alone to read; how many entries there are depends on `tokens`
    and E. It belongs to these values of the ends: make it anew where they change.
    Raises TypeError for a dtype, ValueError for shapes, ends, a format or backend that does not exist.
    """
    fmt = get_format(fmt)
    check_row_blocks("group_tables", fmt)
    return group_tables_op(group_ends, tokens, fmt.name, get_backend(backend).value)


def _check(group_ends, tokens):
    check_group_ends("group_tables", group_ends, tokens, group_ends.device)


def _group_tables(group_ends, tokens, format, backend):
    _check(group_ends, tokens)
    block = get_format(format).block[1]
    if pick_kernel("group_tables", group_ends, backend, quantizes=False) is not Backend.TRITON:
        return reference.group_tables(group_ends, tokens, block)
    from torchao_blockwise.ops.group_tables import kernels_triton as triton

    return triton.group_tables(group_ends, tokens, block)


def _group_tables_fake(group_ends, tokens, format, backend):
    _check(group_ends, tokens)
    length = layout_of(tokens, group_ends.shape[0], get_format(format).block[1]).length
    return group_ends.new_empty((length, FIELDS))


group_tables_op = define_op(
    "group_tables(Tensor group_ends, SymInt tokens, str format, str backend) -> Tensor",
    _group_tables,
    _group_tables_fake,
)
