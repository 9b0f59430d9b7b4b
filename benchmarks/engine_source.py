"""Functions out of an engine's source files, as they stand there, without what the engine's modules import.

vLLM and SGLang write some FP8 kernels in Triton, in files that import all it takes to serve a model. `functions` reads
such a file, keeps the definitions that are asked for, and runs these with the few names that they use: the text is the
engine's own, from a wheel that is installed, or only unpacked.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import hashlib
import json
import logging
import os
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

# What annotations and launchers of all engines use.
_COMMON = {name: getattr(typing, name) for name in ("Any", "Dict", "List", "Optional", "Sequence", "Tuple")}
_COMMON |= {"Callable": Callable, "functools": functools, "json": json, "os": os, "torch": torch, "tl": tl}
_COMMON |= {"triton": triton, "logger": logging.getLogger(__name__)}


class Source(typing.NamedTuple):
    """Where an engine's files lie, and its version."""

    root: Path
    version: str

    @classmethod
    def of(cls, package: str, folder: Path | None) -> Source:
        """An unpacked wheel in `folder`; None: the installed package, which is not imported.

        Raises ValueError where there is none.
        """
        found = metadata.distributions(name=package, **({"path": [str(folder)]} if folder else {}))
        distribution = next(iter(found), None)
        if distribution is None:
            where = f"no {package}-*.dist-info in {folder}" if folder else f"{package} is not installed"
            raise ValueError(f"engine_source: {where}; unpack its wheel into a folder and name that with --source")
        return cls(Path(str(distribution.locate_file(""))), distribution.version)

    def functions(self, file: str, wanted: Collection[str], **given: Any) -> SimpleNamespace:
        """`functions` of a file of this engine."""
        return functions(self.root / file, wanted, version=self.version, **given)


def digest(file: Path) -> str:
    """Of a file's bytes, so that a result says which text ran."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def functions(
    file: Path,
    wanted: Collection[str],
    *,
    version: str = "unknown",
    imports: Mapping[str, object] | None = None,
    **given: object,
) -> SimpleNamespace:
    """The functions and constants `wanted` that `file` defines on its top level, run with the names `given`.

    imports: {module: what an import of it inside of a function gets}; other imports are real.
    A name that is neither given nor wanted raises when it is used, not before: launchers have branches for other GPUs.
    Raises ValueError for a file that is missing, and for definitions that it does not have.
    """
    if not file.is_file():
        raise ValueError(f"engine_source: {file} is missing, wanted for {_listed(wanted)} {_remedy(version)}")
    nodes = [node for node in ast.parse(file.read_text(encoding="utf-8"), str(file)).body if _name(node) in wanted]
    missing = set(wanted) - {_name(node) for node in nodes}
    if missing:
        raise ValueError(f"engine_source: {file} does not define {_listed(missing)} {_remedy(version)}")
    code = compile(ast.Module(nodes, type_ignores=[]), str(file), "exec")
    namespace = {"__name__": f"{__name__}.{file.stem}", "__file__": str(file), **_COMMON, **given}
    namespace["__builtins__"] = vars(builtins) | {"__import__": functools.partial(_import, dict(imports or {}))}
    for name in _globals(code):
        if name not in vars(builtins) and name not in wanted:
            namespace.setdefault(name, _Absent(name, file, version))
    # Triton reads the kernels' text from `file`: lines are those of the whole file.
    exec(code, namespace)
    return SimpleNamespace(**{name: namespace[name] for name in wanted})


class _Absent:
    """Stands for a name that the engine's module has and nobody gave."""

    def __init__(self, name: str, file: Path, version: str):
        self._why = f"engine_source: {file} uses {name}, which nobody gave {_remedy(version)}"

    def __getattr__(self, name: str):
        raise NameError(self._why)

    def __call__(self, *args: object, **options: object):
        raise NameError(self._why)


def _import(stand_ins: Mapping[str, object], name: str, *rest: Any) -> object:
    return stand_ins[name] if name in stand_ins else builtins.__import__(name, *rest)


def _name(node: ast.stmt) -> str | None:
    """What a statement defines."""
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _globals(code: CodeType) -> Iterator[str]:
    """Names that are looked up outside of functions."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))


def _remedy(version: str) -> str:
    return f"(version {version}); give a version that benchmarks/engines.py names, or mend it there"
