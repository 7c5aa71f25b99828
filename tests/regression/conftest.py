"""Runs both trees of a regression, once a module and device, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / 'support')]

from recording import Run  # noqa: E402
from scenarios import SEED  # noqa: E402

_MINUTES = 14


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two trees, the tool's own by default, and what random requests are drawn with."""
    for name, role in (('--reference', 'before'), ('--candidate', 'after')):
        parser.addoption(
            name, type=Path, help=f'folder that holds megatron/ as it is {role} the stage'
        )
    # A gate gives the same verdict each time, hence a number and not a draw.
    parser.addoption('--seed', type=int, default=SEED, help='to draw other random requests')


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line('markers', 'gpu: needs a GPU')


@pytest.fixture(scope='module')
def trees(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """The trees before and after the module's stage: those of the options, or made here."""
    given = [request.config.getoption(name) for name in ('reference', 'candidate')]
    if None not in given:
        return given[0], given[1]
    if given != [None, None]:
        raise pytest.UsageError('give both of --reference and --candidate, or neither')
    from series import tree
    from series.model import Project

    project = Project(_HERE.parents[1])
    series, number = project.series(), request.module.STAGE
    return (
        tree.make(project, series, number, series.stage(number).reference_patches),
        tree.make(project, series, number),
    )


@pytest.fixture(scope='session')
def seed(request: pytest.FixtureRequest) -> int:
    """What random requests are drawn with."""
    return int(request.config.getoption('seed'))


def _run(
    trees: tuple[Path, Path],
    folders: tuple[Path, Path],
    arguments: tuple[list[str], list[str]],
    device: str,
) -> None:
    """Run scenarios on both trees, side by side, each with its arguments of the runner.

    Raises:
        RuntimeError: a runner failed.
    """
    runners = []
    try:
        for tree, out, extra in zip(trees, folders, arguments, strict=True):
            command = [sys.executable, '-P', str(_HERE / 'runner.py'), '--device', device, *extra]
            command += ['--tree', str(tree), '--out', str(out)]
            with (out / 'log').open('w') as log:
                runners.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        for tree, out, runner in zip(trees, folders, runners, strict=True):
            if status := runner.wait(60 * _MINUTES):
                log_end = (out / 'log').read_text()[-5000:]
                raise RuntimeError(f'the runner ended with {status} on {tree}:\n{log_end}')
    finally:
        for runner in runners:
            runner.kill()
            runner.wait()


@pytest.fixture(scope='module')
def runs_on(
    request: pytest.FixtureRequest,
    trees: tuple[Path, Path],
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Run, Run]]:
    """Gives the runs of both trees on a device, made when first asked for.

    The module's `RUNNERS` are the runner's arguments for the tree before and for the one after.
    """
    before_arguments, after_arguments = (
        [*arguments, '--seed', str(seed)] for arguments in request.module.RUNNERS
    )
    done: dict[str, tuple[Run, Run] | Exception] = {}

    def runs(device: str) -> tuple[Run, Run]:
        if device not in done:
            before, after = (
                tmp_path_factory.mktemp(f'{device}-{role}') for role in ('before', 'after')
            )
            try:
                _run(trees, (before, after), (before_arguments, after_arguments), device)
                done[device] = Run(before), Run(after)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                done[device] = error
        result = done[device]
        if isinstance(result, Exception):
            raise result
        return result

    return runs


@pytest.fixture
def runs(
    request: pytest.FixtureRequest, runs_on: Callable[[str], tuple[Run, Run]]
) -> tuple[Run, Run]:
    """The runs before and after the stage, on the device that is the parameter."""
    return runs_on(request.param)
