"""Rollouts of a model that FSDP2 trains, in vLLM's layers and by its loaders: only the cast of activations differs."""

import copy
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import vllm_source
from exported_models import language_model
from helpers import FP8, FP8_POW2
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint, ops, recommended_layers
from torchao_blockwise.formats import FP8_1X128, FP8_128X128

# (config, dtype in which FSDP2 gathers and layers compute)
MODELS = {
    "fp32 masters": (FP8, torch.float32),
    "bf16 forward": (FP8, torch.bfloat16),
    "powers of 2": (FP8_POW2, torch.bfloat16),
}
BLOCK = 128
VOCABULARY = 128
Cast = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def rollouts(rank: int, case: str) -> None:
    """KL divergences from the trainer, nats a token."""
    found = divergences(*MODELS[case])
    print(f"KL(trainer | rollout), {case}: {found}")
    assert found["cast of training"] == 0 and found["cast of vLLM"] < found["decoded weights"]
    assert case != "powers of 2" or found["cast of vLLM"] == 0
    if case == "fp32 masters":
        assert found["exports in bf16"] > 100 * found["cast of vLLM"]
    else:
        # FSDP2 gathers in bf16, so training itself quantizes the rounded values.
        assert found["exports in bf16"] == found["cast of vLLM"]
    of_ranks = [{}, {}]
    dist.all_gather_object(of_ranks, found)
    assert of_ranks[0] == of_ranks[1]


def divergences(config, dtype: torch.dtype) -> dict[str, float]:
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384, "vocab_size": VOCABULARY}
    model = language_model("Llama", None, **sizes, attn_implementation="eager")
    # Of a new model, probabilities are nearly uniform.
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    plain = copy.deepcopy(model)
    # Not the buffers: FSDP2 leaves the frequencies of rotary embeddings in fp32.
    for parameter in plain.parameters():
        parameter.data = parameter.to(dtype)
    quantize_(model, config, filter_fn=recommended_layers(model))
    for layer in (*model.model.layers, model):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = checkpoint.quantized_weights(model)
    sent = [(name, x.clone()) for name, x in weights]
    engine = Engine(plain, weights.quantization_config())
    held_out = torch.randint(VOCABULARY, (4, 33), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(held_out).logits.float().log_softmax(-1)

    def divergence(pairs: Iterable[tuple[str, torch.Tensor]], cast: Cast | None) -> float:
        engine.load(pairs)
        engine.cast = cast
        with torch.no_grad():
            got = engine.model(held_out).logits.float().log_softmax(-1)
        return (expected.exp() * (expected - got)).sum(-1).mean().item()

    # The state dict holds masters.
    state = {name: x.full_tensor() for name, x in model.state_dict().items()}
    exported = quantized_by_the_engine(state, sent, config)

    def by_vllm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cast_of_vllm(x, config.power_of_2_scales)

    return {
        "cast of training": divergence(sent, lambda x: cast_of_training(x, config.power_of_2_scales)),
        "cast of vLLM": divergence(sent, by_vllm),
        "exports in bf16": divergence(exported, by_vllm),
        "decoded weights": divergence(sent, None),
    }


def quantized_by_the_engine(state: dict, sent: list, config) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of `sent`, with quantized weights from values that were exported in bf16."""
    found = dict(sent)
    for name in [name for name in found if f"{name}_scale_inv" in found]:
        values = getattr(state[name], "hp", state[name]).bfloat16()
        weight = ops.quantize(values, FP8_128X128, power_of_2_scales=config.power_of_2_scales).rowwise
        found |= {name: weight.qdata, f"{name}_scale_inv": weight.scale}
    return [*found.items()]


def cast_of_training(x: torch.Tensor, power_of_2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, K] and scales [T, K / 128]."""
    made = ops.quantize(x, FP8_1X128, power_of_2_scales=power_of_2).rowwise
    return made.qdata, made.scale.mT


def cast_of_vllm(x: torch.Tensor, power_of_2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the formula of vLLM's kernels: x divided by amax / 448, which may be rounded up to a power of two."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1).clamp(min=1e-10) * (1.0 / 448)
    scale = scale.log2().ceil().exp2() if power_of_2 else scale
    return (blocks / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2), scale


def scales_of_vllm(rank: int, power_of_2: bool) -> None:
    """`cast_of_vllm` has the scales of vLLM's kernel in Triton's interpreter, which loses carries of codes in e4m3."""
    x = torch.randn(16, 3 * BLOCK, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    x[0, :BLOCK] = 0
    _, scales = vllm_source.load().fp8_utils.per_token_group_quant_fp8(x, BLOCK, use_ue8m0=power_of_2)
    assert torch.equal(scales, cast_of_vllm(x, power_of_2)[1])


class Engine:
    """A Llama whose linear layers are vLLM's: q, k and v are one, gate and up are one.

    cast: of activations; None keeps them in high precision, and decodes the weights.
    """

    cast: Cast | None = None

    def __init__(self, model: nn.Module, settings: dict) -> None:
        self.model, self.vllm = model, vllm_source.load()
        self.stacked = vllm_source.llama_data("orig_to_new_stacked")
        self.vllm.fp8.Fp8LinearMethod.apply = lambda method, layer, x, bias=None: self.linear(layer, x)
        config = self.vllm.fp8.Fp8Config.from_config(settings)
        config.packed_modules_mapping = vllm_source.llama_data("packed_modules_mapping")
        options = {"quant_config": config, "bias": False, "return_bias": False}
        linear, sizes = self.vllm.linear, model.config
        for i, block in enumerate(model.model.layers):
            attention, mlp, prefix = block.self_attn, block.mlp, f"model.layers.{i}"
            attention.qkv_proj = linear.QKVParallelLinear(
                sizes.hidden_size, sizes.head_dim, sizes.num_attention_heads, sizes.num_key_value_heads,
                prefix=f"{prefix}.self_attn.qkv_proj", **options,
            )  # fmt: skip
            mlp.gate_up_proj = linear.MergedColumnParallelLinear(
                sizes.hidden_size, [sizes.intermediate_size] * 2, prefix=f"{prefix}.mlp.gate_up_proj", **options
            )
            for name in (f"{prefix}.self_attn.o_proj", f"{prefix}.mlp.down_proj"):
                layer = model.get_submodule(name)
                made = linear.RowParallelLinear(layer.in_features, layer.out_features, prefix=name, **options)
                model.set_submodule(name, made)
            split(attention, attention.qkv_proj, ("q_proj", "k_proj", "v_proj"))
            split(mlp, mlp.gate_up_proj, ("gate_proj", "up_proj"))

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As vLLM's loader does: a weight's name says which part of which layer it is. All Parameters are filled."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for x in parameters.values():
                x.fill_(float("nan"))
            for name, x in pairs:
                old = next((part for part in self.stacked if f"{part}." in name), None)
                new, *shard = self.stacked.get(old, (old,))
                parameter = parameters[name if old is None else name.replace(old, new)]
                if hasattr(parameter, "weight_loader"):
                    parameter.weight_loader(parameter, x, *shard)
                else:
                    assert parameter.shape == x.shape, name
                    parameter.copy_(x)
        assert not any(x.float().isnan().any() for x in parameters.values())

    def linear(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Sum over blocks of 128 columns of (codes of x · codes of the weight) · both scales, in fp32."""
        weight, scale = layer.weight.float(), layer.weight_scale_inv.repeat_interleave(BLOCK, 0)[: len(layer.weight)]
        rows = x.reshape(-1, x.shape[-1])
        if self.cast is None:
            out = rows @ (weight * scale.repeat_interleave(BLOCK, 1)).to(x.dtype).mT
        else:
            codes, scales = self.cast(rows)
            out = torch.zeros(len(rows), len(weight))
            for k in range(scales.shape[1]):
                columns = slice(k * BLOCK, (k + 1) * BLOCK)
                out += codes[:, columns].float() @ weight[:, columns].mT * scales[:, k, None] * scale[None, :, k]
        return out.to(x.dtype).view(*x.shape[:-1], -1)


def split(block: nn.Module, fused: nn.Module, names: tuple[str, ...]) -> None:
    """Let layers of `block` return their part of the output of `fused`."""
    ends = torch.tensor(fused.output_sizes).cumsum(0).tolist()
    for name, size, end in zip(names, fused.output_sizes, ends):
        delattr(block, name)
        part = slice(end - size, end)
        object.__setattr__(block, name, lambda x, part=part: fused(x)[..., part])


CASES = {2: ([], [*(("rollouts", case) for case in MODELS), ("scales_of_vllm", False), ("scales_of_vllm", True)])}
