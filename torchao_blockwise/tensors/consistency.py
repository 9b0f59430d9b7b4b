"""Whether the parts of a quantized tensor fit each other. Kernels rely on it: they take sizes from the payload alone.

Parts come from files, from gathers and from callers. They are checked where a tensor is made, which is every view and
copy too, and again where they become an operand: attributes can be set from outside after a tensor was made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchao.utils import TorchAOBaseTensor

from torchao_blockwise.formats import HIGH_PRECISION_DTYPES, BlockFormat
from torchao_blockwise.tensors.config import TrainingConfig

_REMEDY = "take all parts from one tensor, or make it with from_hp"


def check_parts(
    name: str,
    fmt: BlockFormat,
    qdata: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    shape: Sequence[int],
    own_columns: int | None = None,
) -> None:
    """Raise TypeError or ValueError unless these are parts, in `fmt`, of a tensor of the class `name`.

    shape: [.., N, K] of the tensor that the scales are of; qdata may be some rows of it, or, of `own_columns`, columns.
    Calls nothing on its way, as every view and product pays for it. Symbolic sizes pass: a compiler traces tensors
    that were checked when they were made.
    """
    for x in (qdata, scale) if global_scale is None else (qdata, scale, global_scale):
        if type(x) is not torch.Tensor and (not isinstance(x, torch.Tensor) or isinstance(x, TorchAOBaseTensor)):
            raise TypeError(f"{name}: qdata and scales must be plain tensors, got a {type(x).__name__}; {_REMEDY}")
        if x.layout is not torch.strided or x.device != qdata.device:
            wanted = f"strided and on {qdata.device}, as qdata is"
            raise ValueError(f"{name}: all parts must be {wanted}, got {x.layout} on {x.device}; move it")
    if qdata.dtype is not fmt.element.storage_dtype or scale.dtype is not fmt.scale_dtype:
        wanted, got = f"{fmt.element.storage_dtype} and {fmt.scale_dtype}", f"{qdata.dtype} and {scale.dtype}"
        raise TypeError(f"{name}: qdata and scale in {fmt.name} must be {wanted}, got {got}; {_REMEDY}")
    if global_scale is None:
        fits = not fmt.has_global_scale
    else:
        fits = fmt.has_global_scale and global_scale.dtype is torch.float32
        # One of all, or of each matrix.
        fits = fits and (global_scale.dim() == 0 or global_scale.shape == torch.Size(shape[:-2]))
    if not fits:
        each = f", or one for each matrix, {list(shape[:-2])}" if len(shape) > 2 else ""
        wanted = f"a float32 scalar{each}" if fmt.has_global_scale else "None"
        got = "None" if global_scale is None else f"{global_scale.dtype} of shape {list(global_scale.shape)}"
        raise ValueError(f"{name}: global_scale in {fmt.name} must be {wanted}, got {got}; {_REMEDY}")
    if len(shape) < 2:
        raise ValueError(f"{name}: blocks need a tensor [.., N, K], got shape {list(shape)}; reshape it first")
    if type(qdata.numel()) is not int or type(scale.numel()) is not int:
        return
    *batch, rows, columns = shape
    block_rows, block_columns = fmt.block
    grid = (*batch, -(-rows // block_rows), -(-columns // block_columns))
    columns = columns if own_columns is None else own_columns
    if scale.shape != grid or qdata.shape[-1] != -(-columns // fmt.element.per_byte):
        wanted = f"scale {list(grid)} and rows of {fmt.element.packed(columns)} in qdata"
        got = f"{list(scale.shape)} and {list(qdata.shape)}"
        raise ValueError(f"{name}: a tensor {list(shape)} in {fmt.name} has {wanted}, got {got}; {_REMEDY}")


def check_attributes(name: str, fmt: BlockFormat, dtype: torch.dtype, config: TrainingConfig | None) -> None:
    """Raise TypeError or ValueError unless a tensor in `fmt` can report `dtype` and train by `config`."""
    if dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"{name}: dtype must be bfloat16, float16 or float32, got {dtype}; dequantize() for others")
    if config is None:
        return
    if not isinstance(config, TrainingConfig):
        raise TypeError(f"{name}: config must be a TrainingConfig or None, got {type(config).__name__}")
    if config.weight_format.element is not fmt.element:
        trains = config.weight_format.name
        raise ValueError(f"{name}: a {type(config).__name__} trains {trains}, not {fmt.name}; give this one no config")
