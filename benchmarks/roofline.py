"""Rooflines: what this GPU reaches in this run, the least time that a job can take, and the picture of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timing import Timing, input_sets, time_runs

_COPY_BYTES, _SMOKE_COPY_BYTES = 2**30, 2**20
_WIDTH, _SMOKE_WIDTH = 8192, 128


@dataclass(frozen=True)
class Ceilings:
    """Measured rates that nothing of its kind exceeds by much.

    copy: TB/s of a large device copy, bytes read plus bytes written. bf16, fp8: TFLOP/s of a large product through
    cuBLASLt, fp8 with one scale a tensor; fp8 is bf16's where fp8 cannot be measured.
    """

    copy: float
    bf16: float
    fp8: float

    def floor_us(self, nbytes: int, flops: int = 0, peak: str = "fp8") -> float:
        """Least microseconds of a job: max(nbytes / copy, flops / peak)."""
        return max(nbytes / (self.copy * 1e6), flops / (getattr(self, peak) * 1e6))

    def speedup(self, flops: int, quantized_bytes: int) -> float:
        """How many times faster than in bf16 `flops` are in fp8, with so many bytes moved to quantize operands."""
        return (flops / self.bf16) / (flops / self.fp8 + quantized_bytes / self.copy)

    def as_dict(self) -> dict:
        return asdict(self)


# Of the data sheets, without sparsity; by what a GPU's name holds.
# Source: NVIDIA H200 and H100 Tensor Core GPU data sheets (SXM).
SPECIFICATIONS = {
    "H200": Ceilings(copy=4.8, bf16=989.5, fp8=1979.0),
    "H100 80GB HBM3": Ceilings(copy=3.35, bf16=989.5, fp8=1979.0),
}


def specification(device_name: str) -> Ceilings | None:
    """What the maker says of this GPU; None where that is not in `SPECIFICATIONS`."""
    return next((ceilings for name, ceilings in SPECIFICATIONS.items() if name in device_name), None)


def measure_ceilings(device: torch.device, *, smoke: bool = False) -> Ceilings:
    """Measure the ceilings on random data; raises RuntimeError where copy or bf16 fails."""
    size, width = (_SMOKE_COPY_BYTES, _SMOKE_WIDTH) if smoke else (_COPY_BYTES, _WIDTH)

    def random(rows, columns):
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)

    copies = input_sets(lambda: (random(size // 2048, 1024),), device, 2 * size)
    products = input_sets(lambda: (random(width, width), random(width, width)), device, 6 * width**2)
    # By the driver and by a kernel, whichever is faster: in a CUDA graph the driver's is the slower one on an H200.
    runs = {"copy": (torch.clone, copies), "copy by a kernel": (torch.neg, copies)}
    runs |= {"bf16": (lambda a, b: a @ b.t(), products)}
    runs["fp8"] = tensorwise, [(*to_tensorwise(a), *to_tensorwise(b)) for a, b in products]
    times = time_runs(runs, device, seconds=0.1)
    for name in ("copy", "bf16"):
        if isinstance(times[name], str):
            raise RuntimeError(f"measure_ceilings: {name} failed: {times[name]}")
    flops = 2 * width**3
    rates = {name: flops / t.us / 1e6 for name, t in times.items() if isinstance(t, Timing)}
    copy = min(t.us for name, t in times.items() if "copy" in name and isinstance(t, Timing))
    return Ceilings(copy=2 * size / copy / 1e6, bf16=rates["bf16"], fp8=rates.get("fp8", rates["bf16"]))


def to_tensorwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` in e4m3 with one scale: (qdata, contiguous; decode scale)."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = x.abs().amax().float() / largest
    return (x / scale).clamp(-largest, largest).to(torch.float8_e4m3fn).contiguous(), scale


def tensorwise(a, a_scale, b, b_scale) -> torch.Tensor:
    """a · bᵀ of e4m3 operands with one scale each, through cuBLASLt at its fastest."""
    recipe = F.ScalingType.TensorWise
    return F.scaled_mm(a, b.t(), a_scale, recipe, b_scale, recipe, output_dtype=torch.bfloat16, use_fast_accum=True)


class Series(NamedTuple):
    """Points of one name in the picture: (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]
    ours: bool


def picture(results, title: str, *columns: str, ours: Callable[[str], bool] = bool, subtitle: str = "") -> dict:
    """What `draw` takes: rates of a report's rows, a series for each value of `columns` and one for each peer.

    Rows are over the bytes that they move, or over operations a byte where they have any. ours: which series are ours.
    """
    x, y = ("intensity", "TFLOP/s") if "TFLOP/s" in results.rows[0] else ("MiB", "TB/s")
    points: dict[str, list[tuple[float, float]]] = {}
    peers: dict[str, set[tuple[float, float]]] = {}
    for row in results.rows:
        points.setdefault(", ".join(row[column] for column in columns), []).append((row[x], row[y]))
        for name, us in row.get("peers us", {}).items():
            peers.setdefault(name, set()).add((row[x], row[y] * row["us"] / us))
    series = [Series(name, rates, ours(name)) for name, rates in points.items()]
    series += [Series(name, sorted(rates), False) for name, rates in sorted(peers.items())]
    c, flat = results.ceilings, math.inf
    roofs = {"fp8 tensorwise, cuBLASLt": (c.copy, c.fp8), "bf16": (c.copy, c.bf16)}
    return {
        "title": title,
        "subtitle": f"{results.device_name} · {subtitle or 'cold cache, random data'}",
        "series": series,
        "roofs": roofs if x == "intensity" else {"device copy": (flat, c.copy)},
        "labels": ("operations a byte that must move" if x == "intensity" else "MiB that must move", y),
    }


def draw(
    path: Path,
    title: str,
    subtitle: str,
    series: Sequence[Series],
    roofs: Mapping[str, tuple[float, float]],
    labels: tuple[str, str],
) -> bool:
    """Draw points below their roofs, y = min(slope · x, top); False where matplotlib is missing, which is said.

    roofs: name -> (slope, top); a slope of inf is a flat roof. labels: of x, logarithmic, and of y.
    """
    try:
        from picture import FAINT, STYLE, entitle, plt, save
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
        return False
    xs = [x for s in series for x, _ in s.points]
    if not xs:
        return False
    low, high = min(xs) / 1.5, max(xs) * 1.5
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(9, 5.2), layout="constrained")
        for i, (name, (slope, top)) in enumerate(roofs.items()):
            knee = top / slope
            corners = (low, min(max(knee, low), high), high)
            ax.plot(corners, [min(slope * x, top) if math.isfinite(slope) else top for x in corners],
                    color=FAINT, linewidth=1.4, linestyle=["-", (0, (4, 2)), (0, (1, 2))][i % 3])  # fmt: skip
            ax.annotate(name, (high, top), (-4, 4), textcoords="offset points", ha="right", fontsize=9, color=FAINT)
        for s in series:
            x, y = zip(*s.points) if s.points else ((), ())
            ax.scatter(
                x, y, s=46 if s.ours else 26, marker="o" if s.ours else "x", label=s.name, zorder=3, linewidth=1.2
            )
        ax.set_xscale("log", base=2)
        ax.set_xlim(low, high)
        ax.set_ylim(0, 1.1 * max([top for _, top in roofs.values()] + [y for s in series for _, y in s.points]))
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        ax.set_xlabel(labels[0])
        ax.set_ylabel(labels[1])
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
        entitle(figure, ax, title, subtitle)
        save(figure, path)
    return True
