# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""The work list of FlashInfer's kernel for any GPU (fa2), made on the device."""

from typing import List

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from .step import Schedule, StepShape

# Keys that a chunk has a multiple of.
CHUNK_KEYS = 128
# CTAs that one multiprocessor runs at a time.
CTAS_PER_MULTIPROCESSOR = 2


class SplitSchedule(Schedule):
    """The works of a step for one kind of layer, and how partial results are merged.

    A work is a tile of a request's query pairs (a query token and one of the query heads that share
    a KV head) against a chunk of its keys. The kernel runs one CTA for each work and KV head, over
    a grid that must follow from what is the same in all steps of a graph; CTAs without a work end
    at once. All chunks are of one length, the shortest with which all works run at the same time.
    Where there are more tiles than that, chunks are as short as lets a GPU's worth of works be
    added, which cuts requests that are much longer than the others and leaves equal ones whole.
    A second kernel merges each token's partial results.

    FlashInfer's own planner makes the list on the host, anew for each step and kind of layer.

    A request's page ids are its row of the context's block table, for a page is a block here.
    Padding tokens are one more request with no keys: the kernel writes zeros for it.

    Args:
        max_requests (int): Rows.
        max_tokens (int): Query tokens of a step, padding included.
        max_kv_blocks (int): Blocks of one row of the context's block table.
        block_size_tokens (int): Tokens of a block.
        num_query_heads (int): Query heads of this partition.
        num_kv_heads (int): KV heads of this partition.
        head_dim (int): Elements of one query head, and of its output.
        tokens_per_decode (int): Query tokens of a decode request.
        window_left (int): Keys before the query's own that it sees; -1: all of them.
        num_multiprocessors (int): Of the GPU.
        partial_bytes (int): Room for partial results.
        device (torch.device): Where the list is.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        max_kv_blocks: int,
        block_size_tokens: int,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        tokens_per_decode: int,
        window_left: int,
        num_multiprocessors: int,
        partial_bytes: int,
        device: torch.device,
    ) -> None:
        self.num_query_heads = num_query_heads
        self.ratio = num_query_heads // num_kv_heads
        self.head_dim = head_dim
        self.tokens_per_decode = tokens_per_decode
        self.window_left = window_left
        self.partial_bytes = partial_bytes
        self.rows = triton.next_power_of_2(max_requests + 1)
        self.works_at_once = CTAS_PER_MULTIPROCESSOR * num_multiprocessors // num_kv_heads
        tiles = triton.cdiv(max_tokens * self.ratio, 16) + max_requests
        self.capacity = tiles + self.works_at_once
        rows = max_requests + 1  # padding tokens are one more
        sizes = dict(
            request=self.capacity,
            tile=self.capacity,
            chunk=self.capacity,
            is_work=triton.cdiv(self.capacity, 4),  # bytes
            merge_start=max_tokens + 1,
            partial_start=rows,
            chunk_keys=1,
            num_tokens=1,
        )
        # Every array begins at a multiple of 16 bytes.
        lengths = [triton.cdiv(length, 4) * 4 for length in sizes.values()]
        self.works = torch.zeros(sum(lengths), dtype=torch.int32, device=device)
        self._arrays = dict(zip(sizes, self.works.split(lengths)))
        self.query_starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        # The kernel takes a row's keys to be those of all its pages but the last, and
        # `last_page_lengths` more. Every row has as many pages as the block table has columns, but
        # for padding tokens where no row is left, so that number is negative for all but the
        # longest requests. The sum, in unsigned arithmetic, is right.
        page_starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * max_kv_blocks
        self.page_starts = page_starts.clamp(max=max_requests * max_kv_blocks)
        self.last_page_lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self._keys_of_full_pages = (max_kv_blocks - 1) * block_size_tokens

    def num_tokens(self, shape: StepShape) -> int:
        """Query tokens that the list is for: those of decode slots, or all where there are none."""
        if shape.decode_slots:
            return shape.decode_slots * self.tokens_per_decode
        return shape.num_tokens

    def _num_requests(self, shape: StepShape) -> int:
        """Requests that it is for. Others may lie in the slots that no decode is left for."""
        if shape.decode_slots and shape.has_prefill:
            return shape.num_decode
        return shape.num_requests

    def tile(self, shape: StepShape) -> int:
        """Query pairs of one of the kernel's tiles, by the longest request there may be."""
        longest = shape.num_tokens - shape.padded_requests + 1
        if shape.decode_slots:
            longest = self.tokens_per_decode
        pairs = longest * self.ratio
        if pairs <= 16:
            return 16
        return 64 if pairs <= 64 or self.head_dim == 256 else 128

    def num_tiles(self, shape: StepShape) -> int:
        """Most tiles that a step of this shape can have."""
        tile = self.tile(shape)
        if shape.decode_slots:
            return shape.decode_slots * triton.cdiv(self.tokens_per_decode * self.ratio, tile)
        return triton.cdiv(shape.num_tokens * self.ratio, tile) + shape.padded_requests

    def num_works(self, shape: StepShape) -> int:
        """Works that the kernel is launched over."""
        return self.num_tiles(shape) + self.works_at_once

    def _partial_rows(self, shape: StepShape) -> int:
        """Most partial results there may be, of all query heads each."""
        tokens = triton.cdiv(self.tile(shape), self.ratio)
        if shape.decode_slots:
            tokens = min(tokens, self.tokens_per_decode)
        return self.num_works(shape) * tokens

    def splits(self, shape: StepShape) -> bool:
        """Whether there is room for partial results, outputs of 2 bytes and log-sum-exps of 4.

        Steps too large for that keep the GPU busy without.
        """
        row = self.num_query_heads * (2 * self.head_dim + 4)
        return self._partial_rows(shape) * row <= self.partial_bytes

    def plan_info(self, shape: StepShape) -> List[int]:
        """What the kernel is told of a step, in its own order: extents, and where it finds what."""
        byte = {
            name: array.storage_offset() * array.itemsize for name, array in self._arrays.items()
        }
        plan = dict(
            works=self.num_works(shape),
            rows=self.num_tokens(shape),
            rows_at=byte["num_tokens"],
            tile=self.tile(shape),
            requests_at=byte["request"],
            tiles_at=byte["tile"],
            chunks_at=byte["chunk"],
            merge_starts_at=byte["merge_start"],
            partial_starts_at=byte["partial_start"],
            chunk_keys_at=byte["chunk_keys"],
            partial_outputs_at=0,
            partial_sums_at=2 * self._partial_rows(shape) * self.num_query_heads * self.head_dim,
            is_work_at=byte["is_work"],
            reads_rows_and_is_work=1,  # as FlashInfer's own plan has it for graphs
            splits=int(self.splits(shape)),
        )
        return list(plan.values())

    def derive(
        self, shape: StepShape, query_starts: Tensor, query_lengths: Tensor, kv_lengths: Tensor
    ) -> None:
        """See base class."""
        num_rows, tile, arrays = self._num_requests(shape), self.tile(shape), self._arrays
        # A tile sees the window of its first token, and its own tokens, at most one a pair.
        most = 2**31 - 1
        visible = most if self.window_left < 0 else min(self.window_left + tile, most)
        _split_kernel[(num_rows + 1,)](
            query_starts,
            query_lengths,
            kv_lengths,
            self.query_starts,
            self.last_page_lengths,
            arrays["request"],
            arrays["tile"],
            arrays["chunk"],
            arrays["is_work"].view(torch.int8),
            arrays["merge_start"],
            arrays["partial_start"],
            arrays["chunk_keys"],
            arrays["num_tokens"],
            num_rows=num_rows,
            num_tokens=self.num_tokens(shape),
            num_works=self.num_works(shape),
            works_at_once=self.works_at_once,
            keys_of_full_pages=self._keys_of_full_pages,
            tile_pairs=tile,
            visible=visible,
            splits=int(self.splits(shape)),
            RATIO=self.ratio,
            CHUNK_KEYS=CHUNK_KEYS,
            ROWS=self.rows,
            WORKS=128,
            TOKENS=1024,
            # Each program looks at all rows, which with fewer warps would not fit its registers.
            num_warps=min(max(self.rows // 512, 4), 32),
        )


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_tokens",
        "num_works",
        "works_at_once",
        "keys_of_full_pages",
        "tile_pairs",
        "visible",
        "splits",
    ]
)
def _split_kernel(
    query_starts_ptr,
    query_lengths_ptr,
    kv_lengths_ptr,
    all_query_starts_ptr,
    last_page_lengths_ptr,
    requests_ptr,
    tiles_ptr,
    chunks_ptr,
    is_work_ptr,
    merge_starts_ptr,
    partial_starts_ptr,
    chunk_keys_ptr,
    num_tokens_ptr,
    num_rows,
    num_tokens,
    num_works,
    works_at_once,
    keys_of_full_pages,
    tile_pairs,
    visible,
    splits,
    RATIO: tl.constexpr,
    CHUNK_KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    WORKS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    own_row = tl.program_id(0)
    row = tl.arange(0, ROWS)
    is_request = row < num_rows
    query_length = tl.load(query_lengths_ptr + row, mask=is_request, other=0)
    kv_length = tl.load(kv_lengths_ptr + row, mask=is_request, other=0)
    query_end = tl.load(query_starts_ptr + num_rows)
    query_length = tl.where(row == num_rows, num_tokens - query_end, query_length)
    tiles = (query_length * RATIO + tile_pairs - 1) // tile_pairs
    # The kernel counts one chunk where there is no key.
    keys = tl.maximum(tl.minimum(kv_length, visible), 1)

    # The shortest chunk that makes no more works than are allowed, by bisection.
    all_tiles = tl.sum(tiles)
    allowed = tl.where(all_tiles <= works_at_once, works_at_once, all_tiles + works_at_once)
    enough = (tl.max(keys) + CHUNK_KEYS - 1) // CHUNK_KEYS
    least = tl.where(splits != 0, 1, enough)
    while least < enough:
        middle = (least + enough) // 2
        works = tl.sum(tiles * ((keys + middle * CHUNK_KEYS - 1) // (middle * CHUNK_KEYS)))
        least = tl.where(works > allowed, middle + 1, least)
        enough = tl.where(works > allowed, enough, middle)
    chunk_keys = enough * CHUNK_KEYS
    chunks = (keys + chunk_keys - 1) // chunk_keys

    is_before = row < own_row
    is_own = row == own_row
    first_work = tl.sum(tl.where(is_before, tiles * chunks, 0))
    first_partial = tl.sum(tl.where(is_before, query_length * chunks, 0))
    own_tiles = tl.sum(tl.where(is_own, tiles, 0))
    own_chunks = tl.sum(tl.where(is_own, chunks, 0))
    own_length = tl.sum(tl.where(is_own, query_length, 0))
    own_kv_length = tl.sum(tl.where(is_own, kv_length, 0))
    own_start = tl.load(query_starts_ptr + own_row)
    tl.store(all_query_starts_ptr + own_row, own_start)
    tl.store(last_page_lengths_ptr + own_row, own_kv_length - keys_of_full_pages)
    tl.store(partial_starts_ptr + own_row, first_partial)

    own_works = own_tiles * own_chunks
    for start in range(0, own_works, WORKS):
        number = start + tl.arange(0, WORKS)
        is_one = number < own_works
        work = first_work + number
        tl.store(requests_ptr + work, own_row + tl.zeros_like(work), mask=is_one)
        tl.store(tiles_ptr + work, number // own_chunks, mask=is_one)
        tl.store(chunks_ptr + work, number % own_chunks, mask=is_one)
        tl.store(is_work_ptr + work, is_one.to(tl.int8), mask=is_one)
    for start in range(0, own_length, TOKENS):
        token = start + tl.arange(0, TOKENS)
        tl.store(
            merge_starts_ptr + own_start + token,
            first_partial + token * own_chunks,
            mask=token < own_length,
        )

    if own_row == num_rows:
        tl.store(all_query_starts_ptr + num_rows + 1, num_tokens)
        tl.store(merge_starts_ptr + num_tokens, first_partial + own_length * own_chunks)
        tl.store(chunk_keys_ptr, chunk_keys)
        tl.store(num_tokens_ptr, num_tokens)
        # What is left of the grid is no work. A kernel that does not ask, as one that does not
        # split may, gets the first tile of the padding tokens once more.
        for start in range(first_work + own_works, num_works, WORKS):
            work = start + tl.arange(0, WORKS)
            is_one = work < num_works
            none = tl.zeros_like(work)
            tl.store(requests_ptr + work, num_rows + none, mask=is_one)
            tl.store(tiles_ptr + work, none, mask=is_one)
            tl.store(chunks_ptr + work, none, mask=is_one)
            tl.store(is_work_ptr + work, none.to(tl.int8), mask=is_one)
