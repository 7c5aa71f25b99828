# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""FlashInfer's kernels for multi-latent attention (MLA) on cached latents.

MLA is absorbed here in every phase: queries are projected to the space of the latents, so that all
heads share one key per token, the cached latent with its rotary part, whose leading elements are
the value. Only prompts of which nothing is cached yet are better off with keys and values that are
projected from their latents, since absorbed ones have several times the elements.
"""

import math
from dataclasses import replace
from typing import Any, Dict, Optional

import torch
from torch import Tensor

from megatron.core.inference.config import FlashInferKernel

from .kernels import Call, DecodeKernel, PrefillKernel, Setup, refuse_beyond_32_bits
from .mla_schedule import CTA_PAIRS, MlaSchedule
from .selection import AttentionProblem
from .step import StepShape

# Elements of projected keys and values that fa3 takes, beside those that are equal.
PROJECTED_DIMS = (192, 128)


def projected(
    problem: AttentionProblem, prefill: FlashInferKernel, head_dim: int, value_dim: int
) -> Optional[AttentionProblem]:
    """What to compute of prompts of which nothing is cached, if projecting their latents pays.

    Args:
        problem (AttentionProblem): The absorbed problem.
        prefill (FlashInferKernel): The kernel that computes it.
        head_dim (int): Elements of a key that is projected from a latent.
        value_dim (int): Elements of a value.
    """
    if prefill is not FlashInferKernel.FA3 or (head_dim, value_dim) != PROJECTED_DIMS:
        return None
    return replace(
        problem,
        num_kv_heads=problem.num_query_heads,
        head_dim=head_dim,
        latent_dim=None,
        value_head_dim=value_dim,
    )


class Mla(DecodeKernel, PrefillKernel):
    """Any phase, by a work list that is made on the device, for all layers.

    Args:
        setup (Setup): With one kind of layer.

    Raises:
        ImportError: If this FlashInfer reads other lists.
        ValueError: If the block table or a step has room for more than the kernels count.
    """

    KERNEL: FlashInferKernel
    SPLITS_STEPS = False
    # Attributes of the wrapper that are no part of its interface, and are set here.
    ATTRIBUTES = ("_plan_info", "_int_workspace_buffer", "_kv_indices_buf")

    def __init__(self, setup: Setup) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper  # type: ignore

        self._setup = setup
        refuse_beyond_32_bits(setup, self.KERNEL)
        latent_dim = setup.problem.value_dim
        self._dims = (latent_dim, setup.problem.head_dim - latent_dim)
        self._schedule = self._make_schedule(
            setup.max_requests, setup.max_tokens, setup.max_kv_blocks
        )
        workspace = torch.empty(
            self._schedule.partial_bytes, dtype=torch.uint8, device=setup.device
        )
        self._wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=self.KERNEL.value)
        self._check()
        self._follow(self._schedule, setup.books.block_table)
        self._wrapper._pin_memory_int_workspace_buffer = None
        self._compile()

    def _make_schedule(self, max_requests: int, max_tokens: int, max_kv_blocks: int) -> MlaSchedule:
        problem, device = self._setup.problem, self._setup.device
        return MlaSchedule(
            max_requests,
            max_tokens,
            max_kv_blocks,
            problem.num_query_heads,
            problem.value_dim,
            torch.cuda.get_device_properties(device).multi_processor_count,
            device,
        )

    def _follow(self, schedule: MlaSchedule, block_table: Tensor) -> None:
        """Point the wrapper to a work list in place of its plan."""
        self._wrapper._int_workspace_buffer = schedule.works.view(torch.uint8)
        self._wrapper._kv_indices_buf = block_table

    def _check(self) -> None:
        """Have two requests computed by FlashInfer's plan, and by a work list and padding tokens.

        The plan also compiles and loads the kernel, and fixes dtypes and options for good.

        Raises:
            ImportError: If the results differ.
        """
        problem, (layer,) = self._setup.problem, self._setup.layers
        device, block_size = self._setup.device, problem.block_size_tokens
        # Keys that are split, pages that are not in order, and nothing that is 0 throughout. The
        # longer request has as many tokens as it takes for clusters of two CTAs.
        long = 3 * CTA_PAIRS // problem.num_query_heads + 1
        query_lengths, kv_lengths, padding = (1, long), (2000 + block_size, long + 1), 3
        num_tokens = sum(query_lengths)
        blocks = [math.ceil(length / block_size) for length in kv_lengths]
        starts = torch.tensor([0, query_lengths[0], num_tokens], dtype=torch.int32)
        pages = torch.randperm(
            sum(blocks), generator=torch.Generator().manual_seed(0), dtype=torch.int32
        ).to(device)
        random = torch.Generator(device).manual_seed(0)

        def values(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device=device).to(problem.dtype)

        query = values(num_tokens + padding, problem.num_query_heads, problem.head_dim)
        latents = values(sum(blocks), block_size, problem.head_dim)
        expected = query.new_zeros(*query.shape[:2], problem.value_dim)
        self._wrapper.plan(
            qo_indptr=starts,
            kv_indptr=torch.tensor([0, blocks[0], sum(blocks)], dtype=torch.int32),
            kv_indices=pages,
            kv_len_arr=torch.tensor(kv_lengths, dtype=torch.int32),
            num_heads=problem.num_query_heads,
            head_dim_ckv=self._dims[0],
            head_dim_kpe=self._dims[1],
            page_size=block_size,
            causal=True,
            sm_scale=layer.softmax_scale,
            q_data_type=problem.dtype,
            kv_data_type=problem.dtype,
        )
        if not all(hasattr(self._wrapper, name) for name in self.ATTRIBUTES):
            raise self._unknown()
        self._run(query[:num_tokens], latents, expected[:num_tokens])

        schedule = self._make_schedule(2, num_tokens + padding, blocks[0])
        block_table = torch.full((2, blocks[0]), -1, dtype=torch.int32, device=device)
        block_table[0], block_table[1, : blocks[1]] = pages.split(blocks)
        self._follow(schedule, block_table)
        # By clusters of one CTA, of which 128 heads have none, and of two.
        for count in (1, 2):
            tokens = sum(query_lengths[:count])
            tokens += padding if count == 2 else 0
            shape = StepShape(
                num_decode=0,
                num_requests=count,
                decode_slots=0,
                padded_requests=count,
                num_tokens=tokens,
                has_prefill=True,
            )
            schedule.derive(
                shape,
                starts.to(device),
                *(
                    torch.tensor(each, dtype=torch.int32, device=device)
                    for each in (query_lengths, kv_lengths)
                ),
            )
            plan_info = schedule.plan_info(schedule.ctas(shape))
            if len(self._wrapper._plan_info) != len(plan_info):
                raise self._unknown()
            self._wrapper._plan_info = plan_info
            found = torch.full_like(expected[:tokens], torch.nan)
            try:
                self._run(query[:tokens], latents, found)
            except (IndexError, TypeError, ValueError) as error:
                raise self._unknown() from error
            if not torch.allclose(found, expected[:tokens], rtol=2e-2, atol=2e-2):
                raise self._unknown()

    def _compile(self) -> None:
        """Make a list of nothing but padding for clusters of one CTA, and of two."""
        for tokens in (1, 2 * CTA_PAIRS // self._setup.problem.num_query_heads + 1):
            if tokens <= self._setup.max_tokens:
                self.derive(
                    StepShape(
                        num_decode=0,
                        num_requests=0,
                        decode_slots=0,
                        padded_requests=1,
                        num_tokens=tokens,
                        has_prefill=True,
                    )
                )

    def _unknown(self) -> ImportError:
        return ImportError(
            f"The {self.KERNEL.value} kernel for multi-latent attention of this FlashInfer is "
            "planned in another way: install flashinfer-python 0.6.18.post1, or set "
            "inference_attention_backend to flash."
        )

    def plan(self, shape: StepShape) -> None:
        """Choose the grid, which a graph keeps."""
        self._wrapper._plan_info = self._schedule.plan_info(self._schedule.ctas(shape))

    def derive(self, shape: StepShape) -> None:
        """Make the work list."""
        books = self._setup.books
        self._schedule.derive(shape, books.query_starts, books.query_lengths, books.kv_lengths)

    def decode(self, call: Call) -> None:
        """See base class."""
        self._run(call.query, call.key_cache, call.output)

    def prefill(self, call: Call) -> None:
        """See base class."""
        self._run(call.query, call.key_cache, call.output)

    def _run(self, query: Tensor, latents: Tensor, output: Tensor) -> None:
        query, rotary_query = query.split(self._dims, dim=-1)
        latents, rotary_keys = latents.split(self._dims, dim=-1)
        self._wrapper.run(
            q_nope=query, q_pe=rotary_query, ckv_cache=latents, kpe_cache=rotary_keys, out=output
        )


class MlaFa3(Mla):
    """On Hopper."""

    KERNEL = FlashInferKernel.FA3


class MlaFa2(Mla):
    """On any GPU. Tested on SM 9.0 only."""

    KERNEL = FlashInferKernel.FA2


MLA_KERNELS: Dict[FlashInferKernel, Any] = {
    FlashInferKernel.FA3: MlaFa3,
    FlashInferKernel.FA2: MlaFa2,
}
