"""transformers with our quantization configs, offline: load, train, save, load again, merge adapters."""

import json

import pytest
import torch
from helpers import FP8, assert_same_tensors, both_masters, converted, replace
from torchao.quantization import quantize_

from torchao_blockwise import (
    NVFP4TrainingConfig,
    conversion_report,
    fusion_report,
    linears_and_experts,
    skip_lm_head,
)
from torchao_blockwise.tensors import QuantizedTensor
from torchao_blockwise.testing import assert_bitwise_equal

transformers = pytest.importorskip("transformers", "5.0")

from monitored import Monitored  # noqa: E402

from torchao_blockwise.integrations import transformers as ours  # noqa: E402

both = pytest.mark.parametrize(
    ("cls", "config"), ((ours.BlockwiseFP8Config, FP8), (ours.NVFP4Config, NVFP4TrainingConfig())), ids=("fp8", "nvfp4")
)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = torch.arange(8)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(path)
    return path


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def by_quantize(folder, config):
    return converted(load(folder), config, linears_and_experts() & skip_lm_head())


def trainer(model, folder, steps, callbacks=()):
    from trainer_checks import arguments, rows

    args = arguments(folder, max_steps=steps)
    return transformers.Trainer(model, args, train_dataset=rows(16), callbacks=list(callbacks))


@both
@both_masters
def test_memory_footprints_count_payload_and_scales(cls, config, masters, folder):
    model = load(folder, dtype=torch.bfloat16)
    plain = model.get_memory_footprint()
    quantize_(model, replace(config, master_weights=masters), filter_fn=linears_and_experts() & skip_lm_head())
    own = [p for p in model.parameters() if isinstance(p, QuantizedTensor)]
    saved = sum(2 * p.numel() - sum(x.nbytes for x in p.operand().tensors if x is not None) for p in own)
    assert model.get_memory_footprint() == plain - saved
    assert (saved == 0) is masters
    assert model.get_memory_footprint(return_buffers=False) == plain - saved - sum(x.nbytes for x in model.buffers())


@both
@both_masters
def test_loads_converted_and_remembers_the_recipe(cls, config, masters, folder, tmp_path):
    """The model is that of `quantize_` after loading. It is saved plain, and loads converted, or in a plain model."""
    model = load(folder, quantization_config=cls(master_weights=masters, out_dtype="float32", backend="reference"))
    expected = by_quantize(
        folder, replace(config, master_weights=masters, out_dtype=torch.float32, backend="reference")
    )
    assert conversion_report(model).totals == conversion_report(expected).totals
    assert_bitwise_equal(model(TOKENS).logits.detach(), expected(TOKENS).logits.detach())
    assert all(p.requires_grad for p in model.parameters())
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert saved["quant_method"] == cls.method and saved["master_weights"] is masters
    again = load(tmp_path)
    assert again.hf_quantizer.quantization_config.training_config == model.config.quantization_config.training_config
    assert_bitwise_equal(again(TOKENS).logits.detach(), expected(TOKENS).logits.detach())
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    from safetensors.torch import load_file

    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_same_tensors(plain.state_dict(), model.state_dict())


@both
@both_masters
@pytest.mark.parametrize("tied", (False, True), ids=("untied", "tied"))
def test_a_model_that_quantize_converts_is_saved_plain(cls, config, masters, tied, tmp_path):
    config = replace(config, master_weights=masters)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied))
    quantize_(model, config, filter_fn=skip_lm_head())
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert all(type(p) is torch.nn.Parameter for p in again.parameters())
    quantize_(again, config, filter_fn=skip_lm_head())
    assert_bitwise_equal(again(TOKENS).logits.detach(), model(TOKENS).logits.detach())


def test_saves_the_state_dict_that_it_is_given(folder, tmp_path):
    """Trainer passes one that it gathered from all ranks. The next save without one writes the model's values."""
    model = load(folder, quantization_config=ours.BlockwiseFP8Config())
    given = {name: x + 1 for name, x in model.state_dict().items()}
    for arguments, options in (((True, dict(given)), {}), ((), {"state_dict": dict(given)})):
        model.save_pretrained(tmp_path, *arguments, **options)
        assert_same_tensors(load(tmp_path).state_dict(), given)
        model.save_pretrained(tmp_path)
        assert_same_tensors(load(tmp_path).state_dict(), model.state_dict())


@both_masters
def test_a_torchao_config_is_refused(masters, folder, caplog):
    """transformers collects the errors of layers in a report, and then raises another one."""
    transformers.utils.logging.enable_propagation()
    try:
        with pytest.raises(RuntimeError, match="automatic conversion"):
            load(folder, quantization_config=transformers.TorchAoConfig(replace(FP8, master_weights=masters)))
    finally:
        transformers.utils.logging.disable_propagation()
    assert "use quantization_config=BlockwiseFP8Config(...) from torchao_blockwise.integrations" in caplog.text


def test_dequantize_gives_the_plain_model_back(folder):
    model, plain = load(folder, quantization_config=ours.BlockwiseFP8Config()), load(folder)
    model.dequantize()
    assert not conversion_report(model).totals["converted"] and not hasattr(model.config, "quantization_config")
    assert_bitwise_equal(model(TOKENS).logits.detach(), plain(TOKENS).logits.detach())


def test_what_is_converted(folder):
    """Named modules stay plain; by default only the head does. `fuse=False` leaves fusion out."""
    model = load(folder, quantization_config=ours.BlockwiseFP8Config())
    assert [layer.fqn for layer in conversion_report(model).layers if layer.status != "converted"] == ["lm_head"]
    assert fusion_report(model).to_dict()["fused"] == 2
    config = ours.BlockwiseFP8Config(["lm_head", r"model.layers.*.mlp"], fuse=False)
    some = load(folder, quantization_config=config)
    left = [layer.fqn for layer in conversion_report(some).layers if layer.status != "converted"]
    assert left == [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")] + ["lm_head"]
    for unfused in (some, load(folder, quantization_config=ours.BlockwiseFP8Config.from_dict(config.to_dict()))):
        assert fusion_report(unfused).to_dict()["fused"] == 0


def test_nvfp4_keeps_the_last_blocks(tmp_path):
    """15 % of three blocks is one. A saved config keeps the option."""
    sizes = SIZES | {"num_hidden_layers": 3}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path)
    for given, wanted in {None: {"2"}, 2: {"1", "2"}, 0: set()}.items():
        model = load(tmp_path, quantization_config=ours.NVFP4Config(keep_last_blocks=given))
        model.save_pretrained(tmp_path / str(given))
        for one in (model, load(tmp_path / str(given))):
            rows = [x.fqn for x in conversion_report(one).layers if x.status != "converted"]
            assert {fqn.split(".")[2] for fqn in rows if "layers" in fqn} == wanted


@both
def test_trainer_is_the_steps_by_hand(cls, config, folder, tmp_path):
    """With gradient accumulation in `weights_unchanged` and a monitor, bitwise identical, also after resuming."""
    monitored, model = Monitored(), load(folder, quantization_config=cls())
    callbacks = [ours.UnchangedWeights(), ours.Numerics(monitored.make), ours.RecipeState()]
    trainer(model, tmp_path, 4, callbacks).train()
    monitored.check(steps=[0, 2], layers=7)

    from trainer_checks import rows

    by_hand = by_quantize(folder, config).train()
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-2, weight_decay=0.0)
    microbatches = torch.stack([row["input_ids"] for row in rows(16)]).split(2)
    for first, second in zip(microbatches[::2], microbatches[1::2]):
        for ids in (first, second):
            by_hand(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(2 * 2 * 7)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_tensors(model.state_dict(), by_hand.state_dict())

    resumed = load(folder, quantization_config=cls())
    trainer(resumed, tmp_path, 4, [ours.UnchangedWeights(), ours.RecipeState()]).train(str(tmp_path / "checkpoint-2"))
    assert_same_tensors(resumed.state_dict(), by_hand.state_dict())


def test_a_training_that_failed_leaves_no_scope(folder, tmp_path):
    """The next training with the same callback enters a new scope."""

    class Fails(transformers.TrainerCallback):
        def on_substep_end(self, *args, **kwargs):
            raise KeyError("on purpose")

    callback, model = ours.UnchangedWeights(), load(folder, quantization_config=ours.BlockwiseFP8Config())
    with pytest.raises(KeyError, match="on purpose"):
        trainer(model, tmp_path, 1, [callback, Fails()]).train()
    before = model.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
    trainer(model, tmp_path, 1, [callback]).train()
    assert not torch.equal(before, model.state_dict()["model.layers.0.mlp.up_proj.weight"])


@both
@both_masters
def test_merged_adapters_are_converted_as_their_base(cls, config, masters, folder):
    """PEFT reads the recipe from the config of the loaded base."""
    peft = pytest.importorskip("peft")
    base = load(folder, quantization_config=cls(master_weights=masters))
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False))
    merged = adapted.merge_and_unload().model.layers[0].self_attn.q_proj.weight
    assert merged.config == replace(config, master_weights=masters)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    (
        ({"save_activation": "fp8"}, TypeError, "did you mean 'save_activations'"),
        ({"modules_to_not_convert": "lm_head"}, TypeError, "must be a list of names"),
        ({"out_dtype": "bfloat61"}, ValueError, "out_dtype must be"),
        ({"backend": "tritonn"}, ValueError, "tritonn"),
    ),
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        ours.BlockwiseFP8Config(**options)


def test_what_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: none of the 8 .* was converted; widen the filter"):
        load(folder, quantization_config=ours.BlockwiseFP8Config(["lm_head", "model.layers"]))
    load(folder, quantization_config=ours.BlockwiseFP8Config()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="quantized with BlockwiseFP8Config but you are passing a NVFP4Config"):
        load(tmp_path, quantization_config=ours.NVFP4Config())
    with pytest.raises(ValueError, match="attach trainable adapters"):
        trainer(load(folder, quantization_config=ours.NVFP4Config(master_weights=False)), tmp_path, 1)
