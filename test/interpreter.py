"""Triton's interpreter does again and again what it could do once: here it does it once, with the same results."""

import dataclasses
import functools
import threading

import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Launches patch Triton's language once and not at every call of a device function.

    Checks of integers for overflow, of which Triton looks at the result in debug mode alone, are not computed.
    """
    interpreter._patch_lang = _patching_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _once_an_element(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    for name, place in (("create_masked_load", 0), ("create_masked_store", 1)):
        setattr(type(builder), name, _masked_by_booleans(getattr(type(builder), name), place))


def _masked_by_booleans(function, place: int):
    """Refuse masks of integers, which a block & a scalar are here: Triton 3.9 does, and older ones take them.

    place: of the mask in the arguments behind the pointers.
    """

    @functools.wraps(function)
    def checked(self, pointers, *args, **kwargs):
        mask = args[place]
        assert getattr(mask, "data", mask).dtype == bool, "a mask of a block and a scalar; compare blocks"
        return function(self, pointers, *args, **kwargs)

    return checked


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
