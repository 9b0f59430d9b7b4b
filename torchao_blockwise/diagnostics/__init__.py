"""Diagnostics: which backends run here, how much memory training takes, and the error of low precision."""

from torchao_blockwise._names import refusing_removed
from torchao_blockwise.diagnostics.doctor import Examination, examine
from torchao_blockwise.diagnostics.memory import MemoryReport, memory_report
from torchao_blockwise.diagnostics.monitor import NumericsMonitor
from torchao_blockwise.diagnostics.records import GradientReport, Recommendation, Report, TensorReport
from torchao_blockwise.diagnostics.writers import CSVWriter, HTMLWriter, Writer

__all__ = [
    "CSVWriter",
    "Examination",
    "GradientReport",
    "HTMLWriter",
    "MemoryReport",
    "NumericsMonitor",
    "Recommendation",
    "Report",
    "TensorReport",
    "Writer",
    "examine",
    "memory_report",
]

# {name that version 0.2 removed: what to use instead}
_REMOVED = {
    "TensorBoardWriter": "NumericsMonitor(.., writers=[SummaryWriter(folder)])",
    "WandbWriter": "NumericsMonitor(.., writers=[wandb.init()])",
}
__getattr__ = refusing_removed(__name__, _REMOVED)
