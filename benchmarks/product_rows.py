"""What benchmarks of products share, plain and grouped: who computes one, whether it is right, rows of its times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import peers
import report
import torch
from report import Report
from roofline import Series
from timing import Timing, reason, time_runs

from torchao_blockwise.ops import Backend

# Peers that quantise in their own way, or not at all, are as far off as our quantisation is.
_OTHERS_BUDGET = {"fp8": 0.1, "nvfp4": 0.25}
# A rate above the measured peak times this is not believed.
_TOO_FAST = 1.5


def reasons(op: Callable, *arguments) -> dict[Backend, str | None]:
    """The backends in an operation's table, each with why it cannot compute these arguments, or None."""
    return {row.backend: row.reason(arguments) for row in op.table}


def by_backend(
    reasons: Mapping[Backend, str | None], backends: Sequence[str] | None, run_on: Callable[[Backend], Callable]
) -> dict[str, Callable | str]:
    """The run of each backend that can, or why it cannot; the reference only where it is named or alone.

    reasons: backend -> why it cannot. backends: those that are named, if any.
    """
    able = [x for x, why in reasons.items() if why is None and x is not Backend.REFERENCE] or [Backend.REFERENCE]
    return {
        backend.value: run_on(backend) if why is None else why
        for backend, why in reasons.items()
        if (backend.value in backends if backends else backend in able or why is not None)
    }


def check(
    sets: Sequence[tuple],
    ours: Mapping[str, Callable | str],
    of_ours: Callable[..., tuple],
    found: Mapping,
    error: Callable[[torch.Tensor, object], float],
    budget: float,
    recipe: str,
) -> tuple[dict, dict, dict]:
    """What is right and can be timed: ({name: (run, sets)}, {name: error}, {name: why it is left out}).

    ours: of `by_backend`; of_ours: a set -> their arguments. found: name -> peer, or why it cannot.
    error: (what a run returned, the peer or None) -> relative error. budget: of what multiplies our operands.
    """
    runs, errors, left_out = {}, {}, {}

    def add(name: str, run: Callable, prepare: Callable, peer, budget: float) -> None:
        try:
            arguments = [prepare(*arguments) for arguments in sets]
            # What accumulates has a place of its own for the check.
            check = prepare(*sets[0])
            out = run(*check)
            off = error(check[-1] if out is None else out, peer)
        except Exception as failure:
            left_out[name] = reason(failure)
            return
        if off > budget:
            left_out[name] = f"WRONG, relative error {off:.2g} above {budget:.2g}"
        else:
            runs[name], errors[name] = (run, arguments), off

    for name, run in ours.items():
        if isinstance(run, str):
            left_out[name] = run
        else:
            add(name, run, of_ours, None, budget)
    for name, peer in found.items():
        if isinstance(peer, str):
            left_out[f"peer {name}"] = peer
        else:
            add(f"peer {name}", peer.run, peer.prepare, peer, budget if peer.same_operands else _OTHERS_BUDGET[recipe])
    return runs, errors, left_out


def measure(
    product,
    labels: Mapping[str, str],
    where: str,
    names: Sequence[str],
    find: Callable[[str], object],
    prepare: Callable[[Mapping], tuple[dict, dict, dict]],
    more: Mapping,
    results: Report,
) -> None:
    """Time one product beside these peers, and add a row for each backend of ours, or to what is there.

    product: has flops and nbytes(). labels: what tells its rows apart. find: name -> peer; may raise Unavailable.
    prepare: peers that were found -> what `check` returns. more: what else its rows hold.
    """
    ceilings = results.ceilings
    there = {row["by"]: row for row in results.rows if labels.items() <= row.items()}
    found: dict[str, object] = {}
    for name in names:
        try:
            found[name] = find(name)
        except peers.Unavailable as why:
            found[name] = str(why)
    if there and all(isinstance(peer, str) for peer in found.values()):
        for name, why in found.items():
            results.leave_out(f"peer {name}", where, why)
        return
    runs, errors, left_out = prepare(found)
    times = time_runs(runs, results.device)
    fastest = product.flops / (_TOO_FAST * max(ceilings.fp8, ceilings.bf16) * 1e6)
    good: dict[str, Timing] = {}
    for name, t in times.items():
        if isinstance(t, str):
            left_out[name] = t
        elif t.us < fastest and results.device.type == "cuda":
            left_out[name] = f"not believed: {t.us:.3g} us are above {_TOO_FAST} times the measured peak"
        else:
            good[name] = t
    for name, why in left_out.items():
        if name.startswith("peer ") or not there:
            results.leave_out(name, where, why)
    others = {name.removeprefix("peer "): t.us for name, t in good.items() if name.startswith("peer ")}
    floor = ceilings.floor_us(product.nbytes(), product.flops)
    for name, t in good.items():
        if name.startswith("peer "):
            continue
        if name in there:
            report.compare(results, there[name], t.us, others, product.flops)
            continue
        results.add(
            {
                **labels,
                "by": name,
                "TFLOP/s": product.flops / t.us / 1e6,
                **report.timed(t, floor),
                "error": errors[name],
                **report.ratios(t.us, others),
                **more,
                "intensity": product.flops / product.nbytes(),
                "peers us": others,
                "peers TFLOP/s": {name: product.flops / us / 1e6 for name, us in others.items()},
            }
        )


def picture(results: Report, title: str, *columns: str) -> dict:
    """TFLOP/s over operations a byte; rows of ours that agree in `columns` are one series."""
    series = []
    for values in sorted({tuple(row[c] for c in columns) for row in results.rows}):
        rows = [row for row in results.rows if tuple(row[c] for c in columns) == values]
        series.append(Series(", ".join(values), [(r["intensity"], r["TFLOP/s"]) for r in rows], True))
    for name in sorted({name for row in results.rows for name in row["peers us"]}):
        points = {(r["intensity"], r["peers TFLOP/s"][name]) for r in results.rows if name in r["peers us"]}
        series.append(Series(name, sorted(points), False))
    c = results.ceilings
    return {
        "title": f"{title}: " + ", ".join(results.arguments["only"]),
        "subtitle": f"{results.device_name} · cold cache, random data, CUDA graph replays",
        "series": series,
        "roofs": {"fp8 tensorwise, cuBLASLt": (c.copy, c.fp8), "bf16": (c.copy, c.bf16)},
        "labels": ("operations a byte that must move", "TFLOP/s"),
    }
