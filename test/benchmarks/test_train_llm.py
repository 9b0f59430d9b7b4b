"""benchmarks/train_llm.py: same start and data for every recipe, exact resumption, clear refusals, a full report."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import train_llm
from llm import checkpoint, data, memory, plot, products, report, training
from llm.config import PRESETS, RunConfig, UsageError, difference, override
from llm.data import Corpus, read_corpus
from llm.model import Router, next_byte_loss
from llm.recipes import RECIPES, convert

CPU = torch.device("cpu")
TINY = PRESETS["tiny"]
# The smallest mixture of experts that all of this runs on.
MOE = replace(TINY, experts=4, top_k=2, shared_experts=1, hidden=128, balance_rate=0.05)
MODELS = pytest.mark.parametrize("config", (TINY, MOE), ids=("dense", "moe"))
TEXT = "".join(f"def f{i}(x):\n    return x + {i * i}\n" for i in range(400)).encode()


@pytest.fixture(autouse=True)
def eager_on_one_thread(one_thread, monkeypatch):
    # The eager reference is far faster than Triton's interpreter, and agrees with it bit for bit.
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch):
    # What is expected must not depend on how fast the tester's machine multiplies bf16.
    monkeypatch.setattr(products, "_fp32_speedup", lambda: 1.0)


@pytest.fixture
def corpus() -> Corpus:
    return Corpus.from_bytes(TEXT, "text", TINY.seq_len, TINY.held_out_sequences)


@pytest.fixture
def text_file(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


def refusal(capsys, *argv: object) -> str:
    """The one line that the command refuses these arguments with."""
    assert train_llm.main([str(a) for a in ("--device", "cpu", "--preset", "tiny", *argv)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("train_llm: ")
    return captured.err


def convert_model(recipe: str, config: RunConfig) -> torch.nn.Module:
    model = training.build(config, CPU)
    convert(model, recipe)
    return model


class Interrupted(Exception):
    pass


def interrupt_at(monkeypatch, step: int) -> None:
    def train_step(model, optimizer, config, corpus, device, at):
        if at == step:
            raise Interrupted
        return original(model, optimizer, config, corpus, device, at)

    original = training.train_step
    monkeypatch.setattr(training, "train_step", train_step)


# Data


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
    read = data._read

    def refuse_secrets(file: Path) -> bytes:
        if file.name == "secret.py":
            raise PermissionError(13, "Permission denied")
        return read(file)

    monkeypatch.setattr(data, "_read", refuse_secrets)
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


@pytest.mark.parametrize(("device", "everything"), [("cpu", False), ("cuda", True)])
def test_a_gpu_reads_all_sources(device, everything, monkeypatch, tmp_path):
    asked = []

    def read(*args, site_packages):
        asked.append(site_packages)
        raise UsageError("enough")

    monkeypatch.setattr(train_llm, "read_corpus", read)
    monkeypatch.setattr(train_llm, "pick_device", lambda name: torch.device(device))
    monkeypatch.setattr(train_llm, "require_memory", lambda config, device: None)
    assert train_llm.main(["--preset", "tiny", "--out", str(tmp_path)]) == 2
    assert asked == [everything]


# Products in fp32, for processors that are slow in bf16


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
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_in_fp32_change_neither_the_first_loss_nor_what_is_saved(recipe, config, corpus):
    config = replace(config, steps=1, warmup=0)
    plain, redone = (training.train(recipe, replace(config, products=p), corpus, CPU) for p in ("bf16", "fp32"))
    assert redone.losses[0] == pytest.approx(plain.losses[0], rel=1e-3)
    assert redone.activation_bytes == plain.activation_bytes


@pytest.mark.parametrize(("speedup", "picked"), [(0.2, "bf16"), (1.9, "bf16"), (2.0, "fp32"), (20.0, "fp32")])
def test_a_processor_that_is_slow_in_bf16_multiplies_in_fp32(speedup, picked, monkeypatch):
    monkeypatch.setattr(products, "_fp32_speedup", lambda: speedup)
    args = train_llm.make_parser().parse_args(["--preset", "tiny"])
    assert train_llm.config_from(args, CPU).products == picked
    args = train_llm.make_parser().parse_args(["--preset", "tiny", "--products", "bf16"])
    assert train_llm.config_from(args, CPU).products == "bf16"
    # Neither a GPU nor a compiled run is probed.
    monkeypatch.setattr(products, "pick", lambda: pytest.fail("probed"))
    args = train_llm.make_parser().parse_args(["--preset", "tiny"])
    assert train_llm.config_from(args, torch.device("cuda")).products == "bf16"
    args = train_llm.make_parser().parse_args(["--preset", "tiny", "--compile"])
    assert train_llm.config_from(args, CPU).products == "bf16"


def test_the_probe_compares_the_two_ways_on_a_clock(monkeypatch):
    monkeypatch.undo()
    now = 0.0

    def product(a, b):
        nonlocal now
        now += {torch.bfloat16: 3.0, torch.float32: 1.0}[a.dtype]
        return a

    class Clock(products.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return product(*args) if func is torch.ops.aten.mm.default else func(*args, **(kwargs or {}))

    monkeypatch.setattr(products.time, "perf_counter", lambda: now)
    with Clock():
        assert products._fp32_speedup() == 3.0


# Training


@MODELS
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_starts_from_the_same_weights(recipe, config):
    expected, got = (convert_model(r, config).state_dict() for r in ("bf16", recipe))
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_every_recipe_sees_the_same_data(corpus, monkeypatch):
    seen = {}
    for recipe in RECIPES:
        batches = seen[recipe] = []
        original = Corpus.batch

        def batch(self, *args, batches=batches, original=original):
            batches.append(original(self, *args))
            return batches[-1]

        with monkeypatch.context() as m:
            m.setattr(Corpus, "batch", batch)
            training.train(recipe, replace(TINY, steps=2, warmup=1), corpus, CPU)
    assert all(torch.equal(a, b) for r in RECIPES for a, b in zip(seen["bf16"], seen[r], strict=True))


@MODELS
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_repeats_the_uninterrupted_one_bitwise(recipe, config, corpus, tmp_path, monkeypatch):
    whole = training.train(recipe, config, corpus, CPU)
    with monkeypatch.context() as m, pytest.raises(Interrupted):
        interrupt_at(m, 5)
        training.train(recipe, config, corpus, CPU, tmp_path, checkpoint_every=2)
    assert len(torch.load(checkpoint.path_of(tmp_path, recipe), weights_only=True)["losses"]) == 4
    torch.manual_seed(12345)
    resumed = training.train(recipe, config, corpus, CPU, tmp_path, resume=True)
    assert resumed.losses == whole.losses
    assert resumed.held_out_loss == whole.held_out_loss


def test_a_finished_run_resumes_to_its_result(corpus, tmp_path):
    whole = training.train("bf16", TINY, corpus, CPU, tmp_path, checkpoint_every=3)
    again = training.train("bf16", TINY, corpus, CPU, tmp_path, resume=True)
    assert (again.losses, again.held_out_loss) == (whole.losses, whole.held_out_loss)


def test_a_checkpoint_restores_random_numbers(tmp_path):
    path = checkpoint.path_of(tmp_path, "bf16")
    torch.manual_seed(7)
    checkpoint.save(path, TINY, "digest", CPU)
    expected = torch.rand(3)
    torch.manual_seed(8)
    checkpoint.load(path, TINY, "digest", CPU)
    assert torch.equal(torch.rand(3), expected)


def test_a_failed_write_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    path = checkpoint.path_of(tmp_path, "bf16")
    checkpoint.save(path, TINY, "digest", CPU, losses=[1.0])

    def fail(state, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(UsageError, match="disk full"):
        checkpoint.save(path, TINY, "digest", CPU, losses=[2.0])
    assert checkpoint.load(path, TINY, "digest", CPU)["losses"] == [1.0]


def test_grad_accumulation_sees_the_same_batch(corpus):
    one = training.train("bf16", replace(TINY, batch_size=4), corpus, CPU)
    two = training.train("bf16", replace(TINY, batch_size=2, grad_accumulation=2), corpus, CPU)
    torch.testing.assert_close(torch.tensor(two.losses), torch.tensor(one.losses), rtol=1e-3, atol=1e-3)


@MODELS
def test_activation_checkpointing_changes_memory_and_not_the_curve(config, corpus):
    plain = training.train("bf16", config, corpus, CPU)
    recomputed = training.train("bf16", replace(config, activation_checkpointing=True), corpus, CPU)
    assert recomputed.losses == plain.losses
    assert recomputed.activation_bytes < plain.activation_bytes / 2


@MODELS
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_learns(recipe, config, corpus):
    with torch.no_grad():
        start = next_byte_loss(convert_model(recipe, config), corpus.batch(0, 0, 64)).item()
    assert start == pytest.approx(math.log(256), rel=0.05)
    assert training.train(recipe, replace(config, steps=14), corpus, CPU).held_out_loss < 0.8 * start


def test_a_tied_head_is_one_parameter(corpus):
    config = replace(TINY, tied_head=True)
    model = training.build(config, CPU)
    assert model.lm_head.weight is model.embedding.weight
    assert sum(p.numel() for p in model.parameters()) == config.parameters
    assert len(training.train("bf16", config, corpus, CPU).losses) == config.steps


def test_learning_rate_rises_to_its_peak_and_falls_to_a_tenth():
    rates = [training.learning_rate(TINY, step) for step in range(TINY.steps)]
    assert rates[0] == TINY.lr / 2 and max(rates) == TINY.lr
    assert rates[-1] == pytest.approx(TINY.lr / 10)


def test_a_loss_that_is_not_finite_stops_the_recipe(corpus, monkeypatch):
    monkeypatch.setattr(training, "train_step", lambda *args: torch.tensor(math.nan))
    result = training.train("bf16", TINY, corpus, CPU)
    assert result.diverged and len(result.losses) == 1
    assert "diverged at step 1" in report.table([result])


def test_a_diverged_recipe_is_drawn_up_to_where_it_diverged(tmp_path):
    good = training.Result("bf16", 128, losses=[5.0, 4.0, 3.0, 2.5], seconds=[1.0] * 4, held_out_loss=2.4)
    bad = training.Result("fp8", 128, losses=[5.0, math.nan], seconds=[1.0] * 2)
    worst = training.Result("nvfp4", 128, losses=[math.inf], seconds=[1.0])
    plot.write_plot(tmp_path / "a.png", TINY, [good, bad, worst], title="t", data="d", unigram_entropy=3.0)
    rows = report.rows([good, bad, worst])
    assert [row["gap_percent"] for row in rows] == [0.0, None, None]


@pytest.mark.parametrize("config, recipe, words", [
    (TINY, "bf16", "every linear layer in bf16"),
    (TINY, "fp8", "8 of 9 linear layers in fp8_128x128"),
    (TINY, "nvfp4", "4 of 9 linear layers in nvfp4_16x16"),
    (MOE, "bf16", "every linear layer and expert in bf16"),
    (MOE, "fp8", "8 of 9 linear layers and 4 of 4 weights of experts in fp8_128x128"),
    (MOE, "nvfp4", "4 of 9 linear layers and 2 of 4 weights of experts in nvfp4_16x16"),
])  # fmt: skip
def test_conversion_spares_the_head_routers_and_nvfp4_the_last_block(config, recipe, words):
    model = training.build(config, CPU)
    assert convert(model, recipe) == words
    assert all(type(router.weight) is torch.nn.Parameter for router in model.routers())


def test_the_estimate_counts_steps_and_evaluation(corpus, monkeypatch):
    now, durations = 0.0, iter([9.0, 2.0, 3.0])

    def train_step(*args):
        nonlocal now
        now += next(durations)
        return torch.zeros(())

    monkeypatch.setattr(training, "train_step", train_step)
    monkeypatch.setattr(training.time, "perf_counter", lambda: now)
    # 4 held-out sequences are 2 steps of text, and evaluating takes a third of training.
    assert training.seconds_to_train("bf16", TINY, corpus, CPU) == pytest.approx((8 + 2 / 3) * 2)


@pytest.mark.parametrize(
    ("seconds", "words"), [(41.4, "41 s"), (99.6, "2 min"), (179, "3 min"), (5400, "90 min"), (9000, "2.5 h")]
)
def test_durations_in_words(seconds, words):
    assert report.duration(seconds) == words


# Mixtures of experts


def test_a_token_takes_its_best_experts_and_their_weights_sum_to_one():
    router = Router(replace(MOE, experts=6, top_k=2))
    torch.nn.init.normal_(router.weight)
    x = torch.randn(50, MOE.dim)
    weights, chosen = router(x)
    probabilities = (x @ router.weight.T).softmax(-1)
    best = probabilities.topk(2, -1)
    assert torch.equal(chosen, best.indices) and weights.dtype == torch.float32
    torch.testing.assert_close(weights, best.values / best.values.sum(-1, keepdim=True))


def test_the_router_decides_in_fp32_under_autocast():
    router = Router(MOE)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(50, MOE.dim).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        got = router(x)
    assert all(map(torch.equal, got, router(x.float())))


def test_a_bias_moves_towards_experts_with_few_tokens_and_no_weight():
    router = Router(MOE)
    torch.nn.init.normal_(router.weight)
    before, _ = router(torch.randn(9, MOE.dim, generator=torch.Generator().manual_seed(0)))
    router.count(torch.tensor([6, 6, 8, 12], dtype=torch.int32))
    router.balance()
    rate = MOE.balance_rate
    torch.testing.assert_close(router.bias, torch.tensor([-rate, rate, rate, -rate]))
    assert router.tokens.tolist() == [0] * 4
    router.bias.fill_(3)
    after, _ = router(torch.randn(9, MOE.dim, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(before, after)


def test_balancing_evens_out_how_many_tokens_experts_have(corpus, monkeypatch):
    def unevenness(rate):
        worst = []

        def balance(self, original=Router.balance):
            worst.append((self.tokens.max() / self.tokens.mean()).item())
            original(self)

        with monkeypatch.context() as m:
            m.setattr(Router, "balance", balance)
            training.train("bf16", replace(MOE, experts=8, steps=30, balance_rate=rate), corpus, CPU)
        return sum(worst[-10:]) / 10

    assert unevenness(0.05) < 0.6 * unevenness(0.0)


def test_a_mixture_is_its_experts_one_by_one(corpus):
    model = training.build(MOE, CPU)
    mixture, x = model.layers[0].mlp, torch.randn(2, 5, MOE.dim)
    weights, chosen = mixture.router(x.flatten(0, 1))
    expected = mixture.shared(x).flatten(0, 1)
    for t, token in enumerate(x.flatten(0, 1)):
        for weight, e in zip(weights[t], chosen[t]):
            gate, up = (mixture.experts.gate_up[e] @ token).chunk(2)
            expected[t] = expected[t] + weight * (mixture.experts.down[e] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(mixture(x).flatten(0, 1), expected)


def test_more_experts_a_token_than_there_are_is_refused():
    with pytest.raises(UsageError, match="top_k must be from 1 to experts = 4, got 5"):
        replace(MOE, top_k=5)


# Memory


@MODELS
@pytest.mark.parametrize("recipe", RECIPES)
def test_memory_estimate_covers_what_is_saved_for_backward(recipe, config):
    config = replace(config, batch_size=4)
    saved = training.activation_bytes(convert_model(recipe, config), config, CPU)
    estimate = memory.estimated_bytes(config) - memory.estimated_bytes(replace(config, batch_size=2))
    assert 0.3 * estimate < saved / 2 <= estimate


def test_low_precision_keeps_fewer_bytes(corpus):
    config = replace(TINY, steps=1, warmup=0)
    bf16, fp8, nvfp4 = (training.train(r, config, corpus, CPU) for r in RECIPES)
    assert fp8.activation_bytes < bf16.activation_bytes
    head = 2 * 256 * TINY.dim
    linear = bf16.weight_bytes - head
    assert fp8.weight_bytes - head == pytest.approx(linear / 2, rel=0.01)
    # One of the two blocks stays in bf16; the other takes 4.5 bits at most.
    assert nvfp4.weight_bytes - head <= linear / 2 + 4.5 / 16 * linear / 2


def test_saved_bytes_counts_each_storage_once_and_no_parameter():
    layer = torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    with memory.saved_bytes(layer) as saved:
        hidden = layer(x)
        (hidden * hidden.view(4, 8)).sum()
    assert sum(saved.values()) == x.nbytes + hidden.nbytes


# Refusals


@pytest.mark.parametrize(
    "argv", ["--steps 0", "--steps -3", "--recipes fp7", "--preset 7b", "--lr nan", "--batch-size x", "--seed -1"]
)
def test_a_wrong_argument_is_refused_by_name(argv, capsys):
    argv = argv.split()
    with pytest.raises(SystemExit) as exit_info:
        train_llm.main(argv)
    assert exit_info.value.code == 2
    assert f"argument {argv[0]}" in capsys.readouterr().err


def test_missing_data_is_refused(capsys, tmp_path):
    assert "no such file or folder" in refusal(capsys, "--data", tmp_path / "nothing", "--out", tmp_path)


@pytest.mark.parametrize("size", [0, 100])
def test_too_little_text_is_refused(size, capsys, tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * size)
    message = refusal(capsys, "--data", path, "--out", tmp_path)
    assert "no text found" in message if size == 0 else "need at least 130 bytes" in message and "got 100" in message


def test_an_unreadable_file_is_refused(capsys, text_file, tmp_path, monkeypatch):
    # Permissions do not stop root, who runs tests in containers.
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert f"cannot read {text_file}: Permission denied" in refusal(capsys, "--data", text_file, "--out", tmp_path)


def test_too_little_memory_is_refused_before_training(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(train_llm, "require_memory", memory.require_memory)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**20)
    message = refusal(capsys, "--out", tmp_path)
    assert "needs about" in message and "GiB are free" in message and "--batch-size" in message


def test_a_warmup_longer_than_the_run_is_refused(capsys, tmp_path):
    assert "warmup must be" in refusal(capsys, "--warmup", 8, "--steps", 8, "--out", tmp_path)


def test_products_in_fp32_are_for_a_cpu(monkeypatch):
    args = train_llm.make_parser().parse_args(["--products", "fp32"])
    with pytest.raises(UsageError, match="--products fp32: cuda multiplies bf16 itself"):
        train_llm.config_from(args, torch.device("cuda"))


def test_products_in_fp32_are_not_compiled():
    with pytest.raises(UsageError, match="products in fp32 run eagerly"):
        replace(TINY, compile=True, products="fp32")


def test_an_output_folder_that_is_a_file_is_refused(capsys, text_file):
    assert "not a folder" in refusal(capsys, "--out", text_file)


@pytest.mark.parametrize("device", ["cuda:99", "abacus", "meta"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(UsageError, match=f"--device {device}"):
        train_llm.pick_device(device)


def test_resume_without_checkpoint_is_refused(capsys, text_file, tmp_path):
    assert "no checkpoint in" in refusal(capsys, "--resume", "--data", text_file, "--out", tmp_path / "new")


def test_resume_with_another_configuration_names_the_fields(capsys, text_file, tmp_path):
    common = ("--recipes", "bf16", "--out", tmp_path, "--data")
    argv = ("--device", "cpu", "--preset", "tiny", "--checkpoint-every", "4", "--steps", "4", *common, text_file)
    assert train_llm.main([str(a) for a in argv]) == 0
    capsys.readouterr()
    text_file.write_bytes(TEXT[1:])
    line = refusal_lines(capsys, "--resume", "--steps", 6, "--lr", "0.5", *common, text_file)
    for part in ("steps: 4 -> 6", "lr: 0.002 -> 0.5", "data (sha256)"):
        assert part in line


def refusal_lines(capsys, *argv: object) -> str:
    assert train_llm.main([str(a) for a in ("--device", "cpu", "--preset", "tiny", *argv)]) == 2
    return capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused(tmp_path):
    path = checkpoint.path_of(tmp_path, "bf16")
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(UsageError, match="not a readable checkpoint"):
        checkpoint.load(path, TINY, "digest", CPU)


def test_difference_names_changed_and_new_fields():
    saved = {"steps": TINY.steps}
    assert "dim: None -> 128" in difference(saved, TINY)
    assert not any(d.startswith("steps") for d in difference(saved, TINY))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_sound(preset):
    config = override(preset, steps=5)
    assert isinstance(config, RunConfig) and config.warmup < 5
    assert config.dim % 128 == config.hidden % 128 == 0 and config.dim % config.heads == 0


@MODELS
def test_parameter_count_matches_the_model(config):
    model = training.build(config, CPU)
    assert sum(p.numel() for p in model.parameters()) == config.parameters
    idle = (config.experts - config.top_k) * 3 * config.dim * config.hidden
    assert config.active_parameters == config.parameters - config.layers * idle


def test_an_interrupted_run_says_how_to_go_on(capsys, text_file, tmp_path, monkeypatch):
    def train(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_llm, "train", train)
    argv = [
        "--device",
        "cpu",
        "--preset",
        "tiny",
        "--data",
        str(text_file),
        "--out",
        str(tmp_path),
        "--recipes",
        "bf16",
    ]
    assert train_llm.main([*argv, "--checkpoint-every", "2"]) == 130
    assert "continue it with --resume" in capsys.readouterr().err


# Report


def test_the_command_leaves_table_json_and_picture(text_file, tmp_path, capsys, monkeypatch):
    results = tmp_path / "results"
    monkeypatch.setattr(train_llm, "RESULTS", results)
    out = tmp_path / "out"
    argv = ["--device", "cpu", "--preset", "tiny", "--data", str(text_file), "--out", str(out), "--results"]
    assert train_llm.main(argv) == 0
    printed = capsys.readouterr().out
    assert "0.4 M parameters" in printed and "8 steps of 128 tokens" in printed
    assert re.search(r"^about \d+ s for 3 recipes: bf16 \d+ s, fp8 \d+ s, nvfp4 \d+ s$", printed, flags=re.MULTILINE)

    content = json.loads((out / "train_llm.json").read_text())
    assert content["config"]["dim"] == TINY.dim and content["config"]["seed"] == 0
    assert content["environment"]["torch"] == torch.__version__ and content["config"]["products"] == "bf16"
    device, data = content["environment"]["device"], content["data"]
    assert device and f"{device}. 1,024 tokens from 0.0 MB of text ({text_file}), no byte twice." in printed
    assert data["passes"] == 8 * 128 / data["train_bytes"]
    assert [row["recipe"] for row in content["table"]] == list(RECIPES)
    for row in content["table"]:
        assert row["held_out_loss"] > 0 and row["tokens_per_second"] > 0 and row["peak_bytes"] is None
        assert len(content["curves"][row["recipe"]]["loss"]) == TINY.steps
        assert f"{row['held_out_loss']:.4f}" in printed
    bf16, fp8, _ = content["table"]
    assert fp8["gap_percent"] == pytest.approx(100 * (fp8["held_out_loss"] / bf16["held_out_loss"] - 1))
    assert (out / "train_llm.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in results.iterdir()} == {f"train_llm_cpu.{suffix}" for suffix in ("json", "md", "png")}


def test_a_mixture_writes_results_of_its_own(text_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_llm, "RESULTS", tmp_path / "results")
    monkeypatch.setitem(PRESETS, "moe-tiny", replace(MOE, preset="moe-tiny"))
    argv = ["--device", "cpu", "--model", "moe-tiny", "--data", str(text_file), "--out", str(tmp_path), "--results"]
    assert train_llm.main(argv) == 0
    assert "4 experts of which a token takes 2" in capsys.readouterr().out
    names = {p.name for p in (tmp_path / "results").iterdir()}
    assert names == {f"train_llm_moe_tiny_cpu.{suffix}" for suffix in ("json", "md", "png")}
    table = json.loads((tmp_path / "results" / "train_llm_moe_tiny_cpu.json").read_text())["table"]
    assert table[1]["layers"] == "8 of 9 linear layers and 4 of 4 weights of experts in fp8_128x128"


def test_without_bf16_there_is_no_gap(corpus, tmp_path):
    result = training.train("fp8", TINY, corpus, CPU)
    assert report.rows([result])[0]["gap_percent"] is None
    path = tmp_path / "curves.png"
    plot.write_plot(path, TINY, [result], title="t", data="d", unigram_entropy=3.0)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_smoothing_neither_lags_nor_moves_a_straight_line():
    line = [10.0 - i for i in range(10)]
    assert plot.smooth(line, 5)[:8] == line[:8]
    assert plot.smooth([1.0] * 7, 3) == [1.0] * 7


def test_labels_are_spread_in_order():
    placed = plot.spread([1.0, 1.0, 5.0, 0.99], 0.5)
    assert placed[3] < placed[0] < placed[1] < placed[2]
    assert all(b - a >= 0.5 - 1e-9 for a, b in pairwise(sorted(placed)))
