"""The grouped linear layer: every call that comes here, casts, noise, quantized Parameters and refusals."""

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    FP8,
    HADAMARD,
    NVFP4,
    PER_EXPERT,
    RECIPES,
    assert_same,
    both_masters,
    every_recipe,
    replace,
    tokens,
    weight,
    weight_calls,
)
from products_by_hand import grouped_by_hand
from torch import nn

from torchao_blockwise import BlockwiseFP8Tensor, MasterWeightTensor, NVFP4Tensor
from torchao_blockwise.nn import grouped_linear
from torchao_blockwise.testing import assert_bitwise_equal, sqnr

NAMES = ("output", "grad_input", "grad_weight")


def ends_of(sizes, device="cpu") -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def experts(config, dtype=torch.float32, device="cpu") -> nn.Parameter:
    hp = (weight(3, 40, 72, seed=1) / 64).to(device=device, dtype=dtype)
    return nn.Parameter(MasterWeightTensor(hp, config))


def quantized(hp: torch.Tensor, config) -> torch.Tensor:
    if config.weight_format.has_global_scale:
        return NVFP4Tensor.from_hp(hp, config=config)
    return BlockwiseFP8Tensor.from_hp(hp, power_of_2_scales=config.power_of_2_scales, config=config)


def run(call, x, w, ends, dy):
    """(output, grad_input, grad_weight) of one pass of `call(x, w, ends)` from fresh gradients."""
    w.grad, x = None, x.detach().requires_grad_()
    out = call(x, w, ends)
    out.backward(dy)
    return out.detach(), x.grad, w.grad


def transposed_mm(x, w, ends):
    return F.grouped_mm(x, w.transpose(-2, -1), offs=ends)


CALLS = {
    "transpose": transposed_mm,
    "mT": lambda x, w, ends: torch._grouped_mm(x, w.mT, ends),
    "positional": lambda x, w, ends: torch._grouped_mm(x, w.permute(0, 2, 1), ends, None, None),
    "cast_transposed": lambda x, w, ends: F.grouped_mm(x, w.mT.to(x.dtype), offs=ends),
    "cast": lambda x, w, ends: F.grouped_mm(x, w.to(x.dtype).mT, offs=ends),
    "view": lambda x, w, ends: F.grouped_mm(x, w.view_as(w).mT, offs=ends),
}


def case(config, dtype=torch.float32, sizes=(4, 0, 5)):
    """(x, weight, ends, dy) of three experts with that many tokens."""
    x, dy = (tokens(sum(sizes), width, dtype=dtype, seed=width) for width in (72, 40))
    return x, experts(config, dtype=dtype), ends_of(sizes), dy


@every_recipe
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("kind", ("master", "quantized", "frozen"))
def test_grouped_mm_comes_here(config, call, dtype, kind):
    x, w, ends, dy = case(config, dtype)
    *expected, grad_weight = grouped_by_hand(x, w.hp, ends, dy, config)
    if kind != "master":
        w = nn.Parameter(quantized(w.hp, config), requires_grad=kind == "quantized")
        call = transposed_mm if call is CALLS["view"] and config is NVFP4 else call
    grad_weight = None if kind == "frozen" else grad_weight
    assert_same(run(call, x, w, ends, dy), (*expected, grad_weight), NAMES)


SAVED = replace(FP8, save_weights="quantized")


@pytest.mark.parametrize("config", (*RECIPES.values(), HADAMARD, SAVED), ids=(*RECIPES, "hadamard", "saved"))
def test_experts_stored_transposed(config):
    """[E, K, N], as GPT-OSS has them, give what [E, N, K] give: blocks are square."""
    x, w, ends, dy = case(config, sizes=(5, 130, 41))
    stored = nn.Parameter(MasterWeightTensor(w.hp.mT.contiguous(), config))
    expected = grouped_by_hand(x, w.hp, ends, dy, config)
    got = run(lambda x, w, ends: F.grouped_mm(x, w, offs=ends), x, stored, ends, dy)
    for name, a, b in zip(NAMES, (got[0], got[1], got[2].mT), expected):
        # The reference's products sum in another order along "k".
        assert sqnr(a, b) > 120 if name == "grad_weight" else torch.equal(a, b), name


BATCHED = {
    "bmm": lambda x, w: torch.bmm(x, w.mT),
    "method": lambda x, w: x.bmm(mat2=w.mT),
    "of_rows": lambda x, w: torch.bmm(x, w.flatten(0, 1).view(*w.shape).transpose(1, 2)),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
@pytest.mark.parametrize("tokens_each", (0, 1, 43))
@pytest.mark.parametrize("call", BATCHED.values(), ids=BATCHED)
@every_recipe
def test_tokens_batched_by_expert(config, call, tokens_each, compiled):
    """`bmm` multiplies groups of equal size, as Llama 4's experts and DeepSeek-V4's grouped linear layer call it."""
    x, w, ends, dy = case(config, torch.bfloat16, 3 * [tokens_each])
    batched = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    got = run(lambda x, w, ends: batched(x.view(3, -1, 72), w).flatten(0, 1), x, w, ends, dy)
    assert_same(got, grouped_by_hand(x, w.hp, ends, dy, config), NAMES)


@both_masters
def test_groups_of_rows_share_the_tensor_scale_of_their_matrix(masters):
    """It is the scale that FSDP2 gathers, and that files and quantized Parameters store."""
    x, outputs = tokens(3, 5, 72), []
    for config in (PER_EXPERT, replace(PER_EXPERT, scale_per_expert=False)):
        w = MasterWeightTensor(weight(48, 72), config)
        w = w if masters else NVFP4Tensor.from_hp(w.hp, config=config)
        outputs.append(torch.bmm(x, w.view(3, 16, 72).mT))
    assert_bitwise_equal(*outputs)


@every_recipe
def test_the_dtype_that_is_asked_for_comes_first(config):
    w, x = experts(replace(config, out_dtype=torch.float16)), tokens(9, 72, dtype=torch.bfloat16)
    for out, ends in (
        (F.grouped_mm(x, w.mT, offs=ends_of([4, 0, 5]), out_dtype=torch.float32), [4, 0, 5]),
        (torch.bmm(x.view(3, 3, 72), w.mT, out_dtype=torch.float32).flatten(0, 1), [3, 3, 3]),
    ):
        assert out.dtype == torch.float32
        assert_bitwise_equal(out.half(), grouped_linear(x, w, ends_of(ends)))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
@every_recipe
def test_a_cast_weight_is_rounded_before_it_is_quantized(config, compiled):
    """As torchtitan does on every use; products read the weight itself, forward and backward."""
    w, x, dy, ends = experts(config), tokens(9, 72).bfloat16(), tokens(9, 40, seed=7).bfloat16(), ends_of([4, 0, 5])
    expected = grouped_by_hand(x, w.hp.bfloat16(), ends, dy, config)
    saved = []

    def call(x, w, ends):
        return F.grouped_mm(x, w.bfloat16().mT, offs=ends)

    call = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    with weight_calls() as calls, torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        for _ in range(3):
            got = run(call, x, w, ends, dy)
    assert (calls.quantize, calls.columnwise, calls.transpose) == (6, 3, 0)
    assert_same(got, (b.to(a.dtype) for a, b in zip(got, expected)), NAMES)
    # Not the cast copy, which would be two bytes a parameter.
    assert saved and not any(t.shape == w.shape and t.dtype == torch.bfloat16 for t in saved)


@every_recipe
def test_main_grad_of_experts_stored_transposed(config, device):
    """Added in fp32, in place; `.grad` and the gradients of empty experts do not change."""
    w = nn.Parameter(MasterWeightTensor(experts(config, device=device).hp.mT.contiguous(), config))
    total, dy = torch.full(w.shape, 0.5, device=device), tokens(9, 40, seed=7, device=device)

    def step(seed, sizes):
        x, ends = tokens(9, 72, seed=seed, device=device), ends_of(sizes, device)
        return run(lambda x, w, ends: F.grouped_mm(x, w, offs=ends), x, w, ends, dy)

    parts = ((1, [4, 0, 5]), (2, [9, 0, 0]))
    grads = [step(*part)[1:] for part in parts]
    w.grad, w.main_grad = None, total.clone()
    for part, (grad_x, grad_w) in zip(parts, grads):
        got = step(*part)
        total += grad_w
        assert torch.equal(got[1], grad_x) and got[2] is None
    assert w.grad_added_to_main_grad and (w.main_grad[1] == 0.5).all()
    torch.testing.assert_close(w.main_grad, total, rtol=1e-6, atol=1e-5)


# --- refusals ---------------------------------------------------------------------------------------------------------

X, ENDS = torch.zeros(9, 72), torch.tensor([4, 4, 9], dtype=torch.int32)
ERRORS = {
    "k": (lambda w: F.grouped_mm(X[:, 1:], w.mT, offs=ENDS), ValueError, r"weight \[E, K, N\] must agree"),
    "k_stored": (lambda w: F.grouped_mm(X, w, offs=ENDS), ValueError, r"got \[9, 72\] and \[3, 40, 72\]"),
    "k_function": (lambda w: grouped_linear(X[:, 1:], w, ENDS), ValueError, r"weight \[E, N, K\] must agree in K, got"),
    "int_x": (lambda w: F.grouped_mm(X.int(), w.mT, offs=ENDS), TypeError, r"x \(up\) must be bfloat16, float16 or"),
    "x_3d": (lambda w: F.grouped_mm(X[None].expand(3, 9, 72), w.mT), NotImplementedError,
             r"tokens \[M, K\], experts \[E, K, N\] and offs \[E\], got \[3, 9, 72\], \[3, 72, 40\] without offs"),
    "no_offs": (lambda w: F.grouped_mm(X, w.mT), NotImplementedError, "without offs; flatten tokens"),
    "matrix": (lambda w: F.grouped_mm(X, w[0].mT, offs=ENDS), NotImplementedError, r"\[9, 72\], \[72, 40\] and offs"),
    "bias": (lambda w: F.grouped_mm(X, w.mT, offs=ENDS, bias=torch.zeros(3, 40)), NotImplementedError, "row by row"),
    "weight_first": (lambda w: F.grouped_mm(w, torch.zeros(3, 72, 5)), TypeError, "only a weight can be a quantized"),
    "plain_weight": (lambda w: grouped_linear(X, torch.zeros(3, 40, 72), ENDS), TypeError,
                     "must be a MasterWeightTensor or a quantized tensor, got Tensor; wrap or quantize it, or call"),
    "linear_weight": (lambda w: grouped_linear(X, w[0], ENDS), ValueError, r"weight must be \[E, N, K\], got shape"),
    "device": (lambda w: F.grouped_mm(X.to("meta"), w.mT, offs=ENDS), ValueError, r"but weight is on cpu \(up\); move"),
    "ends_dtype": (lambda w: F.grouped_mm(X, w.mT, offs=ENDS.long()), TypeError, "group_ends must be int32"),
    "ends_2d": (lambda w: F.grouped_mm(X, w.mT, offs=ENDS[None]), ValueError, r"group_ends must be \[E\]"),
    "ends_values": (lambda w: F.grouped_mm(X, w.mT, offs=ENDS.flip(0).contiguous()), ValueError, "must not decrease"),
    "ends_beyond": (lambda w: F.grouped_mm(X[:8], w.mT, offs=ENDS), ValueError, r"must lie in \[0, 8\]"),
    "experts": (lambda w: F.grouped_mm(X, w.mT, offs=ENDS[1:]), ValueError, "one end for each matrix .* got 2 ends"),
    "bmm_e": (lambda w: torch.bmm(X[None], w.mT), ValueError,
              r"x \[E, m, K\] and weight \[E, K, N\] must agree in E and K, got \[1, 9, 72\] and \[3, 72, 40\] \(up\)"),
    "bmm_k": (lambda w: torch.bmm(X.view(3, 3, 72), w), ValueError, r"got \[3, 3, 72\] and \[3, 40, 72\] \(up\)"),
    "bmm_dims": (lambda w: torch.bmm(X, w.mT), ValueError, r"got \[9, 72\] and \[3, 72, 40\] \(up\)"),
    "bmm_int": (lambda w: torch.bmm(X.view(3, 3, 72).int(), w.mT), TypeError, r"x \(up\) must be bfloat16, float16 or"),
    "bmm_first": (lambda w: torch.bmm(w, torch.zeros(3, 72, 5)), NotImplementedError, r"aten\.bmm\.default: .*\bup\b"),
    "bmm_out": (lambda w: torch.bmm(X.view(3, 3, 72), w.mT, out=torch.empty(3, 3, 40)), NotImplementedError,
                r"aten\.bmm\.out: .*\bup\b"),
    "one_row_blocks": (
        lambda w: F.grouped_mm(X, NVFP4Tensor.from_hp(weight(3, 40, 72), block_size=(1, 16)).mT, offs=ENDS),
        ValueError, r"blocks of \(1, 16\) cannot be transposed .* block_size=\(16, 16\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("kind", ("master", "fp8"))
def test_wrong_inputs(call, error, message, kind):
    hp = weight(3, 40, 72)
    with pytest.raises(error, match=message):
        w = MasterWeightTensor(hp, FP8) if kind == "master" else BlockwiseFP8Tensor.from_hp(hp)
        w.layer = "up"
        call(w)


def test_a_weight_whose_cast_is_multiplied_may_not_change_before_backward():
    w = experts(FP8)
    out = F.grouped_mm(X.clone().requires_grad_(), w.bfloat16().mT, offs=ENDS)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
