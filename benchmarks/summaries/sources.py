"""What made a result: the command, the device, the versions and the commit."""

from __future__ import annotations

import re
from pathlib import Path

from summaries.cells import Results

BENCHMARKS = Path(__file__).resolve().parents[1]
# Scripts by the beginning of what they write; others are bench_<name>.py, or of their own name.
SCRIPTS = {"throughput": "train_llm", "builds": "build_report", "engine_layers": "engine_kernels"}
PACKAGES = ("torch", "torchao", "triton", "sgl-deep-gemm")


def script(name: str) -> str:
    """The benchmark that wrote a result."""
    stems = sorted((path.stem for path in BENCHMARKS.glob("*.py")), key=len)
    written = SCRIPTS | {stem.removeprefix("bench_"): stem for stem in stems}
    starts = [start for start in written if name.startswith(start)]
    if not starts:
        raise ValueError(
            f"no benchmark is known to write {name}.json, which is in results; add it to {__name__}.SCRIPTS"
        )
    return written[max(starts, key=len)]


def source(results: Results, name: str) -> str:
    """In a line of Markdown."""
    made = results.load(name)["environment"]
    versions = ", ".join(f"{what} {made[what]}" for what in PACKAGES if made.get(what))
    # Where its author wrote files to says nothing.
    options = re.sub(r"--out \S+", "", made["command"])
    command = " ".join(f"python benchmarks/{script(name)}.py {options}".split())
    return f"`{command}` on {made['device']}, {versions}, commit {made['commit']}"


def footnote(results: Results, names: tuple[str, ...]) -> str:
    """The sources of a table, a line each, with links to the whole results."""
    return "\n".join(f"[All figures]({name}.md): {source(results, name)}." for name in names)
