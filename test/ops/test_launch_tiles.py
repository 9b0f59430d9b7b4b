"""Launches of Gluon kernels that take matrices in tiles: what the copy engine is told is what Triton would tell it.

A kernel of a few lines is built for Hopper and launched as in test_launch.py, on CPU tensors, by a driver that writes
down what it is given: a tensor map is all that it is made of. Needs no GPU.
"""

import json
import sys

import pytest

from torchao_blockwise import _compat

if not _compat.has_gluon():
    pytest.skip("needs Gluon, which Triton has from 3.6 on", allow_module_level=True)

import test_launch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

_load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

if not triton.knobs.runtime.interpret:

    @gluon.jit
    def _kernel(matrix, scales, out_ptr, n, SCALE: gl.constexpr):
        """Copy a tile of each to shared memory; out[0] = n · SCALE."""
        bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        tile = gl.allocate_shared_memory(matrix.dtype, matrix.block_type.shape, matrix.layout)
        scale_tile = gl.allocate_shared_memory(scales.dtype, scales.block_type.shape, scales.layout)
        mbarrier.init(bar, count=1)
        mbarrier.expect(bar, matrix.block_type.nbytes + scales.block_type.nbytes)
        _load_async(matrix, [0, 0], bar, tile)
        _load_async(scales, [0, 0], bar, scale_tile)
        mbarrier.wait(bar, 0)
        gl.store(out_ptr, gl.to_tensor(n * SCALE).to(out_ptr.dtype.element_ty))

    @gluon.jit
    def _other_kernel(matrix, scales, out_ptr, n, SCALE: gl.constexpr):
        gl.store(out_ptr, gl.to_tensor(n * SCALE).to(out_ptr.dtype.element_ty))


def _tile(rows, columns, bits, swizzle=0):
    from torchao_blockwise.ops.launch import Tile

    return Tile((rows, columns), gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2))


def _strided(memory, rows, columns, stride):
    return memory[: rows * stride].view(rows, stride)[:, :columns]


def _matrices():
    """(label, matrix, its tile): what a map must tell apart, some of them at one address."""
    import torch

    memory, other = torch.zeros(1 << 14, dtype=torch.uint8), torch.zeros(1 << 14, dtype=torch.uint8)
    small, large, swizzled = _tile(16, 64, 8), _tile(32, 64, 8), _tile(16, 128, 8, 128)
    for label, begin in (("here", memory), ("there", other), ("16 bytes on", memory[16:]), ("here again", memory)):
        yield label, _strided(begin, 48, 96, 96), small
    yield "fewer rows", _strided(memory, 47, 96, 96), small
    yield "fewer columns", _strided(memory, 48, 95, 96), small
    yield "rows apart", _strided(memory, 48, 96, 112), small
    yield "one row", _strided(memory, 1, 96, 96), small
    # Of which the stride says nothing.
    yield "one row, strided", _strided(memory, 1, 85, 99), small
    yield "one column", _strided(memory, 48, 1, 16), small
    yield "one column of many, strided", memory[: 48 * 32].view(48, 32)[:, ::32], small
    yield "larger than a tile in no dim", _strided(memory, 3, 5, 16), small
    yield "other tile", _strided(memory, 48, 96, 96), large
    yield "swizzled tile", _strided(memory, 48, 96, 96), swizzled
    yield "the like of another tile", _strided(memory, 48, 96, 96), _tile(16, 64, 8)
    e4m3 = memory.view(torch.float8_e4m3fn)
    yield "e4m3", _strided(e4m3, 48, 96, 96), small
    yield "bf16", _strided(memory.view(torch.bfloat16), 48, 96, 96), _tile(16, 64, 16)
    yield "f32", _strided(memory.view(torch.float32), 48, 20, 20), _tile(1, 64, 32)
    yield "f32, one row, strided", _strided(memory.view(torch.float32), 1, 20, 33), _tile(1, 64, 32)


def _main() -> None:
    import torch

    from torchao_blockwise.ops import launch as module

    launches = test_launch.Launches()
    both_ways = launches.both_ways
    scales, out = (torch.zeros(4, 64), _tile(1, 64, 32)), torch.zeros(16)

    def launch(matrix, tile, n=20, out=out, kernel=_kernel, **options):
        module.launch(kernel, 2, (matrix, tile), scales, out, n, **{"SCALE": 2.0, **options})

    cases = {label: (matrix, tile) for label, matrix, tile in _matrices()}
    results = {"maps": [both_ways(label, lambda c=case: launch(*c)) for label, case in cases.items()]}
    results["maps"] += [both_ways(f"{label}, later", lambda c=case: launch(*c)) for label, case in cases.items()]

    here = cases["here"]
    swapped = [
        both_ways("matrix and scales swapped", lambda: module.launch(_kernel, 2, scales, here, out, 20, SCALE=2.0))
    ]
    options = {"num_warps=8": {"num_warps": 8}, "SCALE": {"SCALE": 3.0}, "out off 16 bytes": {"out": out[1:]}}
    options |= {"kernel": {"kernel": _other_kernel}}
    results["options"] = [both_ways(label, lambda o=o: launch(*here, **o)) for label, o in options.items()]
    results["options"] += swapped

    results["numbers"] = [both_ways(f"n={n}", lambda n=n: launch(*here, n=n)) for n in (1, 16, 17, 32, 33, 1 << 40)]
    results["other scale"] = [both_ways("n=17", lambda: launch(*here, n=17, SCALE=3.0))]

    # A matrix is told apart from the same memory as a tensor, and dtypes from each other.
    words = out.view(torch.int32), (out, torch.int32), (out, torch.uint8), (out[1:], torch.int32), out
    results["dtypes"] = [both_ways(str(i), lambda x=x: launch(*here, out=x)) for i, x in enumerate(words)]

    def refused(*case):
        launches.made.clear()
        try:
            launch(*case)
        except AssertionError:
            return not launches.made
        return False

    memory = torch.zeros(1 << 12, dtype=torch.uint8)
    wrong = {"off 16 bytes": _strided(memory[8:], 8, 96, 96), "rows off 16 bytes": _strided(memory, 8, 90, 90)}
    wrong |= {"no rows": memory.view(-1, 64)[:0], "columns apart": memory.view(-1, 64)[:, ::2]}
    results["refused"] = {label: refused(matrix, here[1]) for label, matrix in wrong.items()}

    def during(**changes):
        vars(launches).update(changes)
        seen = launches.of(lambda: module.launch(_kernel, 2, here, scales, (out, torch.int32), 20, SCALE=2.0))
        vars(launches).update(device=-1)
        return seen

    results["elsewhere"] = [during(), during(device=0), during(device=0), during()]
    json.dump(results, sys.stdout)


@pytest.fixture(scope="module")
def results():
    return test_launch.printed_by(__file__)


def assert_as_by_triton(cases) -> None:
    for case in cases:
        assert case["again"]["by_triton"] == 0, case["label"]
        assert case["plain"]["by_triton"] == len(case["plain"]["launches"]) == 1, case["label"]
        # Addresses too: the tensors are the same ones each time.
        assert case["first"]["launches"] == case["again"]["launches"] == case["plain"]["launches"], case["label"]


def only_launch(results, group: str, label: str) -> dict:
    (case,) = [case for case in results[group] if case["label"] == label]
    return case["again"]["launches"][0]


@pytest.mark.parametrize("group", ("maps", "options", "numbers", "other scale", "dtypes"))
def test_launches_what_triton_would(results, group):
    assert_as_by_triton(results[group])


def test_what_a_map_is_made_of_tells_maps_apart(results):
    labels = [case["label"] for case in results["maps"] if "later" not in case["label"]]
    rows = {label: only_launch(results, "maps", label) for label in labels}
    assert rows["here"] == rows["here again"] == rows["the like of another tile"]
    maps = {label: json.dumps(row["args"]["matrix"]) for label, row in rows.items()}
    one_row = rows["f32, one row, strided"]["args"]["matrix"]
    assert one_row[1:] == [1, 20, 24, 1]
    # To the copy engine a byte is a byte; to the kernel it is not.
    assert maps["here"] == maps["e4m3"] and rows["here"]["build"] != rows["e4m3"]["build"]
    assert len(set(maps.values())) == len(maps) - 3
    # Moving a matrix, and giving it another shape or stride, takes no other build.
    shapes = ("there", "16 bytes on", "fewer rows", "fewer columns", "rows apart", "one row", "one column")
    assert {rows[label]["build"] for label in shapes} == {rows["here"]["build"]}
    assert len({rows[label]["build"] for label in ("here", "other tile", "swizzled tile", "e4m3", "bf16", "f32")}) == 6


def test_options_and_arguments_tell_builds_apart(results):
    labels = [case["label"] for case in results["options"]]
    builds = [only_launch(results, "options", label)["build"] for label in labels]
    assert len({*builds, only_launch(results, "maps", "here")["build"]}) == len(builds) + 1


def test_numbers_that_triton_takes_for_alike_share_a_build(results):
    builds = {case["label"]: case["again"]["launches"][0]["build"] for case in results["numbers"]}
    assert len({*builds.values(), only_launch(results, "other scale", "n=17")["build"]}) == 5
    assert builds["n=16"] == builds["n=32"] and builds["n=17"] == builds["n=33"]
    # Of what is built already even the first launch is direct.
    first = {case["label"]: case["first"]["by_triton"] for case in results["numbers"]}
    assert (first["n=33"], first["n=32"]) == (0, 0)


def test_a_dtype_stands_for_a_view(results):
    as_view, *others = (case["again"]["launches"][0] for case in results["dtypes"])
    assert others[0] == as_view
    assert len({row["build"] for row in others}) == len(others)


@pytest.mark.parametrize("what", ("off 16 bytes", "rows off 16 bytes", "no rows", "columns apart"))
def test_what_the_copy_engine_cannot_take_is_not_launched(results, what):
    assert results["refused"][what]


def test_matrices_of_another_device_are_left_to_triton(results):
    assert [record["by_triton"] for record in results["elsewhere"]] == [0, 1, 1, 0]


@pytest.mark.gpu
def test_products_of_matrices_that_move_on_the_gpu(monkeypatch):
    """Other shapes at one address and one shape at other addresses: the bits of Triton's own launches."""
    import torch

    from torchao_blockwise import ops
    from torchao_blockwise._compat import triton_launcher

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    memory = torch.randn(1 << 20, device="cuda", dtype=torch.bfloat16)

    def products():
        for begin in (0, 16, 1 << 12, 0):
            for m, n, k in ((128, 256, 384), (1, 64, 512), (300, 48, 128), (17, 256, 1003)):
                a = ops.quantize(memory[begin : begin + m * k].view(m, k), "fp8_1x128").rowwise
                b = ops.quantize(memory[begin : begin + n * k].view(n, k), "fp8_128x128").rowwise
                yield ops.matmul(a, b, out_dtype=torch.bfloat16, backend="gluon")

    first, again = list(products()), list(products())
    monkeypatch.setattr(triton_launcher, "launching", lambda: None)
    for direct in (first, again):
        assert all(torch.equal(out, expected) for out, expected in zip(direct, products()))


if __name__ == "__main__":
    _main()
