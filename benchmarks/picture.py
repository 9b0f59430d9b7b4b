"""How pictures look, and how they are written. Raises ImportError where matplotlib is missing."""

from __future__ import annotations

import io
import os
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

INK, FAINT, GRID = "#22262b", "#6b7280", "#e5e7eb"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def entitle(figure, ax, title: str, subtitle: str) -> None:
    """The title of the figure, and what it shows above its first axes."""
    figure.suptitle(title, x=0.015, ha="left", fontsize=14, fontweight="bold")
    ax.set_title(subtitle, loc="left", fontsize=10, color=FAINT, pad=10)


def save(figure, path: Path) -> None:
    """Write the figure as PNG, whole or not at all, and close it."""
    image = io.BytesIO()
    figure.savefig(image, dpi=160, format="png", facecolor="white")
    plt.close(figure)
    temporary = path.with_suffix(".png.tmp")
    temporary.write_bytes(image.getvalue())
    os.replace(temporary, path)
