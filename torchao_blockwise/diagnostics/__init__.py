"""Diagnostics: which backends run here, how much memory training takes, and the error of low precision."""

from torchao_blockwise.diagnostics.doctor import Examination, examine
from torchao_blockwise.diagnostics.memory import MemoryReport, memory_report
from torchao_blockwise.diagnostics.monitor import NumericsMonitor
from torchao_blockwise.diagnostics.records import GradientReport, Recommendation, Report, TensorReport
from torchao_blockwise.diagnostics.writers import CSVWriter, HTMLWriter, TensorBoardWriter, WandbWriter, Writer

__all__ = [
    "CSVWriter",
    "Examination",
    "GradientReport",
    "HTMLWriter",
    "MemoryReport",
    "NumericsMonitor",
    "Recommendation",
    "Report",
    "TensorBoardWriter",
    "TensorReport",
    "WandbWriter",
    "Writer",
    "examine",
    "memory_report",
]
