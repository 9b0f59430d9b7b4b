"""The class of a converted layer: the layer's own in all but its forward pass."""

import copy
import pickle

import pytest
import torch
from every_layer import Doubling
from helpers import FP8, NVFP4, both_masters, converted, every_recipe, mlp, replace, saved_and_loaded
from torch import fx, nn
from torchao.quantization import quantize_

from torchao_blockwise.nn.converted import ConvertedLinear, restore_class
from torchao_blockwise.testing import assert_bitwise_equal

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))


class Named(nn.Linear):
    """A user's class that leaves the forward pass as it is."""


@every_recipe
@both_masters
def test_the_layer_is_what_it_was_to_others(config, masters):
    plain = nn.Linear(64, 64)
    layer = converted(copy.deepcopy(plain), replace(config, master_weights=masters))
    assert isinstance(layer, ConvertedLinear) and isinstance(layer, nn.Linear)
    assert (type(layer).__name__, type(layer).__module__) == ("Linear", "torch.nn.modules.linear")
    assert list(layer.state_dict()) == list(plain.state_dict())
    assert repr(layer) == repr(plain)[:-1] + f", weight in {config.weight_format.name})"
    layer.weight = plain.weight
    assert repr(layer) == repr(plain)
    layer.weight = converted(copy.deepcopy(plain), replace(config, master_weights=masters)).weight
    assert_bitwise_equal(layer(input=X), layer(X))
    assert type(fx.symbolic_trace(nn.Sequential(layer)).get_submodule("0")) is type(layer)


def test_one_class_for_all_layers_of_a_kind_and_no_more_of_them_in_a_second_conversion():
    model = mlp(FP8)
    kind = type(model[0])
    assert type(model[2]) is kind
    quantize_(model, NVFP4)
    assert type(model[0]) is kind and type(mlp(FP8)[0]) is kind


def test_a_layer_with_its_own_forward_that_shares_the_weight():
    model = nn.Sequential(nn.Linear(64, 64), Doubling(64, 64))
    model[1].weight, model[1].bias = model[0].weight, model[0].bias
    quantize_(model, FP8, filter_fn=lambda m, name: name == "0")
    assert isinstance(model[1], Doubling) and model[1].weight is model[0].weight
    assert_bitwise_equal(model[1](X), 2 * model[0](X))


@pytest.mark.parametrize(
    "make",
    (lambda: nn.Linear(64, 64), lambda: Named(64, 64), lambda: Doubling(64, 64)),
    ids=("linear", "subclass", "own_forward"),
)
@both_masters
def test_copies_and_pickles(make, masters):
    layer = converted(make(), replace(FP8, master_weights=masters))
    expected = layer(X)
    for twin in (
        copy.deepcopy(layer),
        copy.copy(layer),
        pickle.loads(pickle.dumps(layer)),
        saved_and_loaded(layer, weights_only=False),
    ):
        assert type(twin) is type(layer) and type(twin.weight) is type(layer.weight)
        assert vars(twin).keys() == vars(layer).keys()
        assert_bitwise_equal(twin(X), expected)
        assert all(type(x) is torch.Tensor for x in twin.state_dict().values())


def test_a_class_that_another_wrapper_derives_stays():
    layer = converted(nn.Linear(64, 64), FP8)
    layer.__class__ = type("Wrapped", (type(layer),), {})
    with pytest.raises((pickle.PicklingError, AttributeError), match="Wrapped"):
        pickle.dumps(layer)
    assert not restore_class(layer) and type(layer).__name__ == "Wrapped"
