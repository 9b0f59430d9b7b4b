"""Steps on a GPU that must not wait for it, CUDA graphs of them, and comparison of a captured step with eager ones."""

import contextlib
import copy

import torch
from helpers import assert_same_tensors

from torchao_blockwise import load_recipe_state, recipe_state
from torchao_blockwise.testing import assert_bitwise_equal


@contextlib.contextmanager
def no_syncs():
    """Whatever makes the host wait for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(run):
    """(CUDA graph of `run()`, what it returned), captured after two runs on a separate stream, as graphs need.

    Two, because the second gradient is added to the first.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def train_step(model, optimizer, x) -> torch.Tensor:
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


def check_training_without_syncs(model, xs) -> None:
    """Every step after the first, in which kernels are built, is launched without waiting for the GPU."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    train_step(model, optimizer, xs[0])
    with no_syncs():
        for x in xs[1:]:
            train_step(model, optimizer, x)


def check_captured_training(make, xs, make_optimizer) -> None:
    """Replays of one captured step have the losses and leave the weights of eager steps on the same batches.

    make: () -> the model, with the same weights each time. make_optimizer: (parameters) -> an optimizer that a graph
        may capture, whose state begins with zeros.
    """
    captured, eager = make(), make()
    optimizer = make_optimizer(eager.parameters())
    expected = [train_step(eager, optimizer, x).detach().clone() for x in xs]

    state, x = copy.deepcopy(captured.state_dict()), xs[0].clone()
    random_bits = recipe_state(captured)
    optimizer = make_optimizer(captured.parameters())
    graph, loss = capture(lambda: train_step(captured, optimizer, x))
    captured.load_state_dict(state)
    load_recipe_state(captured, random_bits)
    for values in optimizer.state.values():
        for value in values.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    for batch, want in zip(xs, expected, strict=True):
        x.copy_(batch)
        graph.replay()
        assert_bitwise_equal(loss.detach(), want, "loss")
    assert_same_tensors(captured.state_dict(), eager.state_dict())
    # Replays changed the weights without counting; eager use must see it all the same.
    assert_bitwise_equal(captured(xs[0]).detach(), eager(xs[0]).detach(), "eager after replays")
