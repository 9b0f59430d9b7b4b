"""The layer on a GPU: no host synchronisation, CUDA graphs, inductor, and what backward leaves in memory."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu
CONFIGS = {"fp8": BlockwiseFP8TrainingConfig(), "nvfp4": NVFP4TrainingConfig()}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def mlp(config, dim: int = 256, hidden: int = 640, dtype=torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim, bias=False))
    model.to(device="cuda", dtype=dtype)
    quantize_(model, config)
    return model


def batches(count: int, tokens: int = 320, dim: int = 256) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(count, tokens, dim, generator=generator, device="cuda", dtype=torch.bfloat16)


def train_step(model, optimizer, x) -> torch.Tensor:
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


@configs
def test_training_never_waits_for_the_gpu(config):
    model = mlp(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    xs = batches(3)
    train_step(model, optimizer, xs[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in xs[1:]:
            train_step(model, optimizer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@configs
def test_a_captured_training_step_equals_eager(config):
    xs = batches(6)
    captured, eager = mlp(config), mlp(config)

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.5)

    expected = []
    optimizer = sgd(eager)
    for x in xs:
        expected.append(train_step(eager, optimizer, x).detach().clone())

    optimizer, x = sgd(captured), xs[0].clone()
    state = copy.deepcopy(captured.state_dict())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            train_step(captured, optimizer, x)
    torch.cuda.current_stream().wait_stream(stream)
    captured.load_state_dict(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train_step(captured, optimizer, x)
    captured.load_state_dict(state)
    for batch, want in zip(xs, expected):
        x.copy_(batch)
        graph.replay()
        assert_bitwise_equal(loss.detach(), want, "loss")
    for got, want in zip(captured.parameters(), eager.parameters()):
        assert_bitwise_equal(
            got.detach().hp if hasattr(got, "hp") else got.detach(), want.hp if hasattr(want, "hp") else want
        )
    # Replays changed the weights without counting; eager use must see it all the same.
    assert_bitwise_equal(captured(xs[0]).detach(), eager(xs[0]).detach(), "eager after replays")


@configs
def test_a_captured_forward_follows_an_eager_optimizer(config):
    """Captured where the quantised copy was fresh: a replay must quantise again all the same."""
    model, x = mlp(config), batches(1)[0]
    with torch.no_grad():
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        for parameter in model.parameters():
            parameter.mul_(1.5)
        graph.replay()
        assert_bitwise_equal(y, model(x))


@configs
def test_inductor_compiles_forward_and_backward(config):
    """A bare layer, so that all that inductor generates is around our operations and not in them."""
    torch._dynamo.reset()
    layer = nn.Linear(256, 384, bias=False).to(device="cuda", dtype=torch.bfloat16)
    quantize_(layer, config)
    compiled = torch.compile(layer, fullgraph=True)
    for tokens in (320, 576, 1024):
        x, dy = batches(1, tokens)[0].requires_grad_(), torch.randn(tokens, 384, device="cuda", dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        results = []
        for run in (compiled, layer):
            layer.weight.grad = x.grad = None
            y = run(x)
            y.backward(dy)
            results.append((y.detach(), x.grad, layer.weight.grad))
        for got, want in zip(*results):
            assert_bitwise_equal(got, want)


def test_on_demand_keeps_one_copy_of_a_weight():
    def resident(config) -> int:
        before = torch.cuda.memory_allocated()
        model = mlp(config, dim=2048, hidden=4096)
        model(batches(1, 512, 2048)[0].requires_grad_()).sum().backward()
        model.zero_grad(set_to_none=True)
        return torch.cuda.memory_allocated() - before

    resident(CONFIGS["fp8"])  # Libraries take their workspaces at first use.
    on_demand, cached = resident(CONFIGS["fp8"]), resident(BlockwiseFP8TrainingConfig(columnwise="cached"))
    weights = 2 * 2048 * 4096
    assert weights <= cached - on_demand <= weights * 1.01


def test_saved_activations_are_one_byte_an_element():
    """Between forward and backward a chain of layers holds FP8 copies of the inputs, not the inputs."""
    tokens, dim, layers = 4096, 1024, 4

    def held(save_activations: str) -> int:
        model = nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(layers))).cuda().bfloat16()
        quantize_(model, BlockwiseFP8TrainingConfig(save_activations=save_activations))
        x = batches(1, tokens, dim)[0]
        model(x).sum().backward()
        before = torch.cuda.memory_allocated()
        y = model(x)
        return torch.cuda.memory_allocated() - before - y.nbytes

    # The first layer's input is the caller's and costs nothing where it is saved itself.
    elements, scales = tokens * dim, 4 * tokens // 128 * dim
    assert held("fp8") == layers * (elements + scales)
    assert held("high_precision") == (layers - 1) * 2 * elements
