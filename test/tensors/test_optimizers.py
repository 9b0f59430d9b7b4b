"""Steps of optimizers on master weights: values and graph breaks of plain weights, and what docs/optimizers.md says."""

import inspect

import optimizer_cases
import pytest
import torch
from helpers import FP8, assert_same, mlp
from optimizer_cases import CASES, WAYS, Case, trained
from torch._dynamo.utils import counters

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # PyTorch's: of a learning rate that is read, and of what Dynamo leaves out.
    pytest.mark.filterwarnings("ignore"),
]

# --- the page ---------------------------------------------------------------------------------------------------------

# Only one compiled case runs by default. (name, way) is one option, so that all eager cases do.
CELLS = [
    pytest.param((name, way), id=f"{name}-{way}", marks=pytest.mark.slow if compiled and name != "SGD" else ())
    for name in CASES
    for way, (_, compiled) in WAYS.items()
]


@pytest.mark.parametrize("cell", CELLS)
def test_the_page_says_what_a_case_gives(cell):
    name, way = cell
    pytest.importorskip(CASES[name].package)
    assert optimizer_cases.on_the_page()[name][1:-1][list(WAYS).index(way)] == optimizer_cases.outcome(name, way)


def test_the_page_has_the_cases_and_their_versions():
    page = optimizer_cases.on_the_page()
    assert page == {name: optimizer_cases.described(name, row[1:-1]) for name, row in page.items()}
    assert list(page) == list(CASES)


# --- all of PyTorch and bitsandbytes ----------------------------------------------------------------------------------

LR = {"lr": torch.tensor(1e-2)}
MOMENTUM = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
OPTIMIZERS = {
    name: Case(f"torch.optim.{name}")
    for name, optimizer in vars(torch.optim).items()
    if inspect.isclass(optimizer) and issubclass(optimizer, torch.optim.Optimizer) and name != "Optimizer"
} | {
    "SGD_tensor_lr": Case("torch.optim.SGD", LR),
    "SGD_momentum": Case("torch.optim.SGD", MOMENTUM),
    "RMSprop_centered": Case("torch.optim.RMSprop", {"centered": True, "momentum": 0.9}),
    "Adadelta_tensor_lr": Case("torch.optim.Adadelta", LR),
    "AdamW_tensor_lr": Case("torch.optim.AdamW", LR),
    "AdamW_single": Case("torch.optim.AdamW", {"foreach": False}),
    "AdamW_fused": Case("torch.optim.AdamW", {"fused": True}),
    "AdamW_amsgrad": Case("torch.optim.AdamW", {"foreach": True, "amsgrad": True}),
    "SGD_fused": Case("torch.optim.SGD", {"fused": True}),
}
BITSANDBYTES = {
    "Adam": {}, "Adam8bit": {}, "AdamW8bit": {"weight_decay": 0.1}, "PagedAdamW": {}, "PagedAdamW8bit": {},
    "Lion": {}, "Lion8bit": {}, "PagedLion8bit": {}, "SGD": {"momentum": 0.9}, "SGD8bit": {"momentum": 0.9},
    "RMSprop8bit": {}, "Adagrad8bit": {}, "LAMB8bit": {}, "AdEMAMix": {},
}  # fmt: skip
# Those whose steps needed an operation that was refused, or fall back to eager.
QUICK = ("SGD_tensor_lr", "RMSprop", "Adafactor", "AdamW")
STEPS = [
    pytest.param(case, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, case in OPTIMIZERS.items()
]
SHAPE = {"features": (32, 48, 32), "bias": True}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("case", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps(case, dtype):
    plain, ours = (trained(case, config, dtype=dtype, **SHAPE) for config in (None, FP8))
    assert_same(ours, plain)
    # PyTorch's fused SGD for CPUs leaves bf16 parameters as they are.
    assert dtype is torch.bfloat16 or not torch.equal(ours[0], mlp(features=(32, 48, 32))[0].weight)


@pytest.mark.parametrize("name", BITSANDBYTES)
def test_bitsandbytes_trains_as_on_plain_weights(name):
    pytest.importorskip("bitsandbytes")
    case = Case(f"bitsandbytes.optim.{name}", BITSANDBYTES[name])
    plain, ours = (trained(case, config) for config in (None, FP8))
    assert_same(ours, plain)
    assert not torch.equal(plain[0], mlp(features=(64, 64, 64))[0].weight)


# The first one decomposes as inductor does, and compiles no kernels.
BACKENDS = ("aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow))
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@every_backend
@pytest.mark.parametrize("case", STEPS)
def test_compiled_steps(case, backend):
    results = []
    for config in (None, FP8):
        counters.clear()
        results.append((trained(case, config, backend, **SHAPE), sum(counters["graph_break"].values())))
    (plain, breaks), (ours, own_breaks) = results
    assert own_breaks == breaks
    assert_same(ours, plain)
