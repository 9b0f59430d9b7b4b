"""Training configs, which define how layers train. Weights carry their config, so both are defined in this folder."""

from __future__ import annotations

import functools
import inspect
from abc import ABCMeta
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torchao.core.config import ALLOWED_AO_MODULES, AOBaseConfig
from typing_extensions import Self

from torchao_blockwise._names import did_you_mean
from torchao_blockwise.formats import (
    FP8_1X128,
    FP8_128X128,
    HIGH_PRECISION_DTYPES,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockFormat,
    hadamard_number,
)
from torchao_blockwise.ops import Backend, get_backend

# The value of `save_activations` and `save_weights` for the quantized copy.
QUANTIZED = "quantized"
_GRAD_WEIGHT_FORMATS = {"1x128": FP8_1X128, "128x128": FP8_128X128}
# What FP8 configs of version 1, which lack these options, did.
VERSION_1 = {"grad_weight_blocks": "1x128"}


# Options of earlier versions: {name: (default, what to do instead of setting another value)}.
REMOVED: dict[str, tuple[Any, str]] = {
    "four_over_six": (False, "remove it: the scale of each block always maps its largest value to 6"),
    "scale_groups": (False, "remove it: checkpoint.export gives layers that engines fuse a common tensor scale"),
}


def without_removed(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` without removed ones, which old files contain at their defaults.

    Raises ValueError, with the replacement, if a removed option has another value.
    """
    for option, (default, instead) in REMOVED.items():
        if options.get(option, default) != default:
            raise ValueError(f"{name}: {option}={options[option]!r} was removed; {instead}")
    return {option: value for option, value in options.items() if option not in REMOVED}


def _refuse_quantization_config(config: Any) -> NoReturn:
    """Raise: `from_pretrained` reads the attribute `quant_method` of its `quantization_config`."""
    cls = config if isinstance(config, type) else type(config)
    got = f"{'the class' if config is cls else 'a'} {cls.__name__}"
    raise AttributeError(
        f"from_pretrained: quantization_config must be {name_in_transformers(cls)}() from "
        f"torchao_blockwise.integrations.transformers (with the same options), got {got}; use it, or load the model "
        "without quantization_config and call quantize_"
    )


def name_in_transformers(cls: type) -> str:
    """Return the name of the config in `integrations.transformers` with the options of `cls`, or of its base class."""
    ours = next(c for c in cls.__mro__ if c.__module__.partition(".")[0] == __package__.partition(".")[0])
    return ours.__name__.replace("Training", "")


class ConfigClass(ABCMeta):
    """Metaclass of configs: drops removed options, and raises where a class is passed instead of a config."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        # torchao's `config_from_dict` passes the version of a saved config if it is another one.
        if "version" in options and (current := getattr(cls, "version", None)):
            if (version := options.pop("version")) > current:
                raise ValueError(f"{cls.__name__}: version {version} is later than {current}; update this package")
            options = (VERSION_1 if version < current else {}) | options
        return super().__call__(*args, **without_removed(cls.__name__, options))

    @property
    def __signature__(cls) -> inspect.Signature:
        """The fields of the config, for `help` and documentation; without it they would show `__call__`."""
        _, *options = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
        return inspect.Signature(options)

    quant_method = property(_refuse_quantization_config)


# `quantize_` then looks for a handler instead of calling the class as a function that converts.
AOBaseConfig.register(ConfigClass)


@dataclass(frozen=True)
class TrainingConfig(AOBaseConfig, metaclass=ConfigClass):
    """Base class of training configs; use `BlockwiseFP8TrainingConfig` or `NVFP4TrainingConfig`."""

    weight_format: ClassVar[BlockFormat]
    activation_format: ClassVar[BlockFormat]
    power_of_2_scales: ClassVar[bool] = False
    stochastic_rounding: ClassVar[bool] = False
    seed: ClassVar[int] = 0
    scale_per_expert: ClassVar[bool] = False
    # Not annotated, which would make it an earlier field of the config that has it as an option.
    save_weights = "high_precision"

    save_activations: Literal["quantized", "high_precision"] = "quantized"
    master_weights: bool = True
    backend: Backend | str = Backend.AUTO
    out_dtype: torch.dtype | None = None

    def __new__(cls, *args: object, **options: object) -> Self:
        """Raise TypeError for an unknown option, with the most similar one."""
        known = [field.name for field in fields(cls)]
        for name in (name for name in options if name not in known):
            others = [c.__name__ for c in TrainingConfig.__subclasses__() if name in [f.name for f in fields(c)]]
            meant = f"; it is an option of {others[0]}" if others else did_you_mean(name, known)
            raise TypeError(f"{cls.__name__}: unknown option {name!r}; the options are {', '.join(known)}{meant}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.save_activations == self.weight_format.name.partition("_")[0]:
            # The earlier name, "fp8" or "nvfp4"; saved configs contain it.
            object.__setattr__(self, "save_activations", QUANTIZED)
        object.__setattr__(self, "backend", get_backend(self.backend))
        name = type(self).__name__
        for field in ("save_activations", "save_weights"):
            if getattr(self, field) not in (QUANTIZED, "high_precision"):
                wanted = f"{QUANTIZED!r} or 'high_precision'"
                raise ValueError(f"{name}: {field} must be {wanted}, got {getattr(self, field)!r}")
        for field in ("master_weights", "power_of_2_scales", "stochastic_rounding", "scale_per_expert"):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(f"{name}: {field} must be True or False, got {getattr(self, field)!r}")
        if self.out_dtype not in (None, *HIGH_PRECISION_DTYPES):
            raise ValueError(
                f"{name}: out_dtype must be torch.bfloat16, torch.float16, torch.float32 or None (the dtype of the "
                f"input), got {self.out_dtype!r}"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set and check the fields of a loaded or copied config, ignoring fields of other versions."""
        state = VERSION_1 | without_removed(type(self).__name__, state)
        for field in fields(self):
            if field.name in state:
                object.__setattr__(self, field.name, state[field.name])
        self.__post_init__()

    quant_method = property(_refuse_quantization_config)

    # The Hadamard transform of both operands of `grad_weight`, as `CastOptions` stores it; 0 for none.
    hadamard_number: ClassVar[int] = 0

    @property
    def grad_weight_format(self) -> BlockFormat:
        """The format of a layer's input in `grad_weight`, which is that of its columnwise copy."""
        return self.activation_format


@dataclass(frozen=True)
class BlockwiseFP8TrainingConfig(TrainingConfig):
    """Train in blockwise FP8: weights 128×128, activations and gradients 1×128, all three GEMMs in e4m3.

    grad_weight_blocks: the blocks in which a layer's input is quantized for `grad_weight`. With "128x128" (default), a
        block is 128 tokens × 128 features, and `grad_weight` is the same kind of GEMM as `output`, which is faster.
        With "1x128", a block is 128 tokens × 1 feature, as in the report. `output` and `grad_input` do not depend on
        this option.
    save_weights: "high_precision" (default) saves the weight itself for backward, which quantizes it again. "quantized"
        quantizes both copies of a master weight in forward, in one read, and saves the columnwise one. This takes 1
        more byte per parameter until backward, and is faster if there are few tokens per parameter, as in experts.
        Gradients are bitwise identical. It has no effect on weights that FSDP2 gathers (backward transposes the
        gathered bytes), on casts of weights, and on eager layers inside `weights_unchanged`, whose copies compiled
        layers do not use.
    save_activations: "quantized" (default) saves the columnwise FP8 copy of the input for `grad_weight`, 1 byte per
        element. "high_precision" saves the input itself and quantizes it in backward. Gradients are bitwise identical.
    power_of_2_scales: round scales to powers of two.
    master_weights: True (default) keeps the Parameter in high precision, and each GEMM quantizes it, in forward and in
        backward (`weights_unchanged` keeps the copies for several passes). False makes the Parameter itself a quantized
        tensor (1 byte per parameter), for frozen base models, and for `distributed.MasterWeightOptimizer`, which holds
        the master weights.
    backend: AUTO, or the name of a backend; see `ops.Backend`.
    out_dtype: dtype of the layer's output. None (default) is the dtype of the input, or that of autocast.

    Raises ValueError or TypeError for invalid values.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3.
    """

    weight_format: ClassVar[BlockFormat] = FP8_128X128
    activation_format: ClassVar[BlockFormat] = FP8_1X128
    # Of torchao's files of configs. Not annotated, which would make it a field.
    version = 2

    power_of_2_scales: bool = False  # type: ignore[misc]  # a constant in the base class
    grad_weight_blocks: Literal["1x128", "128x128"] = "128x128"
    save_weights: Literal["high_precision", "quantized"] = "high_precision"

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.save_weights == QUANTIZED and not self.master_weights:
            raise ValueError(
                f"{name}: save_weights='quantized' needs master_weights=True, because a quantized Parameter is never "
                "quantized in a step; leave one of them out"
            )
        if self.grad_weight_blocks not in _GRAD_WEIGHT_FORMATS:
            wanted, got = " or ".join(map(repr, _GRAD_WEIGHT_FORMATS)), self.grad_weight_blocks
            raise ValueError(f"{name}: grad_weight_blocks must be {wanted}, got {got!r}")

    @property
    def grad_weight_format(self) -> BlockFormat:
        return _GRAD_WEIGHT_FORMATS[self.grad_weight_blocks]


@dataclass(frozen=True)
class NVFP4TrainingConfig(TrainingConfig):
    """Train in NVFP4: weights 16×16, activations and gradients 1×16.

    hadamard: apply a random Hadamard transform along the tokens to both operands of `grad_weight`, x and dy, in chunks
        of 16 tokens. It spreads outliers over a chunk and cancels in the GEMM. True (default) uses the 16 signs
        `formats.DEFAULT_SIGNS`. A tuple sets other signs, which torchao's `config_to_dict` does not support. False
        disables it. Each rank and each expert starts a new chunk.
    stochastic_rounding: round gradients up or down at random, so that the expected value is exact to 1/256 of a step
        (default). False rounds them to nearest, like all other tensors. Random bits depend on the position of the
        element, so they are the same on every device, compiled or not, and for any sharding. To resume a run, save
        `recipe_state(model)`.
    seed: 64-bit seed of the random bits; give each data-parallel rank a different one.
    scale_per_expert: compute a separate tensor scale for each expert of a weight [E, N, K] and for the tokens of each
        expert. The quantized values of an expert then depend only on its values and tokens, so under expert parallelism
        they are the same as on one device, without an exchange of amaxes. False (default) computes one scale for all
        experts. Does not affect other layers.
    Other fields as in `BlockwiseFP8TrainingConfig`, without power_of_2_scales (block scales are e4m3),
    grad_weight_blocks and save_weights. Without FP4 tensor cores, GEMMs compute in bf16 on decoded values, with fp32
    accumulation.
    Keep the last blocks and the head in high precision (`recommended_layers(model, config)`). An activation has one
    tensor scale for the whole batch, or for the tokens of an expert, so the quantized values of a token depend on the
    other tokens.

    Raises ValueError or TypeError for invalid values.
    Source: NVIDIA, Pretraining Large Language Models with NVFP4 (arXiv 2509.25149).
    """

    weight_format: ClassVar[BlockFormat] = NVFP4_16X16
    activation_format: ClassVar[BlockFormat] = NVFP4_1X16

    hadamard: bool | tuple[int, ...] = True
    stochastic_rounding: bool = True  # type: ignore[misc]  # a constant in the base class
    seed: int = 0  # type: ignore[misc]
    scale_per_expert: bool = False  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.hadamard, list):
            object.__setattr__(self, "hadamard", tuple(self.hadamard))
        try:
            hadamard_number(self.hadamard)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: {error}") from None
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"{type(self).__name__}: seed must be from 0 to 2^64 - 1, got {self.seed!r}")

    @property
    def hadamard_number(self) -> int:  # type: ignore[override]
        return hadamard_number(self.hadamard)


# `torchao.core.config.config_from_dict` rebuilds only configs of these modules.
ALLOWED_AO_MODULES.add(__name__)
torch.serialization.add_safe_globals([BlockwiseFP8TrainingConfig, NVFP4TrainingConfig])
# Loading looks a backend up by its value. The class itself would let a file change its members.
torch.serialization.add_safe_globals([(get_backend, f"{Backend.__module__}.{Backend.__qualname__}")])


@functools.cache
def config_of_groups(config: TrainingConfig) -> TrainingConfig:
    """Return the config of a matrix whose rows are viewed as groups [G, N, K]: the matrix has one tensor scale."""
    return replace(config, scale_per_expert=False) if isinstance(config, NVFP4TrainingConfig) else config


def check_config(name: str, config: object) -> None:
    """Raise TypeError, with the fix, unless `config` is a training config. name: the function that needs it."""
    if isinstance(config, TrainingConfig):
        return
    kind = config if isinstance(config, type) else type(config)
    got = f"the class {kind.__name__}" if config is kind else kind.__name__
    # A config of integrations.transformers names its training config.
    meant = kind if issubclass(kind, TrainingConfig) else getattr(kind, "recipe", None)
    remedy = "use BlockwiseFP8TrainingConfig() or NVFP4TrainingConfig()" if meant is None else f"use {meant.__name__}()"
    raise TypeError(f"{name}: config must be a training config, got {got}; {remedy}")
