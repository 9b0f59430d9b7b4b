"""What ranks check of models that the trainer of torchtitan 0.2 trains converted, on a CPU."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import types
from unittest import mock

import pytest
import ranks
import titan_training as titan
import torch
from every_layer import counting
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, linears_and_experts, skip_lm_head


class ByHand:
    """`quantize_` in the place of a converter."""

    def convert(self, model):
        quantize_(model, BlockwiseFP8TrainingConfig(), filter_fn=linears_and_experts() & skip_lm_head())

    def post_optimizer_hook(self, model):
        pass


def losses(family, converter="", *arguments, by_hand=False) -> list[float]:
    """Of two steps of the trainer, on tokens that depend on the step alone."""
    train = titan.import_for_cpu("torchtitan.train")
    config_of = importlib.import_module("torchtitan.config").ConfigManager().parse_args
    base = importlib.import_module("torchtitan.components.dataloader").BaseDataLoader

    class Tokens(base):
        def __init__(self, *, dp_world_size, dp_rank, **_):
            self.ranks, self.rank = dp_world_size, dp_rank

        def __iter__(self):
            for step in range(2):
                generator = torch.Generator().manual_seed(step)
                tokens = torch.randint(64, (2 * self.ranks, 33), generator=generator)[2 * self.rank :][:2]
                yield {"input": tokens[:, :-1]}, tokens[:, 1:].contiguous()

        state_dict = load_state_dict = lambda self, *_: {}

    spec = train.train_spec_module.get_train_spec(family)
    sizes = dataclasses.replace(spec.model_args["debugmodel"], n_layers=2)
    spec = dataclasses.replace(
        spec, model_args={"debugmodel": sizes}, build_tokenizer_fn=None, build_dataloader_fn=Tokens
    )
    given = ["--job.custom_config_module", "torchao_blockwise.integrations.torchtitan_0_2", "--model.name", family]
    given += ["--model.flavor", "debugmodel", "--training.seq_len", "32", "--training.local_batch_size", "2"]
    given += ["--training.steps", "2", "--debug.seed", "1", "--metrics.log_freq", "1"]
    given += ["--model.converters", converter] if converter else []
    seen: list[float] = []
    made = (lambda *_: ByHand()) if by_hand else train.build_model_converters
    with (
        mock.patch.object(train.train_spec_module, "get_train_spec", lambda _: spec),
        mock.patch.object(train, "build_model_converters", made),
        mock.patch.dict(spec.parallelize_fn.__globals__, disable_fsdp_gradient_division=titan.sum_gradients),
    ):
        trainer = train.Trainer(config_of([*given, *arguments]))
    trainer.metrics_processor.log = lambda step, mean, *_, **__: seen.append(mean)
    trainer.train()
    trainer.close()
    return seen


def trains_as_by_hand(rank, family):
    """The losses of `quantize_` by hand on the model that torchtitan builds, bit for bit; not those of bf16."""
    got, plain = losses(family, "blockwise_fp8"), losses(family)
    assert len(got) == 2 and got == losses(family, by_hand=True)
    assert got != plain and all(abs(a - b) < 0.05 * b for a, b in zip(got, plain)), (got, plain)


def takes_options(rank, family):
    exclude = json.dumps({"exclude": ["layers.*"], "lm_head": True})
    got = losses(family, "blockwise_nvfp4", "--blockwise.options", exclude)
    assert got not in (losses(family), losses(family, "blockwise_nvfp4"))


def saves_products(rank, family):
    """With `--blockwise.selective_ac` no product runs again in backward; without, `output` of every layer does."""
    selective = ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"]
    # Else a block ends where its last product would begin again.
    selective += ["--activation_checkpoint.no-early_stop"]

    def counted(*arguments):
        with counting() as counter:
            got = losses(family, "blockwise_fp8", *arguments)
        counts = counter.get_flop_counts()["Global"]
        return got, sum(flops for op, flops in counts.items() if str(op).startswith("torchao_blockwise."))

    expected, once = counted("--activation_checkpoint.mode", "none")
    # First, as the list that is saved grows for good.
    kept, again = counted(*selective)
    assert kept == expected and 3 * again == 4 * once, (once, again)
    assert counted(*selective, "--blockwise.selective_ac") == (expected, once)


def needs_a_list_of_what_is_saved(rank, family):
    from torchao_blockwise.integrations import torchtitan_0_2

    other = types.SimpleNamespace(parallelize_fn=lambda model, *_: model)
    with (
        mock.patch.object(torchtitan_0_2, "get_train_spec", lambda _: other),
        pytest.raises(ValueError, match="llama3 has no list of operations that are saved; leave it out"),
    ):
        losses(family, "blockwise_fp8", "--blockwise.selective_ac")


CHECKS = {f.__name__: f for f in (trains_as_by_hand, takes_options, saves_products, needs_a_list_of_what_is_saved)}


def run(rank, count, port, file, cases):
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(count))
    ranks.join(rank, count, port, seconds=300)
    ranks.run_each(CHECKS, rank, cases, file)
    ranks.leave()
