"""Whatever writes to a converted weight, the next pass reads what was written.

Every writer, also those that no version counter sees, against every reader: after the write, output and gradients are
those of a fresh conversion of the same values, bit for bit. Writers and readers over ranks are in
`distributed/fsdp_life_checks.py`.
"""

import copy

import pytest
import torch
import torchao.optim
from every_layer import Mixture
from helpers import FP8, NVFP4, assert_same, both_formats, converted, replace
from torch import nn

from torchao_blockwise import MasterWeightTensor, linears_and_experts, weights_unchanged

pytestmark = [
    pytest.mark.usefixtures("no_interpreter"),
    pytest.mark.filterwarnings("ignore"),
]

WIDTH, TOKENS = 64, 33


class Mlp(nn.Module):
    """Two linear layers, and nothing that a compiler would round otherwise, as sums of gradients of biases."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 80, bias=False), nn.Linear(80, WIDTH, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


def made(kind, config, state=None):
    torch.manual_seed(0)
    model = kind()
    if state is not None:
        model.load_state_dict(state)
    return converted(model, config, linears_and_experts())


def read(run, model):
    """(output, grad_input, gradients) of one pass."""
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(5)).requires_grad_()
    model.zero_grad()
    out = run(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def values_of(model) -> dict:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# --- writers: each changes every weight of the model ------------------------------------------------------------------


def weights(model) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() > 1]


def optimizer_step(kind, compiled: bool = False, **options):
    def write(model):
        optimizer = kind(model.parameters(), lr=0.1, **options)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        (torch.compile(optimizer.step) if compiled else optimizer.step)()
        model.zero_grad()

    return write


def compiled_average(model):
    """A compiled exponential moving average, written back."""

    @torch.compile
    def average(parameters, others):
        with torch.no_grad():
            for p, other in zip(parameters, others):
                p.lerp_(other, 0.5)

    average(weights(model), [torch.ones_like(p) for p in weights(model)])


def every(change):
    def write(model):
        with torch.no_grad():
            for p in weights(model):
                change(p)

    return write


def through_numpy(p):
    """An alias that PyTorch knows nothing of."""
    torch.from_numpy(p.hp.numpy()).data.mul_(2)
    p.hp.numpy()[:] += 0.25


def without_counting(p):
    with torch.autograd._unsafe_preserve_version_counter(p.hp):
        p.hp.mul_(2)


def load(assign: bool):
    def write(model):
        model.load_state_dict({k: v * 2 + 0.125 for k, v in values_of(model).items()}, assign=assign)

    return write


def swap(model):
    for p in weights(model):
        other = nn.Parameter(MasterWeightTensor(p.hp * 2, p.config))
        torch.utils.swap_tensors(p, other)


# Unseen too. A graph of values takes no part in their format, and takes seconds to compile: only after FP8 weights.
COMPILED = {
    "compiled_adamw": optimizer_step(torch.optim.AdamW, compiled=True),
    "compiled_average": compiled_average,
    "torchao_adamw8bit": optimizer_step(torchao.optim.AdamW8bit),
}
UNSEEN = {
    "numpy": every(through_numpy),
    "dlpack": every(lambda p: torch.from_dlpack(p.hp).mul_(2)),
    "storage": every(lambda p: p.hp.untyped_storage().fill_(1)),
    "hp_data": every(lambda p: p.hp.data.mul_(2)),
    "preserved": every(without_counting),
    "data_of_state_dict": lambda model: [v.data.mul_(2) for v in model.state_dict().values()],
}
SEEN = {
    "sgd": optimizer_step(torch.optim.SGD, weight_decay=0.5, momentum=0.9),
    "adamw_fused": optimizer_step(torch.optim.AdamW, fused=True),
    "in_place": every(lambda p: p.add_(1)),
    "foreach": lambda model: torch.no_grad()(torch._foreach_mul_)(weights(model), 2.0),
    "foreach_copy": lambda model: torch.no_grad()(torch._foreach_copy_)(
        weights(model), [p.hp * 2 for p in weights(model)]
    ),
    "out": every(lambda p: torch.add(p.hp, 1, out=p)),
    "copy_": every(lambda p: p.copy_(MasterWeightTensor(torch.randn(p.shape), p.config))),
    "transposed": every(lambda p: p.mT[0].mul_(3)),
    "hp_view": every(lambda p: p.hp.view(-1)[5:].fill_(2)),
    "data": every(lambda p: p.data.mul_(2)),
    "data_of_data": every(lambda p: p.data.view(-1).data[3:].zero_()),
    "set_data": every(lambda p: setattr(p, "data", p.hp * 3)),
    "rows": every(lambda p: p[1:].fill_(0.5)),
    "setitem": every(lambda p: p.__setitem__((slice(None), 2), 7.0)),
    "load": load(assign=False),
    "load_assigned": load(assign=True),
    "swap_tensors": swap,
}
WRITERS = {**SEEN, **UNSEEN}

RECIPES = {"fp8": (Mlp, FP8), "experts": (Mixture, FP8), "nvfp4": (Mlp, NVFP4), "experts_nvfp4": (Mixture, NVFP4)}
# (recipe, writer)
PAIRS = [(recipe, name) for recipe in RECIPES for name in WRITERS]
PAIRS += [(recipe, name) for recipe in ("fp8", "experts") for name in COMPILED]


@pytest.fixture(scope="module", params=("eager", "compiled"))
def how(request):
    torch._dynamo.reset()
    yield (lambda model: model) if request.param == "eager" else torch.compile
    torch._dynamo.reset()


@pytest.fixture(scope="module", params=RECIPES)
def reader(request, how):
    """(model, its pass, its kind and config); warm: it has read its weights before anything is written."""
    kind, config = RECIPES[request.param]
    model = made(kind, config)
    run = how(model)
    read(run, model)
    return model, run, kind, config


def assert_reads_what_is_there(reader):
    model, run, kind, config = reader
    fresh = made(kind, config, values_of(model))
    assert_same(read(run, model), read(fresh, fresh))


@pytest.mark.parametrize(("reader", "writer"), PAIRS, indirect=["reader"])
def test_the_next_pass_reads_what_was_written(reader, writer):
    """Also after a scope that kept copies, and in the next one, whatever of it can be seen."""
    model, run, *_ = reader
    write = (WRITERS | COMPILED)[writer]
    before = values_of(model)
    write(model)
    changed = {name: value for name, value in values_of(model).items() if value.dim() > 1}
    assert changed and not any(torch.equal(value, before[name]) for name, value in changed.items())
    assert_reads_what_is_there(reader)
    if writer not in SEEN:
        with weights_unchanged(model, keep="both"):
            read(run, model)
        write(model)
        with weights_unchanged(model):
            assert_reads_what_is_there(reader)


# --- quantized Parameters: their payload is the truth -----------------------------------------------------------------

QUANTIZED_WRITERS = {
    "copy_": every(lambda p: p.copy_(torch.randn(p.shape))),
    "set_data": every(lambda p: setattr(p, "data", torch.randn(p.shape))),
    "data_copy_": every(lambda p: p.data.copy_(torch.randn(p.shape))),
    "payload": every(lambda p: p.qdata.view(torch.uint8).bitwise_and_(0x77)),
    "scale": every(lambda p: p.scale.view(torch.uint8).zero_()),
    "load": load(assign=False),
    "load_assigned": load(assign=True),
}


@pytest.mark.parametrize("writer", QUANTIZED_WRITERS.values(), ids=QUANTIZED_WRITERS)
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
@both_formats
def test_quantized_parameters_are_read_as_they_are(config, compiled, writer):
    model = made(Mlp, replace(config, master_weights=False))
    run = torch.compile(model) if compiled else model
    read(run, model)
    writer(model)
    fresh = copy.deepcopy(model)
    assert_same(read(run, model), read(fresh, fresh))
