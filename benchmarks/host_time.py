"""Host time of a linear layer and of its pieces in eager mode: µs that Python, PyTorch and launchers take.

On a GPU it times the calls of a layer so small that the GPU never is what is waited for. Without one, kernels are
built for sm_90 and Triton's extension in C, like cuBLAS, is replaced by nothing, so that the same Python runs.

Compiled, a layer runs by inductor; without a GPU only as far as graphs go, for which no compiler is needed.

    python benchmarks/host_time.py [--dim 512 --tokens 512 --repeats 200 --profile]
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import threading
import time
from collections.abc import Callable

import torch
from environment import environment, slug
from experts import group_ends
from peers import compile_model
from report import RESULTS, markdown, save
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, ops
from torchao_blockwise.conversion import experts as experts_filter
from torchao_blockwise.formats import FP8_1X128, FP8_128X128
from torchao_blockwise.nn import SwiGLUExperts

TARGET = 90
EXPERTS = 4


def stub_the_gpu() -> None:
    """Let CPU tensors take the way of a Hopper GPU's: kernels are built and not launched, by Triton's own Python."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver

    from torchao_blockwise.ops import backend
    from torchao_blockwise.ops.gemm.plain import cublas
    from torchao_blockwise.ops.gemm.plain import kernels_gluon as gluon

    def nothing(*args, **kwargs):
        return None

    class Utils:
        load_binary = staticmethod(lambda name, kernel, shared, device: (object(), 0, 0, 0, 1024))
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 232448})
        # What Triton takes from its extension in C, under the names that its versions know.
        launch = build_signature_metadata = fill_tma_descriptor = fill_tma_descriptor_tiled = staticmethod(nothing)

    class Driver:
        utils = Utils
        launcher_cls = driver.CudaLauncher
        get_current_target = staticmethod(lambda: GPUTarget("cuda", TARGET, 32))
        # What `get_device` of a CPU tensor says.
        get_current_device = staticmethod(lambda: -1)
        get_current_stream = staticmethod(lambda device: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

    driver.library_dirs = list
    driver.compile_module_from_src = lambda **given: Utils
    driver.PyKernelArg = nothing
    triton.runtime.driver.set_active(Driver())
    # In place, for all who imported the names.
    backend.compute_capability.__wrapped__.__code__ = (lambda device: divmod(90, 10)).__code__
    gluon.multiprocessors.__wrapped__.__code__ = (lambda device: 132).__code__
    cublas.why_not.__code__ = (lambda a, b, out_dtype, bias: None).__code__

    def scaled_mm(a, b, *args):
        return torch.empty((a.shape[0], b.shape[1]), dtype=args[-3])

    torch._scaled_mm_v2 = scaled_mm


def microseconds(call, repeats: int, calls: int = 20) -> float:
    """The least µs a call of `repeats` rounds; a round ends when the GPU has caught up, outside of the time."""
    for _ in range(10):
        call()
    best = float("inf")
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(calls):
                call()
            best = min(best, time.perf_counter() - start)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    finally:
        gc.enable()
    return best / calls * 1e6


def layer(config, dim: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    linear = nn.Linear(dim, dim, bias=False).to(device=device, dtype=torch.bfloat16)
    if config is not None:
        quantize_(linear, config)
    return linear


def steps(linear: nn.Module, x: torch.Tensor) -> dict:
    """{name: call}: the forward alone, and forward and backward, into gradients that do not exist yet."""
    dy = torch.empty_like(x)
    leaf = x.detach().requires_grad_()
    outputs = []

    def forward():
        outputs[:] = [linear(leaf)]

    def backward():
        leaf.grad = linear.weight.grad = None
        outputs.pop().backward(dy)

    def no_grad():
        with torch.no_grad():
            linear(x)

    def both():
        forward()
        backward()

    def both_of_new_weight():
        # As after an optimizer's step.
        torch.autograd.graph.increment_version(getattr(linear.weight, "hp", linear.weight))
        both()

    both()
    calls = {"forward without grad": no_grad, "forward": forward, "forward + backward": both}
    calls["forward + backward, weight changed"] = both_of_new_weight
    # A GPU's backward runs in a thread of autograd's, a CPU's where it is called: each the other way too.
    if x.is_cuda:

        def both_in_one_thread():
            with torch.autograd.set_multithreading_enabled(False):
                both()

        return calls | {"forward + backward, in one thread": both_in_one_thread}
    backward_there = in_another_thread(backward)

    def both_in_two_threads():
        forward()
        backward_there()

    return calls | {"forward + backward, in two threads": both_in_two_threads}


def in_another_thread(call):
    """`call` handed to another thread and waited for."""
    work, done = threading.Semaphore(0), threading.Semaphore(0)

    def serve():
        while True:
            work.acquire()
            call()
            done.release()

    threading.Thread(target=serve, daemon=True).start()

    def hand_over():
        work.release()
        done.acquire()

    return hand_over


def both_of(module: nn.Module, call: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Callable[[], None]:
    """Forward and backward of `call`, which runs `module`, into gradients that do not exist yet."""
    leaf, *rest = inputs
    leaf = leaf.detach().requires_grad_()
    dy = torch.empty_like(leaf)

    def both():
        leaf.grad = None
        module.zero_grad()
        call(leaf, *rest).backward(dy)

    return both


def experts(config, dim: int, tokens: int, device: str) -> tuple[nn.Module, torch.Tensor]:
    """A SwiGLU MLP of experts, and the ends of their tokens."""
    torch.manual_seed(0)
    model = SwiGLUExperts(EXPERTS, dim, dim, device=device, dtype=torch.bfloat16)
    if config is not None:
        quantize_(model, config, filter_fn=experts_filter())
    return model, group_ends("balanced", tokens, EXPERTS, torch.device(device))


def pieces(dim: int, tokens: int, device: str) -> dict:
    x = torch.zeros(tokens, dim, dtype=torch.bfloat16, device=device)
    w = ops.quantize(x[:dim] if tokens >= dim else x.new_zeros(dim, dim), FP8_128X128).rowwise
    a = ops.quantize(x, FP8_1X128).rowwise
    return {
        "quantize rowwise": lambda: ops.quantize(x, FP8_1X128),
        "quantize both": lambda: ops.quantize(x, FP8_1X128, columnwise=True),
        "quantize weight": lambda: ops.quantize(x, FP8_128X128),
        "transpose": lambda: ops.transpose(w),
        "matmul auto": lambda: ops.matmul(a, w, out_dtype=torch.bfloat16),
        "matmul triton": lambda: ops.matmul(a, w, out_dtype=torch.bfloat16, backend="triton"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # What is computed on a CPU has to be small, and the first sizes that no kernel pads are.
    size = 512 if torch.cuda.is_available() else 16
    for name, default in (("dim", size), ("tokens", size), ("repeats", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--profile", action="store_true", help="print where forward and backward spend their time")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/host_time_<device>.json and .md")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
        stub_the_gpu()
        torch.backends.mkldnn.enabled = False
    x = torch.zeros(args.tokens, args.dim, dtype=torch.bfloat16, device=device)
    configs = {
        "bf16": None,
        "fp8": BlockwiseFP8TrainingConfig(),
        "nvfp4": NVFP4TrainingConfig(hadamard=False, stochastic_rounding=False),
    }
    if device == "cpu":
        # Its tensor amax is computed by PyTorch, which has no stub.
        del configs["nvfp4"]
    rows: dict[str, dict[str, float]] = {}
    for name, config in configs.items():
        calls = steps(layer(config, args.dim, device), x)
        if args.profile and name == "fp8":
            profile(calls["forward + backward, weight changed"])
        linear = layer(config, args.dim, device)
        calls["forward + backward, compiled"] = both_of(linear, compile_model(linear, torch.device(device)), x)
        model, ends = experts(config, args.dim, args.tokens, device)
        compiled = compile_model(model, torch.device(device))
        calls["experts forward + backward"] = both_of(model, model, x, ends)
        calls["experts forward + backward, compiled"] = both_of(model, compiled, x, ends)
        rows[name] = {what: microseconds(call, args.repeats) for what, call in calls.items()}
    for what, call in pieces(args.dim, args.tokens, device).items():
        rows.setdefault("pieces", {})[what] = microseconds(call, args.repeats)
    text = table(rows)
    print(text)
    if args.save:
        on = torch.device(device)
        save(RESULTS, f"host_time_{slug(on)}", {"environment": environment(on), "rows": rows}, text)


def profile(call, calls: int = 500) -> None:
    with cProfile.Profile() as profiler:
        for _ in range(calls):
            call()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def table(rows: dict[str, dict[str, float]]) -> str:
    cells = []
    for name, values in rows.items():
        for what, value in values.items():
            base = rows["bf16"].get(what)
            cells.append((f"{name} {what}", f"{value:.1f}", f"{value / base:.2f}" if base else ""))
    return markdown(("", "µs", "ratio to bf16"), cells)


if __name__ == "__main__":
    main()
