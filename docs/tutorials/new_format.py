"""
Write a new format
==================

A format is data: the shape of a block, the element, and how scales follow from the largest value of a block. Once it
is registered, every operation computes it. Here are FP8 formats with other blocks, to see what a block is worth.
"""

# %%
# A block of 32
# -------------

import matplotlib.pyplot as plt
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import E4M3, FORMATS, BlockFormat, Scales, register_format


def scales(block_amax, tensor_amax, power_of_2_scales):
    """The largest value of a block becomes the largest e4m3, 448."""
    encode = E4M3.max / block_amax.clamp(min=1e-12)
    return Scales(encode=encode, scale=1 / encode, global_scale=None)


def fp8_format(length):
    return register_format(
        BlockFormat(
            name=f"my_fp8_1x{length}",
            element=E4M3,
            block=(1, length),
            scale_dtype=torch.float32,
            compute_scales=scales,
        )
    )


fp8_1x32 = fp8_format(32)
torch.manual_seed(0)
x, w = torch.randn(64, 512), torch.randn(96, 512)
a, b = (ops.quantize(t, fp8_1x32).rowwise for t in (x, w))
print(a.format_name, tuple(a.qdata.shape), "scales", tuple(a.scale.shape))

y = ops.matmul(a, b, out_dtype=torch.float32)
print(f"relative error of the product {((y - x @ w.T).norm() / (x @ w.T).norm()):.3f}")

# %%
# No kernel knows it, so the reference computes it, in eager PyTorch on any device. A Triton kernel is a function and a
# row in a table: :doc:`/extending` adds one.
#
# What a block is worth
# ---------------------
#
# How much of a tensor with outliers becomes zero, for blocks of any length? Values here are ordinary, and one in ten
# thousand is 30,000 times larger.

lengths = (16, 32, 64, 128, 512, 4096)
values = torch.randn(64, 4096)
outlier = torch.rand_like(values) < 1e-4
values = torch.where(outlier, 30_000 * values, values)
lost = []
for length in lengths:
    made = fp8_1x32 if length == 32 else fp8_format(length)
    decoded = ops.dequantize(ops.quantize(values, made).rowwise)
    lost.append((decoded == 0).float().mean().item() * 100)
    print(f"blocks of {length:4}: {8 + 32 / length:5.2f} bits a value, {lost[-1]:5.2f} % become zero")

figure, axes = plt.subplots()
axes.semilogx(lengths, lost, marker="o", base=2)
axes.set(title="Values that outliers turn to zero, by length of block", xlabel="values that share a scale", ylabel="%")
plt.show()

# %%
# The longer the block, the more values an outlier takes along. At 128, as DeepSeek-V3 trains, a scale of 32 bits costs
# a quarter of a bit a value.
#
# These formats are not to stay:

for length in lengths:
    del FORMATS[f"my_fp8_1x{length}"]

# %%
# A format of which models are to train needs square blocks for weights, so that the transposed copy is exact; then a
# config may name it. :doc:`/extending` says where, :doc:`/numerics` is what a format's definition looks like in full.
