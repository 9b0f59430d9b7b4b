"""What a benchmark leaves behind: a table as it runs, and a JSON, a Markdown table and a picture in results/."""

from __future__ import annotations

import argparse
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

import environment
import roofline
import shapes
import torch
from roofline import Series
from timing import Timing

RESULTS = Path(__file__).resolve().parent / "results"
MISSING = "-"
# Shapes that a reason names.
_PLACES = 4


class Report:
    """The rows of one benchmark, printed as they come.

    name: of the files. columns: what the table shows, in order; rows may hold more, which goes to the JSON alone.
    A row's numbers are µs, TFLOP/s, TB/s or ratios, as the column says; None where there is nothing.
    """

    def __init__(self, name: str, device: torch.device, columns: Sequence[str], arguments: Mapping):
        self.name, self.device, self.columns, self.arguments = name, device, list(columns), dict(arguments)
        self.device_name = environment.device_name(device)
        self.environment = environment.environment(device)
        self.rows: list[dict] = []
        self._amended = False
        self.left_out: dict[tuple[str, str], list[str]] = {}
        self.ceilings: roofline.Ceilings | None = None

    def measure_ceilings(self, *, smoke: bool) -> roofline.Ceilings:
        """Measure and print them; all floors of this run come from them."""
        self.ceilings = c = roofline.measure_ceilings(self.device, smoke=smoke)
        print(f"{self.device_name}: copy {c.copy:.3g} TB/s, bf16 {c.bf16:.4g} TFLOP/s, ", end="")
        print(f"fp8 tensorwise {c.fp8:.4g} TFLOP/s\n")
        return c

    def add(self, row: Mapping, after: Mapping | None = None) -> None:
        """Print a row under the header, which comes before the first.

        after: the row behind which this one stands in the files; without it the last one.
        """
        if not self.rows:
            print("\n".join(_head(self.columns)))
        places = [i for i, other in enumerate(self.rows) if other is after]
        self.rows.insert(places[0] + 1 if places else len(self.rows), dict(row))
        print(_line([_text(row.get(c)) for c in self.columns]), flush=True)
        self._save_what_is_there()

    def amend(self, row: dict, more: Mapping) -> None:
        """Give one of `rows` columns that were not known when it was added; `write` prints the whole table then."""
        row |= more
        self._amended = True
        self._save_what_is_there()

    def leave_out(self, name: str, where: str, why: str) -> None:
        """Say below the table that `name` has no figure for `where`, and why."""
        self.left_out.setdefault((name, why), []).append(where)

    def notes(self) -> list[str]:
        """A line for each reason why something has no figure."""
        lines = []
        for (name, why), places in self.left_out.items():
            more = f" and {len(places) - _PLACES} more" if len(places) > _PLACES else ""
            lines.append(f"{name}: {why} ({', '.join(places[:_PLACES])}{more})")
        return lines

    def table(self) -> str:
        """Everything as Markdown."""
        lines = [*_head(self.columns), *(_line([_text(row.get(c)) for c in self.columns]) for row in self.rows)]
        return "\n".join(lines + ([""] if self.left_out else []) + [f"- {note}" for note in self.notes()])

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

    def _save_what_is_there(self) -> None:
        # A run that is cut short has measured so much.
        if self.arguments.get("out"):
            self._save(Path(self.arguments["out"]))

    def _save(self, folder: Path) -> Path:
        """JSON and Markdown; returns their path without a suffix."""
        path = folder / f"{self.name}_{environment.slug(self.device)}"
        content = {
            "environment": self.environment,
            "arguments": self.arguments,
            "ceilings": self.ceilings.as_dict() if self.ceilings else None,
            "rows": self.rows,
            "left out": [{"what": name, "why": why, "where": w} for (name, why), w in self.left_out.items()],
        }
        environment.write_json(path.with_suffix(".json"), content)
        environment.write_text(path.with_suffix(".md"), self.table() + "\n")
        return path


def in_stages(peers: Sequence[str], slow: Container[str]) -> list[list[str]]:
    """Peers in the order in which they are compared with: all that are quick, then each of `slow` alone.

    Every stage runs at every shape before the next begins, the first without peers too, so that a run that is cut short
    has all of ours.
    """
    return [[name for name in peers if name not in slow], *([name] for name in peers if name in slow)]


def compare(results: Report, row: dict, us: float, others: Mapping[str, float], flops: int) -> None:
    """Add peers that ran beside ours again to the row that is there: times, rates and ratios.

    us: ours, in turns with the peers `others`, so that a ratio is of the same heat and clocks.
    """
    rates = {name: flops / other / 1e6 for name, other in others.items()}
    peers = {"peers us": row["peers us"] | others, "peers TFLOP/s": row["peers TFLOP/s"] | rates}
    results.amend(row, ratios(us, others) | peers)


def timed(t: Timing, floor: float) -> dict:
    """Columns of a time beside its floor, µs."""
    return {
        "us": t.us,
        "spread %": 100 * (t.high - t.low) / t.us,
        "roofline us": floor,
        "of roofline": floor / t.us,
        "timing": t._asdict(),
    }


def moved(nbytes: int, t: Timing, floor: float) -> dict:
    """Columns of a time in which so many bytes must move."""
    return {"MiB": nbytes / 2**20, "TB/s": nbytes / t.us / 1e6, **timed(t, floor)}


def bandwidth_picture(results: Report, title: str, cases: Iterable[str], peers: Mapping[str, str]) -> dict:
    """TB/s over MiB of rows that `moved` made: a series a case of ours, and one a peer, under what it is called."""
    series = [
        Series(case, [(row["MiB"], row["TB/s"]) for row in results.rows if row["case"] == case], ours=True)
        for case in cases
    ]
    for name, called in peers.items():
        rows = [row for row in results.rows if name in row["peers us"]]
        points = [(r["MiB"], r["MiB"] * 2**20 / r["peers us"][name] / 1e6) for r in rows]
        series.append(Series(called, points, ours=False))
    return {
        "title": title,
        "subtitle": f"{results.device_name} · cold cache, random data",
        "series": [s for s in series if s.points],
        "roofs": {"device copy": (float("inf"), results.ceilings.copy)},
        "labels": ("MiB that must move", "TB/s"),
    }


def ratios(us: float, peers: Mapping[str, float]) -> dict[str, float]:
    """{"x <peer>": how many times faster than the peer}: peer's µs over `us`."""
    return {f"x {name}": other / us for name, other in peers.items()}


def arguments(doc: str, default_shapes: str, *, cases: Iterable[str] = ()) -> argparse.ArgumentParser:
    """The options that benchmarks share; `parse` reads them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", type=shapes.argument, default=[default_shapes], metavar="SHAPE",
        help=f"tokens x out x in, a model, peers, linear, default or all; default {default_shapes}",
    )  # fmt: skip
    parser.add_argument("--tokens", nargs="+", type=int, help="these numbers of tokens instead of the shapes' own")
    if cases:
        parser.add_argument("--only", nargs="+", choices=list(cases), default=list(cases), help="only these cases")
    parser.add_argument("--peers", nargs="*", metavar="PEER", help="only these peers; none where none is named")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny shapes, on a CPU where there is no GPU: does it run?"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, torch.device]:
    """Arguments, with `shapes` selected, and the device; leaves with a message where there is no GPU to measure."""
    args = parser.parse_args(argv)
    if args.smoke and args.shapes == parser.get_default("shapes"):
        args.shapes = ["smoke"]
    if not args.smoke and not torch.cuda.is_available():
        parser.exit(2, f"{parser.prog}: needs a CUDA GPU; none found (--smoke tries the script out on a CPU)\n")
    args.shapes = shapes.select(args.shapes, args.tokens)
    return args, torch.device("cuda" if torch.cuda.is_available() else "cpu")


def plain(values: Mapping) -> dict:
    """Arguments as a JSON holds them."""
    return {name: _plain(value) for name, value in values.items()}


def _plain(value):
    # A shape is a tuple that reads better as text.
    if isinstance(value, (Path, shapes.Shape)):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _head(columns: Sequence[str]) -> list[str]:
    return [_line(columns), "|" + "|".join("---" if i < 2 else "--:" for i in range(len(columns))) + "|"]


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
