"""The three products of a linear layer, each backend of ours beside its peers.

Checks first: four corners of every product against the fp64 product of what the operands decode to. Times are of CUDA
graph replays with a cold cache. Floor: the greater of bytes that must move over copy bandwidth, and operations over the
rate of cuBLASLt's tensorwise fp8, both measured here. A ratio to a peer is the peer's time over ours: above 1 we win.
Operands are those that layers make: of grad_weight columnwise copies, padded. Peers that compile for long come last.
Writes benchmarks/results/matmul_<device>.json, .md and .png.

    python benchmarks/bench_matmul.py [--shapes 4096x7168x2048 llama_8b] [--tokens 4096] [--only grad_weight]
                                      [--backends gluon cublas] [--peers cublaslt deep_gemm]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import peers
import report
import shapes
import torch
from report import Report
from roofline import Series

from torchao_blockwise import ops
from torchao_blockwise.ops import Backend
from torchao_blockwise.ops.matmul import candidates
from torchao_blockwise.tuning import Product, Timing, error_budget, input_sets, product_error, time_runs
from torchao_blockwise.tuning.products import KINDS, RECIPES
from torchao_blockwise.tuning.timing import reason

COLUMNS = ("product", "shape", "recipe", "by", "us", "spread %", "TFLOP/s", "roofline us", "of roofline", "error")
# Peers that quantise in their own way, or not at all, are as far off as our quantisation is.
_OTHERS_BUDGET = {"fp8": 0.1, "nvfp4": 0.25}
# Where peers that compile for long are run by default; --peers runs them everywhere. torchao takes six builds for each
# N and K, which are constants of its kernels; DeepGEMM's compiler is slow.
_SLOW_PEERS = {"torchao": (shapes.PEERS[2],), "deep_gemm": shapes.PEERS}
# A rate above the measured peak times this is not believed.
_TOO_FAST = 1.5


def our_runs(product: Product, backends: Sequence[str] | None, a, b) -> dict[str, Callable | str]:
    """Backends that can compute this product, or why not; the reference only where it is named or alone."""
    reasons = candidates(a.qdata, b.qdata, *product.formats, torch.bfloat16)
    able = [x for x, why in reasons.items() if why is None and x is not Backend.REFERENCE] or [Backend.REFERENCE]
    found: dict[str, Callable | str] = {}
    for backend, why in reasons.items():
        wanted = backend.value in backends if backends else backend in able or why is not None
        if wanted and why is not None:
            found[backend.value] = why
        elif wanted:
            found[backend.value] = lambda a, b, x=backend: ops.matmul(a, b, out_dtype=torch.bfloat16, backend=x)
    return found


def peer_runs(product: Product, names: Sequence[str], device: torch.device) -> dict[str, peers.ProductPeer | str]:
    """The peers of these names, or why they cannot."""
    found: dict[str, peers.ProductPeer | str] = {}
    for name in names:
        try:
            found[name] = peers.product_peer(name, product, device)
        except peers.Unavailable as why:
            found[name] = str(why)
    return found


def operands(product: Product, a: torch.Tensor, b: torch.Tensor):
    """Both operands as layers make them: those of grad_weight are columnwise copies, padded with zero tokens."""
    if product.kind != "grad_weight":
        return product.quantize(a, b)
    return tuple(
        ops.quantize(x.t(), fmt, rowwise=False, columnwise=True, padded=True) for x, fmt in zip((a, b), product.formats)
    )


def prepare(
    product: Product, backends, found: Mapping[str, peers.ProductPeer | str], device: torch.device
) -> tuple[dict, dict, dict]:
    """What is checked and can be timed: ({name: (run, sets)}, {name: error}, {name: why it is left out})."""

    def make():
        hp = product.high_precision(device)
        return *hp, *operands(product, *hp)

    sets = input_sets(make, device, product.nbytes())
    a, b = sets[0][2:]
    runs, errors, left_out = {}, {}, {}

    def add(name: str, run: Callable, arguments: Sequence[tuple], check: tuple, budget: float) -> None:
        try:
            out = run(*check)
            error = product_error(check[-1] if out is None else out, a, b)
        except Exception as failure:
            left_out[name] = reason(failure)
            return
        if error > budget:
            left_out[name] = f"WRONG, relative error {error:.2g} above {budget:.2g}"
        else:
            runs[name], errors[name] = (run, arguments), error

    budget = error_budget(product.mnk[2])
    for name, run in our_runs(product, backends, a, b).items():
        if isinstance(run, str):
            left_out[name] = run
        else:
            add(name, run, [(a, b) for _, _, a, b in sets], (a, b), budget)
    for name, peer in found.items():
        if isinstance(peer, str):
            left_out[f"peer {name}"] = peer
            continue
        try:
            arguments = [peer.prepare(*arguments) for arguments in sets]
            # What accumulates has a place of its own for the check.
            check = peer.prepare(*sets[0])
        except Exception as failure:
            left_out[f"peer {name}"] = reason(failure)
            continue
        add(
            f"peer {name}", peer.run, arguments, check, budget if peer.same_operands else _OTHERS_BUDGET[product.recipe]
        )
    return runs, errors, left_out


def measure(product: Product, backends, names: Sequence[str], results: Report) -> None:
    """Check and time one product beside these peers, and add a row for each backend of ours, or to what is there."""
    ceilings = results.ceilings
    shape = f"{product.tokens}x{product.out_features}x{product.in_features}"
    label = f"{product.kind} {shape}"
    of_product = {"product": product.kind, "shape": shape, "recipe": product.recipe}
    there = {row["by"]: row for row in results.rows if of_product.items() <= row.items()}
    found = peer_runs(product, names, results.device)
    if there and all(isinstance(peer, str) for peer in found.values()):
        for name, why in found.items():
            results.leave_out(f"peer {name}", label, why)
        return
    runs, errors, left_out = prepare(product, backends, found, results.device)
    times = time_runs(runs, results.device)
    fastest = product.flops / (_TOO_FAST * max(ceilings.fp8, ceilings.bf16) * 1e6)
    for name, t in list(times.items()):
        if isinstance(t, str):
            left_out[name] = t
        elif t.us < fastest and results.device.type == "cuda":
            left_out[name] = f"not believed: {t.us:.3g} us are above {_TOO_FAST} times the measured peak"
            times[name] = left_out[name]
    for name, why in left_out.items():
        if name.startswith("peer ") or not there:
            results.leave_out(name, label, why)
    good = {name: t for name, t in times.items() if isinstance(t, Timing)}
    others = {name.removeprefix("peer "): t.us for name, t in good.items() if name.startswith("peer ")}
    m, n, k = product.mnk
    floor = ceilings.floor_us(product.nbytes(), product.flops)
    for name, t in good.items():
        if name.startswith("peer "):
            continue
        if name in there:
            report.compare(results, there[name], t.us, others, product.flops)
            continue
        results.add(
            {
                **of_product,
                "by": name,
                "us": t.us,
                "spread %": 100 * (t.high - t.low) / t.us,
                "TFLOP/s": product.flops / t.us / 1e6,
                "roofline us": floor,
                "of roofline": floor / t.us,
                "error": errors[name],
                **report.ratios(t.us, others),
                "mnk": [m, n, k],
                "layers": shapes.name_of(shapes.Shape(product.tokens, product.out_features, product.in_features)),
                "intensity": product.flops / product.nbytes(),
                "timing": t._asdict(),
                "peers us": others,
                "peers TFLOP/s": {name: product.flops / us / 1e6 for name, us in others.items()},
            }
        )


def picture(results: Report) -> dict:
    """TFLOP/s over operations a byte."""
    ours = sorted({row["by"] for row in results.rows})
    theirs = sorted({name for row in results.rows for name in row["peers us"]})
    series = [Series(n, [(r["intensity"], r["TFLOP/s"]) for r in results.rows if r["by"] == n], True) for n in ours]
    for name in theirs:
        points = {(r["intensity"], r["peers TFLOP/s"][name]) for r in results.rows if name in r["peers us"]}
        series.append(Series(name, sorted(points), False))
    c = results.ceilings
    return {
        "title": "Products of a linear layer: " + ", ".join(results.arguments["only"]),
        "subtitle": f"{results.device_name} · cold cache, random data, CUDA graph replays",
        "series": series,
        "roofs": {"fp8 tensorwise, cuBLASLt": (c.copy, c.fp8), "bf16": (c.copy, c.bf16)},
        "labels": ("operations a byte that must move", "TFLOP/s"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.arguments(__doc__, "default", cases=KINDS)
    parser.add_argument("--backends", nargs="+", choices=[b.value for b in Backend if b is not Backend.AUTO])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["fp8"], help="default fp8")
    args, device = report.parse(parser, argv)
    names = peers.PRODUCTS if args.peers is None else args.peers
    if unknown := set(names) - set(peers.PRODUCTS):
        parser.error(f"no peer {', '.join(sorted(unknown))}; the peers are {', '.join(peers.PRODUCTS)}")
    columns = [*COLUMNS, *(f"x {name}" for name in names)]
    results = Report("matmul", device, columns, report.plain(vars(args)))
    results.measure_ceilings(smoke=args.smoke)
    stages = report.in_stages(names, _SLOW_PEERS)
    for stage, kind, shape in itertools.product(stages, args.only, args.shapes):
        slow = [n for n in stage if args.peers is None and shape not in _SLOW_PEERS.get(n, [shape])]
        for name in slow:
            results.leave_out(f"peer {name}", f"{kind} {shape}", "compiles for long; name it with --peers")
        wanted = [name for name in stage if name not in slow]
        if not wanted and stage is not stages[0]:
            continue
        for recipe in args.recipes:
            try:
                measure(Product(kind, *shape, recipe), args.backends, wanted, results)
            except Exception as error:
                results.leave_out("all", f"{kind} {shape}", reason(error))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    results.write(args.out, picture(results))
    return 0 if results.rows else 1


if __name__ == "__main__":
    sys.exit(main())
