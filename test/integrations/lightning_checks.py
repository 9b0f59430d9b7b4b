"""Converted LightningModules, and what ranks check of those that Lightning shards, on the CPU over gloo."""

import lightning
import pytest
import torch
import torch.distributed as dist
from helpers import FP8, assert_same_tensors, converted, mlp
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks import set_environment, shared_folder, values_of
from torch.distributed.fsdp import fully_shard

from torchao_blockwise import MasterWeightTensor, NVFP4TrainingConfig
from torchao_blockwise.integrations.lightning import BlockwisePrecision, UnchangedWeights

RECIPES = {"fp8": FP8, "nvfp4": NVFP4TrainingConfig()}


class Module(lightning.LightningModule):
    def __init__(self, model=None):
        super().__init__()
        self.model = mlp() if model is None else model

    def training_step(self, batch, index):
        return self.model(batch).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(module, folder, steps, batches, ckpt_path=None, **options):
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    return trainer


class Sharded(Module):
    """Converts before it shards, or forgets to."""

    converts = True

    def configure_model(self):
        if self.converts:
            self.trainer.precision_plugin.convert_module(self.model)
        shard(self.model, self._device_mesh)


def batches(rank: int) -> torch.Tensor:
    """Only one, as a trainer that resumes begins with the first one again."""
    return torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(rank))


def fit_on_ranks(module, rank, recipe, folder, steps, distributed=True, ckpt_path=None):
    strategy = ModelParallelStrategy(
        data_parallel_size=dist.get_world_size(), tensor_parallel_size=1, save_distributed_checkpoint=distributed
    )
    options = {"devices": dist.get_world_size(), "strategy": strategy, "use_distributed_sampler": False}
    plugins = [BlockwisePrecision(recipe), LightningEnvironment()]
    options |= {"plugins": plugins, "callbacks": [UnchangedWeights()], "ckpt_path": ckpt_path}
    return fit(module, folder, steps, batches(rank), **options)


def by_hand(rank: int, recipe: str, steps: int) -> dict[str, torch.Tensor]:
    model = converted(mlp(), RECIPES[recipe])
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(batches(rank)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


def resumes(rank: int, recipe: str, saved_as: str) -> None:
    """The steps of `fully_shard` by hand, and two of four from a checkpoint; bit for bit."""
    how = {"distributed": saved_as == "shards"}
    with shared_folder() as folder:
        whole, begun, resumed = Sharded(), Sharded(), Sharded()
        fit_on_ranks(whole, rank, recipe, folder, 4, **how)
        assert any(isinstance(p.to_local(), MasterWeightTensor) for p in whole.model.parameters())
        assert_same_tensors(values_of(whole.model), by_hand(rank, recipe, 4))
        fit_on_ranks(begun, rank, recipe, folder, 2, **how).save_checkpoint(folder / "half.ckpt")
        fit_on_ranks(resumed, rank, recipe, folder, 4, **how, ckpt_path=str(folder / "half.ckpt"))
        assert_same_tensors(values_of(resumed.model), values_of(whole.model))


def needs_conversion_before_shards(rank: int) -> None:
    module = Sharded()
    module.converts = False
    with pytest.raises(ValueError, match="a DTensor; convert before sharding"):
        fit_on_ranks(module, rank, "fp8", ".", 1)


def shard(model, mesh=None):
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh and mesh["data_parallel"])
    return model


CASES = {
    2: (
        [
            ("resumes", "fp8", "shards"),
            ("resumes", "nvfp4", "one_file"),
            ("needs_conversion_before_shards",),
        ],
        [("resumes", "fp8", "one_file"), ("resumes", "nvfp4", "shards")],
    )
}


def start(rank: int, count: int) -> None:
    set_environment(rank, count, NODE_RANK="0")
