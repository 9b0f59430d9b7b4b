"""What Triton and LLVM make of the quantise and transpose kernels gives the reference's bits. Needs no GPU.

A subprocess (without the interpreter, which Triton picks once a process) compiles each launch for a GPU that is not
there and runs its PTX in an emulator; see ptx_emulator.py for what that cannot see.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

pytest.importorskip("triton")

TARGET = 90
SHAPES = ((128, 128), (37, 150))
# Only whole runs of 16 elements of a row, over the edge of a tile.
GLUON_SHAPES = ((128, 128), (147, 272))


def special_input(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of many sizes; blocks of zeros and of subnormals, -0, Inf, NaN, all in blocks of their own or not."""
    from torchao_blockwise.testing import random_tensor

    x = random_tensor(rows, columns, dtype=dtype, seed=rows)
    x[3], x[:, 7] = -0.0, 0.0
    x[4], x[:, 9] = torch.finfo(dtype).smallest_normal / 4, -torch.finfo(dtype).smallest_normal / 8
    x[5, 11], x[21, 30], x[rows - 1, columns - 1] = float("nan"), float("inf"), -float("inf")
    x[6, 12] = torch.finfo(dtype).max
    return x


def _cases() -> dict:
    """{label: call that gives (what kernels computed, what the reference computes), each a tuple of tensors}."""
    from torchao_blockwise import _compat
    from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
    from torchao_blockwise.ops.fused import new_copies
    from torchao_blockwise.ops.group_tables.kernels_triton import block_table
    from torchao_blockwise.ops.grouped_quantize import kernels_triton as grouped
    from torchao_blockwise.ops.grouped_quantize import reference as grouped_reference
    from torchao_blockwise.ops.groups import padded_tokens
    from torchao_blockwise.ops.padding import with_zero_tokens
    from torchao_blockwise.ops.quantize import kernels_triton as quantize
    from torchao_blockwise.ops.quantize import reference
    from torchao_blockwise.ops.swiglu_quantize import kernels_triton as swiglu
    from torchao_blockwise.ops.swiglu_quantize import reference as swiglu_reference
    from torchao_blockwise.ops.transpose import kernels_triton as transpose
    from torchao_blockwise.ops.transpose import reference as transpose_reference
    from torchao_blockwise.testing import random_tensor

    cases = {}

    def expected(x, fmt, rowwise, columnwise, power_of_2):
        amax = x.abs().amax().float() if fmt.has_global_scale else None
        copies = [x] * rowwise + [with_zero_tokens(x).mT] * columnwise
        return sum((reference.quantize(copy, fmt, amax, power_of_2) for copy in copies), ())

    def quantize_case(fmt, shape, dtype, rowwise, columnwise, power_of_2=False):
        x = special_input(*shape, dtype)
        if fmt.has_global_scale:
            x = x.nan_to_num(1.0, 1.0, -1.0)
        amax = x.abs().amax().float() if fmt.has_global_scale else None

        def run():
            result = quantize.quantize(x, fmt, amax, rowwise, columnwise, power_of_2)
            return result, expected(x, fmt, rowwise, columnwise, power_of_2)

        copies = "+".join(["rowwise"] * rowwise + ["columnwise"] * columnwise)
        name = f"quantize {fmt.name} {shape[0]}x{shape[1]} {str(dtype)[6:]} {copies}"
        cases[name + " power_of_2" * power_of_2] = run

    def grouped_case(fmt, shape, ends):
        x = special_input(*shape, torch.bfloat16)
        if fmt.has_global_scale:
            x = x.nan_to_num(1.0, 1.0, -1.0)
        x[max(ends) :] = float("nan")
        ends = torch.tensor(ends, dtype=torch.int32)
        amax = grouped_reference.tensor_amax(x, ends) if fmt.has_global_scale else None
        arguments = (x, ends, fmt, amax, True, True, False)
        name = f"grouped {fmt.name} {shape[0]}x{shape[1]} E{len(ends)}"
        cases[name] = lambda: (grouped.quantize(*arguments), grouped_reference.quantize(*arguments))

    def swiglu_case(tokens, width, ends):
        dh, gate, up = (special_input(tokens, width, torch.bfloat16) for _ in range(3))
        ends = torch.tensor(ends, dtype=torch.int32)

        def run():
            got, expected, options = [], [], (True, True, False)
            h, gradients = swiglu_reference.swiglu(gate, up), swiglu_reference.swiglu_backward(dh, gate, up)
            for y, inputs, launch in (
                (h, (gate, up), swiglu.swiglu_quantize),
                (torch.cat(gradients, 1), (dh, gate, up), swiglu.swiglu_backward_quantize),
            ):
                got += launch(*inputs, FP8_1X128, *options, ends)
                expected += grouped_reference.quantize(y, ends, FP8_1X128, None, *options)
            return got, expected

        cases[f"swiglu {tokens}x{width} E{len(ends)}"] = run

    def transpose_case(fmt, *shape, tile=None):
        qdata = torch.randint(0, 256, fmt.qdata_shape(*shape), dtype=torch.uint8)
        if shape[-1] % 2 and fmt.element.bits == 4:
            qdata[..., -1] &= 0xF
        operand = qdata.view(fmt.element.storage_dtype), torch.rand(fmt.scale_shape(*shape)).to(fmt.scale_dtype)

        def run():
            if tile:
                transpose._QUADS_TILES = {0: tile}
            arguments = *operand, fmt, shape[-1]
            return transpose.transpose(*arguments), transpose_reference.transpose(*arguments)

        name = f"transpose {fmt.name} {'x'.join(map(str, shape))}"
        cases[name + (f" tile {tile[0]}x{tile[1]}" if tile else "")] = run

    def gluon_case(shape, dtype, warps, power_of_2=False, stride=None):
        from torchao_blockwise.ops import gluon_tiles
        from torchao_blockwise.ops.quantize import kernels_gluon as gluon

        x = special_input(shape[0], stride or shape[1], dtype)[:, : shape[1]]
        ends = torch.tensor([0, 37, 36, len(x) - 23], dtype=torch.int32)

        def run(rowwise, in_groups):
            tokens, table = x, ()
            if in_groups:
                tokens = x[:-3]
                table = block_table(ends, len(tokens), 128, None), padded_tokens(len(tokens), len(ends), 128)
            assert gluon_tiles.why_not_this(FP8_1X128, tokens) is None
            if rowwise:
                result = gluon.quantize_both(tokens, FP8_1X128, power_of_2, warps, *table)
            else:
                result = gluon.quantize_columnwise(tokens, FP8_1X128, power_of_2, 64, warps, *table)
            if in_groups:
                return result, grouped_reference.quantize(tokens, ends, FP8_1X128, None, rowwise, True, power_of_2)
            return result, expected(tokens, FP8_1X128, rowwise, True, power_of_2)

        for rowwise, in_groups in ((True, False), (True, True), (False, False), (False, True)):
            name = f"one read {shape[0]}x{shape[1]} {str(dtype)[6:]} {warps} warps" + " columnwise" * (not rowwise)
            name += " power_of_2" * power_of_2 + " strided" * bool(stride) + " grouped" * in_groups
            cases[name] = functools.partial(run, rowwise, in_groups)

    def fused_gluon_cases(rows, width, dtype, parts, warps, power_of_2=False):
        """A norm and SwiGLU, and the same in groups; of halves of wider rows, whose gradients are side by side."""
        from torchao_blockwise.ops import gluon_tiles
        from torchao_blockwise.ops.norm_quantize import kernels_gluon as norm
        from torchao_blockwise.ops.norm_quantize import reference as norm_reference
        from torchao_blockwise.ops.swiglu_quantize import kernels_gluon as swiglu

        dh, gate, up = (special_input(rows, width, dtype) / scale for scale in (1, 8, 16))
        gate, up = torch.cat([gate, up], 1).chunk(2, 1)
        ends = torch.tensor([0, 37, 36, rows - 23], dtype=torch.int32)

        def compared(y, rowwise, ends, launch):
            assert gluon_tiles.why_not_this(FP8_1X128, y) is None
            copies = new_copies(y, FP8_1X128, y.shape, rowwise, True, ends)
            launch([None] * (4 - len(copies)) + copies)
            if ends is None:
                return copies, expected(y, FP8_1X128, rowwise, True, power_of_2)
            return copies, grouped_reference.quantize(y, ends, FP8_1X128, None, rowwise, True, power_of_2)

        def swiglu_run(inputs, y, rowwise, ends):
            blocks = None if ends is None else block_table(ends, rows, 128, None)
            options = (power_of_2, parts, warps, blocks)
            return compared(y, rowwise, ends, lambda copies: swiglu.launch(inputs, FP8_1X128, copies, *options))

        def norm_run(layer, rowwise):
            mean, rstd = norm_reference.statistics(dh, layer, 1e-5)
            weight, bias = random_tensor(1, width, dtype=dtype)[0], random_tensor(1, width, seed=1)[0]
            vectors = [mean, rstd, weight / 16, bias / 16 if layer else None]
            y = norm_reference.normalize(dh, *vectors, dtype)
            launch = functools.partial(norm.launch, dh, vectors, dtype, FP8_1X128)
            return compared(y, rowwise, None, lambda copies: launch(copies, power_of_2, parts, warps))

        h, gradients = swiglu_reference.swiglu(gate, up), swiglu_reference.swiglu_backward(dh, gate, up)
        for rowwise in (True, False):
            label = f"{rows}x{width} {str(dtype)[6:]} {parts} parts {warps} warps" + " columnwise" * (not rowwise)
            for groups in (None, ends):
                name = label + " grouped" * (groups is not None)
                cases["swiglu in Gluon " + name] = functools.partial(swiglu_run, (gate, up), h, rowwise, groups)
                inputs, y = (dh, gate, up), torch.cat(gradients, 1)
                cases["swiglu backward in Gluon " + name] = functools.partial(swiglu_run, inputs, y, rowwise, groups)
            for layer in (False, True):
                cases[f"{'layer' if layer else 'rms'} norm in Gluon {label}"] = functools.partial(
                    norm_run, layer, rowwise
                )

    for shape in SHAPES:
        for fmt, rowwise, columnwise in (
            (FP8_1X128, True, False),
            (FP8_1X128, False, True),
            (FP8_128X128, True, True),
            (NVFP4_1X16, True, True),
            (NVFP4_16X16, True, True),
        ):
            quantize_case(fmt, shape, torch.bfloat16, rowwise, columnwise)
        for fmt in (FP8_128X128, NVFP4_16X16):
            transpose_case(fmt, *shape)
    for tile in transpose._QUADS_TILES.values():
        transpose_case(FP8_128X128, 2, 272, 144, tile=tile)
    for fmt in (FP8_1X128, NVFP4_1X16):
        grouped_case(fmt, (150, 80), [0, 37, 36, 130])
        grouped_case(fmt, (37, 150), [i // 2 for i in range(1, 41)])
    swiglu_case(70, 80, [0, 37, 36, 60])
    for dtype in (torch.float16, torch.float32):
        quantize_case(FP8_1X128, (48, 144), dtype, True, True)
    quantize_case(FP8_1X128, (48, 144), torch.bfloat16, True, True, True)
    if _compat.has_gluon():
        for shape in GLUON_SHAPES:
            for warps in (4, 8):
                gluon_case(shape, torch.bfloat16, warps)
        gluon_case(GLUON_SHAPES[1], torch.float16, 16, True, 304)
        # Gradients whose blocks are of one half, and of both.
        fused_gluon_cases(147, 128, torch.bfloat16, 2, 16)
        fused_gluon_cases(147, 208, torch.float16, 1, 8, power_of_2=True)
        fused_gluon_cases(37, 304, torch.bfloat16, 2, 8)
    return cases


class Emulated:
    """A Triton driver that names a GPU but has none: each launch compiles a kernel and runs it in the emulator."""

    def __init__(self):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.runtime.jit import JITFunction

        self.get_current_target = lambda: GPUTarget("cuda", TARGET, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device=0: 0
        self.get_active_torch_device = lambda: torch.device("cpu")
        build = JITFunction.run

        def run(kernel, *args, grid, warmup, **options):
            compiled = build(kernel, *args, grid=grid, warmup=True, **options)
            self.launch(compiled, grid[0], args)

        JITFunction.run = run
        triton.runtime.driver.set_active(self)

    def launch(self, compiled, grid: int, args) -> None:
        from ptx_emulator import Kernel

        source = compiled.src
        named = zip(source.fn.arg_names, source.signature.values(), args)
        # What Triton specialised a build on, a stride of 1 or no tensor at all, is no argument of it.
        given = {name: arg for name, kind, arg in named if kind != "constexpr"}
        arrays = {name: _memory_of(arg) if isinstance(arg, torch.Tensor) else arg for name, arg in given.items()}
        threads = 32 * compiled.metadata.num_warps
        Kernel(compiled.asm["ptx"], threads, compiled.metadata.shared).run(grid, arrays)


def _memory_of(x: torch.Tensor):
    """The bytes from the first to the last element of `x`, as numpy sees them in place."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    return x.as_strided((last + 1,), (1,)).view(torch.uint8).numpy()


def _differences(got: tuple, expected: tuple) -> list[str]:
    from torchao_blockwise.testing import assert_bitwise_equal

    differences = []
    for name, a, b in zip(("qdata", "scale", "columnwise qdata", "columnwise scale"), got, expected, strict=False):
        try:
            assert_bitwise_equal(a, b.contiguous(), name)
        except AssertionError as error:
            differences.append(str(error))
    return differences + ["another number of results"] * (len(got) != len(expected))


def _main() -> None:
    Emulated()
    results = {}
    for label, run in _cases().items():
        try:
            results[label] = _differences(*run())
        except AssertionError as error:
            results[label] = [f"{type(error).__name__}: {error}"]
    json.dump(results, sys.stdout)


@functools.cache
def _results() -> dict[str, list[str]]:
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("label", _cases())
def test_compiled_kernel_gives_the_bits_of_the_reference(label):
    assert _results()[label] == []


if __name__ == "__main__":
    _main()
