"""The operand of a master weight in a GEMM: quantized for this GEMM, and freed after it.

It is quantized rowwise in forward, and directly columnwise in backward, which is the exact transpose because blocks are
square. Copies are kept only inside `weights_unchanged`; docs/design.md, "Decisions", gives the reasons. Values are
quantized from their own dtype, so autocast does not change the result.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

from torchao_blockwise import _compat, ops
from torchao_blockwise._compat import modes
from torchao_blockwise.formats import CastOptions, Operand
from torchao_blockwise.ops.quantization.operations import hadamard_amax_bits_op, tensor_amax_bits_op
from torchao_blockwise.tensors.config import TrainingConfig


def weight_options(config: TrainingConfig, rowwise: bool, columnwise: bool) -> CastOptions:
    """Return how the requested copies of a weight of this config are quantized."""
    fmt, scale_per_group = config.weight_format, config.scale_per_expert
    return CastOptions(fmt, rowwise, columnwise, config.power_of_2_scales, scale_per_group=scale_per_group)


def weight_operand(
    hp: torch.Tensor,
    options: CastOptions,
    *,
    amax_groups: str = "",
    rounded_to: torch.dtype | None = None,
    backend: ops.Backend | str | None = None,
) -> Operand:
    """Return `hp` [.., N, K] quantized with `options`: a new operand, or one that a scope keeps.

    amax_groups: the process groups over which the weight is split, if `hp` is a part of it, in the format of
        `amax_over`. The default is `hp.amax_groups`, which expert parallelism sets. All their ranks must call this
        together, as with a DTensor.
    rounded_to: the dtype to which values are rounded before quantization, if it is not their own.
    """
    fmt, columnwise = options.fmt, options.columnwise
    if options.scale_per_group and hp.dim() == 2:
        # A single expert has one scale.
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
    # A captured CUDA graph must neither read copies, which are freed when the scope exits, nor own them.
    if kept is None or modes.is_capturing(hp):
        return quantized()
    # A copy belongs to the stream that created it, because other streams do not wait for it.
    stream = torch.cuda.current_stream(hp.device) if hp.is_cuda else None
    # The weight and its views, such as groups of its rows, have separate copies.
    others = amax_groups, rounded_to, stream, hp.shape, hp.stride(), hp.storage_offset()
    with kept.lock:
        kept.check()
        if (copy := kept.copies.get((options, *others))) is not None:
            return copy
        rowwise = kept.copies.get((options._replace(rowwise=True, columnwise=False), *others))
        copy = quantized() if rowwise is None else ops.transpose(rowwise, columns=hp.shape[-1], backend=backend)
        if not columnwise or "both" in kept.keeps:
            kept.copies[(options, *others)] = copy
        return copy


class KeptCopies:
    """The quantized copies of one weight that `weights_unchanged` keeps: the attribute `kept_copies` of its values.

    In eager mode, views of the weight, such as groups of its rows, share the attribute. Only `weight_operand` reads it,
    inside an operation in compiled graphs, so that no guard depends on it.
    name: the weight's name. keeps: the `keep` option of each open scope.
    copies: {(options, the rest of the recipe, stream, shape, strides, offset): copy}.
    """

    def __init__(self, name: str, parameter: torch.Tensor, hp: torch.Tensor):
        self.name = name
        self.keeps: list[str] = []
        self.copies: dict[tuple[Any, ...], Operand] = {}
        self.lock = threading.RLock()
        # Compiled optimizers increment the counter of the first one, and writes to `hp` that of the second.
        self._counting = [x for x in (parameter, hp) if not x.is_inference()]
        self._counts = [_compat.version_of(x) for x in self._counting]

    def check(self) -> None:
        """Raise RuntimeError if a change of the values is detected."""
        if [_compat.version_of(x) for x in self._counting] != self._counts:
            raise_unchanged(self.name, "changed")

    def leave(self, keep: str) -> None:
        """Free the copies that no other open scope keeps."""
        self.keeps.remove(keep)
        if not self.keeps:
            self.copies = {}
        elif "both" not in self.keeps:
            self.copies = {key: copy for key, copy in self.copies.items() if not key[0].columnwise}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for copy in self.copies.values() for t in copy.tensors if t is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and files of the values store an empty dict instead, which `weights_only=True` can load."""
        return OrderedDict, ()


def raise_unchanged(name: str, how: str) -> None:
    raise RuntimeError(
        f"weights_unchanged: {name} was {how} inside the scope, which keeps quantized copies of the old values; exit "
        "the scope before you step an optimizer, load values or edit a weight"
    )


def kept_copies(hp: torch.Tensor) -> KeptCopies | None:
    """Return the copies that scopes keep for the weight with the values `hp`, or None."""
    # An earlier scope's may be left in views, and an empty dict in copies and files.
    kept = getattr(hp, "kept_copies", None)
    return kept if kept and kept.keeps else None


def group_names(groups: Iterable[torch.distributed.ProcessGroup]) -> str:
    """Return the names of process groups in a string, the format of `amax_over`.

    Compiled graphs and schemas of operations support strings, but not process groups.
    """
    return ",".join(group.group_name for group in groups)


def amax_over(x: torch.Tensor, groups: str, per_matrix: bool = False) -> torch.Tensor | None:
    """Return the amax of the tensor of which `x` is a part, f32 scalar; None if `x` is the whole tensor.

    groups: `group_names` of the process groups over which the tensor is split. per_matrix: return the amax of each
        matrix [.., M, K] of which `x` has a part, f32 [..].
    """
    if not groups:
        return None
    # Reduce bits as integers, because a MAX of floats over ranks loses NaN.
    return _largest_over(tensor_amax_bits_op(x, None, per_matrix, ops.Backend.AUTO), groups)


def amaxes_over(x: torch.Tensor, groups: str, hadamard: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `amax_over` of the tensor and of its Hadamard transform, which starts with each rank's first token."""
    plain, transformed = hadamard_amax_bits_op(x, hadamard, None, False, ops.Backend.AUTO)
    largest = _largest_over(torch.stack((plain, transformed)), groups)
    return largest[0], largest[1]


def _largest_over(bits: torch.Tensor, groups: str) -> torch.Tensor:
    for group in groups.split(","):
        bits = _compat.max_over_ranks(bits, group)
    return bits.view(torch.float32)
