"""What Triton and LLVM make of the quantize and transpose kernels gives the reference's bits. Needs no GPU.

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

# The emulator takes minutes.
pytestmark = pytest.mark.slow
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
    """{label: call that gives (what kernels computed, what the reference computes), each operands, or None}."""

    from torchao_blockwise import _compat
    from torchao_blockwise.formats import (
        FP8_1X128,
        FP8_128X128,
        NVFP4_1X16,
        NVFP4_16X16,
        CastOptions,
        Groups,
        Operand,
    )
    from torchao_blockwise.ops.fused import kernels_triton as swiglu
    from torchao_blockwise.ops.fused import reference as fused_reference
    from torchao_blockwise.ops.quantization import kernels_triton as quantize
    from torchao_blockwise.ops.quantization import reference
    from torchao_blockwise.ops.transposition import kernels_triton as transpose
    from torchao_blockwise.ops.transposition import reference as transpose_by_reference
    from torchao_blockwise.testing import random_tensor

    cases = {}

    def amax_of(x, fmt, ends=None):
        return reference.tensor_amax_bits(x, ends, False) if fmt.has_global_scale else None

    def quantize_case(fmt, shape, dtype, rowwise, columnwise, power_of_2=False, square=""):
        x = special_input(*shape, dtype)
        if fmt.has_global_scale:
            x = x.nan_to_num(1.0, 1.0, -1.0)
        amax = amax_of(x, fmt)
        options = CastOptions(fmt, rowwise, columnwise, power_of_2, padded=True, columnwise_format_name=square)

        def run():
            return quantize.quantize(x, amax, options), reference.quantize(x, amax, options)

        copies = "+".join(["rowwise"] * rowwise + ["columnwise"] * columnwise)
        name = f"quantize {fmt.name} {shape[0]}x{shape[1]} {str(dtype)[6:]} {copies}"
        cases[name + " power_of_2" * power_of_2 + f" {square}" * bool(square)] = run

    def grouped_case(fmt, shape, ends, square=""):
        x = special_input(*shape, torch.bfloat16)
        if fmt.has_global_scale:
            x = x.nan_to_num(1.0, 1.0, -1.0)
        x[max(ends) :] = float("nan")
        ends = torch.tensor(ends, dtype=torch.int32)
        options = CastOptions(fmt, columnwise=True, columnwise_format_name=square)
        of = amax_of(x, fmt, ends), options, Groups(ends)

        def run():
            return quantize.quantize(x, *of), reference.quantize(x, *of)

        cases[f"grouped {fmt.name} {shape[0]}x{shape[1]} E{len(ends)}" + f" {square}" * bool(square)] = run

    def swiglu_case(tokens, width, ends):
        dh, gate, up = (special_input(tokens, width, torch.bfloat16) for _ in range(3))
        ends = torch.tensor(ends, dtype=torch.int32)

        def run():
            got, expected, options = [], [], CastOptions(FP8_1X128, columnwise=True)
            h, gradients = fused_reference.swiglu(gate, up), fused_reference.swiglu_backward(dh, gate, up)
            for y, inputs, launch in (
                (h, (gate, up), swiglu.swiglu_quantize),
                (torch.cat(gradients, 1), (dh, gate, up), swiglu.swiglu_backward_quantize),
            ):
                got += launch(*inputs, options, Groups(ends))
                expected += reference.quantize(y, None, options, Groups(ends))
            return got, expected

        cases[f"swiglu {tokens}x{width} E{len(ends)}"] = run

    def transpose_case(fmt, *shape, tile=None):
        qdata = torch.randint(0, 256, fmt.qdata_shape(*shape), dtype=torch.uint8)
        if shape[-1] % 2 and fmt.element.bits == 4:
            qdata[..., -1] &= 0xF
        scale = torch.rand(fmt.scale_shape(*shape)).to(fmt.scale_dtype)
        x = Operand(qdata.view(fmt.element.storage_dtype), scale, None, fmt.name)

        def run():
            if tile:
                transpose._QUADS_TILES = {0: tile}
            return [transpose.transpose(x, shape[-1])], [transpose_by_reference(x, shape[-1])]

        name = f"transpose {fmt.name} {'x'.join(map(str, shape))}"
        cases[name + (f" tile {tile[0]}x{tile[1]}" if tile else "")] = run

    def gluon_case(shape, dtype, warps, power_of_2=False, stride=None, square=""):
        from torchao_blockwise.ops.device import gluon_tiles
        from torchao_blockwise.ops.quantization import kernels_gluon as gluon

        x = special_input(shape[0], stride or shape[1], dtype)[:, : shape[1]]
        ends = torch.tensor([0, 37, 36, len(x) - 23], dtype=torch.int32)

        def run(rowwise, in_groups):
            tokens, groups = x, None
            options = CastOptions(FP8_1X128, rowwise, True, power_of_2, padded=True, columnwise_format_name=square)
            if in_groups:
                tokens, groups = x[:-3], Groups(ends)
            assert gluon_tiles.why_not_this(tokens) is None
            gluon.BOTH, gluon.COLUMNWISE = (128, warps), (64, warps)
            copies = gluon.quantize(tokens, None, options, groups)
            return copies, reference.quantize(tokens, None, options, groups)

        for rowwise, in_groups in ((True, False), (True, True), (False, False), (False, True)):
            name = f"one read {shape[0]}x{shape[1]} {str(dtype)[6:]} {warps} warps" + " columnwise" * (not rowwise)
            name += (
                " power_of_2" * power_of_2
                + " strided" * bool(stride)
                + " grouped" * in_groups
                + f" {square}" * bool(square)
            )
            cases[name] = functools.partial(run, rowwise, in_groups)

    def fused_gluon_cases(rows, width, dtype, parts, warps, power_of_2=False, square=""):
        """A norm and SwiGLU, and the same in groups; of halves of wider rows, whose gradients are side by side."""
        from torchao_blockwise.ops.device import gluon_tiles
        from torchao_blockwise.ops.fused import Norm
        from torchao_blockwise.ops.fused import kernels_gluon as fused

        dh, gate, up = (special_input(rows, width, dtype) / scale for scale in (1, 8, 16))
        gate, up = torch.cat([gate, up], 1).chunk(2, 1)
        ends = torch.tensor([0, 37, 36, rows - 23], dtype=torch.int32)

        def compared(y, options, ends, copies):
            assert gluon_tiles.why_not_this(y) is None
            return copies, reference.quantize(y, None, options, None if ends is None else Groups(ends))

        def options_of(rowwise):
            return CastOptions(FP8_1X128, rowwise, True, power_of_2, padded=True, columnwise_format_name=square)

        def swiglu_run(launch, inputs, y, rowwise, ends):
            fused.FORWARD = fused.BACKWARD = parts, warps
            options = options_of(rowwise)
            return compared(y, options, ends, launch(*inputs, options, None if ends is None else Groups(ends)))

        def norm_run(layer, rowwise):
            fused.NORM = parts, warps
            mean, rstd = fused_reference.norm_statistics(dh, layer, 1e-5)
            weight, bias = random_tensor(1, width, dtype=dtype)[0], random_tensor(1, width, seed=1)[0]
            of, options = Norm(dh, weight / 16, bias / 16 if layer else None, mean, rstd, dtype), options_of(rowwise)
            return compared(fused_reference.normalize(of), options, None, fused.norm_quantize(of, options))

        h, gradients = fused_reference.swiglu(gate, up), fused_reference.swiglu_backward(dh, gate, up)
        for rowwise in (True, False):
            label = f"{rows}x{width} {str(dtype)[6:]} {parts} parts {warps} warps" + " columnwise" * (not rowwise)
            label += f" {square}" * bool(square)
            for groups in (None, ends):
                name = label + " grouped" * (groups is not None)
                for direction, launch, inputs, y in (
                    ("swiglu", fused.swiglu_quantize, (gate, up), h),
                    ("swiglu backward", fused.swiglu_backward_quantize, (dh, gate, up), torch.cat(gradients, 1)),
                ):
                    run = functools.partial(swiglu_run, launch, inputs, y, rowwise, groups)
                    cases[f"{direction} in Gluon {name}"] = run
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
    quantize_case(FP8_1X128, (150, 144), torch.bfloat16, True, True, square=FP8_128X128.name)
    grouped_case(FP8_1X128, (150, 80), [0, 37, 36, 130], FP8_128X128.name)
    if _compat.has_gluon():
        for shape in GLUON_SHAPES:
            for warps in (4, 8):
                gluon_case(shape, torch.bfloat16, warps)
        gluon_case(GLUON_SHAPES[1], torch.float16, 16, True, 304)
        gluon_case(GLUON_SHAPES[1], torch.bfloat16, 4, square=FP8_128X128.name)
        # Gradients whose blocks are of one half, and of both.
        fused_gluon_cases(147, 128, torch.bfloat16, 2, 16)
        fused_gluon_cases(147, 208, torch.float16, 1, 8, power_of_2=True)
        fused_gluon_cases(37, 304, torch.bfloat16, 2, 8)
        fused_gluon_cases(147, 144, torch.float16, 2, 8, square=FP8_128X128.name)
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


def _differences(got, expected) -> list[str]:
    from torchao_blockwise.testing import assert_bitwise_equal

    differences = []
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a is None or b is None:
            differences += [f"one result {i} is None"] * (a is not b)
            continue
        for name, part, wanted in zip(("qdata", "scale"), a.tensors, b.tensors):
            try:
                assert_bitwise_equal(part, wanted.contiguous(), f"{name} of result {i}")
            except AssertionError as error:
                differences.append(str(error))
    return differences


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
