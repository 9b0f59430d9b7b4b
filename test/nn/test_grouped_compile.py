"""Experts whose routing changes with every step: one graph, no recompilation, and no copy of a cast weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, assert_same, recipes_and_variants, replace, weight
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchao.quantization import quantize_

from torchao_blockwise import experts

pytestmark = pytest.mark.usefixtures("no_interpreter", "fresh_dynamo")

E, DIM, HIDDEN = 4, 64, 96
ROUTINGS = ([75, 75, 75, 75], [300, 0, 0, 0], [1, 2, 0, 5], [0, 0, 0, 0], [129, 0, 171, 100])


class Experts(nn.Module):
    """An MLP an expert, over tokens that are sorted by expert; its forward pass takes the sizes of the groups."""

    def __init__(self, cast: bool):
        super().__init__()
        self.gate_up = nn.Parameter(weight(E, 2 * HIDDEN, DIM, seed=1) / 512)
        self.down = nn.Parameter(weight(E, DIM, HIDDEN, seed=2) / 512)
        self.cast = cast

    def forward(self, x, sizes):
        ends = sizes.cumsum(0, dtype=torch.int32)
        gate_up, down = (w.bfloat16() if self.cast else w for w in (self.gate_up, self.down))
        gate, up = F.grouped_mm(x, gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, down.mT, offs=ends)


def mlp(config, cast: bool = False) -> Experts:
    module = Experts(cast)
    quantize_(module, config, filter_fn=experts())
    return module


def results(run, module, count: int, sizes):
    """(output, gradient of the tokens, gradients of the weights)."""
    module.zero_grad()
    x = weight(count, DIM, seed=count, dtype=torch.bfloat16 if module.cast else torch.float32).requires_grad_()
    torch._dynamo.maybe_mark_dynamic(x, 0)
    out = run(x, torch.tensor(sizes))
    out.float().square().sum().backward()
    return out.detach(), x.grad, *(p.grad for p in module.parameters())


@recipes_and_variants(
    {"default": {}, "cast": {}, "high_precision": {"save_activations": "high_precision"},
     "quantized": {"master_weights": False}}
)  # fmt: skip
def test_routing_and_token_counts_do_not_recompile(config, variant, request):
    module = mlp(replace(config, **variant), "-cast" in request.node.name)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (400, 517):
            for sizes in ROUTINGS:
                assert_same(results(compiled, module, count, sizes), results(module, module, count, sizes))
    assert counter.frame_count == 1


def test_a_cast_copy_is_not_saved_for_backward():
    """The graph's backward takes the weight itself: the copy would be two bytes a parameter."""
    module, saved = mlp(FP8, cast=True), []
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = weight(300, DIM, dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        compiled(x, torch.tensor(ROUTINGS[0]))
    assert saved and not [t for t in saved if t.dim() == 3 and t.dtype == torch.bfloat16]
