"""What takes the place of the parts of torch that need a GPU.

`replacements` is the one list of them. `torch.cuda.is_available()` is not on it: it goes on saying
the truth, so that code that can choose, chooses the CPU, and tests that need a GPU skip themselves.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

REAL_DEVICE = torch.device
CPU = REAL_DEVICE('cpu')

Replacement = tuple[Any, str, Any]

# Functions that make a tensor on the device that they are told.
_FACTORIES = (
    'arange',
    'as_tensor',
    'empty',
    'empty_like',
    'empty_strided',
    'eye',
    'full',
    'full_like',
    'linspace',
    'ones',
    'ones_like',
    'rand',
    'rand_like',
    'randint',
    'randint_like',
    'randn',
    'randn_like',
    'randperm',
    'tensor',
    'tril_indices',
    'triu_indices',
    'zeros',
    'zeros_like',
)
_TENSOR_FACTORIES = ('new_empty', 'new_full', 'new_ones', 'new_tensor', 'new_zeros')


class Event:
    """A point in a stream, always reached: the CPU does one thing after the other."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs

    def record(self, stream: object = None) -> None:
        """Mark the point."""

    def wait(self, stream: object = None) -> None:
        """Let a stream wait for the point."""

    def synchronize(self) -> None:
        """Wait for the point."""

    def query(self) -> bool:
        """Whether the point is reached."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds to `end`; never zero, as callers divide by it."""
        del end
        return 1.0


class Stream:
    """A queue of work, always empty."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs

    def wait_stream(self, stream: object) -> None:
        """Let this stream wait for another."""

    def wait_event(self, event: Event) -> None:
        """Let this stream wait for a point in another."""

    def record_event(self, event: Event | None = None) -> Event:
        """A point in this stream."""
        return event or Event()

    def synchronize(self) -> None:
        """Wait until the queue is empty."""

    def query(self) -> bool:
        """Whether the queue is empty."""
        return True


def _is_gpu(device: object) -> bool:
    """Whether torch would take `device` for a GPU: by name, as an object, or by number."""
    if isinstance(device, int):
        return not isinstance(device, bool)
    if isinstance(device, str):
        return device.partition(':')[0] == 'cuda'
    return isinstance(device, REAL_DEVICE) and device.type == 'cuda'


class _DeviceType(type):
    """Makes `torch.device('cuda')` the CPU, and `isinstance` see no difference."""

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        first = kwargs.get('type', args[0] if args else None)
        return CPU if _is_gpu(first) else REAL_DEVICE(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, REAL_DEVICE)


class Device(metaclass=_DeviceType):
    """In place of `torch.device`, of which it makes real ones."""


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`, with any GPU among its keyword arguments replaced by the CPU, and nothing pinned."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop('pin_memory', None)
        if _is_gpu(kwargs.get('device')):
            kwargs['device'] = CPU
        return make(*args, **kwargs)

    return made


def _to_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.to` or `Module.to`, which take the device as any argument, too."""
    keywords_on_cpu = _on_cpu(to)

    @functools.wraps(to)
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        return keywords_on_cpu(self, *(CPU if _is_gpu(a) else a for a in args), **kwargs)

    return moved


# Each of the following gives a new function each time: torch's compiler keeps a table of torch's
# functions and refuses to find one function in two places.


def _same() -> Callable[..., Any]:
    """For a method that moves a tensor or module, which is where it should be."""
    return lambda self, *args, **kwargs: self


def _nothing() -> Callable[..., None]:
    """For what has nothing to do on a CPU."""
    return lambda *args, **kwargs: None


def _no_context(*args: object, **kwargs: object) -> AbstractContextManager[None]:
    return nullcontext()


def _gloo_for_nccl(make: Callable[..., Any]) -> Callable[..., Any]:
    """`init_process_group` or `new_group`, whose backend NCCL needs a GPU."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        args = tuple('gloo' if arg == 'nccl' else arg for arg in args)
        if kwargs.get('backend') == 'nccl':
            kwargs['backend'] = 'gloo'
        kwargs.pop('device_id', None)
        return make(*args, **kwargs)

    return made


def _barrier(barrier: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(barrier)
    def waited(*args: Any, device_ids: object = None, **kwargs: Any) -> Any:
        del device_ids
        return barrier(*args, **kwargs)

    return waited


def _mem_get_info(device: object = None) -> tuple[int, int]:
    """Free and total bytes of the machine's memory."""
    del device
    page = os.sysconf('SC_PAGE_SIZE')
    return os.sysconf('SC_AVPHYS_PAGES') * page, os.sysconf('SC_PHYS_PAGES') * page


def replacements() -> Iterator[Replacement]:
    """Each place, the name there, and what takes its place."""
    cuda: Any = torch.cuda

    # One device, the CPU. The engine hands on what `current_device` says as a device, never as a
    # number to compute with. Upstream's tests set the device that their rank should have.
    yield cuda, 'current_device', lambda: CPU
    yield cuda, 'device_count', lambda: 1
    yield cuda, 'set_device', _nothing()

    # Devices by name: a prompt, say, must be on f"cuda:{torch.cuda.current_device()}".
    yield torch, 'device', Device

    # Streams and events of asynchronous scheduling, of step times and of suspend and resume.
    yield cuda, 'Event', Event
    yield cuda, 'Stream', Stream
    yield cuda, 'current_stream', lambda device=None: Stream()
    yield cuda, 'default_stream', lambda device=None: Stream()
    yield cuda, 'stream', _no_context
    yield cuda, 'synchronize', _nothing()
    yield cuda, 'is_current_stream_capturing', lambda: False

    # Memory figures that the engine logs and upstream's tests print; the allocator has none.
    yield cuda, 'memory_stats', lambda device=None: defaultdict(int)
    yield cuda, 'mem_get_info', _mem_get_info
    yield cuda, 'reset_peak_memory_stats', _nothing()

    # Profiler ranges around the phases of a step.
    yield torch.cuda.nvtx, 'range_push', _nothing()
    yield torch.cuda.nvtx, 'range_pop', _nothing()

    # Random states of model-parallel initialisation and dropout: those of the CPU.
    for place in (cuda, torch.cuda.random):
        yield place, 'get_rng_state', lambda device=None: torch.get_rng_state()
        yield place, 'set_rng_state', lambda state, device=None: torch.set_rng_state(state)
        yield place, 'manual_seed', lambda seed: torch.manual_seed(seed)

    # Tensors made on the device, in pinned memory, or moved from one to the other.
    for name in _FACTORIES:
        yield torch, name, _on_cpu(getattr(torch, name))
    for name in _TENSOR_FACTORIES:
        yield torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name))
    for kind in (torch.Tensor, torch.nn.Module):
        yield kind, 'to', _to_cpu(kind.to)
        yield kind, 'cuda', _same()
    yield torch.Tensor, 'pin_memory', _same()
    yield torch.Tensor, 'record_stream', _nothing()

    # Process groups of model parallelism.
    for name in ('init_process_group', 'new_group'):
        yield dist, name, _gloo_for_nccl(getattr(dist, name))
    yield dist, 'barrier', _barrier(dist.barrier)
