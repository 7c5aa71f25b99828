# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""Page tables and prefill schedules that are derived on the device, against plain Python."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.inference.flashinfer_attention.step import (
    PageTable,
    PrefillSchedule,
    StepShape,
    make_tails_finite,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_BLOCKS = 5
MANY = 10**6  # more keys than any step has


def on_device(values, length=None) -> torch.Tensor:
    """Numbers as an int32 array, filled up with what no kernel should use."""
    values = list(values) + [-(2**31)] * ((length or len(values)) - len(values))
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("pages_per_block", [1, 2, 4, 16])
def test_page_table(pages_per_block):
    table = PageTable(8, MAX_BLOCKS, pages_per_block, DEVICE)
    blocks = torch.full((8, MAX_BLOCKS), -1, dtype=torch.int32)
    blocks[0, :2] = torch.tensor([7, 3])
    blocks[1, :3] = torch.tensor([0, 9, 4])
    blocks[2] = torch.arange(MAX_BLOCKS) + 20
    untouched = table.table[5:].clone()
    table.derive(5, blocks.to(DEVICE))
    for row in range(5):
        expected = [
            max(block, 0) * pages_per_block + page
            for block in blocks[row].tolist()
            for page in range(pages_per_block)
        ]
        assert table.table[row].tolist() == expected
    assert torch.equal(table.table[5:], untouched)


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("heads, head_dim", [(1, 80), (3, 96)])
def test_tails_are_finite(page_size, heads, head_dim):
    """Of rows with queries, and nowhere else."""
    lengths = [page_size, page_size + 1, 5, 2 * page_size - 1, 9, 0]
    has_queries = [1, 1, 1, 1, 0, 0]
    starts = [sum(has_queries[:row]) for row in range(len(lengths) + 1)]
    table = torch.randperm(24, generator=torch.Generator().manual_seed(0)).int().view(6, 4)
    # As in a cache, where a layer's values are a part of a larger buffer.
    pages = torch.randn(24, 2, page_size, heads, head_dim).to(torch.bfloat16)[:, 1]
    expected = pages.clone()
    for row, tail in ((1, 1), (2, 5), (3, page_size - 1)):
        page = table[row, lengths[row] // page_size]
        for spoilt in (torch.nan, torch.inf, -torch.inf):
            where = torch.rand(page_size - tail, heads, head_dim) < 0.2
            pages[page, tail:][where] = spoilt
            expected[page, tail:][where] = 0
    for page in (table[4, 0], table[0, 1], table[5, 0]):
        pages[page] = expected[page] = torch.nan
    storage = pages.to(DEVICE)
    make_tails_finite(storage, table.to(DEVICE), on_device(starts), on_device(lengths), 6)
    assert torch.equal(storage.cpu().view(torch.int16), expected.view(torch.int16))


def works_of(schedule: PrefillSchedule, is_ragged=False) -> list[list[dict[str, int]]]:
    """The works of each CTA, read as the kernel reads them."""
    names = ["tile", "start", "page", "query", "kv", "head", "first", "request", "shared"]
    plan_info = schedule.ragged_plan_info if is_ragged else schedule.plan_info
    offsets = dict(zip(names, plan_info))
    assert offsets.pop("shared") == 0
    assert all(offset % 16 == 0 for offset in offsets.values())
    works = schedule.works.tolist()
    first = offsets.pop("first") // 4
    ends = works[first : first + schedule.num_ctas + 1]
    assert ends[0] == 0
    return [
        [
            {name: works[offset // 4 + work] for name, offset in offsets.items()}
            for work in range(begin, end)
        ]
        for begin, end in zip(ends, ends[1:])
    ]


def random_step(generator: torch.Generator, max_requests: int, max_tokens: int):
    """Lengths of a step: decode rows of one token each, then prefill rows."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    decode, prefill = number(0, max_requests // 2), number(0, max_requests // 2)
    queries = [1] * decode
    for _ in range(prefill):
        room = max_tokens - sum(queries) - (prefill + decode - len(queries) - 1)
        queries.append(number(1, max(1, room // 2)))
    kvs = [query + number(0, 1) * number(0, 900) for query in queries]
    shape = StepShape(
        num_decode=number(0, decode),
        num_requests=decode + prefill,
        decode_slots=0,
        padded_requests=number(decode + prefill, max_requests),
        num_tokens=number(sum(queries), max_tokens),
        has_prefill=True,
    )
    return shape, queries, kvs


def works_in(queries):
    """Keys that each tile of prompts of these lengths sees."""
    return [min((tile + 1) * 128, query) for query in queries for tile in range(-(-query // 128))]


def sections_of(order, num_keys, schedule):
    """Works in the order of the list, a list for each section, of which none comes twice."""
    heads, kv_heads = schedule.num_query_heads, schedule.num_kv_heads
    wanted = -(-num_keys * kv_heads // schedule.keys_in_cache)
    sections = max(1, min(wanted, len(order) // (schedule.MIN_TURNS * schedule.num_ctas)))
    together = -(-kv_heads // sections) * heads // kv_heads
    groups = itertools.groupby(order, lambda work: work["head"] // together)
    found = [(number, list(works)) for number, works in groups]
    assert [number for number, _ in found] == list(range(len(found)))
    return [works for _, works in found]


class TestPrefillSchedule:
    @pytest.fixture(params=[1, 6, 132])
    def num_ctas(self, request):
        """Multiprocessors of the GPU, for which the list is made."""
        return request.param

    @pytest.mark.parametrize(
        "head_dim, heads, kv_heads, keys_in_cache",
        [(128, 3, 3, 700), (64, 4, 2, 2500), (256, 1, 1, 100), (128, 6, 3, 5000), (64, 4, 1, MANY)],
    )
    @pytest.mark.parametrize("seed", range(2))
    def test_every_tile_of_every_head_once(
        self, head_dim, heads, kv_heads, keys_in_cache, seed, num_ctas
    ):
        generator = torch.Generator().manual_seed(seed)
        schedule = PrefillSchedule(
            12, 1500, MAX_BLOCKS, heads, kv_heads, head_dim, num_ctas, keys_in_cache, DEVICE
        )
        tile = schedule.tile_tokens(head_dim)
        for _ in range(2):
            shape, queries, kvs = random_step(generator, 12, 1500)
            starts = [sum(queries[:row]) for row in range(len(queries) + 1)]
            schedule.derive(
                shape, on_device(starts, 13), on_device(queries, 12), on_device(kvs, 12)
            )
            padding = shape.num_tokens - sum(queries)
            rows = [
                (row, starts[row], queries[row], kvs[row])
                for row in range(shape.num_decode, shape.num_requests)
            ] + [(shape.num_requests, starts[-1], padding, 0)]
            expected = sorted(
                (number, start, row * MAX_BLOCKS, query, kv, head, row)
                for row, start, query, kv in rows
                for number in range(-(-query // tile))
                for head in range(heads)
            )
            ctas = works_of(schedule)
            found = sorted(tuple(work.values()) for works in ctas for work in works)
            assert found == expected
            # Where keys lie as the queries do, a request's first key is found as its first query.
            for plain, ragged in zip(ctas, works_of(schedule, is_ragged=True)):
                assert ragged == [work | {"page": work["start"]} for work in plain]

            # Dealt out evenly, there and back.
            counts = [len(works) for works in ctas]
            assert max(counts) - min(counts) <= 1
            order = [
                works[turn]
                for turn in range(max(counts))
                for works in (ctas, ctas[::-1])[turn % 2]
                if turn < len(works)
            ]
            sections = sections_of(order, sum(kv for *_, kv in rows), schedule)
            for place, section in enumerate(reversed(sections)):
                keys = [
                    min(work["kv"] - work["query"] + (work["tile"] + 1) * tile, work["kv"])
                    for work in section
                ]
                assert keys == sorted(keys, reverse=place % 2 == 0)
                tiles = [(work["request"], work["tile"]) for work in section]
                assert len(list(itertools.groupby(tiles))) == len(set(tiles))

    @pytest.mark.parametrize("keys_in_cache", [2000, MANY])
    def test_load_is_balanced(self, num_ctas, keys_in_cache):
        schedule = PrefillSchedule(12, 4096, MAX_BLOCKS, 8, 2, 128, num_ctas, keys_in_cache, DEVICE)
        queries = [2048, 1024, 512, 256, 128]
        starts = [sum(queries[:row]) for row in range(len(queries) + 1)]
        shape = StepShape(0, 5, 0, 5, sum(queries), True)
        schedule.derive(
            shape, on_device(starts, 13), on_device(queries, 12), on_device(queries, 12)
        )
        loads = [
            sum(min((work["tile"] + 1) * 128, work["kv"]) for work in works)
            for works in works_of(schedule)
        ]
        works = sorted((load for load in works_in(queries) for _ in range(8)), reverse=True)
        in_turn = [sum(works[cta::num_ctas]) for cta in range(num_ctas)]
        assert sum(loads) == sum(works)
        if num_ctas == 1:
            assert loads == in_turn
        else:
            assert max(loads) < max(in_turn)

    def test_many_rows(self, num_ctas):
        """As many as an engine has by default on a GPU with much memory."""
        schedule = PrefillSchedule(12000, 4096, MAX_BLOCKS, 2, 1, 128, num_ctas, 300, DEVICE)
        queries, kvs = [1] * 200 + [300, 7], [500] * 200 + [400, 7]
        starts = [sum(queries[:row]) for row in range(len(queries) + 1)]
        schedule.derive(
            StepShape(200, 202, 200, 202, sum(queries), True),
            on_device(starts, 12001),
            on_device(queries, 12000),
            on_device(kvs, 12000),
        )
        found = {tuple(work.values()) for works in works_of(schedule) for work in works}
        assert found == {
            (tile, start, row * MAX_BLOCKS, query, kv, head, row)
            for row, start, query, kv in ((200, 200, 300, 400), (201, 500, 7, 7))
            for tile in range(-(-query // 128))
            for head in range(2)
        }
        assert schedule.first_token.tolist() == [200]

    def test_nothing_to_do(self, num_ctas):
        schedule = PrefillSchedule(12, 256, MAX_BLOCKS, 4, 2, 128, num_ctas, MANY, DEVICE)
        schedule.derive(
            StepShape(3, 3, 3, 4, 3, True),
            on_device([0, 1, 2, 3], 13),
            on_device([1, 1, 1], 12),
            on_device([9, 9, 9], 12),
        )
        assert not any(works_of(schedule))
