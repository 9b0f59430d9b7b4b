"""Checks on ranks of models that torchtitan's trainer trains converted."""

import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import ranks
import titan_training as titan
import torch
from every_layer import counting
from helpers import converted

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, fusion_report, recommended_layers

RECIPES = {"fp8": BlockwiseFP8TrainingConfig(), "nvfp4": NVFP4TrainingConfig()}


def trains_as_by_hand(rank, family, format, **how):
    """Losses are bitwise identical to those of `quantize_` without `fuse`, and differ from those of plain weights."""

    def by_hand(model):
        return converted(model, RECIPES[format], recommended_layers(model, RECIPES[format]))

    got = titan.losses(titan.config_of(family, [(format, {})], **how))
    assert got == titan.losses(titan.config_of(family, **how), by_hand)
    plain = titan.losses(titan.config_of(family, **how))
    assert got != plain and all(abs(a - b) < 0.05 * b for a, b in zip(got, plain)), (got, plain)


def converter_gives_the_same(rank, family, format):
    from torchao_blockwise.integrations.torchtitan import BlockwiseConverter

    converted = titan.config_of(family, converters=[BlockwiseConverter.Config(format=format)])
    assert titan.losses(converted) == titan.losses(titan.config_of(family, [(format, {})]))


def shares_inputs(rank, family, options, fused):
    """Layers share inputs by default. fused: (number of fused modules, of all that look alike), in two blocks."""
    from torchao_blockwise.integrations.torchtitan import BlockwiseConverter

    config = titan.config_of(family, converters=[BlockwiseConverter.Config(options=dict(options))])
    with torch.device("meta"):
        report = fusion_report(config.model_spec.model.build()).to_dict()
    assert (report["fused"], len(report["modules"])) == fused


def compiles(rank, family, format):
    overrides = [(format, {}), ("selective_ac", {})]
    eager = titan.losses(titan.config_of(family, overrides, layers=1, selective=True))
    compiled = titan.losses(titan.config_of(family, overrides, layers=1, selective=True, compiled=True))
    assert all(abs(a - b) < 0.01 * a for a, b in zip(eager, compiled)), (eager, compiled)


def saves_gemms(rank, family, format, **how):
    """With `selective_ac`, backward recomputes no GEMM of a converted layer, and losses do not change.

    torchtitan's own policy recomputes all of them, which shows that the count includes them.
    """

    def counted(*more, selective=True):
        imports = [(format, {}), *((name, {}) for name in more)]
        config = titan.config_of(family, imports, selective=selective, steps=1, **how)
        with counting() as counter:
            losses = titan.losses(config)
        counts = counter.get_flop_counts()["Global"]
        return losses, sum(flops for op, flops in counts.items() if str(op).startswith("torchao_blockwise."))

    expected, once = counted(selective=False)
    assert counted("selective_ac") == (expected, once)
    losses, again = counted()
    # One of the three GEMMs of each converted layer is recomputed, `output`. The head is not converted.
    assert losses == expected and 3 * again == 4 * once, (once, again)


def saves_and_resumes(rank, family, format, **how):
    """A resumed run has bitwise identical losses; an unconverted run loads the checkpoint."""
    imports, how = [(format, {})], {**how, "steps": 4, "save": True}
    with ranks.shared_folder() as folder:
        first, resumed, plain = (str(folder / name) for name in ("first", "resumed", "plain"))
        straight = titan.losses(titan.config_of(family, imports, folder=first, **how))
        torch.distributed.barrier()
        if rank == 0:
            for other in (resumed, plain):
                shutil.copytree(f"{first}/checkpoint/step-2", f"{other}/checkpoint/step-2")
        torch.distributed.barrier()
        assert titan.losses(titan.config_of(family, imports, folder=resumed, **how)) == straight[2:]
        unconverted = titan.losses(titan.config_of(family, folder=plain, **how))
    assert len(unconverted) == 2 and all(abs(a - b) < 0.01 * b for a, b in zip(unconverted, straight[2:]))


def refuses(rank, family, name, options, sentence, **how):
    with pytest.raises((ValueError, TypeError), match=re.escape(sentence)):
        titan.losses(titan.config_of(family, [(name, dict(options))], **how))


def is_measured(rank):
    """bench_torchtitan.py has a row for each recipe, all of about the same loss."""
    titan.load()
    recipes = [recipe for recipe in titan.bench_torchtitan.RECIPES if not recipe.endswith(("deep_gemm", "rowwise"))]
    argv = ["--smoke", "--model", "llama3-debugmodel", "--recipes", *recipes]
    argv += ["--tokens", "64", "--seq_len", "32", "--steps", "2", "--log_freq", "1"]
    with tempfile.TemporaryDirectory() as folder:
        assert titan.bench_torchtitan.main([*argv, "--out", folder]) == 0
        rows = json.loads((Path(folder) / "torchtitan_llama3_debugmodel_cpu.json").read_text())["rows"]
    assert [row["recipe"] for row in rows] == recipes
    losses = [row["loss"] for row in rows]
    assert len(set(losses)) > 1 and max(losses) < 1.02 * min(losses)
    assert all(row["products ms"] > 0 for row in rows)


_BACKEND = "use --parallelism.spmd_backend partial_dtensor"
_CUT, _WHOLE = "2880 of 5760 rows, which cuts a block of 128", "lacks the amax of the whole weight"
# (check, arguments.., keywords as a tuple); options are tested in test_recipes.py.
CASES = {
    1: (
        [
            ("trains_as_by_hand", "llama3", "fp8", ()),
            ("trains_as_by_hand", "deepseek_v3", "fp8", ()),
            ("converter_gives_the_same", "llama3", "fp8", ()),
            ("saves_gemms", "llama3", "fp8", ()),
            ("shares_inputs", "llama3", (), (2, 2), ()),
            ("shares_inputs", "deepseek_v3", (), (4, 4), ()),
            ("shares_inputs", "deepseek_v3", (("fuse", False),), (0, 4), ()),
            ("shares_inputs", "gpt_oss", (), (0, 0), ()),
            ("refuses", "llama3", "fp8", (("min_features", 9999),), "linear layers and experts was converted", ()),
        ],
        [
            ("is_measured", ()),
            ("trains_as_by_hand", "qwen3", "fp8", ()),
            ("trains_as_by_hand", "gpt_oss", "fp8", (("layers", 1),)),
            ("trains_as_by_hand", "llama3", "nvfp4", ()),
            ("compiles", "llama3", "fp8", ()),
            ("compiles", "deepseek_v3", "fp8", ()),
            ("saves_gemms", "deepseek_v3", "fp8", ()),
            ("saves_gemms", "llama3", "nvfp4", ()),
        ],
    ),
    2: (
        [
            ("trains_as_by_hand", "llama3", "fp8", (("tp", 2),)),
            ("trains_as_by_hand", "deepseek_v3", "fp8", (("ep", 2),)),
            ("saves_and_resumes", "llama3", "fp8", ()),
            ("refuses", "llama3", "fp8", (), _BACKEND, (("tp", 2), ("backend", "spmd_types"))),
            ("refuses", "gpt_oss", "fp8", (), _CUT, (("tp", 2), ("layers", 1))),
            ("refuses", "deepseek_v3", "nvfp4", (("keep_last_blocks", 0),), _WHOLE, (("tp", 2),)),
        ],
        [
            *(("trains_as_by_hand", family, "fp8", ()) for family in ("llama3", "qwen3", "deepseek_v3")),
            *(("trains_as_by_hand", family, "fp8", (("tp", 2),)) for family in ("qwen3", "deepseek_v3")),
            ("trains_as_by_hand", "llama3", "nvfp4", (("tp", 2),)),
            ("trains_as_by_hand", "gpt_oss", "fp8", (("layers", 1),)),
            ("trains_as_by_hand", "gpt_oss", "fp8", (("ep", 2), ("layers", 1))),
            ("saves_gemms", "llama3", "fp8", ()),
            ("saves_gemms", "deepseek_v3", "fp8", (("ep", 2),)),
            *(("saves_and_resumes", family, "fp8", ()) for family in ("qwen3", "deepseek_v3")),
            ("saves_and_resumes", "gpt_oss", "fp8", (("layers", 1),)),
            ("saves_and_resumes", "deepseek_v3", "fp8", (("ep", 2),)),
        ],
    ),
}


def start(rank, count):
    ranks.set_environment(rank, count)
    return lambda name, *arguments: globals()[name](rank, *arguments[:-1], **dict(arguments[-1]))
