"""Deliberate faults: what the regression must catch. Each holds from the engine's construction on.

They wrap what a context does, not how, so that they are faults of any tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import Any
from unittest import mock

import torch

from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.transformer.attention import Attention
from tiny_engine import Model

_append = DynamicInferenceContext.append_key_value_cache
_read = DynamicInferenceContext.key_value_cache
_init = DynamicInferenceContext.__init__


def _replaced(name: str, method: Any) -> AbstractContextManager[Any]:
    return mock.patch.object(DynamicInferenceContext, name, method)


@contextmanager
def keys_and_values_swapped(model: Model) -> Iterator[None]:
    """Keys are stored as values and values as keys."""
    del model
    with _replaced(
        'append_key_value_cache', lambda self, layer, key, value: _append(self, layer, value, key)
    ):
        yield


@contextmanager
def window_off_by_one(model: Model) -> Iterator[None]:
    """A query sees one key too many."""
    left, right = model.config.window_size
    with mock.patch.object(model.config, 'window_size', (left + 1, right)):
        yield


@contextmanager
def sink_ignored(model: Model) -> Iterator[None]:
    """The softmax has no sink."""
    with mock.patch.object(model.config, 'softmax_type', 'vanilla'):
        yield


@contextmanager
def wrong_block_table(model: Model) -> Iterator[None]:
    """A request's second block is read where its first one is."""
    del model

    def read(self: Any, layer: int) -> Any:
        keys, values, table = _read(self, layer)
        table = table.clone()
        table[:, 1] = table[:, 0]
        return keys, values, table

    with _replaced('key_value_cache', read):
        yield


@contextmanager
def layer_off_by_one(model: Model) -> Iterator[None]:
    """A layer reads what the attention layer before it stored."""
    layers = model.attention_layers
    before = dict(zip(layers, (layers[-1], *layers), strict=False))
    with _replaced('key_value_cache', lambda self, layer: _read(self, before[layer])):
        yield


@contextmanager
def nan_in_valid_region(model: Model) -> Iterator[None]:
    """The first token of each append is not a number in the cache."""

    def append(self: Any, layer: int, key: Any, value: Any) -> None:
        if layer == model.attention_layers[-1]:
            value = value.clone()
            value[0] = torch.nan
        _append(self, layer, key, value)

    with _replaced('append_key_value_cache', append):
        yield


@contextmanager
def wrong_kv_heads(model: Model) -> Iterator[None]:
    """The context makes room for twice as many KV heads as the model has."""
    del model

    def init(self: Any, model_config: Any, inference_config: Any) -> None:
        model_config = copy(model_config)
        model_config.num_query_groups *= 2
        _init(self, model_config, inference_config)

    with _replaced('__init__', init):
        yield


class _Doubled:
    """An attribute that holds twice what it is set to."""

    def __get__(self, instance: Any, owner: type) -> int:
        value: int = instance.__dict__['doubled']
        return value

    def __set__(self, instance: Any, value: int) -> None:
        instance.__dict__['doubled'] = 2 * value


@contextmanager
def wrong_block_bytes(model: Model) -> Iterator[None]:
    """The context takes a block for twice as large as it is."""
    del model
    with mock.patch.object(DynamicInferenceContext, 'block_size_bytes', _Doubled(), create=True):
        yield


@contextmanager
def gate_left_out(model: Model) -> Iterator[None]:
    """Attention's output is not gated."""
    del model
    with mock.patch.object(Attention, '_apply_output_gate', lambda self, output, gate: output):
        yield


@contextmanager
def rope_in_all_layers(model: Model) -> Iterator[None]:
    """Layers that are to have no RoPE have it."""
    with mock.patch.object(model.config, 'no_rope_freq', None):
        yield


Fault = Callable[[Model], AbstractContextManager[None]]

FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        keys_and_values_swapped,
        window_off_by_one,
        sink_ignored,
        wrong_block_table,
        layer_off_by_one,
        nan_in_valid_region,
        wrong_kv_heads,
        wrong_block_bytes,
        gate_left_out,
        rope_in_all_layers,
    )
}
