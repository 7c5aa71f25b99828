# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

import dataclasses
import gc
import weakref

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.inference.config import InferenceConfig, KVCacheLayout, KVCacheManagementMode
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.kv_cache import AttentionKVCacheSpec, LatentKVCacheSpec
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


def stored(context, layer):
    """The caches of one layer by their place in the storage, values left out where there are none."""
    views = context.kv_cache_spec.layer_views(context.memory_buffer, layer)
    return [view for view in views if view is not None]


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


def test_layout_may_be_given_by_name_and_must_be_known():
    assert InferenceConfig(kv_cache_layout="HND").kv_cache_layout is KVCacheLayout.HND
    with pytest.raises(ValueError, match="'DHN' is not a valid KVCacheLayout"):
        InferenceConfig(kv_cache_layout="DHN")


def test_positional_arguments_of_inference_config_mean_what_they_did():
    assert InferenceConfig(64, 1).buffer_size_gb == 1


def test_layout_of_latents_cannot_be_chosen(make_context):
    with pytest.raises(ValueError, match="leave kv_cache_layout at NHD"):
        make_context(CACHED_LATENTS, kv_cache_layout=KVCacheLayout.HND)


@pytest.mark.parametrize("model_config", MODELS)
def test_block_size_bytes_times_blocks_is_the_memory_taken(make_context, model_config):
    context = make_context(model_config)

    assert (
        context.memory_buffer.untyped_storage().nbytes()
        == context.block_size_bytes * context.kv_block_allocator.total_count
    )


@pytest.mark.parametrize("layer_number, cache", [(1, 1), (4, 0)])
@pytest.mark.parametrize("model_config", MODELS)
def test_key_value_cache_reads_the_layer_that_the_layer_map_names(
    make_context, model_config, layer_number, cache
):
    context = make_context(model_config)
    context.layer_map = {0: 1, 3: 0}  # as where layers without a KV cache lie between
    start_prefill_step(context, prompt_length=5)

    *caches, _ = context.key_value_cache(layer_number)

    expected = stored(context, cache)
    for found, view in zip((c for c in caches if c is not None), expected, strict=True):
        assert found.data_ptr() == view.data_ptr()
        assert found.shape == view.shape and found.stride() == view.stride()


@pytest.mark.parametrize("layer_number, cache", [(1, 1), (4, 0)])
@pytest.mark.parametrize("model_config", MODELS)
def test_append_writes_the_tokens_of_a_step_in_order(
    make_context, model_config, layer_number, cache
):
    # A prompt over two blocks, padded to more tokens than it has, and rows beyond the padding.
    context = make_context(model_config)
    context.layer_map = {0: 1, 3: 0}
    start_prefill_step(context, prompt_length=70)
    context.memory_buffer.zero_()
    padded = context.padded_active_token_count
    assert padded > 70
    # The model hands over keys and values with a batch axis of one.
    shape = (2, padded + 3, 1, *context.kv_cache_spec.token_shape)
    rows = torch.randn(shape, device=context.memory_buffer.device).bfloat16()
    has_value = len(stored(context, cache)) == 2

    context.append_key_value_cache(layer_number, rows[0], rows[1] if has_value else None)

    blocks = context.key_value_cache(layer_number)[2][0, :2].long()
    dummy = context.kv_block_allocator.dummy_block_idx
    for row, found in zip(rows, stored(context, cache)):
        request = found[blocks].flatten(0, 1)
        assert torch.equal(request[:70], row[:70, 0])
        assert not request[70:].any(), "padding reached the request"
        # All padded tokens share a slot of the dummy block; any of them may be the last to write.
        padding = row[70:padded, 0].flatten(1)
        assert (found[dummy, 0].flatten() == padding).all(-1).any(), "padding was not written"
        assert torch.count_nonzero(found.flatten(2).any(-1)) == 70 + 1, "more was written"
    assert not any(view.any() for view in stored(context, 1 - cache)), "another layer was written"


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
