"""vLLM's own linear layers, FP8 config and loaders, from its files, without CUDA and without installing it.

$VLLM_SOURCE is a folder that holds `vllm/`, such as a checkout of 0.33, or a wheel:

    pip download vllm==0.33.0 --no-deps && unzip vllm-*.whl -d vllm-source
    VLLM_SOURCE=vllm-source pytest -m slow -s test/integrations/test_over_ranks.py -k rollout

Only the modules in `_REAL` are executed. Every other module of vLLM is replaced by mocks.
"""

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

SOURCE = Path(os.environ.get("VLLM_SOURCE", ""))
if not (SOURCE / "vllm" / "model_executor").is_dir():
    pytest.skip("VLLM_SOURCE names no folder with vLLM's sources", allow_module_level=True)
_LAYERS = "vllm.model_executor.layers"
_REAL = {
    "vllm.model_executor.parameter",
    f"{_LAYERS}.linear",
    f"{_LAYERS}.quantization.base_config",
    f"{_LAYERS}.quantization.fp8",
    f"{_LAYERS}.quantization.utils.fp8_utils",
    f"{_LAYERS}.quantization.utils.quant_utils",
}


class _Mocked(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=name))
        return self.__dict__[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "vllm":
            return None
        if name in _REAL:
            return importlib.util.spec_from_file_location(name, SOURCE / f"{name.replace('.', '/')}.py")
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Mocked(spec.name)

    def exec_module(self, module):
        pass


class _Layer(nn.Module):
    @classmethod
    def register(cls, name: str):
        return lambda layer: layer


def _set_attributes(x: torch.Tensor, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(x, name, value)


def load() -> types.SimpleNamespace:
    """Import vLLM's modules for one device; returns `linear`, `fp8` and `fp8_utils`.

    `import vllm` works in this process from then on, so call it in processes of a test only.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    of = importlib.import_module
    of("vllm.model_executor.custom_op").__dict__["PluggableLayer"] = _Layer
    of("vllm.model_executor.utils").__dict__["set_weight_attrs"] = _set_attributes
    of("vllm.distributed").__dict__.update(
        get_tensor_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_world_size=lambda: 1,
        divide=lambda a, b: a // b,
    )
    platform = of("vllm.platforms").current_platform
    for name in ("use_sync_weight_loader", "is_cuda_alike", "is_xpu", "is_fp8_fnuz"):
        getattr(platform, name).return_value = False
    platform.fp8_dtype.return_value = torch.float8_e4m3fn
    of(f"{_LAYERS}.quantization").__dict__["resolve_quant_method"] = lambda config, layer, prefix: (
        config.get_quant_method(layer, prefix)
    )
    triton = of("triton")
    of("vllm.triton_utils").__dict__.update(triton=triton, tl=of("triton.language"))
    linear, fp8 = of(f"{_LAYERS}.linear"), of(f"{_LAYERS}.quantization.fp8")
    of(f"{_LAYERS}.quantization.online.fp8").__dict__["OnlineLinearBase"] = type("OnlineLinearBase", (), {})
    # `isinstance` needs classes.
    fp8.__dict__.update(
        {name: type(name, (), {}) for name in ("RoutedExperts", "Attention", "MarlinFP8ScaledMMLinearKernel")}
    )
    return types.SimpleNamespace(linear=linear, fp8=fp8, fp8_utils=of(f"{_LAYERS}.quantization.utils.fp8_utils"))


def llama_data(name: str) -> Any:
    """Return the value of `orig_to_new_stacked` or `packed_modules_mapping` in vLLM's llama.py."""
    tree = ast.parse((SOURCE / "vllm/model_executor/models/llama.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == name:
            return ast.literal_eval(node.value)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return ast.literal_eval(node.value)
    raise AttributeError(name)
