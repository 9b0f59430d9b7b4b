"""docs/extending.md: its files and examples are run, and what they compute is compared with the format's definition."""

import contextlib
import copy
import importlib
import io
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from product_budgets import accumulation_unit, assert_within_budget
from quantize_cases import assert_same
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, ops
from torchao_blockwise.formats import FORMATS, FP8_128X128, CastOptions, Operand
from torchao_blockwise.ops import backend as backend_module
from torchao_blockwise.ops.backend import Backend, get_backend, why_no_encoders
from torchao_blockwise.ops.gemm.plain import add_matmul_op, matmul_op
from torchao_blockwise.ops.quantization.operations import quantize_op
from torchao_blockwise.testing import assert_operands_equal, random_tensor, shape_id, with_special_values

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
FILES, EXAMPLES, OUTPUTS = (
    dict(re.findall(rf"<!-- {marker}: ([\w.]+) -->\n```\w*\n(.*?)\n?```", PAGE, flags=re.DOTALL))
    for marker in ("file", "code", "printed")
)
BLOCK = 32
SHAPES = ((0, 64), (64, 0), (1, 1), (1, 32), (3, 31), (5, 33), (9, 300))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def page(tmp_path, monkeypatch, machine):
    """The page's files can be imported; formats, backends and tables are afterwards as they were."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    before, backends = dict(FORMATS), dict(backend_module.BACKENDS)
    tables = [(op.table, list(op.table)) for op in (quantize_op, matmul_op, add_matmul_op)]
    machine.warns_anew()
    backend_module._place.cache_clear()
    yield importlib.import_module
    for table, rows in tables:
        table[:] = rows
    for names, held in ((FORMATS, before), (backend_module.BACKENDS, backends)):
        names.clear()
        names.update(held)
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)
    backend_module._place.cache_clear()


def run(example: str) -> str:
    """What an example of the page prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(EXAMPLES[example], "docs/extending.md", "exec"), {"__name__": example})
    return printed.getvalue().strip()


@pytest.fixture
def mxfp8(page):
    return page("mxfp8").MXFP8


# --- the format -------------------------------------------------------------------------------------------------------


def by_definition(x: torch.Tensor) -> Operand:
    """`x` [M, K] in MXFP8, in doubles: scale = 2^(⌊log2 amax⌋ - 8), from 2^-127 on, for each block of a row."""
    blocks = F.pad(x.double().cpu(), (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    amax, is_bad = blocks.abs().amax(-1, keepdim=True), ~blocks.isfinite().all(-1, keepdim=True)
    exponent = torch.where(amax == 0, -127, (torch.frexp(amax).exponent - 1 - 8).clamp(min=-127)).double()
    codes = (blocks / 2.0**exponent).clamp(-448, 448).float().to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(is_bad, 0x7F, codes).flatten(1)[:, : x.shape[1]]
    scale = torch.where(is_bad, 255, exponent + 127)[..., 0].to(torch.uint8)
    return Operand(codes.contiguous().view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu), None, "mxfp8_1x32")


def hard(*shape: int, dtype, device) -> torch.Tensor:
    """Values of many sizes; where there is room special blocks, Inf and NaN too."""
    x = random_tensor(*shape, dtype=dtype, device=device)
    if shape[1] >= 5 * BLOCK:
        x = with_special_values(x, FORMATS["mxfp8_1x32"])
        x[1, 3], x[1, BLOCK + 3] = float("inf"), float("nan")
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_quantize_has_the_bits_of_the_definition(shape, dtype, mxfp8, device):
    x = hard(*shape, dtype=dtype, device=device)
    copies = ops.quantize(x, mxfp8, columnwise=True, backend="reference")
    assert_operands_equal(copies.rowwise, by_definition(x))
    assert_operands_equal(copies.columnwise, by_definition(x.mT))


def test_dequantize_and_matmul_follow_the_definition(mxfp8, device):
    a, b = (ops.quantize(random_tensor(n, 500, seed=n, device=device), mxfp8).rowwise for n in (63, 40))
    for x in (a, b):
        # An element and a power of two are exact in fp32; `pow` of CUDA is not, even of two.
        scale = 2.0 ** (x.scale.view(torch.uint8).cpu().double() - 127).repeat_interleave(BLOCK, 1)[:, :500]
        assert torch.equal(ops.dequantize(x).double().cpu(), x.qdata.cpu().double() * scale)
    got = ops.matmul(a, b, out_dtype=torch.float32, backend="reference")
    assert_within_budget(got, a, b, 500, accumulation_unit("reference", mxfp8, device))


@pytest.mark.filterwarnings("ignore:.*auto uses reference")
def test_the_example_of_a_format_prints_what_is_shown(page):
    assert run("format") == OUTPUTS["format"]


@pytest.mark.filterwarnings("ignore:.*auto uses reference")
def test_no_kernel_of_the_package_takes_it_for_a_format_of_its_own(mxfp8, device):
    """AUTO leaves it to the reference in each operation: no kernel of ours knows its scale rule."""
    x, gate = random_tensor(64, 96, device=device), random_tensor(64, 96, seed=1, device=device)
    options = CastOptions(mxfp8, columnwise=True)
    groups = ops.make_groups(torch.tensor([32, 64], dtype=torch.int32, device=device), 64, mxfp8)
    norm = ops.Norm(x, None, None, *ops.norm_statistics(x, "rms", 1e-6), x.dtype)

    def by_reference(values, groups=None):
        return ops.quantize_by(values, options, groups, backend="reference")

    for got, want in (
        (ops.quantize_by(x, options), by_reference(x)),
        (ops.quantize_by(x, options, groups), by_reference(x, groups)),
        (ops.norm_quantize(norm, options), by_reference(ops.normalize(norm))),
        (ops.swiglu_quantize(gate, x, options), by_reference(ops.swiglu(gate, x))),
        (ops.swiglu_quantize(gate, x, options, groups=groups), by_reference(ops.swiglu(gate, x), groups)),
    ):
        assert_same(got, want)
    a, b = by_reference(x, groups), by_reference(gate, groups)
    experts = b.rowwise._replace(**{name: torch.stack([getattr(b.rowwise, name)] * 2) for name in ("qdata", "scale")})
    for along, operands in (("m", (a.rowwise, experts)), ("k", (a.columnwise, b.columnwise))):
        how = {"along": along, "out_dtype": torch.float32}
        got = ops.grouped_matmul(*operands, groups, **how)
        assert torch.equal(got, ops.grouped_matmul(*operands, groups, **how, backend="reference"))


# --- the kernel -------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(page, device):
    pytest.importorskip("triton")
    run("kernel")
    if reason := why_no_encoders(torch.empty(1, device=device)):
        pytest.skip(reason)
    return page("mxfp8").MXFP8


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", ((0, 64), (64, 0), (3, 31), (5, 33), (3, 300)), ids=shape_id)
def test_the_kernel_has_the_bits_of_the_reference(shape, dtype, kernel, device):
    x = hard(*shape, dtype=dtype, device=device)
    for options in ({}, {"columnwise": True}, {"rowwise": False, "columnwise": True, "padded": True}):
        got, want = (ops.quantize(x, kernel, **options, backend=backend) for backend in ("triton", "reference"))
        assert_same(got, want)


def test_the_kernel_is_chosen_and_the_packages_own_stays(kernel, device, monkeypatch):
    ran, module = [], importlib.import_module("mxfp8_kernel")
    by_kernel = module.quantize
    monkeypatch.setattr(module, "quantize", lambda x, *args: ran.append(x.shape) or by_kernel(x, *args))
    x = random_tensor(32, 128, device=device)
    for backend in (None, "triton"):
        ops.quantize(x, kernel, columnwise=True, backend=backend)
    assert ran == [x.shape] * 2
    ops.quantize(x, FP8_128X128, backend="triton")
    assert ran == [x.shape] * 2
    with pytest.raises(ValueError, match="backend triton cannot run: mxfp8_1x32 has no kernel yet"):
        ops.quantize(x[None], kernel, backend="triton")


# --- the backend ------------------------------------------------------------------------------------------------------


@pytest.fixture
def decoding(page, monkeypatch):
    """The products that the page's backend computed, as (M, N)."""
    ran, module = [], page("decoding_backend")

    def counted(*args):
        ran.append((args[0].qdata.shape[0], args[1].qdata.shape[0]))
        return by_backend(*args)

    by_backend, module.ROW = module.matmul, module.ROW._replace(run=counted)
    run("backend")
    return ran


def operands(device, fmt=FP8_128X128):
    tensors = random_tensor(65, 256, device=device), random_tensor(40, 256, seed=1, device=device)
    return [ops.quantize(t, fmt, backend="reference").rowwise for t in tensors]


def test_the_backend_is_chosen_by_name_and_by_auto(decoding, device):
    a, b = operands(device)
    want = ops.matmul(a, b, out_dtype=torch.float32, backend="reference")
    assert decoding == []
    for backend in ("decoding", get_backend("decoding"), None, "auto"):
        got = ops.matmul(a, b, out_dtype=torch.float32, backend=backend)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
    assert decoding == [(65, 40)] * 4
    out = want.clone()
    ops.add_matmul_(out, a, b, backend="decoding")
    torch.testing.assert_close(out, 2 * want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
    assert decoding == [(65, 40)] * 5


@pytest.mark.filterwarnings("ignore:.*auto uses")
def test_what_the_backend_refuses_goes_on_to_the_next_or_raises(decoding, device):
    a, b = operands(device)
    ops.matmul(a, b, out_dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"decoding cannot run: out_dtype must be float32, got torch\.bfloat16; choose"
    ):
        ops.matmul(a, b, out_dtype=torch.bfloat16, backend="decoding")
    assert decoding == []


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_layers_train_on_the_backend(compiled, decoding, fresh_dynamo, device):
    model = nn.Sequential(nn.Linear(128, 96, bias=False)).to(device)
    quantize_(model, BlockwiseFP8TrainingConfig(backend="decoding"))
    model = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    x = random_tensor(48, 128, device=device).requires_grad_()
    model(x).sum().backward()
    # output, grad_input, grad_weight
    assert sorted(decoding) == sorted([(48, 96), (48, 128), (96, 128)])


def test_a_registered_backend_is_one_as_the_others(decoding):
    backend = get_backend("decoding")
    assert (str(backend), backend.value, backend.name) == ("decoding", "decoding", "DECODING")
    assert type(backend) is Backend and Backend("decoding") is backend
    assert copy.deepcopy(backend) is backend and pickle.loads(pickle.dumps(backend)) is backend
    assert ops.casting_backend("decoding") is Backend.AUTO
    with pytest.raises(ValueError, match="register_backend: decoding is already registered; choose another name"):
        backend_module.register_backend("decoding")
