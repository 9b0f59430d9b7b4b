"""Versions of other packages: which are wanted, said in one sentence where older ones are installed.

They are refused where a model is converted: an import must not fail in a program that may never convert one.
"""

from __future__ import annotations

import importlib
import re

_WANTED = {"torch": (2, 11), "torchao": (0, 17)}
# The newest that tests run with, as constraints.txt has them.
_TESTED = {"torch": (2, 13), "torchao": (0, 18), "triton": (3, 7)}


def why_too_old() -> str | None:
    """What is wanted, what is installed and the remedy, or None where nothing installed is known to be too old."""
    installed = {name: str(getattr(importlib.import_module(name), "__version__", "")) for name in _WANTED}
    numbers = {name: re.match(r"(\d+)\.(\d+)", version) for name, version in installed.items()}
    if all(found is None or tuple(map(int, found.groups())) >= _WANTED[name] for name, found in numbers.items()):
        return None
    wanted = " and ".join(f"{name} {major}.{minor}" for name, (major, minor) in _WANTED.items())
    got = " and ".join(f"{name} {version}" for name, version in installed.items())
    return f"torchao_blockwise needs {wanted} or newer, got {got}; pip install -U {' '.join(_WANTED)}"


def why_untested() -> str | None:
    """Which installed versions are newer than those that tests run with, or None."""
    newer = []
    for name, tested in _TESTED.items():
        try:
            version = str(getattr(importlib.import_module(name), "__version__", ""))
        except ImportError:
            continue
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is not None and tuple(map(int, found.groups())) > tested:
            newer.append(f"{name} {version} (tested up to {'.'.join(map(str, tested))})")
    return f"newer than what torchao_blockwise is tested with: {', '.join(newer)}" if newer else None


def check() -> None:
    """Raise RuntimeError where versions are installed that are too old."""
    reason = why_too_old()
    if reason is not None:
        raise RuntimeError(reason)
