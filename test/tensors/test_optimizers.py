"""Optimizer steps on master weights, eager and compiled: the values of plain weights, and as many graph breaks."""

from __future__ import annotations

import inspect

import pytest
import torch
from helpers import FP8, assert_same, mlp, saved_and_loaded
from torch._dynamo.utils import counters

from torchao_blockwise import MasterWeightTensor

pytestmark = [
    pytest.mark.usefixtures("no_interpreter", "fresh_dynamo"),
    # PyTorch's: of a learning rate that is read, and of what Dynamo leaves out.
    pytest.mark.filterwarnings("ignore"),
]

LR = {"lr": torch.tensor(1e-2)}
MOMENTUM = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
OPTIMIZERS = {
    name: (optimizer, {})
    for name, optimizer in vars(torch.optim).items()
    if inspect.isclass(optimizer) and issubclass(optimizer, torch.optim.Optimizer) and name != "Optimizer"
} | {
    "SGD_tensor_lr": (torch.optim.SGD, LR),
    "SGD_momentum": (torch.optim.SGD, MOMENTUM),
    "RMSprop_centered": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "Adadelta_tensor_lr": (torch.optim.Adadelta, LR),
    "AdamW_tensor_lr": (torch.optim.AdamW, LR),
    "AdamW_single": (torch.optim.AdamW, {"foreach": False}),
    "AdamW_fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW_amsgrad": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "SGD_fused": (torch.optim.SGD, {"fused": True}),
}
# Those whose steps needed an operation that was refused, or fall back to eager.
QUICK = ("SGD_tensor_lr", "RMSprop", "Adafactor", "AdamW")
STEPS = [
    pytest.param(*case, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, case in OPTIMIZERS.items()
]


def steps(optimizer, options, config, compiled=None, dtype=torch.float32):
    """(values of the weights after three steps, number of graph breaks)."""
    model = mlp(config, features=(32, 48, 32), dtype=dtype)
    weights = [p for p in model.parameters() if optimizer is not torch.optim.Muon or p.dim() == 2]
    optimizer = optimizer(weights, **options)
    torch._dynamo.reset()
    counters.clear()
    step = optimizer.step if compiled is None else torch.compile(optimizer.step, backend=compiled)
    for i in range(3):
        for j, p in enumerate(weights):
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * i + j)).to(dtype)
            p.grad = grad.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else grad
        step(*([lambda: torch.ones(())] if isinstance(optimizer, torch.optim.LBFGS) else []))
    states = [x for state in optimizer.state.values() for x in state.values()]
    assert not any(isinstance(x, MasterWeightTensor) for x in states)
    return [getattr(p, "hp", p).detach() for p in weights], sum(counters["graph_break"].values())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps(optimizer, options, dtype):
    plain, ours = (steps(optimizer, options, config, dtype=dtype)[0] for config in (None, FP8))
    assert_same(ours, plain)
    # PyTorch's fused SGD for CPUs leaves bf16 parameters as they are.
    assert dtype is torch.bfloat16 or not torch.equal(ours[0], mlp(features=(32, 48, 32))[0].weight)


def test_state_dicts_load_across():
    weights = []
    for first, then in ((None, None), (None, FP8), (FP8, None)):
        a, b = (mlp(config, features=(32, 48, 32)) for config in (first, then))
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (a, b)]
        for p in a.parameters():
            p.grad = torch.ones(p.shape)
        optimizers[0].step()
        b.load_state_dict(saved_and_loaded(a.state_dict()))
        optimizers[1].load_state_dict(saved_and_loaded(optimizers[0].state_dict()))
        for p in b.parameters():
            p.grad = torch.full(p.shape, 0.5)
        optimizers[1].step()
        weights.append([getattr(p, "hp", p).detach() for p in b.parameters()])
    assert_same(weights[1], weights[0])
    assert_same(weights[2], weights[0])


# The first one decomposes as inductor does, and compiles no kernels.
BACKENDS = ("aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow))
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@every_backend
@pytest.mark.parametrize(("optimizer", "options"), STEPS)
def test_compiled_steps(optimizer, options, backend):
    (plain, breaks), (ours, own_breaks) = (steps(optimizer, options, config, backend) for config in (None, FP8))
    assert own_breaks == breaks
    assert_same(ours, plain)


def adamw_step(p, grad, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, decay):
    """As nanochat writes it: all numbers are tensors, so that none of them recompiles."""
    p.mul_(1 - lr * decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad.square(), 1 - beta2)
    denominator = (exp_avg_sq / (1 - beta2**step)).sqrt() + eps
    p.add_(exp_avg / denominator, alpha=-(lr / (1 - beta1**step)))
    p.addcdiv_(exp_avg, denominator, value=-1e-3)
    p.addcmul_(exp_avg, grad, value=1e-3)


@every_backend
def test_a_step_of_tensors_compiles_whole(backend):
    results = []
    for config in (None, FP8):
        p = mlp(config, features=(32, 48, 32))[0].weight
        torch.manual_seed(0)
        grad, exp_avg, exp_avg_sq = torch.randn(p.shape), torch.zeros(p.shape), torch.zeros(p.shape)
        numbers = [torch.tensor(x) for x in (1.0, 0.01, 0.9, 0.95, 1e-8, 0.1)]
        step = torch.compile(adamw_step, fullgraph=True, dynamic=False, backend=backend)
        with torch.no_grad():
            for _ in range(2):
                step(p, grad, exp_avg, exp_avg_sq, *numbers)
        results.append(getattr(p, "hp", p).detach())
    assert torch.equal(*results)
