"""Memory: what is saved for backward, and how long quantized copies live."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers import FP8, NVFP4, both_formats, mlp, replace, weight_calls
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torchao.quantization import quantize_

from torchao_blockwise.formats import Copies
from torchao_blockwise.nn import SwiGLUMLP, gemms, swiglu_layer
from torchao_blockwise.nn import layer as layer_module
from torchao_blockwise.ops.padding import padded_size
from torchao_blockwise.tensors import quantized, weight_operands

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


@both_formats
def test_high_precision_activations_save_the_input_itself(config):
    layer, x = converted(replace(config, save_activations="high_precision")), torch.randn(300, 384, requires_grad=True)
    plain = [t for t in saved_tensors(lambda: layer(x)) if type(t) is torch.Tensor]
    assert len(plain) == 1 and plain[0].data_ptr() == x.data_ptr() and plain[0].shape == x.shape


@both_formats
def test_a_frozen_weight_saves_nothing_of_the_input(config):
    layer, x = converted(config).requires_grad_(False), torch.randn(300, 384, requires_grad=True)
    assert [t.shape for t in saved_tensors(lambda: layer(x))] == [(256, 384)]


def alive(refs) -> list[bool]:
    gc.collect()
    return [not ref.expired() for ref in refs]


@both_formats
@pytest.mark.parametrize("backend", (None, "aot_eager"), ids=("eager", "compiled"))
def test_copies_of_a_weight_die_with_their_product(config, backend, monkeypatch):
    """Each is quantized straight from the values, used once, and gone before the next one is made."""
    model = mlp(config, bias=False)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
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


@pytest.mark.parametrize("config", (FP8, NVFP4), ids=("fp8", "nvfp4"))
def test_columnwise_copies_of_quantised_parameters_die_too(config, monkeypatch):
    layer, refs, real = converted(replace(config, master_weights=False)), [], quantized.ops.transpose

    def transpose(*args, **kwargs):
        result = real(*args, **kwargs)
        refs.extend(StorageWeakRef(t.untyped_storage()) for t in result[:2])
        return result

    monkeypatch.setattr(quantized.ops, "transpose", transpose)
    layer(torch.randn(30, 384, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert alive(refs) == [False, False]


@both_formats
def test_a_step_leaves_only_parameters_and_gradients(config):
    """Every tensor that is alive after forward and backward, by bytes."""
    model = mlp(config, (256, 512, 256), bias=False)
    gc.collect()
    before = {id(t) for t in gc.get_objects() if isinstance(t, torch.Tensor)}
    out = model(torch.randn(64, 256))
    out.sum().backward()
    del out
    grads = [p.grad for p in model.parameters()]
    gc.collect()
    created = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and id(t) not in before]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in created if type(t) is torch.Tensor
    }
    assert sum(storages.values()) == sum(g.nbytes for g in grads)


def recorded(monkeypatch, module, name, refs, key="") -> None:
    """Have what `module.name` makes, a tensor or copies of one, in `refs`: {name: references to its storages}."""
    real = getattr(module, name)

    def record(*args, **kwargs):
        result = real(*args, **kwargs)
        tensors = [copy.qdata for copy in result if copy is not None] if isinstance(result, Copies) else [result]
        refs.setdefault(key or name, []).extend(StorageWeakRef(t.untyped_storage()) for t in tensors)
        return result

    monkeypatch.setattr(module, name, record)


def seen_alive(monkeypatch, module, name, refs, seen) -> None:
    """Have in `seen`, at each call of `module.name`, which of `refs` are alive."""
    real = getattr(module, name)

    def look(*args, **kwargs):
        seen.append((name, {key: sum(alive(of_key)) for key, of_key in refs.items()}))
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, look)


@both_formats
def test_copies_of_gradients_die_with_their_product(config, monkeypatch):
    layer, refs, seen = converted(config), {}, []
    y = layer(torch.randn(30, 384, dtype=torch.bfloat16, requires_grad=True))
    recorded(monkeypatch, layer_module, "quantize", refs)
    seen_alive(monkeypatch, gemms, "grad_weight", refs, seen)
    y.sum().backward()
    # Of dy's two copies the columnwise one.
    assert seen == [("grad_weight", {"quantize": 1})]


def test_copies_in_a_gated_mlp_die_with_their_products(monkeypatch):
    layer, refs, seen = SwiGLUMLP(64, 128).bfloat16(), {}, []
    quantize_(layer, FP8)
    recorded(monkeypatch, swiglu_layer, "weight_gemm", refs)
    y = layer(torch.randn(30, 64, dtype=torch.bfloat16, requires_grad=True))
    recorded(monkeypatch, swiglu_layer, "quantize", refs)
    recorded(monkeypatch, gemms, "weight_gemm", refs, "grad_input")
    seen_alive(monkeypatch, swiglu_layer.ops, "swiglu_backward_quantize", refs, seen)
    recorded(monkeypatch, swiglu_layer.ops, "swiglu_backward_quantize", refs)
    seen_alive(monkeypatch, gemms, "grad_weight", refs, seen)
    y.sum().backward()
    assert seen == [
        # (gate | up) and y are there.
        ("grad_weight", {"weight_gemm": 2, "quantize": 2}),
        # dy's copies are gone, dh is there.
        ("swiglu_backward_quantize", {"weight_gemm": 2, "quantize": 0, "grad_input": 1}),
        # (gate | up), dh and the gradients' rowwise copy are gone; dx and the columnwise copy are there.
        ("grad_weight", {"weight_gemm": 1, "quantize": 0, "grad_input": 1, "swiglu_backward_quantize": 1}),
    ]


def test_a_graph_that_is_kept_keeps_what_it_saved():
    layer = SwiGLUMLP(64, 128).bfloat16()
    quantize_(layer, FP8)
    x = torch.randn(30, 64, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    first, second = (
        torch.autograd.grad(y.sum(), (x, *layer.parameters()), retain_graph=keep) for keep in (True, False)
    )
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
