"""The tensors of a model: their names on disk, the part that each name stands for, and which are quantized there.

transformers keeps experts in one Parameter [E, 2I, H] but writes one tensor for each expert and projection. To find the
mapping, a tensor of row numbers is passed through its own conversion, which shows where each row goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._compat import hugging_face, wrappers
from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard, QuantizedTensor

DIMS_OF_EXPERTS = 3
# Scales with which an engine quantizes activations, keys and values. They are not part of a model, and training derives
# its own. If a model has no such name, `load`, `convert` and `verify` ignore them.
ENGINE_SCALES = r"\.(q|k|v|kv|prob|input|output|input_global)_scale$"


def unwrapped(op: str, model: nn.Module) -> nn.Module:
    """Return the model whose tensors files hold: `model` without torch.compile, checkpoint_wrapper and DDP around it.

    If a user's module wraps one model of transformers which has all of its tensors, that model is returned.
    Raises ValueError for a model with PEFT adapters, which files do not hold.
    """
    if hugging_face.adapters_in(model):
        raise ValueError(
            f"{op}: {type(model).__name__} has PEFT adapters that are not merged, and files cannot hold them; export "
            "the model that model.merge_and_unload() returns, and load files before PEFT adds adapters"
        )
    model = wrappers.wrapped_in(model)
    inner = wrappers.model_of_transformers_in(model)
    return inner if inner is not None and len(tensors_of(inner)) == len(tensors_of(model)) else model


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return Parameters and persistent buffers by name, each once. Names do not include wrapping modules."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    for path, module in model.named_modules():
        found |= {f"{path}.{name}".lstrip("."): x for name, x in _compat.saved_buffers_of(module).items()}
    return {wrappers.own_name(name): x for name, x in found.items()}


def format_of(x: torch.Tensor) -> BlockFormat | None:
    """Return the format in which a converted weight is quantized, None for other tensors."""
    local: Any = _compat.local_of(x)
    if isinstance(local, MasterWeightTensor):
        return local.config.weight_format
    return local.fmt if isinstance(local, QuantizedTensor) else None


def is_converted(x: torch.Tensor) -> bool:
    return format_of(x) is not None


def has_power_of_2_scales(x: torch.Tensor) -> bool:
    """Whether a converted weight is quantized with power-of-two scales."""
    x = _compat.local_of(x)
    return bool(
        getattr(x.config if isinstance(x, (MasterWeightTensor, QuantizedShard)) else x, "power_of_2_scales", False)
    )


def weights_of_embeddings(model: nn.Module) -> set[str]:
    """Return the names of embeddings' weights, also of those that are tied to other layers."""
    own = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {name for name, x in tensors_of(model).items() if id(x) in own}


class Part(NamedTuple):
    """A part of a tensor that has a separate name on disk.

    name: the name on disk. expert: index in the first dim, None for all. start, end: rows of that expert, or of the
    tensor; None for all.
    """

    name: str
    expert: int | None = None
    start: int | None = None
    end: int | None = None

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return this part of `x`, a view."""
        x = x if self.expert is None else x[self.expert]
        return x if self.start is None else x[self.start : self.end]

    def in_blocks(self, block: int) -> Part:
        """Return the same part of a tensor that has one row for each `block` rows, such as block scales."""
        if self.start is None or self.end is None:
            return self
        return self._replace(start=self.start // block, end=-(-self.end // block))

    def cuts(self, block: int) -> bool:
        """Whether this part begins inside of a block of `block` rows, which it then shares with another part."""
        return bool(self.start) and self.start % block != 0  # type: ignore[operator]  # a number


def all_parts_on_disk(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Part]]:
    """Return `parts_on_disk` of each of these tensors of `model`, by name.

    A conversion by transformers visits all modules, so one conversion serves all tensors that are not experts. A tensor
    that comes back unchanged was at most renamed.
    """
    if not tensors:
        return {}
    asked = {name: torch.empty(x.shape, device="meta") for name, x in tensors.items() if x.dim() < DIMS_OF_EXPERTS}
    names = {id(x): name for name, x in hugging_face.reverted(model, asked).items()}
    return {
        name: [Part(names[id(asked[name])])]
        if name in asked and id(asked[name]) in names
        else parts_on_disk(model, name, x.shape)
        for name, x in tensors.items()
    }


def parts_on_disk(model: nn.Module, name: str, shape: torch.Size) -> list[Part]:
    """Return the parts of the tensor `name` of `model`, ordered by their names in files.

    Raises NotImplementedError if transformers does more than split the tensor.
    """
    reverted = hugging_face.reverted(model, {name: torch.empty(shape, device="meta")})
    if len(reverted) == 1:
        ((other, x),) = reverted.items()
        if x.shape == shape:
            return [Part(other)]
    if len(shape) != DIMS_OF_EXPERTS:
        raise NotImplementedError(_refusal(model, name, reverted))
    experts, rows, _ = shape
    # Two columns, because transformers 5.17 drops a dim of one.
    numbers = torch.arange(experts * rows, device="cpu").view(experts, rows, 1).repeat(1, 1, 2)
    parts = []
    for other, x in hugging_face.reverted(model, {name: numbers}).items():
        held = x[..., 0].flatten()
        first = int(held[0]) if held.numel() else 0
        expert, start = divmod(first, rows)
        is_run = x.shape[-1] == 2 and torch.equal(held, torch.arange(first, first + held.numel(), device="cpu"))
        # A depthwise convolution has one row for each channel, and no blocks.
        if is_run and rows == 1 and x.dim() == len(shape):
            parts.append(Part(other, None, first, first + held.numel()))
            continue
        if not is_run or start + held.numel() > rows:
            raise NotImplementedError(_refusal(model, name, reverted))
        parts.append(Part(other, expert, start, start + held.numel()))
    return parts


def _refusal(model: nn.Module, name: str, reverted: dict[str, torch.Tensor]) -> str:
    return (
        f"checkpoint: transformers rearranges {name} of {type(model).__name__} when it writes "
        f"{next(iter(reverted))} and others, and quantized blocks can only be split; save the model with "
        "model.save_pretrained"
    )


class Written(NamedTuple):
    """A tensor in the files.

    name: its name there. own: its names in the model; several for a tied weight, none if the model does not have it.
    """

    name: str
    own: tuple[str, ...]
    shape: tuple[int, ...]
    is_quantized: bool


def written(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], on_disk: Mapping[str, list[Part]]
) -> Iterator[Written]:
    """Yield the tensors that `export` writes for `model`."""
    # Other names of a tensor, in the model and on disk.
    first = {id(x): name for name, x in tensors.items()}
    named = ((wrappers.own_name(name), p) for name, p in model.named_parameters(remove_duplicate=False))
    others = {name: p for name, p in named if name not in tensors}
    tied: dict[str, list[str]] = {}
    for name, parts in all_parts_on_disk(model, others).items():
        tied.setdefault(first[id(others[name])], []).extend((name, *(part.name for part in parts)))
    embeddings = weights_of_embeddings(model)
    for name, x in tensors.items():
        is_quantized = name not in embeddings and is_converted(x)
        for part in on_disk[name]:
            shape = part.of(torch.empty(x.shape, device="meta")).shape
            yield Written(part.name, (name, *tied.get(name, ())), tuple(shape), is_quantized)
