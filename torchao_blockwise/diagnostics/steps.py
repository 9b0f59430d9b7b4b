"""Run a training step with real or fake tensors, count its memory, and undo it."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchao_blockwise import _compat
from torchao_blockwise._compat import fakes
from torchao_blockwise._compat.modes import is_traceable_wrapper_subclass, storage_of
from torchao_blockwise.diagnostics.live_memory import LiveMemory, plain_tensors
from torchao_blockwise.tensors import QuantizedTensor

Loss = Callable[[Any], torch.Tensor]


class NothingToDifferentiate(ValueError):
    """Raised if no output of a model requires a gradient."""


class _Within(nn.Module):
    """Wraps a model so that `functional_call` keeps the replaced tensors in place during backward too.

    Backward may recompute parts of forward, so `body` runs both within this module's forward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, body: Callable[[Callable[[], Any]], Any], batch: Sequence[Any]) -> Any:
        if len(batch) == 1 and isinstance(batch[0], Mapping):
            return body(lambda: self.model(**batch[0]))
        return body(lambda: self.model(*batch))


def run_step(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    batch: Sequence[Any],
    loss: Loss | None,
    microbatches: int = 1,
) -> dict[str, int]:
    """Run forward and backward, and return their bytes by the fields of `memory.Bytes`.

    tensors: replace the model's Parameters and buffers, by name; those do not count as saved, and get gradients.
    microbatches: how often to run them; gradients are added up. The peak includes `main_grad` buffers.
    """
    weights = [x for x in tensors.values() if x.requires_grad]
    before = [*tensors.values(), *_compat.pytree.tree_leaves(list(batch))]
    own = {storage_of(x) for x in plain_tensors(before)}
    saved: dict[int, tuple[StorageWeakRef, int]] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        for part in plain_tensors(x):
            if storage_of(part) not in own:
                saved[storage_of(part)] = StorageWeakRef(part.untyped_storage()), part.untyped_storage().nbytes()
        # If a node saves its own result, saving the tensor itself would create a reference cycle with the node.
        return x.detach()

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)

    def forward_backward(forward: Callable[[], Any]) -> int:
        with hooks:
            total = _scalar(forward(), loss)
        nbytes = sum(nbytes for ref, nbytes in saved.values() if not ref.expired())
        # Edges and not weights: passing tensor subclasses would dispatch to them, and disable it for recomputation.
        edges = [torch.autograd.graph.get_gradient_edge(p) for p in weights]
        torch.autograd.backward(total, inputs=edges)
        return nbytes

    named = {f"model.{name}": x for name, x in tensors.items()}
    contexts = torch.compiler.set_stance("force_eager"), torch.enable_grad(), warnings.catch_warnings()
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        # Plain tensors are in the places of converted weights on purpose.
        warnings.filterwarnings("ignore", ".* was converted to low precision, but computes in high precision")
        memory = stack.enter_context(LiveMemory())
        for _ in range(microbatches):
            saved.clear()
            saved_bytes = torch.func.functional_call(_Within(model), named, (forward_backward, batch))
    main_grads = [x for p in weights if isinstance(x := getattr(p, "main_grad", None), torch.Tensor)]
    made = [p.grad for p in weights if p.grad is not None]
    gradient_bytes, peak = nbytes_of([*made, *main_grads]), memory.peak + nbytes_of(main_grads)
    return {"copies": memory.copies, "gradients": gradient_bytes, "saved": saved_bytes, "peak": peak}


def _scalar(out: Any, loss: Loss | None) -> torch.Tensor:
    """Return the scalar to differentiate. The model's output stays alive meanwhile, as in a training loop."""
    if loss is not None:
        return loss(out)
    own = getattr(out, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    asked = [x.sum() for x in _compat.pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not asked:
        raise NothingToDifferentiate("memory_report: no output of the model requires a gradient; pass loss=")
    total = asked[0]
    for x in asked[1:]:
        total = total + x
    return total


def nbytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors, each counted once; for subclasses those of their inner tensors."""
    return sum({storage_of(x): x.untyped_storage().nbytes() for x in plain_tensors(tensors)}.values())


def replacements(
    model: nn.Module,
    of_weight: Callable[[torch.Tensor], torch.Tensor],
    of_other: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return what replaces each Parameter and buffer of `model`, by name. of_other: for buffers and `main_grad`."""
    tensors = {name: of_other(x) for name, x in model.named_buffers()}
    for name, p in model.named_parameters():
        tensors[name] = made = nn.Parameter(of_weight(p), requires_grad=p.requires_grad)
        if isinstance(main_grad := getattr(p, "main_grad", None), torch.Tensor):
            made.main_grad = of_other(main_grad)  # type: ignore[attr-defined]  # frameworks' own attribute
    return tensors


def run_fake_step(
    model: nn.Module, batch: Sequence[Any], loss: Loss | None, is_converted: bool, microbatches: int
) -> dict[str, int]:
    """Run a step with fake tensors on the model's device, or on the CPU for a model on the meta device.

    is_converted: whether weights stay as they are; else they are plain tensors in their dtype.
    """

    def plain(x: torch.Tensor) -> torch.Tensor:
        strides = torch.empty(x.shape, device="meta").stride() if isinstance(x, QuantizedTensor) else x.stride()
        return torch.empty_strided(x.shape, strides, dtype=x.dtype, device="cpu" if x.is_meta else x.device)

    def like(x: torch.Tensor) -> torch.Tensor:
        if not is_converted or not is_traceable_wrapper_subclass(x):
            return plain(x)
        names, context = x.__tensor_flatten__()
        parts = {name: like(part) for name in names if (part := getattr(x, name)) is not None}
        return type(x).__tensor_unflatten__(parts, context, x.shape, x.stride())

    with fakes.fake_mode():
        tensors = replacements(model, like, plain)
        fake_batch = _compat.pytree.tree_map_only(torch.Tensor, plain, list(batch))
        return run_step(model, tensors, fake_batch, loss, microbatches)


# --- undoing a step ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def undone(model: nn.Module) -> Iterator[None]:
    """A context in which the model is in training mode; restores modes, random states and state of weights at exit."""
    modes = {module: module.training for module in model.modules()}
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    # The values that a quantized weight was made of, kept until a GEMM reads it or an optimizer uses them as master.
    pending = {p: p.pending_master for p in model.parameters() if isinstance(p, QuantizedTensor)}
    held = [getattr(_compat.local_of(p), "rounding_key", None) for p in model.parameters()]
    keys = {key: key.clone() for key in held if key is not None}
    try:
        with torch.random.fork_rng(devices=devices):
            for p in pending:
                p.pending_master = None
            model.train()
            yield
    finally:
        # Reference cycles of the step hold weights, which could then not be converted.
        gc.collect()
        for module, training in modes.items():
            module.training = training
        for p, master in pending.items():
            p.pending_master = master
        for key, before in keys.items():
            key.copy_(before)
