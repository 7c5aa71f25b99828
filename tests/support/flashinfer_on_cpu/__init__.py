"""Lets code that calls FlashInfer run where there is neither that package nor a GPU, for tests.

`install()` makes `import flashinfer` find the stand-in in the folder `kernels`, gives the package a
version, and tells `torch.cuda` what GPU there is said to be. It can also make FlashInfer missing.
`record()` keeps what the stand-in is called with.

The stand-in has FlashInfer's own signatures and computes from exactly the arrays that it is handed,
in float32, by the definition in `reference_attention`. It refuses what a kernel would read wrongly:
types, sizes and strides that it assumes, works that write a row twice, ids of pages that are not
there, semaphores that are not zero. What it cannot show is time, order between streams, whether a
kernel exists for a head dim, and CUDA graphs.

Install it before Megatron is imported, since some modules look once at whether FlashInfer is there.
As a pytest plugin (`-p flashinfer_on_cpu`) it is installed before any conftest is imported, unless
there is a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from packaging.utils import canonicalize_name

from flashinfer_on_cpu.calls import Call, record

__all__ = ['KERNELS', 'SM_COUNT', 'VERSION', 'Call', 'install', 'record', 'uninstall']

KERNELS = Path(__file__).parent / 'kernels'
VERSION = '0.6.18.post1'
"""The FlashInfer whose signatures the stand-in has."""
SM_COUNT = 8
"""Multiprocessors of the GPU that there is said to be."""
L2_CACHE_BYTES = 64 * 1024
"""Its cache, so small that the keys of a few prompts are more."""

_installed = ExitStack()


class _Distribution(Distribution):
    """What is installed under the name flashinfer-python."""

    def __init__(self, version: str) -> None:
        self._metadata = f'Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n'

    def read_text(self, filename: str) -> str | None:
        """The metadata, the only file there is."""
        return self._metadata if filename == 'METADATA' else None

    def locate_file(self, path: object) -> Path:
        """Where a file of the package would be."""
        return KERNELS / str(path)


def _taken_modules() -> dict[str, ModuleType]:
    """Take FlashInfer's modules from those that are imported."""
    names = [name for name in sys.modules if name.partition('.')[0] == 'flashinfer']
    return {name: sys.modules.pop(name) for name in names}


@contextmanager
def _other_modules() -> Iterator[None]:
    """Nothing of FlashInfer is imported at first; afterwards is again what was before."""
    before = _taken_modules()
    try:
        yield
    finally:
        _taken_modules()
        sys.modules.update(before)


def install(version: str | None = VERSION, capability: tuple[int, int] = (9, 0)) -> None:
    """Put the stand-in in place, instead of a FlashInfer that is installed or an earlier stand-in.

    Args:
        version: The version that it says it is; None: FlashInfer is missing.
        capability: The compute capability of the GPU.
    """
    uninstall()
    _installed.enter_context(_other_modules())
    if version is None:
        # What makes Python's import say that there is no such module.
        sys.modules['flashinfer'] = None  # type: ignore[assignment]
    else:
        sys.path.insert(0, str(KERNELS))
        _installed.callback(sys.path.remove, str(KERNELS))

    from_name = Distribution.from_name

    def found(name: str) -> Distribution:
        if canonicalize_name(name) != 'flashinfer-python':
            return from_name(name)
        if version is None:
            raise PackageNotFoundError(name)
        return _Distribution(version)

    major, minor = capability
    gpu = SimpleNamespace(
        name='Stand-in',
        major=major,
        minor=minor,
        multi_processor_count=SM_COUNT,
        L2_cache_size=L2_CACHE_BYTES,
        total_memory=80 * 1024**3,
    )
    for place, name, replacement in (
        (Distribution, 'from_name', found),
        (torch.cuda, 'get_device_capability', lambda device=None: capability),
        (torch.cuda, 'get_device_properties', lambda device=None: gpu),
    ):
        _installed.enter_context(mock.patch.object(place, name, replacement))


def uninstall() -> None:
    """Undo `install`; modules imported meanwhile keep what they took."""
    _installed.close()


def pytest_load_initial_conftests() -> None:
    """Install before conftests, which may import Megatron."""
    if not torch.cuda.is_available():
        install()
