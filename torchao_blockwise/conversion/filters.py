"""Filters: which layers to convert, linear ones and experts. They compose with `&` and `|` and remember why they left
a layer out."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import math
import warnings
import weakref
from collections.abc import Callable
from fractions import Fraction
from typing import ParamSpec

from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.conversion.weights import expert_weights

_HEAD_NAMES = ("lm_head", "output", "head", "embed_out", "unembed", "score", "classifier")
# Of BERT and its like, whose head is no child of the model.
_HEAD_PATHS = ("predictions.decoder",)
_ROUTER_NAMES = ("gate", "router")

_P = ParamSpec("_P")
_reasons: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def skip_reason(module: nn.Module) -> str | None:
    """Why a filter left `module` out when it was last asked, or None."""
    return _reasons.get(module)


class Filter:
    """A predicate `(module, fqn) -> bool` for `quantize_(..., filter_fn=)`.

    `a & b` accepts what both accept, `a | b` what one of them does: `(is_linear() | experts()) & skip_fqns("*.0.*")`.
    why_not: (module, fqn) -> the reason to leave the layer out, or None.
    unused: (names of all layers) -> patterns of the filter that name none of them; quantize_ warns of these.
    kind: which modules it is asked about; nothing else is ever accepted. Without one it is asked about what the filters
        that it is combined with are for, and by itself about `nn.Linear`.
    """

    def __init__(
        self,
        why_not: Callable[[nn.Module, str], str | None],
        description: str,
        kind: Callable[[nn.Module], bool] | None = None,
        unused: Callable[[list[str]], list[str]] = lambda names: [],
    ):
        self.why_not = why_not
        self.unused = unused
        self.description = description
        self.kind = kind

    def __call__(self, module: nn.Module, fqn: str) -> bool:
        if not fqn:
            self._warn_of_nothing(module)
        if not self._is_about(module):
            return False
        reason = self.why_not(module, fqn)
        if reason is None:
            _reasons.pop(module, None)
        else:
            _reasons[module] = reason
        return reason is None

    def _warn_of_nothing(self, model: nn.Module) -> None:
        """Warn if a call of `quantize_`, which asks about the whole model first, will convert nothing of it."""
        converted, filter_fn = _compat.quantize_call()[:2]
        if filter_fn is not self or converted is not model:
            return
        if not any(self._is_about(m) and self.why_not(m, fqn) is None for fqn, m in model.named_modules()):
            layers = sum(_is_linear(m) or bool(expert_weights(m)) for m in model.modules())
            warnings.warn(
                f"quantize_: nothing of {type(model).__name__} is converted: {self} leaves out all of its {layers} "
                "linear layers and experts; print(dry_run(model, config, filter_fn)) says why",
                stacklevel=5,
            )

    def _is_about(self, module: nn.Module) -> bool:
        return _is_linear(module) if self.kind is None else self.kind(module)

    def __and__(self, other: Callable[[nn.Module, str], bool]) -> Filter:
        other = other if isinstance(other, Filter) else custom(other)
        first, second = self, other

        def why_not(module: nn.Module, fqn: str) -> str | None:
            reason = first.why_not(module, fqn)
            return second.why_not(module, fqn) if reason is None else reason

        kinds = [f.kind for f in (first, second) if f.kind is not None]
        kind = None if not kinds else lambda module: all(kind(module) for kind in kinds)
        return Filter(why_not, f"{first.description} & {second.description}", kind, _unused_of(first, second))

    __rand__ = __and__

    def __or__(self, other: Callable[[nn.Module, str], bool]) -> Filter:
        other = other if isinstance(other, Filter) else custom(other)
        both = self, other

        def why_not(module: nn.Module, fqn: str) -> str | None:
            reasons = [f.why_not(module, fqn) for f in both if f._is_about(module)]
            return None if None in reasons else reasons[0]

        kind = lambda module: any(f._is_about(module) for f in both)  # noqa: E731  # as in __and__
        return Filter(why_not, f"({self.description} | {other.description})", kind, _unused_of(*both))

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"Filter({self.description})"


def _unused_of(*filters: Filter) -> Callable[[list[str]], list[str]]:
    return lambda names: [pattern for f in filters for pattern in f.unused(names)]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def must_be_called(make: Callable[_P, Filter]) -> Callable[_P, Filter]:
    """Decorate a function that returns a filter: where it is passed as one itself, the error says how to call it."""
    name = f"{make.__name__}({', '.join(inspect.signature(make).parameters)})"

    @functools.wraps(make)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> Filter:
        # As `quantize_` calls a filter.
        if [isinstance(x, kind) for x, kind in zip(args, (nn.Module, str))] == [True, True]:
            raise TypeError(
                f"{make.__name__}: called with a module and {args[1]!r}, as filters are, but it is what returns one; "
                f"write filter_fn={name}"
            )
        return make(*args, **kwargs)

    return checked


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

    def unused(names: list[str]) -> list[str]:
        return [p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in names)]

    return Filter(why_not, f"skip_fqns{patterns!r}", unused=unused)


@must_be_called
def skip_lm_head() -> Filter:
    """Leave out the output projection, or what stands in its place.

    A layer called lm_head, output, head, embed_out, unembed, score or classifier at its last level, and BERT's
    predictions.decoder. A layer of that name inside a numbered block ("layers.3.attention.output") is not a head.
    """

    def why_not(module: nn.Module, fqn: str) -> str | None:
        *parents, name = fqn.split(".")
        in_block = any(part.isdigit() for part in parents)
        is_head = name in _HEAD_NAMES or ".".join([*parents[-1:], name]) in _HEAD_PATHS
        return "skip_lm_head: output projection" if is_head and not in_block else None

    return Filter(why_not, "skip_lm_head()")


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


def blocks_of(model: nn.Module) -> tuple[str, nn.ModuleList | None]:
    """(name, the longest ModuleList of `model`) of those that lie in no other, the last of several; or None."""
    lists = {fqn: m for fqn, m in reversed([*model.named_modules()]) if isinstance(m, nn.ModuleList)}
    inner = {id(m) for blocks in lists.values() for block in blocks for m in block.modules()}
    outer = [(fqn, m) for fqn, m in lists.items() if id(m) not in inner]
    return max(outer, key=lambda item: len(item[1]), default=("", None))


@must_be_called
def keep_last_blocks(model: nn.Module, count: int | float) -> Filter:
    """Keep the last `count` blocks of `model` in high precision; blocks are the entries of its longest ModuleList.

    Of a list inside of blocks, as one of experts, no entry is a block.

    count: an integer, or a share of the blocks as a float from 0 to 1, rounded up: 0.15 of 32 blocks are 5.
    Source: NVFP4 pretraining (arXiv 2509.25149), which keeps 15 % of the layers in bf16, the last ones.
    Raises ValueError if the model has no ModuleList, or fewer blocks than `count`.
    """
    fqn, blocks = blocks_of(model)
    if blocks is None:
        raise ValueError("keep_last_blocks: the model has no nn.ModuleList of blocks; use skip_fqns with their names")
    most = 1.0 if isinstance(count, float) else len(blocks)
    if not 0 <= count <= most:
        wanted = "a share is from 0.0 to 1.0" if isinstance(count, float) else f"{fqn!r} has {len(blocks)} blocks"
        raise ValueError(f"keep_last_blocks: {wanted}, got count={count}")
    # As written: 0.1 of 10 blocks is one of them, not two.
    number = math.ceil(Fraction(str(count)) * len(blocks)) if isinstance(count, float) else count
    where = "the last block" if number == 1 else f"the last {number} blocks"
    kept = {id(m) for block in list(blocks)[len(blocks) - number :] for m in block.modules()}

    def why_not(module: nn.Module, fqn: str) -> str | None:
        return f"keep_last_blocks: in {where}" if id(module) in kept else None

    return Filter(why_not, f"keep_last_blocks({count})")
