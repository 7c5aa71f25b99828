# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""The attention of dynamic inference, computed by FlashInfer."""

import logging
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple, Union

import torch
from torch import Tensor

from megatron.core.inference.config import FlashInferKernel, InferenceConfig
from megatron.core.models.common.embeddings import _yarn_get_mscale
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.core.utils import log_single_rank

from .kernels import KERNELS, MIB, Bookkeeping, Call, Kernel, Layer, PackedFa3, PrefillKernel, Setup
from .mla import MLA_KERNELS, projected
from .selection import AttentionProblem, require_flashinfer, select
from .step import StepShape

if TYPE_CHECKING:
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

logger = logging.getLogger(__name__)

PROJECTED = "projected"  # of the kernels, the one for keys and values of projected latents


class FlashInferAttention:
    """Attention of one dynamic inference context.

    A decode kernel computes the requests that generate and a prefill kernel the others, both into
    the same output. Constructing this refuses what cannot be computed, `allocate` builds the
    kernels, `plan_step` and `derive_step` prepare a step for all layers, `remember` is given what a
    layer appends to the cache, and `run` computes a layer, the first of a step with what is left to
    prepare.

    Args:
        context (DynamicInferenceContext): The context, before its tensors are allocated.
        model_config (TransformerConfig): The model's configuration.
        inference_config (InferenceConfig): The engine's configuration.

    Raises:
        ImportError: If FlashInfer is not installed or too old.
        ValueError: If FlashInfer, or this GPU with it, cannot compute the model's attention.
    """

    def __init__(
        self,
        context: "DynamicInferenceContext",
        model_config: TransformerConfig,
        inference_config: InferenceConfig,
    ) -> None:
        self._refuse_features(model_config)
        self._version = require_flashinfer()
        if torch.cuda.device_count() == 0:
            raise ValueError("FlashInfer attention needs a CUDA device, and there is none.")
        is_mla = isinstance(model_config, MLATransformerConfig)
        self._tokens_per_decode = context.num_speculative_tokens + 1
        self._problem = AttentionProblem(
            compute_capability=torch.cuda.get_device_capability(),
            dtype=model_config.params_dtype,
            num_query_heads=context.num_query_heads_per_partition,
            num_kv_heads=1 if is_mla else context.num_kv_heads_per_partition,
            head_dim=(
                model_config.kv_lora_rank + model_config.qk_pos_emb_head_dim
                if is_mla
                else context.hidden_size_per_attention_head
            ),
            block_size_tokens=context.block_size_tokens,
            layout=inference_config.kv_cache_layout,
            latent_dim=model_config.kv_lora_rank if is_mla else None,
            tokens_per_decode=self._tokens_per_decode,
            sinks_differ=model_config.softmax_type == "learnable",
        )
        self._selection = select(self._problem, inference_config.flashinfer_kernel)
        self._kernel_types = MLA_KERNELS if is_mla else KERNELS
        self._projected: Optional[AttentionProblem] = None
        if is_mla:
            self._projected = projected(
                self._problem,
                self._selection.prefill,
                model_config.qk_head_dim + model_config.qk_pos_emb_head_dim,
                model_config.v_head_dim,
            )
        self._max_tokens = context.max_tokens
        self._window_size = model_config.window_size
        self._window_attn_skip_freq = model_config.window_attn_skip_freq
        self._layers = {
            windowed: self._layer(model_config, windowed)
            for windowed in (True, False)
            if self._may_be(windowed)
        }
        self._kernels: Dict[Union[FlashInferKernel, str], Any] = {}
        self._shape: Optional[StepShape] = None
        self._first_layer: Optional[int] = None  # of this step; None: none has run
        # Keys and values that a layer has appended and not yet attended to, if they are of use.
        self._new: Optional[Tuple[Tensor, Tensor]] = None

    @staticmethod
    def _refuse_features(model_config: TransformerConfig) -> None:
        instead = "set inference_attention_backend to flash"
        if isinstance(model_config, MLATransformerConfig):
            does_not = "FlashInfer attention does not do multi-latent attention"
            if not model_config.cache_mla_latents:
                raise ValueError(f"{does_not} without cached latents: set cache_mla_latents.")
            if model_config.softmax_type != "vanilla":
                # FlashAttention in dynamic inference leaves them out without a word.
                raise ValueError(f"{does_not} with sinks: set softmax_type to vanilla.")
            if model_config.window_size is not None:
                raise ValueError(f"{does_not} with a window: set window_size to None.")
        variant = model_config.experimental_attention_variant
        if variant is not None:
            raise ValueError(f"FlashInfer attention does not do {variant}: {instead}.")
        if model_config.batch_invariant_mode:
            raise ValueError(
                "FlashInfer attention is not batch-invariant: that mode ties training and "
                f"inference to one FlashAttention version: {instead}."
            )

    def _may_be(self, windowed: bool) -> bool:
        """Whether layers with a window, or without, may be in the model."""
        if self._window_size is None:
            return not windowed
        return windowed or self._window_attn_skip_freq is not None

    def _layer(self, model_config: TransformerConfig, windowed: bool) -> Layer:
        scale = model_config.softmax_scale
        if isinstance(model_config, MLATransformerConfig):
            # As its layers have it, by the head dim before absorption.
            mscale = _yarn_get_mscale(
                model_config.rotary_scaling_factor, model_config.mscale_all_dim
            )
            head_dim = model_config.qk_head_dim + model_config.qk_pos_emb_head_dim
            scale = mscale**2 / math.sqrt(head_dim)
        return Layer(
            window_left=model_config.window_size[0] if windowed else -1,
            softmax_scale=1 / math.sqrt(self._problem.head_dim) if scale is None else scale,
        )

    def allocate(self, context: "DynamicInferenceContext") -> None:
        """Build the kernels, and allocate what they need beside the KV cache.

        Each is launched once: some set themselves up at their first launch, which a graph's capture
        would not allow.

        Args:
            context (DynamicInferenceContext): The context, its other tensors allocated.

        Raises:
            ImportError: If a kernel of this FlashInfer is planned in another way.
            ValueError: If a kernel cannot count as much as there is room for.
        """
        view = context.gpu_view
        setup = Setup(
            problem=self._problem,
            layers=tuple(self._layers.values()),
            books=Bookkeeping(
                block_table=view.mha_block_table,
                query_lengths=view.mha_query_lengths,
                query_starts=view.mha_cu_query_seq_lengths,
                kv_lengths=view.mha_kv_seq_lengths,
            ),
            max_tokens=self._max_tokens,
            tokens_per_decode=self._tokens_per_decode,
        )
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        self._log(f"{self._selection}, of version {self._version}")
        self._log("building its kernels; where they must be compiled, this takes minutes")
        for kernel in dict.fromkeys((self._selection.decode, self._selection.prefill)):
            self._kernels[kernel] = self._kernel_types[kernel](setup)
        if self._projected is not None:
            self._kernels[PROJECTED] = PackedFa3(replace(setup, problem=self._projected))
        # Some are compiled here.
        keys, values = context.kv_cache_spec.layer_views(context.memory_buffer, layer=0)
        self._launch_once(setup, keys, values)
        used = (torch.cuda.memory_allocated() - before) / MIB
        seconds = time.perf_counter() - start
        self._log(f"built in {seconds:.1f} s; workspaces and tables take {used:.0f} MiB")

    @staticmethod
    def _log(message: str) -> None:
        log_single_rank(logger, logging.INFO, f"FlashInfer attention: {message}")

    def _launch_once(self, setup: Setup, keys: Tensor, values: Optional[Tensor]) -> None:
        """Launch every kernel on a step of nothing but padding."""
        shape = StepShape(
            num_decode=0,
            num_requests=0,
            decode_slots=1,
            padded_requests=1,
            num_tokens=self._tokens_per_decode,
            has_prefill=True,
        )
        query = torch.zeros(
            (shape.num_tokens, self._problem.num_query_heads, self._problem.head_dim),
            dtype=self._problem.dtype,
            device=setup.device,
        )
        for kernel in self._kernels.values():
            kernel.plan(shape)
            kernel.derive(shape)
            kernel.begin(shape)
        for layer in setup.layers:
            self._attend(self._call(query, keys, values, layer, shape))
        # What fails, fails here.
        torch.cuda.synchronize()

    def release(self) -> None:
        """Free what `allocate` allocated, until it is called again."""
        self._kernels.clear()

    def plan_step(self, context: "DynamicInferenceContext") -> None:
        """Prepare a step on the host, right before its bookkeeping is copied to the device.

        Args:
            context (DynamicInferenceContext): The context, with the step's bookkeeping complete.
        """
        padded = context.padded_batch_dimensions
        decode_only = context.is_decode_only()
        # A graph counts slots, not phases: decodes may lie behind its decode slots, or prefills in
        # them. The prefill kernel, which comes second, takes all but real decodes in decode slots.
        split = (
            self._selection.decode is not self._selection.prefill
            or self._kernel_types[self._selection.decode].SPLITS_STEPS
        )
        slots = padded.decode_req_count if decode_only or split else 0
        is_graph = context.using_cuda_graph_this_step()
        if split and not is_graph:
            # Padding rows would keep the decode kernel from splitting keys over the whole GPU.
            slots = min(slots, context.num_decode_requests)
        num_decode = min(context.num_decode_requests, slots) if split else 0
        num_requests = context.total_request_count - context.paused_request_count
        takes_new = (
            self._projected is not None
            or self._kernel_types[self._selection.prefill].TAKES_NEW_KEYS
        )
        prefill, num_new = slice(num_decode, num_requests), 0
        # A graph would hold what its capture was like.
        if (
            takes_new
            and not (decode_only or is_graph)
            and torch.equal(
                context._cpu_mha_query_lengths[prefill], context._cpu_mha_kv_seq_lengths[prefill]
            )
        ):
            num_new = int(context._cpu_mha_cu_query_seq_lengths[num_requests])
        self._shape = StepShape(
            num_decode=num_decode,
            num_requests=num_requests,
            decode_slots=slots,
            padded_requests=padded.req_count,
            # The context rounds up beyond its own limit, which is that of the lists, too.
            num_tokens=min(padded.token_count, self._max_tokens),
            has_prefill=not decode_only,
            num_new=num_new,
        )
        # The first layer that runs derives. In a graph it does so unseen, and the next one again.
        self._first_layer = self._new = None
        for kernel in self._kernels_of(self._shape):
            kernel.plan(self._shape)

    def derive_step(self) -> None:
        """Prepare a step on the device, right after its bookkeeping was copied there."""
        assert self._shape is not None
        for kernel in self._kernels_of(self._shape):
            kernel.derive(self._shape)

    def _kernels_of(self, shape: StepShape) -> List[Kernel]:
        """The kernels that a step runs, each once."""
        chosen: List[Kernel] = []
        if shape.decode_slots:
            chosen.append(self._kernels[self._selection.decode])
        if shape.has_prefill:
            chosen.append(self._prefill_kernel(shape))
        return list(dict.fromkeys(chosen))

    def _prefill_kernel(self, shape: StepShape) -> PrefillKernel:
        projects = self._projected is not None and shape.num_new
        return self._kernels[PROJECTED if projects else self._selection.prefill]

    @property
    def projects_latents(self) -> bool:
        """Whether this step's keys and values are projected from its latents, and not absorbed."""
        assert self._shape is not None
        return self._projected is not None and self._shape.num_new > 0

    def remember(self, keys: Tensor, values: Optional[Tensor]) -> None:
        """Keep what a layer appends to the cache until it is `run`, if that can be of use.

        Args:
            keys (Tensor): Keys of this step's tokens, `(tokens, 1, kv_heads, head_dim)`.
            values (Optional[Tensor]): Values, as keys; None with latents.
        """
        if values is not None and self._shape is not None and self._shape.num_new:
            # Without padding, since the kernel reads beyond a request's last value.
            new = slice(self._shape.num_new)
            self._new = keys.squeeze(1)[new], values.squeeze(1)[new]

    def run(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Optional[Tensor],
        layer_number: int,
        sinks: Optional[Tensor] = None,
    ) -> Tensor:
        """Compute one layer's attention over the cache, to which this step's tokens are appended.

        Args:
            query (Tensor): Queries of this step, `(tokens, 1, query_heads, head_dim)`, padding
                included, in the order of the context's requests; with latents, absorbed ones.
            key_cache (Tensor): The layer's keys, `(blocks, block_size, kv_heads, head_dim)`, or
                latents, `(blocks, block_size, head_dim)`; if it `projects_latents`, this step's
                keys, `(tokens, 1, query_heads, head_dim)`.
            value_cache (Optional[Tensor]): The layer's values, as keys; None with latents.
            layer_number (int): Number of the layer in the whole model, from 1.
            sinks (Optional[Tensor]): Logit per query head that joins its softmax's denominator.

        Returns:
            (Tensor) Attention, `(tokens, 1, query_heads, value_dim)`, where values of latents are
                their elements but the rotary ones; of padding tokens something finite.
        """
        assert self._shape is not None
        # It may run several times, before it is captured and while it is.
        if self._first_layer in (None, layer_number):
            self._first_layer = layer_number
            for kernel in self._kernels_of(self._shape):
                kernel.begin(self._shape)
        query = query.squeeze(1).contiguous()
        windowed = is_layer_window_attention(
            self._window_size, self._window_attn_skip_freq, layer_number
        )
        layer = self._layers[windowed]
        new, self._new = self._new, None
        if self.projects_latents:
            assert value_cache is not None
            real = slice(self._shape.num_new)
            new = key_cache.squeeze(1)[real], value_cache.squeeze(1)[real]
        call = self._call(query, key_cache, value_cache, layer, self._shape, sinks, new)
        self._attend(call)
        return call.output.unsqueeze(1)

    def _call(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Optional[Tensor],
        layer: Layer,
        shape: StepShape,
        sinks: Optional[Tensor] = None,
        new: Optional[Tuple[Tensor, Tensor]] = None,
    ) -> Call:
        value_dim = self._problem.value_dim
        if self._projected is not None and shape.num_new:
            value_dim = self._projected.value_dim
        if value_cache is None:
            value_cache = key_cache[..., :value_dim]
        output = torch.empty_like(query[..., :value_dim])
        return Call(query, key_cache, value_cache, output, layer, shape, sinks, new)

    def _attend(self, call: Call) -> None:
        if call.shape.decode_slots:
            self._kernels[self._selection.decode].decode(call)
        if call.shape.has_prefill:
            self._prefill_kernel(call.shape).prefill(call)
        else:
            padding = call.output[call.shape.decode_slots * self._tokens_per_decode :]
            if padding.numel():
                padding.zero_()
