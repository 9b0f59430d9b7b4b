"""TRL's SFTTrainer trains a model that is loaded converted: the bits of one that `quantize_` converts."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8
from torchao.quantization import quantize_

from torchao_blockwise import NVFP4TrainingConfig, recommended_layers
from torchao_blockwise.testing import assert_bitwise_equal

trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers", "5.0")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

from torchao_blockwise.integrations import transformers as ours  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_interpreter")
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
ARGUMENTS = {
    "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
    "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_grad_norm": 0.0,
    "train_sampling_strategy": "sequential", "bf16": False, "gradient_checkpointing": False,
    "gradient_accumulation_steps": 1,
}  # fmt: skip


def tokenizer():
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(30))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture
def model_in(tmp_path):
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path / "plain")
    return lambda config: transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config
    )


@pytest.mark.parametrize(
    ("cls", "config"), ((ours.BlockwiseFP8Config, FP8), (ours.NVFP4Config, NVFP4TrainingConfig())), ids=("fp8", "nvfp4")
)
def test_it_trains_as_after_quantize(cls, config, model_in, tmp_path):
    text = [" ".join(f"w{(7 * row + i) % 30}" for i in range(8)) for row in range(4)]

    def trained(model, *callbacks):
        arguments = trl.SFTConfig(str(tmp_path), max_length=16, packing=False, **ARGUMENTS)
        data, words = datasets.Dataset.from_dict({"text": text}), tokenizer()
        trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=words, callbacks=list(callbacks)).train()
        return model.state_dict()

    by_hand = model_in(None)
    quantize_(by_hand, config, filter_fn=recommended_layers(by_hand, config))
    expected = trained(by_hand)
    plain = trained(model_in(None))
    for name, x in trained(model_in(cls()), ours.UnchangedWeights()).items():
        assert_bitwise_equal(x, expected[name], name)
        assert not torch.equal(x, plain[name])


@pytest.mark.parametrize("cls", (ours.BlockwiseFP8Config, ours.NVFP4Config), ids=("fp8", "nvfp4"))
@pytest.mark.parametrize("method", ("DPO", "GRPO"))
def test_references_must_be_converted_alike(method, cls, model_in, tmp_path):
    """Before the first update policy and reference are the same model only if both are converted."""
    rows, options, more = {"prompt": ["w1 w2 w3 "] * 4}, {"max_length": 16}, {}
    if method == "DPO":
        rows |= {"chosen": ["w4 w5"] * 4, "rejected": ["w6 w7"] * 4}
    else:
        options = {"beta": 0.1, "num_generations": 2, "max_completion_length": 4}
        more["reward_funcs"] = lambda completions, **_: [float(len(text)) for text in completions]
    config = cls(keep_last_blocks=0)

    def first(model_init_kwargs, **reference) -> float:
        """The margin or the divergence of the first step."""
        torch.manual_seed(0)
        made = {**options, **ARGUMENTS, "max_steps": 1, "logging_steps": 1, "model_init_kwargs": model_init_kwargs}
        trainer = getattr(trl, f"{method}Trainer")(
            model_in(config),
            args=getattr(trl, f"{method}Config")(str(tmp_path), **made),
            train_dataset=datasets.Dataset.from_dict(rows),
            processing_class=tokenizer(),
            **more,
            **reference,
        )
        trainer.train()
        return trainer.state.log_history[0]["rewards/margins" if method == "DPO" else "kl"]

    assert first(None) != 0.0
    assert first({"quantization_config": config}) == 0.0
    if method == "DPO":
        assert first(None, ref_model=model_in(config)) == 0.0
