"""Memory: what is saved for backward, and how long quantized copies live."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers import both_formats, mlp, weight_calls
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torchao.quantization import quantize_

from torchao_blockwise.ops.padding import padded_size
from torchao_blockwise.tensors import weight_operands

pytestmark = pytest.mark.usefixtures("no_interpreter", "small_heap")


def saved_tensors(run) -> list[torch.Tensor]:
    """The distinct tensors that `run` saves for backward."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        saved.append(run())
    return list({id(t): t for t in saved[:-1]}.values())


def converted(config, n: int = 256, k: int = 384, dtype=torch.bfloat16) -> nn.Linear:
    layer = nn.Linear(k, n, bias=False, dtype=dtype)
    quantize_(layer, config)
    return layer


@both_formats
@pytest.mark.parametrize("tokens", (300, 1, 128))
def test_saved_for_backward_are_the_columnwise_copy_and_the_weight(config, tokens):
    layer, x = converted(config), torch.randn(tokens, 384, dtype=torch.bfloat16, requires_grad=True)
    weight, *copies = saved_tensors(lambda: layer(x))
    assert weight.hp is layer.weight.hp and all(type(t) is torch.Tensor for t in copies)
    fmt = config.activation_format
    shape = 384, padded_size(tokens)
    expected = [(fmt.qdata_shape(*shape), fmt.element.storage_dtype), (fmt.scale_shape(*shape), fmt.scale_dtype)]
    expected += [((), torch.float32)] * fmt.has_global_scale
    assert [(tuple(t.shape), t.dtype) for t in copies] == expected
    assert sum(t.nbytes for t in copies) == fmt.nbytes(*shape)


def alive(refs) -> list[bool]:
    gc.collect()
    return [not ref.expired() for ref in refs]


@both_formats
def test_copies_of_a_weight_die_with_their_product_also_compiled(config, monkeypatch):
    """Each is quantized straight from the values, used once, and gone before the next one is made."""
    model = mlp(config, bias=False)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, refs, seen, real = torch.randn(300, 64, requires_grad=True), [], [], weight_operands.ops.quantize_by

    def quantize_by(values, options, **kwargs):
        seen.append((options.columnwise, any(alive(refs))))
        result = real(values, options, **kwargs)
        copy = result.columnwise if options.columnwise else result.rowwise
        refs.extend(StorageWeakRef(t.untyped_storage()) for t in copy[:2])
        return result

    with weight_calls() as calls:
        monkeypatch.setattr(weight_operands.ops, "quantize_by", quantize_by)
        for _ in range(2):
            out = run(x)
            assert not any(alive(refs)) and [m.weight.quantized_bytes for m in (model[0], model[2])] == [0, 0]
            out.sum().backward()
    assert not any(alive(refs)) and len(refs) == 2 * len(seen) and calls.transpose == 0
    assert seen == [(False, False), (False, False), (True, False), (True, False)] * 2
