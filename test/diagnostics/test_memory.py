"""The memory report: predictions are what a step takes, by hand too, and nothing of the model changes."""

import json

import pytest
import torch
import torch.distributed as dist
from helpers import FP8, FULL, NVFP4, both_formats, both_masters, converted, mlp, replace
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from torchao.quantization import quantize_

from torchao_blockwise import fuse, linears_and_experts, recipe_state, skip_lm_head
from torchao_blockwise.diagnostics import memory_report
from torchao_blockwise.diagnostics.live_memory import LiveMemory
from torchao_blockwise.distributed import MasterWeightOptimizer, sync_weight_scales
from torchao_blockwise.nn import NormLinear, SwiGLUExperts, SwiGLUMLP

pytestmark = pytest.mark.usefixtures("small_heap")
T, D, H = 96, 64, 160
STEP = ("weights", "buffers", "copies", "gradients", "saved", "peak")


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = SwiGLUExperts(3, D, H)

    def forward(self, x):
        return self.experts(x, torch.full((3,), T // 3, dtype=torch.int32, device=x.device).cumsum(0).int())


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False) if self.training else super().forward(x)


MODELS = {
    "mlp": mlp,
    "norm": lambda: NormLinear(D, H),
    "swiglu": lambda: SwiGLUMLP(D, H),
    "experts": Experts,
    "checkpointed": lambda: Checkpointed(*mlp()),
    "random": lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.BatchNorm1d(D)),
}


def tokens() -> torch.Tensor:
    return torch.randn(T, D, dtype=torch.bfloat16)


def assert_predicted(report, names=STEP) -> None:
    for name in names:
        assert getattr(report.predicted, name) == getattr(report.measured, name), name


@both_masters
@both_formats
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_step_takes_what_was_predicted(make, config, masters):
    model = make().bfloat16()
    plain = memory_report(model, tokens())
    assert plain.predicted == plain.unconverted
    quantize_(model, replace(config, master_weights=masters), filter_fn=linears_and_experts())
    report = memory_report(model, tokens())
    assert report.notes == () and report.unconverted == plain.unconverted
    assert_predicted(report)
    with torch.device("meta"):
        unreal = make().bfloat16()
    quantize_(unreal, replace(config, master_weights=True), filter_fn=linears_and_experts())
    if masters:
        found = memory_report(unreal, tokens().to("meta"))
        assert (found.predicted, found.measured) == (report.predicted, None)


@both_masters
def test_tensor_scales_of_experts_count_each(masters):
    def report(per_expert: bool):
        model, config = Experts().bfloat16(), replace(NVFP4, master_weights=masters, scale_per_expert=per_expert)
        quantize_(model, config, filter_fn=linears_and_experts())
        return memory_report(model, tokens())

    one, each = report(False), report(True)
    assert_predicted(each, ("weights", "copies", "peak"))
    # Two more of the largest master's copy; a quantized weight has them itself, two for each of both weights.
    more = 2 * torch.float32.itemsize
    assert each.predicted.weights - one.predicted.weights == 2 * more * (not masters)
    assert not masters or each.measured.copies - one.measured.copies == more


@both_formats
def test_a_linear_layer_by_hand(config):
    layer = converted(nn.Linear(D, H, bias=False, dtype=torch.bfloat16), config)
    report, element = memory_report(layer, tokens()), torch.bfloat16.itemsize
    weight, x = H * D * element, config.grad_weight_format.nbytes(D, T)
    assert report.measured.weights == report.measured.gradients == weight
    assert (report.measured.saved, report.measured.copies) == (x, config.weight_format.nbytes(H, D))
    # In bf16 the batch itself is saved, which is there anyway.
    payload = H * D * config.weight_format.element.bits // 8
    assert (report.unconverted.saved, report.unconverted.gathered, report.predicted.gathered) == (0, weight, payload)


def test_nothing_changes(recwarn):
    """Values, gradients and what they are added to, modes, random states and bits."""
    model = converted(MODELS["random"](), FULL)
    model(torch.randn(T, D)).sum().backward()
    model[1].eval()
    main_grad = model[0].weight.main_grad = torch.ones(D, D)
    # Such a hook may be an optimizer step.
    model[0].weight.register_post_accumulate_grad_hook(pytest.fail)
    x, grads, state = torch.randn(T, D), [p.grad for p in model.parameters()], torch.get_rng_state()
    before, random_bits = [t.clone() for t in (*model.state_dict().values(), *grads)], recipe_state(model)
    with torch.no_grad():
        memory_report(model, x)
    assert recipe_state(model) == random_bits != {}
    assert torch.equal(torch.get_rng_state(), state) and [m.training for m in model] == [True, False, True]
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads))
    assert all(map(torch.equal, before, (*model.state_dict().values(), *grads)))
    assert model[0].weight.main_grad is main_grad and main_grad.eq(1).all() and recwarn.list == []


def test_masters_are_still_made_of_the_first_values():
    model = mlp()
    hp = model[0].weight.detach().clone()
    quantize_(model, replace(FP8, master_weights=False))
    memory_report(model, torch.randn(T, D))
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model)
    assert torch.equal(optimizer.master(model[0].weight).view_as(hp), hp)


@pytest.mark.parametrize("make", (torch.optim.AdamW, torch.optim.Adagrad), ids=lambda make: make.__name__)
@pytest.mark.parametrize("config", (NVFP4, replace(FP8, master_weights=False)), ids=("master", "quantized"))
def test_states_are_those_after_a_step(make, config):
    """Of an optimizer, of its class, and with the masters of quantized Parameters."""
    model = mlp(config)
    of_masters = not config.master_weights
    optimizer = MasterWeightOptimizer(make, model) if of_masters else make(model.parameters())
    model(torch.randn(T, D)).sum().backward()
    optimizer.step()
    inner = optimizer.inner if of_masters else optimizer
    states = sum(x.nbytes for state in inner.state.values() for x in state.values())
    masters = sum(4 * p.numel() for p in model.parameters() if of_masters and p.dim() == 2)
    for given in (optimizer, make):
        assert memory_report(model, torch.randn(T, D), optimizer=given).predicted.states == states + masters > 0


@pytest.mark.parametrize("batch", ((), (torch.randn(T, D),)), ids=("at rest", "a step"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("config", (FP8, None), ids=("fp8", "unconverted"))
def test_text_and_data(config, dtype, batch):
    """The model is compared with itself before its conversion, in the same dtype."""
    batch = [x.to(dtype) for x in batch]
    report, plain = (memory_report(mlp(recipe).to(dtype), *batch) for recipe in (config, None))
    assert report.unconverted == plain.predicted and report.notes == ()
    assert report.predicted.weights == report.unconverted.weights
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    header = ["what", "unconverted,", str(dtype).removeprefix("torch."), "predicted", *["measured"] * bool(batch)]
    assert str(report).splitlines()[0].split() == header
    assert ("quantized copies, at once" in str(report)) is (bool(batch) and config is not None)


@both_formats
def test_accumulated_gradients_are_held_by_the_next_microbatch(config):
    """The peak is then that of a loop, as counted from the outside; nothing of the model changes."""
    model = converted(MODELS["norm"]().bfloat16(), config, linears_and_experts())
    report, one = (memory_report(model, tokens(), accumulate=several) for several in (True, False))
    assert all(p.grad is None for p in model.parameters())
    assert_predicted(report)
    x = tokens()
    with LiveMemory() as memory:
        for _ in range(3):
            model(x).sum().backward()
    assert report.measured.peak == memory.peak + report.measured.weights > one.measured.peak
    assert report.measured.gradients == one.measured.gradients


@pytest.fixture
def four_ranks():
    """This process is the first of four that do not communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
@both_masters
def test_shards_of_fsdp2_count_as_shards(masters, four_ranks):
    """A rank holds its rows, their gradients and their states, and gathers the whole weights."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)).bfloat16()
    plain = memory_report(model).predicted
    quantize_(model, replace(FP8, master_weights=masters))
    whole = memory_report(model)
    fully_shard(model, mesh=four_ranks)
    report = memory_report(model)
    assert report.unconverted.weights == report.unconverted.gradients == plain.weights // 4
    assert report.unconverted.gathered == plain.gathered and report.predicted.gathered == whole.predicted.gathered
    assert report.predicted.gradients == whole.predicted.gradients // 4
    # Of AdamW each Parameter has a count of steps.
    assert report.predicted.states - 8 == (whole.predicted.states - 8) // 4
    payload = 512 * 256 * 2 // 4
    scales = 2 * FP8.weight_format.nbytes(512, 256) - 4 * payload
    of_weights = plain.weights // 4 if masters else payload + scales
    assert report.predicted.weights == of_weights
    with pytest.raises(ValueError, match="this model is sharded; call it before fully_shard, or without a batch"):
        memory_report(model, torch.randn(8, 256))
    if masters:
        # From the first pass on, a rank keeps the quantized rows that it sends.
        sync_weight_scales(model)
        assert memory_report(model).predicted.weights == of_weights + payload + scales


class Asks(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum().item() < float("inf") else x


def test_what_needs_values_is_measured_all_the_same():
    report = memory_report(Asks(D, D), torch.randn(T, D))
    assert len(report.notes) == 2 and "activations are missing from the prediction: " in str(report)
    assert report.predicted.saved is None and report.measured.peak > 0


def test_nothing_to_differentiate_is_refused():
    with pytest.raises(ValueError, match="no output of the model requires a gradient; pass loss="):
        memory_report(nn.Linear(D, D).requires_grad_(False), torch.randn(T, D))


def report_of(kind, config, device, fused=True):
    pytest.importorskip("transformers", "5.0")
    import exported_models

    sizes = {"vocab_size": 128, "hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
    with torch.device(device):
        model, ids = exported_models.language_model(kind, None, **sizes).bfloat16(), torch.arange(32)[None]
    if kind == "Mixtral":
        model.set_experts_implementation("grouped_mm")
    quantize_(model, config, filter_fn=linears_and_experts() & skip_lm_head())
    if fused:
        fuse(model)
    return memory_report(model, {"input_ids": ids, "labels": ids})


@both_formats
@pytest.mark.parametrize(("kind", "shared"), (("Llama", 3), ("Mixtral", 2)))
def test_predictions_for_fused_models(kind, shared, config):
    """They are what a step takes, on the meta device too. shared: copies of a layer that fusion does not save."""
    report, unreal = (report_of(kind, config, device) for device in ("cpu", "meta"))
    assert report.notes == () and unreal.predicted == report.predicted and unreal.unconverted == report.unconverted
    assert_predicted(report)
    apart = report_of(kind, config, "meta", fused=False).predicted
    copies = 2 * shared * config.grad_weight_format.nbytes(64, 32)
    assert report.predicted.saved == apart.saved - copies and report.predicted.weights == apart.weights
    assert report.predicted.peak < apart.peak
