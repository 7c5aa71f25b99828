# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""Attention by FlashInfer's kernels against float32, on random batches in a poisoned cache."""

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("flashinfer")

from megatron.core.inference.config import FlashInferKernel

from .batch import DEVICE, HAVE_GPU, Batch

EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000]
SHORT = [(1, 1), (1, 300), (5, 5), (64, 64), (100, 356), (127, 127), (128, 130), (129, 129)]
FRESH = [(1, 1), (300, 300), (5, 5), (128, 128), (127, 127), (257, 257), (3, 3)]

# Kernels of FlashInfer are compiled for each of these. GPUs differ in which they have.
SHAPES = {
    "ratio4": dict(),
    "mha": dict(heads=4, kv_heads=4),
    "ratio8": dict(heads=16, kv_heads=2),
    "mqa": dict(heads=16, kv_heads=1),
    "dim64": dict(head_dim=64),
    "dim256": dict(head_dim=256),
    "fp16": dict(dtype=torch.float16),
    "block16": dict(block_size=16),
    "block64": dict(block_size=64),
    "block128": dict(block_size=128),
    "hnd": dict(layout="HND"),
}
PINS = ["auto", "fa2"]


@pytest.fixture(params=PINS)
def kernel(request):
    """A kernel to pin."""
    return request.param


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
class TestShapes:
    def test_decode(self, shape, kernel):
        batch = Batch(EDGES, [], **shape)
        batch.check(batch.run(batch.attention(kernel)))

    def test_prefill(self, shape, kernel):
        batch = Batch([], SHORT, **shape)
        batch.check(batch.run(batch.attention(kernel)))

    def test_mixed_and_padded(self, shape, kernel):
        batch = Batch(EDGES, SHORT, dims=(700, 12, 17), **shape)
        batch.check(batch.run(batch.attention(kernel), layer=2), layer=2)

    def test_fresh(self, shape, kernel):
        """Prompts of which nothing was in the cache, beside decodes and padding."""
        batch = Batch(EDGES, FRESH, dims=(1100, 8, 17), **shape)
        batch.check(batch.run(batch.attention(kernel), layer=2), layer=2)


@pytest.mark.parametrize("head_dim", [80, 96, 192])
class TestOtherHeadDims:
    """Those that fa2 and fa3 do not take."""

    @pytest.fixture(autouse=True)
    def hopper(self):
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("only for Hopper does FlashInfer have kernels for them")

    def test_mixed_and_padded(self, head_dim):
        batch = Batch(EDGES, SHORT, dims=(700, 12, 17), head_dim=head_dim)
        attention = batch.attention()
        batch.check(batch.run(attention, layer=2), layer=2)
        # Decodes are not computed again.
        starts = attention._kernels[FlashInferKernel.FMHA_V2]._rows.query_starts
        assert starts[: len(EDGES) + 2].tolist() == [len(EDGES)] * (len(EDGES) + 1) + [
            len(EDGES) + 1
        ]

    def test_alone(self, head_dim):
        for decode, prefill in ((EDGES, []), ([], SHORT), ([], FRESH), ([], [(300, 300)])):
            batch = Batch(decode, prefill, head_dim=head_dim)
            batch.check(batch.run(batch.attention()))

    def test_graph(self, head_dim):
        """Prefills in decode slots, and decodes in prefill slots."""
        for decode, prefill, dims in (
            ([70, 300, 9], [(40, 40), (3, 500), (200, 200)], (384, 3, 5)),
            ([70, 300, 9, 10, 11], [(40, 40)], (64, 4, 2)),
        ):
            batch = Batch(decode, prefill, dims=dims, graph=True, head_dim=head_dim)
            batch.check(batch.run(batch.attention()))

    def test_softmax_scale(self, head_dim):
        batch = Batch([70, 300], SHORT, head_dim=head_dim, softmax_scale=0.02)
        batch.check(batch.run(batch.attention()), scale=0.02)

    @pytest.mark.parametrize("tokens", [1, 3, 5])
    def test_windows_and_sinks(self, head_dim, tokens):
        options = dict(window_size=(64, 0), window_attn_skip_freq=[1, 0], head_dim=head_dim)
        decode = [edge + tokens - 1 for edge in EDGES]
        batch = Batch(decode, SHORT, dims=(800, 12, 17), tokens=tokens, **options)
        attention = batch.attention()
        sinks = torch.linspace(-1, 4, 8, device=DEVICE).to(batch.dtype)
        batch.check(batch.run(attention, 1, sinks), layer=1, window=64, sinks=sinks)
        batch.check(batch.run(attention, 2, sinks), layer=2, sinks=sinks)


class TestPadding:
    @pytest.mark.parametrize("graph", [False, True])
    @pytest.mark.parametrize("tokens", [1, 3])
    def test_decode_slots_without_request(self, kernel, tokens, graph):
        batch = Batch([70, 300], [], dims=(8 * tokens, 0, 8), tokens=tokens, graph=graph)
        batch.check(batch.run(batch.attention(kernel)))

    def test_no_request(self, kernel):
        batch = Batch([], [], dims=(8, 0, 8), num_blocks=1)
        assert not batch.run(batch.attention(kernel)).any()

    def test_prefill_in_decode_slots(self, kernel):
        """A graph's slots count requests: here two of its five decode slots hold prefills."""
        batch = Batch([70, 300, 9], [(40, 40), (3, 500), (200, 200)], dims=(384, 3, 5), graph=True)
        batch.check(batch.run(batch.attention(kernel)))

    def test_decode_in_prefill_slots(self, kernel):
        batch = Batch([70, 300, 9, 10, 11], [(40, 40)], dims=(64, 4, 2), graph=True)
        batch.check(batch.run(batch.attention(kernel)))

    def test_no_decode_among_decode_slots(self, kernel):
        batch = Batch([], [(1, 1), (2, 2)], dims=(64, 4, 8), graph=True)
        batch.check(batch.run(batch.attention(kernel)))


@pytest.mark.parametrize("prefill", [SHORT, FRESH], ids=["cached", "fresh"])
class TestLayers:
    @pytest.mark.parametrize("window", [0, 63, 64, 100])
    def test_windows(self, window, kernel, prefill):
        """The first layer sees a window, the second everything."""
        batch = Batch(
            EDGES,
            prefill,
            dims=(1100, 12, 17),
            window_size=(window, 0),
            window_attn_skip_freq=[1, 0],
        )
        attention = batch.attention(kernel)
        batch.check(batch.run(attention, layer=1), layer=1, window=window)
        batch.check(batch.run(attention, layer=2), layer=2)

    def test_softmax_scale(self, kernel, prefill):
        batch = Batch([70, 300], prefill, softmax_scale=0.02)
        batch.check(batch.run(batch.attention(kernel)), scale=0.02)

    def test_sinks(self, kernel, prefill):
        batch = Batch(EDGES, prefill, dims=(1100, 12, 17))
        sinks = torch.linspace(-1, 4, 8, device=DEVICE).to(batch.dtype)
        batch.check(batch.run(batch.attention(kernel), sinks=sinks), sinks=sinks)


@pytest.mark.parametrize("tokens", [2, 3, 4, 5])
def test_speculative_tokens(tokens, kernel):
    """Each token of a request has a window of its own in the first layer."""
    decode = [tokens] + [edge + tokens for edge in EDGES]
    windows = dict(window_size=(64, 0), window_attn_skip_freq=[1, 0])
    for batch in (
        Batch(decode, [], dims=(24 * tokens, 0, 24), tokens=tokens, **windows),
        Batch(decode, SHORT, dims=(800, 12, 20), tokens=tokens, **windows),
    ):
        attention = batch.attention(kernel)
        batch.check(batch.run(attention, layer=1), layer=1, window=64)
        batch.check(batch.run(attention, layer=2), layer=2)


@pytest.mark.parametrize("ratio, tokens", [(4, 3), (8, 5), (12, 2), (12, 3), (16, 3)])
def test_sinks_with_speculative_tokens(ratio, tokens, kernel):
    """Also where rows of heads and tokens fill several of xqa's tiles."""
    model = dict(heads=2 * ratio, tokens=tokens, softmax_type="learnable")
    batch = Batch([edge + tokens for edge in EDGES], SHORT, dims=(800, 12, 20), **model)
    sinks = torch.linspace(-2, 6, 2 * ratio, device=DEVICE).to(batch.dtype)
    batch.check(batch.run(batch.attention(kernel), sinks=sinks), sinks=sinks)


def test_attentions_in_one_process(kernel):
    """Engines of different models share nothing."""
    batches = [
        Batch(EDGES, SHORT, heads=8, window_size=(64, 0)),
        Batch(EDGES, SHORT, heads=4, head_dim=64, dtype=torch.float16, softmax_scale=0.03, seed=1),
    ]
    attentions = [batch.attention(kernel) for batch in batches]
    for _ in range(2):
        batches[0].check(batches[0].run(attentions[0]), window=64)
        batches[1].check(batches[1].run(attentions[1]), scale=0.03)


def test_one_attention_for_many_steps(kernel):
    """Steps of all kinds share what was allocated for the first."""
    limits = dict(max_requests=512, max_tokens=2048, max_length=1200)
    generator = torch.Generator().manual_seed(3)

    def numbers(count, low, high):
        return torch.randint(low, high, (count,), generator=generator).tolist()

    attention = None
    for step, (decodes, prefills) in enumerate([(512, 0), (3, 2), (1, 0), (200, 9), (0, 1)]):
        prefill = [
            (query, query + more)
            for query, more in zip(numbers(prefills, 1, 150), numbers(prefills, 0, 900))
        ]
        batch = Batch(numbers(decodes, 1, 1200), prefill, seed=step, **limits)
        if attention is None:
            attention, first = batch.attention(kernel), batch.context
        for name in (
            "mha_block_table",
            "mha_query_lengths",
            "mha_kv_seq_lengths",
            "mha_cu_query_seq_lengths",
        ):
            getattr(first.gpu_view, name).copy_(getattr(batch.context.gpu_view, name))
            cpu = getattr(batch.context, f"_cpu_{name}")
            getattr(first, f"_cpu_{name}")[: len(cpu)] = cpu
        batch.check(batch.run(attention))


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(32, 1, 128), (64, 4, 128), (32, 2, 256)])
def test_fa2_on_a_large_gpu(heads, kv_heads, head_dim, monkeypatch):
    """On which FlashInfer would set more memory aside than there is, were its own plan to split."""
    if not HAVE_GPU:
        monkeypatch.setattr(torch.cuda.get_device_properties(), "multi_processor_count", 132)
    batch = Batch([600, 5], [(130, 130)], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    batch.check(batch.run(batch.attention("fa2")))


@pytest.mark.parametrize(
    "options, message",
    [
        (
            dict(block_size=2**16, max_length=2**32 - 2**16, num_blocks=1),
            "1 requests of 4294967296 tokens exceed: lower max_requests or max_sequence_length, or",
        ),
        (
            dict(heads=8, head_dim=128, max_tokens=2**22),
            "the queries of 4194304 tokens exceed: lower max_tokens, or",
        ),
    ],
)
def test_more_than_is_counted(options, message):
    message = (
        f"FlashInfer's fa2 kernel counts in 32 bits, which {message} set "
        "inference_attention_backend to flash."
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        Batch([5], [], **options).attention("fa2")
