"""
LoRA on an FP8 base
===================

LoRA trains adapters and does not change the base, so the base does not need high-precision values. With
``master_weights=False``, its Parameters are FP8 tensors with one byte per parameter, or NVFP4 tensors with half a byte.
"""

# %%
# Load the base in FP8
# --------------------

import tempfile

import peft
import torch
import transformers

from torchao_blockwise import conversion_report
from torchao_blockwise.integrations.transformers import BlockwiseFP8Config

transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()

config = transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
)
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    # Stands for a downloaded model.
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BlockwiseFP8Config(master_weights=False)
    )
print(conversion_report(base))

# %%
# The weights were in fp32, so they now take about a quarter of the bytes.
#
# Add adapters and train them
# ---------------------------
#
# The rest of the code is plain PEFT.

model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]))
model.print_trainable_parameters()

text = torch.tensor(list(b"Adapters are plain, the base is FP8. " * 16))
batch = text[: len(text) // 32 * 32].view(-1, 32)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
losses = []
for _ in range(12):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")

# %%
# Merge
# -----
#
# ``merge_and_unload`` adds the adapters to the decoded weights and quantizes the sum. This rounds the merged weights to
# FP8, so the loss may change slightly.

before = model(input_ids=batch, labels=batch).loss.item()
merged = model.merge_and_unload()
after = merged(input_ids=batch, labels=batch).loss.item()
print(type(merged.model.layers[0].self_attn.q_proj.weight).__name__, f"loss {before:.4f}, merged {after:.4f}")

# %%
# To merge without this rounding, use a base with master weights (``BlockwiseFP8Config()``), or call
# :func:`~torchao_blockwise.unconvert` first. :doc:`/saving` covers adapters of experts. :doc:`/integrations` compares
# the memory with bitsandbytes' NF4.
