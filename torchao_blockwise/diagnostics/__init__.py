"""Diagnostics: what is installed and runs here, and what training takes."""

from torchao_blockwise.diagnostics.doctor import Examination, examine
from torchao_blockwise.diagnostics.memory import MemoryReport, memory_report

__all__ = [
    "Examination",
    "MemoryReport",
    "examine",
    "memory_report",
]
