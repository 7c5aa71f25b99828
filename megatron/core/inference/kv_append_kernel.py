# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""Triton kernel that appends the tokens of a step to a paged KV cache."""

from typing import Sequence

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

# A program copies a tile of at most this many elements of the keys, and as many of the values:
# part of a wide row, or several narrow ones. Up to so many tokens, each has programs of its own:
# larger tiles would leave most of a large GPU's multiprocessors idle in a decode step; beyond, a
# program a token would have too little to do where rows are narrow.
_TILE_ELEMENTS = 1024
_FEW_TOKENS = 1024
_ELEMENTS_PER_WARP = 256  # a thread then moves 16 bytes of a 16-bit tensor at a time


@triton.jit(do_not_specialize=["num_tokens"])
def _append_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_idx_ptr,
    position_ptr,
    num_tokens,
    key_token_stride,
    key_head_stride,
    key_dim_stride,
    value_token_stride,
    value_head_stride,
    value_dim_stride,
    cache_block_stride,
    cache_token_stride,
    cache_head_stride,
    cache_dim_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
):
    # The heads of a token are walked as one row, so that neighbouring threads access neighbouring
    # addresses across the heads of a layout that keeps them together.
    token = tl.program_id(0) * TOKEN_TILE + tl.arange(0, TOKEN_TILE)
    element = tl.program_id(1) * ROW_TILE + tl.arange(0, ROW_TILE)
    is_token = token < num_tokens
    mask = is_token[:, None] & (element < NUM_HEADS * HEAD_DIM)[None, :]
    block = tl.load(block_idx_ptr + token, mask=is_token, other=0)
    position = tl.load(position_ptr + token, mask=is_token, other=0)

    # Rows and blocks lie up to the whole of a cache apart, which may be more than 2**31 elements.
    token = token.to(tl.int64)
    block = block.to(tl.int64)
    position = position.to(tl.int64)
    head = element // HEAD_DIM
    dim = element % HEAD_DIM

    cache_offset = (block * cache_block_stride + position * cache_token_stride)[:, None] + (
        head * cache_head_stride + dim * cache_dim_stride
    )[None, :]
    key_offset = (token * key_token_stride)[:, None] + (
        head * key_head_stride + dim * key_dim_stride
    )[None, :]
    key = tl.load(key_ptr + key_offset, mask=mask)
    if HAS_VALUE:
        value_offset = (token * value_token_stride)[:, None] + (
            head * value_head_stride + dim * value_dim_stride
        )[None, :]
        value = tl.load(value_ptr + value_offset, mask=mask)
        tl.store(value_cache_ptr + cache_offset, value, mask=mask)
    tl.store(key_cache_ptr + cache_offset, key, mask=mask)


def triton_append(
    rows: Sequence[Tensor],
    caches: Sequence[Tensor],
    block_idx: Tensor,
    position: Tensor,
    num_tokens: int,
) -> None:
    """Write one row per token to its place in each of one or two paged caches.

    Elements are converted to the caches' dtype. Rows and caches may have any strides, as long as
    the elements of one row lie within 2**31 elements; two caches must share theirs. A cache may
    hold more than 2**31 elements. Nothing is checked here.

    Args:
        rows (Sequence[Tensor]): Keys and values, or latents alone, each of shape `(num_tokens or
            more, heads, head_dim)` or `(num_tokens or more, dim)`.
        caches (Sequence[Tensor]): As many caches, each of shape `(blocks, block_size, heads,
            head_dim)` or `(blocks, block_size, dim)`.
        block_idx (Tensor): Block of each token, integers of shape `(num_tokens or more,)`.
        position (Tensor): Position of each token in its block, likewise.
        num_tokens (int): Tokens to write.
    """
    if num_tokens == 0:
        return
    if rows[0].dim() == 2:
        rows = [row.unsqueeze(1) for row in rows]
        caches = [cache.unsqueeze(2) for cache in caches]
    _, num_heads, head_dim = rows[0].shape
    row_elements = num_heads * head_dim
    row_tile = min(1 << (row_elements - 1).bit_length(), _TILE_ELEMENTS)
    token_tile = 1 if num_tokens <= _FEW_TOKENS else _TILE_ELEMENTS // row_tile
    grid = (-(-num_tokens // token_tile), -(-row_elements // row_tile))
    # Without values, the last row and cache are the first, and the kernel leaves them alone.
    _append_kernel[grid](
        rows[0],
        rows[-1],
        caches[0],
        caches[-1],
        block_idx.contiguous(),
        position.contiguous(),
        num_tokens,
        *rows[0].stride(),
        *rows[-1].stride(),
        *caches[0].stride(),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HAS_VALUE=len(rows) == 2,
        TOKEN_TILE=token_tile,
        ROW_TILE=row_tile,
        num_warps=max(1, token_tile * row_tile // _ELEMENTS_PER_WARP),
    )
