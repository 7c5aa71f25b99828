"""Reading series.toml, and what is refused there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from series.model import Project, Series
from synthetic import BRANCH, Ran


def test_list(run: Callable[..., Ran]) -> None:
    ran = run('list')
    assert ran.status == 0
    assert [line.strip() for line in ran.out.splitlines()] == [
        f'{BRANCH}  megatron-core 9.1.2',
        'stage 1  The first stage',
        '0001  Add the cache',
        '0002  [Inference] Turn line 10',
        'stage 2  The second stage',
        '0001  feat(core): Turn line 20',
    ]


@pytest.mark.parametrize('verb', ['fetch', 'open', 'export', 'verify'])
def test_unknown_base(refused: Callable[..., str], verb: str, project: Project) -> None:
    assert f'Unknown base core_r8; there are: {BRANCH}.' in refused(verb, 'core_r8')
    assert not project.work.exists()


@pytest.mark.parametrize('verb', ['apply', 'gate'])
@pytest.mark.parametrize('stage', [0, 3])
def test_unknown_stage(
    refused: Callable[..., str], verb: str, stage: int, project: Project
) -> None:
    said = refused(verb, BRANCH, '--stage', stage)
    assert f'{BRANCH} has no stage {stage}; its stages: 1, 2.' in said
    assert not project.work.exists()


@pytest.mark.parametrize('verb', ['list', 'check', 'verify'])
def test_no_series_at_all(refused: Callable[..., str], series: Series, verb: str) -> None:
    series.file.unlink()
    assert 'There is no patches/<branch>/series.toml' in refused(verb)


@pytest.mark.parametrize(
    ('old', 'new', 'said'),
    [
        ('title =', 'title', 'is not valid TOML'),
        ('package = "megatron-core"\n', '', 'package: Field required'),
        ('package =', 'packet =', 'packet: Extra inputs are not permitted'),
        ('9.1.2', 'newest', 'version: '),
        ('number = 2', 'number = 3', 'stages must be numbered 1, 2, … in order'),
        ('reference-patches = 1', 'reference-patches = 9', 'fewer patches than reference-patches'),
        ('sha256 = "', 'sha256 = "0', 'sha256: '),
        (f'branch = "{BRANCH}"', 'branch = "other"', 'unlike its folder'),
    ],
)
def test_faulty_series(
    refused: Callable[..., str], series: Series, old: str, new: str, said: str
) -> None:
    text = series.file.read_text()
    assert old in text
    series.file.write_text(text.replace(old, new))
    assert said in refused('list')
