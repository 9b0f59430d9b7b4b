"""Text and precision of benchmarks/train_llm.py: what is read and held out, and bf16 products in fp32."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from llm_cases import TEXT, TINY
from llm_training import products
from llm_training.data import Corpus, read_corpus

pytestmark = pytest.mark.usefixtures("train_llm_alike")


def test_batches_depend_on_seed_and_step_alone():
    corpus = Corpus.from_bytes(TEXT, "text", TINY.seq_len, TINY.held_out_sequences)
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


@pytest.mark.parametrize("size", [2 * 65, 5003])
def test_held_out_text_is_cut_out_of_the_training_text(size):
    data = bytes(i % 251 for i in range(size))
    corpus = Corpus.from_bytes(data, "text", 64, 7)
    count = max(1, min(7, size // 650))
    assert corpus.held_out.shape == (count, 65)
    assert len(corpus.train) == size - count * 65
    both = torch.cat([corpus.train, corpus.held_out.flatten()]).bincount(minlength=256)
    assert torch.equal(both, torch.frombuffer(bytearray(data), dtype=torch.uint8).bincount(minlength=256))


def test_a_folder_is_read_in_sorted_order_without_hidden_and_binary_files(tmp_path):
    (tmp_path / "b").mkdir()
    for name, content in (("b/z.txt", b"z"), ("a.txt", b"a"), (".hidden", b"h"), ("c.bin", b"\0c")):
        (tmp_path / name).write_bytes(content * 100)
    corpus = read_corpus(str(tmp_path), 16, 1)
    assert bytes(corpus.train) == b"a" * 100 + b"z" * (100 - 17)


# --- products in fp32, for processors that are slow in bf16 -----------------------------------------------------------


STEPS = {
    "linear with bias": (F.linear, [(3, 24, 64), (40, 64), (40,)]),
    "bmm": (torch.bmm, [(2, 24, 64), (2, 64, 40)]),
    "attention": (partial(F.scaled_dot_product_attention, is_causal=True), [(2, 2, 24, 64)] * 3),
    "experts": (lambda x, w: F.grouped_mm(x, w.mT, offs=torch.tensor([5, 5, 24]).int()), [(24, 64), (3, 40, 64)]),
}


@pytest.mark.parametrize(("step", "shapes"), STEPS.values(), ids=STEPS)
def test_products_in_fp32_are_those_of_bf16(step, shapes):
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    results = []
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.bfloat16), ("bf16", torch.float32)):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in operands]
        with products.computed_in(precision):
            out = step(*inputs)
            out.backward(torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out))
        results.append([out.detach(), *(x.grad for x in inputs)])
    for a, b, truth in zip(*results, strict=True):
        assert a.dtype == b.dtype == torch.bfloat16
        # One rounding to bf16, of sums that differ only in order.
        scale = truth.abs().max()
        assert (b - truth).abs().max() <= max((a - truth).abs().max(), 2**-8 * scale)
