# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""The shape of the paged KV cache of dynamic inference.

The cache of all layers is one tensor, the *storage*. A spec knows how that tensor is laid out and
is the only place that does; it holds no tensor itself, so that suspend and resume can offload, free
or replace the storage without anything here keeping the old one alive.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Optional, Tuple

import torch
from torch import Tensor

from megatron.core.inference.config import KVCacheLayout

try:
    from megatron.core.inference.kv_append_kernel import triton_append

    HAVE_TRITON = True
except ImportError:
    HAVE_TRITON = False

_INDEX_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec(ABC):
    """Shape of the KV cache of one model partition, whatever the number of blocks.

    Args:
        num_layers (int): Layers of this partition that have a KV cache.
        block_size_tokens (int): Tokens that one block holds, for each layer.
        dtype (torch.dtype): Element type of the storage.
    """

    num_layers: int
    block_size_tokens: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise ValueError(
                    f"{type(self).__name__}.{field.name} must be positive, not {value}"
                )

    @abstractmethod
    def storage_shape(self, num_blocks: int) -> Tuple[int, ...]:
        """Shape of the storage that holds `num_blocks` blocks of every layer."""

    @abstractmethod
    def layer_views(self, storage: Tensor, layer: int) -> Tuple[Tensor, Optional[Tensor]]:
        """Views of one layer's cache.

        Args:
            storage (Tensor): The storage, of shape `storage_shape(num_blocks)`.
            layer (int): Index among the layers that have a KV cache, from 0.

        Returns:
            (Tuple[Tensor, Optional[Tensor]]) The key and the value cache, as views of `storage`.
        """

    @property
    @abstractmethod
    def token_shape(self) -> Tuple[int, ...]:
        """Shape of what one token stores in a layer's key cache, and in its value cache."""

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes, over all layers."""
        return math.prod(self.storage_shape(num_blocks=1)) * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> Tensor:
        """Allocate the storage of `num_blocks` blocks on `device`, uninitialised."""
        return torch.empty(self.storage_shape(num_blocks), dtype=self.dtype, device=device)

    def append(
        self,
        storage: Tensor,
        layer: int,
        key: Tensor,
        value: Optional[Tensor],
        block_idx: Tensor,
        position: Tensor,
        num_tokens: int,
    ) -> None:
        """Write the tokens of a step to one layer's cache, converted to the storage's dtype.

        What `key`, `value` and the indices hold beyond `num_tokens` is left out. On a GPU that is
        one launch of a Triton kernel, elsewhere plain indexing.

        Args:
            storage (Tensor): The storage, of shape `storage_shape(num_blocks)`.
            layer (int): Index among the layers that have a KV cache, from 0.
            key (Tensor): Floating-point keys, `(num_tokens or more, *token_shape)`.
            value (Optional[Tensor]): Values, likewise; None where the kind stores no values.
            block_idx (Tensor): Block of each token, int32 or int64, `(num_tokens or more,)`.
            position (Tensor): Position of each token in its block, from 0; likewise.
            num_tokens (int): Tokens to write.

        Raises:
            TypeError: If `key` or `value` is not floating point, or an index not an integer.
            ValueError: If the storage is not of this spec, or a shape or a device is not as said.
        """
        rows = [key] if value is None else [key, value]
        caches = [cache for cache in self.layer_views(storage, layer) if cache is not None]
        if len(rows) != len(caches):
            raise ValueError(
                f"{type(self).__name__} stores keys {'and values' if value is None else 'alone'}, "
                f"but was given {'no' if value is None else 'a'} value"
            )
        token_shape = self.token_shape
        if (
            caches[0].shape[1:] != (self.block_size_tokens, *token_shape)
            or storage.dtype != self.dtype
        ):
            raise ValueError(
                f"The storage, {storage.dtype} of shape {tuple(storage.shape)}, is not of {self}"
            )
        for name, row in zip(("key", "value"), rows):
            if not row.is_floating_point():
                raise TypeError(f"{name} must be floating point, not {row.dtype}")
            self._check(name, row, num_tokens, token_shape, storage.device)
        for name, index in (("block_idx", block_idx), ("position", position)):
            if index.dtype not in _INDEX_DTYPES:
                raise TypeError(f"{name} must be int32 or int64, not {index.dtype}")
            self._check(name, index, num_tokens, (), storage.device)

        if storage.is_cuda and HAVE_TRITON:
            triton_append(rows, caches, block_idx, position, num_tokens)
        else:
            slots = block_idx[:num_tokens], position[:num_tokens]
            for row, cache in zip(rows, caches):
                cache[slots] = row[:num_tokens].to(cache.dtype)

    @staticmethod
    def _check(
        name: str, tensor: Tensor, num_tokens: int, shape: Tuple[int, ...], device: torch.device
    ) -> None:
        found = tensor.shape
        if found[1:] != shape or found[0] < num_tokens or tensor.device != device:
            raise ValueError(
                f"{name} must hold at least {num_tokens} tokens of shape {shape} on {device}, "
                f"not be {tuple(found)} on {tensor.device}"
            )


@dataclass(frozen=True, kw_only=True)
class AttentionKVCacheSpec(KVCacheSpec):
    """Keys and values per KV head, as multi-head, grouped-query and multi-query attention cache.

    Args:
        num_kv_heads (int): KV heads of this partition.
        head_dim (int): Elements of one head's key, and of its value.
        layout (KVCacheLayout): Order of the axes within a block of the storage. The views have the
            same axes in every layout, only their strides differ.
    """

    num_kv_heads: int
    head_dim: int
    layout: KVCacheLayout = KVCacheLayout.NHD

    @property
    def token_shape(self) -> Tuple[int, int]:
        """`(kv_heads, head_dim)`."""
        return (self.num_kv_heads, self.head_dim)

    def storage_shape(self, num_blocks: int) -> Tuple[int, ...]:
        """`(2, layers, blocks, *block)`, keys before values.

        A block is `(block_size, kv_heads, head_dim)` in NHD, `(kv_heads, block_size, head_dim)` in
        HND.
        """
        block = (self.block_size_tokens, self.num_kv_heads)
        if self.layout is KVCacheLayout.HND:
            block = block[::-1]
        return (2, self.num_layers, num_blocks, *block, self.head_dim)

    def layer_views(self, storage: Tensor, layer: int) -> Tuple[Tensor, Tensor]:
        """Keys and values of one layer, each `(blocks, block_size, kv_heads, head_dim)`."""
        keys, values = storage[0, layer], storage[1, layer]
        if self.layout is KVCacheLayout.HND:
            return keys.transpose(1, 2), values.transpose(1, 2)
        return keys, values


@dataclass(frozen=True, kw_only=True)
class LatentKVCacheSpec(KVCacheSpec):
    """One latent vector per token, from which absorbed multi-latent attention (MLA) reads both.

    Args:
        latent_dim (int): Elements of a token's latent: its compressed KV and its rotary key.
    """

    latent_dim: int

    @property
    def token_shape(self) -> Tuple[int]:
        """`(latent_dim,)`."""
        return (self.latent_dim,)

    def storage_shape(self, num_blocks: int) -> Tuple[int, ...]:
        """`(layers, blocks, block_size, latent_dim)`."""
        return (self.num_layers, num_blocks, self.block_size_tokens, self.latent_dim)

    def layer_views(self, storage: Tensor, layer: int) -> Tuple[Tensor, None]:
        """Latents of one layer, `(blocks, block_size, latent_dim)`; there is no value cache."""
        return storage[layer], None
