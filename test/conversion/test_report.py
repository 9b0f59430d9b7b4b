"""The conversion report and the dry run that predicts it."""

from __future__ import annotations

import json

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import FP8, NVFP4, PER_EXPERT, Tied, every_recipe, mlp, replace
from torch import nn
from torchao.quantization import FqnToConfig, quantize_

from torchao_blockwise import (
    conversion_report,
    dry_run,
    experts,
    keep_last_blocks,
    min_features,
    recommended_layers,
    skip_lm_head,
)
from torchao_blockwise.conversion.report import human_bytes
from torchao_blockwise.nn import SwiGLUExperts

pytestmark = pytest.mark.usefixtures("no_interpreter")


def test_text():
    model = Tied(features=256)
    quantize_(model, FP8, skip_lm_head() & keep_last_blocks(model, 1))
    assert_expected_inline(
        str(conversion_report(model)),
        """\
layer     status     why / format                         shape    dtype       before      after  quantized
--------  ---------  -----------------------------------  -------  -------  ---------  ---------  ---------
blocks.0  converted  fp8_128x128                          256×256  float32  256.0 KiB  256.0 KiB          -
blocks.1  skipped    keep_last_blocks: in the last block  256×256  float32  256.0 KiB  256.0 KiB          -
lm_head   skipped    skip_lm_head: output projection      256×256  float32  256.0 KiB  256.0 KiB          -
--------  ---------  -----------------------------------  -------  -------  ---------  ---------  ---------
total     1 of 3     converted                                              768.0 KiB  768.0 KiB        0 B""",
    )


def test_text_of_a_dry_run_that_would_fail():
    model = nn.Sequential(nn.Linear(64, 64, dtype=torch.float64), nn.LazyLinear(8), nn.Linear(64, 2), nn.Linear(64, 96))
    assert_expected_inline(
        str(dry_run(model, NVFP4, min_features(0) & (lambda m, fqn: fqn != "2"))),
        """\
dry run: what quantize_ would do
layer  status          why / format                                                                                shape  dtype      before     after  quantized
-----  --------------  ------------------------------------------------------------------------------------------  -----  -------  --------  --------  ---------
0      cannot convert  its weight is torch.float64; cast it to bfloat16, float16 or float32, or exclude the layer  64×64  float64  32.0 KiB  32.0 KiB          -
1      cannot convert  its weight is not initialized yet; run one forward pass first                               8×0    float32       0 B       0 B          -
2      skipped         left out by a custom filter                                                                 2×64   float32     512 B     512 B          -
3      converted       nvfp4_16x16                                                                                 96×64  float32  24.0 KiB  24.0 KiB          -
-----  --------------  ------------------------------------------------------------------------------------------  -----  -------  --------  --------  ---------
total  1 of 4          converted                                                                                                   56.5 KiB  56.5 KiB        0 B""",  # noqa: E501
    )


def test_text_of_one_layer():
    layer = nn.Linear(256, 256, dtype=torch.bfloat16)
    quantize_(layer, replace(NVFP4, master_weights=False))
    assert_expected_inline(
        str(conversion_report(layer)),
        """\
layer               status     why / format            shape    dtype        before     after  quantized
------------------  ---------  ----------------------  -------  --------  ---------  --------  ---------
(the model itself)  converted  nvfp4_16x16, no master  256×256  bfloat16  128.0 KiB  32.3 KiB   32.3 KiB
------------------  ---------  ----------------------  -------  --------  ---------  --------  ---------
total               1 of 1     converted                                  128.0 KiB  32.3 KiB   32.3 KiB""",
    )


def test_to_dict_is_json():
    model = mlp(FP8)
    report = conversion_report(model).to_dict()
    assert json.loads(json.dumps(report)) == report
    nbytes = 4 * (160 * 64 + 32 * 160)
    assert report["totals"] == {"layers": 2, "converted": 2, "bytes_before": nbytes, "bytes_after": nbytes,
                                "quantized_bytes": 0}  # fmt: skip
    assert report["layers"][0] == {"fqn": "0", "status": "converted", "reason": "fp8_128x128", "shape": [160, 64],
                                   "dtype": "float32", "bytes_before": 40960, "bytes_after": 40960,
                                   "quantized_bytes": 0}  # fmt: skip


@every_recipe
def test_bytes_are_those_that_training_keeps(config):
    model = mlp(config)
    model(torch.randn(2, 64, requires_grad=True)).sum().backward()
    for layer, module in zip(conversion_report(model).layers, (model[0], model[2])):
        assert layer.quantized_bytes == module.weight.quantized_bytes == 0
        assert layer.bytes_after == layer.bytes_before == module.weight.hp.nbytes
    quantised = mlp(replace(config, master_weights=False))
    assert all(
        r.bytes_after == m.weight.nbytes
        for r, m in zip(conversion_report(quantised).layers, (quantised[0], quantised[2]))
    )


@pytest.mark.parametrize("config", (NVFP4, PER_EXPERT, FP8), ids=("one scale", "scale an expert", "fp8"))
def test_bytes_of_experts_are_those_that_training_keeps(config):
    """With a tensor scale of each of five experts, too, and as a dry run predicts them."""
    model, config = SwiGLUExperts(5, 48, 32), replace(config, master_weights=False)
    predicted = dry_run(model, config, experts())
    quantize_(model, config, filter_fn=experts())
    report = conversion_report(model)
    assert report.layers == predicted.layers
    for layer, weight in zip(report.layers, model.parameters(), strict=True):
        assert layer.bytes_after == layer.quantized_bytes == weight.nbytes


def test_a_weight_that_was_replaced_is_told():
    model = mlp(FP8)
    model[2].weight = nn.Parameter(model[2].weight.hp.clone())
    first, second = conversion_report(model).layers
    assert (first.status, second.status, second.reason) == ("converted", "replaced", "was converted, weight replaced")
    assert second.bytes_after == second.bytes_before == model[2].weight.nbytes
    assert "was converted, weight replaced" in str(conversion_report(model))
    assert conversion_report(model).totals["converted"] == 1


def test_tied_weights_count_once():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    model[1].weight = model[0].weight
    quantize_(model, FP8)
    report = conversion_report(model)
    assert len(report.layers) == 3 and report.totals["bytes_before"] == 2 * 64 * 64 * 4


def test_parametrised_weights_count_each():
    """They are computed anew on each access, so nothing may go by the id of a dead one."""
    model = nn.Sequential(*(torch.nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)) for _ in range(4)))
    assert conversion_report(model).totals["bytes_before"] == 4 * 64 * 64 * 4


MODELS = {
    "mlp": (mlp, None),
    "tied": (Tied, None),
    "tied_filtered": (Tied, lambda m: skip_lm_head() & keep_last_blocks(m, 1)),
    "function": (mlp, lambda m: lambda module, fqn: fqn == "0"),
    "transformer": (lambda: nn.TransformerEncoderLayer(64, 4, 128), None),
    "bare": (lambda: nn.Linear(64, 64), None),
    "converted": (lambda: mlp(FP8), None),
}


@pytest.mark.parametrize(
    ("given", "got"),
    (
        (type(FP8), r"the class BlockwiseFP8TrainingConfig; write BlockwiseFP8TrainingConfig\(\)"),
        ("fp8", r"str; take BlockwiseFP8TrainingConfig\(\) or NVFP4TrainingConfig\(\)"),
    ),
    ids=("class", "name"),
)
def test_a_dry_run_with_no_config(given, got):
    with pytest.raises(TypeError, match=f"dry_run: config must be a training config, got {got}"):
        dry_run(nn.Linear(64, 64), given)


@every_recipe
@pytest.mark.parametrize("master_weights", (True, False), ids=("master", "quantised"))
@pytest.mark.parametrize(("make", "filter_of"), MODELS.values(), ids=MODELS)
def test_a_dry_run_changes_nothing_and_predicts_the_report(config, master_weights, make, filter_of):
    model, config = make(), replace(config, master_weights=master_weights)
    filter_fn = {} if filter_of is None else {"filter_fn": filter_of(model)}

    def state():
        hooks = [(len(m._state_dict_hooks), len(m._load_state_dict_pre_hooks)) for m in model.modules()]
        return [(id(p), type(p), p._version, p.requires_grad) for p in model.parameters()], hooks, str(model)

    before = state()
    predicted = dry_run(model, config, **filter_fn)
    assert state() == before and predicted.dry_run
    if any(layer.status == "cannot convert" for layer in predicted.layers):
        with pytest.raises(ValueError, match="cannot be converted"):
            quantize_(model, config, **filter_fn)
        return
    quantize_(model, config, **filter_fn)
    real = conversion_report(model)
    assert real.layers == predicted.layers and real.totals == predicted.totals and not real.dry_run


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (5 * 2**30, "5.0 GiB"),
        (3 * 2**40, "3.0 TiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_human_bytes(count, expected):
    assert human_bytes(count) == expected


def test_a_model_without_linear_layers():
    report = conversion_report(nn.Sequential(nn.ReLU()))
    assert report.layers == () and report.totals["layers"] == 0 and "0 of 0" in str(report)


def test_matrices_that_no_linear_layer_has_are_shown_with_the_reason():
    class Conv1D(nn.Module):
        """As GPT-2's: y = x · w + b."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(64, 192))

    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            self.w_up, self.w_down = nn.Parameter(torch.zeros(96, 64)), nn.Parameter(torch.zeros(64, 96))
            self.gain, self.row = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(1, 64))
            self.table = nn.Parameter(torch.zeros(4, 4, dtype=torch.int32), requires_grad=False)

    model = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 4), "cross": nn.MultiheadAttention(64, 4, kdim=32)})
    model.update({"c_attn": Conv1D(), "raw": Raw(), "embed": nn.Embedding(8, 64), "norm": nn.LayerNorm((8, 64))})
    attention = "nn.MultiheadAttention multiplies by it itself, without an nn.Linear"
    by_name = "no nn.Linear's; if F.linear multiplies by it, FqnToConfig converts it by name"
    expected = {
        "attention.in_proj_weight": attention,
        "cross.q_proj_weight": attention,
        "cross.k_proj_weight": attention,
        "cross.v_proj_weight": attention,
        "c_attn.weight": "Conv1D holds its weight transposed; replace it by nn.Linear",
        "raw.w_up": by_name,
        "raw.w_down": by_name,
    }
    planned = [layer for layer in dry_run(model, FP8).layers if "out_proj" not in layer.fqn]
    quantize_(model, FP8)
    layers = [layer for layer in conversion_report(model).layers if "out_proj" not in layer.fqn]
    assert {layer.fqn: layer.reason for layer in layers} == expected and planned == layers
    assert {layer.status for layer in layers} == {"skipped"}
    quantize_(model, FqnToConfig({"raw.w_up": FP8}), filter_fn=None)
    raw = {layer.fqn: layer.status for layer in conversion_report(model).layers if "raw" in layer.fqn}
    assert raw == {"raw.w_up": "converted", "raw.w_down": "skipped"}
    assert dry_run(model, FP8).layers == conversion_report(model).layers


def test_a_report_of_nothing_names_the_filter():
    """`quantize_` itself cannot say so: where its default filter selects nothing, nothing of this package is called."""
    model = nn.ModuleDict({"experts": SwiGLUExperts(2, 16, 16)})
    quantize_(model, FP8)
    hint = "\nnothing is converted; filter_fn=recommended_layers(model) takes experts too"
    assert str(conversion_report(model)).endswith(hint)
    quantize_(model, FP8, filter_fn=recommended_layers(model))
    assert "nothing is converted" not in str(conversion_report(model))
