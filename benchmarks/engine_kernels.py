"""How far a forward pass of training and one by inference engines' own kernels lie apart, from the files of an export.

Layers and a small Llama, trained for a few steps on text, are written by `checkpoint.export`, as `fp8_block`, with
scales in fp32 that are powers of 2 or not. Engines' kernels (engines.py: Triton's, unmodified, from an engine's source
files) get the files' tensors, and the same bf16 input as this package's forward pass:

    codes, scales        of activations that differ
    output, ‖·‖          ‖ours − theirs‖ / ‖theirs‖ of layers' outputs in bf16
    outputs, %           of these that differ
    product, ‖·‖         the same where the engine gets our codes and scales: the order of sums alone
    KL, top tokens       of the model's next token, on held-out text, all its layers the engine's

Layers are named tokens×N×K; 576 rows of weights end inside of a block. "this package" is the control, and on a GPU
"Triton's products" say how far two of this package's own kernels lie apart.
Writes benchmarks/results/engine_kernels_<device>.json and .md of the model, engine_layers_<device> of the layers.

    python benchmarks/engine_kernels.py --source FOLDER [--engines vllm sglang transformers]

FOLDER: unpacked wheels of the engines, with their dist-info; for transformers a checkout of kernels-community. Without
it, engines that are installed. Without a GPU, Triton's interpreter (TRITON_INTERPRET=1) runs tiny sizes, but it rounds
to e4m3 and bf16 otherwise than a GPU does, so that its figures are none.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import engine_agreement
import shapes
import torch
from engine_agreement import log_probabilities, trained
from engines import ENGINES, Engine, Ours
from llm.data import Corpus, read_corpus
from report import Report
from safetensors.torch import load_file
from shapes import Shape
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, checkpoint

DIFFERENCES = ("codes, ppm", "scales, ppm", "output, ‖·‖", "outputs, %", "product, ‖·‖")
MODEL = ("training", "engine", *DIFFERENCES, "KL, nats", "top tokens, ppm")
LAYERS = ("training", "engine", "layer", *DIFFERENCES)
SCALES = {False: "fp32 scales", True: "powers of 2"}
Stored = tuple[torch.Tensor, torch.Tensor]


class Tally:
    """Sums over layers: what differs, and of how much."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def _add(self, column: str, different: torch.Tensor | int, seen: torch.Tensor | int) -> None:
        self.sums[column][0] += float(different)
        self.sums[column][1] += float(seen)

    def count(self, column: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Elements that differ in their bits."""
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
        different = ours.contiguous().view(integer) != theirs.contiguous().view(integer)
        self._add(column, different.sum(), ours.numel())

    def measure(self, column: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Squares of what lies between, and of theirs."""
        self._add(column, (ours.double() - theirs.double()).square().sum(), theirs.double().square().sum())

    def row(self) -> dict[str, float]:
        units = {"ppm": lambda share: 1e6 * share, "%": lambda share: 100 * share, "‖·‖": lambda share: share**0.5}
        return {
            column: units[column.rsplit(", ")[1]](different / seen) for column, (different, seen) in self.sums.items()
        }


class Case(NamedTuple):
    """An engine, with `powers` for its activations, beside training with `trained` scales."""

    engine: Engine
    powers: bool
    trained: bool

    def row(self) -> dict[str, str]:
        return {"training": SCALES[self.trained], "engine": f"{self.engine.label}, {SCALES[self.powers]}"}


class EngineLinear(nn.Module):
    """A layer of an engine, made of a file's tensors, that tallies in what it differs from this package's."""

    def __init__(self, case: Case, stored: Stored, tally: Tally):
        super().__init__()
        self.case, self.tally, self.ours = case, tally, Ours()
        self.our_weight = self.ours.weight(*stored, case.trained)
        self.weight = case.engine.weight(*stored, case.powers)
        # The weight of the product alone has the file's codes.
        self.same_weight = case.engine.weight(*stored, False)
        tally.count("weights, ppm", self.our_weight[0], self.weight[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        engine, tally = self.case.engine, self.tally
        tokens = x.reshape(-1, x.shape[-1]).contiguous()
        codes, scales = self.ours.quantize(tokens, self.case.trained)
        expected = self.ours.multiply(codes, scales, self.our_weight, x.dtype)
        their_codes, their_scales = engine.quantize(tokens, self.case.powers)
        out = engine.linear(tokens, self.weight, self.case.powers)
        tally.count("codes, ppm", codes, their_codes)
        tally.count("scales, ppm", scales, their_scales)
        tally.measure("output, ‖·‖", expected, out)
        tally.count("outputs, %", expected, out)
        if engine.multiply is not None:
            product = engine.multiply(codes, scales.contiguous(), self.same_weight, x.dtype)
            tally.measure("product, ‖·‖", expected, product)
        return out.view(*x.shape[:-1], -1)


def exported(model: nn.Module) -> dict[str, Stored]:
    """{layer: (weight, scales)} of the files that `export` writes, on the model's device."""
    device = next(model.parameters()).device
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "exported")
        checkpoint.export(model, path)
        tensors = {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}
    suffix = ".weight_scale_inv"
    layers = [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    return {name: (tensors[f"{name}.weight"].to(device), tensors[name + suffix].to(device)) for name in layers}


def as_engine(model: nn.Module, case: Case, stored: dict[str, Stored], tally: Tally) -> nn.Module:
    engine = copy.deepcopy(model)
    for name, tensors in stored.items():
        engine.set_submodule(name, EngineLinear(case, tensors, tally))
    return engine


@torch.no_grad()
def model_row(case: Case, model: nn.Module, stored: dict[str, Stored], text: torch.Tensor) -> dict:
    tally = Tally()
    ours = log_probabilities(model, text)
    theirs = log_probabilities(as_engine(model, case, stored, tally), text)
    return case.row() | tally.row() | engine_agreement.difference(ours, theirs)


@torch.no_grad()
def layer_row(case: Case, shape: Shape, stored: Stored) -> dict:
    tally = Tally()
    generator = torch.Generator(stored[0].device).manual_seed(0)
    x = torch.randn(shape.tokens, shape.in_features, device=stored[0].device, dtype=torch.bfloat16, generator=generator)
    EngineLinear(case, stored, tally)(x)
    return case.row() | {"layer": "×".join(map(str, shape))} | tally.row()


def cases(engines: Sequence[Engine], trained: bool) -> Iterator[Case]:
    """Each engine in each of its modes; the control in training's own."""
    for engine in engines:
        for powers in [trained] if isinstance(engine, Ours) else engine.modes:
            yield Case(engine, powers, trained)


def measure(report: Report, where: str, case: Case, row_of: Callable[..., dict], *arguments: object) -> None:
    """Add a row, or the reason why there is none; the other engines go on."""

    def seen(*arguments: object) -> dict:
        try:
            return row_of(*arguments)
        except Exception:
            traceback.print_exc()
            raise

    row = report.attempt(case.row()["engine"], f"{case.row()['training']}, {where}", seen, case, *arguments)
    if row is not None:
        report.add(row)


def measure_layers(report: Report, engines: Sequence[Engine], layers: Sequence[Shape]) -> None:
    """Each engine in the mode that is closest to training's."""
    for powers in (False, True):
        torch.manual_seed(0)
        linear = {f"{n}x{k}": nn.Linear(k, n, bias=False) for _, n, k in layers}
        model = nn.ModuleDict(linear).to(report.device, torch.bfloat16)
        quantize_(model, BlockwiseFP8TrainingConfig(power_of_2_scales=powers))
        stored = exported(model)
        for case in cases(engines, powers):
            if case.powers == powers or len(case.engine.modes) == 1:
                for shape in layers:
                    weight = stored[f"{shape.out_features}x{shape.in_features}"]
                    measure(report, str(shape), case, layer_row, shape, weight)


def measure_model(report: Report, engines: Sequence[Engine], args: argparse.Namespace, corpus: Corpus) -> None:
    text = corpus.held_out[:, :-1].long().to(report.device)
    for powers in (False, True):
        model = trained(args, BlockwiseFP8TrainingConfig(power_of_2_scales=powers), corpus, report.device)
        stored = exported(model)
        for case in cases(engines, powers):
            measure(report, "model", case, model_row, model, stored, text)


def arguments() -> argparse.ArgumentParser:
    parser = engine_agreement.arguments(__doc__, steps=50, hidden=1024, held_out=256)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--source", type=Path, help="folder of unpacked wheels; default: what is installed")
    layers = ["4096x7168x2048", "16x7168x2048", "4096x576x7168"]
    what = "layers, tokens x out x in, or names of shapes.py"
    parser.add_argument("--shapes", nargs="+", type=shapes.argument, default=layers, metavar="SHAPE", help=what)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engines: list[Engine] = [ENGINES[name](args.source) for name in args.engines]
    sources = {engine.label: engine.sources for engine in engines}
    engines[:0] = [Ours(), Ours("triton")] if device.type == "cuda" else [Ours()]
    corpus = read_corpus(args.data, args.tokens, args.held_out)
    held = {k: v for k, v in vars(args).items() if k not in ("out", "source")}
    held |= {"text": corpus.name, "digest": corpus.digest, "sources": sources}
    for name, columns, run in (
        ("engine_layers", LAYERS, lambda report: measure_layers(report, engines, shapes.select(args.shapes))),
        ("engine_kernels", MODEL, lambda report: measure_model(report, engines, args, corpus)),
    ):
        report = Report(name, device, columns, held)
        run(report)
        report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
