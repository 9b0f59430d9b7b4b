"""Memory held next to the model while it is written or read: a layer's tensors, however many layers there are."""

from __future__ import annotations

import copy

import pytest
import torch
from exported_models import FORMATS, masters_or_not
from helpers import replace
from live_memory import peak_of
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint

pytestmark = pytest.mark.usefixtures("no_interpreter")
WIDTH = 512
LAYER = WIDTH * WIDTH


def layers(config, count: int) -> nn.Module:
    """All alike: what reading takes depends on values, a little."""
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(count)))
    quantize_(model, config)
    return model


@masters_or_not
@pytest.mark.parametrize("format", ("fp8_block", "nvfp4_compressed_tensors"))
def test_export_and_load_hold_a_layer(format, masters, tmp_path):
    """Its payload and what it takes to quantize it, and the file that fills."""
    config, written, read = replace(FORMATS[format], master_weights=masters), [], []
    for count in (3, 24):
        folder = tmp_path / str(count)
        written.append(peak_of(checkpoint.export, layers(config, count), folder, format, shard_bytes=LAYER))
        read.append(peak_of(checkpoint.load, layers(config, count), folder))
    for few, many in (written, read):
        assert 0 < many <= few + LAYER // 10, (few, many)
