"""Recordings of what functions do: what later calls give, what is not recorded, and when tensors go."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import (
    BlockwiseFP8TrainingConfig,
    NVFP4TrainingConfig,
    ops,
    weights_unchanged,
)
from torchao_blockwise.conversion import experts
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.nn import SwiGLUExperts, SwiGLUMLP
from torchao_blockwise.ops import replay

CONFIGS = {
    "fp8": BlockwiseFP8TrainingConfig(),
    "fp8_high_precision": BlockwiseFP8TrainingConfig(save_activations="high_precision"),
    "fp8_pow2": BlockwiseFP8TrainingConfig(power_of_2_scales=True, out_dtype=torch.float32),
    "nvfp4": NVFP4TrainingConfig(),
    "fp8_weight": BlockwiseFP8TrainingConfig(master_weights=False),
}
CALLS = 5

pytestmark = pytest.mark.usefixtures("no_interpreter")


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    """A CPU's operations are replayed too: there all that they do is PyTorch's. Nothing is known from other tests."""
    monkeypatch.setattr(replay, "serves", lambda device: True)
    replay.forget()
    yield
    replay.forget()


@pytest.fixture
def replays(monkeypatch):
    """() -> how many calls were replays."""
    counted, by_itself = [0], replay.Recording.replay

    def counting(self, tensors):
        counted[0] += 1
        return by_itself(self, tensors)

    monkeypatch.setattr(replay.Recording, "replay", counting)
    return lambda: counted[0]


def tensors_of(result) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


def assert_replayed(call, arguments: list, replays, by_reference: bool = True) -> None:
    """Calls with each of the arguments give the bits of first calls with them, and from the third on are replays.

    by_reference: whether what a CPU runs can be replayed too: it reads no values and no table of its own.
    """
    results = []
    for i, args in enumerate(arguments):
        before = replays()
        results.append(tensors_of(call(*args)))
        is_replayed = i >= 2 and (by_reference or torch.cuda.is_available())
        assert (replays() > before) == is_replayed, f"call {i}"
    for args, result in zip(arguments, results, strict=True):
        replay.forget()
        wanted = tensors_of(call(*args))
        assert len(result) == len(wanted) > 0
        for x, y in zip(result, wanted):
            assert x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype
            assert torch.equal(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (x, y)))


def values(device, *shape, dtype=torch.bfloat16):
    return torch.randn(shape, dtype=dtype, device=device)


# --- operations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(256, 384), (33, 100), (2, 40, 64), (5, 1)])
@pytest.mark.parametrize("fmt", [FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16], ids=lambda fmt: fmt.name)
def test_quantize(device, fmt, shape, replays):
    inputs = [(values(device, *shape),) for _ in range(CALLS)]
    assert_replayed(lambda x: ops.quantize(x, fmt, columnwise=True), inputs, replays)


@pytest.mark.parametrize("shape", [(256, 384, 128), (33, 112, 70), (1, 8, 16)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "pair", [(FP8_1X128, FP8_128X128), (FP8_1X128, FP8_1X128), (NVFP4_1X16, NVFP4_16X16)], ids=lambda pair: pair[1].name
)
def test_matmul(device, pair, bias, shape, replays):
    m, n, k = shape

    def inputs():
        a, b = (ops.quantize(values(device, rows, k), fmt).rowwise for rows, fmt in zip((m, n), pair))
        return a, b, values(device, n) if bias else None

    assert_replayed(
        lambda a, b, bias: ops.matmul(a, b, out_dtype=torch.bfloat16, bias=bias),
        [inputs() for _ in range(CALLS)],
        replays,
        by_reference=pair[0] is FP8_1X128,
    )


def test_what_is_added_to_is_changed(device, replays):
    a, b = (ops.quantize(values(device, rows, 256), FP8_1X128).rowwise for rows in (128, 96))
    product = ops.matmul(a, b, out_dtype=torch.float32)
    out = torch.zeros(128, 96, device=device)
    for i in range(CALLS):
        ops.add_matmul_(out, a, b)
        # Sums of few multiples of one number are exact up to their last rounding.
        torch.testing.assert_close(out, product * (i + 1), rtol=1e-6, atol=0)
    assert replays() >= CALLS - 2


@pytest.mark.parametrize("along", ["m", "k"])
def test_groups_are_those_of_the_call(device, along, replays):
    """How many tokens an expert has is known on the device alone, and may change with every call."""

    def inputs(*ends):
        groups = torch.tensor(ends, dtype=torch.int32, device=device)
        x, dy = (values(device, 300, width) for width in (256, 128))
        a, b = (ops.grouped_quantize(t, groups, FP8_1X128, columnwise=True) for t in (dy, x))
        w = ops.quantize(values(device, 3, 128, 256), FP8_128X128).rowwise
        return (b.rowwise, w, groups) if along == "m" else (a.columnwise, b.columnwise, groups)

    arguments = [inputs(*ends) for ends in ((10, 20, 300), (0, 300, 300), (100, 200, 300), (1, 1, 1), (299, 300, 300))]
    assert_replayed(
        lambda a, b, groups: ops.grouped_matmul(a, b, groups, along=along, out_dtype=torch.bfloat16),
        arguments,
        replays,
        by_reference=False,
    )


# --- layers -----------------------------------------------------------------------------------------------------------


def trained(make_layer, make_inputs, steps: int = 6) -> list[torch.Tensor]:
    """Outputs, gradients and weights of some steps of SGD."""
    torch.manual_seed(0)
    layer = make_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    seen = []
    for _ in range(steps):
        x, *more = make_inputs()
        x.requires_grad_()
        out = layer(x, *more)
        out.backward(torch.randn_like(out))
        optimizer.step()
        seen += [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
        seen += [
            p.detach().dequantize() if hasattr(p, "dequantize") else p.detach().clone() for p in layer.parameters()
        ]
        optimizer.zero_grad()
    return seen


def assert_trains_alike(make_layer, make_inputs, replays, monkeypatch) -> None:
    got = trained(make_layer, make_inputs)
    assert replays() >= 4
    monkeypatch.setattr(replay, "serves", lambda device: False)
    before = replays()
    wanted = trained(make_layer, make_inputs)
    assert replays() == before
    for x, y in zip(got, wanted, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("shape", [(64, 96), (3, 20, 96), (96,)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["fp8", "fp8_high_precision", "fp8_pow2", "nvfp4"])
def test_linear_trains_alike(device, name, bias, shape, replays, monkeypatch):
    def layer():
        linear = nn.Linear(96, 80, bias=bias, device=device)
        quantize_(linear, CONFIGS[name])
        return linear

    assert_trains_alike(layer, lambda: (values(device, *shape),), replays, monkeypatch)


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_swiglu_trains_alike(device, name, replays, monkeypatch):
    def layer():
        mlp = SwiGLUMLP(64, 128, device=device)
        quantize_(mlp, CONFIGS[name])
        return mlp

    assert_trains_alike(layer, lambda: (values(device, 48, 64),), replays, monkeypatch)


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_experts_train_alike(device, name, replays, monkeypatch):
    def layer():
        model = nn.ModuleDict({"experts": SwiGLUExperts(3, 64, 128, device=device)})
        quantize_(model, CONFIGS[name], filter_fn=experts())
        return model["experts"]

    def inputs():
        ends = torch.randint(0, 50, (3,)).sort().values
        return values(device, 50, 64), ends.to(device, torch.int32)

    assert_trains_alike(layer, inputs, replays, monkeypatch)


def test_a_quantized_weight(device, replays):
    linear = nn.Linear(96, 80, bias=False, device=device)
    quantize_(linear, CONFIGS["fp8_weight"])
    arguments = [(values(device, 32, 96).requires_grad_(),) for _ in range(CALLS)]
    assert_replayed(lambda x: torch.autograd.grad(linear(x).sum(), x), arguments, replays)


def test_main_grad(device):
    linear = nn.Linear(96, 80, bias=False, device=device)
    quantize_(linear, CONFIGS["fp8"])
    linear.weight.main_grad = torch.zeros(80, 96, device=device)
    x = values(device, 32, 96)
    for i in range(CALLS):
        linear(x).backward(torch.ones(32, 80, dtype=torch.bfloat16, device=device))
        assert linear.weight.grad is None and linear.weight.grad_added_to_main_grad
        if i == 0:
            first = linear.weight.main_grad.clone()
        torch.testing.assert_close(linear.weight.main_grad, first * (i + 1), rtol=1e-6, atol=0)


def test_scopes_and_recordings_do_not_meet(device, replays):
    """A recording reads no copy that a scope keeps, and a scope's copy serves where a recording is known."""
    linear = nn.Linear(96, 80, bias=False, device=device)
    quantize_(linear, CONFIGS["fp8"])
    x = values(device, 32, 96)
    with torch.no_grad():
        plain = [linear(x) for _ in range(4)]
        with weights_unchanged(linear):
            kept = [linear(x) for _ in range(4)]
        linear.weight.copy_(2 * linear.weight)
        after = [linear(x) for _ in range(4)]
    assert all(torch.equal(out, plain[0]) for out in plain + kept)
    assert all(torch.equal(out, 2 * plain[0]) for out in after)
    assert replays() > 0


def test_under_autocast_and_in_inference_mode(device, replays):
    linear = nn.Linear(96, 80, device=device)
    quantize_(linear, CONFIGS["fp8"])
    x = values(device, 32, 96, dtype=torch.float32)
    wanted = linear(x).detach()
    for _ in range(3):
        with torch.autocast(device, torch.bfloat16):
            assert linear(x).dtype == torch.bfloat16
        with torch.inference_mode():
            assert torch.equal(linear(x), wanted) and linear(x).is_inference()
        assert torch.equal(linear(x), wanted) and not linear(x).is_inference()
    assert replays() > 0


def test_checkpointing_and_several_forward_passes(device, replays):
    linear = nn.Linear(96, 80, device=device)
    quantize_(linear, CONFIGS["fp8"])
    for _ in range(4):
        inputs = [values(device, 32, 96).requires_grad_() for _ in range(3)]
        outs = [torch.utils.checkpoint.checkpoint(linear, x, use_reentrant=False) for x in inputs]
        again = [linear(x) for x in inputs]
        for out, other in zip(outs, again, strict=True):
            assert torch.equal(out, other)
        grads = [torch.autograd.grad(out.sum(), x)[0] for x, out in zip(inputs, outs)]
        for x, other, grad in zip(inputs, again, grads):
            assert torch.equal(torch.autograd.grad(other.sum(), x)[0], grad)
    assert replays() > 0


# --- what is recorded, and what is not --------------------------------------------------------------------------------


def called(function, arguments: list, **options) -> list:
    known = replay.Replays(**options)
    return [known.call(function, args) for args in arguments]


def test_views_and_changes_in_place(replays):
    def function(x, y):
        left, right = x[:, :2], x[:, 2:].t()
        total = torch.empty_like(left)
        total.copy_(left).add_(right.t(), alpha=2)
        y.mul_(3)
        return total.view(-1), x, (right, None, "name")

    arguments = [(torch.randn(3, 4), torch.ones(2)) for _ in range(CALLS)]
    for (x, y), (total, same, (right, nothing, name)) in zip(arguments, called(function, arguments), strict=True):
        assert torch.equal(total, (x[:, :2] + 2 * x[:, 2:]).view(-1))
        assert same is x and torch.equal(right, x[:, 2:].t()) and right.data_ptr() == x[:, 2:].data_ptr()
        assert torch.equal(y, torch.full((2,), 3.0)) and nothing is None and name == "name"
    assert replays() == CALLS - 2


ELSEWHERE = torch.ones(3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * float(x.sum()),
        lambda x: x[x > 0],
        lambda x: x + ELSEWHERE,
        lambda x: torch.ops.torchao_blockwise_test_replay.unknown(x),
        lambda x: x.unbind()[0],
        lambda x: torch.tensor([1.0, 2.0, 3.0]) * x,
    ],
    ids=["reads a value", "a shape from values", "from elsewhere", "another library", "several results", "a constant"],
)
def test_what_cannot_be_replayed(function, replays):
    inputs = [torch.randn(3) for _ in range(CALLS)]
    for x, out in zip(inputs, called(function, [(x,) for x in inputs]), strict=True):
        assert torch.equal(out, function(x))
    assert replays() == 0


@torch.library.custom_op("torchao_blockwise_test_replay::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_each_shape_stride_dtype_address_and_option_is_its_own(replays):
    x = torch.randn(64, 64)
    kinds = [
        (x, 1), (x, 2), (x.t(), 1), (x[1:], 1), (x.double(), 1), (x.flatten()[1:65].view(8, 8), 1),
        (x.flatten()[:64].view(8, 8), 1), ((x,), 1), ([x, x], 1),
    ]  # fmt: skip
    keys = [replay.signature(args)[0] for args in kinds]
    assert len(set(keys)) == len(keys)
    assert replay.signature((nn.Parameter(x), 1))[0] == keys[0]
    assert replay.signature((BlockwiseFP8TrainingConfig, 1)) is None


def test_a_subclass_is_not_recorded(replays):
    linear = nn.Linear(64, 64)
    quantize_(linear, CONFIGS["fp8"])
    assert replay.signature((linear.weight,)) is None


def test_shapes_that_come_once_are_not_recorded(replays, monkeypatch):
    monkeypatch.setattr(replay, "record", lambda *args: pytest.fail("recorded"))
    for rows in range(1, 20):
        ops.quantize(torch.randn(rows, 64), FP8_1X128)
    assert replays() == 0


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(replay, "_MAX_SIGNATURES", 8)
    known = replay.Replays()
    for rows in range(1, 100):
        known.call(torch.neg, (torch.ones(rows),))
    assert len(known._known) <= 8


def test_tensors_go_when_they_were_used(replays):
    """What a list among the arguments held, and what is computed on the way: not until the call returns."""
    alive: list[weakref.ref] = []

    def work(x, held):
        (y,) = held
        held.clear()
        middle = y + 1
        alive[:] = [weakref.ref(y), weakref.ref(middle)]
        del y
        out = middle * 2
        del middle
        return out + x

    known = replay.Replays(empties_lists=True)
    x = torch.randn(4)
    for _ in range(2):
        known.call(work, (x, [torch.randn(4)]))
    recording = next(iter(known._known.values()))
    seen: list[int] = []
    y = torch.randn(4)
    ref, held = weakref.ref(y), [y]
    wanted = (y + 1) * 2 + x
    del y

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            gc.collect()
            seen.append(ref() is not None)
            return func(*args, **(kwargs or {}))

    with Watching():
        out = known.call(work, (x, held))
    assert torch.equal(out, wanted) and held == [] and replays() == 1
    # Alive at y + 1 alone.
    assert seen == [True, False, False] and type(recording) is replay.Recording


def test_what_is_recorded_is_not_held(replays):
    """Neither while it is recorded, nor afterwards in a cycle that waits for the collector."""
    alive: list[list[bool]] = []

    def work(x):
        first = x + 1
        ref = weakref.ref(first)
        second = first.view(-1) * 2
        del first
        third = second + 1
        refs.append(weakref.ref(third))
        alive.append([ref() is not None])
        return third.view(2, 2)

    refs: list[weakref.ref] = []
    gc.collect()
    gc.disable()
    try:
        outs = called(work, [(torch.ones(2, 2),) for _ in range(2)])
        assert alive == [[False], [False]] and all(torch.equal(out, torch.full((2, 2), 5.0)) for out in outs)
        del outs
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_results_are_the_callers(replays):
    """No call's results are overwritten by a later one."""
    x = torch.randn(64, 128)
    outs = [ops.quantize(x * i, FP8_1X128).rowwise.scale for i in range(1, 8)]
    assert len({out.data_ptr() for out in outs}) == 7 and replays() > 0
    for i, out in enumerate(outs, 1):
        assert torch.equal(out, outs[0] * i) or torch.allclose(out, outs[0] * i)


def test_wrong_input_is_refused_where_recordings_are_known(replays):
    linear = nn.Linear(96, 80)
    quantize_(linear, CONFIGS["fp8"])
    for _ in range(4):
        linear(torch.randn(8, 96))
    assert replays() > 0
    with pytest.raises(ValueError, match="must agree in K"):
        linear(torch.randn(8, 95))
    with pytest.raises(TypeError, match="bfloat16, float16 or float32"):
        linear(torch.zeros(8, 96, dtype=torch.int64))
    with pytest.raises(ValueError, match="weight"):
        F.linear(torch.randn(8, 96, device="meta"), linear.weight)
