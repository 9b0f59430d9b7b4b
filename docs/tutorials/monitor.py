"""
Monitor numerics and choose layers for bf16
===========================================

Some layers lose too much accuracy in four bits. ``NumericsMonitor`` measures the quantization error of each tensor
during training, tries other recipes on the same tensors, and names the layers to keep in bf16.
"""

# %%
# A model with a layer that is hard to quantize
# ---------------------------------------------
#
# In one layer of this model, rows with large values are next to a row with small values. Such weights can occur in
# training, but here they are constructed.

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
# Train in FP8 and evaluate NVFP4
# -------------------------------
#
# Here, the monitor makes a report in every tenth step. Between reports, it takes almost no time. With ``what_if``, it
# also quantizes the same tensors with another recipe.

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
# The report
# ----------
#
# A report has one line per layer, with the largest error first. SQNR is the signal-to-quantization-noise ratio in
# decibels. An increase of 6 dB halves the error.

report = [report for report in reports if report is not None][-1]
print(report)

# %%
# The report also contains the figures for each tensor:

figure, axes = plt.subplots()
for shift, recipe in ((-0.2, "fp8"), (0.2, "nvfp4")):
    weights = [entry for entry in report.tensors if entry.recipe == recipe and entry.tensor == "w"]
    axes.bar([i + shift for i in range(len(weights))], [entry.underflow for entry in weights], 0.4, label=recipe)
axes.set_xticks(range(len(weights)), [entry.layer for entry in weights])
axes.set(title="How much of each layer's weight becomes zero", xlabel="layer", ylabel="%")
axes.legend()
plt.show()

# %%
# Keep the named layers in bf16
# -----------------------------

model = make_model()
names = [layer.layer for layer in advice]
quantize_(model, NVFP4TrainingConfig(), filter_fn=skip_fqns(*names))
print(conversion_report(model))

# %%
# In real runs, write reports to files: ``writers=[HTMLWriter("numerics.html")]`` writes a page that works offline.
# :doc:`/monitor` explains all figures, and how to use the monitor with ``torch.compile`` and sharding.
