"""Live memory of a step: nothing that no later operation reads, and the bytes that are saved for backward."""

import itertools
from typing import NamedTuple

import pytest
import torch
from every_layer import CONFIGS, Halves, make, tokens
from helpers import FP8, converted
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.diagnostics.live_memory import _PRODUCTS, LiveMemory, plain_tensors, storage_of
from torchao_blockwise.nn.gemms import AmaxGroups, GemmSpec, weight_comes_first
from torchao_blockwise.ops.groups.ends import padded_tokens
from torchao_blockwise.ops.padding import padded_size


class Step(NamedTuple):
    """An operation, and the bytes and storages, by id, that live when it is done: its operands still.

    name: without a namespace for operations of ours, "aten::add" for others. reads: the storages that it reads.
    """

    name: str
    nbytes: int
    reads: set[int]
    live: set[int]


class Trace(LiveMemory):
    """Records in `steps` which tensors live after each operation, of those that are made in this mode."""

    def __init__(self):
        super().__init__()
        self.steps: list[Step] = []
        # Keep the references, whose ids would be used again.
        self._refs: dict[int, object] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        read = [self._made.get(storage_of(x)) for x in plain_tensors([*args, *(kwargs or {}).values()])]
        out = super().__torch_dispatch__(func, types, args, kwargs)
        # What runs inside a product was noted there.
        if func not in _PRODUCTS:
            name = _compat.schema_of(func).name.removeprefix("torchao_blockwise::")
            self.note(name, {id(made[0]) for made in read if made is not None})
        return out

    def note(self, name: str, reads: set[int] | None = None) -> None:
        """Add a step of that name now."""
        nbytes = self.live()
        live = {id(ref): ref for ref, *_ in self._made.values()}
        self._refs |= live
        self.steps.append(Step(name, nbytes, reads or set(), set(live)))


def traced(layer, x) -> Trace:
    layer.zero_grad()
    dy = torch.ones_like(layer(x))
    with Trace() as trace:
        y = layer(x)
        trace.note("between")
        if y.requires_grad:
            y.backward(dy)
        trace.note("after")
    results = [t for t in (y, x.grad, *(p.grad for p in layer.parameters())) if t is not None]
    assert trace.steps[-1].nbytes == sum({t.untyped_storage().data_ptr(): t.nbytes for t in results}.values())
    return trace


def layer_of(name: str, config) -> nn.Module:
    if name != "swiglu_linear":
        return make(name, config, torch.bfloat16)
    return converted(Halves(64, 48, bias=False).bfloat16(), config)


def inputs(name: str, count: int = 33) -> torch.Tensor:
    return tokens(name, count).bfloat16().requires_grad_()


# In NVFP4 a norm and SwiGLU are operations of PyTorch, whose results models hold.
LAYERS = dict.fromkeys(("linear", "grouped"), (*CONFIGS,)) | dict.fromkeys(
    ("norm_linear", "layer_norm_linear", "swiglu_linear", "swiglu_mlp", "experts"),
    ("fp8", "rows", "high_precision", "quantized_weight"),
)


@pytest.mark.parametrize(("name", "config"), [(name, config) for name, configs in LAYERS.items() for config in configs])
def test_nothing_lives_that_no_later_operation_reads(name, config):
    """Besides the results: a copy that outlives its use by one operation is seen."""
    layer = layer_of(name, CONFIGS[config])
    # With more tokens than features another order.
    for count in (33, 300):
        steps = traced(layer, inputs(name, count)).steps
        wanted = steps[-1].live
        for before, step in reversed([*itertools.pairwise(steps)]):
            wanted = wanted | step.reads
            assert "::" in step.name or step.live & before.live <= wanted, step.name


WEIGHT_FIRST, WEIGHT_LAST = "grad_weight quantize matmul", "quantize matmul grad_weight"
SWIGLU = "quantize_both quantize matmul swiglu_quantize quantize matmul"
ORDERS = {
    "linear": f"quantize_both quantize matmul between quantize_both {WEIGHT_LAST}",
    "norm_linear": f"norm_statistics norm_quantize quantize matmul between quantize_both {WEIGHT_FIRST}",
    "swiglu_mlp": f"{SWIGLU} between quantize_both {WEIGHT_FIRST} swiglu_backward_quantize {WEIGHT_LAST}",
}
ORDERS |= {
    "grouped": ORDERS["linear"].replace("matmul", "grouped_matmul"),
    "experts": ORDERS["swiglu_mlp"].replace("matmul", "grouped_matmul"),
    "swiglu_linear": f"swiglu_quantize quantize matmul between quantize_both {WEIGHT_FIRST} swiglu_backward",
}


@pytest.mark.parametrize(("name", "order"), ORDERS.items(), ids=ORDERS)
def test_the_order_of_operations(name, order):
    steps = traced(layer_of(name, FP8), inputs(name)).steps
    assert [step.name for step in steps if "::" not in step.name] == [*order.split(), "after"]


# Features of the columnwise copies, and other bytes that are saved: statistics of a norm, (gate | up) of an MLP.
SAVED = {"linear": ([64], 0), "norm_linear": ([64], 4 * 33), "layer_norm_linear": ([64], 8 * 33), "grouped": ([64], 0),
         "swiglu_mlp": ([64, 160], 2 * 33 * 320), "experts": ([64, 96], 2 * 33 * 192)}  # fmt: skip


@pytest.mark.parametrize(("name", "features", "others"), [(name, *row) for name, row in SAVED.items()], ids=SAVED)
@pytest.mark.parametrize("trained", (True, False), ids=("trained", "frozen"))
@pytest.mark.parametrize("config", ("fp8", "high_precision", "quantized_weight"))
def test_what_is_saved_for_backward(name, features, others, trained, config):
    """Copies, or only the input itself; nothing but what the gradient of the input needs of a frozen layer."""
    layer = layer_of(name, CONFIGS[config]).requires_grad_(trained)
    x, fmt = inputs(name), FP8.grad_weight_format
    width = padded_tokens(33, 3, fmt.block[1]) if name in ("experts", "grouped") else padded_size(33)
    copies = sum(fmt.nbytes(n, width) for n in features) if trained and config != "high_precision" else 0
    nbytes = {step.name: step.nbytes for step in traced(layer, x).steps}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    assert nbytes["between"] == y.nbytes + others + copies
    # The gradient of a norm needs the input itself; else a copy takes its place.
    assert any(t is x for t in saved) == ("norm" in name or (trained and config == "high_precision"))
    # And nothing where nothing needs a gradient.
    nbytes = {step.name: step.nbytes for step in traced(layer.requires_grad_(False), x.detach()).steps}
    assert nbytes["between"] == y.nbytes


def test_linear_multiplies_first_what_leaves_less():
    def weight_first(tokens, n, **options):
        return weight_comes_first(torch.empty(tokens, n, device="meta"), GemmSpec(None, FP8, **options))

    assert weight_first(513, 512) and not weight_first(512, 512)
    # Ranks that exchange amaxes take one order.
    assert not weight_first(513, 512, amax_groups=AmaxGroups(weight="0"))
