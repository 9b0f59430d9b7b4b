"""What operations share that compute a tensor and quantise it in the same pass, so that it never goes to memory."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import FP8_1X128, BlockFormat
from torchao_blockwise.ops.backend import Backend, pick, why_no_triton
from torchao_blockwise.ops.groups import padded_tokens
from torchao_blockwise.ops.operand import operand
from torchao_blockwise.ops.padding import padded_size, with_zero_tokens, without_padding
from torchao_blockwise.ops.quantize import reference

# Formats that kernels quantise to as they compute; to others an operation computes first and quantises then. A tensor
# scale needs the amax of all that is computed, before any of it is quantised.
FUSED_FORMATS = (FP8_1X128,)


def pick_kernel(op: str, x: torch.Tensor, backend: Backend | str, *, quantizes: bool) -> Backend:
    """TRITON or REFERENCE for an operation on `x`."""
    # Below sm_89 there is no conversion to e4m3 in hardware.
    min_capability = (8, 9) if quantizes else (8, 0)
    reasons = {Backend.TRITON: why_no_triton(x.device, min_capability), Backend.REFERENCE: None}
    return pick(op, backend, reasons, expected=Backend.TRITON if x.is_cuda else None)


def check_copies(op: str, fmt: BlockFormat, rowwise: bool, columnwise: bool, power_of_2_scales: bool) -> None:
    """Raise ValueError unless these copies exist in `fmt`."""
    if not (rowwise or columnwise):
        raise ValueError(f"{op}: nothing to compute; ask for rowwise, columnwise or both")
    if power_of_2_scales and not fmt.has_power_of_2_scales:
        raise ValueError(f"{op}: {fmt.name} has no power_of_2_scales; its block scales are {fmt.scale_dtype}")


def new_copies(
    x: torch.Tensor,
    fmt: BlockFormat,
    shape: tuple[int, ...],
    rowwise: bool,
    columnwise: bool,
    group_ends: torch.Tensor | None = None,
    padded: bool = True,
) -> list[torch.Tensor]:
    """Uninitialised (qdata, scale) of each copy of a [rows, columns] that is asked for, rowwise first, beside `x`.

    group_ends: of rows in groups, each of which the columnwise copy pads to whole blocks.
    padded: as kernels fill them: the columnwise copy is padded as in `quantize`.
    """
    rows, columns = shape
    copies: list[torch.Tensor] = []
    if rowwise:
        copies += fmt.new_empty(x, rows, columns)
    if columnwise:
        tokens = rows if group_ends is None else padded_tokens(rows, group_ends.shape[0], fmt.block[1])
        copies += fmt.new_empty(x, columns, padded_size(rows) if padded and group_ends is None else tokens)
    return copies


def quantized_copies(
    y: torch.Tensor, fmt: BlockFormat, rowwise: bool, columnwise: bool, power_of_2_scales: bool, padded: bool
) -> list[torch.Tensor]:
    """What `new_copies` allocates, filled from `y` by the reference."""
    copies: list[torch.Tensor] = []
    if rowwise:
        copies += reference.quantize(y, fmt, None, power_of_2_scales)
    if columnwise:
        copies += reference.quantize((with_zero_tokens(y) if padded else y).mT, fmt, None, power_of_2_scales)
    return copies


def made_copies(
    copies: list[torch.Tensor], fmt: BlockFormat, tokens: int, columnwise: bool, padded: bool
) -> list[torch.Tensor]:
    """What a kernel made of so many tokens, not in groups, as it was asked for: padded or not."""
    if columnwise and not padded:
        copies[-2:] = without_padding(copies[-2:], fmt, tokens)
    return copies


def operands_of(copies: list[torch.Tensor], fmt: BlockFormat, global_scale: torch.Tensor | None = None):
    """The operand that (qdata, scale) make, or the pair (rowwise, columnwise) that four tensors make."""
    operands = tuple(operand(fmt, q, s, global_scale) for q, s in zip(copies[::2], copies[1::2]))
    return operands if len(operands) > 1 else operands[0]


def without_grad(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors as values that no gradient is asked of: operations here lie below autograd."""
    if not torch.is_grad_enabled():
        return list(tensors)
    return [t.detach() if t is not None and t.requires_grad else t for t in tensors]
