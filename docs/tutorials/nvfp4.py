"""
NVFP4 step by step
==================

Four bits have sixteen values. This tutorial shows what they do to a gradient, and what each part of the recipe of
``NVFP4TrainingConfig`` is for: blocks with scales, stochastic rounding, the Hadamard transform, and layers that stay
in bf16.
"""

# %%
# Sixteen values
# --------------
#
# An element, e2m1, has a sign, two bits of exponent and one of mantissa. That makes eight magnitudes:

import matplotlib.pyplot as plt
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import E2M1_VALUES, NVFP4_1X16

print(E2M1_VALUES)

# %%
# So values need a scale that brings them into the range of -6 to 6. NVFP4 has one for each 16 values, in e4m3 (8
# bits), and one for the whole tensor, in fp32. ``ops.quantize`` makes all three.

torch.manual_seed(0)
x = torch.randn(32, 256)
q = ops.quantize(x, NVFP4_1X16).rowwise
print("payload, two values a byte:", tuple(q.qdata.shape), q.qdata.dtype)
print("block scales:              ", tuple(q.scale.shape), q.scale.dtype)
print("tensor scale:              ", q.global_scale)


def error(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()


print(f"relative error {error(ops.dequantize(q), x):.3f}")

# %%
# The steps are finest near zero. Each block has a staircase of its own; this is that of one block whose largest value
# is 6:

line = torch.linspace(-6, 6, 1024 * 15).view(-1, 15)
# A 6 in each block fixes the block's scale.
blocks = torch.cat([line, torch.full((len(line), 1), 6.0)], 1)
stairs = ops.dequantize(ops.quantize(blocks, NVFP4_1X16).rowwise)[:, :15]
figure, axes = plt.subplots()
axes.plot(line.flatten(), stairs.flatten())
axes.plot([-6, 6], [-6, 6], linewidth=0.7, color="gray")
axes.set(title="Rounding to nearest: what a value becomes", xlabel="value", ylabel="in NVFP4")
plt.show()

# %%
# Rounding by chance
# ------------------
#
# Rounded to nearest, a value of 0.2 between 0 and 0.5 is always 0. A gradient of many small values then loses them
# all, at every step, in the same direction. Stochastic rounding goes up with the probability that keeps the mean: 0.2
# becomes 0.5 in two of five cases.

values = torch.tensor([0.1, 0.2, 0.7, 1.3, 2.4, 3.3, 4.5, 6.0]).repeat(2)
rows = values.repeat(4096, 1)
nearest = ops.dequantize(ops.quantize(rows, NVFP4_1X16).rowwise)
chance = ops.StochasticRounding(seed=0, stream=0, use=0)
stochastic = ops.dequantize(ops.quantize(rows, NVFP4_1X16, stochastic=chance).rowwise)
print("value     ", [f"{v:.2f}" for v in values[:8].tolist()])
print("nearest   ", [f"{v:.2f}" for v in nearest.mean(0)[:8].tolist()])
print("stochastic", [f"{v:.2f}" for v in stochastic.mean(0)[:8].tolist()], "in the mean of 4096")

# %%
# Each single rounding is worse, and the mean is right. In a sum over many tokens, as the gradient of a weight is,
# errors that are as often up as down cancel. Here is the error of the mean of n roundings of a random gradient:

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
# ``use`` counts how often a layer has drawn bits, ``stream`` tells layers apart. The bits follow from these numbers
# and from the place of the element, and from nothing else: a run repeats bit for bit, on any device and split over any
# number of GPUs.
#
# Spreading outliers
# ------------------
#
# A block's scale follows its largest value. Beside an outlier the other 15 values have few steps left: most become 0.
# For the gradient of the weight the recipe multiplies both operands, along the tokens, by an orthogonal matrix of 16 ×
# 16, a *random Hadamard transform*: every value of a chunk becomes a sum of all of them with signs, so an outlier is
# spread over the chunk. The product stays the same, because (Tx)ᵀ(T·dy) = xᵀdy.

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
# What happens to the ordinary values that share a chunk with an outlier? Quantize with and without the transform,
# decode, transform back, and look at them alone.


def decoded(hadamard):
    copy = ops.quantize(dy, NVFP4_1X16, rowwise=False, columnwise=True, hadamard=hadamard).columnwise
    values = ops.dequantize(copy).T
    if not hadamard:
        return values
    matrix = hadamard_transform(torch.eye(16), hadamard_number(True))
    return torch.cat([matrix.T @ chunk for chunk in values.split(16)])


beside = is_outlier.view(-1, 16, out_features).any(1).repeat_interleave(16, 0) & ~is_outlier
print("ordinary values beside outliers, exactly 0 after quantization:")
for hadamard in (False, True):
    zero = (decoded(hadamard)[beside] == 0).float().mean().item()
    print(f"{'with' if hadamard else 'without'} the transform".ljust(22), f"{zero:4.0%}")

# %%
# Without the transform many ordinary values are lost; with it nearly none is, and each has noise instead.
#
# All together
# ------------
#
# ``grad_weight`` with each part switched on by itself, against the exact product; and the mean of 16 such products,
# which shows what cancels:

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
# Stochastic rounding makes a single step worse and the mean of many better; what remains in the mean is the error of
# ``x``, which is rounded to nearest. The transform makes this product no better: the outliers are most of it, and a
# block holds its largest value best. What it keeps are the many ordinary values. NVIDIA's paper found that to help
# large models in long runs; ``NVFP4TrainingConfig(hadamard=False)`` is training without it, and :doc:`monitor` a way
# to see the difference in your model.
#
# The recipe has each part where it helps: stochastic rounding in gradients alone, the transform in ``grad_weight``
# alone.
#
# In a model
# ----------
#
# All of that is the default. Paper and recipe keep about 15 % of the layers, the last ones, in bf16, and the head too.
# ``recommended_layers`` does the same where it is called with the config.

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
# :doc:`monitor` measures what each layer of your model loses, and names those to keep in bf16. :doc:`/numerics` has
# every formula. Source: `NVIDIA, Pretraining Large Language Models with NVFP4 <https://arxiv.org/abs/2509.25149>`__.
