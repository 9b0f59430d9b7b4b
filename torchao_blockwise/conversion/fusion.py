"""Fusion: layers of attention and MLPs in known models share one quantization of their input.

Modules are recognized by class. The forward pass of a known class passes its first argument only to the layers in
`_READERS`, and does not modify it. A module that only looks similar is reported and not changed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.conversion.report import aligned
from torchao_blockwise.nn.converted import restore_class
from torchao_blockwise.nn.fused_modules import FusedModule, fuse_class, why_not_shared, why_not_swiglu

FUSED, UNFUSED, SHARDED = "fused", "unfused", "sharded"

_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_LATENT = ("q_proj", "kv_a_proj_with_mqa"), ("q_a_proj", "kv_a_proj_with_mqa")
_W_QKV, _W13, _W_LATENT = ("wq", "wk", "wv"), ("w1", "w3"), (("wq", "wkv_a"), ("wq_a", "wkv_a"))
# {gate and up of an MLP: (the next layer, the activation module or "" if the forward pass calls F.silu)}
_SWIGLU: dict[tuple[str, ...], tuple[str, str]] = {_GATE_UP: ("down_proj", "act_fn"), _W13: ("w2", "")}
_HUGGING_FACE = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "gemma3": "Gemma3",
}
# {(package of a class, its name): the possible sets of layers that read the module's input}
_READERS: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    **{(f"transformers.models.{folder}", f"{name}Attention"): (_QKV,) for folder, name in _HUGGING_FACE.items()},
    **{(f"transformers.models.{folder}", f"{name}MLP"): (_GATE_UP,) for folder, name in _HUGGING_FACE.items()},
    ("transformers.models.deepseek_v3", "DeepseekV3Attention"): _LATENT,
    ("transformers.models.deepseek_v3", "DeepseekV3MLP"): (_GATE_UP,),
    ("torchtitan.models.common", "QKVLinear"): (_W_QKV,),
    ("torchtitan.models.common", "FeedForward"): (_W13,),
    ("torchtitan.models.deepseek_v3", "Attention"): _W_LATENT,
}
_BEFORE = "call fuse before other libraries wrap it"
_ALIKE = tuple(dict.fromkeys(names for ways in _READERS.values() for names in ways))


@dataclass(frozen=True)
class ModuleReport:
    """An attention or MLP module.

    fqn: its fully qualified name. kind: its class. readers: the layers that share its input, or could share it.
    status: "fused", "unfused", or "sharded". A sharded module is fused in forward passes if FSDP2 gathers the weights,
        and unfused under tensor parallelism. reason: why it is not fused, or whether SwiGLU is fused too.
    """

    fqn: str
    kind: str
    status: str
    readers: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class FusionReport:
    """All modules of a model that `fuse` knows, or that look similar to known ones. Print it for a table."""

    modules: tuple[ModuleReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """{"modules": [{...}], "fused": int} of plain Python values, ready for JSON."""
        modules = [{**asdict(module), "readers": list(module.readers)} for module in self.modules]
        return {"modules": modules, "fused": self._fused()}

    def _fused(self) -> int:
        return sum(module.status == FUSED for module in self.modules)

    def __str__(self) -> str:
        header = ("module", "class", "status", "shared input of", "reason / SwiGLU")
        rows = [(m.fqn or "(the model itself)", m.kind, m.status, ", ".join(m.readers), m.reason) for m in self.modules]
        total = ("total", f"{self._fused()} of {len(rows)}", "fused", "", "")
        return aligned(header, rows, total, words=len(header))


def fuse(model: nn.Module, *, round_once: bool = False) -> FusionReport:
    """Let layers that read the same input share its quantized copies: q, k and v of attention, gate and up of an MLP.

    model: changed in place, before or after `quantize_` and before `fully_shard`. Attention and MLPs are recognized by
        class: Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, DeepSeek-V3 and Gemma 3 of transformers; llama3, qwen3
        and deepseek_v3 of torchtitan.
    round_once: in FP8, also fuse SwiGLU with the quantization of its output, which is then never stored. The output
        h = silu(gate) · up is computed in fp32 and rounded once, as compilers do; the model's code also rounds
        silu(gate).
    Returns the report. Later, `fusion_report(model)` returns the current state. Another call replaces the fusion.

    The input is quantized once, and one columnwise copy is saved for backward for all layers that read it. Without
    `round_once`, outputs and gradients are bitwise identical to those of the unfused model. Names, state dicts, hooks,
    tensor-parallel plans and FSDP2 wrapping do not change: each module gets a subclass of its class, and each forward
    pass checks whether the layers can share. If one of them is not converted, is a DTensor, has hooks or was replaced
    (for example by LoRA), or if configs differ, each layer quantizes its input itself. Modules with an unknown forward
    pass are not changed.
    `unconvert` also removes the fusion.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3.
    """
    for module in model.modules():
        if isinstance(module, FusedModule):
            restore_class(module)
    for module in model.modules():
        readers, reason = _examined(module)
        if readers and reason is None:
            down, act = _SWIGLU.get(readers, ("", "")) if round_once else ("", "")
            fuse_class(module, readers, down=down, act=act)
    return fusion_report(model)


def fusion_report(model: nn.Module) -> FusionReport:
    """Return which modules of `model` currently share their inputs, and why others do not."""
    reports = []
    for fqn, module in model.named_modules():
        readers, why = _examined(module)
        status, why = UNFUSED, why or "not fused yet; call fuse(model)"
        if isinstance(module, FusedModule):
            readers, why = module.fusion.readers, why_not_shared(module) or ""
            status = UNFUSED if why else FUSED
            if module.fusion.down and not why:
                unfused = why_not_swiglu(module)
                why = f"SwiGLU in {module.fusion.down}" if unfused is None else f"no SwiGLU: {unfused}"
            weights: list[Any] = [getattr(getattr(module, name), "weight", None) for name in readers]
            if any(_compat.local_of(weight) is not weight for weight in weights):
                status = SHARDED
        if readers:
            reports.append(ModuleReport(fqn, type(module).__name__, status, readers, why))
    return FusionReport(tuple(reports))


def _examined(module: nn.Module) -> tuple[tuple[str, ...], str | None]:
    """Return (readers of the input, why `module` cannot be fused or None); no readers if it looks like no known one."""
    cls: Any = type(module)
    known = _READERS.get((_folder(cls), cls.__name__), ())
    has_all = lambda names: all(isinstance(getattr(module, name, None), nn.Module) for name in names)  # noqa: E731
    readers = next(filter(has_all, known or _ALIKE), ())
    if not known:
        if any((_folder(base), base.__name__) in _READERS for base in cls.__mro__[1:]):
            return readers, f"{cls.__module__}.{cls.__qualname__} is derived from a known class; {_BEFORE}"
        return readers, f"the forward pass of {cls.__module__}.{cls.__qualname__} is not known"
    forward = cls.forward
    if (forward.__module__, forward.__qualname__) != (cls.__module__, f"{cls.__qualname__}.forward"):
        return readers, f"its forward pass was replaced by {forward.__module__}.{forward.__qualname__}"
    if "forward" in vars(module):
        return readers, "its forward pass was replaced on the instance"
    for name in readers:
        if not isinstance(layer := getattr(module, name), nn.Linear):
            return readers, f"{name} is a {type(layer).__name__}; {_BEFORE}"
    return readers, None


def _folder(cls: type) -> str:
    """Return "transformers.models.llama" for a class in transformers.models.llama.modeling_llama."""
    return ".".join(cls.__module__.split(".")[:3])
