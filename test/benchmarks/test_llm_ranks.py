"""train_llm.py under torchrun: ranks of FSDP2 train as one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from llm import ranks
from llm.config import UsageError
from llm_cases import TINY

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

pytest.importorskip("tqdm")
TRAIN = Path(__file__).resolve().parents[2] / "benchmarks" / "train_llm.py"


def run(count: int, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += [str(TRAIN), "--device", "cpu", "--data", str(TRAIN.parent / "llm"), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


def test_two_ranks_train_as_two_microbatches_of_one(tmp_path):
    """The same quantized bits: losses are equal, but for what the norm of gradients is summed up in another order."""
    options = "--preset", "tiny", "--grad-accumulation", "2", "--recipes", "bf16", "fp8", "nvfp4"
    contents = []
    for count in (1, 2):
        done = run(count, *options, "--out", str(tmp_path / str(count)))
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"{count} ranks of FSDP2" in done.stdout and done.stdout.count("held-out loss:") == 1
        contents.append(json.loads((tmp_path / str(count) / "train_llm.json").read_text()))
    one, two = contents
    assert (one["config"]["ranks"], two["config"]["ranks"]) == (1, 2)
    for a, b in zip(one["table"], two["table"], strict=True):
        losses = [content["curves"][a["recipe"]]["loss"] for content in contents]
        assert losses[0][0] == losses[1][0]
        if a["recipe"] == "nvfp4":
            # Few codes: a last bit of the norm moves some weights to another one; how many depends on the processor.
            assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-6)
            continue
        # After the first update, whose learning rate is the least.
        assert losses[0][1] == losses[1][1]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
        assert a["held_out_loss"] == pytest.approx(b["held_out_loss"], rel=1e-3)


def test_what_ranks_cannot_share_is_said(monkeypatch):
    monkeypatch.setattr(ranks, "count", lambda: 2)
    with pytest.raises(
        UsageError, match="2 ranks cannot share 3 microbatches a step; --grad-accumulation 2, or a mult"
    ):
        ranks.check(replace(TINY, grad_accumulation=3), saves=False)
    with pytest.raises(UsageError, match="--checkpoint-every and --resume: not with torchrun"):
        ranks.check(replace(TINY, grad_accumulation=4), saves=True)
    with pytest.raises(UsageError, match="--tied-head: not with torchrun"):
        ranks.check(replace(TINY, grad_accumulation=4, tied_head=True), saves=False)
    with pytest.raises(UsageError, match="--bf16-steps: not with torchrun; leave it out"):
        ranks.check(replace(TINY, grad_accumulation=4, bf16_steps=2), saves=False)
    ranks.check(replace(TINY, grad_accumulation=4), saves=False)
