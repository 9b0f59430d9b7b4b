"""Recipes that leave an operand of FP8 out: what each product reads, and how near all of them are to the real one."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
import torch
from llm import training
from llm.ablation import ABLATIONS, AblatedLinear, Faked, ablate, restore
from llm.config import UsageError
from llm.model import next_byte_loss
from llm.recipes import convert
from llm_cases import CPU, MOE, TINY
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128

pytestmark = pytest.mark.usefixtures("train_llm_alike")
# Blocks of 128 are ragged in each direction.
T, K, N = 150, 300, 200


def ablated(faked: Faked, dtype: torch.dtype = torch.bfloat16) -> tuple[AblatedLinear, torch.Tensor, torch.Tensor]:
    """(a layer, x, dy), of many magnitudes."""
    torch.manual_seed(0)
    layer = nn.Linear(K, N, bias=False)
    assert ablate(layer, faked, lambda module, fqn: True) == 1
    x, dy = (torch.randn(T, n, dtype=dtype) * torch.logspace(-3, 3, n).to(dtype) for n in (K, N))
    return layer, x.requires_grad_(), dy


class _Operands(TorchDispatchMode):
    """Keeps what products read."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.seen.append((args[0].clone(), args[1].mT.clone()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ABLATIONS)
def test_each_product_reads_its_faked_operands_and_others_untouched(name):
    """Bit for bit: what the recipe's FP8 operands decode to, or what bf16 multiplies."""
    layer, x, dy = ablated(ABLATIONS[name])
    with _Operands() as products:
        layer(x).backward(dy)
    w, x = layer.weight.detach(), x.detach()
    rows, columns = {"columnwise": False}, {"rowwise": False, "columnwise": True}
    kinds = {
        "output": ((x, FP8_1X128, rows), (w, FP8_128X128, rows)),
        "grad_input": ((dy, FP8_1X128, rows), (w.mT, FP8_128X128, rows)),
        "grad_weight": ((dy, FP8_1X128, columns), (x, FP8_1X128, columns)),
    }
    assert len(products.seen) == 3
    for product, read in zip(kinds, products.seen, strict=True):
        for faked, (values, fmt, which), got in zip(getattr(ABLATIONS[name], product), kinds[product], read):
            (copy,) = filter(None, ops.quantize(values, fmt, backend="reference", **which))
            plain = values.mT if which is columns else values
            assert torch.equal(got, (ops.dequantize(copy) if faked else plain).bfloat16())
            assert not faked or not torch.equal(got, plain.bfloat16())


def test_names_say_which_operand_is_left_out():
    products = {"output": ("activations", "weights"), "grad_input": ("gradients", "weights")}
    products["grad_weight"] = ("gradients", "activations")
    for name, faked in ABLATIONS.items():
        left_out, only = name.partition("_but_")[2], name.removeprefix("fp8_faked_")
        for product, operands in products.items():
            expected = tuple(only == product if only in products else operand != left_out for operand in operands)
            assert getattr(faked, product) == expected, (name, product)


@pytest.mark.parametrize("product", ("output", "grad_input", "grad_weight"))
def test_all_faked_are_the_real_layer_but_for_sums(product):
    """In fp32, where decoded values are exact: the distance is that of the order of additions."""

    def results(layer, x, dy):
        out = layer(x)
        out.backward(dy)
        return {"output": out.detach(), "grad_input": x.grad, "grad_weight": layer.weight.grad}[product]

    layer, x, dy = ablated(Faked(), torch.float32)
    real = nn.Linear(K, N, bias=False)
    real.load_state_dict(layer.state_dict())
    quantize_(real, BlockwiseFP8TrainingConfig())
    none = ablated(Faked(*[(False, False)] * 3))[0]
    got, wanted, plain = (results(made, x.detach().clone().requires_grad_(), dy) for made in (layer, real, none))
    scale = wanted.norm()
    assert (got - wanted).norm() < 2.0**-20 * scale
    assert (plain - wanted).norm() > 2.0**-8 * scale, "the control"


def test_none_faked_is_bf16(corpus, monkeypatch):
    monkeypatch.setitem(ABLATIONS, "fp8_faked", Faked(*[(False, False)] * 3))
    runs = [training.train(recipe, TINY, corpus, CPU) for recipe in ("bf16", "fp8_faked")]
    assert runs[0].losses == runs[1].losses and runs[0].held_out_loss == runs[1].held_out_loss


def first_step(recipe: str, corpus) -> torch.Tensor:
    """All gradients of a model's first step in one vector, and its loss as the last element."""
    model = training.build(TINY, CPU)
    convert(model, recipe)
    with torch.autocast("cpu", torch.bfloat16):
        loss = next_byte_loss(model, corpus.batch(TINY.seed, 0, 4))
    loss.backward()
    return torch.cat([*(p.grad.flatten() for p in model.parameters()), loss.detach()[None]]).double()


# Where a sum is rounded otherwise, an element behind it may be quantized to its other neighbor. So distances are not
# those of sums alone; and later steps drift apart, as those of runs do that begin one bit off.
@pytest.mark.parametrize(("precision", "of_grads", "of_loss"), [("fp32", 4, 100), ("bf16", 2, 10)])
def test_a_model_with_all_faked_is_the_real_recipes(precision, of_grads, of_loss, corpus, monkeypatch):
    """Its loss, and its gradients: many times nearer than those without FP8 are, the control."""
    if precision == "fp32":
        monkeypatch.setattr(torch, "autocast", lambda *args, **options: contextlib.nullcontext())
    real, faked, plain = (first_step(recipe, corpus) for recipe in ("fp8", "fp8_faked", "bf16"))
    (grads, loss), (off, off_loss) = (
        ((made - real)[:-1].norm() / real[:-1].norm(), (made - real)[-1].abs() / real[-1]) for made in (faked, plain)
    )
    print(f"{precision}: gradients {grads:.2e} of {off:.2e}, loss {loss:.2e} of {off_loss:.2e}")
    assert of_grads * grads < off and of_loss * loss < off_loss


def losses_of(recipe: str, corpus, **changes) -> tuple[float, ...]:
    result = training.train(recipe, replace(TINY, **changes), corpus, CPU)
    return *result.losses, result.held_out_loss


def test_each_is_a_recipe_of_its_own(corpus):
    """The second loss has seen all three products of the first step; the one of output alone has seen that one."""
    losses = [losses_of(name, corpus, steps=2, warmup=0) for name in ("bf16", "fp8", *ABLATIONS)]
    assert len(set(losses)) == len(losses) and all(map(math.isfinite, sum(losses, ())))


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("name", ("fp8_faked", "fp8_faked_but_activations"))
def test_a_compiled_layer_is_one_graph_with_the_values_of_an_eager_one(name, backend, fresh_dynamo):
    results = []
    for compiled in (False, True):
        layer, x, dy = ablated(ABLATIONS[name])
        with torch.autocast("cpu", torch.bfloat16):
            out = (torch.compile(layer, backend=backend, fullgraph=True) if compiled else layer)(x)
        out.backward(dy)
        results.append((out.detach(), x.grad, layer.weight.grad))
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)


def test_trained_weights_are_evaluated_with_one_operand_left_out(corpus):
    others = ("bf16", "fp8", "fp8_faked", "fp8_faked_but_weights")
    for recipe in ("fp8_faked", "fp8"):
        config = replace(TINY, steps=2, warmup=0, compile=recipe == "fp8_faked")
        result = training.train(recipe, config, corpus, CPU, evaluate_in=others)
        assert len(set(result.evaluated_in.values())) == len(others)
        assert result.evaluated_in[recipe] == pytest.approx(result.held_out_loss, rel=1e-4)


def test_a_layer_is_plain_again_and_keeps_its_bias():
    model = nn.Sequential(nn.Linear(K, N), nn.Linear(N, 3))
    names, weight = list(model.state_dict()), model[0].weight
    assert ablate(model, Faked(), lambda module, fqn: fqn == "0") == 1 and type(model[1]) is nn.Linear
    x = torch.randn(2, 5, K)
    with_bias = model[0](x)
    assert with_bias.shape == (2, 5, N) and list(model.state_dict()) == names
    torch.testing.assert_close(with_bias - model[0].bias, torch.nn.functional.linear(x, weight), rtol=0.1, atol=0.1)
    restore(model)
    assert type(model[0]) is nn.Linear and model[0].weight is weight and not hasattr(model[0], "faked")


def test_experts_are_refused(corpus):
    with pytest.raises(UsageError, match="fp8_faked: operands are faked in linear layers alone; take a dense --preset"):
        training.train("fp8_faked", MOE, corpus, CPU)


@pytest.mark.parametrize(
    ("recipe", "layers", "kept"), [("fp8_keep_last", 4, {3}), ("fp8_keep_first_and_last", 4, {0, 3})]
)
def test_blocks_are_kept_in_bf16(recipe, layers, kept):
    model = training.build(replace(TINY, layers=layers), CPU)
    assert convert(model, recipe) == f"{4 * (layers - len(kept))} of {4 * layers + 1} linear layers in fp8_128x128"
    plain = {i for i, block in enumerate(model.layers) if type(block.mlp.down.weight) is nn.Parameter}
    assert plain == kept
