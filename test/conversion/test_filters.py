"""Filters: what they accept, how they compose, and the reasons that they leave."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import pytest
from expecttest import assert_expected_inline
from helpers import FP8, Tied
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import (
    MasterWeightTensor,
    dry_run,
    is_linear,
    keep_last_blocks,
    min_features,
    skip_fqns,
    skip_lm_head,
)
from torchao_blockwise.conversion.filters import Filter, custom, skip_reason

LINEAR = nn.Linear(4, 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 64)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(64, 96), "down": nn.Linear(96, 64)}) for _ in range(3)
        )
        self.heads = nn.ModuleList([nn.Linear(64, 4)])
        self.lm_head = nn.Linear(64, 8)


def accepted(filter_fn, model=None) -> list[str]:
    model = Model() if model is None else model
    return [fqn for fqn, m in model.named_modules() if filter_fn(m, fqn)]


ALL = [f"layers.{i}.{name}" for i in range(3) for name in ("up", "down")] + ["heads.0", "lm_head"]


def test_is_linear():
    assert accepted(is_linear()) == ALL
    assert not is_linear()(nn.Conv1d(1, 1, 1), "conv") and is_linear()(LINEAR, "")


def test_nothing_but_linears_is_asked_about():
    asked = []
    f = Filter(lambda m, fqn: asked.append(type(m)), "spy")
    assert not f(nn.Embedding(2, 2), "e") and f(LINEAR, "l") and asked == [nn.Linear]


@pytest.mark.parametrize(
    ("patterns", "left"),
    [(("layers.0.*",), ALL[2:]), (("*.up", "lm_head"), ["layers.0.down", "layers.1.down", "layers.2.down", "heads.0"]),
     ((), ALL), (("*",), []), (("layers",), ALL), (("LM_HEAD",), ALL)],
    ids=str,
)  # fmt: skip
def test_skip_fqns(patterns, left):
    assert accepted(skip_fqns(*patterns)) == left


@pytest.mark.parametrize(
    ("fqn", "is_head"),
    [
        ("lm_head", True),
        ("model.lm_head", True),
        ("output", True),
        ("head", True),
        ("embed_out", True),
        ("unembed", True),
        ("layers.3.attention.output", False),
        ("layers.0.head", False),
        ("my_lm_head", False),
        ("lm_head.proj", False),
        ("decoder.output", True),
        ("score", True),
        ("classifier", True),
        ("cls.predictions.decoder", True),
        ("decoder", False),
        ("layers.1.classifier", False),
        ("", False),
    ],
)
def test_skip_lm_head(fqn, is_head):
    assert skip_lm_head()(LINEAR, fqn) is not is_head


def test_min_features():
    assert accepted(min_features(64)) == ALL[:6]
    assert min_features(4)(LINEAR, "") and not min_features(5)(LINEAR, "") and min_features(0)(LINEAR, "")


def test_lists_inside_of_blocks_are_no_blocks():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))

    model = nn.Module()
    model.layers = nn.ModuleList(Block() for _ in range(3))
    got = [fqn for fqn, m in model.named_modules() if keep_last_blocks(model, 1)(m, fqn)]
    assert got == [f"layers.{i}.experts.{j}" for i in range(2) for j in range(9)]


def test_keep_last_blocks():
    model = Model()
    assert accepted(keep_last_blocks(model, 1), model) == [*ALL[:4], *ALL[6:]]
    assert accepted(keep_last_blocks(model, 3), model) == ALL[6:]
    assert accepted(keep_last_blocks(model, 0), model) == ALL


@pytest.mark.parametrize(
    ("share", "blocks", "kept"),
    ((0.0, 3, 0), (0.15, 3, 1), (0.34, 3, 2), (1.0, 3, 3), (0.15, 32, 5), (0.15, 12, 2), (0.15, 20, 3), (0.1, 10, 1)),
)
def test_keep_a_share_of_the_blocks(share, blocks, kept):
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))
    names = [f"layers.{i}" for i in range(blocks)]
    assert accepted(keep_last_blocks(model, share), model) == names[: blocks - kept]


WRONG = {
    "skip_fqns": (lambda: skip_fqns("a", 3), TypeError, r"skip_fqns: patterns must be strings, got \('a', 3\)"),
    "skip_fqns_list": (lambda: skip_fqns(["a"]), TypeError, "patterns must be strings"),
    "min_features": (lambda: min_features(-1), ValueError, "features must not be negative, got -1"),
    "no_blocks": (
        lambda: keep_last_blocks(LINEAR, 1),
        ValueError,
        "no nn.ModuleList of blocks; use skip_fqns with their names",
    ),
    "too_many": (lambda: keep_last_blocks(Model(), 4), ValueError, "'layers' has 3 blocks, got count=4"),
    "share": (lambda: keep_last_blocks(Model(), 1.5), ValueError, r"a share is from 0.0 to 1.0, got count=1.5"),
    "negative": (lambda: keep_last_blocks(Model(), -1), ValueError, "'layers' has 3 blocks, got count=-1"),
}


@pytest.mark.parametrize(("make", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_filters_compose_with_filters_and_functions_on_either_side():
    def only_up(module, fqn):
        return fqn.endswith("up")

    up = [fqn for fqn in ALL if fqn.endswith("up")]
    for f in (only_up & is_linear(), is_linear() & only_up, is_linear() & custom(only_up)):
        assert accepted(f) == up
    assert accepted((lambda m, fqn: "1" in fqn) & skip_fqns("*.down") & only_up) == ["layers.1.up"]
    assert accepted(skip_lm_head() & min_features(64) & skip_fqns("layers.0.*")) == ALL[2:6]


def test_composed_filters_print():
    assert_expected_inline(
        repr(skip_lm_head() & min_features(64) & skip_fqns("a", "b") & custom(lambda m, f: True) & is_linear()),
        """Filter(skip_lm_head() & min_features(64) & skip_fqns('a', 'b') & <lambda> & is_linear())""",
    )


def test_reasons_are_the_first_and_the_latest():
    model = Model()
    f = (
        skip_lm_head()
        & min_features(64)
        & keep_last_blocks(model, 1)
        & skip_fqns("*.0.up")
        & (lambda m, fqn: "1" not in fqn)
    )
    accepted(f, model)
    reasons = {fqn: skip_reason(m) for fqn, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert_expected_inline(
        "\n".join(f"{fqn}: {reason}" for fqn, reason in reasons.items()),
        """\
layers.0.up: skip_fqns: matches '*.0.up'
layers.0.down: None
layers.1.up: left out by a custom filter
layers.1.down: left out by a custom filter
layers.2.up: keep_last_blocks: in the last block
layers.2.down: keep_last_blocks: in the last block
heads.0: min_features: 4 < 64
lm_head: skip_lm_head: output projection""",
    )
    accepted(is_linear(), model)
    assert all(skip_reason(m) is None for m in model.modules())


def test_quantize_converts_what_the_filter_accepts():
    model = Tied()
    quantize_(model, FP8, keep_last_blocks(model, 1) & skip_lm_head())
    converted = [fqn for fqn, m in model.named_modules() if isinstance(getattr(m, "weight", None), MasterWeightTensor)]
    assert converted == ["blocks.0"]


def test_a_filter_works_on_a_root_that_is_a_layer():
    layer = nn.Linear(64, 64)
    quantize_(layer, FP8, min_features(128))
    assert dry_run(layer, FP8, min_features(128)).layers[0].reason == "min_features: 64 < 128"
    quantize_(layer, FP8, min_features(64))
    assert isinstance(layer.weight, MasterWeightTensor)


@pytest.mark.parametrize("combine", (lambda f: f, lambda f: is_linear() & f, lambda f: f & (lambda m, fqn: True)))
def test_quantize_warns_of_patterns_that_match_nothing(combine):
    model = nn.Sequential(OrderedDict(block=nn.Sequential(OrderedDict(up=nn.Linear(64, 64), down=nn.Linear(64, 64)))))
    said = (
        r"quantize_: 'block.uo' of Filter\(.*\) matches no layer and leaves nothing out; the nearest names are block.up"
    )
    with pytest.warns(UserWarning, match=said) as seen:
        quantize_(model, FP8, filter_fn=combine(skip_fqns("block.uo", "*.down")))
    assert len([w for w in seen if "matches no layer" in str(w.message)]) == 1


@pytest.mark.parametrize("root", (True, False), ids=("root", "inside"))
def test_quantize_warns_where_it_converts_nothing(root):
    layer = nn.Linear(64, 64)
    model = layer if root else nn.ModuleDict({"up": layer})
    name = "Linear" if root else "ModuleDict"
    said = rf"nothing of {name} is converted: Filter\(min_features\(128\)\) leaves out all of its 1 linear layers"
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


def test_patterns_that_match_are_no_reason_to_warn():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*matches no layer.*")
        quantize_(model, FP8, filter_fn=skip_fqns("1"))
