"""Block-scaled formats as data, and the encoding of their elements."""

from torchao_blockwise.formats.block_format import FORMATS, BlockFormat, Scales, get_format, register_format
from torchao_blockwise.formats.elements import E2M1, E2M1_VALUES, E4M3, HIGH_PRECISION_DTYPES, Element
from torchao_blockwise.formats.fp8 import FP8_1X128, FP8_128X128
from torchao_blockwise.formats.hadamard import DEFAULT_SIGNS, HADAMARD_SIZE, hadamard_number, hadamard_transform
from torchao_blockwise.formats.nvfp4 import NVFP4_1X16, NVFP4_16X16, global_scale_of
from torchao_blockwise.formats.random_bits import Place, RoundingBits, StochasticRounding, block_bytes, key_of, philox
from torchao_blockwise.formats.values import CastOptions, Copies, Groups, Operand

__all__ = [
    "DEFAULT_SIGNS",
    "E2M1",
    "E2M1_VALUES",
    "E4M3",
    "FORMATS",
    "FP8_1X128",
    "FP8_128X128",
    "HADAMARD_SIZE",
    "HIGH_PRECISION_DTYPES",
    "NVFP4_1X16",
    "NVFP4_16X16",
    "BlockFormat",
    "CastOptions",
    "Copies",
    "Element",
    "Groups",
    "Operand",
    "Place",
    "RoundingBits",
    "Scales",
    "StochasticRounding",
    "block_bytes",
    "get_format",
    "global_scale_of",
    "hadamard_number",
    "hadamard_transform",
    "key_of",
    "philox",
    "register_format",
]
