"""Models, training loops and comparisons that the checks of tensor parallelism share; they run on every rank."""

from __future__ import annotations

import contextlib
import copy
import importlib
from unittest import mock

import torch
import torch.distributed as dist
from fsdp_models import ANOTHER_ROUNDING, Block
from ranks import device
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization import quantize_

from torchao_blockwise import _compat
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor, relative_error

# The package has a function of this name.
matmul = importlib.import_module("torchao_blockwise.ops.gemm.plain")

# Ragged in every dim that is not split; the split one has a block a rank.
TOKENS, WIDTH, HIDDEN = (3, 40), 160, 512
# Another order of the same fp32 sums.
CLOSE = 2.0**-20
PLANS = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def block(config) -> Block:
    torch.manual_seed(0)
    model = Block(WIDTH, HIDDEN).to(device())
    quantize_(model, config)
    return model


def random_values(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_tensor(*shape, seed=seed, device=device())


def tokens(seed: int = 0) -> torch.Tensor:
    return random_values(*TOKENS, WIDTH, seed=seed) / 64


def layer(config, n: int, k: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(n)
    model = nn.Linear(k, n, bias=bias).to(device())
    quantize_(model, config)
    return model


def own(x: torch.Tensor, mesh, dim: int | None) -> torch.Tensor:
    return x if dim is None else x.chunk(mesh.size(), dim)[mesh.get_local_rank()]


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@contextlib.contextmanager
def products():
    """Operands of every product, in the order that they are computed: (a, a_scale, a_global, b, b_scale, b_global)."""
    seen, original = [], matmul.matmul_op

    def matmul_op(a, b, *args):
        seen.append([None if t is None else t.clone() for t in (*a.tensors, *b.tensors)])
        return original(a, b, *args)

    with mock.patch.object(matmul, "matmul_op", matmul_op):
        yield seen


class Watch(TorchDispatchMode):
    """Names of the operations that run, those on what ranks hold too."""

    def __init__(self):
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class WithoutHandles(TorchDispatchMode):
    """Synchronous collectives return as those of NCCL do: done for whoever comes next, with an empty handle."""

    def __init__(self):
        super().__init__()
        self.collectives = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name not in ("c10d::scatter_", "c10d::broadcast_"):
            return func(*args, **(kwargs or {}))
        if any(t is not torch.Tensor for t in types):
            # A subclass comes back with its inner tensors.
            return NotImplemented
        self.collectives += 1
        tensors, work = func(*args, **(kwargs or {}))
        _compat.wait_for(work)
        return tensors, dist.Work.boxed(None)


HIGH_PRECISION = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "addbmm", "dot")}


def run(model, x, dy):
    """(output, grad of x) and gradients of parameters in `.grad`; one pass."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.backward(dy)
    return out.detach(), x.grad


def assert_close(actual, expected, what: str) -> None:
    actual = whole(actual)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    error = relative_error(actual, expected)
    assert error <= close(), f"{what}: relative error {error}"


def close() -> float:
    """How far results may be from those of one device: on a GPU kernels are chosen by shape, and sum otherwise."""
    return CLOSE if device().type == "cpu" else ANOTHER_ROUNDING


def assert_same_sums(actual, expected, what: str) -> None:
    """Results of products of other shapes and the same sums: bit for bit where one implementation takes all shapes."""
    (assert_bitwise_equal if device().type == "cpu" else assert_close)(whole(actual), expected, what)


def assert_grads_close(model, expected) -> None:
    for (name, p), q in zip(model.named_parameters(), expected.parameters()):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert_close(p.grad, q.grad, f"{name}.grad")


def train(model, optimizer, steps: int = 3, ulps: int = 0) -> list[float]:
    """The losses of steps of two microbatches. ulps: how far tokens are moved, some up, some down."""
    values = []
    for step in range(steps):
        for micro in range(2):
            x = tokens(10 * step + micro)
            x = x * (1 + ulps * torch.finfo(x.dtype).eps * random_values(*x.shape, seed=1).sign())
            loss = model(x).square().mean()
            loss.backward()
            values.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return values


def groups(model) -> list[dict]:
    """Parameter groups of what PyTorch takes together in a list: plain tensors, or DTensors of one mesh."""
    of_mesh: dict = {}
    for p in model.parameters():
        of_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return [{"params": parameters} for parameters in of_mesh.values()]


def assert_trains_alike(model, expected) -> None:
    """The losses of the parts are no further from those of one device than these are from themselves.

    The all-reduce after row-parallel layers sums in another order, which differs in the last bits; quantization makes
    more of them where an element rounds the other way. What one device makes of tokens whose last bit differs is the
    control: no bound follows from the formats.
    """
    control = copy.deepcopy(expected)
    # For DTensors optimizers choose foreach themselves on a GPU.
    rate = {"lr": 1e-3, "eps": 1e-3, "foreach": True}
    actual, wanted, other = (
        torch.tensor(train(m, torch.optim.AdamW(groups(m), **rate), ulps=ulps), dtype=torch.float64)
        for m, ulps in ((model, 0), (expected, 0), (control, 1))
    )
    if device().type == "cpu":
        assert (actual - wanted).abs().max() <= (other - wanted).abs().max(), f"{actual}, {wanted}, {other}"
    else:
        torch.testing.assert_close(actual, wanted, rtol=close(), atol=0)
