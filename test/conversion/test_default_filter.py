"""`recommended_layers`: what it leaves out of language models, mixtures of experts and vision models, and why."""

import copy
import re

import pytest
import torch
from expert_modules import ROUTERS
from expert_modules import Model as ExpertModel
from helpers import FP8, NVFP4
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import (
    MasterWeightTensor,
    NormLinear,
    conversion_report,
    experts,
    is_linear,
    recommended_layers,
    skip_fqns,
)
from torchao_blockwise.conversion.default_filter import recommended
from torchao_blockwise.conversion.weights import expert_weights

OPTIONS = {
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 128},
}


def of_transformers(family: str, cls: str | None = None) -> nn.Module:
    pytest.importorskip("transformers", "5.0")
    import exported_models

    return exported_models.of_transformers(family, cls, **OPTIONS.get(family, {}))


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
    # transformers keeps those of most of these models in fp32, and vLLM runs them in high precision.
    names = [fqn for fqn, _ in model.named_modules() if fqn.endswith("weights_proj")]
    indexers = {re.sub(r"^.*?\.\d+\.", "", fqn) for fqn in names}
    assert indexers <= others
    others -= indexers
    others -= {"mamba.dt_proj"} if family == "jamba" else set()
    others -= {"model.per_layer_model_projection"} if family == "gemma4_text" else set()
    assert others <= {"lm_head", "score"} and len(others) == (model.get_output_embeddings() is not None)
    has_weights = any(expert_weights(m) for m in model.modules())
    assert has_weights or family in ("nllb-moe", "switch_transformers")


TIED, NO_EXPERTS, NARROW = "output head, tied to ", "not named like experts", "fewer than 16 features"
OUTSIDE, MODULATION = "outside the blocks", "computes scales and shifts of norms"
DT_PROJ = "Mamba multiplies by its weight without calling the layer"
# {what: (family, class, what is left out)}
OTHERS = {
    "llama": ("llama", None, {"lm_head": "output head"}),
    "a tied head": ("gemma", None, {"lm_head": f"{TIED}model.embed_tokens"}),
    "without a head": ("llama", "LlamaModel", {}),
    "a classifier": ("llama", "LlamaForSequenceClassification", {"score": "output head"}),
    # All matrices but the head are of its Conv1D.
    "gpt2": ("gpt2", None, {"lm_head": f"{TIED}transformer.wte"}),
    "t5": ("t5", "T5ForConditionalGeneration", {"lm_head": f"{TIED}decoder.embed_tokens"}),
    "image classifier": ("vit", "ViTForImageClassification", {"classifier": "output head"}),
    "image encoder": ("vit", "ViTModel", {"pooler.dense": OUTSIDE}),
    "mamba": ("mamba", None, {"mixer.dt_proj": DT_PROJ, "lm_head": f"{TIED}backbone.embeddings"}),
    # Heads of attention and recurrent gates are Parameters [E, N, K] too, which no grouped GEMM reads.
    "xlnet": ("xlnet", None, {"rel_attn": NO_EXPERTS, "lm_loss": f"{TIED}transformer.word_embedding"}),
    # The layers next to its heads of attention are not their routers.
    "funnel": ("funnel", "FunnelModel", {"attention": NO_EXPERTS, **{f"{i}.attention": NO_EXPERTS for i in range(4)}}),
    "position biases": ("layoutlmv3", "LayoutLMv3ForTokenClassification", {
        **{f"layoutlmv3.encoder.rel_pos_{x}bias": "LayoutLMv3Encoder reads its weight directly"
           for x in ("", "x_", "y_")},
        "classifier": "output head",
    }),
    "wavlm": ("wavlm", "WavLMForSequenceClassification", {
        **{f"attention.{x}": "WavLMAttention reads its weight directly"
           for x in ("q_proj", "k_proj", "v_proj", "out_proj", "gru_rel_pos_linear")},
        "wavlm.encoder.pos_conv_embed.conv.parametrizations.weight": NO_EXPERTS,
        "wavlm.feature_projection.projection": OUTSIDE, "projector": OUTSIDE, "classifier": "output head",
    }),
    "two heads": ("clip", "CLIPModel", {"visual_projection": OUTSIDE, "text_projection": OUTSIDE}),
    "a head of a convolutional model": ("textnet", "TextNetForImageClassification", {"fc": NARROW}),
    "few inputs": ("gemma3n_text", None, {
        "altup.correction_coefs": NARROW, "altup.prediction_coefs": NARROW, "altup.modality_router": "router or gate",
        "per_layer_input_gate": "router or gate", "model.per_layer_model_projection": OUTSIDE,
        "lm_head": f"{TIED}model.embed_tokens",
    }),
    "recurrent": ("recurrent_gemma", None, {"temporal_block.rg_lru": NO_EXPERTS,
                                            "lm_head": f"{TIED}model.embed_tokens"}),
}  # fmt: skip


@pytest.mark.parametrize(("family", "cls", "expected"), OTHERS.values(), ids=OTHERS)
def test_other_models(family, cls, expected):
    model = of_transformers(family, cls)
    assert left_out(model) == expected
    chosen = recommended_layers(model) | experts()
    assert all(chosen(m, fqn) for fqn, m in model.named_modules() if expert_weights(m))


def test_a_head_by_any_name_and_attention_of_pytorch():
    """`quantize_` refuses the projection inside of nn.MultiheadAttention; the filter leaves it out."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), 3)
    model = nn.ModuleDict({"patches": nn.Linear(48, 64), "encoder": encoder, "to_classes": nn.Linear(64, 10)})
    projection = "nn.MultiheadAttention reads its weight directly"
    assert left_out(model) == {"patches": OUTSIDE, "self_attn.out_proj": projection, "to_classes": OUTSIDE}
    quantize_(model, FP8, filter_fn=recommended_layers(model))


class AdaLayerNormZero(nn.Module):
    """As in diffusers: a norm that computes its scale and shift from a condition, which it may embed itself."""

    def __init__(self):
        super().__init__()
        self.emb, self.linear, self.norm = nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 64), nn.LayerNorm(32)


class DiffusionBlock(nn.Module):
    """The ways in which libraries name what computes scales and shifts."""

    def __init__(self):
        super().__init__()
        self.norm1 = AdaLayerNormZero()
        for name in ("adaLN_modulation", "img_mod"):
            setattr(self, name, nn.Sequential(nn.SiLU(), nn.Linear(32, 96)))
        self.time_emb_proj = nn.Linear(32, 64)
        self.attention, self.model, self.norm_linear = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.mlp = NormLinear.from_modules(nn.RMSNorm(32), nn.Linear(32, 32))


class Diffusion(nn.Module):
    """The output layer is registered before the layers that embed the condition, as in PixArt."""

    def __init__(self, kind):
        super().__init__()
        self.patches = nn.Linear(16, 32)
        self.blocks = kind([DiffusionBlock(), DiffusionBlock()]) if kind is nn.ModuleList else kind(DiffusionBlock())
        self.proj_out = nn.Linear(32, 16)
        self.caption = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential], ids=("list", "one block"))
def test_diffusion_models(kind):
    """The modulation is left out, and what is outside the blocks. A Sequential of one block is not a list."""
    modulation = ["norm1.emb.0", "norm1.linear", "adaLN_modulation.1", "img_mod.1", "time_emb_proj"]
    outside = ["patches", "proj_out", "caption.0", "caption.2"] if kind is nn.ModuleList else []
    assert left_out(Diffusion(kind)) == dict.fromkeys(modulation, MODULATION) | dict.fromkeys(outside, OUTSIDE)


@pytest.mark.parametrize("compiled", ["model", "block"])
def test_what_is_compiled_is_chosen_as_before(compiled):
    """`torch.compile` holds it under the name `_orig_mod`."""
    model = nn.ModuleDict({"layers": nn.ModuleList(Gated() for _ in range(3)), "last": nn.Linear(64, 64)})
    if compiled == "model":
        model = torch.compile(model)
    else:
        model["layers"][1] = torch.compile(model["layers"][1])
    assert list(left_out(model).values()) == [OUTSIDE]


def named(name: str, *layers: nn.Module) -> nn.Module:
    """Layers in a module of a class with this name."""
    module = type(name, (nn.Module,), {})()
    for i, layer in enumerate(layers):
        setattr(module, f"part{i}", layer)
    return module


def test_what_is_only_named_like_modulation_is_converted():
    """The tokens of FocalNet's modulation are mixed by convolutions."""
    names = ("AdapterWithNorm", "GPTAdamNorm", "NormZeroes")
    parts = {name: named(name, nn.Linear(64, 128)) for name in names[:2]}
    parts |= {"modulation": named("FocalNetModulation", nn.Linear(64, 129), nn.Conv2d(64, 64, 3))}
    parts |= {"cross_mod_attn": nn.Linear(64, 64), "mod_projection": nn.Linear(64, 64)}
    assert left_out(nn.ModuleDict(parts)) == {}
    # A model of such a name has blocks, and no condition.
    assert left_out(named("MyAdaNormModel", nn.ModuleList(Gated() for _ in range(2)))) == {}


@pytest.mark.parametrize("names", [("lora_a", "lora_b"), ("lora_A", "lora_B"), ("lora_down", "lora_up")], ids=" ".join)
def test_adapters_of_other_libraries_than_peft(names):
    """What their names only contain, such as the low-rank projections of DeepSeek's attention, is converted."""

    class Adapted(nn.Linear):
        def __init__(self):
            super().__init__(64, 64)
            for name, shape in zip(names, ((64, 16), (16, 64))):
                self.add_module(name, nn.Linear(*shape))

    blocks = nn.ModuleList(nn.ModuleDict({"q_proj": Adapted(), "q_lora_a_proj": nn.Linear(64, 16)}) for _ in range(3))
    assert left_out(nn.ModuleDict({"layers": blocks})) == {f"q_proj.{name}": "low-rank adapter" for name in names}


def test_blocks_that_are_in_no_list():
    """A prediction of further tokens, or a middle, has a block of the same class; towers may have stages."""
    layers = nn.ModuleList(Gated() for _ in range(8))
    model = nn.ModuleDict({"layers": layers, "mtp": nn.ModuleDict({"proj": nn.Linear(128, 64), "block": Gated()})})
    assert left_out(model) == {"mtp.proj": OUTSIDE}
    stages = {f"stage{i}": nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for i in range(8)}
    assert left_out(nn.ModuleDict({**stages, "layers": layers})) == {}


def test_layers_that_have_no_weight_yet_are_not_narrow():
    """They are refused by name when they are converted."""
    lazy = nn.ModuleList(nn.Sequential(nn.LazyLinear(128), nn.Linear(128, 128)) for _ in range(2))
    assert left_out(lazy) == {}
    with pytest.raises(ValueError, match="its weight is not initialized yet"):
        quantize_(lazy, FP8, filter_fn=recommended_layers(lazy))


def test_a_tower_in_a_list_and_one_in_a_sequence():
    """As a vision tower of timm next to a text tower: both have blocks."""
    made = {"vision": nn.Sequential(*(Gated() for _ in range(2))), "text": nn.ModuleList(Gated() for _ in range(8))}
    model = nn.ModuleDict(made)
    assert left_out(model) == {}
    rows = [fqn for fqn, m in model.named_modules() if isinstance(m, nn.Linear)]
    chosen = recommended_layers(model, NVFP4)
    skipped = {fqn.rpartition(".")[0] for fqn in rows if not chosen(model.get_submodule(fqn), fqn)}
    assert skipped == {"vision.1", "text.6", "text.7"}


def test_a_list_of_few_layers_is_not_the_blocks():
    """Most layers are outside it, such as a backbone without blocks, so they are converted."""
    heads = nn.ModuleList(nn.Linear(64, 32) for _ in range(2))
    model = nn.ModuleDict({"backbone": Gated(), "tasks": heads})
    assert left_out(model) == {}


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="needs PyTorch 2.13")
def test_the_head_inside_a_loss():
    model = nn.Sequential(nn.Linear(64, 64), nn.LinearCrossEntropyLoss(64, 32))
    assert left_out(model) == {"1.linear": "output head"}
    quantize_(model, FP8, filter_fn=recommended_layers(model))
    model[1](model[0](torch.randn(8, 64)), torch.randint(32, (8,))).backward()


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


class Followed(nn.Module):
    """A body, and a linear layer after it."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body, self.last = body, nn.Linear(64, 32)


@pytest.mark.parametrize(("model", "expected"), [
    (nn.ModuleDict({"moe": Routed()}), {"moe.choose": "router or gate"}),
    (nn.ModuleDict({"moe": Routed(wide=True)}), {"moe.choose": "router or gate"}),
    (nn.ModuleDict({"gate": nn.Linear(64, 8), "up": nn.Linear(64, 96)}), {"gate": "router or gate"}),
    (nn.ModuleDict({"gate": nn.Linear(64, 96), "down": nn.Linear(96, 64)}), {}),
    (nn.ModuleDict({"mlp": Gated()}), {}),
    (nn.ModuleDict({"router": nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))}),
     {"router.0": "router or gate", "router.1": "router or gate"}),
    # It holds the experts that it routes to.
    (nn.ModuleDict({"router_block": Routed()}), {"router_block.choose": "router or gate"}),
    (nn.ModuleDict({"mtp_head": nn.Sequential(nn.Linear(8, 8))}), {"mtp_head.0": "output head"}),
    # Experts are not blocks of the model, so a layer after them is not a head.
    (Followed(Routed()), {"body.choose": "router or gate"}),
    (Followed(nn.Sequential(Gated(), Gated())), {"last": OUTSIDE}),
], ids=("structure", "wide", "gate", "a wide gate", "a gated MLP", "router", "a block of experts", "head",
        "after experts", "after a sequence"))  # fmt: skip
def test_routers_and_heads(model, expected):
    assert left_out(model) == expected


def blocks(count, kind=nn.ModuleList):
    made = [nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)}) for _ in range(count)]
    if kind is nn.ModuleDict:
        return kind({str(i): block for i, block in enumerate(made)})
    return kind(*made) if kind is nn.Sequential else kind(made)


# {what: (towers, config, how many blocks are asked for, how many of each stay in high precision)}
TOWERS = {
    "one": ({"layers": blocks(20)}, NVFP4, None, (3,)),
    "short": ({"layers": blocks(3)}, NVFP4, None, (1,)),
    "one block": ({"layers": blocks(1)}, NVFP4, None, (0,)),
    "fp8": ({"layers": blocks(20)}, FP8, None, (0,)),
    "no config": ({"layers": blocks(20)}, None, None, (0,)),
    "vision longer": ({"vision": blocks(32), "text": blocks(8)}, NVFP4, None, (5, 2)),
    "encoder longer": ({"encoder": blocks(12), "decoder": blocks(6)}, NVFP4, None, (2, 1)),
    # As torchtitan's.
    "numbered": ({"layers": blocks(7, nn.ModuleDict)}, NVFP4, None, (2,)),
    "sequential": ({"body": blocks(7, nn.Sequential)}, NVFP4, None, (2,)),
    "none": ({"layers": blocks(7)}, NVFP4, 0, (0,)),
    "asked for": ({"layers": blocks(7, nn.ModuleDict)}, FP8, 1, (1,)),
    "asked for, of each": ({"vision": blocks(32), "text": blocks(8)}, FP8, 3, (3, 3)),
    "more than the shorter has": ({"encoder": blocks(12), "decoder": blocks(2)}, FP8, 4, (4, 2)),
    "a share": ({"layers": blocks(7, nn.Sequential)}, NVFP4, 0.3, (3,)),
}


@pytest.mark.parametrize(("towers", "config", "count", "kept"), TOWERS.values(), ids=TOWERS)
def test_the_last_blocks(towers, config, count, kept):
    """Of every tower 15 % in NVFP4, rounded up."""
    chosen = recommended(nn.ModuleDict(towers), config, last_blocks=count)
    for tower, stay in zip(towers.values(), kept, strict=True):
        converted = [chosen(block["up"], "up") for block in tower.children()]
        assert converted == [True] * (len(converted) - stay) + [False] * stay


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
    with pytest.warns(UserWarning, match="no layer of Model is converted"):
        quantize_(other, FP8, filter_fn=recommended_layers(model))
    reasons = {row.reason for row in conversion_report(other).layers}
    assert reasons == {"not part of the model that recommended_layers was called with"}
    quantize_(model.layers[0], FP8, filter_fn=recommended_layers(model))
    assert isinstance(model.layers[0].experts.up, MasterWeightTensor)


@pytest.mark.parametrize("last_blocks", [None, 0, 1, 0.5])
def test_a_number_of_last_blocks_leaves_other_reasons_alone(last_blocks):
    layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 64), nn.Linear(64, 64)) for _ in range(4))
    chosen = recommended(layers, FP8, last_blocks=last_blocks)
    assert [chosen.why_not(block[0], "") is None for block in layers] == [False] * 4
    assert chosen.why_not(layers[0][1], "") is None
