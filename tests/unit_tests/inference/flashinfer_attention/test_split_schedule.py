# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""fa2's work lists that are made on the device, against plain Python."""

import math

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.inference.flashinfer_attention.split_schedule import CHUNK_KEYS, SplitSchedule
from megatron.core.inference.flashinfer_attention.step import StepShape

from .test_step import DEVICE, MAX_BLOCKS, on_device

BLOCK = 1024
ROOM = 2**30  # for partial results
INFO = (
    *("works", "rows", "num_tokens", "tile", "request", "tile_of", "chunk", "merge_start"),
    *("partial_start", "chunk_keys", "outputs", "sums", "is_work", "in_graphs", "splits"),
)


class Case:
    """A step, its list as the kernels read it, and what should be in it.

    Args:
        queries (list[int]): Query tokens of each request.
        keys (list[int]): Keys of each.
        padding (int): Padding tokens.
        ratio (int): Query heads of each of two KV heads.
        multiprocessors (int): Of the GPU.
        window (int): Keys before the query's own that it sees; -1: all of them.
        slots (int): Decode slots; 0: the list is for all rows.
        others (int): Requests behind the decode slots, which are left to another kernel.
        max_requests (int): Rows that there is room for.
        options: Of the schedule.
    """

    def __init__(
        self,
        queries,
        keys,
        padding=0,
        ratio=4,
        multiprocessors=132,
        window=-1,
        slots=0,
        others=0,
        max_requests=12,
        **options,
    ) -> None:
        tokens_per_decode = options.pop("tokens_per_decode", 1)
        self.queries, self.keys, self.ratio, self.window = queries, keys, ratio, window
        self.starts = [sum(queries[:row]) for row in range(len(queries) + 1)]
        self.num_tokens = self.starts[-1] + padding
        # The other kernel's requests have 7 tokens each, the first of them maybe in decode slots.
        self.shape = StepShape(
            num_decode=len(queries) if others else 0,
            num_requests=len(queries) + others,
            decode_slots=slots,
            padded_requests=max(len(queries), slots) + others,
            num_tokens=max(self.num_tokens, self.starts[-1] + 7 * others),
            has_prefill=not slots or others > 0,
        )
        options = {"partial_bytes": ROOM, "head_dim": 64, **options}
        self.schedule = SplitSchedule(
            max_requests=max_requests,
            max_tokens=self.shape.num_tokens,
            max_kv_blocks=MAX_BLOCKS,
            block_size_tokens=BLOCK,
            num_query_heads=2 * ratio,
            num_kv_heads=2,
            tokens_per_decode=tokens_per_decode,
            window_left=window,
            num_multiprocessors=multiprocessors,
            device=DEVICE,
            **options,
        )
        for array in (
            self.schedule.works,
            self.schedule.query_starts,
            self.schedule.last_page_lengths,
        ):
            array.fill_(-(2**31))
        more = [7] * others
        self.schedule.derive(
            self.shape,
            on_device(
                [*self.starts, *(self.starts[-1] + 7 * n for n in range(1, others + 1))],
                max_requests + 1,
            ),
            on_device([*queries, *more], max_requests),
            on_device([*keys, *more], max_requests),
        )
        self._read()

    def _read(self) -> None:
        info = self.info = dict(zip(INFO, self.schedule.plan_info(self.shape), strict=True))
        assert info["in_graphs"] == 1 and info["outputs"] == 0
        numbers, flags = self.schedule.works.tolist(), self.schedule.works.view(torch.int8).tolist()

        def array(name, length):
            assert info[name] % 16 == 0
            return numbers[info[name] // 4 :][:length]

        fields = [array(name, info["works"]) for name in ("request", "tile_of", "chunk")]
        grid = list(zip(*fields))
        is_work = flags[info["is_work"] :][: info["works"]]
        self.works = [work for work, flag in zip(grid, is_work) if flag]
        self.no_works = [work for work, flag in zip(grid, is_work) if not flag]
        assert set(is_work) <= {0, 1}
        (self.chunk,) = array("chunk_keys", 1)
        assert self.chunk > 0 and self.chunk % CHUNK_KEYS == 0
        self.partial_starts = array("partial_start", len(self.queries) + 1)
        self.merges = array("merge_start", self.num_tokens + 1)
        assert array("num_tokens", 1) == [info["rows"]] == [self.num_tokens]

    def rows(self) -> list[tuple[int, int, int]]:
        """Tokens, keys and chunks of each row, padding tokens among them."""
        padding = self.num_tokens - self.starts[-1]
        rows = zip([*self.queries, padding], [*self.keys, 0])
        visible = math.inf if self.window < 0 else self.window + self.info["tile"]
        return [
            (query, length, math.ceil(min(max(length, 1), visible) / self.chunk))
            for query, length in rows
        ]

    def check(self) -> None:
        """Every tile's chunks once, and their results merged; rows as they are."""
        rows, tile = self.rows(), self.info["tile"]
        expected = [
            (row, number, chunk)
            for row, (query, _, chunks) in enumerate(rows)
            for number in range(math.ceil(query * self.ratio / tile))
            for chunk in range(chunks)
        ]
        assert self.works == expected
        assert set(self.no_works) <= {(len(self.queries), 0, 0)}
        partial = 0
        merges: list[int] = []
        for (query, _, chunks), start in zip(rows, self.partial_starts, strict=True):
            assert start == partial
            merges += range(start, start + query * chunks, chunks)
            partial += query * chunks
        assert self.merges == [*merges, partial]
        if self.info["splits"]:
            row = 4 * self.ratio * self.schedule.head_dim
            assert partial * row <= self.info["sums"] and self.info["sums"] % 16 == 0
            end = self.info["sums"] + partial * 8 * self.ratio
            assert end <= self.schedule.partial_bytes
        else:
            assert all(chunks == 1 for _, _, chunks in rows)
        starts = [*self.starts, self.num_tokens]
        assert self.schedule.query_starts[: len(starts)].tolist() == starts
        assert len(self.works) <= self.info["works"]
        most_pairs = self.schedule._partial_rows(self.shape) * self.ratio
        assert self.shape.decode_slots or most_pairs >= self.info["works"] * tile
        pages = self.schedule.page_starts.tolist()
        assert pages[-1] == (len(pages) - 2) * MAX_BLOCKS  # behind it no page id is read
        for row, (_, length, _) in enumerate(rows):
            count = pages[row + 1] - pages[row]
            last = int(self.schedule.last_page_lengths[row])
            # As the kernel counts them, and if there are keys, from the row's place in the table.
            assert length == (((count - 1) * BLOCK + last) % 2**32 if count else 0)
            assert not length or pages[row] == row * MAX_BLOCKS


def random_lengths(seed, requests, longest):
    """Query tokens and keys of requests, half of them decodes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most):
        return torch.randint(1, most + 1, (requests,), generator=generator).tolist()

    queries = [query if row % 2 else 1 for row, query in enumerate(draw(longest))]
    return queries, [query + keys % 3000 for query, keys in zip(queries, draw(4000))]


class TestSplitSchedule:
    @pytest.fixture(params=[2, 7, 132])
    def multiprocessors(self, request):
        """Of the GPU, for which the list is made."""
        return request.param

    @pytest.mark.parametrize("ratio", [1, 4, 12])
    @pytest.mark.parametrize("longest", [1, 200])
    @pytest.mark.parametrize("window", [-1, 0, 1, 250])
    def test_all_keys_once(self, ratio, longest, window, multiprocessors):
        queries, keys = random_lengths(ratio + longest, 9, longest)
        Case(queries, keys, 13, ratio, multiprocessors, window).check()

    @pytest.mark.parametrize("keys", [[1], [127], [128], [129], [1000], [40, 5000], [5] * 12])
    def test_decodes(self, keys, multiprocessors):
        case = Case([1] * len(keys), keys, 3, 4, multiprocessors, slots=len(keys) + 3)
        case.check()
        assert case.info["tile"] == 16
        assert case.schedule._partial_rows(case.shape) == case.info["works"]

    def test_decodes_beside_another_kernel(self, multiprocessors):
        """Requests in and behind the decode slots are not looked at."""
        case = Case([1, 1], [2000, 70], 2, 4, multiprocessors, slots=4, others=3)
        case.check()

    @pytest.mark.parametrize("drafts, ratio, tile", [(3, 4, 16), (3, 8, 64), (4, 16, 128)])
    def test_drafts(self, drafts, ratio, tile, multiprocessors):
        tokens = drafts + 1
        case = Case(
            [tokens] * 3,
            [900, tokens, 4000],
            2 * tokens,
            ratio,
            multiprocessors,
            slots=5,
            tokens_per_decode=tokens,
        )
        case.check()
        assert case.info["tile"] == tile

    def test_heads_of_256_elements(self):
        case = Case([300], [300], head_dim=256)
        case.check()
        assert case.info["tile"] == 64

    def test_as_many_works_as_run_at_once(self):
        case = Case([1] * 3, [4000, 4000, 4000], slots=3)
        case.check()
        works_at_once = 2 * 132 // 2
        assert 0.6 * works_at_once < len(case.works) <= works_at_once

    def test_equal_requests_are_left_whole(self):
        """Where there are more than run at a time."""
        case = Case([1] * 9, [4000] * 9, multiprocessors=7, slots=9)
        case.check()
        assert len(case.works) == 9

    def test_a_longer_request_is_cut(self):
        case = Case([1] * 9, [500] * 8 + [5000], multiprocessors=7, slots=9)
        case.check()
        assert case.chunk <= 768 and len(case.works) > 9

    def test_no_longer_chunk_than_needed(self, multiprocessors):
        keys = [70, 4000, 129, 5000, 800, 9, 1000, 300, 64, 4500, 50, 3000]
        case = Case([1] * 12, keys, multiprocessors=multiprocessors, slots=12)
        case.check()

        def works(chunk):
            return sum(math.ceil(length / chunk) for length in keys)

        at_once = case.schedule.works_at_once
        allowed = at_once if len(keys) <= at_once else len(keys) + at_once
        assert works(case.chunk) <= allowed
        assert case.chunk == CHUNK_KEYS or works(case.chunk - CHUNK_KEYS) > allowed

    def test_as_many_works_as_there_can_be(self):
        """Every row one token over a tile, padding tokens among them, and all that may be added."""
        case = Case([129] * 4, [1000, 129, 129, 129], 1, 1, multiprocessors=2)
        case.check()
        assert len(case.works) == case.info["works"] == 11

    @pytest.mark.parametrize("missing, splits", [(0, 1), (1, 0)])
    def test_room_for_partial_results(self, missing, splits):
        case = Case([1] * 3, [4000] * 3, slots=3)
        room = case.info["sums"] + case.schedule._partial_rows(case.shape) * 8 * 4
        case = Case([1] * 3, [4000] * 3, slots=3, partial_bytes=room - missing)
        case.check()
        assert case.info["splits"] == splits

    @pytest.mark.parametrize("padding", [0, 5])
    def test_no_room_for_partial_results(self, padding, multiprocessors):
        """What is left of the grid is the first tile of the padding tokens."""
        queries, keys = random_lengths(3, 9, 200)
        case = Case(queries, keys, padding, 4, multiprocessors, partial_bytes=1000)
        assert not case.info["splits"]
        case.check()
        assert case.no_works and case.merges[-1] == case.num_tokens

    def test_many_rows(self, multiprocessors):
        """As many as an engine has by default on a GPU with much memory, and as it can have."""
        queries, keys = [1] * 200 + [300, 7], [500] * 200 + [400, 7]
        Case(queries, keys, 0, 4, multiprocessors, max_requests=12000).check()
        Case([1] * 12, [99] * 12, 0, 4, multiprocessors).check()

    @pytest.mark.parametrize("padding, slots", [(0, 0), (5, 0), (5, 5)])
    def test_no_request(self, padding, slots, multiprocessors):
        Case([], [], padding, multiprocessors=multiprocessors, slots=slots).check()

    def test_requests_without_tokens(self, multiprocessors):
        Case([0, 1, 0, 0, 70, 0], [0, 99, 9, 0, 70, 5], 3, multiprocessors=multiprocessors).check()

    def test_grid_is_that_of_the_dimensions(self):
        """Whatever is in a step, for a graph keeps its grid."""
        steps = [([1] * 6, [9] * 6, 2), ([1], [3000], 7), ([], [], 8)]
        grids = {
            tuple(case.schedule.plan_info(case.shape))
            for queries, keys, padding in steps
            for case in [Case(queries, keys, padding, slots=8)]
        }
        assert len(grids) == 1
