"""Device times of calls for one layer, as replays of CUDA graphs over many layers."""

import statistics
from collections.abc import Callable, Mapping

import torch

ROUNDS = 15
L2_BYTES = 256 << 20  # several times that of any GPU

Call = Callable[[int], object]
"""Launches the kernels of one layer, counted from 0."""


def graph_of(call: Call, layers: int) -> torch.cuda.CUDAGraph:
    """Capture one call per layer."""
    for _ in range(2):
        for layer in range(layers):
            call(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            call(layer)
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, layers: int) -> float:
    """Microseconds per layer of one replay."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / layers


def alternate(
    graphs: Mapping[str, torch.cuda.CUDAGraph], layers: int, flush: bool = False
) -> dict[str, float]:
    """Median microseconds per layer of each graph, replayed in turn.

    Args:
        flush: Write over what is in the L2 cache before each replay.
    """
    cache = torch.empty(L2_BYTES if flush else 0, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            cache.fill_(1)
            times[name].append(replay_us(graph, layers))
    return {name: statistics.median(values) for name, values in times.items()}
