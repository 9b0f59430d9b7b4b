"""How far the operands of a real step are from their quantized copies, block shape by block shape."""

from __future__ import annotations

import statistics
from collections import defaultdict

import torch
from torch import nn

from llm_training.model import next_byte_loss
from llm_training.partly import decoded
from llm_training.recipes import convert

# operand -> (format, whether the columnwise copy, along tokens, is meant)
_COPIES = {
    "x": (("fp8_1x128", False), ("fp8_1x128", True), ("fp8_128x128", False), ("nvfp4_1x16", False)),
    "dy": (("fp8_1x128", False), ("fp8_1x128", True), ("fp8_128x128", False), ("nvfp4_1x16", False)),
    "w": (("fp8_128x128", False), ("nvfp4_16x16", False)),
}


def operand_errors(model: nn.Module, windows: torch.Tensor) -> dict[str, dict[str, dict[str, float]]]:
    """{operand: {copy: {"median": .., "max": ..}}} over linear layers: ‖quantized - operand‖ / ‖operand‖ in %.

    model: a decoder in bf16, which is converted to FP8 here. windows: of one microbatch, on its device.
    """
    from torchao_blockwise.nn.activations import observe

    convert(model, "fp8")
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add(operand: str, values: torch.Tensor) -> None:
        for fmt, columnwise in _COPIES[operand]:
            name = f"{fmt} along tokens" if columnwise else fmt
            errors[operand, name].append(error_percent(values, fmt, columnwise))

    def observer(weight, x, spec, grad_enabled):
        add("x", x)
        add("w", weight.hp.detach())
        return lambda dy: add("dy", dy)

    before = observe(observer)
    try:
        with torch.autocast(windows.device.type, torch.bfloat16):
            loss = next_byte_loss(model, windows)
        loss.backward()
    finally:
        observe(before)
    assert errors, "no layer was observed"
    model.zero_grad()
    out: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for (operand, name), values in errors.items():
        out[operand][name] = {"median": statistics.median(values), "max": max(values)}
    return dict(out)


def error_percent(x: torch.Tensor, fmt: str, columnwise: bool) -> float:
    """‖quantized - x‖ / ‖x‖ in %, of the copy in this format."""
    exact = x.double()
    return 100 * ((decoded(x, fmt, columnwise) - exact).norm() / exact.norm()).item()
