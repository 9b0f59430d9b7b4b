"""Groups of tokens: consecutive rows, one group for each expert, given by their ends, which only the device knows.

    rows        0 ───────── group_ends[0] ── group_ends[1] = group_ends[2] ──── group_ends[3] ──── M
    groups      │     0          │     1      (2 is empty)        3                 │    none    │

The host does not know the sizes of groups, so shapes and launches depend only on the numbers of tokens and groups. In
copies with blocks along tokens, each group starts a block; `padded_tokens` is the upper bound of their size.
"""

from __future__ import annotations

import itertools
from typing import overload

import torch

from torchao_blockwise.formats import BlockFormat, Groups

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@overload
def as_groups(groups: Groups | torch.Tensor) -> Groups: ...
@overload
def as_groups(groups: Groups | torch.Tensor | None) -> Groups | None: ...
def as_groups(groups: Groups | torch.Tensor | None) -> Groups | None:
    """Return `groups`, which may be only the ends, as `Groups`."""
    return Groups(groups) if isinstance(groups, torch.Tensor) else groups


def check_group_ends(op: str, group_ends: torch.Tensor, tokens: int, device: torch.device) -> None:
    """Raise unless `group_ends` is int32 [E], contiguous, on `device`, E >= 1; on a CPU also its values.

    For implementations and fakes of operations: fake and meta tensors have no values to check. On a GPU, the host never
    reads the values, and kernels clamp them like `clamped_ends`.
    Raises TypeError for a dtype, ValueError for a shape, a device, or values that decrease or lie outside [0, tokens].
    """
    if group_ends.dtype != torch.int32:
        raise TypeError(f"{op}: group_ends must be int32, got {group_ends.dtype}; use group_ends.int()")
    if group_ends.dim() != 1 or group_ends.shape[0] == 0:
        shape = list(group_ends.shape)
        raise ValueError(f"{op}: group_ends must be [E] with at least one group, got shape {shape}")
    if not group_ends.is_contiguous():
        raise ValueError(f"{op}: group_ends must be contiguous, got stride {group_ends.stride()}; use .contiguous()")
    if group_ends.device != device:
        raise ValueError(f"{op}: group_ends must be on the tokens' device {device}, got {group_ends.device}; move it")
    if device.type == "cpu" and type(group_ends) in _PLAIN and not torch.compiler.is_compiling():
        _check_values(op, group_ends.tolist(), tokens)


def _check_values(op: str, ends: list[int], tokens: int) -> None:
    for i, (previous, end) in enumerate(itertools.pairwise([0, *ends])):
        if not previous <= end <= tokens:
            raise ValueError(
                f"{op}: group_ends must not decrease and must lie in [0, {tokens}], the number of tokens,"
                f" got group_ends[{i}] = {end} after {previous}; pass the cumulative sum of the groups' sizes"
            )


def check_row_blocks(op: str, fmt: BlockFormat) -> None:
    """Raise ValueError if blocks of `fmt` have several rows, which may be tokens of two groups."""
    if fmt.block[0] != 1:
        raise ValueError(
            f"{op}: tokens in groups need a format with one-row blocks, got {fmt.name}; use fp8_1x128 or nvfp4_1x16,"
            " the formats of activations"
        )


def clamped_ends(group_ends: torch.Tensor, tokens: int) -> torch.Tensor:
    """max over i <= g of clamp(group_ends[i], 0, tokens), int32 [E]: ends that never lead outside the tokens."""
    return group_ends.clamp(0, tokens).cummax(0).values


def padded_tokens(tokens: int, groups: int, block: int) -> int:
    """Upper bound of Σ ⌈m_g / block⌉ · block over all sizes m_g >= 0 of `groups` groups with Σ m_g <= tokens.

    (tokens + min(groups, tokens) · (block - 1)) rounded down to a multiple of `block`: no more groups than that have
    tokens, and a group is padded by block - 1 at most. Numbers may be symbolic.
    """
    return (tokens + smaller(groups, tokens) * (block - 1)) // block * block


def smaller(a: int, b: int) -> int:
    """min(a, b) of numbers that may be symbolic."""
    # For plain numbers, `sym_min` takes 4 µs in every launch.
    return min(a, b) if type(a) is type(b) is int else torch.sym_min(a, b)


def padded_ends(group_ends: torch.Tensor, tokens: int, block: int) -> torch.Tensor:
    """Σ over i <= g of ⌈m_i / block⌉ · block, int32 [E]: ends of the groups when each is padded to whole blocks."""
    ends = clamped_ends(group_ends, tokens)
    sizes = ends - starts_of(ends)
    return ((sizes + (block - 1)) // block * block).cumsum(0, dtype=torch.int32)


def padded_rows(group_ends: torch.Tensor, tokens: int, block: int) -> torch.Tensor:
    """The token that each padded row holds, int64 [padded_tokens(..)]; `tokens`, past the last one, if none."""
    ends, padded = clamped_ends(group_ends, tokens), padded_ends(group_ends, tokens, block)
    rows = torch.arange(padded_tokens(tokens, ends.numel(), block), dtype=torch.int32, device=ends.device)
    # With `right`, empty groups are skipped. Rows after all groups get the last one.
    group = torch.searchsorted(padded, rows, right=True).clamp(max=ends.numel() - 1)
    source = rows - starts_of(padded)[group] + starts_of(ends)[group]
    return torch.where(source < ends[group], source, tokens).long()


def starts_of(ends: torch.Tensor) -> torch.Tensor:
    """Return the starts of groups with these ends: each starts at the end of the previous one."""
    return torch.cat((ends.new_zeros(1), ends[:-1]))
