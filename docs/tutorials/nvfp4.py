"""
NVFP4 step by step
==================

A four-bit element has only 15 different values. This tutorial shows how they can represent a gradient, and explains
each part of the ``NVFP4TrainingConfig`` recipe: blocks with scales, stochastic rounding, the Hadamard transform, and
layers that stay in bf16.
"""

# %%
# The element format
# ------------------
#
# An element (e2m1) has a sign, two exponent bits and one mantissa bit. This gives eight magnitudes:

import matplotlib.pyplot as plt
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import E2M1_VALUES, NVFP4_1X16

print(E2M1_VALUES)

# %%
# Scales map values to the range from -6 to 6. NVFP4 has an e4m3 scale (8 bits) for each block of 16 values, and one
# fp32 scale for the whole tensor. ``ops.quantize`` computes the payload and both scales.

torch.manual_seed(0)
x = torch.randn(32, 256)
q = ops.quantize(x, NVFP4_1X16).rowwise
print("payload, two values per byte:", tuple(q.qdata.shape), q.qdata.dtype)
print("block scales:              ", tuple(q.scale.shape), q.scale.dtype)
print("tensor scale:              ", q.global_scale)


def error(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()


print(f"relative error {error(ops.dequantize(q), x):.3f}")

# %%
# The steps between values are smallest near zero, and scale with the block. The figure shows the steps in a block whose
# largest value is 6:

line = torch.linspace(-6, 6, 1024 * 15).view(-1, 15)
# A 6 in each block fixes the block's scale.
blocks = torch.cat([line, torch.full((len(line), 1), 6.0)], 1)
stairs = ops.dequantize(ops.quantize(blocks, NVFP4_1X16).rowwise)[:, :15]
figure, axes = plt.subplots()
axes.plot(line.flatten(), stairs.flatten())
axes.plot([-6, 6], [-6, 6], linewidth=0.7, color="gray")
axes.set(title="Rounding to nearest in NVFP4", xlabel="value", ylabel="value in NVFP4")
plt.show()

# %%
# Stochastic rounding
# -------------------
#
# With rounding to nearest, 0.2 always becomes 0, because the neighboring values are 0 and 0.5. A gradient with many
# small values then loses all of them in every step, and the errors add up. Stochastic rounding rounds up with the
# probability that preserves the mean: 0.2 becomes 0.5 in two out of five cases.

values = torch.tensor([0.1, 0.2, 0.7, 1.3, 2.4, 3.3, 4.5, 6.0]).repeat(2)
rows = values.repeat(4096, 1)
nearest = ops.dequantize(ops.quantize(rows, NVFP4_1X16).rowwise)
chance = ops.StochasticRounding(seed=0, stream=0, use=0)
stochastic = ops.dequantize(ops.quantize(rows, NVFP4_1X16, stochastic=chance).rowwise)
print("value     ", [f"{v:.2f}" for v in values[:8].tolist()])
print("nearest   ", [f"{v:.2f}" for v in nearest.mean(0)[:8].tolist()])
print("stochastic", [f"{v:.2f}" for v in stochastic.mean(0)[:8].tolist()], "on average over 4096")

# %%
# A single stochastic rounding has a larger error, but its expected value is correct. The gradient of a weight is a sum
# over many tokens, in which positive and negative errors cancel. The figure shows the error of the mean of n roundings
# of a random gradient:

gradient = torch.randn(8, 256) * 0.3
counts = [1, 4, 16, 64, 256]
total, errors, at = torch.zeros_like(gradient), [], set(counts)
for use in range(max(counts)):
    drawn = ops.StochasticRounding(seed=0, stream=0, use=use)
    total += ops.dequantize(ops.quantize(gradient, NVFP4_1X16, stochastic=drawn).rowwise)
    if use + 1 in at:
        errors.append(error(total / (use + 1), gradient))
to_nearest = error(ops.dequantize(ops.quantize(gradient, NVFP4_1X16).rowwise), gradient)
figure, axes = plt.subplots()
axes.loglog(counts, errors, marker="o", label="stochastic")
axes.loglog(counts, [to_nearest] * len(counts), linestyle="--", label="to nearest")
axes.set(title="Error of the mean of n roundings", xlabel="n", ylabel="relative error")
axes.legend()
plt.show()

# %%
# ``use`` counts the backward passes of a layer, and ``stream`` is different for each layer. The random bits depend only
# on these numbers, the seed and the position of the element. A run is therefore reproducible bit for bit, on any device
# and on any number of GPUs.
#
# The Hadamard transform
# ----------------------
#
# The largest value of a block determines its scale. If it is an outlier, few steps are left for the other 15 values,
# and most of them become 0. For ``grad_weight``, the recipe therefore multiplies both operands, in chunks of 16 tokens,
# by an orthogonal 16 × 16 matrix, a *random Hadamard transform*. Every value becomes a signed sum of all values in its
# chunk, so an outlier is spread over the chunk. The result of the GEMM does not change, because (T·dy)ᵀ(T·x) = dyᵀx.

from torchao_blockwise.formats import hadamard_number, hadamard_transform

tokens, out_features, in_features = 1024, 64, 64
x = torch.randn(tokens, in_features)
dy = torch.randn(tokens, out_features)
# One value in 200 is an outlier.
is_outlier = torch.rand_like(dy) < 0.005
dy = torch.where(is_outlier, 20 * dy, dy)
transformed = hadamard_transform(dy, hadamard_number(True))

figure, (left, right) = plt.subplots(1, 2, sharey=True)
left.hist(dy.flatten(), bins=80, log=True)
left.set(title="A gradient with outliers", xlabel="value")
right.hist(transformed.flatten(), bins=80, log=True)
right.set(title="the same, transformed", xlabel="value")
plt.show()

# %%
# What happens to the ordinary values that share a chunk with an outlier? This code quantizes with and without the
# transform, decodes, transforms back, and counts the values that become zero.


def decoded(hadamard):
    copy = ops.quantize(dy, NVFP4_1X16, rowwise=False, columnwise=True, hadamard=hadamard).columnwise
    values = ops.dequantize(copy).T
    if not hadamard:
        return values
    matrix = hadamard_transform(torch.eye(16), hadamard_number(True))
    return torch.cat([matrix.T @ chunk for chunk in values.split(16)])


near_outlier = is_outlier.view(-1, 16, out_features).any(1).repeat_interleave(16, 0) & ~is_outlier
print("ordinary values next to outliers, exactly 0 after quantization:")
for hadamard in (False, True):
    zero = (decoded(hadamard)[near_outlier] == 0).float().mean().item()
    print(f"{'with' if hadamard else 'without'} the transform".ljust(22), f"{zero:4.0%}")

# %%
# Without the transform, many ordinary values become zero. With it, almost none do, but all of them become noisy.
#
# The parts combined
# ------------------
#
# The table shows the error of ``grad_weight``, relative to the exact result, for each combination of the two parts. The
# error of the mean over 16 steps shows which errors cancel:

exact = dy.T @ x


def grad_weight(use, hadamard, stochastic):
    drawn = ops.StochasticRounding(seed=0, stream=0, use=use) if stochastic else None
    options = {"rowwise": False, "columnwise": True, "padded": True, "hadamard": hadamard}
    a = ops.quantize(dy, NVFP4_1X16, stochastic=drawn, **options).columnwise
    b = ops.quantize(x, NVFP4_1X16, **options).columnwise
    return ops.matmul(a, b, out_dtype=torch.float32)


print(f"{'relative error':24}one step   mean of 16")
for hadamard in (False, True):
    for stochastic in (False, True):
        products = [grad_weight(use, hadamard, stochastic) for use in range(16)]
        name = " + ".join([*["Hadamard"] * hadamard, *["stochastic"] * stochastic]) or "to nearest"
        print(f"{name:24}{error(products[0], exact):8.3f}{error(torch.stack(products).mean(0), exact):12.3f}")

# %%
# Stochastic rounding makes a single step worse, but the mean over many steps better. The error that remains in the mean
# comes from ``x``, which is rounded to nearest. The transform does not improve this result, because outliers dominate
# it, and a block represents its largest value best. Its benefit is to preserve the many ordinary values. NVIDIA's paper
# found that this helps large models in long runs. ``NVFP4TrainingConfig(hadamard=False)`` trains without it.
#
# The recipe uses stochastic rounding only for gradients, and the transform only for ``grad_weight``.
#
# Convert a model
# ---------------
#
# ``NVFP4TrainingConfig`` does all of this by default. In the paper, the output head and about the last 15 % of the
# layers also stay in bf16. If you pass the config to ``recommended_layers``, it leaves out these layers.

from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import NVFP4TrainingConfig, conversion_report, recommended_layers


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(7))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


model = Model()
config = NVFP4TrainingConfig(seed=0)
quantize_(model, config, filter_fn=recommended_layers(model, config))
print(conversion_report(model))
loss = model(torch.randn(32, 64)).square().mean()
loss.backward()

# %%
# :doc:`monitor` measures the error of each layer of your model, and names the layers to keep in bf16. :doc:`/numerics`
# has all formulas. Source: `NVIDIA, Pretraining Large Language Models with NVFP4 <https://arxiv.org/abs/2509.25149>`__.
