"""Text and precision of benchmarks/train_llm.py: what is read and held out, and bf16 products in fp32."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llm_cases import CPU, MODELS, MOE, TEXT, TINY
from llm_training import data, products, training
from llm_training.data import Corpus, read_corpus
from llm_training.recipes import MERGED

pytestmark = pytest.mark.usefixtures("train_llm_alike")


def test_batches_depend_on_seed_and_step_alone(corpus):
    first = corpus.batch(0, 3, 4)
    torch.manual_seed(99)
    assert torch.equal(first, corpus.batch(0, 3, 4))
    assert not torch.equal(first, corpus.batch(0, 4, 4))
    assert not torch.equal(first, corpus.batch(1, 3, 4))
    assert first.shape == (4, TINY.seq_len + 1) and first.dtype == torch.int64


def test_no_text_comes_twice_before_all_has_come():
    corpus = Corpus.from_bytes(bytes(i // 8 for i in range(8 * 80)), "text", 8, 1)
    windows = (len(corpus.train) - 1) // 8
    seen = torch.cat([corpus.batch(0, step, 4)[:, 1:] for step in range(windows // 4)])
    assert len(seen) >= windows - 3 and len({tuple(row.tolist()) for row in seen}) == len(seen)
    across = [tuple(row.tolist()) for step in range(windows // 2) for row in corpus.batch(0, step, 4)]
    assert sorted(across[:windows]) == sorted(across[windows : 2 * windows]) != across[:windows]
    assert across[:windows] != across[windows : 2 * windows]


@pytest.mark.parametrize("size", [2 * 65, 2 * 65 + 1, 1000, 5003])
def test_held_out_text_is_cut_out_of_the_training_text(size):
    data = bytes(i % 251 for i in range(size))
    corpus = Corpus.from_bytes(data, "text", 64, 7)
    count = max(1, min(7, size // 650))
    assert corpus.held_out.shape == (count, 65)
    assert len(corpus.train) == size - count * 65
    both = torch.cat([corpus.train, corpus.held_out.flatten()]).bincount(minlength=256)
    assert torch.equal(both, torch.frombuffer(bytearray(data), dtype=torch.uint8).bincount(minlength=256))


def test_unigram_entropy_of_two_equal_bytes_is_log_2():
    corpus = Corpus.from_bytes(b"ab" * 500, "text", 63, 1)
    assert corpus.unigram_entropy == pytest.approx(math.log(2))


def test_a_folder_is_read_in_sorted_order_without_hidden_and_binary_files(tmp_path):
    (tmp_path / "b").mkdir()
    for name, content in (("b/z.txt", b"z"), ("a.txt", b"a"), (".hidden", b"h"), ("c.bin", b"\0c")):
        (tmp_path / name).write_bytes(content * 100)
    corpus = read_corpus(str(tmp_path), 16, 1)
    assert bytes(corpus.train) == b"a" * 100 + b"z" * (100 - 17)


def test_default_corpus_is_the_standard_library():
    corpus = read_corpus(None, 128, 8)
    assert corpus.name.endswith("standard library") and len(corpus.train) > 5_000_000
    assert corpus.digest == read_corpus(None, 64, 8).digest


@pytest.fixture
def installation(tmp_path, monkeypatch) -> Path:
    """A Python with two modules, a package, a copy and a file that cannot be read."""
    for name, content in (
        ("lib/b.py", b"b" * 90),
        ("lib/a.py", b"a" * 90),
        ("lib/note.txt", b"no" * 90),
        ("lib/site-packages/pkg/c.py", b"c" * 90),
        ("lib/site-packages/pkg/copy_of_a.py", b"a" * 90),
        ("lib/site-packages/pkg/secret.py", b"s" * 90),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    packages = str(tmp_path / "lib/site-packages")
    paths = {"stdlib": str(tmp_path / "lib"), "purelib": packages, "platlib": packages}
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: paths)
    open_file = Path.open

    def refuse_secrets(file: Path, *args, **kwargs):
        if file.name == "secret.py":
            raise PermissionError(13, "Permission denied")
        return open_file(file, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse_secrets)
    return tmp_path


@pytest.mark.parametrize(
    ("site_packages", "expected", "name"),
    [(False, b"a" * 90 + b"b" * (90 - 9), "library"), (True, b"a" * 90 + b"b" * 90 + b"c" * (90 - 9), "site-packages")],
    ids=("library", "all"),
)
def test_sources_of_an_installation(site_packages, expected, name, installation):
    corpus = read_corpus(None, 8, 1, site_packages=site_packages)
    assert bytes(corpus.train) == expected and corpus.name.endswith(name)


def test_text_ends_at_its_cap(installation, monkeypatch):
    monkeypatch.setattr(data, "MAX_BYTES", 100)
    assert bytes(read_corpus(None, 8, 1, site_packages=True).train) == b"a" * 90 + b"b"


# --- products in fp32, for processors that are slow in bf16 -----------------------------------------------------------


def gradients(step, operands: list[torch.Tensor], precision: str) -> list[torch.Tensor]:
    """The result of step(*operands) and its gradients, with bf16 products in `precision`."""
    operands = [x.clone().requires_grad_() for x in operands]
    with products.computed_in(precision):
        out = step(*operands)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
    return [out.detach(), *(x.grad for x in operands)]


def attend(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def experts(x, w):
    ends = torch.tensor([5, 5, 24], dtype=torch.int32)
    return torch.nn.functional.grouped_mm(x, w.mT, offs=ends)


STEPS = {
    "linear": (torch.nn.functional.linear, [(3, 24, 64), (40, 64)]),
    "linear with bias": (torch.nn.functional.linear, [(24, 64), (40, 64), (40,)]),
    "bmm": (torch.bmm, [(2, 24, 64), (2, 64, 40)]),
    "attention": (attend, [(2, 2, 24, 64)] * 3),
    "experts": (experts, [(24, 64), (3, 40, 64)]),
}


@pytest.mark.parametrize("name", STEPS)
def test_products_in_fp32_are_those_of_bf16(name):
    step, shapes = STEPS[name]
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    plain, redone = (gradients(step, operands, p) for p in ("bf16", "fp32"))
    exact = gradients(step, [x.float() for x in operands], "bf16")
    for a, b, truth in zip(plain, redone, exact, strict=True):
        assert a.dtype == b.dtype == torch.bfloat16
        # One rounding to bf16, of sums that differ in order alone.
        scale = truth.abs().max()
        assert (b - truth).abs().max() <= max((a - truth).abs().max(), 2**-8 * scale)


def multiplied(monkeypatch, **values) -> set[torch.dtype]:
    """The dtypes that a training step and an evaluation multiply in, the recipe's own products left out."""
    seen = set()
    original = products._InFp32.__torch_dispatch__

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(word in str(func) for word in ("mm", "attention")):
                seen.update(a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point())
            return func(*args, **(kwargs or {}))

    def watched(self, *args, **kwargs):
        with Watch():
            return original(self, *args, **kwargs)

    monkeypatch.setattr(products._InFp32, "__torch_dispatch__", watched)
    corpus = Corpus.from_bytes(TEXT, "text", TINY.seq_len, 1)
    training.train("bf16", replace(MOE, steps=1, warmup=0, products="fp32", **values), corpus, CPU)
    return seen


@pytest.mark.parametrize("recomputed", (False, True), ids=("saved", "recomputed"))
def test_no_product_of_a_step_is_left_in_bf16(recomputed, monkeypatch):
    assert multiplied(monkeypatch, activation_checkpointing=recomputed) == {torch.float32}


@MODELS
@pytest.mark.parametrize("recipe", MERGED)
def test_products_in_fp32_change_neither_the_first_loss_nor_what_is_saved(recipe, config, corpus):
    config = replace(config, steps=1, warmup=0)
    plain, redone = (training.train(recipe, replace(config, products=p), corpus, CPU) for p in ("bf16", "fp32"))
    assert redone.losses[0] == pytest.approx(plain.losses[0], rel=1e-3)
    assert redone.activation_bytes == plain.activation_bytes
