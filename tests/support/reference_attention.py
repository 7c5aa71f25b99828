"""Attention over a paged KV cache in plain torch: slow, in float32, and nothing but the definition.

It is what the stand-ins for FlashAttention and FlashMLA compute, and what kernels are compared
with. Keys are read through the block table and nowhere else, and never past a request's length, so
that a wrong table, length or window gives a wrong result here as it does in a kernel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Keys before and after a query's own position that it sees; negative: all of them.
Window = tuple[int, int]
NO_WINDOW: Window = (-1, -1)


def gather_paged(cache: Tensor, block_ids: Tensor, length: int) -> Tensor:
    """The first `length` tokens of one request.

    Args:
        cache: `(blocks, block_size, ...)`.
        block_ids: The request's row of the block table, integers `(blocks of a request or more,)`.
            Entries beyond those that `length` needs are not looked at.
        length: Tokens that the request has in the cache.

    Returns:
        `(length, ...)`, a copy.

    Raises:
        IndexError: a block that `length` needs is not in the cache, as -1 is not.
    """
    needed = block_ids[: math.ceil(length / cache.shape[1])].long()
    if needed.numel() * cache.shape[1] < length:
        raise IndexError(f'{length} tokens do not fit in {needed.numel()} blocks')
    if needed.numel() and not 0 <= int(needed.min()) <= int(needed.max()) < cache.shape[0]:
        raise IndexError(f'block table {needed.tolist()} for a cache of {cache.shape[0]} blocks')
    return cache[needed].flatten(0, 1)[:length]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: Window = NO_WINDOW,
    first_position: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of one request.

    Args:
        query: `(queries, heads, dim)`.
        key: `(keys, kv_heads, dim)`; `heads` is a multiple of `kv_heads`.
        value: `(keys, kv_heads, value_dim)`.
        scale: Factor of the scores.
        causal: Whether a query sees no later key.
        window: With the query at position `i`, keys `i - left` to `i + right` are seen, both ends
            included.
        first_position: Position of the first query among the keys, which may be before the first or
            behind the last; None: the last query is at the last key.

    Returns:
        The output in the query's dtype, `(queries, heads, value_dim)`, zero where no key is seen;
        and the natural log-sum-exp of the scaled scores, float32 `(heads, queries)`, minus infinity
        there.
    """
    num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads, _ = key.shape
    # (kv_heads, group, queries, dim) and (kv_heads, 1, keys, dim): head h reads KV head h // group.
    grouped = query.float().unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
    scores = grouped.permute(1, 2, 0, 3) @ key.float().permute(1, 2, 0).unsqueeze(1) * scale

    if first_position is None:
        first_position = num_keys - num_queries
    position = torch.arange(num_queries, device=query.device)[:, None] + first_position
    distance = torch.arange(num_keys, device=query.device)[None, :] - position
    left, right = window
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance <= 0
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right

    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(~seen, 0)
    output = weights @ value.float().permute(1, 0, 2).unsqueeze(1)
    return (output.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype), lse.flatten(0, 1))


def attend_paged(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    query_starts: Tensor,
    key_lengths: Tensor,
    block_table: Tensor,
    scale: float,
    causal: bool = True,
    window: Window = NO_WINDOW,
) -> tuple[Tensor, Tensor]:
    """`attend` for each request of a packed batch, on a paged cache.

    Args:
        query: `(tokens, heads, dim)`, request after request.
        key_cache: `(blocks, block_size, kv_heads, dim)`.
        value_cache: `(blocks, block_size, kv_heads, value_dim)`.
        query_starts: Where each request's queries start, and where the last one's end; integers
            `(requests + 1,)`.
        key_lengths: Keys of each request, integers `(requests,)`.
        block_table: Integers `(requests, blocks of a request)`.

    Returns:
        As `attend`: `(tokens, heads, value_dim)`, `(heads, tokens)`. Rows of no request, and those
        of a request without keys, are zero.
    """
    output = query.new_zeros(*query.shape[:2], value_cache.shape[-1])
    lse = query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)
    starts, lengths = query_starts.tolist(), key_lengths.tolist()
    for request, length in enumerate(lengths):
        rows = slice(starts[request], starts[request + 1])
        if rows.start < rows.stop and length:
            output[rows], lse[:, rows] = attend(
                query[rows],
                gather_paged(key_cache, block_table[request], length),
                gather_paged(value_cache, block_table[request], length),
                scale=scale,
                causal=causal,
                window=window,
            )
    return output, lse


def attend_paged_without_sync(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    query_starts: Tensor,
    key_lengths: Tensor,
    block_table: Tensor,
    scale: float,
    causal: bool = True,
    window: Window = NO_WINDOW,
) -> tuple[Tensor, Tensor]:
    """`attend_paged` by operations on the device alone, so that a CUDA graph can capture it.

    It looks at every place of the block table for every query, which suits tiny caches. A block
    that is needed and is not in the cache gives NaN.
    """
    token = torch.arange(query.shape[0], device=query.device)
    request = torch.searchsorted(query_starts[1:].contiguous(), token, right=True)
    is_real = request < len(key_lengths)
    request = request.clamp(max=len(key_lengths) - 1)
    length = key_lengths[request]
    position = token - query_starts[1:][request] + length

    # (queries, keys), each query with the keys of its request.
    table = block_table.long()
    key_at = torch.arange(table.shape[1] * key_cache.shape[1], device=query.device)
    distance = key_at - position[:, None]
    seen = is_real[:, None] & (key_at < length[:, None])
    left, right = window
    if causal:
        seen &= distance <= 0
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right

    def gathered(cache: Tensor) -> Tensor:
        tokens = cache[table.clamp(0, cache.shape[0] - 1)].float()
        missing = (table < 0) | (table >= cache.shape[0])
        tokens = tokens.masked_fill(missing[:, :, None, None, None], math.nan)
        tokens = tokens.flatten(1, 2)[request]
        return torch.where(seen[:, :, None, None], tokens, 0)

    group = query.shape[1] // key_cache.shape[2]
    key, value = (gathered(cache).repeat_interleave(group, 2) for cache in (key_cache, value_cache))
    scores = torch.einsum('qhd,qkhd->hqk', query.float(), key) * scale
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(~seen, 0)
    output = torch.einsum('hqk,qkhd->qhd', weights, value)
    # The rows of no request are zero in `attend_paged`, those of one without keys likewise.
    lse = lse.masked_fill(~(is_real & (length > 0)), 0)
    return output.to(query.dtype), lse
