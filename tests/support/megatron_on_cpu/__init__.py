"""Lets Megatron's dynamic inference engine run where there is no GPU, for tests.

Megatron asks `torch.cuda` for devices, streams, events, pinned memory and random states, and calls
FlashAttention and FlashMLA. `install()` replaces those parts of torch by ones that keep everything
on the CPU (`stand_ins` lists them, each with what it is for) and puts the folder `kernels`, with
stand-ins for the two kernel packages, on the import path. Where torch sees a GPU it does nothing.

What this can show is that the right numbers reach the right places. What it cannot: streams and
events order nothing here, and a copy to the device is no copy, so races stay unseen; CUDA graphs
are not captured; and the attention is laxer than a kernel on sizes and types.

As a pytest plugin (`-p megatron_on_cpu`) it is installed before any conftest is imported. Elsewhere
call `install()` before anything of Megatron is imported, since some of its modules look at what is
installed when they are imported.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_on_cpu import stand_ins

KERNELS = Path(__file__).parent / 'kernels'

_installed = ExitStack()
_is_installed = False


def needed() -> bool:
    """Whether there is no GPU to run on."""
    return not torch.cuda.is_available()


def install() -> None:
    """Put the stand-ins in place, if they are needed and are not there yet."""
    global _is_installed
    if _is_installed or not needed():
        return
    for target, name, replacement in stand_ins.replacements():
        _installed.enter_context(mock.patch.object(target, name, replacement))
    sys.path.insert(0, str(KERNELS))
    _installed.callback(sys.path.remove, str(KERNELS))
    _is_installed = True


def uninstall() -> None:
    """Put back what `install` replaced; modules imported meanwhile keep what they took."""
    global _is_installed
    _installed.close()
    _is_installed = False


def append_without_triton() -> None:
    """Let the context append to its cache by plain indexing, which it does where Triton is missing.

    For trees whose context, once imported, calls its Triton kernel on any device.
    """
    context: Any = sys.modules.get('megatron.core.inference.contexts.dynamic_context')
    if hasattr(context, 'triton_append_key_value_cache'):
        context.triton_append_key_value_cache = None


def stages_without_gpus() -> None:
    """Let pipeline stages, once imported, hand on tensors that are not on a GPU."""
    communication: Any = sys.modules.get('megatron.core.inference.communication_utils')
    communication._is_cuda = lambda tensor: None


@contextmanager
def _fp8_support_check() -> Iterator[None]:
    """Make importable the one function of Transformer Engine that upstream's tests ask.

    For their import alone: to all of Megatron the package is, truthfully, missing.
    """
    import megatron.core.inference.engines  # noqa: F401  # before there is anything to be found

    names = ('transformer_engine', 'transformer_engine.pytorch', 'transformer_engine.pytorch.fp8')
    modules: list[Any] = [ModuleType(name) for name in names]
    modules[-1].check_fp8_support = lambda: (False, 'Transformer Engine needs a GPU')
    sys.modules.update(zip(names, modules, strict=True))
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


@contextmanager
def _skip_for_missing_ranks() -> Iterator[None]:
    """Skip a test that needs more ranks than there are, and tidy up after it.

    Megatron refuses such a test's group sizes only after the old groups are gone, which later tests
    of the same file rely on.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_installed or not re.search(r'world_size \(\d+\) is not divisible', str(error)):
            raise
        from megatron.core import parallel_state

        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel()
        pytest.skip(f'the ranks of this test would each need a GPU: {error}')


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Install before conftests, which may import Megatron."""
    install()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Import test files that import from Transformer Engine."""
    with ExitStack() as stack:
        if (
            _is_installed
            and isinstance(collector, pytest.Module)
            and 'from transformer_engine.pytorch.fp8 import' in collector.path.read_text()
            and importlib.util.find_spec('transformer_engine') is None
        ):
            stack.enter_context(_fp8_support_check())
        return (yield)


def pytest_collection_finish() -> None:
    """What is to be tested is imported now."""
    if _is_installed:
        append_without_triton()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Fixtures that start more ranks than there are skip their test."""
    with _skip_for_missing_ranks():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """So do tests."""
    with _skip_for_missing_ranks():
        return (yield)
