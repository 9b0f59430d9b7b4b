"""Names in messages: lists, suggestions for misspelled names, and replacements of removed ones."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence

# The number of names that messages list.
_SHOWN = 3


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" to append to a message about an unknown name, or "" if no known name is similar."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def nearest_names(pattern: str, known: list[str]) -> str:
    """Return the three known names that are most similar to a pattern which matches none of them."""
    return ", ".join(difflib.get_close_matches(pattern, known, n=3, cutoff=0))


def shown(names: Sequence[str]) -> str:
    """Return the first names and the number of the others, for messages."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else "")


def refusing_removed(module: str, removed: Mapping[str, str]) -> Callable[[str], object]:
    """Return a module's `__getattr__`, whose error names what to use instead of a name that version 0.2 removed."""
    _, _, short = module.partition(".")

    def __getattr__(name: str) -> object:
        if name in removed:
            raise AttributeError(f"{short}.{name} was removed in version 0.2; use {removed[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
