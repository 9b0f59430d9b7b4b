"""Quantization of tokens in groups: its reference. The operation is that of ops/quantization."""
