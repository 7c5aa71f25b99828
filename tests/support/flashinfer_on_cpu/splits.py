"""The plan of FlashInfer's prefill kernel for Ampere and later, as it lies in the int workspace.

Its grid has a thread block for each work and KV head. A work is a tile of one request's pairs of
query and head, heads of a group next to each other, and a chunk of the request's keys. If keys are
split, works leave partial results in the float workspace, and a second kernel merges those of each
query; if not, they write the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from flashinfer_on_cpu.works import read_array
from reference_attention import attend

_NUMBERS = 15
"""Of a plan: extents, places in bytes, and two flags."""
_LEAST_KEYS = 128
"""Of a chunk."""


class Work(NamedTuple):
    """What a thread block computes for a KV head."""

    request: int
    tile: int
    chunk: int


@dataclass(frozen=True)
class Plan:
    """What a grid is to do."""

    tile: int
    """Pairs of a work."""

    works: Sequence[Work]
    chunk_keys: int
    partial_starts: Sequence[int]
    """Row of each request's first partial result, or of its output."""

    merge_starts: Sequence[int]
    """Row of each query's first partial result, and where the last one's end."""

    is_split: bool
    """Whether keys are split, and partial results merged."""


def make(
    query_starts: Sequence[int],
    key_lengths: Sequence[int],
    *,
    group: int,
    num_kv_heads: int,
    dim: int,
    page_size: int,
    window_left: int,
    multiprocessors: int,
    may_split: bool,
    most_queries: int | None,
) -> tuple[Plan, int]:
    """The plan of a batch, and how many works the grid has room for.

    Args:
        query_starts: Where each request's queries start, and where the last one's end.
        group: Query heads of a KV head.
        may_split: Whether keys may be split.
        most_queries: Of all batches that the grid is for; None: it is for this one.
    """
    queries = [end - start for start, end in zip(query_starts[:-1], query_starts[1:], strict=True)]
    count, at_once = len(queries), 2 * multiprocessors // num_kv_heads
    longest = sum(queries) // count if most_queries is None else most_queries - count + 1
    tile = tile_size(longest * group, dim)
    tiles = [math.ceil(length * group / tile) for length in queries]
    # Whole pages, as many as a tile sees, and at least one.
    pages = [math.ceil(keys / page_size) for keys in key_lengths]
    if window_left >= 0:
        pages = [min(each, math.ceil((window_left + tile) / page_size)) for each in pages]
    pages = [max(each, 1) for each in pages]

    def works_by(chunk: int) -> int:
        return sum(t * math.ceil(each / chunk) for t, each in zip(tiles, pages, strict=True))

    least = max(_LEAST_KEYS // page_size, 1) if may_split else max(pages)
    chunk = next((c for c in range(least, max(pages)) if works_by(c) <= at_once), max(pages))
    chunks = [math.ceil(each / chunk) for each in pages]
    works = [
        Work(request, number, part)
        for request in range(count)
        for number in range(tiles[request])
        for part in range(chunks[request])
    ]
    of_queries = [n for n, length in zip(chunks, queries, strict=True) for _ in range(length)]
    of_requests = [n * length for n, length in zip(chunks, queries, strict=True)]
    room = len(works)
    if most_queries is not None:
        room = max(at_once, math.ceil(most_queries * group / tile) + count - 1)
    is_split = may_split and (most_queries is not None or max(chunks) > 1)
    partials, merges = ([0, *accumulate(counts)] for counts in (of_requests, of_queries))
    return Plan(tile, works, chunk * page_size, partials, merges, is_split), room


def tile_size(pairs: int, dim: int) -> int:
    """Pairs of a tile, where a request has so many."""
    if pairs <= 16:
        return 16
    return 64 if pairs <= 64 or dim >= 256 else 128


def write(
    workspace: Tensor,
    float_workspace: Tensor,
    plan: Plan,
    *,
    room: int,
    num_heads: int,
    dim: int,
    most_queries: int | None,
) -> list[int]:
    """Put a plan into the workspace.

    Args:
        workspace: uint8 `(bytes,)`, as is the one of partial results.
        room: Works that the grid has room for.
        dim: Elements of a head's output.

    Returns:
        The numbers that the kernel is handed.

    Raises:
        ValueError: there are too many works, or a workspace is too small.
    """
    if len(plan.works) > room:
        raise ValueError(f'{len(plan.works)} works where there is room for {room}')
    end = 0

    def put(values: Sequence[int], length: int, dtype: torch.dtype = torch.int32) -> int:
        nonlocal end
        start = math.ceil(end / 16) * 16
        end = start + length * dtype.itemsize
        if end > workspace.numel():
            raise ValueError(f'an int workspace of {workspace.numel()} bytes is too small')
        part = workspace[start : start + len(values) * dtype.itemsize]
        part.view(dtype).copy_(torch.tensor(values, dtype=dtype))
        return start

    num_queries = len(plan.merge_starts) - 1
    rows = num_queries if most_queries is None else most_queries
    requests, tiles, chunks = (
        put([work[field] for work in plan.works], room) for field in range(3)
    )
    partial_starts = put(plan.partial_starts, len(plan.partial_starts))
    chunk_keys, counted = put([plan.chunk_keys], 1), put([num_queries], 1)
    merges, valid, sums = 0, 0, 0
    if plan.is_split:
        merges = put(plan.merge_starts, rows + 1)
        valid = put([1] * len(plan.works) + [0] * (room - len(plan.works)), room, torch.uint8)
        pairs = num_heads * room * plan.tile
        sums = 4 * pairs * dim
        if sums + 4 * pairs > float_workspace.numel():
            raise ValueError(f'a workspace of {float_workspace.numel()} bytes is too small')
    numbers = [room, rows, counted, plan.tile, requests, tiles, chunks, merges, partial_starts]
    is_for_all = most_queries is not None
    return [*numbers, chunk_keys, 0, sums, valid, int(is_for_all), int(plan.is_split)]


def read(workspace: Tensor, numbers: Sequence[int]) -> Plan:
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
    room, rows, counted, tile, *places = numbers[:10]
    valid, is_for_all, is_split = numbers[12:]
    if tile not in (16, 64, 128):
        raise ValueError(f'a tile of {tile} pairs')
    requests, tiles, chunks, merges, partial_starts, chunk_keys = places
    fields = [read_array(workspace, place, room) for place in (requests, tiles, chunks)]
    works = [Work(*values) for values in zip(*fields, strict=True)]
    merge_starts: list[int] = []
    if is_split:
        if is_for_all:
            rows = read_array(workspace, counted, 1)[0]
            flags = workspace[valid : valid + room].tolist()
            works = [work for work, flag in zip(works, flags, strict=True) if flag]
        merge_starts = read_array(workspace, merges, rows + 1)
    count = max((work.request for work in works), default=-1) + 1
    length = read_array(workspace, chunk_keys, 1)[0]
    if is_split and length <= 0:
        raise ValueError(f'chunks of {length} keys')
    return Plan(
        tile,
        works,
        length,
        read_array(workspace, partial_starts, count),
        merge_starts,
        bool(is_split),
    )


def partial_results(
    workspace: Tensor, numbers: Sequence[int], num_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Room for partial outputs, `(rows, heads, dim)`, and log-sum-exps, float32 `(rows, heads)`."""
    outputs, sums = numbers[10:12]
    row = num_heads * dim * dtype.itemsize
    rows = min((sums - outputs) // row, (workspace.numel() - sums) // (4 * num_heads))
    output = workspace[outputs : outputs + rows * row].view(dtype)
    lse = workspace[sums : sums + rows * num_heads * 4].view(torch.float32)
    return output.view(rows, num_heads, dim), lse.view(rows, num_heads)


def work_through(
    plan: Plan,
    query: Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    keys_of: Callable[[int, int, int], tuple[Tensor, Tensor]],
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool,
    window_left: int,
) -> Tensor:
    """The first of the two kernels.

    Args:
        query: `(queries, heads, dim)`.
        starts: Where each request's queries start, and where the last one's end.
        lengths: Keys of each request.
        keys_of: A request's keys and values from one position to another, float32 `(keys, kv_heads,
            dim)`.
        out: Where results go, partial or not, `(rows, heads, dim)`.
        lse: To base 2, float32 `(rows, heads)`.

    Returns:
        Which rows and heads were written.
    """
    written = torch.zeros(out.shape[:2], dtype=torch.bool)
    for work in plan.works:
        request, tile, chunk = work
        if not (0 <= request < len(lengths) and tile >= 0 <= chunk):
            raise IndexError(f'{work} of {len(lengths)} requests')
        (start, end), keys = starts[request : request + 2], lengths[request]
        if not 0 <= start <= end <= len(query):
            raise IndexError(f'{work}: queries {start} to {end} of {len(query)}')
        queries = end - start
        window = window_left if window_left >= 0 else keys
        num_heads = query.shape[1]
        group = num_heads // keys_of(request, 0, 0)[0].shape[1]
        first_pair = tile * plan.tile
        end_pair = min(first_pair + plan.tile, queries * group)
        if first_pair >= end_pair:
            continue
        first_key, stride = max(keys + first_pair // group - queries - window, 0), 1
        key_range = first_key, keys
        if plan.is_split:
            stride = math.ceil(min(max(keys, 1), window + plan.tile) / plan.chunk_keys)
            key_range = (
                min(first_key + chunk * plan.chunk_keys, keys),
                min(first_key + (chunk + 1) * plan.chunk_keys, keys),
            )
        tokens = torch.arange(first_pair // group, math.ceil(end_pair / group))
        result, result_lse = attend(
            query[start + tokens].float(),
            *keys_of(request, *key_range),
            scale=scale,
            causal=causal,
            window=(window_left, -1),
            first_position=keys - queries + int(tokens[0]) - key_range[0],
        )
        pair = tokens[:, None] * group + torch.arange(num_heads) % group
        token, head = ((pair >= first_pair) & (pair < end_pair)).nonzero(as_tuple=True)
        row = plan.partial_starts[request] + tokens[token] * stride + chunk * (stride > 1)
        if int(row.min()) < 0 or int(row.max()) >= len(out):
            raise IndexError(f'{work}: results {int(row.min())} to {int(row.max())} of {len(out)}')
        if plan.is_split and written[row, head].any():
            raise ValueError(f'{work} is of results that another work leaves')
        written[row, head] = True
        out[row, head] = result[token, head].to(out.dtype)
        lse[row, head] = result_lse.T[token, head] / math.log(2)
    return written


def merge(
    starts: Sequence[int], partial: Tensor, partial_lse: Tensor, written: Tensor
) -> tuple[Tensor, Tensor]:
    """The second: output and log-sum-exp of each query, zero and minus infinity where it has none.

    Args:
        starts: Row of each query's first partial result, and where the last one's end.
        written: Rows and heads that there are results of.

    Raises:
        IndexError: results are none that there is room for.
        ValueError: a result is missing.
    """
    if list(starts) != sorted(starts) or not 0 <= starts[0] <= starts[-1] <= len(partial):
        raise IndexError(f'results {starts[0]} to {starts[-1]} of {len(partial)}')
    first = torch.tensor(starts)
    count = max(first.diff().tolist(), default=0)
    rows = first[:-1, None] + torch.arange(max(count, 1))
    is_one = rows < first[1:, None]
    if not written[rows[is_one]].all():
        raise ValueError('a result that is merged was not computed')
    rows = rows.where(is_one, 0)
    lse = partial_lse[rows].masked_fill(~is_one.unsqueeze(-1), -math.inf)
    whole = torch.logsumexp(lse * math.log(2), 1)
    share = torch.exp(lse * math.log(2) - whole.unsqueeze(1)).nan_to_num(0)
    values = partial[rows].float().masked_fill(share.unsqueeze(-1) == 0, 0)
    return (share.unsqueeze(-1) * values).sum(1), whole / math.log(2)
