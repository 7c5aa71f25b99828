# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""Steps of one attention one after another, eagerly and as replays of CUDA graphs."""

from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("flashinfer")

from megatron.core.inference.flashinfer_attention.kernels import Fa2, Fa3, FmhaV2, TrtllmGen, Xqa

from .batch import DEVICE, HAVE_GPU, NAN, Batch

needs_gpu = pytest.mark.skipif(not HAVE_GPU, reason="CUDA graphs and streams need a GPU")

LAYERS = (1, 2)
WINDOW = 100
LIMITS = dict(max_requests=32, max_tokens=512, max_length=1100, num_blocks=64)
SHAPES = {
    "one_token": dict(),
    "three_tokens": dict(tokens=3),
    # With so many query heads per KV head the kernel of decode is fa2 while that of prefill is not.
    "ratio32": dict(heads=32, kv_heads=1),
}


@pytest.fixture(params=["auto", "fa2", "fmha-v2"])
def kernel(request):
    """A kernel to pin."""
    return request.param


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def shape(request):
    """Heads, and tokens of a decode request."""
    return request.param


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A poison for integers that no kernel survives as a length, an index or an offset."""
    return tensor.view(torch.uint8).fill_(0x7F)


class Steps:
    """An attention of two layers, the first with a window, both with sinks, and its steps.

    All tensors that a graph can see stay where they are, as an engine's do.

    Args:
        kernel (str): Kernel to pin.
        shape (dict): Options of each batch.
    """

    def __init__(self, kernel: str, **shape) -> None:
        self.options = dict(
            **{**LIMITS, **shape}, window_size=(WINDOW, 0), window_attn_skip_freq=[1, 0]
        )
        self.batch = self.make([5], [])
        self.attention = self.batch.attention(kernel)
        spec = self.batch.spec
        self.caches = {layer: spec.layer_views(self.batch.storage, layer - 1) for layer in LAYERS}
        self.query = torch.zeros(
            (self.options["max_tokens"], 1, self.batch.heads, self.batch.head_dim),
            dtype=self.batch.dtype,
            device=DEVICE,
        )
        self.sinks = torch.zeros(self.batch.heads, dtype=self.batch.dtype, device=DEVICE)

    def make(self, decode, prefill, dims=None, seed=0) -> Batch:
        """A batch of this attention's shape."""
        return Batch(decode, prefill, dims, seed=seed, **self.options)

    def load(self, batch: Batch) -> None:
        """Let a batch be the current one, with sinks of its own."""
        self.batch.become(batch)
        self.query[: batch.query.size(0)] = batch.query
        self.sinks.copy_(torch.linspace(-1, 1 + len(batch.kvs) % 5, self.sinks.numel()))

    def prepare(self) -> None:
        """Plan and derive what the current batch's layers need."""
        self.attention.plan_step(self.batch.context)
        self.attention.derive_step()

    def run(self) -> list[torch.Tensor]:
        """Each layer's attention."""
        query = self.query[: self.batch.dims.token_count]
        return [
            self.attention.run(query, keys, values, layer, self.sinks)
            for layer, (keys, values) in self.caches.items()
        ]

    def check(self, batch: Batch, outputs: list[torch.Tensor]) -> None:
        """The outputs are right, padding is finite."""
        for layer, output in zip(LAYERS, outputs):
            window = WINDOW if layer == 1 else -1
            batch.check(output.squeeze(1), layer=layer, window=window, sinks=self.sinks)

    def poison(self) -> None:
        """Spoil all that is derived anew for each step."""
        if HAVE_GPU:
            torch.cuda.synchronize()  # pinned memory may still be on its way
        for kernel in self.attention._kernels.values():
            if isinstance(kernel, (Xqa, FmhaV2, TrtllmGen)):
                numbers(kernel._pages.table)
            if isinstance(kernel, (Xqa, TrtllmGen)):
                numbers(kernel._lengths)
            if isinstance(kernel, Xqa):
                kernel._scratch.fill_(0xFF)
            if isinstance(kernel, (FmhaV2, TrtllmGen)):
                numbers(kernel._rows._first_token)
                numbers(kernel._rows.query_starts)
                numbers(kernel._rows.kv_starts[1:])
            if isinstance(kernel, Fa3):
                numbers(kernel._schedule.works)
            if isinstance(kernel, Fa2):
                for schedule in kernel._schedules.values():
                    numbers(schedule.works)
                    numbers(schedule.query_starts)
                    numbers(schedule.last_page_lengths)
                kernel._workspace.fill_(0xFF)


def decode_steps(steps: Steps, slots: int) -> list[Batch]:
    """Batches for a graph of that many decode requests."""
    tokens = steps.batch.tokens
    dims = (slots * tokens, 0, slots)

    def batch(lengths, seed):
        return steps.make([length + tokens - 1 for length in lengths], [], dims, seed)

    edges = [15, 63, 64, 127, 255, 256, 511, 767, 1, 2][:slots]
    growing = [batch([edge + step for edge in edges], 1) for step in range(4)]
    others = [600, 3, 257, 90, 1, 16, 511, 33, 128, 700, 64, 5][:slots]
    return growing + [batch(others, 2), batch(others[:3], 3), batch([1], 4), batch(others, 5)]


MIXED = (400, 4, 8)


def mixed_steps(steps: Steps) -> list[Batch]:
    """Batches for a graph of `MIXED` dimensions."""
    tokens = steps.batch.tokens
    lengths = [70, 300, 9, 255, 512, 1, 64, 17, 40, 1000, 128, 31]
    prefills = [(130, 130), (3, 500), (1, 257), (60, 188)]

    def batch(num_decode, num_prefill, more, seed):
        decode = [length + more + tokens - 1 for length in lengths[:num_decode]]
        prefill = [(query, kv + more) for query, kv in prefills[:num_prefill]]
        return steps.make(decode, prefill, MIXED, seed)

    growing = [batch(8, 4, step, 1) for step in range(3)]
    return growing + [
        batch(3, 2, 0, 2),  # prefills in decode slots
        batch(11, 1, 0, 3),  # decodes in prefill slots
        batch(0, 4, 0, 4),
        batch(0, 1, 0, 5),
        # Requests that are shorter than a decode may be.
        steps.make([], [(1, 1), (2, 2)], MIXED, 6),
        batch(8, 4, 5, 7),
    ]


class Graph:
    """The layers of a step, captured with one batch, to be replayed with others of its dimensions.

    Args:
        steps (Steps): Where the batches run.
        batch (Batch): One that has as many requests as the graph has slots.
    """

    def __init__(self, steps: Steps, batch: Batch) -> None:
        assert len(batch.kvs) == batch.dims.req_count
        self.steps = steps
        steps.load(batch)
        steps.prepare()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            steps.run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = steps.run()

    def replay(self) -> list[torch.Tensor]:
        """The outputs of the batch that the step was prepared for."""
        for output in self.outputs:
            output.fill_(NAN)
        self.graph.replay()
        return self.outputs


def check_replay(graph: Graph, batch: Batch) -> None:
    """A replay is right, and bitwise what the same padded batch gives eagerly."""
    steps = graph.steps
    steps.load(batch)
    steps.prepare()
    eager = [output.clone() for output in steps.run()]
    steps.poison()
    steps.prepare()
    replayed = graph.replay()
    steps.check(batch, replayed)
    for ours, theirs in zip(replayed, eager):
        assert torch.equal(ours, theirs)


def capturing(steps: Steps, dims) -> Batch:
    """A batch that fills all slots, as dummy requests do for a capture."""
    token_count, num_prefill, num_decode = dims
    tokens = steps.batch.tokens
    prefill = [1] * (num_prefill - 1)
    if num_prefill:
        prefill.append(token_count - num_decode * tokens - sum(prefill))
    return steps.make([tokens] * num_decode, [(query, query) for query in prefill], dims, seed=9)


@pytest.mark.parametrize("graph", [False, True])
def test_every_step_derives_all_it_needs(kernel, shape, graph):
    """Nothing of one step is left for the next, in whatever order they come."""
    steps = Steps(kernel, graph=graph, **shape)
    decode, mixed = decode_steps(steps, 12), mixed_steps(steps)
    for batch in (decode[3], mixed[3], decode[5], mixed[4], mixed[7], decode[6]):
        steps.load(batch)
        steps.poison()
        steps.prepare()
        steps.check(batch, steps.run())


def test_a_first_layer_derives_each_time(kernel):
    """It runs before its capture, too, and what it derives must be in its graph."""
    steps = Steps(kernel, graph=True)
    for batch in (decode_steps(steps, 12)[3], mixed_steps(steps)[3]):
        steps.load(batch)
        steps.prepare()
        steps.run()
        for each in steps.attention._kernels.values():
            if hasattr(each, "_pages"):
                numbers(each._pages.table)
        steps.check(batch, steps.run())


def test_another_layer_derives_where_the_first_does_not_run(kernel):
    """As where a graph holds the first layer, and Python sees the second alone."""
    steps = Steps(kernel)
    first, second = decode_steps(steps, 12)[3:5]
    steps.load(first)
    steps.prepare()
    steps.check(first, steps.run())
    steps.load(second)
    steps.poison()
    steps.prepare()
    del steps.caches[1]
    [output] = steps.run()
    second.check(output.squeeze(1), layer=2, sinks=steps.sinks)


@needs_gpu
class TestGraphs:
    def test_decode(self, kernel, shape):
        steps = Steps(kernel, graph=True, **shape)
        tokens = steps.batch.tokens
        graph = Graph(steps, capturing(steps, (12 * tokens, 0, 12)))
        for batch in decode_steps(steps, 12):
            check_replay(graph, batch)

    def test_mixed(self, kernel, shape):
        steps = Steps(kernel, graph=True, **shape)
        graph = Graph(steps, capturing(steps, MIXED))
        for batch in mixed_steps(steps):
            check_replay(graph, batch)

    def test_graphs_in_turn(self, kernel, shape):
        """Graphs of several dimensions share the attention, and eager steps come between."""
        steps = Steps(kernel, graph=True, **shape)
        tokens = steps.batch.tokens
        graphs = [
            Graph(steps, capturing(steps, dims))
            for dims in (MIXED, (12 * tokens, 0, 12), (2 * tokens, 0, 2))
        ]
        batches = [mixed_steps(steps), decode_steps(steps, 12), decode_steps(steps, 2)]
        for turn in (0, 3, 4):
            for graph, of_graph in zip(graphs, batches):
                check_replay(graph, of_graph[turn])

    def test_replay_alone(self, kernel):
        """Between prepare and replay no eager run sets anything up."""
        steps = Steps(kernel, graph=True)
        graph = Graph(steps, capturing(steps, MIXED))
        for batch in mixed_steps(steps):
            steps.load(batch)
            steps.poison()
            steps.prepare()
            steps.check(batch, graph.replay())


@contextmanager
def no_synchronization():
    """Whatever makes the host wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
class TestNoSynchronization:
    def test_the_mode_finds_what_synchronizes(self):
        flag = torch.ones(1, device=DEVICE)
        with no_synchronization(), pytest.raises(RuntimeError, match="synchronizing"):
            flag.item()

    def test_eager(self, kernel, shape):
        steps = Steps(kernel, **shape)
        for batch in decode_steps(steps, 12)[3:6] + mixed_steps(steps)[2:6]:
            steps.load(batch)
            with no_synchronization():
                steps.prepare()
                outputs = steps.run()
            steps.check(batch, outputs)

    def test_replay(self, kernel, shape):
        steps = Steps(kernel, graph=True, **shape)
        graph = Graph(steps, capturing(steps, MIXED))
        for batch in mixed_steps(steps)[2:6]:
            steps.load(batch)
            with no_synchronization():
                steps.prepare()
                outputs = graph.replay()
            steps.check(batch, outputs)


@needs_gpu
class TestLargeSteps:
    """What is allocated suffices for steps as large as an engine's."""

    @pytest.fixture
    def steps(self, kernel):
        return Steps(
            kernel,
            graph=True,
            heads=32,
            kv_heads=8,
            block_size=16,
            max_requests=512,
            max_tokens=4096,
            max_length=4096,
            num_blocks=2048,
        )

    def test_prefill(self, steps):
        prefill = [(query, query) for query in (2000, 1024, 512, 256, 200, 100, 3, 1)]
        batch = steps.make([], prefill, (4096, 8, 0))
        steps.load(batch)
        steps.prepare()
        steps.check(batch, steps.run())

    def test_decode_graph(self, steps):
        dims = (512, 0, 512)
        graph = Graph(steps, capturing(steps, dims))
        check_replay(graph, steps.make([1 + row % 60 for row in range(512)], [], dims, seed=1))
        check_replay(graph, steps.make([2048], [], dims, seed=2))
