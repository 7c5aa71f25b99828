"""Append kernel: bytes per second, stage 1 against the base's kernel and against a device copy.

All three are timed in alternation in one run, each as the replay of a CUDA graph that appends to
one layer after another, so that inputs and targets together exceed the L2 cache. A byte appended is
read once and written once, and both count, as they do for the copy.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import timing

BLOCK_SIZE = 256
WORKING_SET_BYTES = 1 << 30  # many times the 50 MiB of L2
STORAGE_BYTES = 16 << 30  # decode tokens lie in a block each, so that storage is the larger limit
MAX_LAYERS = 64
DECODE_TOKENS = 512
TOKENS = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
SHAPES: dict[str, tuple[int, int, str]] = {
    "GQA 8 x 128": (8, 128, "NHD"),
    "GQA 8 x 128, HND": (8, 128, "HND"),
    "MHA 32 x 128": (32, 128, "NHD"),
    "one KV head x 128": (1, 128, "NHD"),
    "GQA 8 x 80": (8, 80, "NHD"),
    "MLA latent 576": (1, 576, "latent"),
}


def load(path: Path) -> ModuleType:
    """Import one file by its path, so that two trees' modules can live in one process."""
    spec = importlib.util.spec_from_file_location(f"bench_{abs(hash(path))}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Case:
    """Inputs and targets of one shape and token count, a set for each layer."""

    def __init__(self, heads: int, head_dim: int, layout: str, tokens: int) -> None:
        self.comparable = layout == "NHD"  # the base's kernel knows no other layout
        kinds = 1 if layout == "latent" else 2
        row_bytes = 2 * heads * head_dim
        self.bytes_moved = 2 * kinds * tokens * row_bytes
        # A step of few tokens is decode, one token in each of many blocks; more is prefill.
        blocks = tokens if tokens <= DECODE_TOKENS else tokens // BLOCK_SIZE
        layers = min(
            MAX_LAYERS,
            -(-WORKING_SET_BYTES // self.bytes_moved),
            STORAGE_BYTES // (kinds * blocks * BLOCK_SIZE * row_bytes),
        )
        generator = torch.Generator("cuda").manual_seed(tokens)
        order = torch.randperm(blocks, device="cuda", generator=generator)
        token = torch.arange(tokens, device="cuda")
        if tokens <= DECODE_TOKENS:
            block_idx = order
            position = torch.randint(BLOCK_SIZE, (tokens,), device="cuda", generator=generator)
        else:
            block_idx, position = order[token // BLOCK_SIZE], token % BLOCK_SIZE
        self.block_idx, self.position = block_idx.contiguous(), position.to(torch.int32)
        options: dict[str, Any] = dict(device="cuda", dtype=torch.bfloat16)
        self.rows = torch.randn(
            (kinds, layers, tokens, heads, head_dim), **options, generator=generator
        )
        shape = [kinds, layers, blocks, BLOCK_SIZE, heads, head_dim]
        if layout == "HND":
            shape[3], shape[4] = shape[4], shape[3]
        self.storage = torch.zeros(shape, **options)
        self.cache = self.storage.transpose(3, 4) if layout == "HND" else self.storage
        self.copied = torch.randn((2, layers, kinds * tokens * heads * head_dim), **options)
        self.layers, self.tokens = layers, tokens

    def stage1(self, append: Callable[..., None], layer: int) -> None:
        """Append with the stage's kernel."""
        rows, caches = self.rows[:, layer].unbind(), self.cache[:, layer].unbind()
        append(rows, caches, self.block_idx, self.position, self.tokens)

    def base(self, append: Callable[..., None], layer: int) -> None:
        """Append with the base's kernel, which takes keys of shape (tokens, 1, heads, head_dim)."""
        append(
            layer,
            self.rows[0, layer].unsqueeze(1),
            self.rows[1, layer].unsqueeze(1),
            self.storage,
            self.tokens,
            self.block_idx,
            self.position,
        )

    def copy(self, layer: int) -> None:
        """Copy as many bytes from one contiguous place to another."""
        self.copied[0, layer].copy_(self.copied[1, layer])

    def check(self) -> None:
        """Every appended row is in its place."""
        found = self.cache[:, :, self.block_idx, self.position.long()]
        assert torch.equal(found, self.rows), "the appended rows are not where they belong"


def measure(case: Case, calls: dict[str, timing.Call]) -> dict[str, float]:
    """Median microseconds of each call, timed in alternation."""
    graphs = {}
    for name, call in calls.items():
        case.storage.zero_()
        graphs[name] = timing.graph_of(call, case.layers)
        graphs[name].replay()
        if name != "copy":
            case.check()
    return timing.alternate(graphs, case.layers)


def run(base_tree: Path, stage1_tree: Path) -> list[dict[str, Any]]:
    """Measure every shape and token count.

    Returns:
        A row per case: median microseconds on the device of stage 1, base and copy (`us`), and what
        follows from them. The base's kernel knows NHD with values only; elsewhere `ratio` is None.
    """
    inference = Path("megatron/core/inference")
    base = load(base_tree / inference / "contexts/fused_kv_append_kernel.py")
    stage1 = load(stage1_tree / inference / "kv_append_kernel.py")
    rows = []
    for name, shape in SHAPES.items():
        print(f"append: {name}", file=sys.stderr, flush=True)
        for tokens in TOKENS:
            case = Case(*shape, tokens)
            calls: dict[str, timing.Call] = {
                "stage1": functools.partial(case.stage1, stage1.triton_append),
                "copy": case.copy,
            }
            if case.comparable:
                calls["base"] = functools.partial(case.base, base.triton_append_key_value_cache)
            us = measure(case, calls)
            rows.append(
                dict(
                    shape=name,
                    tokens=tokens,
                    us=us,
                    terabytes_per_second=case.bytes_moved / us["stage1"] / 1e6,
                    of_copy=us["copy"] / us["stage1"],
                    ratio=us["stage1"] / us["base"] if "base" in us else None,
                )
            )
            del case, calls
            torch.cuda.empty_cache()
    return rows
