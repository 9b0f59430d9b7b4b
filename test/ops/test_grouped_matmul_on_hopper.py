"""The Hopper kernels of grouped products: which build is chosen, why they are not, and their bits on the GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_steps import capture
from grouped_cases import FORMATS, OPERANDS, ROUTINGS, TOLERANCE, ends_of, relative_error
from grouped_gluon import BUILDS, add_product, gluon, product

from torchao_blockwise import ops
from torchao_blockwise.ops.groups.ends import clamped_ends


def test_choice_of_build():
    """High tiles where groups are long, low ones where most of a high tile would be empty."""
    for along, sizes in (("m", (32768, 2048, 7168)), ("k", (2048, 7168, 1024))):
        build = gluon.choose_build(along, 32768, 32, *sizes, 132, 1)
        assert (build.tile_m, build.tile_n) == (256, 128)
        assert gluon.choose_build(along, 32768, 32, *sizes, 132, 2).ctas == 2
    assert gluon.choose_build("m", 4096, 256, 4096, 2048, 7168, 132, 1).tile_m == 128
    assert gluon.choose_build("m", 1, 8, 1, 64, 128, 132, 1).tile_m == 64


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


GPU_BUILDS = [name for name, build in BUILDS.items() if build.ctas <= gluon.MAX_CTAS]
GPU_ROUTINGS = {
    **ROUTINGS,
    "mixed": ((1000, 0, 3, 517, 2048, 128, 64, 1), 300),
    "90 experts": ((1, 0, 130) * 30, 5),
}


def gpu_operands(along: str, group_ends: torch.Tensor, tokens: int, n: int, k: int):
    quantized = OPERANDS[along](group_ends, tokens, n, k)
    return [x._replace(qdata=x.qdata.cuda(), scale=x.scale.cuda()) for x in quantized]


@pytest.fixture(params=GPU_ROUTINGS)
def gpu_routing(request, monkeypatch):
    """(group_ends, tokens), the ends on the GPU."""
    monkeypatch.setitem(ROUTINGS, request.param, GPU_ROUTINGS[request.param])
    group_ends, tokens = ends_of(request.param)
    return group_ends.cuda(), tokens


@pytest.mark.gpu
@pytest.mark.parametrize("along", FORMATS)
@pytest.mark.parametrize("build", GPU_BUILDS)
@pytest.mark.parametrize("n, k", [(256, 512), (130, 400), (576, 1100)], ids=str)
def test_product_on_the_gpu(hopper, gpu_routing, n, k, build, along):
    """Against the reference, within what wgmma's 14 bits a block leave: 2^-13 of the magnitudes a step of K = 32."""
    ends, tokens = gpu_routing
    a, b = gpu_operands(along, ends.cpu(), tokens, n, k)
    for dtype in (torch.float32, torch.bfloat16):
        # What the kernel leaves out shows as what was there before.
        torch.full((ends.numel() * n * k + tokens * n,), float("nan"), device="cuda")
        out = product(a, b, ends, along, dtype, BUILDS[build])
        assert relative_error(out, a, b, ends, along) < 4 * 2**-13 + TOLERANCE[dtype]
        if along == "m":
            assert not out[ends[-1] :].float().view(torch.int32).any()


@pytest.mark.gpu
def test_backend_by_name_agrees_with_triton_on_the_gpu(hopper, gpu_routing):
    ends, tokens = gpu_routing
    a, b = gpu_operands("m", ends.cpu(), tokens, 576, 1100)
    out, again, triton = (
        ops.grouped_matmul(a, b, ends, out_dtype=torch.float32, backend=backend)
        for backend in ("gluon", "gluon", "triton")
    )
    assert torch.equal(out, again)
    for x in (out, triton):
        assert relative_error(x, a, b, ends, "m") < 4 * 2**-13 + TOLERANCE[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("build", GPU_BUILDS)
def test_adding_to_gradients_on_the_gpu(hopper, gpu_routing, build):
    ends, tokens = gpu_routing
    a, b = gpu_operands("k", ends.cpu(), tokens, 264, 272)
    start = 100 * torch.randn(ends.numel(), 264, 272, device="cuda")
    out = start.clone()
    add_product(out, a, b, ends, BUILDS[build])
    empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    assert torch.equal(out[empty], start[empty])
    assert relative_error(out, a, b, ends, "k", start) < 4 * 2**-13 + TOLERANCE[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("along", FORMATS)
@pytest.mark.parametrize("ends", [(200, 100, 300), (-5, 130, 131), (60, 2**31 - 1, 0), (-(2**31), -1, -7)], ids=str)
def test_malformed_ends_on_the_gpu(hopper, ends, along):
    """Run this one under compute-sanitizer too."""
    malformed = torch.tensor(ends, dtype=torch.int32)
    meant = clamped_ends(malformed, 300)
    a, b = gpu_operands(along, meant, 300, 130, 257)
    out = product(a, b, malformed.cuda(), along)
    assert relative_error(out, a, b, meant.cuda(), along) < 4 * 2**-13 + TOLERANCE[torch.float32]


@pytest.mark.gpu
def test_a_captured_product_follows_the_ends(hopper):
    """Another routing in the same memory: a replay reads the ends anew, without a host sync."""
    group_ends, tokens = ends_of("tail")
    a, b = gpu_operands("m", group_ends, tokens, 136, 256)
    # Ones in the rows of no group too, for they come into one.
    a.qdata.view(torch.uint8).fill_(0x38), a.scale.fill_(1.0)
    ends = group_ends.cuda()
    graph, out = capture(lambda: product(a, b, ends, "m"))
    ends.copy_(torch.tensor([100, 120, 121]))
    graph.replay()
    assert relative_error(out, a, b, ends, "m") < 4 * 2**-13 + TOLERANCE[torch.float32]
