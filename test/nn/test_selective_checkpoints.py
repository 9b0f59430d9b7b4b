"""`sac_save_list`: products are not run again, bits stay, and no more is saved than of an unconverted model."""

import collections
import functools

import pytest
import torch
from every_layer import CONFIGS, counting, every_model, make, tokens
from helpers import NVFP4, assert_same, both_formats, forward_backward
from torch import nn
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from torchao_blockwise import sac_save_list
from torchao_blockwise.diagnostics.live_memory import LiveMemory

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
PRODUCTS = {"master_matmul", "quantized_matmul", "matmul", "grouped_matmul"}
# A policy for unconverted models saves these.
PLAIN = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._grouped_mm.default]


def whole(model: nn.Module):
    """The sine reads what comes out, so that the last product is one that backward needs."""
    return lambda x: model(x).sin()


def checkpointed(model: nn.Module, saved: list | None = None):
    """`model` under activation checkpointing that saves what these operations give; None: nothing at all."""
    options = {}
    if saved is not None:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, saved)
    return lambda x: checkpoint(whole(model), x, use_reentrant=False, **options)


def test_what_is_in_the_list():
    names = {op.name() for op in sac_save_list()}
    amaxes = {"tensor_amax_bits", "hadamard_amax_bits"}
    assert names == {f"torchao_blockwise::{name}" for name in PRODUCTS | amaxes}
    assert sac_save_list() is not sac_save_list()


@every_model
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_products_are_not_run_again(model, config):
    model, x = make(model, config), tokens(model)

    def step(call):
        with counting() as counter:
            results = forward_backward(model, x, call)
        return results, counter.get_total_flops()

    expected, once = step(whole(model))
    with set_checkpoint_early_stop(False):
        selective, of_selective = step(checkpointed(model, sac_save_list()))
        full, of_full = step(checkpointed(model))
    assert_same(selective, expected)
    assert_same(full, expected)
    assert of_selective == once < of_full


SAVED = {
    # Outputs of products, in bf16: of the layer; of gate, up and down; of (gate | up) and down; of q, k, v and o.
    "linear": [48],
    "fused_mlp": [160, 160, 64],
    "swiglu_mlp": [320, 64],
    "fused_attention": [96, 48, 48, 160],
    "experts": [192, 64],
    "grouped": [48],
}


@pytest.mark.parametrize(("model", "features"), SAVED.items(), ids=SAVED)
@both_formats
def test_what_is_alive_between_forward_and_backward(model, features, config):
    """Eager: outputs of products, what comes out of the checkpoint, and four bytes for each tensor in NVFP4."""
    module, x = make(model, config, torch.bfloat16), tokens(model).bfloat16().requires_grad_()
    with LiveMemory() as memory:
        out = checkpointed(module, sac_save_list())(x)
        amaxes = memory.live() - (2 * 33 * sum(features) + out.nbytes)
    assert amaxes in range(4, 4 * len(features) + 1, 4) if config is NVFP4 else amaxes == 0


def graphs(model: nn.Module, call, x: torch.Tensor) -> tuple[list, list[collections.Counter], list[torch.Tensor]]:
    """(what the forward graph hands to backward, products in both graphs, the step's results)."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    held, counts = [], []

    def count(graph, inputs):
        names = [str(n.target).split(".")[1] for n in graph.graph.nodes if "torchao_blockwise" in str(n.target)]
        counts.append(collections.Counter(name for name in names if name in PRODUCTS))
        if len(counts) == 1:
            (outputs,) = next(n for n in graph.graph.nodes if n.op == "output").args
            # Inputs, and in older PyTorch views of inputs, are there anyway.
            made = [n for n in outputs[1:] if n.op != "placeholder" and n.target is not torch.ops.aten.detach.default]
            held.extend(n.meta["val"] for n in made)
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

    # As inductor does.
    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.reset()
    results = forward_backward(model, x, torch.compile(call, backend=backend, fullgraph=True))
    return held, counts, results


@every_model
@both_formats
def test_compiled(model, config):
    """Backward has no product of forward's, and forward hands on what that of the unconverted model does."""
    module, x = make(model, config, torch.bfloat16), tokens(model).bfloat16()
    held, (forward, backward), results = graphs(module, checkpointed(module, sac_save_list()), x)
    _, (_, once), _ = graphs(module, whole(module), x)
    assert_same(results, forward_backward(module, x, whole(module)))
    assert forward and backward == once
    plain_module = make(model, None, torch.bfloat16)
    plain, *_ = graphs(plain_module, checkpointed(plain_module, PLAIN), x)

    def nbytes(tensors) -> int:
        # Not of scalars: amaxes, and where PyTorch keeps ends of groups as numbers.
        return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.dim() > 1)

    assert 0 < nbytes(held) <= nbytes(plain)
    assert not any(t.dtype in (torch.uint8, torch.float8_e4m3fn) for t in held if isinstance(t, torch.Tensor))
