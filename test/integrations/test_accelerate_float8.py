"""accelerate's own float8 recipe over a converted model is refused, where its first product would be."""

from __future__ import annotations

import pytest
import torch
from helpers import both_formats, replace
from torch import nn
from torchao.quantization import quantize_

accelerate = pytest.importorskip("accelerate", "1.6")

from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import AORecipeKwargs  # noqa: E402

REASONS = {
    ("BlockwiseFP8TrainingConfig", True): "1.weight can be .*, got torch.float8_e4m3fn; use only one",
    ("NVFP4TrainingConfig", True): "1.weight can be .*, got torch.float8_e4m3fn; use only one",
    ("BlockwiseFP8TrainingConfig", False): r"not exact on quantized data \(1.weight\)",
    ("NVFP4TrainingConfig", False): "NVFP4Tensor packs two elements in a byte, so its transpose",
}
pytestmark = pytest.mark.usefixtures("no_interpreter")


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    AcceleratorState._reset_state(reset_partial_state=True)


@both_formats
@pytest.mark.parametrize("masters", (True, False), ids=("masters", "quantized"))
def test_it_is_refused(config, masters, accelerator):
    """prepare() takes the converted weight along in a layer of another class, and nothing of ours runs there."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    quantize_(model, replace(config, master_weights=masters))
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(NotImplementedError, match=REASONS[type(config).__name__, masters]):
        model(torch.randn(16, 64))


def test_it_trains_what_is_not_converted(accelerator):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    quantized, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert type(quantized[1]).__name__ == "Float8Linear"
