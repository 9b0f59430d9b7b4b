"""The operand that a product reads of a master weight: quantized for this product, freed after it.

Nothing that was derived from a weight outlives the pass that made it. A copy kept under a version counter cannot be
made right: compiled optimizers, collectives, aliases and other processes change values without counting. So each
product quantizes the weight that it reads: rowwise in forward, straight to columnwise in backward. Blocks are square,
so that is the transpose, in one pass. Copies are kept only where the program says that weights stand still, inside
`weights_unchanged`. Values are quantized from their own dtype: the same bits with autocast and without.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torchao_blockwise import _compat, ops
from torchao_blockwise._compat import cuda_graphs
from torchao_blockwise.formats import BlockFormat, CastOptions, Operand
from torchao_blockwise.ops.quantization.operations import hadamard_amax_bits_op, tensor_amax_bits_op

# Names of the process groups over which the tensor is split that the values are a part of.
_splits: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def weight_operand(
    hp: torch.Tensor,
    fmt: BlockFormat,
    *,
    columnwise: bool,
    power_of_2_scales: bool = False,
    backend: ops.Backend | str | None = None,
    amax_groups: str = "",
    rounded_to: torch.dtype | None = None,
    scale_per_group: bool = False,
) -> Operand:
    """`hp` [.., N, K] quantized in `fmt`, rowwise or columnwise: the caller's own, or what a scope keeps.

    amax_groups: the process groups over which the weight is split that `hp` is a part of, as `amax_over` takes them.
        Their ranks must use it together, as they do a DTensor.
    rounded_to: the dtype that values are rounded to before they are quantized, if another than their own.
    scale_per_group: of formats with tensor scales each expert [N, K] has its own.
    """
    scale_per_group = scale_per_group and fmt.has_global_scale and hp.dim() > 2
    if not scale_per_group:
        # By experts, which then have scales of their own.
        amax_groups = amax_groups or _splits.get(hp, "")
    amax_groups = amax_groups if fmt.has_global_scale else ""

    recipe = fmt, power_of_2_scales, amax_groups, rounded_to, scale_per_group
    # Replays of a CUDA graph repeat what was captured: it must not read copies that die with a scope, nor own them.
    kept = None if not kept_weights or cuda_graphs.is_capturing(hp) else kept_weights.get(id(hp))
    return quantized(hp, columnwise, backend, *recipe) if kept is None else kept.operand(columnwise, backend, *recipe)


def quantized(
    hp: torch.Tensor,
    columnwise: bool,
    backend: ops.Backend | str | None,
    fmt: BlockFormat,
    power_of_2_scales: bool,
    amax_groups: str,
    rounded_to: torch.dtype | None,
    scale_per_group: bool,
) -> Operand:
    """`hp` quantized now; arguments as in `weight_operand`."""
    values = hp if rounded_to is None else hp.to(rounded_to)
    amax = amax_over(values, amax_groups, scale_per_group) if amax_groups else None
    options = CastOptions(fmt, not columnwise, columnwise, power_of_2_scales, scale_per_group=scale_per_group)
    return ops.quantize_by(values, options, tensor_amax=amax, backend=backend)[columnwise]


class KeptCopies:
    """The quantized copies of one weight that `weights_unchanged` keeps.

    hp: its values. check: raises if they can be seen to have changed. keeps: what each scope around keeps of it,
        "rowwise" or "both".
    """

    def __init__(self, hp: torch.Tensor, check: Callable[[], None]):
        self.hp, self.check = hp, check
        self.keeps: list[str] = []
        self._copies: dict[tuple[Any, ...], list[Any]] = {}

    def operand(self, columnwise: bool, backend: ops.Backend | str | None, fmt: BlockFormat, *others: Any) -> Operand:
        """The copy that `quantized` makes of these arguments, made now or before.

        A copy belongs to the stream that made it: no other waits for it.
        """
        stream = torch.cuda.current_stream(self.hp.device) if self.hp.is_cuda else None
        with lock:
            self.check()
            key = fmt.name, *others, stream
            rowwise, transposed = copies = self._copies.setdefault(key, [None, None])
            if not columnwise:
                copies[0] = quantized(self.hp, False, backend, fmt, *others) if rowwise is None else rowwise
                return copies[0]
            if transposed is not None:
                return transposed
            if rowwise is None:
                transposed = quantized(self.hp, True, backend, fmt, *others)
            else:
                transposed = ops.transpose(rowwise, columns=self.hp.shape[-1], backend=backend)
            if "both" in self.keeps:
                copies[1] = transposed
            return transposed

    def leave(self, keep: str) -> None:
        """Free what no scope around keeps now that one is left."""
        self.keeps.remove(keep)
        for copies in self._copies.values():
            copies[:] = copies[0] if self.keeps else None, copies[1] if "both" in self.keeps else None

    @property
    def nbytes(self) -> int:
        operands = [copy for copies in self._copies.values() for copy in copies if copy is not None]
        return sum(t.nbytes for operand in operands for t in operand.tensors if t is not None)


# By the id of `hp`, which the entry holds; of the process and not of a thread, because autograd has threads of its own.
kept_weights: dict[int, KeptCopies] = {}
lock = threading.RLock()


def kept_bytes(hp: torch.Tensor) -> int:
    """Bytes of the copies of `hp` that scopes keep now."""
    kept = kept_weights.get(id(hp))
    return 0 if kept is None else kept.nbytes


def split_over(hp: torch.Tensor, *groups: torch.distributed.ProcessGroup) -> None:
    """Quantize `hp` from now on as a part of a tensor that is split over `groups`.

    For experts that a rank holds alone, and that share a tensor scale with others: the model hands over the part, and
    no more is known of it. Compiled graphs read the part without its attributes, so that it is found by the values,
    inside of the operation.
    """
    _splits[hp] = group_names(groups)


def group_names(groups: Iterable[torch.distributed.ProcessGroup]) -> str:
    """Process groups as `amax_over` takes them.

    A string, because compiled graphs trace it and operations have it in their schemas: they know no process groups.
    """
    return ",".join(group.group_name for group in groups)


def amax_over(x: torch.Tensor, groups: str, per_matrix: bool = False) -> torch.Tensor | None:
    """The amax of the tensor that `x` is a part of, f32 scalar; None where it is all of it.

    groups: `group_names` of the process groups over which the tensor is split. per_matrix: that of each of the matrices
        [.., M, K] of which `x` has parts, f32 [..].
    """
    if not groups:
        return None
    # Bits, because a MAX over ranks loses a NaN among floats.
    return _largest_over(tensor_amax_bits_op(x, None, per_matrix, ops.Backend.AUTO), groups)


def amaxes_over(x: torch.Tensor, groups: str, hadamard: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`amax_over` of the tensor and of its transform, which begins anew with each rank's first token."""
    if not groups:
        return None
    plain, transformed = hadamard_amax_bits_op(x, hadamard, None, False, ops.Backend.AUTO)
    largest = _largest_over(torch.stack((plain, transformed)), groups)
    return largest[0], largest[1]


def _largest_over(bits: torch.Tensor, groups: str) -> torch.Tensor:
    for group in filter(None, groups.split(",")):
        bits = _compat.max_over_ranks(bits, group)
    return bits.view(torch.float32)
