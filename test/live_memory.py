"""What lives while a layer runs, operation by operation, on any device, without an allocator."""

from typing import NamedTuple
from unittest import mock

from torchao_blockwise import _compat
from torchao_blockwise.diagnostics import live_memory


class Step(NamedTuple):
    """An operation, and what lives when it is done: its operands still, its results already.

    name: without a namespace for operations of ours, "aten::add" for others. parts: which operations made what lives.
    """

    name: str
    nbytes: int
    parts: tuple[str, ...]


class LiveMemory(live_memory.LiveMemory):
    """Under it `steps` get what lives after each operation, of what was made under it."""

    def __init__(self):
        super().__init__()
        self.steps: list[Step] = []
        self._makers: dict = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        # What runs inside of a product was noted there.
        if func not in live_memory._PRODUCTS:
            self.note(_compat.schema_of(func).name.removeprefix("torchao_blockwise::"))
        return out

    def note(self, name: str) -> None:
        """Add a step of that name now."""
        nbytes = self.live()
        self._makers = {made: self._makers.get(made, name) for made in self._made.values()}
        self.steps.append(Step(name, nbytes, tuple(self._makers.values())))


def peak_of(work, *args, **options) -> int:
    """The most bytes that live at once of what `work` makes; tensors on the meta device, which take none, left out."""
    plain_tensors = live_memory.plain_tensors
    real = mock.patch.object(live_memory, "plain_tensors", lambda x: [y for y in plain_tensors(x) if not y.is_meta])
    with real, live_memory.LiveMemory() as memory:
        work(*args, **options)
    return memory.peak
