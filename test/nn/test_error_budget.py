"""How far output and gradients lie from the fp64 layer: as far as the formats' rounding explains, on every backend."""

from __future__ import annotations

import pytest
import torch
from helpers import RECIPES, forward_backward, replace
from rounding_noise import accumulation, assert_noise_is_expected, noise_ratio, rounded
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128

# Tokens, N, K: ragged for 128 in each dim, and of the sizes that cuBLASLt takes.
SHAPE = (288, 224, 352)
# For Triton's interpreter.
SMALL = (144, 112, 176)
DTYPES = (torch.float32, torch.bfloat16)
SAVES = ("quantized", "high_precision")


def case(backend: str, device: str, shape, dtype, save: str):
    marks = (pytest.mark.gpu,) if device == "cuda" else ()
    where = {"cuda": "gpu", "cpu": "cpu"}[device]
    return pytest.param(backend, device, shape, dtype, save, marks=marks, id=f"{backend}-{where}-{dtype}-{save}")


CASES = [case("reference", "cpu", SHAPE, dtype, save) for dtype in DTYPES for save in SAVES]
CASES += [
    case(backend, "cuda", SHAPE, dtype, save)
    for backend in ("auto", "triton", "gluon", "cublas")
    for dtype in DTYPES
    for save in SAVES
]


def why_never(backend: str, config) -> str | None:
    """Return why a named backend cannot compute the GEMMs of a recipe on this GPU, or None if it must."""
    fp8, capability = config.activation_format is FP8_1X128, torch.cuda.get_device_capability()
    if backend == "gluon" and not (fp8 and capability == (9, 0)):
        return "Gluon kernels multiply FP8 on Hopper GPUs, by Triton 3.6 or newer"
    if backend == "cublas":
        cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
        if cuda < (12, 9) or not (capability == (9, 0) if fp8 else capability >= (10, 0)):
            return "cuBLASLt scales blocks of FP8 on Hopper and of NVFP4 on Blackwell GPUs, from CUDA 12.9 on"
    return None


def check_budget(config, device: str, shape, dtype) -> None:
    tokens, n, k = shape
    torch.manual_seed(0)
    x, dy = (torch.randn(tokens, size).to(device, dtype) for size in (k, n))
    layer = nn.Linear(k, n, dtype=dtype)
    nn.init.normal_(layer.weight)
    # The same values on every device.
    layer.to(device)
    w, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    quantize_(layer, config)
    output, grad_input, grad_weight, _ = forward_backward(layer, x, dy)

    def activation(t, fmt=config.activation_format):
        return rounded(t, fmt, config.power_of_2_scales)

    def weight(t):
        return rounded(t, config.weight_format, config.power_of_2_scales)

    along_tokens = activation(dy.mT), activation(x.mT, config.grad_weight_format)
    for name, product, contracted, bias_of in (
        ("output", (output, activation(x), weight(w)), k, bias),
        ("grad_input", (grad_input, activation(dy), weight(w.mT)), n, None),
        ("grad_weight", (grad_weight, *along_tokens), tokens, None),
    ):
        assert_noise_is_expected(name, *product, accumulation=accumulation(device, contracted), bias=bias_of)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("backend", "device", "shape", "dtype", "save"), CASES)
def test_noise_is_that_of_the_formats(recipe, backend, device, shape, dtype, save):
    config = replace(RECIPES[recipe], backend=backend)
    if save == "high_precision":
        config = replace(config, save_activations=save)
    reason = why_never(backend, config) if device == "cuda" else None
    if reason is not None:
        pytest.skip(reason)
    check_budget(config, device, shape, dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, not in the interpreter")
@pytest.mark.parametrize("recipe", RECIPES)
def test_noise_of_kernels_in_the_interpreter(recipe):
    check_budget(replace(RECIPES[recipe], backend="triton"), "cpu", SMALL, torch.bfloat16)


def decoded(t, config):
    q = ops.quantize(t, config.activation_format, power_of_2_scales=config.power_of_2_scales, backend="reference")
    return ops.dequantize(q.rowwise, columns=t.shape[1], dtype=torch.float64)


def toward_zero(t, config):
    half_a_step = (12 * rounded(t, config.activation_format, config.power_of_2_scales).variance).sqrt() / 2
    return decoded((t - t.sign() * half_a_step).float(), config)


ROUNDINGS = {
    "to nearest": decoded,
    "toward zero": toward_zero,
    "along columns and then rows": lambda t, config: decoded(decoded(t.mT, config).mT.float(), config),
    "of nothing": lambda t, config: t.double(),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_budget_sees_other_roundings(recipe, rounding):
    """Of one operand of a product; the other has half of the noise, and has it as it should."""
    config = RECIPES[recipe]
    torch.manual_seed(0)
    a, b = torch.randn(288, 352), torch.randn(224, 352)
    product = (ROUNDINGS[rounding](a, config) @ decoded(b, config).mT).float()
    models = [rounded(t, config.activation_format, config.power_of_2_scales) for t in (a, b)]
    ratio, least, most = noise_ratio(product, *models)
    # Scales that are powers of two leave an element on the grid of any other such scale.
    harmless = rounding == "to nearest" or (rounding.startswith("along") and config.power_of_2_scales)
    assert (least <= ratio <= most) == harmless, ratio
