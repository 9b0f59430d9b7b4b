"""Names that nobody knows: which known one is spelled nearly so."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, to be added to a message about an unknown name, or nothing where none is near."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def nearest_names(pattern: str, known: list[str]) -> str:
    """The three known names that are most like a pattern which matches none of them, however unlike they are."""
    return ", ".join(difflib.get_close_matches(pattern, known, n=3, cutoff=0))
