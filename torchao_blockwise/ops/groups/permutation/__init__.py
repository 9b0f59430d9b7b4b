"""Permute: tokens sorted by the expert that each goes to, and results summed back, with sizes only the device knows.

    x [T, H]                 t0  t1  t2                  top_k experts each: [T, top_k] assignments, numbered row by row
    permute    tokens        t0 t2 | t0 t1 | t1 t2       [T · top_k, H]: all of expert 0, then all of expert 1, ..
               source         0  4 |  1  2 |  3  5       the assignment in each row; its token is source // top_k
               group_ends     2        4       6
    unpermute  Σ over a token's assignments of weight · y

Groups have any size, without padding, because the grouped GEMMs do not need it. These operations are not
differentiable; use `nn.permute` and `nn.unpermute`.
"""

from __future__ import annotations

import torch

from torchao_blockwise.ops.backend import Backend, triton_and_reference, why_no_kernels
from torchao_blockwise.ops.groups.permutation import reference
from torchao_blockwise.ops.operands import check_dtype
from torchao_blockwise.ops.registry import Operation

# Of what the kernels take. A histogram of 1024 experts spills on sm_80, and the table that each program sums grows with
# them. Numbers of assignments, two steps beyond the last too, are int32.
MAX_EXPERTS, MAX_ASSIGNMENTS = 512, 2**31 - 1024


def permute(
    x: torch.Tensor, expert_ids: torch.Tensor, experts: int, *, backend: Backend | str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort rows of `x` by expert: tokens[i] = x[source[i] // top_k], in the order of `expert_ids` within an expert.

    x: [T, H] bf16 | f16 | f32. experts: the number of experts, E.
    expert_ids: [T, top_k] int32 | int64; rows with an id outside [0, experts) come after the last group.
    Returns tokens [T · top_k, H], source int32 [T · top_k] and group_ends int32 [E], cumulative, all on x's device.
    The order is stable and deterministic, without padding. Does not synchronize with the host.
    Raises TypeError for a dtype, ValueError for shapes, devices, `experts` or a backend.
    """
    return permute_op(x, expert_ids, experts, backend)


def unpermute(
    y: torch.Tensor,
    source: torch.Tensor,
    top_k: int,
    weights: torch.Tensor | None = None,
    *,
    backend: Backend | str | None = None,
) -> torch.Tensor:
    """Invert `permute`, summing by token: out[t] = Σ over k of weights[t, k] · y[i] with source[i] = t · top_k + k.

    y: [T · top_k, H] bf16 | f16 | f32. source: int32 [T · top_k], as `permute` returns it. weights: [T, top_k] in high
    precision, or None for ones. Returns [T, H] of y's dtype.
    Products and sums, with k ascending, are rounded to fp32, and the result to y's dtype, so all backends are bitwise
    identical. Rows after the last group are included; the grouped GEMMs return zeros there.
    The host does not read `source`. If it is not a permutation, values are undefined, but kernels do not access memory
    outside the tensors.
    Raises TypeError for a dtype, ValueError for shapes, devices, `source` or a backend.
    """
    return unpermute_op(y, source, top_k, weights, backend)


def unpermute_backward(
    grad_output: torch.Tensor,
    y: torch.Tensor | None,
    source: torch.Tensor,
    top_k: int,
    weights: torch.Tensor | None = None,
    *,
    backend: Backend | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """grad_y[i] = weights.flat[source[i]] · grad_output[source[i] // top_k], and grad_weights = ⟨y, grad_output⟩.

    grad_output: [T, H] bf16 | f16 | f32. source, top_k, weights: as in `unpermute`.
    y: [T · top_k, H] of grad_output's dtype if the gradient of `weights` is needed, or None.
    Returns grad_y [T · top_k, H] of grad_output's dtype, rounded once, and grad_weights [T, top_k] f32, or None: for
    each assignment the dot product of its row of y and its token's grad_output, summed in fp32, in an order that
    depends on the backend. One pass computes both. Without y and weights, this is `permute` with a known `source`.
    Raises like `unpermute`.
    """
    grad_y, *grad_weights = unpermute_backward_op(grad_output, y, source, top_k, weights, backend)
    return grad_y, grad_weights[0] if grad_weights else None


# --- operations -------------------------------------------------------------------------------------------------------

_KERNELS = f"{__name__}.kernels_triton"


def _check_ids(x: torch.Tensor, expert_ids: torch.Tensor, experts: int) -> None:
    check_dtype("permute", x)
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"permute: expert_ids must be int32 or int64, got {expert_ids.dtype}; cast them")
    if x.dim() != 2 or expert_ids.dim() != 2 or expert_ids.shape[0] != x.shape[0] or expert_ids.shape[1] == 0:
        got = f"{list(x.shape)} and {list(expert_ids.shape)}"
        raise ValueError(f"permute: x [T, H] and expert_ids [T, top_k], top_k >= 1, must agree in T, got {got}")
    if expert_ids.device != x.device:
        raise ValueError(f"permute: x is on {x.device}, expert_ids on {expert_ids.device}; move one of them")


def _check_source(
    op: str, x: torch.Tensor, tokens: int, source: torch.Tensor, top_k: int, weights: torch.Tensor | None
) -> None:
    """Raise unless these are of `tokens` tokens, and on the device of the rows `x`."""
    check_dtype(op, x, "y" if op == "unpermute" else "grad_output")
    if source.dtype != torch.int32 or tuple(source.shape) != (tokens * top_k,) or source.device != x.device:
        got = f"{source.dtype} {list(source.shape)} on {source.device} with T={tokens} and top_k={top_k}"
        raise ValueError(f"{op}: source must be int32 [T · top_k] on {x.device}, as permute returns it, got {got}")
    if weights is not None and (tuple(weights.shape) != (tokens, top_k) or weights.device != x.device):
        wanted, got = f"{[tokens, top_k]} on {x.device}", f"{list(weights.shape)} on {weights.device}"
        raise ValueError(f"{op}: weights must be [T, top_k] = {wanted}, got {got}")


def _check_unpermute(y: torch.Tensor, source: torch.Tensor, top_k: int, weights: torch.Tensor | None) -> None:
    tokens = source.shape[0] // max(top_k, 1)
    if y.dim() != 2 or y.shape[0] != tokens * top_k:
        raise ValueError(f"unpermute: y must be [T · top_k, H] for T={tokens}, top_k={top_k}, got {list(y.shape)}")
    _check_source("unpermute", y, tokens, source, top_k, weights)


def _why_no_permute(x: torch.Tensor, expert_ids: torch.Tensor, experts: int) -> str | None:
    if experts > MAX_EXPERTS or expert_ids.numel() > MAX_ASSIGNMENTS:
        got = f"{expert_ids.numel()} to {experts}"
        return f"the kernels take at most {MAX_ASSIGNMENTS} assignments to at most {MAX_EXPERTS} experts, got {got}"
    return why_no_kernels(x)


def _permute_fake(
    x: torch.Tensor, expert_ids: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assignments = expert_ids.shape[0] * expert_ids.shape[1]
    source = expert_ids.new_empty(assignments, dtype=torch.int32)
    return x.new_empty(assignments, x.shape[1]), source, expert_ids.new_empty(experts, dtype=torch.int32)


def _backward_fake(
    grad_output: torch.Tensor, y: torch.Tensor | None, source: torch.Tensor, top_k: int, weights: torch.Tensor | None
) -> list[torch.Tensor]:
    tokens, width = grad_output.shape
    grad_y = grad_output.new_empty(tokens * top_k, width)
    return [grad_y] if y is None else [grad_y, grad_output.new_empty(tokens, top_k, dtype=torch.float32)]


permute_op = Operation(
    "permute(Tensor x, Tensor expert_ids, SymInt experts, str backend) -> (Tensor, Tensor, Tensor)",
    table=triton_and_reference(_KERNELS, reference.permute, _why_no_permute),
    fake=_permute_fake,
    check=_check_ids,
)
unpermute_op = Operation(
    "unpermute(Tensor y, Tensor source, SymInt top_k, Tensor? weights, str backend) -> Tensor",
    table=triton_and_reference(_KERNELS, reference.unpermute),
    fake=lambda y, source, top_k, weights: y.new_empty(y.shape[0] // top_k, y.shape[1]),
    check=_check_unpermute,
)
unpermute_backward_op = Operation(
    "unpermute_backward(Tensor grad_output, Tensor? y, Tensor source, SymInt top_k, Tensor? weights, str backend)"
    " -> Tensor[]",
    table=triton_and_reference(_KERNELS, reference.unpermute_backward),
    fake=_backward_fake,
    check=lambda grad_output, y, *routing: _check_source(
        "unpermute_backward", grad_output, grad_output.shape[0], *routing
    ),
)
