"""What Triton brings along to build kernels: names that it does not promise to keep, here alone."""

from __future__ import annotations

import os


def ptxas_version(capability: tuple[int, int]) -> str | None:
    """The version of the assembler that Triton calls for GPUs of this capability, or None if that is unknown."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        return str(get_ptxas(10 * capability[0] + capability[1]).version)
    except Exception:
        # Triton raises RuntimeError without the program, and whatever the program ends with.
        return None


def why_no_cache() -> str | None:
    """Why Triton cannot keep built kernels, or None where it can or is not there."""
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
    return f"Triton cannot keep kernels in {folder}; set TRITON_CACHE_DIR to a folder that can be written"
