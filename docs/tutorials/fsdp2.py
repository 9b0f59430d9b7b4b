"""
FSDP2 on two processes
======================

``fully_shard`` shards each Parameter over the ranks. Shards stay in high precision for the optimizer, but the
all-gathers for the GEMMs move FP8 values, one byte per parameter. This program starts two processes on the CPU with
gloo. The code is the same on GPUs with NCCL.
"""

# %%
# The program of each rank
# ------------------------
#
# Convert, shard, then train. Compared with plain FSDP2, the only additional line is ``quantize_``. If this file is run
# without a rank, it starts itself on two ranks with ``torchrun``.

import inspect
import os
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, weights_unchanged


class Block(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    quantize_(model, BlockwiseFP8TrainingConfig())
    return model


def data(rank):
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(2, 64, 256, generator=generator)


def train(rank):
    model = make_model()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    weight = model[0].up.weight
    local = tuple(weight.to_local().shape)
    print(f"rank {rank} holds rows {local} of {tuple(weight.shape)}", flush=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, target = data(rank)
    losses = []
    for _ in range(5):
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())

    # Weights do not change in evaluation, so shards are quantized once for all batches.
    with weights_unchanged(model), torch.no_grad():
        outputs = [model(batch) for batch in data(rank)]
    if rank == 0:
        print("sharded:", [f"{loss:.6f}" for loss in losses], flush=True)
    return outputs


if "RANK" in os.environ:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(dist.get_rank())
    dist.destroy_process_group()
    sys.exit()

# %%
# Run it
# ------
#
# From a shell, run ``torchrun --nproc-per-node 2 fsdp2.py``.

command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
done = subprocess.run([*command, inspect.getsourcefile(train)], capture_output=True, text=True)
assert done.returncode == 0, done.stderr
print("\n".join(sorted(line for line in done.stdout.splitlines() if line.startswith(("rank", "sharded")))))

# %%
# Compare with one process
# ------------------------
#
# One process trains the whole model on the samples of both ranks. The loss is the same, because sharded and whole
# weights have bitwise identical quantized values.

model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
both = [data(rank) for rank in range(2)]
losses = []
for _ in range(5):
    parts = [F.mse_loss(model(x), target) for x, target in both]
    (sum(parts) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(sum(part.item() for part in parts) / 2)
print("whole:  ", [f"{loss:.6f}" for loss in losses])

# %%
# :doc:`/sharding` covers the details, other kinds of parallelism and ZeRO, and shows the speed on GPUs.
