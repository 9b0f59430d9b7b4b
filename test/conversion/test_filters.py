"""Filters: what they accept, how they compose, the reasons that they leave, and what `quantize_` warns of."""

import warnings

import pytest
from expecttest import assert_expected_inline
from expert_modules import EXPERTS, LINEARS, Experts, Model, accepted
from helpers import FP8
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import (
    MasterWeightTensor,
    dry_run,
    experts,
    is_linear,
    keep_last_blocks,
    linears_and_experts,
    min_features,
    skip_fqns,
    skip_lm_head,
    skip_routers,
)
from torchao_blockwise.conversion.filters import SKIP_REASON, custom

ATTENTION = ["layers.0.attention", "layers.1.attention"]
HEAD = ["lm_head"]


def skip_reason(module):
    return vars(module).get(SKIP_REASON)


def is_head(module, fqn):
    return fqn == "lm_head"


# {what: (a filter, the layers that it accepts)}; patterns match whole names, case included.
ACCEPTED = {
    "linear": (lambda m: is_linear(), LINEARS),
    "experts": (lambda m: experts(), EXPERTS),
    "or": (lambda m: is_linear() | experts(), LINEARS + EXPERTS),
    "both": (lambda m: linears_and_experts(), EXPERTS + ATTENTION + HEAD),
    "no head": (lambda m: linears_and_experts() & skip_lm_head(), EXPERTS + ATTENTION),
    "and skip": (lambda m: experts() & skip_fqns("layers.0.*"), EXPERTS[1:]),
    "skip and": (lambda m: skip_fqns("layers.0.*") & experts(), EXPERTS[1:]),
    "skip only": (lambda m: skip_fqns("layers.0.*"), LINEARS[2:]),
    "two patterns": (lambda m: skip_fqns("*.router", "lm_head"), ATTENTION),
    "no patterns": (lambda m: skip_fqns(), LINEARS),
    "all names": (lambda m: skip_fqns("*"), []),
    "no names": (lambda m: skip_fqns("layers", "LM_HEAD"), LINEARS),
    "each its own": (lambda m: (experts() & keep_last_blocks(m, 1)) | (is_linear() & skip_routers()),
                     [EXPERTS[0], *ATTENTION, *HEAD]),
    "or skip": (lambda m: experts() | skip_routers(), EXPERTS + ATTENTION + HEAD),
    "nothing is both": (lambda m: experts() & is_linear(), []),
    "too small": (lambda m: (experts() | is_linear()) & min_features(65), []),
    "large enough": (lambda m: (experts() | is_linear()) & min_features(64), EXPERTS + ATTENTION),
    "or function": (lambda m: experts() | is_head, EXPERTS + HEAD),
    "function or": (lambda m: is_head | experts(), EXPERTS + HEAD),
    "and function": (lambda m: is_linear() & is_head, HEAD),
    "function and": (lambda m: is_head & is_linear(), HEAD),
    "custom": (lambda m: is_linear() & custom(is_head), HEAD),
    "last block": (lambda m: keep_last_blocks(m, 1), [*LINEARS[:2], *HEAD]),
    "no block": (lambda m: keep_last_blocks(m, 0), LINEARS),
}  # fmt: skip


@pytest.mark.parametrize(("make", "names"), ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_accepted(make, names):
    model = Model()
    assert sorted(accepted(make(model), model)) == sorted(names)


def test_other_modules_are_not_asked_about():
    asked = []
    filter_fn = is_linear() & (lambda m, fqn: asked.append(type(m)) is None)
    assert not filter_fn(nn.Embedding(2, 2), "e") and filter_fn(nn.Linear(4, 8), "") and asked == [nn.Linear]
    for module in (nn.Conv1d(4, 4, 3), nn.Embedding(4, 4), nn.LazyLinear(4), nn.LazyConv1d(4, 3)):
        assert not experts()(module, "x")
    converted = Experts()
    quantize_(converted, FP8, experts())
    assert experts()(converted, "")


HEADS = ("lm_head", "model.lm_head", "output", "head", "embed_out", "unembed", "decoder.output", "score", "classifier",
         "cls.predictions.decoder", "lm_head.proj", "heads.0", "mtp_head.proj", "classifier.2",
         "qa_outputs", "class_labels_classifier", "decoder.class_embed")  # fmt: skip
NO_HEADS = ("layers.3.attention.output", "layers.0.head", "decoder", "layers.1.classifier", "multihead_attn",
            "pre_classifier", "")  # fmt: skip
ROUTERS = ("layers.0.router", "layers.0.mlp.gate", "moe.router.gate", "router.proj", "mlp.shared_expert_gate")
NO_ROUTERS = ("mlp.gate_proj", "router.attention.out", "lm_head")


@pytest.mark.parametrize(
    ("make", "left_out", "others"),
    ((skip_lm_head, HEADS, NO_HEADS), (skip_routers, ROUTERS, NO_ROUTERS)),
    ids=("heads", "routers"),
)
def test_left_out_by_name(make, left_out, others):
    layer = nn.Linear(64, 8)
    assert {fqn for fqn in left_out + others if not make()(layer, fqn)} == set(left_out)
    assert skip_routers()(nn.Linear(64, 128), "mlp.gate"), "it does not narrow"


class Stack(nn.Module):
    def __init__(self, blocks: int, inner: int = 0):
        super().__init__()
        block = lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(inner)) if inner else nn.Linear(8, 8)  # noqa: E731
        self.layers = nn.ModuleList(block() for _ in range(blocks))


@pytest.mark.parametrize(
    ("count", "blocks", "kept"),
    ((0, 3, 0), (1, 3, 1), (3, 3, 3), (0.0, 3, 0), (0.15, 3, 1), (0.34, 3, 2), (1.0, 3, 3), (0.15, 32, 5),
     (0.15, 20, 3), (0.1, 10, 1)),
)  # fmt: skip
def test_keep_last_blocks(count, blocks, kept):
    """Entries of a list inside a block, such as experts, are not blocks."""
    for inner in (0, 9):
        model = Stack(blocks, inner)
        converted = {name.split(".")[1] for name in accepted(keep_last_blocks(model, count), model)}
        assert converted == {str(i) for i in range(blocks - kept)}


WRONG = {
    "skip_fqns": (lambda: skip_fqns("a", 3), TypeError, r"skip_fqns: patterns must be strings, got \('a', 3\)"),
    "a list": (lambda: skip_fqns(["a"]), TypeError, "patterns must be strings"),
    "min_features": (lambda: min_features(-1), ValueError, "features must not be negative, got -1"),
    "no blocks": (lambda: keep_last_blocks(nn.Linear(4, 8), 1), ValueError, "no nn.ModuleList .*; use skip_fqns with"),
    "too many": (lambda: keep_last_blocks(Stack(3), 4), ValueError, "'layers' has 3 blocks, got count=4"),
    "share": (lambda: keep_last_blocks(Stack(3), 1.5), ValueError, r"a fraction is from 0.0 to 1.0, got count=1.5"),
    "negative": (lambda: keep_last_blocks(Stack(3), -1), ValueError, "'layers' has 3 blocks, got count=-1"),
}


@pytest.mark.parametrize(("make", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_reasons_are_the_first_and_the_latest():
    model = Model()
    filter_fn = (
        linears_and_experts()
        & skip_lm_head()
        & keep_last_blocks(model, 1)
        & min_features(65)
        & skip_fqns("a", "b")
        & (lambda m, fqn: True)
    )
    assert_expected_inline(
        repr(filter_fn),
        """Filter((is_linear() | experts()) & skip_routers() & skip_lm_head() & keep_last_blocks(1) & min_features(65) & skip_fqns('a', 'b') & <lambda>)""",  # noqa: E501
    )
    accepted(filter_fn, model)
    reasons = {fqn: skip_reason(m) for fqn, m in model.named_modules() if skip_reason(m)}
    assert_expected_inline(
        "\n".join(f"{fqn}: {reason}" for fqn, reason in reasons.items()),
        """\
layers.0.attention: min_features: 64 < 65
layers.0.router: skip_routers: chooses experts
layers.0.experts: min_features: 64 < 65
layers.1.attention: keep_last_blocks: in the last block
layers.1.router: skip_routers: chooses experts
layers.1.experts: keep_last_blocks: in the last block
lm_head: skip_lm_head: output projection""",
    )
    accepted(skip_fqns("lm_head"), model)
    assert skip_reason(model.lm_head) == "skip_fqns: matches 'lm_head'"
    accepted(is_linear() | experts(), model)
    assert all(skip_reason(m) is None for m in model.modules())


def test_a_filter_works_on_a_root_that_is_a_layer():
    layer = nn.Linear(64, 64)
    with pytest.warns(UserWarning, match="no layer of Linear is converted"):
        quantize_(layer, FP8, min_features(128))
    assert dry_run(layer, FP8, min_features(128)).layers[0].reason == "min_features: 64 < 128"
    quantize_(layer, FP8, min_features(64))
    assert isinstance(layer.weight, MasterWeightTensor)


@pytest.mark.parametrize("combine", (lambda f: f, lambda f: is_linear() & f, lambda f: f & (lambda m, fqn: True)))
def test_quantize_warns_of_patterns_that_match_nothing(combine):
    model = nn.ModuleDict({"block": nn.ModuleDict({"up": nn.Linear(64, 64), "down": nn.Linear(64, 64)})})
    said = r"quantize_: 'block.uo' of Filter\(.*\) matches no layer; the most similar names are block.up"
    with pytest.warns(UserWarning, match=said) as seen:
        quantize_(model, FP8, filter_fn=combine(skip_fqns("block.uo", "*.down")))
    assert len(seen) == 1


def test_quantize_warns_where_it_converts_nothing():
    model = nn.ModuleDict({"up": nn.Linear(64, 64)})
    said = r"no layer of ModuleDict is converted, because Filter\(min_features\(128\)\) leaves out all linear layers"
    with pytest.warns(UserWarning, match=said) as seen:
        quantize_(model, FP8, filter_fn=min_features(128))
    assert len(seen) == 1 and seen[0].filename == __file__


def test_what_converts_something_is_no_reason_to_warn():
    """Nor is a filter that is asked outside of `quantize_`, or as a part of another one."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dry_run(model, FP8, min_features(1000))
        quantize_(model, FP8, filter_fn=min_features(128) | skip_fqns("1"))
    assert isinstance(model[0].weight, MasterWeightTensor)
