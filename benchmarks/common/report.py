"""The report of a benchmark: a table as it runs, and a JSON and a Markdown table in results/."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from common import environment, roofline
from common.errors import reason

RESULTS = Path(__file__).resolve().parents[1] / "results"
MISSING = "-"


class Report:
    """The rows of one benchmark, printed and saved as they come, so that an interrupted run keeps its rows.

    name: of the files. columns: what the table shows, in order; rows may hold more, which only the JSON has.
    A row's numbers are µs, TFLOP/s, TB/s or ratios, as the column says; None where there is nothing.
    """

    def __init__(self, name: str, device: torch.device, columns: Sequence[str], arguments: Mapping):
        self.name, self.device, self.columns = name, device, list(columns)
        self.arguments = {name: plain(value) for name, value in arguments.items()}
        self.device_name = environment.device_name(device)
        self.environment = environment.environment(device)
        self.rows: list[dict] = []
        # Markdown that stands below the table.
        self.sections: list[str] = []
        self.left_out: dict[tuple[str, str], list[str]] = {}
        self.ceilings: roofline.Ceilings | None = None

    def measure_ceilings(self) -> None:
        """Measure and print them; all floors of this run come from them."""
        self.ceilings = c = roofline.measure_ceilings(self.device, smoke=self.arguments["smoke"])
        print(f"{self.device_name}: copy {c.copy:.3g} TB/s, bf16 {c.bf16:.4g} TFLOP/s, ", end="")
        print(f"fp8 tensorwise {c.fp8:.4g} TFLOP/s\n")

    def add(self, row: Mapping) -> None:
        """Print a row, the first one under the header, and save what is there."""
        if not self.rows:
            print(markdown(self.columns, [], left=2))
        self.rows.append(dict(row))
        print(f"| {' | '.join(self._cells(row))} |", flush=True)
        if self.arguments.get("out"):
            self._save(Path(self.arguments["out"]))

    def leave_out(self, name: str, where: str, why: str | Exception) -> None:
        """Say below the table that `name` has no figure for `where`, and why."""
        why = why if isinstance(why, str) else reason(why)
        self.left_out.setdefault((name, why), []).append(where)

    def attempt(self, name: str, where: str, call: Callable, *arguments):
        """Return what `call` returns; None where it fails, for which `name` is left out."""
        try:
            return call(*arguments)
        except Exception as error:
            self.leave_out(name, where, error)
            return None

    def notes(self) -> list[str]:
        """A line for each reason why something has no figure."""
        return [f"- {name}: {why} ({', '.join(places)})" for (name, why), places in self.left_out.items()]

    def write(self, folder: Path) -> Path:
        """<name>_<device>.json and .md in `folder`; returns their path without a suffix."""
        print("\n".join(["", *self.notes()]))
        path = self._save(folder)
        print(f"wrote {path}.json, .md")
        return path

    def _cells(self, row: Mapping) -> list[str]:
        return [_text(row.get(column)) for column in self.columns]

    def _save(self, folder: Path) -> Path:
        content = {
            "environment": self.environment,
            "arguments": self.arguments,
            "ceilings": self.ceilings and self.ceilings._asdict(),
            "rows": self.rows,
            "left out": [{"what": name, "why": why, "where": w} for (name, why), w in self.left_out.items()],
        }
        table = [markdown(self.columns, map(self._cells, self.rows), left=2), *[""] * bool(self.left_out)]
        text = "\n\n".join(["\n".join([*table, *self.notes()]), *self.sections])
        return save(folder, f"{self.name}_{environment.slug(self.device)}", content, text)


def save_rows(args: Namespace, name: str, device: torch.device, rows: object, table: str) -> None:
    """Print the table, and write it with its rows and the arguments."""
    print(table)
    shape = {k: v for k, v in vars(args).items() if k not in ("out", "smoke", "only")}
    save(args.out, name, {"shape": shape, "environment": environment.environment(device), "rows": rows}, table)


def save(folder: Path, name: str, content: Mapping, table: str) -> Path:
    """Write <name>.json and <name>.md; returns their path without a suffix."""
    environment.write_json(folder / f"{name}.json", dict(content))
    environment.write_text(folder / f"{name}.md", table + "\n")
    return folder / name


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table, the first `left` columns aligned to the left."""
    rule = "|".join("---" if place < left else "--:" for place in range(len(columns)))
    return "\n".join([f"| {' | '.join(columns)} |", f"|{rule}|", *(f"| {' | '.join(cells)} |" for cells in rows)])


def plain(value):
    """An argument as a JSON holds it."""
    # A shape is a tuple that reads better as text.
    if isinstance(value, Path) or hasattr(value, "_fields"):
        return str(value)
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _text(value) -> str:
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
