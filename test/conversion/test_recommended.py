"""`recommended_layers`: what it leaves out of language models, mixtures of experts and vision models, and why."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from expecttest import assert_expected_inline
from expert_modules import Model as ExpertModel
from helpers import FP8, NVFP4
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import (
    BlockwiseFP8TrainingConfig,
    MasterWeightTensor,
    conversion_report,
    experts,
    is_linear,
    recommended_layers,
    skip_fqns,
)
from torchao_blockwise.conversion.weights import expert_weights

# Every mixture of experts that transformers 5.23 builds from its default configuration or from the options below, and
# the linear layers that choose experts or gate one. Routers that are not linear layers are never converted.
ROUTERS = {
    "afmoe": "mlp.router.gate",
    "gemma4_text": "per_layer_input_gate, router.proj",
    "hunyuan_v1_moe": "mlp.gate.wg",
    "jetmoe": "mlp.router.layer, self_attention.experts.router.layer",
    "llama4_text": "feed_forward.router",
    "longcat_flash": "mlp.router.classifier",
    "phimoe": "mlp.router",
    "qwen2_moe": "mlp.shared_expert_gate",
    "qwen3_5_moe_text": "mlp.shared_expert_gate",
    "qwen3_next": "mlp.shared_expert_gate",
    "zaya": "mlp.gate.down_proj, mlp.gate.router_mlp.fc1, mlp.gate.router_mlp.fc2, mlp.gate.router_mlp.out_proj",
    # Their experts are linear layers.
    "nllb-moe": "ffn.router.classifier",
    "switch_transformers": "layer.1.mlp.router.classifier, layer.2.mlp.router.classifier",
}
ROUTERS |= dict.fromkeys(
    """
    aria_text axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1
    dots3_note_text ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite glm4v_moe_text glm5_next_text
    glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared hy_v3 hy_v4 inkling2_text
    inkling_text jamba kimi_linear kolibri1 laguna mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text
    mistral4 mistral_large4_text mixtral muse_spark_text nemotron_h olmoe openai_privacy_filter qwen3_moe
    qwen3_vl_moe_text solar_open
    """.split(),  # noqa: SIM905
    "",
)
OPTIONS = {
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 128},
}


def of_transformers(family: str, cls: str | None = None, **options) -> nn.Module:
    """A model without values, by default a causal language model where there is one."""
    transformers = pytest.importorskip("transformers")
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = transformers.AutoConfig.for_model(family, **OPTIONS.get(family, {}), **options)
    with torch.device("meta"):
        if cls is not None:
            return getattr(transformers, cls)(config)
        try:
            return transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:
            return transformers.AutoModel.from_config(config)


def left_out(model: nn.Module, config=None) -> dict[str, str]:
    """Reasons by the name of a linear layer or of experts; by its name in a block, where it is the same in each."""
    chosen = recommended_layers(model, config)
    reasons = {}
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear) or expert_weights(module):
            assert chosen(module, fqn) is (chosen.why_not(module, fqn) is None)
            if not chosen(module, fqn):
                reasons[re.sub(r"^.*?\.\d+\.", "", fqn)] = chosen.why_not(module, fqn)
    return reasons


@pytest.mark.parametrize("family", sorted(ROUTERS))
def test_mixtures_of_experts(family):
    """Routers and output heads are left out, and nothing else: all experts are converted."""
    model = of_transformers(family)
    reasons = left_out(model)
    routers = [name for name, reason in reasons.items() if reason == "router or gate"]
    assert ", ".join(routers) == ROUTERS[family]
    others = {name for name, reason in reasons.items() if reason != "router or gate"}
    assert others <= {"lm_head", "score"} and len(others) == (model.get_output_embeddings() is not None)
    has_weights = any(expert_weights(m) for m in model.modules())
    assert has_weights or family in ("nllb-moe", "switch_transformers")


DENSE = {
    "llama": ("llama", None, {"lm_head": "output head"}),
    "a tied head": ("gemma", None, {"lm_head": "output head, tied to model.embed_tokens"}),
    "without a head": ("llama", "LlamaModel", {}),
    "a classifier": ("llama", "LlamaForSequenceClassification", {"score": "output head"}),
    # All matrices but the head are of its Conv1D.
    "gpt2": ("gpt2", None, {"lm_head": "output head, tied to transformer.wte"}),
    "t5": ("t5", "T5ForConditionalGeneration", {"lm_head": "output head, tied to decoder.embed_tokens"}),
    "image classifier": ("vit", "ViTForImageClassification", {"classifier": "output head"}),
    "image encoder": ("vit", "ViTModel", {"pooler.dense": "last layer, behind the blocks"}),
}  # fmt: skip


@pytest.mark.parametrize(("family", "cls", "expected"), DENSE.values(), ids=DENSE)
def test_dense_models(family, cls, expected):
    assert left_out(of_transformers(family, cls)) == expected


XLNET = "not named as experts are"
TIED = {"lm_head": "output head, tied to model.embed_tokens"}


@pytest.mark.parametrize(
    ("family", "cls", "expected"),
    [
        ("xlnet", None, {"rel_attn": XLNET, "lm_loss": "output head, tied to transformer.word_embedding"}),
        ("recurrent_gemma", None, {"temporal_block.rg_lru": XLNET, **TIED}),
    ],
)  # fmt: skip
def test_three_dims_alone_are_no_experts(family, cls, expected):
    """Heads of attention and recurrent gates are Parameters [E, N, K] too, which no grouped GEMM reads."""
    model = of_transformers(family, cls)
    assert left_out(model) == expected
    chosen = recommended_layers(model) | experts()
    assert all(chosen(m, fqn) for fqn, m in model.named_modules() if expert_weights(m))


class Vision(nn.Module):
    """PyTorch's own layers, and a head whose name says nothing."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(48, 64)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), 3)
        self.to_classes = nn.Linear(64, 10)

    def forward(self, x):
        return self.to_classes(self.encoder(self.patches(x)).mean(1))


def test_a_head_by_any_name_and_attention_of_pytorch():
    """`quantize_` refuses the projection inside of nn.MultiheadAttention; the filter leaves it out."""
    model = Vision()
    quantize_(model, FP8, filter_fn=recommended_layers(model))
    model(torch.randn(2, 16, 48)).sum().backward()
    rows = [row for row in conversion_report(model).layers if ".1." not in row.fqn and ".2." not in row.fqn]
    assert_expected_inline(
        "\n".join(f"{row.fqn}: {row.status}, {row.reason}" for row in rows),
        """\
patches: converted, fp8_128x128
encoder.layers.0.self_attn.in_proj_weight: skipped, nn.MultiheadAttention multiplies by it itself, without an nn.Linear
encoder.layers.0.self_attn.out_proj: skipped, used by nn.MultiheadAttention itself
encoder.layers.0.linear1: converted, fp8_128x128
encoder.layers.0.linear2: converted, fp8_128x128
to_classes: skipped, last layer, behind the blocks""",
    )  # fmt: skip


class Gated(nn.Module):
    """A gated MLP that narrows: its gate is not a router, as up has its shape."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 64)


class Routed(nn.Module):
    """Experts as modules, and a router whose name says nothing: it has as many outputs as there are experts."""

    def __init__(self, wide: bool = False):
        super().__init__()
        self.choose = nn.Linear(4 if wide else 64, 8)
        self.experts = nn.ModuleList(Gated() for _ in range(8))


@pytest.mark.parametrize("wide", (False, True))
def test_routers_by_structure(wide):
    assert left_out(nn.ModuleDict({"moe": Routed(wide)})) == {"moe.choose": "router or gate"}


@pytest.mark.parametrize(("model", "expected"), [
    (nn.ModuleDict({"gate": nn.Linear(64, 8), "up": nn.Linear(64, 96)}), {"gate": "router or gate"}),
    (nn.ModuleDict({"gate": nn.Linear(64, 96), "down": nn.Linear(96, 64)}), {}),
    (nn.ModuleDict({"mlp": Gated()}), {}),
    (nn.ModuleDict({"router": nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))}),
     {"router.0": "router or gate", "router.1": "router or gate"}),
    # It holds the experts that it routes to.
    (nn.ModuleDict({"router_block": Routed()}), {"router_block.choose": "router or gate"}),
], ids=("gate", "a wide gate", "a gated MLP", "router", "a block of experts"))  # fmt: skip
def test_routers_by_name(model, expected):
    assert left_out(model) == expected


@pytest.mark.parametrize(("name", "reason"), [
    ("lm_heads.0", "output head"), ("mtp_head.proj", "output head"), ("classifier.2", "output head"),
    ("cls.predictions.decoder", "output head"), ("layers.0.attention.output", None), ("layers.1.head", None),
    ("layers.0.multihead_attn", None), ("embed_out", "output head"), ("decoder.output", "output head"),
])  # fmt: skip
def test_heads_by_name(name, reason):
    model = layer = nn.Linear(8, 8)
    for part in reversed(name.split(".")):
        model = nn.ModuleDict({part: model})
    assert recommended_layers(model).why_not(layer, name) == reason


class Stack(nn.Module):
    def __init__(self, blocks: int, kind=nn.ModuleList):
        super().__init__()
        layers = [nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}) for _ in range(blocks)]
        self.layers = kind(layers if kind is nn.ModuleList else {str(i): layer for i, layer in enumerate(layers)})


@pytest.mark.parametrize("kind", (nn.ModuleList, nn.ModuleDict))
@pytest.mark.parametrize(
    ("config", "blocks", "kept"), [(NVFP4, 20, 3), (NVFP4, 3, 1), (NVFP4, 1, 0), (FP8, 20, 0), (None, 20, 0)]
)
def test_the_last_blocks_stay_in_nvfp4(config, blocks, kept, kind):
    model = Stack(blocks, kind)
    chosen = recommended_layers(model, config)
    converted = [all(chosen(m, "x") for m in layer.values()) for layer in model.layers.children()]
    assert converted == [True] * (blocks - kept) + [False] * kept


def test_the_last_blocks_are_those_of_the_decoder():
    reasons = left_out(of_transformers("t5", "T5ForConditionalGeneration"), NVFP4)
    assert reasons["layer.2.DenseReluDense.wo"] == "keep_last_blocks: in the last block"
    assert "decoder.block.5.layer.1.EncDecAttention.q" not in reasons and "layer.1.EncDecAttention.q" in reasons


def test_it_composes():
    model = ExpertModel()
    chosen = recommended_layers(model) & skip_fqns("layers.0.*")
    assert repr(chosen) == "Filter(recommended_layers(Model) & skip_fqns('layers.0.*',))"
    accepted = lambda f: [fqn for fqn, m in model.named_modules() if f(m, fqn)]  # noqa: E731
    assert accepted(recommended_layers(model)) == [f"layers.{i}.{x}" for i in (0, 1) for x in ("attention", "experts")]
    assert accepted(chosen) == ["layers.1.attention", "layers.1.experts"]
    assert accepted(recommended_layers(model) & is_linear()) == ["layers.0.attention", "layers.1.attention"]
    head = is_linear() & (lambda module, fqn: fqn == "lm_head")
    assert "lm_head" in accepted(recommended_layers(model) | head)
    assert "layers.0.router" not in accepted(recommended_layers(model) | head)


def test_another_model_is_left_alone():
    model = ExpertModel()
    other = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="nothing of Model is converted"):
        quantize_(other, FP8, filter_fn=recommended_layers(model))
    reasons = {row.reason for row in conversion_report(other).layers}
    assert reasons == {"not part of the model that recommended_layers was called with"}
    quantize_(model.layers[0], FP8, filter_fn=recommended_layers(model))
    assert isinstance(model.layers[0].experts.up, MasterWeightTensor)


@pytest.mark.parametrize(
    ("config", "got"),
    ((BlockwiseFP8TrainingConfig, "the class BlockwiseFP8TrainingConfig; write"), (torch.float8_e4m3fn, "dtype; take")),
)
def test_what_is_no_config(config, got):
    with pytest.raises(TypeError, match=f"recommended_layers: config must be a training config, got {got}"):
        recommended_layers(nn.Linear(8, 8), config)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)


def blocks(count, kind=nn.ModuleList):
    made = [Block() for _ in range(count)]
    return nn.ModuleDict({str(i): block for i, block in enumerate(made)}) if kind is nn.ModuleDict else kind(made)


def sequential(count):
    return nn.Sequential(*(Block() for _ in range(count)))


# {what: (a model, the blocks that stay in high precision)}
TOWERS = {
    "vision longer": (lambda: nn.ModuleDict({"vision": blocks(32), "text": blocks(8)}), ["vision.27", "text.6"]),
    "encoder longer": (
        lambda: nn.ModuleDict({"encoder": blocks(12), "decoder": blocks(6)}),
        ["encoder.10", "decoder.5"],
    ),
    "numbered": (
        lambda: nn.ModuleDict({"model": nn.ModuleDict({"layers": blocks(7, nn.ModuleDict)})}),
        ["model.layers.5"],
    ),
    "sequential": (lambda: nn.ModuleDict({"body": sequential(7)}), ["body.5"]),
}


@pytest.mark.parametrize(("make", "first_kept"), TOWERS.values(), ids=TOWERS)
def test_nvfp4_keeps_the_last_blocks_of_every_tower(make, first_kept):
    model = make()
    kept = recommended_layers(model, NVFP4)
    for first in first_kept:
        tower, _, number = first.rpartition(".")
        numbers = [int(name) for name, _ in model.get_submodule(tower).named_children()]
        stay = [n for n in numbers if not kept(model.get_submodule(f"{tower}.{n}.up"), f"{tower}.{n}.up")]
        assert stay == numbers[int(number) :], tower
    everything = recommended_layers(model, FP8)
    assert all(everything(m, fqn) for fqn, m in model.named_modules() if isinstance(m, nn.Linear) and "up" in fqn)
