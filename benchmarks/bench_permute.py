"""Tokens sorted by expert and summed back: bytes a second of each operation, beside what eager PyTorch takes for it.

    permute       ids → sorted, a row of x copied for each of its experts
    unpermute     top_k weighted rows summed to a token's
    backward      of unpermute: rows weighted, and their dot products for the router

Checks first that bits are the reference's; of the dot products, that they are within fp32's error. Times are of CUDA
graph replays with a cold cache, the sort included. Floor: each tensor moved once, at the rate of a large copy.
Writes benchmarks/results/permute_<device>.json, .md and .png.

    python benchmarks/bench_permute.py [--only permute unpermute]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import report
import torch
from report import Report
from roofline import Series
from timing import Timing, input_sets, reason, time_runs

from torchao_blockwise import ops
from torchao_blockwise.testing import assert_bitwise_equal, relative_error

COLUMNS = ("operation", "shape", "us", "spread %", "MiB", "TB/s", "roofline us", "of roofline", "x eager")
# ‖difference‖ / ‖reference‖ of sums in fp32 in another order.
_SUM_ERROR = 1e-5


class Routing(NamedTuple):
    """Tokens, experts that each takes, experts, and width of a token."""

    tokens: int
    top_k: int
    experts: int
    dim: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


SHAPES = {
    "deepseek_v3_671b": Routing(4096, 8, 256, 7168),
    "deepseek_v3_16b": Routing(8192, 6, 64, 2048),
    "mixtral_8x7b": Routing(8192, 2, 8, 4096),
    "qwen3_30b_a3b": Routing(4096, 8, 128, 2048),
    "few_tokens": Routing(64, 8, 256, 7168),
}
SMOKE = {"smoke": Routing(24, 2, 4, 160)}


class Job(NamedTuple):
    """An operation: `make` gives its arguments, `run` and `eager` take them; it must move `nbytes`."""

    make: Callable[[], tuple]
    run: Callable
    eager: Callable
    nbytes: int


def job(operation: str, shape: Routing, device: torch.device) -> Job:
    """The job of that name on random bf16 data; its functions take a `backend` where they are ours."""
    tokens, top_k, experts, dim = shape

    def rows(count):
        return torch.randn(count, dim, device=device, dtype=torch.bfloat16)

    def routed():
        chosen = torch.rand(tokens, experts, device=device).topk(top_k, 1).indices
        weights = torch.rand(tokens, top_k, device=device)
        _, source, _ = ops.permute(rows(tokens)[:, :1], chosen, experts, backend="reference")
        return chosen, source, weights

    def permute_eager(x, ids):
        ids, source = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(ids, torch.arange(experts, device=device), right=True, out_int32=True)
        return x[source // top_k], source, ends

    def unpermute_eager(y, source, weights):
        row_of = torch.empty_like(source).scatter_(0, source.long(), torch.arange(len(source), device=device).int())
        return (y[row_of.long()].view(tokens, top_k, dim) * weights[..., None]).sum(1).to(y.dtype)

    def backward_eager(grad, y, source, weights):
        source = source.long()
        grad = grad[source // top_k]
        dots = (grad.float() * y.float()).sum(1)
        return grad * weights.flatten()[source, None], torch.empty_like(dots).scatter_(0, source, dots)

    token, assignment = 2 * tokens * dim, 2 * tokens * top_k * dim
    return {
        "permute": Job(
            lambda: (rows(tokens), routed()[0]),
            lambda x, ids, **options: ops.permute(x, ids, experts, **options),
            permute_eager,
            token + assignment,
        ),
        "unpermute": Job(
            lambda: (rows(tokens * top_k), *routed()[1:]),
            lambda y, source, weights, **options: ops.unpermute(y, source, top_k, weights, **options),
            unpermute_eager,
            token + assignment,
        ),
        "backward": Job(
            lambda: (rows(tokens), rows(tokens * top_k), *routed()[1:]),
            lambda grad, y, source, weights, **o: ops.unpermute_backward(grad, y, source, top_k, weights, **o),
            backward_eager,
            token + 2 * assignment,
        ),
    }[operation]


OPERATIONS = ("permute", "unpermute", "backward")


def check(operation: str, run: Callable, arguments: tuple) -> None:
    """Raise AssertionError unless results are the reference's."""
    got, expected = run(*arguments), run(*arguments, backend="reference")
    pairs = [(got, expected)] if isinstance(got, torch.Tensor) else list(zip(got, expected))
    if operation == "backward":
        dots = pairs.pop()
        error = relative_error(*dots)
        assert error < _SUM_ERROR, f"gradient of the weights: relative error {error:.2g}"
    for a, b in pairs:
        assert_bitwise_equal(a, b, operation)


def measure(operation: str, shape: Routing, results: Report) -> None:
    """Check and time one operation, and add its row."""
    device = results.device
    made = job(operation, shape, device)
    sets = input_sets(made.make, device, made.nbytes)
    check(operation, made.run, sets[0])
    times = time_runs({"ours": (made.run, sets), "eager": (made.eager, sets)}, device)
    for name, t in times.items():
        if isinstance(t, str):
            results.leave_out(name, f"{operation} {shape}", t)
    ours, eager = times["ours"], times["eager"]
    if isinstance(ours, str):
        return
    results.add(
        {
            "operation": operation,
            "shape": str(shape),
            **report.moved(made.nbytes, ours, results.ceilings.floor_us(made.nbytes)),
            "x eager": eager.us / ours.us if isinstance(eager, Timing) else None,
        }
    )


def picture(results: Report) -> dict:
    """TB/s over MiB."""
    return {
        "title": "Tokens sorted by expert and summed back",
        "subtitle": f"{results.device_name} · cold cache, random data, CUDA graph replays",
        "series": [
            Series(name, [(r["MiB"], r["TB/s"]) for r in results.rows if r["operation"] == name], True)
            for name in dict.fromkeys(row["operation"] for row in results.rows)
        ],
        "roofs": {"copy": (float("inf"), results.ceilings.copy)},
        "labels": ("MiB that must move", "TB/s"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="default all")
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), help="only these operations")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny shape, on a CPU where there is no GPU: does it run?"
    )
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    if not args.smoke and not torch.cuda.is_available():
        parser.exit(2, "bench_permute: needs a CUDA GPU; none found (--smoke tries the script out on a CPU)\n")
    shapes = SMOKE if args.smoke else {name: SHAPES[name] for name in args.shapes}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = Report("permute", device, COLUMNS, report.plain(vars(args)))
    results.measure_ceilings(smoke=args.smoke)
    for operation in args.only:
        for shape in shapes.values():
            try:
                measure(operation, shape, results)
            except Exception as error:
                results.leave_out("all", f"{operation} {shape}", reason(error))
    results.write(args.out, picture(results))
    return 0 if results.rows else 1


if __name__ == "__main__":
    sys.exit(main())
