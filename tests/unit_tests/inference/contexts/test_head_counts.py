# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

import logging
from types import SimpleNamespace

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts import dynamic_context
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.transformer.transformer_config import TransformerConfig

NUM_ATTENTION_HEADS, HEAD_DIM = 16, 32


@pytest.fixture
def make_context(monkeypatch):
    """Builds a context as one of `tp_size` ranks; the head counts need no process group."""
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)

    def make(num_query_groups, tp_size, **inference_options):
        model_config = TransformerConfig(
            params_dtype=torch.float32,
            num_layers=2,
            kv_channels=HEAD_DIM,
            num_attention_heads=NUM_ATTENTION_HEADS,
            num_query_groups=num_query_groups,
            tensor_model_parallel_size=tp_size,
        )
        inference_config = InferenceConfig(
            max_sequence_length=128,
            buffer_size_gb=0.01,
            block_size_tokens=64,
            max_requests=8,
            **inference_options,
        )
        return DynamicInferenceContext(model_config, inference_config)

    return make


@pytest.mark.parametrize(
    "num_query_groups, tp_size, query_heads, kv_heads",
    [
        pytest.param(None, 1, 16, 16, id="mha"),
        pytest.param(None, 4, 4, 4, id="mha-tp4"),
        pytest.param(4, 1, 16, 4, id="gqa"),
        pytest.param(4, 2, 8, 2, id="gqa-tp2"),
        pytest.param(4, 4, 4, 1, id="gqa-one-kv-head-a-rank"),
        # Each KV head is held by tp / groups ranks; query heads are divided all the same.
        pytest.param(2, 8, 2, 1, id="gqa-fewer-kv-heads-than-ranks"),
        pytest.param(1, 1, 16, 1, id="mqa"),
        pytest.param(1, 4, 4, 1, id="mqa-tp4"),
    ],
)
def test_query_and_kv_heads_are_counted_apart(
    make_context, num_query_groups, tp_size, query_heads, kv_heads
):
    context = make_context(num_query_groups, tp_size)

    assert context.num_query_heads_per_partition == query_heads
    assert context.num_kv_heads_per_partition == kv_heads
    assert context.memory_buffer.shape[-2:] == (kv_heads, HEAD_DIM)


def test_tensor_parallel_size_is_that_of_the_process_groups_given(make_context, monkeypatch):
    # A model for roll-outs may be split otherwise than its config, which is the trainer's, says.
    monkeypatch.setattr(dynamic_context, "get_pg_size", lambda group: group)
    monkeypatch.setattr(dynamic_context, "get_pg_rank", lambda group: 0)
    context = make_context(
        num_query_groups=4, tp_size=1, pg_collection=SimpleNamespace(tp=8, pp=1, ep=1)
    )

    assert context.num_query_heads_per_partition == 2
    assert context.num_kv_heads_per_partition == 1


def test_old_name_reads_the_kv_head_count_and_cannot_be_set(make_context):
    context = make_context(num_query_groups=4, tp_size=2)

    assert context.num_attention_heads_per_partition == context.num_kv_heads_per_partition == 2
    with pytest.raises(AttributeError):
        context.num_attention_heads_per_partition = 8


def test_log_states_both_counts_once(make_context, monkeypatch, caplog):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with caplog.at_level(logging.INFO):
        make_context(num_query_groups=4, tp_size=2, verbose=True)

    lines = [line for line in caplog.text.splitlines() if "query heads, KV heads" in line]
    assert [line.split(":")[-1].strip() for line in lines] == ["8, 2 in this partition"]
