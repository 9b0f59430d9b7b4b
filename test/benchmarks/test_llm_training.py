"""Training of benchmarks/train_llm.py: same start and data for every recipe, exact resumption, experts and memory."""

import functools
import math
from dataclasses import replace

import pytest
import torch
import train_llm
from llm_cases import CPU, MODELS, MOE, TEXT, TINY
from llm_training import checkpoint, throughput, training
from llm_training.config import RunConfig, UsageError
from llm_training.data import Corpus
from llm_training.model import next_byte_loss
from llm_training.recipes import DEFAULT as RECIPES
from llm_training.recipes import SEPARATE, convert
from torch._dynamo.utils import counters

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("train_llm_alike")]
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
CORPUS = Corpus.from_bytes(TEXT, "text", TINY.seq_len, TINY.held_out_sequences)


def train(recipe: str, config: RunConfig, *args, **options) -> training.Result:
    return training.train(recipe, config, CORPUS, CPU, *args, **options)


# Runs from the first step to the last, which repeat.
trained = functools.cache(train)


def curve(result: training.Result) -> tuple:
    return *result.losses, result.held_out_loss


def converted(recipe: str, config: RunConfig) -> torch.nn.Module:
    model = training.Trainer("bf16", config, CPU).model
    convert(model, recipe)
    return model


@MODELS
@every_recipe
def test_every_recipe_starts_from_the_same_weights_and_learns(recipe, config):
    expected, model = converted("bf16", config).state_dict(), converted(recipe, config)
    assert expected.keys() == model.state_dict().keys()
    assert all(torch.equal(expected[name], x) for name, x in model.state_dict().items())
    with torch.no_grad():
        start = next_byte_loss(model, CORPUS.batch(0, 0, 64)).item()
    assert start == pytest.approx(math.log(256), rel=0.05)
    assert train(recipe, replace(config, steps=14)).held_out_loss < 0.8 * start


@MODELS
@pytest.mark.parametrize("recipe", ("fp8", "nvfp4_full"))
def test_quantized_parameters_train_as_master_weights_do(recipe, config):
    """Masters that only the optimizer has, in fp32 as the weights are, are cast to the same bits."""
    assert curve(trained(recipe, config)) == curve(trained(f"{recipe}_parameters", config))
    assert trained(recipe, config).losses != trained("bf16", config).losses


@MODELS
@every_recipe
def test_a_resumed_run_repeats_the_uninterrupted_one_bitwise(recipe, config, tmp_path, monkeypatch):
    step = training.Trainer.step

    def interrupted(self, windows, at, *part):
        if at == 5:
            raise KeyboardInterrupt
        return step(self, windows, at, *part)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training.Trainer, "step", interrupted)
        train(recipe, config, tmp_path, checkpoint_every=2)
    assert len(torch.load(checkpoint.path_of(tmp_path, recipe), weights_only=True)["losses"]) == 4
    torch.manual_seed(12345)
    assert curve(train(recipe, config, tmp_path)) == curve(trained(recipe, config))


@MODELS
def test_recipes_begin_with_one_start_in_bf16(config, tmp_path, monkeypatch):
    """As a run in bf16 went there, bit for bit; the last bit of weights matters after it."""
    whole, seen, step = trained("bf16", config), [], training.Trainer.step
    config = replace(config, bf16_steps=4)
    monkeypatch.setattr(training.Trainer, "step", lambda self, x, at: seen.append(at) or step(self, x, at))
    start = tmp_path / "start.pt"
    training.train_start(config, CORPUS, CPU, start)
    runs = {recipe: train(recipe, config, start=start) for recipe in ("bf16", "fp8", "nvfp4_full")}
    runs["perturbed"] = train("bf16", config, start=start, draw=1)
    assert seen == [*range(4), *[4, 5, 6, 7] * len(runs)]
    assert curve(runs["bf16"]) == curve(whole)
    assert all(run.losses[:4] == whole.losses[:4] and len(run.losses) == 8 for run in runs.values())
    assert len({run.losses[4] for run in runs.values()}) == len({run.held_out_loss for run in runs.values()}) == 4
    runs["fp8"].seconds = [100.0] * 4 + [1.0] * 4
    assert runs["fp8"].tokens_per_second == config.tokens_per_step
    with pytest.raises(UsageError, match="its optimizer has masters"):
        train("fp8_parameters", config, start=start)


@pytest.mark.parametrize("graph", (False, True))
@pytest.mark.parametrize("recipe", ("bf16", "fp8_parameters"))
def test_a_state_loads_with_and_without_a_cuda_graph(recipe, graph, tmp_path):
    """How the optimizer runs a step is decided by the run that loads the state, not by the one that saved it."""
    path = tmp_path / "state.pt"
    training.Trainer(recipe, replace(TINY, cuda_graph=not graph), CPU).save(path, CORPUS)
    trainer = training.Trainer(recipe, replace(TINY, cuda_graph=graph), CPU)
    trainer.load(path, CORPUS)
    for optimizer in {trainer.optimizer, getattr(trainer.optimizer, "inner", trainer.optimizer)}:
        for group in optimizer.param_groups:
            assert group["capturable"] is isinstance(group["lr"], torch.Tensor) is graph


def test_grad_accumulation_sees_the_same_batch():
    """The first losses are one mean, summed in two orders; later ones are as near as if GEMMs summed in another.

    That run, `products="fp32"`, is the control: both differ from the first only by roundings, which add up as far.
    """
    whole = replace(TINY, batch_size=4)
    configs = (whole, replace(TINY, batch_size=2, grad_accumulation=2), replace(whole, products="fp32"))
    one, two, control = (torch.tensor(train("bf16", config).losses, dtype=torch.float64) for config in configs)
    assert (two - one)[0].abs() <= 2 * whole.tokens_per_step * 2.0**-24 * one[0]
    assert (two - one).abs().max() <= 2 * (control - one).abs().max()


@MODELS
def test_checkpointing_and_fusion_keep_the_curve(config):
    """Rounding once stays near it; what is fused is said."""
    fp8, separate = trained("fp8", config), replace(config, separate=True)
    assert train("fp8", replace(config, activation_checkpointing=True)).losses == fp8.losses
    apart, fused, once = (train(recipe, separate) for recipe in SEPARATE[1:4])
    assert fused.losses == apart.losses != once.losses == pytest.approx(apart.losses, rel=0.01)
    assert fused.layers.startswith(f"{apart.layers}, ") and fused.layers.endswith(" modules fused")
    with pytest.raises(UsageError, match="add --fuse"):
        train("fp8_fused", config)


@pytest.mark.parametrize(("recipe", "graphs"), (("fp8", 1), ("fp8_fused_once", 1), ("nvfp4", 2)))
def test_blocks_that_are_alike_are_compiled_once(recipe, graphs):
    """All but nvfp4's last one, which is bf16's: a deep model compiles no longer than a flat one."""
    torch._dynamo.reset()
    counters["stats"]["unique_graphs"] = 0
    throughput.Run(recipe, replace(TINY, compile=True, separate=True, layers=4), [torch.zeros(2, 65).long()])
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_loss_that_is_not_finite_stops_the_recipe(monkeypatch):
    monkeypatch.setattr(training.Trainer, "step", lambda *args: torch.tensor(math.nan))
    result = train("bf16", TINY)
    assert result.diverged and len(result.losses) == 1
    assert train_llm.row(result, None)["held-out loss"] == "diverged at step 1"


@pytest.mark.parametrize(
    ("config", "recipe", "words"),
    (
        (TINY, "bf16", "every layer in bf16"),
        (TINY, "fp8", "8 of 9 layers in fp8_128x128, grad_weight 1x128"),
        # Four weights of experts and two routers more.
        (MOE, "fp8", "12 of 15 layers in fp8_128x128, grad_weight 1x128"),
        (MOE, "nvfp4", "6 of 15 layers in nvfp4_16x16"),
    ),
)
def test_conversion_spares_the_head_routers_and_nvfp4_the_last_block(config, recipe, words):
    model = training.Trainer("bf16", config, CPU).model
    assert convert(model, recipe) == words
    assert all(type(router.weight) is torch.nn.Parameter for router in model.routers())


def test_a_mixture_is_its_experts_one_by_one():
    mixture, x = training.Trainer("bf16", MOE, CPU).model.layers[0].mlp, torch.randn(2, 5, MOE.dim)
    weights, chosen = mixture.router(x.flatten(0, 1))
    expected = mixture.shared(x).flatten(0, 1)
    for t, token in enumerate(x.flatten(0, 1)):
        for weight, e in zip(weights[t], chosen[t]):
            gate, up = (mixture.experts.gate_up[e] @ token).chunk(2)
            expected[t] = expected[t] + weight * (mixture.experts.down[e] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(mixture(x).flatten(0, 1), expected)
