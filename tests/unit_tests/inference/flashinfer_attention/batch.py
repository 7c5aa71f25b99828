# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""Random batches in a poisoned cache, and the attention that they should get, in float32."""

from types import SimpleNamespace
from unittest import mock

import torch

from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.flashinfer_attention import FlashInferAttention
from megatron.core.inference.kv_cache import AttentionKVCacheSpec
from megatron.core.transformer import TransformerConfig

HAVE_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAVE_GPU else "cpu")
NAN = float("nan")


def tolerance(dtype: torch.dtype) -> float:
    """Relative error that a kernel may have."""
    return {torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]


class Batch:
    """A step's requests as the context would hold them, and the attention they should get.

    Every element of the cache that holds no token of a request is NaN.

    Args:
        decode (list): Tokens in the cache of each decode request, this step's included.
        prefill (list): Query tokens and tokens in the cache of each prefill request.
        dims (tuple): Tokens, prefill and decode requests that the step is padded to; None: none.
        tokens (int): Query tokens of a decode request.
        num_blocks (int): Blocks of the cache; None: as many as the requests need, and two.
        graph (bool): Whether the step is one of a CUDA graph, captured or not.
    """

    def __init__(
        self,
        decode,
        prefill,
        dims=None,
        *,
        tokens=1,
        dtype=torch.bfloat16,
        heads=8,
        kv_heads=2,
        head_dim=128,
        block_size=256,
        layout="NHD",
        max_requests=None,
        max_tokens=None,
        max_length=None,
        num_blocks=None,
        graph=False,
        seed=0,
        **options,
    ):
        self.queries = [tokens] * len(decode) + [query for query, _ in prefill]
        self.kvs = list(decode) + [kv for _, kv in prefill]
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.dtype, self.tokens, self.block_size = dtype, tokens, block_size
        self.graph = graph
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        real = sum(self.queries)
        self.dims = InferenceBatchDimensions(*(dims or (real, len(prefill), len(decode))))
        self.num_decode = len(decode)
        rows = max_requests or max(self.dims.req_count, 1)
        self.max_blocks = -(-(max_length or max(self.kvs, default=1)) // block_size) + 1
        self.config = TransformerConfig(
            num_layers=2,
            hidden_size=heads * head_dim,
            num_attention_heads=heads,
            num_query_groups=kv_heads,
            kv_channels=head_dim,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            **options,
        )
        self.inference = dict(kv_cache_layout=layout, inference_attention_backend="flashinfer")

        blocks_of = [-(-kv // block_size) for kv in self.kvs]
        num_blocks = num_blocks or sum(blocks_of) + 2
        order = torch.randperm(num_blocks, generator=self.generator, device=DEVICE).tolist()
        self.spec = AttentionKVCacheSpec(
            num_layers=2,
            block_size_tokens=block_size,
            dtype=dtype,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            layout=InferenceConfig(kv_cache_layout=layout).kv_cache_layout,
        )
        self.storage = self.spec.allocate(num_blocks, DEVICE).fill_(NAN)
        self.table = torch.full((rows, self.max_blocks), -1, dtype=torch.int32, pin_memory=HAVE_GPU)
        for row, (kv, count) in enumerate(zip(self.kvs, blocks_of)):
            mine = [order.pop() for _ in range(count)]
            self.table[row, :count] = torch.tensor(mine, dtype=torch.int32)
            position = torch.arange(kv, device=DEVICE)
            block = torch.tensor(mine, device=DEVICE)[position // block_size]
            for layer in range(2):
                for cache in self.spec.layer_views(self.storage, layer):
                    cache[block, position % block_size] = self._random(kv, kv_heads, head_dim)
        # Padding tokens go to a block of their own, which stays NaN here.
        self.query = torch.full(
            (self.dims.token_count, 1, heads, head_dim), 1.0, dtype=dtype, device=DEVICE
        )
        self.query[:real, 0] = self._random(real, heads, head_dim)
        self.context = self._context(rows, max_tokens or self.dims.token_count)

    def _random(self, *shape):
        return torch.randn(shape, generator=self.generator, device=DEVICE).to(self.dtype)

    def _context(self, rows, max_tokens):
        def array(values, length):
            filled = list(values) + [0] * (length - len(values))
            return torch.tensor(filled, dtype=torch.int32, pin_memory=HAVE_GPU)

        starts = [sum(self.queries[:row]) for row in range(len(self.queries) + 1)]
        starts += [starts[-1]] * (rows + 1 - len(starts))
        cpu = dict(
            _cpu_mha_block_table=self.table,
            _cpu_mha_query_lengths=array(self.queries, rows),
            _cpu_mha_cu_query_seq_lengths=array(starts, rows + 1),
            _cpu_mha_kv_seq_lengths=array(self.kvs, rows),
        )
        view = {name.removeprefix("_cpu_"): tensor.to(DEVICE) for name, tensor in cpu.items()}
        return SimpleNamespace(
            num_query_heads_per_partition=self.heads,
            num_kv_heads_per_partition=self.kv_heads,
            hidden_size_per_attention_head=self.head_dim,
            block_size_tokens=self.block_size,
            num_speculative_tokens=self.tokens - 1,
            max_tokens=max_tokens,
            padded_batch_dimensions=self.dims,
            num_decode_requests=self.num_decode,
            total_request_count=len(self.queries) + 3,
            paused_request_count=3,
            is_decode_only=lambda: self.dims.prefill_req_count == 0,
            using_cuda_graph_this_step=lambda: self.graph,
            gpu_view=SimpleNamespace(**view),
            kv_cache_spec=self.spec,
            memory_buffer=self.storage,
            **cpu,
        )

    def attention(self, kernel="auto") -> FlashInferAttention:
        """The attention under test, built for this batch's context."""
        config = InferenceConfig(**self.inference, flashinfer_kernel=kernel)
        attention = FlashInferAttention(self.context, self.config, config)
        attention.allocate(self.context)
        return attention

    def become(self, other: "Batch") -> None:
        """Take over the requests of another batch of the same limits; all addresses stay."""
        for name, tensor in vars(self.context).items():
            if name.startswith("_cpu_mha"):
                tensor.copy_(getattr(other.context, name))
        for name, tensor in vars(self.context.gpu_view).items():
            tensor.copy_(getattr(other.context.gpu_view, name))
        self.storage.copy_(other.storage)
        self.context.padded_batch_dimensions = self.dims = other.dims
        self.context.num_decode_requests = self.num_decode = other.num_decode
        self.context.total_request_count = other.context.total_request_count
        self.queries, self.kvs = other.queries, other.kvs

    def new(self, layer):
        """Keys and values that a layer appends in this step, those of padding tokens NaN.

        As in a model, rows of both lie between each other.
        """
        shape = (self.dims.token_count, 1, self.kv_heads, 2 * self.head_dim)
        both = torch.full(shape, NAN, dtype=self.dtype, device=DEVICE).split(self.head_dim, dim=-1)
        start = 0
        for row, (query_length, kv) in enumerate(zip(self.queries, self.kvs)):
            position = torch.arange(kv - query_length, kv, device=DEVICE)
            block = self.table[row].to(DEVICE)[position // self.block_size]
            for part, cache in zip(both, self.spec.layer_views(self.storage, layer - 1)):
                part[start : start + query_length, 0] = cache[block, position % self.block_size]
            start += query_length
        return both

    def run(self, attention, layer=1, sinks=None):
        """One layer's attention of this batch, `(tokens, heads, head_dim)`, in a poisoned output."""
        attention.plan_step(self.context)
        attention.derive_step()
        attention.remember(*self.new(layer))
        keys, values = self.spec.layer_views(self.storage, layer - 1)
        with mock.patch("torch.empty_like", lambda tensor: torch.full_like(tensor, NAN)):
            return attention.run(self.query, keys, values, layer, sinks).squeeze(1)

    def expected(self, layer=1, window=-1, scale=None, sinks=None):
        """What `run` should give for the tokens that are no padding, in float32."""
        keys, values = self.spec.layer_views(self.storage, layer - 1)
        outputs, start = [], 0
        for row, (query_length, kv) in enumerate(zip(self.queries, self.kvs)):
            count = -(-kv // self.block_size)
            blocks = self.table[row, :count].long().to(DEVICE)
            query = self.query[start : start + query_length, 0].float()
            start += query_length
            key, value = (
                cache[blocks]
                .flatten(0, 1)[:kv]
                .float()
                .repeat_interleave(self.heads // self.kv_heads, dim=1)
                for cache in (keys, values)
            )
            scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or self.head_dim**-0.5)
            position = torch.arange(kv - query_length, kv, device=DEVICE).unsqueeze(1)
            seen = torch.arange(kv, device=DEVICE) <= position
            if window >= 0:
                seen &= torch.arange(kv, device=DEVICE) >= position - window
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                sink = sinks.float().view(-1, 1, 1).expand(-1, query_length, 1)
                scores = torch.cat((scores, sink), dim=-1)
            weights = scores.softmax(-1)[..., :kv]
            outputs.append(torch.einsum("hqk,khd->qhd", weights, value))
        return torch.cat(outputs)

    def check(self, output, **reference):
        """Real tokens are right, padding is finite."""
        expected = self.expected(**reference)
        found = output[: expected.size(0)].float()
        error = (found - expected).norm() / expected.norm()
        assert error <= tolerance(self.dtype), f"relative error {error:.2e}"
        rows = (found - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        assert rows.max() <= 4 * tolerance(self.dtype), f"row {rows.argmax()}: {rows.max():.2e}"
        assert output.isfinite().all()
