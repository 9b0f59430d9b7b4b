"""What a benchmark leaves behind: a table as it runs, and a JSON, a Markdown table and a picture in results/."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import environment
import roofline
import torch
from errors import reason

RESULTS = Path(__file__).resolve().parent / "results"
MISSING = "-"
# Places that a reason names.
_PLACES = 4


class Report:
    """The rows of one benchmark, printed as they come.

    name: of the files. columns: what the table shows, in order; rows may hold more, which goes to the JSON alone.
    A row's numbers are µs, TFLOP/s, TB/s or ratios, as the column says; None where there is nothing.
    with_energy: whether rows have joules, "J", behind their rate or time.
    """

    def __init__(self, name: str, device: torch.device, columns: Sequence[str], arguments: Mapping):
        self.name, self.device, self.columns = name, device, list(columns)
        self.arguments = {name: plain(value) for name, value in arguments.items()}
        self.with_energy = bool(self.arguments.get("energy"))
        if self.with_energy:
            before = "TFLOP/s" if "TFLOP/s" in self.columns else "ms a step"
            self.columns.insert(self.columns.index(before) + 1, "J")
        self.device_name = environment.device_name(device)
        self.environment = environment.environment(device)
        self.rows: list[dict] = []
        # Markdown that stands below the table.
        self.sections: list[str] = []
        self._amended = False
        self.left_out: dict[tuple[str, str], list[str]] = {}
        self.ceilings: roofline.Ceilings | None = None

    def measure_ceilings(self) -> None:
        """Measure and print them; all floors of this run come from them."""
        self.ceilings = c = roofline.measure_ceilings(self.device, smoke=self.arguments["smoke"])
        print(f"{self.device_name}: copy {c.copy:.3g} TB/s, bf16 {c.bf16:.4g} TFLOP/s, ", end="")
        print(f"fp8 tensorwise {c.fp8:.4g} TFLOP/s\n")

    def add(self, row: Mapping, after: Mapping | None = None) -> None:
        """Print a row under the header, which comes before the first.

        after: the row behind which this one stands in the files; without it the last one.
        """
        if not self.rows:
            print(markdown(self.columns, [], left=2))
        places = [i for i, other in enumerate(self.rows) if other is after]
        self.rows.insert(places[0] + 1 if places else len(self.rows), dict(row))
        print(_line(self._cells(row)), flush=True)
        self._save_what_is_there()

    def amend(self, row: dict, more: Mapping) -> None:
        """Give one of `rows` columns that were not known when it was added; `write` prints the whole table then."""
        row |= more
        self._amended = True
        self._save_what_is_there()

    def leave_out(self, name: str, where: str, why: str | Exception) -> None:
        """Say below the table that `name` has no figure for `where`, and why."""
        why = why if isinstance(why, str) else reason(why)
        self.left_out.setdefault((name, why), []).append(where)

    def attempt(self, name: str, where: str, call: Callable, *arguments):
        """What `call` returns; None where it fails, for which `name` is left out."""
        try:
            return call(*arguments)
        except Exception as error:
            self.leave_out(name, where, error)
            return None

    def notes(self) -> list[str]:
        """A line for each reason why something has no figure."""
        lines = []
        for (name, why), places in self.left_out.items():
            more = f" and {len(places) - _PLACES} more" if len(places) > _PLACES else ""
            lines.append(f"{name}: {why} ({', '.join(places[:_PLACES])}{more})")
        return lines

    def table(self) -> str:
        """The rows and what has none as Markdown."""
        table = markdown(self.columns, map(self._cells, self.rows), left=2)
        return "\n".join([table, *[""] * bool(self.left_out), *(f"- {note}" for note in self.notes())])

    def write(self, folder: Path, picture: Mapping | None = None) -> None:
        """<name>_<device>.json and .md in `folder`, and .png of `roofline.draw(**picture)`."""
        path = self._save(folder)
        written = [".json", ".md"]
        if picture and roofline.draw(path.with_suffix(".png"), **picture):
            written.append(".png")
        if self._amended:
            print(f"\n{self.table()}\n")
        else:
            print("\n".join(["", *(f"- {note}" for note in self.notes())]))
        print(f"wrote {path}{', '.join(written)}")

    def _cells(self, row: Mapping) -> list[str]:
        return [_text(row.get(column)) for column in self.columns]

    def _save_what_is_there(self) -> None:
        # A run that is cut short has measured so much.
        if self.arguments.get("out"):
            self._save(Path(self.arguments["out"]))

    def _save(self, folder: Path) -> Path:
        content = {
            "environment": self.environment,
            "arguments": self.arguments,
            "ceilings": self.ceilings.as_dict() if self.ceilings else None,
            "rows": self.rows,
            "left out": [{"what": name, "why": why, "where": w} for (name, why), w in self.left_out.items()],
        }
        text = "\n\n".join([self.table(), *self.sections])
        return save(folder, f"{self.name}_{environment.slug(self.device)}", content, text)


def save(folder: Path, name: str, content: Mapping, table: str) -> Path:
    """Write <name>.json and <name>.md; returns their path without a suffix."""
    environment.write_json(folder / f"{name}.json", dict(content))
    environment.write_text(folder / f"{name}.md", table + "\n")
    return folder / name


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table of these cells, the first `left` columns aligned to the left."""
    rule = "|".join("---" if i < left else "--:" for i in range(len(columns)))
    head = _line(columns).replace("|  |", "| |")
    return "\n".join([head, f"|{rule}|", *map(_line, rows)])


def plain(value):
    """An argument as a JSON holds it."""
    # A shape is a tuple that reads better as text.
    if isinstance(value, Path) or hasattr(value, "_fields"):
        return str(value)
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(value) -> str:
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
