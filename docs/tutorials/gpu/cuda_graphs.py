"""
A whole step in a CUDA graph
============================

On a GPU small layers wait for Python. A CUDA graph launches the kernels of a whole step at once: forward, backward and
the optimizer. Weights are quantized anew in each replay, and stochastic rounding draws new random bits.
"""

# %%
# A small model
# -------------

import statistics

import torch
import torchao
import triton
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, recipe_state

print(torch.cuda.get_device_name())
print(f"torch {torch.__version__}, torchao {torchao.__version__}, Triton {triton.__version__}")

WIDTH, ROWS = 768, 4096


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make(config):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(*(Block() for _ in range(12))).bfloat16()
    if config is not None:
        quantize_(model, config)
    # The count of steps must be on the GPU, where a replay advances it.
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)


torch.manual_seed(1)
batches = torch.randn(8, ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
batch = batches[0].clone()

# %%
# The step, captured
# ------------------
#
# A graph repeats addresses: each batch is copied to where the captured one was. Before the capture the step runs twice
# on another stream, which builds kernels and makes the optimizer's states. These two steps are real ones.


def step_of(model, optimizer):
    def step():
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def captured(step):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay():
        graph.replay()
        return loss

    return replay


# %%
# The same bits
# -------------
#
# Two copies of the model train ten steps: one eagerly, one by replays.


def train(run, steps):
    losses = []
    for i in range(steps):
        batch.copy_(batches[i % len(batches)])
        losses.append(run().item())
    return losses


for config in (BlockwiseFP8TrainingConfig(), NVFP4TrainingConfig()):
    eager, replayed = make(config), make(config)
    batch.copy_(batches[0])
    run = step_of(*eager)
    for _ in range(2):
        run()
    batch.copy_(batches[0])
    replay = captured(step_of(*replayed))
    losses = train(run, 10), train(replay, 10)
    weights = zip(eager[0].parameters(), replayed[0].parameters(), strict=True)
    print(type(config).__name__)
    print("  losses  ", " ".join(f"{loss:.4f}" for loss in losses[1][:6]), "...")
    print("  the same losses, bit for bit: ", losses[0] == losses[1])
    print("  the same weights, bit for bit:", all(torch.equal(a, b) for a, b in weights))

# %%
# NVFP4 rounds gradients by random bits. How often each weight has drawn them is counted on the GPU, so that replays
# count too; ``recipe_state`` reads it, for a checkpoint:

name, state = next(iter(recipe_state(replayed[0]).items()))
print(name, state)

# %%
# What it is worth
# ----------------


def milliseconds(run, steps=30):
    for _ in range(5):
        run()
    times = []
    for _ in range(steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


print("recipe   eager ms   replayed ms")
for name, config in {"bf16": None, "FP8": BlockwiseFP8TrainingConfig(), "NVFP4": NVFP4TrainingConfig()}.items():
    eager = milliseconds(step_of(*make(config)))
    replayed = milliseconds(captured(step_of(*make(config))))
    print(f"{name:<8} {eager:8.2f} {replayed:13.2f}")

# %%
# Replays wait for nobody. At this width the products are too small for FP8 to gain much on bf16; without a graph it
# would lose. Hopper multiplies NVFP4 in bf16.
#
# ``torch.compile(model, mode="reduce-overhead")`` makes graphs by itself. :doc:`/compile` has all ways.
