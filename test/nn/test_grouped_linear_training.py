"""The grouped linear layer in training: accumulation, what lives how long, frozen parts, checkpointing, NaN."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from grouped_layers import CALLS, NAMES, ends_of, experts, run, tokens, transposed_mm
from helpers import FP8, NVFP4, both_formats, every_recipe, weight_calls
from products_by_hand import grouped_by_hand
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchao_blockwise import BlockwiseFP8Tensor, MasterWeightTensor, NVFP4Tensor
from torchao_blockwise.nn import grouped_linear
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")


@every_recipe
def test_gradients_accumulate(config):
    w, parts = experts(config), [(tokens(9, 72, seed=s), ends_of(e)) for s, e in ((1, [4, 0, 5]), (2, [0, 9, 0]))]
    parts = [(x.requires_grad_(), ends) for x, ends in parts]
    grads = [run(transposed_mm, x, w, ends, torch.ones(9, 40))[2] for x, ends in parts]
    w.grad = None
    with weight_calls() as calls:
        outputs = [transposed_mm(x, w, ends) for x, ends in parts]
        for out in reversed(outputs):
            out.backward(torch.ones_like(out))
        grouped_linear(parts[0][0], w, parts[0][1])
        F.grouped_mm(parts[0][0], w.detach().mT, offs=parts[0][1])
    assert (calls.quantize, calls.columnwise, calls.transpose) == (6, 2, 0)
    assert_bitwise_equal(w.grad, grads[1] + grads[0])


@every_recipe
def test_the_columnwise_copy_dies_with_its_product(config):
    w, x, refs = experts(config), tokens(9, 72), []
    with weight_calls() as calls:
        calls.on_columnwise = lambda copy: refs.extend(weakref.ref(t) for t in copy.tensors if t is not None)
        for _ in range(2):
            run(transposed_mm, x, w, ends_of([4, 0, 5]), tokens(9, 40, seed=7))
    assert len(refs) >= 4 and not any(ref() is not None for ref in refs)
    assert w.quantized_bytes == 0


@every_recipe
def test_one_weight_used_twice(config):
    w, x, ends = experts(config, n=72), tokens(9, 72).requires_grad_(), ends_of([4, 0, 5])
    twice = transposed_mm(transposed_mm(x, w, ends), w, ends)
    twice.sum().backward()
    first = grouped_by_hand(x.detach(), w.hp, ends, torch.zeros(9, 72), config)[0]
    _, dy, outer = grouped_by_hand(first, w.hp, ends, torch.ones(9, 72), config)
    _, dx, inner = grouped_by_hand(x.detach(), w.hp, ends, dy, config)
    assert_bitwise_equal(x.grad, dx)
    assert_bitwise_equal(w.grad, outer + inner)


@every_recipe
@pytest.mark.parametrize("needs", ("x", "weight", "none"))
def test_only_the_gradients_that_are_needed(config, needs):
    w, x, dy, ends = experts(config), tokens(9, 72), tokens(9, 40, seed=7), ends_of([4, 0, 5])
    expected = grouped_by_hand(x, w.hp, ends, dy, config)
    w.requires_grad_(needs == "weight")
    x.requires_grad_(needs == "x")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        out = transposed_mm(x, w, ends)
    assert_bitwise_equal(out.detach(), expected[0])
    assert out.requires_grad == (needs != "none")
    if needs == "none":
        return
    # For its own gradient a weight needs the copy of x along tokens, for that of x nothing of x.
    assert (len(saved) > 2) == (needs == "weight") and x.shape not in saved
    out.backward(dy)
    for t, name, want in ((x, "x", expected[1]), (w, "weight", expected[2])):
        assert (t.grad is not None) == (name == needs)
        if name == needs:
            assert_bitwise_equal(t.grad, want, name)


@every_recipe
@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode), ids=("no_grad", "inference_mode"))
def test_without_gradients(config, mode):
    w, x, ends = experts(config), tokens(9, 72), ends_of([4, 0, 5])
    expected = transposed_mm(x, w, ends).detach()
    with mode():
        for call in (transposed_mm, lambda x, w, ends: torch._grouped_mm(x, w.mT, offs=ends), grouped_linear):
            assert_bitwise_equal(call(x, w, ends), expected)


@every_recipe
@pytest.mark.parametrize("use_reentrant", (False, True), ids=("non_reentrant", "reentrant"))
def test_checkpointing(config, use_reentrant):
    w, x, dy, ends = experts(config), tokens(9, 72), tokens(9, 40, seed=7), ends_of([4, 0, 5])
    expected = run(transposed_mm, x, w, ends, dy)
    with weight_calls() as calls:
        got = run(lambda *a: checkpoint(transposed_mm, *a, use_reentrant=use_reentrant), x, w, ends, dy)
    assert (calls.quantize, calls.columnwise) == (3, 1)
    for name, a, b in zip(NAMES, got, expected):
        assert_bitwise_equal(a, b, name)


QUANTIZED = {"fp8": (BlockwiseFP8Tensor, FP8), "nvfp4": (NVFP4Tensor, NVFP4)}
kinds = pytest.mark.parametrize(("kind", "config"), QUANTIZED.values(), ids=QUANTIZED)


@kinds
@pytest.mark.parametrize("requires_grad", (True, False), ids=("trained", "frozen"))
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_quantised_parameter_trains_like_a_master_weight(kind, config, requires_grad, call):
    if call is CALLS["view"] and kind is NVFP4Tensor:
        call = transposed_mm
    w, x, dy, ends = experts(config), tokens(9, 72), tokens(9, 40, seed=7), ends_of([4, 0, 5])
    expected = run(grouped_linear, x, w, ends, dy)
    quantised = nn.Parameter(kind.from_hp(w.hp), requires_grad=requires_grad)
    got = run(call, x, quantised, ends, dy)
    for name, a, b in zip(NAMES, got, expected):
        assert a is None if name == "grad_weight" and not requires_grad else torch.equal(a, b), name


@both_formats
@pytest.mark.parametrize("stored", ("nk", "kn"))
def test_main_grad_takes_the_gradients_of_all_microbatches(config, stored, device):
    """Added in fp32, in place; `.grad` is left alone, and empty experts' gradients too."""
    w = experts(config, device=device)
    if stored == "kn":
        w = nn.Parameter(MasterWeightTensor(w.hp.mT.contiguous(), config))

    def call(x, w, ends):
        return F.grouped_mm(x, w if stored == "kn" else w.mT, offs=ends)

    total = torch.full(w.shape, 0.5, device=device)
    parts = [(tokens(9, 72, seed=s, device=device), ends_of(e, device)) for s, e in ((1, [4, 0, 5]), (2, [9, 0, 0]))]
    dy = tokens(9, 40, seed=7, device=device)
    grads = [run(call, x, w, ends, dy)[1:] for x, ends in parts]
    w.grad, w.main_grad = None, total.clone()
    for (x, ends), (grad_x, grad_w) in zip(parts, grads):
        got = run(call, x, w, ends, dy)
        total += grad_w
        assert torch.equal(got[1], grad_x) and got[2] is None
    assert w.grad_added_to_main_grad and (w.main_grad[1] == 0.5).all()
    torch.testing.assert_close(w.main_grad, total, rtol=1e-6, atol=1e-5)


@both_formats
@pytest.mark.parametrize("where", ("x", "weight", "dy"))
def test_nan_stays_with_its_expert(config, where):
    if config is NVFP4 and where != "weight":
        pytest.skip("one NaN makes NVFP4's scale of the tensor NaN")
    w, x, dy, ends = experts(config), tokens(9, 72), tokens(9, 40, seed=7), ends_of([4, 0, 5])
    clean = run(transposed_mm, x, w, ends, dy)
    if where == "weight":
        with torch.no_grad():
            w[1, 5, 3] = float("nan")
    else:
        {"x": x, "dy": dy}[where][1, 6] = float("nan")
    output, grad_x, grad_w = run(transposed_mm, x, w, ends, dy)
    if where == "weight" and config is FP8:
        assert_bitwise_equal(output, clean[0])
    elif where == "weight":
        assert not output.isfinite().any()
    else:
        assert not (output[1] if where == "x" else grad_x[1]).isfinite().any() and not grad_w[0].isfinite().all()
        assert_bitwise_equal(output[4:], clean[0][4:])
        assert_bitwise_equal(grad_x[4:], clean[1][4:])
        assert_bitwise_equal(grad_w[1:], clean[2][1:])
