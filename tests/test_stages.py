"""The series itself: `series check`, and every patch's imports and unit tests in a patched tree.

The stages' regressions are under tests/regression.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from series import checks, gates, tree
from series.model import Project, Series

PROJECT = Project(Path(__file__).resolve().parents[1])
PATCHES = [
    pytest.param(series, stage.number, count, id=f'{series.branch}-stage{stage.number}-{count:04}')
    for series in PROJECT.all_series()
    for stage in series.stages
    for count in range(1, len(stage.patches) + 1)
]


def test_check() -> None:
    """All that `series check` looks at holds."""
    failed = [verdict for verdict in checks.run(PROJECT) if verdict.complaints]
    assert not failed, '\n'.join(f'{v.name}: {text}' for v in failed for text in v.complaints)


@pytest.mark.timeout(3600)  # as long as a gate lets one of its jobs run
@pytest.mark.parametrize(('series', 'number', 'count'), PATCHES)
def test_patch(series: Series, number: int, count: int) -> None:
    """After this patch all it touched imports, and the unit tests that exist so far pass."""
    folder = tree.make(PROJECT, series, number, count)
    results = gates.run(gates.at_patch(PROJECT, series, number, folder, count))
    problems = [problem for result in results for problem in result.problems()]
    assert not problems, '\n'.join(problems)


def test_mirrors_are_not_importable() -> None:
    """`import megatron` means a tree's package, never this repository's mirrors."""
    (job,) = gates.run([gates.Job('find', ('-c', 'import megatron'), PROJECT.root)])
    assert "No module named 'megatron'" in job.problems()[0]
