# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""FlashInfer's kernels behind one interface.

FlashInfer is imported when a kernel is constructed, not with this module.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

import torch
import triton  # type: ignore
from torch import Tensor

from megatron.core.inference.config import FlashInferKernel

from .selection import AttentionProblem
from .split_schedule import SplitSchedule
from .step import PageTable, PrefillSchedule, Schedule, StepShape, make_tails_finite

MIB = 1024**2


@dataclass(frozen=True)
class Layer:
    """What the layers of a model differ in.

    Args:
        window_left: Keys before the query's own that it sees; -1: all of them.
        softmax_scale: Factor of the product of query and key.
    """

    window_left: int
    softmax_scale: float


@dataclass(frozen=True)
class Bookkeeping:
    """The context's arrays of a step, int32, on the device.

    Args:
        block_table: Block ids, `(max_requests, max_kv_blocks)`; -1 where there is no block.
        query_lengths: Query tokens of each request, `(max_requests,)`.
        query_starts: First query token of each, and the end of the last, `(max_requests + 1,)`.
        kv_lengths: Tokens of each in the cache, those of this step included, `(max_requests,)`.
    """

    block_table: Tensor
    query_lengths: Tensor
    query_starts: Tensor
    kv_lengths: Tensor


@dataclass(frozen=True)
class Setup:
    """All that a kernel is constructed from.

    Args:
        problem: Heads, dims, dtype and blocks.
        layers: Kinds of layers of the model.
        books: The context's arrays.
        max_tokens: Most query tokens of a step, padding included.
        tokens_per_decode: Query tokens of a decode request.
    """

    problem: AttentionProblem
    layers: Tuple[Layer, ...]
    books: Bookkeeping
    max_tokens: int
    tokens_per_decode: int

    @property
    def max_requests(self) -> int:
        """Most requests of a step."""
        return self.books.block_table.size(0)

    @property
    def max_kv_blocks(self) -> int:
        """Most blocks of a request."""
        return self.books.block_table.size(1)

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.books.block_table.device


@dataclass(frozen=True)
class Call:
    """One layer's attention in one step.

    Args:
        query: Contiguous `(tokens, query_heads, head_dim)`.
        key_cache: `(blocks, block_size, kv_heads, head_dim)`; of latents `(blocks, block_size,
            head_dim)`.
        value_cache: Likewise; of latents the part of `key_cache` that is the value.
        output: Contiguous `(tokens, query_heads, value_dim)`; a kernel writes its own rows.
        layer: Kind of the layer.
        shape: Extents of the step.
        sinks: Natural logit per query head that joins its softmax's denominator; None: none.
        new: Keys and values of the step's tokens, `(tokens, kv_heads, head_dim)`, where its prefill
            requests have nothing else in the cache and they are at hand; rows need not be
            contiguous.
    """

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    output: Tensor
    layer: Layer
    shape: StepShape
    sinks: Optional[Tensor] = None
    new: Optional[Tuple[Tensor, Tensor]] = None


class Kernel:
    """One of FlashInfer's kernels, with all that it needs beside the KV cache."""

    def plan(self, shape: StepShape) -> None:
        """Plan a step on the host, before the step's bookkeeping is copied to the device."""

    def derive(self, shape: StepShape) -> None:
        """Derive what a step needs on the device, once the step's bookkeeping is there."""

    def begin(self, shape: StepShape) -> None:
        """Derive what follows from the block table alone, when a step's first layer runs.

        In a CUDA graph of the step this is part of it, and costs the host nothing.
        """


class DecodeKernel(Kernel, ABC):
    """A kernel for decode requests."""

    SPLITS_STEPS = True  # whether a step with prefill leaves its decode requests to this kernel

    @abstractmethod
    def decode(self, call: Call) -> None:
        """Write the output of the step's decode slots."""


class PrefillKernel(Kernel, ABC):
    """A kernel for requests with any number of query tokens."""

    TAKES_NEW_KEYS = False  # whether a call's `new` is of use

    @abstractmethod
    def prefill(self, call: Call) -> None:
        """Write the output of all tokens but those of the `num_decode` first requests."""


def _page_table(setup: Setup, kernel: FlashInferKernel) -> Tuple[int, PageTable]:
    """Tokens of one of a kernel's pages, and a table of such."""
    page_size = setup.problem.page_size(kernel)
    assert page_size is not None
    table = PageTable(
        setup.max_requests,
        setup.max_kv_blocks,
        setup.problem.block_size_tokens // page_size,
        setup.device,
    )
    return page_size, table


def _in_pages(cache: Tensor, page_size: int) -> Tensor:
    """A cache of NHD blocks as one of smaller pages, `(pages, page_size, kv_heads, head_dim)`."""
    return cache.view(-1, page_size, *cache.shape[2:])


class Xqa(DecodeKernel):
    """Decode on Hopper with no plan: a page table and lengths are all that it reads."""

    # FlashInfer sets 8 MiB aside for semaphores. They must start as zeros, and nobody else may
    # write them.
    SEMAPHORE_BYTES = 8 * MIB
    # Where keys are split over CTAs, a row of length 0 would be divided by 0. A sink prevents that,
    # so small that it takes no share of any other row: the kernel itself starts maxima there.
    NO_SINK = -1e5

    def __init__(self, setup: Setup) -> None:
        from flashinfer.xqa import xqa  # type: ignore

        self._xqa = xqa
        self._problem = setup.problem
        self._books = setup.books
        self._tokens = setup.tokens_per_decode
        self._page_size, self._pages = _page_table(setup, FlashInferKernel.XQA)
        self._lengths = torch.zeros_like(setup.books.kv_lengths)
        self._no_sinks = torch.full(
            (setup.problem.num_query_heads,), self.NO_SINK, device=setup.device
        )
        semaphores = torch.zeros(self.SEMAPHORE_BYTES // 4, dtype=torch.int32, device=setup.device)
        self._semaphores = semaphores.view(torch.uint32)
        self._scratch = torch.empty(
            self._scratch_bytes(setup), dtype=torch.uint8, device=setup.device
        )
        self._mask: Optional[Tensor] = None
        if self._tokens > 1:
            mask = _causal_bits(self._tokens).to(setup.device)
            self._mask = mask.expand(setup.max_requests, -1, -1).contiguous()

    @staticmethod
    def _scratch_bytes(setup: Setup) -> int:
        """What the kernel keeps where it splits the keys of few requests over the GPU.

        It then launches at most one CTA per multiprocessor for each tile of 32 query rows. A CTA
        keeps a tile's output in the dtype of the queries, head dims of 64, 128 or 256, and two
        numbers for each row.
        """
        problem = setup.problem
        properties = torch.cuda.get_device_properties(setup.device)
        tiles = math.ceil(setup.tokens_per_decode * problem.ratio / 32)
        row = 2 * triton.next_power_of_2(max(problem.head_dim, 64)) + 16
        alignment = 1024
        return properties.multi_processor_count * tiles * 32 * row + alignment

    def derive(self, shape: StepShape) -> None:
        """Derive lengths where rows of other requests lie among the decode slots."""
        if shape.has_prefill:
            _take_decodes(self._lengths, self._books.kv_lengths, shape)

    def begin(self, shape: StepShape) -> None:
        """Derive the page table."""
        self._pages.derive(shape.decode_slots, self._books.block_table)

    def _lengths_of(self, shape: StepShape) -> Tensor:
        """Keys of each row, 0 of padding and of all that is no decode."""
        return self._lengths if shape.has_prefill else self._books.kv_lengths

    def decode(self, call: Call) -> None:
        """See base class."""
        rows, problem = call.shape.decode_slots, self._problem
        tokens = () if self._tokens == 1 else (self._tokens,)
        heads = (problem.num_query_heads, problem.head_dim)
        sinks = self._no_sinks if call.sinks is None else call.sinks.float()
        self._xqa(
            call.query[: rows * self._tokens].view(rows, 1, *tokens, *heads),
            _in_pages(call.key_cache, self._page_size),
            _in_pages(call.value_cache, self._page_size),
            self._pages.table[:rows],
            self._lengths_of(call.shape)[:rows].view(torch.uint32).unsqueeze(1),
            call.output[: rows * self._tokens].view(rows, 1, *tokens, *heads),
            self._scratch,
            self._semaphores,
            problem.num_kv_heads,
            self._page_size,
            sinks=sinks.view(problem.num_kv_heads, -1),
            # The kernel itself divides by the root of the head dim.
            q_scale=call.layer.softmax_scale * math.sqrt(problem.head_dim),
            sliding_win_size=call.layer.window_left + 1,
            q_seq_len=self._tokens,
            mask=None if self._mask is None else self._mask[:rows],
        )


def _take_decodes(lengths: Tensor, kv_lengths: Tensor, shape: StepShape) -> None:
    """Let lengths be those of the step's decodes, and 0 in other rows."""
    lengths.zero_()
    lengths[: shape.num_decode].copy_(kv_lengths[: shape.num_decode])


def _causal_bits(tokens: int) -> Tensor:
    """Which new token sees which, packed for xqa: `(tokens, 16-bit words)`.

    Bit j of row i is set if j is at most i. Rows are padded to 32 bits.
    """
    words = 2 * math.ceil(tokens / 32)
    bits = torch.ones((tokens, 16 * words), dtype=torch.int32).tril().view(tokens, words, 16)
    return (bits << torch.arange(16, dtype=torch.int32)).sum(-1).to(torch.uint16)


class _Wrapped(PrefillKernel):
    """A prefill kernel with FlashInfer's wrapper, one wrapper for each kind of layer.

    In place of the wrapper's plan it follows a work list that is made on the device.
    """

    KERNEL: FlashInferKernel
    WORKSPACE_BYTES: int
    # Attributes of the wrapper that are no part of its interface, and are set here.
    ATTRIBUTES: Tuple[str, ...]

    HAS_PAGES = True  # whether it reads any, which it does through a wrapper of its own
    _first_token: Optional[Tensor] = None  # from which on the output is this kernel's; None: all

    def __init__(self, setup: Setup) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper  # type: ignore

        self._setup = setup
        self._workspace = torch.empty(self.WORKSPACE_BYTES, dtype=torch.uint8, device=setup.device)
        self._wrappers = {
            layer: BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", backend=self.KERNEL.value
            )
            for layer in setup.layers
            if self.HAS_PAGES
        }

    @abstractmethod
    def _make_schedule(
        self, layer: Layer, max_requests: int, max_tokens: int, max_kv_blocks: int
    ) -> Schedule:
        """A work list for so much."""

    def _follow(self, layer: Layer, is_packed: bool, schedule: Any, block_table: Tensor) -> None:
        """Point a wrapper that has planned to a work list in place of its plan."""
        wrapper = self._wrapper(layer, is_packed)
        wrapper._int_workspace_buffer = schedule.works.view(torch.uint8)
        wrapper._pin_memory_int_workspace_buffer = None
        if not is_packed:
            wrapper._paged_kv_indices_buf = block_table

    def _wrapper(self, layer: Layer, is_packed: bool) -> Any:
        """For packed keys, or for pages."""
        return self._wrappers[layer]

    def _require_attributes(self, wrapper: Any, *more: str) -> None:
        """Refuse a FlashInfer whose wrapper lacks what is set here."""
        if not all(hasattr(wrapper, name) for name in (*self.ATTRIBUTES, *more)):
            raise self._unknown()

    def _unknown(self) -> ImportError:
        return ImportError(
            f"The {self.KERNEL.value} kernel of this FlashInfer is planned in another way: install "
            "flashinfer-python 0.6.18.post1, or set inference_attention_backend to flash."
        )

    def _plan_arguments(self, layer: Layer) -> Dict[str, Any]:
        """Arguments of a wrapper's plan that are the same in every step."""
        problem = self._setup.problem
        return dict(
            num_qo_heads=problem.num_query_heads,
            num_kv_heads=problem.num_kv_heads,
            head_dim_qk=problem.head_dim,
            head_dim_vo=problem.value_dim,
            causal=True,
            sm_scale=layer.softmax_scale,
            window_left=layer.window_left,
            q_data_type=problem.dtype,
            kv_data_type=problem.dtype,
        )

    def _check(self, layer: Layer, is_packed: bool = False) -> None:
        """Have two requests computed by FlashInfer's plan, and by a work list and padding tokens.

        The plan also compiles and loads the kernel, and fixes dtypes and options for good.

        Raises:
            ImportError: If the results differ: this FlashInfer reads other lists.
        """
        problem, device = self._setup.problem, self._setup.device
        block_size = problem.block_size_tokens
        wrapper = self._wrapper(layer, is_packed)
        # More than one tile, pages that are not in order, and nothing that is 0 throughout.
        query_lengths, padding = (200, 2), 3
        kv_lengths = query_lengths if is_packed else (200 + block_size, 3)
        num_tokens, long = sum(query_lengths), math.ceil(kv_lengths[0] / block_size)
        starts = torch.tensor([0, query_lengths[0], num_tokens], dtype=torch.int32)
        pages = torch.arange(long, -1, -1, dtype=torch.int32, device=device)
        random = torch.Generator(device).manual_seed(0)

        def values(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device=device).to(problem.dtype)

        query = values(num_tokens + padding, problem.num_query_heads, problem.head_dim)
        rows = (num_tokens + padding,) if is_packed else (long + 1, block_size)
        both = values(2, *rows, problem.num_kv_heads, problem.head_dim)
        new = both[0], both[1, ..., : problem.value_dim]
        expected = query.new_zeros(*query.shape[:2], problem.value_dim)
        real, arguments = slice(num_tokens), self._plan_arguments(layer)
        if is_packed:
            wrapper.plan(starts, starts, **arguments)
            self._require_attributes(wrapper)
            wrapper.run(query[real], *(each[real] for each in new), out=expected[real])
        else:
            wrapper.plan(
                starts,
                torch.tensor([0, long, long + 1], dtype=torch.int32),
                pages,
                torch.tensor([(kv - 1) % block_size + 1 for kv in kv_lengths], dtype=torch.int32),
                page_size=block_size,
                # Room for partial results is asked for by what FlashInfer might split, not by need.
                disable_split_kv=True,
                **arguments,
            )
            self._require_attributes(wrapper, "_paged_kv_indices_buf")
            wrapper.run(query[real], new, out=expected[real])

        planned = wrapper._plan_info
        schedule = self._make_schedule(layer, 2, num_tokens + padding, long)
        block_table = torch.zeros((2, long), dtype=torch.int32, device=device)
        block_table[0] = pages[:-1]
        shape = StepShape(
            num_decode=0,
            num_requests=2,
            decode_slots=0,
            padded_requests=2,
            num_tokens=num_tokens + padding,
            has_prefill=True,
            num_new=num_tokens if is_packed else 0,
        )
        schedule.derive(
            shape,
            starts.to(device),
            *(
                torch.tensor(each, dtype=torch.int32, device=device)
                for each in (query_lengths, kv_lengths)
            ),
        )
        self._follow(layer, is_packed, schedule, block_table)
        self.plan(shape)
        if len(wrapper._plan_info) != len(planned):
            raise self._unknown()
        found = torch.full_like(expected, torch.nan)
        try:
            self.prefill(
                Call(query, new[0], new[1], found, layer, shape, new=new if is_packed else None)
            )
        except (IndexError, TypeError, ValueError) as error:
            raise self._unknown() from error
        if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2):
            raise self._unknown()

    def prefill(self, call: Call) -> None:
        """See base class."""
        is_packed = call.new is not None
        keys = call.new if call.new is not None else ((call.key_cache, call.value_cache),)
        self._run(call, call.query, call.output, self._wrapper(call.layer, is_packed), *keys)

    def _run(self, call: Call, query: Tensor, output: Tensor, wrapper: Any, *keys: Any) -> None:
        # A wrapper compares the query with what it has planned, before the first step.
        wrapper._qo_indptr_last = query.size(0)
        if call.sinks is None:
            wrapper.run(query, *keys, out=output)
        else:
            # The wrapper accepts sinks, but these kernels do not apply them.
            _, lse = wrapper.run(query, *keys, out=output, return_lse=True)
            _apply_sinks(output, lse, call.sinks, self._first_token)


def _apply_sinks(output: Tensor, lse: Tensor, sinks: Tensor, first_token: Optional[Tensor]) -> None:
    """Let sinks join the denominators of softmaxes that were computed without.

    Args:
        output (Tensor): Attention, `(tokens, query_heads, head_dim)`; scaled in place.
        lse (Tensor): Logarithm to base 2 of the denominators, float32 `(tokens, query_heads)`.
        sinks (Tensor): Natural logits, `(query_heads,)`.
        first_token (Optional[Tensor]): Tokens before this one are left alone; one element.
    """
    share = torch.sigmoid(lse * math.log(2.0) - sinks.float())
    if first_token is not None:
        ours = torch.arange(lse.size(0), device=lse.device) >= first_token
        share = torch.where(ours.unsqueeze(1), share, 1.0)
    output.mul_(share.unsqueeze(2))


class Fa3(_Wrapped):
    """Prefill on Hopper, by a work list that is made on the device.

    A step whose prefill requests have nothing else in the cache is computed from the keys and
    values of its tokens as they were handed to the cache, which the kernel reads by TMA. It gathers
    pages more slowly. In exchange it reads beyond a prompt's last value, with weights of 0, so that
    one prompt's values that are not finite spoil the prompt before it.
    """

    KERNEL = FlashInferKernel.FA3
    TAKES_NEW_KEYS = True
    WORKSPACE_BYTES = 256  # the wrapper insists on one, the kernel uses none
    CACHE_SHARE = 2  # keys of a section of works take one part in so many of the GPU's cache
    ATTRIBUTES = (
        "_plan_info",
        "_int_workspace_buffer",
        "_pin_memory_int_workspace_buffer",
        "_qo_indptr_last",
    )

    def __init__(self, setup: Setup) -> None:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper  # type: ignore

        super().__init__(setup)
        self._ragged_wrappers = {
            layer: BatchPrefillWithRaggedKVCacheWrapper(
                self._workspace, "NHD", backend=self.KERNEL.value
            )
            for layer in setup.layers
        }
        kinds = (False, True) if self.HAS_PAGES else (True,)
        for layer in setup.layers:
            for is_packed in kinds:
                self._check(layer, is_packed)
        # One list serves all layers.
        self._schedule = self._make_schedule(
            setup.layers[0], setup.max_requests, setup.max_tokens, setup.max_kv_blocks
        )
        self._first_token = self._schedule.first_token
        for layer in setup.layers:
            for is_packed in kinds:
                self._follow(layer, is_packed, self._schedule, setup.books.block_table)

    def _make_schedule(
        self, layer: Layer, max_requests: int, max_tokens: int, max_kv_blocks: int
    ) -> PrefillSchedule:
        problem, device = self._setup.problem, self._setup.device
        properties = torch.cuda.get_device_properties(device)
        key_bytes = (problem.head_dim + problem.value_dim) * problem.dtype.itemsize
        return PrefillSchedule(
            max_requests,
            max_tokens,
            max_kv_blocks,
            problem.num_query_heads,
            problem.num_kv_heads,
            problem.value_dim,
            properties.multi_processor_count,
            properties.L2_cache_size // self.CACHE_SHARE // key_bytes,
            device,
        )

    def _wrapper(self, layer: Layer, is_packed: bool) -> Any:
        """See base class."""
        return (self._ragged_wrappers if is_packed else self._wrappers)[layer]

    def _follow(self, layer: Layer, is_packed: bool, schedule: Any, block_table: Tensor) -> None:
        """See base class."""
        super()._follow(layer, is_packed, schedule, block_table)
        plan_info = schedule.ragged_plan_info if is_packed else schedule.plan_info
        self._wrapper(layer, is_packed)._plan_info = plan_info

    def derive(self, shape: StepShape) -> None:
        """Make the work list."""
        books = self._setup.books
        self._schedule.derive(shape, books.query_starts, books.query_lengths, books.kv_lengths)


class PackedFa3(Fa3):
    """The same for steps of new prompts alone, whose keys and values are of dims of their own.

    For those, `PROJECTED_DIMS` of `mla.py`, FlashInfer has no kernel that reads pages.
    """

    HAS_PAGES = False


class Fa2(_Wrapped, DecodeKernel):
    """Any phase on any GPU, by work lists that are made on the device, one for each kind of layer.

    Whole steps at once, or, beside another prefill kernel, decode slots. Where it is the prefill
    kernel, it is the decode kernel, too.

    Raises:
        ImportError: If this FlashInfer reads other lists.
        ValueError: If the block table or a step has room for more than the kernel counts.
    """

    KERNEL = FlashInferKernel.FA2
    WORKSPACE_BYTES = 128 * MIB  # for partial results
    SPLITS_STEPS = False
    ATTRIBUTES = (
        "_plan_info",
        "_int_workspace_buffer",
        "_pin_memory_int_workspace_buffer",
        "_qo_indptr_last",
        "_qo_indptr_buf",
        "_paged_kv_indptr_buf",
        "_paged_kv_last_page_len_buf",
    )

    def __init__(self, setup: Setup) -> None:
        refuse_beyond_32_bits(setup, self.KERNEL)
        super().__init__(setup)
        self._schedules: Dict[Layer, SplitSchedule] = {}
        for layer in setup.layers:
            self._check(layer)
        for layer in setup.layers:
            schedule = self._make_schedule(
                layer, setup.max_requests, setup.max_tokens, setup.max_kv_blocks
            )
            self._follow(layer, False, schedule, setup.books.block_table)

    def _make_schedule(
        self, layer: Layer, max_requests: int, max_tokens: int, max_kv_blocks: int
    ) -> SplitSchedule:
        problem, device = self._setup.problem, self._setup.device
        return SplitSchedule(
            max_requests,
            max_tokens,
            max_kv_blocks,
            problem.block_size_tokens,
            problem.num_query_heads,
            problem.num_kv_heads,
            problem.head_dim,
            self._setup.tokens_per_decode,
            layer.window_left,
            torch.cuda.get_device_properties(device).multi_processor_count,
            self.WORKSPACE_BYTES,
            device,
        )

    def _follow(self, layer: Layer, is_packed: bool, schedule: Any, block_table: Tensor) -> None:
        """See base class."""
        super()._follow(layer, is_packed, schedule, block_table)
        wrapper = self._wrapper(layer, is_packed)
        wrapper._qo_indptr_buf = schedule.query_starts
        wrapper._paged_kv_indptr_buf = schedule.page_starts
        wrapper._paged_kv_last_page_len_buf = schedule.last_page_lengths
        self._schedules[layer] = schedule

    def plan(self, shape: StepShape) -> None:
        """Choose the grids, which a graph keeps."""
        for layer, schedule in self._schedules.items():
            self._wrappers[layer]._plan_info = schedule.plan_info(shape)

    def derive(self, shape: StepShape) -> None:
        """Make the work lists."""
        books = self._setup.books
        for schedule in self._schedules.values():
            schedule.derive(shape, books.query_starts, books.query_lengths, books.kv_lengths)

    def decode(self, call: Call) -> None:
        """See base class."""
        rows = slice(call.shape.decode_slots * self._setup.tokens_per_decode)
        cache = (call.key_cache, call.value_cache)
        self._run(call, call.query[rows], call.output[rows], self._wrappers[call.layer], cache)


def refuse_beyond_32_bits(setup: Setup, kernel: FlashInferKernel) -> None:
    """Refuse room for more than a kernel counts: tokens of the block table, elements of queries.

    Raises:
        ValueError: If there is.
    """
    problem, tokens = setup.problem, setup.max_tokens
    length = setup.max_kv_blocks * problem.block_size_tokens
    if setup.max_requests * length >= 2**32:
        refused = f"{setup.max_requests} requests of {length} tokens"
        lower = "max_requests or max_sequence_length"
    elif tokens * problem.num_query_heads * problem.head_dim >= 2**32:
        refused, lower = f"the queries of {tokens} tokens", "max_tokens"
    else:
        return
    raise ValueError(
        f"FlashInfer's {kernel.value} kernel counts in 32 bits, which {refused} exceed: lower "
        f"{lower}, or set inference_attention_backend to flash."
    )


class _PrefillRows:
    """Starts of all rows, decode rows emptied, for kernels that take such and plan nothing."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._first_token = torch.zeros(1, dtype=torch.int32, device=setup.device)
        self.query_starts = torch.zeros_like(setup.books.query_starts)
        self.kv_starts = torch.zeros_like(setup.books.query_starts)

    def derive(self, shape: StepShape) -> None:
        """Derive them for a step."""
        books = self._setup.books
        first_token = shape.num_decode * self._setup.tokens_per_decode
        self._first_token.fill_(first_token)
        # Before the first step there is no request, whatever the bookkeeping says.
        end = shape.num_tokens if shape.num_requests else 0
        torch.clamp(books.query_starts, min=first_token, max=end, out=self.query_starts)
        torch.cumsum(books.kv_lengths, 0, dtype=torch.int32, out=self.kv_starts[1:])

    def clear(self, output: Tensor) -> None:
        """Zero what is no decode's, since padding tokens are of no row."""
        token = torch.arange(output.size(0), device=output.device)
        output.masked_fill_((token >= self._first_token).view(-1, 1, 1), 0)


class FmhaV2(PrefillKernel):
    """Prefill on Hopper with no plan, for head dims that fa3 does not take.

    Its grid is as large as if every row had the most tokens, which in graphs of many rows costs.
    """

    WORKSPACE_BYTES = MIB  # for a counter

    def __init__(self, setup: Setup) -> None:
        from flashinfer.prefill import trtllm_fmha_v2_prefill  # type: ignore

        self._prefill = trtllm_fmha_v2_prefill
        self._setup = setup
        self._page_size, self._pages = _page_table(setup, FlashInferKernel.FMHA_V2)
        self._rows = _PrefillRows(setup)
        self._workspace = torch.zeros(self.WORKSPACE_BYTES, dtype=torch.uint8, device=setup.device)

    def derive(self, shape: StepShape) -> None:
        """Derive the starts."""
        self._rows.derive(shape)

    def begin(self, shape: StepShape) -> None:
        """Derive the page table."""
        self._pages.derive(shape.padded_requests, self._setup.books.block_table)

    def prefill(self, call: Call) -> None:
        """See base class."""
        rows, window = call.shape.padded_requests, call.layer.window_left
        keys, values = (
            _in_pages(cache, self._page_size) for cache in (call.key_cache, call.value_cache)
        )
        page_bytes = keys[0].numel() * keys.element_size()
        # Values are looked for in pages from where keys start.
        values_at = (values.data_ptr() - keys.data_ptr()) // page_bytes
        pages = self._pages.table[:rows]
        lengths, starts = self._setup.books.kv_lengths[:rows], self._rows.query_starts[: rows + 1]
        # Scores are masked before the softmax, whatever they are; values are not.
        make_tails_finite(values, pages, starts, lengths, rows)
        self._rows.clear(call.output)
        # FlashInfer takes all rows for equally long where the most tokens of one, times the rows,
        # are the tokens there are.
        most = call.shape.num_tokens
        self._prefill(
            (call.query, (keys, values)),
            "Q_PAGED_KV_NHD",
            self._workspace,
            seq_lens=lengths,
            max_q_len=most,
            max_kv_len=max(most, self._setup.max_kv_blocks * self._setup.problem.block_size_tokens),
            bmm1_scale=call.layer.softmax_scale,
            bmm2_scale=1.0,
            batch_size=rows,
            cum_seq_lens_q=starts,
            cum_seq_lens_kv=self._rows.kv_starts[: rows + 1],
            block_tables=torch.stack((pages, pages + values_at), dim=1),
            out=call.output,
            sinks=None if call.sinks is None else call.sinks.float(),
            mask_mode="causal" if window < 0 else "sliding_window",
            window_left=window,
        )


class TrtllmGen(DecodeKernel, PrefillKernel):
    """Both phases on SM 10.x with no plan. Not run: no such GPU was at hand."""

    WORKSPACE_BYTES = 128 * MIB

    def __init__(self, setup: Setup) -> None:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache  # type: ignore
        from flashinfer.prefill import trtllm_batch_context_with_kv_cache  # type: ignore

        self._decode = trtllm_batch_decode_with_kv_cache
        self._prefill = trtllm_batch_context_with_kv_cache
        self._setup = setup
        self._page_size, self._pages = _page_table(setup, FlashInferKernel.TRTLLM_GEN)
        self._lengths = torch.zeros_like(setup.books.kv_lengths)
        self._rows = _PrefillRows(setup)
        self._workspace = torch.zeros(self.WORKSPACE_BYTES, dtype=torch.uint8, device=setup.device)

    def derive(self, shape: StepShape) -> None:
        """Derive lengths of decodes, and the starts."""
        _take_decodes(self._lengths, self._setup.books.kv_lengths, shape)
        self._rows.derive(shape)

    def begin(self, shape: StepShape) -> None:
        """Derive the page table."""
        self._pages.derive(shape.padded_requests, self._setup.books.block_table)

    def _arguments(self, call: Call, rows: int) -> Dict[str, Any]:
        """What both functions are given under the same name."""
        return dict(
            kv_cache=(
                _in_pages(call.key_cache, self._page_size),
                _in_pages(call.value_cache, self._page_size),
            ),
            workspace_buffer=self._workspace,
            block_tables=self._pages.table[:rows],
            bmm1_scale=call.layer.softmax_scale,
            bmm2_scale=1.0,
            window_left=call.layer.window_left,
            sinks=None if call.sinks is None else call.sinks.float(),
            kv_layout="NHD",
        )

    def decode(self, call: Call) -> None:
        """See base class."""
        rows = call.shape.decode_slots
        tokens = rows * self._setup.tokens_per_decode
        lengths, output = self._lengths[:rows], call.output[:tokens]
        self._decode(
            call.query[:tokens],
            seq_lens=lengths,
            max_seq_len=self._setup.max_kv_blocks * self._setup.problem.block_size_tokens,
            out=output,
            backend="trtllm-gen",
            q_len_per_req=self._setup.tokens_per_decode,
            **self._arguments(call, rows),
        )
        output.view(rows, -1).masked_fill_((lengths == 0).unsqueeze(1), 0)

    def prefill(self, call: Call) -> None:
        """See base class."""
        rows = call.shape.padded_requests
        self._rows.clear(call.output)
        self._prefill(
            call.query,
            seq_lens=self._setup.books.kv_lengths[:rows],
            max_q_len=call.shape.num_tokens,
            max_kv_len=self._setup.max_kv_blocks * self._setup.problem.block_size_tokens,
            batch_size=rows,
            cum_seq_lens_q=self._rows.query_starts[: rows + 1],
            cum_seq_lens_kv=self._rows.kv_starts[: rows + 1],
            out=call.output,
            **self._arguments(call, rows),
        )


KERNELS: Dict[FlashInferKernel, Any] = {
    FlashInferKernel.XQA: Xqa,
    FlashInferKernel.FA3: Fa3,
    FlashInferKernel.FA2: Fa2,
    FlashInferKernel.FMHA_V2: FmhaV2,
    FlashInferKernel.TRTLLM_GEN: TrtllmGen,
}
