"""A page for each file of benchmarks/results, written as the site is built. Links to the files lead to these pages.

Summaries have no JSON files and no pages: other pages show them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import site_pages

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
    "torchtitan": "Training in torchtitan",
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


def write(folder: Path) -> None:
    """A page for each result."""
    names = sorted(path.stem for path in RESULTS.glob("*.md") if (RESULTS / f"{path.stem}.json").exists())
    index = "# Results\n\nResults of the benchmarks, each with its command, device, versions and commit.\n\n"
    pages = {"index": f"{index}```{{toctree}}\n:maxdepth: 1\n\n" + "\n".join(names) + "\n```\n"}
    for name in names:
        # Headings of single recipes are below the page's own.
        text = sources.listed((RESULTS / f"{name}.md").read_text(encoding="utf-8"))
        text = re.sub(r"^#+ ", "## ", text, flags=re.MULTILINE)
        picture = f"\n![The figures of {name} as a picture](../../benchmarks/results/{name}.png)\n"
        shown = picture if (RESULTS / f"{name}.png").exists() else ""
        data = f"All figures: [{name}.json](../../benchmarks/results/{name}.json)."
        pages[name] = f"# {title(name)}\n\n{source(name)}. {data}\n{shown}\n{text}"
    site_pages.write(folder, {f"{name}.md": text for name, text in pages.items()})
