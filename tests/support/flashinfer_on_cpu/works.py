"""The work list of FlashInfer's Hopper prefill kernel, as it lies in the int workspace.

The kernel looks at nothing else to find its rows and keys: a grid of one thread block a
multiprocessor, of which each has a stretch of the list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Work:
    """A tile of one request's queries, for one query head or for all."""

    tile: int
    query_start: int
    """Row of the request's first query."""

    page_start: int
    """Place of the request's first page id."""

    queries: int
    """Of the request, of which `tile` is a part."""

    keys: int
    head: int
    request: int

    def rows(self, size: int) -> slice:
        """Its queries, counted from the request's first, with tiles of `size`."""
        start = min(self.tile * size, self.queries)
        return slice(start, min(start + size, self.queries))


def tile_size(value_dim: int) -> int:
    """Queries that one work takes."""
    return 192 if value_dim == 64 else 128


def make(
    query_starts: Sequence[int],
    page_starts: Sequence[int],
    key_lengths: Sequence[int],
    *,
    num_heads: int,
    tile: int,
    all_heads: bool,
) -> list[Work]:
    """The works of a batch: every tile of every request for every head.

    Args:
        query_starts: Where each request's queries start, and where the last one's end.
        page_starts: Likewise for its page ids.
        all_heads: Whether one work is for all heads.
    """
    return [
        Work(number, start, page_starts[request], end - start, keys, head, request)
        for head in range(1 if all_heads else num_heads)
        for request, (start, end, keys) in enumerate(
            zip(query_starts[:-1], query_starts[1:], key_lengths, strict=True)
        )
        for number in range(math.ceil((end - start) / tile))
    ]


def write(
    workspace: Tensor, works: Sequence[Work], *, ctas: int, room: int, all_heads: bool
) -> list[int]:
    """Put a list into the workspace, works dealt out in turn.

    Args:
        workspace: uint8 `(bytes,)`.
        ctas: Thread blocks of the grid.
        room: Works that there is to be room for, so that the places depend on it alone.

    Returns:
        The plan: where each array starts, in bytes, and whether a work is for all heads.

    Raises:
        ValueError: the workspace or the room is too small.
    """
    if len(works) > room:
        raise ValueError(f'{len(works)} works where there is room for {room}')
    dealt = [works[cta::ctas] for cta in range(ctas)]
    fields = list(zip(*(astuple(work) for part in dealt for work in part), strict=True))
    tiles, rows, pages, queries, keys, heads, requests = fields or [()] * 7
    stretches = [0, *accumulate(map(len, dealt))]
    arrays = (tiles, rows, pages, queries, keys, heads, stretches, requests)
    plan, offset = [], 0
    for number, values in enumerate(arrays):
        size = 4 * (ctas + 1 if number == 6 else room)
        if offset + size > workspace.numel():
            raise ValueError(f'an int workspace of {workspace.numel()} bytes is too small')
        workspace[offset : offset + 4 * len(values)].view(torch.int32).copy_(
            torch.tensor(values, dtype=torch.int32)
        )
        plan.append(offset)
        offset += math.ceil(size / 16) * 16
    return [*plan, int(all_heads)]


def read(workspace: Tensor, plan: Sequence[int], *, ctas: int) -> list[Work]:
    """The list that a grid of `ctas` thread blocks works through.

    Args:
        workspace: uint8 `(bytes,)`.
        plan: As `write` gives it.

    Raises:
        IndexError: an array reaches beyond the workspace, or begins before it.
    """
    stretches = read_array(workspace, plan[6], ctas + 1)
    numbers = [
        number for cta in range(ctas) for number in range(stretches[cta], stretches[cta + 1])
    ]
    if not numbers:
        return []
    if min(numbers) < 0:
        raise IndexError(f'work {min(numbers)}')
    places = (*plan[:6], plan[7])
    arrays = [read_array(workspace, place, max(numbers) + 1) for place in places]
    return [Work(*(array[number] for array in arrays)) for number in numbers]


def read_array(workspace: Tensor, offset: int, count: int) -> list[int]:
    """`count` numbers, int32, from byte `offset` on.

    Raises:
        IndexError: they are not all in the workspace, or not aligned.
    """
    part = workspace[offset : offset + 4 * count]
    if offset < 0 or offset % 4 or part.numel() != 4 * count:
        raise IndexError(f'{count} numbers at byte {offset} of {workspace.numel()}')
    return part.view(torch.int32).tolist()
