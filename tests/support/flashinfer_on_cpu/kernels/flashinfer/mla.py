"""Stand-in for multi-latent attention: the wrapper, with a plan, of `fa2` and `fa3`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashinfer_on_cpu.calls import stands_in
from flashinfer_on_cpu.paged import base_2, gather, require, require_like, use_as_scratch
from reference_attention import attend

_TILE = 64
"""Pairs of query and head that a thread block takes, and keys that it takes at a time."""
_MAX_WORKS = 16384
_FIELDS = 7
"""Numbers of a work: first row, first page id, queries, keys, first pair, first key, last key."""


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


class BatchMLAPagedAttentionWrapper:
    """Absorbed attention of packed queries on a paged cache of latents.

    `run` computes from the works that lie in the int workspace, and from the page ids, and leaves
    alone rows that no work has. Like the real kernel's, a work's keys end short of its last query's
    where a tile, but a row's last, ends between two heads of one query.
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
        self._int_workspace_buffer = torch.full(
            (8 * 1024 * 1024,), 255, dtype=torch.uint8, device=self.device
        )
        self._pin_memory_int_workspace_buffer = torch.empty_like(self._int_workspace_buffer)
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

        pairs = [(end - start) * num_heads for start, end in zip(starts[:-1], starts[1:])]
        ctas = 2 if sum(pairs) // num_requests > _TILE else 1
        tile = ctas * _TILE
        works: list[int] = []
        for request, count in enumerate(pairs):
            tiles = math.ceil(count / tile)
            for number in range(tiles):
                queries, end = count // num_heads, lengths[request]
                if causal and number + 1 < tiles:
                    bound = math.ceil((number + 1) * tile / num_heads)
                    end = max(min(end - queries + bound, end), 0)
                works += [starts[request], page_starts[request], queries, lengths[request]]
                works += [number * tile, 0, end]
        require(len(works) <= _FIELDS * _MAX_WORKS, f'more works than {_MAX_WORKS}')
        clusters = _multiprocessors() // ctas
        scratch = 2 * clusters * tile * (2 * head_dim_ckv + 4)
        require(self._float_workspace_buffer.nbytes >= scratch, f'less than {scratch} bytes')

        header = torch.tensor([len(works) // _FIELDS, *works], dtype=torch.int32)
        pinned = self._pin_memory_int_workspace_buffer[: header.nbytes].view(torch.int32)
        pinned.copy_(header)
        self._int_workspace_buffer[: header.nbytes].view(torch.int32).copy_(pinned)
        self._kv_indices_buf = kv_indices.to(self.device)
        self._plan_info = [ctas, clusters]
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

        query = torch.cat((q_nope, q_pe), -1).float()
        caches = tuple(cache.unsqueeze(2) for cache in (ckv_cache, kpe_cache))
        tile = self._plan_info[0] * _TILE
        for work in self._works():
            first, page, queries, keys, pair, key_start, key_end = work
            if not 0 <= first <= first + queries <= rows or page < 0:
                raise IndexError(f'{work} for {rows} rows')
            latents, rotary = gather((caches[0], caches[1]), self._kv_indices_buf[page:], keys)
            bound = keys
            if self._causal and pair + tile < queries * heads:
                bound = keys - queries + (pair + tile) // heads
            seen = min(math.ceil(min(key_end, max(bound, 0)) / _TILE) * _TILE, key_end)
            require(key_start == 0, 'keys are not split here')
            start, stop = pair // heads, math.ceil(min(pair + tile, queries * heads) / heads)
            # The last query is at the last key.
            result, result_lse = self._attend(
                query[first + start : first + stop],
                latents[: max(keys - queries + stop, 0)],
                rotary[: max(keys - queries + stop, 0)],
                seen,
            )
            pairs = slice(pair - start * heads, min(pair + tile, queries * heads) - start * heads)
            rows_of = slice(first + start, first + stop)
            out[rows_of].view(-1, out.shape[-1])[pairs] = result.flatten(0, 1)[pairs].to(out.dtype)
            lse[rows_of].view(-1)[pairs] = result_lse.flatten()[pairs]
        use_as_scratch(self._float_workspace_buffer)
        return (out, lse) if return_lse else out

    def _works(self) -> list[list[int]]:
        plan: Any = self._int_workspace_buffer.view(torch.int32)
        count = int(plan[0])
        require(0 <= count <= _MAX_WORKS, f'{count} works')
        works: list[list[int]] = plan[1 : 1 + _FIELDS * count].view(count, _FIELDS).tolist()
        return works

    def _attend(
        self, query: Tensor, latents: Tensor, rotary: Tensor, seen: int
    ) -> tuple[Tensor, Tensor]:
        """Attention to the first `seen` keys at most, as `causal` says."""
        keys = torch.cat((latents, rotary), -1)
        if not self._causal:
            output, lse = attend(
                query, keys[:seen], latents[:seen], scale=self._sm_scale, causal=False
            )
            return output, base_2(lse)
        first = len(keys) - len(query)
        if seen >= len(keys):
            output, lse = attend(query, keys, latents, scale=self._sm_scale)
            return output, base_2(lse)
        outputs, lses = [], []
        for row in range(len(query)):
            end = max(min(first + row + 1, seen), 0)
            output, lse = attend(
                query[row : row + 1], keys[:end], latents[:end], scale=self._sm_scale, causal=False
            )
            outputs.append(output)
            lses.append(base_2(lse))
        return torch.cat(outputs), torch.cat(lses)
