"""fuse: known attention and MLPs share inputs with bitwise identical results; others are reported and not changed."""

import types

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import FP8, assert_same, both_formats, converted, forward_backward, saved_and_loaded
from shared_inputs import Counter
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import conversion_report, fuse, fusion_report, skip_fqns, skip_lm_head, unconvert
from torchao_blockwise.conversion.fusion import FUSED, UNFUSED
from torchao_blockwise.nn.fused_modules import FusedModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 160, "moe_intermediate_size": 32}
# {what: (family, own options, modules that are fused: attention of two layers; MLPs, dense and shared by all tokens)}
FAMILIES = {
    "Llama": ("Llama", {}, 4),
    "Mistral": ("Mistral", {}, 4),
    "Qwen2": ("Qwen2", {}, 4),
    "Qwen3": ("Qwen3", {}, 4),
    "Qwen3Moe": ("Qwen3Moe", {"mlp_only_layers": [0]}, 3),
    "Mixtral": ("Mixtral", {}, 2),
    "DeepseekV3": ("DeepseekV3", {}, 4),
    "no latent query": ("DeepseekV3", {"q_lora_rank": None}, 4),
    "Gemma3": ("Gemma3Text", {}, 4),
}
every_family = pytest.mark.parametrize("family", FAMILIES)
IDS = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(1))


def language_model(name: str = "Llama", dtype=torch.bfloat16, **options) -> nn.Module:
    pytest.importorskip("transformers")
    import exported_models

    family, own, _ = FAMILIES[name]
    return exported_models.language_model(family, None, **(SIZES | own | options)).to(dtype)


def convert(model, config=FP8) -> nn.Module:
    return converted(model, config, skip_lm_head())


def step(model, autocast: bool = False) -> list[torch.Tensor]:
    """Logits and all gradients of one step."""
    model.zero_grad()
    model.train()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(input_ids=IDS, labels=IDS, use_cache=False)
    out.loss.backward()
    return [out.logits.detach(), *(p.grad for p in model.parameters())]


@every_family
@both_formats
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, "autocast"), ids=("bf16", "fp32", "autocast"))
def test_bits_are_those_of_before(family, config, dtype):
    """And of a model that is fused before it is converted."""
    autocast, count = dtype == "autocast", FAMILIES[family][2]
    dtype = torch.float32 if autocast else dtype
    model = convert(language_model(family, dtype), config)
    with Counter() as before:
        expected = step(model, autocast)
    report = fuse(model)
    with Counter() as after:
        assert_same(step(model, autocast), expected)
    assert [module.status for module in report.modules] == [FUSED] * count
    # Of layers that read one input, all but one.
    assert before.quantized - after.quantized == sum(len(module.readers) - 1 for module in report.modules)
    early, plain = language_model(family, dtype), language_model(family, dtype)
    assert [module.status for module in fuse(early).modules] == [UNFUSED] * count
    assert_same(step(early, autocast), step(plain, autocast))
    assert_same(step(convert(early, config), autocast), expected)
    assert fusion_report(early) == report


def test_generation_and_attentions():
    """With a cache, and with returned attention weights."""
    outputs = []
    for fused in (False, True):
        model = convert(language_model()).eval()
        model.set_attn_implementation("eager")
        if fused:
            fuse(model)
        generated = model.generate(IDS, max_new_tokens=4, do_sample=False)
        outputs.append((generated, *model(IDS, output_attentions=True).attentions))
    assert len(outputs[0]) == 3
    assert_same(*outputs)


# {how: (compiled, whether checkpoints are reentrant, None without any)}
HOW = {
    "compiled": (True, None),
    "compiled, checkpointed": (True, False),
    "non_reentrant": (False, False),
    "reentrant": (False, True),
}


@both_formats
@pytest.mark.parametrize(("compiled", "reentrant"), HOW.values(), ids=HOW)
def test_compiled_and_checkpointed(config, compiled, reentrant):
    results = []  # Attention is computed in another order by a compiler.
    for fused in (False, True):
        model = convert(language_model(num_hidden_layers=1), config)
        if fused:
            fuse(model)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch._dynamo.reset()
        results.append(step(torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model))
    assert_same(*results)


@both_formats
def test_latent_attention_and_mlp_of_torchtitan(config):
    """Of DeepSeek-V3. Its models without a latent query, and Llama and Qwen3, train in titan_checks.py."""
    pytest.importorskip("torchtitan.models.common.linear")
    from torchtitan.models.common import attention, feed_forward, linear, nn_modules, rope
    from torchtitan.models.deepseek_v3.model import Attention

    def build(inputs: int, outputs: int):
        return linear.Linear.Config(in_features=inputs, out_features=outputs)

    torch.manual_seed(0)
    norm = nn_modules.RMSNorm.Config(normalized_shape=32)
    latent = Attention.Config(
        n_heads=4, dim=64, wq_a=build(64, 32), wq_b=build(32, 128), wkv_a=build(64, 48), wkv_b=build(32, 128),
        wo=build(64, 64), q_lora_rank=32, kv_lora_rank=32, q_norm=norm, kv_norm=norm, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16, rope=rope.ComplexRoPE.Config(dim=16, max_seq_len=32),
        inner_attention=attention.ScaledDotProductAttention.Config(),
    ).build()  # fmt: skip
    mlp = feed_forward.FeedForward.Config(w1=build(64, 160), w2=build(160, 64), w3=build(64, 160)).build()
    model = nn.ModuleList([latent, mlp]).bfloat16()
    model.forward = lambda x: mlp(latent(x, None))
    x = torch.randn(2, 17, 64, dtype=torch.bfloat16)
    quantize_(model, config)
    expected = forward_backward(model, x)
    found = [module.readers for module in fuse(model).modules if module.status == FUSED]
    assert found == [("wq_a", "wkv_a"), ("w1", "w3")]
    assert_same(forward_backward(model, x), expected)
    report = fuse(model, round_once=True)
    assert report.modules[1].reason.startswith("SwiGLU in w2" if config is FP8 else "no SwiGLU: w2 trains in NVFP4")


def test_the_report():
    model = language_model("DeepseekV3")
    quantize_(model, FP8, filter_fn=skip_fqns("*.1.self_attn.*", "lm_head"))
    fuse(model, round_once=True)
    assert_expected_inline(
        str(fusion_report(model)),
        """\
module                             class                status   shared input of               reason / SwiGLU
---------------------------------  -------------------  -------  ----------------------------  -------------------------
model.layers.0.self_attn           DeepseekV3Attention  fused    q_a_proj, kv_a_proj_with_mqa
model.layers.0.mlp                 DeepseekV3MLP        fused    gate_proj, up_proj            SwiGLU in down_proj
model.layers.1.self_attn           DeepseekV3Attention  unfused  q_a_proj, kv_a_proj_with_mqa  q_a_proj is not converted
model.layers.1.mlp.shared_experts  DeepseekV3MLP        fused    gate_proj, up_proj            SwiGLU in down_proj
---------------------------------  -------------------  -------  ----------------------------  -------------------------
total                              3 of 4               fused""",
    )
    assert fusion_report(model).to_dict()["fused"] == 3


class Own(nn.Module):
    """Looks alike, and changes its input."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        q = self.q_proj(x)
        return q + self.k_proj(x.mul_(2)) + self.v_proj(x)


def derived(model):
    cls = type(model.model.layers[0].mlp)
    model.model.layers[0].mlp.__class__ = type("MyMLP", (cls,), {"__module__": "mine"})


def patched(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(lambda self, x: self.down_proj(self.gate_proj(x) + self.up_proj(x.mul(2))), mlp)


def wrapped(model):
    mlp = model.model.layers[0].mlp
    mlp.gate_proj = nn.Sequential(mlp.gate_proj)


def replaced(model):
    """As libraries of kernels replace the forward pass of all modules of a class."""
    cls = type(model.model.layers[0].mlp)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(cls, "forward", lambda self, x: self.down_proj(self.gate_proj(x) * self.up_proj(x)))
    return monkeypatch.undo


LEFT_ALONE = {
    "derived": (derived, "mine.MyMLP is derived from a known class; call fuse before other libraries wrap it"),
    "patched": (patched, "its forward pass was replaced on the instance"),
    "wrapped": (wrapped, "gate_proj is a Sequential; call fuse before other libraries wrap it"),
    "unknown": (lambda m: setattr(m, "own", Own()), "the forward pass of test_fusion.Own is not known"),
    "replaced": (replaced, "its forward pass was replaced by test_fusion.replaced.<locals>.<lambda>"),
}


@pytest.mark.parametrize(("change", "reason"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_is_not_known_is_left_alone(change, reason, request):
    model = language_model(num_hidden_layers=1)
    request.addfinalizer(change(model) or (lambda: None))
    convert(model)
    expected, classes = step(model), [type(module) for module in model.modules()]
    reports = fuse(model).modules
    (unfused,) = [module for module in reports if module.status == UNFUSED]
    assert unfused.reason.replace(__name__, "test_fusion") == reason
    changed = [cls for cls, module in zip(classes, model.modules()) if type(module) is not cls]
    assert len(changed) == len(reports) - 1
    assert_same(step(model), expected)


def test_a_forward_pass_that_is_replaced_later(monkeypatch):
    """It may change the input between layers, so they do not share it."""
    fused, plain = (convert(language_model(num_hidden_layers=1)).eval() for _ in range(2))
    fuse(fused)
    changed = lambda self, x: self.down_proj(self.gate_proj(x) + self.up_proj(x.mul_(2)))  # noqa: E731
    with torch.no_grad():
        expected = plain(IDS).logits
        with monkeypatch.context() as patch:
            patch.setattr(type(plain.model.layers[0].mlp), "forward", changed)
            assert_same([fused(IDS).logits], [plain(IDS).logits])
            report = fusion_report(fused)
        assert_same([fused(IDS).logits], [expected])
    assert [module.reason for module in report.modules] == ["", "its forward pass was replaced after fuse"]
    assert [module.status for module in fusion_report(fused).modules] == [FUSED] * 2


@pytest.mark.parametrize("targets", (["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "gate_proj"]), ids=len)
def test_lora(targets):
    """Adapters take the places of layers; what they wrap is called as before."""
    peft = pytest.importorskip("peft")
    results = []
    for fused in (False, True):
        model = convert(language_model(dtype=torch.float32))
        if fused:
            fuse(model)
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, init_lora_weights=False))
        torch.manual_seed(2)
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                nn.init.normal_(p, std=0.1)
        results.append(step(adapted))
    assert_same(*results)
    statuses = {module.fqn.split(".")[-1]: module.status for module in fusion_report(model).modules}
    assert statuses == {"self_attn": UNFUSED, "mlp": UNFUSED if "gate_proj" in targets else FUSED}


@both_formats
def test_names_and_state_dicts_stay_and_unconvert_ends_it(config):
    model, plain, other = convert(language_model(), config), language_model(), convert(language_model(), config)
    names, report = [name for name, _ in model.named_modules()], conversion_report(model)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    expected = step(model)
    fuse(model)
    assert [name for name, _ in model.named_modules()] == names and conversion_report(model) == report
    after = saved_and_loaded(model.state_dict())
    assert [*after] == [*state]
    assert_same([*after.values()], [*state.values()])
    fuse(other, round_once=True)
    other.load_state_dict(state)
    for round_once in (False, True, False):
        fuse(other, round_once=round_once)
        assert bool(other.model.layers[0].mlp.fusion.down) == round_once
        assert len([m for m in other.modules() if isinstance(m, FusedModule)]) == 4
    assert_same(step(other), expected)
    unconvert(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert [vars(m).keys() for m in model.modules()] == [vars(m).keys() for m in plain.modules()]
    assert_same(step(model), step(plain))
