"""Test cases of the self-test: the calls of operations that small layers make in training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import _compat, formats, ops
from torchao_blockwise.conversion import linears_and_experts
from torchao_blockwise.nn import NormLinear, SwiGLUExperts, SwiGLUMLP
from torchao_blockwise.nn.permutation import permute, unpermute
from torchao_blockwise.ops import shards
from torchao_blockwise.ops.backend import Backend, first_tensor
from torchao_blockwise.ops.groups.tables.layout import HEIGHTS, layout_of
from torchao_blockwise.ops.registry import Operation
from torchao_blockwise.ops.shards.flat import Shards, shard_entries
from torchao_blockwise.tensors import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, TrainingConfig

# More tokens than the number of rows up to which GEMMs choose another backend, and not a multiple of a block.
TOKENS, FEATURES_IN, FEATURES_OUT = 520, 384, 256
# One expert has no tokens, and the last tokens have no expert.
ENDS = (100, 100, 390, 500)
TOP_K = 2
# Operations in which backends may sum in different orders.
_SUMS = {"matmul", "add_matmul", "grouped_matmul", "add_grouped_matmul", "norm_statistics", "unpermute_backward"}


class Case(NamedTuple):
    """An operation and its arguments.

    of: formats and options that distinguish the cases of an operation. args: the arguments, without the backend.
    """

    op: Operation
    of: str
    args: Sequence[Any]

    @property
    def exact(self) -> bool:
        """Whether all backends give the same bits."""
        return self.op.name not in _SUMS

    def defined(self, result: torch.Tensor) -> torch.Tensor:
        """Return the defined part of a result: a schedule of groups has undefined values after its last entry."""
        if self.op.name != "group_tables":
            return result
        at = layout_of(TOKENS, len(ENDS), self.args[2].block[1])
        firsts = [at.rows_of(tile) for tile in HEIGHTS]
        schedules = [result[first : first + 1 + int(result[first, 0])] for first in firsts]
        return torch.cat([result[: at.rows], *schedules, result[at.blocks :]])


def cases(device: torch.device) -> list[Case]:
    """Return at least one case of each operation, with inputs on `device`. Only the reference runs."""
    numbers = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers, dtype=torch.float32, device="cpu").to(device, torch.bfloat16)

    with _recorded() as found, torch.enable_grad():
        fp8, nvfp4 = BlockwiseFP8TrainingConfig(), NVFP4TrainingConfig()
        rows = BlockwiseFP8TrainingConfig(grad_weight_blocks="1x128")
        kinds: Any = nn.Linear, SwiGLUMLP, SwiGLUExperts
        layers = [(make, config) for make in kinds for config in (fp8, nvfp4)]
        layers += [(NormLinear, fp8), *((make, rows) for make in (NormLinear, SwiGLUMLP, SwiGLUExperts))]
        for make, config in (*layers, (SwiGLUExperts, NVFP4TrainingConfig(scale_per_expert=True))):
            _train(make, config, values)
        _permute(values)
        x, w = values(TOKENS, FEATURES_IN), values(FEATURES_OUT, FEATURES_IN)
        ops.normalize(ops.Norm(x, None, None, *ops.norm_statistics(x, "rms", 1e-5), x.dtype))
        for fmt in (formats.FP8_128X128, formats.NVFP4_16X16):
            quantized = ops.quantize(w, fmt).rowwise
            ops.dequantize(quantized, dtype=torch.bfloat16)
            ops.transpose(quantized)
            _cast_shards(w, quantized)
    unlike = {(case.op.name, case.of): case for case in reversed(found)}
    return sorted(unlike.values(), key=lambda case: (case.op.name, case.of))


@contextlib.contextmanager
def _recorded() -> Iterator[list[Case]]:
    """Record calls of operations that have several backends, and run them with the reference."""
    found: list[Case] = []
    original = Operation.__call__

    def call(op: Operation, *values: Any, dispatched: bool = False) -> Any:
        # Under a mode, such as a default device, a call comes here a second time through PyTorch's dispatcher.
        if dispatched:
            return original(op, *values, dispatched=True)
        names_backend = _compat.schema_of(op.overload).arguments[-1].name == "backend"
        args = values[:-1] if names_backend else values
        if op.table[0].backend is not Backend.AUTO:
            # Cloned, because operations may write their arguments in place.
            found.append(Case(op, _described(args), _compat.pytree.tree_map_only(torch.Tensor, torch.clone, args)))
        return original(op, *args, *([Backend.REFERENCE] if names_backend else []))

    Operation.__call__ = call  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        Operation.__call__ = original  # type: ignore[method-assign]


def _described(args: Sequence[Any]) -> str:
    """Return the formats and options of a call, or the dtype of its first tensor if there are none."""
    words: list[str] = []
    for arg in args:
        arg = arg[0] if isinstance(arg, list) and arg else arg
        fmt = arg if isinstance(arg, formats.BlockFormat) else getattr(arg, "fmt", getattr(arg, "format", None))
        words += [fmt.name] if isinstance(fmt, formats.BlockFormat) else []
        if isinstance(arg, formats.CastOptions):
            of_both = arg.rowwise and arg.columnwise
            words += [] if of_both else ["rowwise" if arg.rowwise else "columnwise"]
            words += [name for name in ("hadamard", "scale_per_group") if getattr(arg, name)]
            words += [arg.columnwise_format.name] if arg.columnwise_format is not arg.fmt else []
        if isinstance(arg, formats.Groups) or arg is True:
            words.append("groups" if isinstance(arg, formats.Groups) else "each")
    first = first_tensor(args)
    return " ".join(words) or str(None if first is None else first.dtype).removeprefix("torch.")


def _train(make: Callable[..., nn.Module], config: TrainingConfig, values: Callable[..., torch.Tensor]) -> None:
    """Run forward and backward of a layer; every second weight accumulates into `main_grad`, as in Megatron."""
    x = values(TOKENS, FEATURES_IN).requires_grad_()
    experts = (len(ENDS),) if make is SwiGLUExperts else ()
    layer = make(*experts, FEATURES_IN, FEATURES_OUT, device="meta")
    for i, (name, p) in enumerate(list(layer.named_parameters())):
        module, _, own_name = name.rpartition(".")
        weight = nn.Parameter(values(*p.shape))
        setattr(layer.get_submodule(module), own_name, weight)
        if i % 2:
            weight.main_grad = torch.zeros(p.shape, dtype=torch.float32, device=x.device)  # type: ignore[attr-defined]
    quantize_(layer, config, filter_fn=linears_and_experts())
    out = layer(x, torch.tensor(ENDS, dtype=torch.int32, device=x.device)) if experts else layer(x)
    out.backward(values(*out.shape))


def _permute(values: Callable[..., torch.Tensor]) -> None:
    x, weights = values(TOKENS, FEATURES_IN).requires_grad_(), values(TOKENS, TOP_K).float().requires_grad_()
    first = torch.arange(TOKENS, device=x.device)
    tokens, source, _ = permute(x, torch.stack([(first + k) % len(ENDS) for k in range(TOP_K)], 1), len(ENDS))
    unpermute(tokens, source, TOP_K, weights).sum().backward()
    for fmt in (formats.FP8_1X128, formats.NVFP4_1X16):
        ops.make_groups(torch.tensor(ENDS, dtype=torch.int32, device=x.device), TOKENS, fmt)


def _cast_shards(w: torch.Tensor, whole: formats.Operand) -> None:
    """Cast a weight that two ranks split in the middle of a row."""
    fmt, cut = whole.format, w.numel() // 2 + 1
    part = Shards.of([w.flatten()[cut:]], [cut], [w.shape], w.dtype, fmt)
    bits = torch.zeros(whole.scale.numel(), dtype=torch.int32, device=w.device)
    encode, auto = torch.zeros_like(bits, dtype=torch.float32), Backend.AUTO
    shards.partial_block_amax_op(bits, part, auto)
    global_scales = [torch.zeros((), dtype=torch.float32, device=w.device)] if fmt.has_global_scale else []
    shards.block_scales_op(encode, [torch.zeros_like(whole.scale)], global_scales, bits, [0], fmt, False, auto)
    first, _ = shard_entries(cut, w.numel() - cut, w.shape[1], fmt)
    payload = torch.zeros_like(whole.qdata).view(-1)
    shards.partial_cast_op([payload[first:]], part, encode, auto)
    if not fmt.has_global_scale:
        # The first row of blocks; the others belong to another rank.
        rows = Shards.of([w[: fmt.block[0]].flatten()], [0], [w.shape], w.dtype, fmt)
        shards.whole_block_cast_op([payload[: rows.tensors[0].numel()]], torch.zeros_like(bits), rows, False, auto)
