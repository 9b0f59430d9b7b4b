"""The recommended filter, and how it finds the layers that it leaves out: heads, routers, modulation, narrow layers."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from torchao_blockwise._names import shown
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
# A layer with a smaller dim is not faster, since GEMMs pad it to 16: a head, or a projection of coordinates. In a
# block, engines may fuse a layer with few outputs (a gate for each head) with others, so it is converted.
_LEAST_FEATURES = 16
# The ends of names of classes that read the weights of their layers without calling them.
_READERS = ("WavLMAttention", "DetrMHAttentionMap")
_LOOKED_UP = re.compile("rel_pos_([xy]_)?bias")

_GATE = re.compile(r"(.+_)?(gate|gating)")
_EXPERTS = re.compile("expert|moe", re.IGNORECASE)
# Adapters of other libraries than PEFT, whose classes are known.
_ADAPTER = re.compile("lora_(a|b|down|up)", re.IGNORECASE)
# Names and classes of modules that compute scales and shifts from the condition of a diffusion model.
_MODULATION = re.compile(r"(.+_)?(adaln|modulation)(_.+)?|((img|txt)_)?mod|time_emb_proj", re.IGNORECASE)
_ADAPTIVE_NORM = re.compile(r"\w*Ada(ptive)?(Layer|RMS|Group)?Norm\w*|\w*Norm(Zero|Continuous)\w*")


def recommended_layers(model: nn.Module, config: TrainingConfig | None = None) -> Filter:
    """Accept the linear layers and experts of `model` that benefit from low precision; the recommended `filter_fn`.

    Leaves out output heads (also those tied to an embedding) and other layers outside the blocks (embeddings of
    patches, timesteps and captions, poolers), modulation layers of diffusion models, routers and gates, the
    `weights_proj` of DeepSeek-V3.2's indexers, layers with fewer than 16 inputs, layers whose weight is used without
    calling them (the output projection of `nn.MultiheadAttention`, Mamba's `dt_proj`, WavLM's attention), LoRA adapters
    and, with an `NVFP4TrainingConfig`, the last 15 % of the blocks of each tower. Parameters [E, N, K] count as experts
    if the name or the class of their module contains "expert" or "moe"; `| experts()` adds all others.

    model: the model that is passed to `quantize_`, or a model that contains it; layers of other models are left out.
    Raises TypeError unless `model` is a module, and `config` a training config or None.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3.1; NVFP4 pretraining (arXiv 2509.25149).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"recommended_layers: model must be an nn.Module, got a {type(model).__name__}")
    if config is not None:
        check_config("recommended_layers", config)
    return recommended(model, config)


def warn_of_plain(model: nn.Module, config: TrainingConfig, chosen: Iterable[str]) -> None:
    """Warn if `quantize_(model, config)` without a filter converts layers that `recommended_layers` leaves out."""
    advice = recommended_layers(model, config)
    left_out = {fqn: advice.why_not(model.get_submodule(fqn), fqn) for fqn in chosen}
    unwanted = [f"{fqn} ({why})" for fqn, why in left_out.items() if why is not None]
    if unwanted:
        warnings.warn(
            f"quantize_: without a filter, these layers are converted, too: {shown(unwanted)}; to leave them out, "
            "convert a new model with filter_fn=recommended_layers(model, config)",
            stacklevel=3,
        )


def recommended(
    model: nn.Module, config: TrainingConfig | None, *, heads: bool = False, last_blocks: int | float | None = None
) -> Filter:
    """Return `recommended_layers` with further options.

    heads: also convert output heads and other layers outside the blocks.
    last_blocks: how many blocks to leave out; None for the config's default.
    """
    reasons: dict[nn.Module, str | None] = dict.fromkeys(model.modules())
    towers = list(block_lists(model, least=2).values())
    blocks = [block for tower in towers for block in tower]
    # If a layer has several reasons, the last one is reported.
    if last_blocks is None:
        for tower in towers if isinstance(config, NVFP4TrainingConfig) else ():
            reasons |= in_last_blocks(tower, NVFP4_SHARE_KEPT)
    elif last_blocks:
        kept = keep_last_blocks(model, last_blocks)
        reasons |= {m: kept.why_not(m, fqn) for fqn, m in model.named_modules()}
    reasons |= dict.fromkeys(_narrow(model, blocks), f"fewer than {_LEAST_FEATURES} features")
    reasons |= dict.fromkeys(_routers(model), "router or gate")
    reasons |= dict.fromkeys(_modulations(model), "computes scales and shifts of norms")
    if not heads:
        reasons |= _outside_of_blocks(model, blocks) | _output_heads(model)
    named = dict(model.named_modules())
    for fqn, module in named.items():
        path, _, name = fqn.rpartition(".")
        holder = type(named[path]).__name__
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            reasons[module] = "nn.MultiheadAttention reads its weight directly"
        elif holder.endswith(_READERS) or _LOOKED_UP.fullmatch(name):
            reasons[module] = f"{holder} reads its weight directly"
        elif _ADAPTER.fullmatch(name):
            reasons[module] = "low-rank adapter"
        elif name == "dt_proj":
            reasons[module] = "Mamba multiplies by its weight without calling the layer"
        elif name == "weights_proj" and "indexer" in fqn:
            reasons[module] = "an indexer's weights, which choose tokens"
        elif not isinstance(module, nn.Linear) and not _EXPERTS.search(f"{fqn}.{type(module).__name__}"):
            reasons[module] = "not named like experts"
    foreign = "not part of the model that recommended_layers was called with"
    chosen = is_linear() | experts()
    return Filter(
        lambda module, fqn: reasons.get(module, foreign), f"recommended_layers({type(model).__name__})", chosen.kind
    )


def _narrow(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Linear]:
    """Return the linear layers with few inputs, and those outside the blocks with few outputs."""
    in_blocks = {m for block in blocks for m in block.modules()}
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    least = {m: m.in_features if m in in_blocks else min(m.in_features, m.out_features) for m in linears}
    # A LazyLinear has 0.
    return [m for m in linears if 0 < least[m] < _LEAST_FEATURES]


def _outside_of_blocks(model: nn.Module, blocks: list[nn.Module]) -> dict[nn.Module, str]:
    """Return {layer before or after the blocks: why it is left out}: all if they are few, else the last one, a head."""
    # A block that is not in a list, such as that of a prediction of further tokens, is one by its class.
    entries = [m for block in blocks for inner in block.modules() if isinstance(inner, nn.ModuleList) for m in inner]
    kinds = {type(m) for m in blocks + entries} - {nn.Linear, nn.Sequential, nn.ModuleList, nn.ModuleDict}
    inner = {m for block in (*blocks, *(m for m in model.modules() if type(m) in kinds)) for m in block.modules()}
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) or expert_weights(m)]
    outer = [m for m in layers if m not in inner]
    if 4 * len(outer) < len(layers):
        return dict.fromkeys(outer, "outside the blocks")
    is_last = len(outer) < len(layers) and layers[-1] not in inner
    return {layers[-1]: "last layer, after the blocks"} if is_last else {}


def _modulations(model: nn.Module) -> list[nn.Module]:
    """Return the layers that compute the scales and shifts of adaptive norms, and embed their condition."""
    found = list[nn.Module]()
    for fqn, module in model.named_modules():
        if _MODULATION.fullmatch(fqn.rpartition(".")[2]) or _ADAPTIVE_NORM.fullmatch(type(module).__name__):
            # FocalNet's modulation mixes tokens with convolutions.
            inner = [*module.modules()]
            found += [] if any(isinstance(m, (nn.Conv2d, nn.ModuleList)) for m in inner) else inner
    return found


def _output_heads(model: nn.Module) -> dict[nn.Module, str]:
    """Return {output head: reason why it is one}."""
    embeddings = {id(m.weight): fqn for fqn, m in model.named_modules() if isinstance(m, nn.Embedding)}
    found: dict[nn.Module, str] = {}
    # Only PyTorch ≥ 2.13 has it. It multiplies by the weight without calling its layer.
    loss: Any = getattr(nn, "LinearCrossEntropyLoss", ())
    for fqn, module in model.named_modules():
        # Models of transformers, and parts of them, declare their head.
        get: Any = getattr(module, "get_output_embeddings", lambda: None)
        with contextlib.suppress(AttributeError, NotImplementedError):
            if isinstance(declared := get(), nn.Module):
                found |= dict.fromkeys(declared.modules(), "output head")
        if isinstance(module, nn.Linear) and is_head_name(fqn):
            found[module] = "output head"
        if isinstance(module, loss):
            found[module.linear] = "output head"
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
        # A square layer, such as those next to heads [D, H, D / H] of attention, chooses no experts.
        children = [m for m in parent.children() if isinstance(m, nn.Linear) and m.out_features != m.in_features]
        found += [m for m in children if m.out_features in numbers]
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
