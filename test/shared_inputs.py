"""A fused module for tests, and a count of quantizations."""

import collections

import torch
from helpers import converted
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchao_blockwise.nn.fused_modules import fuse_class

OPS = torch.ops.torchao_blockwise
FEATURES = 160
VARIANTS = {
    "default": {},
    "high_precision": {"save_activations": "high_precision"},
    "quantized_weight": {"master_weights": False},
    "out_dtype": {"out_dtype": torch.bfloat16},
}


class Counter(TorchDispatchMode):
    """Counts the operations of this package."""

    def __init__(self):
        super().__init__()
        self.ran = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))

    @property
    def quantized(self) -> int:
        """How many activations and gradients were quantized."""
        return self.ran[OPS.quantize_both] + self.ran[OPS.quantize]


def quantizations(run) -> int:
    with Counter() as counter:
        run()
    return counter.quantized


def counting_backend() -> tuple:
    """(backend for torch.compile, list that gets a Counter of our operations, by name, for each graph)."""
    from torch._dynamo.backends.common import aot_autograd

    counts: list[collections.Counter] = []

    def count(graph, inputs):
        targets = [str(node.target).split(".") for node in graph.graph.nodes]
        counts.append(collections.Counter(name[1] for name in targets if name[0] == "torchao_blockwise"))
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=count), counts


class Attention(nn.Module):
    """Reads its input as attention does, and does not attend."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(FEATURES, 96, dtype=dtype)
        self.k = nn.Linear(FEATURES, 48, bias=False, dtype=dtype)
        self.v = nn.Linear(FEATURES, 48, dtype=dtype)
        self.o = nn.Linear(96, FEATURES, dtype=dtype)

    def forward(self, x):
        return self.o(self.q(x) * torch.cat((self.k(x), self.v(x)), -1))


def attention(config, dtype=torch.float32, fused: bool = True, cls=Attention) -> Attention:
    model = converted(cls(dtype), config)
    if fused:
        fuse_class(model, ("q", "k", "v"))
    return model


def tokens(*leading: int, dtype=torch.float32, width: int = FEATURES) -> torch.Tensor:
    return torch.randn(*leading, width, generator=torch.Generator().manual_seed(1)).to(dtype)
