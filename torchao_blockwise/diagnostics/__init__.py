"""Diagnostics: what is installed and runs here, and what training takes."""

from torchao_blockwise.diagnostics.doctor import Examination, examine

__all__ = [
    "Examination",
    "examine",
]
