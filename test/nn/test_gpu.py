"""The layer on a GPU: no host synchronization, CUDA graphs, inductor, and what backward leaves in memory."""

import contextlib

import pytest
import torch
from gpu_steps import check_training_without_syncs
from helpers import FP8, both_formats
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import weights_unchanged
from torchao_blockwise.ops.device import tables
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu


def mlp(config, dim: int = 256, hidden: int = 640, dtype=torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim, bias=False))
    model.to(device="cuda", dtype=dtype)
    quantize_(model, config)
    return model


def batches(count: int, tokens: int = 320, dim: int = 256) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(count, tokens, dim, generator=generator, device="cuda", dtype=torch.bfloat16)


@both_formats
def test_training_never_waits_for_the_gpu(config):
    check_training_without_syncs(mlp(config), batches(3))


@pytest.mark.usefixtures("fresh_dynamo")
@both_formats
def test_inductor_compiles_forward_and_backward(config):
    """A bare layer, so that all that inductor generates is around our operations and not in them."""
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


def test_a_step_leaves_no_copy_of_a_weight():
    model, x = mlp(FP8, dim=2048, hidden=4096), batches(1, 512, 2048)[0].requires_grad_()

    def held(keep: str = "") -> int:
        """Bytes that a step leaves, of them those that a scope keeps."""
        with weights_unchanged(model, keep=keep) if keep else contextlib.nullcontext():
            model(x).sum().backward()
            model.zero_grad(set_to_none=True)
            x.grad = None
            # Of launches for many tensors a bounded number of tables is kept, of addresses and sizes.
            tables._tables.clear()
            return torch.cuda.memory_allocated()

    held()  # Libraries take their workspaces at first use.
    nothing, rowwise, both, after = held(), held("rowwise"), held("both"), held()
    weights = 2 * 2048 * 4096
    assert after == nothing and weights <= rowwise - nothing <= weights * 1.01
    assert 2 * weights <= both - nothing <= 2 * weights * 1.01
