"""Shared set-up: on a machine without a GPU, Triton kernels run in Triton's interpreter."""

import contextlib
import gc
import itertools
import logging
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch

# Tests share modules of this folder and of those in it, in spawned processes too.
_HERE = Path(__file__).parent
sys.path += map(str, (_HERE, *sorted(folder for folder in _HERE.iterdir() if folder.is_dir())))

if not torch.cuda.is_available():
    # Before anything imports Triton, which reads it once.
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        import interpreter

        interpreter.install()

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores; threads of several would wait for each other, and so would inductor's compilers.
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

warnings.filterwarnings("ignore", message=".*register_constant.*")

# pytest listens to loggers that keep their records to themselves. PyTorch's of compilation would then write all graphs,
# guards and stacks down as JSON, which it does for nobody else.
logging.getLogger("torch.__trace").propagate = True

# Python looks for cycles after each 700 objects; compilers make millions, of which hardly one is a cycle's.
gc.set_threshold(20_000, 50, 100)

# Graphs that inductor keeps on disk know operations by name: they would go on with shapes and strides of old fakes.
os.environ |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}


# As many pairs of values of two options are few.
FEW = 8


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU; skipped where there is none")
    config.addinivalue_line("markers", "device: takes the fixture `device`, so computes on a GPU where there is one")
    config.addinivalue_line("markers", "xdist_group(name): runs on one worker with others of this name")


def _starts_processes(path: Path) -> bool:
    """Whether the tests of a file look at what processes left that it started once, to build kernels or as ranks."""
    once = path.stem.endswith("_builds") or path.stem in ("test_launch", "test_over_ranks")
    return once or "distributed" in path.parts


# Before -m chooses.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    _mark_products(items)
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker("device")
        if _starts_processes(item.path):
            # By --dist loadgroup on one worker.
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish():
    # What was imported and collected stays: collections that tests and benchmarks ask for need not look through it.
    gc.collect()
    gc.freeze()


def _mark_products(items) -> None:
    """Mark tests of combined options slow, except some that have every value of every option.

    And every pair of values of two options that make few pairs, such as formats and backends.
    """
    of_function: dict = {}
    for item in items:
        if hasattr(item, "callspec"):
            of_function.setdefault((item.path, item.originalname), []).append(item)
    for alike in of_function.values():
        # By number, in the order of their first test: arguments that are drawn together are one option.
        options = set()
        for name in alike[0].callspec.params:
            numbers: dict[int, int] = {}
            values = [id(item.callspec.params[name]) for item in alike]
            options.add(tuple(numbers.setdefault(value, len(numbers)) for value in values))
        if len(alike) > FEW and len(options) > 1:
            for index in _left_out(sorted(options), len(alike)):
                alike[index].add_marker("slow")


def _left_out(options: list[tuple], count: int) -> set[int]:
    """Of `count` tests those that show nothing new; options: of each, the index of its value in every test."""
    few = [
        (a, b) for a, b in itertools.combinations(range(len(options)), 2)
        if len(set(options[a])) * len(set(options[b])) <= FEW
    ]  # fmt: skip
    values = list(zip(*options))
    shown = [{*enumerate(v), *((a, b, v[a], v[b]) for a, b in few)} for v in values]
    wanted, chosen = set.union(*shown), set()
    while wanted:
        # Of equal ones not the first, which has the first value of all other options.
        best = max(range(count), key=lambda i: (len(shown[i] & wanted), i * 2654435761 % 2**32))
        chosen.add(best)
        wanted -= shown[best]
    return set(range(count)) - chosen


@pytest.fixture(scope="module")
def small_heap():
    """For tests that collect garbage again and again: what tests before them have left is not looked through."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def device() -> str:
    """The device that tests run on: the GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    """What ranks raised in the selected cases of the module's suites (test/rank_suites.py)."""
    from rank_suites import raised_by_ranks

    return raised_by_ranks(request, tmp_path_factory)


@pytest.fixture
def one_rank():
    """A mesh of this process alone."""
    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("needs torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def fresh_dynamo():
    """torch.compile remembers nothing of other tests, and nothing stays for them."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def no_interpreter():
    """AUTO on a CPU takes the reference, not Triton's interpreter: the same bits, many times faster."""
    # Only now, when the environment says what Triton is to do.
    from machines import without_interpreter

    with pytest.MonkeyPatch.context() as patch:
        without_interpreter(patch)
        yield


@pytest.fixture(autouse=True)
def same_numbers():
    """Random numbers of a test do not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def by_the_reference(request):
    """On a CPU the reference computes tensors, layers and models, except where kernels are tested."""
    kernels = ("test_kernels", "test_permute", "test_kernel_self_test", "test_master_weights")
    if request.path.parent.name not in ("formats", "ops", "test") and request.path.stem not in kernels:
        request.getfixturevalue("no_interpreter")


@pytest.fixture
def machine(monkeypatch):
    """The machine that a test pretends to run on (test/machines.py)."""
    from machines import Machine

    made = Machine(monkeypatch)
    yield made
    monkeypatch.undo()
    made.forget()
