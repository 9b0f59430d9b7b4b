"""Weights that a model multiplies by itself are refused at conversion, by name and with a remedy; no others are."""

from __future__ import annotations

import inspect
import tokenize

import pytest
import torch
from helpers import FP8, replace
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor, dry_run, experts, linears_and_experts, skip_fqns, skip_lm_head
from torchao_blockwise.conversion.raw_uses import raw_uses

pytestmark = pytest.mark.usefixtures("no_interpreter")


class Raw(nn.Module):
    def __init__(self):
        super().__init__()
        self.by_operator, self.by_name, self.in_method, self.called = (nn.Linear(32, 32) for _ in range(4))
        self.never, self.scaled = nn.Linear(32, 32), nn.Linear(32, 32)
        self.stack = nn.Parameter(torch.randn(2, 32, 32))

    def forward(self, x):
        x = x @ self.by_operator.weight.t().to(x.dtype)
        x = torch.addmm(self.by_name.bias, x, mat2=self.by_name.weight.T)
        x = nn.functional.linear(x, self.called.weight) + self.called(x) * self.scaled.weight.norm()
        return self.helper(x) @ self.stack[0]

    def helper(self, x):
        return x.matmul(self.in_method.weight)

    def unused(self, x):
        return x @ self.never.weight


def test_products_in_forward_passes_are_found():
    model = nn.Sequential(Raw())
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[i]: reason for i, reason in raw_uses(model).items() if not names[i].endswith("bias")}
    said = "Raw.{} multiplies by self.{} itself, in high precision; leave {}, filter_fn=skip_fqns({})"
    assert found == {
        "0.stack": said.format("forward", "stack", "the module out", "its name"),
        **{
            f"0.{name}.weight": said.format(method, f"{name}.weight", "it out", f'"*.{name}"')
            for name, method in (("by_operator", "forward"), ("by_name", "forward"), ("in_method", "helper"))
        },
    }


def test_a_conversion_names_them_all_and_changes_nothing():
    model = nn.Sequential(Raw())
    report = {layer.fqn: layer for layer in dry_run(model, FP8, linears_and_experts()).layers}
    assert report["0.by_name"].status == "cannot convert" and report["0.called"].status == "converted"
    with pytest.raises(ValueError, match=r"4 of 7 layers cannot .*\n.*0: stack: Raw.forward multiplies by self.stack"):
        quantize_(model, FP8, filter_fn=linears_and_experts())
    assert not any(isinstance(p, MasterWeightTensor) for p in model.parameters())
    quantize_(model, FP8, filter_fn=linears_and_experts() & skip_fqns("*.by_*", "*.in_method", "0"))
    model(torch.randn(4, 32)).sum().backward()


def test_code_without_source_is_left_to_its_products():
    names: dict = {"nn": nn}
    exec("class M(nn.Linear):\n    def own(self, x): return x @ self.weight", names)
    model = nn.Sequential(names["M"](32, 32))
    quantize_(model, FP8)
    with pytest.raises(NotImplementedError, match="in high precision without being seen"):
        model[0].own(torch.randn(4, 32))


def test_a_file_that_is_not_the_source_is_left_alone(tmp_path):
    """A document's example runs under the document's name, say; its text need not even be Python."""
    path = tmp_path / "page.md"
    path.write_text('\n    def forward(self, x): """\n')
    names: dict = {"nn": nn}
    exec(compile("class M(nn.Linear):\n    def forward(self, x): return super().forward(x)", path, "exec"), names)
    with pytest.raises(tokenize.TokenError):
        inspect.getsource(names["M"].forward)
    assert not raw_uses(names["M"](32, 32))


# --- Hugging Face's models --------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2}
ATTENTION = {**SMALL, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
IDS = torch.arange(34).view(2, 17)


def language_model(family: str, implementation: str | None = None, **options) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**options)
    chosen = {} if implementation is None else {"experts_implementation": implementation}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, **chosen)


def trains(model) -> None:
    model(input_ids=IDS, labels=IDS).loss.backward()
    converted = [p for p in model.parameters() if isinstance(p, MasterWeightTensor)]
    assert converted and all(p.grad is not None for p in converted)


GPT_OSS = {**ATTENTION, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}


@pytest.mark.parametrize("masters", (True, False), ids=("masters", "quantized"))
def test_gpt_oss_is_refused_with_eager_experts_and_trains_with_the_remedy(masters):
    config = replace(FP8, master_weights=masters)
    model = language_model("GptOss", "eager", **GPT_OSS)
    with pytest.raises(
        ValueError,
        match=r"model.layers.0.mlp.experts: gate_up_proj: GptOssExperts.forward multiplies by self.gate_up_proj "
        r'itself, in high precision; call model.set_experts_implementation\("grouped_mm"\) before',
    ):
        quantize_(model, config, filter_fn=linears_and_experts() & skip_lm_head())
    assert not any(isinstance(p, MasterWeightTensor) for p in model.parameters())
    model.set_experts_implementation("grouped_mm")
    quantize_(model, config, filter_fn=linears_and_experts() & skip_lm_head())
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert type(model.model.layers[0].mlp.experts.down_proj) is not nn.Parameter
    assert all(p.grad is not None for name, p in model.named_parameters() if "experts" in name)


@pytest.mark.parametrize("family", ("Mamba", "FalconMamba"))
def test_mamba_is_refused_and_trains_with_the_remedy(family):
    model = language_model(family, **SMALL, state_size=8)
    with pytest.raises(ValueError, match=rf'dt_proj: {family}Mixer.* filter_fn=skip_fqns\("\*.dt_proj"\)'):
        quantize_(model, FP8, filter_fn=skip_lm_head())
    quantize_(model, FP8, filter_fn=skip_lm_head() & skip_fqns("*.dt_proj"))
    trains(model)


FAMILIES = {
    "Llama": ATTENTION,
    "Qwen3": {**ATTENTION, "head_dim": 16},
    "Gemma3Text": {**ATTENTION, "head_dim": 16},
    "Phi3": {**ATTENTION, "pad_token_id": 0},
    "Mixtral": {**ATTENTION, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {**ATTENTION, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "DeepseekV3": {
        **ATTENTION, "moe_intermediate_size": 48, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 16, "num_experts_per_tok": 2,
    },
    "GPT2": {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "Mamba2": {**SMALL, "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", ("eager", "grouped_mm"))
def test_models_that_train_are_not_refused(family, implementation):
    if implementation == "grouped_mm" and not any("experts" in option for option in FAMILIES[family]):
        return
    model = language_model(family, implementation, **FAMILIES[family])
    if family == "GPT2":
        # Its layers are no `nn.Linear`; the head is.
        return quantize_(model, FP8)
    quantize_(model, FP8, filter_fn=linears_and_experts() & skip_lm_head())
    trains(model)


@pytest.mark.parametrize("family", ("Bert", "ViT"))
def test_encoders_are_not_refused(family):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}Model")(config)
    assert not raw_uses(model)
    quantize_(model, FP8)


def test_experts_alone_are_refused_too():
    model = language_model("GptOss", "eager", **GPT_OSS)
    with pytest.raises(ValueError, match="2 of 2 layers cannot be converted"):
        quantize_(model, FP8, filter_fn=experts())
