"""An emulator of PTX, for tests on machines without a GPU: runs what a compiler made of a kernel, bit for bit.

Triton's interpreter runs a kernel's Python; this runs the code that Triton and LLVM wrote for the GPU: layouts, packed
halves, shuffles, matrix loads, asynchronous copies. One program (CTA) after the other, each instruction by all threads
at once: a register is an array over threads. What would go unnoticed on a GPU is an error here:

    registers    reading one that nothing wrote; where a guard kept a thread from writing, it holds garbage
    memory       an access outside the buffers, or off its own size; shared memory is garbage when a program starts
    copies       what cp.async copies arrives when it is waited for, no sooner
    warps        shuffles, reductions and matrix loads by a part of the threads

Limits: threads never drift apart, so a missing barrier does not show, and branches must be taken by all or none. Only
the instructions that our kernels use are here; another one is refused by its name. ptxas comes after PTX: its errors
and its registers are beyond this, as is speed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np
import torch

_WARP = 32
_GARBAGE, _GARBAGE_BYTE = 0xABABABABABABABAB, 0xAB
# Each buffer of global memory begins a power of two further on, so that nothing runs from one into another.
_BUFFER_BITS = 40


class PtxError(AssertionError):
    """What would be a fault or chance on a GPU, or what this emulator does not know."""


def _dtype(kind: str) -> np.dtype:
    """numpy's type of a PTX type: b32, u32, s32, f32 .."""
    return np.dtype({"f": "f", "s": "i"}.get(kind[0], "u") + str(int(kind[1:]) // 8))


def _split(text: str) -> list[str]:
    """Operands, a group in braces or brackets as one."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)]


def _group(text: str) -> list[str]:
    return [part.strip() for part in text.strip("{} ").split(",")]


_instructions: list[tuple[re.Pattern, Callable]] = []


def _instruction(pattern: str):
    """Register what computes it: (program, match, operands, active threads) -> value of operand 0, or None."""

    def register(compute):
        _instructions.append((re.compile(pattern), compute))
        return compute

    return register


def _parse(statement: str) -> tuple:
    """(guard, whether it is negated, operands, what computes it, match of its name)."""
    parts = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", statement, flags=re.S)
    if parts is None:
        raise PtxError(f"cannot read {statement!r}")
    negated, guard, op, operands = parts.groups()
    # A program has no other shared memory: Triton 3.9 says so of stores.
    op = op.replace("shared::cta", "shared")
    known = [(compute, match) for pattern, compute in _instructions if (match := pattern.fullmatch(op))]
    if not known:
        raise PtxError(f"the emulator does not know {op!r}")
    return guard, negated == "!", _split(operands), *known[0]


class Kernel:
    """The one kernel of a PTX text, for programs of so many threads and bytes of shared memory."""

    def __init__(self, ptx: str, threads: int, shared_bytes: int):
        self.threads, self.shared_bytes = threads, shared_bytes
        ptx = re.sub(r"//.*|^\s*\.(?:loc|file)\b.*", "", ptx, flags=re.M)
        scopes = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
        header, body = re.search(r"\.entry\s+\w+\(([^)]*)\)[^{]*" + scopes, ptx).groups()
        self.parameters = re.findall(r"\w+_param_\d+", header)
        self.symbols = re.findall(r"\.shared[^;\[]*?(\w+)\[", ptx)
        self.labels: dict[str, int] = {}
        self.instructions: list[tuple] = []
        for statement in body.split(";"):
            # A brace where a statement begins opens or closes a scope of inline assembly.
            while start := re.match(r"[{}\s]+|(\$\w+):", statement):
                if start[1]:
                    self.labels[start[1]] = len(self.instructions)
                statement = statement[start.end() :]
            if statement and not statement.startswith("."):
                self.instructions.append(_parse(statement))

    def run(self, grid: int, arguments: dict[str, np.ndarray | int]) -> None:
        """Run programs 0 .. grid - 1. arguments: what the PTX takes, in order; arrays are read and written in place."""
        buffers = {i: (name, array) for i, (name, array) in enumerate(arguments.items(), 1) if not np.isscalar(array)}
        values = [i << _BUFFER_BITS if i in buffers else value for i, value in enumerate(arguments.values(), 1)]
        # Triton's own buffers come last; our kernels have none.
        values += [0] * (len(self.parameters) - len(values))
        # The last one first: where two write to one place, the interpreter's order may hide it.
        for index in reversed(range(grid)):
            Program(self, index, buffers, dict(zip(self.parameters, values, strict=True))).run()


class Program:
    """One program (CTA) of a grid: its registers and its shared memory."""

    def __init__(self, kernel: Kernel, index: int, buffers: dict, parameters: dict[str, int]):
        self.kernel, self.threads, self.parameters, self.at = kernel, kernel.threads, parameters, 0
        self.buffers = {i: (name, array.reshape(-1).view(np.uint8)) for i, (name, array) in buffers.items()}
        self.shared = np.full(kernel.shared_bytes, _GARBAGE_BYTE, np.uint8)
        self.copies: list[list[Callable[[], None]]] = [[]]  # groups of cp.async, the last one not committed
        # A register's bits in each thread. Shared memory begins at 0.
        self.registers = {name: np.zeros(self.threads, np.uint64) for name in kernel.symbols}
        self.registers["%tid.x"] = np.arange(self.threads, dtype=np.uint64)
        self.registers["%ctaid.x"] = np.full(self.threads, index, np.uint64)

    def run(self) -> None:
        everyone, instructions = np.ones(self.threads, bool), self.kernel.instructions
        with np.errstate(all="ignore"):
            while self.at < len(instructions):
                guard, negated, operands, compute, match = instructions[self.at]
                self.at += 1
                active = everyone if guard is None else self.read(guard, "pred") != negated
                if "sync." in match[0] and not active.all():
                    raise PtxError(f"{match[0]} by a part of the threads")
                value = compute(self, match, operands, active)
                if value is not None:
                    self.write(operands[0], value, active)

    def read(self, operand: str, kind: str) -> np.ndarray:
        """An operand's value in each thread, as a PTX type."""
        if operand in self.registers:
            bits = self.registers[operand]
        elif match := re.fullmatch(r"0f([0-9A-F]{8})|(-?\d+|0x[0-9A-Fa-f]+)U?", operand):
            number = int(match[1], 16) if match[1] else int(match[2], 0)
            bits = np.full(self.threads, number % 2**64, np.uint64)
        else:
            raise PtxError(f"{operand} is read and nothing wrote it")
        if kind == "pred":
            return bits != 0
        dtype = _dtype(kind)
        return bits.astype(f"u{dtype.itemsize}").view(dtype)

    def write(self, register: str, value: np.ndarray, active: np.ndarray) -> None:
        bits = value if value.dtype == bool else value.view(f"u{value.itemsize}")
        if value.dtype.kind == "f":
            # Every NaN that arithmetic makes has these bits.
            bits = np.where(np.isnan(value), bits.dtype.type(np.iinfo(bits.dtype).max >> 1), bits)
        # Of "value|predicate" nobody reads the predicate.
        register = register.split("|")[0]
        before = self.registers.get(register, np.uint64(_GARBAGE))
        self.registers[register] = np.where(active, bits.astype(np.uint64), before)

    def address(self, operand: str) -> np.ndarray:
        base, offset = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand).groups()
        return self.read(base, "s64") + int(offset or "0", 0)

    def bytes_at(self, space: str, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """(buffer, [threads, size] places in it) of accesses; raises PtxError unless they lie in one buffer whole."""
        name, buffer = "shared memory", self.shared
        if space == "global" and len(addresses):
            index = int(addresses[0]) >> _BUFFER_BITS
            if index not in self.buffers:
                raise PtxError(f"address {int(addresses[0]):#x} lies in no buffer")
            name, buffer = self.buffers[index]
            addresses = addresses - (index << _BUFFER_BITS)
        wrong = (addresses < 0) | (addresses + size > len(buffer)) | (addresses % size != 0)
        if wrong.any():
            where = int(addresses[wrong][0])
            raise PtxError(f"{size} bytes at byte {where} of {name}: it has {len(buffer)}, and accesses are aligned")
        return buffer, addresses[:, None] + np.arange(size)


@_instruction(r"bra(?:\.uni)?|ret")
def _jump(program, match, operands, active):
    if active.any() != active.all():
        raise PtxError(f"threads part at {match[0]}")
    if active.all():
        program.at = program.kernel.labels[operands[0]] if operands else len(program.kernel.instructions)


# Threads are never apart.
_instruction(r"bar\.sync")(lambda program, match, operands, active: None)
_instruction(r"cp\.async\.commit_group")(lambda program, match, operands, active: program.copies.append([]))


def _bit_field(a, start, length):
    wide = a.astype(np.int64 if a.dtype == np.int32 else np.uint64)
    unused = (64 - length).astype(wide.dtype)
    return (wide >> start.astype(wide.dtype) << unused >> unused).astype(a.dtype)


def _permute_bytes(a, b, selectors):
    source = np.stack([a, b], axis=1).view(np.uint8)
    chosen = selectors[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 0xF
    taken = np.take_along_axis(source, (chosen & 7).astype(np.int64), axis=1)
    # Bit 3 asks for the byte's sign in all bits.
    return np.where(chosen & 8, taken.view(np.int8) >> 7, taken).astype(np.uint8).view(np.uint32)[:, 0]


def _fused_multiply_add(a, b, c):
    """a · b + c of fp32, rounded once: in fp64 the product is exact, and a sum rounded to odd rounds as if it were."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = total.view(np.uint64) & 1 == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where(even & (error != 0) & np.isfinite(error), np.nextafter(total, towards), total).astype(np.float32)


def _elementwise(function, program, match, operands, active):
    kind, packed = match.groups()
    values = [program.read(operand, "b32" if packed else kind) for operand in operands[1:]]
    return function(*(v.view(_dtype(kind)) for v in values)).view(np.uint32) if packed else function(*values)


# Operands of one type, element by element.
for _op, _function in {
    r"add(?:\.rn(?=\.f))?": np.add, r"sub(?:\.rn(?=\.f))?": np.subtract,
    r"mul(?:\.lo|\.rn(?=\.f))?": np.multiply, r"neg": np.negative,
    r"mad\.lo": lambda a, b, c: a * b + c, r"mul\.hi(?=\.u32)": lambda a, b: (a.astype("u8") * b >> 32).astype("u4"),
    r"fma\.rn(?=\.f32)": _fused_multiply_add, r"rcp\.approx\.ftz(?=\.f)": lambda a: a.dtype.type(1) / a,
    r"div\.rn(?=\.f)": np.divide, r"div(?=\.s32)": lambda a, b: np.trunc(a / b).astype(np.int32),
    # Of a number and a NaN: the number.
    r"max": np.fmax, r"min": np.fmin,
    r"max\.relu(?=\.s)": lambda a, b: np.maximum(np.maximum(a, b), 0),
    r"and": np.bitwise_and, r"or": np.bitwise_or, r"xor": np.bitwise_xor, r"not": np.bitwise_not,
    r"popc(?=\.b32)": lambda a: np.unpackbits(a.view(np.uint8).reshape(-1, 4), axis=1).sum(1, dtype=np.uint32),
    # As in PTX, a shift by the width or more leaves zero, or the sign.
    r"shl": np.left_shift, r"shr": np.right_shift, r"bfe": _bit_field, r"prmt": _permute_bytes,
    r"setp\.lt": np.less, r"setp\.le": np.less_equal, r"setp\.gt": np.greater, r"setp\.ge": np.greater_equal,
    r"setp\.eq": np.equal, r"setp\.ne(?=\.[bus])": np.not_equal, r"setp\.num": lambda a, b: ~np.isnan(a + b),
}.items():  # fmt: skip
    _instruction(_op + r"\.([bus]\d+|f16|f32|pred)(x2)?")(functools.partial(_elementwise, _function))


@_instruction(r"abs\.b?f(32|16)(x2)?")
def _abs(program, match, operands, active):
    mask = {("32", None): 0x7FFFFFFF, ("16", "x2"): 0x7FFF7FFF, ("16", None): 0x7FFF}[match.groups()]
    return program.read(operands[1], "b32") & np.uint32(mask)


@_instruction(r"(mul|mad)\.wide\.([us])32")
def _multiply_wide(program, match, operands, active):
    a, b = (program.read(operand, match[2] + "32").astype(_dtype(match[2] + "64")) for operand in operands[1:3])
    return a * b if match[1] == "mul" else a * b + program.read(operands[3], match[2] + "64")


@_instruction(r"selp\.([bf]\d+)")
def _select(program, match, operands, active):
    a, b = (program.read(operand, "b" + match[1][1:]) for operand in operands[1:3])
    return np.where(program.read(operands[3], "pred"), a, b)


@_instruction(r"cvt\.([us]\d+)\.([us]\d+)|cvt\.(f32)\.(b?f16)")
def _convert(program, match, operands, active):
    out, kind = (group for group in match.groups() if group is not None)
    if kind == "bf16":
        return (program.read(operands[1], "b32") << 16).view(np.float32)
    return program.read(operands[1], kind).astype(_dtype(out))


def _rounded_to_16_bits(kind: str, value: np.ndarray) -> np.ndarray:
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    rounded = torch.from_numpy(value.copy()).to(dtype).view(torch.int16).numpy().view(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), rounded)


@_instruction(r"cvt\.rn\.(b?f16)(x2)?\.f32")
def _to_16_bits(program, match, operands, active):
    first, *second = (_rounded_to_16_bits(match[1], program.read(operand, "f32")) for operand in operands[1:])
    return first.astype(np.uint32) << 16 | second[0] if match[2] else first


@_instruction(r"cvt\.rn\.satfinite\.e4m3x2\.f32")
def _to_e4m3_pair(program, match, operands, active):
    most = torch.finfo(torch.float8_e4m3fn).max
    high, low = (torch.from_numpy(program.read(operand, "f32").copy()) for operand in operands[1:])
    high, low = (x.clamp(-most, most).to(torch.float8_e4m3fn).view(torch.uint8).numpy() for x in (high, low))
    # Of a NaN the sign is dropped.
    high, low = (np.where(code & 0x7F == 0x7F, 0x7F, code).astype(np.uint16) for code in (high, low))
    return high << 8 | low


@_instruction(r"mov\.([bu]\d+|pred)")
def _move(program, match, operands, active):
    target, source = operands
    if match[1] == "pred":
        return program.read(source, "pred")
    bits = int(match[1][1:])
    if source.startswith("{"):
        parts = _group(source)
        columns = [program.read(part, f"b{bits // len(parts)}") for part in parts]
        return np.stack(columns, axis=1).view(_dtype(f"b{bits}")).reshape(-1)
    value = program.read(source, match[1])
    if not target.startswith("{"):
        return value
    parts = _group(target)
    for part, column in zip(parts, value.view(_dtype(f"b{bits // len(parts)}")).reshape(-1, len(parts)).T):
        program.write(part, np.ascontiguousarray(column), active)
    return None


@_instruction(r"shfl\.sync\.(bfly|idx|up)\.b32")
def _shuffle(program, match, operands, active):
    if [int(operand, 0) for operand in operands[3:]] != [0 if match[1] == "up" else _WARP - 1, -1]:
        raise PtxError(f"{match[0]} by a part of the threads")
    threads, by = np.arange(program.threads), program.read(operands[2], "s32")
    if match[1] == "up":
        # The first ones keep their own.
        sources = np.where(threads % _WARP >= by, threads - by, threads)
    else:
        sources = threads ^ by if match[1] == "bfly" else threads // _WARP * _WARP + by % _WARP
    return program.read(operands[1], "b32")[sources]


@_instruction(r"redux\.sync\.(max|add)\.s32")
def _reduce(program, match, operands, active):
    values = program.read(operands[1], "s32").reshape(-1, _WARP)
    return {"max": np.maximum, "add": np.add}[match[1]].reduce(values, axis=1).repeat(_WARP)


@_instruction(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")
def _matrix(program, match, operands, active):
    """8×8 matrices of 16 bits; lane i has the address of row i % 8 of matrix i / 8, and two neighbors of row i / 4."""
    load = match[1] == "ld"
    registers, address = operands if load else operands[::-1]
    rows = program.address(address).reshape(-1, _WARP)
    for i, register in enumerate(_group(registers)):
        shared, places = program.bytes_at("shared", rows[:, 8 * i : 8 * i + 8].reshape(-1), 16)
        matrices = (shared[places] if load else program.read(register, "b32")).view(np.uint16).reshape(-1, 8, 8)
        matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1) if match[3] else matrices)
        if load:
            program.write(register, matrices.reshape(-1).view(np.uint32), active)
        else:
            shared[places] = matrices.view(np.uint8).reshape(-1, 16)


@_instruction(r"ld\.param\.([bs]\d+)")
def _load_parameter(program, match, operands, active):
    return np.full(program.threads, program.parameters[operands[1].strip("[]")] % 2**64, np.uint64)


@_instruction(r"(ld|st)\.(global|shared)\.(?:v([24])\.)?b(\d+)")
def _access(program, match, operands, active):
    op, space, count, bits = match.groups()
    registers, address = operands if op == "ld" else operands[::-1]
    registers, dtype = _group(registers), _dtype("b" + bits)
    buffer, places = program.bytes_at(space, program.address(address)[active], int(count or 1) * int(bits) // 8)
    if op == "st":
        columns = [program.read(register, "b" + bits)[active] for register in registers]
        buffer[places] = np.stack(columns, axis=1).view(np.uint8)
        return
    values = np.zeros((program.threads, len(registers)), dtype)
    values[active] = buffer[places].view(dtype)
    for register, column in zip(registers, values.T):
        program.write(register, np.ascontiguousarray(column), active)


@_instruction(r"cp\.async\.c[ag]\.shared\.global")
def _copy(program, match, operands, active):
    """Copy bytes to shared memory, of which those beyond the last operand are zero and not read."""
    size = int(operands[2], 0)
    kept = program.read(operands[3], "u32") if len(operands) > 3 else np.full(program.threads, size)
    shared, targets = program.bytes_at("shared", program.address(operands[0])[active], size)
    some = (kept > 0) & active
    source, places = program.bytes_at("global", program.address(operands[1])[some], size)
    values = np.zeros((program.threads, size), np.uint8)
    values[some] = source[places] * (np.arange(size) < kept[some, None])
    program.copies[-1].append(lambda: shared.__setitem__(targets, values[active]))


@_instruction(r"cp\.async\.wait_group")
def _wait_for_copies(program, match, operands, active):
    done = len(program.copies) - 1 - int(operands[0], 0)
    for group in program.copies[:done]:
        for arrive in group:
            arrive()
    program.copies = program.copies[max(done, 0) :]
