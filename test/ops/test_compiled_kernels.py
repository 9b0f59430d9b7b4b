"""What Triton and LLVM make of the quantize and transpose kernels gives the reference's bits. Needs no GPU.

A subprocess (without the interpreter, which Triton picks once a process) compiles each launch for a GPU that is not
there and runs its PTX in an emulator; see ptx_emulator.py for what that cannot see.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

pytest.importorskip("triton")

from torchao_blockwise.formats import (
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    NVFP4_16X16,
    CastOptions,
    Groups,
    Operand,
)
from torchao_blockwise.ops.fused import Norm
from torchao_blockwise.ops.fused import reference as fused_reference
from torchao_blockwise.ops.quantization import reference
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

# The emulator takes minutes.
pytestmark = pytest.mark.slow
TARGET = 90
SHAPES = ((128, 128), (37, 150))
# Only whole runs of 16 elements of a row, over the edge of a tile.
GLUON_SHAPES = ((128, 128), (147, 272))


def special_input(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of many sizes; blocks of zeros and of subnormals, -0, Inf, NaN, all in blocks of their own or not."""
    x = random_tensor(rows, columns, dtype=dtype, seed=rows)
    x[3], x[:, 7] = -0.0, 0.0
    x[4], x[:, 9] = torch.finfo(dtype).smallest_normal / 4, -torch.finfo(dtype).smallest_normal / 8
    x[5, 11], x[21, 30], x[rows - 1, columns - 1] = float("nan"), float("inf"), -float("inf")
    x[6, 12] = torch.finfo(dtype).max
    return x


def _cases() -> dict:
    """{label: call that gives (what kernels computed, what the reference computes), each operands, or None}."""
    return _triton_cases() | _gluon_cases()


def _amax_of(x, fmt, ends=None):
    return reference.tensor_amax_bits(x, ends, False) if fmt.has_global_scale else None


def _triton_cases() -> dict:
    from torchao_blockwise.ops.fused import kernels_triton as swiglu
    from torchao_blockwise.ops.quantization import kernels_triton as quantize
    from torchao_blockwise.ops.transposition import kernels_triton as transpose
    from torchao_blockwise.ops.transposition import reference as transpose_by_reference

    cases = {}

    def quantize_case(fmt, shape, dtype, rowwise, columnwise, power_of_2=False, ends=None, square=""):
        x, groups = special_input(*shape, dtype), None
        if fmt.has_global_scale:
            x = x.nan_to_num(1.0, 1.0, -1.0)
        if ends is not None:
            x[max(ends) :] = float("nan")
            ends = torch.tensor(ends, dtype=torch.int32)
            groups = Groups(ends)
        options = CastOptions(fmt, rowwise, columnwise, power_of_2, padded=True, columnwise_format_name=square)
        of = _amax_of(x, fmt, ends), options, groups
        copies = "+".join(["rowwise"] * rowwise + ["columnwise"] * columnwise)
        name = f"quantize {fmt.name} {shape[0]}x{shape[1]} {str(dtype)[6:]} {copies}" + " power_of_2" * power_of_2
        name += f" {square}" * bool(square) + ("" if ends is None else f" E{len(ends)}")
        cases[name] = lambda: (quantize.quantize(x, *of), reference.quantize(x, *of))

    def swiglu_case(tokens, width, ends):
        dh, gate, up = (special_input(tokens, width, torch.bfloat16) for _ in range(3))
        groups, options = Groups(torch.tensor(ends, dtype=torch.int32)), CastOptions(FP8_1X128, columnwise=True)

        def run():
            h, gradients = fused_reference.swiglu(gate, up), fused_reference.swiglu_backward(dh, gate, up)
            got = [
                *swiglu.swiglu_quantize(gate, up, options, groups),
                *swiglu.swiglu_backward_quantize(dh, gate, up, options, groups),
            ]
            values = h, torch.cat(gradients, 1)
            return got, [copy for y in values for copy in reference.quantize(y, None, options, groups)]

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

        cases[f"transpose {fmt.name} {'x'.join(map(str, shape))} {tile or ''}"] = run

    bf16 = torch.bfloat16
    for shape in SHAPES:
        quantize_case(FP8_1X128, shape, bf16, True, False)
        quantize_case(FP8_1X128, shape, bf16, False, True)
        for fmt in (FP8_128X128, NVFP4_1X16, NVFP4_16X16):
            quantize_case(fmt, shape, bf16, True, True)
        for fmt in (FP8_128X128, NVFP4_16X16):
            transpose_case(fmt, *shape)
    for tile in transpose._QUADS_TILES.values():
        transpose_case(FP8_128X128, 2, 272, 144, tile=tile)
    for fmt in (FP8_1X128, NVFP4_1X16):
        quantize_case(fmt, (150, 80), bf16, True, True, ends=[0, 37, 36, 130])
        quantize_case(fmt, (37, 150), bf16, True, True, ends=[i // 2 for i in range(1, 41)])
    swiglu_case(70, 80, [0, 37, 36, 60])
    for dtype in (torch.float16, torch.float32):
        quantize_case(FP8_1X128, (48, 144), dtype, True, True)
    quantize_case(FP8_1X128, (48, 144), bf16, True, True, True)
    quantize_case(FP8_1X128, (150, 144), bf16, True, True, square=FP8_128X128.name)
    quantize_case(FP8_1X128, (150, 80), bf16, True, True, ends=[0, 37, 36, 130], square=FP8_128X128.name)
    return cases


def _gluon_cases() -> dict:
    from torchao_blockwise.ops.fused import kernels_gluon as fused
    from torchao_blockwise.ops.operands import why_no_tile
    from torchao_blockwise.ops.quantization import kernels_gluon as gluon

    cases = {}

    def add(label, y, launch, tiles, power_of_2=False, square="", grouped=True):
        """What `launch(options, groups)` makes of tokens, and of those in groups, with tiles: {constant: value}.

        y: the matrix that it quantizes.
        """
        ends = Groups(torch.tensor([0, 37, 36, len(y) - 23], dtype=torch.int32))
        assert why_no_tile(y) is None

        def run(rowwise, groups):
            for (module, constant), value in tiles.items():
                setattr(module, constant, value)
            options = CastOptions(FP8_1X128, rowwise, True, power_of_2, padded=True, columnwise_format_name=square)
            return launch(options, groups), reference.quantize(y, None, options, groups)

        for rowwise, groups in itertools.product((True, False), (None, ends) if grouped else (None,)):
            name = f"{label} in Gluon {square}" + " columnwise" * (not rowwise) + " grouped" * (groups is not None)
            cases[name] = functools.partial(run, rowwise, groups)

    def quantize_cases(shape, dtype, warps, power_of_2=False, stride=None, square=""):
        x = special_input(shape[0], stride or shape[1], dtype)[:, : shape[1]]
        tiles = {(gluon, "BOTH"): (128, warps), (gluon, "COLUMNWISE"): (64, warps)}
        label = f"one read {shape[0]}x{shape[1]} {str(dtype)[6:]} {warps} warps"
        add(label, x, lambda options, groups: gluon.quantize(x, None, options, groups), tiles, power_of_2, square)

    def fused_cases(rows, width, dtype, parts, warps, power_of_2=False, square=""):
        """A norm and SwiGLU, and the same in groups; of halves of wider rows, whose gradients are side by side."""
        dh, gate, up = (special_input(rows, width, dtype) / scale for scale in (1, 8, 16))
        gate, up = torch.cat([gate, up], 1).chunk(2, 1)
        label = f"{rows}x{width} {str(dtype)[6:]} {parts} parts {warps} warps"
        tiles = {(fused, name): (parts, warps) for name in ("FORWARD", "BACKWARD", "NORM")}
        h, gradients = fused_reference.swiglu(gate, up), fused_reference.swiglu_backward(dh, gate, up)
        for name, launch, inputs, y in (
            ("swiglu", fused.swiglu_quantize, (gate, up), h),
            ("swiglu backward", fused.swiglu_backward_quantize, (dh, gate, up), torch.cat(gradients, 1)),
        ):
            add(f"{name} {label}", y, functools.partial(launch, *inputs), tiles, power_of_2, square)
        weight, bias = random_tensor(1, width, dtype=dtype)[0] / 16, random_tensor(1, width, seed=1)[0] / 16
        for layer in (False, True):
            mean, rstd = fused_reference.norm_statistics(dh, layer, 1e-5)
            norm = Norm(dh, weight, bias if layer else None, mean, rstd, dtype)
            add(
                f"{'layer' if layer else 'rms'} norm {label}", fused_reference.normalize(norm),
                lambda options, groups, norm=norm: fused.norm_quantize(norm, options), tiles, power_of_2, square, False,
            )  # fmt: skip

    for shape, warps in itertools.product(GLUON_SHAPES, (4, 8)):
        quantize_cases(shape, torch.bfloat16, warps)
    quantize_cases(GLUON_SHAPES[1], torch.float16, 16, True, 304)
    quantize_cases((144, 272), torch.bfloat16, 4, square=FP8_128X128.name)
    # Gradients whose blocks are of one half, and of both.
    fused_cases(147, 128, torch.bfloat16, 2, 16)
    fused_cases(147, 208, torch.float16, 1, 8, power_of_2=True)
    fused_cases(37, 304, torch.bfloat16, 2, 8)
    fused_cases(147, 144, torch.float16, 2, 8, square=FP8_128X128.name)
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
