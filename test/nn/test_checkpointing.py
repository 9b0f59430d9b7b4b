"""Activation checkpointing, full and selective, gives the same bits."""

from __future__ import annotations

import collections
import functools

import pytest
import torch
from helpers import assert_same, every_recipe, mlp, replace, weight_calls
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

pytestmark = pytest.mark.usefixtures("no_interpreter")

OPS = torch.ops.torchao_blockwise


def results(model, run):
    model.zero_grad()
    x = torch.randn(130, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = run(x)
    out.square().sum().backward()
    return out.detach(), x.grad, *(p.grad for p in model.parameters())


@every_recipe
@pytest.mark.parametrize("use_reentrant", (False, True), ids=("non_reentrant", "reentrant"))
@pytest.mark.parametrize("save_activations", ("quantised", "high_precision"))
def test_full(config, use_reentrant, save_activations):
    if save_activations == "high_precision":
        config = replace(config, save_activations=save_activations)
    model = mlp(config)
    expected = results(model, model)
    with weight_calls() as calls:
        assert_same(results(model, lambda x: checkpoint(model, x, use_reentrant=use_reentrant)), expected)
    # Of two layers in forward, in the recomputation and in backward.
    assert (calls.quantize, calls.columnwise) == (6, 2)


class Counter(TorchDispatchMode):
    """Counts the operations of this package that really run."""

    def __init__(self):
        super().__init__()
        self.ran = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "torchao_blockwise":
            self.ran[func] += 1
        return func(*args, **(kwargs or {}))


POLICIES = {
    "products": {OPS.master_matmul.default, OPS.matmul.default},
    "quantised": {OPS.quantize_both.default, OPS.quantize.default},
    "everything": {OPS.master_matmul.default, OPS.matmul.default, OPS.quantize_both.default, OPS.quantize.default},
    "nothing": set(),
}


@every_recipe
@pytest.mark.parametrize("saved", POLICIES.values(), ids=POLICIES)
def test_selective(config, saved):
    model = mlp(config)

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    expected = results(model, model)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    with Counter() as counter:
        assert_same(results(model, lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts)), expected)
    # Two layers: forward and backward run an operation twice each, and what was not saved runs again.
    for op in (OPS.master_matmul.default, OPS.quantize_both.default):
        assert counter.ran[op] == (4 if op in saved else 6)


@every_recipe
def test_compiled(config):
    model = mlp(config)
    expected = results(model, model)
    run = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend="aot_eager", fullgraph=True)
    assert_same(results(model, run), expected)
