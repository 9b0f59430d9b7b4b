"""Recordings: what they repeat, what is not recorded, and when tensors go."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from replayed import CALLS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig
from torchao_blockwise.ops import replay

pytestmark = pytest.mark.usefixtures("replays")


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


def test_operations_with_several_results(replays):
    def function(x):
        left, right = x.chunk(2, 1)
        (whole,) = x.chunk(1, 1)
        values, indices = whole.max(0)
        # Of three gradients the second is not asked for.
        grads = torch.ops.aten.native_layer_norm_backward(
            left.contiguous(), right.contiguous(), [2], values[:1].expand(3, 1), values[1:2].expand(3, 1), None, None,
            [True, False, False],
        )  # fmt: skip
        return left * right, indices, grads[0]

    inputs = [(torch.randn(3, 4),) for _ in range(CALLS)]
    for args, outs in zip(inputs, called(function, inputs), strict=True):
        for out, wanted in zip(outs, function(*args), strict=True):
            assert torch.equal(out, wanted)
    assert replays() == CALLS - 2


class Watch(TorchDispatchMode):
    """Whether a tensor is alive at each operation."""

    def __init__(self, x: torch.Tensor):
        super().__init__()
        self.ref, self.seen = weakref.ref(x), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(self.ref() is not None)
        return func(*args, **(kwargs or {}))


def test_what_no_step_reads_goes_before_all_steps(replays):
    """A second view of a storage is such an argument: launches name the first alone."""

    def function(given):
        x, _ = given
        given.clear()
        return x.mul(2).add(1)

    known = replay.Replays(empties_lists=True)
    for i in range(CALLS):
        given = [torch.ones(3), torch.ones(4)]
        with Watch(given[1]) as watch:
            out = known.call(function, (given,))
        assert torch.equal(out, torch.full((3,), 3.0))
        assert given == [] and (i < 2 or watch.seen == [False, False])
    assert replays() == CALLS - 2


ELSEWHERE = torch.ones(3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * float(x.sum()),
        lambda x: x[x > 0],
        lambda x: x + ELSEWHERE,
        lambda x: torch.ops.torchao_blockwise_test_replay.unknown(x),
        lambda x: torch.tensor([1.0, 2.0, 3.0]) * x,
    ],
    ids=["reads a value", "a shape from values", "from elsewhere", "another library", "a constant"],
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
    quantize_(linear, BlockwiseFP8TrainingConfig())
    assert replay.signature((linear.weight,)) is None


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(replay, "_MAX_SIGNATURES", 8)
    known = replay.Replays()
    for rows in range(1, 100):
        known.call(torch.neg, (torch.ones(rows),))
    assert len(known._known) <= 8


def test_a_recording_is_a_program(replays):
    """What is in the docs: each tensor by its place, deleted after what reads it last, views only where needed."""

    def work(x, bias):
        rows = x.view(2, -1)
        out = torch.empty((3, 2, 4))
        return [torch.add(rows + 1, bias, alpha=2, out=out[0]), None]

    known = replay.Replays()
    args = torch.randn(8), torch.randn(4)
    for _ in range(2):
        known.call(work, args)
    (recording,) = known._known.values()
    assert (
        recording.source
        == """\
def program(tensors):
    (t0, t1, ) = tensors
    tensors.clear()
    t2 = view_0(t0, [2, -1, ])
    del t0
    t3 = empty_strided_2((3, 2, 4), (8, 4, 1), dtype_1)
    t4 = add_3(t2, 1)
    del t2
    t5 = select_4(t3, 0, 0)
    del t3
    t5 = add_5(t4, t1, alpha=2, out=t5)
    del t1, t4
    return [t5, None, ]"""
    )


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
