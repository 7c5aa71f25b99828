"""The stand-in for FlashInfer against the real package's signatures, of two versions."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator
from inspect import Parameter, Signature
from pathlib import Path

import pytest

import flashinfer_on_cpu
from flashinfer_signatures import WHEELS, DownloadError, of_folder, of_function, of_wheel, wheel

WRAPPER = 'prefill.BatchPrefillWithPagedKVCacheWrapper'
NAMES = [
    'xqa.xqa',
    f'{WRAPPER}.__init__',
    f'{WRAPPER}.plan',
    f'{WRAPPER}.run',
    f'{WRAPPER}.reset_workspace_buffer',
    *(
        f'prefill.BatchPrefillWithRaggedKVCacheWrapper.{method}'
        for method in ('__init__', 'plan', 'run')
    ),
    'prefill.trtllm_batch_context_with_kv_cache',
    'prefill.trtllm_fmha_v2_prefill',
    'decode.trtllm_batch_decode_with_kv_cache',
]
# 0.7 takes the same calls by other signatures: all of `plan` and `run` may be left out there.
OF_ONE_VERSION = [
    f'mla.BatchMLAPagedAttentionWrapper.{method}' for method in ('__init__', 'plan', 'run')
]


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    flashinfer_on_cpu.install()
    yield
    flashinfer_on_cpu.uninstall()


@pytest.fixture(scope='module', params=WHEELS)
def real(request: pytest.FixtureRequest) -> dict[str, Signature]:
    """The real signatures of a version; the index has to be in reach once."""
    try:
        return of_wheel(wheel(request.param))
    except DownloadError as error:
        pytest.skip(f'no wheel of flashinfer-python {request.param}: {error}')


def required(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Those without a default, which come first."""
    optional = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [p for p in parameters if p.default is Parameter.empty and p.kind not in optional]


def stand_in(name: str) -> Signature:
    """The stand-in's signature by a name such as those of `NAMES`."""
    module, *path = name.split('.')
    found: object = importlib.import_module(f'flashinfer.{module}')
    for part in path:
        found = getattr(found, part)
    return of_function(found)


@pytest.mark.parametrize('real', [flashinfer_on_cpu.VERSION], indirect=True)
@pytest.mark.parametrize('name', [*NAMES, *OF_ONE_VERSION])
def test_stand_in_has_the_real_signature(name: str, real: dict[str, Signature]) -> None:
    assert stand_in(name) == real[name]


@pytest.mark.parametrize('name', NAMES)
def test_what_the_stand_in_takes_every_version_takes(name: str, real: dict[str, Signature]) -> None:
    """So a call that the stand-in takes means the same, with all that has a default by name."""
    known = real[name].parameters
    ours = stand_in(name).parameters
    assert {key: known[key] for key in ours} == dict(ours)
    assert required(known.values()) == required(ours.values())


def test_source_is_read_as_python_reads_it(tmp_path: Path) -> None:
    source = (
        'def plain(a, /, b: int, c=1, *rest, d, e=-1.5, **more) -> None: ...\n'
        'class Kind:\n'
        '    def method(self, a="x", *, b=None, c=(1, 2)): ...\n'
        '    def twice(self, overload): ...\n'
        '    def twice(self, last): ...\n'
    )
    (tmp_path / 'flashinfer').mkdir()
    for module in ('xqa', 'prefill', 'decode'):
        (tmp_path / 'flashinfer' / f'{module}.py').write_text(source)
    names: dict[str, object] = {}
    exec(source, names)  # pylint: disable=exec-used
    kind = names['Kind']
    found = of_folder(tmp_path)
    assert found['xqa.plain'] == of_function(names['plain'])
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        assert found[f'decode.Kind.{name}'] == of_function(function)


def test_a_default_that_is_no_literal_is_its_source(tmp_path: Path) -> None:
    (tmp_path / 'flashinfer').mkdir()
    for module in ('xqa', 'prefill', 'decode'):
        (tmp_path / 'flashinfer' / f'{module}.py').write_text('def f(a=torch.float16): ...')
    assert of_folder(tmp_path)['xqa.f'].parameters['a'].default == 'torch.float16'
