"""Which inputs Gluon kernels of FP8 tiles take, and where. Their bits: test_compiled_kernels.py."""

from __future__ import annotations

import pytest
import torch

from torchao_blockwise import _compat

pytest.importorskip("triton")
if not _compat.has_gluon():
    pytest.skip("needs Gluon of Triton 3.6 or newer", allow_module_level=True)

from torchao_blockwise.ops.device import gluon_tiles

TAKEN = {
    "one run": torch.zeros(16, 16, dtype=torch.bfloat16),
    "f16": torch.zeros(48, 272, dtype=torch.float16),
    "any number of tokens": torch.zeros(17, 32, dtype=torch.bfloat16),
    "rows apart": torch.zeros(32, 64, dtype=torch.bfloat16)[:, 16:48],
    "no rows": torch.zeros(0, 64, dtype=torch.bfloat16),
}
REFUSED = {
    "f32": (torch.zeros(16, 16), "the kernel takes elements of 16 bits, got torch.float32"),
    "a batch": (torch.zeros(2, 16, 16).bfloat16(), "the kernel takes one matrix, got shape [2, 16, 16]"),
    "ragged K": (torch.zeros(16, 24).bfloat16(), "got shape [16, 24]"),
    "ragged rows apart": (torch.zeros(16, 40).bfloat16()[:, :32], "strides [40, 1]"),
    "transposed": (torch.zeros(16, 32).bfloat16().mT, "strides [1, 32]"),
    "off 16 bytes": (torch.zeros(16, 64).bfloat16()[:, 4:36], "address 0x"),
}


@pytest.fixture
def on_hopper(machine):
    """Every machine is one whose GPU has sm_90, and compiles kernels."""
    machine.runs_gluon((9, 0))


@pytest.mark.parametrize("x", TAKEN.values(), ids=TAKEN)
def test_takes(x, on_hopper):
    assert gluon_tiles.why_not_this(x) is None
    assert gluon_tiles.why_not(x, x) is None


@pytest.mark.parametrize(("x", "reason"), REFUSED.values(), ids=REFUSED)
def test_refuses(x, reason, on_hopper):
    assert reason in gluon_tiles.why_not_this(x)
    # Whichever of several inputs it is.
    good = TAKEN["one run"]
    for inputs in ((x,), (x, good), (good, x)):
        assert reason in gluon_tiles.why_not(*inputs)


def test_inputs_have_one_dtype(on_hopper):
    reason = "the kernel takes inputs of one dtype, got torch.bfloat16 and torch.float16"
    assert gluon_tiles.why_not(TAKEN["one run"], TAKEN["f16"]) == reason


def test_needs_a_gpu_with_its_instructions(machine):
    x = TAKEN["one run"]
    for capability, reason in (
        ((8, 9), "the kernel needs sm_90 or newer, got sm_89"),
        ((9, 0), None),
        ((10, 0), None),
    ):
        machine.runs_gluon(capability)
        assert gluon_tiles.why_not(x) == reason
    machine.runs_gluon((9, 0), interprets=True)
    assert gluon_tiles.why_not(x) == "Triton's interpreter does not know Gluon"
