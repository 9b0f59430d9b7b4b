"""Lightning: a precision plugin that converts the module, and callbacks.

    from torchao_blockwise.integrations.lightning import BlockwisePrecision

    trainer = Trainer(plugins=[BlockwisePrecision("fp8")])

With `ModelParallelStrategy`, convert before sharding, in `configure_model`:

    self.trainer.precision_plugin.convert_module(self.model)
    fully_shard(self.model)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _versions
from torchao_blockwise.conversion import conversion_report, recipe_state
from torchao_blockwise.integrations.recipes import convert, nearest, resume_recipe, training_config
from torchao_blockwise.tensors import TrainingConfig, weights_unchanged

_versions.require("lightning", (2, 4))

from lightning.pytorch import Callback  # noqa: E402  # after its version is known
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision  # noqa: E402

# {name: Lightning's plugin, which handles everything that is not converted}
_PRECISIONS: dict[str, Callable[[], Precision]] = {
    "32-true": Precision,
    "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cuda" if torch.cuda.is_available() else "cpu"),
    "bf16-true": lambda: HalfPrecision("bf16-true"),
}
_DELEGATED = "forward_context", "tensor_init_context", "module_init_context", "convert_input", "convert_output"


class BlockwisePrecision(Precision):
    """`Trainer(plugins=[BlockwisePrecision("fp8")])` converts the module before its optimizers are made.

    recipe: "fp8", "nvfp4", or a training config.
    precision: of everything else, as in `Trainer(precision=...)`: "32-true", "bf16-mixed" or "bf16-true".
    filter_fn: the layers to convert; default `recommended_layers(module, config)`.
    fuse: let layers that read the same input share its quantized copies; see `torchao_blockwise.fuse`.
    Raises ValueError for another name, and if no layer is converted.
    """

    def __init__(
        self,
        recipe: str | TrainingConfig,
        precision: str = "32-true",
        filter_fn: Callable[[nn.Module, str], bool] | None = None,
        fuse: bool = True,
    ) -> None:
        if precision not in _PRECISIONS:
            raise ValueError(nearest("BlockwisePrecision: precision", precision, _PRECISIONS))
        self.config = training_config(recipe)
        self.precision = precision  # type: ignore[assignment]  # one of the names that Lightning lists
        self._filter_fn, self._fuse = filter_fn, fuse
        self._module: nn.Module | None = None
        self._inner = _PRECISIONS[precision]()
        for method in _DELEGATED:
            setattr(self, method, getattr(self._inner, method))

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert `module` in place, unless a layer of it is already converted; return it."""
        self._module = module
        if conversion_report(module).totals["converted"]:
            return module
        return convert(self._inner.convert_module(module), self.config, self._filter_fn, self._fuse)

    def state_dict(self) -> dict[str, Any]:
        """Return the `recipe_state` of the module, which Lightning saves in checkpoints."""
        return {} if self._module is None else recipe_state(self._module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._module is not None:
            resume_recipe(self._module, state_dict)


class UnchangedWeights(Callback):
    """Quantize each weight once for each optimizer step: microbatches run in `weights_unchanged(module, keep)`."""

    def __init__(self, keep: str = "rowwise") -> None:
        self._keep, self._scope, self._is_open = keep, contextlib.ExitStack(), False

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        if not self._is_open:
            self._scope.enter_context(weights_unchanged(pl_module, keep=self._keep))
            self._is_open = True

    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._is_open = False
        self._scope.close()

    on_train_end = on_exception = on_before_optimizer_step


class Numerics(Callback):
    """Make a monitor when training begins, call its `step()` after each optimizer step, and close it at the end.

    make: module -> a monitor with `step()` and `close()`: `lambda module: NumericsMonitor(module, every=100)`.
    """

    def __init__(self, make: Callable[[nn.Module], Any]) -> None:
        self._make, self._scope, self._steps = make, contextlib.ExitStack(), 0

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self._steps = trainer.global_step
        self.monitor = self._scope.enter_context(contextlib.closing(self._make(pl_module)))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        # Only after an optimizer step, not after each microbatch.
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self.monitor.step()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._scope.close()

    on_exception = on_train_end
