"""The stand-in for FlashInfer against the reference, and what it does not put up with."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashinfer_on_cpu
from flashinfer_on_cpu import KERNELS, SM_COUNT, mla_works, splits, works
from flashinfer_on_cpu.mla_works import Merge, Work
from reference_attention import attend_paged, gather_paged
from series import gates, tree
from series.model import Project

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 32, 16, 64
SCALE = 0.3
# New tokens and tokens in the cache of each request.
PREFILL = [(20, 20), (5, 40), (0, 0), (1, 16), (150, 170), (3, 33)]
DECODE = [(1, 16), (1, 17), (1, 0), (1, 1), (1, 100)]
TABLE_WIDTH = 12


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    torch.manual_seed(0)
    flashinfer_on_cpu.install()
    yield
    flashinfer_on_cpu.uninstall()


class Batch:
    """Packed requests on a paged cache whose every other place is NaN, pages in random order."""

    def __init__(
        self, requests: list[tuple[int, int]], dim: int = DIM, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        new, lengths = (torch.tensor(part, dtype=torch.int32) for part in zip(*requests))
        self.lengths = lengths
        self.starts = torch.cat([new.new_zeros(1), new.cumsum(0, dtype=torch.int32)])
        self.query = torch.randn(int(new.sum()), HEADS, dim).to(dtype)
        shape = PAGES, PAGE, KV_HEADS, dim
        self.cache = tuple(torch.full(shape, math.nan, dtype=dtype) for _ in range(2))
        counts = (lengths + PAGE - 1) // PAGE
        self.page_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
        self.page_ids = torch.randperm(PAGES)[: int(counts.sum())].to(torch.int32)
        self.last = lengths - (counts - 1).clamp(min=0) * PAGE
        self.table = torch.full((len(requests), TABLE_WIDTH), -1, dtype=torch.int32)
        for request, (_, length) in enumerate(requests):
            ids = self.page_ids[self.page_starts[request] : self.page_starts[request + 1]]
            self.table[request, : len(ids)] = ids
            for position in range(length):
                for cache in self.cache:
                    cache[ids[position // PAGE], position % PAGE] = torch.randn(KV_HEADS, dim)

    def wanted(self, window: int = -1, causal: bool = True) -> tuple[Tensor, Tensor]:
        """Output and natural log-sum-exp, both float32, from the block table."""
        output, lse = attend_paged(
            self.query.float(),
            *self.cache,
            query_starts=self.starts,
            key_lengths=self.lengths,
            block_table=self.table,
            scale=SCALE,
            causal=causal,
            window=(window, -1),
        )
        return output, lse.T


def assert_close(output: Tensor, wanted: Tensor, atol: float = 1e-4) -> None:
    """Equal but for the rounding of the output, or, by `atol`, of what was merged to it."""
    torch.testing.assert_close(output.float(), wanted, rtol=1e-2, atol=atol)


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Softmax with one more score a head, `sinks`, whose value is zero."""
    total = torch.logaddexp(lse, sinks.flatten())
    return output * torch.exp(lse - total).unsqueeze(-1)


def kernel(name: str) -> Callable[..., Any]:
    """A function of the stand-in by module and name."""
    module, function = name.split('.')
    found = getattr(importlib.import_module(f'flashinfer.{module}'), function)
    assert callable(found)
    return found


# xqa


def xqa_arguments(batch: Batch) -> dict[str, Any]:
    """A right call for requests of one query each."""
    query = batch.query.unsqueeze(1)
    return {
        'q': query,
        'k_cache': batch.cache[0],
        'v_cache': batch.cache[1],
        'page_table': batch.table,
        'seq_lens': batch.lengths.to(torch.uint32).unsqueeze(1),
        'output': torch.full_like(query, 7),
        'workspace_buffer': torch.zeros(1024, dtype=torch.uint8),
        'semaphores': torch.zeros(64, dtype=torch.uint32),
        'num_kv_heads': KV_HEADS,
        'page_size': PAGE,
        'q_scale': SCALE * DIM**0.5,
    }


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('window', [-1, 0, 15, 16, 1000])
@pytest.mark.parametrize('sinks', [None, torch.tensor([[0.5, -1.0], [2.0, 5.0]])])
def test_xqa_is_the_reference_and_leaves_nan_where_there_is_neither_key_nor_sink(
    dtype: torch.dtype, window: int, sinks: Tensor | None
) -> None:
    batch = Batch(DECODE, dtype=dtype)
    call = xqa_arguments(batch)
    kernel('xqa.xqa')(**call, sliding_win_size=window + 1, sinks=sinks)
    wanted, lse = batch.wanted(window)
    if sinks is not None:
        wanted = with_sinks(wanted, lse, sinks)
    empty = batch.lengths == 0
    assert_close(call['output'][~empty, 0], wanted[~empty])
    without = call['output'][empty]
    assert without.isnan().all() if sinks is None else not without.any()
    assert not call['semaphores'].view(torch.int32).any()


def test_xqa_reads_heads_first_caches() -> None:
    batch = Batch(DECODE)
    call = xqa_arguments(batch)
    for name in ('k_cache', 'v_cache'):
        call[name] = call[name].transpose(1, 2).contiguous()
    kernel('xqa.xqa')(**call, kv_layout='HND')
    assert_close(call['output'][0, 0], batch.wanted()[0][0])


def packed(mask: Tensor) -> Tensor:
    """A boolean mask `(requests, queries, queries)` in xqa's bits."""
    width = mask.shape[-1]
    words = (width + 31) // 32 * 2
    bits = torch.nn.functional.pad(mask, (0, words * 16 - width)).unflatten(-1, (words, 16))
    return (bits * 2 ** torch.arange(16)).sum(-1).to(torch.int32).to(torch.uint16)


@pytest.mark.parametrize('window', [-1, 20])
@pytest.mark.parametrize('drafts', [3, 33])
def test_xqa_takes_drafts_with_a_mask(drafts: int, window: int) -> None:
    batch = Batch([(drafts, drafts), (drafts, drafts + 31), (drafts, 100)])
    call = xqa_arguments(batch)
    call['q'] = batch.query.view(3, 1, drafts, HEADS, DIM)
    call['output'] = torch.empty_like(call['q'])
    call['mask'] = packed(torch.ones(3, drafts, drafts, dtype=torch.bool).tril())
    kernel('xqa.xqa')(**call, q_seq_len=drafts, sliding_win_size=window + 1)
    assert_close(call['output'].view_as(batch.query), batch.wanted(window)[0])


@pytest.mark.parametrize('drafts', [16, 17])
def test_xqa_tells_heads_by_their_row_in_a_tile(drafts: int) -> None:
    """Two heads divide a tile of 32 rows, so theirs are right; of three heads they would not be."""
    batch = Batch([(drafts, 40)])
    call = xqa_arguments(batch)
    call['q'] = batch.query.view(1, 1, drafts, HEADS, DIM)
    call['output'] = torch.empty_like(call['q'])
    call['mask'] = packed(torch.ones(1, drafts, drafts, dtype=torch.bool).tril())
    sinks = torch.tensor([[0.5, -1.0], [2.0, 5.0]])
    kernel('xqa.xqa')(**call, q_seq_len=drafts, sinks=sinks)
    assert_close(call['output'].view_as(batch.query), with_sinks(*batch.wanted(), sinks))
    of_three = kernel('xqa._sinks_of')(torch.tensor([[1.0, 2.0, 3.0]]), 10)
    assert of_three.tolist() == [[1.0, 2.0, 1.0]]  # rows 30, 31, and 0 of the next tile


def test_xqa_sees_no_draft_that_the_mask_leaves_out() -> None:
    batch = Batch([(2, 40)])
    call = xqa_arguments(batch)
    call['q'] = batch.query.view(1, 1, 2, HEADS, DIM)
    call['output'] = torch.empty_like(call['q'])
    call['mask'] = packed(torch.tensor([[[True, False], [False, True]]]))
    last = batch.table[0, 2]
    batch.cache[0][last, 6] = batch.cache[1][last, 6] = math.nan
    kernel('xqa.xqa')(**call, q_seq_len=2)
    first, second = call['output'][0, 0]
    assert first.isnan().all() and second.isfinite().all()


def every_second(tensor: Tensor) -> Tensor:
    """The same elements, not contiguous."""
    return torch.stack([tensor, tensor], -1)[..., 0]


@pytest.mark.parametrize(
    ('name', 'change', 'why'),
    [
        ('q', every_second, 'contiguous'),
        ('q', Tensor.float, 'queries of'),
        ('q', lambda q: q.squeeze(1), 'q is'),
        ('output', every_second, 'contiguous'),
        ('output', Tensor.half, 'output is'),
        ('output', lambda output: output[:-1], 'output is'),
        ('page_table', every_second, 'contiguous'),
        ('page_table', Tensor.long, 'page_table is'),
        ('page_table', lambda table: table[:-1], 'page_table is'),
        ('seq_lens', lambda lengths: lengths.view(torch.int32), 'seq_lens is'),
        ('seq_lens', Tensor.flatten, 'seq_lens is'),
        ('semaphores', lambda zeros: zeros.view(torch.int32), 'semaphores is'),
        ('semaphores', lambda zeros: zeros[:9], 'too few semaphores'),
        ('semaphores', lambda zeros: (zeros.view(torch.int32) + 1).view(torch.uint32), 'not zero'),
        ('k_cache', Tensor.half, 'a cache of'),
        ('v_cache', lambda cache: cache.transpose(1, 2).contiguous().transpose(1, 2), 'strides'),
        ('page_size', lambda size: 256, 'pages of 256'),
        ('page_size', lambda size: 32, 'a cache of'),
        ('num_kv_heads', lambda heads: 1, 'a cache of'),
        ('sinks', lambda sinks: torch.zeros(HEADS), 'sinks is'),
        ('q_seq_len', lambda size: 2, 'five dimensions'),
    ],
)
def test_xqa_refuses_what_it_would_read_wrongly(
    name: str, change: Callable[[Any], Any], why: str
) -> None:
    call = xqa_arguments(Batch(DECODE))
    with pytest.raises(ValueError, match=why):
        kernel('xqa.xqa')(**{**call, name: change(call.get(name))})


def test_xqa_needs_semaphores_that_no_one_else_uses() -> None:
    call = xqa_arguments(Batch(DECODE))
    call['workspace_buffer'] = call['semaphores'].view(torch.uint8)
    kernel('xqa.xqa')(**call)
    with pytest.raises(ValueError, match='not zero'):
        kernel('xqa.xqa')(**call)


def test_xqa_needs_a_mask_for_drafts_and_a_gpu_that_has_it() -> None:
    batch = Batch([(2, 40)])
    call = xqa_arguments(batch)
    call['q'] = call['output'] = batch.query.view(1, 1, 2, HEADS, DIM)
    with pytest.raises(ValueError, match='need a mask'):
        kernel('xqa.xqa')(**call, q_seq_len=2)
    flashinfer_on_cpu.install(capability=(8, 0))
    with pytest.raises(ValueError, match='SM 9.0'):
        kernel('xqa.xqa')(**call, q_seq_len=2)


# The prefill wrapper


def make_wrapper(backend: str, *args: Any, **options: Any) -> Any:
    """A new wrapper of the stand-in."""
    make = kernel('prefill.BatchPrefillWithPagedKVCacheWrapper')
    return make(torch.zeros(2**22, dtype=torch.uint8), *args, backend=backend, **options)


def plan(wrapper: Any, batch: Batch, window: int = -1, **changes: Any) -> None:
    """Plan on a batch."""
    dim, dtype = batch.query.shape[-1], batch.query.dtype
    call = {
        'qo_indptr': batch.starts,
        'paged_kv_indptr': batch.page_starts,
        'paged_kv_indices': batch.page_ids,
        'paged_kv_last_page_len': batch.last,
        'num_qo_heads': HEADS,
        'num_kv_heads': KV_HEADS,
        'head_dim_qk': dim,
        'page_size': PAGE,
        'causal': True,
        'sm_scale': SCALE,
        'window_left': window,
        'q_data_type': dtype,
        **changes,
    }
    wrapper.plan(**call)


def graph_wrapper(backend: str, requests: int) -> Any:
    """A wrapper with buffers for that many requests."""
    sizes = requests + 1, requests + 1, PAGES, requests
    buffers = (torch.full((size,), -1, dtype=torch.int32) for size in sizes)
    return make_wrapper(backend, 'NHD', True, *buffers)


@pytest.mark.parametrize('backend', ['fa2', 'fa3', 'auto'])
@pytest.mark.parametrize('graph', [False, True])
@pytest.mark.parametrize(('window', 'causal'), [(-1, True), (-1, False), (0, True), (17, True)])
def test_wrapper_is_the_reference(backend: str, graph: bool, window: int, causal: bool) -> None:
    batch = Batch(PREFILL)
    wrapper = graph_wrapper(backend, len(PREFILL)) if graph else make_wrapper(backend)
    plan(wrapper, batch, window, causal=causal)
    out = torch.full_like(batch.query, math.nan)
    result, lse = wrapper.run(batch.query, batch.cache, out=out, return_lse=True)
    wanted, wanted_lse = batch.wanted(window, causal)
    assert result is out
    assert_close(out, wanted)
    torch.testing.assert_close(lse, torch.log2(torch.exp(wanted_lse)))
    assert torch.equal(wrapper.run(batch.query, batch.cache), out)


@pytest.mark.parametrize('backend', ['fa2', 'fa3'])
def test_wrapper_gives_zero_where_there_is_no_key(backend: str) -> None:
    batch = Batch([(2, 20), (3, 0)])
    wrapper = make_wrapper(backend)
    plan(wrapper, batch)
    out, lse = wrapper.run(batch.query, batch.cache, return_lse=True)
    assert_close(out[:2], batch.wanted()[0][:2])
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))
    assert torch.equal(lse[2:], torch.full((3, HEADS), -math.inf))


@pytest.mark.parametrize('backend', ['fa2', 'fa3'])
def test_wrapper_reads_either_layout_and_one_tensor_for_both(backend: str) -> None:
    batch = Batch(PREFILL)
    both = torch.stack(batch.cache, 1)
    for layout, cache in (('NHD', both), ('HND', both.transpose(2, 3))):
        wrapper = make_wrapper(backend, layout)
        plan(wrapper, batch)
        assert_close(wrapper.run(batch.query, cache), batch.wanted()[0])


@pytest.mark.parametrize('backend', ['fa2', 'fa3'])
def test_wrapper_takes_sinks_and_does_not_apply_them(backend: str) -> None:
    batch = Batch(PREFILL)
    wrapper = make_wrapper(backend)
    plan(wrapper, batch)
    plain = wrapper.run(batch.query, batch.cache)
    assert torch.equal(wrapper.run(batch.query, batch.cache, sinks=torch.ones(HEADS)), plain)


@pytest.mark.parametrize('backend', ['fa2', 'fa3'])
@pytest.mark.parametrize(
    ('change', 'why'),
    [
        ({'q': lambda q: q[:-1]}, 'planned'),
        ({'q': Tensor.half}, 'not planned'),
        ({'q': lambda q: q[:, :2]}, 'heads are not planned'),
        ({'q': every_second}, 'contiguous'),
        ({'out': Tensor.half}, 'not planned'),
        ({'out': lambda out: out[:-1]}, 'out is'),
        ({'out': every_second}, 'contiguous'),
        ({'lse': lambda lse: lse.T.contiguous().T}, 'contiguous'),
        ({'lse': Tensor.double}, 'lse is'),
        ({'window_left': lambda window: 3}, 'not planned'),
        ({'paged_kv_cache': lambda cache: tuple(map(Tensor.half, cache))}, 'is not'),
        ({'paged_kv_cache': lambda cache: tuple(part[:, :, :1] for part in cache)}, 'KV heads'),
    ],
)
def test_wrapper_refuses_what_was_not_planned(
    backend: str, change: dict[str, Callable[[Any], Any]], why: str
) -> None:
    batch = Batch(PREFILL)
    wrapper = make_wrapper(backend)
    plan(wrapper, batch)
    call: dict[str, Any] = {
        'q': batch.query,
        'paged_kv_cache': batch.cache,
        'out': torch.empty_like(batch.query),
        'lse': torch.empty(batch.query.shape[:2]),
        'window_left': -1,
    }
    wrapper.run(**call)
    ((name, changed),) = change.items()
    with pytest.raises(ValueError, match=why):
        wrapper.run(**{**call, name: changed(call[name])})


@pytest.mark.parametrize('backend', ['fa2', 'fa3'])
def test_graph_mode_holds_to_its_buffers(backend: str) -> None:
    wrapper = graph_wrapper(backend, 2)
    places = [wrapper._qo_indptr_buf.data_ptr(), wrapper._paged_kv_indices_buf.data_ptr()]
    plan(wrapper, Batch([(4, 20), (4, 30)]))
    first = wrapper._plan_info
    for batch in (Batch([(8, 90), (0, 0)]), Batch([(1, 3), (2, 2)])):
        plan(wrapper, batch)
        assert_close(wrapper.run(batch.query, batch.cache), batch.wanted()[0])
        assert wrapper._plan_info == first
    with pytest.raises(ValueError, match='9 rows, more than 8'):
        plan(wrapper, Batch([(4, 20), (5, 30)]))
    with pytest.raises(ValueError, match='1 requests, not 2'):
        plan(wrapper, Batch([(4, 20)]))
    many = torch.zeros(PAGES + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match='more than 64 page ids'):
        plan(wrapper, Batch([(1, 3), (2, 2)]), paged_kv_indices=many)
    assert places == [wrapper._qo_indptr_buf.data_ptr(), wrapper._paged_kv_indices_buf.data_ptr()]
    with pytest.raises(ValueError, match='four buffers'):
        make_wrapper(backend, 'NHD', True)
    with pytest.raises(ValueError, match=r'buffers of \[3, 3, 3\]'):
        make_wrapper(backend, 'NHD', True, *(torch.zeros(3, dtype=torch.int32) for _ in range(4)))


@pytest.mark.parametrize('backend', ['fa2', 'fa3'])
def test_a_plan_is_made_from_int32(backend: str) -> None:
    batch = Batch(PREFILL)
    with pytest.raises(ValueError, match='int64'):
        plan(make_wrapper(backend), batch, qo_indptr=batch.starts.long())


def test_run_needs_all_that_plan_sets() -> None:
    batch = Batch(PREFILL)
    wrapper = make_wrapper('fa3')
    with pytest.raises(AttributeError):
        wrapper.run(batch.query, batch.cache)
    plan(wrapper, batch)
    del wrapper._token_pos_in_items_len
    with pytest.raises(AttributeError, match='_token_pos_in_items_len'):
        wrapper.run(batch.query, batch.cache)


def test_what_has_no_stand_in_is_refused() -> None:
    batch = Batch(PREFILL)
    wrapper = make_wrapper('fa2')
    with pytest.raises(NotImplementedError, match='logits_soft_cap'):
        plan(wrapper, batch, logits_soft_cap=30.0)
    plan(wrapper, batch, logits_soft_cap=None)
    with pytest.raises(NotImplementedError, match='k_scale'):
        wrapper.run(batch.query, batch.cache, k_scale=torch.ones(1))
    with pytest.raises(NotImplementedError, match='cudnn'):
        make_wrapper('cudnn')
    with pytest.raises(TypeError, match='unexpected keyword'):
        wrapper.run(batch.query, batch.cache, scale=1.0)


@pytest.mark.parametrize('backend', ['fa2', 'fa3'])
def test_workspaces_are_written_and_aligned(backend: str) -> None:
    batch = Batch(PREFILL)
    wrapper = make_wrapper(backend)
    scratch = torch.zeros(2**22, dtype=torch.uint8)
    wrapper.reset_workspace_buffer(scratch, torch.zeros(65536, dtype=torch.uint8))
    plan(wrapper, batch)
    wrapper.run(batch.query, batch.cache)
    assert scratch.any()
    with pytest.raises(ValueError, match='16-byte'):
        wrapper.reset_workspace_buffer(scratch, torch.zeros(65, dtype=torch.uint8)[1:])


# The plan of fa2

MERGED = 5e-3  # what the rounding of partial results makes of output


@pytest.fixture
def split() -> tuple[Any, Batch]:
    """A wrapper of fa2 after a plan that splits keys, and the batch."""
    batch = Batch([(1, 170), (3, 20), (0, 0), (2, 160)])
    wrapper = make_wrapper('fa2')
    plan(wrapper, batch)
    assert splits.read(wrapper._int_workspace_buffer, wrapper._plan_info).is_split
    return wrapper, batch


def number_at(wrapper: Any, place: int, index: int = 0) -> Tensor:
    """An int32 of the plan, to be changed; `place` as the plan numbers its arrays."""
    start = wrapper._plan_info[place] + 4 * index
    return wrapper._int_workspace_buffer[start : start + 4].view(torch.int32)


def test_fa2_splits_keys_and_merges_results(split: tuple[Any, Batch]) -> None:
    wrapper, batch = split
    found = splits.read(wrapper._int_workspace_buffer, wrapper._plan_info)
    assert found.tile == 16 and found.chunk_keys == 128
    assert found.works == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (3, 0, 0), (3, 0, 1)]
    assert found.partial_starts == [0, 2, 5, 5] and found.merge_starts == [0, 2, 3, 4, 5, 7, 9]
    out, lse = wrapper.run(batch.query, batch.cache, return_lse=True)
    wanted, wanted_lse = batch.wanted()
    assert_close(out, wanted, MERGED)
    torch.testing.assert_close(lse, torch.log2(torch.exp(wanted_lse)))


def test_fa2_reads_lengths_as_unsigned(split: tuple[Any, Batch]) -> None:
    """As many pages for each request, and from their keys taken off what is too many."""
    wrapper, batch = split
    wrapper._paged_kv_indptr_buf = torch.arange(5, dtype=torch.int32) * TABLE_WIDTH
    wrapper._paged_kv_indices_buf = batch.table
    wrapper._paged_kv_last_page_len_buf = batch.lengths - (TABLE_WIDTH - 1) * PAGE
    assert_close(wrapper.run(batch.query, batch.cache), batch.wanted()[0], MERGED)


def test_fa2_leaves_alone_what_is_not_merged(split: tuple[Any, Batch]) -> None:
    wrapper, batch = split
    wrapper._plan_info[13] = 1
    number_at(wrapper, 2).fill_(4)
    out = torch.full_like(batch.query, math.nan)
    wrapper.run(batch.query, batch.cache, out=out)
    assert_close(out[:4], batch.wanted()[0][:4], MERGED)
    assert out[4:].isnan().all()
    number_at(wrapper, 2).fill_(7)
    number_at(wrapper, 7, 7).fill_(9)
    with pytest.raises(ValueError, match='7 queries are merged'):
        wrapper.run(batch.query, batch.cache)


def test_fa2_gives_zero_to_what_has_no_result(split: tuple[Any, Batch]) -> None:
    wrapper, batch = split
    wrapper._plan_info[12] = wrapper._int_workspace_buffer.numel() - 5
    wrapper._int_workspace_buffer[-5:] = torch.tensor([1, 1, 0, 1, 1])
    wrapper._plan_info[13] = 1
    for index, value in enumerate([0, 2, 2, 2, 2, 7, 9]):
        number_at(wrapper, 7, index).fill_(value)
    number_at(wrapper, 2).fill_(6)
    with pytest.raises(ValueError, match='was not computed'):
        wrapper.run(batch.query, batch.cache)
    number_at(wrapper, 7, 5).fill_(2)
    number_at(wrapper, 7, 6).fill_(2)
    out, lse = wrapper.run(batch.query, batch.cache, return_lse=True)
    assert_close(out[:1], batch.wanted()[0][:1], MERGED)
    assert not out[1:].any() and (lse[1:] == -math.inf).all()


@pytest.mark.parametrize(
    ('place', 'index', 'value', 'error', 'why'),
    [
        (4, 0, 4, IndexError, 'of 4 requests'),
        (4, 0, -1, IndexError, 'of 4 requests'),
        (5, 0, -1, IndexError, 'of 4 requests'),
        (5, 1, 1, ValueError, 'was not computed'),
        (6, 1, 0, ValueError, 'another work leaves'),
        (8, 3, 10**6, IndexError, 'results 1000000'),
        (8, 3, 0, ValueError, 'another work leaves'),
        (9, 0, 64, ValueError, 'another work leaves|was not computed'),
        (9, 0, 0, ValueError, 'chunks of 0 keys'),
        (7, 6, 10**9, IndexError, 'results 0 to 1000000000'),
        (7, 2, 1, IndexError, 'results 0 to 9'),
        (7, 0, -1, IndexError, 'results -1 to 9'),
    ],
)
def test_fa2_notices_a_wrong_plan(
    split: tuple[Any, Batch], place: int, index: int, value: int, error: type[Exception], why: str
) -> None:
    wrapper, batch = split
    number_at(wrapper, place, index).fill_(value)
    with pytest.raises(error, match=why):
        wrapper.run(batch.query, batch.cache)


@pytest.mark.parametrize(
    ('place', 'value', 'error', 'why'),
    [
        (0, 2**22, IndexError, 'numbers at byte'),
        (3, 32, ValueError, 'a tile of 32'),
        (4, -4, IndexError, 'numbers at byte -4'),
        (11, 16, IndexError, 'results'),
    ],
)
def test_fa2_notices_wrong_numbers(
    split: tuple[Any, Batch], place: int, value: int, error: type[Exception], why: str
) -> None:
    wrapper, batch = split
    wrapper._plan_info[place] = value
    with pytest.raises(error, match=why):
        wrapper.run(batch.query, batch.cache)
    wrapper._plan_info.pop()
    with pytest.raises(ValueError, match='a plan of 14 numbers'):
        wrapper.run(batch.query, batch.cache)


def test_a_plan_of_fa2_needs_room() -> None:
    batch = Batch([(1, 170)])
    wrapper = make_wrapper('fa2')
    wrapper.reset_workspace_buffer(
        torch.zeros(64, dtype=torch.uint8), torch.zeros(65536, dtype=torch.uint8)
    )
    with pytest.raises(ValueError, match='a workspace of 64 bytes'):
        plan(wrapper, batch)
    wrapper.reset_workspace_buffer(*(torch.zeros(64, dtype=torch.uint8) for _ in range(2)))
    with pytest.raises(ValueError, match='an int workspace of 64 bytes'):
        plan(wrapper, batch)
    room = torch.zeros(65536, dtype=torch.uint8)
    with pytest.raises(ValueError, match='1 works where there is room for 0'):
        splits.write(
            room,
            room,
            splits.Plan(16, [splits.Work(0, 0, 0)], 128, [0], [0, 1], True),
            room=0,
            num_heads=HEADS,
            dim=DIM,
            most_queries=None,
        )


def test_fa2_without_splits_may_compute_twice() -> None:
    batch = Batch([(20, 20), (5, 40)])
    wrapper = make_wrapper('fa2')
    plan(wrapper, batch)
    found = splits.read(wrapper._int_workspace_buffer, wrapper._plan_info)
    assert not found.is_split and found.works == [(0, 0, 0), (1, 0, 0)]
    number_at(wrapper, 4, 1).fill_(0)
    out = torch.full_like(batch.query, math.nan)
    wrapper.run(batch.query, batch.cache, out=out)
    assert_close(out[:20], batch.wanted()[0][:20])
    assert out[20:].isnan().all()


# The work list of fa3


@pytest.fixture
def planned() -> tuple[Any, Batch]:
    """A wrapper of fa3 after its plan, and the batch."""
    batch = Batch(PREFILL)
    wrapper = make_wrapper('fa3')
    plan(wrapper, batch)
    return wrapper, batch


def read_works(wrapper: Any) -> list[works.Work]:
    return works.read(wrapper._int_workspace_buffer, wrapper._plan_info, ctas=SM_COUNT)


def write_works(wrapper: Any, changed: list[works.Work], all_heads: bool = False) -> None:
    wrapper._int_workspace_buffer.fill_(255)
    wrapper._plan_info = works.write(
        wrapper._int_workspace_buffer, changed, ctas=SM_COUNT, room=500, all_heads=all_heads
    )


def test_works_are_found_as_they_were_written(planned: tuple[Any, Batch]) -> None:
    wrapper, batch = planned
    found = read_works(wrapper)
    assert len(found) == HEADS * 6 and {work.tile for work in found} == {0, 1}
    write_works(wrapper, found[::-1])
    assert set(read_works(wrapper)) == set(found)
    assert_close(wrapper.run(batch.query, batch.cache), batch.wanted()[0])
    write_works(wrapper, [])
    assert read_works(wrapper) == []


def test_a_list_may_be_for_all_heads_at_once(planned: tuple[Any, Batch]) -> None:
    wrapper, batch = planned
    write_works(wrapper, [w for w in read_works(wrapper) if w.head == 0], all_heads=True)
    assert wrapper._plan_info[8] == 1
    assert_close(wrapper.run(batch.query, batch.cache), batch.wanted()[0])


def test_many_tiles_are_planned_for_all_heads() -> None:
    wrapper = make_wrapper('fa3')
    rows = torch.arange(4100, dtype=torch.int32)
    none = torch.zeros_like(rows)
    plan(wrapper, Batch(DECODE), qo_indptr=rows, paged_kv_indptr=none,
         paged_kv_last_page_len=none[1:])  # fmt: skip
    assert wrapper._plan_info[8] == 1 and len(read_works(wrapper)) == 4099


def test_rows_of_no_work_stay_as_they_are(planned: tuple[Any, Batch]) -> None:
    wrapper, batch = planned
    write_works(wrapper, [w for w in read_works(wrapper) if (w.request, w.head) != (1, 2)])
    out = torch.full_like(batch.query, 7)
    wrapper.run(batch.query, batch.cache, out=out)
    wanted, _ = batch.wanted()
    wanted[20:25, 2] = 7
    assert_close(out, wanted)


def test_a_row_that_is_written_twice_is_noticed(planned: tuple[Any, Batch]) -> None:
    wrapper, batch = planned
    found = read_works(wrapper)
    write_works(wrapper, [*found, found[3]])
    with pytest.raises(ValueError, match='another work writes'):
        wrapper.run(batch.query, batch.cache)


def test_a_stale_list_shows(planned: tuple[Any, Batch]) -> None:
    wrapper, batch = planned
    # A token more, and only the list does not know of it.
    later = Batch([(new, keys and keys + 1) for new, keys in PREFILL])
    wrapper._paged_kv_indices_buf = later.page_ids
    output = wrapper.run(later.query, later.cache)
    assert not torch.allclose(output.float(), later.wanted()[0], rtol=1e-2, atol=1e-4)
    # Rows fewer than the list has.
    fewer = Batch(PREFILL[:-1])
    wrapper._qo_indptr_last = len(fewer.query)
    with pytest.raises(IndexError, match='rows'):
        wrapper.run(fewer.query, fewer.cache)
    # Nothing was ever planned in this workspace.
    wrapper.reset_workspace_buffer(
        torch.zeros(64, dtype=torch.uint8), torch.full((65536,), 255, dtype=torch.uint8)
    )
    wrapper._qo_indptr_last = len(batch.query)
    out = torch.full_like(batch.query, 7)
    wrapper.run(batch.query, batch.cache, out=out)
    assert torch.equal(out, torch.full_like(out, 7))


@pytest.mark.parametrize(
    'change',
    [
        {'query_start': -1},
        {'query_start': 100},
        {'page_start': -1},
        {'page_start': 25},
        {'tile': -1},
        {'head': HEADS},
        {'head': -1},
    ],
)
def test_a_work_out_of_bounds_is_noticed(
    planned: tuple[Any, Batch], change: dict[str, int]
) -> None:
    wrapper, batch = planned
    found = next(work for work in read_works(wrapper) if work.request == 4 and work.tile == 0)
    write_works(wrapper, [found])
    wrapper.run(batch.query, batch.cache)
    write_works(wrapper, [works.Work(**{**vars(found), **change})])
    with pytest.raises(IndexError):
        wrapper.run(batch.query, batch.cache)


def test_a_list_out_of_its_workspace_is_noticed(planned: tuple[Any, Batch]) -> None:
    wrapper, batch = planned
    found, right = read_works(wrapper), wrapper._plan_info
    wrapper._plan_info = [*right[:5], wrapper._int_workspace_buffer.numel() - 4, *right[6:]]
    with pytest.raises(IndexError, match='numbers at byte'):
        wrapper.run(batch.query, batch.cache)
    wrapper._plan_info = right[:8]
    with pytest.raises(ValueError, match='a plan of 8'):
        wrapper.run(batch.query, batch.cache)
    with pytest.raises(ValueError, match='too small'):
        works.write(torch.zeros(100, dtype=torch.uint8), found, ctas=4, room=99, all_heads=False)
    with pytest.raises(ValueError, match='room for 1'):
        works.write(torch.zeros(9999, dtype=torch.uint8), found, ctas=4, room=1, all_heads=False)


def ragged(window: int = -1) -> tuple[Any, Tensor, Tensor, Tensor, Batch]:
    """A wrapper that has planned for prompts of 150, 3 and 20 tokens; queries, keys, values, batch."""
    batch = Batch([(new, new) for new in (150, 3, 20)])
    make = kernel('prefill.BatchPrefillWithRaggedKVCacheWrapper')
    wrapper = make(torch.zeros(1024, dtype=torch.uint8), 'NHD', backend='fa3')
    wrapper.plan(
        batch.starts,
        batch.starts,
        HEADS,
        KV_HEADS,
        DIM,
        causal=True,
        window_left=window,
        sm_scale=SCALE,
        q_data_type=batch.query.dtype,
    )
    # Rows of both lie between each other, as in a projection to both.
    both = torch.zeros(len(batch.query), KV_HEADS, 2 * DIM, dtype=batch.query.dtype)
    keys, values = both.split(DIM, dim=-1)
    for request, start in enumerate(batch.starts[:-1].tolist()):
        length = int(batch.lengths[request])
        for part, cache in zip((keys, values), batch.cache, strict=True):
            part[start : start + length] = gather_paged(cache, batch.table[request], length)
    return wrapper, batch.query, keys, values, batch


@pytest.mark.parametrize('window', [-1, 20])
def test_ragged_is_the_reference(window: int) -> None:
    wrapper, query, keys, values, batch = ragged(window)
    output, lse = wrapper.run(query, keys, values, return_lse=True)
    wanted, wanted_lse = batch.wanted(window)
    assert_close(output, wanted)
    torch.testing.assert_close(lse * math.log(2), wanted_lse, rtol=1e-4, atol=1e-4)


def test_ragged_reads_whole_tiles_of_values() -> None:
    wrapper, query, keys, values, batch = ragged()
    behind = torch.cat((keys, torch.full_like(keys, math.nan)))
    assert wrapper.run(query, behind[: len(keys)], values).isfinite().all()
    behind = torch.cat((values, torch.full_like(values, math.nan)))
    output = wrapper.run(query, torch.cat((keys, keys)), behind)
    assert output.isnan().all()
    # A request's own NaN harms those before it, too, as far as their tiles reach.
    values[151] = math.nan
    output = wrapper.run(query, keys, values)
    assert output[:150].isnan().all() and output[153:].isfinite().all()


def test_ragged_refuses_what_is_not_planned() -> None:
    wrapper, query, keys, values, _ = ragged()
    for arguments, match in (
        ((query[:-1], keys, values), 'queries, where'),
        ((query.float(), keys, values), 'are not planned'),
        ((query, keys.float(), values), 'are not planned'),
        ((query, keys[:, :1], values), r'keys \('),
        ((query, keys[:-1], values), r'keys \('),
    ):
        with pytest.raises(ValueError, match=match):
            wrapper.run(*arguments)
    with pytest.raises(IndexError, match='keys'):
        wrapper.run(query, keys[:-1], values[:-1])


def fmha_v2_arguments(batch: Batch, window: int = -1) -> dict[str, Any]:
    """A right call; values lie behind keys as in a cache of three layers, of which this is the second."""
    cache = torch.full((2, 3, *batch.cache[0].shape), math.nan, dtype=batch.query.dtype)
    for part, found in zip(cache, batch.cache, strict=True):
        part[1] = found
    cache[1, 1].nan_to_num_(nan=1e4)
    pages = batch.table.clamp(min=0)
    return {
        'qkv': (batch.query, (cache[0, 1], cache[1, 1])),
        'input_layout': 'Q_PAGED_KV_NHD',
        'workspace_buffer': torch.zeros(64, dtype=torch.uint8),
        'seq_lens': batch.lengths,
        'max_q_len': len(batch.query),
        'max_kv_len': len(batch.query),
        'bmm1_scale': SCALE,
        'bmm2_scale': 1.0,
        'batch_size': len(batch.lengths),
        'cum_seq_lens_q': batch.starts,
        'cum_seq_lens_kv': torch.nn.functional.pad(batch.lengths.cumsum(0), (1, 0)).int(),
        'block_tables': torch.stack((pages, pages + 3 * PAGES), dim=1),
        'out': torch.full_like(batch.query, 7),
        'mask_mode': 'causal' if window < 0 else 'sliding_window',
        'window_left': window,
    }


@pytest.mark.parametrize('window', [-1, 0, 20])
@pytest.mark.parametrize('sinks', [None, torch.tensor([0.5, -1.0, 2.0, 5.0])])
def test_fmha_v2_is_the_reference(window: int, sinks: Tensor | None) -> None:
    batch = Batch([(150, 150), (3, 100), (20, 20)])
    call = fmha_v2_arguments(batch, window)
    output = kernel('prefill.trtllm_fmha_v2_prefill')(**call, sinks=sinks)
    wanted, lse = batch.wanted(window)
    assert output is call['out']
    assert_close(output, wanted if sinks is None else with_sinks(wanted, lse, sinks))


def test_fmha_v2_is_spoilt_by_values_behind_the_last_token() -> None:
    batch = Batch([(150, 150), (3, 100), (20, 20)])
    call = fmha_v2_arguments(batch)
    values, page_size = call['qkv'][1][1], batch.cache[1].shape[1]
    values[batch.table[1, 100 // page_size], 100 % page_size] = math.inf
    output = kernel('prefill.trtllm_fmha_v2_prefill')(**call)
    assert output[150:153].isnan().all()
    assert output[:150].isfinite().all() and output[153:].isfinite().all()


def test_fmha_v2_leaves_other_rows_alone() -> None:
    batch = Batch([(150, 150), (3, 100), (20, 20)])
    call = fmha_v2_arguments(batch)
    call['cum_seq_lens_q'] = batch.starts.clamp(min=150)
    output = kernel('prefill.trtllm_fmha_v2_prefill')(**call)
    assert torch.equal(output[:150], torch.full_like(output[:150], 7))
    assert_close(output[150:], batch.wanted()[0][150:])


@pytest.mark.parametrize(
    'change, match',
    [
        ({'max_q_len': 149}, 'more than max_q_len'),
        ({'max_kv_len': 1}, 'more queries than keys'),
        ({'mask_mode': 'sliding_window'}, 'mask sliding'),
        ({'block_tables': torch.zeros(3, 12, dtype=torch.int32)}, 'block_tables is'),
        ({'sinks': torch.zeros(2, 2)}, 'sinks is'),
        ({'seq_lens': torch.tensor([150, 101, 20], dtype=torch.int32)}, 'lengths do not fit'),
    ],
)
def test_fmha_v2_refuses_what_the_kernel_would_read_wrongly(
    change: dict[str, Any], match: str
) -> None:
    call = fmha_v2_arguments(Batch([(150, 150), (3, 100), (20, 20)]))
    with pytest.raises(ValueError, match=match):
        kernel('prefill.trtllm_fmha_v2_prefill')(**{**call, **change})


def test_fmha_v2_takes_rows_for_equally_long_if_they_could_be() -> None:
    batch = Batch([(30, 30), (30, 30)])
    call = {**fmha_v2_arguments(batch), 'max_q_len': 30}
    assert_close(kernel('prefill.trtllm_fmha_v2_prefill')(**call), batch.wanted()[0])
    call['cum_seq_lens_q'] = batch.starts.clamp(min=5)
    with pytest.raises(ValueError, match='equally long'):
        kernel('prefill.trtllm_fmha_v2_prefill')(**call)


def test_page_ids_may_be_a_table_of_any_shape(planned: tuple[Any, Batch]) -> None:
    wrapper, batch = planned
    wrapper._paged_kv_indices_buf = batch.table
    write_works(
        wrapper,
        [
            works.Work(**{**vars(work), 'page_start': work.request * TABLE_WIDTH})
            for work in read_works(wrapper)
        ],
    )
    assert_close(wrapper.run(batch.query, batch.cache), batch.wanted()[0])
    wrapper._paged_kv_indices_buf = batch.table.T
    with pytest.raises(ValueError, match='contiguous'):
        wrapper.run(batch.query, batch.cache)


def test_tiles_are_larger_where_the_head_dim_is_64() -> None:
    batch = Batch(PREFILL, dim=64)
    wrapper = make_wrapper('fa3')
    plan(wrapper, batch)
    assert {work.tile for work in read_works(wrapper)} == {0}
    assert_close(wrapper.run(batch.query, batch.cache), batch.wanted()[0])


# Blackwell's kernels


def trtllm_arguments(batch: Batch) -> dict[str, Any]:
    """What both kernels take."""
    return {
        'query': batch.query,
        'kv_cache': batch.cache,
        'workspace_buffer': torch.zeros(64, dtype=torch.uint8),
        'block_tables': batch.table,
        'seq_lens': batch.lengths,
        'bmm1_scale': SCALE,
        'bmm2_scale': 1.0,
        'kv_layout': 'NHD',
        'out': torch.full_like(batch.query, 7),
    }


@pytest.mark.parametrize('window', [-1, 0, 17])
@pytest.mark.parametrize('sinks', [None, torch.tensor([0.5, -1.0, 2.0, 5.0])])
def test_trtllm_is_the_reference(window: int, sinks: Tensor | None) -> None:
    flashinfer_on_cpu.install(capability=(10, 0))
    for requests in (DECODE, PREFILL):
        batch = Batch(requests)
        call = {**trtllm_arguments(batch), 'window_left': window, 'sinks': sinks}
        decode = kernel('decode.trtllm_batch_decode_with_kv_cache')
        context = kernel('prefill.trtllm_batch_context_with_kv_cache')
        ragged = {'cum_seq_lens_q': batch.starts, 'max_q_len': 150}
        outputs = [
            decode(**call, **ragged, q_len_per_req=None, max_seq_len=170),
            context(**call, **ragged, max_kv_len=170, batch_size=len(requests),
                    cum_seq_lens_kv=torch.cat([batch.starts[:1], batch.lengths.cumsum(0).int()])),
        ]  # fmt: skip
        if requests is DECODE:
            outputs.append(decode(**{**call, 'out': None}, max_seq_len=170))
        wanted, lse = batch.wanted(window)
        if sinks is not None:
            wanted = with_sinks(wanted, lse, sinks)
        empty = batch.lengths.repeat_interleave(batch.starts.diff()) == 0
        for output in outputs:
            assert_close(output[~empty], wanted[~empty])
            assert output[empty].isnan().all()


def test_trtllm_leaves_rows_of_no_request_as_they_are() -> None:
    flashinfer_on_cpu.install(capability=(10, 3))
    batch = Batch(DECODE)
    call = trtllm_arguments(batch)
    starts = batch.starts.clamp(max=3)
    kernel('decode.trtllm_batch_decode_with_kv_cache')(
        **call, max_seq_len=170, q_len_per_req=None, max_q_len=1, cum_seq_lens_q=starts
    )
    assert torch.equal(call['out'][3:], torch.full_like(call['out'][3:], 7))


@pytest.mark.parametrize(
    ('change', 'why'),
    [
        ({'max_seq_len': 99}, '100 keys, more than the 99'),
        ({'block_tables': torch.zeros(5, 12, dtype=torch.int64)}, 'block_tables is'),
        ({'seq_lens': torch.zeros(5, 1, dtype=torch.int32)}, 'seq_lens is'),
        ({'seq_lens': torch.zeros(5, dtype=torch.int64)}, 'seq_lens of'),
        ({'sinks': torch.zeros(2, 2)}, 'sinks is'),
        ({'multi_ctas_kv_counter_buffer': torch.ones(8, dtype=torch.uint8)}, 'not zero'),
        ({'cum_seq_lens_q': torch.arange(6, dtype=torch.int32)}, 'q_len_per_req=None'),
    ],
)
def test_trtllm_refuses_what_it_would_read_wrongly(change: dict[str, Any], why: str) -> None:
    flashinfer_on_cpu.install(capability=(10, 0))
    call = {**trtllm_arguments(Batch(DECODE)), 'max_seq_len': 170}
    with pytest.raises(ValueError, match=why):
        kernel('decode.trtllm_batch_decode_with_kv_cache')(**{**call, **change})


def test_trtllm_is_for_blackwell() -> None:
    call = {**trtllm_arguments(Batch(DECODE)), 'max_seq_len': 170}
    with pytest.raises(NotImplementedError, match='xqa'):
        kernel('decode.trtllm_batch_decode_with_kv_cache')(**call)
    with pytest.raises(ValueError, match='SM 10'):
        kernel('decode.trtllm_batch_decode_with_kv_cache')(**call, backend='trtllm-gen')


# Latents


# New tokens and tokens in the cache of each request.
MIXED = [(20, 20), (5, 400), (0, 0), (1, 33), (150, 170), (3, 0)]
ONES = [(1, 1), (1, 0), (1, 64), (1, 65), (1, 1000)]


class Latents:
    """Packed absorbed queries on pages of latents whose every other place is NaN."""

    def __init__(
        self,
        requests: list[tuple[int, int]],
        heads: int = HEADS,
        causal: bool = True,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.causal = causal
        new, self.lengths = (torch.tensor(part, dtype=torch.int32) for part in zip(*requests))
        counts = (self.lengths + PAGE - 1) // PAGE
        self.starts, self.page_starts = (
            torch.cat([part.new_zeros(1), part.cumsum(0, dtype=torch.int32)])
            for part in (new, counts)
        )
        pages = int(counts.sum())
        self.page_ids = torch.randperm(pages + 3)[:pages].to(torch.int32)
        self.query = torch.randn(int(new.sum()), heads, 576).to(dtype)
        self.cache = torch.full((pages + 3, PAGE, 576), math.nan, dtype=dtype)
        self.table = torch.full((len(requests), int(counts.max()) + 2), -1, dtype=torch.int32)
        for request, length in enumerate(self.lengths.tolist()):
            ids = self.page_ids[self.page_starts[request] : self.page_starts[request + 1]]
            self.table[request, : len(ids)] = ids
            tokens = torch.full((len(ids) * PAGE, 576), math.nan)
            tokens[:length] = torch.randn(length, 576)
            self.cache[ids.long()] = tokens.view(-1, PAGE, 576).to(dtype)

    def planned(self, backend: str = 'fa3', **changes: Any) -> Any:
        """A wrapper with a plan."""
        wrapper = kernel('mla.BatchMLAPagedAttentionWrapper')(
            torch.zeros(32 * 1024 * 1024, dtype=torch.uint8), backend=backend
        )
        call = {
            'qo_indptr': self.starts,
            'kv_indptr': self.page_starts,
            'kv_indices': self.page_ids,
            'kv_len_arr': self.lengths,
            'num_heads': self.query.shape[1],
            'head_dim_ckv': 512,
            'head_dim_kpe': 64,
            'page_size': PAGE,
            'causal': self.causal,
            'sm_scale': 0.05,
            'q_data_type': self.query.dtype,
            'kv_data_type': self.cache.dtype,
        }
        wrapper.plan(**{**call, **changes})
        return wrapper

    def run(self, wrapper: Any, **options: Any) -> Any:
        parts = (part.split([512, 64], -1) for part in (self.query, self.cache))
        return wrapper.run(*(each for pair in parts for each in pair), **options)

    def wanted(self) -> tuple[Tensor, Tensor]:
        """Output, and log-sum-exp to base 2 `(rows, heads)`."""
        cache = self.cache.unsqueeze(2)
        output, lse = attend_paged(
            self.query.float(),
            cache,
            cache[..., :512],
            query_starts=self.starts,
            key_lengths=self.lengths,
            block_table=self.table,
            scale=0.05,
            causal=self.causal,
        )
        empty = self.lengths.repeat_interleave(self.starts.diff()) == 0
        return output, (lse.T / math.log(2)).masked_fill(empty[:, None], -math.inf)

    def check(self, results: tuple[Tensor, Tensor]) -> None:
        """Equal but for two roundings, of partial results and of the output."""
        output, lse = self.wanted()
        torch.testing.assert_close(results[0].float(), output, rtol=1e-2, atol=5e-3)
        torch.testing.assert_close(results[1], lse, rtol=1e-4, atol=1e-4)


def read_plan(wrapper: Any) -> mla_works.Plan:
    return mla_works.read(
        wrapper._int_workspace_buffer,
        wrapper._plan_info,
        multiprocessors=torch.cuda.get_device_properties().multi_processor_count,
    )


def set_plan(
    wrapper: Any, dealt: list[list[Work]], merges: list[Merge] | None = None, ctas: int = 1
) -> None:
    """Write a plan as a caller may: arrays as long as need be, in a workspace as large as need be."""
    idle = [Merge(0, 0, 0, 0, 0)] * (ctas * len(dealt) - len(merges or []))
    works_of = [list(part) for part in zip(*(work for part in dealt for work in part))]
    ends = [sum(map(len, dealt[:count])) for count in range(len(dealt) + 1)]
    merges_of = [list(part) for part in zip(*(merges or []), *idle)]
    arrays = [ends, *merges_of, *works_of]
    places = [16 + 4 * sum(map(len, arrays[:count])) for count in range(len(arrays))]
    wrapper._int_workspace_buffer = torch.tensor(
        [-1] * 4 + [number for array in arrays for number in array], dtype=torch.int32
    ).view(torch.uint8)
    wrapper._plan_info = [
        *(ctas, len(dealt), *places[6:9], *places[1:6], *places[9:], places[0]),
        *(1024, 1024 + 16 * 1024 * 1024),
    ]
    wrapper._pin_memory_int_workspace_buffer = None


@pytest.mark.parametrize('backend', ['fa2', 'fa3'])
@pytest.mark.parametrize('requests', [MIXED, ONES], ids=['mixed', 'ones'])
@pytest.mark.parametrize('heads', [1, 4, 64, 128])
@pytest.mark.parametrize('causal', [True, False])
def test_mla_is_the_reference(
    backend: str, requests: list[tuple[int, int]], heads: int, causal: bool
) -> None:
    batch = Latents(requests, heads, causal)
    wrapper = batch.planned(backend)
    plan_ = read_plan(wrapper)
    assert plan_.ctas == (2 if heads * len(batch.query) // len(requests) > 64 else 1)
    batch.check(batch.run(wrapper, return_lse=True))


def test_mla_of_float16_rounds_to_it() -> None:
    batch = Latents(MIXED, dtype=torch.float16)
    output, lse = batch.run(batch.planned(), return_lse=True)
    assert output.dtype == torch.float16
    batch.check((output, lse))


@pytest.fixture
def large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many multiprocessors as an H200 has."""
    properties = torch.cuda.get_device_properties()
    monkeypatch.setattr(properties, 'multi_processor_count', 132)


@pytest.mark.usefixtures('large_gpu')
def test_mla_plan_lies_as_the_kernel_finds_it() -> None:
    # 2 queries of 4 heads on 100 keys: a limit of 32 keys gives 4 works, and 3 merges of 3 pairs.
    batch = Latents([(1, 20), (2, 100)])
    wrapper = batch.planned()
    numbers, room, merges = wrapper._plan_info, 4 * 16384, 4 * 132
    assert numbers[:2] == [1, 132]
    assert numbers[2:6] == [0, room, 2 * room, 3 * room]
    assert numbers[6:11] == [3 * room + count * merges for count in range(1, 6)]
    assert numbers[11:16] == [numbers[10] + count * room for count in range(1, 6)]
    assert numbers[16:] == [0, 2 * 132 * 64 * 1024]
    found = read_plan(wrapper)
    assert [len(part) for part in found.dealt] == [1] * 5 + [0] * 127
    assert found.works[0] == Work(0, 0, -1, 1, 20, 0, 0, 20)
    assert found.works[1:] == [
        Work(1, 2, 8 * number, 2, 100, 0, 32 * number, min(32 * number + 32, 100))
        for number in range(4)
    ]
    assert found.merges == [Merge(4, 7, 0, 32, 8), Merge(7, 10, 3, 32, 8), Merge(10, 12, 6, 32, 8)]


@pytest.mark.usefixtures('large_gpu')
def test_mla_gives_the_same_from_split_keys_as_from_whole_ones() -> None:
    batch = Latents([(1, 1000), (40, 700)], heads=16)
    wrapper = batch.planned()
    split, plan_ = batch.run(wrapper, return_lse=True), read_plan(wrapper)
    assert plan_.ctas == 2 and len(plan_.merges) > 6
    last = {
        (work.query_start, work.pair): work for work in sorted(plan_.works, key=lambda w: w.key_end)
    }
    whole = [work._replace(partial_start=-1, key_start=0) for work in last.values()]
    set_plan(wrapper, [whole[::2], whole[1::2]], ctas=2)
    output, lse = batch.run(wrapper, return_lse=True)
    batch.check((output, lse))
    torch.testing.assert_close(split[0].float(), output.float(), rtol=1e-2, atol=5e-3)
    torch.testing.assert_close(split[1], lse, rtol=1e-5, atol=1e-5)
    assert not torch.equal(split[0], output)


@pytest.fixture
def thirds() -> tuple[Latents, Any, list[list[Work]], list[Merge]]:
    """A hand-made plan of three clusters, of which each has a third of 300 keys of 10 pairs, and
    the first another request; two thread blocks merge.
    """
    batch = Latents([(1, 64), (5, 300)], heads=2)
    place = Work(1, 4, 0, 5, 300, 0, 0, 64)
    dealt = [
        [place._replace(partial_start=25), Work(0, 0, -1, 1, 64, 0, 0, 64)],
        [place._replace(partial_start=5, key_start=64, key_end=256)],
        # And one of no queries behind the last, as of padding.
        [
            place._replace(partial_start=15, key_start=256, key_end=300),
            Work(6, 0, -1, 0, 0, 64, 0, 0),
        ],
    ]
    merges = [Merge(2, 8, 5, 35, 10), Merge(8, 12, 11, 35, 10)]
    wrapper = batch.planned()
    set_plan(wrapper, dealt, merges)
    return batch, wrapper, dealt, merges


def test_mla_merges_a_work_cut_in_three(
    thirds: tuple[Latents, Any, list[list[Work]], list[Merge]],
) -> None:
    batch, wrapper, dealt, merges = thirds
    wrapper._float_workspace_buffer.fill_(255)  # NaN
    batch.check(batch.run(wrapper, return_lse=True))
    scratch = wrapper._float_workspace_buffer[slice(*wrapper._plan_info[16:])]
    written = scratch.view(torch.bfloat16).view(-1, 512).isfinite().all(-1)
    assert written.nonzero().flatten().tolist() == list(range(5, 35))

    # Rows that no work and no merge writes stay, as do those whose merge lacks a part.
    set_plan(wrapper, [dealt[0][:1], *dealt[1:]], [merges[0]._replace(partial_end=25)])
    out = torch.full((6, 2, 512), 7, dtype=torch.bfloat16)
    batch.run(wrapper, out=out)
    assert (out[0] == 7).all() and (out[4:] == 7).all()
    two, wanted = out[1:4].clone().view(6, 512), batch.wanted()[0][1:4].reshape(6, 512)
    assert not torch.isclose(two.float(), wanted, rtol=1e-2, atol=5e-3).all(-1).any()
    # The last part may be of some rows only.
    set_plan(wrapper, dealt, [merges[0]._replace(partial_end=28)])
    batch.run(wrapper, out=out)
    some = out[1:4].view(6, 512)
    torch.testing.assert_close(some[:3].float(), wanted[:3], rtol=1e-2, atol=5e-3)
    torch.testing.assert_close(some[3:], two[3:], rtol=1e-2, atol=1e-3)


def test_mla_merges_parts_without_keys() -> None:
    batch = Latents([(3, 66)], heads=2)
    wrapper = batch.planned()
    place = Work(0, 0, 0, 3, 66, 0, 0, 64)
    # The first query does not see key 65, the last part is of none.
    parts = [place, place._replace(partial_start=6, key_start=64, key_end=66),
             place._replace(partial_start=12, key_start=128, key_end=66)]  # fmt: skip
    set_plan(wrapper, [parts], [Merge(0, 6, 0, 18, 6)])
    batch.check(batch.run(wrapper, return_lse=True))
    set_plan(wrapper, [parts[2:]], [Merge(0, 6, 12, 18, 6)])
    output, lse = batch.run(wrapper, return_lse=True)
    assert not output.any() and torch.equal(lse, torch.full_like(lse, -5e4))


def test_mla_bounds_keys_as_the_kernel_does() -> None:
    # The first tile, 64 of 66 pairs of 3 heads, ends within query 21, whose own key, the 65th, is the
    # next tile's first.
    batch = Latents([(22, 65)], heads=3)
    wrapper = batch.planned()
    place = Work(0, 0, -1, 22, 65, 0, 0, 65)
    batch.check(batch.run(wrapper, return_lse=True))
    wanted = batch.wanted()[0].view(66, 512)
    parts = [place._replace(partial_start=0, key_end=64),
             place._replace(partial_start=64, key_start=64)]  # fmt: skip
    for works_, merges in ([place], []), (parts, [Merge(0, 64, 0, 128, 64)]):
        set_plan(wrapper, [[*works_, place._replace(pair=64)]], merges)
        output = batch.run(wrapper).float().view(66, 512)
        torch.testing.assert_close(output[:63], wanted[:63], rtol=1e-2, atol=5e-3)
        torch.testing.assert_close(output[64:], wanted[64:], rtol=1e-2, atol=5e-3)
        assert not torch.allclose(output[63], wanted[63], rtol=1e-2, atol=5e-3)


def test_mla_takes_a_block_table_for_page_ids() -> None:
    batch = Latents(MIXED)
    wrapper = batch.planned()
    width = batch.table.shape[1]
    rows = {int(start): row * width for row, start in enumerate(batch.page_starts[:-1])}
    found = read_plan(wrapper)
    dealt = [[work._replace(page_start=rows[work.page_start]) for work in part]
             for part in found.dealt]  # fmt: skip
    set_plan(wrapper, dealt, list(found.merges), found.ctas)
    assert (batch.table == -1).any()
    for table in (batch.table, batch.table.flatten()):
        wrapper._kv_indices_buf = table
        batch.check(batch.run(wrapper, return_lse=True))
    # An id of a page that is needed.
    batch.table[4, 10] = -1
    with pytest.raises(IndexError, match='block table'):
        batch.run(wrapper)
    wrapper._kv_indices_buf = batch.table.T
    with pytest.raises(ValueError, match='page ids'):
        batch.run(wrapper)


@pytest.mark.parametrize(
    ('places', 'size', 'error'),
    [
        ((1024, 1024 + 36 * 1024), 1024 + 36 * 1024 + 4 * 35, None),
        ((1024, 1024 + 36 * 1024), 1024 + 36 * 1024 + 4 * 35 - 4, IndexError),
        ((1024, 0), 1024 + 35 * 1024, None),
        ((1024, 0), 1024 + 35 * 1024 - 16, IndexError),
        ((-1024, 64 * 1024), 1024 * 1024, IndexError),
        ((1024, 1024 + 34 * 1024), 1024 * 1024, ValueError),
        ((8, 64 * 1024), 1024 * 1024, ValueError),
    ],
)
def test_mla_refuses_partial_rows_beyond_the_float_workspace(
    thirds: tuple[Latents, Any, list[list[Work]], list[Merge]],
    places: tuple[int, int],
    size: int,
    error: type[Exception] | None,
) -> None:
    batch, wrapper, _, _ = thirds
    wrapper._float_workspace_buffer = torch.zeros(size, dtype=torch.uint8)
    wrapper._plan_info[16:] = places
    if error is None:
        batch.check(batch.run(wrapper, return_lse=True))
    else:
        with pytest.raises(error):
            batch.run(wrapper)


@pytest.mark.parametrize(
    ('change', 'error'),
    [
        ({'query_start': 2}, IndexError),
        ({'query_start': -1}, IndexError),
        ({'page_start': -1}, IndexError),
        ({'page_start': 20}, IndexError),
        ({'pair': -1}, IndexError),
        ({'key_start': -64}, IndexError),
        ({'key_end': 301}, IndexError),
        ({'partial_start': -2}, IndexError),
        ({'key_start': 32}, ValueError),
        ({'keys': 4, 'key_end': 4}, ValueError),
        ({'partial_start': 24}, ValueError),
        ({'partial_start': 26}, ValueError),
        ({'partial_start': -1}, IndexError),
    ],
)
def test_mla_notices_a_work_out_of_bounds_or_in_anothers_place(
    thirds: tuple[Latents, Any, list[list[Work]], list[Merge]],
    change: dict[str, int],
    error: type[Exception],
) -> None:
    batch, wrapper, dealt, merges = thirds
    changed = dealt[0][0]._replace(key_end=100)._replace(**change)
    set_plan(wrapper, [[changed, *dealt[0][1:]], *dealt[1:]], merges)
    with pytest.raises(error):
        batch.run(wrapper)


@pytest.mark.parametrize(
    ('change', 'error'),
    [
        ({'partial_start': -1}, IndexError),
        ({'partial_end': 36}, IndexError),
        ({'start': 9, 'end': 13}, IndexError),
        ({'start': -1}, IndexError),
        ({'partial_start': 4}, ValueError),
        ({'stride': 0}, ValueError),
        ({'end': 7}, ValueError),
        ({'start': 7, 'partial_start': 10}, ValueError),
    ],
)
def test_mla_notices_a_merge_out_of_bounds_or_in_anothers_place(
    thirds: tuple[Latents, Any, list[list[Work]], list[Merge]],
    change: dict[str, int],
    error: type[Exception],
) -> None:
    batch, wrapper, dealt, merges = thirds
    set_plan(wrapper, dealt, [merges[0], merges[1]._replace(**change)])
    with pytest.raises(error):
        batch.run(wrapper)


def test_mla_notices_a_plan_that_is_none() -> None:
    batch = Latents(ONES)
    wrapper = batch.planned()
    right, out = list(wrapper._plan_info), torch.full((5, 4, 512), 7, dtype=torch.bfloat16)
    for number, value, error in ((0, 3, ValueError), (1, 133, ValueError), (0, 2, ValueError),
                                 (4, 8 * 1024 * 1024, IndexError), (7, -4, IndexError)):  # fmt: skip
        wrapper._plan_info = [*right[:number], value, *right[number + 1 :]]
        with pytest.raises(error):
            batch.run(wrapper)
    wrapper._plan_info = right[:17]
    with pytest.raises(ValueError, match='a plan of 17 numbers'):
        batch.run(wrapper)
    # Nothing was ever planned in this workspace.
    wrapper._plan_info = right
    wrapper._int_workspace_buffer = torch.full_like(wrapper._int_workspace_buffer, 255)
    batch.run(wrapper, out=out)
    assert (out == 7).all()
    wrapper._pin_memory_int_workspace_buffer = None
    with pytest.raises(ValueError, match='nowhere to write'):
        wrapper.plan(batch.starts, batch.page_starts, batch.page_ids, batch.lengths, 4, 512, 64,
                     PAGE, True, 0.05, torch.bfloat16, torch.bfloat16)  # fmt: skip


@pytest.mark.parametrize(
    'change',
    [
        {'head_dim_ckv': 256},
        {'head_dim_kpe': 0},
        {'page_size': 8},
        {'kv_data_type': torch.float16},
        {'qo_indptr': torch.zeros(6, dtype=torch.int64)},
        {'kv_indices': torch.zeros(9, dtype=torch.int32)},
        {'num_heads': 2**20},
    ],
)
def test_mla_plans_nothing_that_it_would_read_wrongly(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Latents(ONES).planned(**change)


# All kernels


def run_on(name: str, batch: Batch) -> Tensor:
    """The output of a kernel for a batch of one query a request."""
    if name == 'xqa':
        call = xqa_arguments(batch)
        kernel('xqa.xqa')(**call)
        output = call['output'].squeeze(1)
    elif name == 'trtllm':
        flashinfer_on_cpu.install(capability=(10, 0))
        output = kernel('decode.trtllm_batch_decode_with_kv_cache')(
            **trtllm_arguments(batch), max_seq_len=170
        )
    else:
        wrapper = make_wrapper(name)
        plan(wrapper, batch)
        output = wrapper.run(batch.query, batch.cache)
    return output


@pytest.mark.parametrize('name', ['xqa', 'fa2', 'fa3', 'trtllm'])
def test_a_wrong_page_id_shows(name: str) -> None:
    batch = Batch([(1, 16), (1, 40)])
    assert run_on(name, batch).isfinite().all()
    unused = next(page for page in range(PAGES) if page not in batch.page_ids)
    batch.table[1, 1] = batch.page_ids[2] = unused
    right, wrong = run_on(name, batch)
    assert right.isfinite().all() and wrong.isnan().all()
    for missing in (-1, PAGES):
        batch.table[1, 1] = batch.page_ids[2] = missing
        with pytest.raises(IndexError):
            run_on(name, batch)


# The package


def test_package_is_there_only_while_installed() -> None:
    path, capability = list(sys.path), torch.cuda.get_device_capability
    flashinfer = importlib.import_module('flashinfer')
    assert Path(flashinfer.__file__ or '').is_relative_to(KERNELS)
    assert flashinfer.__version__ == importlib.metadata.version('flashinfer-python')
    assert flashinfer.__version__ == importlib.metadata.version('FlashInfer_python')
    assert flashinfer.__version__ == '0.6.18.post1'
    assert importlib.metadata.version('torch')
    assert torch.cuda.get_device_capability() == torch.cuda.get_device_capability(0) == (9, 0)
    assert torch.cuda.get_device_properties(0).multi_processor_count == SM_COUNT
    flashinfer_on_cpu.uninstall()
    assert 'flashinfer' not in sys.modules and str(KERNELS) not in sys.path
    assert torch.cuda.get_device_capability is not capability
    flashinfer_on_cpu.install()
    assert sys.path == path


def test_version_and_gpu_are_what_the_test_says() -> None:
    flashinfer_on_cpu.install(version='0.7.4', capability=(12, 1))
    assert importlib.import_module('flashinfer').__version__ == '0.7.4'
    assert importlib.metadata.version('flashinfer-python') == '0.7.4'
    assert torch.cuda.get_device_capability() == (12, 1)
    gpu = torch.cuda.get_device_properties()
    assert (gpu.major, gpu.minor) == (12, 1)


def test_flashinfer_can_be_missing_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_on_cpu.uninstall()
    mine = type(sys)('flashinfer')
    monkeypatch.setitem(sys.modules, 'flashinfer', mine)
    flashinfer_on_cpu.install(version=None)
    assert importlib.util.find_spec('flashinfer') is None
    for name in ('flashinfer', 'flashinfer.xqa'):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version('flashinfer-python')
    flashinfer_on_cpu.uninstall()
    assert sys.modules['flashinfer'] is mine


def test_top_level_has_what_the_real_one_has() -> None:
    flashinfer = importlib.import_module('flashinfer')
    assert flashinfer.xqa is kernel('xqa.xqa')
    wrapper = kernel('prefill.BatchPrefillWithPagedKVCacheWrapper')
    assert flashinfer.BatchPrefillWithPagedKVCacheWrapper is wrapper
    assert flashinfer.decode and flashinfer.prefill
    assert not hasattr(flashinfer, 'trtllm_batch_decode_with_kv_cache')


def test_calls_are_kept_when_wanted_with_tables_as_they_were() -> None:
    batch = Batch(DECODE)
    call = xqa_arguments(batch)
    wrapper = make_wrapper('fa2')
    with flashinfer_on_cpu.record() as calls:
        kernel('xqa.xqa')(**call)
        plan(wrapper, batch)
        batch.starts += 1
        with pytest.raises(ValueError):
            wrapper.run(batch.query[1:], batch.cache)
    wrapper.run(batch.query, batch.cache)
    of_wrapper = 'prefill.BatchPrefillWithPagedKVCacheWrapper'
    names = ['xqa.xqa', f'{of_wrapper}.plan', f'{of_wrapper}.run']
    assert [kept.name for kept in calls] == names
    first, second, third = calls
    assert first.given == call.keys()
    assert first.arguments['kv_layout'] == 'NHD' and first.arguments['k_cache'] is call['k_cache']
    assert torch.equal(second.arguments['qo_indptr'], batch.starts - 1)
    assert third.arguments['self'] is wrapper and third.given == {'self', 'q', 'paged_kv_cache'}


def test_megatron_imports_with_the_stand_in() -> None:
    """Also where it imports parts of FlashInfer that the stand-in does not have."""
    project = Project(Path(__file__).resolve().parents[2])
    base = tree.make(project, project.series(), 0)
    code = (
        'import megatron_on_cpu, flashinfer_on_cpu as stand_in\n'
        'megatron_on_cpu.install(); stand_in.install()\n'
        'from megatron.core.inference.contexts import dynamic_context\n'
        'from megatron.core.inference.quantization import mxfp8_tensor, utils\n'
        'from megatron.core.inference.sampling import flashinfer_sampling\n'
        'from megatron.core.transformer.moe import experts, moe_layer\n'
        'from megatron.core.utils import is_flashinfer_min_version\n'
        'assert dynamic_context.HAVE_FLASHINFER and moe_layer.HAVE_FLASHINFER\n'
        'assert not (mxfp8_tensor.HAVE_FLASHINFER or experts.HAVE_FLASHINFER)\n'
        'assert is_flashinfer_min_version(stand_in.VERSION)\n'
    )
    job = gates.Job('import', ('-c', code), base, (base, Path(__file__).parent))
    (result,) = gates.run([job])
    assert not result.problems(), result.problems()
