"""One launch for many tensors: programs find their tensor in a table in device memory.

A row of the table describes a tensor or a part of one with int64 fields, of which the first is the first program that
works on it. Rows are in the order of programs, so each program finds its row by binary search:

    first program   pointer   sizes ..
          0          0x7f..     ..          programs 0, 1, 2
          3          0x7f..     ..          programs 3 ..
"""

import collections
from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

# The number of kept tables: one for each launch, with a few launches in a training step.
_MAX_TABLES = 128
# The alignment of all pointers that 16-byte loads and stores need.
ALIGNMENT = 16


@triton.jit
def find_row(table_ptr, count, FIELDS: tl.constexpr):
    """(row's address, its index, which of its programs this is) for program id 0; count: rows of the table."""
    program = tl.program_id(0)
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        starts_later = tl.load(table_ptr + middle * FIELDS) > program
        high = tl.where(starts_later, middle, high)
        low = tl.where(starts_later, low, middle)
    row_ptr = table_ptr + low * FIELDS
    return row_ptr, low, program - tl.load(row_ptr)


@triton.jit
def load_pointer(field_ptr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a field as a pointer to `dtype`; ALIGNED: it is a multiple of 16 bytes."""
    pointer = tl.load(field_ptr).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load_size(field_ptr, MULTIPLE: tl.constexpr):
    """The number in a field, known to be a multiple of MULTIPLE."""
    size = tl.load(field_ptr)
    if MULTIPLE > 1:
        size = tl.multiple_of(size, MULTIPLE)
    return size


class Table(NamedTuple):
    """A table in device memory [rows, fields] int64, its rows, and the programs that they take together."""

    tensor: torch.Tensor
    rows: int
    programs: int


# (table, event after its copy to a GPU, or None on a CPU), in the order of their last use.
_tables: collections.OrderedDict[tuple[object, ...], tuple[torch.Tensor, torch.cuda.Event | None]] = (
    collections.OrderedDict()
)
# Captured graphs read their tables in each replay.
_captured: dict[int, torch.Tensor] = {}


def make_table(rows: Iterable[tuple[int, ...]], device: torch.device) -> Table | None:
    """The table of `rows`, each (programs, *fields); None if that leaves none. Rows without programs are left out.

    The table of the same rows as before is found again. A new one is written on the host and copied once, without
    waiting; its contents are addresses and sizes, so it never goes stale.
    Raises RuntimeError for a new table under CUDA graph capture.
    """
    table: list[tuple[int, ...]] = []
    programs = 0
    for needed, *fields in rows:
        if needed:
            table.append((programs, *fields))
            programs += needed
    if not table:
        return None
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    key = (device, *table)
    tensor, copied = _tables.pop(key) if key in _tables else _new_table(table, device, is_capturing)
    _tables[key] = tensor, copied
    if len(_tables) > _MAX_TABLES:
        _tables.popitem(last=False)
    if is_capturing:
        _captured[tensor.data_ptr()] = tensor
    elif copied is not None:
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        tensor.record_stream(current)
    return Table(tensor, len(table), programs)


def _new_table(
    table: list[tuple[int, ...]], device: torch.device, is_capturing: bool
) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    if is_capturing:
        raise RuntimeError(
            "a CUDA graph captures a call with a new list of tensors, whose addresses must already be on the device; "
            "make the same call once before the capture"
        )
    if device.type != "cuda":
        return torch.tensor(table, dtype=torch.int64, device=device), None
    tensor = torch.tensor(table, dtype=torch.int64, device="cpu", pin_memory=True).to(device, non_blocking=True)
    return tensor, torch.cuda.current_stream(device).record_event()
