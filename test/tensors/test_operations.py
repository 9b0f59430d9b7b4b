"""Operations on master weights: no GEMM runs in high precision unseen, a copy or a view is a weight again."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, converted, linear_by_hand, master, mlp, replace
from torch import nn
from torch.nn.utils import parametrizations, prune

from torchao_blockwise import MasterWeightTensor, conversion_report
from torchao_blockwise.tensors.operations import Result, result_of

aten = torch.ops.aten

N, K = 40, 24
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (8, K)), generator=torch.Generator().manual_seed(3))


# --- what is refused --------------------------------------------------------------------------------------------------

GEMMS = {
    "matmul": lambda w: x() @ w.t(),
    "matmul_of_weight": lambda w: w @ x(K, 3),
    "matmul_batched": lambda w: x(5, 3, K) @ w.view(1, N, K).expand(5, N, K).mT,
    "addmm_of_two": lambda w: torch.addmm(w[:, :N], w, x(K, K)),
    "addmm_into_plain": lambda w: x(8, N).addmm_(x(), w.detach().t()),
    "baddbmm_": lambda w: x(2, 8, N).baddbmm_(x(2, 8, K), w.detach().t().expand(2, K, N)),
    "einsum": lambda w: torch.einsum("tk,nk->tn", x(), w),
    "tensordot": lambda w: torch.tensordot(x(), w, ([1], [1])),
    "bilinear": lambda w: F.bilinear(x(), x(), w.unsqueeze(0).expand(2, N, K)[:, :K]),
    "conv1d": lambda w: F.conv1d(x(2, K, 9), w[:, :, None]),
    "cdist": lambda w: torch.cdist(x(), w),
    "multi_dot": lambda w: torch.linalg.multi_dot([x(), w.t(), x(N, 2)]),
    "attention": lambda w: F.scaled_dot_product_attention(x(1, 1, 8, K), w[None, None], w[None, None]),
    "lstm": lambda w: torch.lstm_cell(x(2, K), (x(2, 10), x(2, 10)), w, x(N, 10)),
    "normalized": lambda w: x() @ F.normalize(w).t(),
}


@pytest.mark.parametrize("gemm", GEMMS.values(), ids=GEMMS)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_gemms_are_refused(gemm, mode):
    w = master(N, K)
    before = w.hp.clone()
    message = r"silently be used in high precision.* call torch\.nn\.functional\.linear .* weight\.hp, or exclude"
    with mode(), pytest.raises(NotImplementedError, match=message):
        gemm(w)
    assert torch.equal(w.hp, before)


NAMES_OF_GEMMS = """
mm bmm addmm addbmm baddbmm mv addmv addr linear matmul inner tensordot bilinear _trilinear cdist _cdist_forward hspmm
convolution conv2d conv_transpose2d convolution_backward mkldnn_convolution cudnn_convolution linear_backward sspaddmm
mkldnn_linear _euclidean_dist _grouped_mm _scaled_mm _scaled_grouped_mm _int_mm _sparse_mm _addmm_activation
_weight_int4pack_mm _weight_int8pack_mm _dyn_quant_matmul_4bit _scaled_dot_product_flash_attention
_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention _native_multi_head_attention
_transformer_encoder_layer_fwd lstm gru rnn_tanh _thnn_fused_lstm_cell mkldnn_rnn_layer _cudnn_rnn miopen_rnn
"""


@pytest.mark.parametrize("first_alone", (False, True))
def test_every_form_of_a_gemm_is_refused(first_alone):
    """`addmm_`, `_foreach_mm` and `mm.out` too; where a weight comes first, a GEMM of others is added to it."""
    adds = {"addbmm", "addmm", "addr", "baddbmm"} if first_alone else set()
    for name in NAMES_OF_GEMMS.split():
        forms = [getattr(aten, form, None) for form in (name, f"{name}_", f"_foreach_{name}")]
        overloads = [getattr(form, overload) for form in forms if form is not None for overload in form.overloads()]
        assert overloads, name
        wanted = Result.DERIVED if name in adds else Result.REFUSED
        assert {result_of(op, 2, first_alone) for op in overloads} == {wanted}, name


def test_a_refusal_names_the_layer_and_the_remedy():
    model = converted(nn.ModuleDict({"block": mlp()}), FP8)
    with pytest.raises(NotImplementedError, match=r"aten\.mm\.default: block\.2\.weight .*nn\.Linear.*weight\.hp"):
        torch.mm(x(3, 32), model["block"][2].weight.data[:, :].clone())
    # The values of another layer leave the name.
    model = mlp(FP8, features=(64, 64, 64))
    model[0].weight.data = model[2].weight.data
    assert model[0].weight.layer == "0.weight"
    quantized = mlp(replace(FP8, master_weights=False))[0].weight
    for use in (lambda: torch.mm(quantized, x(64, 3)), lambda: quantized + 1):
        with pytest.raises(NotImplementedError, match=r"0\.weight"):
            use()


# --- what stays a weight, so that a layer with it runs in low precision -----------------------------------------------

b, a = x(N, 2), x(2, K)
STAY = {
    "lora": lambda w: w + b @ a,
    "addmm": lambda w: torch.addmm(w, b, a, alpha=0.5),
    "baddbmm": lambda w: torch.baddbmm(w[None], b[None], a[None])[0],
    "mask": lambda w: w * (x(N, K) > 0),
    "mask_first": lambda w: (x(N, K) > 0).float() * w,
    "magnitude_first": lambda w: x(N, 1) * F.normalize(w + b @ a, dim=1),
    "where": lambda w: torch.where(x(N, K) > 0, w, 0.0),
    "lerp": lambda w: torch.lerp(w, x(N, K), 0.5),
    "normalized": lambda w: F.normalize(w, dim=1),
    "cat": lambda w: torch.cat([w[:10], w[10:]]),
    "stack": lambda w: torch.stack([w, w])[0],
    "chunk": lambda w: torch.cat(w.chunk(4)),
    "flip": lambda w: w.flip(0),
    "dropout": lambda w: F.dropout(w, 0.5),
    "padded": lambda w: F.pad(w, (0, 0, 0, 8))[:N],
    "view": lambda w: w.view(4, 10, K).view(N, K),
    "flat": lambda w: w.view(-1).view(N, K),
    "twice_transposed": lambda w: w.t().t(),
    "contiguous": lambda w: w.contiguous().t().contiguous().t(),
    "softplus": lambda w: F.softplus(w),
    "hardtanh": lambda w: F.hardtanh(F.leaky_relu(w)),
    "cast": lambda w: w.to(torch.bfloat16).float(),
    "clone": lambda w: w.clone(),
    "unflattened": lambda w: w.unflatten(0, (4, -1)).flatten(0, 1),
    "rearranged": lambda w: w.reshape(4, 10, K).permute(1, 0, 2).reshape(N, K),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("made", STAY.values(), ids=STAY)
def test_what_is_made_of_a_weight_runs_in_low_precision(made, mode):
    w = master(N, K)
    tokens, dy = x().requires_grad_(), x(8, N)
    with mode():
        torch.manual_seed(0)
        derived = made(w)
        assert type(derived) is MasterWeightTensor and derived.config is w.config and derived.shape == (N, K)
        out = F.linear(tokens, derived)
        expected, grad_input, grad_weight, _ = linear_by_hand(x(), derived.hp.detach(), None, dy, FP8)
        assert torch.equal(out, expected)
    if mode is not torch.enable_grad:
        return
    out.backward(dy)
    assert torch.equal(tokens.grad, grad_input)
    # The gradient of the weight is what autograd makes of that of the derived one.
    plain = nn.Parameter(w.hp.clone())
    torch.manual_seed(0)
    made(plain).backward(grad_weight)
    assert type(w.grad) is torch.Tensor and torch.equal(w.grad, plain.grad)


def test_arithmetic_in_a_graph_of_any_size(fresh_dynamo):
    """As an optimizer that stacks weights of several shapes: Dynamo makes their sizes symbolic."""

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def decayed(weight, update):
        return 0.5 * weight * (update * weight >= 0) - update

    weight = torch.stack([master(32, 32), master(32, 32, seed=1)])
    update = torch.randn(2, 32, 32)
    with torch.no_grad():
        got = decayed(weight, update)
    assert torch.equal(got.hp, 0.5 * weight.hp * (update * weight.hp >= 0) - update)


def test_compiled_layers_on_derived_weights(fresh_dynamo):
    w, down = master(N, K), nn.Parameter(b.clone())

    def layer(tokens):
        return F.linear(tokens, w + down @ a)

    expected = layer(x())
    expected.square().sum().backward()
    grads = w.grad, down.grad
    w.grad = down.grad = None
    out = torch.compile(layer, fullgraph=True)(x())
    out.square().sum().backward()
    assert torch.equal(out, expected)
    torch.testing.assert_close((w.grad, down.grad), grads)


# --- what is plain ----------------------------------------------------------------------------------------------------

PLAIN = {
    "sum": lambda w: w.sum(),
    "norm": lambda w: w.norm(),
    "compare": lambda w: w > 0,
    "zeros_like": lambda w: torch.zeros_like(w),
    "rand_like": lambda w: torch.rand_like(w),
    "embedding": lambda w: F.embedding(torch.tensor([1, 2]), w),
    "rows": lambda w: w[torch.tensor([1, 2])],
    "topk": lambda w: w.topk(3).values,
    "mse": lambda w: F.mse_loss(w, torch.zeros(N, K)),
    "dot": lambda w: torch.dot(w.flatten(), x(N * K)),
    "dot_of_two": lambda w: torch.dot(w.view(-1), w.detach().t().t().reshape(-1)),
    "inner": lambda w: torch.inner(x(N * K), w.flatten()),
    # As Prodigy and D-Adaptation step, by the distance from the first weights along the gradients.
    "distance": lambda w: torch.dot(x(N * K), w.detach().flatten().clone() - w.detach().flatten()),
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
}


@pytest.mark.parametrize("read", PLAIN.values(), ids=PLAIN)
def test_values_that_are_no_weight_are_plain(read):
    w = master(N, K)
    result = read(w)
    assert type(result) is torch.Tensor
    expected = read(w.hp)
    assert result.shape == expected.shape
    if read is not PLAIN["rand_like"]:
        torch.testing.assert_close(result, expected)


def test_copies_in_another_dtype_are_refused_with_the_remedy():
    w = master(N, K)
    for make in (lambda: w.double(), lambda: w * torch.ones(K, dtype=torch.float64)):
        with pytest.raises(NotImplementedError, match=r"can only be bfloat16, float16 or float32, got .* weight\.hp"):
            make()
    # Tensors without values of the weight are not copies.
    for empty in (torch.empty_like(w, dtype=torch.float64), w.new_zeros(2, 3, dtype=torch.float64)):
        assert type(empty) is torch.Tensor and empty.dtype is torch.float64
    with pytest.raises(
        NotImplementedError, match=r"a converted weight can only be .* got torch\.float8_e4m3fn; .*unconvert"
    ):
        w.to(torch.float8_e4m3fn)


def test_a_product_of_others_is_added_in_place():
    """As adapters are merged."""
    w = master(N, K)
    expected = torch.addmm(torch.addmm(w.hp, b, a), b, a)
    with torch.no_grad():
        w.addmm_(b, a)
        torch.addmm(w, b, a, out=w.detach())
    assert torch.equal(w.hp, expected)


def test_gradients_are_plain():
    w, mask = master(N, K), nn.Parameter(torch.ones(N, K))
    F.linear(x(), w * mask).sum().backward()
    assert type(w.grad) is torch.Tensor and type(mask.grad) is torch.Tensor


# --- a layer whose weight was replaced --------------------------------------------------------------------------------


def test_pruned_and_parametrized_layers_stay_converted(recwarn):
    for change in (
        lambda m: prune.l1_unstructured(m[0], "weight", 0.5),
        lambda m: parametrizations.weight_norm(m[0]),
        lambda m: nn.utils.parametrize.register_parametrization(m[0], "weight", Symmetric()),
    ):
        model = mlp(FP8, features=(64, 64, 32))
        change(model)
        assert type(model[0].weight) is MasterWeightTensor
        model(x(8, 64)).sum().backward()
    assert not [w for w in recwarn if "replaced" in str(w.message)]


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


REPLACED = {
    "deleted": lambda m: (delattr(m[0], "weight"), setattr(m[0], "weight", torch.zeros(160, 64))),
    "to_plain": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.hp)),
}


@pytest.mark.parametrize("change", REPLACED.values(), ids=REPLACED)
@pytest.mark.parametrize("backend", (None, "inductor"), ids=("eager", "compiled"))
def test_a_replaced_weight_is_said_once(change, backend, fresh_dynamo):
    model = nn.Sequential(mlp(FP8))
    change(model[0])
    run = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            run(x(8, 64))
    ours = [w for w in caught if "replaced" in str(w.message)]
    assert len(ours) == 1 and str(ours[0].message).startswith("0 was converted")
    layer, *_ = conversion_report(model[0]).layers
    assert (layer.status, layer.reason) == ("replaced", "its weight was replaced after the conversion")
