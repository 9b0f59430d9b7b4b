"""Experts on a GPU: nothing waits for it, CUDA graphs capture layers whose routing changes, ends may be malformed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_steps import check_captured_training, check_training_without_syncs, sgd, train_step
from helpers import FP8, both_formats, replace
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import linears_and_experts
from torchao_blockwise.nn import grouped_linear, permute, unpermute
from torchao_blockwise.tensors import MasterWeightTensor
from torchao_blockwise.testing import assert_bitwise_equal, sqnr

pytestmark = pytest.mark.gpu

EXPERTS, TOP_K, DIM, HIDDEN, TOKENS = 8, 2, 256, 384, 500


class MoE(nn.Module):
    """A router in high precision, tokens sorted by expert, an MLP an expert, and what top-k experts say summed."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, DIM) * DIM**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) * HIDDEN**-0.5)

    def forward(self, x):
        scores, ids = self.router(x).softmax(-1).topk(TOP_K, -1)
        tokens, source, ends = permute(x, ids, EXPERTS)
        gate, up = F.grouped_mm(tokens, self.gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        return unpermute(out, source, TOP_K, scores)


def moe(config, dtype=torch.bfloat16) -> MoE:
    torch.manual_seed(0)
    model = MoE().to(device="cuda", dtype=dtype)
    quantize_(model, config, filter_fn=linears_and_experts())
    assert type(model.gate_up) is MasterWeightTensor and type(model.router.weight) is nn.Parameter
    return model


def batches(count: int, tokens: int = TOKENS) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(count, tokens, DIM, generator=generator, device="cuda", dtype=torch.bfloat16)
    # A direction of its own each, so that other experts are chosen every time.
    return x + 3 * torch.randn(count, 1, DIM, generator=generator, device="cuda", dtype=torch.bfloat16)


@both_formats
def test_training_never_waits_for_the_gpu(config):
    check_training_without_syncs(moe(config), batches(4))


def test_the_profiler_sees_no_copy_to_the_host():
    model, xs = moe(FP8), batches(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, optimizer, xs[0])
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train_step(model, optimizer, xs[1])
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert names and not [name for name in names if "DtoH" in name or "Device -> Pageable" in name]


@both_formats
def test_a_captured_step_with_changing_routing_equals_eager(config):
    check_captured_training(lambda: moe(config), batches(5), sgd(0.1))


@pytest.mark.usefixtures("fresh_dynamo")
@both_formats
def test_inductor_compiles_products_whose_groups_change(config):
    weight = nn.Parameter(MasterWeightTensor(torch.randn(EXPERTS, 384, DIM, device="cuda").bfloat16(), config))

    def layer(x, sizes):
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=sizes.cumsum(0, dtype=torch.int32))

    compiled = torch.compile(layer, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (500, 640, 1100):
            sizes = torch.multinomial(torch.rand(EXPERTS, generator=generator), count, True, generator=generator)
            sizes = sizes.bincount(minlength=EXPERTS).cuda()
            results = []
            for run in (compiled, layer):
                x = batches(1, count)[0].requires_grad_()
                torch._dynamo.mark_dynamic(x, 0)
                weight.grad = None
                out = run(x, sizes)
                out.backward(torch.ones_like(out))
                results.append((out.detach(), x.grad, weight.grad))
            for got, want in zip(*results):
                assert_bitwise_equal(got, want)


def test_malformed_group_ends_reach_no_other_memory():
    """On a GPU nobody reads them before a kernel does: they are clamped, and results are those of the clamped ones."""
    weight = nn.Parameter(MasterWeightTensor(torch.randn(4, 384, DIM, device="cuda").bfloat16(), FP8))
    x = batches(1)[0]
    for ends in ([-5, 600, 300, 10**9], [400, 100, -(2**31), 450]):
        clamped = torch.tensor(ends).clamp(0, TOKENS).cummax(0).values
        results = []
        for values in (torch.tensor(ends), clamped):
            tokens = x.clone().requires_grad_()
            weight.grad = None
            out = grouped_linear(tokens, weight, values.int().cuda())
            out.backward(torch.ones_like(out))
            results.append((out.detach(), tokens.grad, weight.grad))
        for got, want in zip(*results):
            assert_bitwise_equal(got, want)


@both_formats
def test_bits_do_not_depend_on_the_backend(config):
    """Quantized bits; the products agree within the error of sums in fp32."""
    hp, x = torch.randn(EXPERTS, 384, DIM, device="cuda").bfloat16(), batches(1)[0]
    ends = torch.tensor([0, 100, 101, 101, 333, 333, 470, 490], device="cuda", dtype=torch.int32)
    results = []
    for backend in ("auto", "reference"):
        weight = nn.Parameter(MasterWeightTensor(hp, replace(config, backend=backend)))
        tokens = x.clone().requires_grad_()
        out = grouped_linear(tokens, weight, ends)
        out.backward(x[:, :1].expand_as(out))
        results.append((out.detach(), tokens.grad, weight.grad))
        assert not out[490:].any() and not tokens.grad[490:].any() and not weight.grad[[0, 3, 5]].any()
    for got, want in zip(*results):
        # One rounding to bf16 that may fall to the other side.
        assert sqnr(got, want) > 45
