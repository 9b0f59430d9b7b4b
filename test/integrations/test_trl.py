"""TRL's trainers on converted models: SFT as after `quantize_`, and references that equal the policy."""

import re
from pathlib import Path

import pytest
import torch
from helpers import FP8, assert_same_tensors, both_masters, converted
from torchao.quantization import quantize_

from torchao_blockwise import NVFP4TrainingConfig, recommended_layers
from torchao_blockwise.tensors import QuantizedTensor
from torchao_blockwise.testing import assert_bitwise_equal

trl = pytest.importorskip("trl", "1.16")
transformers = pytest.importorskip("transformers", "5.0")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

from torchao_blockwise.integrations import transformers as ours  # noqa: E402

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
ARGUMENTS = {
    "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
    "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_grad_norm": 0.0,
    "train_sampling_strategy": "sequential", "bf16": False, "gradient_checkpointing": False,
    "gradient_accumulation_steps": 1, "logging_steps": 1,
}  # fmt: skip
# Each method's options, and the logged value that is 0 if policy and reference are equal.
METHODS = {
    "DPO": ({"max_length": 16}, "rewards/margins"),
    "GRPO": ({"num_generations": 2, "max_completion_length": 4}, "kl"),
}
PROMPTS = [f"w{i} w{i + 3} w{2 * i} " for i in range(8)]
ROWS = {
    "DPO": {
        "prompt": PROMPTS,
        "chosen": [f"w{i + 1} w{i + 5} w3" for i in range(8)],
        "rejected": [f"w{i + 9} w{i}" for i in range(8)],
    },
    "GRPO": {"prompt": PROMPTS},
}
RECIPES = {
    "fp8": (ours.BlockwiseFP8Config, FP8),
    "nvfp4": (ours.NVFP4Config, NVFP4TrainingConfig()),
}
every_method = pytest.mark.parametrize("method", METHODS)
both_recipes = pytest.mark.parametrize("recipe", RECIPES)


def tokenizer():
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(30))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def reward(completions, **_):
    return [float(len(text)) for text in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("trl") / "plain"
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(path)
    return str(path)


def policy_of(folder, recipe, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return converted(model, type(RECIPES[recipe][1])(**options), recommended_layers(model))


def hf_config(recipe, **options):
    return RECIPES[recipe][0](keep_last_blocks=0, **options)


def trainer_of(method, model, folder, *, more=None, **options):
    torch.manual_seed(0)
    more = {"reward_funcs": reward} | (more or {}) if method == "GRPO" else more or {}
    options = METHODS[method][0] | ARGUMENTS | ({"beta": 0.1} if method == "GRPO" else {}) | options
    return getattr(trl, f"{method}Trainer")(
        model,
        args=getattr(trl, f"{method}Config")(f"{folder}_out", **options),
        train_dataset=datasets.Dataset.from_dict(ROWS[method]),
        processing_class=tokenizer(),
        **more,
    )


def differences(method, *args, **options) -> list[float]:
    trainer = trainer_of(method, *args, **options)
    trainer.train()
    return logged(method, trainer)


def logged(method, trainer) -> list[float]:
    name = METHODS[method][1]
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@both_recipes
def test_it_trains_as_after_quantize(recipe, folder, tmp_path):
    text = [" ".join(f"w{(7 * row + i) % 30}" for i in range(8)) for row in range(4)]

    def trained(model, *callbacks):
        arguments = trl.SFTConfig(str(tmp_path), max_length=16, packing=False, **ARGUMENTS)
        data, words = datasets.Dataset.from_dict({"text": text}), tokenizer()
        trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=words, callbacks=list(callbacks)).train()
        return model.state_dict()

    def load(config):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)

    cls, config = RECIPES[recipe]
    by_hand = load(None)
    quantize_(by_hand, config, filter_fn=recommended_layers(by_hand, config))
    expected = trained(by_hand)
    plain = trained(load(None))
    for name, x in trained(load(cls()), ours.UnchangedWeights()).items():
        assert_bitwise_equal(x, expected[name], name)
        assert not torch.equal(x, plain[name])


@both_recipes
@both_masters
@pytest.mark.parametrize("given", ("peft_config", "PeftModel"))
@every_method
def test_lora_needs_no_reference(method, given, masters, recipe, folder):
    """TRL disables new adapters, or copies those of a PeftModel, which need not be zero."""
    peft = pytest.importorskip("peft")
    model = policy_of(folder, recipe, master_weights=masters)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=given == "peft_config")
    more = {"peft_config": lora} if given == "peft_config" else {}
    before = {name: x.clone() for name, x in model.state_dict().items()}
    trainer = trainer_of(method, model if more else peft.get_peft_model(model, lora), folder, more=more)
    assert trainer.ref_model is None
    trainer.train()
    steps = logged(method, trainer)
    assert steps[0] == 0.0 != steps[1]
    assert_same_tensors(trainer.model.unload().state_dict(), before)


@both_recipes
@every_method
def test_a_synchronized_reference_follows_the_policy(method, recipe, folder):
    options = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    config = {"model_init_kwargs": {"quantization_config": hf_config(recipe)}}
    assert differences(method, policy_of(folder, recipe), folder, **config)[1] != 0.0
    more = {"callbacks": [ours.UnchangedWeights()]}
    assert differences(method, policy_of(folder, recipe), folder, more=more, **config, **options) == [0.0, 0.0]
    config = {"model_init_kwargs": {"quantization_config": hf_config(recipe, master_weights=False)}}
    with pytest.raises(NotImplementedError, match=r"q_proj.weight.*keep high-precision weights \(master_weights=True"):
        differences(method, policy_of(folder, recipe), folder, **config, **options)


def code_of(page: str, section: str) -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", re.search(rf"^## {section}\n(.*?)^## ", text, re.S | re.M)[1], re.S)


@every_method
def test_the_page(method, folder):
    [example] = [code for code in code_of("integrations.md", "TRL") if f"{method}Trainer" in code]
    # GRPO's policy is an object, so that `folder` must not be needed.
    names = {
        "options": {"output_dir": f"{folder}_out", **METHODS[method][0], **ARGUMENTS},
        "dataset": datasets.Dataset.from_dict(ROWS[method]),
        "tokenizer": tokenizer(),
        "reward": reward,
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    names |= {"folder": folder} if method == "DPO" else {"model": model}
    exec(compile(example, "integrations.md", "exec"), names)
    steps = logged(method, names["trainer"])
    assert steps[0] == 0.0 != steps[1]
    weights = names["trainer"].ref_model.parameters()
    assert any(isinstance(weight, QuantizedTensor) for weight in weights) == (method == "GRPO")
