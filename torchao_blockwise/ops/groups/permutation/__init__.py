"""Permute: tokens sorted by the expert that each goes to, and results summed back, with sizes only the device knows.

    x [T, H]                 t0  t1  t2                  top_k experts each: [T, top_k] assignments, numbered row by row
    permute    tokens        t0 t2 | t0 t1 | t1 t2       [T · top_k, H]: all of expert 0, then all of expert 1, ..
               source         0  4 |  1  2 |  3  5       the assignment in each row; its token is source // top_k
               group_ends     2        4       6
    unpermute  Σ over a token's assignments of weight · y

Groups have any size: nothing is padded, because the grouped products here take groups as they are.
"""

from __future__ import annotations

import torch

from torchao_blockwise.formats import HIGH_PRECISION_DTYPES
from torchao_blockwise.ops.backend import Backend, Implementation, kernels
from torchao_blockwise.ops.groups.permutation import reference
from torchao_blockwise.ops.operands import check_dtype, without_grad
from torchao_blockwise.ops.registry import Operation

_ID_DTYPES = (torch.int32, torch.int64)
_INT32_MAX = torch.iinfo(torch.int32).max


def permute(
    x: torch.Tensor, expert_ids: torch.Tensor, experts: int, *, backend: Backend | str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of `x` sorted by expert: tokens[i] = x[source[i] // top_k], in the order of `expert_ids` within an expert.

    x: [T, H] bf16 | f16 | f32. experts: how many there are, E.
    expert_ids: [T, top_k] int32 | int64; an id outside [0, experts) is of no expert, and comes after the last group.
    Returns tokens [T · top_k, H], source int32 [T · top_k] and group_ends int32 [E], cumulative, all on x's device.
    Stable, deterministic, without padding and without a look at the values by the host. Not differentiable:
    `nn.permute` is.
    Raises TypeError for a dtype, ValueError for shapes, devices, `experts` or a backend.
    """
    op = "permute"
    _check_rows(op, "x", x)
    if expert_ids.dtype not in _ID_DTYPES:
        raise TypeError(f"{op}: expert_ids must be int32 or int64, got {expert_ids.dtype}; cast them")
    if expert_ids.dim() != 2 or expert_ids.shape[0] != x.shape[0] or expert_ids.shape[1] == 0:
        got = f"{list(x.shape)} and {list(expert_ids.shape)}"
        raise ValueError(f"{op}: x [T, H] and expert_ids [T, top_k], top_k >= 1, must agree in T, got {got}")
    if expert_ids.device != x.device:
        raise ValueError(f"{op}: x is on {x.device}, expert_ids on {expert_ids.device}; move one of them")
    if not 1 <= experts < _INT32_MAX:
        raise ValueError(f"{op}: experts must be from 1 to {_INT32_MAX - 1}, got {experts}")
    return permute_op(*without_grad(x), expert_ids, experts, backend)


def unpermute(
    y: torch.Tensor,
    source: torch.Tensor,
    top_k: int,
    weights: torch.Tensor | None = None,
    *,
    backend: Backend | str | None = None,
) -> torch.Tensor:
    """out[t] = Σ over k of weights[t, k] · y[i] with source[i] = t · top_k + k: what `permute` sorted, summed by token.

    y: [T · top_k, H] bf16 | f16 | f32. source: int32 [T · top_k], as `permute` returns it. weights: [T, top_k] in high
    precision; None counts as ones. Returns [T, H] of y's dtype.
    Products and sums, k ascending, are fp32, each rounded, and rounded once more to y's dtype: the same bits on every
    backend. Rows after the last group take part like all others; the grouped products give zeros there.
    A `source` that is no permutation raises on a CPU. On a GPU the host does not look: values are then undefined, and
    no memory outside of the tensors is touched. Not differentiable: `nn.unpermute` is.
    Raises TypeError for a dtype, ValueError for shapes, devices, `source` or a backend.
    """
    op = "unpermute"
    _check_rows(op, "y", y)
    if top_k < 1 or y.shape[0] % top_k:
        raise ValueError(f"{op}: y must be [T · top_k, H] with top_k >= 1, got {list(y.shape)} and top_k={top_k}")
    _check_routing(op, y.shape[0] // top_k, y.device, source, top_k, weights)
    return unpermute_op(*without_grad(y), source, top_k, *without_grad(weights), backend)


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
    y: [T · top_k, H] of grad_output's dtype, where the gradient of `weights` is wanted, or None.
    Returns grad_y [T · top_k, H] of grad_output's dtype, rounded once, and grad_weights [T, top_k] f32, or None: for
    each assignment the dot product of its row of y and its token's grad_output, in fp32, in the backend's order.
    Both come of one pass. Without y and weights this is `permute` by a `source` that is known.
    Raises as `unpermute` does.
    """
    op = "unpermute_backward"
    _check_rows(op, "grad_output", grad_output)
    tokens, width = grad_output.shape
    _check_routing(op, tokens, grad_output.device, source, top_k, weights)
    if y is not None and (tuple(y.shape) != (tokens * top_k, width) or y.dtype != grad_output.dtype):
        wanted = f"{grad_output.dtype} {[tokens * top_k, width]}"
        raise ValueError(f"{op}: y must be {wanted}, as its gradient is, got {y.dtype} {list(y.shape)}")
    inputs = *without_grad(grad_output, y), source, top_k, *without_grad(weights)
    grad_y, *grad_weights = unpermute_backward_op(*inputs, backend)
    return grad_y, grad_weights[0] if grad_weights else None


def _check_rows(op: str, name: str, x: torch.Tensor) -> None:
    check_dtype(op, x, name)
    if x.dim() != 2:
        raise ValueError(f"{op}: {name} must be [rows, H], got shape {list(x.shape)}; reshape it")


def _check_routing(
    op: str, tokens: int, device: torch.device, source: torch.Tensor, top_k: int, weights: torch.Tensor | None
) -> None:
    if source.dtype != torch.int32:
        raise TypeError(f"{op}: source must be int32, as permute returns it, got {source.dtype}")
    if top_k < 1 or tuple(source.shape) != (tokens * top_k,):
        got = f"{list(source.shape)}, T={tokens} and top_k={top_k}"
        raise ValueError(f"{op}: source must be [T · top_k] with top_k >= 1, got {got}")
    if weights is not None and weights.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"{op}: weights must be bfloat16, float16 or float32, got {weights.dtype}; cast them")
    if weights is not None and tuple(weights.shape) != (tokens, top_k):
        raise ValueError(f"{op}: weights must be [T, top_k] = {[tokens, top_k]}, got shape {list(weights.shape)}")
    for name, tensor in (("source", source), ("weights", weights)):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{op}: {name} must be on the rows' device {device}, got {tensor.device}; move it")


def _check_permutation(op: str, source: torch.Tensor) -> None:
    """Raise ValueError unless `source`, on a CPU, is a permutation; a GPU's values are not read by the host."""
    has_values = source.device.type == "cpu" and type(source) in (torch.Tensor, torch.nn.Parameter)
    if (
        has_values
        and not torch.compiler.is_compiling()
        and not source.sort().values.equal(reference.numbers_like(source))
    ):
        raise ValueError(f"{op}: source must hold each of 0 .. {source.numel() - 1} once; pass what permute returned")


_KERNELS = f"{__name__}.kernels_triton"


def _permute(
    x: torch.Tensor, expert_ids: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from torchao_blockwise.ops.groups.permutation import kernels_triton

    if experts <= kernels_triton.MAX_EXPERTS and expert_ids.numel() <= kernels_triton.MAX_ASSIGNMENTS:
        return kernels_triton.permute(x, expert_ids, experts)
    source, group_ends = reference.route(expert_ids, experts)
    tokens, _ = kernels_triton.unpermute_backward(x, None, source, expert_ids.shape[1], None)
    return tokens, source, group_ends


def _permute_fake(
    x: torch.Tensor, expert_ids: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assignments = expert_ids.shape[0] * expert_ids.shape[1]
    source = expert_ids.new_empty(assignments, dtype=torch.int32)
    return x.new_empty(assignments, x.shape[1]), source, expert_ids.new_empty(experts, dtype=torch.int32)


permute_op = Operation(
    "permute(Tensor x, Tensor expert_ids, SymInt experts, str backend) -> (Tensor, Tensor, Tensor)",
    table=[
        kernels(Backend.TRITON, _permute),
        Implementation(Backend.REFERENCE, reference.permute),
    ],
    fake=_permute_fake,
)
unpermute_op = Operation(
    "unpermute(Tensor y, Tensor source, SymInt top_k, Tensor? weights, str backend) -> Tensor",
    table=[
        kernels(Backend.TRITON, f"{_KERNELS}:unpermute"),
        Implementation(Backend.REFERENCE, reference.unpermute),
    ],
    fake=lambda y, source, top_k, weights: y.new_empty(y.shape[0] // top_k, y.shape[1]),
    check=lambda y, source, *_: _check_permutation("unpermute", source),
)


def _backward_fake(
    grad_output: torch.Tensor, y: torch.Tensor | None, source: torch.Tensor, top_k: int, weights: torch.Tensor | None
) -> list[torch.Tensor]:
    tokens, width = grad_output.shape
    grad_y = grad_output.new_empty(tokens * top_k, width)
    return [grad_y] if y is None else [grad_y, grad_output.new_empty(tokens, top_k, dtype=torch.float32)]


unpermute_backward_op = Operation(
    "unpermute_backward(Tensor grad_output, Tensor? y, Tensor source, SymInt top_k, Tensor? weights, str backend)"
    " -> Tensor[]",
    table=[
        kernels(Backend.TRITON, f"{_KERNELS}:unpermute_backward"),
        Implementation(Backend.REFERENCE, reference.unpermute_backward),
    ],
    fake=_backward_fake,
    check=lambda grad_output, y, source, *_: _check_permutation("unpermute_backward", source),
)
