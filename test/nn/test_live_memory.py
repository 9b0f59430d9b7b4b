"""What lives at each operation of a step, in exact bytes: a copy that outlives its use by one operation is seen."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from helpers import FP8, replace
from live_memory import LiveMemory
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import NormLinear
from torchao_blockwise.conversion import linears_and_experts
from torchao_blockwise.nn import SwiGLUExperts, SwiGLUMLP, grouped_linear, swiglu_linear
from torchao_blockwise.nn.activations import NormInput
from torchao_blockwise.nn.gemms import AmaxGroups, GemmSpec, weight_comes_first
from torchao_blockwise.ops.groups.ends import padded_tokens
from torchao_blockwise.ops.padding import padded_size

pytestmark = pytest.mark.usefixtures("no_interpreter")

T, E, D, H = 300, 3, 256, 144
ENDS = (100, 100, 290)
MODES = {
    "master": {},
    "no_master": {"master_weights": False},
}


class Op(NamedTuple):
    """An operation of a step: what is there before, which it may read or not, and what it makes.

    weight: whose quantized copy it takes, in the direction "forward" or "backward".
    """

    name: str
    before: str
    made: str
    weight: str = ""
    direction: str = ""


def linear_step(quantize: str, matmul: str, weight_first: bool = False) -> list[Op]:
    products = [
        Op(matmul, "x.col y dy.row dy.col", "dx", "w", "backward"),
        Op("grad_weight", "x.col y dx dy.col", "grad_w"),
    ]
    if weight_first:
        products = [
            Op("grad_weight", "x.col y dy.row dy.col", "grad_w"),
            Op(matmul, "y grad_w dy.row", "dx", "w", "backward"),
        ]
    return [
        Op(quantize, "", "x.row x.col"),
        Op(matmul, "x.row x.col", "y", "w", "forward"),
        Op("between", "x.col y", ""),
        Op(quantize, "x.col y", "dy.row dy.col"),
        *products,
        Op("after", "y dx grad_w", ""),
    ]


def mlp_step(quantize: str, matmul: str) -> list[Op]:
    return [
        Op(quantize, "", "x.row x.col"),
        Op(matmul, "x.row x.col", "gate_up", "gate_up_w", "forward"),
        Op("swiglu_quantize", "x.col gate_up", "h.row h.col"),
        Op(matmul, "x.col gate_up h.row h.col", "y", "down_w", "forward"),
        Op("between", "x.col gate_up h.col y", ""),
        Op(quantize, "x.col gate_up h.col y", "dy.row dy.col"),
        Op("grad_weight", "x.col gate_up h.col y dy.row dy.col", "grad_down"),
        Op(matmul, "x.col gate_up y grad_down dy.row", "dh", "down_w", "backward"),
        Op("swiglu_backward_quantize", "x.col gate_up y grad_down dh", "dgate_up.row dgate_up.col"),
        Op(matmul, "x.col y grad_down dgate_up.row dgate_up.col", "dx", "gate_up_w", "backward"),
        Op("grad_weight", "x.col y grad_down dx dgate_up.col", "grad_gate_up"),
        Op("after", "y grad_down dx grad_gate_up", ""),
    ]


NORM_STEP = [
    Op("norm_statistics", "", "rstd"),
    Op("norm_quantize", "rstd", "x.row x.col"),
    Op("matmul", "rstd x.row x.col", "y", "w", "forward"),
    Op("between", "rstd x.col y", ""),
    Op("quantize_both", "rstd x.col y", "dy.row dy.col"),
    Op("grad_weight", "rstd x.col y dy.row dy.col", "grad_w"),
    Op("matmul", "rstd y grad_w dy.row", "dnorm", "w", "backward"),
    # PyTorch's.
    Op("norm_backward", "rstd y grad_w dnorm", ""),
    Op("after", "y grad_w dx grad_norm", ""),
]
SWIGLU_STEP = [
    Op("swiglu_quantize", "", "h.row h.col"),
    Op("matmul", "h.row h.col", "y", "w", "forward"),
    Op("between", "h.col y", ""),
    Op("quantize_both", "h.col y", "dy.row dy.col"),
    Op("grad_weight", "h.col y dy.row dy.col", "grad_w"),
    Op("matmul", "y grad_w dy.row", "dh", "w", "backward"),
    Op("swiglu_backward", "y grad_w dh", "dgate dup"),
    Op("after", "y grad_w dgate dup", ""),
]


def sizes(tokens: int, n: int, k: int, experts: int) -> dict[str, int]:
    """Bytes of everything that a step names, in bf16 and FP8, where it takes k features and gives n."""
    fmt, weight_format, lead = FP8.activation_format, FP8.weight_format, (experts,) if experts else ()
    width = padded_tokens(tokens, experts, fmt.block[1]) if experts else padded_size(tokens)
    widths = {"x": k, "h": H, "dy": n, "dgate_up": 2 * H}
    weights = {"w": (n, k), "gate_up_w": (2 * H, D), "down_w": (D, H)}
    found = {f"{name}.row": fmt.nbytes(tokens, n) for name, n in widths.items()}
    found |= {f"{name}.col": fmt.nbytes(n, width) for name, n in widths.items()}
    found |= {f"{name}.row": weight_format.nbytes(*lead, n, k) for name, (n, k) in weights.items()}
    found |= {f"{name}.col": weight_format.nbytes(*lead, k, n) for name, (n, k) in weights.items()}
    gradients = {"grad_w": "w", "grad_gate_up": "gate_up_w", "grad_down": "down_w"}
    element = torch.bfloat16.itemsize
    found |= {name: element * max(experts, 1) * weights[w][0] * weights[w][1] for name, w in gradients.items()}
    activations = {"y": n, "dx": k, "dnorm": k, "gate_up": 2 * H, "dh": H, "dgate": H, "dup": H}
    found |= {name: element * tokens * n for name, n in activations.items()}
    return found | {"rstd": torch.float32.itemsize * tokens, "grad_norm": element * k}


def expected(step: list[Op], mode: str, size: dict[str, int]) -> list[tuple[str, int]]:
    """(name, bytes that live) of each operation, those that make a weight's copy too."""
    found = []

    def live(names) -> int:
        return sum(size[name] for name in names)

    for op in step:
        before, made, copies = op.before.split(), op.made.split(), []
        # A Parameter that is quantized has its rowwise copy, and only that.
        if op.direction == "backward" or (op.direction == "forward" and mode == "master"):
            copies = [f"{op.weight}.{'col' if op.direction == 'backward' else 'row'}"]
            found.append(("quantize" if mode == "master" else "transpose", live((*before, *copies))))
        found.append((op.name, live((*before, *copies, *made))))
    return found


def watched(call, inputs: list[torch.Tensor], dy: torch.Tensor) -> list[tuple[str, int]]:
    """The same of a step of `call`, as it runs; y is held to its end, as by the caller of `backward`."""
    norm_backward = NormInput.backward
    with LiveMemory() as memory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(NormInput, "backward", lambda *args: (memory.note("norm_backward"), norm_backward(*args))[1])
        y = call(*inputs)
        memory.note("between")
        y.backward(dy)
        memory.note("after")
    return [(step.name, step.nbytes) for step in memory.steps if "::" not in step.name]


def converted(module: nn.Module, mode: str) -> nn.Module:
    quantize_(module.bfloat16(), replace(FP8, **MODES[mode]), filter_fn=linears_and_experts())
    return module


class Expert(nn.Module):
    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x, ends):
        return grouped_linear(x, self.weight, ends)


def linear_of(n):
    return lambda mode: converted(nn.Linear(D, n, bias=False), mode)


def norm_linear_of(mode):
    return converted(NormLinear(D, D), mode)


def swiglu_linear_of(mode):
    layer = converted(nn.Linear(H, D, bias=False), mode)
    return lambda gate, up: swiglu_linear(gate, up, layer.weight)


def experts_of(make):
    def call_of(mode):
        module, ends = converted(make(), mode), torch.tensor(ENDS, dtype=torch.int32)
        return lambda x: module(x, ends)

    return call_of


DENSE, GROUPED = ("quantize_both", "matmul"), ("quantize_both", "grouped_matmul")
# More features than tokens.
WIDE = 320
# (step, mode -> what takes the inputs, their number, features of each, features of y, experts)
LAYERS = {
    "linear": (linear_step(*DENSE, weight_first=True), linear_of(D), 1, D, D, 0),
    "wide_linear": (linear_step(*DENSE), linear_of(WIDE), 1, D, WIDE, 0),
    "norm_linear": (NORM_STEP, norm_linear_of, 1, D, D, 0),
    "swiglu_linear": (SWIGLU_STEP, swiglu_linear_of, 2, H, D, 0),
    "swiglu_mlp": (mlp_step(*DENSE), lambda mode: converted(SwiGLUMLP(D, H), mode), 1, D, D, 0),
    "grouped_linear": (linear_step(*GROUPED), experts_of(lambda: Expert(E, D, D)), 1, D, D, E),
    "swiglu_experts": (mlp_step(*GROUPED), experts_of(lambda: SwiGLUExperts(E, D, H)), 1, D, D, E),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("step", "call_of", "inputs", "k", "n", "experts"), LAYERS.values(), ids=LAYERS)
def test_nothing_lives_longer_than_it_must(step, call_of, inputs, k, n, experts, mode):
    xs = [torch.randn(T, k, dtype=torch.bfloat16, requires_grad=True) for _ in range(inputs)]
    got = watched(call_of(mode), xs, torch.ones(T, n, dtype=torch.bfloat16))
    assert got == expected(step, mode, sizes(T, n, k, experts))


def test_linear_multiplies_first_what_leaves_less():
    def weight_first(tokens, n, **options):
        return weight_comes_first(torch.empty(tokens, n, device="meta"), GemmSpec(None, FP8, **options))

    assert weight_first(513, 512) and not weight_first(512, 512)
    # Ranks that exchange amaxes take one order.
    assert not weight_first(513, 512, amax_groups=AmaxGroups(weight="0"))
