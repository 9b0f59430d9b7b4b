"""Files: what is saved loads with weights_only=True in a process that only imports the package."""

from __future__ import annotations

import io
import itertools
import random
import subprocess
import sys
import zipfile

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, NVFP4, every_kind, master, mlp, replace, saved_and_loaded, weight
from torch import nn

from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")

CONFIGS = [replace(c, **k) for c in (FP8, NVFP4) for k in ({}, {"out_dtype": torch.bfloat16, "backend": "reference"})]


def test_state_dicts_load_in_another_process(tmp_path):
    expected = []
    for index, (config, master_weights) in enumerate(itertools.product(CONFIGS, (True, False))):
        model = mlp(replace(config, master_weights=master_weights))
        torch.save({"state": model.state_dict(), "weight": model[0].weight}, tmp_path / f"{index}.pt")
        kind = type(model[0].weight).__name__
        expected.append(f"Tensor {kind} {config.out_dtype} True")
    code = """
import sys, torch, torchao_blockwise
for index in range(int(sys.argv[2])):
    saved = torch.load(f"{sys.argv[1]}/{index}.pt", weights_only=True)
    state, weight = saved["state"]["0.weight"], saved["weight"]
    print(type(state).__name__, type(weight).__name__, weight.config.out_dtype, weight.requires_grad)
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path), str(len(expected))]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:-1] == expected


@every_kind
def test_tensors_in_containers_keep_their_ties(from_hp):
    q = nn.Parameter(from_hp(weight(48, 64)))
    loaded = saved_and_loaded({"a": q, "b": [q, q.detach()]})
    assert loaded["a"] is loaded["b"][0] and torch.equal(loaded["a"], q) and torch.equal(loaded["b"][1], q)


@every_kind
def test_a_slice_loads_as_it_was(from_hp):
    q = from_hp(weight(256, 256))[128:, :128]
    assert torch.equal(saved_and_loaded(q), q)


def test_tied_master_weights_keep_their_ties():
    p = master(40, 24)
    loaded = saved_and_loaded({"a": p, "b": p})
    assert loaded["a"] is loaded["b"]
    assert_bitwise_equal(loaded["a"].hp, p.hp)


def test_optimizer_states_are_plain():
    model = mlp(FP8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 64)).sum().backward()
    optimizer.step()
    state = saved_and_loaded(optimizer.state_dict())["state"]
    assert all(type(t) is torch.Tensor for entry in state.values() for t in entry.values())


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A file of `torch.save` with some bytes of its pickle flipped."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            entry = bytearray(old.read(name))
            for _ in range(rng.randrange(1, 3) if name.endswith("data.pkl") else 0):
                entry[rng.randrange(len(entry))] ^= 1 << rng.randrange(8)
            new.writestr(name, bytes(entry))
    return out.getvalue()


@pytest.mark.filterwarnings("ignore")
@every_kind
def test_damaged_files_are_refused_or_multiply(from_hp):
    """Kernels take sizes from the payload: parts that do not fit each other must not come as far as one."""
    file = io.BytesIO()
    torch.save(from_hp(weight(130, 140)), file)
    loaded = 0
    for seed in range(300):
        try:
            x = torch.load(io.BytesIO(damaged(file.getvalue(), random.Random(seed))), weights_only=True)
        except Exception:
            continue
        if type(x).__name__ in ("BlockwiseFP8Tensor", "NVFP4Tensor"):
            loaded += 1
            assert x.dequantize().shape == x.shape and x.shape[-1] in (130, 140)
            if x.fmt.is_square:
                assert F.linear(torch.ones(3, x.shape[-1]), x).shape == (3, len(x))
    assert 5 < loaded < 250
