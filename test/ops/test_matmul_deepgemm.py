"""GEMMs through DeepGEMM: what it is given, when AUTO takes it, and what a broken one does.

The library itself runs on Hopper alone; elsewhere a function that decodes its arguments stands in its place.
"""

import importlib.util
import re
import subprocess
import sys
import types
import warnings
from importlib import metadata

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise._compat import deep_gemm_library as library
from torchao_blockwise.formats import FP8_1X128, FP8_128X128
from torchao_blockwise.ops.gemm import deepgemm
from torchao_blockwise.testing import random_tensor, relative_error

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"))]
SHAPES = ((1, 8, 16), (3, 136, 144), (65, 72, 272), (128, 384, 512))


def product(a, b, out):
    """DeepGEMM's, of what it says that it takes."""
    (qa, a_scale), (qb, b_scale) = a, b
    (m, k), n = qa.shape, len(qb)
    blocks = -(-k // 128)
    assert a_scale.shape == (m, blocks) and a_scale.stride() == (1, -(-m // 4) * 4)
    assert b_scale.shape == (-(-n // 128), blocks) and b_scale.is_contiguous()
    for x in (qa, qb):
        assert x.is_contiguous() and x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0
    assert out.shape == (m, n) and out.dtype == torch.bfloat16 and out.is_contiguous()
    # As the library does, on tensors that nobody else knows.
    decoded = [
        q.detach().float() * scale.detach().repeat_interleave(128, 1)[:, :k].repeat_interleave(rows, 0)[: len(q)]
        for q, scale, rows in ((qa, a_scale, 1), (qb, b_scale, 128))
    ]
    out.copy_(decoded[0] @ decoded[1].t())


@pytest.fixture
def installed(machine, request, monkeypatch):
    """DeepGEMM is there: really where the test's device is a GPU, else as `product` above."""
    if "cuda" in getattr(request.node, "callspec", types.SimpleNamespace(params={})).params.values():
        if (reason := library.why_absent()) is not None:
            pytest.skip(reason)
        return machine
    machine.has_gpu_of((9, 0))
    monkeypatch.setattr(deepgemm, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(library, "why_absent", lambda: None)
    monkeypatch.setattr(library, "product_on", lambda device: product)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    return machine


def operands(m, n, k, device="cpu", formats=(FP8_1X128, FP8_128X128)):
    return tuple(
        ops.quantize(random_tensor(rows, k, device=device), fmt, backend="reference").rowwise
        for rows, fmt in zip((m, n), formats)
    )


def multiply(a, b, out_dtype=torch.bfloat16, **options):
    return ops.matmul(a, b, out_dtype=out_dtype, **{"backend": "deep_gemm", **options})


@pytest.mark.parametrize("device", DEVICES)
def test_the_product(device, installed):
    for shape in SHAPES:
        a, b = operands(*shape, device)
        got = multiply(a, b)
        assert got.dtype == torch.bfloat16 and got.shape == shape[:2]
        assert relative_error(got, multiply(a, b, torch.float32, backend="reference")) < 2**-8
    # As in grad_input.
    dy, _ = operands(3, 8, shape[1], device)
    transposed = dy, ops.transpose(b)
    assert relative_error(multiply(*transposed), multiply(*transposed, torch.float32, backend="reference")) < 2**-8
    # Payload off 16 bytes, and scales of some rows.
    moved = torch.empty(a.qdata.numel() + 1, dtype=torch.uint8, device=device)[1:].view(a.qdata.shape)
    moved.copy_(a.qdata.view(torch.uint8))
    assert torch.equal(multiply(a._replace(qdata=moved.view(a.qdata.dtype)), b), got)
    some = a._replace(qdata=a.qdata[:22], scale=a.scale[:, :22])
    assert relative_error(multiply(some, b), got[:22]) < 2**-8


# --- the library ------------------------------------------------------------------------------------------------------


@pytest.fixture
def library_with(monkeypatch):
    """(version or None, exit status and stderr of the trial) -> commands that are tried."""

    def pretend(version="0.1.4", returncode=0, stderr="") -> list:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: version)

        def version_of(name):
            if version == "another":
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", version_of)
        tried = []

        def run(command, **options):
            tried.append(command)
            return subprocess.CompletedProcess(command, returncode, "", stderr)

        monkeypatch.setattr(subprocess, "run", run)
        return tried

    def forget():
        library.why_absent.cache_clear()
        library.product_on.cache_clear()

    forget()
    monkeypatch.setattr(library, "_devices", [])
    yield pretend
    forget()


def test_what_works_is_imported_after_one_trial(library_with, monkeypatch):
    tried = library_with()
    module = types.SimpleNamespace(get_num_sms=lambda: 132, fp8_gemm_nt=product)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    assert library.product_on(1) is library.product_on(1) is product
    assert len(tried) == 1 and "set_device(1)" in tried[0][-1]
    assert library.product_on(0) == "its kernels are on the device that the process used first, cuda:1, got cuda:0"


BROKEN = {
    "import fails": ({"returncode": 1, "stderr": "Traceback\nOSError: libcudart.so.13\n"}, "OSError: libcudart.so.13$"),
    "process dies": ({"returncode": -11}, "needs CUDA_HOME to build a kernel with nvcc, failed: exit status -11$"),
}


@pytest.mark.parametrize(("broken", "reason"), BROKEN.values(), ids=BROKEN)
def test_what_is_installed_and_broken_is_warned_about_once(broken, reason, library_with):
    tried = library_with(**broken)
    with pytest.warns(UserWarning, match=f"DeepGEMM is installed but cannot be used: .*{reason}"):
        said = library.product_on(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert library.product_on(0) == said
    assert len(tried) == 1


NOT_THE_PACKAGE = {
    None: r"deep_gemm is not installed \(pip install -e '\.\[deep_gemm\]' in a clone of this package\)",
    "another": "must be sgl-deep-gemm 0.1.4 or newer and below 0.2.0, got another package",
    "0.1.3": "got 0.1.3",
    "0.2.0": "got 0.2.0",
}


@pytest.mark.parametrize(("version", "reason"), NOT_THE_PACKAGE.items())
@pytest.mark.filterwarnings("error")
def test_what_is_not_the_package_is_not_tried(version, reason, library_with):
    tried = library_with(version)
    assert library.product_on(0) == library.why_absent()
    assert not tried and re.search(reason, library.why_absent())
