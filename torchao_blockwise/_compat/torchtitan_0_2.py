"""A name that torchtitan 0.2 does not promise to keep; torchtitan is not imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def saved_operations(parallelize: Callable[..., Any]) -> set[Any] | None:
    """What selective activation checkpointing of the models that `parallelize` splits saves: a set that may grow.

    None where there is no such set beside the function.
    """
    return getattr(parallelize, "__globals__", {}).get("_op_sac_save_list")
