"""`FlopCounterMode` counts of a converted model what it counts of the model before."""

import pytest
import torch
from every_layer import CONFIGS, counting, every_model, flops, make, tokens
from helpers import FP8, both_formats, forward_backward, mlp

from torchao_blockwise import ops

OPS = torch.ops.torchao_blockwise


@every_model
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_step(model, config):
    """Of any number of tokens, padded or not."""
    x = tokens(model)
    expected = flops(lambda: forward_backward(make(model), x))
    assert expected > 0
    assert flops(lambda: forward_backward(make(model, config), x)) == expected


@both_formats
@pytest.mark.parametrize("frozen", (True, False), ids=("frozen_weight", "frozen_input"))
def test_only_products_that_are_computed_count(config, frozen):
    def step(config):
        model, x = make("linear", config), tokens("linear").requires_grad_(frozen)
        model.weight.requires_grad_(not frozen)
        model(x).sum().backward()

    assert flops(lambda: step(config)) == flops(lambda: step(None)) == 2 * (2 * 33 * 64 * 48)


def test_a_sum_in_main_grad_counts():
    def step(has_main_grad: bool):
        model = make("linear", FP8)
        if has_main_grad:
            model.weight.main_grad = torch.zeros(48, 64)
        model(tokens("linear", 64).requires_grad_()).sum().backward()
        assert (model.weight.grad is None) == has_main_grad

    assert flops(lambda: step(True)) == flops(lambda: step(False)) == 6 * 64 * 48 * 64


@both_formats
def test_counts_by_module_and_operation(config):
    with counting() as counter:
        mlp(config)(tokens("two")).sum()
    by_module = counter.get_flop_counts()
    assert by_module["Sequential.0"] == {OPS.master_matmul: 2 * 33 * 64 * 160}
    assert by_module["Sequential.2"] == {OPS.master_matmul: 2 * 33 * 160 * 32}


def operands(config, *shapes: tuple[int, ...]):
    """Copies by rows of tensors that are wide enough for whole blocks."""
    return (ops.quantize(torch.randn(shape), config.activation_format).rowwise for shape in shapes)


@both_formats
def test_operations(config):
    a, b = operands(config, (5, 256), (7, 256))
    product = 2 * 5 * 7 * 256
    assert flops(lambda: ops.matmul(a, b, out_dtype=torch.float32)) == product
    assert flops(lambda: ops.add_matmul_(torch.zeros(5, 7), a, b)) == product
    (experts,), ends = operands(config, (3, 7, 256)), torch.tensor([1, 1, 4], dtype=torch.int32)
    # The token of no group counts too: what is on the device is not asked.
    assert flops(lambda: ops.grouped_matmul(a, experts, ends, out_dtype=torch.float32)) == product
    x, dy = (
        ops.quantize(torch.randn(5, n), config.activation_format, groups=ends, columnwise=True).columnwise
        for n in (64, 48)
    )
    padded = x.qdata.shape[1] * config.activation_format.element.per_byte
    assert padded > 5
    along_tokens = 2 * 64 * 48 * padded
    assert flops(lambda: ops.grouped_matmul(x, dy, ends, along="k", out_dtype=torch.float32)) == along_tokens
    assert flops(lambda: ops.add_grouped_matmul_(torch.zeros(3, 64, 48), x, dy, ends)) == along_tokens
