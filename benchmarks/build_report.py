"""What the compiler makes of each kernel for Hopper: registers, spills, instructions, the share of the issue slots.

Needs no GPU: kernels are built as a launch would build them, and never run. Writes benchmarks/results/builds_sm_90.json
and .md, which docs/performance.md shows.

    python benchmarks/build_report.py [--out FOLDER]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

# Triton picks its interpreter once a process.
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from environment import environment
from report import RESULTS, markdown, save
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, BlockFormat, CastOptions, Groups, Operand
from torchao_blockwise.ops.fused.norm import kernels_gluon as norm_tiles
from torchao_blockwise.ops.fused.norm.values import Norm
from torchao_blockwise.ops.fused.swiglu import kernels_gluon as swiglu_tiles
from torchao_blockwise.ops.gemm.builds import BUILDS, Build
from torchao_blockwise.ops.gemm.grouped import kernels_gluon as grouped
from torchao_blockwise.ops.gemm.plain import kernels_gluon as gluon
from torchao_blockwise.ops.quantization import kernels_gluon as one_read
from torchao_blockwise.ops.quantization import kernels_triton as quantize
from torchao_blockwise.ops.transposition import kernels_triton as transpose

CAPABILITY = 90
# e4m3 operations a cycle of a multiprocessor's tensor cores; its schedulers.
TENSOR_RATE, SCHEDULERS = 8192, 4
# Elements of K that one of their instructions takes.
MMA_K = 32
ROWS, COLUMNS = 512, 1024
EXPERTS = 4


class Driver:
    """Names a GPU and has none."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", CAPABILITY, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=0: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))


def build(launch: Callable[[], object]):
    """The build that `launch` would run; the last one where it launches several."""
    builds, run = [], JITFunction.run

    def record(self, *args, grid, warmup, **kwargs):
        builds.append((run(self, *args, grid=grid, warmup=True, **kwargs), grid))

    JITFunction.run = record
    try:
        launch()
    finally:
        JITFunction.run = run
    return builds[-1]


def operand(fmt: BlockFormat, rows: int, columns: int) -> Operand:
    qdata = torch.zeros(fmt.qdata_shape(rows, columns), dtype=torch.uint8).view(fmt.element.storage_dtype)
    return Operand(qdata, torch.zeros(fmt.scale_shape(rows, columns)).to(fmt.scale_dtype), None, fmt.name)


def products() -> dict[str, tuple[Callable, Build]]:
    """Gluon products by name, plain and of groups, with what they are built for."""
    configs = [config for config in BUILDS if config.ctas <= gluon.MAX_CTAS]
    x, weight = operand(FP8_1X128, ROWS, COLUMNS), operand(FP8_128X128, ROWS, COLUMNS)
    groups = Groups(torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (ROWS // EXPERTS))
    qdata = torch.stack([weight.qdata.view(torch.uint8)] * EXPERTS).view(weight.qdata.dtype)
    weights = weight._replace(qdata=qdata, scale=torch.stack([weight.scale] * EXPERTS))
    y = operand(FP8_1X128, COLUMNS, ROWS)

    def size(config: Build) -> str:
        return f"{config.tile_m}×{config.tile_n}" + " a pair" * (config.ctas == 2)

    found = {}
    for kind, b in {"output, grad_input": weight, "grad_weight": x}.items():
        for config in configs:
            launch = partial(gluon.matmul, x, b, torch.bfloat16, None, config)
            found[f"{kind} {size(config)}"] = launch, config
    grouped_kinds = {
        "output, grad_input": (x, weights, groups, "m"),
        "grad_weight": (y, y, groups, "k"),
    }
    for config in configs:
        for kind, arguments in grouped_kinds.items():
            launch = partial(grouped.grouped_matmul, *arguments, torch.bfloat16, config)
            found[f"grouped {kind} {size(config)}"] = launch, config
    return found


def casts() -> dict[str, Callable]:
    """Kernels that move a [512, 1024] tensor, bf16 where it is in high precision."""
    x, amax_bits = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16), torch.ones(()).view(torch.int32)
    rowwise = CastOptions(FP8_1X128)
    columnwise, both = rowwise._replace(rowwise=False, columnwise=True), rowwise._replace(columnwise=True)
    square = CastOptions(FP8_128X128)
    norm = Norm(x, torch.ones(COLUMNS, dtype=x.dtype), None, None, torch.ones(ROWS), x.dtype)
    # Of SwiGLU an element is one of h, which has two gradients.
    return {
        "quantize 1×128 rowwise": lambda: quantize.quantize(x, None, rowwise),
        "quantize 1×128 columnwise": lambda: one_read.quantize(x, None, columnwise),
        "quantize 1×128, both copies": lambda: one_read.quantize(x, None, both),
        "quantize 128×128": lambda: quantize.quantize(x, None, square),
        "quantize 128×128, both copies": lambda: quantize.quantize(x, None, square._replace(columnwise=True)),
        "quantize NVFP4 1×16 rowwise": lambda: quantize.quantize(x, amax_bits, CastOptions(NVFP4_1X16)),
        "transpose fp8": lambda: transpose.transpose(operand(FP8_128X128, ROWS, COLUMNS), COLUMNS),
        "RMSNorm + quantize, both copies": lambda: norm_tiles.norm_quantize(norm, both),
        "SwiGLU + quantize, both copies": lambda: swiglu_tiles.swiglu_quantize(x, x, both, None),
        "SwiGLU backward + quantize, both copies": lambda: swiglu_tiles.swiglu_backward_quantize(x, x, x, both, None),
    }


def disassemble(cubin: bytes) -> tuple[dict[str, int], str]:
    """(resources that ptxas gave, SASS)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def tool(name: str, *options: str) -> str:
            path = getattr(triton.knobs.nvidia, name).path
            return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout

        usage, sass = tool("cuobjdump", "--dump-resource-usage"), tool("nvdisasm", "-c")
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}, sass


def instructions(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if re.search(r"/\*[0-9a-f]{4,}\*/", line)]


def inner_loop(sass: str, products: int) -> list[str]:
    """The instructions of the shortest loop with so many products of the tensor cores."""
    lines = sass.splitlines()
    labels = {m.group(1): i for i, line in enumerate(lines) if (m := re.match(r"\s*(\.L_x_\d+):", line))}
    loops = []
    for i, line in enumerate(lines):
        m = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        if m and labels.get(m.group(1), i) < i:
            body = instructions(lines[labels[m.group(1)] : i + 1])
            loops += [body] if sum("QGMMA" in x for x in body) >= products else []
    return min(loops, key=len)


def product_row(name: str, launch: Callable, config: Build) -> dict:
    compiled, _ = build(launch)
    resources, sass = disassemble(compiled.asm["cubin"])
    loop = len(inner_loop(sass, config.waves * FP8_1X128.block[1] // MMA_K))
    cycles = 2 * config.tile_m * config.tile_n * FP8_1X128.block[1] / TENSOR_RATE
    return {
        "kernel": name,
        "registers": resources["REG"],
        "spilled bytes": resources["STACK"] + resources["LOCAL"],
        "shared KiB": compiled.metadata.shared / 1024,
        "tensor cycles a block of K": cycles,
        "instructions a block of K": loop * config.consumers,
        "issue slots %": 100 * loop * config.consumers / cycles,
        "L2 bytes a KFLOP": 500 * (config.tile_m / config.ctas + config.tile_n) / (config.tile_m * config.tile_n),
    }


def cast_row(name: str, launch: Callable) -> dict:
    compiled, grid = build(launch)
    resources, sass = disassemble(compiled.asm["cubin"])
    warps = compiled.metadata.num_warps
    # Padding behind the last EXIT is no instruction that runs.
    code = instructions(sass.splitlines())
    ends = [i for i, line in enumerate(code) if "EXIT" in line]
    executed = len([line for line in code[: ends[-1] + 1] if "NOP" not in line])
    return {
        "kernel": name,
        "registers": resources["REG"],
        "spilled bytes": resources["STACK"] + resources["LOCAL"],
        "warps a multiprocessor": min(64, 65536 // (resources["REG"] + 7 & ~7) // 32 // warps * warps),
        "instructions an element": executed * warps * 32 * grid[0] / (ROWS * COLUMNS),
    }


def table(rows: Sequence[dict]) -> str:
    def cell(value) -> str:
        return f"{value:.1f}" if isinstance(value, float) else str(value)

    return markdown(list(rows[0]), ([cell(value) for value in row.values()] for row in rows))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    triton.runtime.driver.set_active(Driver())
    gluon.multiprocessors = grouped.multiprocessors = lambda device: 132
    multiplying = [product_row(name, *case) for name, case in products().items()]
    moving = [cast_row(name, launch) for name, launch in casts().items()]
    text = f"{table(multiplying)}\n\n{table(moving)}"
    print(text)
    content = {"environment": environment(torch.device("cpu")), "products": multiplying, "casts": moving}
    save(args.out, f"builds_sm_{CAPABILITY}", content, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
