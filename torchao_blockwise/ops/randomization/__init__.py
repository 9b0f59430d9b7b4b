"""Quantize with what NVFP4 gradients need: the random Hadamard transform, and stochastic rounding.

    x ── amax of x, and of its transform, in one read ──▶ two tensor scales
      ── a launch ──▶ rowwise copy        of x,            rounded by the bits of its stream
      ── a launch ──▶ columnwise copy     of the transform, rounded by those of the next one

Copies are made one by one, because each has its tensor scale and its random bits.
"""

from __future__ import annotations

import torch

from torchao_blockwise import _compat
from torchao_blockwise.formats import NVFP4_1X16, CastOptions, Draws, Groups, Place, StochasticRounding, draws_of
from torchao_blockwise.ops.backend import Backend, Implementation, kernels
from torchao_blockwise.ops.groups.ends import check_group_ends
from torchao_blockwise.ops.randomization import reference
from torchao_blockwise.ops.registry import Operation, groups

# Which entry of a key counts its uses.
_USE = 2


def checked_draws(
    op: str, options: CastOptions, rounding: StochasticRounding | None, device: torch.device
) -> Draws | None:
    """What operations on `device` carry of a rounding, None for round to nearest.

    Raises ValueError unless copies by these options can be rounded so.
    """
    if rounding is None:
        return None
    if options.fmt.name != NVFP4_1X16.name:
        raise ValueError(f"{op}: stochastic rounding is for {NVFP4_1X16.name}, got {options.fmt.name}; leave it out")
    if min(*rounding.start, 0 if rounding.grid is None else rounding.grid, rounding.expert) < 0:
        raise ValueError(
            f"{op}: start, grid and expert of stochastic must not be negative, got {rounding.start}, "
            f"{rounding.grid} and {rounding.expert}"
        )
    is_part = rounding.start != (0, 0) or rounding.grid is not None
    if is_part and options.rowwise and options.columnwise:
        raise ValueError(
            f"{op}: start and grid of stochastic are those of one copy's blocks, and both are asked for; "
            "ask for one after the other, the columnwise one with stream + 1"
        )
    return draws_of(rounding, device)


def _check_ends(x: torch.Tensor, hadamard: int, groups: Groups | None, per_group: bool) -> None:
    if groups is not None:
        check_group_ends("grouped_quantize", groups.ends, x.shape[0], x.device)


def _fake(x: torch.Tensor, hadamard: int, groups: Groups | None, per_group: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shape = groups.ends.shape if per_group and groups is not None else ()
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.int32)


# Apart from `tensor_amax_bits`: of one read two tensors, which policies of checkpointing save.
hadamard_amax_bits_op = Operation(
    f"hadamard_amax_bits(Tensor x, SymInt hadamard, {groups('Tensor?')}, bool per_group, str backend)"
    " -> (Tensor, Tensor)",
    takes=(None, None, Groups, None),
    table=[
        kernels(Backend.TRITON, f"{__name__}.kernels_triton:amaxes"),
        Implementation(Backend.REFERENCE, reference.amax_bits),
    ],
    fake=_fake,
    check=_check_ends,
    called="quantize",
)


def draws_for(
    key: torch.Tensor | None, gradient: torch.Tensor, places: tuple[Place, Place] | None = None
) -> Draws | None:
    """Random bits for both copies of a `gradient`, by a key (seed, stream, use, first expert), whose `use` advances.

    key: int64 [4] on the gradient's device; None for no random bits, which are None then.
    places: of the rowwise and the columnwise copy in those of the whole; None for all of them.
    """
    if key is None:
        return None
    taken = take_key_op(key, gradient)
    return Draws(taken) if places is None else Draws(taken, *places)


def _take(key: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    taken = key.clone()
    with _compat.keeping_version(key):
        key.select(0, _USE).add_(1)
    return taken


# The schema does not say that `key` changes. Else no pass of a layer could run while another one's backward is to come:
# autograd refuses what was saved and changed. A compiler may do with it what it does with what reads a generator; it
# stays in the backward graph, as it takes the gradient. The count is no value that anything else reads.
take_key_op = Operation(
    "take_key(Tensor key, Tensor gradient) -> Tensor",
    table=[Implementation(Backend.AUTO, _take)],
    fake=lambda key, gradient: key.new_empty(key.shape),
)
