"""A master weight that FSDP2 shards: its part for the cast, and the payload that its rank sends."""

from __future__ import annotations

import torch
from torch import nn

from torchao_blockwise import ops
from torchao_blockwise._compat import torch_fsdp
from torchao_blockwise.distributed.cast import Part, Recipe
from torchao_blockwise.ops.shards.flat import CODES, ENTRIES
from torchao_blockwise.tensors import MasterWeightTensor
from torchao_blockwise.tensors.fsdp import WeightShard, layout_of


class ShardedMaster:
    """One master weight below a root of FSDP2, and the shard that gathers of it find."""

    def __init__(self, parameter: torch_fsdp.FsdpParameter):
        self.parameter = parameter
        self._dtype = self.master.dtype
        modules = parameter.modules
        # A module that is no linear layer, as an embedding, needs the values.
        quantized = len(modules) == 1 or all(isinstance(module, nn.Linear) for module in modules)
        self.layout = layout_of(parameter, self.master.config, quantized)
        self.shard = WeightShard(self.layout)
        if quantized:
            # Zeros, because the padding of a small shard travels too.
            self.shard.payload = torch.zeros(self.layout.payload_shape, dtype=torch.uint8, device=parameter.device)

    @property
    def master(self) -> MasterWeightTensor:
        return self.parameter.local  # type: ignore[return-value]

    @property
    def is_laid_out(self) -> bool:
        """Whether the parameter still is what the shard was laid out for."""
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
        gathered = layout.config.of_all_ranks if layout.quantized else "high precision"
        return (
            f"{layout.name} {list(layout.shape)} {self._dtype}, dim {layout.dim} over {layout.ranks} ranks, gathered "
            f"from {layout.dtype} as {gathered}"
        )

    def part(self) -> Part:
        """What a cast reads and writes, with new scales: gathered weights hold the old ones."""
        layout, payload, device = self.layout, self.shard.payload, self.parameter.device
        assert payload is not None
        config, fmt = layout.config, layout.config.weight_format
        split_groups = self.parameter.split_groups if fmt.has_global_scale else ()
        scales: tuple[int, ...] = ()
        if config.scale_per_expert:
            scales = layout.shape[:-2]
            split_groups = self._groups_of_matrices() if scales else split_groups
        blocks = torch.Size(fmt.scale_shape(*layout.shape)).numel() + bool(split_groups)
        # Flat and without the padding; shards of another dim have none.
        is_flat = layout.dim == 0
        return Part(
            recipe=Recipe(fmt, config.power_of_2_scales, layout.dtype, ops.casting_backend(config.backend)),
            shape=layout.shape,
            values=self.master.hp.reshape(-1) if is_flat else self.master.hp,
            start=layout.flat_start if is_flat else layout.start,
            target=payload[: layout.local_shape[0]].view(-1) if is_flat else payload,
            into=ENTRIES if layout.travels_as_stored else CODES,
            scale=torch.empty(blocks, dtype=fmt.scale_dtype, device=device),
            global_scale=torch.empty(scales, dtype=torch.float32, device=device) if fmt.has_global_scale else None,
            dim=layout.dim,
            split_groups=split_groups,
        )

    def _groups_of_matrices(self) -> tuple[torch.distributed.ProcessGroup, ...]:
        """Over which each expert, which has a tensor scale of its own, is split: none, as ranks hold whole ones."""
        p, matrices = self.parameter, len(self.layout.shape) - 2
        if any(dim >= matrices for dim in p.split_dims):
            raise ValueError(
                f"fully_shard: {p.name} {list(p.shape)} is split in dim {max(p.split_dims)} by tensor parallelism, and "
                "each of its experts has a tensor scale of its own; spread whole experts over ranks (ExpertParallel), "
                "or take scale_per_expert=False"
            )
        return ()

    def publish(self, part: Part | None, ready: torch.cuda.Event | None) -> None:
        """Let gathers of the parameter find the payload and the scales that a cast has written to `part`."""
        if part is not None:
            shape = torch.Size(part.recipe.fmt.scale_shape(*part.shape))
            self.shard.scale, self.shard.global_scale = part.scale[: shape.numel()].view(shape), part.global_scale
        self.shard.ready = ready
        self.shard.attach(self.master)

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the values can be seen to be others than those of the payload."""
        if not self.shard.is_current(self.master):
            raise RuntimeError(
                f"weights_unchanged: {self.layout.name} was changed inside the scope, which keeps quantized shards of "
                "the old values; leave the scope before optimizer steps, loads and edits"
            )
