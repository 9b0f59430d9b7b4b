"""The rule for operations on master weights: they return a weight or plain values, or raise.

    operations that multiply matrices, by their names          refused
    operations of other libraries                              refused, except updates of optimizers
    lookups of rows, factories, factorizations                 plain values
    views, copies, `cat`                                       a weight
    all others, such as `w * mask`                             a weight if the result has the shape of one

In-place, `out=` and `_foreach_` forms follow the same rule as their base operation.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Sequence

import torch

from torchao_blockwise import _compat
from torchao_blockwise._compat import Operation


class Result(enum.Enum):
    """The kinds of results of operations on master weights."""

    WEIGHT = "a weight"
    DERIVED = "a weight where it has the shape of one"
    PLAIN = "plain values"
    REFUSED = "nothing"


# Words in the names of operations that multiply matrices. (A dot product of vectors is not the output of a layer.)
_GEMM = re.compile(
    r".*mm|.*mv|.*matmul|conv.*|.*linear|.*attention|.*lstm|.*gru|.*rnn|tensordot|inner|addr|cdist|euclidean|transformer"
)
# self + a · b: if the weight is only `self`, the GEMM does not read it.
_ADDS_A_GEMM = {"addbmm", "addmm", "addr", "baddbmm"}
# Operations with which optimizers add a decayed weight to a gradient.
_SUMS = {"add", "addcdiv", "addcmul", "lerp", "rsub", "sub"}
# Of a matrix, they look up rows, as embeddings do. Of a stack of experts, they select experts, which are weights.
_PICKS_EXPERTS = {"index", "index_select"}
_PLAIN = {
    *("embedding", "gather", "index", "index_select", "masked_select", "take", "_embedding_bag", "_unsafe_index"),
    *("_embedding_bag_forward_only", "full_like", "new_full", "new_ones", "ones_like", "rand_like", "randint_like"),
    *("randn_like", "zeros_like"),
}
_WEIGHT = {
    *("cat", "clone", "constant_pad_nd", "contiguous", "empty_like", "lift", "new_empty", "new_empty_strided"),
    *("new_zeros", "repeat", "stack", "unsafe_split", "unsafe_split_with_sizes", "_pin_memory", "_reshape_copy"),
    *("_to_copy", "_unsafe_view"),
}
_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
# With these operations DTensor gathers shards.
_GATHERS = {f"_c10d_functional::{name}" for name in ("all_gather_into_tensor", "wait_tensor", "_wrap_tensor_autograd")}


@functools.cache
def result_of(func: Operation, dims: int = 2, first_alone: bool = False) -> Result:
    """Return the kind of result of the operator overload `func` for master weights with `dims` dims.

    first_alone: whether its first argument is the only master weight among the arguments.
    """
    if func.namespace == "torchao_blockwise":
        # The package's own operations quantize their operands.
        return Result.PLAIN
    if func.namespace in _COLLECTIVES:
        return Result.WEIGHT if _compat.schema_of(func).name in _GATHERS else Result.PLAIN
    if func.namespace not in ("aten", "prims"):
        return Result.REFUSED
    name = _plain_name(func)
    if any(_GEMM.fullmatch(word) for word in name.split("_")):
        return Result.DERIVED if first_alone and name in _ADDS_A_GEMM else Result.REFUSED
    if name in _PICKS_EXPERTS and dims == 3:
        return Result.WEIGHT
    if name in _PLAIN or name.lstrip("_").startswith("linalg"):
        return Result.PLAIN
    if _compat.is_view(func) or name in _WEIGHT or torch.Tag.view_copy in func.tags:
        return Result.WEIGHT
    return Result.DERIVED


def is_update(func: Operation, shape: torch.Size, others: Sequence[torch.Tensor]) -> bool:
    """Whether `func` may be the in-place update of a weight of `shape` by another library's optimizer.

    others: the other tensor arguments. Gradients and states have the weight's shape, or are stacks of that shape;
    scales and tables have fewer than two dims. `func` must also declare that it writes the weight.
    """
    if func.namespace in ("aten", "prims") or _compat.schema_of(func).returns or len(shape) < 2:
        return False
    return all(x.dim() < 2 or x.shape[-len(shape) :] == shape for x in others)


@functools.cache
def is_sum(func: Operation) -> bool:
    """Whether `func` adds elements, or multiples or products of elements."""
    return _plain_name(func) in _SUMS


def _plain_name(func: Operation) -> str:
    """Return the name of an operation without the affixes of its in-place and `_foreach_` forms."""
    return func.overloadpacket.__name__.removeprefix("_foreach_").removesuffix("_")
