"""What the compiler makes of each kernel for Hopper: registers, spills, instructions, the share of the issue slots.

Needs no GPU: kernels are built as a launch would build them, and never run. Writes benchmarks/results/builds_sm_90.json
and .md, which docs/kernels.md shows; with another Triton than the tested one, builds_sm_90_triton_3_9 and the like.

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

from torchao_blockwise import _versions
from torchao_blockwise.formats import (
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockFormat,
    CastOptions,
    Groups,
    Operand,
)
from torchao_blockwise.ops.fused.norm import kernels_gluon as norm_tiles
from torchao_blockwise.ops.fused.norm.values import Norm
from torchao_blockwise.ops.fused.swiglu import kernels_gluon as swiglu_tiles
from torchao_blockwise.ops.gemm.builds import BUILDS, Build
from torchao_blockwise.ops.gemm.grouped import kernels_decoded as decoded
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
GROUPS = Groups(torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (ROWS // EXPERTS))
CONFIGS = [config for config in BUILDS if config.ctas <= gluon.MAX_CTAS]


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
    tensor_scale = torch.ones(()) if fmt.has_global_scale else None
    return Operand(qdata, torch.zeros(fmt.scale_shape(rows, columns)).to(fmt.scale_dtype), tensor_scale, fmt.name)


def of_experts(weight: Operand) -> Operand:
    """`weight` of each expert."""
    qdata = torch.stack([weight.qdata.view(torch.uint8)] * EXPERTS).view(weight.qdata.dtype)
    scale = torch.stack([weight.scale.view(torch.uint8)] * EXPERTS).view(weight.scale.dtype)
    return weight._replace(qdata=qdata, scale=scale)


def size(config: Build) -> str:
    return f"{config.tile_m}×{config.tile_n}" + " a pair" * (config.ctas == 2)


def products() -> dict[str, tuple[Callable, Build]]:
    """Gluon products by name, plain and of groups, with what they are built for."""
    x, weight = operand(FP8_1X128, ROWS, COLUMNS), operand(FP8_128X128, ROWS, COLUMNS)
    weights, y = of_experts(weight), operand(FP8_1X128, COLUMNS, ROWS)
    found = {}
    for kind, b in {"output, grad_input": weight, "grad_weight": x}.items():
        for config in CONFIGS:
            launch = partial(gluon.matmul, x, b, torch.bfloat16, None, config)
            found[f"{kind} {size(config)}"] = launch, config
    grouped_kinds = {
        "output, grad_input": (x, weights, GROUPS, "m"),
        "grad_weight": (y, y, GROUPS, "k"),
    }
    for config in CONFIGS:
        for kind, arguments in grouped_kinds.items():
            launch = partial(grouped.grouped_matmul, *arguments, torch.bfloat16, config)
            found[f"grouped {kind} {size(config)}"] = launch, config
    return found


def outputs() -> dict[str, Callable]:
    """Gluon products by name with each kind of output: in bf16, in fp32, and added to fp32."""
    x, weight = operand(FP8_1X128, ROWS, COLUMNS), operand(FP8_128X128, ROWS, COLUMNS)
    kinds: dict[str, tuple] = {
        "grouped": (grouped, x, of_experts(weight), operand(FP8_1X128, COLUMNS, ROWS)),
        "grouped NVFP4 in bf16": (
            decoded,
            operand(NVFP4_1X16, ROWS, COLUMNS),
            of_experts(operand(NVFP4_16X16, ROWS, COLUMNS)),
            operand(NVFP4_1X16, COLUMNS, ROWS),
        ),
    }
    found = {}
    for config in CONFIGS:
        for kind, b in {"output, grad_input": weight, "grad_weight": x}.items():
            for dtype in (torch.bfloat16, torch.float32):
                name = f"{kind} {size(config)} {str(dtype)[6:]}"
                found[name] = partial(gluon.matmul, x, b, dtype, None, config)
            out = torch.zeros(ROWS, ROWS)
            found[f"{kind} {size(config)} added"] = partial(gluon.add_matmul, out, x, b, config)
        for kind, (module, rows, weights, columns) in kinds.items():
            for along, a, b in (("m", rows, weights), ("k", columns, columns)):
                for dtype in (torch.bfloat16, torch.float32):
                    name = f"{kind} along {along} {size(config)} {str(dtype)[6:]}"
                    found[name] = partial(module.grouped_matmul, a, b, GROUPS, along, dtype, config)
            out = torch.zeros(EXPERTS, COLUMNS, COLUMNS)
            found[f"{kind} along k {size(config)} added"] = partial(
                module.add_grouped_matmul, out, columns, columns, GROUPS, config
            )
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


def dumped(cubin: bytes, tool: str, *options: str) -> str:
    """The output of a program that Triton carries, run on a build."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = getattr(triton.knobs.nvidia, tool).path
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def resources_of(cubin: bytes) -> dict[str, int]:
    """The registers and the bytes of stack that ptxas gave a build."""
    usage = dumped(cubin, "cuobjdump", "--dump-resource-usage")
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}


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
    resources, sass = resources_of(compiled.asm["cubin"]), dumped(compiled.asm["cubin"], "nvdisasm", "-c")
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
    resources, sass = resources_of(compiled.asm["cubin"]), dumped(compiled.asm["cubin"], "nvdisasm", "-c")
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


def spill_row(name: str, launch: Callable) -> dict:
    resources = resources_of(build(launch)[0].asm["cubin"])
    return {
        "kernel": name,
        "registers": resources["REG"],
        "spilled bytes": resources["STACK"] + resources["LOCAL"],
    }


def spills(rows: Sequence[dict]) -> str:
    """How many of the builds spill, and a table of these."""
    spilled = [row for row in rows if row["spilled bytes"]]
    said = f"{len(spilled)} of {len(rows)} builds of products, by output, spill registers"
    return f"{said}:\n\n{table(spilled)}" if spilled else f"{said}."


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
    by_output = [spill_row(name, launch) for name, launch in outputs().items()]
    text = f"{table(multiplying)}\n\n{table(moving)}\n\n{spills(by_output)}"
    print(text)
    measured = {"products": multiplying, "casts": moving, "products by output": by_output}
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    suffix = "" if version == _versions._TESTED["triton"] else "_triton_{}_{}".format(*version)
    content = {"environment": environment(torch.device("cpu")), **measured}
    save(args.out, f"builds_sm_{CAPABILITY}{suffix}", content, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
