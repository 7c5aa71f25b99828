# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""FlashAttention reads the cache in either layout through the strides of its views."""

import pytest
import torch

from megatron.core.inference.config import KVCacheLayout
from megatron.core.inference.kv_cache import AttentionKVCacheSpec
from megatron.core.transformer import attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BLOCKS, BLOCK_SIZE, QUERY_HEADS, KV_HEADS, HEAD_DIM = 7, 256, 8, 2, 128
SCALE = HEAD_DIM**-0.5
# KV length of each request, and its blocks.
LENGTHS = torch.tensor([300, 256, 5], dtype=torch.int32, device=DEVICE)
BLOCK_TABLE = torch.tensor([[4, 1], [2, 0], [5, 3]], dtype=torch.int32, device=DEVICE)


def cumulative(lengths):
    """Cumulative lengths from 0, int32."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def decode_2(keys, values):
    """FlashAttention-2 on one token of each request."""
    return attention.flash_attn_with_kvcache(
        draw_query(1),
        keys,
        values,
        cache_seqlens=LENGTHS,
        block_table=BLOCK_TABLE,
        softmax_scale=SCALE,
        causal=True,
    )


def prefill_2(keys, values):
    """FlashAttention-2 on the last five tokens of each request."""
    return attention.flash_attn_varlen_func(
        draw_query(5).flatten(0, 1),
        keys,
        values,
        cumulative(torch.full_like(LENGTHS, 5)),
        cumulative(LENGTHS),
        5,
        int(LENGTHS.max()),
        softmax_scale=SCALE,
        causal=True,
        block_table=BLOCK_TABLE,
    )


def decode_3(keys, values):
    """FlashAttention-3 on one token of each request."""
    return attention.flash_attn3_with_kvcache(
        draw_query(1),
        keys,
        values,
        cache_seqlens=LENGTHS,
        page_table=BLOCK_TABLE,
        softmax_scale=SCALE,
        causal=True,
    )


def prefill_4(keys, values):
    """FlashAttention-4 on the last five tokens of each request."""
    return attention.flash_attn4_varlen_func(
        draw_query(5).flatten(0, 1),
        keys,
        values,
        cu_seqlens_q=cumulative(torch.full_like(LENGTHS, 5)),
        max_seqlen_q=5,
        max_seqlen_k=int(LENGTHS.max()),
        seqused_k=LENGTHS,
        page_table=BLOCK_TABLE,
        softmax_scale=SCALE,
        causal=True,
        num_splits=1,
    )[0]


KERNELS = [
    pytest.param(kernel, id=kernel.__name__, marks=pytest.mark.skipif(not there, reason=reason))
    for kernel, there, reason in [
        (decode_2, attention.flash_attn_with_kvcache, "FlashAttention-2 is not installed"),
        (prefill_2, attention.flash_attn_varlen_func, "FlashAttention-2 is not installed"),
        (decode_3, attention.HAVE_FA3, "FlashAttention-3 is not installed"),
        (prefill_4, attention.HAVE_FA4, "FlashAttention-4 is not installed"),
    ]
]


def draw_query(tokens):
    """The same queries at each call, `(requests, tokens, query heads, head dim)`."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(LENGTHS), tokens, QUERY_HEADS, HEAD_DIM)
    return torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16)


def fill(layout):
    """One layer's cache in a layout, with every block's every slot appended."""
    spec = AttentionKVCacheSpec(
        num_layers=1,
        block_size_tokens=BLOCK_SIZE,
        dtype=torch.bfloat16,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        layout=layout,
    )
    generator = torch.Generator().manual_seed(2)
    slots = torch.arange(NUM_BLOCKS * BLOCK_SIZE, device=DEVICE)
    rows = torch.randn(2, len(slots), KV_HEADS, HEAD_DIM, generator=generator).to(DEVICE)
    storage = spec.allocate(NUM_BLOCKS, DEVICE)
    spec.append(storage, 0, *rows, slots // BLOCK_SIZE, slots % BLOCK_SIZE, len(slots))
    return spec.layer_views(storage, 0)


@pytest.mark.parametrize("attend", KERNELS)
def test_both_layouts_give_the_same_bits(attend):
    output = attend(*fill(KVCacheLayout.NHD))

    assert output.isfinite().all() and output.any()
    assert torch.equal(attend(*fill(KVCacheLayout.HND)), output)
