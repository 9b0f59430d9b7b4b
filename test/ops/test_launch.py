"""The direct launch takes the very build that Triton would, and leaves to Triton what is not its own. Needs no GPU.

A subprocess (without the interpreter, which Triton picks once a process) launches on CPU tensors with a driver that
names a GPU but has none: kernels are built as a GPU would build them, and the launcher writes down what it is given. Of
a matrix that the copy engine moves in tiles that is all that a tensor map is made of.
"""

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from torchao_blockwise._compat import triton_launcher
from torchao_blockwise.ops.launch import Tile, launch

TARGET = 90
_load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


class Launches:
    """A Triton driver that launches nothing: in the place of Triton's extension in C, `made` lists what it is given."""

    def __init__(self):
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia import driver
        from triton.runtime.jit import JITFunction

        self.made, self.by_triton, self.seen, self.device = [], 0, 0, torch.zeros(()).get_device()
        # Triton 3.6 compiles an extension for each signature; others have one for all.
        driver.library_dirs, driver.compile_module_from_src = list, lambda **given: self.utils
        driver.PyKernelArg = lambda **given: None
        self.nvidia = driver
        run = JITFunction.run

        def counted(*args, **kwargs):
            self.by_triton += 1
            return run(*args, **kwargs)

        JITFunction.run = counted
        self.get_current_target = lambda: GPUTarget("cuda", TARGET, 32)
        self.get_current_device = lambda: self.device
        self.get_current_stream = lambda device: 7
        self.get_active_torch_device = lambda: torch.device("cpu")
        triton.runtime.driver.set_active(self)

    def both_ways(self, call) -> list[tuple]:
        """(launches, how many of them by Triton) of a first and a later call, and of one by Triton only."""
        known = triton_launcher.launching
        first, again = self.of(call), self.of(call)
        triton_launcher.launching = lambda: None
        plain = self.of(call)
        triton_launcher.launching = known
        return [first, again, plain]

    class utils:
        load_binary = staticmethod(lambda name, kernel, shared, device: (object(), name, 0, 0, 1024))
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 232448})
        build_signature_metadata = staticmethod(lambda kinds: kinds)
        # A tensor map is all that it is made of; sizes are lists or tuples.
        fill_tma_descriptor = fill_tma_descriptor_tiled = staticmethod(
            lambda *given: [list(x) if isinstance(x, tuple) else x for x in given]
        )

    def launcher_cls(self, src, metadata):
        """Triton's own launcher, in Python, up to what it calls in C."""
        self.utils.launch = functools.partial(self._record, src, metadata)
        return self.nvidia.CudaLauncher(src, metadata)

    def _record(self, src, metadata, x, y, z, stream, function, *given):
        if triton.__version__.startswith("3.6"):
            *flags, scratch, profile_scratch, packed, about, enter, leave = given[:8]
            args = given[8:]
        else:
            *flags, packed, about, enter, leave, scratch, profile_scratch, _, _, args = given
        # Kernels get the address of a tensor; values of constexprs are not read.
        values = [getattr(arg, "data_ptr", lambda arg=arg: arg)() for arg in args]
        for hook in (enter, leave):
            if hook is not None:
                hook(about)
        read, pointers, following = {}, [], iter(values)
        for name, kind in zip(src.fn.arg_names, src.signature.values()):
            value = next(following)
            if kind.startswith("tensordesc"):
                # The map, two sizes, two strides.
                read[name] = [value, *(next(following) for _ in range(4))]
            elif kind != "constexpr":
                read[name] = value
            if kind[0] == "*":
                pointers.append(name)
        assert next(following, "nothing") == "nothing"
        row = {"build": metadata.hash, "function": function, "grid": [x, y, z], "stream": stream}
        row |= {"args": read, "pointers": pointers, "packed": list(packed)}
        self.made.append(row | {"flags": flags, "scratch": [scratch, profile_scratch]})

    def of(self, call) -> tuple[list[dict], int]:
        """The launches of `call`, and how many of them went through Triton."""
        self.made.clear()
        self.by_triton = 0
        call()
        return list(self.made), self.by_triton


if not triton.knobs.runtime.interpret:
    import triton.language as tl

    @triton.jit(do_not_specialize=["free"])
    def _kernel(x_ptr, y_ptr, n, free, SIZE: tl.constexpr, SCALE: tl.constexpr):
        offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        values = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0) * SCALE + free
        if y_ptr is not None:
            tl.store(y_ptr + offsets, values, mask=offsets < n)
        else:
            tl.store(x_ptr + offsets, values, mask=offsets < n)

    @gluon.jit
    def _tile_kernel(matrix, scales, out_ptr, n, SCALE: gl.constexpr):
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


# --- what is launched -------------------------------------------------------------------------------------------------


def _kernel_cases():
    """{label: call} of the first variant of every kernel that takes no descriptors, of those that are built."""
    sys.path.append(str(Path(__file__).parent))
    modules = [importlib.import_module(name) for name in ("cast_builds", "gemm_builds")]
    cases = [case for module in modules for case in module.cases(TARGET) if not case[0].startswith("gluon")]
    return dict({tuple(label.split()[:2]): (label, call) for label, call in reversed(cases)}.values())


SIZES = (1, 16, 17, 32, 33, 0, -16, 2**31 - 1, 2**31 + 1, 2**40, -(2**31), -(2**40))


def _argument_cases():
    """{label: call} of launches that differ in what Triton builds for, and in what it does not."""
    x, y, flat = torch.zeros(256), torch.zeros(256), torch.zeros(1 << 12)

    def case(x=x, y=y, n=100, free=5, **options):
        return functools.partial(launch, _kernel, 2, x, y, n, free, **{"SIZE": 128, "SCALE": 2.0, **options})

    cases = {f"n={n}": case(n=n) for n in SIZES} | {f"free={n}": case(free=n) for n in SIZES}
    return cases | {
        "x off 16 bytes": case(x=x[1:]),
        "y off 16 bytes": case(y=y[3:]),
        # Tensors of one storage, at other distances than in other launches of the same build.
        "apart": case(x=flat[:256], y=flat[1024:]),
        "further apart": case(x=flat[16:], y=flat[2048:]),
        "the other way round": case(x=flat[1024:], y=flat[:256]),
        "no y": case(y=None),
        "bf16": case(x=x.bfloat16()),
        "another constexpr": case(SIZE=64),
        "8 warps": case(num_warps=8),
        # By name, so that the order in which options are written says nothing.
        "64, 128": case(SIZE=64, SCALE=128),
        "64, 128 swapped": functools.partial(launch, _kernel, 2, x, y, 100, 5, SCALE=64, SIZE=128),
    }


def _tile(rows, columns, bits, swizzle=0):
    return Tile((rows, columns), gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2))


def _strided(memory, rows, columns, stride):
    return memory[: rows * stride].view(rows, stride)[:, :columns]


def _matrices():
    """{label: (matrix, its tile)}: what a map must tell apart, some of them at one address."""
    memory, other = torch.zeros(1 << 14, dtype=torch.uint8), torch.zeros(1 << 14, dtype=torch.uint8)
    small, f32 = _tile(16, 64, 8), memory.view(torch.float32)
    whole, e4m3 = _strided(memory, 48, 96, 96), memory.view(torch.float8_e4m3fn)
    return {
        "here": (whole, small),
        "there": (_strided(other, 48, 96, 96), small),
        "fewer rows": (_strided(memory, 47, 96, 96), small),
        "fewer columns": (_strided(memory, 48, 80, 80), small),
        "still fewer columns": (_strided(memory, 48, 64, 64), small),
        # Of which the stride says nothing.
        "one row, strided": (_strided(memory, 1, 80, 99), small),
        "larger than a tile in no dim": (_strided(memory, 3, 16, 16), small),
        "e4m3": (_strided(e4m3, 48, 96, 96), small),
        "other tile": (whole, _tile(32, 64, 8)),
        "swizzled tile": (whole, _tile(16, 128, 8, 128)),
        "the like of another tile": (whole, _tile(16, 64, 8)),
        "f32, one row, strided": (_strided(f32, 1, 20, 33), _tile(1, 64, 32)),
    }


def _tile_cases():
    """({label: call} of launches with maps, {label: call} of those that the copy engine cannot make)."""
    scales, out, matrices = (torch.zeros(4, 64), _tile(1, 64, 32)), torch.zeros(16), _matrices()
    here = matrices["here"]

    def case(matrix=here, scales=scales, out=out, n=20, **options):
        return functools.partial(launch, _tile_kernel, 2, matrix, scales, out, n, **{"SCALE": 2.0, **options})

    cases = {label: case(matrix) for label, matrix in matrices.items()}
    cases |= {f"{label}, later": case(matrix) for label, matrix in matrices.items()}
    cases |= {
        "maps, 8 warps": case(num_warps=8),
        "another scale": case(SCALE=3.0),
        "out off 16 bytes": case(out=out[1:]),
        "matrix and scales swapped": case(scales, here),
        # A matrix differs from a tensor in the same memory, and so do tensors of different dtypes.
        "out as a view": case(out=out.view(torch.int32)),
        "out as int32": case(out=(out, torch.int32)),
        "out as uint8": case(out=(out, torch.uint8)),
        "out as int32, off 16 bytes": case(out=(out[1:], torch.int32)),
    }
    memory = torch.zeros(1 << 12, dtype=torch.uint8)
    wrong = {"off 16 bytes": _strided(memory[8:], 8, 96, 96), "rows off 16 bytes": _strided(memory, 8, 90, 90)}
    wrong |= {"no rows": memory.view(-1, 64)[:0], "columns apart": memory.view(-1, 64)[:, ::2]}
    wrong |= {"rows apart": _strided(memory, 8, 96, 112), "one column of many": memory.view(-1, 32)[:, ::32]}
    return cases, {label: case((matrix, here[1])) for label, matrix in wrong.items()}


def _watchers(launches):
    """(label, how it begins, how it ends) of all that makes a launch Triton's own."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook

    def hook(*args, **kwargs):
        launches.seen += 1

    yield "enter hook", lambda: enter.add(hook), lambda: enter.remove(hook)
    yield "exit hook", lambda: leave.add(hook), lambda: leave.remove(hook)
    yield "pre-run hook", lambda: _kernel.add_pre_run_hook(hook), _kernel.pre_run_hooks.clear
    yield "debug", lambda: setattr(runtime, "debug", True), lambda: setattr(runtime, "debug", False)
    yield "another device", lambda: setattr(launches, "device", 0), lambda: setattr(launches, "device", -1)


# --- checks in the subprocess -----------------------------------------------------------------------------------------

# Labels of cases that share a build with one before them.
BUILT_ALREADY = ("n=32", "n=33", "there", "fewer rows", "fewer columns")


def _without_results(launches: list[dict]) -> list:
    """Launches without the addresses of results, which are made again by every call."""
    return [{**row, "args": {k: v for k, v in row["args"].items() if k not in row["pointers"]}} for row in launches]


def _check_launches_are_tritons(launches, cases: dict, has_new_results: bool) -> None:
    for label, call in cases.items():
        made, by_triton = zip(*launches.both_ways(call))
        assert by_triton[1:] == (0, len(made[2])) and made[2], label
        assert by_triton[0] == 0 or label not in BUILT_ALREADY, label
        first, again, plain = map(_without_results, made) if has_new_results else made
        assert first == again == plain, label


def _check_what_watches_sees_launches(launches, tile) -> None:
    """And other arguments are left to Triton."""
    x = torch.zeros(256)

    def call():
        launch(_kernel, 2, x, None, 100, 5, SIZE=128, SCALE=2.0)

    for label, begin, end in _watchers(launches):
        for watched in (call, tile) if label == "another device" else (call,):
            before, launches.seen = launches.of(watched)[1], 0
            begin()
            # The first launch on a device builds, and a second one might be direct.
            during = [launches.of(watched)[1] for _ in range(2)]
            end()
            assert (before, during, launches.of(watched)[1]) == (0, [1, 1], 0), label
            assert launches.seen == 2 * ("hook" in label), label
    for _ in range(2):
        assert launches.of(lambda: launch(_kernel, 2, x, None, n=100, free=5, SIZE=128, SCALE=2.0))[1] == 1


def _check_what_the_copy_engine_cannot_take_is_not_launched(launches, cases: dict) -> None:
    for label, call in cases.items():
        launches.made.clear()
        with pytest.raises(AssertionError):
            call()
        assert not launches.made, label


def _main() -> None:
    launches = Launches()
    tiles, wrong = _tile_cases()
    _check_launches_are_tritons(launches, _kernel_cases(), has_new_results=True)
    _check_launches_are_tritons(launches, _argument_cases() | tiles, has_new_results=False)
    _check_what_the_copy_engine_cannot_take_is_not_launched(launches, wrong)
    _check_what_watches_sees_launches(launches, tiles["here"])


# --- tests ------------------------------------------------------------------------------------------------------------


def test_launches():
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_a_fallback_to_tritons_launcher_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(triton_launcher, "use_writable_cache", lambda: None)
    cached = triton_launcher.why_by_triton, triton_launcher.launching
    for function in cached:
        function.cache_clear()
    try:
        assert triton_launcher.launching() is triton_launcher.launching() is None
        (record,) = caplog.records
        assert "Triton 3.99.0 is not one of the versions whose launchers are known: 3.6" in record.getMessage()
    finally:
        for function in cached:
            function.cache_clear()


if __name__ == "__main__":
    _main()
