"""Where a model holds its Parameters, looked up once for all layers of a `quantize_` call."""

from __future__ import annotations

import threading
import weakref

from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._compat import hugging_face


class ModelIndex:
    """Of a model: the names of its modules, which of them hold a Parameter, and the Parameters' numbers.

    It holds none of them: it is of a model whose modules and Parameters stay the objects that they were.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._names: dict[int, str] = {}
        self._holders: dict[int, list[str]] = {}
        for name, module in model.named_modules():
            self._names[id(module)] = name
            for held in {id(p) for p in _compat.parameters_of(module).values() if p is not None}:
                self._holders.setdefault(held, []).append(name)
        # Of modules; they are left out.
        self.adapters = {id(module) for module in hugging_face.adapters_in(model)}
        self._numbers = {id(p): number for number, p in enumerate(model.parameters())}

    def is_of(self, model: nn.Module) -> bool:
        return self._model() is model

    def name_of(self, module: nn.Module) -> str:
        return self._names[id(module)]

    def number_of(self, weight: nn.Parameter) -> int:
        """Its number among the model's Parameters, each of which counts once."""
        return self._numbers[id(weight)]

    def holders_of(self, weight: nn.Parameter) -> list[nn.Module]:
        """The modules that hold this very Parameter."""
        model = self._model()
        assert model is not None, "whoever asks has the model"
        return [model.get_submodule(name) for name in self._holders.get(id(weight), ())]


# Of a thread, the index of the model that its last `quantize_` is about.
_last = threading.local()


def looked_up(model: nn.Module, *, anew: bool) -> ModelIndex:
    """The index of `model`; `anew` where the model may have changed since it was indexed."""
    index: ModelIndex | None = getattr(_last, "index", None)
    if anew or index is None or not index.is_of(model):
        index = _last.index = ModelIndex(model)
    return index
