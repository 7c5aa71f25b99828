# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

import inspect
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch

from megatron.core.inference.contexts.base_context import BaseInferenceContext
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

TOKENS, HEADS, LATENT_DIM, ROPE_DIM, V_HEAD_DIM = 3, 4, 16, 8, 12


class _NoProjection(torch.nn.Module):
    """An output projection that changes nothing and has no bias."""

    def forward(self, core_attn_out):
        return core_attn_out, None


class _CachedLatentAttention(MultiLatentAttention):
    """`MultiLatentAttention.forward` with cached latents, its projections replaced by tensors."""

    def __init__(self, is_decode_only: bool):
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(cache_mla_latents=True)
        self.cache_mla_latents = True
        self.recompute_up_proj = False
        self.checkpoint_core_attention = False
        self.offload_qkv_linear = self.offload_core_attention = self.offload_attn_proj = False
        self.core_attention = None
        self.linear_proj = _NoProjection()
        self.up_v_weight = torch.ones(HEADS, V_HEAD_DIM, LATENT_DIM)
        self.eval()

        # Decode attends in the latent space, prefill on uncompressed keys and values.
        out_dim = LATENT_DIM if is_decode_only else V_HEAD_DIM
        # The autospec holds the call to the signature of the method that it stands for.
        self.flash_decode_and_prefill = create_autospec(
            Attention.flash_decode_and_prefill, return_value=torch.ones(TOKENS, 1, HEADS, out_dim)
        ).__get__(self)

    def prepare_for_absorption(self):
        """The up-projections are given."""

    def get_query_key_value_tensors(self, hidden_states, *args, inference_context, **kwargs):
        """Queries and the latent to append, as for cached latents."""
        query = torch.zeros(TOKENS, 1, HEADS, LATENT_DIM + ROPE_DIM)
        return query, torch.zeros(TOKENS, 1, LATENT_DIM + ROPE_DIM), None, None, None

    def _adjust_key_value_for_inference(self, inference_context, query, key, value, rotary_pos_emb):
        block_table = torch.zeros(1, 1, dtype=torch.int32)
        if inference_context.is_decode_only():
            return query, torch.zeros(1, 64, LATENT_DIM + ROPE_DIM), None, None, None, block_table
        key = torch.zeros(1, 64, HEADS, LATENT_DIM + ROPE_DIM)
        value = torch.zeros(1, 64, HEADS, V_HEAD_DIM)
        return query, key, value, None, None, block_table


class _Context(BaseInferenceContext):
    """A dynamic context that knows one thing: what kind of step this is."""

    def __init__(self, decode_only: bool):
        self.decode_only = decode_only

    def is_static_batching(self):
        """Dynamic batching."""
        return False

    def is_decode_only(self):
        """Whether this step holds decode tokens only."""
        return self.decode_only

    def cu_query_lengths(self):
        """Cumulative query lengths and the longest."""
        return torch.tensor([0, TOKENS]), TOKENS

    def cu_kv_lengths(self):
        """Cumulative KV lengths, KV lengths and the longest."""
        return torch.tensor([0, TOKENS]), torch.tensor([TOKENS]), TOKENS


@pytest.mark.parametrize("is_decode_only", [True, False], ids=["decode", "prefill"])
def test_dynamic_step_says_whether_it_is_decode_only(is_decode_only):
    attention = _CachedLatentAttention(is_decode_only)

    with torch.inference_mode():
        output, _ = attention(
            torch.zeros(TOKENS, 1, HEADS * V_HEAD_DIM),
            attention_mask=None,
            inference_context=_Context(is_decode_only),
        )

    call = attention.flash_decode_and_prefill.call_args
    signature = inspect.signature(Attention.flash_decode_and_prefill)
    assert signature.bind(*call.args, **call.kwargs).arguments["is_decode_only"] is is_decode_only
    assert output.shape == (TOKENS, 1, HEADS * V_HEAD_DIM)
