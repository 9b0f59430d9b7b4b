"""Checks that two ranks run on loops that train converted models; noise is measured by moving weights by one bit.

A GEMM has two quantized operands. Rounding moves an element by at most half of the format's last bit, so both together
by at most one. bf16 has 7 bits of mantissa, e4m3 has 3 and e2m1 has 1: their last bits are 16 and 64 times as large.
This is how many times the noise a converted run may differ from the plain one. A layer that returns zeros must exceed
both limits.
"""

from __future__ import annotations

import lightning
import litgpt_loop
import nanochat_loop
import ranks
import torch
import torch.distributed as dist
from helpers import FP8, assert_same_tensors
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from lightning_checks import set_environment
from torch.distributed.fsdp import fully_shard
from torchao.quantization import quantize_

from torchao_blockwise import (
    MasterWeightTensor,
    NVFP4TrainingConfig,
    load_recipe_state,
    recipe_state,
    recommended_layers,
)

STEPS = 20
RECIPES = {"fp8": FP8, "nvfp4": NVFP4TrainingConfig()}
COARSER = {"fp8": 2 ** (7 - 3), "nvfp4": 2 ** (7 - 1)}


def batches_of(rank: int, rows: int, length: int, vocabulary: int):
    """Most tokens follow from the one before, by a fixed permutation; some are random."""
    following = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(5))

    def batches(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * number + rank)
        tokens = torch.randint(vocabulary, (rows, length + 1), generator=generator)
        follows = torch.rand(tokens.shape, generator=generator) < 0.9
        for i in range(1, length + 1):
            tokens[:, i] = torch.where(follows[:, i], following[tokens[:, i - 1]], tokens[:, i])
        return tokens

    return batches


def converted(model, recipe: str):
    quantize_(model, RECIPES[recipe], filter_fn=recommended_layers(model, RECIPES[recipe]))
    assert sum(isinstance(p, MasterWeightTensor) for p in model.parameters()) > 4
    return model


@torch.no_grad()
def moved_by_a_bit(model, seed: int):
    """Each element of the blocks' matrices one bf16 bit up or down."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.blocks.parameters():
        if p.dim() == 2:
            signs = 2 * torch.randint(2, p.shape, generator=generator, dtype=torch.int32) - 1
            p.copy_((p.view(torch.int32) + signs * 2**16).view(torch.float32))
    return model


def with_a_zeroed_layer(model):
    model.blocks[-1].down.register_forward_hook(lambda module, args, output: output * 0)
    return model


def difference(losses: list[float], others: list[float]) -> float:
    return (torch.tensor(losses) - torch.tensor(others)).square().mean().sqrt().item()


def assert_within_noise(losses_of, model_of) -> None:
    """losses_of: model -> the losses of a run."""
    plain = losses_of(model_of())
    assert len(plain) == STEPS and plain[-1] < 0.5 * plain[0], plain
    noise = max(difference(losses_of(moved_by_a_bit(model_of(), seed)), plain) for seed in (1, 2))
    found = {recipe: difference(losses_of(converted(model_of(), recipe)), plain) for recipe in RECIPES}
    wrong = difference(losses_of(with_a_zeroed_layer(converted(model_of(), "fp8"))), plain)
    print(f"one bit {noise:.2e}, converted {found}, with a zeroed layer {wrong:.2e}")
    for recipe, got in found.items():
        assert 0 < got < COARSER[recipe] * noise < wrong, (recipe, noise, got, wrong)


def nanochat(rank: int, muon: str, head: str) -> None:
    batches = batches_of(rank, nanochat_loop.ROWS, nanochat_loop.LENGTH, nanochat_loop.VOCABULARY)
    optimizer = {"stacked": nanochat_loop.StackedMuon, "torch": nanochat_loop.TorchMuon}[muon]

    def model():
        torch.manual_seed(0)
        return nanochat_loop.GPT(head == "tied")

    def losses_of(made) -> list[float]:
        # Each run compiles its own graphs, as a process that trains one model.
        torch._dynamo.reset()
        return nanochat_loop.losses_of(made, optimizer, STEPS, batches)

    assert_within_noise(losses_of, model)


def fabric_of(strategy: str) -> lightning.Fabric:
    def shard(model, mesh):
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    made = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "fsdp": lambda: ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1),
    }[strategy]()
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=made, plugins=[LightningEnvironment()])
    fabric.launch()
    return fabric


def litgpt_model():
    torch.manual_seed(0)
    return litgpt_loop.GPT()


def litgpt(rank: int, strategy: str) -> None:
    batches = batches_of(rank, litgpt_loop.ROWS, litgpt_loop.LENGTH, litgpt_loop.VOCABULARY)
    fit = lambda made: litgpt_loop.fit(fabric_of(strategy), made, STEPS, batches)[1]  # noqa: E731
    assert_within_noise(fit, litgpt_model)


def litgpt_resumes(rank: int, strategy: str, recipe: str) -> None:
    """Two of four steps from a checkpoint, bit for bit; the checkpoint has plain tensors."""
    batches = batches_of(rank, litgpt_loop.ROWS, litgpt_loop.LENGTH, litgpt_loop.VOCABULARY)
    with ranks.shared_folder() as folder:
        file, fabric = folder / "two.ckpt", fabric_of(strategy)
        whole, losses = litgpt_loop.fit(fabric, converted(litgpt_model(), recipe), 4, batches, file, save_at=2)
        half = converted(litgpt_model(), recipe)
        # The loop does not save the recipe's state, which counts the random bits of the first two steps.
        begun = converted(litgpt_model(), recipe)
        litgpt_loop.fit(fabric, begun, 2, batches)
        load_recipe_state(half, recipe_state(begun))
        again, resumed = litgpt_loop.fit(fabric, half, 4, batches, file)
        assert resumed == losses[2:]
        assert_same_tensors(ranks.values_of(again), ranks.values_of(whole))
        dist.barrier()


CHECKS = {"nanochat": nanochat, "litgpt": litgpt, "litgpt_resumes": litgpt_resumes}
CASES = {
    2: (
        [],
        [
            ("nanochat", "stacked", "own_head"),
            ("nanochat", "torch", "tied"),
            ("litgpt", "ddp"),
            ("litgpt", "fsdp"),
            ("litgpt_resumes", "ddp", "nvfp4"),
            ("litgpt_resumes", "fsdp", "fp8"),
        ],
    )
}


def start(rank: int, count: int):
    set_environment(rank, count)
    return lambda name, *arguments: CHECKS[name](rank, *arguments)
