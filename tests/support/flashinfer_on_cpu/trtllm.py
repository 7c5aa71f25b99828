"""What the stand-ins for Blackwell's decode and prefill kernels have in common."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import reference_attention
from flashinfer_on_cpu.paged import (
    PagedCache,
    gather,
    keys_and_values,
    require,
    require_like,
    use_as_scratch,
    with_sinks,
)


def attend(
    query: Tensor,
    kv_cache: PagedCache,
    workspace: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    max_query_len: int,
    max_key_len: int,
    scale: float,
    value_scale: float,
    window_left: int,
    out: Tensor | None,
    layout: str,
    sinks: Tensor | None,
    counters: Tensor | None,
    causal: bool = True,
) -> Tensor:
    """Attention of packed queries on a paged cache.

    Args:
        query: float16 or bfloat16 `(tokens, heads, dim)`, request after request.
        block_tables: int32 `(requests, pages of a request)`.
        seq_lens: Keys of each request, int32 or uint32 `(requests,)`. Queries of a request without
            keys get NaN, as what the kernel leaves there is not known.
        query_starts: int32 `(requests + 1,)`. Rows of no request stay as they are.
        max_query_len: At least the queries of each request, as the kernel's grid has it.
        max_key_len: Likewise for keys.
        sinks: float32 `(heads,)`.
        counters: All zero before and after.

    Returns:
        `out`, or without one a new tensor.
    """
    require(torch.cuda.get_device_capability()[0] == 10, 'trtllm-gen is for SM 10.x')
    num_requests, num_heads = len(seq_lens), query.shape[1]
    require(query.dtype in (torch.float16, torch.bfloat16), f'queries of {query.dtype}')
    out = torch.empty_like(query) if out is None else out
    for tensor, name in ((query, 'query'), (out, 'out')):
        require_like(tensor, name, tuple(query.shape), query.dtype)
    require(seq_lens.dtype in (torch.int32, torch.uint32), f'seq_lens of {seq_lens.dtype}')
    require_like(seq_lens, 'seq_lens', (num_requests,), seq_lens.dtype)
    shape = num_requests, *block_tables.shape[1:2]
    require_like(block_tables, 'block_tables', shape, torch.int32)
    require_like(query_starts, 'cum_seq_lens_q', (num_requests + 1,), torch.int32)
    require(counters is None or not counters.any(), 'counters are not zero')
    if sinks is not None:
        require_like(sinks, 'sinks', (num_heads,), torch.float32)
    cache = keys_and_values(kv_cache, layout)
    require(cache[0].shape == cache[1].shape, 'keys and values must have the same shape')
    require(cache[0].dtype == cache[1].dtype == query.dtype, 'cache and queries differ in dtype')

    starts = query_starts.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        require(rows.stop - rows.start <= max_query_len, 'a request has more than max_q_len')
        require(length <= max_key_len, f'{length} keys, more than the {max_key_len} announced')
        require(0 <= rows.start <= rows.stop <= len(query), 'rows that are not in the queries')
        if length == 0:
            out[rows] = math.nan
            continue
        keys, values = gather(cache, block_tables[request], length)
        result, lse = reference_attention.attend(
            query[rows].float(), keys, values, scale=scale, causal=causal, window=(window_left, -1)
        )
        out[rows] = (with_sinks(result, lse, sinks) * value_scale).to(out.dtype)
    use_as_scratch(workspace)
    return out
