"""The quantised copy of a master weight: made once per change of value, found again by the tensor that it was made of.

PyTorch counts the in-place changes of a tensor and shares the count between its aliases; a copy is valid while the
count stands. Copies hang on the master's lifetime, not in its state, so that nothing saves or copies them.

With `rowwise="on_demand"` nothing is kept, and every use quantises. So it is in three cases that have no trustworthy
count: tensors made under `torch.inference_mode`, those that a CUDA graph changes, whose replays do not count, and what
FSDP2 gathers in high precision into memory of before.

A CUDA graph makes copies of its own, which its replays make anew, and no other may use: a copy belongs to one capture.
Compiled graphs that the compiler captures quantise on every use: nothing may outlive their capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torchao_blockwise import _compat, ops
from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.quantize import tensor_amax_bits_op


@dataclass
class _Copies:
    """Valid at one count of changes, `version`, of values that were quantised as `recipe` says."""

    version: int = -1
    recipe: tuple = ()
    rowwise: Any = None
    columnwise: Any = None
    counted: bool = True  # whether the count can be trusted

    def drop(self) -> None:
        self.version, self.rowwise, self.columnwise = -1, None, None


# One lookup a use: each goes through Python, 0.5 µs.
_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# Names of the process groups over which the tensor is split that the values are a part of.
_splits: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def quantized_weight(
    hp: torch.Tensor,
    fmt: BlockFormat,
    *,
    columnwise: bool,
    keep: str = "rowwise",
    power_of_2_scales: bool = False,
    backend: ops.Backend | str | None = None,
    amax_groups: str = "",
    rounded_to: torch.dtype | None = None,
    keep_in_capture: bool = True,
):
    """`hp` [.., N, K] quantised in `fmt`, rowwise or columnwise, from the copy that is kept where it is still valid.

    keep: which copies are kept, "none", "rowwise" or "both"; others live as long as the caller holds them.
    amax_groups: the process groups over which the weight is split that `hp` is a part of, as `amax_over` takes them.
        Their ranks must change it together, as they do a DTensor.
    rounded_to: the dtype that values are rounded to before they are quantised, if another than their own.
    keep_in_capture: keep copies while a CUDA graph is captured, for the rest of the capture.
    """
    if fmt.has_global_scale:
        amax_groups = amax_groups or _splits.get(hp, "")

    def quantized(columnwise: bool):
        values = hp if rounded_to is None else hp.to(rounded_to)
        return ops.quantize(
            values,
            fmt,
            rowwise=not columnwise,
            columnwise=columnwise,
            power_of_2_scales=power_of_2_scales,
            tensor_amax=amax_over(values, amax_groups),
            backend=backend,
        )

    if keep == "none":
        return quantized(columnwise)
    copies, capture = _copies.get(hp), _compat.capture_id(hp)
    keeps = capture == 0 or (capture is not None and keep_in_capture)
    if hp.is_inference() or not keeps or not (copies is None or copies.counted):
        # For this use alone. Blocks are square: the columnwise copy of the values is the transpose, in one pass.
        return quantized(columnwise)
    version = _compat.version_of(hp)
    if copies is None:
        copies = _copies[hp] = _Copies()
    recipe = fmt.name, power_of_2_scales, amax_groups, rounded_to, capture
    if copies.version != version or copies.recipe != recipe:
        # The stale copy goes first, so that two never live together.
        copies.drop()
        copies.rowwise = quantized(columnwise=False)
        copies.version, copies.recipe = version, recipe
    if not columnwise:
        return copies.rowwise
    if copies.columnwise is not None:
        return copies.columnwise
    result = ops.transpose(copies.rowwise, columns=hp.shape[-1], backend=backend)
    if keep == "both":
        copies.columnwise = result
    return result


def split_over(hp: torch.Tensor, groups: str) -> None:
    """Quantise `hp` from now on as a part of a tensor that is split over `groups`, as `amax_over` takes them.

    For experts that a rank holds alone: the model hands over the part, and no more is known of it.
    """
    _splits[hp] = groups


def amax_over(x: torch.Tensor, groups: str) -> torch.Tensor | None:
    """The amax of the tensor that `x` is a part of, f32 scalar; None where it is all of it.

    groups: names of the process groups over which the tensor is split, with commas between them.
    """
    if not groups:
        return None
    # Bits, because a MAX over ranks loses a NaN among floats.
    bits = tensor_amax_bits_op(x)
    for group in groups.split(","):
        bits = _compat.max_over_ranks(bits, group)
    return bits.view(torch.float32)


def kept_bytes(hp: torch.Tensor) -> int:
    """Bytes of the copies of `hp` that are kept now."""
    copies = _copies.get(hp)
    if copies is None:
        return 0
    kept = [*(copies.rowwise or ()), *(copies.columnwise or ())]
    return sum(t.nbytes for t in kept if t is not None)


def drop(hp: torch.Tensor) -> None:
    """Forget the copies of `hp`; the next use quantises it again."""
    copies = _copies.get(hp)
    if copies is not None:
        copies.drop()


def note_change(hp: torch.Tensor) -> None:
    """Called when an operation changes `hp`: fused optimizers do not count it, and a CUDA graph will repeat it."""
    if not hp.is_inference():
        torch.autograd.graph.increment_version(hp)
    if _compat.is_capturing(hp):
        keep_nothing(hp)


def keep_nothing(hp: torch.Tensor) -> None:
    """Quantise `hp` on every use from now on: something changes its values without counting."""
    _copies[hp] = _Copies(counted=False)
