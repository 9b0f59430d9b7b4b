"""torchtitan's trainer on a CPU, over gloo: its debug models with fewer layers, on random tokens."""

import importlib
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import bench_torchtitan

SECTION = "torchao_blockwise.integrations.torchtitan"


# torchtitan calls functions of a device that torch.cpu lacks.
_CPU = types.SimpleNamespace(
    **vars(torch.cpu)
    | {
        "get_device_name": lambda *_: "CPU",
        "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=2**30),
        "current_device": lambda: 0,
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda *_: None,
    }
)


def load() -> types.ModuleType:
    """Import torchtitan's trainer for a CPU, gloo and the installed PyTorch."""
    # It looks for its device at import.
    with (
        mock.patch("torch._utils._get_available_device_type", lambda: "cpu"),
        mock.patch("torch._utils._get_device_module", lambda _: _CPU),
    ):
        trainer = importlib.import_module("torchtitan.trainer")
    fsdp = importlib.import_module("torchtitan.distributed.fsdp")
    # PyTorch 2.13 lacks torch.distributed.set_timeout, and gloo lacks reductions that also divide.
    importlib.import_module("torchtitan.distributed.utils").set_pg_timeouts = lambda **_: None
    fsdp.disable_fsdp_gradient_division = sum_gradients
    trainer.time = types.SimpleNamespace(
        sleep=lambda _: None, perf_counter=importlib.import_module("time").perf_counter
    )
    return trainer


def sum_gradients(model):
    """torchtitan's `disable_fsdp_gradient_division`, with operations that gloo supports."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _attention():
    from torchtitan.protocols.module import Module

    class Attention(Module):
        """Causal attention that runs forward and backward on a CPU, unlike FlexAttention."""

        @dataclass(kw_only=True, slots=True)
        class Config(Module.Config):
            pass

        def __init__(self, config):
            super().__init__()

        def forward(self, q_BLNH, k_BLNH, v_BLNH, *, scale=None, out_transform=None, **_):  # their names
            q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            scores = (q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
            scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu(1)
            out = (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2)
            return out if out_transform is None else out_transform(out, scores.logsumexp(-1).transpose(1, 2))

    return Attention


def config_of(family: str, imports=(), *, layers=2, steps=2, tp=1, ep=1, compiled=False, selective=False,
              backend="partial_dtensor", folder="", save=False, converters=None):  # fmt: skip
    """Return torchtitan's config of a debug model with `layers` layers. imports: (override, its options)."""
    trainer = load()
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import CompileConfig, OverrideConfig, ParallelismConfig, TrainingConfig
    from torchtitan.config.configs import DebugConfig
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    (Tokenizer, Tokens), Attention = bench_torchtitan.components(), _attention()
    spec = importlib.import_module(f"torchtitan.models.{family}").model_registry("debugmodel", converters=converters)
    spec.model.layers = spec.model.layers[:layers]
    for layer in spec.model.layers:
        layer.attention.inner_attention = Attention.Config()
    checkpoint = CheckpointManager.Config(enable=save, interval=2, last_save_model_only=False)
    return trainer.Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        tokenizer=Tokenizer.Config(),
        dataloader=Tokens.Config(vocabulary=64),
        optimizer=default_adamw(lr=1e-3),
        training=TrainingConfig(local_batch_size=2, seq_len=32, steps=steps, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(tensor_parallel_degree=tp, expert_parallel_degree=ep, spmd_backend=backend),
        compile=CompileConfig(enable=compiled),
        activation_checkpoint=SelectiveAC.Config() if selective else None,
        checkpoint=checkpoint,
        debug=DebugConfig(seed=1),
        override=OverrideConfig(imports=[(f"{SECTION}.{name}", options) for name, options in imports]),
        dump_folder=folder or tempfile.gettempdir(),
    )


def losses(config, prepare=None) -> list[float]:
    kind = type(config.model_spec.model)
    build = kind.build
    made = (lambda self, **kwargs: prepare(build(self, **kwargs))) if prepare else build
    with mock.patch.object(kind, "build", made):
        trainer = config.build()
    seen: list[float] = []
    trainer.metrics_processor.log = lambda step, mean, *_, **__: seen.append(mean)
    trainer.metrics_processor.config.log_freq = 1
    trainer.train()
    trainer.close()
    return seen
