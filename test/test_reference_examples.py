"""Each public name has an example in the reference, and it prints what it says."""

import importlib
import sys
from pathlib import Path

import pytest

EXTENSIONS = Path(__file__).resolve().parents[1] / "docs" / "extensions"
sys.path.append(str(EXTENSIONS))
examples = importlib.import_module("examples")
reference = importlib.import_module("reference")

pytestmark = pytest.mark.usefixtures("no_interpreter")
SECTIONS = examples.sections()
# They need a trainer or an engine.
NOT_RUN = ("integrations.vllm", "integrations.sglang", "integrations.torchtitan")


def documented() -> set[str]:
    return {
        f"{module}.{name}" for module, names in reference.modules().items() for name in reference._own(module, names)
    }


def test_each_public_name_has_one():
    absent = {name for name in SECTIONS.keys() - documented() if "integrations" not in name}
    assert (sorted(documented() - SECTIONS.keys()), sorted(absent)) == ([], [])
    skipping = {name for name, text in SECTIONS.items() if "+SKIP" in text}
    assert {name for name in skipping if not name.removeprefix("torchao_blockwise.").startswith(NOT_RUN)} == set()


@pytest.mark.parametrize("name", sorted(documented() & SECTIONS.keys()))
def test_it_prints_what_it_says(name):
    assert examples.run(name, SECTIONS[name]) == ""
