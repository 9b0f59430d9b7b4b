"""Training configs: how the layers that hold a tensor train. A tensor carries its config, so both live here."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import torch
from torchao.core.config import ALLOWED_AO_MODULES, AOBaseConfig

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

if TYPE_CHECKING:
    from typing_extensions import Self

# The value of `save_activations` for the quantized copy.
QUANTIZED = "quantized"
_GRAD_WEIGHT_FORMATS = {"1x128": FP8_1X128, "128x128": FP8_128X128}


# Options of earlier versions: what they were by default, and what to do instead of another value.
REMOVED: dict[str, tuple[Any, str]] = {
    "four_over_six": (False, "leave it out: each block has the scale by which its largest value becomes 6"),
    "scale_groups": (False, "leave it out: checkpoint.export gives layers that engines fuse one tensor scale"),
}


def without_removed(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` without those that are gone, which files have at their defaults.

    Raises ValueError, with the replacement, for another value of one.
    """
    for option, (default, instead) in REMOVED.items():
        if options.get(option, default) != default:
            raise ValueError(f"{name}: {option}={options[option]!r} is gone; {instead}")
    return {option: value for option, value in options.items() if option not in REMOVED}


class ConfigClass(ABCMeta):
    """The class of configs' classes: drops options that are gone, and refuses a class where a config belongs."""

    in_transformers: str

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return super().__call__(*args, **without_removed(cls.__name__, options))

    @property
    def __signature__(cls) -> inspect.Signature:
        """The fields of the config, for `help` and documentation; without it they would show `__call__`."""
        _, *options = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
        return inspect.Signature(options)

    @property
    def quant_method(cls) -> NoReturn:
        """Raise, where `from_pretrained` reads it of its `quantization_config`."""
        _refuse_quantization_config(f"the class {cls.__name__}", cls.in_transformers)


# So that `quantize_` looks for a handler of it, instead of taking the class for a function that converts.
AOBaseConfig.register(ConfigClass)


def _refuse_quantization_config(got: str, name: str) -> NoReturn:
    raise AttributeError(
        f"from_pretrained: quantization_config must be {name}() from torchao_blockwise.integrations.transformers, got "
        f"{got}; it takes the same options, or load the model without it and call quantize_"
    )


@dataclass(frozen=True)
class TrainingConfig(AOBaseConfig, metaclass=ConfigClass):
    """Base class of training configs; use `BlockwiseFP8TrainingConfig` or `NVFP4TrainingConfig`."""

    weight_format: ClassVar[BlockFormat]
    activation_format: ClassVar[BlockFormat]
    quantized_activations: ClassVar[str]
    # The config of integrations.transformers with the same options.
    in_transformers: ClassVar[str]
    power_of_2_scales: ClassVar[bool] = False
    stochastic_rounding: ClassVar[bool] = False
    seed: ClassVar[int] = 0
    scale_per_expert: ClassVar[bool] = False

    save_activations: Literal["quantized", "high_precision"] = "quantized"
    master_weights: bool = True
    backend: Backend | str = Backend.AUTO
    out_dtype: torch.dtype | None = None

    def __new__(cls, *args: object, **options: object) -> Self:
        """A misspelled option is named with the one that is nearest."""
        known = [field.name for field in fields(cls)]
        for name in (name for name in options if name not in known):
            meant = did_you_mean(name, known)
            raise TypeError(f"{cls.__name__}: no option {name!r}; its options are {', '.join(known)}{meant}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.save_activations == self.quantized_activations:
            # As it was called before there was one name for all formats; saved configs have it.
            object.__setattr__(self, "save_activations", QUANTIZED)
        object.__setattr__(self, "backend", get_backend(self.backend))
        name = type(self).__name__
        if self.save_activations not in (QUANTIZED, "high_precision"):
            wanted = f"{QUANTIZED!r} or 'high_precision'"
            raise ValueError(f"{name}: save_activations must be {wanted}, got {self.save_activations!r}")
        for field in ("master_weights", "power_of_2_scales", "stochastic_rounding", "scale_per_expert"):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(f"{name}: {field} must be True or False, got {getattr(self, field)!r}")
        if self.out_dtype not in (None, *HIGH_PRECISION_DTYPES):
            raise ValueError(
                f"{name}: out_dtype must be torch.bfloat16, torch.float16, torch.float32 or None (the input's), "
                f"got {self.out_dtype!r}"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the fields of a loaded or copied config, checked as in a new one; skip those of other versions."""
        without_removed(type(self).__name__, state)
        for field in fields(self):
            if field.name in state:
                object.__setattr__(self, field.name, state[field.name])
        self.__post_init__()

    @property
    def quant_method(self) -> NoReturn:
        """Raise, where `from_pretrained` reads it of its `quantization_config`."""
        _refuse_quantization_config(f"a {type(self).__name__}", self.in_transformers)

    @property
    def of_all_ranks(self) -> TrainingConfig:
        """The config without what ranks may differ in."""
        return replace(self, seed=0) if self.seed else self  # type: ignore[call-arg]  # a field where it is not 0

    # Of the transform of both operands of `grad_weight`, as `CastOptions` carries it; 0 for none.
    hadamard_number: ClassVar[int] = 0

    @property
    def saves_quantized_activations(self) -> bool:
        return self.save_activations == QUANTIZED

    @property
    def grad_weight_format(self) -> BlockFormat:
        """The format of a layer's input in `grad_weight`: that of its columnwise copy."""
        return self.activation_format


@dataclass(frozen=True)
class BlockwiseFP8TrainingConfig(TrainingConfig):
    """Train in blockwise FP8: weights 128×128, activations and gradients 1×128, all three GEMMs in e4m3.

    grad_weight_blocks: the blocks, tokens × features, in which a layer's input is quantized for `grad_weight`: "1x128"
        (default), 128 tokens of a feature, as in the report; or "128x128", for which `grad_weight` is the same kind of
        GEMM as `output`. `output` and `grad_input` are the same bits.
    save_activations: "quantized" (default) saves the columnwise FP8 copy of the input for `grad_weight`, 1 byte an
        element; "high_precision" saves the input itself and quantizes it in backward. Gradients are the same bits.
    power_of_2_scales: round scales to powers of two.
    master_weights: True (default) keeps the Parameter in high precision and quantizes it where a product reads it,
        forward and backward (`weights_unchanged` keeps the copies of several passes); False makes the Parameter the
        quantized tensor itself, 1 byte a parameter: for frozen bases, and for `distributed.MasterWeightOptimizer`,
        which owns the masters.
    backend: AUTO or a backend by name; see `ops.Backend`.
    out_dtype: dtype of the layer's output; None (default) is the input's, or autocast's.

    Raises ValueError or TypeError for a value or combination that cannot work.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3.
    """

    weight_format: ClassVar[BlockFormat] = FP8_128X128
    activation_format: ClassVar[BlockFormat] = FP8_1X128
    quantized_activations: ClassVar[str] = "fp8"
    in_transformers: ClassVar[str] = "BlockwiseFP8Config"

    power_of_2_scales: bool = False  # type: ignore[misc]  # a constant in formats that have no choice
    grad_weight_blocks: Literal["1x128", "128x128"] = "1x128"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grad_weight_blocks not in _GRAD_WEIGHT_FORMATS:
            wanted, got = " or ".join(map(repr, _GRAD_WEIGHT_FORMATS)), self.grad_weight_blocks
            raise ValueError(f"{type(self).__name__}: grad_weight_blocks must be {wanted}, got {got!r}")

    @property
    def grad_weight_format(self) -> BlockFormat:
        return _GRAD_WEIGHT_FORMATS[self.grad_weight_blocks]


@dataclass(frozen=True)
class NVFP4TrainingConfig(TrainingConfig):
    """Train in NVFP4: weights 16×16, activations and gradients 1×16.

    hadamard: transform both operands of `grad_weight`, x and dy, along the tokens: a random Hadamard transform in
        chunks of 16 tokens, which spreads outliers over a chunk and leaves the product as it is. True (default) for
        `formats.DEFAULT_SIGNS`, 16 signs, or False. Chunks begin with the tokens of a rank, and of an expert.
    stochastic_rounding: round gradients up or down by random bits, so that their mean is kept (default); False rounds
        them to nearest, as all else. Bits belong to the element: they are the same on any device, compiled or not, and
        for any split of the tensors over ranks. `recipe_state(model)` has what a run must remember to resume.
    seed: of these bits, 64 bits; give each data-parallel rank another.
    scale_per_expert: each expert of a weight [E, N, K], and the tokens of each expert, have their own tensor scale.
        An expert's bits then depend only on its values and tokens: under expert parallelism they are those of one
        device, activations' too, and ranks exchange no amax for them. False (default): one for all of them. Layers
        without experts are the same either way.
    Other fields as in `BlockwiseFP8TrainingConfig`, without power_of_2_scales (block scales are e4m3) and
    grad_weight_blocks. Where there are no FP4 tensor cores, GEMMs are computed from decoded values in bf16 with fp32
    accumulation. Keep the last blocks and the head in higher precision (`keep_last_blocks`, `skip_lm_head`). An
    activation has one tensor scale for the whole batch, or for the tokens of an expert: the quantized values of a token
    depend on the other tokens.

    Raises ValueError or TypeError for a value that cannot work.
    Source: NVIDIA, Pretraining Large Language Models with NVFP4 (arXiv 2509.25149).
    """

    weight_format: ClassVar[BlockFormat] = NVFP4_16X16
    activation_format: ClassVar[BlockFormat] = NVFP4_1X16
    quantized_activations: ClassVar[str] = "nvfp4"
    in_transformers: ClassVar[str] = "NVFP4Config"

    hadamard: bool | tuple[int, ...] = True
    stochastic_rounding: bool = True  # type: ignore[misc]  # a constant in formats that have no choice
    seed: int = 0  # type: ignore[misc]
    scale_per_expert: bool = False  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.hadamard, bool):
            # So that a list is one too.
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


# `torchao.core.config.config_from_dict` rebuilds configs of these modules only.
ALLOWED_AO_MODULES.add(__name__)
torch.serialization.add_safe_globals([BlockwiseFP8TrainingConfig, NVFP4TrainingConfig])
# A file gets a backend by its value; of the class itself it could change the members.
torch.serialization.add_safe_globals([(get_backend, f"{Backend.__module__}.{Backend.__qualname__}")])


def check_config(name: str, config: object) -> None:
    """Raise TypeError, with the remedy, unless `config` is a training config; `name` asks for one."""
    if isinstance(config, TrainingConfig):
        return
    kind = config if isinstance(config, type) else type(config)
    got = f"the class {kind.__name__}" if config is kind else kind.__name__
    # Of a config of integrations.transformers the training config that it has.
    meant = kind if issubclass(kind, TrainingConfig) else getattr(kind, "recipe", None)
    remedy = (
        "take BlockwiseFP8TrainingConfig() or NVFP4TrainingConfig()" if meant is None else f"write {meant.__name__}()"
    )
    raise TypeError(f"{name}: config must be a training config, got {got}; {remedy}")
