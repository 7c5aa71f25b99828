"""The stand-ins: in place where there is no GPU, nowhere else, and gone when asked."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megatron_on_cpu
from megatron_on_cpu import KERNELS, stand_ins

CPU = torch.device('cpu')
HERE = Path(__file__).resolve().parent


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-ins in place, on any machine; whatever was in place before is again after."""
    was_installed = megatron_on_cpu._is_installed
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    megatron_on_cpu.install()
    yield
    if not was_installed:
        megatron_on_cpu.uninstall()


def _now() -> list[object]:
    return [getattr(place, name) for place, name, _ in stand_ins.replacements()]


def test_nothing_is_replaced_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron_on_cpu.uninstall()
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    before, path = _now(), list(sys.path)
    megatron_on_cpu.install()
    assert (_now(), sys.path) == (before, path)


def test_install_may_be_repeated_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron_on_cpu.uninstall()
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    before, path = _now(), list(sys.path)
    megatron_on_cpu.install()
    installed = _now()
    assert all(new is not old for new, old in zip(installed, before, strict=True))
    assert sys.path == [str(KERNELS), *path]
    megatron_on_cpu.install()
    assert (_now(), sys.path) == (installed, [str(KERNELS), *path])
    megatron_on_cpu.uninstall()
    assert (_now(), sys.path) == (before, path)


@pytest.mark.usefixtures('without_gpu')
def test_whatever_names_a_gpu_gives_a_cpu_tensor() -> None:
    like, number = torch.ones(2), torch.cuda.current_device()
    devices = ['cuda', 'cuda:0', 0, number, torch.device('cuda'), torch.device(f'cuda:{number}')]
    for device in devices:
        made = [
            torch.empty(2, device=device, pin_memory=True),
            torch.arange(2, device=device),
            torch.randint(3, (2,), device=device),
            torch.tensor([1, 2], device=device),
            torch.zeros_like(like, device=device),
            like.new_zeros(2, device=device),
            like.to(device),
            like.to(device=device, dtype=torch.float64),
            like.cuda().pin_memory(),
            *torch.nn.Linear(2, 2).to(device).cuda().parameters(),
        ]
        assert {tensor.device for tensor in made} == {CPU}
    assert torch.empty(2, device='meta').device.type == 'meta'
    assert like.to(torch.float64).dtype is torch.float64
    assert isinstance(torch.device('meta'), torch.device) and torch.device('meta').type == 'meta'


@pytest.mark.usefixtures('without_gpu')
def test_streams_and_events_have_nothing_to_wait_for() -> None:
    stream, event = torch.cuda.Stream(device=0), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        event.record(torch.cuda.current_stream())
        stream.wait_event(event)
        stream.wait_stream(torch.cuda.default_stream())
    event.synchronize()
    stream.synchronize()
    torch.cuda.synchronize()
    assert event.query() and stream.query() and stream.record_event().query()
    assert event.elapsed_time(torch.cuda.Event()) > 0
    assert torch.cuda.memory_stats()['allocated_bytes.all.current'] == 0
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total


@pytest.mark.usefixtures('without_gpu')
def test_random_state_of_the_device_is_that_of_the_cpu() -> None:
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4)
    torch.cuda.set_rng_state(state, 0)
    assert torch.equal(torch.rand(4), first)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), first)


@pytest.mark.usefixtures('without_gpu')
def test_nccl_groups_are_made_of_gloo(tmp_path: Path) -> None:
    dist.init_process_group('nccl', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        group = dist.new_group([0], backend='nccl')
        total = torch.ones(2)
        dist.all_reduce(total, group=group)
        dist.barrier(device_ids=[0])
        assert {dist.get_backend(), dist.get_backend(group)} == {'gloo'}
        assert total.tolist() == [1, 1]
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures('without_gpu')
def test_kernel_packages_are_found_with_a_version() -> None:
    found = importlib.util.find_spec('flash_attn'), importlib.util.find_spec('flash_mla')
    assert [spec and Path(spec.origin or '').parent for spec in found] == [KERNELS, KERNELS]
    assert importlib.metadata.version('flash-attn') == '2.8.3'


_CONFTEST = """
import torch
assert torch.cuda.current_device() == torch.device('cpu')
"""
_TEST = """
import pytest
import sys
from transformer_engine.pytorch.fp8 import check_fp8_support

def test_fp8_is_not_supported_and_the_package_is_gone():
    assert not check_fp8_support()[0]
    assert 'transformer_engine' not in sys.modules

def test_of_eight_ranks():
    raise RuntimeError('world_size (1) is not divisible by 8')

@pytest.fixture
def eight_ranks():
    raise RuntimeError('world_size (1) is not divisible by 8')

def test_with_eight_ranks(eight_ranks):
    raise AssertionError('not reached')

def test_with_a_failure():
    raise RuntimeError('something else')

def test_triton_is_not_asked_to_append():
    import megatron.core.inference.contexts.dynamic_context as context
    assert context.triton_append_key_value_cache is None
"""
_MEGATRON = {
    'megatron/core/parallel_state.py': """
initialized = False
def is_initialized():
    return initialized
def initialize_model_parallel():
    global initialized
    initialized = True
""",
    'megatron/core/inference/engines/__init__.py': """
import importlib.util
assert importlib.util.find_spec('transformer_engine') is None
import megatron.core.inference.contexts.dynamic_context
""",
    'megatron/core/inference/contexts/dynamic_context.py': 'triton_append_key_value_cache = print',
}


@pytest.mark.skipif(torch.cuda.is_available(), reason='the plugin is inert where there is a GPU')
def test_plugin_serves_upstream_tests_and_their_conftest(tmp_path: Path) -> None:
    files = {'conftest.py': _CONFTEST, 'test_upstream.py': _TEST, **_MEGATRON}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    options = ['-p', 'megatron_on_cpu', '-p', 'no:cacheprovider', '-rA', '--tb=line']
    done = subprocess.run(
        [sys.executable, '-P', '-m', 'pytest', *options, 'test_upstream.py'],
        cwd=tmp_path,
        env=os.environ | {'PYTHONPATH': f'{tmp_path}{os.pathsep}{HERE}'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert '2 passed, 2 skipped' in done.stdout and '1 failed' in done.stdout, done.stdout
    assert 'FAILED test_upstream.py::test_with_a_failure' in done.stdout
