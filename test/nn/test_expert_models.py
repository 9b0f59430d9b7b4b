"""Mixtures of experts as others write them, unchanged: Hugging Face's and torchtitan's classes, made small.

They need `pip install -e .[models]`, which the other tests do not.
"""

import contextlib
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, NVFP4, assert_same, both_formats, both_masters, converted, forward_backward, weight_calls
from products_by_hand import ProductsByHand
from torch import nn

from torchao_blockwise import MasterWeightTensor, experts, linears_and_experts, skip_lm_head
from torchao_blockwise.testing import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SIZES = {"vocab_size": 128, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 48}
# The last one stores experts transposed, [E, K, N], and has biases.
FAMILIES = ("Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss")
# They call `bmm`: each expert with all tokens, those of others as zeros; a linear layer with groups of its rows.
BATCHED = {
    "Llama4Text": {
        "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1
    },
    "DeepseekV4": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 40, "q_lora_rank": 32
    },
}  # fmt: skip
IDS = torch.randint(0, 128, (2, 33), generator=torch.Generator().manual_seed(1))
CHOSEN = linears_and_experts() & skip_lm_head()
every_family = pytest.mark.parametrize("family", FAMILIES)


def hugging_face(family: str, implementation: str = "grouped_mm", dtype=torch.float32) -> nn.Module:
    """A language model of two layers, whose experts run by `implementation`."""
    transformers = pytest.importorskip("transformers", "5.0")
    import exported_models

    if family in BATCHED:
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
        config = getattr(transformers, f"{family}Config")(**SIZES, **heads, **BATCHED[family])
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    else:
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "GptOss" else {}
        model = exported_models.language_model(family, None, **SIZES, **experts)
        model.set_experts_implementation(implementation)
    with torch.no_grad():
        for p in model.parameters():
            # So that experts matter: initial weights are tiny.
            p.mul_(4) if p.dim() == 3 else None
    return model.to(dtype)


def loss_of(model) -> torch.Tensor:
    return model(input_ids=IDS, labels=IDS).loss


def gradients(model, loss=loss_of) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def train(model, loss_of, calls_a_step: tuple[int, int] | None = None) -> list[float]:
    """The losses of four steps of two microbatches; each step quantizes weights that often (in all, columnwise)."""
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(4):
        with weight_calls() as calls:
            for _ in range(2):
                loss = loss_of(model)
                loss.backward()
                losses.append(loss.item())
        assert calls_a_step in (None, (calls.quantize, calls.columnwise))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_by_hand(plain, model, config, loss_of) -> list[float]:
    """The losses of `plain`, with products composed by hand where `model` has master weights."""
    plain_weights = dict(plain.named_parameters())
    chosen = [plain_weights[name] for name, p in model.named_parameters() if isinstance(p, MasterWeightTensor)]
    with ProductsByHand(chosen, config):
        return train(plain, loss_of, (0, 0))


@both_formats
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@every_family
def test_hugging_faces_experts_train(config, family, dtype):
    """Each product quantizes its weight, forward and backward; the losses fall, and are those of products by hand."""
    plain, model = hugging_face(family, dtype=dtype), converted(hugging_face(family, dtype=dtype), config, CHOSEN)
    count = sum(isinstance(p, MasterWeightTensor) for p in model.parameters())
    expected = train_by_hand(plain, model, config, loss_of)
    assert train(model, loss_of, (4 * count, 2 * count)) == expected
    assert expected[-1] < expected[0] - 0.3


@both_formats
@pytest.mark.parametrize("family", BATCHED)
def test_tokens_batched_by_expert_train(config, family):
    plain, model = hugging_face(family), converted(hugging_face(family), config, CHOSEN)
    expected = train_by_hand(plain, model, config, loss_of)
    assert train(model, loss_of) == expected
    assert expected[-1] < expected[0] - 0.3


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_implementations_agree(family):
    """A loop over experts with `F.linear` gives what grouped products give: blocks never reach over experts.

    It takes the tokens of an expert in another order, which only changes the sums in its weight's gradient.
    """
    models = [
        converted(hugging_face(family, implementation), FP8, CHOSEN) for implementation in ("grouped_mm", "eager")
    ]
    grouped, eager = map(gradients, models)
    for name, p in models[0].named_parameters():
        if p.dim() == 3:
            # Each token is once with an expert, so two sums of as many products as there are tokens.
            assert relative_error(grouped[name], eager[name]) < 2 * IDS.numel() * 2.0**-24, name
        else:
            assert_bitwise_equal(grouped[name], eager[name], name)


@both_masters
@every_family
def test_experts_generate_where_transformers_switches_to_batched_products(family, masters, monkeypatch):
    """On other devices than CPUs `generate` decodes with "batched_mm", which multiplies by `bmm`."""
    model = converted(hugging_face(family), replace(FP8, master_weights=masters), CHOSEN)
    plain = hugging_face(family)

    @contextlib.contextmanager
    def switched(self):
        self.set_experts_implementation("batched_mm")
        yield
        self.set_experts_implementation("grouped_mm")

    def tokens():
        return model.generate(IDS[:, :8], max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)

    expected = tokens()
    monkeypatch.setattr(type(model), "_optimize_model_for_decode", switched)
    assert torch.equal(tokens(), expected)
    # Experts that are not converted run as before.
    logits = [plain(IDS).logits]
    plain.set_experts_implementation("batched_mm")
    with mock.patch.object(F, "grouped_mm", side_effect=AssertionError):
        logits.append(plain(IDS).logits)
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@every_family
def test_hugging_faces_experts_compile(family, dtype):
    """As one graph; of float32 weights transformers makes another product when it is compiled.

    Formats take turns, so that each family and each dtype is compiled with both of them.
    """
    config = (FP8, NVFP4)[(FAMILIES.index(family) + (dtype == torch.bfloat16)) % 2]
    module = next(m for fqn, m in hugging_face(family, dtype=dtype).named_modules() if fqn.endswith("experts"))
    converted(module, config, experts())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    x, scores = torch.randn(40, 64, dtype=dtype), torch.rand(40, 2, dtype=dtype)

    def results(run, ids):
        return forward_backward(module, x, lambda x: run(x, ids, scores))

    for high in (4, 2):
        ids = torch.randint(0, high, (40, 2))
        assert_same(results(compiled, ids), results(module, ids))


# --- torchtitan -------------------------------------------------------------------------------------------------------


def titan_moe() -> nn.Module:
    moe = pytest.importorskip("torchtitan.models.common.moe")
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    def linear(inputs: int, outputs: int):
        return Linear.Config(in_features=inputs, out_features=outputs)

    shared = FeedForward.Config(w1=linear(64, 96), w2=linear(96, 64), w3=linear(64, 96))
    routed = moe.RoutedExperts.Config(
        inner_experts=moe.GroupedExperts.Config(dim=64, hidden_dim=96, num_experts=4),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=4, top_k=2),
    )
    router = moe.TokenChoiceTopKRouter.Config(num_experts=4, gate=linear(64, 4), top_k=2)
    layer = moe.MoE.Config(num_experts=4, routed_experts=routed, router=router, shared_experts=shared).build()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=p.shape[-1] ** -0.5)
    return layer


def titan_loss(layer, tokens: int = 19) -> torch.Tensor:
    x = torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(2))
    return layer(x).square().mean()


@both_formats
def test_torchtitans_experts_train(config):
    """They cast float32 weights to bfloat16 on every use; products read the weights themselves."""
    plain, layer = titan_moe(), converted(titan_moe(), config, CHOSEN)
    kinds = {name: isinstance(p, MasterWeightTensor) for name, p in layer.named_parameters()}
    assert sum(kinds.values()) == 6 and not kinds["router.gate.weight"]
    expected = train_by_hand(plain, layer, config, titan_loss)
    # Of six weights in forward; the input needs no gradient, which leaves the two down-projections.
    losses = train(layer, titan_loss, (2 * 8, 2 * 2))
    assert losses == expected and losses[-1] < 0.3 * losses[0]


@both_formats
@pytest.mark.parametrize("sharded", (False, True), ids=("plain", "dtensors"))
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_torchtitans_experts_also_as_dtensors(config, compiled, sharded, one_rank):
    """`to_local().bfloat16().transpose(-2, -1)`, as expert parallelism leaves them."""
    from torch.distributed.tensor import DTensor, Shard

    whole, module = (converted(titan_moe().routed_experts.inner_experts, config, experts()) for _ in range(2))
    x, counts = torch.randn(40, 64), torch.tensor([7, 0, 30, 3])
    expected = gradients(whole, lambda m: m(x, counts).square().sum())
    for name, p in list(module.named_parameters()) if sharded else ():
        local = DTensor.from_local(p.detach(), one_rank, [Shard(0)], run_check=False)
        setattr(module, name, nn.Parameter(local))
    run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    with weight_calls() as calls:
        for _ in range(2):
            got = gradients(module, lambda m: run(x, counts).square().sum())
    assert (calls.quantize, calls.columnwise) == (2 * 4, 2)
    for name in expected:
        assert_bitwise_equal(got[name].to_local() if sharded else got[name], expected[name], name)
