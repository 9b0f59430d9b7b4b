"""Figures of benchmarks/results on pages, each with its source, read from the files as the site is built.

`{result} name` is a table, `{headline}` the first page's figures; each file of results is a page, to which links lead.
Summaries, which have no JSON of their own, are no pages: other pages show them whole.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import site_pages
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
sys.path.append(str(RESULTS.parent))

from summaries import sources  # noqa: E402  # of benchmarks/
from summaries.cells import Results  # noqa: E402


def load(name: str) -> dict:
    return Results(RESULTS).load(name)


def source(name: str) -> str:
    return sources.source(Results(RESULTS), name)


# How the names of results begin, in words.
SUBJECTS = {
    "adapter_memory": "Memory of adapters",
    "builds": "Kernel builds",
    "convergence": "Loss of training runs",
    "engine_agreement": "Agreement of training and inference",
    "engine_kernels": "Kernels compared with inference engines",
    "engine_layers": "Layers compared with inference engines",
    "fsdp": "FSDP2",
    "fuse_memory": "Memory with fuse",
    "fused": "Fused quantization kernels",
    "graphs": "Ways to launch a training step",
    "grouped_matmul": "Grouped GEMMs",
    "host_time": "Host time of a layer",
    "linear": "Linear layers",
    "matmul": "GEMMs",
    "memory": "Memory of MLPs",
    "model": "Training steps of Llama-8B layers",
    "moe": "Expert MLPs",
    "permute": "Permutation of tokens",
    "quantize": "Quantization kernels",
    "refit": "Weights sent to an inference engine",
    "study": "Loss study",
    "throughput": "Training steps of language models",
    "train_llm": "The example training run",
    "weight_bytes": "Bytes of a weight",
}


def title(name: str) -> str:
    """The subject and the device: `moe_peers_nvidia_h200` is "Expert MLPs: peers, NVIDIA H200"."""
    gpu = load(name)["environment"]["device"]
    slug = "_".join("".join(c if c.isalnum() else " " for c in gpu.lower()).split())
    name = name.replace(f"_{slug}", "").removesuffix("_cpu")
    subject = max((start for start in SUBJECTS if name.startswith(start)), key=len)
    rest = name.removeprefix(subject).strip("_").replace("_", " ")
    return f"{SUBJECTS[subject]}{rest and f': {rest}'}, {gpu}"


def device(name: str) -> str:
    return load(name)["environment"]["device"].removeprefix("NVIDIA ")


def rows(name: str, **where: object) -> list[dict]:
    """The rows that have these values."""
    return [row for row in load(name)["rows"] if all(row.get(key) == value for key, value in where.items())]


def row(name: str, **where: object) -> dict:
    """The one row that has these values."""
    (found,) = rows(name, **where)
    return found


def headlines() -> list[Mapping[str, str]]:
    """The first page's figures: what, how much, and the source."""
    layers, memory, gather = "model_4_layers_fuse_nvidia_h200", "memory_nvidia_h200", "fsdp_compiled_nvidia_h200"
    fast = row(layers, recipe="fp8_fused_once", mode="compiled")["x bf16"]
    held = {name: line["held between forward and backward MiB"] for name, line in load(memory)["rows"].items()}
    gathered = {line["recipe"]: line["gathered MiB"] for line in rows(gather)}
    fp8, nvfp4 = (gathered[recipe] / gathered["bf16"] for recipe in ("fp8", "nvfp4"))
    return [
        {
            "figure": f"{fast:.2f} × the speed",
            "what": f"of bf16: four Llama-8B layers in FP8, fused, compiled, with DeepGEMM, on an {device(layers)}.",
            "source": source(layers),
        },
        {
            "figure": f"{held['fp8'] / held['bf16']:.2f} × the memory",
            "what": f"of bf16 from forward to backward, in MLPs; {held['nvfp4'] / held['bf16']:.2f} × in NVFP4.",
            "source": source(memory),
        },
        {
            "figure": f"{fp8:.2f} × the traffic",
            "what": f"of bf16 where FSDP2 gathers weights; {nvfp4:.2f} × in NVFP4.",
            "source": source(gather),
        },
    ]


class Result(SphinxDirective):
    """`{result} name`: the table and its source; `:columns: a | b` shows only some, `:where: a x` rows whose a is x."""

    required_arguments = 1
    option_spec: ClassVar = {"columns": directives.unchanged, "where": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        self.env.note_dependency(str(RESULTS / f"{name}.json"))
        table = (RESULTS / f"{name}.md").read_text(encoding="utf-8").split("\n\n")[0].strip()
        if condition := self.options.get("where"):
            table = _those(table, *condition.rsplit(" ", 1))
        if chosen := self.options.get("columns"):
            table = _only(table, [column.strip() for column in chosen.split("|")])
        return _parse(self, f"{table}\n\n{source(name)}.\n")


class Headline(SphinxDirective):
    """Cards with the figures of the first page."""

    def run(self) -> list[nodes.Node]:
        cards = []
        for card in headlines():
            cards.append(f":::{{grid-item-card}}\n:class-card: headline\n**{card['figure']}**\n\n{card['what']}\n\n")
            cards.append(f"```{{dropdown}} measured how\n{card['source']}\n```\n:::\n")
        return _parse(self, f"::::{{grid}} 1 3 3 3\n:gutter: 2\n\n{''.join(cards)}::::\n")


def _cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]


def _written(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _only(table: str, columns: list[str]) -> str:
    """The table with these columns alone."""
    lines = _cells(table)
    places = [lines[0].index(column) for column in columns]
    return _written([[line[place] for place in places] for line in lines])


def _those(table: str, column: str, value: str) -> str:
    """The table with the rows alone that have this value."""
    head, rule, *rows = _cells(table)
    place = head.index(column)
    return _written([head, rule, *(row for row in rows if row[place] == value)])


def _parse(directive: SphinxDirective, text: str) -> list[nodes.Node]:
    """Nodes of Markdown, on a Markdown page."""
    holder = nodes.container()
    directive.state.nested_parse(StringList(text.splitlines(), source="results"), 0, holder)
    return holder.children


def write(folder: Path) -> None:
    """A page for each result."""
    names = sorted(path.stem for path in RESULTS.glob("*.md") if (RESULTS / f"{path.stem}.json").exists())
    index = "# Results\n\nResults of the benchmarks, each with its command, device, versions and commit.\n\n"
    pages = {"index": f"{index}```{{toctree}}\n:maxdepth: 1\n\n" + "\n".join(names) + "\n```\n"}
    for name in names:
        # Headings of single recipes are below the page's own.
        text = re.sub(r"^#+ ", "## ", (RESULTS / f"{name}.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
        picture = f"\n![The figures of {name} as a picture](../../benchmarks/results/{name}.png)\n"
        shown = picture if (RESULTS / f"{name}.png").exists() else ""
        data = f"All figures: [{name}.json](../../benchmarks/results/{name}.json)."
        pages[name] = f"# {title(name)}\n\n{source(name)}. {data}\n{shown}\n{text}"
    site_pages.write(folder, {f"{name}.md": text for name, text in pages.items()})


def _lead_to_pages(app, page: str, text: list[str]) -> None:
    """Links to results and tutorials lead to their pages here, and to the files on GitHub.

    A link that is called by its file, [numerics.md](numerics.md), is called by the page's title here.
    """
    text[0] = re.sub(r"\[\w+\.md\]\((\w+\.md(?:#[\w-]+)?)\)", r"[](\1)", text[0])
    text[0] = re.sub(r"\]\(tutorials/(\w+)\.py\)", r"](learn/\1)", text[0])
    text[0] = re.sub(r"\]\((?:\.\./)+benchmarks/results/(\w+)\.md\)", r"](results/\1.md)", text[0])


def setup(app) -> dict:
    app.connect("source-read", _lead_to_pages)
    app.add_directive("result", Result)
    app.add_directive("headline", Headline)
    return {"parallel_read_safe": True}
