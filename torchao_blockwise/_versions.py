"""Required versions of other packages.

They are checked when a model is converted: an import must not fail in a program that may never convert one.
"""

from __future__ import annotations

import importlib
import re

_WANTED = {"torch": (2, 11), "torchao": (0, 17)}


def _version(package: str) -> tuple[str, tuple[int, ...] | None]:
    """Return a package's version and its first two numbers, or None for these; raise ImportError if it is missing."""
    version = str(getattr(importlib.import_module(package), "__version__", ""))
    found = re.match(r"(\d+)\.(\d+)", version)
    return version, None if found is None else tuple(map(int, found.groups()))


def why_too_old() -> str | None:
    """Return a message with required and installed versions if one is too old, else None."""
    installed = {name: _version(name) for name in _WANTED}
    if all(numbers is None or numbers >= _WANTED[name] for name, (_, numbers) in installed.items()):
        return None
    wanted = " and ".join(f"{name} {major}.{minor}" for name, (major, minor) in _WANTED.items())
    got = " and ".join(f"{name} {version}" for name, (version, _) in installed.items())
    return f"torchao_blockwise needs {wanted} or newer, got {got}; pip install -U {' '.join(_WANTED)}"


def check() -> None:
    """Raise RuntimeError if an installed version is too old."""
    reason = why_too_old()
    if reason is not None:
        raise RuntimeError(reason)


def require(package: str, least: tuple[int, int]) -> None:
    """Raise ImportError, with the remedy, unless `package` is installed in at least this version."""
    wanted = f"{package}>={least[0]}.{least[1]}"
    needs = f"torchao_blockwise.integrations.{package} needs {wanted}"
    try:
        version, numbers = _version(package)
    except ModuleNotFoundError as e:
        raise ImportError(f"{needs}; pip install '{wanted}'") from e
    if numbers is not None and numbers < least:
        raise ImportError(f"{needs}, got {version}; pip install -U '{wanted}'")
