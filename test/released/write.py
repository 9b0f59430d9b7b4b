"""Write what this version saves to a new folder here, which tests of all later versions read:

    python test/released/write.py test/released/0.2.0

Run it once per release, with the released code, and add the folder. What later versions no longer have stays in older
folders.
"""

import dataclasses
import hashlib
import json
import pickle
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchao.core.config import config_to_dict
from torchao.quantization import quantize_

from torchao_blockwise import (
    BlockwiseFP8Tensor,
    BlockwiseFP8TrainingConfig,
    MasterWeightTensor,
    NVFP4Tensor,
    NVFP4TrainingConfig,
    checkpoint,
    linears_and_experts,
    load_recipe_state,
    recipe_state,
)
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.nn import SwiGLUExperts

CONFIGS = {"fp8": BlockwiseFP8TrainingConfig, "nvfp4": NVFP4TrainingConfig}
SIGNS = (1, -1) * 4 + (-1, -1, 1, 1) * 2
# One option each; all others at their defaults. As JSON has them.
COMMON = {
    "defaults": {},
    "high_precision": {"save_activations": "high_precision"},
    "quantized": {"master_weights": False},
    "reference": {"backend": "reference"},
    "bfloat16": {"out_dtype": "bfloat16"},
}
OPTIONS = {
    "fp8": {**COMMON, "power_of_2": {"power_of_2_scales": True}},
    "nvfp4": {
        **COMMON,
        "nearest": {"stochastic_rounding": False},
        "seed": {"seed": 2**63 + 1},
        "no_hadamard": {"hadamard": False},
        "signs": {"hadamard": SIGNS},
        "per_expert": {"scale_per_expert": True},
    },
}
# Models that are saved whole, by recipe, with the names in OPTIONS.
MODELS = {
    "fp8": ("defaults", "quantized", "power_of_2"),
    "nvfp4": ("defaults", "quantized", "per_expert"),
}
FORMATS = {
    "fp8_block": ("fp8", {}),
    "fp8_block_ue8m0": ("fp8", {"power_of_2_scales": True}),
    "nvfp4_compressed_tensors": ("nvfp4", {}),
    "nvfp4_modelopt": ("nvfp4", {}),
}


def config(recipe: str, options: dict):
    dtype = {"out_dtype": getattr(torch, options["out_dtype"])} if "out_dtype" in options else {}
    return CONFIGS[recipe](**options | dtype)


def model(recipe: str, options: dict, **more) -> nn.Module:
    """Two layers that engines fuse, and two experts; the same values at every call."""
    torch.manual_seed(0)
    layers = {"q_proj": nn.Linear(16, 20), "k_proj": nn.Linear(16, 20), "experts": SwiGLUExperts(2, 16, 8)}
    return converted(nn.ModuleDict(layers).bfloat16(), recipe, options, **more)


def attention(recipe: str, options: dict, **more) -> nn.Module:
    """Only layers, of whole blocks of NVFP4, as all formats have them."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(16, 32, bias=False) for name in ("q_proj", "k_proj")}
    return converted(nn.ModuleDict(layers).bfloat16(), recipe, options, **more)


def converted(layers: nn.Module, recipe: str, options: dict, **more) -> nn.Module:
    quantize_(layers, dataclasses.replace(config(recipe, options), **more), filter_fn=linears_and_experts())
    return layers


def master_optimizer(layers: nn.Module) -> MasterWeightOptimizer:
    return MasterWeightOptimizer(torch.optim.AdamW, layers, lr=1e-2, foreach=False)


def trained(recipe: str) -> tuple[nn.Module, MasterWeightOptimizer]:
    layers = converted(nn.Sequential(nn.Linear(16, 20)).bfloat16(), recipe, {}, master_weights=False)
    optimizer = master_optimizer(layers)
    for parameter in layers.parameters():
        parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)
    optimizer.step()
    return layers, optimizer


def drawn(layers: nn.Module) -> dict[str, dict[str, int]]:
    """The recipe state of a model whose weights have drawn random bits."""
    state = {name: {**numbers, "use": 5 + i} for i, (name, numbers) in enumerate(recipe_state(layers).items())}
    load_recipe_state(layers, state)
    return state


def weights() -> dict[str, nn.Parameter]:
    w = torch.linspace(-3, 3, 20 * 32).reshape(20, 32).bfloat16()
    return {
        "master_fp8": nn.Parameter(MasterWeightTensor(w, BlockwiseFP8TrainingConfig(power_of_2_scales=True))),
        "master_nvfp4": nn.Parameter(MasterWeightTensor(w, NVFP4TrainingConfig(seed=3))),
        "fp8": nn.Parameter(BlockwiseFP8Tensor.from_hp(w)),
        "fp8_power_of_2": nn.Parameter(BlockwiseFP8Tensor.from_hp(w, power_of_2_scales=True)),
        "nvfp4": nn.Parameter(NVFP4Tensor.from_hp(w)),
        "nvfp4_rows": nn.Parameter(NVFP4Tensor.from_hp(w, block_size=(1, 16)), requires_grad=False),
    }


def digests(value: object, path: str = "") -> dict[str, str]:
    """A digest of each tensor and number in nested dicts and lists, of weights what is stored: no GEMM is in them."""
    if isinstance(value, MasterWeightTensor):
        value = {"hp": value.hp}
    elif isinstance(value, BlockwiseFP8Tensor):
        value = {"qdata": value.qdata, "scale": value.scale}
    elif isinstance(value, NVFP4Tensor):
        value = {"qdata": value.qdata, "scale": value.scale, "global_scale": value.global_scale}
    if isinstance(value, dict):
        return {k: d for name, x in value.items() for k, d in digests(x, f"{path}/{name}").items()}
    if isinstance(value, (list, tuple)):
        return digests(dict(enumerate(value)), path)
    data = repr(value).encode()
    if isinstance(value, torch.Tensor):
        bytes_of = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        data = f"{value.dtype} {list(value.shape)} ".encode() + bytes_of
    return {path: hashlib.sha256(data).hexdigest()[:12]}


def state_of(layers: nn.Module) -> dict:
    return {"parameters": dict(layers.named_parameters()), "recipe": recipe_state(layers)}


def write_configs(folder: Path) -> None:
    for recipe, options in OPTIONS.items():
        for name, given in options.items():
            made = config(recipe, given)
            file = folder / "configs" / f"{recipe}-{name}"
            file.parent.mkdir(exist_ok=True)
            torch.save(made, f"{file}.pt")
            Path(f"{file}.pickle").write_bytes(pickle.dumps(made))
            saved = {"recipe": recipe, "options": given, "transformers": of_transformers(recipe, given)}
            if not any(isinstance(x, (list, tuple)) for x in given.values()):
                # torchao refuses tuples.
                saved["torchao"] = config_to_dict(made)
            Path(f"{file}.json").write_text(json.dumps(saved) + "\n")


def of_transformers(recipe: str, options: dict) -> dict:
    from torchao_blockwise.integrations.transformers import BlockwiseFP8Config, NVFP4Config

    return {"fp8": BlockwiseFP8Config, "nvfp4": NVFP4Config}[recipe](**options).to_dict()


def write_models(folder: Path) -> dict:
    found = {}
    for recipe, names in MODELS.items():
        for name in names:
            layers = model(recipe, OPTIONS[recipe][name])
            drawn(layers)
            torch.save(layers, folder / f"model-{recipe}-{name}.pt")
            found[f"model-{recipe}-{name}"] = digests(state_of(layers))
    return found


def write_states(folder: Path) -> dict:
    found = {}
    torch.save(weights(), folder / "weights.pt")
    found["weights"] = digests(weights())
    for recipe in CONFIGS:
        for suffix, more in (("", {}), ("-quantized", {"master_weights": False})):
            layers, again = (model(recipe, {}, **more) for _ in range(2))
            state = {"model": layers.state_dict(), "recipe": drawn(layers)}
            torch.save(state, folder / f"state-{recipe}{suffix}.pt")
            again.load_state_dict(state["model"])
            load_recipe_state(again, state["recipe"])
            found[f"state-{recipe}{suffix}"] = digests(state_of(again))
        layers, optimizer = trained(recipe)
        state = {"model": layers.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, folder / f"optimizer-{recipe}.pt")
        found[f"optimizer-{recipe}"] = digests([dict(layers.named_parameters()), optimizer.model_state_dict()])
    layers = model("nvfp4", {})
    dcp.save({"model": layers.state_dict()}, checkpoint_id=folder / "dcp", no_dist=True)
    found["dcp"] = digests(dict(layers.named_parameters()))
    return found


def write_exports(folder: Path) -> dict:
    found = {}
    for format, given in FORMATS.items():
        checkpoint.export(attention(*given), folder / format, format=format)
        layers = attention(*given)
        checkpoint.load(layers, folder / format)
        found[format] = digests(dict(layers.named_parameters()))
    return found


def write_transformers(folder: Path) -> None:
    import transformers

    from torchao_blockwise.integrations.transformers import BlockwiseFP8Config, NVFP4Config

    for recipe, kind in {"fp8": BlockwiseFP8Config, "nvfp4": NVFP4Config}.items():
        with tempfile.TemporaryDirectory() as plain:
            llama().save_pretrained(plain)
            layers = transformers.AutoModelForCausalLM.from_pretrained(plain, quantization_config=kind())
        with tempfile.TemporaryDirectory() as saved:
            layers.save_pretrained(saved)
            (folder / f"pretrained-{recipe}.json").write_text((Path(saved) / "config.json").read_text())


def llama() -> nn.Module:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    write_configs(folder)
    found = write_models(folder) | write_states(folder) | write_exports(folder)
    write_transformers(folder)
    (folder / "digests.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
