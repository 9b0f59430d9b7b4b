"""Tiny models of transformers, and what is in the folders that they are exported to."""

import copy
import hashlib
import warnings
from pathlib import Path

import pytest
import torch
from helpers import FP8, FP8_POW2, NVFP4, converted
from torch import nn

from torchao_blockwise import MasterWeightTensor, _compat, checkpoint, linears_and_experts, skip_lm_head
from torchao_blockwise.diagnostics import live_memory
from torchao_blockwise.formats import E2M1, Operand
from torchao_blockwise.tensors import QuantizedTensor

safetensors = pytest.importorskip("safetensors.torch")

SMALL = {"vocab_size": 64, "hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 48}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 320, "max_position_embeddings": 64}
_LATENT = {"q_lora_rank": 96, "kv_lora_rank": 160, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
MODELS = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen3Moe": {"moe_intermediate_size": 128, "num_experts": 3, "num_experts_per_tok": 2},
    "Mixtral": {"num_local_experts": 3, "intermediate_size": 256},
    "DeepseekV3": _LATENT | {"n_routed_experts": 4, "moe_intermediate_size": 128, "n_group": 1, "topk_group": 1,
                             "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}  # fmt: skip


def language_model(name: str, config=FP8, **more):
    transformers = pytest.importorskip("transformers", "5.0")
    options = SMALL | MODELS.get(name, {}) | more
    if name == "DeepseekV3":
        del options["head_dim"]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**options))
    return converted(model, config, linears_and_experts() & skip_lm_head())


# The config that each format of files is of.
FORMATS = {
    "fp8_block": FP8,
    "fp8_block_ue8m0": FP8_POW2,
    "nvfp4_compressed_tensors": NVFP4,
    "nvfp4_modelopt": NVFP4,
}
every_format = pytest.mark.parametrize("format", FORMATS)


def export(model: nn.Module, folder: Path, format: str = "fp8_block") -> dict[str, torch.Tensor]:
    """The tensors of the files; what `export` warns of is not shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        checkpoint.export(model, folder, format)
    return tensors_in(folder)


def save(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def compressed_tensors(format: object = "float-quantized", block: object = [128, 128], **groups: object) -> dict:
    """Its settings of files in blocks of FP8. groups: {name: format of its layers}."""
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": block, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights}
    made = {name: group | {"format": x} for name, x in groups.items()} or {"group_0": group}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": made}


def filled(model: nn.Module, value: float = 1.0) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.full(p.shape, value))
    return model


def alike_layers(config, width: int, count: int) -> nn.Sequential:
    """All alike: the memory that reading takes depends on values, a little."""
    torch.manual_seed(0)
    layer = nn.Linear(width, width, bias=False)
    return converted(nn.Sequential(*(copy.deepcopy(layer) for _ in range(count))), config)


def tensors_in(folder) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors.load_file(file)
    return found


def values_of(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return x.hp if isinstance(x, MasterWeightTensor) else x.dequantize() if isinstance(x, QuantizedTensor) else x


def operand_of(weight: torch.Tensor) -> Operand:
    return weight.quantized() if isinstance(weight, MasterWeightTensor) else weight.operand()


def decoded(found: dict[str, torch.Tensor], name: str, scale: str | None = None) -> torch.Tensor:
    """By the rules of the formats, the values of a weight in files. scale: the name of its scales in FP8."""
    if name in found and found[name].dtype == torch.float8_e4m3fn:
        codes, grid = found[name].float(), found[scale or f"{name}_scale_inv"].float()
        rows = grid.repeat_interleave(128, -2)[..., : codes.shape[-2], :]
        return codes * rows.repeat_interleave(128, -1)[..., : codes.shape[-1]]
    if name in found:
        packed, factor = found[name], found[f"{name}_scale_2"]
    else:
        packed, factor = found[f"{name}_packed"], 1 / found[f"{name}_global_scale"]
    codes = E2M1.decode(packed, 2 * packed.shape[-1]).float()
    return codes * (found[f"{name}_scale"].float() * factor).repeat_interleave(16, -1)


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


PRODUCTS = ("torchao_blockwise::matmul", "torchao_blockwise::grouped_matmul")


class OperandsRead(live_memory.LiveMemory):
    """Under it `operands` get (payload, scale, tensor scale or None) of each product's weight, as kernels get them."""

    def __init__(self):
        super().__init__()
        self.operands: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _compat.schema_of(func).name in PRODUCTS:
            self.operands.append(tuple(None if x is None else x.detach().clone() for x in args[4:7]))
        return super().__torch_dispatch__(func, types, args, kwargs)


def assert_files_hold(operands, found: dict[str, torch.Tensor]) -> None:
    """Each quantized weight of the files is an operand by SHA-256, with its scales; and all operands are there."""
    read = set()
    for qdata, scale, tensor_scale in operands:
        if tensor_scale is not None:
            scale = scale.repeat_interleave(16, -2)[..., : qdata.shape[-2], :]
        factor = None if tensor_scale is None else tensor_scale.reshape(1).reciprocal()
        read.add((digest(qdata), digest(scale), None if factor is None else digest(factor)))
    packed = any(name.endswith("_packed") for name in found)
    ends = ("_packed", "_scale", "_global_scale") if packed else ("", "_scale_inv")
    weights = [name.removesuffix(ends[1]) for name in found if name.endswith(ends[1]) and "global" not in name]
    held = {tuple(digest(found[name + end]) for end in ends) + (None,) * (3 - len(ends)) for name in weights}
    assert held and held == read


def losses(model, steps: int = 3, lr: float = 1e-3) -> list[float]:
    """Of steps of AdamW on what trains, if anything does."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr) if parameters else None
    ids, found = torch.arange(16, device=next(model.parameters()).device).view(2, 8), []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        found.append(loss.item())
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(8)[None]).logits


# Every mixture of experts of transformers 5.23 that these options, where its configuration has them, make tiny.
TINY = SMALL | _LATENT | {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "n_group": 1}
TINY |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
TINY |= {
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What these take only so; a configuration may have other values for some layers, and says so where it is asked.
_ALSO = {
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2, "vocab_size_per_layer_input": 64},
    "glm5_next_text": {"num_key_value_heads": 4, "qk_rope_head_dim": 0},
    "zaya": {"num_experts_per_tok": 1},
}


def config_of_transformers(family: str, **options):
    transformers = pytest.importorskip("transformers", "5.0")
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return transformers.AutoConfig.for_model(family, **options)


def of_transformers(family: str, cls: str | None = None, device: str = "meta", **options) -> nn.Module:
    """A model without values, on meta, or with random ones; by default a causal language model where there is one."""
    transformers, config = pytest.importorskip("transformers", "5.0"), config_of_transformers(family, **options)
    torch.manual_seed(0)
    with torch.device(device):
        if cls is not None:
            return getattr(transformers, cls)(config)
        try:
            return transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:
            return transformers.AutoModel.from_config(config)


def tiny_mixture(family: str, device: str = "meta") -> nn.Module:
    # The defaults of some families make no model.
    default = config_of_transformers(family)
    has = {*dir(default), *default.attribute_map}
    options = {name: x for name, x in (TINY | _ALSO.get(family, {})).items() if name in has}
    return of_transformers(family, device=device, **options)
