"""Names that PyTorch and torchao do not promise to keep: each is used here and nowhere else."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types

import torch


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported; cheap, imports nothing."""
    return importlib.util.find_spec("triton") is not None


def scaling_types():
    """(ScalingType, SwizzleType) of `torch.nn.functional.scaled_mm`."""
    from torch.nn.functional import ScalingType, SwizzleType

    return ScalingType, SwizzleType


def quantize_call():
    """(model, filter_fn) of the `torchao.quantization.quantize_` call that is on the stack, or (None, None).

    torchao hands a handler one module at a time. To refuse a model before its first layer changes, and to name the
    layer, a handler must see the whole call; torchao offers no hook for that, so this reads it off the stack.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "quantize_" and frame.f_globals.get("__name__") == "torchao.quantization.quant_api":
            return frame.f_locals.get("model"), frame.f_locals.get("filter_fn")
        frame = frame.f_back
    return None, None


def allow_config_module(module: str) -> None:
    """Let `torchao.core.config.config_from_dict` rebuild configs that are defined in `module`."""
    from torchao.core import config

    config.ALLOWED_AO_MODULES.add(module)


def is_capturing(x: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured that would record operations on `x`."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def version_of(x: torch.Tensor) -> int:
    """How often `x` or an alias of it was changed in place."""
    return x._version
