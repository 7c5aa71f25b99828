"""What the stand-in's functions have in common: calls are checked against their signature, kept if
wanted, and refused if they ask for what has no stand-in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec('_P')
_R = TypeVar('_R')

# Tensors of these types are tables and lengths, which callers overwrite; others may be large.
_COPIED = (torch.int32, torch.int64, torch.uint32, torch.uint16)


@dataclass(frozen=True)
class Call:
    """One call of a function or method of the stand-in."""

    name: str
    """With its module, as in `prefill.BatchPrefillWithPagedKVCacheWrapper.plan`."""

    arguments: dict[str, Any]
    """By parameter, defaults included. Tensors of integers are copies from when it was called."""

    given: frozenset[str]
    """Parameters that the caller named or gave by position."""


_recordings: list[list[Call]] = []


@contextmanager
def record() -> Iterator[list[Call]]:
    """In this context, keep all calls in the list that it gives, in order, refused ones included."""
    _recordings.append([])
    try:
        yield _recordings[-1]
    finally:
        _recordings.pop()


def stands_in(*without: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function that takes the place of FlashInfer's of that name.

    Args:
        without: Parameters that it does not look at, and that change the real one's result. Such an
            argument, unless it is the default, is a NotImplementedError.
    """

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)
        name = f'{function.__module__.rpartition(".")[2]}.{function.__qualname__}'

        @wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            bound = signature.bind(*args, **kwargs)
            given = frozenset(bound.arguments)
            bound.apply_defaults()
            if _recordings:
                arguments = {
                    key: value.clone() if _is_table(value) else value
                    for key, value in bound.arguments.items()
                }
                _recordings[-1].append(Call(name, arguments, given))
            for key in without:
                value, default = bound.arguments[key], signature.parameters[key].default
                if value is not default and (isinstance(value, Tensor) or value != default):
                    raise NotImplementedError(f'there is no stand-in for {name} with {key}')
            return function(*args, **kwargs)

        return called

    return decorated


def _is_table(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in _COPIED
