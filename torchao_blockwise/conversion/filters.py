"""Filters: which layers to convert, linear ones and experts. They compose with `&` and `|` and remember why they left
a layer out."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import itertools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeGuard, TypeVar

from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.conversion.weights import expert_weights

# Parts of names outside of numbered blocks: "lm_head", "heads", "score", "predictions".
_HEAD = re.compile(
    r"(?!multi)(.+_)?heads?|output|embed_out|unembed|score|classifier|(.+_)?predictions|pred_layer|fc_out"
)
_ROUTER_NAMES = ("gate", "router")
# The attribute of a module that has the reason.
_SKIP_REASON = "_skip_reason"

WhyNot = Callable[[nn.Module, str], str | None]


def skip_reason(module: nn.Module) -> str | None:
    """The reason why a filter left `module` out when it was last asked, or None."""
    return vars(module).get(_SKIP_REASON)


def forget_skip_reason(module: nn.Module) -> None:
    vars(module).pop(_SKIP_REASON, None)


class Filter:
    """A predicate `(module, fqn) -> bool` for `quantize_(..., filter_fn=)`.

    `a & b` accepts what both accept, `a | b` what one of them does: `(is_linear() | experts()) & skip_fqns("*.0.*")`.
    why_not: (module, fqn) -> the reason to leave the layer out, or None.
    kind: which modules it is asked about; nothing else is ever accepted. Without one it is asked about what the filters
        that it is combined with are for, and by itself about `nn.Linear`.
    patterns: of names, as `fnmatch` has them; quantize_ warns of those that match no layer.
    """

    def __init__(
        self,
        why_not: WhyNot,
        description: str,
        kind: Callable[[nn.Module], bool] | None = None,
        patterns: Sequence[str] = (),
    ):
        self.why_not = why_not
        self.description = description
        self.kind = kind
        self.patterns = tuple(patterns)

    def __call__(self, module: nn.Module, fqn: str) -> bool:
        if not fqn:
            self._warn_of_nothing(module)
        if not self.is_about(module):
            return False
        reason = self.why_not(module, fqn)
        if reason is None:
            forget_skip_reason(module)
        else:
            vars(module)[_SKIP_REASON] = reason
        return reason is None

    def is_about(self, module: nn.Module) -> bool:
        return (self.kind or _is_linear)(module)

    def _warn_of_nothing(self, model: nn.Module) -> None:
        """Warn if a call of `quantize_`, which asks about the whole model first, will convert nothing of it."""
        converted, filter_fn = _compat.quantize_call()[:2]
        if filter_fn is not self or converted is not model:
            return
        if not any(self.is_about(m) and self.why_not(m, fqn) is None for fqn, m in model.named_modules()):
            warnings.warn(
                f"quantize_: nothing of {type(model).__name__} is converted: {self} leaves out all linear layers and "
                "experts; print(dry_run(model, config, filter_fn)) says why",
                stacklevel=5,
            )

    def __and__(self, other: Callable[[nn.Module, str], bool]) -> Filter:
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

    def __or__(self, other: Callable[[nn.Module, str], bool]) -> Filter:
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


_MakesFilter = TypeVar("_MakesFilter", bound=Callable[..., Filter])


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def must_be_called(make: _MakesFilter) -> _MakesFilter:
    """Decorate a function that returns a filter: the error names the call where the function itself is passed."""

    @functools.wraps(make)
    def checked(*args: object, **kwargs: object) -> Filter:
        # As `quantize_` calls a filter.
        if len(args) == 2 and isinstance(args[0], nn.Module) and isinstance(args[1], str):
            call = f"{make.__name__}({', '.join(inspect.signature(make).parameters)})"
            raise TypeError(
                f"{make.__name__}: called with a module and {args[1]!r}, as filters are, but it is what returns one; "
                f"write filter_fn={call}"
            )
        return make(*args, **kwargs)

    return checked  # type: ignore[return-value]  # it has the signature of `make`


def custom(predicate: Callable[[nn.Module, str], bool], reason: str = "left out by a custom filter") -> Filter:
    """A Filter from any `(module, fqn) -> bool`; `reason` is what the report says of the layers that it leaves out."""
    name = getattr(predicate, "__name__", "custom")
    return Filter(lambda module, fqn: None if predicate(module, fqn) else reason, name)


@must_be_called
def is_linear() -> Filter:
    """Every `nn.Linear`."""
    return Filter(lambda module, fqn: None, "is_linear()", _is_linear)


@must_be_called
def experts() -> Filter:
    """Every module that holds weights of experts itself: float Parameters [E, N, K], as mixtures of experts have them.

    All of them are converted; name single ones in a `torchao.quantization.FqnToConfig`. The module's forward pass must
    use them by `F.grouped_mm`, or by `F.linear` an expert; other products raise where they run.
    """
    return Filter(lambda module, fqn: None, "experts()", lambda module: bool(expert_weights(module)))


@must_be_called
def skip_routers() -> Filter:
    """Leave out the layers that choose experts: their error sends tokens to others, and they cost next to nothing.

    A linear layer is a router if it has fewer outputs than inputs, and its name ends in "gate" or "router", or that of
    the module it lies in does. Routers that are no `nn.Linear` (Hugging Face's) are never converted.
    """

    def why_not(module: nn.Module, fqn: str) -> str | None:
        named = any(part.endswith(_ROUTER_NAMES) for part in fqn.split(".")[-2:])
        narrows = isinstance(module, nn.Linear) and module.out_features < module.in_features
        return "skip_routers: chooses experts" if named and narrows else None

    return Filter(why_not, "skip_routers()")


@must_be_called
def linears_and_experts() -> Filter:
    """Every `nn.Linear` and all experts, but no router: `(is_linear() | experts()) & skip_routers()`."""
    return (is_linear() | experts()) & skip_routers()


@must_be_called
def skip_fqns(*patterns: str) -> Filter:
    """Leave out layers whose fully qualified name matches a pattern, as `fnmatch` does: "layers.0.*", "*.gate".

    `quantize_` warns of a pattern that matches no layer. Raises TypeError unless patterns are strings.
    """
    if not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"skip_fqns: patterns must be strings, got {patterns!r}")

    def why_not(module: nn.Module, fqn: str) -> str | None:
        hit = next((p for p in patterns if fnmatch.fnmatchcase(fqn, p)), None)
        return None if hit is None else f"skip_fqns: matches {hit!r}"

    return Filter(why_not, f"skip_fqns{patterns!r}", patterns=patterns)


@must_be_called
def skip_lm_head() -> Filter:
    """Leave out the output projection, or what stands in its place, by its name.

    A layer called lm_head, head, output, embed_out, unembed, score, classifier, predictions or the like, or one that
    lies in a module of that name. In a numbered block ("layers.3.attention.output") such a layer is not a head.
    """
    reason = "skip_lm_head: output projection"
    return Filter(lambda module, fqn: reason if is_head_name(fqn) else None, "skip_lm_head()")


def is_head_name(fqn: str) -> bool:
    """Whether a part of the name is that of an output head, before the first number."""
    parts = itertools.takewhile(lambda part: not part.isdigit(), fqn.split("."))
    return any(map(_HEAD.fullmatch, parts))


@must_be_called
def min_features(features: int) -> Filter:
    """Leave out layers whose in_features or out_features are fewer than `features`: too small to gain.

    Of experts, those of the smallest of their weights.

    Raises ValueError for a negative number.
    """
    if features < 0:
        raise ValueError(f"min_features: features must not be negative, got {features}")

    def why_not(module: nn.Module, fqn: str) -> str | None:
        if isinstance(module, nn.Linear):
            least = min(module.in_features, module.out_features)
        else:
            least = min(min(weight.shape[1:]) for weight in expert_weights(module).values())
        return None if least >= features else f"min_features: {least} < {features}"

    return Filter(why_not, f"min_features({features})")


def block_lists(model: nn.Module, least: int = 1) -> dict[str, list[nn.Module]]:
    """The outermost lists of `least` or more blocks, one of each tower, by name.

    These are ModuleLists and numbered ModuleDicts. Without any, each `nn.Sequential` of blocks is one.
    """
    lists: dict[str, nn.Module] = {
        fqn: m for fqn, m in model.named_modules() if _is_list(m) and len(m) >= least and "expert" not in fqn
    }
    if not lists:
        lists = {fqn: m for fqn, m in model.named_modules() if isinstance(m, nn.Sequential) and _holds_blocks(m)}
    inner = {id(m) for outer in lists.values() for m in outer.modules() if m is not outer}
    return {fqn: list(m.children()) for fqn, m in lists.items() if id(m) not in inner}


def _is_list(module: nn.Module) -> TypeGuard[nn.ModuleList | nn.ModuleDict]:
    is_numbered = isinstance(module, nn.ModuleDict) and all(name.isdigit() for name in module)
    return is_numbered or isinstance(module, nn.ModuleList)


def _holds_blocks(module: nn.Sequential) -> bool:
    """Whether its entries are blocks, of two or more linear layers each."""
    linears = [sum(isinstance(m, nn.Linear) for m in block.modules()) for block in module]
    return len(linears) > 1 and min(linears) > 1


def in_last_blocks(blocks: Sequence[nn.Module], count: int | float) -> dict[nn.Module, str]:
    """The modules of the last `count` blocks, or of a share of them, and the reason to leave these out."""
    # As written: 0.1 of 10 blocks is one of them, not two.
    number = math.ceil(Fraction(str(count)) * len(blocks)) if isinstance(count, float) else count
    where = "the last block" if number == 1 else f"the last {number} blocks"
    kept = blocks[len(blocks) - number :]
    return {m: f"keep_last_blocks: in {where}" for block in kept for m in block.modules()}


@must_be_called
def keep_last_blocks(model: nn.Module, count: int | float) -> Filter:
    """Keep the last `count` blocks of `model` in high precision: entries of its longest ModuleList, or the like.

    Entries of a list inside of a block, such as experts, are no blocks. Without a list, entries of an `nn.Sequential`
    with two or more linear layers each are blocks.

    count: an integer, or a share of the blocks as a float from 0 to 1, rounded up: 0.15 of 32 blocks are 5.
    Source: NVFP4 pretraining (arXiv 2509.25149), which keeps 15 % of the layers in bf16, the last ones.
    Raises ValueError if the model has no blocks, or fewer than `count`.
    """
    lists = block_lists(model)
    if not lists:
        raise ValueError("keep_last_blocks: the model has no nn.ModuleList of blocks; use skip_fqns with their names")
    fqn, blocks = max(reversed(lists.items()), key=lambda item: len(item[1]))
    if not 0 <= count <= (1.0 if isinstance(count, float) else len(blocks)):
        wanted = "a share is from 0.0 to 1.0" if isinstance(count, float) else f"{fqn!r} has {len(blocks)} blocks"
        raise ValueError(f"keep_last_blocks: {wanted}, got count={count}")
    kept = in_last_blocks(blocks, count)
    return Filter(lambda module, fqn: kept.get(module), f"keep_last_blocks({count})")
