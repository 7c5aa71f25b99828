# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

import dataclasses
import gc
import weakref

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.inference.config import InferenceConfig, KVCacheManagementMode
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.kv_cache import AttentionKVCacheSpec, KVCacheLayout, LatentKVCacheSpec
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

MODEL = dict(params_dtype=torch.bfloat16, num_layers=2, hidden_size=64, num_attention_heads=4)
GQA = TransformerConfig(**MODEL, num_query_groups=2, kv_channels=32)
CACHED_LATENTS = MLATransformerConfig(
    **MODEL,
    multi_latent_attention=True,
    cache_mla_latents=True,
    kv_lora_rank=48,
    qk_pos_emb_head_dim=16,
)
MODELS = [pytest.param(GQA, id="gqa"), pytest.param(CACHED_LATENTS, id="latent")]


@pytest.fixture
def make_context(monkeypatch):
    """Builds a context of one rank, without process groups."""
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)

    def make(model_config, **inference_options):
        options = dict(
            max_sequence_length=128, buffer_size_gb=0.001, block_size_tokens=64, max_requests=8
        )
        return DynamicInferenceContext(
            model_config, InferenceConfig(**{**options, **inference_options})
        )

    return make


def start_prefill_step(context, prompt_length):
    """Make the context ready for the prefill step of one request."""
    context.add_request(
        DynamicInferenceRequest(
            request_id=0,
            prompt_tokens=torch.arange(prompt_length),
            sampling_params=SamplingParams(num_tokens_to_generate=1),
        )
    )
    context.initialize_attention_state()
    context.transfer_bookkeeping_to_gpu()


def test_model_config_chooses_the_kind_of_cache(make_context):
    sizes = dict(num_layers=2, block_size_tokens=64, dtype=torch.bfloat16)

    assert make_context(GQA).kv_cache_spec == AttentionKVCacheSpec(
        **sizes, num_kv_heads=2, head_dim=32
    )
    assert make_context(CACHED_LATENTS).kv_cache_spec == LatentKVCacheSpec(
        **sizes, latent_dim=48 + 16
    )


def test_inference_config_chooses_the_layout(make_context):
    nhd, hnd = make_context(GQA), make_context(GQA, kv_cache_layout=KVCacheLayout.HND)

    assert nhd.kv_cache_spec.layout is KVCacheLayout.NHD
    assert hnd.kv_cache_spec == dataclasses.replace(nhd.kv_cache_spec, layout=KVCacheLayout.HND)
    assert hnd.block_size_bytes == nhd.block_size_bytes
    start_prefill_step(hnd, prompt_length=5)
    start_prefill_step(nhd, prompt_length=5)
    assert hnd.key_value_cache(1)[0].shape == nhd.key_value_cache(1)[0].shape


@pytest.mark.parametrize("model_config", MODELS)
def test_block_size_bytes_times_blocks_is_the_memory_taken(make_context, model_config):
    context = make_context(model_config)

    assert (
        context.memory_buffer.untyped_storage().nbytes()
        == context.block_size_bytes * context.kv_block_allocator.total_count
    )


@pytest.mark.parametrize("layer_number", [1, 2])
@pytest.mark.parametrize("model_config", MODELS)
def test_key_value_cache_reads_the_memory_buffer(make_context, model_config, layer_number):
    context = make_context(model_config)
    start_prefill_step(context, prompt_length=5)
    expected = context.kv_cache_spec.layer(context.memory_buffer, layer_number - 1)

    *caches, _ = context.key_value_cache(layer_number)

    for cache, view in zip(caches, expected, strict=True):
        if view is None:
            assert cache is None
        else:
            assert cache.data_ptr() == view.data_ptr()
            assert cache.shape == view.shape and cache.stride() == view.stride()


@pytest.mark.parametrize("layer_number", [1, 2])
@pytest.mark.parametrize("model_config", MODELS)
def test_append_writes_the_tokens_of_a_step_in_order(make_context, model_config, layer_number):
    # A prompt over two blocks, padded to more tokens than it has.
    context = make_context(model_config)
    start_prefill_step(context, prompt_length=70)
    context.memory_buffer.zero_()
    tokens = context.padded_active_token_count
    assert tokens > 70
    # The model hands over keys and values with a batch axis of one.
    token_shape = context.kv_cache_spec.token_shape
    key, value = torch.randn(2, tokens, 1, *token_shape, device=context.memory_buffer.device).to(
        torch.bfloat16
    )
    has_values = context.key_value_cache(layer_number)[1] is not None

    context.append_key_value_cache(layer_number, key, value if has_values else None)

    *caches, block_table = context.key_value_cache(layer_number)
    blocks = block_table[0, :2].long()
    for rows, cache in zip((key, value), caches):
        if cache is not None:
            assert torch.equal(cache[blocks].flatten(0, 1)[:70], rows[:70, 0])
            assert not cache[blocks].flatten(0, 1)[70:].any(), "padding reached the request"
    for other in range(context.num_attention_layers):
        if other != layer_number - 1:
            for cache in context.kv_cache_spec.layer(context.memory_buffer, other):
                assert cache is None or not cache.any(), "another layer was written"


@pytest.mark.parametrize("model_config", MODELS)
def test_nothing_keeps_the_memory_buffer_alive_across_recompute(make_context, model_config):
    context = make_context(model_config, kv_cache_management_mode=KVCacheManagementMode.RECOMPUTE)
    start_prefill_step(context, prompt_length=5)
    context.key_value_cache(1)
    buffer = weakref.ref(context.memory_buffer)

    context.deallocate_inference_state_buffers()
    gc.collect()
    assert buffer() is None

    context.reinitialize_inference_state_buffers()
    start_prefill_step(context, prompt_length=5)
    keys = context.key_value_cache(1)[0]
    assert keys.untyped_storage().data_ptr() == context.memory_buffer.untyped_storage().data_ptr()
