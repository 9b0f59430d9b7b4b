"""Checks of pipeline parallelism: ranks hold stages of a converted model; each runs on every rank of a mesh."""

import torch
from fsdp_models import adamw, blocks, values
from ranks import device
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from torchao_blockwise.testing import assert_bitwise_equal

MICROBATCHES = 4


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, 32, 48, generator=generator).to(device())
    return x, target


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(out, target)


def trains_as_one_device(mesh, config):
    """Bitwise identical, also with a schedule whose backward computes grad_input and grad_weight at different times."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for schedule in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        one, model = (blocks(config, count=2 * ranks) for _ in range(2))
        own = range(rank, 2 * ranks, ranks)
        stages = [PipelineStage(model[i], i, 2 * ranks, device(), group=mesh.get_group()) for i in own]
        pipeline = schedule(stages, MICROBATCHES, loss_fn=loss_of)
        whole, split = adamw(one), adamw(nn.ModuleList(model[i] for i in own))
        for step in range(2):
            x, target = batch(step)
            expected, losses = [], []
            for micro, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES)):
                loss = loss_of(one(micro), wanted)
                (loss / MICROBATCHES).backward()
                expected.append(loss.detach())
            last = {"target": target, "losses": losses} if rank == ranks - 1 else {}
            pipeline.step(*[x] * (rank == 0), **last)
            assert not last or torch.stack(losses).equal(torch.stack(expected)), f"{schedule.__name__}: {losses}"
            for optimizer in (whole, split):
                optimizer.step()
                optimizer.zero_grad()
        for i in own:
            for (name, p), q in zip(model[i].named_parameters(), one[i].parameters()):
                assert_bitwise_equal(values(p), values(q), f"{schedule.__name__}: {i}.{name}")
