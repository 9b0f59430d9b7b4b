"""Checks that ranks run on converted models that DeepSpeed trains, on the CPU over gloo."""

import importlib.util

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import FP8, assert_same_tensors, mlp, replace
from torchao.quantization import quantize_

from torchao_blockwise import NVFP4TrainingConfig, load_recipe_state, recipe_state, weights_unchanged
from torchao_blockwise.testing import assert_bitwise_equal

# Importing it chooses its accelerator.
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

RECIPES = {"fp8": FP8, "nvfp4": NVFP4TrainingConfig()}
STEPS, ACCUMULATED = 4, 2


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * number + rank))


def config_of(stage: int, batch: int, of_stage_3: dict) -> dict:
    return {
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": {"stage": stage, "overlap_comm": False} | (of_stage_3 if stage == 3 else {}),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def engine_of(model, stage: int):
    import deepspeed

    # Shards Parameters of any size.
    config = config_of(stage, 8, {"stage3_param_persistence_threshold": 0})
    config["gradient_accumulation_steps"] = ACCUMULATED
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine, rank: int, steps: range) -> list[float]:
    losses = []
    for number in range(ACCUMULATED * steps.start, ACCUMULATED * steps.stop):
        loss = engine(batch(rank, number)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def values(engine) -> dict[str, torch.Tensor]:
    import deepspeed

    parameters = [p for p in engine.module.parameters() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(parameters, enabled=bool(parameters)):
        return {name: x.clone() for name, x in engine.module.state_dict().items()}


def by_hand(rank: int, recipe: str, stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same steps in data parallelism: ZeRO-1 reduces sums over microbatches, ZeRO-2 and 3 each microbatch."""

    def reduced(gradients):
        for gradient in gradients:
            dist.all_reduce(gradient.div_(dist.get_world_size()))
        return gradients

    model, losses, total = mlp(RECIPES[recipe]), [], None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(ACCUMULATED * STEPS):
        loss = model(batch(rank, number)).square().mean()
        gradients = torch.autograd.grad(loss / ACCUMULATED, list(model.parameters()))
        gradients = reduced(gradients) if stage > 1 else gradients
        total = gradients if total is None else [x + y for x, y in zip(total, gradients)]
        losses.append(loss.item())
        if number % ACCUMULATED == ACCUMULATED - 1:
            for p, gradient in zip(model.parameters(), total if stage > 1 else reduced(total)):
                p.grad = gradient
            optimizer.step()
            total = None
    return losses, model.state_dict()


def trains(rank: int, stage: int, recipe: str) -> None:
    """Losses and values of the steps by hand, bit for bit; ZeRO-3 frees the weights between steps."""
    engine = engine_of(mlp(RECIPES[recipe]), stage)
    losses, expected = by_hand(rank, recipe, stage)
    assert train(engine, rank, range(STEPS)) == losses
    got = values(engine)
    assert losses[-1] < losses[0] and all(type(x) is torch.Tensor for x in got.values())
    assert_same_tensors(got, expected)
    bytes_held = engine.module[0].weight.hp.untyped_storage().nbytes()
    assert (bytes_held == 0) == (stage == 3), bytes_held


def resumes(rank: int, stage: int, recipe: str) -> None:
    """Two of four steps from a checkpoint, bit for bit; unconverted models load it."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with ranks.shared_folder() as folder:
        whole, again = (engine_of(mlp(RECIPES[recipe]), stage) for _ in range(2))
        train(whole, rank, range(2))
        saved = values(whole)
        whole.save_checkpoint(folder, "two", client_state={"recipe": recipe_state(whole.module)})
        _, client_state = again.load_checkpoint(folder, "two")
        load_recipe_state(again.module, client_state["recipe"])
        assert train(again, rank, range(2, 4)) == train(whole, rank, range(2, 4))
        assert_same_tensors(values(again), values(whole))
        state = get_fp32_state_dict_from_zero_checkpoint(folder, "two")
        mlp().load_state_dict(state)
        for name, x in saved.items():
            assert type(state[name]) is torch.Tensor
            assert_bitwise_equal(state[name], x, name)


def refuses(rank: int, stage: int) -> None:
    """Quantized Parameters, weights that are sharded already, and scopes in which ZeRO-3 would gather them again."""
    for config in RECIPES.values():
        with pytest.raises(NotImplementedError, match=r"0\.weight.* high-precision weights \(master_weights=True\)"):
            engine_of(mlp(replace(config, master_weights=False)), stage)
    engine = engine_of(mlp(), stage)
    reason = "DeepSpeed shards its weight; convert before deepspeed.initialize" if stage == 3 else "parallel wrappers"
    with pytest.raises(ValueError, match=rf"2 of 2 layers cannot be converted, so nothing was changed(?s:.*){reason}"):
        quantize_(engine.module, FP8)
    train(engine, rank, range(1))
    if stage == 3:
        engine = engine_of(mlp(FP8), stage)
        with pytest.raises(RuntimeError, match=r"0\.weight was replaced inside the scope"), weights_unchanged(engine):
            train(engine, rank, range(1))


def trainer(rank: int, stage: int) -> None:
    """Hugging Face's Trainer trains a converted model in ZeRO, and saves plain weights that load converted."""
    transformers = pytest.importorskip("transformers", "5.0")
    from trainer_checks import plain_model, rows

    from torchao_blockwise.integrations.transformers import BlockwiseFP8Config

    config = config_of(stage, 2, {"stage3_gather_16bit_weights_on_model_save": True})
    with ranks.shared_folder() as folder:
        if rank == 0:
            plain_model().save_pretrained(folder / "plain")
        dist.barrier()
        load = transformers.AutoModelForCausalLM.from_pretrained
        args = transformers.TrainingArguments(
            str(folder / "out"), deepspeed=config, max_steps=8, per_device_train_batch_size=2, learning_rate=1e-2,
            report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", optim="adamw_torch", logging_steps=1,
        )  # fmt: skip
        model = load(folder / "plain", quantization_config=BlockwiseFP8Config())
        made = transformers.Trainer(model, args, train_dataset=rows(4) * 8)
        made.train()
        losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        assert losses[-1] < 0.9 * losses[0], losses
        made.save_model(str(folder / "saved"))
        dist.barrier()
        saved, before = load(folder / "saved"), plain_model().state_dict()
        assert type(saved.model.layers[0].mlp.up_proj.weight).__name__ == "MasterWeightTensor"
        for name, x in values(made.model_wrapped).items():
            assert_bitwise_equal(saved.state_dict()[name], x, name)
            assert not torch.equal(x, before[name])


CASES = {
    2: (
        [
            *(("trains", stage, recipe) for stage in (1, 2, 3) for recipe in ("fp8", "nvfp4")),
            *(("resumes", 2, "fp8"), ("resumes", 3, "nvfp4"), ("refuses", 2), ("refuses", 3)),
            *(("trainer", 2), ("trainer", 3)),
        ],
        [],
    )
}


def start(rank: int, count: int) -> None:
    ranks.set_environment(rank, count, DS_ACCELERATOR="cpu")
    import deepspeed

    deepspeed.init_distributed("gloo")
