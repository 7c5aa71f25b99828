"""Device time of one layer's attention: FlashInfer's path of stage 2 beside upstream's flash path.

Both compute the same batch on the same cache, each called as the engine calls it: FlashInfer through
`FlashInferAttention`, FlashAttention through `SelfAttention.flash_decode_and_prefill`, in whichever
version is installed. They are timed in alternation, as replays of CUDA graphs over many layers, with
the L2 cache flushed before each. `latents.py` does the same with cached latents.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import timing

STORAGE_BYTES = 32 << 30
MAX_LAYERS = 32
# Decode slots of a graph, requests in them and their tokens.
PADDED: tuple[tuple[int, int, int], ...] = (
    (256, 192, 1024),
    (256, 64, 1024),
    (64, 16, 4096),
    (8, 1, 8192),
)
HOST_CALLS = 20
# Two kernels round in bf16 where they like.
MAX_ERROR = 2e-2


@dataclass(frozen=True)
class Heads:
    """A model's heads in one partition."""

    query: int
    kv: int
    dim: int = 128

    @property
    def value_dim(self) -> int:
        """Elements of one value."""
        return self.dim

    @property
    def token_bytes(self) -> int:
        """Of one token's keys and values in one layer, in bf16."""
        return 2 * self.kv * (self.dim + self.value_dim)


SHAPES = {"GQA 4:1": Heads(32, 8), "GQA 8:1": Heads(64, 8), "MHA": Heads(32, 32)}


@dataclass(frozen=True)
class Batch:
    """A step's requests.

    Args:
        decode: Tokens in the cache of each request that has one new token, that one included.
        prefill: New tokens, and tokens in the cache with these, of each other request.
        slots: Decode slots of the graph; None: as many as there are decodes.
    """

    decode: Sequence[int] = ()
    prefill: Sequence[tuple[int, int]] = ()
    slots: int | None = None

    @property
    def rows(self) -> list[tuple[int, int]]:
        """New tokens and tokens in the cache of each request."""
        return [(1, kv) for kv in self.decode] + list(self.prefill)

    def bytes_read(self, heads: Heads) -> int:
        """Keys and values that one layer has to read at least."""
        return sum(kv for _, kv in self.rows) * heads.token_bytes

    def operations(self, heads: Heads) -> int:
        """Floating-point operations of one layer's causal attention."""
        pairs = sum(query * kv - query * (query - 1) // 2 for query, kv in self.rows)
        return 2 * pairs * heads.query * (heads.dim + heads.value_dim)


def even(count: int, tokens: int) -> tuple[int, ...]:
    """Requests of about that many tokens, no two of them alike."""
    return tuple(max(1, tokens - 7 * (row % 17)) for row in range(count))


def decode_batches() -> Iterator[tuple[str, Batch]]:
    """The grid of decode steps."""
    for count in (1, 8, 32, 64, 128, 256, 512):
        for tokens in (128, 1024, 4096, 32768):
            if count * tokens <= 1 << 20:
                yield f"{count} x {tokens}", Batch(decode=even(count, tokens))
    # All of these are a little longer than a multiple of the 256 keys that xqa takes at a time.
    for count in (8, 32, 64, 128, 256):
        yield f"{count} x 1152", Batch(decode=even(count, 1152))


def prefill_batches() -> Iterator[tuple[str, Batch]]:
    """Prompts, whole and in chunks on what is cached."""
    for count, tokens in ((1, 512), (8, 512), (16, 512), (4, 2048), (8, 2048), (1, 8192)):
        lengths = even(count, tokens) if count > 1 else (tokens,)
        yield f"{count} x {tokens}", Batch(prefill=[(tokens, tokens) for tokens in lengths])
    for count, tokens, cached in ((8, 512, 4096), (1, 2048, 30720)):
        yield f"{count} x {tokens} on {cached}", Batch(prefill=[(tokens, cached + tokens)] * count)


def mixed_batches() -> Iterator[tuple[str, Batch]]:
    """Decodes beside prompts in one step."""
    for decodes, tokens, prompts, length in (
        (32, 1024, 1, 2048),
        (128, 2048, 4, 1024),
        (256, 1024, 2, 512),
    ):
        yield (
            f"{decodes} x {tokens} + {prompts} x {length}",
            Batch(decode=even(decodes, tokens), prefill=[(length, length)] * prompts),
        )


class Case:
    """A batch, the cache of many layers, and both paths over it.

    Args:
        heads: The model's.
        batch: The step.
    """

    block_size = 256

    def __init__(self, heads: Heads, batch: Batch) -> None:
        self.heads, self.batch = heads, batch
        generator = torch.Generator("cuda").manual_seed(0)
        blocks_of = [math.ceil(kv / self.block_size) for _, kv in batch.rows]
        num_blocks = sum(blocks_of) + 1
        layer_bytes = num_blocks * self.block_size * heads.token_bytes
        self.layers = max(2, min(MAX_LAYERS, STORAGE_BYTES // layer_bytes))
        self.spec = self._spec()
        self.storage = self.spec.allocate(num_blocks, torch.device("cuda"))
        for layer in range(self.layers):
            for part in self.spec.layer_views(self.storage, layer):
                if part is not None:
                    part.normal_(generator=generator)
        self.context = self._context(blocks_of, num_blocks)
        tokens = self.context.padded_batch_dimensions.token_count
        self.query = torch.randn(
            (tokens, 1, heads.query, heads.dim), device="cuda", generator=generator
        ).bfloat16()

        self.new = self._new()
        self.config = self._config()
        self.attention = self.attention_by("auto")
        lengths = self.context.gpu_view.mha_kv_seq_lengths
        self.kv_starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        self.layer = self._layer()

    def attention_by(self, kernel: str) -> Any:
        """The engine's attention by a kernel of FlashInfer, prepared for the step."""
        from megatron.core.inference.config import FlashInferKernel, InferenceConfig
        from megatron.core.inference.flashinfer_attention import FlashInferAttention

        inference = InferenceConfig(
            inference_attention_backend="flashinfer", flashinfer_kernel=FlashInferKernel(kernel)
        )
        attention = FlashInferAttention(self.context, self.config, inference)
        attention.allocate(self.context)
        attention.plan_step(self.context)
        attention.derive_step()
        return attention

    def _spec(self) -> Any:
        """The cache's."""
        from megatron.core.inference.kv_cache import AttentionKVCacheSpec

        return AttentionKVCacheSpec(
            num_layers=self.layers,
            block_size_tokens=self.block_size,
            dtype=torch.bfloat16,
            num_kv_heads=self.heads.kv,
            head_dim=self.heads.dim,
        )

    def _config(self) -> Any:
        """The model's."""
        from megatron.core.transformer import TransformerConfig

        return TransformerConfig(
            num_layers=self.layers,
            hidden_size=self.heads.query * self.heads.dim,
            num_attention_heads=self.heads.query,
            num_query_groups=self.heads.kv,
            kv_channels=self.heads.dim,
            params_dtype=torch.bfloat16,
            bf16=True,
        )

    def _layer(self) -> Any:
        """All that upstream's method needs of its layer."""
        from megatron.core.transformer.attention import SelfAttention

        layer = SelfAttention.__new__(SelfAttention)
        torch.nn.Module.__init__(layer)
        layer.eval()
        layer.config, layer.layer_number = self.config, 1
        layer.flash_attention_version, layer.batch_invariant_mode = None, False
        return layer

    def _context(self, blocks_of: list[int], num_blocks: int) -> Any:
        """What both paths read of a context, for a step that an engine has a graph of if it decodes."""
        from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions

        batch, rows = self.batch, self.batch.rows
        slots = len(batch.decode) if batch.slots is None else batch.slots
        requests = slots + len(batch.prefill)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        table = torch.full((requests, max(blocks_of)), -1, dtype=torch.int32)
        for row, count in enumerate(blocks_of):
            table[row, :count] = torch.tensor([order.pop() for _ in range(count)])

        def array(values: list[int], length: int) -> Tensor:
            padded = values + [values[-1] if length > requests else 0] * (length - len(values))
            return torch.tensor(padded, dtype=torch.int32)

        starts = [sum(query for query, _ in rows[:row]) for row in range(len(rows) + 1)]
        cpu = {
            "_cpu_mha_block_table": table,
            "_cpu_mha_query_lengths": array([query for query, _ in rows], requests),
            "_cpu_mha_kv_seq_lengths": array([kv for _, kv in rows], requests),
            "_cpu_mha_cu_query_seq_lengths": array(starts, requests + 1),
        }
        tokens = slots - len(batch.decode) + starts[-1]
        dimensions = InferenceBatchDimensions(tokens, len(batch.prefill), slots)
        view = {name.removeprefix("_cpu_"): value.cuda() for name, value in cpu.items()}
        return SimpleNamespace(
            num_query_heads_per_partition=self.heads.query,
            num_kv_heads_per_partition=self.heads.kv,
            hidden_size_per_attention_head=self.heads.dim,
            block_size_tokens=self.block_size,
            num_speculative_tokens=0,
            max_tokens=tokens,
            max_requests=requests,
            padded_batch_dimensions=dimensions,
            num_decode_requests=len(batch.decode),
            total_request_count=len(rows),
            paused_request_count=0,
            is_decode_only=lambda: not batch.prefill,
            using_cuda_graph_this_step=lambda: not batch.prefill,
            gpu_view=SimpleNamespace(**view),
            kv_cache_spec=self.spec,
            memory_buffer=self.storage,
            **{name: value.pin_memory() for name, value in cpu.items()},
        )

    def _new(self) -> Tensor | None:
        """What each layer appends, `(layers, parts, tokens, 1, *token_shape)`, if it prefills."""
        if not self.batch.prefill:
            return None
        blocks, positions = [], []
        for row, (query, kv) in enumerate(self.batch.rows):
            token = torch.arange(kv - query, kv)
            blocks.append(self.context._cpu_mha_block_table[row][token // self.block_size])
            positions.append(token % self.block_size)
        place = torch.cat(blocks).cuda(), torch.cat(positions).cuda()
        layers = (self.spec.layer_views(self.storage, layer) for layer in range(self.layers))
        return torch.stack(
            [
                torch.stack([part[place] for part in layer if part is not None]).unsqueeze(2)
                for layer in layers
            ]
        )

    def flashinfer(self, layer: int) -> Tensor:
        """One layer by FlashInfer, `(tokens, 1, query_heads, head_dim)`."""
        keys, values = self.spec.layer_views(self.storage, layer)
        if self.new is not None:
            self.attention.remember(*self.new[layer])
        return self.attention.run(self.query, keys, values, layer + 1)

    def flash(self, layer: int) -> Tensor:
        """The same by FlashAttention."""
        return self._flash(self.query, *self.spec.layer_views(self.storage, layer))

    def _flash(self, query: Tensor, keys: Tensor, values: Tensor | None) -> Tensor:
        view, rows = self.context.gpu_view, self.batch.rows
        return self.layer.flash_decode_and_prefill(
            query,
            keys,
            values,
            max(query for query, _ in rows),
            max(kv for _, kv in rows),
            view.mha_cu_query_seq_lengths,
            self.kv_starts,
            view.mha_kv_seq_lengths,
            view.mha_block_table,
            not self.batch.prefill,
        )

    def operations(self) -> int:
        """Floating-point operations of a layer by FlashInfer's path."""
        return self.batch.operations(self.heads)

    def calls(self) -> dict[str, timing.Call]:
        """What is timed; `flashinfer` is FlashInfer's path, `flash` upstream's."""
        return {"flashinfer": self.flashinfer, "flash": self.flash}

    def check(self, calls: dict[str, timing.Call]) -> None:
        """All give the same, up to rounding."""
        real = sum(query for query, _ in self.batch.rows)
        ours, *others = (
            call(self.layers - 1).flatten(1)[:real].float()  # type: ignore[attr-defined]
            for call in calls.values()
        )
        for other in others:
            error = float((ours - other).norm() / other.norm())
            assert error <= MAX_ERROR, f"two paths are {error:.3g} apart"

    def measure(self) -> dict[str, float]:
        """Microseconds of one layer by each path, and of preparing a step: device, and host.

        What the host takes to launch a layer outside of graphs is beside a path's name as `call`.
        """
        calls = self.calls()
        self.check(calls)
        graphs = {name: timing.graph_of(call, self.layers) for name, call in calls.items()}
        times = timing.alternate(graphs, self.layers, flush=True)
        prepare = timing.graph_of(lambda _: self.attention.derive_step(), 1)
        times["derive"] = timing.alternate({"derive": prepare}, 1)["derive"]
        for name, call in calls.items():
            times[f"{name} call"] = _host_us(partial(call, 0))
        return {**times, "host": _host_us(self._prepare)}

    def _prepare(self) -> None:
        self.attention.plan_step(self.context)
        self.attention.derive_step()


def _host_us(call: Callable[[], object]) -> float:
    """Microseconds that the host takes for a call, the device idle before; the median of several."""
    times = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def padding() -> list[dict[str, Any]]:
    """What padding rows of a decode graph cost, and how.

    Returns:
        A row per batch: its slots and real decodes, and microseconds of a layer as it is (`us`), with
        padding rows that are left to come out as NaN (`no_sink`), with such of one key (`one_key`),
        and without any (`exact`).
    """
    from megatron.core.inference.config import FlashInferKernel

    def without_sinks(xqa: Any) -> Any:
        return lambda *args, **options: xqa(*args, **{**options, "sinks": None})

    rows = []
    for slots, decodes, tokens in PADDED:
        times: dict[str, float] = {}
        for name in ("us", "no_sink", "one_key", "exact"):
            padded = slots if name != "exact" else None
            case = Case(SHAPES["GQA 4:1"], Batch(decode=even(decodes, tokens), slots=padded))
            kernel = case.attention._kernels.get(FlashInferKernel.XQA)
            if kernel is None:
                return []
            if name == "no_sink":
                kernel._xqa = without_sinks(kernel._xqa)
            if name == "one_key":
                case.context.gpu_view.mha_kv_seq_lengths[decodes:] = 1
            graph = timing.graph_of(case.flashinfer, case.layers)
            times[name] = timing.alternate({name: graph}, case.layers, flush=True)[name]
            del case, graph
            torch.cuda.empty_cache()
        rows.append(dict(slots=slots, decodes=decodes, tokens=tokens, **times))
    return rows


def measured(shape: str, phase: str, name: str, case: Case) -> dict[str, Any]:
    """A case's row: see `run`."""
    print(f"attention: {shape}, {phase} {name}", file=sys.stderr, flush=True)
    return dict(
        shape=shape,
        phase=phase,
        batch=name,
        us=case.measure(),
        bytes=case.batch.bytes_read(case.heads),
        operations=case.operations(),
    )


def run() -> list[dict[str, Any]]:
    """Measure every shape and batch.

    Returns:
        A row per case: microseconds of a layer by `flashinfer` and by `flash`, of launching it eagerly
        on the host (each one's `call`), of deriving a step on the device (`derive`) and of preparing
        it on the host (`host`), bytes of keys and values, and
        floating-point operations.
    """
    rows = []
    for shape, heads in SHAPES.items():
        for phase, batches in (
            ("decode", decode_batches()),
            ("prefill", prefill_batches()),
            ("mixed", mixed_batches()),
        ):
            for name, batch in batches:
                rows.append(measured(shape, phase, name, Case(heads, batch)))
                torch.cuda.empty_cache()
    return rows
