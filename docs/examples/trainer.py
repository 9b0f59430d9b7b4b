"""Fine-tune a model of transformers in blockwise FP8 with Trainer, and save it as a plain one.

pip install "torchao_blockwise[models]"; python docs/examples/trainer.py      # offline, seconds on a CPU
"""

import tempfile

import torch
import transformers

from torchao_blockwise import conversion_report
from torchao_blockwise.integrations.transformers import BlockwiseFP8Config, UnchangedWeights

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        # In the place of a model that was downloaded.
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=BlockwiseFP8Config())
        print(conversion_report(model))

        text = torch.tensor(list(b"Blocks of 128 share a scale. " * 64))
        rows = [{"input_ids": row, "labels": row} for row in text[: len(text) // 32 * 32].view(-1, 32)]
        args = transformers.TrainingArguments(
            folder,
            max_steps=8,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        )
        # Each weight is quantized once for both microbatches of a step.
        trainer = transformers.Trainer(model, args, train_dataset=rows, callbacks=[UnchangedWeights()])
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss {float(losses[0]):.2f} -> {float(losses[-1]):.2f}")
        model.save_pretrained(folder)


if __name__ == "__main__":
    main()
