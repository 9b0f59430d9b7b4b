"""Checkpoints in the formats of inference engines, which hold the same quantized weights that training used."""

from torchao_blockwise.checkpoint.checking import checksum, checksums
from torchao_blockwise.checkpoint.reading import load
from torchao_blockwise.checkpoint.writing import export, quantized_weights

__all__ = ["checksum", "checksums", "export", "load", "quantized_weights"]
