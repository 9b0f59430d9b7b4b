"""Damaged checkpoints: each is refused with a reason when it is loaded, or loads and multiplies in bounds.

    python test/tensors/fuzz_checkpoints.py --count 3000
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python test/tensors/fuzz_checkpoints.py --device cuda --count 300

On a CPU what loads is moved to memory with forbidden pages before and behind each tensor, and multiplied by the
reference and in Triton's interpreter: a read out of bounds ends the process. compute-sanitizer says the same of a GPU;
without PyTorch's caching each tensor is an allocation of its own there. Prints a JSON summary; fails with the first
cases that neither were refused nor multiplied.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copyreg
import ctypes
import dataclasses
import io
import json
import mmap
import os
import random
import sys
import warnings
import zipfile

if "cuda" not in sys.argv:
    # Triton reads it when it is imported, and again with each kernel; operations ask for it at each call.
    os.environ["TRITON_INTERPRET"] = "1"
import torch
import torch.nn.functional as F
import triton.language  # noqa: F401
from torch import nn

from torchao_blockwise import (
    BlockwiseFP8Tensor,
    BlockwiseFP8TrainingConfig,
    MasterWeightTensor,
    NVFP4Tensor,
    NVFP4TrainingConfig,
    ops,
)
from torchao_blockwise.formats import Operand
from torchao_blockwise.tensors import QuantizedShard, QuantizedTensor
from torchao_blockwise.tensors.fsdp import ShardLayout

FP8, NVFP4 = BlockwiseFP8TrainingConfig(master_weights=False), NVFP4TrainingConfig(master_weights=False)
MASTER = BlockwiseFP8TrainingConfig()
CLASSES = (BlockwiseFP8Tensor, NVFP4Tensor, QuantizedShard, MasterWeightTensor)
PAGE = mmap.PAGESIZE


class Written:
    """Is written to a file as what calls `function(*arguments)` and then sets `state`."""

    def __init__(self, function, arguments, state=None):
        self.reduced = (function, tuple(arguments)) + (() if state is None else (state,))

    def __reduce_ex__(self, protocol):
        return self.reduced

    @property
    def __class__(self):
        """What the pickler asks about where a class is to be instantiated without its constructor."""
        return self.reduced[1][0] if self.reduced[0] is copyreg.__newobj__ else Written


def sound(rng: random.Random):
    """A tensor of one of our kinds."""
    torch.manual_seed(rng.randrange(1 << 30))
    shape = rng.choice([(130, 140), (130, 140), (40, 33), (2, 130, 24), (1, 1), (0, 24)])
    w = torch.randn(shape)
    kind = rng.choice(["fp8", "fp8", "fp8_t", "nvfp4", "nvfp4", "nvfp4_1x16", "master", "shard"])
    if kind == "fp8":
        return nn.Parameter(BlockwiseFP8Tensor.from_hp(w, config=rng.choice([FP8, None])))
    if kind == "fp8_t":
        return BlockwiseFP8Tensor.from_hp(torch.randn(140, 130)).t()
    if kind == "nvfp4":
        return nn.Parameter(NVFP4Tensor.from_hp(w.bfloat16(), config=rng.choice([NVFP4, None])))
    if kind == "nvfp4_1x16":
        return NVFP4Tensor.from_hp(w, block_size=(1, 16))
    if kind == "master":
        return nn.Parameter(MasterWeightTensor(w, MASTER))
    layout = ShardLayout("w", (130, 140), torch.float32, 0, rng.randrange(2), 2, rng.choice([FP8, NVFP4]))
    whole = (BlockwiseFP8Tensor if layout.config is FP8 else NVFP4Tensor).from_hp(torch.randn(130, 140))
    rows = slice(layout.start, layout.start + layout.local_shape[0])
    return QuantizedShard(whole.qdata[rows].clone(), whole.scale, layout, torch.float32, whole.global_scale)


JUNK = (
    None, True, False, -1, 0, 1, 16, 24, 2**31, 2**63, 2**100, 1.5, float("nan"), "", "x", "qdata", b"x", (), (16, 16),
    (1, 16), (16, 1), (128, 128), (-16, 16), [16, 16], [], {}, {"qdata": 1}, torch.int8, torch.float16, torch.float64,
    torch.float8_e4m3fn, torch.uint8, torch.device("cpu"), torch.Size([2]), FP8, NVFP4, MASTER, BlockwiseFP8Tensor,
    NVFP4Tensor, BlockwiseFP8TrainingConfig, torch.Tensor, nn.Parameter, ops.Backend.TRITON,
)  # fmt: skip


def junk(rng: random.Random):
    return rng.choice([rng.choice(JUNK), rng.choice(JUNK), damaged_tensor(rng, torch.zeros(4, 4, dtype=torch.uint8))])


def damaged_tensor(rng: random.Random, t: torch.Tensor):
    """`t` with another shape, dtype, strides, storage or type."""
    size, stride = list(t.shape), list(t.stride())
    if rng.random() < 0.2:
        # What no tensor is: sizes, strides or offsets outside the storage.
        values = (size, stride)[rng.randrange(2)]
        if values:
            values[rng.randrange(len(values))] = rng.choice([-1, 0, 1, 2, 7, 1 << 20, 1 << 40, 1 << 62, -(1 << 62)])
        offset = rng.choice([0, 0, 1, 5, -1, 1 << 40])
        return Written(torch._utils._rebuild_tensor_v2, (t._typed_storage(), offset, size, stride, False, {}))
    whole = t.reshape(-1)
    changes = [
        lambda: t[: rng.randrange(len(t) + 1)] if t.dim() else t[None],
        lambda: t[..., : rng.randrange(t.shape[-1] + 1)] if t.dim() else t[None, None],
        lambda: torch.cat([t, t]) if t.dim() else t.expand(3),
        lambda: whole,
        lambda: whole[:1].reshape([1] * t.dim()),
        lambda: whole[:1].expand(t.numel()).view(t.shape) if t.numel() else t,
        lambda: t.as_strided(size, [1] * t.dim()) if t.numel() else t,
        lambda: t.mT if t.dim() > 1 else t,
        lambda: t[None],
        lambda: t[..., None],
        lambda: t.sum() if t.dtype != torch.uint8 else t.new_zeros(()),
        lambda: t.new_empty(0),
        lambda: t.to(rng.choice([torch.int32, torch.uint8, torch.float32, torch.int64, torch.bool])),
        lambda: t.to("meta"),
        lambda: t.to_sparse() if t.dim() else t,
        lambda: nn.Parameter(t, requires_grad=False),
        lambda: BlockwiseFP8Tensor.from_hp(torch.ones(t.shape)) if t.dim() > 1 else t,
        lambda: torch.randint(0, 256, (t.nbytes,), dtype=torch.uint8).view(t.dtype).view(t.shape) if t.numel() else t,
    ]
    return rng.choice(changes)()


def damaged_state(rng: random.Random, state: dict) -> dict:
    """`state` without an entry, with one more, or with another value."""
    state = dict(state)
    name = rng.choice(list(state)) if state else "x"
    change = rng.randrange(4)
    if change == 0:
        state.pop(name, None)
    elif change == 1:
        state[rng.choice(["x", "qdata", "scale", "columns", "pending_master", "shape", "_is_param", "__class__"])] = (
            junk(rng)
        )
    else:
        state[name] = damaged(rng, state[name])
    return state


def damaged(rng: random.Random, value):
    if rng.random() < 0.3:
        return junk(rng)
    if isinstance(value, torch.Tensor):
        return damaged_tensor(rng, value)
    if dataclasses.is_dataclass(value):
        return Written(copyreg.__newobj__, (type(value),), damaged_state(rng, vars(value)))
    if isinstance(value, dict):
        return damaged_state(rng, value)
    if isinstance(value, tuple) and value:
        i = rng.randrange(len(value))
        return (*value[:i], *rng.choice([(), (damaged(rng, value[i]),), (damaged(rng, value[i]),)]), *value[i + 1 :])
    if type(value) is int:
        return rng.choice([value - 1, value + 1, -value, value * 2, 2**40, str(value)])
    return junk(rng)


def damaged_calls(rng: random.Random, x, route: str):
    """What makes `x` from a file, damaged, or another way into its class."""
    function, arguments, *_ = x.__reduce_ex__(2)
    if route == "usual":
        too_few = arguments[: rng.randrange(5)]
        return Written(function, too_few if rng.random() < 0.05 else damaged_inside(rng, arguments))
    # Files know no memory of two dtypes.
    state = {
        k: v.clone() if isinstance(v, torch.Tensor) else v
        for k, v in vars(x).items()
        if k not in ("pending_master", "saved_values")
    }
    cls = rng.choice([type(x), type(x), rng.choice(CLASSES)])
    if route == "call":
        return Written(cls, damaged_inside(rng, tuple(state[name] for name in init_names(x))))
    if route == "new":
        arguments = rng.choice([(), (state.get("qdata", 1), state.get("scale"), x.dtype)])
        return Written(copyreg.__newobj__, (cls, *arguments), damaged_state(rng, state))
    if route == "wrapper":
        made = (cls, x.dtype, x.shape, x.stride(), 0, torch.strided, x.device, False)
        return Written(torch._tensor._rebuild_from_type_v2,
                       (torch._utils._rebuild_wrapper_subclass, cls, made, damaged_state(rng, state)))  # fmt: skip
    assert route == "attributes"
    return Written(torch._utils._rebuild_parameter_with_state, (x, True, {}, damaged_state(rng, state)))


def init_names(x) -> list[str]:
    names, attributes = x.__tensor_flatten__()
    return [name for name in (*names, *attributes) if name in vars(x)]


def damaged_inside(rng: random.Random, arguments: tuple) -> tuple:
    """One of the arguments damaged; tensors and their pairs mostly."""
    i = rng.choice([1, 1, 1, 2, 2, rng.randrange(len(arguments))]) % len(arguments)
    return (*arguments[:i], damaged(rng, arguments[i]), *arguments[i + 1 :])


def file_of(x) -> bytes:
    file = io.BytesIO()
    torch.save({"weight": x}, file)
    return file.getvalue()


def damaged_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes changed, left out or put in: in the pickle, with the archive around it whole, or anywhere."""
    if rng.random() < 0.2:
        return data[: rng.randrange(len(data))]
    if rng.random() < 0.2:
        return changed(rng, data)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            entry = old.read(name)
            new.writestr(name, changed(rng, entry) if name.endswith("data.pkl") else entry)
    return out.getvalue()


def changed(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.choice([1, 1, 2, 4])):
        i = rng.randrange(len(data))
        flipped = data[i] ^ (1 << rng.randrange(8))
        put = rng.choice([b"", bytes([rng.randrange(256)]), bytes([flipped]), data[i : i + 9]])
        data = data[:i] + put + data[i + rng.choice([1, 1, 1, 0, 4]) :]
    return data


KINDS = (*["usual"] * 7, *["bytes"] * 3, "call", "new", "wrapper", "attributes")


def case(seed: int, index: int) -> tuple[str, bytes]:
    """What is done to the file, and the file."""
    rng = random.Random(f"{seed}/{index}")
    kind = "none" if index % 20 == 0 else rng.choice(KINDS)
    x = sound(rng)
    if kind not in ("none", "bytes"):
        try:
            return kind, file_of(damaged_calls(rng, x, kind))
        except Exception:
            kind = "bytes"  # torch.save cannot write it
    return kind, damaged_bytes(rng, file_of(x)) if kind == "bytes" else file_of(x)


def guarded(t: torch.Tensor, at_end: bool) -> torch.Tensor:
    """A copy of `t` with the same strides, at the end or the start of memory that ends in forbidden pages."""
    if t.numel() == 0:
        return t
    entries = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    nbytes = entries * t.itemsize
    room = -(-nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (address, address + PAGE + room):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) == 0
    offset = PAGE + (room - nbytes if at_end else 0)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset).view(t.dtype)
    # Entry by entry of the memory: some may be seen twice.
    return flat.copy_(t.as_strided((entries,), (1,))).as_strided(t.shape, t.stride())


def rebuilt(x, config, device: str, at_end: bool):
    """`x` with `config`, on `device`, or on a CPU in guarded memory."""
    names, attributes = x.__tensor_flatten__()
    move = (lambda t: t.to(device)) if device != "cpu" else (lambda t: guarded(t, at_end))
    if "config" in attributes:
        attributes["config"] = config
    return type(x).__tensor_unflatten__({n: move(getattr(x, n)) for n in names}, attributes, None, None)


def multiply(x, device: str) -> None:
    """All that reads the payload and the scales of a weight, or its values."""
    if isinstance(x, QuantizedTensor):
        x.dequantize()
        if isinstance(x, QuantizedShard):
            x.own_bytes.sum()
            return
        if not x.fmt.is_square:
            return
        x.columnwise_operand()
    if x.dim() not in (2, 3) or not x.numel():
        return
    weight = x.detach().requires_grad_()
    tokens = torch.ones(5, x.shape[-1], device=device, dtype=torch.bfloat16, requires_grad=True)
    if x.dim() == 2:
        F.linear(tokens, weight).sum().backward()
    else:
        ends = torch.full((len(x),), 5, dtype=torch.int32, device=device)
        F.grouped_mm(tokens, weight.transpose(-2, -1), offs=ends).sum().backward()


def layout(x) -> tuple:
    """What addresses depend on."""
    names, _ = x.__tensor_flatten__()
    inner = [getattr(x, name) for name in names]
    return type(x), getattr(x, "fmt", None), x.shape, x.dtype, *((t.shape, t.stride(), t.dtype) for t in inner)


def exercise(x, device: str, seen: set) -> None:
    """Multiply by `x`: by the reference always, by kernels where nothing like it was there before."""
    if x.device.type == "meta":
        return
    default = NVFP4 if isinstance(x, NVFP4Tensor) else FP8
    config = dataclasses.replace(x.config or default, backend="auto")
    if device == "cpu":
        multiply(rebuilt(x, config, device, at_end=True), device)
    if layout(x) not in seen:
        seen.add(layout(x))
        with interpreter(device):
            multiply(rebuilt(x, config, device, at_end=len(seen) % 2 == 0), device)


@contextlib.contextmanager
def interpreter(device: str):
    """On a CPU operations run in Triton's interpreter, inside alone: it takes a second a layer."""
    os.environ["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    yield
    os.environ["TRITON_INTERPRET"] = "0"


def run(seed: int, count: int, device: str, first: int = 0) -> dict:
    """How many files of each kind came to what. A failure: sound and refused, or loaded and not to be multiplied.

    PyTorch itself sets attributes of Parameters as files say; of that kind some are refused when they are used.
    """
    totals: collections.Counter = collections.Counter()
    failures, seen = [], set()
    for index in range(first, first + count):
        kind, data = case(seed, index)
        try:
            loaded = torch.load(io.BytesIO(data), weights_only=True)
        except Exception as error:
            totals[f"{kind}: refused"] += 1
            # The loader of PyTorch ends at a cut file with an EOFError that has no text.
            if kind == "none" or not (str(error) or isinstance(error, EOFError)):
                failures.append(f"{index} ({kind}) was refused: {error!r}")
            continue
        x = loaded.get("weight") if isinstance(loaded, dict) else None
        if not isinstance(x, (QuantizedTensor, MasterWeightTensor)):
            totals[f"{kind}: none of our tensors"] += 1
            continue
        try:
            exercise(x, device, seen)
            totals[f"{kind}: multiplied"] += 1
        except Exception as error:
            totals[f"{kind}: refused when used"] += 1
            if kind != "attributes":
                failures.append(f"{index} ({kind}) loaded, and then: {error!r}")
    return {"totals": dict(sorted(totals.items())), "layouts": len(seen), "failures": failures}


def overrun(device: str) -> None:
    """The control: a product whose scales are too few. It must end the process, or compute-sanitizer must report it."""
    q = BlockwiseFP8Tensor.from_hp(torch.randn(512, 512))
    one = q.scale[:1, :1].contiguous()
    parts = (t.to(device) if device != "cpu" else guarded(t, at_end=True) for t in (q.qdata, one))
    a = ops.quantize(torch.randn(16, 512, device=device), "fp8_1x128").rowwise
    with interpreter(device):
        ops.matmul(a, Operand(*parts, None, "fp8_128x128"), out_dtype=torch.float32, backend="triton").sum().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to see one again")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--overrun", action="store_true", help="read out of bounds, to see that it is noticed")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["TRITON_INTERPRET"] = "0"
    if arguments.overrun:
        overrun(arguments.device)
        return
    result = run(arguments.seed, arguments.count, arguments.device, arguments.first)
    print(json.dumps(result))
    sys.exit(1 if result["failures"] else 0)


if __name__ == "__main__":
    main()
