"""The kernels of permute, built for the GPUs they are for, by kernel_builds.py: no GPU."""

import pytest

pytest.importorskip("triton")

import kernel_builds

pytestmark = pytest.mark.slow

TARGETS = kernel_builds.TARGETS
targets = pytest.mark.parametrize("target", TARGETS)


def cases(target: int):
    """(label, call of a launcher) for every variant of every kernel."""
    import torch

    from torchao_blockwise.ops.groups.permutation import MAX_EXPERTS
    from torchao_blockwise.ops.groups.permutation import kernels_triton as permute

    def cases(tokens, width, top_k, dtype=torch.bfloat16):
        x, y = torch.zeros(tokens, width, dtype=dtype), torch.zeros(tokens * top_k, width, dtype=dtype)
        source, weights = torch.zeros(tokens * top_k, dtype=torch.int32), torch.zeros(tokens, top_k)
        where = f"{tokens}x{width} top{top_k} {str(dtype)[6:]}"
        yield f"permute {where}", lambda: permute.unpermute_backward(x, None, source, top_k, None)
        yield f"backward {where}", lambda: permute.unpermute_backward(x, y, source, top_k, weights)
        yield f"sum {where}", lambda: permute.unpermute(y, source, top_k, None)
        yield f"unpermute {where}", lambda: permute.unpermute(y, source, top_k, weights)

    def route(assignments, experts, dtype):
        ids = torch.zeros(assignments, 1, dtype=dtype)
        return f"route {assignments} to {experts} {str(dtype)[6:]}", lambda: permute._route(ids, experts)

    for experts in (1, 8, 64, 128, 256, MAX_EXPERTS):
        for assignments in (512, 2**15):
            yield route(assignments, experts, torch.int64)
    yield route(512, 256, torch.int32)
    # Token counts that change.
    for assignments in (2**15 + 16, 2**20 + 1, 1025):
        yield route(assignments, 256, torch.int64)

    for width in (2048, 500):
        for dtype in (torch.bfloat16, torch.float32):
            yield from cases(512, width, 2, dtype)
    yield from cases(512, 7168, 8)
    # Token counts that change.
    for tokens in (528, 531, 1):
        yield from cases(tokens, 2048, 2)


@targets
def test_builds_are_sound(builds, target):
    kernel_builds.assert_sound(builds[target], target)


@targets
def test_rows_move_16_bytes_at_a_time(builds, target):
    for row in builds[target]:
        if row["kernel"] in ("_scatter_kernel", "_gather_kernel") and "x500" not in row["label"]:
            assert "st.global.v4.b32" in row["instructions"], row["label"]


@targets
@pytest.mark.parametrize("case", ("permute", "backward", "sum", "unpermute"))
def test_token_counts_do_not_rebuild(builds, target, case):
    rows = [kernel_builds.of(builds[target], case, f"{n}x2048", "bfloat16") for n in (512, 528, 531, 1)]
    for launches in zip(*rows, strict=True):
        assert len({row["build"] for row in launches}) == 1


@targets
def test_numbers_of_assignments_do_not_rebuild(builds, target):
    rows = [kernel_builds.of(builds[target], "route", f"{n}", "256", "int64") for n in (2**15, 2**15 + 16, 1025)]
    for launches in zip(*rows, strict=True):
        assert len({row["build"] for row in launches}) == 1


@targets
def test_counts_are_on_their_way_before_they_are_summed(builds, target):
    """Three tiles of 16 KiB in shared memory besides that in use."""
    rows = [row for n in (64, 256, 512) for row in kernel_builds.of(builds[target], "route", "32768", str(n))]
    rows = [row for row in rows if row["kernel"] == "_place_kernel"]
    assert len(rows) == 3 and all(row["SHARED"] >= 3 * 2**14 for row in rows)
