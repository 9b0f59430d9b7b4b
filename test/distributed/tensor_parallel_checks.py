"""Checks of tensor parallelism on bits, GEMMs and gradients, and what they share: all run on every rank of a mesh."""

import contextlib
import copy
from unittest import mock

import torch
import torch.distributed as dist
from fsdp_models import ANOTHER_ROUNDING, Block
from helpers import assert_same, converted, replace
from ranks import device, whole
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from torchao_blockwise import _compat
from torchao_blockwise.nn import SwiGLUMLP, gemms
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor, relative_error

# Ragged in every dim that is not split; the split one has a block a rank.
TOKENS, WIDTH, HIDDEN = (3, 40), 160, 512
# Another order of the same fp32 sums.
CLOSE = 2.0**-20
PLANS = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def block(config) -> Block:
    torch.manual_seed(0)
    return converted(Block(WIDTH, HIDDEN).to(device()), config)


def random_values(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_tensor(*shape, seed=seed, device=device())


def tokens(seed: int = 0) -> torch.Tensor:
    return random_values(*TOKENS, WIDTH, seed=seed) / 64


def layer(config, n: int, k: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(n)
    return converted(nn.Linear(k, n, bias=bias).to(device()), config)


def own(x: torch.Tensor, mesh, dim: int | None) -> torch.Tensor:
    return x if dim is None else x.chunk(mesh.size(), dim)[mesh.get_local_rank()]


@contextlib.contextmanager
def products():
    """Operands of every product, in the order that they are computed: (a, a_scale, a_global, b, b_scale, b_global)."""
    seen, original = [], gemms.matmul_op

    def matmul_op(a, b, *args):
        seen.append([None if t is None else t.clone() for t in (*a.tensors, *b.tensors)])
        return original(a, b, *args)

    with mock.patch.object(gemms, "matmul_op", matmul_op):
        yield seen


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


def assert_computes_alike(model, expected, x, dy) -> None:
    for m in (model, expected):
        m.zero_grad()
    for what, a, b in zip(("output", "grad of x"), run(model, x, dy), run(expected, x, dy)):
        assert_close(a, b, what)
    assert_grads_close(model, expected)


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


# Of each of the three products, in the order that they run: the dim of operand a and of operand b that is split.
COLWISE = {"weight": 0, "x": None, "dy": 2, "products": ((None, 0), (1, 1), (0, None))}
ROWWISE = {"weight": 1, "x": 2, "dy": None, "products": ((1, 1), (None, 0), (None, 0))}


def splits_on_the_grid(mesh, config, how, style, n, k, exact) -> None:
    """All operands of all GEMMs are bitwise identical to parts of the unsharded layer's, and so are results."""
    # On a GPU too: bits of operands are compared, and no kernel is in question.
    config = replace(config, backend="reference")
    for bias in (True, False):
        alone, split = layer(config, n, k, bias), layer(config, n, k, bias)
        parallelize_module(split, mesh, style)
        assert split.weight.placements == (Shard(how["weight"]),)
        x, dy = random_values(*TOKENS, k, seed=1) / 64, random_values(*TOKENS, n, seed=2)
        with products() as expected:
            alone_out, alone_grad = run(alone, x, dy)
        with products() as actual:
            out, grad = run(split, own(x, mesh, how["x"]), own(dy, mesh, how["dy"]))
        assert len(actual) == len(expected) == 3
        for which, dims in enumerate(how["products"]):
            for side, dim in enumerate(dims):
                mine, theirs = (operands[which][3 * side : 3 * side + 3] for operands in (actual, expected))
                what = f"product {which}, operand {'ab'[side]}"
                assert_bitwise_equal(mine[0], own(theirs[0], mesh, dim), what)
                # Of scales that lie transposed the other dim is split; they are those of one-row blocks in FP8.
                fmt = config.grad_weight_format if (which, side) == (2, 1) else config.activation_format
                transposed = fmt.transposed_scales and (side == 0 or which == 2)
                scale_dim = dim if dim is None or not transposed else 1 - dim
                assert_bitwise_equal(mine[1], own(theirs[1], mesh, scale_dim), f"{what}, scale")
                assert (mine[2] is None) == (theirs[2] is None)
                if mine[2] is not None:
                    assert_bitwise_equal(mine[2], theirs[2], f"{what}, global scale")
        results = {
            "output": (out, own(alone_out, mesh, how["dy"])),
            "grad_input": (grad, own(alone_grad, mesh, how["x"])),
            "grad_weight": (split.weight.grad.to_local(), own(alone.weight.grad, mesh, how["weight"])),
        }
        if bias:
            results["grad_bias"] = whole(split.bias.grad), alone.bias.grad
        for name, (got, wanted) in results.items():
            compare = assert_same_sums if name in exact else assert_close
            compare(got, wanted.contiguous(), name)


def colwise(mesh, config):
    """Only sums of grad_input take another order."""
    exact = ("output", "grad_weight", "grad_bias")
    splits_on_the_grid(mesh, config, COLWISE, ColwiseParallel(), 512, 160, exact)


def rowwise(mesh, config):
    """Only sums of the output take another order."""
    exact = ("grad_input", "grad_weight", "grad_bias")
    splits_on_the_grid(mesh, config, ROWWISE, RowwiseParallel(), 160, 512, exact)


def sequence_parallel(mesh, config):
    """Tokens split between the norm and the layers; DTensors or local tensors between them."""
    tokens_split = Shard(1)
    for local in (True, False):
        plan = {
            "norm": SequenceParallel(use_local_output=local),
            "up": ColwiseParallel(input_layouts=tokens_split, use_local_output=local),
            "down": RowwiseParallel(output_layouts=tokens_split, use_local_output=local),
        }
        model, expected = parallelize_module(block(config), mesh, plan), block(config)
        x, dy = tokens(), random_values(*TOKENS, WIDTH, seed=2)
        alone_out, alone_grad = run(expected, x, dy)
        own_x = own(x, mesh, 1).clone().requires_grad_()
        out = model(own_x if local else DTensor.from_local(own_x, mesh, [tokens_split]))
        out.backward(own(dy, mesh, 1) if local else distribute_tensor(dy, mesh, [tokens_split]))
        assert_close(out.detach() if local else out.to_local().detach(), own(alone_out, mesh, 1), "output")
        assert_close(own_x.grad, own(alone_grad, mesh, 1), "grad of x")
        assert_grads_close(model, expected)


def splits_tokens_alone(mesh, config):
    """A weight on every rank: each rank brings its tokens, gradients are sums."""
    alone, model = layer(config, 64, 96), layer(config, 64, 96)
    x = random_values(256, 96, seed=1) / 64
    dy = random_values(256, 64, seed=2)
    _, alone_grad = run(alone, x, dy)
    for name, p in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()])))
    sharded = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    out = model(sharded)
    assert out.placements == (Shard(0),)
    out.backward(distribute_tensor(dy, mesh, [Shard(0)]))
    assert_same_sums(out.detach(), alone(x).detach(), "output")
    assert_same_sums(sharded.grad, alone_grad, "grad of x")
    if mesh.size() == 2:
        # 128 tokens a rank: blocks along tokens begin where shards do.
        assert_grads_close(model, alone)


def redistributes_what_lies_otherwise(mesh, config):
    """Whatever the placement of x, it is brought to where the weight needs it."""
    for style, n, k in ((ColwiseParallel, 512, 160), (RowwiseParallel, 160, 512)):
        x = random_values(*TOKENS, k, seed=1) / 64
        alone, model = layer(config, n, k), layer(config, n, k)
        parallelize_module(model, mesh, style())
        expected, _ = run(alone, x, torch.ones(*TOKENS, n, device=device()))
        for placement in (Replicate(), Shard(1), Shard(2)):
            sharded = distribute_tensor(x, mesh, [placement]).requires_grad_()
            model.weight.grad = None
            out = type(model).forward(model, sharded)
            assert_close(out.detach(), expected, f"output from {placement}")
            out.redistribute(placements=[Replicate()]).to_local().sum().backward()
            assert sharded.grad.placements == (placement,) or placement == Replicate()
            assert_close(model.weight.grad, alone.weight.grad, f"grad_weight from {placement}")


def runs_a_swiglu_mlp(mesh, config):
    """With outputs as DTensors, because ranks with a part of gate_up do not have both halves of the same columns."""
    torch.manual_seed(0)
    expected, model = (SwiGLUMLP(WIDTH, HIDDEN // 2, device=device()) for _ in range(2))
    model.load_state_dict(expected.state_dict())
    for m in (expected, model):
        converted(m, config)
    plan = {"gate_up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    outs = [whole(m(tokens())) for m in (model, expected)]
    assert_close(outs[0].detach(), outs[1].detach(), "output")
    for out in outs:
        out.backward(random_values(*TOKENS, WIDTH))
    assert_grads_close(model, expected)


def takes_any_tokens(mesh, config):
    model, expected = parallelize_module(block(config), mesh, PLANS), block(config)
    for shape in ((0,), (1,), (2, 0, 3), (1, 129)):
        dy = torch.ones(*shape, WIDTH, device=device())
        assert_computes_alike(model, expected, random_values(1, *shape, WIDTH, seed=1)[0] / 64, dy)


def leaves_frozen_parts(mesh, config):
    for frozen in ("up.weight", "down.weight", "up.bias", "down.bias", "x"):
        model, expected = block(config), block(config)
        for m in (model, expected):
            for name, p in m.named_parameters():
                p.requires_grad_(name != frozen)
        parallelize_module(model, mesh, PLANS)
        for m in (model, expected):
            x = tokens() if frozen == "x" else tokens().requires_grad_()
            m(x).square().sum().backward()
        assert frozen == "x" or dict(model.named_parameters())[frozen].grad is None
        assert_grads_close(model, expected)
    with torch.no_grad():
        assert_close(model(tokens()), expected(tokens()), "output without gradients")


def holds_quantised_weights(mesh, config):
    """master_weights=False: shards are slices of the quantized tensor, frozen or not."""
    quantised = replace(config, master_weights=False)
    model = parallelize_module(block(quantised), mesh, PLANS)
    expected = block(quantised)
    for name, dim in (("up", 0), ("down", 1)):
        local, alone = getattr(model, name).weight.to_local(), getattr(expected, name).weight
        assert_bitwise_equal(local.qdata, own(alone.qdata, mesh, dim).contiguous(), f"{name}.qdata")
        assert_bitwise_equal(local.scale, own(alone.scale, mesh, dim).contiguous(), f"{name}.scale")
    assert_computes_alike(model, expected, tokens(), random_values(*TOKENS, WIDTH))
    replicated = distribute_tensor(expected.up.weight.detach(), mesh, [Replicate()]).to_local()
    assert_bitwise_equal(replicated.qdata, expected.up.weight.qdata)


def sends_quantised_weights_without_handles(mesh, config):
    """Sent weights arrive whole where collectives leave nothing to wait for."""
    weight = layer(replace(config, master_weights=False), 512, 160).weight.detach()
    for placement in (Shard(0), Replicate()):
        with WithoutHandles() as mode:
            actual = distribute_tensor(weight, mesh, [placement]).to_local()
        assert mode.collectives == len(weight.parts()), mode.collectives
        expected = distribute_tensor(weight, mesh, [placement]).to_local()
        assert_same(actual.parts().values(), expected.parts().values())
