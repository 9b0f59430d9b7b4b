"""Filters that select the linear layers and experts to convert. They compose with `&` and `|`, and record the reason
for each layer that they leave out."""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._names import nearest_names
from torchao_blockwise.conversion.weights import expert_weights

# Names of output heads, outside numbered blocks: "lm_head", "heads", "score", "predictions".
_HEAD = re.compile(
    r"(?!multi)(.+_)?heads?|output|embed_out|unembed|score|(?!pre_)(.+_)?classifier|class_embed|qa_outputs|"
    r"(.+_)?predictions|pred_layer|fc_out"
)
_ROUTER_NAMES = ("gate", "router")
# The attribute of a module that holds the reason why a filter last left it out.
SKIP_REASON = "_skip_reason"

WhyNot = Callable[[nn.Module, str], str | None]
FilterFn = Callable[[nn.Module, str], bool]


@dataclass(eq=False, repr=False)
class Filter:
    """A predicate `(module, fqn) -> bool` for `quantize_(..., filter_fn=)`.

    `a & b` accepts a layer if both accept it, `a | b` if at least one does:
    `(is_linear() | experts()) & skip_fqns("*.0.*")`.
    why_not: (module, fqn) -> the reason to leave the layer out, or None.
    kind: a predicate for the modules that the filter applies to; it rejects all others. By default it applies to the
        modules of the filters that it is combined with, or to every `nn.Linear` if it is used by itself.
    patterns: `fnmatch` patterns of names; `quantize_` warns about patterns that match no layer.
    """

    why_not: WhyNot
    description: str
    kind: Callable[[nn.Module], bool] | None = None
    patterns: tuple[str, ...] = ()

    def __call__(self, module: nn.Module, fqn: str) -> bool:
        # `quantize_` passes the model itself first.
        if not fqn and _compat.quantize_call()[:2] == (module, self):
            self._warn_of_mistakes(module)
        if not self.is_about(module):
            return False
        vars(module)[SKIP_REASON] = reason = self.why_not(module, fqn)
        return reason is None

    def is_about(self, module: nn.Module) -> bool:
        return (self.kind or _is_linear)(module)

    def _warn_of_mistakes(self, model: nn.Module) -> None:
        """Warn about patterns that match no layer, and if no layer will be converted."""
        modules = dict(model.named_modules())
        names = [fqn for fqn, m in modules.items() if _is_linear(m) or expert_weights(m)]
        texts = [
            f"{pattern!r} of {self} matches no layer; the most similar names are {nearest_names(pattern, names)}"
            for pattern in self.patterns
            if not fnmatch.filter(names, pattern)
        ]
        if not any(self.is_about(m) and self.why_not(m, fqn) is None for fqn, m in modules.items()):
            texts.append(
                f"no layer of {type(model).__name__} is converted, because {self} leaves out all linear layers and "
                "experts; print(dry_run(model, config, filter_fn)) to see why"
            )
        for text in texts:
            warnings.warn(f"quantize_: {text}", stacklevel=5)

    def __and__(self, other: FilterFn) -> Filter:
        other = other if isinstance(other, Filter) else custom(other)
        first, second = self.why_not, other.why_not
        kinds = [f.kind for f in (self, other) if f.kind is not None]
        return Filter(
            lambda module, fqn: first(module, fqn) or second(module, fqn),
            f"{self.description} & {other.description}",
            (lambda module: all(kind(module) for kind in kinds)) if kinds else None,
            self.patterns + other.patterns,
        )

    __rand__ = __and__

    def __or__(self, other: FilterFn) -> Filter:
        other = other if isinstance(other, Filter) else custom(other)
        both = self, other

        def why_not(module: nn.Module, fqn: str) -> str | None:
            reasons = [f.why_not(module, fqn) for f in both if f.is_about(module)]
            return None if None in reasons else reasons[0]

        return Filter(
            why_not,
            f"({self.description} | {other.description})",
            lambda module: any(f.is_about(module) for f in both),
            self.patterns + other.patterns,
        )

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"Filter({self.description})"


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def custom(predicate: FilterFn, reason: str = "left out by a custom filter") -> Filter:
    """Make a Filter from any `(module, fqn) -> bool`; the report shows `reason` for the layers that it leaves out."""
    name = getattr(predicate, "__name__", "custom")
    return Filter(lambda module, fqn: None if predicate(module, fqn) else reason, name)


def is_linear() -> Filter:
    """Accept every `nn.Linear`."""
    return Filter(lambda module, fqn: None, "is_linear()", _is_linear)


def experts() -> Filter:
    """Accept every module that directly holds expert weights: floating-point Parameters [E, N, K].

    All expert weights of the module are converted; to convert only some of them, name them in a
    `torchao.quantization.FqnToConfig`. The module's forward pass must call `F.grouped_mm`, or `F.linear` for each
    expert. Other GEMMs with a converted weight raise an error.
    """
    return Filter(lambda module, fqn: None, "experts()", lambda module: bool(expert_weights(module)))


def skip_routers() -> Filter:
    """Leave out routers: their GEMMs are cheap, and quantization errors would send tokens to other experts.

    A linear layer is a router if it has fewer outputs than inputs, and its name or the name of its parent module ends
    in "gate" or "router". Routers that are not an `nn.Linear` (Hugging Face's) are never converted.
    """

    def why_not(module: nn.Module, fqn: str) -> str | None:
        named = any(part.endswith(_ROUTER_NAMES) for part in fqn.split(".")[-2:])
        narrows = isinstance(module, nn.Linear) and module.out_features < module.in_features
        return "skip_routers: chooses experts" if named and narrows else None

    return Filter(why_not, "skip_routers()")


def linears_and_experts() -> Filter:
    """Accept every `nn.Linear` and all experts, except routers: `(is_linear() | experts()) & skip_routers()`."""
    return (is_linear() | experts()) & skip_routers()


def skip_fqns(*patterns: str) -> Filter:
    """Leave out layers whose fully qualified name matches an `fnmatch` pattern, such as "layers.0.*" or "*.gate".

    `quantize_` warns about a pattern that matches no layer. Raises TypeError unless patterns are strings.
    """
    if not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"skip_fqns: patterns must be strings, got {patterns!r}")

    def why_not(module: nn.Module, fqn: str) -> str | None:
        hit = next((p for p in patterns if fnmatch.fnmatchcase(fqn, p)), None)
        return None if hit is None else f"skip_fqns: matches {hit!r}"

    return Filter(why_not, f"skip_fqns{patterns!r}", patterns=patterns)


def skip_lm_head() -> Filter:
    """Leave out output heads, by name.

    A head is a layer called lm_head, head, output, embed_out, unembed, score, classifier, predictions or similar, or a
    layer in a module with such a name. Layers in a numbered block ("layers.3.attention.output") are not heads.
    """
    reason = "skip_lm_head: output projection"
    return Filter(lambda module, fqn: reason if is_head_name(fqn) else None, "skip_lm_head()")


def is_head_name(fqn: str) -> bool:
    """Whether a part of the name, before the first number, is the name of an output head."""
    parts = itertools.takewhile(lambda part: not part.isdigit(), fqn.split("."))
    return any(map(_HEAD.fullmatch, parts))


def min_features(features: int) -> Filter:
    """Leave out layers with fewer than `features` in_features or out_features, which are too small to run faster.

    For experts, the smallest weight is compared. Raises ValueError for a negative number.
    """
    if features < 0:
        raise ValueError(f"min_features: features must not be negative, got {features}")

    def why_not(module: nn.Module, fqn: str) -> str | None:
        of_linear = [module.in_features, module.out_features] if isinstance(module, nn.Linear) else []
        least = min(of_linear or [size for weight in expert_weights(module).values() for size in weight.shape[1:]])
        return None if least >= features else f"min_features: {least} < {features}"

    return Filter(why_not, f"min_features({features})")


def block_lists(model: nn.Module, least: int = 1) -> dict[str, list[nn.Module]]:
    """Return {name: blocks} of the outermost lists of at least `least` blocks, one for each tower.

    Lists are ModuleLists, numbered ModuleDicts, and each `nn.Sequential` of blocks that holds no such list of blocks.
    """
    named = dict(model.named_modules())
    lists: dict[str, nn.Module] = {
        fqn: m
        for fqn, m in named.items()
        if isinstance(m, (nn.ModuleList, nn.ModuleDict)) and len(m) >= least and "expert" not in fqn
        if all(name.isdigit() for name, _ in m.named_children())
    }
    of_blocks = {m for m in lists.values() if _holds_blocks(m)}
    lists |= {
        fqn: m
        for fqn, m in named.items()
        if isinstance(m, nn.Sequential) and _holds_blocks(m) and of_blocks.isdisjoint(m.modules())
    }
    inner = {id(m) for outer in lists.values() for m in outer.modules() if m is not outer}
    return {fqn: list(m.children()) for fqn, m in lists.items() if id(m) not in inner}


def _holds_blocks(module: nn.Module) -> bool:
    """Whether all entries are blocks, with two or more linear layers each."""
    linears = [sum(isinstance(m, nn.Linear) for m in block.modules()) for block in module.children()]
    return len(linears) > 1 and min(linears) > 1


def in_last_blocks(blocks: Sequence[nn.Module], count: int | float) -> dict[nn.Module, str]:
    """Return {module: reason to leave it out} for all modules in the last `count` blocks (a number or a fraction)."""
    # Use the decimal digits of the float, so that 0.1 of 10 blocks is one block, not two.
    number = math.ceil(Fraction(str(count)) * len(blocks)) if isinstance(count, float) else count
    where = "the last block" if number == 1 else f"the last {number} blocks"
    kept = blocks[max(0, len(blocks) - number) :]
    return {m: f"keep_last_blocks: in {where}" for block in kept for m in block.modules()}


def keep_last_blocks(model: nn.Module, count: int | float) -> Filter:
    """Keep the last `count` blocks of `model` in high precision, in each of its towers: encoder and decoder, vision and
    language.

    Blocks are the entries of a ModuleList or numbered ModuleDict that has at least two and is not itself inside a block
    (unlike a list of experts). Without a list, they are the entries of an `nn.Sequential` with at least two linear
    layers each.

    count: an integer, or a fraction of the blocks as a float from 0 to 1, rounded up: 0.15 of 32 blocks is 5 blocks.
    Source: NVFP4 pretraining (arXiv 2509.25149), which keeps the last 15 % of the layers in bf16.
    Raises ValueError if the model has no blocks, or if its longest tower has fewer than `count`.
    """
    lists = block_lists(model, least=2) or block_lists(model)
    if not lists:
        raise ValueError("keep_last_blocks: the model has no nn.ModuleList of blocks; use skip_fqns with their names")
    fqn, blocks = max(reversed(lists.items()), key=lambda item: len(item[1]))
    if not 0 <= count <= (1.0 if isinstance(count, float) else len(blocks)):
        wanted = "a fraction is from 0.0 to 1.0" if isinstance(count, float) else f"{fqn!r} has {len(blocks)} blocks"
        raise ValueError(f"keep_last_blocks: {wanted}, got count={count}")
    kept = {m: reason for tower in lists.values() for m, reason in in_last_blocks(tower, count).items()}
    return Filter(lambda module, fqn: kept.get(module), f"keep_last_blocks({count})")
