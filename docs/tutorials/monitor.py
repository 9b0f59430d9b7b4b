"""
Watch numerics, choose what stays in bf16
=========================================

Some layers do not bear four bits. ``NumericsMonitor`` measures what each tensor of each layer loses while the model
trains, tries other recipes on the same tensors, and names the layers to keep in bf16.
"""

# %%
# A model with a layer that is hard to quantize
# ---------------------------------------------
#
# In one of its layers rows with large values lie beside a row with small ones. Training makes such weights by itself;
# here they are made.

import matplotlib.pyplot as plt
import torch
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, conversion_report, skip_fqns
from torchao_blockwise.diagnostics import NumericsMonitor


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())))
    with torch.no_grad():
        model[4].weight[7] *= 1e-3
        model[4].weight[::16] *= 300
    return model


# %%
# Train in FP8, and ask about NVFP4
# ---------------------------------
#
# A report comes on every tenth step; in between the monitor costs nothing. ``what_if`` quantizes the same tensors by
# another recipe.

model = make_model()
quantize_(model, BlockwiseFP8TrainingConfig())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
reports = []
with NumericsMonitor(model, every=10, what_if=("nvfp4",)) as monitor:
    for _ in range(31):
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        reports.append(monitor.step())
    advice = monitor.recommend("nvfp4")
    print("FP8 should leave out:  ", [layer.layer for layer in monitor.recommend()])
    print("NVFP4 should leave out:", [layer.layer for layer in advice])
for layer in advice:
    print(layer)

# %%
# What a report holds
# -------------------
#
# A line a layer, those that lose most first. SQNR is the ratio of signal to quantization noise in decibels: 6 dB more
# is half the error.

report = [report for report in reports if report is not None][-1]
print(report)

# %%
# The figures of single tensors are in it, too:

figure, axes = plt.subplots()
for shift, recipe in ((-0.2, "fp8"), (0.2, "nvfp4")):
    weights = [entry for entry in report.tensors if entry.recipe == recipe and entry.tensor == "w"]
    axes.bar([i + shift for i in range(len(weights))], [entry.underflow for entry in weights], 0.4, label=recipe)
axes.set_xticks(range(len(weights)), [entry.layer for entry in weights])
axes.set(title="How much of each layer's weight becomes zero", xlabel="layer", ylabel="%")
axes.legend()
plt.show()

# %%
# Follow the advice
# -----------------

model = make_model()
names = [layer.layer for layer in advice]
quantize_(model, NVFP4TrainingConfig(), filter_fn=skip_fqns(*names))
print(conversion_report(model))

# %%
# Real runs write reports to files: ``writers=[HTMLWriter("numerics.html")]`` is a page that needs no network.
# :doc:`/monitor` explains each figure, and what happens under ``torch.compile`` and on several ranks.
