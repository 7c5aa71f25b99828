"""Stand-in for the decode kernel of Blackwell, which needs no plan."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flashinfer_on_cpu import trtllm
from flashinfer_on_cpu.calls import stands_in
from flashinfer_on_cpu.paged import PagedCache, require


@stands_in(
    'out_dtype',
    'o_sf_scale',
    'o_sf_vec_size',
    'o_scale',
    'mask',
    'skip_softmax_threshold_scale_factor',
    'kv_cache_sf',
    'uses_shared_paged_kv_idx',
    'lse',
    'return_lse',
    'bmm1_scale_log2',
    'enable_block_sparse_attention',
    'bf16q_fp8kv_transform_mode',
)
def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: PagedCache,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Tensor | None = None,
    kv_layout: str = 'HND',
    enable_pdl: bool | None = None,
    backend: str = 'auto',
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: Tensor | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    bf16q_fp8kv_transform_mode: Literal['k_only', 'separate_kv'] | None = None,
) -> Tensor:
    """Causal attention of each request's last tokens; `trtllm.attend` says on what.

    A request has `q_len_per_req` of them, or, with that None, what `cum_seq_lens_q` says.
    """
    if backend == 'auto' and torch.cuda.get_device_capability()[0] != 10:
        backend = 'xqa'
    if backend not in ('auto', 'trtllm-gen'):
        raise NotImplementedError(f'there is no stand-in for the {backend} backend of decode')
    if q_len_per_req is None:
        assert cum_seq_lens_q is not None and max_q_len is not None
    else:
        require(cum_seq_lens_q is None, 'cum_seq_lens_q is for q_len_per_req=None')
        max_q_len = q_len_per_req
        cum_seq_lens_q = torch.arange(
            0, len(query) + 1, q_len_per_req, dtype=torch.int32, device=query.device
        )
    return trtllm.attend(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        cum_seq_lens_q,
        max_query_len=max_q_len,
        max_key_len=max_seq_len,
        scale=float(bmm1_scale),
        value_scale=float(bmm2_scale),
        window_left=window_left,
        out=out,
        layout=kv_layout,
        sinks=sinks,
        counters=multi_ctas_kv_counter_buffer,
    )
