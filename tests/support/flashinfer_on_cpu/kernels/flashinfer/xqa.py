"""Stand-in for the decode kernel of Hopper, which needs no plan."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashinfer_on_cpu.calls import stands_in
from flashinfer_on_cpu.paged import (
    gather,
    keys_and_values,
    require,
    require_like,
    use_as_scratch,
    with_sinks,
)
from reference_attention import attend


@stands_in('q_cu_seq_lens', 'k_sf_cache', 'v_sf_cache', 'rcp_out_scale')
def xqa(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Tensor,
    semaphores: Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: Tensor | None = None,
    q_scale: float | Tensor = 1.0,
    kv_scale: float | Tensor = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = 'NHD',
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: Tensor | None = None,
    *,
    q_cu_seq_lens: Tensor | None = None,
    k_sf_cache: Tensor | None = None,
    v_sf_cache: Tensor | None = None,
) -> None:
    """Attention of each request's last `q_seq_len` tokens, into `output`.

    Args:
        q: float16 or bfloat16, `(requests, 1, heads, dim)`, or
            `(requests, 1, q_seq_len, heads, dim)`.
        k_cache: `(pages, page_size, kv_heads, dim)` in NHD.
        page_table: int32 `(requests, pages of a request)`; -1 where a length needs none.
        seq_lens: uint32 `(requests, 1)`. A request of length 0 gets NaN without sinks, else zeros.
        output: As `q`.
        semaphores: uint32, all zero before and after.
        sinks: float32, one a head, `(kv_heads, heads / kv_heads)`. With several queries a row of a
            query and a head takes the sink that is the row's in its tile of 32, as the kernel does.
        q_scale: Factor of the scores, beside `dim**-0.5`.
        sliding_win_size: Keys that a query sees, its own included; 0: all.
        mask: For `q_seq_len > 1`, uint16 `(requests, q_seq_len, 2 * ceil(q_seq_len / 32))`: bit
            `j % 16` of word `j // 16` says whether a query sees the `j`-th of the last `q_seq_len`
            tokens.
    """
    require(torch.cuda.get_device_capability()[0] in (9, 10, 12), 'xqa is for SM 9.0, 10.x, 12.x')
    require(q.ndim in (4, 5) and q.shape[1] == 1, f'q is {tuple(q.shape)}')
    require(q.ndim == 5 or q_seq_len == 1, 'several queries a request need five dimensions')
    num_requests = len(q)
    num_heads, dim = q.shape[-2:]
    require(q.numel() == num_requests * q_seq_len * num_heads * dim, f'q is {tuple(q.shape)}')
    require(q.dtype in (torch.float16, torch.bfloat16), f'queries of {q.dtype}')
    require(page_size in (16, 32, 64, 128), f'pages of {page_size} tokens')
    require(dim % 16 == 0 and 16 <= dim <= 256, f'head dim {dim}')
    for tensor, name in ((q, 'q'), (output, 'output')):
        require_like(tensor, name, tuple(q.shape), q.dtype)
    require_like(page_table, 'page_table', (num_requests, *page_table.shape[1:2]), torch.int32)
    require_like(seq_lens, 'seq_lens', (num_requests, 1), torch.uint32)
    require_like(semaphores, 'semaphores', (semaphores.numel(),), torch.uint32)
    require(semaphores.numel() >= num_requests * num_kv_heads, 'too few semaphores')
    require(not semaphores.view(torch.int32).any(), 'semaphores are not zero')
    if sinks is not None:
        require_like(sinks, 'sinks', (num_kv_heads, num_heads // num_kv_heads), torch.float32)

    cache = keys_and_values((k_cache, v_cache), kv_layout)
    for part in cache:
        require(part.dtype == q.dtype, f'a cache of {part.dtype} for queries of {q.dtype}')
        require(
            part.shape[1:] == (page_size, num_kv_heads, dim),
            f'a cache of {tuple(part.shape)} for {page_size} tokens, {num_kv_heads} heads, {dim}',
        )
    require(cache[0].stride() == cache[1].stride(), 'keys and values must have the same strides')

    queries = q.reshape(num_requests, q_seq_len, num_heads, dim).float()
    results = torch.full_like(queries, math.nan if sinks is None else 0)
    visible = _visible(mask, num_requests, q_seq_len)
    scale = float(q_scale) * float(kv_scale) * dim**-0.5
    for request, length in enumerate(seq_lens.flatten().tolist()):
        if length == 0:
            continue
        require(length >= q_seq_len, f'{q_seq_len} queries of a request of {length} tokens')
        keys, values = gather(cache, page_table[request], length)
        first = length - q_seq_len
        for row, drafts in enumerate(visible[request]):
            earliest = first + row + 1 - sliding_win_size if sliding_win_size else 0
            seen = [*range(first), *(first + draft for draft in drafts)]
            seen = [position for position in seen if position >= earliest]
            one, lse = attend(
                queries[request, row : row + 1], keys[seen], values[seen], scale=scale, causal=False
            )
            own = None if sinks is None else _sinks_of(sinks, row if q_seq_len > 1 else 0)
            results[request, row] = with_sinks(one, lse, own)[0] * float(kv_scale)
    output.copy_(results.view_as(output))
    use_as_scratch(workspace_buffer)


def _sinks_of(sinks: Tensor, row: int) -> Tensor:
    """The sinks that the heads of a query get: those of other heads from the second tile on, maybe."""
    ratio = sinks.shape[1]
    rows = row * ratio + torch.arange(ratio, device=sinks.device)
    return sinks[:, rows % 32 % ratio]


def _visible(mask: Tensor | None, num_requests: int, q_seq_len: int) -> list[list[list[int]]]:
    """By request and query, which of the last `q_seq_len` tokens it sees."""
    if q_seq_len == 1:
        return [[[0]]] * num_requests
    require(mask is not None, 'several queries a request need a mask')
    assert mask is not None
    words = (q_seq_len + 31) // 32 * 2
    require_like(mask, 'mask', (num_requests, q_seq_len, words), torch.uint16)
    bits = mask.to(torch.int64).unsqueeze(-1) >> torch.arange(16, device=mask.device) & 1
    return [
        [[token for token in range(q_seq_len) if row[token]] for row in rows]
        for rows in bits.flatten(2).tolist()
    ]
