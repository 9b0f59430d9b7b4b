"""The largest magnitude of a tensor, and the tensor scale made of it, in Triton: one read, and two small launches.

    x  ── a chunk a turn ──▶ largest magnitude of each program ── atomic maximum of its bits ──▶ amax ──▶ global scale

As integers, bits of magnitudes have their order, so the maximum is exact, whichever program comes first.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import E2M1
from torchao_blockwise.ops.device.elements import magnitude_bits, to_f32
from torchao_blockwise.ops.launch import ceil_div, launch

_CHUNK = 8192
_WARPS = 8
# More programs than multiprocessors hold at once, and few enough that their maxima take no time.
_PROGRAMS = 1024


@triton.jit
def _amax_kernel(
    x_ptr,  # rows side by side
    ends_ptr,  # int32 [E], of rows in groups, or None
    amax_ptr,  # int32, bits of an fp32, zero before
    M,
    K,
    E,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two, E at least
):
    rows = M
    if ends_ptr is not None:
        offs_e = tl.arange(0, GROUPS)
        ends = tl.load(ends_ptr + offs_e, mask=offs_e < E, other=0)
        rows = tl.minimum(tl.max(ends, 0), M)
    size = (tl.zeros((), tl.int64) + rows) * K
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    word: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    mask_of_sign: tl.constexpr = 0x7FFFFFFF if dtype.primitive_bitwidth == 32 else 0x7FFF
    largest = tl.zeros((CHUNK,), word)
    for chunk in range(tl.program_id(0), tl.cdiv(size, CHUNK).to(tl.int32), tl.num_programs(0)):
        offs = (tl.zeros((CHUNK,), tl.int64) + chunk) * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + offs, mask=offs < size, other=0.0)
        largest = tl.maximum(largest, x.to(word, bitcast=True) & mask_of_sign)
    most = tl.max(largest, 0).to(word).to(dtype, bitcast=True)
    tl.atomic_max(amax_ptr, magnitude_bits(to_f32(most)))


@triton.jit
def _global_scale_kernel(amax_ptr, scale_ptr, LARGEST: tl.constexpr):
    amax = tl.load(amax_ptr)
    scale = tl.div_rn(amax, LARGEST)
    scale = tl.where(amax == 0, 1.0, scale)
    # Inf and NaN alone are unlike themselves less themselves.
    tl.store(scale_ptr, tl.where(amax - amax == 0, scale, float("nan")))


def tensor_amax_bits(x: torch.Tensor) -> torch.Tensor:
    """Arguments and result as in the op."""
    return grouped_amax_bits(x, None)


def grouped_amax_bits(x: torch.Tensor, group_ends: torch.Tensor | None) -> torch.Tensor:
    """Arguments and result as in the op; without ends, of all rows."""
    bits = torch.zeros((), dtype=torch.int32, device=x.device)
    if x.numel() > 0:
        K, E = x.shape[-1], 1 if group_ends is None else group_ends.shape[0]
        grid = min(ceil_div(x.numel(), _CHUNK), _PROGRAMS)
        launch(
            _amax_kernel, grid, x.contiguous(), group_ends, bits, x.numel() // K, K, E,
            CHUNK=_CHUNK, GROUPS=triton.next_power_of_2(E), num_warps=_WARPS,
        )  # fmt: skip
    return bits


def global_scale(amax_bits: torch.Tensor, scale_max: float) -> torch.Tensor:
    """Arguments and result as in the op."""
    scale = torch.empty((), dtype=torch.float32, device=amax_bits.device)
    launch(_global_scale_kernel, 1, (amax_bits, torch.float32), scale, LARGEST=E2M1.max * scale_max, num_warps=1)
    return scale
