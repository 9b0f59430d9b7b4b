"""
torchtitan
==========

torchtitan builds its models from a config. One additional line makes it convert the model. This tutorial converts
torchtitan's small Llama 3, and trains it for a few steps on the CPU.
"""

# %%
# From the command line
# ---------------------
#
# To convert the model in a training run, add one option to its command:
#
# .. code-block:: bash
#
#     torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b \
#         --override.imports torchao_blockwise.integrations.torchtitan.fp8
#
# Pass options as JSON: ``'torchao_blockwise.integrations.torchtitan.nvfp4={"keep_last_blocks": 0.15}'``.
#
# In a custom config
# ------------------
#
# ``model_registry`` accepts converters. torchtitan builds and converts the model on the meta device, where it takes no
# memory, and then shards and initializes it.

import logging

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.llama3 import model_registry

from torchao_blockwise import conversion_report
from torchao_blockwise.integrations.torchtitan import BlockwiseConverter

logging.disable(logging.INFO)


def build(converters):
    torch.manual_seed(0)
    spec = model_registry("debugmodel", converters=converters)
    spec.model.layers = spec.model.layers[:2]
    with torch.device("meta"):
        model = spec.model.build()
    model.to_empty(device="cpu")
    model.init_weights(buffer_device=torch.device("cpu"))
    return model


model = build([BlockwiseConverter.Config(format="fp8")])
print(conversion_report(model))

# %%
# Train
# -----
#
# torchtitan's trainer, and the backward pass of its attention, are made for GPUs. To run on a CPU, this tutorial uses a
# plain training loop and PyTorch's attention.


class Attention(nn.Module):
    def forward(self, q, k, v, **_):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def train(model, steps=8):
    for layer in model.layers.values():
        layer.attention.inner_attention = Attention()
    tokens = torch.randint(64, (4, 65), generator=torch.Generator().manual_seed(0))
    places = torch.arange(64).expand(4, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        logits = model(tokens[:, :-1], positions=places)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


print("fp8: ", [f"{loss:.3f}" for loss in train(model)])
print("fp32:", [f"{loss:.3f}" for loss in train(build(None))])

# %%
# Checkpoints contain plain tensors, so a run can resume with or without conversion. :doc:`/integrations` lists the
# options, and what was tested on several ranks.
