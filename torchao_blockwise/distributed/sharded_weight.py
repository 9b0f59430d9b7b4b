"""A master weight that FSDP2 shards: its blocks in the buffer of its group, and the cast of this rank's part.

A shard of dim 0 is a flat range of the weight, whatever blocks it cuts, and all such shards go through one call. A
shard of another dim is not: it is quantised as a tensor of its own, its frame, begun at a block border by zeros, whose
blocks are a part of the weight's grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from torchao_blockwise import _compat_fsdp, ops
from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.partial_cast import CODES, ENTRIES, block_count, partial_block_amax, partial_cast_
from torchao_blockwise.tensors import MasterWeightTensor
from torchao_blockwise.tensors.fsdp import ShardLayout, WeightShard, is_current, set_shard


class Recipe(NamedTuple):
    """What weights must have in common to be quantised by one call. dtype: what values are rounded to first."""

    fmt: BlockFormat
    power_of_2_scales: bool
    dtype: torch.dtype
    backend: ops.Backend


class ShardedWeight:
    """One weight of a shard group: its layout, where its blocks begin in the group's buffer, and what it sends."""

    def __init__(self, parameter: _compat_fsdp.FsdpParameter):
        self.parameter = parameter
        self.first_block = 0
        master = self.master
        modules = parameter.modules
        needed_whole = len(modules) > 1 and not all(isinstance(module, nn.Linear) for module in modules)
        self.layout = ShardLayout(
            name=parameter.name,
            shape=parameter.shape,
            dtype=parameter.dtype,
            dim=parameter.dim,
            rank=parameter.rank,
            ranks=parameter.ranks,
            config=master.config,
            quantized=not needed_whole,
        )
        self._dtype = master.dtype
        # Flat index in the weight of the first element of a shard of dim 0.
        self.start = self.layout.start * torch.Size(self.layout.shape[1:]).numel()
        self.shard = WeightShard(self.layout)
        if self.layout.quantized:
            self._allocate()

    def _allocate(self) -> None:
        device = self.parameter.device
        # Zeros, because the padding of a small shard travels too.
        payload = torch.zeros(self.layout.payload_shape, dtype=torch.uint8, device=device)
        self.shard.payload = payload
        # Without the padding: flat for a shard of dim 0, and shards of others have none.
        self.own_payload = payload[: self.layout.local_shape[0]].view(-1) if self.layout.dim == 0 else payload
        self.renew_scales()

    def renew_scales(self) -> None:
        """Make new scales to write to: gathered weights hold the old ones."""
        fmt, device = self.fmt, self.parameter.device
        shape = fmt.scale_shape(*self.layout.shape)
        self.scales = torch.empty(self.blocks, dtype=fmt.scale_dtype, device=device)
        self.shard.scale = self.scales[: torch.Size(shape).numel()].view(shape)
        if fmt.has_global_scale:
            self.shard.global_scale = torch.empty((), dtype=torch.float32, device=device)

    @property
    def fmt(self) -> BlockFormat:
        return self.layout.config.weight_format

    @property
    def recipe(self) -> Recipe:
        config = self.layout.config
        backend = ops.casting_backend(config.backend)
        return Recipe(config.weight_format, config.power_of_2_scales, self.layout.dtype, backend)

    @property
    def blocks(self) -> int:
        """Of this weight in the buffer; a last one for what other ranks hold of a tensor that has a global scale."""
        return block_count(self.layout.shape, self.fmt) + bool(self.split_groups)

    @property
    def split_groups(self) -> tuple:
        return self.parameter.split_groups if self.fmt.has_global_scale else ()

    @property
    def master(self) -> MasterWeightTensor:
        return self.parameter.local  # type: ignore[return-value]

    @property
    def is_current(self) -> bool:
        """Whether the parameter still is what buffers and calls were laid out for."""
        master = self.master
        return (
            isinstance(master, MasterWeightTensor)
            and master.dtype == self._dtype
            and master.config == self.layout.config
        )

    @property
    def description(self) -> str:
        """What must be the same on all ranks."""
        layout = self.layout
        gathered = layout.config if layout.quantized else "high precision"
        return (
            f"{layout.name} {list(layout.shape)} {self._dtype}, dim {layout.dim} over {layout.ranks} ranks, gathered "
            f"from {layout.dtype} as {gathered}"
        )

    def frame(self, values: torch.Tensor) -> tuple[torch.Tensor, int]:
        """(this rank's values behind the zeros that begin their first block, how many along the sharded dim)."""
        border = self.layout.start % self._block()
        if not border:
            return values.contiguous(), 0
        dims_behind = len(self.layout.shape) - 1 - self.layout.dim
        return F.pad(values, [0, 0] * dims_behind + [border, 0]), border

    def part_of_grid(self, of_blocks: torch.Tensor) -> torch.Tensor:
        """The part that the frame covers of a buffer with a value a block: a view."""
        layout, block = self.layout, self._block()
        *batch, rows, columns = layout.shape
        grid = of_blocks[self.first_block :][: block_count(layout.shape, self.fmt)].view(
            *batch, *self.fmt.grid(rows, columns)
        )
        first, end = layout.start // block, layout.start + layout.local_shape[layout.dim]
        return grid.narrow(layout.dim, first, (end + block - 1) // block - first)

    def _block(self) -> int:
        """Elements of a block along the sharded dim."""
        rows, columns = self.fmt.block
        return {-1: columns, -2: rows}.get(self.layout.dim - len(self.layout.shape), 1)

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the values can be seen to be others than those of the payload."""
        if not is_current(self.master.hp, self.shard):
            raise RuntimeError(
                f"weights_unchanged: {self.layout.name} was changed inside the scope, which keeps quantized shards of "
                "the old values; leave the scope before optimizer steps, loads and edits"
            )

    def publish(self, ready: torch.cuda.Event | None) -> None:
        """Let gathers of the parameter find the payload."""
        self.shard.ready = ready
        set_shard(self.master.hp, self.shard)


# A weight, and this rank's values of it on the device that computes.
Part = tuple[ShardedWeight, torch.Tensor]


def add_amaxes(parts: Sequence[Part], recipe: Recipe, bits: torch.Tensor) -> None:
    """Write the amaxes of what this rank holds to each weight's part of `bits`, which is zeros before."""
    flat, framed = _by_dim(parts)
    options: dict = {"dtype": recipe.dtype, "backend": recipe.backend}
    if flat:
        partial_block_amax(
            [values.reshape(-1) for _, values in flat],
            [weight.start for weight, _ in flat],
            [weight.layout.shape for weight, _ in flat],
            recipe.fmt,
            out=bits,
            first_blocks=[weight.first_block for weight, _ in flat],
            **options,
        )
    for weight, values in framed:
        frame, _ = weight.frame(values)
        part = weight.part_of_grid(bits)
        part.copy_(partial_block_amax([frame.view(-1)], [0], [frame.shape], recipe.fmt, **options).view(part.shape))


def cast(parts: Sequence[Part], recipe: Recipe, encode: torch.Tensor) -> None:
    """Write each weight's payload: this rank's values times the `encode` of their blocks, rounded to elements."""
    flat, framed = _by_dim(parts)
    options: dict = {"dtype": recipe.dtype, "backend": recipe.backend}
    for into in (ENTRIES, CODES):
        some = [(weight, values) for weight, values in flat if weight.layout.packs == (into == ENTRIES)]
        if some:
            partial_cast_(
                [weight.own_payload for weight, _ in some],
                [values.reshape(-1) for _, values in some],
                [weight.start for weight, _ in some],
                [weight.layout.shape for weight, _ in some],
                encode,
                recipe.fmt,
                into=into,
                first_blocks=[weight.first_block for weight, _ in some],
                **options,
            )
    for weight, values in framed:
        layout, payload = weight.layout, weight.own_payload
        frame, border = weight.frame(values)
        codes = torch.empty_like(frame, dtype=torch.uint8)
        factors = weight.part_of_grid(encode).clone(memory_format=torch.contiguous_format).view(-1)
        partial_cast_(
            [codes.view(-1)], [frame.view(-1)], [0], [frame.shape], factors, recipe.fmt, into=CODES, **options
        )
        payload.copy_(codes.narrow(layout.dim, border, payload.shape[layout.dim]))


def _by_dim(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """(parts sharded on dim 0, parts sharded on another dim)."""
    return [part for part in parts if part[0].layout.dim == 0], [part for part in parts if part[0].layout.dim]
