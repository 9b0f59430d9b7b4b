"""Checks on ranks of converted models under Trainer and accelerate, by DDP and FSDP2, on the CPU over gloo."""

import contextlib
import importlib.util
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from helpers import FP8, assert_same_tensors
from ranks import set_environment, shared_folder, values_of
from torch.nn.parallel import DistributedDataParallel
from torchao.quantization import quantize_

from torchao_blockwise import NVFP4TrainingConfig, recommended_layers
from torchao_blockwise.integrations.transformers import BlockwiseFP8Config, NVFP4Config, RecipeState, UnchangedWeights

RECIPES = {"fp8": (BlockwiseFP8Config, FP8), "nvfp4": (NVFP4Config, NVFP4TrainingConfig())}
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "accelerate_loop.py"
STEPS, ACCUMULATED, PER_RANK = 4, 2, 2


@contextlib.contextmanager
def wrapped_by(wrapper: str):
    """Set the environment of `accelerate launch`. "fsdp" saves whole values, "fsdp_shards" each rank's.

    accelerate shards only on accelerators, so ranks are said to have some.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    settings = {"ACCELERATE_TORCH_DEVICE": "cpu"}
    backend = ("gloo", DistributedType.MULTI_CPU)
    if wrapper != "ddp":
        settings |= {"ACCELERATE_USE_FSDP": "1", "FSDP_VERSION": "2"}
        backend = ("gloo", DistributedType.MULTI_GPU)
    with (
        mock.patch.dict(os.environ, settings),
        mock.patch.object(PartialState, "_prepare_backend", lambda self, *args, **kwargs: backend),
    ):
        yield


def plain_model(sizes=SIZES):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def rows(count: int) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (count, 8), generator=generator)]


def arguments(out: Path, **options):
    return transformers.TrainingArguments(
        str(out), per_device_train_batch_size=PER_RANK, gradient_accumulation_steps=ACCUMULATED, learning_rate=1e-2,
        lr_scheduler_type="constant", save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, max_grad_norm=0,
        train_sampling_strategy="sequential", optim="adamw_torch", **options,
    )  # fmt: skip


def trainer(folder: Path, out: Path, wrapper: str, recipe: str, data: list[dict] | None = None, **options):
    config = RECIPES[recipe][0]()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    if wrapper != "ddp":
        saved_as = "SHARDED_STATE_DICT" if wrapper == "fsdp_shards" else "FULL_STATE_DICT"
        fsdp = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": saved_as}
        options |= {"fsdp": True, "fsdp_config": fsdp}
    args = arguments(out, max_steps=STEPS, **options)
    data = data or rows(STEPS * ACCUMULATED * PER_RANK * dist.get_world_size())
    return transformers.Trainer(model, args, train_dataset=data, callbacks=[UnchangedWeights(), RecipeState()])


def by_hand(rank: int, recipe: str) -> dict[str, torch.Tensor]:
    """The same steps of DistributedDataParallel, after `quantize_`."""
    model = plain_model()
    config = RECIPES[recipe][1]
    quantize_(model, config, filter_fn=recommended_layers(model, config))
    wrapped, count = DistributedDataParallel(model), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    batches = torch.stack([row["input_ids"] for row in rows(STEPS * ACCUMULATED * PER_RANK * count)]).split(PER_RANK)
    mine = batches[rank::count]
    tokens = torch.tensor(PER_RANK * ACCUMULATED * count * 7)
    for step in range(STEPS):
        first, last = mine[ACCUMULATED * step :][:ACCUMULATED]
        with wrapped.no_sync():
            (count * wrapped(input_ids=first, labels=first, num_items_in_batch=tokens).loss).backward()
        (count * wrapped(input_ids=last, labels=last, num_items_in_batch=tokens).loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


def resumes(rank: int, wrapper: str, recipe: str) -> None:
    """Four steps, and two of them from a checkpoint, bit for bit; what is saved loads. Under DDP as by hand."""
    with shared_folder() as folder, wrapped_by(wrapper):
        if rank == 0:
            plain_model().save_pretrained(folder / "plain")
        dist.barrier()
        straight = trainer(folder / "plain", folder / "out", wrapper, recipe)
        straight.train()
        assert straight.accelerator.is_fsdp2 is (wrapper != "ddp")
        got = values_of(straight.model)
        before = plain_model().state_dict()
        assert all(not torch.equal(got[name], before[name]) for name in before)
        if wrapper == "ddp":
            assert_same_tensors(got, by_hand(rank, recipe))
        if wrapper != "fsdp_shards":
            saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "out" / f"checkpoint-{STEPS}")
            assert_same_tensors(values_of(saved), got)
        AcceleratorState._reset_state(reset_partial_state=True)
        again = trainer(folder / "plain", folder / "again", wrapper, recipe)
        again.train(str(folder / "out" / "checkpoint-2"))
        assert_same_tensors(values_of(again.model), got)


def compiled(rank: int, recipe: str) -> None:
    """Trainer with `torch_compile=True`, whose graphs DDP splits, trains as in eager mode: the same rows each step."""
    sizes, counts = SIZES | {"hidden_size": 128, "intermediate_size": 256}, torch._dynamo.utils.counters
    data, losses = rows(ACCUMULATED * PER_RANK * dist.get_world_size()) * STEPS, []
    # PyTorch's first bucket holds 1 MB, more than half of the model.
    with shared_folder() as folder, mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 10_000):
        if rank == 0:
            plain_model(sizes).save_pretrained(folder / "plain")
        dist.barrier()
        for options in ({}, {"torch_compile": True, "ddp_bucket_cap_mb": 1}):
            counts.clear()
            out = folder / str(len(losses))
            with wrapped_by("ddp"):
                made = trainer(folder / "plain", out, "ddp", recipe, data, logging_steps=1, **options)
                made.train()
            losses.append([entry["loss"] for entry in made.state.log_history if "loss" in entry])
    assert counts["aot_autograd"]["total"] > 2, "the buckets split no layer from another"
    eager, with_compiler = losses
    assert eager[-1] < 0.8 * eager[0]
    assert with_compiler == pytest.approx(eager, rel=5e-3)


def example_resumes(rank: int, wrapper: str) -> None:
    """Two epochs of docs/examples/accelerate_loop.py, and the second one from the first one's state; bit for bit."""
    spec = importlib.util.spec_from_file_location("accelerate_loop", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def accelerator():
        AcceleratorState._reset_state(reset_partial_state=True)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        return Accelerator(fsdp_plugin=plugin if wrapper == "fsdp" else None)

    with shared_folder() as folder, wrapped_by(wrapper):
        made = accelerator()
        model, losses = example.train(made, str(folder))
        assert made.is_fsdp2 is (wrapper == "fsdp") and isinstance(model, DistributedDataParallel) is (wrapper == "ddp")
        assert losses[-1] < 0.9 * losses[0], losses
        again, later = example.train(accelerator(), str(folder / "again"), range(1, 2), str(folder / "0"))
        assert later == losses[len(losses) // 2 :]
        assert_same_tensors(values_of(again), values_of(model))


CASES = {
    2: (
        [("resumes", "ddp", "nvfp4"), ("resumes", "fsdp", "fp8"), ("resumes", "fsdp_shards", "fp8"),
         ("example_resumes", "fsdp")],
        [("resumes", "ddp", "fp8"), ("resumes", "fsdp", "nvfp4"), ("example_resumes", "ddp"), ("compiled", "fp8"),
         ("compiled", "nvfp4")],
    )
}  # fmt: skip


start = set_environment
