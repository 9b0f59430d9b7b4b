"""The default filter: which layers of a model to convert where nothing else is asked for."""

from __future__ import annotations

import contextlib
import re
import warnings
import weakref
from typing import Any

from torch import nn

from torchao_blockwise.conversion.filters import Filter, experts, is_linear, keep_last_blocks, must_be_called
from torchao_blockwise.conversion.weights import expert_weights
from torchao_blockwise.tensors import NVFP4TrainingConfig, TrainingConfig
from torchao_blockwise.tensors.config import check_config

# What NVFP4 pretraining (arXiv 2509.25149) keeps of the blocks in high precision, the last ones.
NVFP4_SHARE_KEPT = 0.15

# Parts of names outside of numbered blocks: "lm_head", "heads", "score", "predictions".
_HEAD = re.compile(
    r"(?!multi)(.+_)?heads?|output|embed_out|unembed|score|classifier|(.+_)?predictions|pred_layer|fc_out"
)
_GATE = re.compile(r"(.+_)?(gate|gating)")
_EXPERTS = re.compile("expert|moe", re.IGNORECASE)


@must_be_called
def recommended_layers(model: nn.Module, config: TrainingConfig | None = None) -> Filter:
    """The linear layers and experts of `model` that gain from low precision: `quantize_(..., filter_fn=)` by default.

    Left out are output heads (those that are tied to an embedding, too), routers and gates, the projection inside of
    `nn.MultiheadAttention`, and with an `NVFP4TrainingConfig` the last 15 % of the blocks. Parameters [E, N, K] are
    experts where the name or the class of their module says "expert" or "moe"; `| experts()` adds all others.

    model: the model that `quantize_` is called with, or one that contains it; layers of others are left out.
    Raises TypeError unless `config` is a training config or None.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3.1; NVFP4 pretraining (arXiv 2509.25149).
    """
    if config is not None:
        check_config("recommended_layers", config)
    return recommended(model, config)


def warn_of_plain(model: nn.Module, config: TrainingConfig, targets: list[tuple[str, nn.Module]]) -> None:
    """Warn if `quantize_(model, config)` without a filter converts layers that `recommended_layers` leaves out."""
    advice = recommended_layers(model, config)
    unwanted = [f"{fqn} ({why})" for fqn, m in targets if (why := advice.why_not(m, fqn)) is not None]
    if unwanted:
        shown = ", ".join(unwanted[:3]) + (f" and {len(unwanted) - 3} more" if len(unwanted) > 3 else "")
        warnings.warn(
            f"quantize_: without a filter it converts {shown}; to leave these out, convert a fresh model with "
            "filter_fn=recommended_layers(model, config)",
            stacklevel=3,
        )


def recommended(
    model: nn.Module, config: TrainingConfig | None, *, heads: bool = False, last_blocks: int | float | None = None
) -> Filter:
    """`recommended_layers`; heads: output heads too. last_blocks: how many to leave out, None what `config` says."""
    reasons = _reasons(model, heads)
    kept = _keep_blocks(model, config, last_blocks)
    foreign = "not part of the model that recommended_layers was called with"

    def why_not(module: nn.Module, fqn: str) -> str | None:
        return reasons.get(module, foreign) or kept.why_not(module, fqn)

    chosen = is_linear() | experts()
    return Filter(why_not, f"recommended_layers({type(model).__name__})", chosen._is_about)


def _keep_blocks(model: nn.Module, config: TrainingConfig | None, count: int | float | None) -> Filter:
    """Leave out the last `count` blocks of `model`; None: in NVFP4 the last 15 % of every list of blocks."""
    kept = Filter(lambda module, fqn: None, "keep_last_blocks(0)")
    if count is None:
        for blocks in _block_lists(model) if isinstance(config, NVFP4TrainingConfig) else ():
            kept &= keep_last_blocks(blocks, NVFP4_SHARE_KEPT)
        return kept
    # `model.layers` of torchtitan is a ModuleDict.
    layers: Any = getattr(model, "layers", None)
    held = nn.ModuleList(layers.values()) if isinstance(layers, nn.ModuleDict) else model
    return keep_last_blocks(held, count) if count else kept


def _block_lists(model: nn.Module) -> list[nn.ModuleList]:
    """The outermost lists of blocks of `model`, one of each tower; without any, each `nn.Sequential` of blocks."""
    lists = {fqn: m for fqn, m in model.named_modules() if _is_list(m) and "expert" not in fqn}
    if not lists:
        lists = {fqn: m for fqn, m in model.named_modules() if isinstance(m, nn.Sequential) and _holds_blocks(m)}
    inner = {id(m) for outer in lists.values() for m in outer.modules() if m is not outer}
    return [nn.ModuleList(m.children()) for m in lists.values() if id(m) not in inner]


def _is_list(module: nn.Module) -> bool:
    """Whether it is a list of two or more, by number."""
    if isinstance(module, nn.ModuleDict):
        return len(module) > 1 and all(name.isdigit() for name in module)
    return isinstance(module, nn.ModuleList) and len(module) > 1


def _holds_blocks(module: nn.Sequential) -> bool:
    """Whether its entries are blocks, of two or more linear layers each."""
    linears = [sum(isinstance(m, nn.Linear) for m in block.modules()) for block in module]
    return len(linears) > 1 and min(linears) > 1


def _reasons(model: nn.Module, heads: bool) -> weakref.WeakKeyDictionary[nn.Module, str | None]:
    """By layer of `model`: why it is left out, None where it is converted."""
    outputs = {} if heads else _output_heads(model)
    routers = _routers(model)
    reasons: weakref.WeakKeyDictionary[nn.Module, str | None] = weakref.WeakKeyDictionary()
    for fqn, module in model.named_modules():
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            reasons[module] = "used by nn.MultiheadAttention itself"
        elif not isinstance(module, nn.Linear) and not _EXPERTS.search(f"{fqn}.{type(module).__name__}"):
            reasons[module] = "not named as experts are"
        else:
            reasons[module] = outputs.get(module) or routers.get(module)
    return reasons


def _output_heads(model: nn.Module) -> dict[nn.Module, str]:
    embeddings = {id(m.weight): fqn for fqn, m in model.named_modules() if isinstance(m, nn.Embedding)}
    linears = {fqn: m for fqn, m in model.named_modules() if isinstance(m, nn.Linear)}
    named: list[nn.Module] = [m for fqn, m in linears.items() if any(map(_HEAD.fullmatch, _before_numbers(fqn)))]
    named += [m for output in _declared_outputs(model) for m in output.modules()]
    last = dict.fromkeys(_last_behind_blocks(model), "last layer, behind the blocks")
    tied = {
        m: f"output head, tied to {embeddings[id(m.weight)]}" for m in linears.values() if id(m.weight) in embeddings
    }
    return last | dict.fromkeys(named, "output head") | tied


def _before_numbers(fqn: str) -> list[str]:
    """The parts of a name as far as the first number: what is in a block has the same names as heads have."""
    parts = fqn.split(".")
    return parts[: next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))]


def _declared_outputs(model: nn.Module) -> list[nn.Module]:
    """The modules that `get_output_embeddings` of transformers' models returns, for each part of `model`."""
    found = []
    for module in model.modules():
        get: Any = getattr(module, "get_output_embeddings", lambda: None)
        with contextlib.suppress(AttributeError, NotImplementedError):
            found.append(get())
    return [output for output in found if isinstance(output, nn.Module)]


def _last_behind_blocks(model: nn.Module) -> list[nn.Module]:
    """The last linear layer where it follows all lists of blocks and lies in none of them: a head by any name."""
    blocks = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict)) and len(m) > 1]
    inner = {id(m) for block in blocks for m in block.modules()}
    weighted = [m for m in model.modules() if isinstance(m, nn.Linear) or expert_weights(m)]
    of_blocks = [i for i, m in enumerate(weighted) if id(m) in inner]
    return weighted[-1:] if of_blocks and of_blocks[-1] < len(weighted) - 1 else []


def _routers(model: nn.Module) -> dict[nn.Module, str]:
    """Linear layers inside of routers, next to as many experts as they have outputs, or with the name of a gate.

    A gate has few outputs, and no layer of its shape next to it: gate and up of a gated MLP have the same shape.
    """
    counts, found = set[int](), []
    for fqn, parent in model.named_modules():
        if fqn and _is_router(fqn, parent):
            found += parent.modules()
        for name, child in (("", parent), *parent.named_children()):
            number = _number_of_experts(name, child)
            counts.add(number)
            found += [m for m in parent.children() if isinstance(m, nn.Linear) and m.out_features == number]
    for fqn, parent in model.named_modules():
        linears = {name: m for name, m in parent.named_children() if isinstance(m, nn.Linear)}
        shapes = [(m.out_features, m.in_features) for m in linears.values()]
        for name, module in linears.items():
            is_named = _GATE.fullmatch(name) or fqn.rpartition(".")[2] in ("gate", "gating")
            is_small = module.out_features < module.in_features or module.out_features in counts
            if is_named and is_small and shapes.count((module.out_features, module.in_features)) == 1:
                found.append(module)
    return dict.fromkeys(found, "router or gate")


def _is_router(fqn: str, module: nn.Module) -> bool:
    """Whether the last part of its name or its class says so, and it holds no experts itself."""
    is_named = "router" in f"{fqn.rpartition('.')[2]} {type(module).__name__}".lower()
    return is_named and not any(_number_of_experts(name, m) for name, m in module.named_modules())


def _number_of_experts(name: str, module: nn.Module) -> int:
    """How many experts `module`, of that name, holds in weights [E, N, K] or as modules; 0 for none."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and "expert" in name:
        return len(module)
    return next((weight.shape[0] for weight in expert_weights(module).values()), 0)
