"""Inference engines' own FP8 layers: what quantizes activations and multiplies, taken from their source files.

Each class has
    label                           the engine and its version
    sources                         {file: digest} of what was taken
    modes                           whether activations may get scales that are powers of 2: (False,), or (False, True)
    weight(qdata, scale, powers)    what the engine makes of a file's tensors when it loads them
    quantize(x, powers)             x [M, K] -> codes [M, K] e4m3, scales [M, K/128] f32
    multiply(codes, scales, weight, dtype)    -> [M, N]; None where the engine has only `linear`
    linear(x, weight, powers)       a layer: x [M, K] -> [M, N] in x's dtype
K is a multiple of 128, as the engines want it; N is any.

Written for vLLM 0.33, SGLang 0.5.23 and finegrained-fp8 4. Names that their functions use are given here; what stands
for a platform says that there is Triton and nothing compiled. So these are the kernels that engines have beside CUTLASS
and DeepGEMM; on CUDA vLLM and SGLang quantize what is contiguous by compiled kernels instead, of the same formulas.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_source
import torch
import triton
from engine_source import Source

from torchao_blockwise import ops
from torchao_blockwise.formats import E4M3, FP8_1X128, FP8_128X128, Operand

BLOCK = list(FP8_128X128.block)
Weight = tuple[torch.Tensor, torch.Tensor]


def device_name(*_: object) -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


class Engine:
    """What the engines below have in common."""

    package: str
    name: str
    modes: tuple[bool, ...] = (False, True)
    # Of the root.
    files: tuple[str, ...] = ()

    def __init__(self, folder: Path | None):
        source = self.find(folder)
        self.label = f"{self.name} {source.version}"
        self.load(source)
        self.sources = {file: engine_source.digest(source.root / file) for file in self.files}

    def find(self, folder: Path | None) -> Source:
        return Source.of(self.package, folder)

    def load(self, source: Source) -> None:
        raise NotImplementedError

    def quantize(self, x: torch.Tensor, powers: bool) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def weight(self, qdata: torch.Tensor, scale: torch.Tensor, powers: bool) -> Weight:
        return qdata, scale

    def multiply(self, codes: torch.Tensor, scales: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError

    def linear(self, x: torch.Tensor, weight: Weight, powers: bool) -> torch.Tensor:
        return self.multiply(*self.quantize(x, powers), weight, x.dtype)


class VLLM(Engine):
    """`per_token_group_quant_fp8` and `w8a8_triton_block_scaled_mm`.

    powers: as before DeepGEMM, where vLLM quantizes weights with fp32 scales anew, by `requant_weight_ue8m0_inplace`.
    """

    package, name = "vllm", "vLLM"
    _UTILS = "vllm/model_executor/layers/quantization/utils"
    files = (f"{_UTILS}/fp8_utils.py", f"{_UTILS}/quant_utils.py", "vllm/utils/deep_gemm.py")

    def load(self, source: Source) -> None:
        fp8_utils, quant_utils, deep_gemm = self.files
        no = lambda: False  # noqa: E731
        # On CUDA and ROCm, `per_token_group_quant_fp8` takes a compiled kernel for what is contiguous.
        platform: Any = SimpleNamespace(is_cuda_alike=no, is_xpu=no, is_rocm=no, is_fp8_fnuz=no)
        platform.fp8_dtype = lambda: E4M3.storage_dtype
        platform.simple_compile_backend = "inductor"
        limits = source.functions(quant_utils, ["get_fp8_min_max"], current_platform=platform)
        casts = source.functions(
            deep_gemm, ["per_block_cast_to_fp8", "_ceil_to_ue8m0", "_align", "DEFAULT_BLOCK_SIZE"],
            current_platform=platform, cdiv=triton.cdiv, **vars(limits),
        )  # fmt: skip
        self._functions = source.functions(
            fp8_utils,
            ["_per_token_group_quant_fp8", "_per_token_group_quant_fp8_colmajor", "per_token_group_quant_fp8",
             "_w8a8_triton_block_scaled_mm", "get_w8a8_block_fp8_configs", "w8a8_triton_block_scaled_mm",
             "_upcast_e8m0_to_fp32", "requant_weight_ue8m0_inplace"],
            current_platform=platform, envs=SimpleNamespace(VLLM_BATCH_INVARIANT=False),
            get_device_name_as_file_name=lambda: re.sub(r"[\s/]+", "_", device_name()),
            imports={"vllm.utils.deep_gemm": casts}, **vars(limits),
        )  # fmt: skip

    def weight(self, qdata: torch.Tensor, scale: torch.Tensor, powers: bool) -> Weight:
        if powers and scale.dtype == torch.float32:
            qdata, scale = qdata.clone(), scale.clone()
            # vLLM compiles it: the same formula.
            with torch.compiler.set_stance("force_eager"):
                self._functions.requant_weight_ue8m0_inplace(qdata, scale, BLOCK)
        return qdata, scale

    def quantize(self, x: torch.Tensor, powers: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return self._functions.per_token_group_quant_fp8(x, BLOCK[1], use_ue8m0=powers)

    def multiply(self, codes: torch.Tensor, scales: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        return self._functions.w8a8_triton_block_scaled_mm(codes, weight[0], scales, weight[1], BLOCK, dtype)


class SGLang(Engine):
    """`_per_token_group_quant_8bit_raw`, Triton's `per_token_group_quant_fp8`, and `w8a8_block_fp8_matmul_triton`.

    powers: as for files that say `scale_fmt: ue8m0`.
    """

    package, name = "sglang", "SGLang"
    files = ("sglang/kernels/ops/quantization/fp8_kernel.py", "sglang/kernels/ops/gemm/fp8_kernel.py")

    def load(self, source: Source) -> None:
        quantization, gemm = self.files
        self._quantization = source.functions(
            quantization,
            ["_per_token_group_quant_8bit", "_per_token_group_quant_8bit_colmajor", "_per_token_group_quant_8bit_raw",
             "create_per_token_group_quant_fp8_output_scale"],
            _is_hip=False, fp8_dtype=E4M3.storage_dtype, fp8_max=E4M3.max,
            # Scales stay as the kernel wrote them, for Triton's product.
            imports={"deep_gemm": SimpleNamespace(transform_sf_into_required_layout=lambda scales, **_: scales)},
        )  # fmt: skip
        sm90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        self._gemm = source.functions(
            gemm,
            ["_w8a8_block_fp8_matmul", "_w8a8_block_fp8_matmul_hopper", "_reduce_block_fp8_split_k",
             "get_w8a8_block_fp8_configs", "select_w8a8_block_fp8_matmul_kernel", "prepare_block_fp8_matmul_inputs",
             "w8a8_block_fp8_matmul_triton"],
            _is_cuda=True, _is_gfx1250=False, get_platform=lambda: SimpleNamespace(is_sm90=sm90),
            get_device_name=device_name, log_info_on_rank0=lambda logger, text: logger.info(text),
        )  # fmt: skip

    def weight(self, qdata: torch.Tensor, scale: torch.Tensor, powers: bool) -> Weight:
        return qdata, scale.float()

    def quantize(self, x: torch.Tensor, powers: bool) -> tuple[torch.Tensor, torch.Tensor]:
        raw = self._quantization._per_token_group_quant_8bit_raw
        return raw(x, BLOCK[1], column_major_scales=powers, scale_ue8m0=powers)

    def multiply(self, codes: torch.Tensor, scales: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        return self._gemm.w8a8_block_fp8_matmul_triton(codes, weight[0], scales, weight[1], BLOCK, dtype)


class Transformers(Engine):
    """`_w8a8_block_dynamic_fp8_matmul` of the hub's finegrained-fp8, which quantizes and multiplies in one kernel.

    transformers gets these files from a hub; here they come from a checkout of kernels-community.
    """

    package, name = "finegrained-fp8", "transformers, finegrained-fp8"
    modes = (False,)
    _FOLDER = "finegrained-fp8/torch-ext/finegrained_fp8"
    files = (f"{_FOLDER}/utils.py", f"{_FOLDER}/matmul.py")
    multiply = None

    def find(self, folder: Path | None) -> Source:
        build = (folder or Path()) / "finegrained-fp8" / "build.toml"
        if folder is None or not build.is_file():
            wanted = "a checkout of kernels-community"
            raise ValueError(f"engines: {build} is missing, transformers' kernel comes from {wanted}; --source it")
        (version,) = re.findall(r"^version = (\d+)", build.read_text(encoding="utf-8"), flags=re.MULTILINE)
        return Source(folder, version)

    def load(self, source: Source) -> None:
        utils, matmul = self.files
        # Operations are called as functions. Nothing is tuned: along K the tile is the block all the same.
        plainly = {
            "triton_op": lambda name, mutates_args: lambda function: function,
            "wrap_triton": lambda kernel: kernel,
            "add_op_namespace_prefix": lambda name: name,
            "get_accelerator_autotuning_configs": lambda: [triton.Config({}, num_warps=4, num_stages=3)],
        }
        self._utils = source.functions(
            utils,
            ["FP8_DTYPE", "device_context", "ue8m0_as_uint8", "adaptive_block_size_m", "fp8_act_quant_inline",
             "decode_ue8m0_scale", "_fp8_act_quant_kernel", "_fp8_act_quant"],
            contextmanager=contextlib.contextmanager, **plainly,
        )  # fmt: skip
        self._matmul = source.functions(
            matmul,
            ["GROUP_SIZE_M", "_swizzle_offsets", "_store_masked", "w8a8_block_dynamic_fp8_matmul_kernel",
             "_w8a8_block_dynamic_fp8_matmul"],
            **plainly, **vars(self._utils),
        )  # fmt: skip

    def quantize(self, x: torch.Tensor, powers: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return self._utils._fp8_act_quant(x, BLOCK[1])

    def linear(self, x: torch.Tensor, weight: Weight, powers: bool) -> torch.Tensor:
        return self._matmul._w8a8_block_dynamic_fp8_matmul(x, *weight, BLOCK, x.dtype)


class Ours(Engine):
    """The control: this package's operations, from the same files; with a `backend` of products, another of its own."""

    def __init__(self, backend: str | None = None):
        self.backend, self.sources = backend, {}
        self.label = f"this package, {backend.title()}'s products" if backend else "this package"

    def weight(self, qdata: torch.Tensor, scale: torch.Tensor, powers: bool) -> Weight:
        return qdata, scale.float()

    def quantize(self, x: torch.Tensor, powers: bool) -> tuple[torch.Tensor, torch.Tensor]:
        operand = ops.quantize(x, FP8_1X128, power_of_2_scales=powers).rowwise
        return operand.qdata, operand.scale.mT

    def multiply(self, codes: torch.Tensor, scales: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        a = Operand(codes, scales.mT.contiguous(), None, FP8_1X128.name)
        return ops.matmul(a, Operand(*weight, None, FP8_128X128.name), out_dtype=dtype, backend=self.backend)


ENGINES: dict[str, type[Engine]] = {"vllm": VLLM, "sglang": SGLang, "transformers": Transformers}
