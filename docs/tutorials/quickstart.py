"""
Quickstart
==========

Convert a small language model, train it in FP8, and compare the loss with the same model in bf16. This takes seconds on
a CPU. Quantized values are bitwise identical on CPUs and GPUs, but only GPUs are fast.
"""

# %%
# A model
# -------
#
# Any model with ``nn.Linear`` layers can be converted. This one reads bytes of text and predicts the next byte.

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, conversion_report, keep_last_blocks, recommended_layers

DIM, BLOCKS, LENGTH = 128, 2, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(256, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.lm_head = nn.Linear(DIM, 256, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


# %%
# Convert the model
# -----------------
#
# ``quantize_`` is torchao's function. The config selects the recipe, and the filter selects the layers, here all except
# the output head. The report has one line per layer.

torch.manual_seed(0)
model = Model()
quantize_(model, BlockwiseFP8TrainingConfig(), filter_fn=recommended_layers(model))
print(conversion_report(model))

# %%
# The columns "before" and "after" show the same number of bytes, because the Parameters stay in high precision for the
# optimizer. Each GEMM quantizes the weight that it reads. The names in the state dict do not change.
#
# You can combine filters. This one also leaves out the last block. ``dry_run`` reports the result without converting.

from torchao_blockwise import dry_run

other = Model()
print(dry_run(other, BlockwiseFP8TrainingConfig(), recommended_layers(other) & keep_last_blocks(other, 1)))

# %%
# Train
# -----
#
# The training loop does not change. The training text is Python's standard library.

library = Path(argparse.__file__).parent
text = torch.tensor(list(b"".join(file.read_bytes() for file in sorted(library.glob("[a-c]*.py")))))


def batch(step):
    starts = torch.randint(len(text) - LENGTH - 1, (16,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def train(model, steps=60):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(steps):
        tokens, targets = batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


curves = {"fp8": train(model)}

# %%
# Compare with bf16
# -----------------
#
# The initial weights (from the same seed) and the batches are the same.

torch.manual_seed(0)
curves["bf16"] = train(Model())
for name, losses in curves.items():
    print(f"{name}: loss {losses[0]:.4f} -> {sum(losses[-10:]) / 10:.4f}")

figure, axes = plt.subplots()
for name, losses in curves.items():
    axes.plot(losses, label=name, linestyle="--" if name == "bf16" else "-")
axes.set(title="Training loss in bf16 and in FP8", xlabel="step", ylabel="nats per byte")
axes.legend()
plt.show()

# %%
# The two curves are almost identical. :doc:`/results/train_llm_nvidia_h200` shows curves of longer runs on GPUs.
#
# Save
# ----
#
# As before the conversion, the state dict contains plain tensors under the same names. A plain model can load it, and a
# converted model can load the state dict of a plain model.

plain = Model()
plain.load_state_dict(model.state_dict())
print(type(model.layers[0].up.weight).__name__, "->", type(plain.layers[0].up.weight).__name__)

# %%
# Next
# ----
#
# - :doc:`/recipes` helps you choose between FP8 and NVFP4, and select the layers to convert.
# - On a GPU, compile the model with ``torch.compile``: :doc:`/compile`.
# - :doc:`trainer` fine-tunes a Hugging Face model, and :doc:`fsdp2` trains on several GPUs.
