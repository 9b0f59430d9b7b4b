"""Tokens sorted by expert and summed back: bytes a second of each operation, compared with eager PyTorch.

    permute       ids → sorted, a row of x copied for each of its experts
    unpermute     top_k weighted rows summed to a token's
    backward      of unpermute: rows weighted, and their dot products for the router

The results are bitwise identical to the reference's, except the dot products, which are within fp32's error. The sort
is timed too.

    python benchmarks/bench_permute.py [--shapes 4096x8x256x7168] [--only permute unpermute]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from functools import partial

import torch
from common import driver, errors, shapes
from common.driver import Job, Peer
from common.errors import relative_error, tensors
from common.shapes import Routing

from torchao_blockwise import ops

OPERATIONS = ("permute", "unpermute", "backward")
# ‖difference‖ / ‖reference‖ of sums in fp32 in another order, and of eager PyTorch, which rounds in between.
_SUM_ERROR, _EAGER_ERROR = 1e-5, 5e-3


def job(operation: str, shape: Routing, device: torch.device) -> Job:
    tokens, top_k, experts, dim = shape

    def rows(count):
        return torch.randn(count, dim, device=device, dtype=torch.bfloat16)

    def routed():
        chosen = torch.rand(tokens, experts, device=device).topk(top_k, 1).indices
        _, source, _ = ops.permute(rows(tokens)[:, :1], chosen, experts, backend="reference")
        return chosen, source, torch.rand(tokens, top_k, device=device)

    def permute(x, ids, **options):
        return ops.permute(x, ids, experts, **options)

    def permute_eager(x, ids):
        ids, source = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(ids, torch.arange(experts, device=device), right=True, out_int32=True)
        return x[source // top_k], source, ends

    def unpermute(y, source, weights, **options):
        return ops.unpermute(y, source, top_k, weights, **options)

    def unpermute_eager(y, source, weights):
        row_of = torch.empty_like(source).scatter_(0, source.long(), torch.arange(len(source), device=device).int())
        return (y[row_of.long()].view(tokens, top_k, dim) * weights[..., None]).sum(1).to(y.dtype)

    def backward(grad, y, source, weights, **options):
        return ops.unpermute_backward(grad, y, source, top_k, weights, **options)

    def backward_eager(grad, y, source, weights):
        source = source.long()
        grad = grad[source // top_k]
        dots = (grad.float() * y.float()).sum(1)
        return grad * weights.flatten()[source, None], torch.empty_like(dots).scatter_(0, source, dots)

    make, run, eager, assignments = {
        "permute": (lambda: (rows(tokens), routed()[0]), permute, permute_eager, 1),
        "unpermute": (lambda: (rows(tokens * top_k), *routed()[1:]), unpermute, unpermute_eager, 1),
        "backward": (lambda: (rows(tokens), rows(tokens * top_k), *routed()[1:]), backward, backward_eager, 2),
    }[operation]
    nbytes = (1 + assignments * top_k) * tokens * dim * torch.bfloat16.itemsize

    def check(out, inputs, peer):
        got, expected = list(tensors(out)), list(tensors(run(*inputs, backend="reference")))
        if operation == "backward" and peer is None:
            errors.check(relative_error(got.pop(), expected.pop()), _SUM_ERROR)
        if peer is None:
            errors.check_bits(got, expected)
        for a, b in zip(got, expected, strict=True):
            errors.check(relative_error(a.flatten(), b.flatten()), _EAGER_ERROR)

    labels = {"operation": operation, "shape": str(shape)}
    return Job(labels, make, lambda inputs: {"ours": run}, check, {"eager": partial(Peer, eager)}, nbytes)


def main(argv: Sequence[str] | None = None) -> int:
    parser = driver.parser(__doc__, (shapes.ROUTED, "default"), only=(OPERATIONS, OPERATIONS))
    args, device = driver.parse(parser, argv)
    jobs = [job(operation, shape, device) for operation, shape in itertools.product(args.only, args.shapes)]
    return driver.run_jobs("permute", args, device, jobs, ["eager"])


if __name__ == "__main__":
    sys.exit(main())
