"""The partial cast in Triton: one launch processes the shards of many tensors; see `device/tables.py`.

A program processes a tile of a tensor [.., h, w], and reads or writes only elements of the shard:

      ┌───┬───┬───┐      h × w, elements numbered along rows
      │   │ ▗▄│▄▄▄│      ▗▄ the shard begins
      │▄▄▄│▄▄▄│▄▄▄│
      │▀▀▘│   │   │      ▘  and ends
      └───┴───┴───┘

Shards whose addresses and sizes allow it are moved 16 bytes at a time, in a separate launch. If the first or last byte
of a shard is shared with a neighbor, it is read first, and written back with the neighbor's nibble.
"""

import itertools

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import E4M3, BlockFormat
from torchao_blockwise.ops.device.elements import DTYPES, encode_e2m1, encode_e4m3, from_f32, magnitude_bits, to_f32
from torchao_blockwise.ops.device.scales import fp8_scales, nvfp4_scales
from torchao_blockwise.ops.device.tables import ALIGNMENT, find_row, load_pointer, load_size, make_table
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.shards.flat import Shards, shard_entries

# (tile rows, tile columns, warps) of each element, and of shards whose elements are moved one by one. A tile is in one
# block, or consists of whole ones.
_TILES = {"e4m3": (128, 128, 8), "e2m1": (64, 128, 4)}
_UNALIGNED_TILE = (32, 128, 8)
_CHUNK, _CHUNK_WARPS = 1024, 4  # blocks of a program that works only on those

# Fields of a shard's row.
_SHARD_FIELDS = tl.constexpr(11)
# Of a tensor's row in the scale kernels.
_SCALE_FIELDS = tl.constexpr(6)

_LOW = tl.constexpr(0x0F)
_HIGH = tl.constexpr(0xF0)


@triton.jit
def _load_shard_tile(
    table_ptr, count,
    DTYPE: tl.constexpr, ALIGN: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(row of the table, values, which are the shard's, number of each element, tile's first row and column in its
    matrix, the matrix' first row, blocks' places in the list's buffer, which of those exist).

    ALIGN: what sizes are multiples of, with addresses of 16; 1 where anything goes.
    """
    row_ptr, _, tile = find_row(table_ptr, count, _SHARD_FIELDS)
    shard_ptr = load_pointer(row_ptr + 1, DTYPE, ALIGN > 1)
    start = load_size(row_ptr + 3, ALIGN)
    end = load_size(row_ptr + 4, ALIGN)
    rows = tl.load(row_ptr + 5)
    columns = load_size(row_ptr + 6, ALIGN)
    tile += tl.load(row_ptr + 7)
    first_block = tl.load(row_ptr + 8)

    tiles_m, tiles_k = tl.cdiv(rows, TILE_M), tl.cdiv(columns, TILE_K)
    matrix = (tile // tiles_k) // tiles_m
    first_row, first_column = (tile // tiles_k) % tiles_m * TILE_M, tile % tiles_k * TILE_K
    offs_m = first_row + tl.arange(0, TILE_M)
    offs_k = first_column + tl.arange(0, TILE_K)
    flat = (matrix * rows + offs_m)[:, None] * columns + offs_k[None, :]
    owned = (offs_m < rows)[:, None] & (offs_k < columns)[None, :] & (flat >= start) & (flat < end)
    x = to_f32(tl.load(shard_ptr + (flat - start), mask=owned, other=0.0))

    grid_m, grid_k = tl.cdiv(rows, BLOCK), tl.cdiv(columns, BLOCK)
    blocks_m = first_row // BLOCK + tl.arange(0, TILE_M // min(TILE_M, BLOCK))
    blocks_k = first_column // BLOCK + tl.arange(0, TILE_K // BLOCK)
    blocks = first_block + (matrix * grid_m + blocks_m)[:, None] * grid_k + blocks_k[None, :]
    exist = (blocks_m < grid_m)[:, None] & (blocks_k < grid_k)[None, :]
    return row_ptr, x, owned, flat, first_row, first_column, matrix * rows, blocks, exist


@triton.jit(do_not_specialize=["count"])
def _partial_block_amax_kernel(
    table_ptr,  # [shards, fields] int64
    amax_ptr,  # [blocks] int32
    count,
    DTYPE: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _, x, _, _, _, _, _, blocks, exist = _load_shard_tile(table_ptr, count, DTYPE, ALIGN, TILE_M, TILE_K, BLOCK)
    magnitude = magnitude_bits(to_f32(from_f32(x, ROUNDED_TO)))
    if TILE_M <= BLOCK and TILE_K <= BLOCK:
        # In whatever order: in rows or columns the tile would go through shared memory.
        amax = tl.full((1, 1), tl.max(magnitude), tl.int32)
    else:
        amax = tl.max(tl.max(magnitude.reshape(TILE_M // BLOCK, BLOCK, TILE_K // BLOCK, BLOCK), 3), 1)
    # Atomic, because tiles and shards may share a block.
    tl.atomic_max(amax_ptr + blocks, amax, mask=exist, sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def _partial_cast_kernel(
    table_ptr,  # [shards, fields] int64
    encode_ptr,  # [blocks] f32
    count,
    DTYPE: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    ALIGN: tl.constexpr,
    E4M3_ELEMENTS: tl.constexpr,
    ELEMENT_MAX: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_ptr, x, owned, flat, first_row, first_column, matrix_row, blocks, exist = _load_shard_tile(
        table_ptr, count, DTYPE, ALIGN, TILE_M, TILE_K, BLOCK
    )
    target_ptr = load_pointer(row_ptr + 2, tl.uint8, ALIGN > 1)
    start = load_size(row_ptr + 3, ALIGN)
    end = load_size(row_ptr + 4, ALIGN)
    rows = tl.load(row_ptr + 5)
    columns = load_size(row_ptr + 6, ALIGN)
    first_entry = load_size(row_ptr + 9, ALIGN if E4M3_ELEMENTS else ALIGN // 2)

    encode = tl.load(encode_ptr + blocks, mask=exist, other=0.0)
    BLOCK_M: tl.constexpr = min(TILE_M, BLOCK)
    x = to_f32(from_f32(x, ROUNDED_TO)).reshape(TILE_M // BLOCK_M, BLOCK_M, TILE_K // BLOCK, BLOCK)
    y = x * encode[:, None, :, None]
    if E4M3_ELEMENTS:
        codes = encode_e4m3(y, ELEMENT_MAX).reshape(TILE_M, TILE_K)
        tl.store(target_ptr + (flat - first_entry), codes, mask=owned)
    else:
        even, odd = tl.split(encode_e2m1(y, ELEMENT_MAX).reshape(TILE_M, TILE_K // 2, 2))
        offs_m = first_row + tl.arange(0, TILE_M)
        pairs = first_column // 2 + tl.arange(0, TILE_K // 2)
        packed_columns = load_size(row_ptr + 10, ALIGN // 2)
        entries = (matrix_row + offs_m)[:, None] * packed_columns + pairs[None, :]
        exists = (offs_m < rows)[:, None] & (pairs < packed_columns)[None, :]
        if ALIGN > 1:
            # No byte is shared, and rows have no padding.
            mask = exists & (entries >= start // 2) & (entries < end // 2)
            tl.store(target_ptr + (entries - first_entry), even | (odd << 4), mask=mask)
        else:
            flat_even = (matrix_row + offs_m)[:, None] * columns + 2 * pairs[None, :]
            owns_even = exists & (flat_even >= start) & (flat_even < end)
            owns_odd = exists & (flat_even + 1 >= start) & (flat_even + 1 < end)
            # The padding of a row of odd length is written as zero together with the last element.
            owns_odd = tl.where((2 * pairs + 1 < columns)[None, :], owns_odd, owns_even)
            there = tl.load(target_ptr + (entries - first_entry), mask=owns_even != owns_odd, other=0)
            low = tl.where(owns_even, even, there & _LOW)
            high = tl.where(owns_odd, odd << 4, there & _HIGH)
            tl.store(target_ptr + (entries - first_entry), low | high, mask=owns_even | owns_odd)


@triton.jit(do_not_specialize=["count"])
def _whole_block_cast_kernel(
    table_ptr,  # [shards, fields] int64
    amax_ptr,  # [blocks] int32
    count,
    DTYPE: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    ALIGN: tl.constexpr,
    ELEMENT_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile is a block, and all of it is the shard's."""
    tl.static_assert(TILE_M == BLOCK and TILE_K == BLOCK)
    row_ptr, x, _, _, first_row, first_column, matrix_row, block, _ = _load_shard_tile(
        table_ptr, count, DTYPE, ALIGN, TILE_M, TILE_K, BLOCK
    )
    target_ptr = load_pointer(row_ptr + 2, tl.uint8, ALIGN > 1)
    rows = tl.load(row_ptr + 5)
    columns = load_size(row_ptr + 6, ALIGN)
    first_entry = load_size(row_ptr + 9, ALIGN)
    x = to_f32(from_f32(x, ROUNDED_TO))
    amax = tl.full((1, 1), tl.max(magnitude_bits(x)), tl.int32)
    tl.store(amax_ptr + block, amax)
    encode, _ = fp8_scales(amax, ELEMENT_MAX, MIN_AMAX, POWER_OF_2)
    # Offsets in a block have 32 bits; one 64-bit offset for each element would not fit in registers.
    offs_m, offs_k = tl.arange(0, TILE_M), tl.arange(0, TILE_K)
    exists = (offs_m < rows - first_row)[:, None] & (offs_k < columns - first_column)[None, :]
    target_ptr += (matrix_row + first_row) * columns + first_column - first_entry
    offs = offs_m[:, None] * columns.to(tl.int32) + offs_k[None, :]
    tl.store(target_ptr + offs, encode_e4m3(x * encode, ELEMENT_MAX), mask=exists)


@triton.jit
def _load_blocks(table_ptr, amax_ptr, count, CHUNK: tl.constexpr, PER_MATRIX: tl.constexpr):
    """(row of the table, matrix, number of the amax, blocks of the tensor, their places in the list's buffer, which
    exist, amaxes).

    PER_MATRIX: some tensors have an amax for each of their matrices; else each has one, and so has the matrix 0.
    """
    row_ptr, index, chunk = find_row(table_ptr, count, _SCALE_FIELDS)
    blocks = tl.load(row_ptr + 4)  # of a matrix
    matrix = tl.zeros((), tl.int64)
    if PER_MATRIX:
        chunks = tl.maximum(tl.cdiv(blocks, CHUNK), 1)
        matrix, chunk = chunk // chunks, chunk % chunks
        index = tl.load(row_ptr + 5) + matrix
    offs = chunk * CHUNK + tl.arange(0, CHUNK)
    exist = offs < blocks
    if PER_MATRIX:
        offs += matrix * blocks
    places = tl.load(row_ptr + 3) + offs
    return row_ptr, matrix, index, offs, places, exist, tl.load(amax_ptr + places, mask=exist, other=0)


@triton.jit(do_not_specialize=["count"])
def _tensor_amax_kernel(table_ptr, amax_ptr, tensor_amax_ptr, count, CHUNK: tl.constexpr, PER_MATRIX: tl.constexpr):
    """[blocks] int32 -> [tensors] int32, zero-initialized."""
    _, _, index, _, _, _, amax_bits = _load_blocks(table_ptr, amax_ptr, count, CHUNK, PER_MATRIX)
    tl.atomic_max(tensor_amax_ptr + index, tl.max(amax_bits, 0), sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def _block_scales_kernel(
    table_ptr,  # [tensors, fields] int64
    amax_ptr,  # [blocks] int32
    tensor_amax_ptr,  # [tensors] int32, where there are global scales
    encode_ptr,  # [blocks] f32
    count,
    GLOBAL: tl.constexpr,
    ELEMENT_MAX: tl.constexpr,
    SCALE_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    CHUNK: tl.constexpr,
    PER_MATRIX: tl.constexpr,
):
    row_ptr, matrix, index, offs, places, exist, amax_bits = _load_blocks(table_ptr, amax_ptr, count, CHUNK, PER_MATRIX)
    if GLOBAL:
        tensor_amax = tl.load(tensor_amax_ptr + index).to(tl.float32, bitcast=True)
        encode, scale = nvfp4_scales(amax_bits, tensor_amax, ELEMENT_MAX, SCALE_MAX)
        tl.store(load_pointer(row_ptr + 1, tl.uint8, False) + offs, scale, mask=exist)
        # All programs of the tensor, or of the matrix, write the same value.
        global_ptr = load_pointer(row_ptr + 2, tl.float32, False)
        if PER_MATRIX:
            global_ptr += matrix
        global_scale = tl.div_rn(tensor_amax, ELEMENT_MAX * SCALE_MAX)
        global_scale = tl.where(tensor_amax == 0, 1.0, global_scale)
        tl.store(global_ptr, tl.where(tensor_amax < float("inf"), global_scale, float("nan")))
    else:
        encode, scale = fp8_scales(amax_bits, ELEMENT_MAX, MIN_AMAX, POWER_OF_2)
        tl.store(load_pointer(row_ptr + 1, tl.float32, False) + offs, scale, mask=exist)
    tl.store(encode_ptr + places, encode, mask=exist)


# --- launchers --------------------------------------------------------------------------------------------------------


def _launch(kernel, shards: Shards, of_blocks: torch.Tensor, targets=None, blocks=False, **options) -> None:
    """Run `kernel` on the shards; those whose sizes and addresses allow it are moved 16 bytes at a time.

    blocks: whether a tile must be a block, also if elements are moved one by one.
    """
    fmt, each = shards.fmt, shards.each()
    addresses = [0] * len(each) if targets is None else [target.data_ptr() for target in targets]
    # Elements that take 16 bytes of payload.
    wide = ALIGNMENT * fmt.element.per_byte

    def kind(i: int):
        x, start, shape, _ = each[i]
        aligned = all(size % wide == 0 for size in (start, x.numel(), shape[-1]))
        return x.dtype, wide if aligned and (x.data_ptr() | addresses[i]) % ALIGNMENT == 0 else 1

    kinds: dict[tuple[torch.dtype, int], list[int]] = {}
    for i, shard in enumerate(each):
        if shard.x.numel():
            kinds.setdefault(kind(i), []).append(i)
    for (dtype, align), group in kinds.items():
        tile_m, tile_k, warps = _TILES[fmt.element.name] if align > 1 or blocks else _UNALIGNED_TILE

        def row(i: int, tile_m=tile_m, tile_k=tile_k):
            """From the tile with a shard's first row to the one with its last."""
            x, start, shape, first_block = each[i]
            _, rows, columns = shape
            tiles_m, tiles_k, end = ceil_div(rows, tile_m), ceil_div(columns, tile_k), start + x.numel()
            first, last = (
                element // columns // rows * tiles_m + element // columns % rows // tile_m
                for element in (start, end - 1)
            )
            first_entry, _ = shard_entries(start, x.numel(), columns, fmt)
            return (
                (last - first + 1) * tiles_k, x.data_ptr(), addresses[i], start, end, rows, columns,
                first * tiles_k, first_block, first_entry, fmt.element.packed(columns),
            )  # fmt: skip

        table = make_table(map(row, group), of_blocks.device)
        assert table is not None, "shards with elements"
        launch(
            kernel, table.programs, table.tensor, of_blocks, table.rows,
            DTYPE=DTYPES[dtype], ROUNDED_TO=DTYPES[shards.dtype], ALIGN=align,
            TILE_M=tile_m, TILE_K=tile_k, BLOCK=fmt.block[0], num_warps=warps, **options,
        )  # fmt: skip


def partial_block_amax_(amax_bits: torch.Tensor, shards: Shards) -> None:
    """Raise `amax_bits` to the amax of each block ∩ shard."""
    _launch(_partial_block_amax_kernel, shards, amax_bits)


def partial_cast_(targets: list[torch.Tensor], shards: Shards, encode: torch.Tensor) -> None:
    """Write the elements of each shard to its payload entries."""
    element = shards.fmt.element
    _launch(_partial_cast_kernel, shards, encode, targets, E4M3_ELEMENTS=element is E4M3, ELEMENT_MAX=element.max)


def whole_block_cast_(
    targets: list[torch.Tensor], amax_bits: torch.Tensor, shards: Shards, power_of_2_scales: bool
) -> None:
    """Write the amaxes of the shards' blocks and their elements."""
    fmt = shards.fmt
    _launch(
        _whole_block_cast_kernel, shards, amax_bits, targets, blocks=True,
        ELEMENT_MAX=fmt.element.max, MIN_AMAX=fmt.min_amax, POWER_OF_2=power_of_2_scales,
    )  # fmt: skip


def block_scales_(
    encode, scales, global_scales, amax_bits, first_blocks, fmt: BlockFormat, power_of_2_scales: bool
) -> None:
    """Write encode factors, scale grids and global scales of many tensors."""
    matrices = [scale.numel() for scale in global_scales] if fmt.has_global_scale else [1] * len(scales)
    *first_amaxes, amaxes = itertools.accumulate(matrices, initial=0)

    def row(i: int):
        blocks = scales[i].numel() // max(1, matrices[i])
        # An empty tensor has a global scale, too.
        programs = matrices[i] * max(1, ceil_div(blocks, _CHUNK))
        of_tensor = global_scales[i].data_ptr() if fmt.has_global_scale else 0
        return programs, scales[i].data_ptr(), of_tensor, first_blocks[i], blocks, first_amaxes[i]

    table = make_table(map(row, range(len(scales))), amax_bits.device)
    if table is None:
        return
    per_matrix = any(count != 1 for count in matrices)
    tensor_amax, chunks = None, {"CHUNK": _CHUNK, "PER_MATRIX": per_matrix, "num_warps": _CHUNK_WARPS}
    if fmt.has_global_scale:
        tensor_amax = amax_bits.new_zeros(amaxes)
        launch(_tensor_amax_kernel, table.programs, table.tensor, amax_bits, tensor_amax, table.rows, **chunks)
    launch(
        _block_scales_kernel, table.programs, table.tensor, amax_bits, tensor_amax, encode, table.rows,
        GLOBAL=fmt.has_global_scale, ELEMENT_MAX=fmt.element.max, SCALE_MAX=fmt.scale_max, MIN_AMAX=fmt.min_amax,
        POWER_OF_2=power_of_2_scales, **chunks,
    )  # fmt: skip
