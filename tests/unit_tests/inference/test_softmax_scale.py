# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""FlashAttention is given the softmax scale of training in dynamic inference."""

import pytest
import torch

from megatron.core.transformer import attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

HEADS, HEAD_DIM = 2, 16


@pytest.fixture
def given(monkeypatch):
    """The scales that FlashAttention's kernels are given, whether they are installed or not."""
    scales = []

    def kernel(with_lse):
        def attend(*args, softmax_scale=None, q=None, **kwargs):
            scales.append(softmax_scale)
            query = args[0] if args else q
            return (torch.zeros_like(query), None) if with_lse else torch.zeros_like(query)

        return attend

    def wrapper(self, *args, **kwargs):
        scales.append(args[8])
        return torch.zeros_like(args[0])

    for name, with_lse in (
        ("flash_attn_varlen_func", False),
        ("flash_attn_with_kvcache", False),
        ("flash_attn3_with_kvcache", False),
        ("flash_attn4_varlen_func", True),
    ):
        monkeypatch.setattr(attention, name, kernel(with_lse), raising=False)
    monkeypatch.setattr(SelfAttention, "_flash_attention_3_forward_wrapper", wrapper)
    monkeypatch.setattr(attention, "HAVE_FA3", True)
    monkeypatch.setattr(attention, "HAVE_FA4", True)
    return scales


@pytest.mark.parametrize("decode_only", [False, True])
@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize(
    "of_config, of_layer, expected",
    [(None, None, HEAD_DIM**-0.5), (0.05, None, 0.05), (None, 0.3, 0.3), (0.05, 0.3, 0.3)],
)
def test_scale(given, version, decode_only, of_config, of_layer, expected):
    layer = SelfAttention.__new__(SelfAttention)
    torch.nn.Module.__init__(layer)
    layer.eval()
    layer.config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=HEADS, softmax_scale=of_config
    )
    layer.layer_number, layer.flash_attention_version = 1, version
    layer.batch_invariant_mode = False
    if of_layer is not None:
        layer.softmax_scale = of_layer
    cache, lengths = torch.zeros(1, 4, HEADS, HEAD_DIM), torch.ones(3, dtype=torch.int32)
    layer.flash_decode_and_prefill(
        torch.zeros(3, 1, HEADS, HEAD_DIM),
        cache,
        cache,
        max_seqlen_q=1,
        max_seqlen_k=1,
        cu_seqlens_q=torch.arange(4),
        cu_seqlens_k=torch.arange(4),
        seqlens_k=lengths,
        block_table=torch.zeros(3, 1, dtype=torch.int32),
        is_decode_only=decode_only,
    )
    assert given == [expected]
