"""MasterWeightOptimizer in one process: training, groups, schedulers and scalers, refusals."""

import copy

import pytest
import torch
from fsdp_models import adamw, both, every_config
from helpers import FP8, mlp, replace
from primary_weight_checks import assert_holds_masters, assert_masters, batch, net, primary, quantized, train
from torch import nn
from torch.optim import lr_scheduler

from torchao_blockwise import NVFP4Tensor
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.testing import assert_bitwise_equal


def trains_alike(run, config="mixed", optimizer_class=torch.optim.AdamW, params=None, **options):
    """`run(model, optimizer)` returns the same for master weights and for quantized Parameters with masters.

    params: of a model, what the optimizer gets. Returns (result, model with master weights, model, optimizer).
    """
    results, models = [], []
    for master_weights in (True, False):
        model = net(config, master_weights)
        given = list(model.parameters()) if params is None else params(model)
        options = options or {"lr": 1e-2}
        if master_weights:
            optimizer = optimizer_class(given, **options)
        else:
            optimizer = MasterWeightOptimizer(optimizer_class, model, given, **options)
        results.append(run(model, optimizer))
        models.append(model)
    assert results[0] == results[1]
    return results[1], *models, optimizer


@both
def test_weights_of_bf16_models_have_fp32_masters(config):
    """By hand: fp32 master and states, gradients cast to fp32, the weight quantized from the rounded master."""
    model, values = primary(config, dtype=torch.bfloat16)
    optimizer = adamw(model)
    master = nn.Parameter(values["up.weight"].float())
    by_hand = torch.optim.AdamW([master], lr=1e-2)
    for step in range(4):
        model(batch(step).bfloat16()).float().square().mean().backward()
        assert type(model.up.weight.grad) is torch.Tensor and model.up.weight.grad.dtype == torch.bfloat16
        master.grad = model.up.weight.grad.float()
        optimizer.step()
        optimizer.zero_grad()
        by_hand.step()
        assert_bitwise_equal(optimizer.master(model.up.weight), master.detach())
        assert model.up.weight.dtype == torch.bfloat16
        assert torch.equal(model.up.weight, quantized(master.detach(), model.up.weight))


def test_a_learning_rate_in_a_tensor():
    trains_alike(lambda m, o: train(m, o, 6), optimizer_class=torch.optim.Adam, lr=torch.tensor(1e-2))


def test_closures():
    def run(model, optimizer):
        seen = []

        def closure():
            optimizer.zero_grad()
            loss = model(batch(0)).square().mean()
            loss.backward()
            seen.append(loss.item())
            return loss

        return seen, [optimizer.step(closure).item() for _ in range(3)]

    def params(model):
        model.idle.requires_grad_(False)
        return [p for p in model.parameters() if p.requires_grad]

    (seen, _), *_ = trains_alike(run, "fp8", torch.optim.LBFGS, params, lr=0.1, max_iter=4)
    assert len(seen) == 12


@both
def test_gradients_of_quantized_parameters(config):
    """Plain, high-precision, accumulated in place, seen by hooks; the optimizer keeps none of them."""
    model, _ = primary(config)
    weight, fired = model.up.weight, []
    weight.register_hook(lambda g: fired.append(type(g)))
    weight.register_post_accumulate_grad_hook(lambda p: fired.append(type(p.grad)))
    optimizer = adamw(model)
    model(batch(0)).sum().backward()
    grad, once = weight.grad, weight.grad.clone()
    model(batch(0)).sum().backward()
    assert weight.grad is grad and type(grad) is torch.Tensor and fired == [torch.Tensor] * 4
    assert_bitwise_equal(grad, 2 * once)
    optimizer.step()
    assert weight.grad is grad and optimizer.inner.param_groups[0]["params"][0].grad is None
    optimizer.zero_grad()
    assert weight.grad is None
    if hasattr(weight, "grad_dtype"):
        bf16, _ = primary(config, dtype=torch.bfloat16)
        bf16.up.weight.grad_dtype = torch.float32
        optimizer = adamw(bf16)
        bf16(batch(0).bfloat16()).sum().backward()
        assert bf16.up.weight.grad.dtype == torch.float32
        optimizer.step()
        assert_holds_masters(optimizer, bf16)


def test_a_step_changes_weights_only_by_gradients_and_backward_sees_it():
    model, _ = primary()
    optimizer, before = adamw(model), copy.deepcopy([*primary()[0].parameters()])
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())) and not optimizer.state
    out = model(batch(0)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def groups_of(model):
    first, second = [model.up.weight, model.up.bias], [model.mid.weight, model.frozen.weight, model.norm.weight]
    return [{"params": first, "lr": 1e-3}, {"params": []}, {"params": second, "weight_decay": 0.5}]


def test_groups():
    """That they train as those of master weights, one added later too, primary_weight_checks.py shows."""
    model, _ = primary()
    optimizer = adamw(model, params=groups_of(model))
    train(model, optimizer, 1)
    assert optimizer.param_groups[2]["params"] == [model.mid.weight, model.norm.weight], "a frozen weight has no master"
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        optimizer.add_param_group({"params": [model.mid.weight]})
    rows = nn.Parameter(NVFP4Tensor.from_hp(torch.zeros(32, 32), block_size=(1, 16)))
    with pytest.raises(ValueError, match="has blocks of 1x16; create it with square blocks"):
        optimizer.add_param_group({"params": [rows]})
    assert len(optimizer.param_groups) == len(optimizer.inner.param_groups) == 3
    model.frozen.weight.requires_grad_(True)
    with pytest.warns(UserWarning, match="1 of 1 weights start from the quantized values: frozen.weight; create"):
        optimizer.add_param_group({"params": [model.frozen.weight]})
    assert_bitwise_equal(optimizer.master(model.frozen.weight), model.frozen.weight.dequantize())


def test_named_parameters():
    model, _ = primary()
    optimizer = adamw(model, params=model.named_parameters())
    names = optimizer.param_groups[0]["param_names"]
    assert "up.weight" in names and "frozen.weight" not in names
    assert len(names) == len(optimizer.param_groups[0]["params"])
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["param_names"] == names


@every_config
def test_a_scheduler_sets_options(config):
    def run(model, optimizer):
        scheduler, seen = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8), []
        for step in range(6):
            seen += train(model, optimizer, 1, first=step)
            scheduler.step()
            seen += [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"], scheduler.get_last_lr()]
        return seen

    _, plain, model, optimizer = trains_alike(run, config)
    assert optimizer.inner.param_groups[0]["lr"] != optimizer.param_groups[0]["lr"], "options pass when stepping"
    assert_holds_masters(optimizer, model)
    assert_masters(optimizer, plain.state_dict())


def test_grad_scaler():
    def run(model, optimizer):
        scaler, seen = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2), []
        for step in range(6):
            loss = model(batch(step)).square().mean()
            scaler.scale(loss * (float("inf") if step == 2 else 1)).backward()
            scaler.unscale_(optimizer)
            seen += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.1).isfinite().item()]
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return seen

    seen, *_ = trains_alike(run)
    assert seen[7] is False


def test_hooks_and_state():
    model, _ = primary()
    optimizer, called = adamw(model), []
    optimizer.register_step_pre_hook(lambda *args: called.append("before"))
    optimizer.register_step_post_hook(lambda *args: called.append("after"))
    train(model, optimizer, 1)
    assert called == ["before", "after"]
    for p in (model.up.weight, model.up.bias):
        assert optimizer.state[p]["exp_avg"].shape == p.shape and optimizer.state[p]["exp_avg"].dtype == torch.float32
    assert len(optimizer.state) == len([p for p in model.parameters() if p.requires_grad]) - 2, "idle ones have none"


def _load_other_shape(model):
    state = adamw(primary()[0]).state_dict()
    state["state"][0]["master"] = torch.zeros(76, 37)
    adamw(model).load_state_dict(state)


REFUSALS = {
    "no class": (lambda m: MasterWeightOptimizer(torch.optim.AdamW(m.parameters()), m), TypeError,
                 "optimizer_class must be an optimizer's class, got AdamW"),
    "no model": (lambda m: MasterWeightOptimizer(torch.optim.AdamW, [*m.parameters()]), TypeError,
                 "model must be the converted nn.Module, got a list; pass parameters as params="),
    "shard": (lambda m: adamw(m, shard="zero3"), ValueError, 'shard must be "zero1", "zero2" or None, got .zero3.'),
    "no ranks": (lambda m: adamw(m, shard="zero1"), ValueError, "needs ranks; call torch.distributed.init_process_gr"),
    "option": (lambda m: adamw(m, betas=(2, 2)), ValueError, "Invalid beta parameter"),
    "shape": (_load_other_shape, ValueError, r"of up.weight must have shape \[75, 37\], got \[76, 37\]; load the full"),
    "groups": (lambda m: adamw(m, params=groups_of(m)).load_state_dict(adamw(primary()[0]).state_dict()), ValueError,
               "different number of parameter groups"),
    "copied": (lambda m: copy.deepcopy(adamw(m)), TypeError, r"cannot be copied or pickled.*load state_dict\(\)"),
    "DDP flattens": (lambda m: m.up.weight.view(-1), ValueError, r"\(DistributedDataParallel: init_sync=False;"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(make, kind, message):
    with pytest.raises(kind, match=message):
        make(primary()[0])


class Averaging(torch.optim.SGD):
    """As schedule-free optimizers: `eval` puts other values into the parameters, and `train` the first ones back."""

    def train(self, change=-1.0, training=True):
        for group in self.param_groups:
            group["training"] = training
            for p in group["params"]:
                p.data.add_(change)

    def eval(self):
        self.train(1.0, training=False)

    def step(self, closure=None):
        assert all(group["training"] for group in self.param_groups), "call train()"
        return super().step(closure)


def test_modes_of_the_wrapped_optimizer_change_the_model():
    model = mlp(replace(FP8, master_weights=False), features=(64, 64, 64), bias=False)
    optimizer, w = MasterWeightOptimizer(Averaging, model, lr=0.1), model[0].weight
    before = w.dequantize()
    optimizer.train()
    trains = w.dequantize()
    assert torch.allclose(trains, before - 1, atol=0.1) and optimizer.param_groups[0]["training"]
    w.grad = torch.full((64, 64), 5.0)
    optimizer.step()
    optimizer.eval()
    assert torch.allclose(w.dequantize(), before - 0.5, atol=0.05)
    assert not optimizer.param_groups[0]["training"]


def test_an_optimizer_without_modes_ignores_them():
    """The Trainer calls `train` of any optimizer that has it."""
    model = mlp(replace(FP8, master_weights=False))
    optimizer = MasterWeightOptimizer(torch.optim.SGD, model, lr=0.1)
    before = model[0].weight.qdata.clone()
    optimizer.train()
    optimizer.eval()
    assert torch.equal(model[0].weight.qdata, before)
