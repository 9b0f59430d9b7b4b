"""Checkpoints in the formats of inference engines: the quantized weights that trained, written and read as they are."""

from torchao_blockwise.checkpoint.checking import checksum, checksums
from torchao_blockwise.checkpoint.reading import load
from torchao_blockwise.checkpoint.writing import export, quantized_weights

__all__ = ["checksum", "checksums", "export", "load", "quantized_weights"]
