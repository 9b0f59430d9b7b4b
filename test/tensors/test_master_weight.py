"""MasterWeightTensor: to optimizers, initializers and state dicts it is the high-precision tensor that it holds."""

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import FP8, NVFP4, master, weight
from torch import nn

from torchao_blockwise import BlockwiseFP8Tensor, MasterWeightTensor
from torchao_blockwise.testing import assert_bitwise_equal

INITS = {
    "kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
    "normal_": nn.init.normal_,
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "orthogonal_": nn.init.orthogonal_,
    "zeros_": nn.init.zeros_,
}


@pytest.mark.parametrize("init", INITS.values(), ids=INITS)
def test_initialisers_write_what_they_write_to_a_plain_parameter(init):
    plain, ours = nn.Parameter(weight(40, 24)), master(40, 24)
    for parameter in (plain, ours):
        torch.manual_seed(0)
        init(parameter)
    assert_bitwise_equal(ours.hp, plain.data)


def test_what_it_holds():
    hp = weight(40, 24)
    assert MasterWeightTensor(hp, FP8).hp is hp and MasterWeightTensor(nn.Parameter(hp), FP8).hp.requires_grad is False
    for wrong, config, message in (
        (torch.zeros(2, 2, dtype=torch.int32), FP8, "hp must be bfloat16, float16 or float32, got torch.int32"),
        (BlockwiseFP8Tensor.from_hp(hp), FP8, "hp must be a plain strided tensor, got a BlockwiseFP8Tensor"),
        (hp, None, "config must be a TrainingConfig, got NoneType"),
    ):
        with pytest.raises(TypeError, match=message):
            MasterWeightTensor(wrong, config)


RESHAPES = {
    "t_": lambda w: w.t_(),
    "transpose_": lambda w: w.transpose_(0, 1),
    "unsqueeze_": lambda w: w.unsqueeze_(0),
    "squeeze_": lambda w: w[:1].squeeze_(0),
    "as_strided_": lambda w: w.as_strided_((3, 5), (5, 1), 2),
    "resize_": lambda w: w.resize_(4, 6),
    "set_": lambda w: w.set_(torch.ones(2, 3)),
}


@pytest.mark.parametrize("context", (torch.enable_grad, torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("reshape", RESHAPES.values(), ids=RESHAPES)
def test_a_shape_is_changed_in_place_as_a_plain_ones(reshape, context):
    """Of this tensor: what it is an alias of keeps its own."""
    ours, plain = master(40, 24), master(40, 24).hp
    with context():
        for alias, expected in ((ours.data, plain.data), (ours.detach(), plain.detach())):
            changed, wanted = reshape(alias), reshape(expected)
            assert type(changed) is MasterWeightTensor and torch.equal(changed.hp, wanted)
            assert (changed.shape, changed.stride(), changed.hp.stride()) == (wanted.shape, *2 * (wanted.stride(),))
            assert ours.shape == ours.hp.shape == (40, 24) and torch.equal(ours.hp, plain)


VIEWS = {
    "view": lambda w: w.view(2, 20, 24), "slice": lambda w: w[1:, ::2], "T": lambda w: w.T, "select": lambda w: w[0],
    "split_sizes": lambda w: w.split([1, 39])[1], "chunk": lambda w: w.chunk(3)[2], "unbind": lambda w: w.unbind(0)[3],
    "squeeze": lambda w: w[None].squeeze(0), "expand": lambda w: w.expand(3, 40, 24), "detach": lambda w: w.detach(),
    "as_strided": lambda w: w.as_strided((4, 4), (24, 1)), "data": lambda w: w.data,
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_stay_master_weights_that_share_values(view):
    """A view that came back plain would multiply in high precision unseen."""
    parameter = master(40, 24)
    viewed = view(parameter)
    assert type(viewed) is MasterWeightTensor and viewed.config is FP8
    assert_bitwise_equal(viewed.hp, view(parameter.hp))
    assert viewed.hp.untyped_storage().data_ptr() == parameter.hp.untyped_storage().data_ptr()


@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode))
def test_in_place_operations_and_copies(context):
    with context():
        parameter, other, plain = master(40, 24), master(40, 24, seed=1), torch.zeros(40, 24)
        assert torch.equal(parameter, parameter.clone()) and not torch.equal(parameter, other)
        assert parameter.add_(1) is parameter and plain.copy_(parameter) is plain
        assert torch.add(plain, 1, out=parameter) is parameter
        assert_bitwise_equal(parameter.hp, plain + 1)
        assert torch.equal(parameter.copy_(other), other)
        with pytest.raises(NotImplementedError, match=r"copy from source\.dequantize\(\)"):
            parameter.copy_(BlockwiseFP8Tensor.from_hp(weight(40, 24)))
        with pytest.raises(RuntimeError, match="must match"):
            parameter.copy_(weight(3, 24))


def test_prints():
    parameter = master(40, 24, dtype=torch.bfloat16)
    assert f"{parameter[3, 2]:.4f}" == f"{parameter.hp[3, 2]:.4f}" and f"{parameter}" == repr(parameter)
    assert_expected_inline(
        repr(parameter),
        """MasterWeightTensor(shape=(40, 24), dtype=torch.bfloat16, device='cpu', quantized_to=fp8_128x128, requires_grad=True)""",  # noqa: E501
    )
    assert_expected_inline(
        str(master(40, 24, config=NVFP4).detach()),
        """MasterWeightTensor(shape=(40, 24), dtype=torch.float32, device='cpu', quantized_to=nvfp4_16x16)""",
    )
    with pytest.raises(NotImplementedError) as gemm:
        torch.zeros(1, 24) @ parameter.T
    assert_expected_inline(
        str(gemm.value),
        """aten.mm.default: a converted weight would silently be used in high precision; for low precision, call torch.nn.functional.linear (or nn.Linear; grouped_mm or bmm for experts, in transformers model.set_experts_implementation("grouped_mm"); for a DTensor, nn.Linear or one of these with x.to_local() and weight.to_local()); for high precision, use weight.hp, or exclude the layer (filter_fn=skip_fqns(...)); for an optimizer that does this, convert with master_weights=False and use torchao_blockwise.distributed.MasterWeightOptimizer""",  # noqa: E501
    )
