"""Optimizers of several libraries, and the table in docs/optimizers.md, which `python test/optimizer_cases.py` writes.

A case trains plain weights and converted ones with the same gradients, and compares the results bit for bit.
"""

import contextlib
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from helpers import FP8, mlp, replace

from torchao_blockwise import BlockwiseFP8Tensor, MasterWeightTensor
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.testing import assert_bitwise_equal

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "optimizers.md"
BEGIN, END = "<!-- optimizers: made by test/optimizer_cases.py -->\n", "<!-- end of optimizers -->"


class Case(NamedTuple):
    """An optimizer's class by its full name, its options, and a note for the page."""

    path: str
    options: Mapping[str, Any] = MappingProxyType({})
    note: str = ""

    @property
    def package(self) -> str:
        return self.path.split(".")[0]


COMPILES_ITSELF = "Compiles its step itself."
CASES = {
    "AdamW": Case("torch.optim.AdamW"),
    "AdamW, foreach": Case("torch.optim.AdamW", {"foreach": True}),
    "AdamW, fused": Case("torch.optim.AdamW", {"fused": True}),
    "SGD": Case("torch.optim.SGD", {"momentum": 0.9}),
    "Adafactor": Case("torch.optim.Adafactor"),
    "Muon": Case("torch.optim.Muon"),
    "AdamW8bit": Case("torchao.optim.AdamW8bit", note=COMPILES_ITSELF),
    "AdamW4bit": Case("torchao.optim.AdamW4bit", note=COMPILES_ITSELF),
    "AdamWFp8": Case("torchao.optim.AdamWFp8", note=COMPILES_ITSELF),
    "AdamW8bit of bitsandbytes": Case("bitsandbytes.optim.AdamW8bit"),
    "PagedAdamW8bit": Case("bitsandbytes.optim.PagedAdamW8bit"),
    "AdEMAMix8bit": Case(
        "bitsandbytes.optim.AdEMAMix8bit",
        note="Its scales are a matrix, like an operand of a GEMM. Use `AdEMAMix`, or quantized Parameters.",
    ),
    "Prodigy": Case("prodigyopt.Prodigy", {"lr": 1.0}),
    "Prodigy, slice_p=11": Case("prodigyopt.Prodigy", {"lr": 1.0, "slice_p": 11}),
    "AdamWScheduleFree": Case(
        "schedulefree.AdamWScheduleFree",
        note="Call `train()` and `eval()` of the optimizer, also of a `MasterWeightOptimizer`.",
    ),
    "SGDScheduleFree": Case("schedulefree.SGDScheduleFree"),
    "GefenMuon": Case(
        "gefen.GefenMuon",
        note="Muon with momentum in 8 bits ([Benedek, Koren, Fried](https://arxiv.org/abs/2606.13894)).",
    ),
}
CONFIGS = {"master weights": FP8, "quantized Parameters": replace(FP8, master_weights=False)}
# Of the page's columns: (config, whether the step is compiled).
WAYS = {
    f"{kind}{suffix}": (config, compiled)
    for kind, config in CONFIGS.items()
    for suffix, compiled in (("", False), (", compiled", True))
}


def trained(
    case: Case, config: Any, compiled: bool | str = False, dtype: torch.dtype = torch.float32, **shape: Any
) -> list[torch.Tensor]:
    """Return the weights, or their masters, after three steps.

    compiled: whether the step is compiled, or by which backend. shape: features and bias of the model.
    """
    torch._dynamo.reset()
    # One shape, which torchao compiles once, and large enough for states in 8 bits.
    model = mlp(config, dtype=dtype, **{"features": (64, 64, 64), "bias": False, **shape})
    # Muon takes only matrices.
    weights = [p for p in model.parameters() if "Muon" not in case.path or p.dim() == 2]
    optimizer_class, options = pkgutil.resolve_name(case.path), {"lr": 1e-2, **case.options}
    is_quantized = config is not None and not config.master_weights
    optimizer: Any
    if is_quantized:
        optimizer = MasterWeightOptimizer(optimizer_class, model, **options)
    else:
        optimizer = optimizer_class(weights, **options)
    has_modes = hasattr(optimizer, "train")
    if has_modes:
        optimizer.train()
    step = optimizer.step
    if compiled and case.package != "torchao":
        step = torch.compile(step, backend="aot_eager_decomp_partition" if compiled is True else compiled)
    closure = [lambda: torch.ones(())] if case.path.endswith("LBFGS") else []
    with contextlib.nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
        for seed in range(3):
            for index, p in enumerate(weights):
                grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * seed + index)).to(dtype)
                p.grad = grad.to_sparse() if case.path.endswith("SparseAdam") else grad
            step(*closure)
    if has_modes:
        optimizer.eval()
    if not is_quantized:
        states = [x for state in optimizer.state.values() for x in state.values()]
        assert not any(isinstance(x, MasterWeightTensor) for x in states)
        return [getattr(p, "hp", p).detach() for p in weights]
    masters = [optimizer.master(p) for p in weights]
    for p, master in zip(weights, masters):
        assert_bitwise_equal(p.qdata, BlockwiseFP8Tensor.from_hp(master).qdata)
    return masters


def outcome(name: str, way: str) -> str:
    """Return the cell of the page."""
    case, (config, compiled) = CASES[name], WAYS[way]
    start = mlp(features=(64, 64, 64), bias=False)[0].weight
    try:
        expected = trained(case, None, compiled)
    except Exception:
        return "fails with plain weights"
    assert not torch.equal(expected[0], start)
    try:
        got = trained(case, config, compiled)
    except NotImplementedError:
        return "refused"
    return "identical" if all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)) else "different"


def versions() -> dict[str, str]:
    """Return the tested versions of packages."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)==(\S+?);?$", pins, re.MULTILINE))


def on_the_page() -> dict[str, list[str]]:
    """Return the cells of each row of the page: the package, the outcome of each way, and the note."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def described(name: str, outcomes: list[str]) -> list[str]:
    """Return a row of the page, without the name."""
    case = CASES[name]
    return [f"{case.package} {versions()[case.package]}", *outcomes, case.note]


def write(rows: dict[str, list[str]]) -> None:
    """Write the page's table."""
    header = ["optimizer", "package", *WAYS, ""]
    lines = [header, ["---"] * len(header), *([name, *row] for name, row in rows.items())]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    write({name: described(name, [outcome(name, way) for way in WAYS]) for name in CASES})
