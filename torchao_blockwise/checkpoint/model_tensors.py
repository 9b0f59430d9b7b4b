"""The tensors of a model: their names on disk, the part that each name stands for, and which are quantized there.

transformers keeps experts in one Parameter [E, 2I, H] but writes one tensor for each expert and projection. To find the
mapping, a tensor of row numbers is passed through its own conversion, which shows where each row goes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._compat import hugging_face
from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard

DIMS_OF_EXPERTS = 3
# The parts that torch.compile and checkpoint_wrapper add to names of Parameters.
_ADDED = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)(\.|$)")
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
            f"{op}: {type(model).__name__} has PEFT adapters that are not merged, which files cannot contain; export "
            "the model that model.merge_and_unload() returns, and load files before PEFT adds adapters"
        )
    model = _wrapped_in(model)
    kinds: Any = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    inner = next((m for m in model.modules() if isinstance(m, kinds)), model)
    return inner if len(tensors_of(inner)) == len(tensors_of(model)) else model


def check_read_as_stored(op: str, model: nn.Module) -> None:
    """Raise ValueError if a layer computes its weight from a converted Parameter, whose bytes no GEMM reads."""
    for fqn, module in model.named_modules():
        is_derived = isinstance(module, nn.Linear) and "weight" not in _compat.parameters_of(module)
        if is_derived and any(map(is_converted, module.parameters())):
            raise ValueError(
                f"{op}: {fqn} is parametrized or pruned, so files would not contain its effective weight; first call "
                "torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.prune.remove"
            )


def _wrapped_in(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile, checkpoint_wrapper and DistributedDataParallel, or `model` itself."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return _wrapped_in(model.module)
    inner = next((m for name, m in model.named_children() if not _own_name(name)), None)
    return model if inner is None else _wrapped_in(inner)


def _own_name(name: str) -> str:
    """Return the name of a Parameter without the parts that wrappers add."""
    return _ADDED.sub("", name)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return Parameters and persistent buffers by name, each once. Names do not include wrapping modules."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    for path, module in model.named_modules():
        found |= {f"{path}.{name}".lstrip("."): x for name, x in _compat.saved_buffers_of(module).items()}
    return {_own_name(name): x for name, x in found.items()}


def format_of(x: torch.Tensor) -> BlockFormat | None:
    """Return the format in which a converted weight is quantized, None for other tensors."""
    return getattr(_compat.local_of(x), "fmt", None)


def is_converted(x: torch.Tensor) -> bool:
    return format_of(x) is not None


def has_power_of_2_scales(x: torch.Tensor) -> bool:
    """Whether a converted weight is quantized with power-of-two scales."""
    x = _compat.local_of(x)
    return bool(
        getattr(x.config if isinstance(x, (MasterWeightTensor, QuantizedShard)) else x, "power_of_2_scales", False)
    )


class Part(NamedTuple):
    """A tensor in the files: a part of a tensor of the model that has a separate name on disk.

    name: its name on disk. shape: its shape.
    own: its names in the model; several for a tied weight, none if the model does not have it.
    place: the index of the part in the model's tensor: () for all of it, (expert, rows), or (rows,).
    is_transposed: whether files hold the last two dims in reverse order.
    """

    name: str
    shape: tuple[int, ...] = ()
    own: tuple[str, ...] = ()
    is_quantized: bool = False
    place: tuple[Any, ...] = ()
    is_transposed: bool = False

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return this part of `x` as files hold it, a view."""
        return x[self.place].mT if self.is_transposed else x[self.place]

    def transposed(self) -> Part:
        """Return the same part, with the last two dims in files exchanged."""
        *outer, rows, columns = self.shape
        return self._replace(shape=(*outer, columns, rows), is_transposed=not self.is_transposed)

    def in_blocks(self, block: int) -> Part:
        """Return the same part of a tensor that has one row for each `block` rows, such as block scales."""
        if not self.place:
            return self
        *expert, rows = self.place
        return self._replace(place=(*expert, slice(rows.start // block, -(-rows.stop // block))))

    def cuts(self, block: int) -> bool:
        """Whether this part begins inside a block of `block` rows, which it then shares with another part."""
        return bool(self.place) and self.place[-1].start % block != 0


def parts_on_disk(model: nn.Module) -> dict[str, list[Part]]:
    """Return the parts of each tensor of `model` that `export` writes, by the tensor's name.

    Raises NotImplementedError if transformers does more than rename and split a tensor.
    """
    tensors, embeddings = tensors_of(model), {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    named = ((_own_name(name), p) for name, p in model.named_parameters(remove_duplicate=False))
    others = {name: p for name, p in named if name not in tensors}
    tied: dict[int, list[str]] = {}
    for name, parts in _places(model, others).items():
        tied.setdefault(id(others[name]), []).extend((name, *(part.name for part in parts)))
    found = {}
    for name, parts in _places(model, tensors).items():
        x = tensors[name]
        own, is_quantized = (name, *tied.get(id(x), ())), is_converted(x) and id(x) not in embeddings
        shapes = [tuple(part.of(torch.empty(x.shape, device="meta")).shape) for part in parts]
        found[name] = [Part(p.name, shape, own, is_quantized, p.place) for p, shape in zip(parts, shapes)]
    for name in hugging_face.transposed_in_files(model, tensors):
        # NVFP4 packs two elements of a row into a byte.
        if not getattr(format_of(tensors[name]), "has_global_scale", False):
            found[name] = [part.transposed() for part in found[name]]
    return found


def _places(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Part]]:
    """Return the parts of these tensors of `model`, with their names and places.

    A conversion by transformers visits all modules, so one conversion serves all tensors that are not split. A tensor
    that comes back unchanged was at most renamed. An equal shape would not suffice, because rows may be permuted.
    """
    asked = {name: torch.empty(x.shape, device="meta") for name, x in tensors.items()}
    renamed = {id(x): name for name, x in hugging_face.reverted(model, asked).items()}
    return {
        name: [Part(renamed[id(x)])] if id(x) in renamed else _split(model, name, x.shape) for name, x in asked.items()
    }


def _split(model: nn.Module, name: str, shape: torch.Size) -> list[Part]:
    """Return the parts into which transformers splits a tensor of experts, with their names and places."""
    refusal = NotImplementedError(
        f"checkpoint: transformers rearranges {name} of {type(model).__name__} between model and files, and quantized "
        "blocks can only be split; use the model's save_pretrained and from_pretrained"
    )
    if len(shape) != DIMS_OF_EXPERTS:
        raise refusal
    experts, rows, _ = shape
    # Two columns, because transformers 5.17 drops a dim of one.
    numbers = torch.arange(experts * rows, device="cpu").view(experts, rows, 1).repeat(1, 1, 2)
    parts = []
    for other, x in hugging_face.reverted(model, {name: numbers}).items():
        held = x[..., 0].flatten()
        first = int(held[0]) if held.numel() else 0
        run = slice(first, first + held.numel())
        expert, start = divmod(first, rows)
        end = start + held.numel()
        # A depthwise convolution has one row for each channel, and no blocks.
        is_channels = rows == 1 and x.dim() == len(shape)
        is_run = x.shape[-1] == 2 and torch.equal(held, torch.arange(run.start, run.stop, device="cpu"))
        if not is_run or not (is_channels or end <= rows):
            raise refusal
        parts.append(Part(other, place=(run,) if is_channels else (expert, slice(start, end))))
    return parts
