"""Training of benchmarks/train_llm.py: same start and data for every recipe, exact resumption, experts and memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import train_llm
from llm_cases import CPU, MODELS, MOE, TINY
from llm_training import checkpoint, throughput, training
from llm_training.config import RunConfig, UsageError
from llm_training.model import next_byte_loss
from llm_training.recipes import DEFAULT as RECIPES
from llm_training.recipes import SEPARATE, convert
from torch._dynamo.utils import counters

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("train_llm_alike")]


@pytest.fixture(scope="module")
def runs_of():
    return {}


@pytest.fixture
def trained(corpus, runs_of):
    """(recipe, config) -> the result of a run from the first step to the last, which all tests share: it repeats."""

    def run(recipe: str, config: RunConfig) -> training.Result:
        if (recipe, config) not in runs_of:
            runs_of[recipe, config] = training.train(recipe, config, corpus, CPU)
        return runs_of[recipe, config]

    return run


def convert_model(recipe: str, config: RunConfig) -> torch.nn.Module:
    model = training.Trainer("bf16", config, CPU).model
    convert(model, recipe)
    return model


class Interrupted(Exception):
    pass


def interrupt_at(monkeypatch, step: int) -> None:
    def train_step(self, windows, at, *part):
        if at == step:
            raise Interrupted
        return original(self, windows, at, *part)

    original = training.Trainer.step
    monkeypatch.setattr(training.Trainer, "step", train_step)


@MODELS
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_starts_from_the_same_weights(recipe, config):
    expected, got = (convert_model(r, config).state_dict() for r in ("bf16", recipe))
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@MODELS
@pytest.mark.parametrize("recipe", ("fp8", "nvfp4_full"))
def test_quantized_parameters_train_as_master_weights_do(recipe, config, trained):
    """Masters that the optimizer alone has, in fp32 as the weights are, are cast to the same bits."""
    runs = [trained(name, config) for name in (recipe, f"{recipe}_parameters")]
    assert runs[0].losses == runs[1].losses and runs[0].held_out_loss == runs[1].held_out_loss
    assert runs[0].losses != trained("bf16", config).losses


@MODELS
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_repeats_the_uninterrupted_one_bitwise(recipe, config, corpus, trained, tmp_path, monkeypatch):
    whole = trained(recipe, config)
    with monkeypatch.context() as m, pytest.raises(Interrupted):
        interrupt_at(m, 5)
        training.train(recipe, config, corpus, CPU, tmp_path, checkpoint_every=2)
    assert len(torch.load(checkpoint.path_of(tmp_path, recipe), weights_only=True)["losses"]) == 4
    torch.manual_seed(12345)
    resumed = training.train(recipe, config, corpus, CPU, tmp_path, resume=True)
    assert resumed.losses == whole.losses
    assert resumed.held_out_loss == whole.held_out_loss


@MODELS
def test_recipes_begin_with_one_start_in_bf16(config, corpus, trained, tmp_path, monkeypatch):
    """As bf16 alone went there, bit for bit, and it is trained once; the last bit of its weights matters after it."""
    whole = trained("bf16", config)
    config = replace(config, bf16_steps=4)
    seen = []
    original = training.Trainer.step
    monkeypatch.setattr(
        training.Trainer, "step", lambda self, windows, at: seen.append(at) or original(self, windows, at)
    )
    recipes = ("bf16", "fp8", "nvfp4_full")
    runs = {recipe: training.train(recipe, config, corpus, CPU, tmp_path) for recipe in recipes}
    runs["perturbed"] = training.train("bf16", config, corpus, CPU, tmp_path, draw=1)
    assert seen == [*range(4), *[4, 5, 6, 7] * len(runs)]
    assert (runs["bf16"].losses, runs["bf16"].held_out_loss) == (whole.losses, whole.held_out_loss)
    assert all(run.losses[:4] == whole.losses[:4] and len(run.losses) == 8 for run in runs.values())
    assert len({run.losses[4] for run in runs.values()}) == len({run.held_out_loss for run in runs.values()}) == 4
    again = training.train("fp8", config, corpus, CPU, tmp_path / "other", starts=tmp_path)
    assert again.losses == runs["fp8"].losses and len(seen) == 4 + 4 * len(runs) + 4
    again.seconds = [100.0] * 4 + [1.0] * 4
    assert again.tokens_per_second == config.tokens_per_step


def test_grad_accumulation_sees_the_same_batch(corpus):
    """The first losses are one mean, summed in two orders; later ones are as near as if GEMMs summed in another.

    That run, `products="fp32"`, is the control: both differ from the first by roundings alone, which add up as far.
    """
    whole = replace(TINY, batch_size=4)
    configs = (whole, replace(TINY, batch_size=2, grad_accumulation=2), replace(whole, products="fp32"))
    one, two, control = (
        torch.tensor(training.train("bf16", config, corpus, CPU).losses, dtype=torch.float64) for config in configs
    )
    assert (two - one)[0].abs() <= 2 * whole.tokens_per_step * 2.0**-24 * one[0]
    assert (two - one).abs().max() <= 2 * (control - one).abs().max()


@MODELS
def test_activation_checkpointing_changes_memory_and_not_the_curve(config, corpus, trained):
    plain = trained("bf16", config)
    recomputed = training.train("bf16", replace(config, activation_checkpointing=True), corpus, CPU)
    assert recomputed.losses == plain.losses
    assert recomputed.activation_bytes < plain.activation_bytes / 2


@MODELS
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_learns(recipe, config, corpus):
    with torch.no_grad():
        start = next_byte_loss(convert_model(recipe, config), corpus.batch(0, 0, 64)).item()
    assert start == pytest.approx(math.log(256), rel=0.05)
    assert training.train(recipe, replace(config, steps=14), corpus, CPU).held_out_loss < 0.8 * start


@MODELS
def test_fusion_keeps_the_curve_and_rounding_once_stays_near_it(config, corpus, trained):
    """Layers of their own, and one for q, k and v; both fused as far as they can be."""
    fp8, fused, once, nvfp4, nvfp4_fused = (
        training.train(recipe, replace(config, separate=True), corpus, CPU) for recipe in SEPARATE if recipe != "bf16"
    )
    blocks = len(training.Trainer("bf16", config, CPU).model.layers)
    assert fused.losses == fp8.losses and nvfp4_fused.losses == nvfp4.losses
    assert once.losses != fp8.losses and once.losses == pytest.approx(fp8.losses, rel=0.01)
    assert fused.layers == f"{fp8.layers}, {2 * blocks} modules fused" and once.layers == fused.layers
    assert fused.activation_bytes < fp8.activation_bytes
    merged, merged_once = (trained(recipe, config) for recipe in ("fp8", "fp8_fused_once"))
    assert merged_once.losses != merged.losses and merged_once.losses == pytest.approx(merged.losses, rel=0.01)
    assert merged_once.layers == f"{merged.layers}, {blocks} modules fused"
    with pytest.raises(UsageError, match="add --fuse"):
        training.train("fp8_fused", config, corpus, CPU)


@pytest.mark.parametrize(("recipe", "graphs"), (("fp8", 1), ("fp8_fused_once", 1), ("nvfp4", 2)))
def test_blocks_that_are_alike_are_compiled_once(recipe, graphs):
    """All but nvfp4's last one, which is bf16's: a deep model compiles no longer than a flat one."""
    torch._dynamo.reset()
    counters["stats"]["unique_graphs"] = 0
    throughput.Run(recipe, replace(TINY, compile=True, separate=True, layers=4), [torch.zeros(2, 65).long()])
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_loss_that_is_not_finite_stops_the_recipe(corpus, monkeypatch):
    monkeypatch.setattr(training.Trainer, "step", lambda *args: torch.tensor(math.nan))
    result = training.train("bf16", TINY, corpus, CPU)
    assert result.diverged and len(result.losses) == 1
    assert "diverged at step 1" in train_llm.table([result])


@pytest.mark.parametrize("config, recipe, words", [
    (TINY, "bf16", "every linear layer in bf16"),
    (TINY, "fp8", "8 of 9 linear layers in fp8_128x128"),
    (TINY, "nvfp4", "4 of 9 linear layers in nvfp4_16x16"),
    (MOE, "bf16", "every linear layer and expert in bf16"),
    (MOE, "fp8", "8 of 9 linear layers and 4 of 4 weights of experts in fp8_128x128"),
    (MOE, "nvfp4", "4 of 9 linear layers and 2 of 4 weights of experts in nvfp4_16x16"),
])  # fmt: skip
def test_conversion_spares_the_head_routers_and_nvfp4_the_last_block(config, recipe, words):
    model = training.Trainer("bf16", config, CPU).model
    assert convert(model, recipe) == words
    assert all(type(router.weight) is torch.nn.Parameter for router in model.routers())


# --- mixtures of experts ----------------------------------------------------------------------------------------------


def test_a_mixture_is_its_experts_one_by_one(corpus):
    model = training.build(MOE, CPU)
    mixture, x = model.layers[0].mlp, torch.randn(2, 5, MOE.dim)
    weights, chosen = mixture.router(x.flatten(0, 1))
    expected = mixture.shared(x).flatten(0, 1)
    for t, token in enumerate(x.flatten(0, 1)):
        for weight, e in zip(weights[t], chosen[t]):
            gate, up = (mixture.experts.gate_up[e] @ token).chunk(2)
            expected[t] = expected[t] + weight * (mixture.experts.down[e] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(mixture(x).flatten(0, 1), expected)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_low_precision_keeps_fewer_bytes(corpus):
    config = replace(TINY, steps=1, warmup=0)
    bf16, fp8, nvfp4 = (training.train(r, config, corpus, CPU) for r in RECIPES)
    assert fp8.activation_bytes < bf16.activation_bytes
    head = 2 * 256 * TINY.dim
    linear = bf16.weight_bytes - head
    assert fp8.weight_bytes - head == pytest.approx(linear / 2, rel=0.01)
    # One of the two blocks stays in bf16; the other takes 4.5 bits at most.
    assert nvfp4.weight_bytes - head <= linear / 2 + 4.5 / 16 * linear / 2
