"""Training configs: defaults, every refusal, and the round trip through torchao's dict."""

import copy
import dataclasses
import inspect
import json
import pickle

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import saved_and_loaded
from torchao.core.config import config_from_dict, config_to_dict

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, ops
from torchao_blockwise.formats import DEFAULT_SIGNS, FP8_1X128, FP8_128X128, NVFP4_1X16

CONFIGS = (BlockwiseFP8TrainingConfig, NVFP4TrainingConfig)
SIGNS = (1, -1) * 8
both_classes = pytest.mark.parametrize("cls", CONFIGS, ids=("fp8", "nvfp4"))


def test_defaults():
    assert_expected_inline(
        repr(BlockwiseFP8TrainingConfig()),
        """BlockwiseFP8TrainingConfig(power_of_2_scales=False, save_activations='quantized', master_weights=True, backend=<Backend.AUTO: 'auto'>, out_dtype=None, grad_weight_blocks='128x128', save_weights='high_precision')""",  # noqa: E501
    )
    assert_expected_inline(
        repr(NVFP4TrainingConfig()),
        """NVFP4TrainingConfig(stochastic_rounding=True, seed=0, scale_per_expert=False, save_activations='quantized', master_weights=True, backend=<Backend.AUTO: 'auto'>, out_dtype=None, hadamard=True)""",  # noqa: E501
    )


@both_classes
def test_signature_names_each_option_with_its_default(cls):
    options = {f.name: f.default for f in dataclasses.fields(cls)}
    shown = inspect.signature(cls).parameters
    assert {name: option.default for name, option in shown.items()} == options
    assert "Literal['quantized', 'high_precision']" in str(shown["save_activations"])


def test_only_master_weights_of_fp8_are_saved_quantized():
    assert BlockwiseFP8TrainingConfig(save_weights="quantized").save_weights == "quantized"
    with pytest.raises(ValueError, match="save_weights must be 'quantized' or 'high_precision', got 'fp8'"):
        BlockwiseFP8TrainingConfig(save_weights="fp8")
    with pytest.raises(ValueError, match="save_weights='quantized' needs master_weights=True"):
        BlockwiseFP8TrainingConfig(save_weights="quantized", master_weights=False)
    with pytest.raises(TypeError, match="unknown option 'save_weights'"):
        NVFP4TrainingConfig(save_weights="quantized")


def test_versions_of_saved_configs():
    """Of version 1 the blocks are others; a later one may have options that are not known here."""
    fp8, nvfp4 = (config_to_dict(cls()) for cls in CONFIGS)
    older = {name: x for name, x in fp8["_data"].items() if name != "grad_weight_blocks"}
    with pytest.warns(UserWarning, match="Stored version"):
        assert config_from_dict(fp8 | {"_data": older, "_version": 1}).grad_weight_blocks == "1x128"
    for later in (fp8, nvfp4):
        with (
            pytest.warns(UserWarning, match="Stored version"),
            pytest.raises(ValueError, match="version 3 is later than"),
        ):
            config_from_dict(later | {"_version": 3})


def test_blocks_of_grad_weight_belong_to_fp8():
    fp8, nvfp4 = (cls() for cls in CONFIGS)
    assert (fp8.grad_weight_format, nvfp4.grad_weight_format) == (FP8_128X128, NVFP4_1X16)
    assert BlockwiseFP8TrainingConfig(grad_weight_blocks="1x128").grad_weight_format is FP8_1X128
    with pytest.raises(ValueError, match="grad_weight_blocks must be '1x128' or '128x128', got '128'"):
        BlockwiseFP8TrainingConfig(grad_weight_blocks="128")
    with pytest.raises(TypeError, match=r"unknown option 'grad_weight_blocks'.*; it is an option of BlockwiseFP8Train"):
        NVFP4TrainingConfig(grad_weight_blocks="1x128")
    with pytest.raises(TypeError, match=r"unknown option 'hadamard'.*; it is an option of NVFP4TrainingConfig"):
        BlockwiseFP8TrainingConfig(hadamard=False)


WRONG = {
    "save_activations": ({"save_activations": "bf16"}, "must be 'quantized' or 'high_precision', got 'bf16'"),
    "master_weights": ({"master_weights": "yes"}, "master_weights must be True or False, got 'yes'"),
    "backend": ({"backend": "tritn"}, r"unknown backend 'tritn'; the backends are auto, .*; did you mean 'triton'\?"),
    "out_dtype": ({"out_dtype": torch.float64}, r"out_dtype must be .* or None \(.*\), got torch.float64"),
    "unknown": ({"x": 1}, r"unknown option 'x'; the options are .*save_activations, master_weights"),
    "misspelled": ({"save_activation": "quantized"}, "unknown option .*; did you mean 'save_activations'?"),
    "power_of_2_scales": ({"power_of_2_scales": 2}, "power_of_2_scales"),
}


@both_classes
@pytest.mark.parametrize(("fields", "message"), WRONG.values(), ids=WRONG)
def test_wrong_values(cls, fields, message):
    with pytest.raises((TypeError, ValueError), match=message):
        cls(**fields)


def loaded(cls, **changes):
    """As pickle makes it, which calls no constructor."""
    config = object.__new__(cls)
    config.__setstate__(vars(cls()) | changes)
    return config


@both_classes
def test_states_of_files_are_checked_and_take_fields_alone(cls):
    """Saved configs have the name that a format had for the copies that it saves."""
    name = cls.weight_format.name.partition("_")[0]
    assert cls(save_activations=name) == cls() == loaded(cls, save_activations=name)
    config = loaded(cls, weight_format=3, of_an_older_version="cached")
    assert config == cls() and vars(config).keys() == vars(cls()).keys()
    for field, value in {"save_activations": 7, "out_dtype": torch.int8, "master_weights": 1}.items():
        with pytest.raises((TypeError, ValueError), match=f"{field} must be"):
            loaded(cls, **{field: value})
    with pytest.raises(ValueError, match="unknown backend 'nonsense'"):
        loaded(cls, backend="nonsense")


@both_classes
def test_backends_by_name(cls):
    for backend in ops.Backend:
        assert cls(backend=backend.value) == cls(backend=backend) and cls(backend=backend.value).backend is backend
    assert cls(backend=None) == cls()


def test_signs_are_a_value():
    config = NVFP4TrainingConfig(hadamard=SIGNS)
    assert config == NVFP4TrainingConfig(hadamard=list(SIGNS)) != NVFP4TrainingConfig()
    assert NVFP4TrainingConfig(hadamard=DEFAULT_SIGNS) == NVFP4TrainingConfig(hadamard=list(DEFAULT_SIGNS))
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    # What another version has not saved has the default.
    old = object.__new__(NVFP4TrainingConfig)
    old.__setstate__({"backend": "auto", "save_activations": "nvfp4"})
    assert old == NVFP4TrainingConfig()


@pytest.mark.parametrize("hadamard", (None, 16, "yes", SIGNS[1:], (2,) * 16, torch.ones(16)), ids=str)
def test_other_values_are_not_signs(hadamard):
    with pytest.raises(ValueError, match=r"^NVFP4TrainingConfig: hadamard must be .* or 16 signs of 1 and -1, got"):
        NVFP4TrainingConfig(hadamard=hadamard)


def variants(cls):
    return [
        cls(),
        cls(save_activations="high_precision", backend="reference", out_dtype=torch.bfloat16),
        cls(master_weights=False, out_dtype=torch.float32),
    ]


TRIPS = {
    "torchao_dict": lambda c: config_from_dict(config_to_dict(c)),
    "json": lambda c: config_from_dict(json.loads(json.dumps(config_to_dict(c)))),
    "pickle": lambda c: pickle.loads(pickle.dumps(c)),
    "deepcopy": copy.deepcopy,
    "weights_only": saved_and_loaded,
    "replace": dataclasses.replace,
}


@both_classes
@pytest.mark.parametrize("trip", TRIPS.values(), ids=TRIPS)
def test_round_trips(cls, trip):
    for config in variants(cls):
        again = trip(config)
        assert again == config and type(again) is cls and hash(again) == hash(config)
        assert type(again.backend) is ops.Backend and again.out_dtype is config.out_dtype
