"""Triton's tools for building kernels, with private names of Triton."""

from __future__ import annotations

import os


def ptxas_version(capability: tuple[int, int]) -> str | None:
    """Return the version of the ptxas that Triton uses for GPUs of this capability, or None if it is unknown."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        return str(get_ptxas(10 * capability[0] + capability[1]).version)
    except Exception:
        # Triton raises RuntimeError if ptxas is missing; running ptxas may raise other errors.
        return None


def why_no_cache() -> str | None:
    """Return why Triton cannot cache kernels, or None if it can or is not installed."""
    try:
        from triton import knobs

        folder = os.path.abspath(knobs.cache.dir)
    except Exception:
        return None
    existing = folder
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK):
        return None
    return f"Triton cannot cache kernels in {folder}; set TRITON_CACHE_DIR to a folder that can be written"
