"""Import torchao without the messages that do not concern this package."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator

# {logger: text of its messages to drop}: compiled kernels that this package does not use, and an enum of torchao that
# is registered in a deprecated way since PyTorch 2.13.
_NOISE = {"torchao": "Failed to load", "torch.utils._pytree": "register_constant"}


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """A context for importing torchao that drops messages which do not concern this package; others are shown.

    Python's syntax warnings about torchao's source, which appear once after an installation, are dropped too. Warning
    filters that are set meanwhile stay.
    """
    filters = {name: _without(text) for name, text in _NOISE.items()}
    for name, drop in filters.items():
        logging.getLogger(name).addFilter(drop)
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*\btorchao\b")
    of_source = warnings.filters[0]
    try:
        yield
    finally:
        # Leaving a `catch_warnings` context meanwhile may have removed it already.
        with contextlib.suppress(ValueError):
            warnings.filters.remove(of_source)  # type: ignore[attr-defined]  # a list, promised to be a sequence
        for name, drop in filters.items():
            logging.getLogger(name).removeFilter(drop)


def _without(text: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: text not in record.getMessage()
