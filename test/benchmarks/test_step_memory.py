"""step_memory.py with an allocator that counts on the CPU: which bytes are a step's, and of which part."""

from __future__ import annotations

import argparse
import dataclasses

import bench_linear
import bench_memory
import bench_moe
import pytest
import step_memory
import torch
from experts import Experts
from live_memory import LiveMemory
from shapes import Shape

from torchao_blockwise.formats import FP8_1X128, FP8_128X128

pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread", "without_gpu")
CPU = torch.device("cpu")
# Weights that are most of it, in whole blocks.
SHAPE = Shape(32, 512, 256)
N, K = SHAPE.out_features, SHAPE.in_features


@dataclasses.dataclass
class Counting:
    """An allocator: of what is made on the CPU, at the ends of operations."""

    memory: LiveMemory
    first: int = 0

    def allocated(self) -> int:
        self.memory.note("now")
        return self.memory.steps[-1].nbytes

    def peak(self) -> int:
        return max(step.nbytes for step in self.memory.steps[self.first :])

    def reset(self) -> None:
        self.first = len(self.memory.steps)


@pytest.fixture
def counting(monkeypatch):
    with LiveMemory() as memory:
        monkeypatch.setattr(step_memory, "allocator_of", lambda device: Counting(memory))
        yield memory


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def linear_memory(recipe: str) -> step_memory.StepMemory:
    weight, x, dy = tokens(N, K), tokens(SHAPE.tokens, K).requires_grad_(), tokens(SHAPE.tokens, N)
    another = bench_linear.make_layer(SHAPE, "fp8", weight, CPU)
    found = step_memory.step_memory(lambda: bench_linear.make_layer(SHAPE, recipe, weight, CPU), x, dy)
    another.step(x, dy)
    return found


HIGH, LOW = 2 * N * K, FP8_128X128.nbytes(N, K)
WEIGHTS = {"bf16": HIGH, "fp8": HIGH, "fp8_primary": LOW}


@pytest.mark.parametrize("recipe", WEIGHTS)
def test_a_step_of_a_linear_layer_by_parts(recipe, counting):
    got, weights = linear_memory(recipe), WEIGHTS[recipe]
    x, y = 2 * SHAPE.tokens * K, 2 * SHAPE.tokens * N
    saved_x = FP8_1X128.nbytes(K, SHAPE.tokens)
    assert (got.weights, got.gradients) == (weights, HIGH + x)
    if recipe == "bf16":
        # dw and dx with y; x counts where the step owns it.
        assert (got.held, got.step, got.step_owning_x) == (y, 2 * HIGH + x + y, 2 * HIGH + 2 * x + y)
    else:
        # The last product: dy's copy and the saved one of x, dx, dw and y.
        copies = FP8_1X128.nbytes(N, SHAPE.tokens) + saved_x
        assert (got.held, got.step) == (y + saved_x, weights + HIGH + x + y + copies)
        assert got.step_owning_x == got.step


def test_an_expert_mlps_peak_is_least_with_weights_in_fp8(counting):
    shape, peaks = Experts(64, 2, 128, 256), {}
    ends = torch.tensor([30, 64], dtype=torch.int32)
    x, dy = tokens(shape.tokens, shape.dim).requires_grad_(), tokens(shape.tokens, shape.dim)
    for recipe in ("fp8", "fp8_primary", "bf16"):
        found = step_memory.step_memory(lambda: bench_moe.make_layer(shape, recipe, ends), x, dy)  # noqa: B023
        peaks[recipe] = found.step
    weight = sum(FP8_128X128.nbytes(*s) for s in shape.weights.values())
    high = 2 * 3 * shape.experts * shape.hidden * shape.dim
    assert peaks["fp8"] - peaks["fp8_primary"] == high - weight
    assert peaks["fp8_primary"] < peaks["bf16"]


def test_policies_of_a_stack_have_the_same_gradients(counting):
    args, found, peaks = argparse.Namespace(dim=128, hidden=256, layers=2, tokens=40), [], {}
    for name in bench_memory.SAME_BITS:
        torch.manual_seed(1)
        memory, gradients = bench_memory.measure(args, bench_memory.VARIANTS[name], CPU)
        peaks[name] = bench_memory.row_of(memory)["peak of a step MiB"]
        found.append(gradients)
    assert all(torch.equal(a, b) for gradients in found[1:] for a, b in zip(gradients, found[0], strict=True))
    assert len(found[0]) == 4
    assert peaks["fp8, no master weights"] < peaks["fp8"]


def test_what_others_free_meanwhile_is_not_of_the_step(counting):
    """A tensor that a late thread frees, say: once, so that the second attempt counts."""
    others = [torch.empty(1 << 20)]

    def make():
        others.clear()
        return bench_linear.make_layer(SHAPE, "bf16", weight, CPU)

    weight, x, dy = tokens(N, K), tokens(SHAPE.tokens, K).requires_grad_(), tokens(SHAPE.tokens, N)
    assert step_memory.step_memory(make, x, dy).weights == HIGH


def test_without_an_allocator_there_are_no_figures():
    x = torch.zeros(1, requires_grad=True)
    assert step_memory.step_memory(lambda: None, x, x) is None
