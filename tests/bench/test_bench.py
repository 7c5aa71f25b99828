"""The benchmarks run, on a CPU with stand-ins, and say of a run what is to be said of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from series import tree
from series.model import Project

_HERE = Path(__file__).parent


@pytest.fixture(scope='module')
def stage2() -> Path:
    """A tree with both stages."""
    project = Project(_HERE.parents[1])
    return tree.make(project, project.series(), 2)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> type[ModuleType]:
    """Puts the benchmarks on the path."""
    monkeypatch.syspath_prepend(_HERE.parents[1] / 'scripts/bench')
    return ModuleType


@pytest.mark.parametrize(
    'name, rows',
    [
        (
            'kernels',
            [
                '| GQA 4:1 | 3 x 300 |',
                '| GQA 4:1 | 2 x 100 + 1 x 60 |',
                '| MLA, 16 heads | decode 3 x 300 |',
                '| MLA, 16 heads | prefill 2 x 100 |',
                '| 2 of 4 x 300 |',
            ],
        ),
        (
            'engine',
            ['## 8B, arriving', '| 3 | stage 2, off |', '## 8B, drafts', '| 2 | FlashInfer |'],
        ),
        ('rollout', ['| roll-out, tokens/s |', '| divergence with the new weights |']),
        ('parity', ['| FlashInfer fa2 |', 'Met: mean and KL from the float32 forward']),
        (
            'parallel',
            [
                '| TP 2 | eager |',
                '| PP 2 | eager |',
                '| TP 2, one KV head | eager |',
                '2/1, 2/1 | 0.00e+00',
                'Nothing was missed.',
            ],
        ),
    ],
)
def test_it_runs(stage2: Path, name: str, rows: list[str]) -> None:
    launch = ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    done = subprocess.run(
        [
            *(sys.executable, '-P', '-W', 'ignore'),
            *(launch if name == 'parallel' else []),
            *(str(_HERE / 'on_cpu.py'), name, str(stage2)),
        ],
        env=os.environ
        | {'OMP_NUM_THREADS': '1', 'TRITON_INTERPRET': '1', 'TORCH_COMPILE_DISABLE': '1'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for row in rows:
        assert row in done.stdout


@pytest.mark.usefixtures('bench')
def test_kernels_misses() -> None:
    import kernels

    def row(phase: str, batch: str, flash: float, **work: float) -> dict[str, object]:
        us = {'flashinfer': 100.0, 'flash': flash, 'derive': 1.0, 'host': 9.0}
        work = {'bytes': 0, 'operations': 0, **work}
        return {'shape': 'GQA 4:1', 'phase': phase, 'batch': batch, 'us': us, **work}

    def missed(
        *attention: dict[str, object], append: Sequence[dict[str, object]] = ()
    ) -> list[str]:
        card = {'read': 4e12, 'copy': 4e12, 'matrix': 1e15}
        rows = {'attention': attention, 'latents': (), 'append': append}
        return kernels.misses(
            {part: {'ceilings': card, 'rows': found} for part, found in rows.items()}
        )

    assert missed(row('decode', '256 x 1024', 116), row('decode', '8 x 128', 100)) == []
    assert len(missed(row('decode', '256 x 1024', 114), row('decode', '8 x 128', 99))) == 2
    # 2 GiB in 100 µs is far above 4 TB/s; in 1 ms it is half of it.
    large = row('decode', '512 x 1024', 100, bytes=2 << 30)
    assert missed(large) == []
    assert len(missed({**large, 'us': {'flashinfer': 1000.0, 'flash': 1001.0}})) == 1
    assert len(missed(row('prefill', '8 x 512', 114), row('prefill', '1 x 512', 101))) == 1
    assert len(missed(row('prefill', '1 x 8192', 200, operations=5e10))) == 1
    assert len(missed(row('mixed', '32 x 1024 + 1 x 2048', 124))) == 1
    small_append = {'tokens': 64, 'shape': 'GQA', 'ratio': 1.02, 'of_copy': 0.2}
    large_append = {'tokens': 16384, 'shape': 'GQA', 'ratio': 2.0, 'of_copy': 0.84}
    assert len(missed(append=[small_append, large_append])) == 2


@pytest.mark.usefixtures('bench')
def test_engine_misses() -> None:
    import engine

    def missed(mode: str, batch: int, flash: float, **ours: float) -> list[str]:
        variants = {'stage 1': {'decode_ms': flash}, 'FlashInfer': {'decode_ms': 10.0, **ours}}
        return engine.misses({'shapes': {'8B': {mode: {'cases': {f'{batch} requests': variants}}}}})

    assert missed('graphs', 256, 11.1, host_us=40) == []
    assert len(missed('graphs', 256, 10.9, host_us=60)) == 2
    assert missed('eager', 8, 9.95, host_us=60) == []
    assert len(missed('eager', 8, 9.8)) == 1


@pytest.mark.usefixtures('bench')
def test_parity_misses() -> None:
    import parity

    def missed(ours: float) -> list[str]:
        flash = [1.0, 1.1, 0.9, 1.0]
        own = [value * ours for value in flash]
        values = {name: flash if 'flash' in name else own for name in parity.ENGINES}
        rows = {name: {'mean': value, 'KL': value} for name, value in values.items()}
        return parity.misses({'float32': rows})

    assert missed(1.04) == []
    assert len(missed(1.3)) == 8


@pytest.mark.usefixtures('bench')
def test_parallel_misses() -> None:
    import parallel

    def missed(mean: float, kv_heads: int) -> list[str]:
        rank = {'query_heads': 16, 'kv_heads': kv_heads, 'gib': 1.0}
        row = {'graphs': True, 'ranks': {'FlashInfer': [rank, rank]}, 'distance': {'mean': mean}}
        return parallel.misses({'TP 2, one KV head': [row]})

    assert missed(0.01, 1) == []
    assert len(missed(float('nan'), 2)) == 2


@pytest.mark.usefixtures('bench')
def test_rollout_misses() -> None:
    import rollout

    def missed(speed: float, drift: float) -> list[str]:
        def process(speed: float, drift: float) -> list[dict[str, object]]:
            apart = {'mean': drift, 'KL': drift}
            return [{'tokens_per_second': speed, 'drift': apart, 'drift_after': apart}]

        variants = {'flash': process(100, 1), 'FlashInfer': process(speed, drift)}
        return rollout.misses({'variants': variants})

    assert missed(111, 1.04) == []
    assert len(missed(109, 1.06)) == 5
