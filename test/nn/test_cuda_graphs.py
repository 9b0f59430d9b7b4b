"""Ways to replay training from CUDA graphs: each step has the bits of an eager one, and sees the weights of then."""

import contextlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gpu_steps import capture, check_captured_training, check_training_without_syncs
from helpers import FP8, FP8_ROWS, FULL, NVFP4, assert_same_gradients, assert_same_tensors
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import linears_and_experts, load_recipe_state, recipe_state, weights_unchanged
from torchao_blockwise.nn import SwiGLUExperts, SwiGLUMLP, permute, unpermute
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu

DIM, TOKENS, STEPS = 256, 320, 5


class Experts(nn.Module):
    """Three experts, of which one has no tokens."""

    def __init__(self):
        super().__init__()
        self.experts = SwiGLUExperts(3, DIM, 384)
        self.register_buffer("ends", torch.tensor([100, 100, TOKENS], dtype=torch.int32))

    def forward(self, x):
        return self.experts(x, self.ends)


class MoE(nn.Module):
    """A router in high precision, tokens sorted by expert, an MLP an expert, and what top-k experts say summed."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, 8, bias=False)
        self.gate_up = nn.Parameter(torch.randn(8, 2 * 384, DIM) * DIM**-0.5)
        self.down = nn.Parameter(torch.randn(8, DIM, 384) * 384**-0.5)

    def forward(self, x):
        scores, ids = self.router(x).softmax(-1).topk(2, -1)
        tokens, source, ends = permute(x, ids, 8)
        gate, up = F.grouped_mm(tokens, self.gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        return unpermute(out, source, 2, scores)


MODELS = {"linear": lambda: nn.Linear(DIM, DIM), "swiglu": lambda: SwiGLUMLP(DIM, 384), "experts": Experts, "moe": MoE}
every_model = pytest.mark.parametrize("kind", MODELS)
models_of_fixed_groups = pytest.mark.parametrize("kind", ("linear", "swiglu", "experts"))
# Of the last one replays draw random bits, others each time.
CONFIGS = {"fp8": FP8, "fp8_1x128": FP8_ROWS, "nvfp4": NVFP4, "nvfp4_full": FULL}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def make(kind: str, config) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[kind]().cuda()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    quantize_(model, config, filter_fn=linears_and_experts())
    assert kind != "moe" or type(model.router.weight) is nn.Parameter
    return model


def batches() -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    # Another direction each, so that other experts are chosen every time.
    return torch.randn(STEPS, TOKENS, DIM, **options) + torch.randn(STEPS, 1, DIM, **options)


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True, capturable=True)


def gradients_of(model: nn.Module, call, x: torch.Tensor) -> torch.Tensor:
    """The loss, with new gradients of the weights."""
    model.zero_grad(set_to_none=True)
    loss = call(x).float().square().mean()
    loss.backward()
    return loss


def check_steps(replayed: nn.Module, eager: nn.Module, gradients, call=None) -> None:
    """`gradients(x)` has the losses and gradients of `eager`, while optimizers outside change the weights of both.

    call: how `eager` is called, if not by itself.
    """
    call = eager if call is None else call
    # Runs before a capture have drawn random bits.
    load_recipe_state(replayed, recipe_state(eager))
    optimizers = [adamw(model.parameters()) for model in (replayed, eager)]
    losses = []
    for x in batches():
        loss, want = gradients(x).detach().clone(), gradients_of(eager, call, x).detach()
        assert_bitwise_equal(loss, want, "loss")
        assert_same_gradients(replayed, eager)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    assert len(set(losses)) == STEPS


@pytest.mark.parametrize("keep", (None, "both"))
@models_of_fixed_groups
@every_config
def test_forward_and_backward_in_a_graph(kind, config, keep):
    """In a scope too copies are quantized in each replay: the optimizer changes the weights after it."""
    model, x = make(kind, config), batches()[0].clone()
    with weights_unchanged(model, keep=keep) if keep else contextlib.nullcontext():
        graph, loss = capture(lambda: gradients_of(model, model, x))

    def gradients(batch):
        x.copy_(batch)
        graph.replay()
        return loss

    check_steps(model, make(kind, config), gradients)


@every_model
@every_config
def test_training_never_waits_for_the_gpu(kind, config):
    check_training_without_syncs(make(kind, config), batches())


@every_model
@every_config
def test_a_whole_step_with_its_optimizer_in_a_graph(kind, config):
    check_captured_training(lambda: make(kind, config), batches(), adamw)


@models_of_fixed_groups
@every_config
def test_make_graphed_callables(kind, config):
    model = make(kind, config)
    graphed = torch.cuda.make_graphed_callables(model, (batches()[0].clone(),))
    check_steps(model, make(kind, config), lambda x: gradients_of(model, graphed, x))


@models_of_fixed_groups
@every_config
def test_gradients_of_microbatches_are_added(kind, config):
    """To gradients that were there before; see docs/compile.md."""
    model, eager = make(kind, config), make(kind, config)
    graphed = torch.cuda.make_graphed_callables(model, (batches()[0].clone(),))
    for trained, call in ((model, graphed), (eager, eager)):
        for parameter in trained.parameters():
            parameter.grad = torch.zeros_like(parameter)
        load_recipe_state(trained, recipe_state(make(kind, config)))
        for x in batches():
            call(x).float().square().mean().backward()
    assert_same_gradients(model, eager)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("keep", (None, "rowwise", "both"))
@models_of_fixed_groups
@every_config
def test_reduce_overhead(kind, config, keep):
    """And inductor does make graphs of it; inside a scope neither its first run nor replays keep or read copies."""
    model, counters = make(kind, config), torch._dynamo.utils.counters["inductor"]
    skipped = counters["cudagraph_skips"]
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)

    def gradients(x):
        torch.compiler.cudagraph_mark_step_begin()
        with weights_unchanged(model, keep=keep) if keep else contextlib.nullcontext():
            return gradients_of(model, compiled, x)

    # Compiled as well: inductor computes what lies between our operations, as SwiGLU in NVFP4, in one rounding.
    other = make(kind, config)
    check_steps(model, other, gradients, torch.compile(other, fullgraph=True))
    assert counters["cudagraph_skips"] == skipped


@every_config
def test_the_training_loop_of_the_docs(config, capsys):
    """Microbatches, a schedule and clipping: the weights of an eager loop with the same steps."""
    page = (Path(__file__).parents[2] / "docs" / "compile.md").read_text()
    code = page.split("### A training loop")[1].split("```python\n")[1].split("```")[0]

    def loss_fn(y):
        return y.float().square().mean()

    model, eager, all_batches = make("linear", config), make("linear", config), batches().unflatten(1, (2, -1))
    exec(code, {"torch": torch, "model": model, "loss_fn": loss_fn, "batches": iter(all_batches)})
    assert len(capsys.readouterr().out.split()) == 2
    rate = torch.tensor(3e-4, device="cuda")
    optimizer = torch.optim.AdamW(eager.parameters(), lr=rate, fused=True, capturable=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    for step in range(-3, STEPS - 1):
        for x in all_batches[max(0, step + 1)]:
            (loss_fn(eager(x)) / 2).backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step >= 0:
            scheduler.step()
    assert 0.049 < rate.item() / 3e-4 < 0.051
    assert_same_tensors(model.state_dict(), eager.state_dict())
