"""Expert parallel: each rank holds some of the experts, and tokens travel to the ranks that hold theirs.

    tokens of a rank, sorted by expert   | expert 0 | 1 | 2 | 3 |
    all-to-all: a run of experts a rank    to rank 0 ─┴┘  └─┴─ to rank 1
    sorted by expert again                 rank 1: | 2 of rank 0 | 2 of rank 1 | 3 of rank 0 | 3 of rank 1 |
    its experts, then the same way back

An expert gets the tokens of all ranks, ordered by rank, as on one device that holds the concatenated tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from torchao_blockwise import _compat
from torchao_blockwise.nn import permute, unpermute
from torchao_blockwise.ops.groups.ends import check_group_ends, clamped_ends
from torchao_blockwise.tensors import MasterWeightTensor
from torchao_blockwise.tensors.base import layers_of
from torchao_blockwise.tensors.rounding import keys_of, start_key, state_of
from torchao_blockwise.tensors.weight_operands import group_names


class TokenExchange(NamedTuple):
    """How tokens were exchanged, so that results can be sent back.

    source: index of each received row before rows were sorted by expert. sent, received: rows to and from each rank.
    tokens: number of rows that the rank had, including those of no expert.
    """

    source: torch.Tensor
    sent: list[int]
    received: list[int]
    tokens: int


def dispatch_tokens(
    x: torch.Tensor, group_ends: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, TokenExchange]:
    """Send each row to the rank that holds its expert; a collective, differentiable in `x`.

    x: [M, H], sorted by expert. group_ends: [E] int32, cumulative; rows after the last group are not sent.
    group: ranks that hold ⌈E / ranks⌉ experts each, the last ones fewer, as `torch.chunk` splits them.
    Returns the rows of this rank's experts [M', H], sorted by expert and then by source rank, their group ends [E'],
    and the argument `exchange` of `combine_tokens`. The host reads the sizes of the exchange once, to allocate the
    results. An expert layer has no other synchronization.
    Raises TypeError or ValueError for invalid group ends.
    """
    ranks, experts = group.size(), group_ends.shape[0]
    check_group_ends("dispatch_tokens", group_ends, x.shape[0], x.device)
    most = -(-experts // ranks)
    own = max(0, min(most, experts - group.rank() * most))
    ends = clamped_ends(group_ends, x.shape[0])
    counts = ends.new_zeros(ranks * most)
    counts[:experts] = ends.diff(prepend=ends.new_zeros(1))
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    counts, arriving = counts.view(ranks, most), arriving.view(ranks, most)
    sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
    rows = _compat.all_to_all(x[: sum(sent)].contiguous(), received, sent, group)
    # Rows come rank by rank, each rank's sorted by expert.
    expert_of_run = torch.arange(most, device=x.device).repeat(ranks)
    ids = torch.repeat_interleave(expert_of_run, arriving.flatten(), output_size=sum(received))
    tokens, source, own_ends = permute(rows, ids[:, None], most)
    return tokens, own_ends[:own], TokenExchange(source, sent, received, x.shape[0])


def combine_tokens(y: torch.Tensor, exchange: TokenExchange, group: dist.ProcessGroup) -> torch.Tensor:
    """Send each row of `y` [M', H] back to the rank that it came from; a collective, differentiable.

    Returns [M, H] in the original order; rows of no expert are zeros.
    """
    rows = unpermute(y, exchange.source, 1)
    back = _compat.all_to_all(rows.contiguous(), exchange.sent, exchange.received, group)
    stayed = exchange.tokens - back.shape[0]
    return back if not stayed else torch.cat([back, back.new_zeros(stayed, back.shape[1])])


class ExpertParallel(ParallelStyle):
    """A `parallelize_module` style for modules of experts: their 3D parameters, sharded by expert, and an exchange.

    For modules with parameters [E, ..] that are called with tokens [M, H], sorted by expert, and group ends [E], such
    as `SwiGLUExperts`. Each rank then holds E / ranks of the experts as DTensors. On each rank, you still call the
    module with the rank's tokens for all experts, and it returns their results. Apply it after `quantize_` and before
    `fully_shard`.

    In FP8, and in NVFP4 with `scale_per_expert`, quantized values do not depend on the number of ranks. In NVFP4
    without it, the experts of all ranks share the tensor scale of a weight, and the tokens that a rank receives share
    that of the activations.
    Raises ValueError for a parameter that is not [E, ..], a mesh of several dims, or fewer experts than all ranks need.
    Source: GShard (arXiv 2006.16668), §3.2.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"ExpertParallel: the mesh must have one dim, got {device_mesh}; use the slice whose ranks hold the "
                "experts, mesh['ep']"
            )
        parameters = dict(module.named_parameters(recurse=False))
        counts = {p.shape[0] for p in parameters.values() if p.dim() == 3}
        if len(counts) != 1 or any(p.dim() != 3 for p in parameters.values()):
            shapes = {name: list(p.shape) for name, p in parameters.items()}
            raise ValueError(
                f"ExpertParallel: a {type(module).__name__} must hold parameters [E, .., ..] of the same E experts and "
                f"no others, got {shapes}; name the module of experts in the plan"
            )
        (count,), ranks = counts, device_mesh.size()
        most = -(-count // ranks)
        if most * (ranks - 1) >= count:
            raise ValueError(
                f"ExpertParallel: {count} experts over {ranks} ranks, {most} per rank, leave some ranks without "
                "experts; use fewer ranks"
            )
        for name, parameter in parameters.items():
            sharded = distribute_tensor(parameter, device_mesh, [Shard(0)])
            local: Any = _compat.local_of(sharded)
            if getattr(local, "rounding_key", None) is not None:
                start_key(local, state_of(keys_of(local))._replace(expert=device_mesh.get_local_rank() * most))
            module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        group = device_mesh.get_group()
        exchange: Any = None

        def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal exchange
            if len(args) != 2:
                layers = layers_of(map(_compat.local_of, module.parameters(recurse=False)), type(module).__name__)
                got = f"{len(args)} positional argument{'s' * (len(args) != 1)} ({layers})"
                raise TypeError(
                    "ExpertParallel: a module must be called with tokens [M, H], sorted by expert, and group_ends [E], "
                    f"got {got}; sort tokens with permute, or for a transformers model use its "
                    "DistributedConfig(ep_size=...)"
                )
            for parameter in module.parameters(recurse=False):
                local: Any = _compat.local_of(parameter)
                is_master = isinstance(local, MasterWeightTensor)
                if is_master and local.fmt.has_global_scale and not local.config.scale_per_expert:
                    # The experts of all ranks have one tensor scale. It is noted on the values, which compiled graphs
                    # read without the weight around them.
                    local.hp.amax_groups = group_names([group])
            x, group_ends = args
            tokens, own_ends, exchange = dispatch_tokens(x, group_ends, group)
            return tokens, own_ends

        def after(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            nonlocal exchange
            taken, exchange = exchange, None
            return combine_tokens(output, taken, group)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module
