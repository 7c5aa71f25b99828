"""Substitutes for what some models of the engine need beside torch, for scenarios that run them.

They replace names of imported Megatron modules. They are no part of `megatron_on_cpu` because
upstream's own tests do not expect them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from triton.runtime.interpreter import GridExecutor

from megatron.core.inference.contexts import dynamic_context
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.models import backends
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron_on_cpu.stand_ins import REAL_DEVICE


class _AnyHeadDims(DotProductAttention):
    """Takes key and value dims, which MLA hands over as it would to Transformer Engine.

    Dense attention works out both from its inputs, but the scale, which MLA gives.
    """

    def __init__(
        self,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        del k_channels, v_channels
        super().__init__(*args, **kwargs)


def mla_without_transformer_engine() -> None:
    """Let MLA with cached latents be built of the local layers, for the rest of the process."""
    backends.DotProductAttention = _AnyHeadDims

    # With Transformer Engine the up-projection holds a norm, to be split off for absorption. Here
    # the norm is where it should be.
    multi_latent_attention.split_te_layernorm_column_parallel_linear = (
        lambda linear, *args, **kwargs: (None, linear)
    )
    absorb: Callable[[Any], None] = multi_latent_attention.MLASelfAttention.prepare_for_absorption

    def keep_norm(self: Any) -> None:
        norm = self.kv_layernorm
        absorb(self)
        self.kv_layernorm = norm

    multi_latent_attention.MLASelfAttention.prepare_for_absorption = keep_norm


@contextmanager
def append_by_interpreted_triton() -> Iterator[None]:
    """In this context append through the tree's own Triton kernel, interpreted.

    That needs `TRITON_INTERPRET=1` from the start. The kernels' callers ask tensors whether they
    are on a GPU; during an append, all say yes.

    Raises:
        RuntimeError: the kernel was never launched.
    """
    append = DynamicInferenceContext.append_key_value_cache
    launch = GridExecutor.__call__
    launches: list[object] = []

    def launched(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        launches.append(self.grid)
        launch(self, *args, **kwargs)

    def appended(self: DynamicInferenceContext, *args: Any, **kwargs: Any) -> None:
        with (
            mock.patch.object(torch.Tensor, 'is_cuda', True),
            mock.patch.object(torch.Tensor, 'device', REAL_DEVICE('cuda', 0)),
            mock.patch.object(GridExecutor, '__call__', launched),
        ):
            append(self, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(DynamicInferenceContext, 'append_key_value_cache', appended)
        )
        if hasattr(dynamic_context, 'triton_append_key_value_cache'):
            from megatron.core.inference.contexts import fused_kv_append_kernel as kernel

            stack.enter_context(
                mock.patch.object(
                    dynamic_context,
                    'triton_append_key_value_cache',
                    kernel.triton_append_key_value_cache,
                )
            )
        yield
    if not launches:
        raise RuntimeError('the cache was appended to without Triton')
