"""Backends: names, the choice between implementations, the one warning, refusals."""

import types
import warnings

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.ops.backend import Backend, Implementation, choose, get_backend, kernels, why_no_triton

CPU = torch.device("cpu")
NO_GPU = "Triton kernels need a CUDA device, got cpu (TRITON_INTERPRET=1 interprets them on a CPU)"
NO_TRITON = "triton is not installed (pip install triton)"


@pytest.fixture(autouse=True)
def forget_warnings(machine):
    """Every test may see the warning that is given once."""
    machine.warns_anew()


def test_names():
    names = ["auto", "reference", "triton", "cublas", "gluon", "deep_gemm", "cutlass"]
    assert [b.value for b in Backend] == [str(b) for b in Backend] == [f"{b}" for b in Backend] == names
    assert [get_backend(b) for b in Backend] == [get_backend(name) for name in names] == list(Backend)
    assert get_backend(None) is Backend.AUTO
    for name, meant in (("Triton", "; did you mean 'triton'?"), ("", "")):
        with pytest.raises(ValueError) as error:
            get_backend(name)
        assert str(error.value) == f"unknown backend {name!r}; the backends are {', '.join(names)}{meant}"


def pick(backend, reasons, is_cuda=False, **rules):
    """The backend that is chosen from rows in this order, each with why it cannot run or None."""
    table = [Implementation(row, "not:imported", lambda x, reason=reason: reason) for row, reason in reasons.items()]
    return choose("op", table, get_backend(backend), (types.SimpleNamespace(is_cuda=is_cuda),), **rules).backend


CUBLAS, TRITON, REFERENCE = Backend.CUBLAS, Backend.TRITON, Backend.REFERENCE
ALL = dict.fromkeys((CUBLAS, TRITON, REFERENCE))
# what is shown: (backend asked for, why rows cannot run, the backend that is preferred, the one chosen)
CHOICES = {
    "the first that can": ("auto", {CUBLAS: "no GPU"}, None, TRITON),
    "the second that can": ("auto", {CUBLAS: "no GPU", TRITON: "no"}, None, REFERENCE),
    "the first": ("auto", {}, None, CUBLAS),
    "the preferred": ("auto", {}, TRITON, TRITON),
    # Even if a faster one can run.
    "named": (TRITON, {}, None, TRITON),
    "the last, named": (REFERENCE, {}, TRITON, REFERENCE),
}


@pytest.mark.parametrize(("asked", "reasons", "preferred", "chosen"), CHOICES.values(), ids=CHOICES)
@pytest.mark.filterwarnings("error")
def test_choice(asked, reasons, preferred, chosen):
    assert pick(asked, ALL | reasons, preferred_backend=lambda x: preferred) is chosen


def test_auto_needs_a_row_that_can_run():
    with pytest.raises(ValueError, match=r"^op: no backend can run: cublas: no GPU; triton: too old$"):
        pick("auto", {CUBLAS: "no GPU", TRITON: "too old"})


def test_auto_says_why_no_kernel_runs_on_a_cpu(monkeypatch, machine):
    """An operation that a program adds may have only kernels."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    machine.has_triton()
    with pytest.raises(ValueError) as error:
        choose("op", [kernels(TRITON, "not:imported")], Backend.AUTO, (torch.zeros(1),))
    assert str(error.value) == f"op: no backend can run: triton: {NO_GPU}"


@pytest.mark.filterwarnings("error")
def test_of_several_rows_of_a_backend_the_first_that_can_is_taken():
    refuses = {"first": None, "second": None}
    table = [Implementation(TRITON, name, lambda x, name=name: refuses[name]) for name in refuses]
    table.append(Implementation(REFERENCE, "third"))

    def chosen(backend):
        return choose("op", table, get_backend(backend), (torch.empty(0),), lambda x: TRITON).run

    assert (chosen("triton"), chosen("auto")) == ("first", "first")
    refuses["first"] = "another format"
    # AUTO does not fall short of Triton: it is Triton that computes.
    assert (chosen("triton"), chosen("auto")) == ("second", "second")
    refuses["second"] = "another shape"
    for backend, message in (
        ("triton", "cannot run: another shape; choose another, or auto"),
        ("gluon", "has no implementation; choose one of triton, reference, or auto"),
    ):
        with pytest.raises(ValueError, match=f"^op: backend {backend} {message}$"):
            chosen(backend)


def test_auto_that_falls_short_warns_once_with_the_reason():
    reasons = ALL | {CUBLAS: "old driver"}
    with pytest.warns(UserWarning, match="^op: auto uses triton instead of cublas: old driver$"):
        pick("auto", reasons, preferred_backend=lambda x: CUBLAS)
    with pytest.warns(UserWarning, match="^op: auto uses cublas instead of triton: old$"):
        assert pick("auto", ALL | {TRITON: "old"}, preferred_backend=lambda x: TRITON) is CUBLAS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pick("auto", reasons, preferred_backend=lambda x: CUBLAS)
        # Another token count, another reason: a warning a step would drown everything else.
        pick("auto", {**reasons, CUBLAS: "M=5"}, preferred_backend=lambda x: CUBLAS)
        pick("triton", reasons, preferred_backend=lambda x: CUBLAS)
        pick("auto", reasons)
        # On a GPU Triton is expected, elsewhere not.
        assert pick("auto", {TRITON: "too old", REFERENCE: None}) is REFERENCE
    with pytest.warns(UserWarning, match="^op: auto uses reference instead of triton: too old$"):
        assert pick("auto", {TRITON: "too old", REFERENCE: None}, is_cuda=True) is REFERENCE


@pytest.mark.parametrize(
    ("interpret", "installed", "reason"),
    (("0", True, NO_GPU), ("", True, NO_GPU), ("1", True, None), ("1", False, NO_TRITON)),
)
def test_triton_on_a_cpu_needs_the_interpreter_and_triton(interpret, installed, reason, monkeypatch, machine):
    machine.has_triton(installed)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if interpret:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert why_no_triton(CPU) == reason


def test_triton_needs_a_gpu_that_is_new_enough(monkeypatch, machine):
    machine.has_triton()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    machine.has_gpu_of((8, 6))
    gpu = torch.device("cuda:0")
    assert why_no_triton(gpu) is None
    assert why_no_triton(gpu, min_capability=(8, 6)) is None
    assert why_no_triton(gpu, min_capability=(8, 9)) == "the kernel needs sm_89 or newer, got sm_86"


@pytest.mark.parametrize("given", ("reference", "triton", None, "cublas", "gluon"), ids=str)
def test_what_only_multiplies_leaves_casts_to_auto(given):
    expected = Backend.AUTO if given in (None, "cublas", "gluon") else Backend(given)
    assert ops.casting_backend(given) is expected
