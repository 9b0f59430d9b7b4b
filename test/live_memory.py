"""The most bytes that live at once, on any device, without an allocator."""

from unittest import mock

from torchao_blockwise.diagnostics import live_memory


def peak_of(work, *args, **options) -> int:
    """The most bytes that live at once of what `work` makes; tensors on the meta device, which take none, left out."""
    plain_tensors = live_memory.plain_tensors
    real = mock.patch.object(live_memory, "plain_tensors", lambda x: [y for y in plain_tensors(x) if not y.is_meta])
    with real, live_memory.LiveMemory() as memory:
        work(*args, **options)
    return memory.peak
