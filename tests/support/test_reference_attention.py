"""The reference attention against torch's own, and at the edges where kernels go wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_on_cpu.kernels import flash_attn, flash_mla
from reference_attention import (
    NO_WINDOW,
    Window,
    attend,
    attend_paged,
    attend_paged_without_sync,
    gather_paged,
)

HEADS, KV_HEADS, DIM, VALUE_DIM, BLOCK = 4, 2, 8, 6, 4
# New tokens and tokens in the cache of each request: prefill, chunk, decode, draft, none at all.
REQUESTS = [(5, 5), (3, 9), (1, 12), (2, 7), (0, 0)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def rows(count: int, heads: int = HEADS, dim: int = DIM) -> Tensor:
    return torch.randn(count, heads, dim)


def mask_of(queries: int, keys: int, sees: Callable[[int, int], bool]) -> Tensor:
    """Which key a query sees, by their positions; the last query is at the last key."""
    return torch.tensor(
        [[sees(i + keys - queries, j) for j in range(keys)] for i in range(queries)]
    )


@pytest.mark.parametrize('keys', [5, 9])
@pytest.mark.parametrize('kv_heads', [4, 2, 1])
@pytest.mark.parametrize(
    ('causal', 'window', 'sees'),
    [
        (False, NO_WINDOW, lambda i, j: True),
        (True, NO_WINDOW, lambda i, j: j <= i),
        (True, (0, 0), lambda i, j: j == i),
        (True, (2, 0), lambda i, j: i - 2 <= j <= i),
        (False, (2, 1), lambda i, j: i - 2 <= j <= i + 1),
        (True, (100, 0), lambda i, j: j <= i),
    ],
)
def test_attend_is_what_torch_computes(
    keys: int, kv_heads: int, causal: bool, window: Window, sees: Callable[[int, int], bool]
) -> None:
    query, key = rows(5), rows(keys, kv_heads)
    value = rows(keys, kv_heads, VALUE_DIM)
    mask = mask_of(5, keys, sees)
    output, lse = attend(query, key, value, scale=0.3, causal=causal, window=window)

    wanted = scaled_dot_product_attention(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        mask,
        scale=0.3,
        enable_gqa=True,
    )
    torch.testing.assert_close(output, wanted.transpose(0, 1))
    scores = torch.einsum('qhd,khd->hqk', query, key.repeat_interleave(HEADS // kv_heads, 1)) * 0.3
    torch.testing.assert_close(lse, scores.masked_fill(~mask, -math.inf).logsumexp(-1))


def test_window_keeps_its_edge_token_and_no_other() -> None:
    query, key, value = rows(1), rows(9, KV_HEADS), rows(9, KV_HEADS)
    output, _ = attend(query, key, value, scale=1.0, window=(3, 0))
    for position in range(9):
        changed = value.clone()
        changed[position] += 1
        other, _ = attend(query, key, changed, scale=1.0, window=(3, 0))
        assert torch.equal(other, output) == (position < 5)


def test_a_query_that_sees_nothing_gives_zero() -> None:
    output, lse = attend(rows(2), rows(1, KV_HEADS), rows(1, KV_HEADS), scale=1.0)
    assert torch.equal(output[0], torch.zeros(HEADS, DIM))
    assert torch.equal(lse[:, 0], torch.full((HEADS,), -math.inf))
    assert output[1].abs().min() > 0


def test_half_precision_is_computed_in_float32() -> None:
    query, key, value = (rows(6).bfloat16() for _ in range(3))
    output, lse = attend(query, key, value, scale=1.0)
    wanted, _ = attend(query.float(), key.float(), value.float(), scale=1.0)
    assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(output, wanted.bfloat16())


class Batch:
    """Packed requests on a paged cache whose every other place is NaN, blocks in random order."""

    def __init__(self) -> None:
        self.queries = [rows(new) for new, _ in REQUESTS]
        self.keys = [rows(length, KV_HEADS) for _, length in REQUESTS]
        self.values = [rows(length, KV_HEADS, VALUE_DIM) for _, length in REQUESTS]
        blocks = iter(torch.randperm(20).tolist())
        self.key_cache = torch.full((20, BLOCK, KV_HEADS, DIM), math.nan)
        self.value_cache = torch.full((20, BLOCK, KV_HEADS, VALUE_DIM), math.nan)
        self.table = torch.full((len(REQUESTS), 4), -1, dtype=torch.int32)
        for request, (_, length) in enumerate(REQUESTS):
            for place in range(math.ceil(length / BLOCK)):
                block = self.table[request, place] = next(blocks)
                part = slice(place * BLOCK, min(length, (place + 1) * BLOCK))
                size = part.stop - part.start
                self.key_cache[block, :size] = self.keys[request][part]
                self.value_cache[block, :size] = self.values[request][part]
        new = torch.tensor([0] + [new for new, _ in REQUESTS])
        self.starts = new.cumsum(0, dtype=torch.int32)
        self.lengths = torch.tensor([length for _, length in REQUESTS], dtype=torch.int32)

    def wanted(self, window: Window) -> tuple[Tensor, Tensor]:
        """Request for request, without pages."""
        results = [
            attend(query, key, value, scale=0.3, window=window)
            for query, key, value in zip(self.queries, self.keys, self.values, strict=True)
            if len(query)
        ]
        outputs, lses = zip(*results, strict=True)
        return torch.cat(outputs), torch.cat(lses, 1)


@pytest.mark.parametrize('function', [attend_paged, attend_paged_without_sync])
@pytest.mark.parametrize('window', [NO_WINDOW, (3, 0)])
def test_pages_change_nothing_and_rows_of_no_request_are_zero(
    function: Callable[..., tuple[Tensor, Tensor]], window: Window
) -> None:
    batch = Batch()
    output, lse = function(
        torch.cat([*batch.queries, rows(3)]),
        batch.key_cache,
        batch.value_cache,
        query_starts=batch.starts,
        key_lengths=batch.lengths,
        block_table=batch.table,
        scale=0.3,
        window=window,
    )
    for got, want, padding in zip((output, lse.T), batch.wanted(window), (0, 1), strict=True):
        want = want.T if padding else want
        torch.testing.assert_close(got[:-3], want)
        assert torch.equal(got[-3:], torch.zeros_like(got[-3:]))


@pytest.mark.parametrize(
    ('blocks', 'length'), [([3, -1], 5), ([3, 20], 5), ([3], 5)], ids=['none', 'beyond', 'short']
)
def test_a_block_that_is_not_there_is_an_error(blocks: list[int], length: int) -> None:
    with pytest.raises(IndexError):
        gather_paged(torch.zeros(20, BLOCK), torch.tensor(blocks), length)


def test_blocks_beyond_the_length_are_not_looked_at() -> None:
    cache = torch.arange(80.0).view(20, BLOCK)
    assert gather_paged(cache, torch.tensor([2, -1]), 3).tolist() == [8, 9, 10]
    assert gather_paged(cache, torch.tensor([-1]), 0).shape == (0,)


def test_varlen_takes_and_gives_what_flash_attention_does() -> None:
    batch = Batch()
    key_starts = torch.cat([torch.zeros(1, dtype=torch.int32), batch.lengths.cumsum(0)])
    output, lse, dropout = flash_attn.flash_attn_varlen_func(
        torch.cat(batch.queries),
        batch.key_cache,
        batch.value_cache,
        batch.starts,
        key_starts,
        5,
        12,
        softmax_scale=0.3,
        causal=True,
        window_size=(3, 0),
        block_table=batch.table,
        return_attn_probs=True,
    )
    wanted, wanted_lse = batch.wanted((3, 0))
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    assert dropout is None


def test_kvcache_takes_and_gives_what_flash_attention_does() -> None:
    batch, requests = Batch(), [1, 3]
    query = torch.stack([batch.queries[request][-2:] for request in requests])
    output, lse = flash_attn.flash_attn_with_kvcache(
        q=query,
        k_cache=batch.key_cache,
        v_cache=batch.value_cache,
        cache_seqlens=batch.lengths[requests],
        block_table=batch.table[requests],
        causal=True,
        return_softmax_lse=True,
    )
    for index, request in enumerate(requests):
        keys, values = batch.keys[request], batch.values[request]
        wanted, wanted_lse = attend(query[index], keys, values, scale=DIM**-0.5)
        torch.testing.assert_close(output[index], wanted)
        torch.testing.assert_close(lse[index], wanted_lse)


def test_latent_attention_reads_values_from_the_keys() -> None:
    latents = rows(7, 1, DIM)
    cache = torch.full((3, BLOCK, 1, DIM), math.nan)
    cache[2], cache[0, :3] = latents[:4], latents[4:]
    query, lengths = rows(2).unsqueeze(0), torch.tensor([7])
    schedule = flash_mla.get_mla_metadata(lengths, 2 * HEADS, 1)
    output, lse = flash_mla.flash_mla_with_kvcache(
        query, cache, torch.tensor([[2, 0]]), lengths, VALUE_DIM, *schedule, 0.3, causal=True
    )
    wanted, wanted_lse = attend(query[0], latents, latents[..., :VALUE_DIM], scale=0.3)
    torch.testing.assert_close(output[0], wanted)
    torch.testing.assert_close(lse[0], wanted_lse)
