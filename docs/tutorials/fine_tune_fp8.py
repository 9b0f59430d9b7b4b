"""
Fine-tune a Qwen3-FP8 checkpoint
================================

Many models, such as ``Qwen/Qwen3-8B-FP8``, are published in FP8, as e4m3 weights with a scale for each block of
128×128. :func:`~torchao_blockwise.integrations.transformers.from_pretrained` reads such a folder and returns a
trainable model. This tutorial first trains adapters on the FP8 weights, and then all weights.
"""

# %%
# A checkpoint in FP8
# -------------------
#
# This tutorial downloads nothing. Instead, it writes a small Qwen3 with random weights, with the same file names,
# formats and settings as the published model. To use the real model, run
# ``folder = huggingface_hub.snapshot_download("Qwen/Qwen3-8B-FP8")``.

import json
import tempfile
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file
from torchao.quantization import quantize_

from torchao_blockwise import (
    BlockwiseFP8TrainingConfig,
    checkpoint,
    conversion_report,
    recommended_layers,
)
from torchao_blockwise.integrations.transformers import from_pretrained

transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()

temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name) / "Qwen3-FP8"
config = transformers.Qwen3Config(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    tie_word_embeddings=True,
)
torch.manual_seed(0)
published = transformers.Qwen3ForCausalLM(config).bfloat16()
quantize_(published, BlockwiseFP8TrainingConfig(), filter_fn=recommended_layers(published))
checkpoint.export(published, folder)

stored = load_file(folder / "model.safetensors")
for name in ("weight", "weight_scale_inv"):
    x = stored[f"model.layers.0.mlp.up_proj.{name}"]
    print(f"up_proj.{name}: {x.dtype}, {list(x.shape)}")
print(json.loads((folder / "config.json").read_text())["quantization_config"]["weight_block_size"])

# %%
# Train adapters on the FP8 weights
# ---------------------------------
#
# With ``trainable="adapters"``, the Parameters are the FP8 weights of the files, byte for byte. They are frozen, with
# one byte per element. Layers that are bf16 in the files stay in bf16, here the embedding and the head tied to it.

base = from_pretrained(folder, "fp8", trainable="adapters")
print(conversion_report(base))

# %%
# The following code is plain PEFT. You can also pass the model to ``Trainer`` or to TRL's ``SFTTrainer``.

text = torch.tensor(list(b"The base is in FP8, and adapters are plain. " * 16))
batch = text[: len(text) // 32 * 32].view(-1, 32)


def train(model, learning_rate, steps=12):
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=learning_rate)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")


model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules="all-linear"))
model.print_trainable_parameters()
train(model, learning_rate=1e-2)

# %%
# Training has not changed the base: without the adapters, it is exported with exactly the bytes of the original files.

adapters = Path(temporary.name) / "adapters"
model.save_pretrained(adapters)
checkpoint.export(model.unload(), Path(temporary.name) / "unchanged")
exported = load_file(Path(temporary.name) / "unchanged" / "model.safetensors")
print(all(torch.equal(exported[name].view(torch.uint8), x.view(torch.uint8)) for name, x in stored.items()))

# %%
# Merge and serve
# ---------------
#
# ``merge_and_unload`` adds the adapters to the decoded weights and quantizes the sum. ``checkpoint.export`` writes the
# result in the format of the published files, which vLLM, SGLang and transformers read.

base = from_pretrained(folder, "fp8", trainable="adapters")
merged = peft.PeftModel.from_pretrained(base, adapters).merge_and_unload()
checkpoint.export(merged, Path(temporary.name) / "merged")
print(f"loss {merged(input_ids=batch, labels=batch).loss.item():.2f}")

# %%
# Train all weights
# -----------------
#
# With ``trainable="full"``, the default, each converted weight has a master weight. It starts with the decoded values,
# which quantize to the codes of the files again. The first step therefore uses the published weights, and the optimizer
# updates them in high precision.

model = from_pretrained(folder, "fp8", dtype=torch.float32)
print(type(model.model.layers[0].mlp.up_proj.weight).__name__)
train(model, learning_rate=1e-3)

# %%
# The recipe can differ from the format of the files. ``from_pretrained(folder, "nvfp4")`` decodes the weights and
# trains in NVFP4, and warns that they are quantized again. With ``recipe=None``, weights are decoded, and nothing is
# converted. :doc:`/integrations` has the details, and shows how to shard a model before its weights are loaded.

temporary.cleanup()
