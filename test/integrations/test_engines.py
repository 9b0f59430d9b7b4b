"""Senders to inference engines, to what stands for these with the interface that their releases have.

Neither is installed. What the stand-ins are asked is what vLLM 0.33 (distributed/weight_transfer) and SGLang 0.5.23
(srt/entrypoints, srt/managers) ask of a trainer, and what they refuse.
"""

import functools
import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass

import pytest
import torch
from helpers import FP8, NVFP4, assert_same_tensors, mlp

from torchao_blockwise import checkpoint
from torchao_blockwise.integrations import sglang, vllm
from torchao_blockwise.testing import assert_bitwise_equal


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource(ABC):
    """Of vLLM 0.33: metadata is read again and again, and a class whose metadata is not cached is refused."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if not isinstance(cls.__dict__.get("metadata"), functools.cached_property):
            raise TypeError(f"{cls.__name__}.metadata must be a functools.cached_property")

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def iter_full(self):
        raise NotImplementedError


def sent_to_a_worker(source) -> dict[str, torch.Tensor]:
    """As vLLM packs tensors for its workers, which cut the bytes by the metadata."""
    metas, pairs = source.metadata, list(source.iter_full())
    assert [ParamMeta(name, x.dtype, tuple(x.shape)) for name, x in pairs] == metas
    packed = torch.cat([x.contiguous().view(torch.uint8).view(-1) for _, x in pairs])
    sizes = [x.nbytes for _, x in pairs]
    # Where tensors before it have an odd number of bytes vLLM could not view floats: a copy is none of its steps.
    parts = (part.clone().view(meta.dtype).view(meta.shape) for part, meta in zip(packed.split(sizes), metas))
    return {meta.name: part for meta, part in zip(metas, parts)}


@pytest.fixture
def with_vllm(monkeypatch):
    path = vllm._BASE.split(".")
    for i in range(len(path)):
        monkeypatch.setitem(sys.modules, ".".join(path[: i + 1]), types.ModuleType(path[i]))
    sys.modules[vllm._BASE].__dict__.update(WeightSource=WeightSource, ParamMeta=ParamMeta)


@pytest.mark.parametrize(
    ("config", "format"),
    ((FP8, "fp8_block"), (NVFP4, "nvfp4_compressed_tensors"), (NVFP4, "nvfp4_modelopt")),
    ids=("fp8_block", "nvfp4_compressed_tensors", "nvfp4_modelopt"),
)
def test_a_source_of_vllm_gives_the_weights_of_the_moment(config, format, with_vllm):
    model = mlp(config, features=(208, 304, 144))
    model.register_buffer("without_dims", torch.tensor(3))
    source = vllm.weight_source(model, format)
    assert isinstance(source, WeightSource)
    for _ in range(2):
        expected = dict(checkpoint.quantized_weights(model, format))
        got = sent_to_a_worker(source)
        assert got.keys() == expected.keys()
        for name, x in expected.items():
            # vLLM packs no tensor without dims, and takes one element of one dim for it.
            x = x.detach().reshape(x.shape or (1,))
            assert_bitwise_equal(got[name].view(torch.uint8), x.view(torch.uint8), name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-2)


class Stream:
    def __init__(self):
        self.done = set()

    def wait_stream(self, other):
        self.done |= other.done


def test_work_for_vllm_is_in_order_on_all_its_streams(with_vllm, monkeypatch):
    """Its packed transfer goes on with a source on the next of its streams, whenever a buffer is full."""
    of_training, *streams = (Stream() for _ in range(3))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: of_training)
    source = vllm.weight_source(mlp(FP8, features=(208, 304, 144)))
    pairs = iter(source.iter_full())
    of_training.done.add("steps before")
    expected = {"steps before"}
    for current in (streams[0], streams[0], streams[1], streams[0], of_training, streams[1]):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda current=current: current)
        name, _ = next(pairs)
        assert current.done == expected
        current.done.add(name)
        expected.add(name)


def test_without_vllm_a_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"install vllm, or pass checkpoint\.quantized_weights"):
        vllm.weight_source(mlp(FP8))


class EngineOfBefore:
    """Keeps what it is given; refuses a bucket by its number with this answer, or raises it."""

    def __init__(self, refused: int | None = None, answer=(False, "no such weight")):
        self.calls, self.weights, self.refused, self.answer = [], {}, refused, answer

    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
        if len(self.calls) == self.refused:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer
        self.calls.append((len(named_tensors), flush_cache))
        self.weights |= {name: tensor.clone() for name, tensor in named_tensors}
        return True, "Success"


class Engine(EngineOfBefore):
    """Of SGLang 0.5.23, which takes weights only between begin and end; its HTTP adapter answers with a dict."""

    is_open, updates = False, 0

    def begin_weight_update(self, selector="all"):
        was_open, self.is_open = self.is_open, True
        return not was_open, "a weight-update session is already open; call end_weight_update() first"

    def end_weight_update(self):
        was_open, self.is_open, self.updates = self.is_open, False, self.updates + 1
        return {"success": was_open, "message": "no weight-update session is open; call begin_weight_update() first"}

    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
        if not self.is_open:
            return False, "must run between begin_weight_update() and end_weight_update()"
        return super().update_weights_from_tensor(named_tensors, load_format, flush_cache)


@pytest.fixture
def model():
    return mlp(FP8, features=(200, 300, 130))


@pytest.mark.parametrize("kind", (Engine, EngineOfBefore), ids=("sglang_0.5.23", "before"))
@pytest.mark.parametrize("bucket_bytes", (1, 70_000, 2**30))
def test_sglang_is_sent_buckets(bucket_bytes, kind, model):
    """All tensors once, no bucket above its size unless one tensor is; the last one flushes."""
    engine = kind()
    sent = sglang.update_weights(engine, model, bucket_bytes=bucket_bytes)
    expected = dict(checkpoint.quantized_weights(model))
    assert_same_tensors(engine.weights, expected)
    # A rank without an engine gathers, and sends nothing.
    assert sent == sglang.update_weights(None, model) == sum(x.nbytes for x in expected.values())
    counts, flushes = zip(*engine.calls)
    assert flushes == (*[False] * (len(flushes) - 1), True)
    assert counts == {1: (1,) * 6, 70_000: (3, 3), 2**30: (6,)}[bucket_bytes]


@pytest.mark.parametrize(
    "answer",
    ((False, "no such weight"), {"success": False, "message": "no such weight"}, ConnectionError("no such weight")),
    ids=("engine", "http", "raises"),
)
def test_what_sglang_refuses_is_said(answer, model, monkeypatch):
    """When all is gathered, since other ranks go on; the update is ended, so that the next one may begin."""
    engine, gathered, weights = Engine(refused=1, answer=answer), [], checkpoint.quantized_weights
    monkeypatch.setattr(
        sglang, "quantized_weights", lambda *args: (gathered.append(pair) or pair for pair in weights(*args))
    )
    with pytest.raises(RuntimeError, match=r"refused .* \(.*no such weight\); its weights are now a mix of two"):
        sglang.update_weights(engine, model, bucket_bytes=1)
    assert len(gathered) == 6 and len(engine.calls) == 1 and not engine.is_open
    engine.refused = None
    sglang.update_weights(engine, model, bucket_bytes=1)
    assert engine.updates == 2


def test_an_update_that_another_has_begun_is_said(model):
    engine = Engine()
    engine.begin_weight_update()
    with pytest.raises(RuntimeError, match=r"refused begin_weight_update \(.*already open.*\); no weight was sent"):
        sglang.update_weights(engine, model)
    assert not engine.weights and engine.is_open
