"""`model.bfloat16()`, `.to(..)` and the like on converted models: as on plain ones, or not at all."""

import copy
import subprocess
import sys

import pytest
import torch
from every_layer import Grouped
from helpers import FP8, Tied, assert_same_gradients, both_formats, both_masters, converted, mlp, replace
from torch import nn

from torchao_blockwise import MasterWeightTensor, linears_and_experts
from torchao_blockwise.testing import assert_bitwise_equal


def model_of(kind: str, config) -> nn.Module:
    torch.manual_seed(0)
    return converted({"linear": mlp, "experts": Grouped, "tied": Tied}[kind](), config, linears_and_experts())


def run(model) -> torch.Tensor:
    x = torch.arange(33) if isinstance(model, Tied) else torch.randn(33, 64, generator=torch.Generator().manual_seed(1))
    # A second holder of each weight, next to its layer, which saves it: a penalty.
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    out = model(x if isinstance(model, Tied) else x.to(dtype)).sum()
    return out + sum(p.square().sum() for p in model.parameters() if isinstance(p, MasterWeightTensor))


def contents(model) -> list:
    return [(name, type(p), p.dtype, p.device, id(p)) for name, p in model.named_parameters()]


@pytest.fixture(params=("neither", "overwrite", "swap"))
def future(request):
    """PyTorch's switches for how modules take what was cast."""
    setters = {
        "overwrite": torch.__future__.set_overwrite_module_params_on_conversion,
        "swap": torch.__future__.set_swap_module_params_on_conversion,
    }
    set_to = setters.get(request.param, lambda value: None)
    set_to(True)
    yield request.param
    set_to(False)


MOVES = {
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "half": (lambda m: m.half(), torch.float16),
    "to_dtype": (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    "to_device": (lambda m: m.to("cpu"), torch.float32),
    "cpu": (lambda m: m.cpu(), torch.float32),
    "share_memory": (lambda m: m.share_memory(), torch.float32),
    "to_empty": (lambda m: m.to_empty(device="cpu"), torch.float32),
}
KINDS = [("linear", True), ("linear", False), ("experts", True), ("experts", False), ("tied", True)]
every_model = pytest.mark.parametrize(("kind", "masters"), KINDS, ids=lambda x: x if isinstance(x, str) else f"{x:d}")


@both_formats
@every_model
@pytest.mark.parametrize("move", MOVES)
def test_models_move_whole_with_outputs_alive(config, kind, masters, move):
    """Each Parameter stays the object it is, and the model what it would be without outputs.

    Of a tied weight the embedding, which is not converted, lets PyTorch swap it, which refuses where a graph holds it.
    """
    config = replace(config, master_weights=masters)
    model, other = model_of(kind, config), model_of(kind, config)
    act, dtype = MOVES[move]
    before, out = contents(model), None if kind == "tied" else run(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert act(model) is model
    act(other)
    assert [(name, cls, dtype, device, ident) for name, cls, _, device, ident in before] == contents(model)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters()))
    if move == "to_empty":
        return
    assert_bitwise_equal(run(model).detach(), run(other).detach())
    del out
    run(model).backward()
    assert all(p.grad.dtype == dtype for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", ("linear", "experts", "tied"))
@both_masters
def test_switches_of_pytorch_change_nothing(future, kind, masters):
    if kind == "tied" and not masters:
        return
    if kind == "tied" and future == "overwrite":
        pytest.skip("PyTorch then gives each module a separate Parameter, and unties plain ones too")
    model = model_of(kind, replace(FP8, master_weights=masters))
    weights = [p for p in model.parameters() if type(p) is not nn.Parameter]
    out = torch.zeros(()) if future == "swap" or kind == "tied" else run(model)
    model.bfloat16()
    assert all(a is b for a, b in zip(weights, (p for p in model.parameters() if type(p) is not nn.Parameter)))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and out is not None


@both_formats
@pytest.mark.parametrize(("kind", "masters"), KINDS[:4])
def test_backward_goes_on_where_nothing_was_cast(config, kind, masters):
    config = replace(config, master_weights=masters)
    model, other = model_of(kind, config), model_of(kind, config)
    out = run(model)
    model.to("cpu")
    out.backward()
    run(other).backward()
    assert_same_gradients(model, other)


def test_gradients_are_cast_along():
    model = model_of("linear", FP8)
    run(model).backward()
    weight = model[0].weight
    grad, expected = weight.grad, weight.grad.bfloat16()
    out = run(model)
    model.bfloat16()
    assert model[0].weight is weight and weight.grad is grad and out is not None
    assert_bitwise_equal(grad, expected)


@both_formats
@every_model
def test_a_refused_move_leaves_weights_as_they_were(config, kind, masters):
    model = model_of(kind, replace(config, master_weights=masters))
    before, values = contents(model), copy.deepcopy(model.state_dict())
    with pytest.raises(NotImplementedError if masters else TypeError, match=r"float16 or float32, got torch.float64"):
        model.double()
    weights = [row for row in before if row[1] is not nn.Parameter]
    assert [row for row in contents(model) if row[1] is not nn.Parameter] == weights
    for name, *_ in weights:
        assert torch.equal(model.state_dict()[name], values[name])


@both_formats
@every_model
def test_models_move_to_meta(config, kind, masters):
    model = model_of(kind, replace(config, master_weights=masters))
    assert {p.device.type for p in model.to("meta").parameters()} == {"meta"}


def test_a_copy_read_in_a_new_process_moves_whole_too(tmp_path):
    model = model_of("linear", FP8)
    torch.save(model, tmp_path / "model.pt")
    program = (
        "import torch, sys\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "out = model(torch.randn(4, 64))\n"
        "model.bfloat16()\n"
        "print({str(p.dtype) for p in model.parameters()})"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "model.pt"], capture_output=True, text=True)
    assert done.stdout.strip() == "{'torch.bfloat16'}", done.stderr
