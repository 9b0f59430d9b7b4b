"""Tutorials that need a GPU. They are run on a GPU by hand, and the pages show the printed output.

python docs/extensions/gpu_tutorials.py [NAME ..]      # on a GPU: runs them, and writes their outputs next to them
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "tutorials" / "gpu"
# In the order in which to read them.
TUTORIALS = ("speed", "cuda_graphs")


class Part(NamedTuple):
    """A section between two lines `# %%`: text in reStructuredText, then code, which begins at `line`."""

    text: str
    code: str
    line: int


def parts(source: str) -> list[Part]:
    """A program's docstring and its parts; the first part has only the docstring."""
    _, docstring, program = source.split('"""', 2)
    found = [Part(docstring.strip(), "", 0)]
    begin = source.count("\n", 0, len(source) - len(program))
    for block in re.split(r"^# %%\n", program, flags=re.MULTILINE):
        lines = block.splitlines()
        text = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
        words = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[:text])
        code = "\n".join(lines[text:])
        if words or code.strip():
            found.append(Part(words, code.strip("\n"), begin + text + len(code) - len(code.lstrip("\n"))))
        begin += len(lines) + 1
    return found


def digest(source: str) -> str:
    """Of the code, by which outputs are found to be of another program."""
    return hashlib.sha256("\n".join(part.code for part in parts(source)).encode()).hexdigest()


def run(name: str) -> None:
    """Run a tutorial in this process; what its parts print goes to its file of outputs."""
    file = FOLDER / f"{name}.py"
    source, known, outputs = file.read_text(encoding="utf-8"), {"__name__": "__main__"}, []
    for part in parts(source):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Lines of the file, for errors.
            exec(compile("\n" * part.line + part.code, str(file), "exec"), known)
        outputs.append(printed.getvalue())
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import torch
    from common.environment import environment

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = {"environment": environment(device), "code": digest(source), "outputs": outputs}
    file.with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def page(name: str) -> str:
    """The tutorial in reStructuredText, with its printed output."""
    file = FOLDER / f"{name}.py"
    made = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
    shown = []
    for part, printed in zip(parts(file.read_text(encoding="utf-8")), made["outputs"], strict=True):
        shown.append(part.text)
        if part.code:
            shown.append(f".. code-block:: python\n\n{textwrap.indent(part.code, '    ')}")
        if printed:
            shown.append(
                f".. rst-class:: sphx-glr-script-out\n\n.. code-block:: none\n\n{textwrap.indent(printed, '    ')}"
            )
    where = made["environment"]
    versions = ", ".join(f"{what} {where[what]}" for what in ("torch", "torchao", "triton"))
    shown.append(
        f"``python docs/extensions/gpu_tutorials.py {name}`` printed this on an {where['device']}, {versions}, "
        f"commit {where['commit']}. :download:`{name}.py <../tutorials/gpu/{name}.py>`"
    )
    return "\n\n".join(shown) + "\n"


def cards() -> str:
    """The end of the list of tutorials."""
    lines = ["", "On a GPU", "--------", "", "Each page shows the output of a run on the GPU that it names.", ""]
    lines += [".. toctree::", "   :hidden:", "", *(f"   /gpu/{name}" for name in TUTORIALS), ""]
    lines += [".. grid:: 1 2 2 2", "   :gutter: 3", ""]
    for name in TUTORIALS:
        title, _, about = parts((FOLDER / f"{name}.py").read_text(encoding="utf-8"))[0].text.split("\n", 2)
        lines += [f"   .. grid-item-card:: {title}", f"      :link: /gpu/{name}", "      :link-type: doc", ""]
        lines += [textwrap.indent(about.strip(), "      "), ""]
    return "\n".join(lines)


def write(folder: Path) -> None:
    """A page for each tutorial."""
    import site_pages

    site_pages.write(folder, {f"{name}.rst": page(name) for name in TUTORIALS})


def _list(app, page: str, text: list[str]) -> None:
    """Behind the tutorials that run on a CPU, whose list sphinx-gallery writes."""
    if page == "learn/index":
        text[0] += cards()


def setup(app) -> dict:
    app.connect("source-read", _list)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    for chosen in sys.argv[1:] or TUTORIALS:
        if sys.argv[1:] == [chosen]:
            run(chosen)
        else:
            # Each runs in a separate process, so that memory of one is not in the figures of another.
            subprocess.run([sys.executable, __file__, chosen], check=True)
