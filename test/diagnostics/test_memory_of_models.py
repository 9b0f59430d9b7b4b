"""`memory_report` of fused Hugging Face models, made from configurations: what is predicted is what a step takes."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8, both_formats
from torchao.quantization import quantize_

from torchao_blockwise import fuse, linears_and_experts, skip_lm_head
from torchao_blockwise.diagnostics import memory_report

transformers = pytest.importorskip("transformers", "5.0")
pytestmark = pytest.mark.usefixtures("no_interpreter")
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
}


def model_of(kind, config, device, fused=True):
    torch.manual_seed(0)
    options = {"experts_implementation": "grouped_mm"} if kind == "mixtral" else {}
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.bfloat16, **options)
    quantize_(model, config, filter_fn=linears_and_experts() & skip_lm_head())
    if fused:
        fuse(model)
    return model


@both_formats
@pytest.mark.parametrize("kind", CONFIGS)
def test_predicted_is_measured(kind, config):
    """Without values, too: on the meta device the prediction is the same."""
    ids = torch.arange(32)[None] % 128
    report = memory_report(model_of(kind, config, "cpu"), {"input_ids": ids, "labels": ids})
    assert report.notes == () and report.measured is not None
    for name in ("weights", "gradients", "saved", "copies", "peak"):
        assert getattr(report.predicted, name) == getattr(report.measured, name), name
    meta = ids.to("meta")
    unreal = memory_report(model_of(kind, config, "meta"), {"input_ids": meta, "labels": meta})
    assert unreal.predicted == report.predicted and unreal.bf16 == report.bf16


def test_fusion_saves_memory():
    ids = torch.zeros(1, 32, dtype=torch.long, device="meta")
    fused, apart = (
        memory_report(model_of("llama", FP8, "meta", fused=fused), {"input_ids": ids, "labels": ids}).predicted
        for fused in (True, False)
    )
    assert fused.saved < apart.saved and fused.weights == apart.weights
