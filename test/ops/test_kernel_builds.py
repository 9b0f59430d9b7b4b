"""Every Triton kernel compiles for the GPUs it is for: no spills, the right instructions, few builds. Needs no GPU.

A subprocess (without the interpreter, which Triton picks once a process) runs the launchers on CPU tensors with a
driver that names a GPU but has none: kernels are built as a GPU would build them, and never launched.
"""

import json
import os
import re
import subprocess
import sys
import tempfile

import pytest

pytest.importorskip("triton")

TARGETS = (80, 90, 100)


def _record_builds(target: int):
    """Make Triton build for `target` and launch nothing; returns the list that builds are appended to."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Driver:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", target, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=0: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

    builds = []
    run = JITFunction.run

    def build(self, *args, grid, warmup, **kwargs):
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        builds.append((self.fn.__name__, compiled))
        return compiled

    JITFunction.run = build
    triton.runtime.driver.set_active(Driver())
    return builds


def _operand(fmt, rows: int, columns: int):
    import torch

    qdata = torch.zeros(fmt.qdata_shape(rows, columns), dtype=torch.uint8).view(fmt.element.storage_dtype)
    return qdata, torch.zeros(fmt.scale_shape(rows, columns)).to(fmt.scale_dtype)


def _cases(target: int):
    """(label, call of a launcher) for every variant of every kernel."""
    import torch

    from torchao_blockwise.formats import FORMATS, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
    from torchao_blockwise.ops.matmul import triton as matmul
    from torchao_blockwise.ops.quantize import triton as quantize
    from torchao_blockwise.ops.transpose import triton as transpose

    matmul.compute_capability = lambda device: divmod(target, 10)
    amax = torch.ones(())

    def quantize_case(fmt, m, k, dtype, rowwise, columnwise, power_of_2=False):
        copies = "+".join(["rowwise"] * rowwise + ["columnwise"] * columnwise)
        label = f"quantize {fmt.name} {m}x{k} {str(dtype)[6:]} {copies}" + " power_of_2" * power_of_2
        tensor_amax = amax if fmt.has_global_scale else None
        x = torch.zeros(m, k, dtype=dtype)
        return label, lambda: quantize.quantize(x, fmt, tensor_amax, rowwise, columnwise, power_of_2)

    def matmul_case(a_fmt, b_fmt, m, n, k, out_dtype, bias=None):
        label = f"matmul {a_fmt.name}·{b_fmt.name} {m}x{n}x{k} {str(out_dtype)[6:]}"
        scale = amax if a_fmt.has_global_scale else None
        a, b = _operand(a_fmt, m, k), _operand(b_fmt, n, k)
        return label, lambda: matmul.matmul(*a, scale, *b, scale, a_fmt, b_fmt, out_dtype, bias)

    def transpose_case(fmt, m, k):
        return f"transpose {fmt.name} {m}x{k}", lambda: transpose.transpose(*_operand(fmt, m, k), fmt, k)

    # Quantising needs conversions to e4m3 in hardware, from sm_89 on.
    for fmt in FORMATS.values() if target >= 89 else ():
        for copies in ((True, False), (False, True), (True, True)):
            yield quantize_case(fmt, 512, 1024, torch.bfloat16, *copies)
        yield quantize_case(fmt, 512, 1024, torch.float32, True, True)
        yield quantize_case(fmt, 300, 500, torch.bfloat16, True, True)
        for m, k in ((1, 16), (16, 1), (33, 150)):
            yield quantize_case(fmt, m, k, torch.float32, True, True)
        if fmt.has_power_of_2_scales:
            yield quantize_case(fmt, 512, 1024, torch.bfloat16, True, True, True)
        # Token counts that change: the first one is built already, the others make one build more.
        for m in (528, 531, 533) if fmt.element is FP8_1X128.element else ():
            yield quantize_case(fmt, m, 1024, torch.bfloat16, True, True)
    pairs = ((FP8_1X128, FP8_128X128), (FP8_1X128, FP8_1X128), (NVFP4_1X16, NVFP4_16X16), (NVFP4_1X16, NVFP4_1X16))
    for pair in pairs:
        for m in (16, 64, 512):
            yield matmul_case(*pair, m, 512, 1024, torch.bfloat16)
        yield matmul_case(*pair, 512, 512, 1024, torch.float32, torch.zeros(512))
        yield matmul_case(*pair, 300, 500, 500, torch.bfloat16)
        for m, k in ((528, 1024), (531, 1024), (528, 1000), (528, 1003)):
            yield matmul_case(*pair, m, 512, k, torch.bfloat16)
    for fmt in (FP8_128X128, NVFP4_16X16):
        yield transpose_case(fmt, 512, 1024)
        yield transpose_case(fmt, 301, 501)


def _resources(cubin: bytes) -> dict[str, int]:
    """What ptxas gave a kernel: REG, STACK, .. ; a spilled register lies on the stack."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", output)}


_INSTRUCTIONS = re.compile(
    r"(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync|cvt\.rn\.satfinite|div(?=\.\w+\.f32)|fma|st\.global)\.[\w.:]*"
    r"|\S*\.ftz\S*"
)


def _half_defined_words(ptx: str) -> list[str]:
    """Words of which one half was never written. ptxas 12.8 lost other bytes beside such halves of e4m3 pairs."""
    defined = set()
    for line in ptx.splitlines():
        operands = re.match(r"\s*(?:@!?%p\d+ )?(?!st)[a-z][\w.:]*\s+(\{[^}]*\}|[^,;{]+)", line)
        defined.update(re.findall(r"%rs\d+", operands.group(1)) if operands else ())
    words = re.findall(r"(mov\.b32 \s*%r\d+, \{(%rs\d+), (%rs\d+)\})", ptx)
    return [word for word, *halves in words if not defined.issuperset(halves)]


def _main(target: int) -> None:
    builds = _record_builds(target)
    rows, resources = [], {}
    for label, launch in _cases(target):
        launch()
        for kernel, compiled in builds:
            if compiled.hash not in resources:
                resources[compiled.hash] = _resources(compiled.asm["cubin"])
            instructions = sorted(set(_INSTRUCTIONS.findall(compiled.asm["ptx"])))
            row = {"label": label, "kernel": kernel, "build": compiled.hash, "instructions": instructions}
            row["half_defined_words"] = _half_defined_words(compiled.asm["ptx"])
            rows.append(row | resources[compiled.hash])
        builds.clear()
    json.dump(rows, sys.stdout)


@pytest.fixture(scope="module")
def builds():
    """{target: builds}; the targets compile side by side."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    commands = {target: [sys.executable, __file__, str(target)] for target in TARGETS}
    running = {
        target: subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for target, command in commands.items()
    }
    results = {}
    for target, process in running.items():
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        results[target] = json.loads(output)
    return results


def _of(rows, *words):
    found = [row for row in rows if all(word in row["label"].split() for word in words)]
    assert found, words
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_spills(builds, target):
    spills = [(row["label"], row["STACK"] + row["LOCAL"]) for row in builds[target]]
    assert [(label, n) for label, n in spills if n] == []


@pytest.mark.parametrize(
    "target, instruction",
    [(90, r"wgmma\.mma_async\S*e4m3\.e4m3"), (100, r"tcgen05\.mma\S*kind::f8f6f4")],
)
def test_fp8_products_run_on_fp8_tensor_cores(builds, target, instruction):
    for row in _of(builds[target], "matmul"):
        if "fp8" in row["label"] and " 16x" not in row["label"]:
            assert any(re.match(instruction, i) for i in row["instructions"]), row["label"]


@pytest.mark.parametrize("target", TARGETS[1:])
def test_quantize_rounds_as_the_reference_does(builds, target):
    """Division rounded correctly, conversions to e4m3 in hardware, subnormals kept, no contraction."""
    for row in _of(builds[target], "quantize"):
        names = row["instructions"]
        assert {i for i in names if i.startswith("div")} == {"div.rn.f32"}, row["label"]
        assert ("cvt.rn.satfinite.e4m3x2.f32" in names) == ("fp8" in row["label"]), row["label"]
        assert not [i for i in names if ".ftz" in i or i.startswith("fma")], row["label"]


@pytest.mark.parametrize("target", TARGETS[1:])
def test_quantize_leaves_no_half_of_a_word_undefined(builds, target):
    for row in _of(builds[target], "quantize"):
        assert row["half_defined_words"] == [], row["label"]


@pytest.mark.parametrize("target", TARGETS[1:])
def test_payload_is_stored_16_bytes_at_a_time(builds, target):
    for row in _of(builds[target], "quantize") + _of(builds[target], "transpose"):
        if "512x1024" in row["label"]:
            assert "st.global.v4.b32" in row["instructions"], row["label"]


@pytest.mark.parametrize("target", TARGETS)
def test_token_counts_do_not_recompile(builds, target):
    for pair in ("fp8_1x128·fp8_128x128", "fp8_1x128·fp8_1x128", "nvfp4_1x16·nvfp4_16x16"):
        shapes = ("512x512x1024", "528x512x1024", "531x512x1024", "528x512x1000", "528x512x1003")
        rows = [_of(builds[target], pair, shape, "bfloat16")[0] for shape in shapes]
        assert len({row["build"] for row in rows}) == 1
    if target >= 89:
        # The columnwise launch, the second one: multiples of 16 and all others.
        rows = [_of(builds[target], "fp8_1x128", f"{m}x1024", "rowwise+columnwise")[1] for m in (528, 531, 533)]
        assert len({row["build"] for row in rows}) == 2


if __name__ == "__main__":
    _main(int(sys.argv[1]))
