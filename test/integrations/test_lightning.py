"""Lightning with the precision plugin and callbacks: bitwise identical to the same steps by hand."""

import pytest
import torch
from helpers import FP8, NVFP4, assert_same_tensors, mlp, replace
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import NVFP4TrainingConfig, conversion_report
from torchao_blockwise.distributed import MasterWeightOptimizer

lightning = pytest.importorskip("lightning", "2.4")

import lightning_checks  # noqa: E402
from monitored import Monitored  # noqa: E402

from torchao_blockwise.integrations import lightning as ours  # noqa: E402

BATCHES = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(0))


def fit(module, plugin, folder, steps=4, batches=BATCHES, accumulate_grad_batches=2, **options):
    options |= {"plugins": [plugin] if plugin else None, "accumulate_grad_batches": accumulate_grad_batches}
    return lightning_checks.fit(module, folder, steps, batches, **options)


def by_hand(config, precision="32-true"):
    model = mlp()
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    quantize_(model.to(dtype), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for pair in BATCHES.to(dtype).split(2):
        for batch in pair:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                loss = model(batch).float().square().mean()
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    ("recipe", "config", "precision"),
    (
        ("fp8", FP8, "32-true"),
        ("nvfp4", NVFP4TrainingConfig(), "32-true"),
        (FP8, FP8, "bf16-mixed"),
        ("fp8", FP8, "bf16-true"),
    ),
    ids=("fp8", "nvfp4", "mixed", "bf16"),
)
def test_fit_is_the_steps_by_hand(recipe, config, precision, tmp_path):
    """With gradient accumulation in `weights_unchanged` and a monitor, which is stepped once an optimizer step."""
    monitored, module = Monitored(), lightning_checks.Module()
    callbacks = [ours.UnchangedWeights(), ours.Numerics(monitored.make)]
    fit(module, ours.BlockwisePrecision(recipe, precision), tmp_path, callbacks=callbacks)
    monitored.check(steps=[0, 2], layers=2)
    assert_same_tensors(module.model.state_dict(), by_hand(config, precision).state_dict())


def test_the_microbatches_of_a_step_share_a_scope(tmp_path, monkeypatch):
    scopes, enter = [], ours.weights_unchanged
    monkeypatch.setattr(ours, "weights_unchanged", lambda *args, **how: scopes.append(args) or enter(*args, **how))
    plugin = ours.BlockwisePrecision("fp8")
    fit(lightning_checks.Module(), plugin, tmp_path, steps=4, callbacks=[ours.UnchangedWeights()])
    assert len(scopes) == 4


class Quantized(lightning_checks.Module):
    """Quantized Parameters by `quantize_`; their masters are saved as the optimizer's states."""

    def __init__(self, config):
        super().__init__(mlp(replace(config, master_weights=False)))

    def configure_optimizers(self):
        return MasterWeightOptimizer(torch.optim.AdamW, self, lr=1e-2)


@pytest.mark.parametrize(("recipe", "config"), (("fp8", None), ("nvfp4", None), (None, FP8), (None, NVFP4)))
def test_resumes(recipe, config, tmp_path):
    """Bit for bit; of one batch, as a trainer that resumes begins with the first one again."""
    one, saved = {"batches": BATCHES[:1], "accumulate_grad_batches": 1}, tmp_path / "half.ckpt"
    whole, begun, resumed = (lightning_checks.Module() if recipe else Quantized(config) for _ in range(3))
    plugin = lambda: ours.BlockwisePrecision(recipe) if recipe else None  # noqa: E731
    fit(whole, plugin(), tmp_path, 4, **one)
    fit(begun, plugin(), tmp_path, 2, **one).save_checkpoint(saved)
    assert all(type(x) is torch.Tensor for x in torch.load(saved, weights_only=True)["state_dict"].values())
    fit(resumed, plugin(), tmp_path, 4, **one, ckpt_path=str(saved))
    assert_same_tensors(resumed.model.state_dict(), whole.model.state_dict())


def test_an_exception_leaves_the_scope_and_closes_the_monitor(tmp_path):
    class Fails(lightning.Callback):
        def on_train_batch_end(self, *args):
            raise KeyError("on purpose")

    monitored, module = Monitored(), lightning_checks.Module()
    callbacks = [ours.UnchangedWeights(), ours.Numerics(monitored.make), Fails()]
    with pytest.raises(KeyError, match="on purpose"):
        fit(module, ours.BlockwisePrecision("fp8"), tmp_path, callbacks=callbacks)
    assert monitored.closed == 1
    with torch.no_grad():
        module.model[0].weight.mul_(2)
    # A scope that was left open would refuse the changed weight.
    module.model(BATCHES[0])


def test_modules_and_names_that_do_not_fit(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'nvfp4'"):
        ours.BlockwisePrecision("nvfp")
    with pytest.raises(ValueError, match=r"precision must be one of .*'bf16-mixed'"):
        ours.BlockwisePrecision("fp8", "bf16-mix")
    with pytest.raises(ValueError, match=r"Module: none of the .* was converted"):
        fit(lightning_checks.Module(nn.Sequential(nn.Conv1d(1, 1, 1))), ours.BlockwisePrecision("fp8"), tmp_path)
    by_hand = lightning_checks.Module(mlp(NVFP4))
    assert ours.BlockwisePrecision("fp8").convert_module(by_hand) is by_hand
    assert by_hand.model[0].weight.config == NVFP4 and conversion_report(by_hand).totals["converted"]
