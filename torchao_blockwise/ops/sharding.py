"""When a sharded tensor can be quantized shard by shard, and how the parts of an operand are placed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from torchao_blockwise.formats import BlockFormat, Operand

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# A DTensorSpec. Rules get it in the place of each tensor, in operands too.
Spec: TypeAlias = Any
# (placements of what is returned, of each tensor argument): an operation may run on shards that lie so.
Rules: TypeAlias = "list[tuple[list[Placement], list[Placement | None]]]"


def shards_on_blocks(x: Spec, dim: int, fmt: BlockFormat, columnwise: bool) -> bool:
    """Whether cutting the DTensorSpec `x` evenly on `dim` over its mesh cuts no block.

    Leading dims hold independent matrices; of the last two, blocks span fmt.block, swapped for a columnwise copy.
    """
    ndim = len(x.shape)
    if dim < ndim - 2:
        return True
    block = fmt.block[::-1] if columnwise else fmt.block
    length = block[dim - (ndim - 2)]
    # Packed elements share a byte along the dim that is contiguous in the copy.
    if dim == (ndim - 2 if columnwise else ndim - 1):
        length = max(length, fmt.element.per_byte)
    return x.shape[dim] % (length * x.mesh.size()) == 0


def placements_of(x: Operand, qdata: Placement, scale: Placement) -> list[Placement | None]:
    """The placements of an operand's tensors, as a DTensor rule gives them.

    A global scale is on every rank, those of matrices where these are.
    """
    from torch.distributed.tensor import Replicate

    of_tensor: Placement | None = None
    if x.global_scale is not None:
        is_split = any(qdata.is_shard(dim) for dim in range(len(x.global_scale.shape)))
        of_tensor = qdata if is_split else Replicate()
    return [qdata, scale, of_tensor]
