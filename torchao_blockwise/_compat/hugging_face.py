"""Private names of transformers, accelerate and PEFT. Importing this module imports none of them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from torchao_blockwise import _compat


def adapters_in(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the modules that PEFT's tuners have added to `model`, and their submodules."""
    peft: Any = sys.modules.get("peft")
    found: set[torch.nn.Module] = set()
    for module in () if peft is None else model.modules():
        names: tuple[str, ...] = ()
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            names = module.adapter_layer_names
        elif isinstance(module, peft.PeftModel):
            names = ("prompt_encoder",)
        for added in (getattr(module, name, None) for name in names):
            found.update(added.modules() if isinstance(added, torch.nn.Module) else ())
    return found


class _WeightData:
    """PEFT's access to the weight of a converted layer, for tuners that replace it when they merge."""

    supports_merge, backend_name, layer_type = True, "torchao_blockwise", "linear"

    def get_base_weight(self, base_layer: Any) -> torch.Tensor:
        return base_layer.weight.dequantize()

    def set_base_weight(self, layer: Any, weight: torch.Tensor) -> None:
        layer.get_base_layer().weight.data = weight

    def maybe_clone_base_result(self, x: torch.Tensor) -> torch.Tensor:
        return x


def tell_peft_how_to_merge(kind: type) -> None:
    """Make PEFT merge adapters into the data of weights of class `kind`, as it does for plain weights.

    Otherwise PEFT takes them for torchao's own tensors, which it merges by calling `quantize_` with a config that it
    has only for models that transformers has loaded quantized. Each conversion calls this; it does nothing if PEFT is
    not imported.
    """

    def is_ours(layer: Any) -> bool:
        inner = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        return isinstance(getattr(inner, "weight", None), kind)

    lora: Any = sys.modules.get("peft.tuners.lora.model")
    if lora is not None and not hasattr(lora.dispatch_torchao, "__wrapped__"):
        dispatch = lora.dispatch_torchao

        @functools.wraps(dispatch)
        def dispatch_others(target: Any, *args: Any, **options: Any) -> Any:
            # The next one in PEFT's list is for plain layers.
            return None if is_ours(target) else dispatch(target, *args, **options)

        lora.dispatch_torchao = dispatch_others

    # PEFT ≥ 0.20
    resolve = getattr(sys.modules.get("peft.utils"), "resolve_quantization_backend", None)
    if resolve is not None and not hasattr(resolve, "__wrapped__"):

        @functools.wraps(resolve)
        def resolve_others(base_layer: Any, **options: Any) -> Any:
            return _WeightData() if is_ours(base_layer) else resolve(base_layer, **options)

        # Each tuner has imported the function by name.
        for name, module in list(sys.modules.items()):
            if name.startswith("peft.") and vars(module).get("resolve_quantization_backend") is resolve:
                vars(module)["resolve_quantization_backend"] = resolve_others


def run_batched_experts_grouped(kind: type) -> None:
    """Make transformers run experts of class `kind` with `grouped_mm` where their implementation is "batched_mm".

    On a GPU, `generate` switches from "grouped_mm" to "batched_mm" for decoding, which copies the weights of each
    token's experts and multiplies them with `torch.bmm`. A conversion of experts calls this; it does nothing if
    transformers is not imported.
    """
    functions: Any = getattr(sys.modules.get("transformers.integrations.moe"), "ALL_EXPERTS_FUNCTIONS", None)
    if functions is None or hasattr(functions["batched_mm"], "__wrapped__"):
        return
    batched = functions["batched_mm"]

    @functools.wraps(batched)
    def experts_forward(self: Any, *args: Any, **options: Any) -> Any:
        run = functions["grouped_mm"] if isinstance(self, kind) else batched
        return run(self, *args, **options)

    functions.register("batched_mm", experts_forward)


def is_offloaded_by_accelerate(module: torch.nn.Module) -> bool:
    """Whether accelerate offloads the module and replaces its weights by plain ones on every use."""
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


def is_silu(activation: torch.nn.Module) -> bool:
    """Whether `activation` is SiLU, by its class in PyTorch or transformers."""
    cls = type(activation)
    return cls is torch.nn.SiLU or (cls.__module__, cls.__name__) == ("transformers.activations", "SiLUActivation")


def multiplies_as_linear(cls: type) -> bool:
    """Whether the forward pass of a linear layer of class `cls` computes `x @ weight.T + bias`, like Falcon's."""
    return (cls.__module__, cls.__name__) == ("transformers.models.falcon.modeling_falcon", "FalconLinear")


def kept_in_fp32(model: torch.nn.Module) -> list[str] | None:
    """Return the names of modules that transformers keeps in fp32, whatever dtype the model is loaded in."""
    return getattr(model, "_keep_in_fp32_modules", None)


def is_model(model: object) -> bool:
    """Whether `model` is a model of transformers, or of a library that derives from its class."""
    return "transformers" in sys.modules and hasattr(model, "_tied_weights_keys")


def ignored_on_load(model: torch.nn.Module) -> set[str]:
    """Return patterns of names that files may have and `model` does not; empty for models of other libraries.

    Examples are layers for multi-token prediction in DeepSeek-V3 and GLM-4.5, and rotary frequencies in old files.
    """
    named = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    return {*(named or ()), *[r"rotary_emb\.inv_freq$"] * is_model(model)}


def class_in_config(model: Any) -> dict[str, Any]:
    """Return the class and the dtype of a model of transformers as `save_pretrained` writes them to config.json."""
    if not is_model(model):
        return {}
    # The prefix of a class that FSDP2 derives.
    architecture = type(model).__name__.removeprefix("FSDP")
    return {"architectures": [architecture], "dtype": str(model.dtype).removeprefix("torch.")}


def model_on_meta(config: Any, dtype: torch.dtype | None, options: dict[str, Any]) -> Any:
    """Return the model that `config` names, else a causal LM or a base model, on the meta device.

    dtype: default that of `config`, else bfloat16. What transformers keeps in fp32 when it loads files is in fp32.
    Raises ValueError if transformers has no model for `config`.
    """
    import transformers

    named = (getattr(transformers, name, None) for name in config.architectures or ())
    classes = [c for c in named if isinstance(c, type) and issubclass(c, transformers.PreTrainedModel)]
    autos = transformers.AutoModelForCausalLM, transformers.AutoModel
    makers = [c._from_config for c in classes] + [a.from_config for a in autos if type(config) in a._model_mapping]
    if not makers:
        raise ValueError(
            f"transformers {transformers.__version__} has no model for {type(config).__name__}; upgrade it"
        )
    dtype = dtype or config.dtype or torch.bfloat16
    with torch.device("meta"):
        model = makers[0](config, dtype=dtype, **options)
    kept = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    if dtype is torch.float16:
        kept.update(kept_in_fp32(model) or ())
    for name, x in itertools.chain(model.named_parameters(), model.named_buffers()):
        if any(re.search(pattern.replace("*", ".*"), name) for pattern in kept):
            x.data = x.data.float()
    return model


def materialize(model: Any, device: torch.device) -> None:
    """Give a model on the meta device memory on `device`, and buffers that no state dict has their values.

    If `device` is the meta device too, only these buffers get memory, on the CPU.
    """
    if device.type == "meta":
        for module in model.modules():
            for name in module._non_persistent_buffers_set:
                setattr(module, name, torch.empty_like(getattr(module, name), device="cpu"))
    else:
        model.to_empty(device=device)
        model.tie_weights()
    # transformers initializes what it has not loaded.
    for x in model.state_dict(keep_vars=True).values():
        x._is_hf_initialized = True
    model.initialize_weights()


def advise_on_stored_formats(kind: type, advice: str) -> None:
    """Append `advice` to transformers' error about quantized files that are loaded with a config of class `kind`."""
    from transformers.quantizers.auto import AutoHfQuantizer

    merge = AutoHfQuantizer.merge_quantization_configs

    @functools.wraps(merge)
    def advising(stored: Any, given: Any) -> Any:
        try:
            return merge(stored, given)
        except ValueError as error:
            if not isinstance(given, kind):
                raise
            raise ValueError(f"{error} {advice}") from None

    AutoHfQuantizer.merge_quantization_configs = staticmethod(advising)  # type: ignore[method-assign,assignment]


def remember_given_state_dicts(kind: type) -> None:
    """Wrap `save_pretrained` to set its `state_dict` argument as `given_state_dict` of a quantizer of class `kind`.

    transformers passes only the model to a quantizer, and drops the state dict, which Trainer has gathered.
    """
    from transformers import PreTrainedModel

    save = PreTrainedModel.save_pretrained
    signature = inspect.signature(save)

    @functools.wraps(save)
    def remembering(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        quantizer = getattr(given["self"], "hf_quantizer", None)
        if isinstance(quantizer, kind):
            vars(quantizer)["given_state_dict"] = given.get("state_dict")
        return save(*args, **kwargs)

    PreTrainedModel.save_pretrained = remembering  # type: ignore[method-assign]


def count_stored_bytes(kind: type) -> None:
    """Make `PreTrainedModel.get_memory_footprint` count payload and scales of Parameters of class `kind`.

    transformers counts elements in the dtype that a Parameter reports, which is that of its decoded values.
    """
    from transformers import PreTrainedModel

    own = PreTrainedModel.get_memory_footprint

    @functools.wraps(own)
    def footprint(self: Any, return_buffers: bool = True) -> Any:
        total = own(self, return_buffers)
        for p in self.parameters():
            x: Any = _compat.local_of(p)
            if issubclass(type(x), kind):
                per_matrix = x.global_scale is not None and x.global_scale.dim() > 0
                total += x.fmt.nbytes(*p.shape, scale_per_matrix=per_matrix) - p.nelement() * p.element_size()
        return total

    PreTrainedModel.get_memory_footprint = footprint  # type: ignore[method-assign]


@contextlib.contextmanager
def prefixes_of(model: torch.nn.Module, names: Collection[str]) -> Iterator[None]:
    """Make `reverted` write the prefixes of names in files that transformers drops or adds when it loads them.

    Most files of LLaVA, Gemma 3 and PaliGemma have "vision_tower.vision_model.". transformers saves that only if it has
    loaded it, and remembers this in the model. The model keeps the prefixes of these files unless the context raises.
    """
    before = getattr(model, "_weight_conversions", None)
    try:
        if is_model(model):
            _take_prefixes(model, names)
        yield
    except BaseException:
        if getattr(model, "_weight_conversions", None) is not before:
            model._weight_conversions = before  # type: ignore[assignment]
        raise


def _take_prefixes(model: torch.nn.Module, names: Collection[str]) -> None:
    from transformers import core_model_loading

    # Later versions of transformers 5
    kind: Any = getattr(core_model_loading, "PrefixChange", None)
    if kind is None:
        return
    from transformers.conversion_mapping import get_model_conversion_mapping

    model_of_theirs: Any = model
    conversions = get_model_conversion_mapping(model_of_theirs, add_legacy=False)
    for name in names:
        for x in conversions:
            if isinstance(x, core_model_loading.WeightRenaming):
                name, _ = x.rename_source_key(name)
    kept = [x for x in conversions if not isinstance(x, kind) or x.was_used()]
    has_other = len(kept) < len(conversions) and getattr(model, "_weight_conversions", None) is not None
    if has_other or any(isinstance(x, kind) for x in kept):
        model_of_theirs._weight_conversions = kept


def transposed_in_files(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of those tensors [E, N, K] that released files and engines hold as [E, K, N].

    These are the experts of Qwen3-VL-MoE. transformers writes [E, N, K] and reads both, by shape; N = K is left out.
    """
    if not is_model(model):
        return set()
    from transformers.conversion_mapping import get_model_conversion_mapping

    model_of_theirs: Any = model
    by_shape = [
        x
        for x in get_model_conversion_mapping(model_of_theirs)
        if any(getattr(op, "check_dims", False) for op in getattr(x, "operations", ()))
    ]
    different = [name for name, x in tensors.items() if by_shape and x.shape[-2:] != x.shape[-2:][::-1]]
    return {name for name in different if any(x.rename_source_key(name)[1] is not None for x in by_shape)}


def reverted(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert a part of a state dict to what transformers writes: its names, and experts one by one.

    The state dict of a model of another library is returned unchanged.
    """
    if not is_model(model):
        return state
    from transformers import core_model_loading

    model_of_theirs: Any = model
    # Those of a model that transformers has dequantized would quantize its weights again. Without them, it uses those
    # of the model's class.
    loaded_by = getattr(model, "_weight_conversions", None)
    operations = [type(op) for x in loaded_by or () for op in getattr(x, "operations", ())]
    if any(op.__module__ == "transformers.integrations.finegrained_fp8" for op in operations):
        model_of_theirs._weight_conversions = None
    try:
        return core_model_loading.revert_weight_conversion(model_of_theirs, state)
    finally:
        if loaded_by is not None:
            model_of_theirs._weight_conversions = loaded_by
