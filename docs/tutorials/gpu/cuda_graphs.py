"""
A whole step in a CUDA graph
============================

On a GPU, small layers are limited by host overhead. A CUDA graph launches the kernels of a whole step at once: forward,
backward and the optimizer. Each replay quantizes the weights again, and stochastic rounding draws new random bits.
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
# Capture a step
# --------------
#
# A graph replays fixed addresses, so each batch is copied into the captured tensor. Before the capture, the step runs
# twice on another stream, which compiles kernels and creates the optimizer's states. These two steps change the
# weights.


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
# Compare with eager mode
# -----------------------
#
# Two copies of the model train for ten steps: one eagerly, one with replays.


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
# NVFP4 rounds gradients with random bits. The GPU counts how often each weight has drawn them, so replays are counted
# too. ``recipe_state`` reads the count, for a checkpoint:

name, state = next(iter(recipe_state(replayed[0]).items()))
print(name, state)

# %%
# Speed
# -----


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
# Replays are not limited by the host. At this width the GEMMs are too small for FP8 to gain much over bf16. Without a
# graph, FP8 would be slower. Hopper runs NVFP4 GEMMs in bf16.
#
# ``torch.compile(model, mode="reduce-overhead")`` creates CUDA graphs automatically. :doc:`/compile` describes all
# methods.
