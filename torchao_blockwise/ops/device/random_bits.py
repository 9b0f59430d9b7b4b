"""Random bits in Triton kernels: those of formats/random_bits.py, a call of Philox for each block of 16."""

import triton
import triton.language as tl

_WORD = tl.constexpr(0xFFFFFFFF)


@triton.jit
def load_key(key_ptr, OPERAND: tl.constexpr):
    """(seed, stream, use, number of the first expert) of a copy; stream and use as words."""
    seed, stream, use = tl.load(key_ptr), tl.load(key_ptr + 1) + OPERAND, tl.load(key_ptr + 2)
    return seed, (stream & _WORD).to(tl.uint32), (use & _WORD).to(tl.uint32), tl.load(key_ptr + 3).to(tl.int32)


@triton.jit
def block_words(block, seed, stream, use):
    """The four words of random bits of blocks, int64 numbers: uint32 of their shape, byte i of all is element i's."""
    low, high = (block & _WORD).to(tl.uint32), ((block >> 32) & _WORD).to(tl.uint32)
    none = tl.zeros_like(low)
    return tl.philox(seed, low, high, none + stream, none + use)
