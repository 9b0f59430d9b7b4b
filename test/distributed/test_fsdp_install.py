"""An import replaces nothing, the first weight wraps FSDP2, and FSDP2 is refused if its private names are missing.

This file, run with the name of a check, is a process that has not imported the package.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torchao.quantization import quantize_

WRAPPED = [
    "DTensor._stable_hash_for_caching",
    "FSDPModule.unshard",
    "FSDPState._root_pre_forward",
]
# Earlier, DTensor has no such method.
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
    WRAPPED.remove("DTensor._stable_hash_for_caching")


def callables_of_others() -> dict:
    """{(where, name, id of where): what can be called or looked up there} in modules and classes of others."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("torch", "torchao", "triton"):
            continue
        classes = [x for x in list(vars(module).values()) if isinstance(x, type)]
        for holder in (module, *(c for c in classes if not str(c.__module__).startswith("torchao_blockwise"))):
            for attribute, x in list(vars(holder).items()):
                if callable(x) or hasattr(type(x), "__get__"):
                    found[getattr(holder, "__qualname__", name), attribute, id(holder)] = x
    return found


def replaced(before: dict) -> list[str]:
    now = callables_of_others()
    return sorted({f"{key[0]}.{key[1]}" for key, x in before.items() if now.get(key) is not x})


def model_of(**options) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 150), nn.GELU(), nn.Linear(150, 48))
    if options:
        from torchao_blockwise import BlockwiseFP8TrainingConfig

        quantize_(model, BlockwiseFP8TrainingConfig(backend="reference", **options))
    return model


def loss_of(model) -> float:
    torch.manual_seed(1)
    loss = model(torch.randn(8, 48)).square().mean()
    loss.backward()
    return loss.item()


def start_rank() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def is_installed() -> bool:
    return hasattr(FSDPModule.unshard, "__wrapped__")


def import_replaces_nothing():
    import torch._dynamo

    before = callables_of_others()
    for holder, name in ((FSDPModule, "unshard"), (torch.Tensor, "backward"), (nn.Linear, "forward")):
        assert (holder.__qualname__, name, id(holder)) in before
    import torchao_blockwise

    assert replaced(before) == [], replaced(before)
    unshard = FSDPModule.unshard
    quantize_(nn.Linear(16, 16), torchao_blockwise.BlockwiseFP8TrainingConfig())
    assert replaced(before) == WRAPPED, replaced(before)
    assert FSDPModule.unshard.__wrapped__ is unshard
    once = callables_of_others()
    model_of(master_weights=False), model_of(master_weights=True)
    assert replaced(once) == [], replaced(once)


def models_sharded_before_and_after_train():
    """FSDP2's hooks of the first are older than what a conversion installs."""
    start_rank()
    plain, expected = fully_shard(model_of()), loss_of(model_of())
    assert loss_of(plain) == expected and not is_installed()
    model = fully_shard(model_of(master_weights=True))
    assert loss_of(plain) == expected and is_installed()
    plain.load_state_dict(plain.state_dict())
    assert loss_of(plain) == expected
    assert loss_of(model) == loss_of(model) == loss_of(model_of(master_weights=True))


def weights_made_by_hand_train_as_converted_ones():
    from torchao_blockwise import BlockwiseFP8Tensor, BlockwiseFP8TrainingConfig, MasterWeightTensor

    def by_hand(kind):
        model = model_of()
        for layer in (model[0], model[2]):
            layer.weight = nn.Parameter(kind(layer.weight.detach(), BlockwiseFP8TrainingConfig(backend="reference")))
        return model

    start_rank()
    model = fully_shard(by_hand(MasterWeightTensor))
    quantized = fully_shard(by_hand(lambda hp, config: BlockwiseFP8Tensor.from_hp(hp, config=config)))
    assert loss_of(model) == loss_of(quantized) == loss_of(model_of(master_weights=True))


def converted_layers_of_other_processes_install_it():
    with tempfile.TemporaryDirectory() as folder:
        path, child = f"{folder}/model.pickle", os.fork()
        if child == 0:
            with open(path, "wb") as file:
                pickle.dump(model_of(master_weights=False), file)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0 and not is_installed()
        with open(path, "rb") as file:
            model = pickle.load(file)
    start_rank()
    assert "QuantizedShard" in str(type(fully_shard(model)[0].weight._local_tensor))


def missing_names_matter_to_none_but_fsdp2():
    gone = "torch.distributed.fsdp._fully_shard._fsdp_state"
    sys.modules[gone] = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loss_of(model_of(master_weights=True)) == loss_of(model_of(master_weights=False))
    start_rank()
    master, primary = model_of(master_weights=True), model_of(master_weights=False)
    for model in (master, primary):
        reason = rf"^FSDP2 gathers a weight of Linear\(.*import of {gone} halted"
        with pytest.raises(RuntimeError, match=reason) as refused:
            loss_of(fully_shard(model))
        assert "PyTorch 2.11 to 2.15" in str(refused.value)
    assert not is_installed()


CHECKS = (
    import_replaces_nothing,
    models_sharded_before_and_after_train,
    weights_made_by_hand_train_as_converted_ones,
    converted_layers_of_other_processes_install_it,
    missing_names_matter_to_none_but_fsdp2,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_fsdp_install(check):
    # Triton's interpreter, once it runs, replaces what kernels call.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, check.__name__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    code = 1
    try:
        globals()[sys.argv[1]]()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # At once: threads of gloo may outlive the interpreter.
        os._exit(code)
