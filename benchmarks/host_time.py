"""Host time of a linear layer and of experts: microseconds that Python, PyTorch and launchers take.

On a GPU it times the calls of a layer so small that the GPU never is what is waited for. Without one, kernels are
built for sm_90 and Triton's extension in C, like cuBLAS, is replaced by nothing, so that the same Python runs.
Compiled, a layer runs by inductor; without a GPU only as far as graphs go, for which no compiler is needed.
"x bf16" is the time over that of bf16. Writes benchmarks/results/host_time_<device>.json and .md.

    python benchmarks/host_time.py [--dim 512 --tokens 512]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from common import driver
from common.peers import OUR_CONFIGS, compile_model
from common.report import Report
from common.shapes import group_ends
from common.timing import host_time
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise.conversion import experts as experts_filter
from torchao_blockwise.nn import SwiGLUExperts

TARGET = 90
COLUMNS = ("recipe", "what", "us", "x bf16")
EXPERTS = 4


def stub_the_gpu() -> None:
    """Let CPU tensors take the way of a Hopper GPU's: kernels are built and not launched, by Triton's own Python."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver

    from torchao_blockwise.ops import backend
    from torchao_blockwise.ops.gemm import cublas
    from torchao_blockwise.ops.gemm import kernels_gluon as gluon

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
    backend.may_have_kernels.__code__ = (lambda device: True).__code__
    backend.compute_capability.__wrapped__.__code__ = (lambda device: divmod(90, 10)).__code__
    gluon.multiprocessors.__wrapped__.__code__ = (lambda device: 132).__code__
    cublas.why_not.__code__ = (lambda a, b, out_dtype, bias: None).__code__

    def scaled_mm(a, b, *args):
        return torch.empty((a.shape[0], b.shape[1]), dtype=args[-3])

    torch._scaled_mm_v2 = scaled_mm


def layers(config, args: argparse.Namespace, device: torch.device) -> dict[str, tuple[nn.Module, tuple]]:
    """{name: (a linear layer or an MLP of experts, further arguments)}, converted with `config`."""
    torch.manual_seed(0)
    linear = nn.Linear(args.dim, args.dim, bias=False).to(device, torch.bfloat16)
    experts = SwiGLUExperts(EXPERTS, args.dim, args.dim, device=device, dtype=torch.bfloat16)
    if config is not None:
        quantize_(linear, config)
        quantize_(experts, config, filter_fn=experts_filter())
    return {"": (linear, ()), "experts ": (experts, (group_ends("balanced", args.tokens, EXPERTS, device),))}


def calls_of(name: str, layer: nn.Module, x: torch.Tensor, more: tuple) -> dict[str, Callable[[], object]]:
    """Forward passes, and forward and backward into gradients that do not exist yet."""
    leaf, dy = x.detach().requires_grad_(), torch.empty_like(x)
    compiled = compile_model(layer, x.device)

    def without_grad():
        with torch.no_grad():
            layer(x, *more)

    def both(call: nn.Module = layer):
        leaf.grad = None
        layer.zero_grad()
        call(leaf, *more).backward(dy)

    return {
        f"{name}forward without grad": without_grad,
        f"{name}forward": lambda: layer(leaf, *more),
        f"{name}forward + backward": both,
        f"{name}forward + backward, compiled": lambda: both(compiled),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = driver.parser(__doc__)
    # What is computed on a CPU has to be small, and the first sizes that no kernel pads are.
    size = 512 if torch.cuda.is_available() else 16
    driver.add_numbers(parser, dim=size, tokens=size)
    parser.add_argument("--seconds", type=float, help="of each time; default 200 calls")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = ["fp8_128x128", "nvfp4"]
    if device.type == "cpu":
        torch.set_num_threads(1)
        stub_the_gpu()
        torch.backends.mkldnn.enabled = False
        # Its tensor amax is computed by PyTorch, which has no stub.
        names.remove("nvfp4")
    x = torch.zeros(args.tokens, args.dim, dtype=torch.bfloat16, device=device)
    report = Report("host_time", device, COLUMNS, vars(args))
    bf16: dict[str, float] = {}
    for name in ("bf16", *names):
        for what, (layer, more) in layers(OUR_CONFIGS.get(name), args, device).items():
            for call, run in calls_of(what, layer, x, more).items():
                us = host_time(run, device, args.seconds).us
                bf16.setdefault(call, us)
                report.add({"recipe": name, "what": call, "us": us, "x bf16": us / bf16[call]})
    report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
