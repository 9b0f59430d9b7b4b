"""Checks of tensor parallelism on training, refusals, compilation and FSDP2: each runs on every rank of a mesh."""

import copy
import warnings

import torch
import torch.nn.functional as F
from fsdp_models import Block, raises
from helpers import assert_same, converted, replace, weight_calls
from ranks import device, whole
from tensor_parallel_checks import (
    HIDDEN,
    PLANS,
    TOKENS,
    WIDTH,
    assert_close,
    assert_computes_alike,
    assert_same_sums,
    assert_trains_alike,
    block,
    close,
    groups,
    layer,
    random_values,
    run,
    tokens,
    train,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor, conversion_report, weights_unchanged
from torchao_blockwise.testing import assert_bitwise_equal, relative_error


def trains(mesh, config):
    model, expected = parallelize_module(block(config), mesh, PLANS), block(config)
    with weight_calls() as calls:
        assert_trains_alike(model, expected)
    # Three models of two weights, three steps of two microbatches, forward and backward.
    assert calls.quantize == 72, calls.quantize
    with weight_calls() as calls:
        train(model, torch.optim.AdamW(groups(model), lr=1e-3, fused=True), steps=2)
    assert calls.quantize == 16, calls.quantize


def keeps_copies_in_a_scope(mesh, config):
    """The same bits, with a tensor's scale from all ranks; outside the scope nothing is kept."""
    x, dy = tokens(), random_values(*TOKENS, WIDTH)
    model, kept = (parallelize_module(block(config), mesh, PLANS) for _ in range(2))
    with weight_calls() as calls:
        results = [run(model, x, dy)]
        # Two weights, in forward and in backward.
        assert (calls.quantize, calls.transpose) == (4, 0), (calls.quantize, calls.transpose)
        with weights_unchanged(kept):
            results.append(run(kept, x, dy))
            held = [weight.to_local().quantized_bytes for weight in (kept.up.weight, kept.down.weight)]
        # Once, and transposed in backward.
        assert (calls.quantize, calls.transpose) == (4 + 2, 2), (calls.quantize, calls.transpose)
    gradients = [[p.grad for p in m.parameters()] for m in (model, kept)]
    assert_same(*(map(whole, (*outputs, *grads)) for outputs, grads in zip(results, gradients)))
    assert all(held)
    assert [w.to_local().quantized_bytes for m in (model, kept) for w in (m.up.weight, m.down.weight)] == [0] * 4
    assert conversion_report(model).totals["quantized_bytes"] == 0


def trains_in_mixed_precision(mesh, config):
    model, expected = parallelize_module(block(config), mesh, PLANS), block(config)
    with torch.autocast(device().type, torch.bfloat16):
        out, wanted = model(tokens()), expected(tokens())
    assert out.dtype == wanted.dtype and relative_error(out, wanted) < 1e-2
    low, wanted = parallelize_module(block(config).bfloat16(), mesh, PLANS), block(config).bfloat16()
    x, dy = tokens().bfloat16(), random_values(*TOKENS, WIDTH).bfloat16()
    for a, b in zip(run(low, x, dy), run(wanted, x, dy)):
        assert a.dtype == torch.bfloat16 and relative_error(a, b) < 1e-2
    assert low.up.weight.grad.dtype == torch.bfloat16


def saves_other_activations(mesh, config):
    """Recomputed, and saved in high precision: bitwise identical to the default."""
    results = []
    for options in ({}, {"recomputed": True}, {"save_activations": "high_precision"}):
        recomputed = options.pop("recomputed", False)
        model = parallelize_module(block(replace(config, **options)), mesh, PLANS)
        x = tokens().requires_grad_()
        out = checkpoint(model, x, use_reentrant=False) if recomputed else model(x)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(whole(p.grad) for p in model.parameters())])
    for other in results[1:]:
        assert_same(other, results[0])


def catches_changes_before_backward(mesh, config):
    torch._dynamo.reset()
    for compiled in (False, True):
        model = parallelize_module(block(config), mesh, PLANS)
        out = (torch.compile(model, backend="aot_eager") if compiled else model)(tokens())
        with torch.no_grad():
            model.up.weight.mul_(2)
        with raises(RuntimeError, "modified by an inplace operation"):
            out.sum().backward()


def sees_changes_inside_a_graph(mesh, config):
    """A weight that a compiled function changes is multiplied as it is then."""

    def change_and_use(model, x):
        with torch.no_grad():
            model.up.weight.mul_(2)
        return model(x).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(change_and_use, backend="aot_eager", fullgraph=True)
    models = [parallelize_module(block(config), mesh, PLANS) for _ in range(2)]
    losses = [step(model, tokens()) for step, model in zip((change_and_use, compiled), models)]
    sum(losses).backward()
    assert relative_error(losses[1].detach(), losses[0].detach()) < close()
    for a, b in zip(*(model.parameters() for model in models)):
        assert relative_error(whole(b.grad), whole(a.grad)) < close()


def starts_on_meta(mesh, config):
    source, expected = parallelize_module(block(config), mesh, PLANS), block(config)
    with torch.device("meta"):
        model = Block(WIDTH, HIDDEN)
    quantize_(model, config)
    parallelize_module(model, mesh, PLANS)
    model.to_empty(device=device())
    model.load_state_dict(source.state_dict())
    assert isinstance(model.up.weight.to_local(), MasterWeightTensor)
    assert_close(model(tokens()), expected(tokens()), "output")
    assert_bitwise_equal(copy.deepcopy(model.up)(tokens()), model.up(tokens()))
    assert conversion_report(model).totals["converted"] == 2


def refuses_cut_blocks(mesh, config):
    """By name, size and remedy, when the layer first runs."""
    block_size, ranks = config.weight_format.block[0], mesh.size()
    size, per_rank = 5 * block_size, -(-5 * block_size // ranks)

    def linear(what, config=config, size=size):
        sizes = (64, size) if what == "rows" else (size, 64)
        return converted(nn.Sequential(nn.Linear(*sizes, bias=False)).to(device()), config)

    model = parallelize_module(linear("rows", size=block_size), mesh, {"0": ColwiseParallel()})
    with raises(ValueError, "; use 1 rank, or exclude the layer"):
        model(torch.ones(4, 64, device=device()))
    for style, what, placement in ((RowwiseParallel, "columns", Shard(1)), (ColwiseParallel, "rows", Shard(0))):
        message = (
            f"{size} {what} over {ranks} ranks give {per_rank}, which cuts a block of {block_size}; "
            "use 1 or 5 ranks, or exclude the layer"
        )
        model = linear(what)
        parallelize_module(model, mesh, {"0": style()})
        x = torch.ones(4, model[0].in_features, device=device())
        with raises(ValueError, f"0: {message}"):
            model[0](distribute_tensor(x, mesh, [Replicate()]))
        (by_hand,) = linear(what)
        by_hand.weight = nn.Parameter(distribute_tensor(by_hand.weight.detach(), mesh, [placement]))
        with raises(ValueError, message):
            by_hand(distribute_tensor(torch.ones(4, by_hand.in_features, device=device()), mesh, [Replicate()]))
        with raises(ValueError, f"[0:{per_rank}] of dim {placement.dim} (size {size}) cuts blocks of {block_size}"):
            parallelize_module(linear(what, replace(config, master_weights=False))[0], mesh, style())
    ragged = layer(config, block_size * ranks - 1, 64)
    parallelize_module(ragged, mesh, ColwiseParallel(output_layouts=Replicate()))
    x = tokens()[..., :64].contiguous()
    assert_same_sums(ragged(x), layer(config, block_size * ranks - 1, 64)(x), "the last rank has a ragged block")


def refuses_what_it_cannot_place(mesh, config):
    model = parallelize_module(layer(config, 512, 160), mesh, ColwiseParallel())
    forward = type(model).forward
    with raises(TypeError, "the weight is a DTensor, but x is a Tensor; parallelize the layer with ColwiseParallel"):
        forward(model, tokens())
    with raises(ValueError, "x [.., K] and weight [N, K] must agree in K, got [4, 96] and [512, 160]"):
        forward(model, distribute_tensor(torch.ones(4, 96, device=device()), mesh, [Replicate()]))
    with raises(NotImplementedError, "would silently be used in high precision"):
        x = distribute_tensor(tokens(), mesh, [Replicate()])
        F.linear(x, model.weight)


def compiles(mesh, config):
    """A block compiles to one graph, whose GEMMs quantize master weights when it runs."""
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        model = parallelize_module(block(config), mesh, PLANS)
        step = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        with weight_calls() as calls:
            for seed in range(2):
                step(tokens(seed)).square().sum().backward()
        assert calls.quantize == (8 if config.master_weights else 0), calls.quantize
        results.append([whole(p.grad) for p in model.parameters()])
    for a, b in zip(*results):
        assert relative_error(a, b) < close()


def shards_in_two_dims(mesh, config):
    """FSDP2 over what tensor parallelism left to each rank; both dims of a mesh."""
    model, expected = parallelize_module(block(config), mesh["inner"], PLANS), block(config)
    fully_shard(model, mesh=mesh["outer"])
    for name, p in model.named_parameters():
        assert "norm" in name or p.device_mesh.ndim == 2, name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_computes_alike(model, expected, tokens(), random_values(*TOKENS, WIDTH))
    for m in (model, expected):
        m.zero_grad()
    assert_trains_alike(model, expected)


class Own(nn.Linear):
    """A separate forward pass around that of `nn.Linear`, or, for `looks_up`, a sum of its weight."""

    def forward(self, x):
        return x * self.weight.abs().sum() if getattr(self, "looks_up", False) else 2 * super().forward(x)


def checks_forward_passes(mesh, config):
    """`super().forward` runs on shards as the layer without a separate forward pass does; a sum is refused."""
    expected = block(config)
    model = Block(WIDTH, HIDDEN).to(device())
    model.load_state_dict(expected.state_dict())
    model.up.__class__ = Own
    quantize_(model, config)
    model = parallelize_module(model, mesh, PLANS)
    x = tokens()
    with torch.no_grad():
        expected = parallelize_module(expected, mesh, PLANS)
        assert_bitwise_equal(model.up(x), 2 * expected.up(x))
    assert model.up.checked == {True}
    model.up.looks_up = True
    with raises(NotImplementedError, "up: Own.forward ran no low-precision GEMM"):
        model.eval()(x)
