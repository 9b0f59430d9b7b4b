"""TransposedWeight: experts as grouped products ask for them, exact in all else; and the source of a cast."""

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, NVFP4, both_formats, master, weight
from torch import nn

from torchao_blockwise import BlockwiseFP8Tensor, MasterWeightTensor, NVFP4Tensor
from torchao_blockwise.tensors import TransposedWeight
from torchao_blockwise.testing import assert_bitwise_equal

SHAPE = (3, 40, 72)
KINDS = {
    "master": lambda: MasterWeightTensor(weight(*SHAPE), FP8),
    "master_bf16": lambda: MasterWeightTensor(weight(*SHAPE).bfloat16(), NVFP4),
    "fp8": lambda: BlockwiseFP8Tensor.from_hp(weight(*SHAPE)),
    "nvfp4": lambda: NVFP4Tensor.from_hp(weight(*SHAPE)),
}
every_weight = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
TRANSPOSES = {
    "transpose": lambda w: w.transpose(-2, -1), "transpose_2_1": lambda w: w.transpose(2, 1), "mT": lambda w: w.mT,
    "swapaxes": lambda w: w.swapaxes(-1, -2), "permute": lambda w: w.permute(0, 2, 1),
    "permute_negative": lambda w: w.permute(-3, -1, -2), "mH": lambda w: w.mH,
}  # fmt: skip


@every_weight
@pytest.mark.parametrize("transpose", TRANSPOSES.values(), ids=TRANSPOSES)
def test_a_transpose_of_the_last_two_dims_leads_to_the_weight(make, transpose):
    w = make()
    t = transpose(w)
    assert type(t) is TransposedWeight and t.weight is w
    assert t.shape == (3, 72, 40) and t.stride() == (40 * 72, 1, 72) and not t.is_contiguous()
    assert (t.dtype, t.device, t.requires_grad) == (w.dtype, w.device, False)
    assert repr(t) == f"TransposedWeight(shape=(3, 72, 40), of {w!r})"
    with torch.inference_mode():
        w = make()
        assert type(transpose(w)) is TransposedWeight and type(transpose(w.to(torch.float16))) is TransposedWeight
        assert type(transpose(w).to(torch.float16)) is TransposedWeight


@every_weight
def test_views_of_a_parameter_in_inference_mode(make):
    w = nn.Parameter(make())
    with torch.inference_mode():
        for view in (w.mT, w[1], w.detach(), w.mT.detach()):
            assert not view.is_inference() and view.dtype == w.dtype
        assert w.to(torch.float16).is_inference()


@every_weight
def test_copies_and_a_second_transpose(make):
    w = make()
    t, back = w.mT, w.mT.mT
    assert type(back) is type(w) and back.shape == w.shape and back.data_ptr() == w.data_ptr()
    assert not isinstance(w, MasterWeightTensor) or back.hp is w.hp
    for copy in (t.detach(), t.clone(), t.to(torch.float16), t.data):
        assert type(copy) is TransposedWeight and type(copy.weight) is type(w) and copy.shape == t.shape
    cast = t.to(torch.float16)
    assert cast.dtype == torch.float16 == cast.weight.dtype and t.clone().weight is not t.weight


def test_transposes_of_matrices_and_of_four_dims_are_what_they_were():
    for shape in ((40, 72), (2, 3, 40, 72)):
        w = MasterWeightTensor(weight(*shape), FP8)
        assert type(w.mT) is MasterWeightTensor and w.mT.hp.data_ptr() == w.hp.data_ptr()
    w = MasterWeightTensor(weight(*SHAPE), FP8)
    for t in (w.transpose(0, 1), w.permute(2, 0, 1)):
        assert type(t) is MasterWeightTensor
    assert_bitwise_equal(w.transpose(0, 1).hp, w.hp.transpose(0, 1))


PLAIN = {
    "add": lambda t: t + 1, "norm": lambda t: t.norm(), "sum": lambda t: t.sum(1), "row": lambda t: t[1, 5],
    "index": lambda t: t[torch.tensor([2, 0])], "stack": lambda t: torch.stack([t, t]), "float": lambda t: t.float(),
    "zeros_like": torch.zeros_like, "equal": lambda t: torch.tensor(torch.equal(t, t)), "slice": lambda t: t[:, 3:9],
    "expert": lambda t: t[1], "contiguous": lambda t: t.contiguous(), "unbind": lambda t: t.unbind(0)[2],
}  # fmt: skip


@pytest.mark.parametrize("op", PLAIN.values(), ids=PLAIN)
def test_of_a_master_weight_everything_else_is_done_to_the_values(op):
    w = MasterWeightTensor(weight(*SHAPE), FP8)
    got, expected = op(w.mT), op(w.hp.mT)
    got = got.weight.mT if isinstance(got, TransposedWeight) else got
    assert_bitwise_equal(getattr(got, "hp", got), expected)


REFUSED = {
    "add": ("fp8", lambda t: t + 1, r"not exact on quantized data .* call \.dequantize\(\) first"),
    "expert_of_packed": ("nvfp4", lambda t: t[1], "packs two elements in a byte, so its transpose"),
    "matmul": ("fp8", lambda t: torch.zeros(3, 5, 72) @ t, r"for a GEMM, call torch\.nn\.functional\.linear"),
}


@pytest.mark.parametrize(("kind", "op", "message"), REFUSED.values(), ids=REFUSED)
def test_of_a_quantized_weight_what_is_not_exact_raises(kind, op, message):
    t = KINDS[kind]().mT
    assert_bitwise_equal(t.dequantize(), t.weight.dequantize().mT)
    assert kind == "nvfp4" or torch.equal(t[1].dequantize(), t.dequantize()[1])
    with pytest.raises(NotImplementedError, match=message):
        op(t)


@pytest.mark.parametrize("mode", (torch.enable_grad, torch.no_grad, torch.inference_mode))
def test_gemms_in_high_precision_raise_with_the_layers_name(mode):
    x, out = torch.zeros(3, 5, 72), torch.zeros(3, 5, 40)

    @torch.library.custom_op("torchao_blockwise_test::gemm", mutates_args=())
    def of_others(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    w = KINDS["master"]()
    w.layer = "block.experts.w1"
    with mode():
        t = w.mT
        for gemm in (
            lambda: x @ t, lambda: torch.baddbmm(out, x, t), lambda: torch.addmm(out[0], x[0], t[0]),
            lambda: x @ t.contiguous(), lambda: x @ (t * 2).neg(), lambda: x[:2] @ t[[0, 2]],
            lambda: x.half() @ t.half(),
            lambda: torch.bmm(x, t, out=out), lambda: torch.bmm(w, t), lambda: of_others(x, t),
        ):  # fmt: skip
            with pytest.raises(NotImplementedError, match=r"block.experts.w1.* grouped_mm or bmm for exp"):
                gemm()


def test_compiled_changes_of_a_transposed_view(fresh_dynamo):
    """Inductor makes `prims.fma` of them."""

    def change(t, a, b):
        t.addcmul_(a, b, value=0.5)
        t.addcdiv_(a, b.abs() + 1, value=torch.tensor(0.25).item())
        t.add_(a, alpha=2.0)

    a, b = (weight(*SHAPE, seed=seed).mT for seed in (1, 2))
    w, plain = KINDS["master"](), weight(*SHAPE)
    for x in (w, plain):
        torch.compile(change, fullgraph=True, backend="aot_eager_decomp_partition")(x.mT, a, b)
    assert_bitwise_equal(w.hp, plain)


@every_weight
def test_gradients_pass_to_the_weight(make):
    w = nn.Parameter(make())
    t = w.mT
    assert t.requires_grad and not t.detach().requires_grad and not t.is_leaf
    dy = torch.randn(3, 72, 40).to(t.dtype)
    t.backward(dy)
    assert type(w.grad) is torch.Tensor and torch.equal(w.grad, dy.mT)


# --- casts to another dtype ------------------------------------------------------------------------------------------


CASTS = {
    "bfloat16": lambda w: w.bfloat16(),
    "float16": lambda w: w.to(torch.float16),
    "transposed": lambda w: w.mT.bfloat16().mT,
}


@both_formats
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_products_with_a_cast_that_autograd_records_read_the_weight_of_now(config, cast):
    """The cast itself shows the values of then, to all but products."""
    w, ends = master(*SHAPE, config=config), torch.tensor([2, 2, 5], dtype=torch.int32)
    copy, before = cast(w), w.hp.clone()
    assert copy.source[0] is w.hp and copy.source[1] == copy.dtype
    assert w.source == (w.hp, None) and w.detach().source[1] is None
    with torch.no_grad():
        w.mul_(3)
    assert copy.source[0] is w.hp
    assert_bitwise_equal(copy.hp, before.to(copy.dtype))
    x, now = torch.randn(5, 72).to(copy.dtype), MasterWeightTensor(w.hp.to(copy.dtype), config)
    assert_bitwise_equal(F.grouped_mm(x, copy.mT, offs=ends), F.grouped_mm(x, now.mT, offs=ends))


def changed(change):
    copy = master(*SHAPE).bfloat16()
    with torch.no_grad():
        change(copy)
    return copy


OWN_VALUES = {
    "changed_in_place": lambda: changed(lambda copy: copy.add_(1)),
    "changed_as_alias": lambda: changed(lambda copy: copy.detach().add_(1)),
    "changed_as_view": lambda: changed(lambda copy: copy[1].fill_(2)),
    "changed_transposed": lambda: changed(lambda copy: copy.mT.mul_(2)),
    "unrecorded": lambda: torch.no_grad()(master(*SHAPE).bfloat16)(),
    "inference": lambda: torch.inference_mode()(master(*SHAPE).bfloat16)(),
    "frozen": lambda: MasterWeightTensor(weight(*SHAPE), FP8).bfloat16(),
}


@pytest.mark.parametrize("make", OWN_VALUES.values(), ids=OWN_VALUES)
def test_a_cast_that_was_changed_or_not_recorded_has_values_of_its_own(make):
    copy = make()
    assert copy.source[0] is copy.hp and copy.source[1] is None


def test_a_view_of_the_same_shape_has_the_same_values():
    """`DTensor.to_local` makes such views: kept copies are found by the values."""
    w = MasterWeightTensor(weight(*SHAPE), FP8)
    assert w.view_as(w).hp is w.hp and w.view(3, 40, 72).hp is w.hp
    assert w.view(3, 72, 40).hp is not w.hp
