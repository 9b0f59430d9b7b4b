"""What lives beside the model while it is written or read: a layer's tensors, however many layers there are."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import FP8, NVFP4, replace
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint

pytest.importorskip("safetensors.torch")

from live_memory import peak_of

pytestmark = pytest.mark.usefixtures("no_interpreter")

WIDTH = 512
LAYER = WIDTH * WIDTH
FORMATS = {"fp8_block": FP8, "nvfp4_compressed_tensors": NVFP4}
every_format = pytest.mark.parametrize("format", FORMATS)
both = pytest.mark.parametrize("masters", (True, False), ids=("masters", "quantized"))


def layers(config, count: int) -> nn.Module:
    """All alike: what reading takes depends on values, a little."""
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(count)))
    quantize_(model, config)
    return model


@every_format
@both
def test_an_export_holds_a_layer(format, masters, tmp_path):
    """Its payload and what it takes to quantize it, and the file that fills."""
    config = replace(FORMATS[format], master_weights=masters)
    few, many = (
        peak_of(checkpoint.export, layers(config, count), tmp_path / str(count), format, shard_bytes=LAYER)
        for count in (3, 24)
    )
    assert 0 < many <= few + LAYER // 10, (few, many)


@every_format
@both
def test_a_load_holds_a_layer(format, masters, tmp_path):
    config, peaks = replace(FORMATS[format], master_weights=masters), []
    for count in (3, 24):
        checkpoint.export(layers(config, count), tmp_path / str(count), format, shard_bytes=LAYER)
        peaks.append(peak_of(checkpoint.load, layers(config, count), tmp_path / str(count)))
    few, many = peaks
    assert 0 < many <= few + LAYER // 10, (few, many)


def test_what_is_kept_is_seen(tmp_path):
    """All weights at once, as a file of more than all would hold them."""
    few, many = (
        peak_of(checkpoint.export, layers(FP8, count), tmp_path / str(count), shard_bytes=2**30) for count in (3, 24)
    )
    assert many > few + 20 * LAYER, (few, many)
