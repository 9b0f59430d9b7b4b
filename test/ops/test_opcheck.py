"""Each op through `torch.library.opcheck`. Compiled layers: test/nn/test_every_layer.py."""

import contextlib

import pytest
import torch
from gpu_steps import capture
from quantize_cases import rowwise_of
from torch.overrides import TorchFunctionMode

from torchao_blockwise import ops
from torchao_blockwise._compat import pytree
from torchao_blockwise.diagnostics import cases as recorded
from torchao_blockwise.formats import FORMATS, FP8_1X128, FP8_128X128, NVFP4_1X16, random_bits
from torchao_blockwise.ops.backend import Backend, choose
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

library = torch.ops.torchao_blockwise


# The layers whose calls are checked: (tokens, features in, features out, ends of groups).
SIZES = {"ragged": (33, 144, 80, (3, 3, 20, 30)), "none": (0, 48, 32, (0, 0, 0, 0))}


def calls_of_no_layer(tokens: int) -> None:
    """Options and optional arguments that layers do not ask for, or not of all formats."""
    x = random_tensor(tokens, 40) if tokens else torch.empty(0, 40)
    for fmt in FORMATS.values():
        for rowwise, columnwise, padded in ((True, False, False), (False, True, False), (False, True, True)):
            ops.quantize(x, fmt, rowwise=rowwise, columnwise=columnwise, padded=padded)
        ops.quantize(x.expand(2, 5, tokens, 40), fmt, columnwise=True)
    ends, rounded = torch.tensor([tokens // 2, tokens], dtype=torch.int32), ops.StochasticRounding(1, 2, 3)
    for groups in (None, ends):
        for columnwise in (False, True):
            options = {"rowwise": not columnwise, "columnwise": columnwise, "groups": groups, "stochastic": rounded}
            ops.quantize(x, NVFP4_1X16, **options)
        for rowwise in (False, True):
            ops.quantize(x, FP8_1X128, rowwise=rowwise, columnwise=FP8_128X128, groups=groups)
    a, b = (rowwise_of(t, FP8_1X128, backend="reference") for t in (x, random_tensor(16, 40)))
    ops.matmul(a, b, out_dtype=torch.float16, bias=torch.ones(16))
    for layer in ("layer", "rms"):
        statistics = ops.norm_statistics(x, layer, 1e-5)
        ops.normalize(ops.Norm(x, torch.ones(40), None, *statistics, x.dtype))
    y, source, _ = ops.permute(x, torch.zeros(tokens, 2, dtype=torch.int32), 3)
    ops.unpermute(y, source, 2)
    ops.unpermute_backward(x, None, source, 2)


def _cases():
    for size, (tokens, *features, ends) in SIZES.items():
        with pytest.MonkeyPatch.context() as patch:
            for name, value in zip(("TOKENS", "FEATURES_IN", "FEATURES_OUT", "ENDS"), (tokens, *features, ends)):
                patch.setattr(recorded, name, value)
            yield from ((f"{case.op.name} {case.of} {size}", case) for case in recorded.cases(torch.device("cpu")))
        with recorded._recorded() as found:
            calls_of_no_layer(tokens)
        yield from ((f"{case.op.name} {size} more{i}", case) for i, case in enumerate(found))


CASES = dict(_cases())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_opcheck(case):
    """opcheck's own tests; its test_schema cannot compare fp8 inputs, so the schema is checked here, bit by bit."""
    op, in_place = case.op.overload, case.op.overload._schema.is_mutable
    # opcheck makes no fake of an empty view.
    values = pytree.tree_map_only(torch.Tensor, lambda x: x.reshape(-1).clone().view(x.shape), list(case.args))
    args = case.op._parts_of([*values, "reference"] if "str backend" in case.op.schema else values)
    # No autograd registration: the ops run below autograd and are not differentiable.
    tests = ("test_faketensor",) if in_place else ("test_faketensor", "test_aot_dispatch_dynamic")
    assert set(torch.library.opcheck(op, tuple(args), test_utils=tests).values()) == {"SUCCESS"}
    if in_place:
        assert op(*args) is None
        return
    inputs = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in inputs]
    results = pytree.tree_leaves(op(*args))
    for x, copy in zip(inputs, before):
        assert_bitwise_equal(x, copy, "an input that was written to")
    storages = [x.untyped_storage().data_ptr() for x in (*inputs, *results) if x.numel()]
    assert len(set(storages)) == len(storages), "an output shares memory with an input or another output"


# Operations whose reference decides on the host by values of tensors.
READS_THE_HOST = ("grouped_matmul", "add_grouped_matmul")


class CopiesFromTheHost(TorchFunctionMode):
    """Counts tensors that are made of Python's numbers, or moved from the CPU."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        moved = func in (torch.Tensor.to, torch.Tensor.cuda) and args[0].device.type == "cpu"
        self.count += moved or func in (torch.tensor, torch.as_tensor)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference_makes_its_constants_on_the_device(case, monkeypatch):
    """As a CUDA graph, which cannot capture a copy from the host, needs them."""
    # No autocast for the meta device.
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: contextlib.nullcontext())
    args = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), list(case.args))
    rows = [row for row in case.op.table if row.backend is Backend.REFERENCE]
    with CopiesFromTheHost() as copies:
        try:
            for row in rows:
                row.function(*args)
        except NotImplementedError as error:
            assert "copy out of meta tensor" in str(error) and case.op.name in READS_THE_HOST
    assert rows and not copies.count


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_cuda_graph_captures_it(case):
    """What AUTO takes, and a replay has the bits of an eager call."""
    args = pytree.tree_map_only(torch.Tensor, torch.Tensor.cuda, list(case.args))
    row = choose(case.op.name, case.op.table, Backend.AUTO, args, case.op.preferred_backend)
    if row.backend is Backend.REFERENCE and case.op.name in READS_THE_HOST:
        pytest.skip("the reference reads the ends of groups on the host")
    args += [Backend.AUTO] * ("str backend" in case.op.schema)
    if case.op.overload._schema.is_mutable:
        assert capture(lambda: case.op(*args))[1] is None
        return
    expected = _tensors_of(case.op(*args))
    graph, results = capture(lambda: case.op(*args))
    graph.replay()
    # Behind the entries that a schedule counts, tables of groups are not written.
    if case.op.name != "group_tables":
        for x, wanted in zip(_tensors_of(results), expected, strict=True):
            assert_bitwise_equal(x, wanted, "a replay")


def _tensors_of(results):
    return [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]


def test_a_key_is_made_on_the_device():
    with CopiesFromTheHost() as copies:
        random_bits.key_of(ops.StochasticRounding(1, 2, 3), torch.device("meta"))
    assert not copies.count


def test_take_key_counts_and_autograd_does_not_see_it():
    key, gradient = torch.tensor([1, 2, 3, 5]), random_tensor(4, 16)
    before, version = key.tolist(), key._version
    assert library.take_key(key, gradient).tolist() == before
    assert key.tolist() == [before[0], before[1], before[2] + 1, before[3]] and key._version == version
    tests = ("test_faketensor", "test_aot_dispatch_dynamic")
    assert set(torch.library.opcheck(library.take_key.default, (key, gradient), test_utils=tests).values()) == {
        "SUCCESS"
    }
