"""Where reports go: CSV, TensorBoard, Weights & Biases; html_page.py has the page."""

from __future__ import annotations

import csv
import importlib
import math
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from torchao_blockwise.diagnostics.records import Report, TensorReport


class Writer(Protocol):
    """What takes reports."""

    def write(self, report: Report) -> None: ...

    def close(self) -> None: ...


def writable_file(writer: str, path: str | os.PathLike[str]) -> Path:
    """`path`, whose folder is made if need be; raises ValueError if nothing can be written there."""
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # To append changes nothing, and fails where writing would.
        existed = file.exists()
        with file.open("a", encoding="utf-8"):
            pass
        if not existed:
            file.unlink()
    except OSError as e:
        raise ValueError(f"{writer}: cannot write {file}: {e.strerror}; choose another path") from e
    return file


def optional(writer: str, module: str, package: str) -> Any:
    """A module of a package that is not installed with this one."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise ImportError(f"{writer}: needs the package {package}; pip install {package}, or use CSVWriter") from e


class CSVWriter:
    """A row for each tensor of each report; a file that exists is continued.

    Columns are the fields of `TensorReport` and `gradient_to_noise` of the layer; `histogram` reads "e:blocks ...".
    Raises ValueError where the file cannot be written.
    """

    columns = ("step", *(field.name for field in fields(TensorReport)), "gradient_to_noise")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = writable_file("CSVWriter", path)

    def write(self, report: Report) -> None:
        is_new = not self.path.exists() or not self.path.stat().st_size
        noise = {(g.layer, g.recipe): g.to_noise for g in report.gradients}
        with self.path.open("a", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            if is_new:
                rows.writerow(self.columns)
            for tensor in report.tensors:
                values = [_cell(getattr(tensor, field.name)) for field in fields(TensorReport)]
                rows.writerow([report.step, *values, _cell(noise.get((tensor.layer, tensor.recipe), math.nan))])

    def close(self) -> None: ...


def _cell(value: Any) -> Any:
    if isinstance(value, dict):
        return " ".join(f"{e}:{blocks}" for e, blocks in value.items())
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if value is None else value


def scalars(report: Report) -> Iterator[tuple[str, float]]:
    """(tag, figure) of what trains, and of the least SQNR of each layer under each other recipe.

    "numerics/gradient_to_noise", "sqnr_db/layers.0.up/dy rowwise", "what_if/nvfp4/layers.0.up", ..
    """
    yield "numerics/gradient_to_noise", report.gradient_to_noise
    yield "numerics/nonfinite", float(sum(t.nonfinite for t in report.tensors if t.trains))
    for tensor in report.tensors:
        if tensor.trains:
            where = f"{tensor.layer}/{tensor.kind}"
            for name in ("sqnr_db", "cosine", "amax", "underflow", "saturated"):
                yield f"{name}/{where}", getattr(tensor, name)
    for gradient in report.gradients:
        if gradient.layer and gradient.trains:
            yield f"gradient_to_noise/{gradient.layer}", gradient.to_noise
    for recipe in dict.fromkeys(t.recipe for t in report.tensors if not t.trains):
        for layer, sqnr in report.what_if(recipe).items():
            yield f"what_if/{recipe}/{layer}", sqnr


class TensorBoardWriter:
    """Scalars and, of what trains, histograms of block scales (log2) in a TensorBoard folder.

    Raises ImportError without the package tensorboard, ValueError where the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        module = optional("TensorBoardWriter", "torch.utils.tensorboard", "tensorboard")
        writable_file("TensorBoardWriter", Path(folder) / "events")
        self._writer = module.SummaryWriter(str(folder))

    def write(self, report: Report) -> None:
        for tag, value in scalars(report):
            self._writer.add_scalar(tag, value, report.step)
        for tensor in report.tensors:
            if tensor.trains and tensor.histogram:
                self._add_histogram(f"scale_log2/{tensor.layer}/{tensor.kind}", tensor.histogram, report.step)
        self._writer.flush()

    def _add_histogram(self, tag: str, histogram: dict[int, int], step: int) -> None:
        middles = [(e + 0.5, blocks) for e, blocks in histogram.items()]
        self._writer.add_histogram_raw(
            tag,
            min=min(histogram),
            max=max(histogram) + 1,
            num=sum(histogram.values()),
            sum=sum(middle * blocks for middle, blocks in middles),
            sum_squares=sum(middle * middle * blocks for middle, blocks in middles),
            bucket_limits=[e + 1 for e in histogram],
            bucket_counts=list(histogram.values()),
            global_step=step,
        )

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Scalars, to a run of Weights & Biases: the one that the program has begun, or a new one by `wandb.init(**init)`.

    Raises ImportError without the package wandb.
    """

    def __init__(self, run: Any = None, **init: Any) -> None:
        wandb = optional("WandbWriter", "wandb", "wandb")
        self._is_own = run is None and wandb.run is None
        self._run = run or wandb.run or wandb.init(**init)

    def write(self, report: Report) -> None:
        # By a step of its own: W&B refuses steps that are not larger than the last one, and the program logs too.
        self._run.log({"numerics/step": report.step, **dict(scalars(report))})

    def close(self) -> None:
        if self._is_own:
            self._run.finish()
