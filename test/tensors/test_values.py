"""Code that reads a weight's memory directly: it gets a master weight's values, and only a quantized one's address."""

import copy
from concurrent.futures import Future

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import assert_same_tensors, every_kind, master, weight
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from torchao_blockwise import BlockwiseFP8Tensor, MasterWeightTensor, NVFP4Tensor
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")

MASTER_READS = {
    "data_ptr": lambda w: w.data_ptr(),
    "numpy": lambda w: w.numpy().tolist(),
    "np.asarray": lambda w: np.asarray(w).tolist(),
    "np.from_dlpack": lambda w: np.from_dlpack(w).tolist(),
    "from_dlpack": lambda w: torch.from_dlpack(w).tolist(),
    "tolist": lambda w: w.tolist(),
    "storage": lambda w: w.storage().data_ptr(),
    "is_shared": lambda w: w.is_shared(),
    "histc": lambda w: torch.histc(w, 5).tolist(),
    "histogram": lambda w: w.histogram(5).hist.tolist(),
    "item": lambda w: w[3, 2].item(),
}


@pytest.mark.parametrize("read", MASTER_READS.values(), ids=MASTER_READS)
def test_master_weights_answer_for_their_values(read):
    ours = master(40, 24)
    assert read(ours.detach()) == read(ours.hp)
    ours.share_memory_()
    assert read(ours.detach()) == read(ours.hp) and ours.is_shared()


def test_a_function_is_applied_in_python():
    ours, plain = master(40, 24), master(40, 24).hp
    ours.detach().apply_(abs)
    assert torch.equal(ours.hp, plain.abs()) and not torch.equal(ours.hp, plain)


@every_kind
def test_contiguous_weights_are_themselves_and_get_gradients(from_hp):
    for w in (nn.Parameter(from_hp(weight(40, 32))), master(40, 32)):
        assert w.contiguous() is w
    experts = nn.Parameter(from_hp(weight(3, 32, 32)))
    experts.mT.contiguous().backward(grad := weight(3, 32, 32, seed=1))
    assert_bitwise_equal(experts.grad, grad.mT)


@every_kind
def test_a_quantized_tensors_address_is_its_own(from_hp):
    weights = [nn.Parameter(from_hp(weight(40, 32))) for _ in range(3)]
    assert len({w.data_ptr() for w in weights} | {0}) == 4
    w = weights[0]
    assert w.data_ptr() == w.detach().data_ptr() == w.data.data_ptr() != copy.deepcopy(w).data_ptr()
    assert not w.is_shared() and w.share_memory_().is_shared()


QUANTIZED_READS = {
    "numpy": lambda w: w.numpy(),
    "np.asarray": np.asarray,
    "dlpack": torch.from_dlpack,
    "tolist": lambda w: w.tolist(),
    "storage": lambda w: w.storage(),
    "apply_": lambda w: w.apply_(abs),
    "safetensors": lambda w: pytest.importorskip("safetensors.torch").save({"w": w}),
    "async_save": lambda w: stager_of_state_dicts().stage({"w": w}),
}


def stager_of_state_dicts():
    return pytest.importorskip("torch.distributed.checkpoint._state_dict_stager").StateDictStager()


@pytest.mark.parametrize("from_hp", (BlockwiseFP8Tensor.from_hp, NVFP4Tensor.from_hp), ids=("fp8", "nvfp4"))
@pytest.mark.parametrize("read", QUANTIZED_READS.values(), ids=QUANTIZED_READS)
def test_nothing_reads_a_quantized_tensors_memory(from_hp, read):
    """Code that copied or saved it would copy bytes that are not values."""
    with pytest.raises(TypeError, match=r"blocks, not its values; use weight.dequantize\(\), or model.state_dict"):
        read(nn.Parameter(from_hp(weight(40, 32)), requires_grad=False))


def test_safetensors_saves_master_weights():
    safetensors = pytest.importorskip("safetensors.torch")
    weights = {"a": master(40, 24), "b": master(24, 8, seed=1)}
    loaded = safetensors.load(safetensors.save(weights))
    assert all(torch.equal(loaded[name], w.hp) for name, w in weights.items())
    shared = {"a": weights["a"], "b": weights["a"].detach()}
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.save(shared)


def weights_to_save(seed: int) -> dict[str, torch.Tensor]:
    packed = master(120, 24, seed=seed).data
    weights = {
        "w": master(40, 24, seed=seed),
        "bf16": master(40, 24, seed=seed, dtype=torch.bfloat16),
        "rows": packed[40:80],
        "columns": packed[:, 8:16],
        "experts": master(3, 24, 8, seed=seed),
        "plain": weight(3, 8, seed=seed),
    }
    return {name: nn.Parameter(w.detach()) for name, w in weights.items()}


def values_of(w: torch.Tensor) -> torch.Tensor:
    return getattr(w, "hp", w).detach()


STAGERS = {
    "default": lambda staging: None,
    "default_stager": lambda staging: staging.DefaultStager(staging.StagingOptions(False, False, False, False)),
    "blocking": lambda staging: staging.BlockingAsyncStager(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stager", STAGERS.values(), ids=STAGERS)
def test_what_is_saved_asynchronously_loads(stager, tmp_path):
    stager = stager(pytest.importorskip("torch.distributed.checkpoint.staging"))
    weights, loaded = weights_to_save(seed=0), weights_to_save(seed=1)
    expected = {name: values_of(w).clone() for name, w in weights.items()}
    saving = dcp.async_save(weights, checkpoint_id=tmp_path, async_stager=stager, no_dist=True)
    if not isinstance(saving, Future):
        saving.staging_completion.result()
        saving = saving.upload_completion
    with torch.no_grad():
        for w in weights.values():
            w.zero_()
    saving.result()
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert_same_tensors({name: values_of(w) for name, w in loaded.items()}, expected)


@pytest.mark.parametrize("name", weights_to_save(seed=0))
def test_fakes_of_weights(name):
    """PyTorch makes them by storages, of which a weight and its values have one."""
    w = weights_to_save(seed=0)[name]
    fake = FakeTensorMode().from_tensor(w)
    assert type(fake) is (FakeTensor if name == "plain" else MasterWeightTensor)
    for x in (fake, values_of(fake)):
        assert (x.shape, x.stride(), x.storage_offset()) == (w.shape, w.stride(), w.storage_offset())
