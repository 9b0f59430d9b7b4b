"""Triton's interpreter does again and again what it could do once: here it does it once, with the same results."""

from __future__ import annotations

import functools
import threading

import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Launches patch Triton's language once and not at every call of a device function; dtypes are looked up once."""
    interpreter._patch_lang = _patching_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _once_an_element(interpreter._get_np_dtype)


def _patching_once(patch):
    # Of a thread, so that threads which launch side by side, and fail, leave others as they were.
    local = threading.local()

    class Scope:
        """What a launch has patched, until it ends."""

        def __init__(self, scope):
            self.scope = scope

        def restore(self) -> None:
            local.patched.clear()
            self.scope.restore()

    def patch_lang(fn):
        seen, patched = _languages(fn), vars(local).setdefault("patched", set())
        # A launch begins with nothing patched. What calls of device functions return is not looked at.
        if patched and patched.issuperset(seen):
            return None
        patched.update(seen)
        return Scope(patch(fn))

    return patch_lang


def _once_an_element(np_dtype):
    """Of blocks and scalars alike; types of blocks have no hash, and all types have names."""
    found: dict = {}

    def np_dtype_of(dtype):
        name = dtype.scalar.name
        if name not in found:
            found[name] = np_dtype(dtype)
        return found[name]

    return np_dtype_of


@functools.cache
def _languages(fn) -> frozenset[str]:
    """The modules of Triton's language that a function sees, which are what the interpreter patches."""
    return frozenset(value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core)
