"""What torchao logs and warns of when it is imported, and does not mean this package."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator

# By logger: what its messages about torchao contain. Compiled kernels for recipes that are not ours, and an enum of
# torchao that PyTorch 2.13 says is registered in an older way.
_NOISE = {"torchao": "Failed to load", "torch.utils._pytree": "register_constant"}


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """A context in which torchao is imported without messages that concern nothing here; others are shown.

    Python warns of torchao's source where it compiles it, so once an installation. Filters that others set meanwhile
    stay.
    """
    filters = {name: _without(text) for name, text in _NOISE.items()}
    for name, drop in filters.items():
        logging.getLogger(name).addFilter(drop)
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*\btorchao\b")
    of_source = warnings.filters[0]
    try:
        yield
    finally:
        # Whoever left a `catch_warnings` meanwhile has taken it away already.
        with contextlib.suppress(ValueError):
            warnings.filters.remove(of_source)  # type: ignore[attr-defined]  # a list, promised to be a sequence
        for name, drop in filters.items():
            logging.getLogger(name).removeFilter(drop)


def _without(text: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: text not in record.getMessage()
