"""
A mixture of experts
====================

A router sends each token to a few of many experts. The weights of all experts form one 3D Parameter, and a grouped GEMM
processes all experts at once. The same ``quantize_`` call converts them. This tutorial trains a small Qwen3-MoE from
transformers in fp32 and in FP8.
"""

# %%
# The model
# ---------
#
# With ``experts_implementation="grouped_mm"``, experts use PyTorch's grouped GEMM. You can also convert models with
# ``"eager"``, which runs one expert at a time.

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
# ``recommended_layers`` selects linear layers and experts. It leaves out the output head, and also routers, because a
# small error in a router can send a token to a different expert.

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
# The curves are close but not identical, because a small error may send a token to a different expert.
#
# Tokens of each expert
# ---------------------
#
# An expert may have any number of tokens, including none. Nothing is padded to a fixed size, and changes in routing do
# not cause recompilation.

router_logits = model(input_ids=batch).router_logits[0]
chosen = router_logits.topk(2, -1).indices
print("tokens of each expert:", torch.bincount(chosen.flatten(), minlength=8).tolist())

# %%
# In your own model, call ``F.grouped_mm``, or use ``permute``, ``SwiGLUExperts`` and ``unpermute``. The kernels of
# ``SwiGLUExperts`` quantize their results as they compute them. :doc:`/moe` describes both ways.
