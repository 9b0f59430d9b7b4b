"""The three GEMMs of a weight, for every layer: quantize, multiply, in the order in which less lives at once.

    forward    x → rowwise [T, K] (· wᵀ = output), and columnwise [K, T], saved
    backward   dy → rowwise [T, N] (· w columnwise = grad_input), and columnwise [N, T] (· x columnwise = grad_weight)

Every operand is quantized for the contraction it takes part in. A layer says how its activation is computed and what it
saves; all else is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchao_blockwise import ops
from torchao_blockwise._compat import checkpoint_modes
from torchao_blockwise.formats import CastOptions, Copies, Draws, Groups, Operand
from torchao_blockwise.nn.observation import note_multiplied
from torchao_blockwise.nn.sharded_linear import WHOLE
from torchao_blockwise.nn.weight_products import (
    Contraction,
    Readable,
    Recipe,
    WeightValues,
    product_flops,
    weight_product,
)
from torchao_blockwise.ops.backend import Backend, Implementation, get_backend
from torchao_blockwise.ops.operands import new_copies, tensor_scales_shape
from torchao_blockwise.ops.registry import Operation, groups, operand
from torchao_blockwise.tensors import QuantizedTensor, TrainingConfig
from torchao_blockwise.tensors.weight_operands import amax_over, amaxes_over


def cast_options(config: TrainingConfig | Recipe, rowwise: bool, columnwise: bool) -> CastOptions:
    """How a layer of this config quantizes an activation or its gradient."""
    hadamard = config.hadamard_number if columnwise else 0
    power_of_2 = config.power_of_2_scales
    rounding = config.four_over_six, config.scale_per_expert
    return CastOptions(config.activation_format, rowwise, columnwise, power_of_2, True, hadamard, *rounding)


def operand_of(tensors: Sequence[torch.Tensor], config: TrainingConfig) -> Operand:
    """The operand of an activation from its tensors (qdata, scale, global_scale); the last may be left out."""
    qdata, scale, *rest = tensors
    return Operand(qdata, scale, rest[0] if rest else None, config.activation_format.name)


def quantize(
    x: torch.Tensor,
    how: Contraction,
    *,
    rowwise: bool,
    columnwise: bool,
    over: str = "",
    draws: Draws | None = None,
) -> Copies:
    """Copies of x [T, K], none where none are asked for.

    over: the process groups over which `x` is split. draws: the random bits that they are rounded by, if by any.
    """
    if not (rowwise or columnwise):
        return Copies(None, None)
    options = cast_options(how.config, rowwise, columnwise)
    return ops.quantize_by(
        x,
        options,
        how.groups,
        tensor_amax=amaxes_over(x, over, options.hadamard) if options.hadamard else amax_over(x, over),
        draws=draws,
        backend=ops.casting_backend(how.config.backend),
    )


def output(
    x: Operand, weight: Readable, how: Contraction, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, K] · wᵀ (+ bias) = [T, N] of `dtype`."""
    return weight_product(x, weight, how, how.transposed, dtype, bias)


def quantized_output(
    x: torch.Tensor,
    weight: Readable,
    how: Contraction,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    columnwise: bool,
) -> tuple[torch.Tensor, Operand | None]:
    """(`output` of x [T, K] in high precision, its columnwise copy if asked for)."""
    if _is_one_op(how):
        out, *copy = quantized_output_op(x, _parts_of(weight, how), bias, how.groups, columnwise, _recipe(how), dtype)
        return out, operand_of(copy, how.config) if columnwise else None
    return _quantized_output(x, weight, how, dtype, bias, columnwise)


def _quantized_output(
    x: torch.Tensor,
    weight: Readable,
    how: Contraction,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    columnwise: bool,
) -> tuple[torch.Tensor, Operand | None]:
    copies = quantize(x, how, rowwise=True, columnwise=columnwise, over=how.split.x)
    return output(copies.rowwise, weight, how, dtype, bias), copies.columnwise


def grad_input(dy: Operand, weight: Readable, how: Contraction, dtype: torch.dtype) -> torch.Tensor:
    """dy [T, N] · w = [T, K] of `dtype`."""
    return weight_product(dy, weight, how, not how.transposed, dtype, None)


def grad_weight(
    dy: Operand, x: Operand, tokens: int, weight: Readable, how: Contraction, dtype: torch.dtype
) -> torch.Tensor | None:
    """dyᵀ · x, both quantized along tokens, as the weight lies; None where it went into `weight.main_grad`."""
    operands = (x, dy) if how.transposed else (dy, x)
    main_grad, backend = main_grad_of(weight), how.config.backend
    if main_grad is None:
        return grad_weight_op(*operands, how.groups, tokens, dtype, get_backend(backend))
    if how.groups is None:
        ops.add_matmul_(main_grad, *operands, backend=backend)
    else:
        ops.add_grouped_matmul_(main_grad, *operands, how.groups, backend=backend)
    weight.grad_added_to_main_grad = True  # type: ignore[union-attr]
    return None


def main_grad_of(weight: Readable) -> torch.Tensor | None:
    """What the gradient of `weight` is added to in place of `.grad`, if it has such an attribute, `main_grad`.

    Of its shape, in f32; the product is added in the pass that computes it, and `weight.grad_added_to_main_grad` is
    set, as Megatron-LM's optimizers expect. `.grad` stays as it is, and its hooks do not run: a gradient that is added
    later is written once and read twice more. In eager mode alone: a compiled layer gives `.grad`.
    """
    return None if torch.compiler.is_compiling() else getattr(weight, "main_grad", None)


def gradients(
    dy: list[Operand | None],
    x_columnwise: Callable[[], Operand],
    tokens: int,
    weight: Readable,
    how: Contraction,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    weight_first: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(grad_input, grad_weight) of dy's copies [rowwise, columnwise], each where its copy is there.

    The copies are taken out of the list, and `x_columnwise` is asked when its product is next: each operand goes when
    its product is done. Together they would be most of a step's memory.
    tokens: T, without the zeros that columnwise copies are padded with. dtypes: of the two gradients.
    weight_first: which product comes first; see `weight_comes_first`.
    """
    columnwise, rowwise = dy.pop(), dy.pop()
    if _is_one_op(how) and not (rowwise is columnwise is None):
        x = None if columnwise is None else x_columnwise()
        parts, recipe = _parts_of(weight, how), _recipe(how)
        both = gradients_op(parts, rowwise, columnwise, x, tokens, how.groups, recipe, *dtypes)
        return None if rowwise is None else both[0], None if columnwise is None else both[-1]
    grads: dict[str, torch.Tensor | None] = {"input": None, "weight": None}
    for product in ("weight", "input") if weight_first else ("input", "weight"):
        if product == "input" and rowwise is not None:
            grads[product] = grad_input(rowwise, weight, how, dtypes[0])
            rowwise = None
        if product == "weight" and columnwise is not None:
            grads[product] = grad_weight(columnwise, x_columnwise(), tokens, weight, how, dtypes[1])
            columnwise = None
    return grads["input"], grads["weight"]


def weight_comes_first(dy: torch.Tensor, how: Contraction) -> bool:
    """Whether less lives at once where grad_weight is computed before grad_input.

    With grad_input first its result is there beside copies of all tokens, those of dy and the saved one of x; with
    grad_weight first that is there beside the columnwise copy of the weight: up to 23 % of a layer's peak with many
    tokens (32768 of 4096 → 14336), up to 10 % the other way with few. A compiled graph has one order for any number of
    tokens, and so have ranks that ask each other for amaxes, whose parts may differ in size.
    """
    tokens, features = dy.shape
    return not torch.compiler.is_compiling() and how.split == WHOLE and tokens > features


# --- passes of a layer as operations of a compiled graph --------------------------------------------------------------
# Each operation there costs the host a call through PyTorch's dispatcher, so that what is done in a row is one:
# quantize and multiply, and the two products of backward. The gradient's copies are made outside, so that it can go.


def _is_one_op(how: Contraction) -> bool:
    """Whether passes are traced as one operation. What ranks exchange on the way stays visible to compilers."""
    return torch.compiler.is_compiling() and how.split == WHOLE


def _recipe(how: Contraction) -> Recipe:
    config = how.config
    return Recipe(
        config.activation_format,
        config.weight_format,
        config.power_of_2_scales,
        config.hadamard_number,
        config.four_over_six,
        config.scale_per_expert,
        how.transposed,
        get_backend(config.backend),
    )


def _parts_of(weight: Any, how: Contraction) -> WeightValues:
    if isinstance(weight, QuantizedTensor):
        return WeightValues(*weight.operand_tensors(), how.config.weight_format.name, weight.shape[-1], None)
    return WeightValues(weight, None, None, "", weight.shape[-1], how.rounded_to)


def _contraction(weight: WeightValues, groups: Groups | None, recipe: Recipe) -> Contraction:
    # All that products read of a config is there.
    return Contraction(recipe, groups, rounded_to=weight.rounded_to, transposed=recipe.transposed)  # type: ignore[arg-type]


def _compute_output(
    x: torch.Tensor,
    weight: WeightValues,
    bias: torch.Tensor | None,
    groups: Groups | None,
    columnwise: bool,
    recipe: Recipe,
    out_dtype: torch.dtype,
) -> list[torch.Tensor]:
    # A compiled function inside of a forward pass that is checked.
    note_multiplied(None)
    how = _contraction(weight, groups, recipe)
    out, copy = _quantized_output(x, weight, how, out_dtype, bias, columnwise)
    return [out, *_present(copy)]


def _output_fake(
    x: torch.Tensor,
    weight: WeightValues,
    bias: torch.Tensor | None,
    groups: Groups | None,
    columnwise: bool,
    recipe: Recipe,
    out_dtype: torch.dtype,
) -> list[torch.Tensor]:
    columns = weight.columns if recipe.transposed else weight.values.shape[-2]
    out = x.new_empty((x.shape[0], columns), dtype=out_dtype)
    if not columnwise:
        return [out]
    fmt = recipe.activation_format
    options = cast_options(recipe, False, True)
    copy = new_copies(x, tuple(x.shape), options, groups).columnwise
    scales = [x.new_empty(tensor_scales_shape(x, options, groups), dtype=torch.float32)]
    return [out, copy.qdata, copy.scale, *(scales if fmt.has_global_scale else [])]


_WEIGHT = "Tensor values, Tensor? scale, Tensor? global_scale, str format_name, SymInt columns, ScalarType? rounded_to"
_RECIPE = (
    "str activation_format, str weight_format, bool power_of_2_scales, SymInt hadamard_number, bool four_over_six, "
    "bool scale_per_expert, bool transposed, str backend"
)

quantized_output_op = Operation(
    f"quantized_output(Tensor x, {_WEIGHT}, Tensor? bias, {groups('Tensor?')}, bool columnwise, {_RECIPE}, "
    "ScalarType out_dtype) -> Tensor[]",
    takes=(None, WeightValues, None, Groups, None, Recipe, None),
    table=[Implementation(Backend.AUTO, _compute_output)],
    fake=_output_fake,
    flops=lambda x, weight, *_: product_flops(x.shape[0], _shape_of(weight)),
)


# Policies of selective checkpointing save or drop an operation's results together. They see the two that it is made of,
# so that the product can be saved, and the columnwise copy, a byte an element of every layer's input, be made again.
quantized_output_op.show_inside(checkpoint_modes.MODES, _compute_output)


def _compute_gradients(
    weight: WeightValues,
    dy_rowwise: Operand | None,
    dy_columnwise: Operand | None,
    x_columnwise: Operand | None,
    tokens: int,
    groups: Groups | None,
    recipe: Recipe,
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> list[torch.Tensor]:
    how, dtypes = _contraction(weight, groups, recipe), (input_dtype, weight_dtype)
    x: Any = x_columnwise  # there where that of dy is
    both = gradients([dy_rowwise, dy_columnwise], lambda: x, tokens, weight, how, dtypes, weight_first=False)
    return [grad for grad in both if grad is not None]


def _gradients_flops(
    weight: WeightValues, dy_rowwise: Operand | None, dy_columnwise: Operand | None, x: object, tokens: int, *_: object
) -> int:
    products = (dy_rowwise is not None) + (dy_columnwise is not None)
    return products * product_flops(tokens, _shape_of(weight))


def _gradients_fake(
    weight: WeightValues,
    dy_rowwise: Operand | None,
    dy_columnwise: Operand | None,
    x_columnwise: Operand | None,
    tokens: int,
    groups: Groups | None,
    recipe: Recipe,
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> list[torch.Tensor]:
    grads = []
    if dy_rowwise is not None:
        columns = weight.values.shape[-2] if recipe.transposed else weight.columns
        grads.append(dy_rowwise.qdata.new_empty((dy_rowwise.qdata.shape[0], columns), dtype=input_dtype))
    if dy_columnwise is not None:
        grads.append(dy_columnwise.qdata.new_empty(_shape_of(weight), dtype=weight_dtype))
    return grads


_OPERANDS = ", ".join(operand(name, "Tensor?") for name in ("dy_rowwise", "dy_columnwise", "x_columnwise"))

gradients_op = Operation(
    f"gradients({_WEIGHT}, {_OPERANDS}, SymInt tokens, {groups('Tensor?')}, {_RECIPE}, ScalarType input_dtype, "
    "ScalarType weight_dtype) -> Tensor[]",
    takes=(WeightValues, Operand, Operand, Operand, None, Groups, Recipe, None, None),
    table=[Implementation(Backend.AUTO, _compute_gradients)],
    fake=_gradients_fake,
    flops=_gradients_flops,
)


def _compute_grad_weight(
    a: Operand, b: Operand, groups: Groups | None, tokens: int, out_dtype: torch.dtype, products_by: Backend
) -> torch.Tensor:
    if groups is None:
        return ops.matmul(a, b, out_dtype=out_dtype, backend=products_by)
    return ops.grouped_matmul(a, b, groups, along="k", out_dtype=out_dtype, backend=products_by)


def _grad_weight_fake(
    a: Operand, b: Operand, groups: Groups | None, tokens: int, out_dtype: torch.dtype, products_by: Backend
) -> torch.Tensor:
    shape = a.qdata.shape[0], b.qdata.shape[0]
    return a.qdata.new_empty(shape if groups is None else (groups.ends.shape[0], *shape), dtype=out_dtype)


# Of the products' own operations none knows how many tokens are padding, nor so how many operations these do.
grad_weight_op = Operation(
    f"grad_weight({operand('a')}, {operand('b')}, {groups('Tensor?')}, SymInt tokens, ScalarType out_dtype, "
    "str products_by) -> Tensor",
    takes=(Operand, Operand, Groups, None, None, Backend),
    table=[Implementation(Backend.AUTO, _compute_grad_weight)],
    fake=_grad_weight_fake,
    flops=lambda a, b, groups, tokens, *_: product_flops(tokens, (a.qdata.shape[0], b.qdata.shape[0])),
)


def _shape_of(weight: WeightValues) -> tuple[int, ...]:
    """As it lies in memory."""
    return *weight.values.shape[:-1], weight.columns


def _present(copy: Operand | None) -> list[torch.Tensor]:
    return [] if copy is None else [x for x in copy.tensors if x is not None]
