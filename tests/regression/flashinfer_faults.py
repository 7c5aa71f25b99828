"""Deliberate faults of the FlashInfer backend, which the regression must catch.

They wrap what stage 2 plans, derives and runs. `replanned` is no fault, but makes one show that
would be there: it destroys all that the last step's plan consists of before the next is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from faults import Fault
from megatron.core.inference.flashinfer_attention import FlashInferAttention, kernels, step
from tiny_engine import Model

_plan_step = FlashInferAttention.plan_step
_derive_step = FlashInferAttention.derive_step
_run = FlashInferAttention.run
_derive_fa2 = kernels.Fa2.derive
_derive_fa3 = kernels.Fa3.derive
_derive_pages = step.PageTable.derive
_decode_lengths = kernels.Xqa._lengths_of
_derive_works = step.PrefillSchedule.derive
_check_fa3 = kernels.Fa3._check


def _replaced(owner: Any, name: str, method: Any) -> AbstractContextManager[Any]:
    return mock.patch.object(owner, name, method)


def _arrays(owner: Any) -> Iterator[Tensor]:
    """The arrays that hold a plan: those of int32 of a kernel and of its tables, and workspaces."""
    for name, value in vars(owner).items():
        if isinstance(value, Tensor):
            if value.dtype is torch.int32 or name == '_int_workspace_buffer':
                yield value
        elif hasattr(value, 'derive'):
            yield from _arrays(value)
        elif name == '_wrappers':
            for wrapper in value.values():
                yield wrapper._int_workspace_buffer
        elif name == '_schedules':
            for schedule in value.values():
                yield from (schedule.query_starts, schedule.last_page_lengths)
        elif name == '_wrapper':
            yield value._int_workspace_buffer


def _destroy_plan(attention: Any) -> None:
    for kernel in attention._kernels.values():
        for array in _arrays(kernel):
            array.zero_()


@contextmanager
def replanned(model: Model) -> Iterator[None]:
    """Nothing is left of the last step's plan when a step is planned."""
    del model

    def plan(self: Any, context: Any) -> None:
        _destroy_plan(self)
        _plan_step(self, context)

    with _replaced(FlashInferAttention, 'plan_step', plan):
        yield


@contextmanager
def plan_destroyed(model: Model) -> Iterator[None]:
    """Nothing is left of a step's plan when the step is run."""
    del model

    def derive(self: Any) -> None:
        _derive_step(self)
        _destroy_plan(self)

    with _replaced(FlashInferAttention, 'derive_step', derive):
        yield


@contextmanager
def previous_tables(model: Model) -> Iterator[None]:
    """A page table stays as it was when there first was one of its size."""
    del model
    derived: set[int] = set()

    def derive(self: Any, rows: int, block_table: Tensor) -> None:
        if rows not in derived:
            _derive_pages(self, rows, block_table)
        derived.add(rows)

    with _replaced(step.PageTable, 'derive', derive):
        yield


@contextmanager
def begin_not_captured(model: Model) -> Iterator[None]:
    """What the decode kernel derives in a step's first layer is no part of a graph."""
    del model
    begin = kernels.Xqa.begin

    def eagerly(self: Any, shape: Any) -> None:
        if not torch.cuda.is_current_stream_capturing():
            begin(self, shape)

    with _replaced(kernels.Xqa, 'begin', eagerly):
        yield


def _repeated(kernel: Any, name: str, prepare: Callable[..., None]) -> AbstractContextManager[Any]:
    """A step of the same shape as the one before is run by what was prepared for that."""
    last: list[Any] = [None]

    def prepared(self: Any, shape: Any) -> None:
        if shape != last[0]:
            prepare(self, shape)
        last[0] = shape

    return _replaced(kernel, name, prepared)


@contextmanager
def previous_fa2_works(model: Model) -> Iterator[None]:
    """fa2 runs a step of the same shape as the one before by the work list of that."""
    del model
    with _repeated(kernels.Fa2, 'derive', _derive_fa2):
        yield


@contextmanager
def previous_mla_works(model: Model) -> Iterator[None]:
    """MLA's kernel runs a step of the same shape as the one before by the work list of that."""
    del model
    # It is not in every tree that has FlashInfer.
    from megatron.core.inference.flashinfer_attention.mla import Mla

    with _repeated(Mla, 'derive', Mla.derive):
        yield


@contextmanager
def window_of_another_layer(model: Model) -> Iterator[None]:
    """A layer has the window of the layer before it."""
    layers = model.attention_layers
    before = dict(zip(layers, (layers[-1], *layers), strict=False))

    def run(self: Any, query: Any, keys: Any, values: Any, layer: int, *rest: Any) -> Any:
        return _run(self, query, keys, values, before[layer], *rest)

    with _replaced(FlashInferAttention, 'run', run):
        yield


@contextmanager
def pages_shifted(model: Model) -> Iterator[None]:
    """The first request's pages are read one place too early."""
    del model

    def derive(self: Any, *args: Any) -> None:
        _derive_pages(self, *args)
        self.table[0] = self.table[0].roll(1)

    with _replaced(step.PageTable, 'derive', derive):
        yield


@contextmanager
def fa2_pages_shifted(model: Model) -> Iterator[None]:
    """All page ids are one place too late."""
    del model

    def derive(self: Any, shape: Any) -> None:
        _derive_fa2(self, shape)
        # Entries that no request has would be read, too.
        shifted = self._setup.books.block_table.clamp(min=0).flatten().roll(-1)
        for wrapper in self._wrappers.values():
            wrapper._paged_kv_indices_buf = shifted

    with _replaced(kernels.Fa2, 'derive', derive):
        yield


@contextmanager
def decode_length_off_by_one(model: Model) -> Iterator[None]:
    """A decode request does not see its newest token."""
    del model

    def lengths(self: Any, shape: Any) -> Tensor:
        return (_decode_lengths(self, shape) - 1).clamp(min=0)

    with _replaced(kernels.Xqa, '_lengths_of', lengths):
        yield


@contextmanager
def _works_derived(derive: Callable[..., None]) -> Iterator[None]:
    """Work lists are made otherwise, but for those by which fa3 is checked when the engine is built."""
    checking = [False]

    def check(self: Any, *args: Any) -> None:
        checking[0] = True
        _check_fa3(self, *args)
        checking[0] = False

    def either(*args: Any) -> None:
        (_derive_works if checking[0] else derive)(*args)

    with _replaced(kernels.Fa3, '_check', check), _replaced(step.PrefillSchedule, 'derive', either):
        yield


@contextmanager
def prefill_length_off_by_one(model: Model) -> Iterator[None]:
    """A prefill request does not see its newest token."""
    del model

    def derive(self: Any, shape: Any, starts: Any, query_lengths: Any, kv_lengths: Any) -> None:
        _derive_works(self, shape, starts, query_lengths, kv_lengths - 1)

    with _works_derived(derive):
        yield


@contextmanager
def sinks_dropped(model: Model) -> Iterator[None]:
    """The softmax has no sink."""
    del model

    def run(self: Any, *args: Any) -> Any:
        return _run(self, *args[:4])

    with _replaced(FlashInferAttention, 'run', run):
        yield


@contextmanager
def sinks_twice(model: Model) -> Iterator[None]:
    """What is done for the sinks of prefill rows is done to decode rows, too."""
    del model

    def derive(self: Any, shape: Any) -> None:
        _derive_fa3(self, shape)
        self._first_token.zero_()

    with _replaced(kernels.Fa3, 'derive', derive):
        yield


def _with_shape(change: Callable[[Any], dict[str, Any]]) -> AbstractContextManager[Any]:
    """Steps have another shape from the moment that they are planned."""

    def plan(self: Any, context: Any) -> None:
        _plan_step(self, context)
        self._shape = replace(self._shape, **change(self._shape))

    return _replaced(FlashInferAttention, 'plan_step', plan)


@contextmanager
def decode_slots_off_by_one(model: Model) -> Iterator[None]:
    """The decode kernel leaves out its last row, and the prefill kernel knows nothing of it."""
    del model

    def change(shape: Any) -> dict[str, Any]:
        return {'decode_slots': max(shape.num_decode - 1, 0)}

    with _with_shape(change):
        yield


@contextmanager
def prefill_taken_for_decode(model: Model) -> Iterator[None]:
    """The first prefill request is computed as one more decode."""
    del model

    def change(shape: Any) -> dict[str, Any]:
        if shape.num_decode == shape.num_requests:
            return {}
        more = shape.num_decode + 1
        return {'num_decode': more, 'decode_slots': max(more, shape.decode_slots)}

    with _with_shape(change):
        yield


@contextmanager
def cached_keys_forgotten(model: Model) -> Iterator[None]:
    """Prompts of which more is in the cache are taken for ones of which nothing is."""
    del model

    def derive(self: Any, shape: Any, starts: Any, query_lengths: Any, kv_lengths: Any) -> None:
        del kv_lengths
        _derive_works(self, shape, starts, query_lengths, query_lengths)

    def plan(self: Any, context: Any) -> None:
        _plan_step(self, context)
        shape = self._shape
        if shape.has_prefill:
            num_new = int(context._cpu_mha_cu_query_seq_lengths[shape.num_requests])
            self._shape = replace(shape, num_new=num_new)

    with _works_derived(derive), _replaced(FlashInferAttention, 'plan_step', plan):
        yield


@contextmanager
def padding_left_out(model: Model) -> Iterator[None]:
    """The prefill kernel leaves padding tokens as they are."""
    del model

    def derive(self: Any, shape: Any, starts: Any, *args: Any) -> None:
        shape = replace(shape, num_tokens=int(starts[shape.num_requests]))
        _derive_works(self, shape, starts, *args)

    with _works_derived(derive):
        yield


@contextmanager
def scale_ignored(model: Model) -> Iterator[None]:
    """Scores are not scaled."""
    del model
    layer = FlashInferAttention._layer

    def unscaled(self: Any, *args: Any) -> Any:
        return replace(layer(self, *args), softmax_scale=1.0)

    with _replaced(FlashInferAttention, '_layer', unscaled):
        yield


@contextmanager
def window_one_too_wide(model: Model) -> Iterator[None]:
    """A query sees the key before its window, too."""
    del model
    layer = FlashInferAttention._layer

    def wider(self: Any, config: Any, windowed: bool) -> Any:
        right = layer(self, config, windowed)
        return replace(right, window_left=right.window_left + 1) if windowed else right

    with _replaced(FlashInferAttention, '_layer', wider):
        yield


@contextmanager
def sinks_of_the_first_step(model: Model) -> Iterator[None]:
    """A layer's sinks stay what they were when it ran first."""
    del model
    first: dict[int, Tensor] = {}

    def run(self: Any, query: Any, keys: Any, values: Any, layer: int, sinks: Any) -> Any:
        kept = first.setdefault(layer, sinks.clone())
        return _run(self, query, keys, values, layer, kept)

    with _replaced(FlashInferAttention, 'run', run):
        yield


@contextmanager
def number_within_the_stage(model: Model) -> Iterator[None]:
    """A pipeline stage counts its layers from one."""
    module: Any = model.module
    before = module.decoder.layers[0].layer_number - 1

    def run(self: Any, query: Any, keys: Any, values: Any, layer: int, *rest: Any) -> Any:
        return _run(self, query, keys, values, layer - before, *rest)

    with _replaced(FlashInferAttention, 'run', run):
        yield


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        replanned,
        plan_destroyed,
        previous_tables,
        begin_not_captured,
        previous_fa2_works,
        previous_mla_works,
        window_of_another_layer,
        pages_shifted,
        fa2_pages_shifted,
        decode_length_off_by_one,
        prefill_length_off_by_one,
        sinks_dropped,
        sinks_twice,
        decode_slots_off_by_one,
        prefill_taken_for_decode,
        cached_keys_forgotten,
        padding_left_out,
        scale_ignored,
        window_one_too_wide,
        sinks_of_the_first_step,
        number_within_the_stage,
    )
}
