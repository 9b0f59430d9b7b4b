"""How far a forward pass of training and one of an inference engine lie apart, where both have the same FP8 weights.

Training and engines round activations by the same formula, in another order of operations. A small Llama is trained for
a few steps on text, then runs on held-out text in bf16: once as it trains, and once for each engine's way to quantize
activations. Products are ours in all: how engines sum is not compared, and their division is taken as exact. Needs no
GPU. Writes benchmarks/results/engine_agreement_cpu.json and .md.

    python benchmarks/engine_agreement.py [--steps 20 --hidden 256 --layers 4]

Source of the formulas: vLLM, quantization/utils/fp8_utils.py (`_per_token_group_quant_fp8`); SGLang,
layers/quantization/fp8_kernel.py; DeepGEMM, utils/math.py (`per_token_cast_to_fp8`).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from llm.data import Corpus, read_corpus
from report import RESULTS, Report
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, MasterWeightTensor, ops, recommended_layers
from torchao_blockwise.formats import E4M3, FP8_1X128, Operand

Quantizer = Callable[[torch.Tensor], Operand]
COLUMNS = ("training", "engine", "codes, ppm", "scales, ppm", "KL, nats", "top tokens, ppm")
# What engines raise a block's amax to.
_MIN_AMAX = 1e-10
_BLOCK = FP8_1X128.block[1]
CPU = torch.device("cpu")


def of_training(power_of_2_scales: bool) -> Quantizer:
    def quantize(x: torch.Tensor) -> Operand:
        return ops.quantize(x, FP8_1X128, power_of_2_scales=power_of_2_scales).rowwise

    return quantize


def of_engine(encode: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Quantizer:
    """encode: (blocks, amax / 448 of each) -> (blocks before they are rounded, scales), all fp32."""

    def quantize(x: torch.Tensor) -> Operand:
        blocks = x.float().unflatten(-1, (-1, _BLOCK))
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=_MIN_AMAX) / E4M3.max
        values, scale = encode(blocks, scale)
        return Operand(E4M3.encode(values.flatten(-2)), scale.squeeze(-1).mT.contiguous(), None, FP8_1X128.name)

    return quantize


def raised_to_power_of_2(scale: torch.Tensor) -> torch.Tensor:
    fraction, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).int())


DIVIDES = "x / scale"
MULTIPLIES = "x · (1 / scale)"
POWERS = "scales that are powers of 2"
ENGINES = {
    DIVIDES: of_engine(lambda x, scale: (x / scale, scale)),
    MULTIPLIES: of_engine(lambda x, scale: (x * scale.reciprocal(), scale)),
    POWERS: of_engine(lambda x, scale: (x / (scale := raised_to_power_of_2(scale)), scale)),
}
HIGH_PRECISION = "activations in bf16"


class EngineLinear(nn.Module):
    """A layer as an engine runs it: a quantized weight, activations by `quantize`; None leaves these as they are.

    different: (codes, scales) that `expected`, training's way, rounds otherwise. seen: of how many.
    """

    def __init__(self, weight: MasterWeightTensor, quantize: Quantizer | None, expected: Quantizer):
        super().__init__()
        self.weight, self.shape, self.quantize, self.expected = weight.quantized(), weight.shape, quantize, expected
        self.different, self.seen = [0, 0], [0, 0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        if self.quantize is None:
            return nn.functional.linear(x, ops.dequantize(self.weight, dtype=x.dtype))
        operand, other = self.quantize(tokens), self.expected(tokens)
        pairs = ((operand.qdata.view(torch.uint8), other.qdata.view(torch.uint8)), (operand.scale, other.scale))
        for i, (mine, theirs) in enumerate(pairs):
            self.different[i] += int((mine != theirs).sum())
            self.seen[i] += mine.numel()
        return ops.matmul(operand, self.weight, out_dtype=x.dtype).view(*x.shape[:-1], self.shape[0])


def trained(
    args: argparse.Namespace,
    config: BlockwiseFP8TrainingConfig,
    corpus: Corpus,
    device: torch.device = CPU,
) -> nn.Module:
    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        vocab_size=256, hidden_size=args.hidden, intermediate_size=5 * args.hidden // 2, num_hidden_layers=args.layers,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(settings).to(device)
    quantize_(model, config, filter_fn=recommended_layers(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        batch = corpus.batch(0, step, args.sequences).to(device)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.bfloat16().eval()


def as_engine(model: nn.Module, quantize: Quantizer | None, expected: Quantizer) -> nn.Module:
    engine = copy.deepcopy(model)
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, MasterWeightTensor):
            engine.set_submodule(name, EngineLinear(weight, quantize, expected))
    return engine


@torch.no_grad()
def log_probabilities(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return model(input_ids=text).logits.double().log_softmax(-1)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
    """Of log-probabilities [..., vocabulary], over the other dims."""
    return {
        "KL, nats": float((ours.exp() * (ours - theirs)).sum(-1).mean()),
        "top tokens, ppm": 1e6 * float((ours.argmax(-1) != theirs.argmax(-1)).double().mean()),
    }


def compared(model: nn.Module, quantize: Quantizer | None, expected: Quantizer, text: torch.Tensor) -> dict:
    """What an engine does otherwise on `text`."""
    engine = as_engine(model, quantize, expected)
    ours, theirs = log_probabilities(model, text), log_probabilities(engine, text)
    layers = [layer for layer in engine.modules() if isinstance(layer, EngineLinear)]
    found = difference(ours, theirs)
    if quantize is None:
        return found
    shares = (sum(x.different[i] for x in layers) / sum(x.seen[i] for x in layers) for i in range(2))
    return found | dict(zip(("codes, ppm", "scales, ppm"), (1e6 * share for share in shares)))


def rows_of(args: argparse.Namespace, corpus: Corpus):
    text = corpus.held_out[:, :-1].long()
    for powers in (False, True):
        training = "powers of 2" if powers else "fp32 scales"
        model = trained(args, BlockwiseFP8TrainingConfig(power_of_2_scales=powers), corpus)
        expected = of_training(powers)
        # Control: with training's own way nothing may differ.
        control = compared(model, expected, expected, text)
        assert not any(control.values()), control
        for name, engine in (ENGINES | {HIGH_PRECISION: None}).items():
            yield {"training": training, "engine": name} | compared(model, engine, expected, text)


def arguments(description: str | None = __doc__, **others: int) -> argparse.ArgumentParser:
    """others: defaults that are not those of this script."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"steps": 20, "hidden": 256, "layers": 4, "sequences": 8, "tokens": 128, "held_out": 64} | others
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--data", help="text to train on; default: the sources of Python's standard library")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    corpus = read_corpus(args.data, args.tokens, args.held_out)
    held = {k: v for k, v in vars(args).items() if k != "out"} | {"text": corpus.name, "digest": corpus.digest}
    report = Report("engine_agreement", CPU, COLUMNS, held)
    for row in rows_of(args, corpus):
        report.add(row)
    report.write(args.out)


if __name__ == "__main__":
    main()
