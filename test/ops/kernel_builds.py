"""Kernels built for GPUs that are not there, and what the builds are like: registers, spills, instructions.

A subprocess (without the interpreter, which Triton picks once a process) runs the launchers on CPU tensors with a
driver that names a GPU but has none: kernels are built as a GPU would build them, and never launched.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter


def _record_builds(target: int, once: bool):
    """Make Triton build for `target` and launch nothing; returns the list that builds are appended to.

    once: whether each kernel is built with the first of its configurations only.
    """
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Driver:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", target, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=0: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

    builds, seen = [], set()
    run = JITFunction.run

    def build(self, *args, grid, warmup, **kwargs):
        if once and self.fn in seen:
            return None
        seen.add(self.fn)
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        builds.append((self.fn.__name__, compiled))
        # No build to launch the next time: each launch comes here.
        return None

    JITFunction.run = build
    triton.runtime.driver.set_active(Driver())
    return builds


def operand(fmt, *shape: int):
    import torch

    from torchao_blockwise.formats import Operand

    qdata = torch.zeros(fmt.qdata_shape(*shape), dtype=torch.uint8).view(fmt.element.storage_dtype)
    scale = torch.zeros(fmt.scale_shape(*shape)).to(fmt.scale_dtype)
    return Operand(qdata, scale, torch.ones(()) if fmt.has_global_scale else None, fmt.name)


def _resources(cubin: bytes) -> dict[str, int]:
    """The resources that ptxas gave a kernel: REG, STACK, .. ; a spilled register lies on the stack."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Triton carries this program.
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", output)}


# Sums and products too: without ".rn" ptxas may contract two of them. And estimates, and copies to shared memory that
# do not pass through registers: "cg" of 16 bytes, "ca" of 4 or 8.
INSTRUCTIONS = re.compile(
    r"(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync|cvt\.rn\.satfinite|div(?=\.\w+\.f32)|fma|[ls][dt]\.global)\.[\w.:]*"
    r"|\S*\.ftz\S*|(?:add|sub|mul)\.(?:[\w.]+\.)?f32(?:x2)?|\S*\.approx\S*|cp\.async\.c[ag]"
)


def _half_defined_words(ptx: str) -> list[str]:
    """Words of which one half was never written. ptxas 12.8 lost other bytes next to such halves of e4m3 pairs."""
    defined = set()
    for line in ptx.splitlines():
        operands = re.match(r"\s*(?:@!?%p\d+ )?(?!st)[a-z][\w.:]*\s+(\{[^}]*\}|[^,;{]+)", line)
        defined.update(re.findall(r"%rs\d+", operands.group(1)) if operands else ())
    words = re.findall(r"(mov\.b32 \s*%r\d+, \{(%rs\d+), (%rs\d+)\})", ptx)
    return [word for word, *halves in words if not defined.issuperset(halves)]


def ptxas_12_9_hazards(ptx: str) -> list[str]:
    """Instructions of a kernel with FP8 that ptxas 12.9, which Triton 3.8 uses on Hopper, may miscompile.

    min.NaN and max.NaN: where two stores write the value as FP8, one of them writes other bytes (Triton issue 11111).
    add.s16x2 of a register that another one adds too, as for a constant: the second adds 0 (Triton issue 11581).
    """
    if not re.search(r"cvt\.[\w.]*e[45]m[23]x2", ptx):
        return []
    addends = Counter(x for line in re.findall(r"add\.s16x2\s+%r\d+,([^;]*);", ptx) for x in set(line.split(",")))
    found = [f"add.s16x2 of {x.strip()} in {n} places" for x, n in addends.items() if n > 1]
    return found + re.findall(r"(?:min|max)\.NaN\S*", ptx)


def _loads_in_loops(ttgir: str) -> list[int]:
    """Of each partition of a kernel how many loads from memory are in its loops."""
    partitions = re.split(r"^\s*(?:default \{|partition\d+\()", ttgir, flags=re.M)[1:]
    loops = (re.split(r"scf\.(?:for|while)", partition, maxsplit=1)[1:] for partition in partitions)
    return [len(re.findall(r"tt\.load", *loop)) if loop else 0 for loop in loops]


def _rows(modules, target: int, once: bool) -> list[dict]:
    """Describe each build for `target`."""
    builds = _record_builds(target, once)
    rows, resources = [], {}
    for module in modules:
        for label, launch in module.cases(target):
            launch()
            for kernel, compiled in builds:
                if compiled.hash not in resources:
                    resources[compiled.hash] = _resources(compiled.asm["cubin"])
                # How many there are of each.
                counts = Counter(INSTRUCTIONS.findall(compiled.asm["ptx"]))
                row = {"label": label, "kernel": kernel, "build": compiled.hash, "instructions": counts}
                row["SHARED"] = compiled.metadata.shared
                row["loads_in_loops"] = _loads_in_loops(compiled.asm["ttgir"])
                row["half_defined_words"] = _half_defined_words(compiled.asm["ptx"])
                row["ptxas_12_9_hazards"] = ptxas_12_9_hazards(compiled.asm["ptx"])
                rows.append(resources[compiled.hash] | row)
            builds.clear()
    return rows


def built_for(modules, target: int, once: bool = False) -> list[dict]:
    """Describe the builds of all `cases(target)` of these modules; once: of each kernel only the first."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, str(target), "once" if once else "all", *modules]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    for row in rows:
        assert row["ptxas_12_9_hazards"] == [], row["label"]
    return rows


# Kernels of which the ptxas of Triton 3.9 (13.4) keeps up to 72 bytes on the stack in some builds, listed in
# benchmarks/results/builds_sm_90_triton_3_9.md; older ones do so in two builds of all.
_SPILLED_BY_TRITON_3_9 = ("matmul_kernel", "_swiglu_kernel", "_swiglu_backward_kernel")


def spilled_bytes(rows) -> dict[str, int]:
    """{label: bytes on the stack} of builds that spill; with Triton 3.9 not of those that are known to."""
    import triton

    is_3_9 = tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 9)
    allowed = dict.fromkeys(_SPILLED_BY_TRITON_3_9, 72) if is_3_9 else {}
    found = ((row["label"], row["kernel"], row["STACK"] + row["LOCAL"]) for row in rows)
    return {label: n for label, kernel, n in found if n > allowed.get(kernel, 0)}


# Of builds that need one register more than there is: the number of the thread, read back once a tile, in no loop. The
# last one by ptxas for Blackwell, told to allocate registers in a simpler way; by itself it needs no stack.
SPILLED_BYTES = {
    (90, "gluon_one_row 256x128 512x512x1024 dtypefloat32"): 8,
    (90, "gluon_k 256x128 512x1024x1024 groups4 dtypefloat32"): 8,  # by Triton 3.6
    (100, "swiglu_backward_quantize gluon 512x1024 bfloat16 rowwise+columnwise E8"): 8,
}


# Kernels whose sums no bits depend on: of a norm's statistics, and of products.
_SUMS = ("_statistics_kernel", "_scale_kernel")


def assert_sound(rows, target: int) -> None:
    """Nothing spills; kernels multiply on tensor cores, or round each step by itself and leave no half of a word."""
    of_builds = {row["build"]: row for row in reversed(rows)}.values()
    spilled = {(target, label): n for label, n in spilled_bytes(of_builds).items()}
    assert spilled.items() <= SPILLED_BYTES.items()
    for row in rows:
        if "matmul" in row["kernel"]:
            assert any("mma" in name for name in row["instructions"]), row["label"]
        elif row["kernel"] != "_decode_kernel":
            assert_each_step_is_rounded_by_itself(row)
            assert row["half_defined_words"] == [], row["label"]


def assert_each_step_is_rounded_by_itself(row) -> None:
    """No contraction, by the compiler or by ptxas; division rounded correctly; subnormals kept.

    But for `reciprocal`, of which SwiGLU has one an element: an estimate and two FMAs, which make it right.
    """
    counts, is_fused = row["instructions"], any(word in row["kernel"] for word in ("swiglu", "norm"))
    inexact = {i: n for i, n in counts.items() if re.match(r"fma\..*f32", i) or ".ftz" in i or ".approx" in i}
    reciprocals = counts.get("rcp.approx.ftz.f32", 0)
    assert (reciprocals > 0) == ("swiglu" in row["kernel"]), row["label"]
    if row["kernel"] not in _SUMS:
        expected = {"rcp.approx.ftz.f32": reciprocals, "fma.rn.f32": 2 * reciprocals} if reciprocals else {}
        assert inexact == expected, row["label"]
    arithmetic = [name for name in counts if re.match(r"(add|sub|mul|div)\." if is_fused else r"div\.", name)]
    assert row["kernel"] in _SUMS or all(".rn." in name for name in arithmetic), row["label"]


def of(rows, *words):
    found = [row for row in rows if all(word in row["label"].split() for word in words)]
    assert found, words
    return found


if __name__ == "__main__":
    target, how, *names = sys.argv[1:]
    modules = [importlib.import_module(name) for name in names]
    json.dump(_rows(modules, int(target), how == "once"), sys.stdout)
