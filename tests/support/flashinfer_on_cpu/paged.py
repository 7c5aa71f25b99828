"""Caches, checks and attention as the stand-in's modules share them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from reference_attention import gather_paged

type PagedCache = Tensor | tuple[Tensor, Tensor]


def require(holds: bool, what: str) -> None:
    """Refuse a call.

    Raises:
        ValueError: what the kernel assumes does not hold.
    """
    if not holds:
        raise ValueError(what)


def require_like(tensor: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a tensor of another shape or dtype, or one that is not contiguous."""
    found = f'{name} is {tuple(tensor.shape)} {tensor.dtype}'
    require(tensor.shape == shape and tensor.dtype == dtype, f'{found}, not {shape} {dtype}')
    require(tensor.is_contiguous(), f'{name} is read or written as contiguous, and is not')


def keys_and_values(cache: PagedCache, layout: str) -> tuple[Tensor, Tensor]:
    """A cache as two views `(pages, page_size, kv_heads, dim)`.

    Args:
        cache: Keys and values, or one tensor with both, `(pages, 2, ...)`.
        layout: `NHD` or `HND`, the order within a page.
    """
    require(layout in ('NHD', 'HND'), f'layout {layout}')
    key, value = cache.unbind(1) if isinstance(cache, Tensor) else cache
    require(key.ndim == value.ndim == 4, 'a cache has four dimensions')
    require(key.stride(-1) == value.stride(-1) == 1, 'elements of a head must be contiguous')
    return (key, value) if layout == 'NHD' else (key.transpose(1, 2), value.transpose(1, 2))


def gather(
    cache: tuple[Tensor, Tensor], page_ids: Tensor, length: int, heads: Any = slice(None)
) -> tuple[Tensor, Tensor]:
    """The first `length` keys and values of a request, float32 `(length, heads, dim)`."""
    key, value = (gather_paged(part, page_ids, length)[:, heads].float() for part in cache)
    return key, value


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """`output` as if a key without a value had the score `sinks`.

    Args:
        output: `(queries, heads, dim)`.
        lse: Natural log-sum-exp without sinks, `(heads, queries)`.
        sinks: `(heads,)`, or None for none.
    """
    if sinks is None:
        return output
    return output * torch.sigmoid(lse - sinks.flatten()[:, None]).T.unsqueeze(-1)


def base_2(lse: Tensor) -> Tensor:
    """The natural log-sum-exp `(heads, queries)` as FlashInfer gives it, `(queries, heads)`."""
    return lse.T / math.log(2)


def use_as_scratch(workspace: Tensor) -> None:
    """Leave in a workspace what no one else should rely on."""
    workspace.view(torch.uint8)[:64] = 0xA5
