"""Peers for the same work: their GEMMs, quantizers and layers, each optional, each with its reason.

tensorwise   cuBLASLt, e4m3 with one scale a tensor: what no block scaling reaches
cublaslt, deep_gemm   scales laid out beforehand; DeepGEMM's grad_weight adds into fp32
torchao      torchao.prototype.blockwise_fp8_training, whose layer multiplies through cuBLASLt
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torchao import float8
from torchao.quantization import quantize_

from common.driver import Peer
from common.errors import Unavailable
from common.products import Product
from common.roofline import tensorwise, to_tensorwise
from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig
from torchao_blockwise._compat import deep_gemm_library
from torchao_blockwise.formats import FP8_1X128

_BLOCK = FP8_1X128.block[1]

# Ours, of the same weights. "128x128": `grad_weight_blocks`, else "1x128". "saved": `save_weights="quantized"`.
# "primary": Parameters that are quantized themselves.
# "nvfp4" is without the transform and random bits, which "full" has.
OUR_CONFIGS = {
    "fp8": BlockwiseFP8TrainingConfig(grad_weight_blocks="1x128"),
    "fp8_128x128": BlockwiseFP8TrainingConfig(),
    "fp8_saved": BlockwiseFP8TrainingConfig(grad_weight_blocks="1x128", save_weights="quantized"),
    "fp8_128x128_saved": BlockwiseFP8TrainingConfig(save_weights="quantized"),
    "fp8_primary": BlockwiseFP8TrainingConfig(grad_weight_blocks="1x128", master_weights=False),
    "nvfp4": NVFP4TrainingConfig(hadamard=False, stochastic_rounding=False),
    "nvfp4_full": NVFP4TrainingConfig(),
}

PRODUCTS = ("bf16", "tensorwise", "cublaslt", "deep_gemm")
# What compiles for each shape runs only where it is named.
QUICK_PRODUCTS = PRODUCTS[:3]


def product_peer(name: str, product: Product, device: torch.device) -> Peer:
    """The peer of that name, which prepares (a_hp, b_hp, a, b): in high precision and ours; raises Unavailable."""
    makers = {"bf16": _bf16, "tensorwise": _tensorwise, "cublaslt": _cublaslt, "deep_gemm": _deep_gemm}
    maker = makers[name]
    if name != "bf16" and product.recipe == "nvfp4":
        raise Unavailable("compared in FP8 only")
    return maker(product, device)


def _bf16(product: Product, device: torch.device) -> Peer:
    return Peer(lambda a, b: a @ b.t(), lambda a_hp, b_hp, a, b: (a_hp, b_hp))


def _tensorwise(product: Product, device: torch.device) -> Peer:
    need_multiples("N and K", product.mnk[1:], 16)
    return Peer(tensorwise, lambda a_hp, b_hp, a, b: (*to_tensorwise(a_hp), *to_tensorwise(b_hp)))


def _cublaslt(product: Product, device: torch.device) -> Peer:
    need_capability(device, (9, 0))
    m, n, k = product.mnk
    need_multiples("N and K", (n, k), 16)
    one_row = product.formats[1].block[0] == 1
    need_multiples("rows of 1x128 operands", (m, n) if one_row else (m,), 4)
    types = F.ScalingType
    b_type = types.BlockWise1x128 if one_row else types.BlockWise128x128

    def prepare(a_hp, b_hp, a, b):
        # Rows of 128x128 scales fill 16 bytes.
        b_scale = b.scale if one_row else F.pad(b.scale, (0, -b.scale.shape[1] % 4), value=1.0)
        return a.qdata, a.scale.t(), b.qdata.t(), b_scale.t()

    def run(a, a_scale, b, b_scale):
        return F.scaled_mm(a, b, a_scale, types.BlockWise1x128, b_scale, b_type, output_dtype=torch.bfloat16)

    return Peer(run, prepare, same_operands=True)


def _deep_gemm(product: Product, device: torch.device) -> Peer:
    need_capability(device, (9, 0))
    deep_gemm = import_deep_gemm(device)
    m, n, k = product.mnk
    one_row = product.formats[1].block[0] == 1
    need_multiples("rows of scales, for their copies by TMA,", (m, n) if one_row else (m,), 4)
    need_multiples("K", (k,), 16)

    def prepare(a_hp, b_hp, a, b):
        out = [torch.zeros(m, n, device=device)] * one_row
        return a.qdata, a.scale.t(), b.qdata, b.scale.t() if one_row else b.scale, *out

    def add(a, a_scale, b, b_scale, out):
        # Recipe: one row of a and of b a scale. It adds into fp32 that is there already; C and D are the same.
        deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), out, c=out, recipe=(1, 1, _BLOCK))

    def run(a, a_scale, b, b_scale):
        out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
        deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), out)
        return out

    return Peer(add if one_row else run, prepare, same_operands=True)


# --- quantizers -------------------------------------------------------------------------------------------------------


def torchao_quantizer(case: str, rows: int, columns: int, device: torch.device) -> Peer:
    """torchao's kernel that does the work of `case` in bench_quantize; raises Unavailable."""
    need_capability(device, (8, 9), at_least=True)
    need_multiples("rows and columns", (rows, columns), _BLOCK)
    kernels = torchao_kernels()
    rowwise = kernels.triton_fp8_blockwise_act_quant_lhs
    columnwise = kernels.triton_fp8_blockwise_act_quant_transposed_lhs
    runs = {
        "rowwise": rowwise,
        "columnwise": columnwise,
        "both": lambda x: (*rowwise(x), *columnwise(x)),
        "weight": kernels.triton_fp8_blockwise_weight_quant_transposed_rhs,
    }
    if case not in runs:
        raise Unavailable("torchao has no such kernel")
    return Peer(runs[case])


# --- layers -----------------------------------------------------------------------------------------------------------

# Recipes that torch.compile takes long for, at every shape again.
COMPILED = ("torchao_tensorwise", "torchao_rowwise", "bf16_compiled")


def convert(model: nn.Module, recipe: str, device: torch.device) -> nn.Module:
    """The model whose linear layers without bias train by `recipe`; raises Unavailable, or KeyError for no recipe."""
    if recipe == "bf16":
        return model
    if recipe in OUR_CONFIGS:
        quantize_(model, OUR_CONFIGS[recipe])
        return model
    if recipe == "torchao":
        need_capability(device, (9, 0))
        torchao_kernels()
        from torchao.prototype.blockwise_fp8_training import linear

        widths = [s for m in model.modules() if isinstance(m, nn.Linear) for s in m.weight.shape]
        need_multiples("features", widths, _BLOCK)
        quantize_(model, linear.Float8BlockwiseLinearConfig(), filter_fn=lambda m, fqn: isinstance(m, nn.Linear))
        return model
    granularity = {"torchao_tensorwise": "tensorwise", "torchao_rowwise": "rowwise"}[recipe]
    need_capability(device, (8, 9), at_least=True)
    config = float8.Float8LinearConfig.from_recipe_name(granularity)
    return float8.convert_to_float8_training(model, config=config)


def compile_options(device: torch.device) -> dict:
    """Of torch.compile, for fixed shapes; without a GPU only as far as graphs go, for which no compiler is needed."""
    return {"backend": "inductor" if device.type == "cuda" else "aot_eager", "dynamic": False}


def compile_model(model: nn.Module, device: torch.device) -> nn.Module:
    return torch.compile(model, **compile_options(device))


def torchao_grouped_product(device: torch.device, widths: Iterable[int]) -> Callable:
    """(x [M, K], weight [E, K, N], ends) -> [M, N] by torchao's blockwise FP8 training; raises Unavailable."""
    # Without DeepGEMM it dequantizes, which is not compared.
    need_capability(device, (9, 0))
    import_deep_gemm(device)
    torchao_kernels()
    need_multiples("dim and hidden", widths, _BLOCK)
    from torchao.prototype.moe_training.blockwise_fp8 import grouped_mm as grouped

    return functools.partial(grouped._to_fp8_blockwise_then_scaled_grouped_mm, out_dtype=torch.bfloat16)


# --- what is there ----------------------------------------------------------------------------------------------------


@functools.cache
def torchao_kernels():
    """torchao's blockwise kernels, with fewer variants to compile and to try.

    Its quantizers have no loop, so variants that differ only in pipeline stages are the same code.
    """
    from torchao.prototype.blockwise_fp8_training import kernels
    from triton.testing import do_bench

    for name, kernel in vars(kernels).items():
        if not hasattr(kernel, "configs"):
            continue
        kernel.do_bench = functools.partial(do_bench, warmup=5, rep=20)
        if "_quant_" in name:
            stages = min(config.num_stages for config in kernel.configs)
            kernel.configs = [config for config in kernel.configs if config.num_stages == stages]
    return kernels


def import_deep_gemm(device: torch.device):
    """DeepGEMM, where it runs on this device; raises Unavailable."""
    if isinstance(why := deep_gemm_library.product_on(device.index or 0), str):
        raise Unavailable(why)
    import deep_gemm

    return deep_gemm


def need_capability(device: torch.device, wanted: tuple[int, int], *, at_least: bool = False) -> None:
    have = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if have is None or (have < wanted if at_least else have != wanted):
        got = device.type if have is None else f"sm_{have[0]}{have[1]}"
        raise Unavailable(f"needs sm_{wanted[0]}{wanted[1]}{' or newer' if at_least else ''}, got {got}")


def need_multiples(what: str, sizes: Iterable[int], of: int) -> None:
    sizes = list(sizes)
    if any(size % of for size in sizes):
        raise Unavailable(f"{what} must be multiples of {of}, got {', '.join(map(str, sizes))}")
