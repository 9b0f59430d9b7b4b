"""Diagnostics: what low precision does to a model's numbers while it trains."""

from torchao_blockwise.diagnostics.html_page import HTMLWriter
from torchao_blockwise.diagnostics.monitor import NumericsMonitor
from torchao_blockwise.diagnostics.records import GradientReport, Recommendation, Report, TensorReport
from torchao_blockwise.diagnostics.writers import CSVWriter, TensorBoardWriter, WandbWriter, Writer

__all__ = [
    "CSVWriter",
    "GradientReport",
    "HTMLWriter",
    "NumericsMonitor",
    "Recommendation",
    "Report",
    "TensorBoardWriter",
    "TensorReport",
    "WandbWriter",
    "Writer",
]
