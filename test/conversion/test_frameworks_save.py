"""Saving, loading and merging by transformers, Lightning and PEFT, with their real code."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import FP8, NVFP4, both_formats, mlp, replace
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor, linears_and_experts, skip_lm_head
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")

CONFIGS = {
    f"{name}-{kind}": replace(config, master_weights=kind == "masters")
    for name, config in {"fp8": FP8, "nvfp4": NVFP4}.items()
    for kind in ("masters", "quantized")
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
TOKENS = torch.arange(8)[None]


def llama(tied: bool = False):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


@every_config
@pytest.mark.parametrize("tied", (False, True), ids=("untied", "tied"))
def test_save_pretrained(config, tied, tmp_path):
    """What is saved loads in a plain model, and converted gives the same outputs."""
    model = llama(tied)
    quantize_(model, config, filter_fn=skip_lm_head())
    expected = model(TOKENS).logits.detach()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(type(p) is nn.Parameter for p in again.parameters())
    quantize_(again, config, filter_fn=skip_lm_head())
    assert_bitwise_equal(again(TOKENS).logits.detach(), expected)


@pytest.mark.parametrize("config", (CONFIGS["fp8-masters"], CONFIGS["fp8-quantized"]), ids=("masters", "quantized"))
def test_a_torchao_config_of_transformers_is_refused(config, tmp_path, caplog):
    """transformers collects errors of layers in a report, and then raises one of its own."""
    model = llama()
    model.save_pretrained(tmp_path)
    import transformers

    transformers.utils.logging.enable_propagation()
    try:
        with pytest.raises(RuntimeError, match="automatic conversion"):
            type(model).from_pretrained(tmp_path, quantization_config=transformers.TorchAoConfig(config))
    finally:
        transformers.utils.logging.disable_propagation()
    assert "take quantization_config=BlockwiseFP8Config(...) from torchao_blockwise.integrations" in caplog.text


@every_config
def test_lightning_resumes(config, tmp_path):
    """Bit for bit; of quantized Parameters with their masters, whose states Lightning saves as the optimizer's."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = mlp(config)

        def training_step(self, batch, index):
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self):
            if config.master_weights:
                return torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            return MasterWeightOptimizer(torch.optim.AdamW, self.model, lr=1e-2)

    def fit(module, steps, **options):
        # One batch: a trainer that resumes begins with the first one again.
        data = torch.utils.data.TensorDataset(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=32), **options)
        return trainer

    whole, begun, resumed = Module(), Module(), Module()
    fit(whole, 4)
    fit(begun, 2).save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    assert all(type(x) is torch.Tensor for x in saved.values())
    fit(resumed, 4, ckpt_path=str(tmp_path / "half.ckpt"))
    for name, x in resumed.state_dict().items():
        assert_bitwise_equal(x, whole.state_dict()[name], name)


@both_formats
def test_trainer_accumulates_gradients_and_resumes(config, tmp_path):
    """Hugging Face's, in one process: every weight trains, and one that goes on has the bits of one without a stop."""
    transformers = pytest.importorskip("transformers")
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(64).view(8, 8)]

    def train(folder, steps, resume=None):
        args = transformers.TrainingArguments(
            str(folder), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=1e-2, lr_scheduler_type="constant", save_steps=2, logging_steps=1, report_to=[],
            use_cpu=True, disable_tqdm=True, seed=0,
        )  # fmt: skip
        model = llama()
        quantize_(model, config, filter_fn=skip_lm_head())
        if resume is not None:
            nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in model.parameters())), model.parameters())
        trainer = transformers.Trainer(model, args, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    whole, losses = train(tmp_path / "whole", 4)
    assert losses[-1] < 0.9 * losses[0]
    before = llama().state_dict()
    assert not any(torch.equal(x, before[name]) for name, x in whole.state_dict().items())
    train(tmp_path / "parts", 2)
    resumed, _ = train(tmp_path / "parts", 4, str(tmp_path / "parts" / "checkpoint-2"))
    for name, x in resumed.state_dict().items():
        assert_bitwise_equal(x, whole.state_dict()[name], name)


@every_config
@pytest.mark.parametrize("safe", (False, True), ids=("", "safe"))
def test_peft_merges(config, safe):
    """Into master weights w + scale · B · A; into quantized ones the decoded values plus that, quantized again."""
    peft = pytest.importorskip("peft")
    model = mlp()
    values = model[0].weight.detach().clone()
    quantize_(model, config)
    decoded = values if config.master_weights else model[0].weight.dequantize()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights=False))
    for layer in adapted.modules():
        # What PEFT takes from a model that transformers quantized.
        if hasattr(layer, "get_apply_tensor_subclass"):
            layer.get_apply_tensor_subclass = lambda: config
    delta = adapted.base_model.model[0].get_delta_weight("default").detach()
    merged = adapted.merge_and_unload(safe_merge=safe)
    expected = mlp()
    with torch.no_grad():
        expected[0].weight.copy_(decoded + delta)
    quantize_(expected, config)
    kind = MasterWeightTensor if config.master_weights else type(expected[0].weight)
    assert type(merged[0].weight) is kind and isinstance(merged[0].weight, nn.Parameter)
    x = torch.randn(3, 64)
    assert_bitwise_equal(merged[0](x).detach(), expected[0](x).detach())
    assert all(type(v) is torch.Tensor for v in merged.state_dict().values())
    assert_bitwise_equal(copy.deepcopy(merged)(x).detach(), merged(x).detach())


@both_formats
def test_peft_trains_and_merges_adapters_of_experts(config):
    """`w + b @ a` by `baddbmm`, which stays a weight: the products with it are in low precision."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3MoeConfig(**small, **heads, **experts), experts_implementation="grouped_mm"
    )
    quantize_(model, config, filter_fn=linears_and_experts())
    names = ["experts.gate_up_proj", "experts.down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=names))
    ids = torch.arange(20).view(1, 20)
    adapted(input_ids=ids, labels=ids).loss.backward()
    adapters = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(adapters) == 4 and all(p.grad.any() for name, p in adapters.items() if "lora_B" in name)
    with torch.no_grad():
        for p in adapters.values():
            p.normal_(std=0.02)
        expected = adapted.eval()(input_ids=ids).logits
        merged = adapted.merge_and_unload()
        assert torch.equal(merged(input_ids=ids).logits, expected)
    stacks = [p for p in merged.parameters() if p.dim() == 3]
    assert len(stacks) == 2 and all(isinstance(p, MasterWeightTensor) for p in stacks)
