"""
Write a new format
==================

A format consists of the shape of a block, the element type, and a function that computes a block's scale from its
largest value. Once it is registered, every operation supports it. This tutorial defines FP8 formats with different
block lengths, and measures the effect of the block length.
"""

# %%
# Blocks of 32
# ------------

import matplotlib.pyplot as plt
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import E4M3, FORMATS, BlockFormat, Scales, register_format


def scales(block_amax, tensor_amax, power_of_2_scales):
    """Map the largest value of a block to the largest e4m3 value, 448."""
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
print(f"relative error of the GEMM {((y - x @ w.T).norm() / (x @ w.T).norm()):.3f}")

# %%
# There is no kernel for this format, so the reference implementation runs, in eager PyTorch on any device. To add a
# Triton kernel, see :doc:`/extending`.
#
# Effect of the block length
# --------------------------
#
# This experiment counts how many values of a tensor with outliers become zero, for different block lengths. One value
# in ten thousand is an outlier, 30,000 times larger than the others.

lengths = (16, 32, 64, 128, 512, 4096)
values = torch.randn(64, 4096)
outlier = torch.rand_like(values) < 1e-4
values = torch.where(outlier, 30_000 * values, values)
lost = []
for length in lengths:
    made = fp8_1x32 if length == 32 else fp8_format(length)
    decoded = ops.dequantize(ops.quantize(values, made).rowwise)
    lost.append((decoded == 0).float().mean().item() * 100)
    print(f"blocks of {length:4}: {8 + 32 / length:5.2f} bits per value, {lost[-1]:5.2f} % become zero")

figure, axes = plt.subplots()
axes.semilogx(lengths, lost, marker="o", base=2)
axes.set(title="Values that become zero, by block length", xlabel="values that share a scale", ylabel="%")
plt.show()

# %%
# In a longer block, an outlier turns more values into zeros, but scales take less space. With blocks of 128, as in
# DeepSeek-V3, a 32-bit scale costs a quarter of a bit per value.
#
# Remove the formats of this experiment:

for length in lengths:
    del FORMATS[f"my_fp8_1x{length}"]

# %%
# Next: :doc:`/extending` shows how to add a complete format and a kernel, and :doc:`/numerics` specifies the formats of
# this package.
