"""Senders to inference engines, to what stands for these with their documented interface: neither is installed."""

from __future__ import annotations

import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass

import pytest
import torch
from helpers import FP8, NVFP4, mlp

from torchao_blockwise import checkpoint
from torchao_blockwise.integrations import sglang, vllm
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource(ABC):
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    @abstractmethod
    def __iter__(self): ...


@pytest.fixture
def with_vllm(monkeypatch):
    path = vllm._BASE.split(".")
    for i in range(len(path)):
        monkeypatch.setitem(sys.modules, ".".join(path[: i + 1]), types.ModuleType(path[i]))
    sys.modules[vllm._BASE].__dict__.update(WeightSource=WeightSource, ParamMeta=ParamMeta)


@pytest.mark.parametrize(("config", "format"), ((FP8, "fp8_block"), (NVFP4, "nvfp4_compressed_tensors")), ids=str)
def test_a_source_of_vllm_gives_the_weights_of_the_moment(config, format, with_vllm):
    model = mlp(config, features=(208, 304, 144))
    source = vllm.weight_source(model, format)
    assert isinstance(source, WeightSource)
    for _ in range(2):
        expected = dict(checkpoint.quantized_weights(model, format))
        got = list(source)
        assert [ParamMeta(name, x.dtype, tuple(x.shape)) for name, x in got] == source.metadata()
        for name, x in got:
            assert_bitwise_equal(x.detach().view(torch.uint8), expected[name].detach().view(torch.uint8), name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-2)


def test_without_vllm_a_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"install vllm, or hand checkpoint\.quantized_weights"):
        vllm.weight_source(mlp(FP8))


class Engine:
    """Keeps what it is given; refuses a bucket by its number."""

    def __init__(self, refused: int | None = None):
        self.calls, self.weights, self.refused = [], {}, refused

    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
        if len(self.calls) == self.refused:
            return False, "no such weight"
        self.calls.append((len(named_tensors), flush_cache))
        self.weights |= {name: tensor.clone() for name, tensor in named_tensors}
        return True, "Success"


@pytest.mark.parametrize("bucket_bytes", (1, 70_000, 2**30))
def test_sglang_is_sent_buckets(bucket_bytes):
    """All tensors once, no bucket above its size unless one tensor is; the last one flushes."""
    model, engine = mlp(FP8, features=(200, 300, 130)), Engine()
    sent = sglang.update_weights(engine, model, bucket_bytes=bucket_bytes)
    expected = dict(checkpoint.quantized_weights(model))
    assert engine.weights.keys() == expected.keys()
    for name, x in expected.items():
        assert_bitwise_equal(engine.weights[name].view(torch.uint8), x.detach().view(torch.uint8), name)
    assert sent == sum(x.nbytes for x in expected.values())
    counts, flushes = zip(*engine.calls)
    assert flushes == (*[False] * (len(flushes) - 1), True)
    assert counts == {1: (1,) * 6, 70_000: (3, 3), 2**30: (6,)}[bucket_bytes]


def test_what_sglang_refuses_is_said():
    with pytest.raises(RuntimeError, match=r"refused .* \(no such weight\); its weights are now of two steps"):
        sglang.update_weights(Engine(refused=1), mlp(FP8, features=(200, 300, 130)), bucket_bytes=1)


def test_ranks_without_an_engine_gather_and_send_nothing():
    model = mlp(FP8, features=(200, 300, 130))
    assert sglang.update_weights(None, model) == sum(x.nbytes for _, x in checkpoint.quantized_weights(model))
