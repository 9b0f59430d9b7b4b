"""
Fine-tune with Hugging Face's Trainer
=====================================

``from_pretrained`` loads and converts a model, ``Trainer`` trains it, and ``save_pretrained`` writes plain weights.
This tutorial uses a small Llama with random weights, so nothing is downloaded. Replace its folder with the name of your
model.
"""

# %%
# Load and convert
# ----------------

import tempfile

import torch
import transformers

from torchao_blockwise import conversion_report
from torchao_blockwise.integrations.transformers import BlockwiseFP8Config, UnchangedWeights

transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()

folder = tempfile.TemporaryDirectory()
config = transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
)
torch.manual_seed(0)
transformers.LlamaForCausalLM(config).save_pretrained(folder.name)

model = transformers.AutoModelForCausalLM.from_pretrained(folder.name, quantization_config=BlockwiseFP8Config())
print(conversion_report(model))

# %%
# The output projection, and modules that the model keeps in fp32, are not converted. To choose the excluded layers
# yourself, pass ``modules_to_not_convert=[...]``. q, k and v share one quantization of their input (:doc:`/fusion`).
#
# Train
# -----
#
# Each step has two microbatches. The weights do not change between them, so ``UnchangedWeights`` quantizes each weight
# only once for both.

text = torch.tensor(list(b"Blocks of 128 share a scale. " * 64))
rows = [{"input_ids": row, "labels": row} for row in text[: len(text) // 32 * 32].view(-1, 32)]
arguments = transformers.TrainingArguments(
    folder.name,
    max_steps=12,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
)
trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[UnchangedWeights()])
trainer.train()

# %%
# The losses:

losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")

# %%
# Save
# ----
#
# The files contain plain weights, and ``config.json`` contains the recipe. If you import
# ``torchao_blockwise.integrations.transformers``, ``from_pretrained`` converts the model again. Otherwise, it loads a
# plain model.

model.save_pretrained(folder.name)
again = transformers.AutoModelForCausalLM.from_pretrained(folder.name)
weight = again.model.layers[0].mlp.up_proj.weight
print(type(weight).__name__, torch.equal(weight, model.model.layers[0].mlp.up_proj.weight))
folder.cleanup()

# %%
# For NVFP4, use ``NVFP4Config``, and add the callback ``RecipeState()``, so that runs can be resumed bit for bit.
# :doc:`/integrations` covers accelerate, Lightning and torchtitan, and lists what was tested on several ranks.
