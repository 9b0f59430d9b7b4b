"""Operations as they are defined: names, fakes and checks.

Calls go through PyTorch's dispatcher where modes, subclasses, profilers or compilers observe them.
"""

import contextlib
import itertools
import warnings

import pytest
import torch
from shared_inputs import Counter
from torch.overrides import TorchFunctionMode

from torchao_blockwise.formats import NVFP4_1X16
from torchao_blockwise.ops import registry
from torchao_blockwise.ops.backend import Backend, Implementation

X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture(scope="module")
def define():
    """define(arguments, returns, run, ..): an operation `op<n>` of this schema, in a namespace that goes afterwards."""
    names = (f"op{n}" for n in itertools.count())

    def define(arguments: str, returns: str = "()", run=lambda *args: None, **options):
        schema = f"{next(names)}({arguments}) -> {returns}"
        return registry.Operation(schema, table=[Implementation(Backend.REFERENCE, run)], **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "NAMESPACE", "torchao_blockwise_test")
        patch.setattr(registry, "_library", torch.library.Library("torchao_blockwise_test", "DEF"))
        yield define


# --- names and checks -------------------------------------------------------------------------------------------------


def test_formats_and_backends_that_do_not_exist(define):
    op = define("str fmt, str products_by, str backend")
    for values, message in (
        (("fp7", "triton", "auto"), "unknown block format 'fp7'"),
        ((NVFP4_1X16.name, "tritn", "auto"), "unknown backend 'tritn'"),
        ((NVFP4_1X16.name, "triton", "aut"), "unknown backend 'aut'"),
    ):
        with pytest.raises(ValueError, match=message):
            op.overload(*values)
    with pytest.raises(ValueError, match="unknown backend 'aut'"):
        op(NVFP4_1X16, Backend.TRITON, "aut")


@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_checks_are_of_values_and_of_fakes(device, define):
    ran = []

    def note(x, n):
        ran.append(1)

    def check(x, n):
        if n > x.shape[0]:
            raise ValueError(f"n is {n}")

    op = define("Tensor x, int n, str backend", "()", note, fake=note, check=check)
    op(X.to(device), 2, Backend.AUTO)
    with pytest.raises(ValueError, match=r"^n is 3$"):
        op(X.to(device), 3, Backend.AUTO)
    assert ran == [1]


# --- who observes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def double(define):
    """double(x, y, times): x · times + y."""

    def run(x, y, times):
        return x * times + (0 if y is None else y)

    return define("Tensor x, Tensor? y, int times", "Tensor", run, fake=lambda x, y, times: torch.empty_like(x))


@pytest.mark.parametrize("mode", (contextlib.nullcontext, Counter), ids=("direct", "intercepted"))
def test_operations_are_not_differentiable(double, mode):
    leaf = torch.ones(2, 3, requires_grad=True)
    with mode():
        assert not double(leaf, None, 2).requires_grad


SEEN: list = []


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        SEEN.append(func)
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        SEEN.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_modes_subclasses_a_profiler_and_traces_see_the_operation(double):
    with Counter() as counter:
        double(X, X, 3)
    assert counter.ran[double.overload.overloadpacket] == 1
    other, nothing = X.as_subclass(Subclass), contextlib.nullcontext()
    for mode, x, y in ((FunctionMode(), X, X), (nothing, other, X), (nothing, X, other)):
        SEEN.clear()
        with mode:
            double(x, y, 3)
        assert double.overload in SEEN
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        double(X, X, 3)
    assert double.overload.name() in {event.key for event in profiler.key_averages()}
    with warnings.catch_warnings():
        # That tracing is deprecated.
        warnings.simplefilter("ignore")
        graph = torch.jit.trace(lambda x: double(x, None, 3), (X,)).graph
    assert double.overload.name() in str(graph)
