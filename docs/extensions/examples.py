"""Examples of the API reference: examples.txt has one for each public name, which a test runs.

python docs/extensions/examples.py      # writes what the examples print into examples.txt
"""

from __future__ import annotations

import contextlib
import doctest
import io
import tempfile
from pathlib import Path

TEXT = Path(__file__).with_name("examples.txt")
# Examples begin with these imports. They can also use `folder`, an empty path, and `mesh`, of all ranks.
IMPORTS = """\
import torch
import torch.nn.functional as F
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import *
from torchao_blockwise import diagnostics
"""


def sections() -> dict[str, str]:
    """{full public name: its example}."""
    found = {}
    for section in TEXT.read_text(encoding="utf-8").split("# torchao_blockwise.")[1:]:
        name, _, text = section.partition("\n")
        found[f"torchao_blockwise.{name}"] = text.strip() + "\n"
    return found


@contextlib.contextmanager
def mesh_of_one():
    """A mesh with only this process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def run(name: str, text: str) -> str:
    """Run an example; return the differences between its output and the output that is shown, or nothing."""
    test = _parsed(name, text)
    said = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False)
    with _known(text) as known:
        test.globs = known
        runner.run(test, out=said.write)
    return said.getvalue()


def _parsed(name: str, text: str) -> doctest.DocTest:
    return doctest.DocTestParser().get_doctest(text, {}, name, str(TEXT), 0)


@contextlib.contextmanager
def _known(text: str):
    import torch

    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ranks = "mesh" in text or "distributed." in text
        known = {"folder": folder, "mesh": stack.enter_context(mesh_of_one()) if ranks else None}
        exec(IMPORTS, known)
        yield known


def with_output(name: str, text: str) -> str:
    """The example with its present output."""
    lines = []
    with _known(text) as known:
        for example in _parsed(name, text).examples:
            first, *others = example.source.rstrip("\n").split("\n")
            lines += [f">>> {first}", *(f"... {line}".rstrip() for line in others)]
            if example.options.get(doctest.SKIP):
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(example.source, name, "single"), known)
            lines += printed.getvalue().rstrip("\n").split("\n") if printed.getvalue() else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    written = (f"# {name}\n{with_output(name, text)}" for name, text in sections().items())
    TEXT.write_text("\n".join(written), encoding="utf-8")
