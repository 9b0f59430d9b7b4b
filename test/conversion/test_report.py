"""The conversion report and the dry run that predicts it."""

import dataclasses
import json

import pytest
import torch
from expecttest import assert_expected_inline
from expert_modules import Model as ExpertModel
from helpers import FP8, NVFP4, PER_EXPERT, RECIPES, Tied, both_masters, converted, mlp, replace
from torch import nn
from torchao.quantization import FqnToConfig, quantize_

from torchao_blockwise import (
    BlockwiseFP8Tensor,
    conversion_report,
    dry_run,
    experts,
    is_linear,
    keep_last_blocks,
    linears_and_experts,
    min_features,
    recommended_layers,
    skip_lm_head,
)
from torchao_blockwise.conversion.report import human_bytes
from torchao_blockwise.nn import SwiGLUExperts


def test_text():
    model = ExpertModel()
    quantize_(model, NVFP4, linears_and_experts() & skip_lm_head() & keep_last_blocks(model, 1))
    assert_expected_inline(
        str(conversion_report(model)),
        """\
layer                  status     why / format                         shape    dtype       before      after  quantized
---------------------  ---------  -----------------------------------  -------  -------  ---------  ---------  ---------
layers.0.attention     converted  nvfp4_16x16                          64×64    float32   16.0 KiB   16.0 KiB          -
layers.0.router        skipped    skip_routers: chooses experts        4×64     float32    1.0 KiB    1.0 KiB          -
layers.0.experts.up    converted  nvfp4_16x16                          4×96×64  float32   96.0 KiB   96.0 KiB          -
layers.0.experts.down  converted  nvfp4_16x16                          4×64×96  float32   96.0 KiB   96.0 KiB          -
layers.1.attention     skipped    keep_last_blocks: in the last block  64×64    float32   16.0 KiB   16.0 KiB          -
layers.1.router        skipped    skip_routers: chooses experts        4×64     float32    1.0 KiB    1.0 KiB          -
layers.1.experts.up    skipped    keep_last_blocks: in the last block  4×96×64  float32   96.0 KiB   96.0 KiB          -
layers.1.experts.down  skipped    keep_last_blocks: in the last block  4×64×96  float32   96.0 KiB   96.0 KiB          -
lm_head                skipped    skip_lm_head: output projection      16×64    float32    4.0 KiB    4.0 KiB          -
---------------------  ---------  -----------------------------------  -------  -------  ---------  ---------  ---------
total                  3 of 9     converted                                              422.0 KiB  422.0 KiB        0 B""",  # noqa: E501
    )


def test_text_of_a_dry_run_that_would_fail():
    model = nn.Sequential(nn.Linear(64, 64, dtype=torch.float64), nn.LazyLinear(8), nn.Linear(64, 2), nn.Linear(64, 96))
    assert_expected_inline(
        str(dry_run(model, NVFP4, min_features(0) & (lambda m, fqn: fqn != "2"))),
        """\
dry run: the result of quantize_, without converting
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
    layer = converted(nn.Linear(256, 256, dtype=torch.bfloat16), replace(NVFP4, master_weights=False))
    row = "(the model itself) converted nvfp4_16x16, no master 256×256 bfloat16 128.0 KiB 32.3 KiB 32.3 KiB"
    assert str(conversion_report(layer)).splitlines()[2].split() == row.split()
    module = converted(SwiGLUExperts(2, 16, 16), FP8, experts())
    assert [row.fqn for row in conversion_report(module).layers] == ["gate_up", "down"]


def test_blocks_of_grad_weight_are_named_unless_they_are_the_default():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Named(type(FP8)):
        team: str

    model = converted(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), RECIPES["fp8_1x128"])
    model[1].weight.config = Named(team="a")
    reasons = [layer.reason for layer in conversion_report(model).layers]
    assert reasons == ["fp8_128x128, grad_weight 1x128", "fp8_128x128"]


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


MODELS = {
    "mlp": (mlp, None),
    "tied": (Tied, None),
    "tied, filtered": (Tied, lambda m: skip_lm_head() & keep_last_blocks(m, 1)),
    "function": (mlp, lambda m: lambda module, fqn: fqn == "0"),
    "transformer": (lambda: nn.TransformerEncoderLayer(64, 4, 128), None),
    "root": (lambda: nn.Linear(64, 64), None),
    "converted": (lambda: mlp(FP8), None),
    "converted, filtered": (lambda: mlp(FP8), lambda m: lambda module, fqn: fqn == "0"),
    "experts": (ExpertModel, lambda m: experts()),
    "both": (ExpertModel, lambda m: linears_and_experts()),
    "linears": (ExpertModel, lambda m: is_linear()),
    # The linear layer lies in a module that is converted too.
    "nested": (lambda: holds_a_layer(SwiGLUExperts(2, 32, 32)), lambda m: experts() | is_linear()),
}


def holds_a_layer(module):
    module.inner = nn.Linear(32, 32)
    return module


@pytest.mark.parametrize("config", (*RECIPES.values(), PER_EXPERT), ids=(*RECIPES, "scale_per_expert"))
@both_masters
@pytest.mark.parametrize(("make", "filter_of"), MODELS.values(), ids=MODELS)
def test_a_dry_run_changes_nothing_and_predicts_the_report(config, masters, make, filter_of):
    """And the bytes are those that training keeps."""
    model, config = make(), replace(config, master_weights=masters)
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
    weights = dict(model.named_parameters())
    for row in real.layers:
        weight = weights.get(row.fqn, weights.get(f"{row.fqn}.weight".lstrip(".")))
        if row.status == "converted" and weight is not None:
            kept = weight.nbytes if config.weight_format.name in row.reason and "no master" in row.reason else 0
            assert row.quantized_bytes == kept and row.bytes_after == (kept or row.bytes_before)
            assert row.shape == tuple(weight.shape)


def test_weights_that_fsdp2_has_gathered_keep_their_masters(one_rank):
    """FSDP2 leaves those of the root module gathered after a forward pass; its shards hold the masters."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(mlp(FP8), mesh=one_rank)
    model(torch.randn(2, 64))
    assert isinstance(model[0].weight, BlockwiseFP8Tensor)
    gathered, planned = conversion_report(model), dry_run(model, FP8)
    model.reshard()
    assert gathered.layers == planned.layers == conversion_report(model).layers
    assert [layer.reason for layer in gathered.layers] == ["fp8_128x128"] * 2
    assert all(layer.bytes_after == layer.bytes_before + layer.quantized_bytes for layer in gathered.layers)
    assert all(layer.quantized_bytes for layer in gathered.layers)


def test_a_weight_that_was_replaced_is_told():
    model = mlp(FP8)
    model[2].weight = nn.Parameter(model[2].weight.hp.clone())
    report = conversion_report(model)
    first, second = report.layers
    assert (first.status, second.status) == ("converted", "replaced")
    assert second.reason == "its weight was replaced after the conversion"
    assert second.bytes_after == second.bytes_before == model[2].weight.nbytes and report.totals["converted"] == 1


def test_shared_weights_count_once_and_parametrized_ones_each():
    """These are computed again on each access, so nothing may go by the id of a dead one."""
    model = ExpertModel()
    model.layers[1].experts.up, model.layers[1].attention = model.layers[0].experts.up, model.layers[0].attention
    model.layers[1].router.weight = model.layers[0].router.weight
    quantize_(model, FP8, linears_and_experts())
    once = 4 * (64 * 64 + 4 * 64 + 16 * 64 + 3 * 4 * 96 * 64)
    assert conversion_report(model).totals["bytes_before"] == once
    model = nn.Sequential(*(torch.nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)) for _ in range(4)))
    assert conversion_report(model).totals["bytes_before"] == 4 * 64 * 64 * 4


def test_human_bytes():
    counts = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 2**20: "1.0 MiB", 5 * 2**30: "5.0 GiB", 2**52: "4096.0 TiB"}
    assert {count: human_bytes(count) for count in counts} == counts


def test_a_report_of_nothing_names_the_filter():
    """`quantize_` itself cannot say so: where its default filter selects nothing, nothing of this package is called."""
    report = conversion_report(nn.Sequential(nn.ReLU()))
    assert report.layers == () and report.totals["layers"] == 0 and "0 of 0" in str(report)
    model = converted(nn.ModuleDict({"experts": SwiGLUExperts(2, 16, 16)}), FP8)
    hint = "\nno layer is converted; filter_fn=recommended_layers(model) includes experts"
    assert str(conversion_report(model)).endswith(hint)
    quantize_(model, FP8, filter_fn=recommended_layers(model))
    assert "no layer is converted" not in str(conversion_report(model))


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


def test_matrices_that_no_linear_layer_has_are_shown_with_the_reason():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 4), "cross": nn.MultiheadAttention(64, 4, kdim=32)})
    model.update({"c_attn": Conv1D(), "raw": Raw(), "embed": nn.Embedding(8, 64), "norm": nn.LayerNorm((8, 64))})
    attention = "nn.MultiheadAttention uses it directly, without an nn.Linear"
    by_name = "not in an nn.Linear; if the model passes it to F.linear, FqnToConfig converts it by name"
    names = ("attention.in_proj_weight", *(f"cross.{x}_proj_weight" for x in "qkv"))
    expected = dict.fromkeys(names, attention) | {
        "c_attn.weight": "Conv1D stores its weight transposed; replace it with nn.Linear",
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


def test_a_quantized_parameter_without_a_config():
    model = nn.Sequential(nn.Linear(32, 48))
    model[0].weight = nn.Parameter(BlockwiseFP8Tensor.from_hp(model[0].weight.detach()), requires_grad=False)
    [row] = conversion_report(model).layers
    assert row.reason == "fp8_128x128, no master" and row.bytes_before == 4 * 48 * 32
    assert row.bytes_after == row.quantized_bytes == model[0].weight.nbytes
