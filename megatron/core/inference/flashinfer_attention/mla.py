# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""FlashInfer's kernels for multi-latent attention (MLA) on cached latents.

MLA is absorbed here in every phase: queries are projected to the space of the latents, so that all
heads share one key per token, the cached latent with its rotary part, whose leading elements are
the value.
"""

from typing import Any, Dict

import torch

from megatron.core.inference.config import FlashInferKernel

from .kernels import Call, DecodeKernel, HostPlanned, PrefillKernel, Setup
from .selection import AttentionProblem
from .step import StepShape

# Pairs of query token and head that one CTA takes. Where rows have more on average, two CTAs share
# a work.
TILE = 64
# Works that FlashInfer's plan has room for, which it does not check.
MAX_WORKS = 16384


def refuse_large_steps(
    problem: AttentionProblem, max_requests: int, max_tokens: int, num_multiprocessors: int
) -> None:
    """Refuse an engine whose steps may be larger than FlashInfer can plan.

    Args:
        problem (AttentionProblem): What to compute.
        max_requests (int): Most requests of a step.
        max_tokens (int): Most query tokens of a step, padding included.
        num_multiprocessors (int): Of the GPU.

    Raises:
        ValueError: If steps may be too large.
    """
    rows = min(max_requests + 1, max_tokens)
    pairs = max_tokens * problem.num_query_heads
    # A row's last work may be of less than a tile. One CTA takes a work if there are at most
    # `TILE` pairs a row, fractions aside; splitting keys adds at most one work a multiprocessor.
    works = rows + max(pairs // (2 * TILE), rows * (TILE + 1) // TILE) + num_multiprocessors
    if works > MAX_WORKS:
        raise ValueError(
            f"FlashInfer plans multi-latent attention in at most {MAX_WORKS} works a step, but "
            f"max_tokens {max_tokens} and max_requests {max_requests} with "
            f"{problem.num_query_heads} query heads may need {works}: lower them, or set "
            "inference_attention_backend to flash."
        )


class Mla(HostPlanned, DecodeKernel, PrefillKernel):
    """Any phase, by one plan that the host makes of each step, for all layers.

    Padding tokens belong to a row that has no keys: the kernel writes zeros for it.

    Args:
        setup (Setup): With one kind of layer.
    """

    KERNEL: FlashInferKernel
    SPLITS_STEPS = False

    def __init__(self, setup: Setup) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper  # type: ignore

        self._setup = setup
        workspace = torch.empty(
            self._workspace_bytes(setup), dtype=torch.uint8, device=setup.device
        )
        # All that the kernel reads of a plan is at the same addresses without FlashInfer's mode for
        # CUDA graphs, too, which would hold a wrapper to one number of rows.
        self._wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=self.KERNEL.value)
        self._allocate_page_ids()
        latent_dim = setup.problem.value_dim
        self._dims = (latent_dim, setup.problem.head_dim - latent_dim)

    @staticmethod
    def _workspace_bytes(setup: Setup) -> int:
        """Partial results where keys are split over idle multiprocessors: at most two tiles each.

        Each pair has its output, in the dtype of the queries, and its log-sum-exp.
        """
        properties = torch.cuda.get_device_properties(setup.device)
        rows = 2 * TILE * properties.multi_processor_count
        alignment = 16
        return rows * (2 * setup.problem.value_dim + 4) + 2 * alignment

    def plan(self, shape: StepShape) -> None:
        """Plan all rows."""
        problem, (layer,) = self._setup.problem, self._setup.layers
        # FlashInfer chooses the grid by the mean of a row's tokens, and a graph keeps its grid. So
        # the number of rows follows from the shape, and all tokens are some row's. No request is
        # without a token, so that padding tokens find the last of these rows free.
        tables = self._rows(shape, min(shape.padded_requests + 1, shape.num_tokens))
        self._wrapper.plan(
            qo_indptr=tables.query_starts,
            kv_indptr=tables.page_starts,
            kv_indices=tables.page_ids,
            kv_len_arr=tables.kv_lengths,
            num_heads=problem.num_query_heads,
            head_dim_ckv=self._dims[0],
            head_dim_kpe=self._dims[1],
            page_size=problem.block_size_tokens,
            causal=True,
            sm_scale=layer.softmax_scale,
            q_data_type=problem.dtype,
            kv_data_type=problem.dtype,
        )

    def decode(self, call: Call) -> None:
        """See base class."""
        self.prefill(call)

    def prefill(self, call: Call) -> None:
        """See base class."""
        query, rotary_query = call.query.split(self._dims, dim=-1)
        latents, rotary_keys = call.key_cache.split(self._dims, dim=-1)
        self._wrapper.run(
            q_nope=query,
            q_pe=rotary_query,
            ckv_cache=latents,
            kpe_cache=rotary_keys,
            out=call.output,
        )


class MlaFa3(Mla):
    """On Hopper."""

    KERNEL = FlashInferKernel.FA3


class MlaFa2(Mla):
    """On any GPU. Run on SM 9.0 alone."""

    KERNEL = FlashInferKernel.FA2


MLA_KERNELS: Dict[FlashInferKernel, Any] = {
    FlashInferKernel.FA3: MlaFa3,
    FlashInferKernel.FA2: MlaFa2,
}
