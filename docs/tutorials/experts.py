"""
A mixture of experts
====================

Each token goes to few of many experts. Their weights are 3D Parameters, multiplied in one grouped product; the same
``quantize_`` call converts them. Here a small Qwen3-MoE of transformers trains in fp32 and in FP8.
"""

# %%
# The model
# ---------
#
# ``experts_implementation="grouped_mm"`` takes PyTorch's grouped product, which can be converted; ``"eager"``, expert
# by expert, can be too.

import matplotlib.pyplot as plt
import torch
import transformers
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, conversion_report, recommended_layers

transformers.logging.set_verbosity_error()
config = transformers.Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=128,
    moe_intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    experts_implementation="grouped_mm",
    output_router_logits=True,
)


def make_model():
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config)


# %%
# Convert
# -------
#
# ``recommended_layers`` selects linear layers and experts. It leaves out the output head, and routers: a router's small
# errors would send tokens elsewhere.

model = make_model()
quantize_(model, BlockwiseFP8TrainingConfig(), filter_fn=recommended_layers(model))
print(conversion_report(model))

# %%
# Train
# -----

text = torch.tensor(list(b"Eight experts, two for each token, and nobody asks the host how many tokens one has. " * 12))
batch = text[: len(text) // 32 * 32].view(-1, 32)


def train(model, steps=20):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


curves = {"fp8": train(model), "fp32": train(make_model())}
for name, losses in curves.items():
    print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")

figure, axes = plt.subplots()
for name, losses in curves.items():
    axes.plot(losses, label=name, linestyle="--" if name == "fp32" else "-")
axes.set(title="Training loss of a mixture of experts, in fp32 and in FP8", xlabel="step", ylabel="loss")
axes.legend()
plt.show()

# %%
# The curves are close. A router's choice is one or the other, so a small error may send a token to another expert.
#
# How tokens are spread
# ---------------------
#
# Experts may have any number of tokens, none too: nothing is padded to a size, and routing that changes recompiles
# nothing.

router_logits = model(input_ids=batch).router_logits[0]
chosen = router_logits.topk(2, -1).indices
print("tokens of each expert:", torch.bincount(chosen.flatten(), minlength=8).tolist())

# %%
# A model of your own writes ``F.grouped_mm``, or takes the layers ``permute``, ``SwiGLUExperts`` and ``unpermute``,
# which quantize as they compute: both are in :doc:`/moe`.
