"""Layers that engines run as one: which they are, and what of them engines refuse."""

from __future__ import annotations

import textwrap
import warnings

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import FP8, NVFP4
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint, linears_and_experts, skip_fqns, skip_lm_head
from torchao_blockwise.checkpoint.fused_layers import fused_layers, shared_amaxes
from torchao_blockwise.checkpoint.model_tensors import Written
from torchao_blockwise.checkpoint.plain_layers import warn_of_fused
from torchao_blockwise.cli import main

pytest.importorskip("safetensors.torch")

from exported_models import language_model

pytestmark = pytest.mark.usefixtures("no_interpreter")

# Of vLLM 0.33.0, read on 2026-11-26: members in files, by the last parts of names, from packed_modules_mapping and
# stacked weights of all models. Not here: convolutions, and layers without quantization.
VLLM = """
    q_proj k_proj v_proj | query key value | query_net key_net value_net | q k v | wq wk wv | k_proj v_proj
    key_net value_net | key_proj value_proj | q_proj k_proj | gate_proj up_proj | w1 w3 | c_fc_0 c_fc_1 | fc1 fc3
    gate_proj dense_h_to_4h | in_proj_qkv in_proj_z | in_proj_b in_proj_a | q_a_proj kv_a_proj_with_mqa
    q_a_proj kv_a_proj_with_mqa g_proj | wq_a wkv | wq_du wk_dv wv_dv wr_du | q_proj k_proj v_proj g_proj
    q_proj k_proj v_proj b_proj | q_proj k_proj v_proj b_proj f_a_proj | q_proj k_proj v_proj b_proj f_a_proj g_a_proj
    q_proj k_proj v_proj gate_proj | q_proj k_proj v_proj o_gate_proj | q_proj k_proj v_proj output_gate_proj
    q_proj k_proj v_proj index_q_proj index_k_proj | q_proj k_proj v_proj index_qk_proj
    q_proj k_proj v_proj sparse_indexer_q sparse_indexer_k sparse_indexer_z g_proj
"""
ROWS = [tuple(row.split()) for row in VLLM.strip().replace("\n", "|").split("|")]


def test_what_vllm_runs_as_one_is_known():
    """And layers without their neighbors are not, which in another module they are no longer."""
    for row in ROWS:
        names = {f"model.layers.{i}.mixer.{member}.weight": i for i in range(2) for member in row}
        fused = fused_layers([*names, "model.layers.0.mixer.o_proj.weight"])
        for name, i in names.items():
            assert fused[name] == f"model.layers.{i}.mixer.{'+'.join(row)}"
        assert fused["model.layers.0.mixer.o_proj.weight"] == "model.layers.0.mixer.o_proj.weight"
        for member in row:
            others = [f"other.{x}.weight" for x in row if x != member]
            assert fused_layers([f"a.{member}.weight", *others])[f"a.{member}.weight"] == f"a.{member}.weight"


def test_experts_of_a_list_are_one():
    experts = [f"mlp.experts.{i}.{name}.weight" for i in range(3) for name in ("gate_proj", "up_proj", "down_proj")]
    fused = fused_layers(experts)
    assert set(fused.values()) == {"mlp.experts.*.gate_proj+up_proj", "mlp.experts.*.down_proj.weight"}


def test_all_of_them_get_one_tensor_scale():
    """Of a model that has each row in a module; the last layer of each has the largest value."""
    model = nn.ModuleList(nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in row}) for row in ROWS)
    for module in model:
        [*module.values()][-1].weight.data *= 8
    quantize_(model, NVFP4)
    amaxes = shared_amaxes(model)
    for i, row in enumerate(ROWS):
        largest = model[i][row[-1]].weight.hp.detach().abs().amax()
        assert all(torch.equal(amaxes[f"{i}.{name}.weight"], largest) for name in row[:-1]), row


@pytest.mark.parametrize("row", ROWS[::5], ids="+".join)
@pytest.mark.parametrize("kind", ("quantized in part", "ragged"))
def test_engines_refuse_what_is_warned_of(kind, row):
    """Rows of the last may be ragged, and layers that are not quantized."""

    def tensors(ragged: int | None, plain: int | None) -> list[Written]:
        shapes = [(160 if i == ragged else 256, 128) for i in range(len(row))]
        names = [f"a.{name}.weight" for name in row]
        return [Written(n, (n,), s, i != plain) for i, (n, s) in enumerate(zip(names, shapes, strict=True))]

    for i in range(len(row)):
        asked = tensors(i, None) if kind == "ragged" else tensors(None, i)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            warn_of_fused(asked, 128)
        assert len(found) == (kind != "ragged" or i + 1 < len(row))
        assert all(f"a.{'+'.join(row)}" in str(warning.message) for warning in found)
    # NVFP4 has scales for each row.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_fused(tensors(0, None), None)
        warn_of_fused([x._replace(is_quantized=False) for x in tensors(0, None)], 128)


def ragged_warnings(run) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [warning for warning in found if "vLLM fuses" in str(warning.message)]


def test_ragged_rows_are_warned_of_once(tmp_path):
    """q_a_proj has 96 rows, the first block's MLP 320; kv_a_proj_with_mqa, the last, may have 192."""
    model = language_model("DeepseekV3")
    (found,) = ragged_warnings(lambda: checkpoint.export(model, tmp_path / "out"))
    assert found.filename == __file__
    assert_expected_inline(
        textwrap.fill(str(found.message), 100),
        """\
export: vLLM fuses model.layers.0.mlp.gate_proj+up_proj (320 rows),
model.layers.0.self_attn.q_a_proj+kv_a_proj_with_mqa (96 rows),
model.layers.1.self_attn.q_a_proj+kv_a_proj_with_mqa (96 rows) and refuses files if the rows of any
but the last are not a multiple of 128; leave these layers unconverted
(skip_fqns("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj",
"model.layers.*.self_attn.kv_a_proj_with_mqa", "model.layers.*.self_attn.q_a_proj"); convert:
--skip)""",
    )
    language_model("DeepseekV3", None).save_pretrained(tmp_path / "plain")
    convert = ["convert", str(tmp_path / "plain"), str(tmp_path / "converted")]
    (again,) = ragged_warnings(lambda: main(convert))
    assert str(again.message) == str(found.message)


def test_nothing_is_said_where_vllm_reads_the_files(tmp_path):
    """NVFP4 has scales for each row; and the remedy is one."""
    model = language_model("DeepseekV3", NVFP4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*quantized again")
        checkpoint.export(model, tmp_path / "nvfp4", "nvfp4_modelopt")
    model = language_model("DeepseekV3", None)
    named = skip_fqns(
        "model.layers.*.self_attn.q_a_proj",
        "model.layers.*.self_attn.kv_a_proj_with_mqa",
        "model.layers.*.mlp.gate_proj",
        "model.layers.*.mlp.up_proj",
    )
    quantize_(model, FP8, filter_fn=linears_and_experts() & skip_lm_head() & named)
    assert ragged_warnings(lambda: checkpoint.export(model, tmp_path / "out")) == []
