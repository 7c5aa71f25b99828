"""Stand-in for FlashMLA: decode attention of absorbed MLA on a cache of latents."""

from __future__ import annotations

import torch
from torch import Tensor

import reference_attention


def get_mla_metadata(
    cache_seqlens: Tensor, num_heads_per_head_k: int, num_heads_k: int
) -> tuple[Tensor, Tensor]:
    """The schedule that the caller hands back to the kernel; there is none to make here.

    Returns:
        A schedule and splits, both empty.
    """
    del num_heads_per_head_k, num_heads_k
    empty = cache_seqlens.new_empty(0)
    return empty, empty


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Queries `(requests, queries, heads, latent_dim)` on latents.

    Args:
        k_cache: `(blocks, block_size, 1, latent_dim)`, whose first `head_dim_v` elements are the
            values, too.

    Returns:
        The output `(requests, queries, heads, head_dim_v)` and the log-sum-exp
        `(requests, heads, queries)`.
    """
    del tile_scheduler_metadata, num_splits
    num_requests, num_queries = q.shape[:2]
    output, lse = reference_attention.attend_paged(
        q.flatten(0, 1),
        k_cache,
        k_cache[..., :head_dim_v],
        query_starts=torch.arange(num_requests + 1, device=q.device) * num_queries,
        key_lengths=cache_seqlens,
        block_table=block_table,
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
    )
    return (
        output.unflatten(0, (num_requests, num_queries)),
        lse.unflatten(1, (num_requests, num_queries)).transpose(0, 1),
    )
