"""Stand-in for multi-latent attention: the wrapper, with a plan, of `fa2` and `fa3`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashinfer_on_cpu import mla_works
from flashinfer_on_cpu.calls import stands_in
from flashinfer_on_cpu.mla_works import TILE, Merge, Plan, Work
from flashinfer_on_cpu.paged import gather, require, require_like, use_as_scratch

_NO_KEY = -5e4
"""The kernel's minus infinity, which a merge gives as log-sum-exp where there is no key."""


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


class BatchMLAPagedAttentionWrapper:
    """Absorbed attention of packed queries on a paged cache of latents.

    `run` computes from the plan that lies in the int workspace, and from the page ids, leaves
    partial results in the float workspace, and leaves alone rows that no work or merge writes. Like
    the real kernel's, a work's keys end short of its last query's where a tile, but a request's
    last, ends between two heads of one query.
    """

    @stands_in('use_cuda_graph')
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = 'auto',
    ) -> None:
        """The buffers are for graph mode, which has no stand-in."""
        if backend not in ('fa2', 'fa3'):
            raise NotImplementedError(f'there is no stand-in for the {backend} backend of MLA')
        major = torch.cuda.get_device_capability()[0]
        require(backend == 'fa2' or major == 9, 'fa3 is for SM 9.0')
        require(float_workspace_buffer.data_ptr() % 16 == 0, 'a workspace must be aligned')
        self.device = float_workspace_buffer.device
        self._backend = backend
        self._float_workspace_buffer = float_workspace_buffer
        # All -1, so that what no plan wrote is no work.
        self._int_workspace_buffer: Tensor = torch.full(
            (8 * 1024 * 1024,), 255, dtype=torch.uint8, device=self.device
        )
        self._pin_memory_int_workspace_buffer: Tensor | None = torch.full_like(
            self._int_workspace_buffer, 255, device='cpu'
        )
        self._plan_info: list[int] | None = None

    @stands_in('use_profiler')
    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Prepare for `run` on a batch.

        Args:
            qo_indptr: int32 `(requests + 1,)`, on the host, for a copy from the device would wait.
            kv_indptr: Likewise, into the page ids.
            kv_indices: Page ids, int32, on the device.
            kv_len_arr: Keys of each request, int32 `(requests,)`, on the host.
        """
        num_requests = len(kv_len_arr)
        for array, name, size in (
            (qo_indptr, 'qo_indptr', 1),
            (kv_indptr, 'kv_indptr', 1),
            (kv_len_arr, 'kv_len_arr', 0),
        ):
            require_like(array, name, (num_requests + size,), torch.int32)
        require_like(kv_indices, 'kv_indices', (kv_indices.numel(),), torch.int32)
        require(
            kv_data_type in (torch.float16, torch.bfloat16) and q_data_type == kv_data_type,
            f'queries of {q_data_type} on latents of {kv_data_type}',
        )
        require((head_dim_ckv, head_dim_kpe) == (512, 64), f'dims {head_dim_ckv}, {head_dim_kpe}')
        starts, page_starts, lengths = (
            array.tolist() for array in (qo_indptr, kv_indptr, kv_len_arr)
        )
        # As a newer FlashInfer insists.
        pages = [math.ceil(length / page_size) for length in lengths]
        require(kv_indptr.diff().tolist() == pages, 'kv_indptr does not fit the lengths')
        require(len(kv_indices) >= page_starts[-1], 'too few page ids')

        plan = mla_works.make(
            starts,
            page_starts,
            lengths,
            num_heads=num_heads,
            causal=causal,
            multiprocessors=_multiprocessors(),
        )
        scratch = plan.partial_rows * (mla_works.ROW_BYTES + 4)
        require(self._float_workspace_buffer.nbytes >= scratch, f'less than {scratch} bytes')
        pinned = self._pin_memory_int_workspace_buffer
        require(pinned is not None, 'there is nowhere to write a plan')
        assert pinned is not None
        self._plan_info, size = mla_works.write(pinned, plan, multiprocessors=_multiprocessors())
        self._int_workspace_buffer[:size].copy_(pinned[:size])
        self._kv_indices_buf = kv_indices.to(self.device)
        self._num_heads, self._page_size = num_heads, page_size
        self._causal, self._sm_scale = causal, sm_scale
        self._dims = head_dim_ckv, head_dim_kpe
        self._q_data_type, self._kv_data_type = q_data_type, kv_data_type

    @stands_in(
        'profiler_buffer',
        'kv_len',
        'page_table',
        'return_lse_base_on_e',
        'o_scale',
        'ckv_scale',
        'ckv_scale_arr',
        'kpe_scale',
    )
    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention as planned.

        Args:
            q_nope: `(rows, heads, 512)`; `q_pe` `(rows, heads, 64)`.
            ckv_cache: `(pages, page_size, 512)`; `kpe_cache` `(pages, page_size, 64)`.

        Returns:
            `out`, or without one a new tensor; with `return_lse` also the log-sum-exp to base 2,
            float32 `(rows, heads)`.
        """
        require(self._plan_info is not None, 'no plan is made')
        assert self._plan_info is not None
        rows, heads = q_nope.shape[:2]
        require(heads == self._num_heads, f'{heads} heads are not planned')
        for part, dim, lead, dtype in (
            (q_nope, self._dims[0], (rows, heads), self._q_data_type),
            (q_pe, self._dims[1], (rows, heads), self._q_data_type),
            (ckv_cache, self._dims[0], (len(ckv_cache), self._page_size), self._kv_data_type),
            (kpe_cache, self._dims[1], (len(ckv_cache), self._page_size), self._kv_data_type),
        ):
            require(part.shape == (*lead, dim), f'{tuple(part.shape)}, not {(*lead, dim)}')
            require(part.dtype == dtype, f'{part.dtype} is not planned')
            require(part.stride(-1) == 1, 'elements of a head must be contiguous')
            aligned = [part.data_ptr(), *(2 * stride for stride in part.stride()[:-1])]
            require(not any(number % 16 for number in aligned), 'loads are of 16 bytes')
        if out is None:
            out = torch.empty_like(q_nope)
        require_like(out, 'out', (rows, heads, self._dims[0]), q_nope.dtype)
        if lse is None:
            lse = q_nope.new_empty((rows, heads), dtype=torch.float32)
        require_like(lse, 'lse', (rows, heads), torch.float32)

        page_ids = self._kv_indices_buf
        require_like(page_ids, 'page ids', tuple(page_ids.shape), torch.int32)
        plan = mla_works.read(
            self._int_workspace_buffer, self._plan_info, multiprocessors=_multiprocessors()
        )
        query = torch.cat((q_nope, q_pe), -1).float().flatten(0, 1)
        final = _Results(out.view(-1, out.shape[-1]), lse.view(-1))
        partial = self._partial_results(plan)
        caches = ckv_cache.unsqueeze(2), kpe_cache.unsqueeze(2)
        for work in plan.works:
            self._check(work, rows)
            first = work.query_start * heads + work.pair
            count = self._pairs(work, plan.tile)
            if not count:
                continue
            result = self._attend(work, plan.tile, query[first : first + count], caches)
            if work.partial_start < 0:
                final.write(first, *result)
            else:
                partial.write(work.partial_start, *result)
        for merge in plan.merges:
            final.write(merge.start, *partial.merged(merge))
        use_as_scratch(self._float_workspace_buffer)
        return (out, lse) if return_lse else out

    def _pairs(self, work: Work, tile: int) -> int:
        return max(min(tile, work.queries * self._num_heads - work.pair), 0)

    def _check(self, work: Work, rows: int) -> None:
        if not (
            0 <= work.query_start <= work.query_start + work.queries <= rows
            and work.page_start >= 0 <= work.pair
            and work.key_start >= 0 <= work.key_end <= work.keys
        ):
            raise IndexError(f'{work} for {rows} rows')
        # The kernel counts tiles as if the first were whole, and masks only those that it takes for
        # the last.
        start = work.key_start // TILE * TILE
        if start < work.key_start and start + TILE < work.key_end:
            raise ValueError(f'{work} starts within a tile')
        if self._causal and 0 < work.keys < work.queries:
            raise ValueError(f'{work} has more queries than keys')

    def _partial_results(self, plan: Plan) -> _Results:
        """Those in the float workspace, up to the last row that a work of `plan` writes."""
        assert self._plan_info is not None
        works = [work for work in plan.works if work.partial_start != -1]
        if any(work.partial_start < 0 for work in works):
            raise IndexError('partial results before the first')
        rows = max((work.partial_start + self._pairs(work, plan.tile) for work in works), default=0)
        output, lse = self._plan_info[16:]
        ends = output + rows * mla_works.ROW_BYTES, lse + 4 * rows
        workspace = self._float_workspace_buffer.view(torch.uint8)
        if not (output >= 0 <= lse and max(ends) <= workspace.numel()):
            raise IndexError(f'{rows} rows at {output} and {lse} of {workspace.numel()} bytes')
        require(not output % 16 and not lse % 4, 'partial results must be aligned')
        require(ends[0] <= lse or ends[1] <= output, 'partial results overlap')
        return _Results(
            workspace[output : ends[0]].view(self._q_data_type).view(rows, self._dims[0]),
            workspace[lse : ends[1]].view(torch.float32),
        )

    def _attend(
        self, work: Work, tile: int, query: Tensor, caches: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """A work's output and its log-sum-exp to base 2, float32 `(pairs, 512)` and `(pairs,)`.

        Args:
            query: float32 `(pairs, 576)`.
        """
        bound = work.key_end
        if self._causal:
            end_query = (work.pair + tile) // self._num_heads
            bound = min(bound, work.keys - work.queries + end_query)
        tiles = math.ceil(bound / TILE) - work.key_start // TILE
        if tiles <= 0 or work.key_end <= work.key_start:
            none = query.new_full((len(query),), -math.inf)
            return query.new_zeros(len(query), self._dims[0]), none
        # Whole tiles are read, but for what is behind the request's last key.
        last = min(work.key_start + tiles * TILE, work.keys)
        page, offset = divmod(work.key_start, self._page_size)
        ids = self._kv_indices_buf.view(-1)[work.page_start + page :]
        latents, rotary = (
            part[offset:, 0] for part in gather(caches, ids, last - page * self._page_size)
        )
        position = torch.arange(work.key_start, last)
        seen = (position < work.key_end).expand(len(query), -1)
        if self._causal:
            # The last query is at the last key.
            own = torch.arange(work.pair, work.pair + len(query)) // self._num_heads
            seen = seen & (position <= own[:, None] + work.keys - work.queries)
        scores = query @ torch.cat((latents, rotary), -1).T * self._sm_scale
        scores.masked_fill_(~seen, -math.inf)
        lse = scores.logsumexp(-1)
        # Where no key is seen, weights are 0, and not NaN.
        weights = (scores - lse.clamp(min=_NO_KEY)[:, None]).exp()
        return weights @ latents, lse / math.log(2)


class _Results:
    """Rows of output and log-sum-exp, of which each is written once at most."""

    def __init__(self, output: Tensor, lse: Tensor) -> None:
        self._output, self._lse = output, lse
        self._written = torch.zeros(len(lse), dtype=torch.bool)

    def write(self, first: int, output: Tensor, lse: Tensor) -> None:
        """Round and write rows from `first` on."""
        rows = slice(first, first + len(lse))
        if not 0 <= rows.start <= rows.stop <= len(self._lse):
            raise IndexError(f'{rows} of {len(self._lse)}')
        if self._written[rows].any():
            raise ValueError(f'{rows} are written twice')
        self._written[rows] = True
        self._output[rows] = output.to(self._output.dtype)
        self._lse[rows] = lse

    def merged(self, merge: Merge) -> tuple[Tensor, Tensor]:
        """Rows put together, by their log-sum-exp to base 2, from those that are here.

        Raises:
            IndexError: a row is not here.
            ValueError: no one wrote it, or the merge would never end.
        """
        require(merge.start < merge.end and merge.stride > 0, f'{merge} does not end')
        first, end = merge.partial_start, merge.partial_end
        if not 0 <= first <= end <= len(self._lse):
            raise IndexError(f'{merge} of {len(self._lse)} partial results')
        own = torch.arange(merge.end - merge.start)[:, None]
        row = first + own + torch.arange(0, end - first, merge.stride)
        # The last part need not be there for all rows.
        beyond = row >= end
        row = row.clamp(max=len(self._lse) - 1)
        require(bool((self._written[row] | beyond).all()), f'{merge} of rows that no work writes')
        parts = self._lse[row].masked_fill(beyond, -math.inf)
        lse = (parts * math.log(2)).logsumexp(-1) / math.log(2)
        lse = lse.clamp(min=_NO_KEY)
        output = self._output[row].float().masked_fill(beyond.unsqueeze(-1), 0)
        weights = (parts - lse[:, None]).exp2()
        return (weights.unsqueeze(1) @ output).squeeze(1), lse
