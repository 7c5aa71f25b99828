# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""What the kernels need to know of a step, derived on the device from the context's bookkeeping.

Nothing here is copied from or to the host, and all addresses are fixed. So whatever a CUDA graph
replays is as fresh as the bookkeeping, and no layer, window or captured shape has a plan of its own
that could be stale.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import List

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor


@dataclass(frozen=True)
class StepShape:
    """Extents of a step, known on the host.

    Rows are requests: the first `num_decode` are computed by a decode kernel, which takes the same
    number of query tokens from each; then come those of a prefill kernel, with any number of query
    tokens; those from `num_requests` on are padding.

    Args:
        num_decode: Requests that a decode kernel computes; 0 where the prefill kernel takes all.
        num_requests: Requests of this step.
        decode_slots: Rows that the decode kernel is launched over, `num_decode` or more.
        padded_requests: Rows, padding included.
        num_tokens: Query tokens of this step, padding included.
        has_prefill: Whether the prefill kernel is launched.
        num_new: Tokens, padding aside, of a step whose prefill requests have nothing else in the
            cache, if that is of use; 0 otherwise.
    """

    num_decode: int
    num_requests: int
    decode_slots: int
    padded_requests: int
    num_tokens: int
    has_prefill: bool
    num_new: int = 0


class Schedule(ABC):
    """A list of a step's works, made on the device, as one of FlashInfer's kernels reads it.

    Attributes:
        works (Tensor): The list, int32. It is where the kernel expects FlashInfer's own plan.
    """

    works: Tensor

    @abstractmethod
    def derive(
        self, shape: StepShape, query_starts: Tensor, query_lengths: Tensor, kv_lengths: Tensor
    ) -> None:
        """Make the list of a step.

        Args:
            shape (StepShape): Extents of the step.
            query_starts (Tensor): First token of each row, and the end of the last, int32.
            query_lengths (Tensor): Query tokens of each row, int32 of shape `(rows,)`.
            kv_lengths (Tensor): Tokens in the cache, those of this step included, int32 `(rows,)`.
        """


class PageTable:
    """Page ids of the rows, for kernels whose pages are parts of a block.

    Block `b` consists of pages `b * k` to `b * k + k - 1`.

    Args:
        max_requests (int): Rows.
        max_kv_blocks (int): Blocks of one row of the context's block table.
        pages_per_block (int): Pages that make a block.
        device (torch.device): Where the table is.
    """

    def __init__(
        self, max_requests: int, max_kv_blocks: int, pages_per_block: int, device: torch.device
    ) -> None:
        self.pages_per_block = pages_per_block
        width = max_kv_blocks * pages_per_block
        self.table = torch.zeros((max_requests, width), dtype=torch.int32, device=device)

    def derive(self, rows: int, block_table: Tensor) -> None:
        """Derive the first rows of the table.

        Args:
            rows (int): How many.
            block_table (Tensor): Blocks, int32 of shape `(rows, max_kv_blocks)`; -1 where none is.
        """
        width = self.table.size(1)
        tile = min(1024, triton.next_power_of_2(width))
        _pages_kernel[(rows, triton.cdiv(width, tile))](
            block_table,
            self.table,
            width,
            block_table.stride(0),
            PAGES_PER_BLOCK=self.pages_per_block,
            TILE=tile,
        )


@triton.jit
def _pages_kernel(
    block_table_ptr,
    page_table_ptr,
    width,
    block_table_stride,
    PAGES_PER_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    page = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = page < width
    block = tl.load(
        block_table_ptr + row * block_table_stride + page // PAGES_PER_BLOCK, mask=mask, other=0
    )
    # Entries beyond a request's blocks are -1. No kernel should read them; if one does, no harm.
    page_id = tl.maximum(block, 0) * PAGES_PER_BLOCK + page % PAGES_PER_BLOCK
    tl.store(page_table_ptr + row.to(tl.int64) * width + page, page_id, mask=mask)


# Tokens of a page that one program looks at, and elements of a token that it loads at once.
TAIL_TOKENS, TAIL_ELEMENTS = 16, 256


def make_tails_finite(
    pages: Tensor, page_table: Tensor, query_starts: Tensor, kv_lengths: Tensor, rows: int
) -> None:
    """Zero what is not finite behind the last token of each row with queries, in its last page.

    For kernels that load whole pages and multiply what they mask by zero. What is finite stays as
    it is, for with prefix caching the page may hold tokens of another request.

    Args:
        pages (Tensor): Part of a cache, of shape `(pages, page_size, heads, head_dim)`, each
            token's heads contiguous.
        page_table (Tensor): Page ids, int32 of shape `(rows or more, pages of a row)`.
        query_starts (Tensor): First query of each row, and the end of the last, int32.
        kv_lengths (Tensor): Tokens in the cache of each row, int32.
        rows (int): How many.
    """
    page_size, elements = pages.size(1), pages[0, 0].numel()
    _finite_tails_kernel[(rows, triton.cdiv(page_size, TAIL_TOKENS))](
        pages,
        page_table,
        query_starts,
        kv_lengths,
        elements,
        pages.stride(0),
        pages.stride(1),
        page_table.stride(0),
        PAGE_SIZE=page_size,
        TOKENS=TAIL_TOKENS,
        TILE=TAIL_ELEMENTS,
    )


@triton.jit
def _finite_tails_kernel(
    pages_ptr,
    page_table_ptr,
    query_starts_ptr,
    kv_lengths_ptr,
    elements,
    page_stride,
    token_stride,
    page_table_stride,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    has_queries = tl.load(query_starts_ptr + row + 1) > tl.load(query_starts_ptr + row)
    kv_length = tl.load(kv_lengths_ptr + row)
    tail = kv_length % PAGE_SIZE
    last = (tl.program_id(1) + 1) * TOKENS - 1
    if has_queries & (tail > 0) & (last >= tail):
        page = tl.load(
            page_table_ptr + row.to(tl.int64) * page_table_stride + kv_length // PAGE_SIZE
        )
        token = last - tl.arange(0, TOKENS)
        tokens_ptr = pages_ptr + page.to(tl.int64) * page_stride + token[:, None] * token_stride
        is_tail = (token >= tail) & (token < PAGE_SIZE)
        for start in range(0, elements, TILE):
            element = start + tl.arange(0, TILE)
            mask = is_tail[:, None] & (element < elements)[None, :]
            found = tl.load(tokens_ptr + element[None, :], mask=mask, other=0.0)
            is_finite = tl.abs(found.to(tl.float32)) < float("inf")
            tl.store(
                tokens_ptr + element[None, :], tl.zeros_like(found), mask=mask & (is_finite == 0)
            )


class PrefillSchedule(Schedule):
    """The work list of FlashInfer's prefill kernel for Hopper (fa3), made on the device.

    That kernel runs one CTA per multiprocessor, which computes the works of its part of the list:
    one tile of query tokens of one request and one head each. FlashInfer's own planner makes the
    list on the host, in a loop over heads and tiles, for about a millisecond a step; here each work
    finds its own place. Works are dealt out in sections of heads whose keys the GPU's cache can
    hold, so that a request's tiles share them, heads of one tile next to each other. The last
    section's works go by descending number of keys, those of the one before the other way round,
    and so on, there and back over the CTAs, which loads them evenly.

    A request's page ids are its row of the context's block table, for a page is a block here.
    Decode rows are left out. Padding tokens are one more request with no keys: the kernel writes
    zeros for it. One list serves all layers and windows.

    Args:
        max_requests (int): Rows.
        max_tokens (int): Query tokens of a step, padding included.
        max_kv_blocks (int): Blocks of one row of the context's block table.
        num_query_heads (int): Query heads of this partition.
        num_kv_heads (int): KV heads of this partition.
        value_dim (int): Elements of one value.
        num_ctas (int): CTAs that the kernel runs, which is one per multiprocessor.
        keys_in_cache (int): Keys, with their values, that the GPU's cache can hold.
        device (torch.device): Where the list is.
    """

    # Works that a section has at least for each CTA. With fewer, requests that differ much would
    # load them unevenly.
    MIN_TURNS = 4

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        max_kv_blocks: int,
        num_query_heads: int,
        num_kv_heads: int,
        value_dim: int,
        num_ctas: int,
        keys_in_cache: int,
        device: torch.device,
    ) -> None:
        self.max_kv_blocks = max_kv_blocks
        self.num_query_heads = num_query_heads
        self.num_kv_heads = num_kv_heads
        self.keys_in_cache = keys_in_cache
        self.tile = self.tile_tokens(value_dim)
        self.rows = triton.next_power_of_2(max_requests + 1)
        self.num_ctas = num_ctas
        works = (triton.cdiv(max_tokens, self.tile) + max_requests + 1) * num_query_heads
        self.capacity = triton.cdiv(works, 4) * 4  # keeps every array aligned to 16 bytes
        self.works = torch.zeros(
            (7 * self.capacity + self.num_ctas + 2,), dtype=torch.int32, device=device
        )

    @staticmethod
    def tile_tokens(value_dim: int) -> int:
        """Query tokens of one of the kernel's tiles."""
        return 192 if value_dim == 64 else 128

    @property
    def first_token(self) -> Tensor:
        """First of the tokens that are in the list, one element."""
        return self.works[-1:]

    @property
    def plan_info(self) -> List[int]:
        """Where the kernel finds what, in its own order: byte offsets, and whether heads share."""
        return self._plan_info(is_ragged=False)

    @property
    def ragged_plan_info(self) -> List[int]:
        """As `plan_info`, for keys that lie in the order of the queries, as many as they are."""
        return self._plan_info(is_ragged=True)

    def _plan_info(self, is_ragged: bool) -> List[int]:
        arrays = [array * self.capacity * self.works.itemsize for array in range(8)]
        tile, query_start, first_page, query_length, kv_length, head, request, first_work = arrays
        return [
            tile,
            query_start,
            query_start if is_ragged else first_page,
            query_length,
            kv_length,
            head,
            first_work,
            request,
            0,
        ]

    def derive(
        self, shape: StepShape, query_starts: Tensor, query_lengths: Tensor, kv_lengths: Tensor
    ) -> None:
        """See base class."""
        rows = shape.num_requests - shape.num_decode + 1
        _schedule_kernel[(triton.cdiv(shape.num_tokens, self.tile) + rows,)](
            query_starts,
            query_lengths,
            kv_lengths,
            self.works,
            shape.num_decode,
            shape.num_requests,
            shape.num_tokens,
            self.max_kv_blocks,
            self.capacity,
            TILE=self.tile,
            ROWS=self.rows,
            HEADS=self.num_query_heads,
            HEAD_TILE=triton.next_power_of_2(self.num_query_heads),
            KV_HEADS=self.num_kv_heads,
            KEYS_IN_CACHE=self.keys_in_cache,
            MIN_TURNS=self.MIN_TURNS,
            CTAS=self.num_ctas,
            CTA_TILE=triton.next_power_of_2(self.num_ctas + 1),
            # Each program looks at all rows, which with fewer warps would not fit its registers.
            num_warps=min(max(self.rows // 512, 4), 32),
        )


@triton.jit
def _tiles_with_more_keys(keys, tiles, query_length, kv_length, TILE: tl.constexpr):
    # Tile i of a row sees kv_length - query_length + (i + 1) * TILE keys, the last one kv_length.
    first = tl.maximum(keys - (kv_length - query_length), 0) // TILE
    inner = tl.maximum(tiles - 1 - first, 0)
    return inner + ((tiles > 0) & (kv_length > keys)).to(tl.int32)


@triton.jit
def _first_work(cta, full, rest, CTAS: tl.constexpr):
    # Every CTA has `full` works; the rest goes to the first CTAs, or to the last on the way back.
    more = tl.where(full % 2 == 0, tl.minimum(cta, rest), tl.maximum(cta - (CTAS - rest), 0))
    return cta * full + more


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tokens"])
def _schedule_kernel(
    query_starts_ptr,
    query_lengths_ptr,
    kv_lengths_ptr,
    works_ptr,
    first_row,
    num_rows,
    num_tokens,
    max_kv_blocks,
    capacity,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEYS_IN_CACHE: tl.constexpr,
    MIN_TURNS: tl.constexpr,
    CTAS: tl.constexpr,
    CTA_TILE: tl.constexpr,
):
    work = tl.program_id(0)
    row = tl.arange(0, ROWS)
    is_request = (row >= first_row) & (row < num_rows)
    query_length = tl.load(query_lengths_ptr + row, mask=is_request, other=0)
    kv_length = tl.load(kv_lengths_ptr + row, mask=is_request, other=0)
    query_end = tl.load(query_starts_ptr + num_rows)
    query_length = tl.where(row == num_rows, num_tokens - query_end, query_length)
    tiles = (query_length + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles)
    full = total * HEADS // CTAS
    rest = total * HEADS % CTAS

    if work == 0:
        cta = tl.arange(0, CTA_TILE)
        tl.store(
            works_ptr + 7 * capacity + cta, _first_work(cta, full, rest, CTAS), mask=cta <= CTAS
        )
        first_token = tl.load(query_starts_ptr + first_row)
        tl.store(works_ptr + 7 * capacity + CTAS + 1, first_token)
    if work < total:
        own_row = tl.sum((ends <= work).to(tl.int32))
        is_own = row == own_row
        own_query_length = tl.sum(tl.where(is_own, query_length, 0))
        own_kv_length = tl.sum(tl.where(is_own, kv_length, 0))
        own_tiles = tl.sum(tl.where(is_own, tiles, 0))
        tile = work - (tl.sum(tl.where(is_own, ends, 0)) - own_tiles)
        keys = tl.minimum(own_kv_length - own_query_length + (tile + 1) * TILE, own_kv_length)

        more = _tiles_with_more_keys(keys, tiles, query_length, kv_length, TILE)
        as_many = _tiles_with_more_keys(keys - 1, tiles, query_length, kv_length, TILE) - more
        rank = tl.sum(more) + tl.sum(tl.where(row < own_row, as_many, 0))

        head = tl.arange(0, HEAD_TILE)
        # As many sections as let their keys fit, as long as none gets too few works.
        all_keys = tl.sum(kv_length).to(tl.int64) * KV_HEADS
        most = tl.maximum(total * HEADS // (CTAS * MIN_TURNS), 1)
        sections = tl.minimum(tl.maximum(tl.cdiv(all_keys, KEYS_IN_CACHE), 1), most).to(tl.int32)
        heads = tl.cdiv(KV_HEADS, sections) * (HEADS // KV_HEADS)
        first_head = head // heads * heads
        sections_after = (HEADS - 1) // heads - head // heads
        place = tl.where(sections_after % 2 == 0, rank, total - 1 - rank)
        heads_here = tl.minimum(heads, HEADS - first_head)
        order = first_head * total + place * heads_here + head - first_head
        turn = order // CTAS
        cta = tl.where(turn % 2 == 0, order % CTAS, CTAS - 1 - order % CTAS)
        slot = works_ptr + _first_work(cta, full, rest, CTAS) + turn
        mask = head < HEADS
        query_start = tl.load(query_starts_ptr + own_row)
        tl.store(slot, tile, mask=mask)
        tl.store(slot + capacity, query_start, mask=mask)
        tl.store(slot + 2 * capacity, own_row * max_kv_blocks, mask=mask)
        tl.store(slot + 3 * capacity, own_query_length, mask=mask)
        tl.store(slot + 4 * capacity, own_kv_length, mask=mask)
        tl.store(slot + 5 * capacity, head, mask=mask)
        tl.store(slot + 6 * capacity, own_row, mask=mask)
