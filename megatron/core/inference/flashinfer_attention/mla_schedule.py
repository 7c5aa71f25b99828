# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""The work list of FlashInfer's kernels for multi-latent attention, made on the device."""

from typing import List

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from .step import Schedule, StepShape

# Pairs of query token and head that one CTA takes; two CTAs, a cluster, may share a tile.
CTA_PAIRS = 64
# Keys that a CTA takes at a time. Works begin at a multiple of it.
KEY_TILE = 64
# What a tile costs beside its keys, in keys: its queries are loaded, its output is written.
TILE_COST = 128


class MlaSchedule(Schedule):
    """The works of a step, and how partial results are merged.

    The kernels run a CTA on each multiprocessor, alone or in clusters of two. Each cluster computes
    its works: a tile of query pairs (a query token and one of its heads) against a range of keys.
    Here the tiles of all requests lie on a line, one after the other, each as long as its keys are
    many, and the line is cut into one piece per cluster. So clusters have as much to do as each
    other, whatever the lengths of the requests, and a tile is computed in parts only where a cut
    goes through it. Its partial results are merged by as many clusters as there are cuts.

    FlashInfer's own planner makes such a list on the host, for 150 microseconds and more a step.

    A request's page ids are its row of the context's block table, for a page is a block here.
    Padding tokens are one more request with no keys: the kernels write zeros for it.

    Args:
        max_requests (int): Rows.
        max_tokens (int): Query tokens of a step, padding included.
        max_kv_blocks (int): Blocks of one row of the context's block table.
        num_query_heads (int): Query heads of this partition, a power of two up to 128.
        value_dim (int): Elements of a head's output.
        num_multiprocessors (int): Of the GPU.
        device (torch.device): Where the list is.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        max_kv_blocks: int,
        num_query_heads: int,
        value_dim: int,
        num_multiprocessors: int,
        device: torch.device,
    ) -> None:
        self.max_kv_blocks = max_kv_blocks
        self.num_query_heads = num_query_heads
        self.value_dim = value_dim
        self.num_multiprocessors = num_multiprocessors
        self.rows = triton.next_power_of_2(max_requests + 1)
        # Rows of at most one tile of a CTA on average make at most two tiles each.
        tiles = triton.cdiv(max_tokens * num_query_heads, 2 * CTA_PAIRS) + 2 * (max_requests + 1)
        self.capacity = tiles + num_multiprocessors
        merges = 5 * num_multiprocessors
        self.works = torch.zeros(
            8 * self.capacity + merges + num_multiprocessors + 1, dtype=torch.int32, device=device
        )
        # Where each cluster begins: the number of a tile, and the first of its keys.
        self._cuts = torch.zeros((2, num_multiprocessors + 1), dtype=torch.int32, device=device)

    @property
    def partial_rows(self) -> int:
        """Partial results that there may be: a cluster begins and ends with at most one tile's."""
        return 2 * CTA_PAIRS * self.num_multiprocessors

    @property
    def partial_bytes(self) -> int:
        """What partial results take, outputs of 2 bytes an element and log-sum-exps of 4."""
        return self.partial_rows * (2 * self.value_dim + 4)

    def ctas(self, shape: StepShape) -> int:
        """CTAs of a cluster: two where a row has more pairs on average than one takes.

        A graph keeps its grid, so this must follow from what is the same in all its steps.

        Args:
            shape (StepShape): Extents of the step.
        """
        rows = min(shape.padded_requests + 1, shape.num_tokens)
        # With 128 heads a tile of one CTA would end between two heads of a query.
        is_large = self.num_query_heads > CTA_PAIRS
        return 2 if is_large or shape.num_tokens * self.num_query_heads > CTA_PAIRS * rows else 1

    def plan_info(self, ctas: int) -> List[int]:
        """Grid, and byte offsets of what the kernels read, in their own order.

        Args:
            ctas (int): CTAs of a cluster.
        """
        works = [array * self.capacity for array in range(8)]
        query_start, first_page, partial, query_length, kv_length, pair, key, end_key = works
        merges = [8 * self.capacity + array * self.num_multiprocessors for array in range(6)]
        *merges, first_work = merges
        arrays = [query_start, first_page, partial, *merges]
        arrays += [query_length, kv_length, pair, key, end_key, first_work]
        return [
            ctas,
            self.num_multiprocessors // ctas,
            *(array * self.works.itemsize for array in arrays),
            0,
            2 * self.partial_rows * self.value_dim,
        ]

    def derive(
        self, shape: StepShape, query_starts: Tensor, query_lengths: Tensor, kv_lengths: Tensor
    ) -> None:
        """See base class."""
        ctas = self.ctas(shape)
        clusters = self.num_multiprocessors // ctas
        tile = ctas * CTA_PAIRS
        warps = min(max(self.rows // 512, 4), 32)
        rows = (query_starts, query_lengths, kv_lengths, shape.num_requests, shape.num_tokens)
        _cuts_kernel[(clusters + 1,)](
            *rows,
            self._cuts,
            self._cuts.stride(0),
            CLUSTERS=clusters,
            TOKENS=tile // self.num_query_heads,
            ROWS=self.rows,
            KEYS=KEY_TILE,
            COST=TILE_COST,
            num_warps=warps,
        )
        _works_kernel[(clusters,)](
            *rows,
            self._cuts,
            self._cuts.stride(0),
            self.works,
            self.capacity,
            self.num_multiprocessors,
            self.max_kv_blocks,
            CLUSTERS=clusters,
            CUTS=triton.next_power_of_2(clusters + 1),
            CTAS=ctas,
            TILE=tile,
            HEADS=self.num_query_heads,
            ROWS=self.rows,
            num_warps=warps,
        )


@triton.jit
def _lengths(
    row, query_starts_ptr, query_lengths_ptr, kv_lengths_ptr, num_rows, num_tokens, TOKENS
):
    # Query tokens, keys and tiles of rows. The row behind the requests is that of padding tokens.
    is_request = row < num_rows
    query_length = tl.load(query_lengths_ptr + row, mask=is_request, other=0)
    kv_length = tl.load(kv_lengths_ptr + row, mask=is_request, other=0)
    query_end = tl.load(query_starts_ptr + num_rows)
    query_length = tl.where(row == num_rows, num_tokens - query_end, query_length)
    return query_length, kv_length, (query_length + TOKENS - 1) // TOKENS


@triton.jit
def _keys_of_tile(tile, query_length, kv_length, TOKENS: tl.constexpr):
    # That its last token sees. Padding tokens see none.
    return tl.maximum(
        kv_length - query_length + tl.minimum((tile + 1) * TOKENS, query_length), 0
    ) * (kv_length > 0).to(tl.int32)


@triton.jit
def _cost_of_tiles(tiles, query_length, kv_length, TOKENS: tl.constexpr, COST: tl.constexpr):
    # Of a row's first tiles. All but a row's last see `TOKENS` keys more than the one before.
    tiles = tiles.to(tl.int64)
    earlier = kv_length - query_length
    more = tl.minimum(tiles * TOKENS, query_length.to(tl.int64)) + tiles * (tiles - 1) // 2 * TOKENS
    return tiles * COST + tl.where(kv_length > 0, tiles * earlier + more, 0)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _cuts_kernel(
    query_starts_ptr,
    query_lengths_ptr,
    kv_lengths_ptr,
    num_rows,
    num_tokens,
    cuts_ptr,
    cuts_stride,
    CLUSTERS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COST: tl.constexpr,
):
    cluster = tl.program_id(0)
    row = tl.arange(0, ROWS)
    query_length, kv_length, tiles = _lengths(
        row, query_starts_ptr, query_lengths_ptr, kv_lengths_ptr, num_rows, num_tokens, TOKENS
    )
    costs = _cost_of_tiles(tiles, query_length, kv_length, TOKENS, COST)
    ends = tl.cumsum(costs, 0)
    # At least a key tile apart, cuts through one tile are at different keys.
    share = (tl.sum(costs) + CLUSTERS * KEYS - 1) // (CLUSTERS * KEYS) * KEYS
    place = cluster * share
    own_row = tl.sum((ends <= place).to(tl.int32))
    is_own = row == own_row
    number = tl.sum(tl.where(row < own_row, tiles, 0))
    key = 0
    if own_row < ROWS:
        place -= tl.sum(tl.where(row < own_row, costs, 0))
        own_query_length = tl.sum(tl.where(is_own, query_length, 0))
        own_kv_length = tl.sum(tl.where(is_own, kv_length, 0))
        own_tiles = tl.sum(tl.where(is_own, tiles, 0))
        # The last tile that begins at or before this place, by bisection.
        tile, beyond = own_tiles * 0, own_tiles
        while beyond - tile > 1:
            middle = (tile + beyond) // 2
            cost = _cost_of_tiles(middle, own_query_length, own_kv_length, TOKENS, COST)
            tile = tl.where(cost <= place, middle, tile)
            beyond = tl.where(cost <= place, beyond, middle)
        place -= _cost_of_tiles(tile, own_query_length, own_kv_length, TOKENS, COST)
        key = (tl.maximum(place - COST, 0) // KEYS * KEYS).to(tl.int32)
        is_done = (key > 0) & (key >= _keys_of_tile(tile, own_query_length, own_kv_length, TOKENS))
        number += tile + is_done.to(tl.int32)
        key = tl.where(is_done, 0, key)
    tl.store(cuts_ptr + cluster, number)
    tl.store(cuts_ptr + cuts_stride + cluster, key)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _works_kernel(
    query_starts_ptr,
    query_lengths_ptr,
    kv_lengths_ptr,
    num_rows,
    num_tokens,
    cuts_ptr,
    cuts_stride,
    works_ptr,
    capacity,
    num_multiprocessors,
    max_kv_blocks,
    CLUSTERS: tl.constexpr,
    CUTS: tl.constexpr,
    CTAS: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    TOKENS: tl.constexpr = TILE // HEADS
    cluster = tl.program_id(0)
    cut = tl.arange(0, CUTS)
    tile_of = tl.load(cuts_ptr + cut, mask=cut <= CLUSTERS, other=0)
    key_of = tl.load(cuts_ptr + cuts_stride + cut, mask=cut <= CLUSTERS, other=0)
    tile_before = tl.load(cuts_ptr + cut - 1, mask=(cut > 0) & (cut <= CLUSTERS), other=-1)
    key_before = tl.load(
        cuts_ptr + cuts_stride + cut - 1, mask=(cut > 0) & (cut <= CLUSTERS), other=0
    )
    is_split = key_of > 0
    is_first = is_split & ((key_before == 0) | (tile_before != tile_of))
    # A tile that is cut n times has n + 1 parts.
    parts = tl.cumsum(is_split.to(tl.int32) + is_first.to(tl.int32), 0)

    first_tile = tl.load(cuts_ptr + cluster)
    first_key = tl.load(cuts_ptr + cuts_stride + cluster)
    last_tile = tl.load(cuts_ptr + cluster + 1)
    last_key = tl.load(cuts_ptr + cuts_stride + cluster + 1)
    first_part = tl.sum(tl.where(cut == cluster, parts, 0)) - 1
    last_part = tl.sum(tl.where(cut == cluster + 1, parts, 0)) - 2

    # Each tile before this cluster's first is a work, and one more wherever it is cut.
    work = first_tile + tl.sum((is_split & (cut <= cluster)).to(tl.int32))
    first_works_ptr = works_ptr + 8 * capacity + 5 * num_multiprocessors
    tl.store(first_works_ptr + cluster, work)
    if cluster == CLUSTERS - 1:
        tl.store(first_works_ptr + CLUSTERS, last_tile + tl.sum(is_split.to(tl.int32)))

    rows = tl.arange(0, ROWS)
    query_length, kv_length, tiles = _lengths(
        rows, query_starts_ptr, query_lengths_ptr, kv_lengths_ptr, num_rows, num_tokens, TOKENS
    )
    row = tl.sum((tl.cumsum(tiles, 0) <= first_tile).to(tl.int32))
    tile = first_tile - tl.sum(tl.where(rows < row, tiles, 0))

    # This cluster's share of merging the tile that it begins in the midst of: some of its pairs.
    own_length = tl.sum(tl.where(rows == row, query_length, 0))
    own_start = tl.load(query_starts_ptr + row, mask=row <= num_rows, other=0)
    is_own = is_split & (tile_of == first_tile)
    num_cuts = tl.sum(is_own.to(tl.int32))
    own_number = tl.sum((is_own & (cut < cluster)).to(tl.int32))
    pairs = tl.minimum((own_length - tile * TOKENS) * HEADS, TILE)
    pairs = tl.where(first_key > 0, pairs, 0)
    sharers = tl.maximum(num_cuts * CTAS, 1)
    share = (pairs + sharers - 1) // sharers
    first_row = (first_part - own_number - 1) * TILE
    for cta in tl.static_range(CTAS):
        begin = tl.minimum((own_number * CTAS + cta) * share, pairs)
        end = tl.minimum(begin + share, pairs)
        pair = own_start * HEADS + tile * TILE
        merge_ptr = works_ptr + 8 * capacity + cluster * CTAS + cta
        tl.store(merge_ptr, pair + begin)
        tl.store(merge_ptr + num_multiprocessors, pair + end)
        tl.store(merge_ptr + 2 * num_multiprocessors, first_row + begin)
        tl.store(merge_ptr + 3 * num_multiprocessors, first_row + num_cuts * TILE + pairs)
        tl.store(merge_ptr + 4 * num_multiprocessors, TILE)

    number = first_tile
    while (number < last_tile) | ((number == last_tile) & (last_key > 0)):
        own_length, own_kv_length, own_tiles = _lengths(
            row, query_starts_ptr, query_lengths_ptr, kv_lengths_ptr, num_rows, num_tokens, TOKENS
        )
        while (tile == own_tiles) & (row < num_rows):
            row += 1
            tile = 0
            own_length, own_kv_length, own_tiles = _lengths(
                row,
                query_starts_ptr,
                query_lengths_ptr,
                kv_lengths_ptr,
                num_rows,
                num_tokens,
                TOKENS,
            )
        is_begun = (number == first_tile) & (first_key > 0)
        is_left = number == last_tile
        key = tl.where(is_begun, first_key, 0)
        end_key = _keys_of_tile(tile, own_length, own_kv_length, TOKENS)
        end_key = tl.where(is_left, last_key, end_key)
        partial = tl.where(is_begun, first_part * TILE, tl.where(is_left, last_part * TILE, -1))
        tl.store(works_ptr + work, tl.load(query_starts_ptr + row))
        tl.store(works_ptr + capacity + work, tl.where(row < num_rows, row * max_kv_blocks, 0))
        tl.store(works_ptr + 2 * capacity + work, partial)
        tl.store(works_ptr + 3 * capacity + work, own_length)
        tl.store(works_ptr + 4 * capacity + work, own_kv_length)
        tl.store(works_ptr + 5 * capacity + work, tile * TILE)
        tl.store(works_ptr + 6 * capacity + work, key)
        tl.store(works_ptr + 7 * capacity + work, end_key)
        tile += 1
        number += 1
        work += 1
