"""GEMMs of two quantized operands: `plain`, and `grouped` by expert. They share kernels, in a file for each backend."""

from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16

# (format of a, format of b) that kernels support: a has one-row blocks.
FP8_PAIRS = {(FP8_1X128.name, FP8_128X128.name), (FP8_1X128.name, FP8_1X128.name)}
NVFP4_PAIRS = {(NVFP4_1X16.name, NVFP4_16X16.name), (NVFP4_1X16.name, NVFP4_1X16.name)}
KERNEL_PAIRS = FP8_PAIRS | NVFP4_PAIRS
