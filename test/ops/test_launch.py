"""The direct launch takes the very build that Triton would, and leaves to Triton what is not its own. Needs no GPU.

A subprocess (without the interpreter, which Triton picks once a process) launches on CPU tensors with a driver that
names a GPU but has none: kernels are built as a GPU would build them, and the launcher writes down what it is given.
"""

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

TARGET = 90


class Launches:
    """A Triton driver that launches nothing: in the place of Triton's extension in C, `made` lists what it is given."""

    def __init__(self):
        import torch
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

    def both_ways(self, label: str, call) -> dict:
        """What a first and a later launch give the driver, and what one by Triton alone does."""
        from torchao_blockwise.ops import launch

        known = launch.triton_launcher.launching
        first, again = self.of(call), self.of(call)
        launch.triton_launcher.launching = lambda: None
        plain = self.of(call)
        launch.triton_launcher.launching = known
        return {"label": label, "first": first, "again": again, "plain": plain}

    class utils:
        load_binary = staticmethod(lambda name, kernel, shared, device: (object(), name, 0, 0, 1024))
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 232448})
        build_signature_metadata = staticmethod(lambda kinds: kinds)
        # A tensor map is all that it is made of.
        fill_tma_descriptor = fill_tma_descriptor_tiled = staticmethod(lambda *given: ["map", *given])

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
        # A tensor is its address to a kernel; values of constexprs are not read.
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

    def of(self, call) -> dict:
        """What `call` launched, and how many of the launches went through Triton."""
        self.made.clear()
        self.by_triton = 0
        call()
        return {"launches": list(self.made), "by_triton": self.by_triton}


def _kernel_cases():
    """The first variant of every kernel that takes no descriptors, as the files of builds list them."""
    sys.path.append(str(Path(__file__).parent))
    modules = [importlib.import_module(name) for name in ("test_kernel_builds", "test_gemm_builds")]
    cases = [case for module in modules for case in module.cases(TARGET) if not case[0].startswith("gluon")]
    return list({tuple(label.split()[:2]): (label, call) for label, call in reversed(cases)}.values())


if triton is not None and not triton.knobs.runtime.interpret:
    import triton.language as tl

    @triton.jit(do_not_specialize=["free"])
    def _kernel(x_ptr, y_ptr, n, free, SIZE: tl.constexpr, SCALE: tl.constexpr):
        offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        values = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0) * SCALE + free
        if y_ptr is not None:
            tl.store(y_ptr + offsets, values, mask=offsets < n)
        else:
            tl.store(x_ptr + offsets, values, mask=offsets < n)


def _specialisation_cases():
    """(label, arguments, options) that differ in what Triton builds for, and in what it does not."""
    import torch

    x, y = torch.zeros(256), torch.zeros(256)
    sizes = {"n=1": 1, "n=16": 16, "n=17": 17, "n=0": 0, "n=-1": -1, "n=-16": -16, "n=2^31-1": 2**31 - 1}
    sizes |= {"n=2^31": 2**31, "n=2^31+1": 2**31 + 1, "n=2^40": 2**40, "n=-2^31": -(2**31), "n=-2^40": -(2**40)}
    for label, n in sizes.items():
        yield label, (x, y, n, 5), {"SIZE": 128, "SCALE": 2.0}
        yield f"{label}, not specialised", (x, y, 100, n), {"SIZE": 128, "SCALE": 2.0}
    yield "x off 16 bytes", (x[1:], y, 100, 5), {"SIZE": 128, "SCALE": 2.0}
    yield "y off 16 bytes", (x, y[3:], 100, 5), {"SIZE": 128, "SCALE": 2.0}
    yield "no y", (x, None, 100, 5), {"SIZE": 128, "SCALE": 2.0}
    yield "bf16", (x.bfloat16(), y, 100, 5), {"SIZE": 128, "SCALE": 2.0}
    yield "another constexpr", (x, y, 100, 5), {"SIZE": 64, "SCALE": 2.0}
    yield "8 warps", (x, y, 100, 5), {"SIZE": 128, "SCALE": 2.0, "num_warps": 8}
    # By name, so that the order in which options are written says nothing.
    yield "64, 128", (x, y, 100, 5), {"SIZE": 64, "SCALE": 128}
    yield "64, 128 swapped", (x, y, 100, 5), {"SCALE": 64, "SIZE": 128}


def _shared_storage_cases():
    """(tensors of one flat buffer, at a distance that differs by case, or of their own storages), in turn."""
    import torch

    flat = torch.zeros(1 << 12)
    for turn in range(3):
        for gap in (256, 512, 1024, 2048):
            start = 16 * turn
            yield flat[start : start + 256], flat[start + gap : start + gap + 256]
        yield torch.zeros(256), torch.zeros(256)
        yield flat[1024:1280], flat[:256]


def _watchers(launches):
    """(label, how it begins, how it ends) of all that makes a launch Triton's own."""
    from triton import knobs

    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook

    def hook(*args, **kwargs):
        launches.seen += 1

    yield "enter hook", lambda: enter.add(hook), lambda: enter.remove(hook)
    yield "exit hook", lambda: leave.add(hook), lambda: leave.remove(hook)
    yield "pre-run hook", lambda: _kernel.add_pre_run_hook(hook), _kernel.pre_run_hooks.clear
    yield "debug", lambda: setattr(runtime, "debug", True), lambda: setattr(runtime, "debug", False)
    yield "another device", lambda: setattr(launches, "device", 0), lambda: setattr(launches, "device", -1)


def _main() -> None:
    import torch

    from torchao_blockwise.ops import launch as module

    launches = Launches()
    kernels = [launches.both_ways(label, call) for label, call in _kernel_cases()]
    specialised = []
    for label, args, options in _specialisation_cases():
        specialised.append(launches.both_ways(label, lambda a=args, o=options: module.launch(_kernel, 2, *a, **o)))

    in_storages = []
    for x, y in _shared_storage_cases():
        launched = launches.of(lambda x=x, y=y: module.launch(_kernel, 2, x, y, 100, 5, SIZE=128, SCALE=2.0))
        in_storages.append({"launched": launched, "addresses": [x.data_ptr(), y.data_ptr()]})

    x = torch.zeros(256)

    def call(n=100):
        module.launch(_kernel, 2, x, None, n, 5, SIZE=128, SCALE=2.0)

    watched = []
    for label, begin, end in _watchers(launches):
        before, launches.seen = launches.of(call), 0
        begin()
        during = launches.of(call)
        end()
        row = {"label": label, "before": before, "during": during, "after": launches.of(call)}
        watched.append(row | {"seen": launches.seen})

    def by_name():
        module.launch(_kernel, 2, x, None, n=100, free=5, SIZE=128, SCALE=2.0)

    strange = {"a float": [launches.of(lambda: call(2.5)) for _ in range(2)]}
    strange["by name"] = [launches.of(by_name) for _ in range(2)]
    results = {"kernels": kernels, "specialised": specialised, "in_storages": in_storages, "watched": watched}
    json.dump(results | {"strange": strange}, sys.stdout)


def printed_by(script: str):
    """What a script prints as JSON, in a process without Triton's interpreter, which Triton picks once a process."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def results():
    return printed_by(__file__)


def what_is_launched(record: dict) -> list:
    """Launches without the addresses of results, which are made anew by every call."""
    return [
        {**row, "args": {k: v for k, v in row["args"].items() if k not in row["pointers"]}}
        for row in record["launches"]
    ]


def test_every_kernel_launches_the_build_that_triton_would(results):
    assert len(results["kernels"]) > 20
    for case in results["kernels"]:
        assert case["again"]["by_triton"] == 0, case["label"]
        assert case["plain"]["by_triton"] == len(case["plain"]["launches"]) > 0, case["label"]
        expected = what_is_launched(case["plain"])
        assert what_is_launched(case["first"]) == expected, case["label"]
        assert what_is_launched(case["again"]) == expected, case["label"]


def test_what_triton_specialises_on_tells_builds_apart(results):
    cases = results["specialised"]
    for case in cases:
        assert case["again"]["by_triton"] == 0, case["label"]
        assert case["plain"]["by_triton"] == 1, case["label"]
        # Addresses too: the tensors are the same ones each time.
        assert case["first"]["launches"] == case["again"]["launches"] == case["plain"]["launches"], case["label"]
    builds = {case["label"]: case["again"]["launches"][0]["build"] for case in cases}
    assert builds["n=17"] not in (builds["n=1"], builds["n=16"], builds["n=2^31+1"])
    assert builds["n=16"] == builds["n=0"] == builds["n=-16"]
    assert builds["n=17, not specialised"] == builds["n=16, not specialised"] != builds["n=2^40, not specialised"]
    distinct = ("n=17", "x off 16 bytes", "y off 16 bytes", "no y", "bf16", "another constexpr", "8 warps", "64, 128")
    assert len({builds[label] for label in distinct}) == len(distinct)


def test_tensors_of_one_storage_are_launched_by_their_own_addresses(results):
    """Whatever the distance between them was in earlier launches of the same build."""
    assert len({case["launched"]["launches"][0]["build"] for case in results["in_storages"]}) == 1
    assert [case["launched"]["by_triton"] for case in results["in_storages"]] == [1] + [0] * 17
    for case in results["in_storages"]:
        (row,) = case["launched"]["launches"]
        assert [row["args"][name] for name in ("x_ptr", "y_ptr")] == case["addresses"]


@pytest.mark.parametrize("label", ("enter hook", "exit hook", "pre-run hook", "debug", "another device"))
def test_what_watches_launches_sees_them(results, label):
    (case,) = [case for case in results["watched"] if case["label"] == label]
    assert [case[when]["by_triton"] for when in ("before", "during", "after")] == [0, 1, 0]
    assert case["seen"] == ("hook" in label)


@pytest.mark.parametrize("arguments", ("a float", "by name"))
def test_other_arguments_are_left_to_triton(results, arguments):
    assert [record["by_triton"] for record in results["strange"][arguments]] == [1, 1]


def test_a_fallback_to_tritons_launcher_is_logged_once(monkeypatch, caplog):
    from torchao_blockwise._compat import triton_launcher

    monkeypatch.setattr(triton, "__version__", "3.99.0")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    cached = triton_launcher.why_by_triton, triton_launcher.launching, triton_launcher._log_once
    for function in cached:
        function.cache_clear()
    try:
        assert triton_launcher.launching() is triton_launcher.launching() is None
        (record,) = caplog.records
        assert "Triton 3.99.0 is not one of the versions whose launchers are known: 3.6" in record.getMessage()
    finally:
        for function in cached:
            function.cache_clear()


def test_ceil_div():
    from torchao_blockwise.ops.launch import ceil_div

    assert [ceil_div(x, 16) for x in (0, 1, 16, 17)] == [0, 1, 1, 2]


@pytest.mark.gpu
def test_a_cuda_graph_captures_direct_launches():
    import torch

    from torchao_blockwise import ops
    from torchao_blockwise.testing import assert_bitwise_equal

    def random():
        return torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)

    x = random()
    for _ in range(2):
        ops.quantize(x, "fp8_1x128")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = ops.quantize(x, "fp8_1x128").rowwise
    x.copy_(random())
    graph.replay()
    expected = ops.quantize(x, "fp8_1x128", backend="reference").rowwise
    assert_bitwise_equal(q.qdata, expected.qdata)
    assert_bitwise_equal(q.scale, expected.scale)


@pytest.mark.gpu
def test_launches_go_to_the_current_stream():
    import torch

    from torchao_blockwise import ops
    from torchao_blockwise.testing import assert_bitwise_equal

    x = torch.zeros(256, 512, device="cuda", dtype=torch.bfloat16)
    ops.quantize(x, "fp8_1x128")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # Long enough that a launch on another stream would read zeros.
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        q = ops.quantize(x, "fp8_1x128").rowwise
    torch.cuda.synchronize()
    assert_bitwise_equal(q.qdata, ops.quantize(x, "fp8_1x128", backend="reference").rowwise.qdata)


if __name__ == "__main__":
    _main()
