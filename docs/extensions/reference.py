"""The pages of the API reference: one for each public module, with the names of its `__all__`, and for each name."""

from __future__ import annotations

import functools
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import examples
import site_pages

PACKAGE = "torchao_blockwise"
# In the order of the reference. A name belongs to the first module that has it.
MODULES = ("", "ops", "formats", "tensors", "nn", "distributed", "conversion", "checkpoint", "diagnostics")
# Frameworks' modules list no names: those that users write.
INTEGRATIONS = {
    "integrations.transformers": (
        "from_pretrained",
        "BlockwiseFP8Config",
        "NVFP4Config",
        "UnchangedWeights",
        "Numerics",
        "RecipeState",
    ),
    "integrations.lightning": ("BlockwisePrecision", "UnchangedWeights", "Numerics"),
    "integrations.vllm": ("weight_source",),
    "integrations.sglang": ("update_weights",),
    "integrations.torchtitan": ("fp8", "nvfp4", "selective_ac", "BlockwiseConverter"),
}


def modules() -> dict[str, tuple[str, ...]]:
    """{full name of a public module: its public names}."""
    listed = {_full(module): tuple(importlib.import_module(_full(module)).__all__) for module in MODULES}
    for module, names in INTEGRATIONS.items():
        try:
            importlib.import_module(_full(module))
        except ImportError:
            continue
        listed[_full(module)] = names
    return listed


@functools.cache
def homes() -> dict[str, str]:
    """{full public name: the full name under which it is documented}, modules left out."""
    documented: dict[int, str] = {}
    found = {}
    for module, names in modules().items():
        for name in names:
            x = getattr(importlib.import_module(module), name)
            if not isinstance(x, ModuleType):
                # Equal numbers are one object, and two names.
                key = id(x) if callable(x) else hash(f"{module}.{name}")
                found[f"{module}.{name}"] = documented.setdefault(key, f"{module}.{name}")
    return found


def full_name(words: str) -> str | None:
    """Where `ops.quantize` or `NumericsMonitor` is documented; None if no public name, or more than one, fits."""
    places = {home for name, home in homes().items() if name == words or name.endswith(f".{words}")}
    if len(places) > 1:
        places &= {f"{PACKAGE}.{words}"}
    return places.pop() if len(places) == 1 else None


def write(folder: Path) -> None:
    """index.rst, and a page for each module and for each class and function."""
    pages = {"index": _index()}
    for module, names in modules().items():
        pages[module] = _page(module, names)
        pages |= {f"{module}.{name}": _stub(module, name) for name in _own(module, names)}
    site_pages.write(folder, {f"{name}.rst": text for name, text in pages.items()})


def _index() -> str:
    lines = [*_title("API reference"), "These pages document every public name.", ""]
    lines += ["``[M, K]`` is the shape of a tensor, and ``..`` in a shape stands for leading dims.", ""]
    lines += ["Examples begin with:", "", ".. code-block:: python", ""]
    lines += [*(f"    {line}" for line in examples.IMPORTS.splitlines()), ""]
    lines += ["``folder`` is an empty ``pathlib.Path``, and ``mesh`` is a ``DeviceMesh`` of all ranks.", ""]
    lines += ["Errors have a separate index: :doc:`/errors`.", "", ".. toctree::", "    :maxdepth: 1", ""]
    return "\n".join([*lines, *(f"    {module}" for module in modules()), ""])


def _page(module: str, names: tuple[str, ...]) -> str:
    package = importlib.import_module(module)
    doc = inspect.getdoc(package) or ""
    lines = [f".. module:: {module}", "", *_title(_short(module)), _summary(doc), ""]
    own = [name for name in names if homes().get(f"{module}.{name}") == f"{module}.{name}"]
    lines += [".. toctree::", "    :hidden:", "", *(f"    {module}.{name}" for name in _own(module, names)), ""]
    for title, kind in (("Classes", inspect.isclass), ("Functions", _is_function)):
        if chosen := [name for name in own if kind(getattr(package, name))]:
            lines += [*_title(title, "-"), f".. currentmodule:: {module}", "", ".. autosummary::"]
            lines += ["    :nosignatures:", "", *(f"    {name}" for name in chosen), ""]
    if values := [name for name in own if not callable(getattr(package, name))]:
        lines += _title("Values", "-")
        for name in values:
            shown = repr(getattr(package, name))
            lines += [f".. py:data:: {name}", f"    :module: {module}", ""]
            lines += ["    ::", "", f"        {shown}", ""] if len(shown) < 400 else []
    elsewhere = [name for name in names if name not in own and f"{module}.{name}" in homes()]
    inside = [name for name in names if isinstance(getattr(package, name), ModuleType)]
    if inside:
        known = [f":doc:`{module}.{name}`" if f"{module}.{name}" in modules() else f"``{name}``" for name in inside]
        lines += [*_title("Modules", "-"), ", ".join(known), ""]
    if elsewhere:
        links = (f":py:obj:`{name} <{homes()[f'{module}.{name}']}>`" for name in elsewhere)
        lines += [*_title("Also here", "-"), ", ".join(links), ""]
    return "\n".join(lines)


def _own(module: str, names: tuple[str, ...]) -> list[str]:
    """Classes and functions that are documented in this module."""
    package = importlib.import_module(module)
    return [
        name
        for name in names
        if homes().get(f"{module}.{name}") == f"{module}.{name}" and callable(getattr(package, name))
    ]


def _stub(module: str, name: str) -> str:
    """The page of a class or function."""
    is_class = inspect.isclass(getattr(importlib.import_module(module), name))
    lines = [*_title(_short(f"{module}.{name}")), f".. auto{'class' if is_class else 'function'}:: {module}.{name}"]
    example = examples.sections().get(f"{module}.{name}")
    shown = [".. rubric:: Example", "", example] if example else []
    return "\n".join([*lines, "    :members:" if is_class else "", "", *shown, ""])


def _short(name: str) -> str:
    """Without the package's name."""
    return name.removeprefix(f"{PACKAGE}.")


def _is_function(x: object) -> bool:
    return callable(x) and not inspect.isclass(x)


def _summary(doc: str) -> str:
    import docstrings

    return docstrings.inline(" ".join(doc.split("\n\n")[0].split()))


def _title(text: str, rule: str = "=") -> list[str]:
    # `add_matmul_` would be a link.
    text = text.replace("_", "\\_")
    return [text, rule * len(text), ""]


def _full(module: str) -> str:
    return f"{PACKAGE}.{module}".rstrip(".")
