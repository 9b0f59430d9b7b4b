"""DistributedDataParallel: gradients of a converted model are averaged over ranks, like those of any model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers import FP8 as CONFIG
from helpers import ddp_scope_worker, ddp_worker, mlp, replace
from ranks import spawn

from torchao_blockwise.testing import relative_error

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def test_microbatches_in_a_scope(tmp_path):
    """Without and with `weights_unchanged`: the same bits after two steps of three microbatches."""
    config = replace(CONFIG, backend="reference")
    for of_rank in spawn(ddp_scope_worker, 2, tmp_path, config):
        plain, scoped = of_rank
        assert plain.keys() == scoped.keys()
        assert all(torch.equal(plain[name], scoped[name]) for name in plain)


def test_gradients_are_the_mean_over_ranks(tmp_path, ranks=2):
    config = replace(CONFIG, backend="reference")
    results = spawn(ddp_worker, ranks, tmp_path, config)
    model = mlp(config)
    for step in range(2):
        total = None
        for rank in range(ranks):
            model.zero_grad()
            model(
                torch.randn(24, 64, generator=torch.Generator().manual_seed(10 * step + rank))
            ).square().sum().backward()
            grads = [p.grad / ranks for p in model.parameters()]
            total = grads if total is None else [a + b for a, b in zip(total, grads)]
        for p, mean in zip(model.parameters(), total):
            p.grad = mean
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
    for name, value in model.state_dict().items():
        assert torch.equal(results[0][name], results[1][name]), name
        assert relative_error(results[0][name], value) < 1e-6, name
