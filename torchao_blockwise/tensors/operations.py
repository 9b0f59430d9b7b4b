"""Which operations may be done to a master weight: a closed rule, so that no product runs in high precision unseen.

    pointwise operations, by tag                        on the values
    views, by the aliases that their schema declares    on the values; a view of a weight is a weight
    what the lists here name, reductions among them     on the values
    updates by other libraries: they return nothing,    on the values
      write the weight, and have no other matrices
      but of its shape, as optimizers do
    dot of vectors of as many elements as a weight      on the values
    everything else, every product among them           refused

In-place, `out=` and `_foreach_` forms follow the operation that they are forms of: tags and names of them prove
nothing, there are `addmm_` and `_foreach_mm` too. What comes out is a weight again where it could be used as one:
copies, views, `cat`, and, of the weight's shape, `w * mask` and `w + b @ a`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence

import torch

from torchao_blockwise import _compat
from torchao_blockwise._compat.torch_types import Operation


class Result(enum.Enum):
    """What an operation on master weights gives."""

    WEIGHT = "a weight"
    DERIVED = "a weight where it has the shape of one"
    PLAIN = "plain values"
    REFUSED = "nothing"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# By the name of the operation, without what marks its in-place and `_foreach_` forms.
_WEIGHT = _names(
    "as_strided cat clone constant_pad_nd contiguous detach empty_like lift lift_fresh new_empty new_empty_strided "
    "new_zeros repeat squeeze stack t transpose unsafe_split unsafe_split_with_sizes unsqueeze _pin_memory "
    "_reshape_copy _to_copy _unsafe_view"
)
_DERIVED = _names(
    "as_strided_scatter copy diagonal_scatter fill flip floor_divide index_add index_copy index_fill index_put "
    "index_reduce masked_scatter native_dropout put renorm roll scatter scatter_add scatter_reduce select_scatter "
    "slice_scatter tril triu _index_put_impl _unsafe_index_put _weight_norm_interface _weight_norm_interface_backward "
    # Pointwise, as PyTorch 2.11 does not tag it yet.
    "leaky_relu leaky_relu_backward"
)
_PLAIN = _names(
    # Reductions: their tag is younger than the oldest PyTorch that is supported.
    "all amax amin aminmax any argmax argmin count_nonzero linalg__powsum linalg_vector_norm logsumexp max mean min "
    "nansum norm powsum prod std std_mean sum trace var var_mean "
    # Distances between weights.
    "dist huber_loss huber_loss_backward mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward "
    # Embedding and row lookup.
    "embedding embedding_renorm gather index index_select masked_select nonzero take _embedding_bag "
    "_embedding_bag_forward_only _unsafe_index "
    # Order, and what one looks at values by.
    "allclose argsort bincount bucketize cummax cummin cumprod cumsum equal hash_tensor histc histogram is_pinned isin "
    "kthvalue "
    "median mode nanmedian searchsorted sort topk unique_consecutive unique_dim _local_scalar_dense _unique _unique2 "
    # Initialization: random fills, and the factors that it makes weights of.
    "bernoulli cauchy exponential eye full_like geometric linalg_qr log_normal new_full new_ones normal ones_like "
    "rand_like randint_like randn_like random uniform zero zeros_like _linalg_svd "
    # Memory.
    "record_stream resize resize_as set _assert_tensor_metadata _has_compatible_shallow_copy_type "
    # Optimizers.
    "_amp_foreach_non_finite_check_and_unscale _fused_adagrad _fused_adam _fused_adamw _fused_sgd"
)
_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
# self + a · b: the product is of others, where the weight is `self` alone.
_ADDS_A_PRODUCT = _names("addbmm addmm addr baddbmm")
# What optimizers make of a gradient and a weight that decays.
_SUMS = _names("add addcdiv addcmul lerp rsub sub")
# Of a matrix they look up rows, as embeddings do; of a stack of experts they pick experts, which are weights still.
_PICKS_EXPERTS = {"index", "index_select"}


def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def is_update(func: Operation, shape: torch.Size, others: Sequence[torch.Tensor]) -> bool:
    """Whether `func` may be what another library's optimizer does in place to a weight of `shape`.

    others: the other tensors that it is given. Gradients and states have the weight's shape, or are stacks of that;
    scales and tables have fewer than two dims. `func` must also declare that it writes the weight.
    """
    if func.namespace in ("aten", "prims") or _compat.schema_of(func).returns or len(shape) < 2:
        return False
    return all(x.dim() < 2 or x.shape[-len(shape) :] == shape for x in others)


def is_dot(func: Operation, whole: int, operands: Sequence[torch.Tensor]) -> bool:
    """Whether `func` multiplies two vectors of all elements of a weight: that is a number, and no layer's output."""
    is_product = func.namespace == "aten" and _plain_name(func) in ("dot", "vdot", "inner")
    return is_product and all(x.shape == (whole,) for x in operands)


@functools.cache
def is_sum(func: Operation) -> bool:
    """Whether `func` adds elements, multiples or products of them."""
    return _plain_name(func) in _SUMS


def _plain_name(func: Operation) -> str:
    """The name of an operation without what marks its in-place and `_foreach_` forms."""
    return func.overloadpacket.__name__.removeprefix("_foreach_").removesuffix("_")


@functools.cache
def result_of(func: Operation, dims: int = 2, first_alone: bool = False) -> Result:
    """What the operator overload `func` gives of master weights of `dims` dims, or that it is refused.

    first_alone: whether its first argument is the one master weight that it reads.
    """
    if func.namespace == "torchao_blockwise":
        # Ours, which quantize what they multiply.
        return Result.PLAIN
    if func.namespace in _COLLECTIVES:
        return Result.WEIGHT if func in _compat.functional_gathers() else Result.PLAIN
    if func.namespace == "prims" and torch.Tag.pointwise in func.tags:
        return Result.DERIVED
    if func.namespace != "aten":
        return Result.REFUSED
    schema = _compat.schema_of(func)
    name = _plain_name(func)
    if name in _PICKS_EXPERTS and dims == 3:
        return Result.WEIGHT
    if name in _ADDS_A_PRODUCT and first_alone:
        return Result.DERIVED
    for names, result in ((_WEIGHT, Result.WEIGHT), (_DERIVED, Result.DERIVED), (_PLAIN, Result.PLAIN)):
        if name in names:
            return result
    if torch.Tag.view_copy in func.tags:
        return Result.WEIGHT
    # What some of them call in backward has no tag.
    if _is_pointwise(name.removesuffix("_backward")):
        return Result.DERIVED
    aliases = [value.alias_info for value in schema.returns]
    if not schema.is_mutable and aliases and all(alias is not None for alias in aliases):
        return Result.WEIGHT
    return Result.REFUSED
