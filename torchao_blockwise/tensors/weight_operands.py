"""The operand that a GEMM reads of a master weight: quantized for this GEMM, freed after it.

Nothing that was derived from a weight outlives the pass that made it. A copy kept under a version counter cannot be
made right: compiled optimizers, collectives, aliases and other processes change values without counting. So each
GEMM quantizes the weight that it reads: rowwise in forward, straight to columnwise in backward. Blocks are square,
so that is the transpose, in one pass. Copies are kept only where the program says that weights do not change, inside
`weights_unchanged`. Values are quantized from their own dtype: the same bits with autocast and without.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

from torchao_blockwise import _compat, ops
from torchao_blockwise._compat import cuda_graphs
from torchao_blockwise.formats import CastOptions, Operand
from torchao_blockwise.ops.quantization.operations import hadamard_amax_bits_op, tensor_amax_bits_op
from torchao_blockwise.tensors.config import TrainingConfig


def weight_options(config: TrainingConfig, columnwise: bool) -> CastOptions:
    """How a weight of this config is quantized, rowwise or columnwise."""
    fmt, scale_per_group = config.weight_format, config.scale_per_expert
    return CastOptions(fmt, not columnwise, columnwise, config.power_of_2_scales, scale_per_group=scale_per_group)


def weight_operand(
    hp: torch.Tensor,
    options: CastOptions,
    *,
    amax_groups: str = "",
    rounded_to: torch.dtype | None = None,
    backend: ops.Backend | str | None = None,
) -> Operand:
    """`hp` [.., N, K] quantized by `weight_options`: the caller's own, or what a scope keeps.

    amax_groups: the process groups over which the weight is split that `hp` is a part of, as `amax_over` takes them;
        by default those that `hp.amax_groups` names, which expert parallelism sets. Their ranks must use it together,
        as they do a DTensor.
    rounded_to: the dtype that values are rounded to before they are quantized, if another than their own.
    """
    fmt, columnwise = options.fmt, options.columnwise
    if options.scale_per_group and hp.dim() == 2:
        # One expert by itself has one scale, too.
        options = CastOptions(fmt, options.rowwise, columnwise, options.power_of_2_scales)
    if not fmt.has_global_scale:
        amax_groups = ""
    elif not options.scale_per_group:
        amax_groups = amax_groups or getattr(hp, "amax_groups", "")

    def quantized() -> Operand:
        values = hp if rounded_to is None else hp.to(rounded_to)
        amax = amax_over(values, amax_groups, options.scale_per_group) if amax_groups else None
        return ops.quantize_by(values, options, tensor_amax=amax, backend=backend)[columnwise]

    kept = kept_copies(hp)
    # Replays of a CUDA graph repeat what was captured: it must not read copies that die with a scope, nor own them.
    if kept is None or cuda_graphs.is_capturing(hp):
        return quantized()
    # A copy belongs to the stream that made it: no other waits for it.
    stream = torch.cuda.current_stream(hp.device) if hp.is_cuda else None
    with kept.lock:
        kept.check()
        copies = kept.copies.setdefault(
            (fmt.name, options.power_of_2_scales, options.scale_per_group, amax_groups, rounded_to, stream), {}
        )
        if columnwise in copies:
            return copies[columnwise]
        if columnwise and False in copies:
            copy = ops.transpose(copies[False], columns=hp.shape[-1], backend=backend)
        else:
            copy = quantized()
        if not columnwise or "both" in kept.keeps:
            copies[columnwise] = copy
        return copy


class KeptCopies:
    """The quantized copies of one weight that `weights_unchanged` keeps: the attribute `kept_copies` of its values.

    Only `weight_operand` reads it, which compiled graphs call, so that nothing guards on it.
    name: of the weight. keeps: what each scope around keeps of it, "rowwise" or "both".
    copies: by recipe and stream, the rowwise copy under False and the columnwise one under True.
    """

    def __init__(self, name: str, parameter: torch.Tensor, hp: torch.Tensor):
        self.name = name
        self.keeps: list[str] = []
        self.copies: dict[tuple[Any, ...], dict[bool, Operand]] = {}
        self.lock = threading.RLock()
        # Compiled optimizers count changes of the first one, writes to `hp` those of the second.
        self._counting = [x for x in (parameter, hp) if not x.is_inference()]
        self._counts = [_compat.version_of(x) for x in self._counting]

    def check(self) -> None:
        """Raise RuntimeError if the values can be seen to have changed."""
        if [_compat.version_of(x) for x in self._counting] != self._counts:
            raise_unchanged(self.name, "changed")

    def leave(self, keep: str) -> None:
        """Free what no scope around keeps now that one is left."""
        self.keeps.remove(keep)
        if "both" not in self.keeps:
            for copies in self.copies.values():
                copies.pop(True, None)

    @property
    def nbytes(self) -> int:
        operands = [copy for copies in self.copies.values() for copy in copies.values()]
        return sum(t.nbytes for operand in operands for t in operand.tensors if t is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and files of the values have an empty dict in its place, which `weights_only=True` loads."""
        return OrderedDict, ()


def raise_unchanged(name: str, how: str) -> None:
    raise RuntimeError(
        f"weights_unchanged: {name} was {how} inside the scope, which keeps quantized copies of the old values; leave "
        "the scope before optimizer steps, loads and edits"
    )


def kept_copies(hp: torch.Tensor) -> KeptCopies | None:
    """The copies that scopes keep of the weight with the values `hp`, or None."""
    return getattr(hp, "kept_copies", None) or None


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
    """`amax_over` of the tensor and of its transform, which begins again with each rank's first token."""
    if not groups:
        return None
    plain, transformed = hadamard_amax_bits_op(x, hadamard, None, False, ops.Backend.AUTO)
    largest = _largest_over(torch.stack((plain, transformed)), groups)
    return largest[0], largest[1]


def _largest_over(bits: torch.Tensor, groups: str) -> torch.Tensor:
    for group in filter(None, groups.split(",")):
        bits = _compat.max_over_ranks(bits, group)
    return bits.view(torch.float32)
