"""The parts of the site: public names, errors and tutorials have their places; docstrings keep their text."""

import ast
import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parent.parent / "docs" / "extensions"))

import docstrings
import error_index
import gallery
import gpu_tutorials
import pictures
import reference

DOCS = Path(__file__).parent.parent / "docs"


def test_tutorials_are_listed_the_quickstart_first_and_what_needs_a_gpu_last():
    assert {file.stem for file in (DOCS / "tutorials").glob("*.py")} == set(gallery.TUTORIALS)
    assert {file.stem for file in gpu_tutorials.FOLDER.glob("*.py")} == set(gpu_tutorials.TUTORIALS)
    assert gallery.TUTORIALS[0] == "quickstart"
    # sphinx-gallery puts its list behind the header.
    assert "toctree" not in (DOCS / "tutorials" / "GALLERY_HEADER.rst").read_text(encoding="utf-8")
    text = ["the list of sphinx-gallery\n"]
    gpu_tutorials._list(None, "learn/index", text)
    assert text[0].startswith("the list of sphinx-gallery\n\nOn a GPU\n")
    assert re.findall(r"^   /gpu/(\w+)$", text[0], flags=re.MULTILINE) == list(gpu_tutorials.TUTORIALS)


def test_outputs_of_gpu_tutorials_are_of_their_code():
    """A tutorial that was changed must run on a GPU again: `python docs/extensions/gpu_tutorials.py`."""
    for name in gpu_tutorials.TUTORIALS:
        source = (gpu_tutorials.FOLDER / f"{name}.py").read_text(encoding="utf-8")
        made = json.loads((gpu_tutorials.FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        assert made["code"] == gpu_tutorials.digest(source), name
        assert made["environment"]["commit"] and "NVIDIA" in made["environment"]["device"]
        page = gpu_tutorials.page(name)
        for part, printed in zip(gpu_tutorials.parts(source), made["outputs"], strict=True):
            for text in (part.text, *part.code.splitlines(), *printed.splitlines()):
                assert text in page


def test_gpu_tutorials_run_part_by_part(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_tutorials, "FOLDER", tmp_path)
    program = '"""\nTitle\n=====\n"""\n\n# %%\n# One\n# ---\n\nx = 2\nprint(x)\n\n'
    program += "# %%\n# Only words\n\n# %%\n# More\n\nprint(x + 1)\n"
    (tmp_path / "small.py").write_text(program)
    gpu_tutorials.run("small")
    made = json.loads((tmp_path / "small.json").read_text())
    assert made["outputs"] == ["", "2\n", "", "3\n"]
    (tmp_path / "small.py").write_text(program.replace("print(x + 1)", "raise ValueError(x)"))
    with pytest.raises(ValueError, match="2") as caught:
        gpu_tutorials.run("small")
    # Errors name the line of the file.
    assert caught.traceback[-1].lineno + 1 == program.splitlines().index("print(x + 1)") + 1


def test_pictures_of_tutorials_have_titles():
    """A figure's title is its text for who cannot see it."""
    for name in gallery.TUTORIALS:
        tree = ast.parse((DOCS / "tutorials" / f"{name}.py").read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        figures = sum(node.func.attr == "subplots" for node in calls)
        titles = sum(any(word.arg == "title" for word in node.keywords) for node in calls if node.func.attr == "set")
        assert titles >= figures, name


def test_the_search_leads_to_each_error():
    """`#error-12` on the page is the text at 12 of `ERRORS`, which the search matches."""
    given = []
    app = SimpleNamespace(add_js_file=lambda name, body: given.append(body))
    error_index.give_texts(app, "index", "", {}, None)
    error_index.give_texts(app, "search", "", {}, None)
    (script,) = given
    texts = json.loads(script.removeprefix("const ERRORS = ").removesuffix(";"))
    anchors = dict(re.findall(r"^\.\. _error-(\d+):\n\n(.+)$", error_index.page(), re.MULTILINE))
    assert anchors == {str(place): docstrings.escape(text) for place, text in enumerate(texts)}


def test_every_error_that_is_raised_is_found():
    """One whose text is made in another way needs a function for it that is called why_.., or more of `error_index`."""
    assert not error_index.unfound()
    assert any("ranks differ; rank … has …" in message.text for message in error_index.messages())


PROGRAM = """
def f(x):
    if why := why_not(x):
        raise TypeError(f"f: {why}")
    if x > 9:
        raise ValueError("f: {} is not a valid {}".format(x, "too large") if x else LONG)
    raise ValueError(f"f: x must be positive, got {x}; " + nearest(f"take {x:d}"))

def why_not(x):
    return ValueError, f"the kernel needs {x}"

def h(said):
    raise ValueError(said)
"""


def test_texts_of_errors(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(PROGRAM, encoding="utf-8")
    found = error_index.messages(tmp_path / "package")
    assert [(message.error, message.text) for message in found] == [
        ("ValueError", "f: … is not a valid …"),
        ("ValueError", "f: x must be positive, got …; take …"),
        ("a reason, in errors and warnings", "the kernel needs …"),
    ]
    # `said` may be anything.
    assert error_index.unfound(tmp_path / "package") == [f"package/module.py:{len(PROGRAM.splitlines())}"]


DOCSTRING = """\
a @ b.T for `ops.quantize`d [M, K] | None and add_matmul_.

a: [M, K]; lines
    that go on.
b, c: likewise.
Returns [M, N].
Raises ValueError for *shapes*.

    code(x)
"""


def test_docstrings_keep_their_text():
    assert "\n".join(docstrings.to_rst(DOCSTRING.splitlines())) == (
        "a @ b.T for \\ :py:obj:`ops.quantize <torchao_blockwise.ops.quantize>`\\ d [M, K] \\| None "
        "and add\\_matmul\\_.\n\n"
        "``a``\n    [M, K]; lines that go on.\n\n"
        "``b``, ``c``\n    likewise.\n\n"
        "Returns [M, N].\n\n"
        "Raises ValueError for \\*shapes\\*.\n\n"
        "::\n\n    code(x)\n"
    )


def test_docstrings_of_public_names_lose_no_word():
    """Escapes and roles come and go; the words stay, in their order."""
    for home in sorted(set(reference.homes().values())):
        module, name = home.rsplit(".", 1)
        doc = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
        shown = "\n".join(docstrings.to_rst(doc.splitlines()))
        for full in set(reference.homes().values()):
            shown = shown.replace(f" <{full}>`", "`")
        assert words(shown.replace(":py:obj:", "")) == words(doc), home


def words(text: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in text).split()


def test_links_and_pictures_of_built_pages_are_looked_at(tmp_path):
    built = pytest.importorskip("built", reason="needs the extra docs")
    (tmp_path / "b.html").write_text('<h1 id="here">b</h1>', encoding="utf-8")
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here"></a><a href="b.html#there"></a><a href="c.html"></a><a href="https://x.org/"></a>'
        '<img src="b.html" alt="words"><img src="b.html">',
        encoding="utf-8",
    )
    assert built.faults(tmp_path) == [
        "a.html: a picture without a text: b.html",
        "a.html: no such place: b.html#there",
        "a.html: leads nowhere: c.html",
    ]


@pytest.mark.parametrize("name", [*pictures.DRAWINGS, "number_lines"])
def test_drawings_are_those_of_the_script(name):
    written = (pictures.STATIC / f"{name}.svg").read_text(encoding="utf-8")
    assert written == pictures.draw(name), "run python docs/extensions/pictures.py"
