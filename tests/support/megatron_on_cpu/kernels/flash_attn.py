"""Stand-in for FlashAttention 2: the two functions that Megatron's dynamic engine calls.

Same arguments and results as the real ones, as far as the engine uses them; an argument that is not
here is a TypeError, not something silently left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

import reference_attention
from reference_attention import NO_WINDOW, Window

__version__ = '2.8.3'


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    *,
    block_table: Tensor,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Packed queries `(tokens, heads, dim)` on a paged cache.

    Returns:
        The output `(tokens, heads, value_dim)`; with `return_attn_probs` also the log-sum-exp
        `(heads, tokens)`, and None, as there is no dropout.
    """
    del max_seqlen_q, max_seqlen_k  # upper bounds, of use to a kernel's grid only
    output, lse = reference_attention.attend_paged(
        q,
        k,
        v,
        query_starts=cu_seqlens_q,
        key_lengths=cu_seqlens_k.diff(),
        block_table=block_table,
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        window=window_size,
    )
    return (output, lse, None) if return_attn_probs else output


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Queries `(requests, queries, heads, dim)` on a paged cache that already holds their keys.

    Returns:
        The output `(requests, queries, heads, value_dim)`; with `return_softmax_lse` also the
        log-sum-exp `(requests, heads, queries)`.
    """
    del num_splits  # how the work is shared out, not what is computed
    num_requests, num_queries = q.shape[:2]
    output, lse = reference_attention.attend_paged(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        query_starts=torch.arange(num_requests + 1, device=q.device) * num_queries,
        key_lengths=cache_seqlens,
        block_table=block_table,
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        window=window_size,
    )
    output = output.unflatten(0, (num_requests, num_queries))
    if not return_softmax_lse:
        return output
    return output, lse.unflatten(1, (num_requests, num_queries)).transpose(0, 1)
