"""Where results are shown, and what made them: the command, the device, the versions and the commit."""

from __future__ import annotations

import os
import re
from pathlib import Path

from summaries.cells import Results

# The script of a result by how its name begins, at the commit of the result; others are bench_<first word>.py.
SCRIPTS = {
    "adapter_memory": "adapter_memory",
    "builds": "build_report",
    "convergence": "convergence",
    "fuse_memory": "fuse_memory",
    "host_time": "host_time",
    "grouped_matmul": "bench_grouped_matmul",
    "study": "convergence",
    "throughput": "train_llm",
    "train_llm": "train_llm",
    "weight_bytes": "weight_bytes",
    "engine_agreement": "engine_agreement",
    "engine": "engine_kernels",
}
PACKAGES = ("torch", "torchao", "triton", "sgl-deep-gemm")
# `<!-- results: name; columns: a | b; where: mode eager,compiled -->`: only these columns and rows, with their source.
_SHOWN = re.compile(r"(<!-- results: (\w+)((?:; \w+: [^;>]+)*) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)


def script(name: str) -> str:
    known = next((script for start, script in SCRIPTS.items() if name.startswith(start)), None)
    return known or f"bench_{name.split('_')[0]}"


def source(results: Results, name: str) -> str:
    made = results.load(name)["environment"]
    versions = ", ".join(f"{what} {made[what]}" for what in PACKAGES if made.get(what))
    # Where its author wrote files to says nothing.
    options = re.sub(r"--out \S+", "", made["command"])
    command = " ".join(f"python benchmarks/{script(name)}.py {options}".split())
    commits = ", ".join(commit[:9] for commit in made["commit"].split(", "))
    return f"`{command}` on {made['device']}, {versions}, commit {commits}"


def footnote(results: Results, names: tuple[str, ...]) -> str:
    return "\n".join(f"[All figures]({name}.md): {source(results, name)}." for name in names)


def pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def filled(page: Path, results: Path) -> str:
    """The text of the page with results as they are now; a table that it shows without the notes below stays so."""
    prefix = Path(os.path.relpath(results, page.parent)).as_posix()

    def fill(found: re.Match) -> str:
        begin, name, options, shown, end = found.groups()
        text = (results / f"{name}.md").read_text(encoding="utf-8").strip()
        if options:
            chosen = dict(option.split(": ") for option in options.split("; ")[1:])
            text = f"{part(text, **chosen)}\n\n{footnote(Results(results), (name,))}"
        elif shown and "\n\n" not in shown:
            text = text.split("\n\n")[0]
        text = listed(text)
        # Links lead to files in the folder of the result.
        text = re.sub(r"\]\((\w+\.md)\)", rf"]({prefix}/\1)", text)
        return f"{begin}{text}\n{end}"

    return _SHOWN.sub(fill, page.read_text(encoding="utf-8"))


def listed(text: str) -> str:
    """The text with notes of several lines as lists; their lines would run together."""
    blocks = (block.splitlines() for block in text.split("\n\n"))
    return "\n\n".join("\n".join(_items(lines)) for lines in blocks)


def _items(lines: list[str]) -> list[str]:
    is_note = len(lines) > 1 and not lines[0].startswith(("|", "- ", "#"))
    return [f"- {line}" for line in lines] if is_note else lines


def part(text: str, columns: str, where: str = "") -> str:
    """The table of `text` with these columns, separated by |, and the rows that have a value: "mode eager,compiled"."""
    lines = text.split("\n\n")[0].splitlines()
    head, rule, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines)
    if where:
        column, values = where.rsplit(" ", 1)
        rows = [row for row in rows if row[head.index(column)] in values.split(",")]
    places = [head.index(column) for column in columns.split(" | ")]
    return "\n".join(f"| {' | '.join(line[place] for place in places)} |" for line in (head, rule, *rows))
