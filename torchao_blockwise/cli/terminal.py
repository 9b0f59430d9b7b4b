"""What commands print: plain text, colored on a terminal, or JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

# Words that say how something is, by the code of their color.
_COLORS = {
    "31": ("problem", "failed", "not healthy", "cannot convert", "FAIL"),
    "32": ("ok", "ran", "healthy", "converted", "fused", "PASS"),
    "33": ("note", "skipped", "unfused", "not converted"),
}
# A longer phrase before one that it holds: "not healthy" before "healthy".
_WORDS = dict(
    sorted(((word, code) for code, words in _COLORS.items() for word in words), key=lambda item: -len(item[0]))
)
# As cells of a table, or where a line begins: not inside of a sentence.
_WORD = re.compile(rf"(?:(?<=^)|(?<=  )|(?<=\w ))({'|'.join(_WORDS)})(?=  |,|:|$)", flags=re.MULTILINE)


class UsageError(Exception):
    """Input that a command cannot work with: one sentence that says what was wanted, what was given and the remedy."""


def show(text: str, data: dict[str, Any] | None) -> None:
    """Print a report: its data as JSON, or its text where they are None."""
    if data is not None:
        print(json.dumps(data, indent=1))
    else:
        print(colored(text) if wants_color() else text)


def wants_color() -> bool:
    """Whether standard output is a terminal and nothing asks for plain text (NO_COLOR, no-color.org; TERM=dumb)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def colored(text: str) -> str:
    """`text` with words of its tables in color."""
    return _WORD.sub(lambda match: f"\033[{_WORDS[match[1]]}m{match[1]}\033[0m", text)
