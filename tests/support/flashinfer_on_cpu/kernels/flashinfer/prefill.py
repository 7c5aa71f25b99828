"""Stand-in for prefill: the wrapper, with a plan, of Ampere and Hopper, and Blackwell's kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashinfer_on_cpu import splits, trtllm, works
from flashinfer_on_cpu.calls import stands_in
from flashinfer_on_cpu.paged import (
    PagedCache,
    base_2,
    gather,
    keys_and_values,
    require,
    require_like,
    use_as_scratch,
    with_sinks,
)
from reference_attention import attend

# What only `plan` sets and the real `run` looks at: who goes past `plan` has to set all of it.
_SET_BY_PLAN = (
    '_batch_size',
    '_cached_kv_data_type',
    '_cached_o_data_type',
    '_cached_q_data_type',
    '_causal',
    '_logits_soft_cap',
    '_max_item_len_ptr',
    '_max_kv_len',
    '_max_q_len',
    '_num_kv_heads',
    '_num_qo_heads',
    '_prefix_len_ptr',
    '_qo_indptr_last',
    '_rope_scale',
    '_rope_theta',
    '_sm_scale',
    '_token_pos_in_items_len',
    '_token_pos_in_items_ptr',
    '_window_left',
)


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


@dataclass(frozen=True)
class _Module:
    """The host part of a kernel."""

    backend: str

    def plan(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        pinned_workspace: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_lens: Tensor,
        total_num_rows: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        use_cuda_graph: bool,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        *only_fa2: int,
    ) -> list[int]:
        """Write what `run` will need into `int_workspace`.

        Args:
            qo_indptr: int32 on the host, `(batch_size + 1,)`; `kv_indptr` likewise.
            kv_lens: int32 on the host, `(batch_size,)`.
            total_num_rows: With `use_cuda_graph`, the most there will ever be.

        Returns:
            The plan, for `run`.
        """
        for array, size in ((qo_indptr, 1), (kv_indptr, 1), (kv_lens, 0)):
            require_like(array, 'an array to plan with', (batch_size + size,), torch.int32)
            require(array.device.type == 'cpu', 'a plan is made on the host')
        require(num_qo_heads % num_kv_heads == 0, f'{num_qo_heads} heads on {num_kv_heads}')
        if self.backend == 'fa2':
            most = total_num_rows if use_cuda_graph else None
            split, room = splits.make(
                qo_indptr.tolist(),
                kv_lens.tolist(),
                group=num_qo_heads // num_kv_heads,
                num_kv_heads=num_kv_heads,
                dim=head_dim_vo,
                page_size=page_size,
                window_left=window_left,
                multiprocessors=_multiprocessors(),
                may_split=not only_fa2[1],
                most_queries=most,
            )
            return splits.write(
                int_workspace,
                float_workspace,
                split,
                room=room,
                num_heads=num_qo_heads,
                dim=head_dim_vo,
                most_queries=most,
            )
        tile = works.tile_size(head_dim_vo)
        works_a_head = math.ceil(total_num_rows / tile) + batch_size - 1
        all_heads = works_a_head > 4096
        batch = works.make(
            qo_indptr.tolist(),
            kv_indptr.tolist(),
            kv_lens.tolist(),
            num_heads=num_qo_heads,
            tile=tile,
            all_heads=all_heads,
        )
        room = works_a_head * (1 if all_heads else num_qo_heads)
        return works.write(
            int_workspace,
            batch,
            ctas=_multiprocessors(),
            room=room if use_cuda_graph else len(batch),
            all_heads=all_heads,
        )


class BatchPrefillWithPagedKVCacheWrapper:
    """Attention of packed queries on a paged cache, by the kernels of `fa2` and `fa3`.

    `run` computes from the work list in the int workspace and the buffers, of which `fa3` reads
    that of page ids alone, and leaves alone rows that the list is not for.
    """

    @stands_in('custom_mask_buf', 'mask_indptr_buf', 'jit_args', 'jit_kwargs')
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = 'NHD',
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = 'auto',
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """With `use_cuda_graph`, plans are copied to the buffers, int32, whose sizes set the batch
        size and the most page ids.
        """
        if backend not in ('auto', 'fa2', 'fa3'):
            raise NotImplementedError(f'there is no stand-in for the {backend} backend of prefill')
        self.device = float_workspace_buffer.device
        self._kv_layout = kv_layout
        self._backend = backend
        self._use_cuda_graph = use_cuda_graph
        self._fixed_batch_size = 0
        if use_cuda_graph:
            buffers = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_last_page_len_buf
            for buffer in (*buffers, paged_kv_indices_buf):
                require(isinstance(buffer, Tensor), 'graph mode needs four buffers')
            sizes = [len(buffer) for buffer in buffers if buffer is not None]
            self._fixed_batch_size = sizes[0] - 1
            require(sizes[1:] == [sizes[0], sizes[0] - 1], f'buffers of {sizes}')
        self._qo_indptr_buf: Any = qo_indptr_buf
        self._paged_kv_indptr_buf: Any = paged_kv_indptr_buf
        self._paged_kv_indices_buf: Any = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf: Any = paged_kv_last_page_len_buf
        self._custom_mask_buf = None
        self._max_total_num_rows: int | None = None
        self._plan_info: list[int] | None = None
        self._cached_module: _Module | None = None
        # All -1, so that what no plan wrote is no work.
        self._bind_workspaces(
            float_workspace_buffer,
            torch.full((8 * 1024 * 1024,), 255, dtype=torch.uint8, device=self.device),
        )

    def _bind_workspaces(self, float_workspace: Tensor, int_workspace: Tensor) -> None:
        for workspace in (float_workspace, int_workspace):
            require(workspace.data_ptr() % 16 == 0, 'a workspace must be 16-byte aligned')
        self._float_workspace_buffer = float_workspace
        self._int_workspace_buffer = int_workspace
        self._pin_memory_int_workspace_buffer = torch.empty_like(int_workspace, device='cpu')

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans are copied to the buffers that the wrapper was made with."""
        return self._use_cuda_graph

    @stands_in()
    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        """Take other workspaces; a plan made before is not in them."""
        self._bind_workspaces(float_workspace_buffer, int_workspace_buffer)

    @stands_in(
        'custom_mask',
        'packed_custom_mask',
        'pos_encoding_mode',
        'use_fp16_qk_reduction',
        'logits_soft_cap',
        'rope_scale',
        'rope_theta',
        'prefix_len_ptr',
        'token_pos_in_items_ptr',
        'token_pos_in_items_len',
        'max_item_len_ptr',
        'block_tables',
    )
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = 'NONE',
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = 'float16',
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Prepare for `run` on a batch.

        Args:
            qo_indptr: int32 `(requests + 1,)`, as all that follows on the host or the device.
            paged_kv_indptr: int32 `(requests + 1,)`, into the page ids.
            paged_kv_indices: Page ids, int32 `(pages,)`.
            paged_kv_last_page_len: int32 `(requests,)`, 0 for a request without pages.
            sm_scale: Factor of the scores; None: `head_dim_qk**-0.5`.
            window_left: Earlier keys that a query sees; -1: all.
            seq_lens: The lengths that result from the pages, int32 `(requests,)`, if known.
        """
        query_dtype = _dtype(q_data_type)
        self._batch_size = len(qo_indptr) - 1
        self._num_qo_heads, self._num_kv_heads = num_qo_heads, num_kv_heads
        starts, page_starts, last = (
            array.cpu() for array in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        )
        lengths = _lengths(page_starts, last, page_size) if seq_lens is None else seq_lens.cpu()
        lengths = lengths.flatten()
        self._qo_indptr_last = int(starts[-1])
        self._max_q_len = max_token_per_sequence or int(starts.diff().max())
        self._max_kv_len = max_sequence_kv or int(lengths.max())

        arrays = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        if self._use_cuda_graph:
            if self._max_total_num_rows is None:
                self._max_total_num_rows = self._qo_indptr_last
            most = self._max_total_num_rows
            require(self._qo_indptr_last <= most, f'{self._qo_indptr_last} rows, more than {most}')
            require(
                self._batch_size == self._fixed_batch_size,
                f'{self._batch_size} requests, not {self._fixed_batch_size}',
            )
            room = len(self._paged_kv_indices_buf)
            require(len(paged_kv_indices) <= room, f'more than {room} page ids')
            self._qo_indptr_buf.copy_(qo_indptr)
            self._paged_kv_indptr_buf.copy_(paged_kv_indptr)
            self._paged_kv_indices_buf[: len(paged_kv_indices)].copy_(paged_kv_indices)
            self._paged_kv_last_page_len_buf.copy_(paged_kv_last_page_len)
        else:
            (
                self._qo_indptr_buf,
                self._paged_kv_indptr_buf,
                self._paged_kv_indices_buf,
                self._paged_kv_last_page_len_buf,
            ) = (array.to(self.device, copy=True) for array in arrays)

        self._cached_q_data_type = query_dtype
        self._cached_kv_data_type = _dtype(kv_data_type or query_dtype)
        self._cached_o_data_type = _dtype(o_data_type or query_dtype)
        if self._backend == 'auto':
            self._backend = 'fa3' if torch.cuda.get_device_capability()[0] == 9 else 'fa2'
        self._cached_module = _Module(self._backend)
        only_fa2 = (fixed_split_size or -1, disable_split_kv, 0, 0)
        self._plan_info = self._cached_module.plan(
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer,
            starts,
            page_starts,
            lengths,
            self._max_total_num_rows or self._qo_indptr_last,
            self._batch_size,
            num_qo_heads,
            num_kv_heads,
            page_size,
            self._use_cuda_graph,
            head_dim_qk,
            head_dim_vo or head_dim_qk,
            causal,
            window_left,
            *(only_fa2 if self._backend == 'fa2' else ()),
        )
        self._causal = causal
        self._pos_encoding_mode = pos_encoding_mode
        self._use_fp16_qk_reduction = use_fp16_qk_reduction
        self._window_left = window_left
        self._sm_scale = sm_scale
        self._logits_soft_cap = logits_soft_cap
        self._rope_scale, self._rope_theta = rope_scale, rope_theta
        self._prefix_len_ptr = prefix_len_ptr
        self._token_pos_in_items_ptr = token_pos_in_items_ptr
        self._token_pos_in_items_len = token_pos_in_items_len
        self._max_item_len_ptr = max_item_len_ptr

    @stands_in(
        'q_scale',
        'k_scale',
        'v_scale',
        'kv_cache_sf',
        'skip_softmax_threshold_scale_factor',
        'use_fp16_softmax',
        'uses_spcompress',
    )
    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: PagedCache | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention as planned.

        Args:
            q: `(rows, heads, dim)`, the rows that the plan says.
            sinks: Taken and not applied, as the real kernels do.

        Returns:
            `out`, or without one a new tensor; with `return_lse` also the log-sum-exp to base 2,
            float32 `(rows, heads)`.
        """
        require(not args, 'further arguments are for custom kernels')
        for name in _SET_BY_PLAN:
            getattr(self, name)
        require(self._cached_module is not None and self._plan_info is not None, 'no plan is made')
        cache = keys_and_values(paged_kv_cache, self._kv_layout)
        same = q.shape[-1] == cache[1].shape[-1]
        require(same or self._backend != 'fa3', 'fa3 reads no pages of such dims')
        require(q.dtype == self._cached_q_data_type, f'queries of {q.dtype} are not planned')
        for part in cache:
            require(part.dtype == self._cached_kv_data_type, f'a cache of {part.dtype} is not')
            require(part.shape[2] == self._num_kv_heads, f'{part.shape[2]} KV heads are not')
        rows = self._qo_indptr_last
        require(len(q) == rows, f'{len(q)} queries, where {rows} are planned')
        require(q.shape[1] == self._num_qo_heads, f'{q.shape[1]} heads are not planned')
        require(window_left in (None, self._window_left), f'window {window_left} is not planned')
        require(self._custom_mask_buf is self._prefix_len_ptr is None, 'masks have no stand-in')
        require(q.stride(-1) == 1, 'elements of a head must be contiguous')

        out, lse = _results(q, cache[1].shape[-1], self._cached_o_data_type, out, lse)

        (self._run_fa2 if self._backend == 'fa2' else self._run_fa3)(q, cache, out, lse)
        use_as_scratch(self._float_workspace_buffer)
        return (out, lse) if return_lse else out

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return _attention(q, keys, values, self._sm_scale, self._causal, self._window_left)

    def _run_fa2(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> None:
        assert self._plan_info is not None
        require(out.is_contiguous(), 'out is written as contiguous, and is not')
        starts, page_starts, last = (
            buffer.tolist()
            for buffer in (
                self._qo_indptr_buf,
                self._paged_kv_indptr_buf,
                self._paged_kv_last_page_len_buf,
            )
        )
        page_ids, page_size = self._paged_kv_indices_buf.view(-1), cache[0].shape[1]
        pages = [end - start for start, end in zip(page_starts[:-1], page_starts[1:], strict=True)]
        # Unsigned, so that the two parts need not be what they are called.
        lengths = [
            ((count - 1) * page_size + tail) % 2**32 if count else 0
            for count, tail in zip(pages, last, strict=True)
        ]

        def keys_of(request: int, start: int, end: int) -> tuple[Tensor, Tensor]:
            page = start // page_size
            ids = page_ids[page_starts[request] + page :]
            keys, values = gather(cache, ids, end - page * page_size)
            return keys[start % page_size :], values[start % page_size :]

        plan = splits.read(self._int_workspace_buffer, self._plan_info)
        results = out, lse
        if plan.is_split:
            results = splits.partial_results(
                self._float_workspace_buffer, self._plan_info, q.shape[1], out.shape[-1], out.dtype
            )
        written = splits.work_through(
            plan,
            q,
            starts,
            lengths,
            keys_of,
            *results,
            scale=q.shape[-1] ** -0.5 if self._sm_scale is None else self._sm_scale,
            causal=self._causal,
            window_left=self._window_left,
        )
        if plan.is_split:
            merged, merged_lse = splits.merge(plan.merge_starts, *results, written)
            rows = slice(len(merged))
            require(len(merged) <= len(out), f'{len(merged)} queries are merged')
            out[rows], lse[rows] = merged.to(out.dtype), merged_lse

    def _run_fa3(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> None:
        assert self._plan_info is not None
        require(cache[0].stride()[:2] == cache[1].stride()[:2], 'strides of keys and values differ')
        page_ids = self._paged_kv_indices_buf
        require_like(page_ids, 'page ids', tuple(page_ids.shape), torch.int32)
        group = q.shape[1] // cache[0].shape[2]

        def keys_of(work: works.Work, head: int) -> tuple[Tensor, Tensor]:
            heads = slice(head // group, head // group + 1)
            return gather(cache, page_ids.view(-1)[work.page_start :], work.keys, heads)

        _work(self._int_workspace_buffer, self._plan_info, keys_of, self._attend, q, out, lse)


class BatchPrefillWithRaggedKVCacheWrapper:
    """Attention of packed queries on packed keys, by the kernel of `fa3`, from its work list.

    The kernel reads whole tiles of keys: a value behind a request's last that is NaN, be it another
    request's or no one's, makes its outputs NaN.
    """

    @stands_in(
        'use_cuda_graph',
        'qo_indptr_buf',
        'kv_indptr_buf',
        'custom_mask_buf',
        'mask_indptr_buf',
        'jit_args',
        'jit_kwargs',
    )
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = 'NHD',
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = 'auto',
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if backend != 'fa3' or kv_layout != 'NHD':
            raise NotImplementedError(f'there is no stand-in for ragged {backend} in {kv_layout}')
        self.device = float_workspace_buffer.device
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer: Tensor = torch.full(
            (8 * 1024 * 1024,), 255, dtype=torch.uint8, device=self.device
        )
        self._pin_memory_int_workspace_buffer: Tensor | None = torch.empty_like(
            self._int_workspace_buffer, device='cpu'
        )
        self._plan_info: list[int] | None = None

    @stands_in(
        'custom_mask',
        'packed_custom_mask',
        'pos_encoding_mode',
        'use_fp16_qk_reduction',
        'logits_soft_cap',
        'rope_scale',
        'rope_theta',
        'prefix_len_ptr',
        'token_pos_in_items_ptr',
        'token_pos_in_items_len',
        'max_item_len_ptr',
        'fixed_split_size',
        'disable_split_kv',
        'v_indptr',
        'o_indptr',
    )
    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = 'NONE',
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = 'float16',
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
    ) -> None:
        """Prepare for `run` on a batch.

        Args:
            qo_indptr: int32 `(requests + 1,)`; `kv_indptr` likewise.
            sm_scale: Factor of the scores; None: `head_dim_qk**-0.5`.
            window_left: Earlier keys that a query sees; -1: all.
        """
        starts, key_starts = qo_indptr.cpu(), kv_indptr.cpu()
        self._qo_indptr_last = int(starts[-1])
        self._cached_q_data_type = _dtype(q_data_type)
        self._cached_kv_data_type = _dtype(kv_data_type or q_data_type)
        self._cached_o_data_type = _dtype(o_data_type or q_data_type)
        self._num_qo_heads, self._num_kv_heads = num_qo_heads, num_kv_heads
        self._causal, self._window_left, self._sm_scale = causal, window_left, sm_scale
        assert self._pin_memory_int_workspace_buffer is not None
        self._plan_info = _Module('fa3').plan(
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer,
            starts,
            key_starts,
            key_starts.diff(),
            self._qo_indptr_last,
            len(starts) - 1,
            num_qo_heads,
            num_kv_heads,
            1,
            False,
            head_dim_qk,
            head_dim_vo or head_dim_qk,
            causal,
            window_left,
        )

    @stands_in('q_scale', 'k_scale', 'v_scale', 'o_scale', 'kv_cache_sf')
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: PagedCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention as planned; arguments and result as of the wrapper for pages.

        Args:
            k: `(keys, kv_heads, dim)`; `v` likewise.
        """
        require(not args, 'further arguments are for custom kernels')
        require(self._plan_info is not None, 'no plan is made')
        assert self._plan_info is not None
        rows = self._qo_indptr_last
        require(q.dtype == self._cached_q_data_type, f'queries of {q.dtype} are not planned')
        require(len(q) == rows, f'{len(q)} queries, where {rows} are planned')
        require(q.shape[1] == self._num_qo_heads, f'{q.shape[1]} heads are not planned')
        for part in (k, v):
            require(
                part.dtype == self._cached_kv_data_type, f'keys of {part.dtype} are not planned'
            )
            require(part.shape[:2] == (len(k), self._num_kv_heads), f'keys {tuple(part.shape)}')
            require(all(stride % 8 == 0 for stride in part.stride()[:2]), 'TMA takes 16 bytes')
        for part in (q, k, v):
            require(part.stride(-1) == 1, 'elements of a head must be contiguous')
        out, lse = _results(q, v.shape[-1], self._cached_o_data_type, out, lse)
        group = self._num_qo_heads // self._num_kv_heads

        def keys_of(work: works.Work, head: int) -> tuple[Tensor, Tensor]:
            end = work.page_start + work.keys
            if end > len(k):
                raise IndexError(f'{work} of {len(k)} keys')
            tile = slice(work.page_start, work.page_start + math.ceil(work.keys / 128) * 128)
            behind = torch.zeros_like(v[tile, head // group])
            behind[work.keys :] = v[tile, head // group][work.keys :]
            poison = 0 * behind.float().sum(0)
            keys, values = (part[work.page_start : end, head // group].float() for part in (k, v))
            return keys.unsqueeze(1), (values + poison).unsqueeze(1)

        _work(self._int_workspace_buffer, self._plan_info, keys_of, self._attend, q, out, lse)
        use_as_scratch(self._float_workspace_buffer)
        return (out, lse) if return_lse else out

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return _attention(q, keys, values, self._sm_scale, self._causal, self._window_left)


def _attention(
    q: Tensor, keys: Tensor, values: Tensor, scale: float | None, causal: bool, window_left: int
) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp to base 2."""
    output, lse = attend(
        q.float(),
        keys,
        values,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        causal=causal,
        window=(window_left, -1),
    )
    return output, base_2(lse)


def _work(
    workspace: Tensor,
    plan: list[int],
    keys_of: Callable[[works.Work, int], tuple[Tensor, Tensor]],
    attend_to: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    q: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Work through a list, as the kernel of fa3 does.

    Args:
        keys_of: Keys and values of a work's request for a query head, float32 `(keys, 1, dim)`.
        attend_to: Attention of queries on them, and its log-sum-exp.
        out: `(rows, heads, dim)`, written where there is a work; `lse` likewise.
    """
    require(len(plan) == 9, f'a plan of {len(plan)} numbers')
    require(out.stride(-1) == 1, 'elements of a head must be contiguous')
    num_rows, num_heads = q.shape[:2]
    tile = works.tile_size(out.shape[-1])
    written = torch.zeros(num_rows, num_heads, dtype=torch.bool)
    for work in works.read(workspace, plan, ctas=_multiprocessors()):
        first, last = work.query_start, work.query_start + work.queries
        if not (0 <= first <= last <= num_rows and work.tile >= 0 <= work.page_start):
            raise IndexError(f'{work} for {num_rows} rows')
        part = work.rows(tile)
        rows = slice(first + part.start, first + part.stop)
        for head in range(num_heads) if plan[8] else (work.head,):
            if not 0 <= head < num_heads:
                raise IndexError(f'{work} for {num_heads} heads')
            if written[rows, head].any():
                raise ValueError(f'{work} is of rows that another work writes')
            written[rows, head] = True
            keys, values = keys_of(work, head)
            result, result_lse = attend_to(q[first:last, head : head + 1], keys, values)
            out[rows, head] = result[part, 0].to(out.dtype)
            lse[rows, head] = result_lse[part, 0]


def _results(
    q: Tensor, value_dim: int, dtype: torch.dtype, out: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, new ones where there are none."""
    shape = (*q.shape[:2], value_dim)
    out = q.new_zeros(shape, dtype=dtype) if out is None else out
    require(out.shape == shape, f'out is {tuple(out.shape)}, not {shape}')
    require(out.dtype == dtype, f'out of {out.dtype} is not planned')
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if lse is None else lse
    require_like(lse, 'lse', tuple(q.shape[:2]), torch.float32)
    return out, lse


def _dtype(name: str | torch.dtype) -> torch.dtype:
    return getattr(torch, name) if isinstance(name, str) else name


def _lengths(page_starts: Tensor, last: Tensor, page_size: int) -> Tensor:
    """Keys of each request, from the tables that the wrapper takes."""
    return (page_starts.diff() - 1).clamp(min=0) * page_size + last


@stands_in(
    'out_dtype',
    'o_sf_scale',
    'o_sf_vec_size',
    'kv_cache_sf',
    'skip_softmax_threshold_scale_factor',
    'uses_shared_paged_kv_idx',
    'lse',
    'return_lse',
    'use_fp16_softmax',
    'uses_spcompress',
)
def trtllm_batch_context_with_kv_cache(
    query: Tensor,
    kv_cache: PagedCache,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = 'HND',
    enable_pdl: bool | None = None,
    sinks: Tensor | None = None,
    kv_cache_sf: PagedCache | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
) -> Tensor:
    """Attention of packed queries; `trtllm.attend` says on what.

    Args:
        batch_size: The requests of the tables.
        cum_seq_lens_kv: int32 `(batch_size + 1,)`.
    """
    require(len(seq_lens) == batch_size, f'{len(seq_lens)} lengths for {batch_size} requests')
    require_like(cum_seq_lens_kv, 'cum_seq_lens_kv', (batch_size + 1,), torch.int32)
    return trtllm.attend(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        cum_seq_lens_q,
        max_query_len=max_q_len,
        max_key_len=max_kv_len,
        scale=float(bmm1_scale),
        value_scale=float(bmm2_scale),
        window_left=window_left,
        out=out,
        layout=kv_layout,
        sinks=sinks,
        counters=multi_ctas_kv_counter_buffer,
        causal=causal,
    )


@stands_in(
    'out_dtype',
    'pos_encoding_mode',
    'logits_soft_cap_scale',
    'chunked_attention_size',
    'save_softmax_stats',
    'skip_softmax_threshold_scale_factor',
)
def trtllm_fmha_v2_prefill(
    qkv: Tensor | tuple[Tensor, Any],
    input_layout: str,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    block_tables: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    sinks: Tensor | None = None,
    pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None,
    mask_mode: str = 'causal',
    window_left: int = -1,
    chunked_attention_size: int = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float = 0,
) -> Tensor:
    """Attention of packed queries on pages of keys and values that are apart, on Hopper.

    As the kernel does, it multiplies the values behind a request's last token in its last page by
    zero, and does not leave them out.

    Args:
        qkv: Queries `(tokens, heads, dim)`, and keys and values, each `(pages, page_size, kv_heads,
            dim)`, values behind keys.
        seq_lens: Keys of each request, int32 `(batch_size,)`.
        max_q_len: At least the queries of each request. If it is the mean, all have so many.
        cum_seq_lens_q: int32 `(batch_size + 1,)`; `cum_seq_lens_kv` likewise. Rows of no request
            stay as they are.
        block_tables: Pages of keys and of values, int32 `(batch_size, 2, pages)`, both counted from
            where keys start.
        sinks: float32 `(heads,)`.
        window_left: With `mask_mode` `sliding_window`, earlier keys that a query sees.
    """
    require(torch.cuda.get_device_capability()[0] == 9, 'this stands in for the kernel of SM 9.0')
    if input_layout != 'Q_PAGED_KV_NHD' or isinstance(qkv, Tensor):
        raise NotImplementedError(f'there is no stand-in for {input_layout}')
    query, cache = qkv
    keys, values = keys_and_values(cache, 'NHD')
    require(keys.is_contiguous() and values.is_contiguous(), 'strides are taken from shapes')
    require(keys.shape == values.shape, 'keys and values must have the same shape')
    page_size = keys.shape[1]
    require(page_size & (page_size - 1) == 0, f'pages of {page_size} tokens, no power of two')
    apart, rest = divmod(values.data_ptr() - keys.data_ptr(), keys[0].numel() * keys.itemsize)
    require(apart > 0 == rest, 'values must lie whole pages behind keys')
    require(query.dtype == keys.dtype == torch.bfloat16, f'queries of {query.dtype}')
    require(query.is_contiguous(), 'queries are read as contiguous')
    out = torch.zeros_like(query) if out is None else out
    require_like(out, 'out', tuple(query.shape), query.dtype)
    require_like(seq_lens, 'seq_lens', (batch_size,), torch.int32)
    for array in (cum_seq_lens_q, cum_seq_lens_kv):
        require_like(array, 'starts', (batch_size + 1,), torch.int32)
    require(block_tables is not None, 'block_tables is required')
    assert block_tables is not None
    shape = batch_size, 2, block_tables.shape[-1]
    require_like(block_tables, 'block_tables', shape, torch.int32)
    require(mask_mode == ('causal' if window_left < 0 else 'sliding_window'), f'mask {mask_mode}')
    require(workspace_buffer.nbytes >= 16, 'no room for the counter')
    require(max_kv_len >= max_q_len, 'more queries than keys')
    if sinks is not None:
        require_like(sinks, 'sinks', (query.shape[1],), torch.float32)
    starts, key_starts = cum_seq_lens_q.tolist(), cum_seq_lens_kv.tolist()
    if batch_size * max_q_len == len(query):
        lengths = {end - start for start, end in zip(starts[:-1], starts[1:], strict=True)}
        require(len(lengths) == 1, 'requests are not equally long, as the kernel takes it')
    for request, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        require(0 <= rows.start <= rows.stop <= len(query), 'rows that are not in the queries')
        require(rows.stop - rows.start <= max_q_len, 'a request has more than max_q_len')
        require(key_starts[request + 1] - key_starts[request] == length, 'lengths do not fit')
        if rows.start == rows.stop:
            continue
        ids = block_tables[request]
        found = [
            gather((part, part), table, length)[0]
            for part, table in zip((keys, values), (ids[0], ids[1] - apart), strict=True)
        ]
        result, lse = attend(
            query[rows].float(), *found, scale=bmm1_scale, causal=True, window=(window_left, -1)
        )
        page, tail = divmod(length, page_size)
        if tail and not values[ids[1, page] - apart, tail:].isfinite().all():
            result.fill_(math.nan)
        out[rows] = (with_sinks(result, lse, sinks) * bmm2_scale).to(out.dtype)
    use_as_scratch(workspace_buffer)
    return out
