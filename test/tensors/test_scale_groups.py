"""Weights that share one tensor scale: it is that of all their values now, however the model was changed or copied."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import SCALE_GROUPS, assert_same, forward_backward, replace, weight
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchao.quantization import quantize_

from torchao_blockwise import (
    BlockwiseFP8TrainingConfig,
    NVFP4Tensor,
    NVFP4TrainingConfig,
    load_recipe_state,
    ops,
    recipe_state,
    skip_fqns,
    unconvert,
    weights_unchanged,
)
from torchao_blockwise.conversion import experts
from torchao_blockwise.distributed import MasterWeightOptimizer, cast_master_weights_to_nvfp4
from torchao_blockwise.formats import NVFP4_16X16
from torchao_blockwise.nn import SwiGLUExperts
from torchao_blockwise.tensors.scale_groups import scale_group_name
from torchao_blockwise.testing import assert_bitwise_equal, assert_operands_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")
CONFIG = NVFP4TrainingConfig(scale_groups=True, backend="reference")
JOINED = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    """Ragged blocks; o_proj has the shape of q_proj, and a scale of its own."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(40, 40, bias=False)
        self.k_proj = nn.Linear(40, 24, bias=False)
        self.v_proj = nn.Linear(40, 16, bias=False)
        self.o_proj = nn.Linear(40, 40, bias=False)

    def forward(self, x):
        return self.o_proj(self.q_proj(x) + torch.cat([self.k_proj(x), self.v_proj(x)], -1))


def attentions(config=CONFIG, count: int = 2, **options) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention() for _ in range(count)))
    # Each weight has another amax, and each block another order of them.
    for p, factor in zip(model.parameters(), itertools.cycle((1, 2, 3, 5, 7))):
        p.data *= factor
    if config is not None:
        quantize_(model, config, **options)
    return model


def values_of(layer) -> torch.Tensor:
    return layer.weight.hp.detach()


def amax_of(block, names=JOINED) -> torch.Tensor:
    return torch.stack([values_of(getattr(block, name)).abs().amax().float() for name in names]).amax()


def assert_share(block, names=JOINED) -> None:
    """What products read of these weights is quantized with the largest amax of all; of the others with their own."""
    for name, layer in block.named_children():
        for columnwise in (False, True):
            got = layer.weight.quantized(columnwise=columnwise)
            shared = amax_of(block, names) if name in names else None
            options = {"rowwise": not columnwise, "columnwise": columnwise, "backend": "reference"}
            wanted = ops.quantize(values_of(layer), NVFP4_16X16, tensor_amax=shared, **options)[columnwise]
            assert_operands_equal(got, wanted)


@torch.no_grad()
def change(weight: torch.Tensor, factor: float = 8.0) -> None:
    weight.mul_(factor)


def test_a_group_has_one_scale_of_all_its_values():
    model = attentions()
    scales = {name: p.quantized().global_scale.item() for name, p in model.named_parameters()}
    for i in range(2):
        assert len({scales[f"{i}.{name}.weight"] for name in JOINED}) == 1
        assert_share(model[i])
    assert len(set(scales.values())) == 4


@pytest.mark.parametrize("changed", JOINED)
def test_products_read_what_the_others_are_now(changed, device):
    """In forward and in backward, whoever changed; weights of no group and of other blocks stay as they are."""
    model, x = attentions(replace(CONFIG, backend="auto")).to(device), weight(33, 40).to(device)
    names = [name for name, _ in model.named_parameters() if "o_proj" in name or name[0] == "1"]
    others = {name: model.get_parameter(name).quantized().global_scale for name in names}
    before = forward_backward(model[0], x)
    change(getattr(model[0], changed).weight, 64)
    assert_share(model[0])
    assert not torch.equal(forward_backward(model[0], x)[0], before[0])
    for name, scale in others.items():
        assert_bitwise_equal(model.get_parameter(name).quantized().global_scale, scale)


def test_layers_are_their_operations():
    model, x = attentions(replace(CONFIG, stochastic_rounding=False, hadamard=False), 1), weight(33, 40)
    block = model[0]
    amax = amax_of(block)
    out, grad_input, _ = forward_backward(block.k_proj, x)
    how = {"out_dtype": torch.float32, "backend": "reference"}
    w = ops.quantize(values_of(block.k_proj), NVFP4_16X16, columnwise=True, tensor_amax=amax, backend="reference")
    activation = ops.quantize(x, "nvfp4_1x16", backend="reference").rowwise
    assert_bitwise_equal(out, ops.matmul(activation, w.rowwise, **how))
    dy = ops.quantize(torch.ones_like(out), "nvfp4_1x16", backend="reference").rowwise
    assert_bitwise_equal(grad_input, ops.matmul(dy, w.columnwise, **how))


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "bf16": lambda model: model.bfloat16(),
    "there_and_back": lambda model: model.to("meta").to_empty(device="cpu"),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_copies_and_moves_keep_the_groups(make):
    model = attentions()
    same = make(model)
    if make is COPIES["there_and_back"]:
        for p in same.parameters():
            nn.init.normal_(p)
    change(same[0].v_proj.weight)
    for block in same:
        assert_share(block)
    if same is not model:
        for block in model:
            assert_share(block)
        assert same[0].q_proj.weight.quantized().global_scale > model[0].q_proj.weight.quantized().global_scale


def test_loads_and_new_data_are_seen():
    model, other = attentions(), attentions(None)
    change(other[0].k_proj.weight)
    model.load_state_dict(other.state_dict())
    assert_share(model[0])
    model.load_state_dict(attentions(None).state_dict(), assign=True)
    assert_share(model[0])
    model[0].v_proj.weight.data = 32 * model[0].v_proj.weight.data
    assert_share(model[0])
    alias = model[0].q_proj.weight.hp
    alias.mul_(128)
    assert_share(model[0])


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled_layers_see_the_others(backend):
    """One graph, whatever changes between its runs; random bits are those of the same uses."""
    model, x = attentions(count=1), weight(33, 40)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(3):
        state = recipe_state(model)
        got = forward_backward(compiled, x)
        load_recipe_state(model, state)
        assert_same(got, forward_backward(model, x))
        change(model[0].v_proj.weight)
        assert_share(model[0])


@pytest.mark.parametrize("keep", ("rowwise", "both"))
def test_scopes_keep_copies_with_the_shared_scale(keep):
    model, x = attentions(), weight(33, 40)
    state = recipe_state(model)
    wanted = forward_backward(model, x)
    load_recipe_state(model, state)
    with weights_unchanged(model, keep=keep):
        assert_same(forward_backward(model, x), wanted)
    change(model[0].v_proj.weight)
    assert_share(model[0])


def test_checkpointing_and_casts_of_the_model():
    model, x = attentions(count=1), weight(33, 40)
    state = recipe_state(model)
    wanted = forward_backward(model, x)
    load_recipe_state(model, state)
    x = x.requires_grad_()
    out = checkpoint(model, x, use_reentrant=False)
    out.backward(torch.ones_like(out))
    assert_same([out.detach(), x.grad, *(p.grad for p in model.parameters())], wanted)
    # A model that casts its weights on every use.
    k = model[0].k_proj.weight
    out = nn.functional.linear(x.detach().bfloat16(), k.to(torch.bfloat16))
    options = {"tensor_amax": amax_of(model[0]).bfloat16().float(), "backend": "reference"}
    w = ops.quantize(k.hp.detach().bfloat16(), NVFP4_16X16, **options).rowwise
    a = ops.quantize(x.detach().bfloat16(), "nvfp4_1x16", backend="reference").rowwise
    assert_bitwise_equal(out.detach(), ops.matmul(a, w, out_dtype=torch.bfloat16, backend="reference"))


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_what_is_not_finite_reaches_all_of_the_group(value):
    model = attentions()
    with torch.no_grad():
        model[0].v_proj.weight[3, 5] = value
    for name in JOINED:
        assert getattr(model[0], name).weight.quantized().global_scale.isnan()
    assert model[0].o_proj.weight.quantized().global_scale.isfinite()


# --- conversion ------------------------------------------------------------------------------------------------------


def test_names():
    assert scale_group_name("layers.3.self_attn.q_proj.weight") == "layers.3.self_attn.q_proj+k_proj+v_proj"
    assert scale_group_name("layers.3.self_attn.o_proj.weight") == "layers.3.self_attn.o_proj.weight"
    assert scale_group_name("layers.3.self_attn.q_proj.weight", False) == "layers.3.self_attn.q_proj.weight"
    expert = "layers.3.mlp.experts.{}.{}.weight"
    names = {scale_group_name(expert.format(i, name)) for i in range(3) for name in ("gate_proj", "up_proj")}
    assert names == {"layers.3.mlp.experts.*.gate_proj+up_proj"}
    assert scale_group_name(expert.format(0, "down_proj")) == scale_group_name(expert.format(1, "down_proj"))
    assert scale_group_name("experts.w1") == scale_group_name("experts.w3") == "experts.w1+w3"
    assert scale_group_name("a.to_q", (("to_q", "to_k"),)) == scale_group_name("a.to_k", (("to_q", "to_k"),))


def test_names_of_ones_own_and_what_a_filter_leaves_out():
    model = attentions(replace(CONFIG, scale_groups=[["k_proj", "o_proj"]]))
    assert_share(model[0], ("k_proj", "o_proj"))
    model = attentions(filter_fn=skip_fqns("*.k_proj"))
    assert not hasattr(model[0].k_proj.weight, "hp")
    amax = amax_of(model[0], ("q_proj", "v_proj"))
    wanted = ops.quantize(values_of(model[0].v_proj), NVFP4_16X16, tensor_amax=amax, backend="reference")
    assert_operands_equal(model[0].v_proj.weight.quantized(), wanted.rowwise)


def test_layers_of_two_conversions_share_a_scale():
    model = attentions(None)
    for name in JOINED:
        quantize_(model, CONFIG, filter_fn=lambda module, fqn, name=name: fqn.endswith(name))
    quantize_(model, CONFIG, filter_fn=lambda module, fqn: fqn.endswith("o_proj"))
    assert_share(model[0])
    assert_share(model[1])


def test_another_conversion_ends_a_group():
    model = attentions()
    quantize_(model, replace(CONFIG, scale_groups=False), filter_fn=lambda module, fqn: fqn == "0.k_proj")
    assert_share(model[0], ("q_proj", "v_proj"))
    unconvert(model)
    quantize_(model, replace(CONFIG, scale_groups=False))
    assert_share(model[0], ())


def test_experts_of_two_parameters_share_a_scale():
    model = nn.ModuleList([SwiGLUExperts(3, 40, 24)])
    config = replace(CONFIG, scale_groups=(("gate_up", "down"),))
    quantize_(model, config, filter_fn=experts())
    ends = torch.tensor([9, 9, 20], dtype=torch.int32)
    change(model[0].down, 64)
    assert model[0].gate_up.quantized().global_scale == model[0].down.quantized().global_scale
    alone = nn.ModuleList([SwiGLUExperts(3, 40, 24)])
    quantize_(alone, replace(config, scale_groups=False), filter_fn=experts())
    alone.load_state_dict(model.state_dict())
    x = weight(20, 40)
    assert not torch.equal(model[0](x, ends), alone[0](x, ends))


BAD = {
    "text": "qkv",
    "names": ("q_proj", "k_proj"),
    "dots": (("a.q", "b"),),
    "twice": (("q", "k"), ("k", "v")),
    "none": (),
}


@pytest.mark.parametrize("groups", BAD.values(), ids=BAD)
def test_refuses_what_names_no_groups(groups):
    with pytest.raises(ValueError, match="scale_groups must"):
        NVFP4TrainingConfig(scale_groups=groups)


def test_refuses_a_scale_an_expert_beside():
    with pytest.raises(ValueError, match="scale_per_expert each expert its own; take one of them"):
        NVFP4TrainingConfig(scale_groups=True, scale_per_expert=True)


def test_formats_without_a_tensor_scale_have_no_option():
    with pytest.raises(TypeError, match="no option 'scale_groups'"):
        BlockwiseFP8TrainingConfig(scale_groups=True)


# --- quantized Parameters --------------------------------------------------------------------------------------------


def test_quantized_parameters_begin_and_train_with_the_shared_scale():
    config = replace(CONFIG, master_weights=False)
    model, masters = attentions(config), attentions()
    for step in range(3):
        for p, w in zip(model.parameters(), masters.parameters(), strict=True):
            assert isinstance(p, NVFP4Tensor)
            assert_operands_equal(p.operand(), w.quantized())
        if not step:
            optimizer = MasterWeightOptimizer(torch.optim.SGD, model, lr=1.0)
            reference = torch.optim.SGD(masters.parameters(), lr=1.0)
        for i, (p, w) in enumerate(zip(model.parameters(), masters.parameters(), strict=True)):
            p.grad = weight(*p.shape, seed=i) * 4.0**step
            w.grad = p.grad.clone()
        optimizer.step()
        reference.step()


def test_a_cast_of_a_part_of_a_group_is_refused():
    model = attentions(replace(CONFIG, master_weights=False), 1)
    names = {name: p for name, p in model[0].named_parameters() if "q_proj" not in name}
    masters = [torch.randn(p.numel()) for p in names.values()]
    with pytest.raises(ValueError) as error:
        cast_master_weights_to_nvfp4([*names.values()], masters, [0] * len(masters))
    assert_expected_inline(
        str(error.value),
        """\
scale_groups: 3 weights of 0.q_proj+k_proj+v_proj share a tensor scale, and 2 of them are cast together; give all of \
them to one optimizer and one mesh, or convert with scale_groups=False""",
    )


def test_sharded_layers_of_tests_share_scales():
    """Tests of ranks compare this recipe, whose groups must be there."""
    model = nn.ModuleDict({"up": nn.Linear(32, 32), "down": nn.Linear(32, 32)})
    change(model["down"].weight)
    quantize_(model, SCALE_GROUPS)
    assert model["up"].weight.quantized().global_scale == model["down"].weight.quantized().global_scale
