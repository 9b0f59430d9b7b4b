"""Kernels of transformed and stochastically rounded copies compile for GPUs: no spills, few builds. Needs no GPU."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

import kernel_builds

pytestmark = pytest.mark.slow

# From Hopper on: who trains in NVFP4 has one of these.
TARGETS = kernel_builds.TARGETS[1:]


def cases(target: int):
    """(label, call of a launcher) for every variant of every kernel."""
    import torch

    from torchao_blockwise.formats import NVFP4_1X16, CastOptions, Groups, Place, hadamard_number
    from torchao_blockwise.ops.quantization import kernels_amax as amax
    from torchao_blockwise.ops.quantization import kernels_chunks as chunks
    from torchao_blockwise.ops.quantization import kernels_triton as kernels

    number, bits, key = hadamard_number(True), torch.ones(()).view(torch.int32), torch.zeros(4, dtype=torch.int64)
    whole = Place()
    ends = Groups(torch.zeros(8, dtype=torch.int32))

    def case(name, m, k, dtype, groups=None, rowwise=False, hadamard=0, key=None, place=whole, bits=bits):
        x = torch.zeros(m, k, dtype=dtype)
        options = CastOptions(NVFP4_1X16, rowwise, not rowwise, padded=True, hadamard=hadamard)
        label = f"{name} {m}x{k} {str(dtype)[6:]}" + " groups" * (groups is not None) + " with scales" * bits.dim()
        return label, lambda: kernels.quantize(x, bits, options, groups, key, place)

    def amaxes_case(m, k, dtype, experts):
        x, ends = torch.zeros(m, k, dtype=dtype), torch.zeros(experts, dtype=torch.int32)
        label = f"{m}x{k} {str(dtype)[6:]} {experts} groups with scales"
        yield f"amaxes {label}", lambda: chunks.hadamard_amax_bits(x, number, Groups(ends), True)
        yield f"amaxes of groups {label}", lambda: amax.tensor_amax_bits(x, ends, True)
        yield f"amaxes of matrices {label}", lambda: amax.tensor_amax_bits(x.view(2, m // 2, k), None, True)
        yield f"scales {label}", lambda: amax.global_scale(torch.ones(experts).view(torch.int32))

    for experts in (8, 256):
        yield from amaxes_case(512, 1024, torch.bfloat16, experts)
    of_each = {"bits": torch.ones(8).view(torch.int32), "groups": ends}
    for dtype in (torch.bfloat16, torch.float32):
        yield case("transformed", 512, 1024, dtype, hadamard=number, **of_each)
        yield case("both", 512, 1024, dtype, hadamard=number, key=key, **of_each)
        yield case("rowwise", 512, 1024, dtype, rowwise=True, key=key, **of_each)
        yield case("nearest", 512, 1024, dtype, rowwise=True, **of_each)
    for groups in (None, ends):
        for m, k in ((512, 1024), (528, 1024), (531, 1024)):
            x = torch.zeros(m, k, dtype=torch.bfloat16)
            label = f"amaxes {m}x{k} bfloat16" + " groups" * (groups is not None)
            yield label, lambda x=x, groups=groups: chunks.hadamard_amax_bits(x, number, groups, False)
            for dtype in (torch.bfloat16, torch.float32) if m == 512 else (torch.bfloat16,):
                yield case("transformed", m, k, dtype, groups, hadamard=number)
                yield case("both", m, k, dtype, groups, hadamard=number, key=key)
                yield case("rounded", m, k, dtype, groups, key=key)
                yield case("rowwise", m, k, dtype, groups, rowwise=True, key=key)
        yield case("both", 512, 1024, torch.bfloat16, groups, hadamard=number, key=key, place=Place(0, 128, 7, 99))


@pytest.fixture(scope="module")
def builds():
    return kernel_builds.built_for([Path(__file__).stem], TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_builds_are_sound(builds, target):
    kernel_builds.assert_sound(builds[target], target)


@pytest.mark.parametrize("target", TARGETS)
def test_token_counts_and_places_make_few_builds(builds, target):
    for name in ("transformed", "both", "rounded", "rowwise", "amaxes"):
        rows = [row for row in kernel_builds.of(builds[target], name, "bfloat16") if "groups" not in row["label"]]
        # Columnwise scales are stored more at a time where their rows are multiples of 16.
        assert len({row["build"] for row in rows}) <= 2, name
