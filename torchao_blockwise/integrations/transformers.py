"""transformers: configs with which its `from_pretrained` converts models, and callbacks for Trainer.

    from torchao_blockwise.integrations.transformers import BlockwiseFP8Config, from_pretrained

    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=BlockwiseFP8Config())
    model = from_pretrained(folder, "fp8")  # files that are quantized

Importing this module registers the configs. A saved model has plain weights, and its config.json has the recipe.
Loading it converts the model again if this module is imported; otherwise transformers warns and loads a plain model.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from torchao_blockwise import _versions
from torchao_blockwise._compat import hugging_face
from torchao_blockwise.checkpoint.files import config_and_settings
from torchao_blockwise.conversion import custom, recipe_state, unconvert
from torchao_blockwise.conversion.default_filter import recommended
from torchao_blockwise.conversion.handlers import refuse_config
from torchao_blockwise.integrations.recipes import config_of, convert, resume_recipe
from torchao_blockwise.ops import Backend
from torchao_blockwise.tensors import BlockwiseFP8TrainingConfig, QuantizedTensor, TrainingConfig, weights_unchanged
from torchao_blockwise.tensors import NVFP4TrainingConfig as _NVFP4
from torchao_blockwise.tensors.config import VERSION_1, ConfigClass

_versions.require("transformers", (5, 0))

from transformers import TrainerCallback  # noqa: E402  # after its version is known
from transformers.quantizers.auto import register_quantization_config, register_quantizer  # noqa: E402
from transformers.quantizers.base import HfQuantizer  # noqa: E402
from transformers.quantizers.quantizers_utils import should_convert_module  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

from torchao_blockwise.integrations.pretrained import from_pretrained  # noqa: E402, F401  # a public name

hugging_face.count_stored_bytes(QuantizedTensor)
_USE_OURS = (
    "For files that are quantized, call from_pretrained(path, recipe) of torchao_blockwise.integrations.transformers, "
    "which converts the model and loads their values."
)


class BlockwiseConfig(QuantizationConfigMixin, metaclass=ConfigClass):
    """Base class of `BlockwiseFP8Config` and `NVFP4Config`; use one of these.

    modules_to_not_convert: names or patterns as in transformers; default the output heads, tied weights and modules
        that the model keeps in fp32. `recommended_layers` leaves out further layers.
    keep_last_blocks: the number of blocks at the end of each tower that stay in high precision, or their share; default
        15 % in NVFP4, none in FP8.
    fuse: let layers that read the same input share its quantized copies; see `torchao_blockwise.fuse`.
    options: fields of the training config; backend and out_dtype may be names ("triton", "bfloat16").
    Raises TypeError for an unknown option, and the errors of the training config for values.
    """

    method: ClassVar[str]
    recipe: ClassVar[type[TrainingConfig]]

    def __init__(
        self,
        modules_to_not_convert: Sequence[str] | None = None,
        fuse: bool = True,
        keep_last_blocks: int | float | None = None,
        **options: Any,
    ) -> None:
        if isinstance(modules_to_not_convert, str):
            raise TypeError(
                f"{type(self).__name__}: modules_to_not_convert must be a list of names, got a string; write [...]"
            )
        self.quant_method = self.method  # type: ignore[assignment]  # transformers lists only its own methods
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.fuse = fuse
        self.keep_last_blocks = keep_last_blocks
        # Files contain the method, and those of version 0.1 an option `fused`.
        if options.pop("quant_method", None) is not None and "fused" in options:
            del options["fused"]
            options = (VERSION_1 if self.recipe is BlockwiseFP8TrainingConfig else {}) | options
        self.training_config = config_of(self.recipe, options)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, from which `from_dict` restores the config."""
        config = self.training_config
        dtype = None if config.out_dtype is None else str(config.out_dtype).removeprefix("torch.")
        mine = ("quant_method", "modules_to_not_convert", "fuse", "keep_last_blocks")
        plain = dataclasses.asdict(config) | {"backend": Backend(config.backend).value, "out_dtype": dtype}
        return {name: getattr(self, name) for name in mine} | plain


@register_quantization_config("blockwise_fp8")
class BlockwiseFP8Config(BlockwiseConfig):
    """`quantization_config=` for blockwise FP8; options are those of `BlockwiseFP8TrainingConfig`."""

    method = "blockwise_fp8"
    recipe = BlockwiseFP8TrainingConfig


@register_quantization_config("blockwise_nvfp4")
class NVFP4Config(BlockwiseConfig):
    """`quantization_config=` for NVFP4; options are those of `NVFP4TrainingConfig`."""

    method = "blockwise_nvfp4"
    recipe = _NVFP4


hugging_face.advise_on_stored_formats(BlockwiseConfig, _USE_OURS)
# `quantize_` refuses these configs with a message that names the training config.
AOBaseConfig.register(BlockwiseConfig)
for _config in (BlockwiseFP8Config, NVFP4Config):
    register_quantize_module_handler(_config)(refuse_config)


@register_quantizer("blockwise_fp8")
@register_quantizer("blockwise_nvfp4")
class BlockwiseQuantizer(HfQuantizer):
    """Convert a model after its high-precision weights are loaded; `model.dequantize()` calls `unconvert(model)`."""

    quantization_config: BlockwiseConfig
    # Adapters train with any recipe.
    is_trainable = is_compileable = True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether all weights train: yes with master weights; quantized Parameters only serve as bases of adapters."""
        return self.quantization_config.training_config.master_weights

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return the state dict that was passed to `save_pretrained`, or None for the model's own, which is plain."""
        return vars(self).pop("given_state_dict", None), {}

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        """Raise ValueError for files in a format that transformers does not know, such as Model Optimizer's."""
        for folder in {Path(file).parent for file in checkpoint_files or ()}:
            method = config_and_settings(folder)[1].get("quant_method")
            if method not in (None, BlockwiseFP8Config.method, NVFP4Config.method):
                raise ValueError(f"from_pretrained: {folder} is quantized by {method!r}. {_USE_OURS}")

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> nn.Module:
        config = self.quantization_config
        kept = self.get_modules_to_not_convert(model, config.modules_to_not_convert, hugging_face.kept_in_fp32(model))
        heads = config.modules_to_not_convert is not None
        chosen = recommended(model, config.training_config, heads=heads, last_blocks=config.keep_last_blocks)
        chosen &= custom(lambda module, fqn: should_convert_module(fqn, kept), "named in modules_to_not_convert")
        return convert(model, config.training_config, chosen, config.fuse)

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        return unconvert(model)


hugging_face.remember_given_state_dicts(BlockwiseQuantizer)


class UnchangedWeights(TrainerCallback):
    """Quantize each weight once for each optimizer step: microbatches run in `weights_unchanged(model, keep)`."""

    def __init__(self, keep: str = "rowwise") -> None:
        self._keep, self._scope = keep, contextlib.ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._scope.enter_context(weights_unchanged(kwargs["model"], keep=self._keep))

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._scope.close()

    # Also at the beginning, since an exception may have ended an earlier training.
    on_train_begin = on_train_end = on_pre_optimizer_step


class RecipeState(ExportableState, TrainerCallback):
    """Save `recipe_state(model)` in each checkpoint, and restore it when training resumes.

    Each rank keeps the seed of its config and restores the positions in its streams of random bits.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None

    def state(self) -> dict[str, Any]:
        """Return the entry that Trainer saves in `trainer_state.json`."""
        return {"args": {}, "attributes": {} if self._model is None else {"recipe": recipe_state(self._model)}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = self._model = kwargs["model"]
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("recipe")
        if state.global_step and saved is not None:
            resume_recipe(model, saved)


class Numerics(TrainerCallback):
    """Make a monitor when training begins, call its `step()` after each optimizer step, and close it at the end.

    make: model -> a monitor with `step()` and `close()`: `lambda model: NumericsMonitor(model, every=100)`.
    """

    def __init__(self, make: Callable[[nn.Module], Any]) -> None:
        self._make, self._scope = make, contextlib.ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # An exception may have ended an earlier training.
        self._scope.close()
        self.monitor = self._scope.enter_context(contextlib.closing(self._make(kwargs["model"])))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._scope.close()
