"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" to append to a message about an unknown name, or "" if no known name is similar."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def nearest_names(pattern: str, known: list[str]) -> str:
    """Return the three known names that are most similar to a pattern which matches none of them."""
    return ", ".join(difflib.get_close_matches(pattern, known, n=3, cutoff=0))
