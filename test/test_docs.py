"""README.md, CONTRIBUTING.md and docs/: no typed figures, examples print what is shown, links lead somewhere."""

import ast
import contextlib
import io
import re
import sys
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
# Written next to the pages by a build of the site.
GENERATED = {"api", "learn", "results", "changelog.md", "contributing.md"}
PAGES = [page for page in sorted((ROOT / "docs").glob("**/*.md")) if not GENERATED & {page.parent.name, page.name}]
PAGES += [ROOT / "CONTRIBUTING.md", ROOT / "README.md"]

# Not measured here: how the board's counter works, results of arithmetic, sizes that are needed.
RECKONED = (
    "renewed every 20 to 100 ms",
    "an estimated 2 µs",
    "at 4 TB/s the four schedulers",
    "are 101 and 165 µs of issue slots",
    "hold 128 GiB of",
)
MEASURED = re.compile(r"\d ?(?:µs|ms|TB/s|TFLOP/s|tokens/s|GiB|MiB)(?!\w)|\d\.\d+ ?×(?!\d)")


def typed(text: str) -> list[str]:
    """Lines with a measured figure outside of code and of tables of results."""
    for pattern in (r"<!-- results: .*?<!-- end of results -->", r"```.*?```"):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    for words in RECKONED:
        text = text.replace(words, "")
    return [line for line in text.splitlines() if MEASURED.search(line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_measured_figure_is_typed_by_hand(page):
    assert typed(page.read_text(encoding="utf-8")) == []


def test_the_design_names_every_folder():
    package = ROOT / "torchao_blockwise"
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", text))
    assert {f"{path.name}/" for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"} <= named


def blocks(page: Path, marker: str) -> dict[str, str]:
    """{name: the fenced block after `<!-- marker: name -->`}."""
    text = page.read_text(encoding="utf-8")
    return dict(re.findall(rf"<!-- {marker}: (\w+) -->\n```\w*\n(.*?)\n```", text, flags=re.DOTALL))


EXAMPLES = [page for page in PAGES if blocks(page, "example")]


def test_pages_have_examples():
    assert len(EXAMPLES) == 10


class LLM:
    """Stands for vLLM's engine. weights: by name, as it has received them."""

    def __init__(self, model, **options):
        self.weights = {}

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        if "weights_iterator" in kwargs:
            self.weights = {name: x.detach().clone() for name, x in kwargs["weights_iterator"]}
            return
        from safetensors.torch import load_file

        files = Path(kwargs["weights_path"]).glob("*.safetensors")
        self.weights = {name: x for file in files for name, x in load_file(file).items()}


@pytest.fixture
def vllm(monkeypatch):
    module = types.ModuleType("vllm")
    module.LLM = LLM
    monkeypatch.setitem(sys.modules, "vllm", module)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def check_rollout(engine, model):
    """Its weights and scales are those that the next forward pass multiplies."""
    from exported_models import OperandsRead, assert_files_hold

    with OperandsRead() as products, torch.no_grad():
        model(torch.arange(8)[None])
    assert len(products.operands) == 14
    assert_files_hold(products.operands, engine.weights)


@pytest.mark.usefixtures("no_interpreter", "vllm")
@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.name)
def test_examples_print_what_is_shown(page, tmp_path, monkeypatch):
    """One after the other: a later one may use what an earlier one made."""
    if page.name in ("fusion.md", "integrations.md", "rollouts.md"):
        pytest.importorskip("transformers")
    if page.name in ("rollouts.md", "saving.md"):
        pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    shown, namespace = blocks(page, "output"), {"__name__": "docs"}
    for name, code in blocks(page, "example").items():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page.name, "exec"), namespace)
        assert printed.getvalue().strip() == shown.get(name, ""), name
        if name in ("verl_style", "prime_rl_style"):
            check_rollout(namespace["engine"], namespace["model"])


# docs/extensions/ writes it next to the pages; git does not have it.
MADE_WITH_THE_SITE = {"errors.rst"}

# Names under which snippets use PyTorch.
PYTORCH = {"torch", "nn", "F", "dist"}


def misused_imports(text: str) -> list[str]:
    """Names of PyTorch that a snippet with imports lacks, also from earlier snippets; imports that no snippet uses."""
    imported, used, wrong = set(), set(), []
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        nodes = list(ast.walk(ast.parse(code)))
        imports = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
        loaded = {node.id for node in nodes if isinstance(node, ast.Name)}
        imported |= {(alias.asname or alias.name).partition(".")[0] for alias in imports}
        wrong += [f"{name} is not imported" for name in sorted(PYTORCH & loaded - imported) if imports]
        used |= loaded
    return wrong + [f"{name} is not used" for name in sorted(imported - used)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_import_what_they_use(page):
    assert misused_imports(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_plain_markdown(page):
    """Code hosts show the pages too, and know no directives."""
    assert re.findall(r"^(?:```\{|:::).*", page.read_text(encoding="utf-8"), re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    paths = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [path for path in paths if path not in MADE_WITH_THE_SITE and not (page.parent / path).exists()] == []


FOLDERS = ("benchmarks", "docs", "test", "torchao_blockwise")
FILES = [str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    """`ops/registry.py` and `ops/device/` by the end of their path, from wherever a reader is."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    named = re.findall(r"`([\w/]+(?:\.py|/))`", text)
    missing = [name for name in named if not any(f"/{name}" in f"/{file}/" for file in FILES)]
    assert missing == []
