# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""Work lists for multi-latent attention that are made on the device, against plain Python."""

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.inference.flashinfer_attention.mla_schedule import (
    KEY_TILE,
    TILE_COST,
    MlaSchedule,
    _cuts_kernel,
)
from megatron.core.inference.flashinfer_attention.step import StepShape

from .test_split_schedule import random_lengths
from .test_step import DEVICE, MAX_BLOCKS, on_device

WORK = ("query", "page", "partial", "queries", "keys", "pair", "key", "end_key")
MERGE = ("first", "end", "partial", "end_partial", "stride")


class Case:
    """A step, its list as the kernels read it, and what should be in it.

    Args:
        queries (list[int]): Query tokens of each request.
        keys (list[int]): Keys of each.
        padding (int): Padding tokens.
        heads (int): Query heads.
        multiprocessors (int): Of the GPU.
        max_requests (int): Rows that there is room for.
        padded_requests (int | None): Rows of the step; None: as many as requests.
    """

    def __init__(
        self,
        queries,
        keys,
        padding=0,
        heads=16,
        multiprocessors=132,
        max_requests=12,
        padded_requests=None,
    ) -> None:
        self.starts = [sum(queries[:row]) for row in range(len(queries) + 1)]
        num_tokens = sum(queries) + padding
        self.shape = StepShape(
            num_decode=0,
            num_requests=len(queries),
            decode_slots=0,
            padded_requests=len(queries) if padded_requests is None else padded_requests,
            num_tokens=num_tokens,
            has_prefill=True,
        )
        self.heads = heads
        self.schedule = MlaSchedule(
            max_requests, num_tokens, MAX_BLOCKS, heads, 512, multiprocessors, DEVICE
        )
        for array in (self.schedule.works, self.schedule._cuts):
            array.fill_(-(2**31))
        self.schedule.derive(
            self.shape,
            on_device(self.starts, max_requests + 1),
            on_device(queries, max_requests),
            on_device(keys, max_requests),
        )
        self.ctas = self.schedule.ctas(self.shape)
        self.tile = 64 * self.ctas
        self._read()

        self.expected = {}
        rows = [*zip(range(len(queries)), queries, keys), (len(queries), padding, 0)]
        for row, count, length in rows:
            for pair in range(0, count * heads, self.tile):
                seen = length - count + min((pair + self.tile) // heads, count) if length else 0
                page = row * MAX_BLOCKS if length else 0
                self.expected[self.starts[row], pair] = (page, count, length, seen)

    def _read(self) -> None:
        info = self.schedule.plan_info(self.ctas)
        assert info[0] == self.ctas and not any(offset % 4 for offset in info[2:])
        numbers = self.schedule.works.tolist()
        query, page, partial, *merges, queries, keys, pair, key, end_key, first = (
            offset // 4 for offset in info[2:16]
        )
        works = (query, page, partial, queries, keys, pair, key, end_key)
        ends = numbers[first : first + info[1] + 1]
        assert ends[0] == 0 and ends[-1] <= self.schedule.capacity
        self.clusters = [
            [
                {name: numbers[array + work] for name, array in zip(WORK, works)}
                for work in range(begin, end)
            ]
            for begin, end in zip(ends, ends[1:])
        ]
        entries = [
            {name: numbers[array + cta] for name, array in zip(MERGE, merges)}
            for cta in range(info[0] * info[1])
        ]
        assert all(entry["first"] <= entry["end"] for entry in entries)  # else it would not end
        self.merges = [entry for entry in entries if entry["first"] < entry["end"]]

    def loads(self) -> list[int]:
        """Keys of each cluster, with what tiles cost beside them."""
        return [
            sum(work["end_key"] - work["key"] + TILE_COST for work in works)
            for works in self.clusters
        ]

    def check(self) -> None:
        """Every tile's keys are computed once, and merged wherever they are split."""
        parts_of: dict = {}
        merged = 0
        for works in self.clusters:
            for work in works:
                parts_of.setdefault((work["query"], work["pair"]), []).append(work)
        assert parts_of.keys() == self.expected.keys()
        used: set = set()
        for (query, pair), works in parts_of.items():
            page, count, length, seen = self.expected[query, pair]
            assert {(work["page"], work["queries"], work["keys"]) for work in works} == {
                (page, count, length)
            }
            assert [work["key"] for work in works] == [0, *(work["end_key"] for work in works[:-1])]
            assert works[-1]["end_key"] == seen
            assert all(work["key"] % KEY_TILE == 0 for work in works)
            partial = [work["partial"] for work in works]
            if len(works) == 1:
                assert partial == [-1]
                continue
            assert all(work["key"] < work["end_key"] for work in works)
            assert partial == [partial[0] + part * self.tile for part in range(len(works))]
            rows = set(range(partial[0], partial[-1] + self.tile))
            assert not rows & used and rows <= set(range(self.schedule.partial_rows))
            used |= rows

            first = query * self.heads + pair
            end = first + min(count * self.heads - pair, self.tile)
            merges = [entry for entry in self.merges if first <= entry["first"] < end]
            assert [entry["first"] for entry in merges] == [
                first,
                *(entry["end"] for entry in merges[:-1]),
            ]
            assert merges[-1]["end"] == end
            for entry in merges:
                assert entry["partial"] == partial[0] + entry["first"] - first
                assert entry["end_partial"] == partial[-1] + end - first
                assert entry["stride"] == self.tile
            merged += len(merges)
        assert merged == len(self.merges)


class TestMlaSchedule:
    @pytest.fixture(params=[2, 7, 132])
    def multiprocessors(self, request):
        """Of the GPU, for which the list is made."""
        return request.param

    @pytest.mark.parametrize("heads", [1, 16, 64, 128])
    @pytest.mark.parametrize("longest", [1, 200])
    def test_all_keys_once(self, heads, longest, multiprocessors):
        queries, keys = random_lengths(heads + longest, 9, longest)
        Case(queries, keys, 13, heads, multiprocessors, padded_requests=10).check()

    @pytest.mark.parametrize("heads", [16, 128])
    @pytest.mark.parametrize("keys", [[1], [63], [64], [65], [1000], [40, 32768], [5] * 12])
    def test_decodes(self, keys, heads, multiprocessors):
        case = Case([1] * len(keys), keys, heads=heads, multiprocessors=multiprocessors)
        case.check()
        assert case.ctas == (2 if heads == 128 else 1)

    def test_load_is_even(self, multiprocessors):
        """Whatever the lengths; but for a key tile, and the cost of a tile that is cut."""
        case = Case([1] * 12, [70, 4000, 129, 12000, 800, 9, 1000, 300, 64, 20000, 50, 3000])
        loads = case.loads()
        assert max(loads) - sum(loads) / len(loads) <= KEY_TILE + TILE_COST

    def test_many_rows(self, multiprocessors):
        """As many as an engine has by default on a GPU with much memory."""
        queries, keys = [1] * 200 + [300, 7], [500] * 200 + [400, 7]
        Case(queries, keys, multiprocessors=multiprocessors, max_requests=12000).check()

    @pytest.mark.parametrize("padding", [0, 5])
    def test_no_request(self, padding, multiprocessors):
        case = Case([], [], padding, multiprocessors=multiprocessors, padded_requests=4)
        case.check()
        assert not case.merges

    def test_requests_without_tokens(self, multiprocessors):
        Case([0, 1, 0, 0, 70, 0], [0, 99, 9, 0, 70, 5], 3, multiprocessors=multiprocessors).check()

    def test_costs_beyond_32_bits(self, multiprocessors):
        """Of prompts of which much is cached."""
        queries, keys = [15] * 10, [2**24] * 10
        case = Case(queries, keys, heads=128, multiprocessors=multiprocessors)
        case.check()
        loads = case.loads()
        assert max(loads) <= 1.001 * sum(loads) / len(loads)


@pytest.mark.parametrize(
    "heads, queries", [(128, [46342, 9, 50000]), (32, [131072]), (16, [9, 185365])]
)
def test_prompts_of_many_tiles(heads, queries):
    """Whose costs are beyond 32 bits: cuts are in order, and as many keys apart as they should be."""
    clusters, tokens = 2, 128 // heads
    starts = [sum(queries[:row]) for row in range(len(queries) + 1)]
    keys = [query + 1 for query in queries]
    schedule = MlaSchedule(4, starts[-1], MAX_BLOCKS, heads, 512, 2 * clusters, DEVICE)
    cuts = torch.full((2, clusters + 1), -1, dtype=torch.int32, device=DEVICE)
    _cuts_kernel[(clusters + 1,)](
        on_device(starts, 5),
        on_device(queries, 4),
        on_device(keys, 4),
        len(queries),
        starts[-1],
        cuts,
        cuts.stride(0),
        CLUSTERS=clusters,
        TOKENS=tokens,
        ROWS=schedule.rows,
        KEYS=KEY_TILE,
        COST=TILE_COST,
    )
    costs = torch.cat(
        [
            1 + torch.arange(tokens, query + tokens, tokens).clamp(max=query) + TILE_COST
            for query in queries
        ]
    ).cumsum(0)
    middle = int((costs <= costs[-1] // clusters).sum())
    assert cuts[0].tolist() == [0, pytest.approx(middle, abs=1), len(costs)]
    assert cuts[1, 2] == 0


def test_the_grid_is_that_of_the_dimensions():
    """Whatever is in a step, for a graph keeps its grid."""
    steps = [([1] * 6, [9] * 6, 2), ([1], [700], 7), ([], [], 8)]
    grids = {
        tuple(case.schedule.plan_info(case.ctas)[:2])
        for queries, keys, padding in steps
        for case in [Case(queries, keys, padding, multiprocessors=7, padded_requests=7)]
    }
    assert len(grids) == 1
