"""The default filter: the layers of a model that gain from low precision."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from torchao_blockwise.conversion.filters import (
    Filter,
    block_lists,
    experts,
    in_last_blocks,
    is_head_name,
    is_linear,
    keep_last_blocks,
)
from torchao_blockwise.conversion.weights import expert_weights
from torchao_blockwise.tensors import NVFP4TrainingConfig, TrainingConfig
from torchao_blockwise.tensors.config import check_config

# The fraction of the blocks, at the end, that NVFP4 pretraining (arXiv 2509.25149) keeps in high precision.
NVFP4_SHARE_KEPT = 0.15

_GATE = re.compile(r"(.+_)?(gate|gating)")
_EXPERTS = re.compile("expert|moe", re.IGNORECASE)


def recommended_layers(model: nn.Module, config: TrainingConfig | None = None) -> Filter:
    """Accept the linear layers and experts of `model` that benefit from low precision; the recommended `filter_fn`.

    Leaves out output heads (also those tied to an embedding), routers and gates, the output projection of
    `nn.MultiheadAttention` and, with an `NVFP4TrainingConfig`, the last 15 % of the blocks. Parameters [E, N, K] count
    as experts if the name or the class of their module contains "expert" or "moe"; `| experts()` adds all others.

    model: the model that is passed to `quantize_`, or a model that contains it; layers of other models are left out.
    Raises TypeError unless `config` is a training config or None.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3.1; NVFP4 pretraining (arXiv 2509.25149).
    """
    if config is not None:
        check_config("recommended_layers", config)
    return recommended(model, config)


def warn_of_plain(model: nn.Module, config: TrainingConfig, chosen: Iterable[str]) -> None:
    """Warn if `quantize_(model, config)` without a filter converts layers that `recommended_layers` leaves out."""
    advice = recommended_layers(model, config)
    left_out = {fqn: advice.why_not(model.get_submodule(fqn), fqn) for fqn in chosen}
    unwanted = [f"{fqn} ({why})" for fqn, why in left_out.items() if why is not None]
    if unwanted:
        shown = ", ".join(unwanted[:3]) + (f" and {len(unwanted) - 3} more" if len(unwanted) > 3 else "")
        warnings.warn(
            f"quantize_: without a filter, it also converts {shown}; to leave these out, convert a new model with "
            "filter_fn=recommended_layers(model, config)",
            stacklevel=3,
        )


def recommended(
    model: nn.Module, config: TrainingConfig | None, *, heads: bool = False, last_blocks: int | float | None = None
) -> Filter:
    """Return `recommended_layers` with further options.

    heads: also convert output heads. last_blocks: how many blocks to leave out; None for the config's default.
    """
    reasons: dict[nn.Module, str | None] = dict.fromkeys(model.modules())
    # If a layer has several reasons, the last one is reported.
    if last_blocks is None:
        for blocks in block_lists(model, least=2).values() if isinstance(config, NVFP4TrainingConfig) else ():
            reasons |= in_last_blocks(blocks, NVFP4_SHARE_KEPT)
    elif last_blocks:
        kept = keep_last_blocks(model, last_blocks)
        reasons |= {m: kept.why_not(m, fqn) for fqn, m in model.named_modules()}
    reasons |= dict.fromkeys(_routers(model), "router or gate")
    if not heads:
        reasons |= _output_heads(model)
    for fqn, module in model.named_modules():
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            reasons[module] = "nn.MultiheadAttention reads its weight directly"
        elif not isinstance(module, nn.Linear) and not _EXPERTS.search(f"{fqn}.{type(module).__name__}"):
            reasons[module] = "not named like experts"
    foreign = "not part of the model that recommended_layers was called with"
    chosen = is_linear() | experts()
    return Filter(
        lambda module, fqn: reasons.get(module, foreign), f"recommended_layers({type(model).__name__})", chosen.kind
    )


def _output_heads(model: nn.Module) -> dict[nn.Module, str]:
    """Return {output head: reason why it is one}."""
    embeddings = {id(m.weight): fqn for fqn, m in model.named_modules() if isinstance(m, nn.Embedding)}
    found: dict[nn.Module, str] = {}
    # If the last linear layer follows all lists of blocks, it is a head, regardless of its name.
    inner = {m for blocks in block_lists(model, least=2).values() for block in blocks for m in block.modules()}
    in_blocks = {m: m in inner for m in model.modules() if isinstance(m, nn.Linear) or expert_weights(m)}
    if any(in_blocks.values()) and not list(in_blocks.values())[-1]:
        found[list(in_blocks)[-1]] = "last layer, after the blocks"
    for fqn, module in model.named_modules():
        # Models of transformers, and parts of them, declare their head.
        get: Any = getattr(module, "get_output_embeddings", lambda: None)
        with contextlib.suppress(AttributeError, NotImplementedError):
            if isinstance(declared := get(), nn.Module):
                found |= dict.fromkeys(declared.modules(), "output head")
        if isinstance(module, nn.Linear) and is_head_name(fqn):
            found[module] = "output head"
    tied = {m: embeddings.get(id(m.weight)) for m in model.modules() if isinstance(m, nn.Linear)}
    return found | {m: f"output head, tied to {fqn}" for m, fqn in tied.items() if fqn is not None}


def _routers(model: nn.Module) -> list[nn.Module]:
    """Return linear layers inside routers, next to as many experts as they have outputs, or named like a gate.

    A router holds no experts, and its class or the last part of its name contains "router".
    A gate has few outputs, and no sibling has its shape. (In a gated MLP, gate and up have the same shape.)
    """
    counts, found = set[int](), list[nn.Module]()
    for fqn, parent in model.named_modules():
        is_router = "router" in f"{fqn.rpartition('.')[2]} {type(parent).__name__}".lower()
        if fqn and is_router and not any(_number_of_experts(name, m) for name, m in parent.named_modules()):
            found += parent.modules()
        numbers = {_number_of_experts(name, child) for name, child in (("", parent), *parent.named_children())}
        counts |= numbers
        found += [m for m in parent.children() if isinstance(m, nn.Linear) and m.out_features in numbers]
    for fqn, parent in model.named_modules():
        linears = {name: m for name, m in parent.named_children() if isinstance(m, nn.Linear)}
        shapes = [(m.out_features, m.in_features) for m in linears.values()]
        for name, module in linears.items():
            is_named = _GATE.fullmatch(name) or fqn.rpartition(".")[2] in ("gate", "gating")
            is_small = module.out_features < module.in_features or module.out_features in counts
            if is_named and is_small and shapes.count((module.out_features, module.in_features)) == 1:
                found.append(module)
    return found


def _number_of_experts(name: str, module: nn.Module) -> int:
    """Return the number of experts that `module`, called `name`, holds in weights [E, N, K] or as modules."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and "expert" in name:
        return len(module)
    return next((weight.shape[0] for weight in expert_weights(module).values()), 0)
