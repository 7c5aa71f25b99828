"""The plan of FlashInfer's multi-latent attention, as it lies in the int workspace.

The kernel looks at nothing else to find its rows and keys. Its grid is of clusters of one or two
thread blocks, of which each has a stretch of the works. A work of some of its rows' keys leaves
partial results in the float workspace; when all works are done, each thread block merges a few rows
of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from flashinfer_on_cpu.works import read_array

TILE = 64
"""Pairs of query and head that a thread block takes, and keys that it takes at a time."""
ROW_BYTES = 2 * 512
"""Of a partial output."""
_ROOM = 16384
"""Works that each array has room for."""
_NUMBERS = 18
"""Of a plan: the grid, then places in bytes, of 14 int32 arrays and of two kinds of results."""


class Work(NamedTuple):
    """A tile of one request's pairs of query and head, and a stretch of the request's keys."""

    query_start: int
    """Row of the request's first query."""

    page_start: int
    """Place of the request's first page id."""

    partial_start: int
    """Row of the first pair's partial result; -1: results are whole, and are the output."""

    queries: int
    """Of the request; `keys` likewise."""

    keys: int
    pair: int
    """The first, where the request's first is 0 and heads of a query lie together."""

    key_start: int
    key_end: int


class Merge(NamedTuple):
    """Rows that a thread block merges."""

    start: int
    """First pair, counted over all queries."""

    end: int
    partial_start: int
    """Row of the first pair's first partial result; the second is `stride` rows on."""

    partial_end: int
    """Where the partial results of these pairs end."""

    stride: int


@dataclass(frozen=True)
class Plan:
    """What a grid is to do."""

    ctas: int
    """Thread blocks of a cluster."""

    dealt: Sequence[Sequence[Work]]
    """The works of each cluster."""

    merges: Sequence[Merge]
    """At most one a thread block."""

    @property
    def works(self) -> list[Work]:
        """The works of all clusters."""
        return [work for part in self.dealt for work in part]

    @property
    def tile(self) -> int:
        """Pairs of a work."""
        return self.ctas * TILE

    @property
    def partial_rows(self) -> int:
        """Those that the float workspace has to have room for."""
        return 2 * len(self.dealt) * self.tile


def make(
    query_starts: Sequence[int],
    page_starts: Sequence[int],
    key_lengths: Sequence[int],
    *,
    num_heads: int,
    causal: bool,
    multiprocessors: int,
) -> Plan:
    """The plan of a batch: all tiles of all requests, keys split so that no cluster is idle.

    Args:
        query_starts: Where each request's queries start, and where the last one's end.
        page_starts: Likewise for its page ids.
    """
    lengths = [end - start for start, end in zip(query_starts[:-1], query_starts[1:], strict=True)]
    ctas = 2 if num_heads * sum(lengths) // len(lengths) > TILE else 1
    tile, clusters = ctas * TILE, multiprocessors // ctas
    tiles = []
    for request, (queries, keys) in enumerate(zip(lengths, key_lengths, strict=True)):
        place = query_starts[request], page_starts[request], -1, queries, keys
        pairs = queries * num_heads
        for pair in reversed(range(0, pairs, tile)):
            end = keys
            if causal and pair + tile < pairs:
                end = max(min(keys - queries + math.ceil((pair + tile) / num_heads), keys), 0)
            tiles.append(Work(*place, pair, 0, end))

    most = _most_keys(math.ceil(sum(whole.key_end for whole in tiles) / clusters))
    dealt: list[list[Work]] = [[] for _ in range(clusters)]
    costs = [(0, cluster) for cluster in range(clusters)]
    merges: list[Merge] = []
    row = 0
    for whole in tiles:
        rows = min(tile, whole.queries * num_heads - whole.pair)
        starts = range(0, max(whole.key_end, 1), most)
        is_split = len(starts) > 1
        for number, start in enumerate(starts):
            end = min(start + most, whole.key_end)
            cost, cluster = costs[0]
            heapq.heapreplace(costs, (cost + 2 * tile + end - start, cluster))
            partial = row + number * rows if is_split else -1
            work = whole._replace(partial_start=partial, key_start=start, key_end=end)
            dealt[cluster].append(work)
        if is_split:
            first = whole.query_start * num_heads + whole.pair
            partial_end = row + len(starts) * rows
            share = math.ceil(rows / (whole.key_end * ctas // most))
            for offset in range(0, rows, share):
                last = first + min(offset + share, rows)
                merges.append(Merge(first + offset, last, row + offset, partial_end, rows))
            row = partial_end
    return Plan(ctas, dealt, merges)


def _most_keys(share: int) -> int:
    """Keys that a work may have where a cluster's share of all is `share`."""
    for bound, most in ((8, 32), (16, 64), (32, 128), (64, 192)):
        if share <= bound:
            return most
    return math.ceil(share / 256) * 256


def write(workspace: Tensor, plan: Plan, *, multiprocessors: int) -> tuple[list[int], int]:
    """Put a plan into the workspace.

    Args:
        workspace: uint8 `(bytes,)`.

    Returns:
        The numbers that the kernel is handed, partial results at the float workspace's start; and
        the bytes that the arrays take.

    Raises:
        ValueError: there are too many works or merges, or the workspace is too small.
    """
    batch = plan.works
    if len(batch) > _ROOM or len(plan.merges) > multiprocessors:
        raise ValueError(f'{len(batch)} works, more than {_ROOM}, or {len(plan.merges)} merges')
    of_works = list(zip(*batch, strict=True)) or [()] * 8
    idle = [Merge(0, 0, 0, 0, 0)] * (multiprocessors - len(plan.merges))
    of_merges = zip(*plan.merges, *idle, strict=True)
    stretches = [0, *accumulate(map(len, plan.dealt))]
    arrays = [*of_works[:3], *of_merges, *of_works[3:], stretches]
    places, end = [], 0
    for number, values in enumerate(arrays):
        places.append(math.ceil(end / 16) * 16)
        end = places[-1] + 4 * (multiprocessors if 3 <= number < 8 else _ROOM)
        if end > workspace.numel():
            raise ValueError(f'an int workspace of {workspace.numel()} bytes is too small')
        workspace[places[-1] : places[-1] + 4 * len(values)].view(torch.int32).copy_(
            torch.tensor(values, dtype=torch.int32)
        )
    return [plan.ctas, len(plan.dealt), *places, 0, ROW_BYTES * plan.partial_rows], end


def read(workspace: Tensor, numbers: Sequence[int], *, multiprocessors: int) -> Plan:
    """The plan that a grid finds.

    Args:
        workspace: uint8 `(bytes,)`.
        numbers: As `write` gives them.

    Raises:
        IndexError: an array reaches beyond the workspace, or begins before it.
        ValueError: the grid is none that the kernel is launched with.
    """
    if len(numbers) != _NUMBERS:
        raise ValueError(f'a plan of {len(numbers)} numbers')
    ctas, clusters = numbers[:2]
    if ctas not in (1, 2) or not 0 < ctas * clusters <= multiprocessors:
        raise ValueError(f'a grid of {clusters} clusters of {ctas}')
    starts = read_array(workspace, numbers[15], clusters + 1)
    stretches = [(start, end) for start, end in zip(starts[:-1], starts[1:], strict=True)]
    if any(start < 0 and start < end for start, end in stretches):
        raise IndexError(f'works {stretches}')
    count = max((end for start, end in stretches if start < end), default=0)
    fields = [
        read_array(workspace, place, count) for place in (*numbers[2:5], *numbers[10:15]) if count
    ]
    batch = [Work(*values) for values in zip(*fields, strict=True)]
    merges = [read_array(workspace, place, ctas * clusters) for place in numbers[5:10]]
    return Plan(
        ctas,
        [batch[start:end] if start < end else [] for start, end in stretches],
        [
            merge
            for merge in map(Merge._make, zip(*merges, strict=True))
            if merge.start != merge.end
        ],
    )
