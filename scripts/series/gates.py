"""A stage's gate: its unit tests in the patched tree, its regression, and upstream's own tests."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from junitparser import Error, JUnitXml, Skipped, TestCase, TestSuite

from series import tree
from series.checkout import Checkout
from series.model import Project, Series, SeriesError

_TIMEOUT_SECONDS = 3600
_TAIL_LINES = 30

# Called before a group of jobs with their number; gives what to call as each one ends.
OnJobs = Callable[[int], Callable[[str], None]]


@dataclass(frozen=True)
class Job:
    """One test process: `python *args`; `pytest` ones leave a JUnit file."""

    name: str
    args: tuple[str, ...]
    cwd: Path
    python_path: tuple[Path, ...] = ()

    @property
    def is_pytest(self) -> bool:
        """Whether the process is pytest."""
        return 'pytest' in self.args


@dataclass
class Result:
    """What a job's tests came to. Of an `informative` one failures do not fail the gate."""

    name: str
    seconds: float
    cases: list[TestCase] = field(default_factory=list)
    informative: bool = False

    @property
    def skipped(self) -> Counter[str]:
        """Reasons of skipped tests, with how many tests each."""
        return Counter(
            str(outcome.message)
            for case in self.cases
            for outcome in case.result
            if isinstance(outcome, Skipped)
        )

    @property
    def failures(self) -> list[TestCase]:
        """The tests that failed, or could not run."""
        return [case for case in self.cases if not case.is_passed and not case.is_skipped]

    @property
    def passed(self) -> int:
        """The number of tests that passed."""
        return sum(case.is_passed for case in self.cases)

    @property
    def ok(self) -> bool:
        """Whether the gate may pass."""
        return self.informative or not self.failures

    def problems(self) -> list[str]:
        """A line or more for each failure that fails the gate."""
        if self.informative:
            return []
        return [
            f'{self.name}: {case_id(case)}: {outcome.message or outcome.text or "failed"}'
            for case in self.failures
            for outcome in case.result
        ]


def case_id(case: TestCase) -> str:
    """The name that a test has in every tree."""
    return f'{case.classname}::{case.name}' if case.classname else str(case.name)


def _broken(name: str, message: str, text: str = '') -> TestCase:
    case = TestCase(name)
    error = Error(message)
    error.text = text
    case.result = [error]
    return case


@functools.cache
def has_gpu() -> bool:
    """Whether torch sees a GPU.

    Raises:
        SeriesError: torch is not installed.
    """
    code = 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else 3)'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, check=False)
    if done.returncode not in (0, 3):
        raise SeriesError(
            'torch cannot be imported; install this project with its `test` extra.',
            *done.stderr.decode(errors='replace').splitlines()[-1:],
        )
    return done.returncode == 0


def run(jobs: Sequence[Job], on_job: Callable[[str], None] = lambda name: None) -> list[Result]:
    """Run jobs, one a CPU core at a time (on a GPU one at all); results in the jobs' order.

    Ends every process that it started when it is interrupted.
    """
    running: set[subprocess.Popen[bytes]] = set()
    pool = ThreadPoolExecutor(1 if has_gpu() else os.cpu_count())
    try:
        futures = {pool.submit(_run, job, running): job for job in jobs}
        for future in as_completed(futures):
            on_job(future.result().name)
        return [future.result() for future in futures]
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running):
            _kill(process)
        raise
    finally:
        pool.shutdown()


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _run(job: Job, running: set[subprocess.Popen[bytes]]) -> Result:
    start = time.monotonic()
    with TemporaryDirectory(prefix='series-') as folder, socket.socket() as port:
        port.bind(('127.0.0.1', 0))
        env = os.environ | {
            'PYTHONPATH': os.pathsep.join(map(str, job.python_path)),
            'MASTER_ADDR': '127.0.0.1',
            'MASTER_PORT': str(port.getsockname()[1]),
        }
        port.close()
        if not has_gpu():
            env |= {'TRITON_INTERPRET': '1', 'OMP_NUM_THREADS': '1'}
        report = Path(folder) / 'junit.xml'
        args = [*job.args, f'--junit-xml={report}'] if job.is_pytest else list(job.args)
        # `-P`: where the current folder is this repository, its mirrors are not to be imported.
        process = subprocess.Popen(
            [sys.executable, '-P', *args],
            cwd=job.cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running.add(process)
        try:
            output, _ = process.communicate(timeout=_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            _kill(process)
            output, _ = process.communicate()
        running.discard(process)
        cases = list(_cases(report)) if report.exists() else []
    result = Result(job.name, time.monotonic() - start, cases)
    if job.is_pytest and process.returncode == 0 and not cases:
        cases.append(_broken('process', 'no test ran'))
    elif process.returncode != 0 and not result.failures:
        tail = '\n'.join(output.decode(errors='replace').splitlines()[-_TAIL_LINES:])
        cases.append(_broken('process', f'exit status {process.returncode}\n{tail}', tail))
    elif not job.is_pytest:
        cases.append(TestCase(job.name))
    return result


def _cases(report: Path) -> Iterator[TestCase]:
    document = JUnitXml.fromfile(str(report))
    for suite in [document] if isinstance(document, TestSuite) else document:
        yield from suite


def _in_tree(project: Project, folder: Path, name: str, *args: str) -> Job:
    return Job(name, args, folder, (folder, project.root / 'tests/support'))


def unit_tests(
    project: Project, folder: Path, paths: Sequence[str], name: str, plugins: Sequence[str] = ()
) -> Job:
    """The job that runs test files of a tree inside it."""
    names = ('megatron_on_cpu', *plugins, 'no:cacheprovider')
    args = ('-m', 'pytest', *(arg for plugin in names for arg in ('-p', plugin)))
    return _in_tree(project, folder, name, *args, *paths)


def imports(project: Project, folder: Path, modules: Sequence[str], name: str) -> Job:
    """The job that imports, one after the other, modules of a tree."""
    code = 'import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]'
    return _in_tree(project, folder, name, '-c', code, *modules)


def _label(number: int, patches: int, what: str) -> str:
    return f'stage{number}/{patches:04} {what}'


def at_patch(
    project: Project, series: Series, number: int, folder: Path, patches: int
) -> list[Job]:
    """The jobs for a tree with the first `patches` patches of a stage.

    Its touched modules are imported; of the unit tests of this stage and those below, the ones
    that exist so far are run.
    """
    files = {name for patch in tree.plan(series, number, patches) for name in patch.files()}
    modules = [
        name.removesuffix('.py').removesuffix('/__init__').replace('/', '.')
        for name in sorted(files)
        if name.startswith('megatron/') and name.endswith('.py') and (folder / name).exists()
    ]
    tests = [
        path
        for stage in series.stages[:number]
        for path in stage.unit_tests
        if (folder / path).exists()
    ]
    jobs = [imports(project, folder, modules, _label(number, patches, 'imports'))]
    if tests:
        plugins = [plugin for stage in series.stages[:number] for plugin in stage.plugins]
        label = _label(number, patches, 'unit tests')
        jobs.append(unit_tests(project, folder, tests, label, plugins))
    return jobs


def regression(project: Project, path: str, reference: Path, candidate: Path, name: str) -> Job:
    """The job that runs a regression of this repository on two trees."""
    trees = ('--reference', str(reference), '--candidate', str(candidate))
    return Job(name, ('-m', 'pytest', path, *trees), project.root)


def gate(
    project: Project,
    series: Series,
    number: int,
    *,
    to: Path | None = None,
    every_patch: bool = False,
    on_jobs: OnJobs = lambda count: lambda name: None,
) -> list[Result]:
    """Run the gate of a stage, in trees that the tool makes or on the checkout `to`.

    Args:
        every_patch: also after each single patch, as far as it is above the reference.

    Raises:
        SeriesError: a tree cannot be made, or `to` does not have the stage.
    """
    stage = series.stage(number)
    missing: list[Result] = []
    with ExitStack() as stack:
        at: Callable[[int | None], Path]
        if to is None:
            at = functools.cache(functools.partial(tree.make, project, series, number))
        else:
            checkout = Checkout.at(to, series)
            commits = checkout.commits(number)
            own = commits[-len(stage.patches) - 1 :]

            @functools.cache
            def at(patches: int | None) -> Path:
                if patches is None:
                    return checkout.git.path
                name = f'gate-{patches}'
                return stack.enter_context(checkout.worktree(own[patches], name)).path

        candidate = at(None)
        jobs = []
        for count in range(1, len(stage.patches)) if every_patch else ():
            jobs += at_patch(project, series, number, at(count), count)
        jobs += at_patch(project, series, number, candidate, len(stage.patches))
        for path in stage.unit_tests:
            if not (candidate / path).exists():
                missing.append(Result(path, 0, [_broken('file', 'is not in the patched tree')]))
        results = missing + run(jobs, on_jobs(len(jobs)))
        first = stage.reference_patches + 1 if every_patch else len(stage.patches)
        for path in stage.regression:
            reference = at(stage.reference_patches)
            for count in range(first, len(stage.patches) + 1):
                tested = candidate if count == len(stage.patches) else at(count)
                job = regression(project, path, reference, tested, _label(number, count, path))
                # One by one: a regression runs engines of its own, side by side.
                results += run([job], on_jobs(1))
        if to is not None:
            below = stack.enter_context(checkout.worktree(commits[0], 'before')).path
            results += upstream(project, series, below, candidate, on_jobs)
    return results


def upstream(
    project: Project, series: Series, before: Path, after: Path, on_jobs: OnJobs
) -> list[Result]:
    """Upstream's own tests, each file in its process, before and after the series.

    Fails where a test that passed before does not pass after; a test that failed before and
    still does is counted as skipped.
    """
    files = [
        str(path.relative_to(before))
        for folder in series.upstream_tests
        for path in sorted((before / folder).rglob('test_*.py'))
    ]
    jobs = [unit_tests(project, tree_, [path], path) for tree_ in (before, after) for path in files]
    if not jobs:
        return []
    results = run(jobs, on_jobs(len(jobs)))
    old = _merged('upstream tests, before', results[: len(files)], informative=True)
    new = _merged('upstream tests, after', results[len(files) :])
    passed = {case_id(case) for case in old.cases if case.is_passed}
    for case in new.failures:
        if case_id(case) not in passed:
            case.result = [Skipped('failed before the series, too')]
    gone = passed - {case_id(case) for case in new.cases}
    new.cases += [_broken(name, 'passed before the series, is gone after') for name in sorted(gone)]
    return [old, new]


def _merged(name: str, results: list[Result], *, informative: bool = False) -> Result:
    cases = [case for result in results for case in result.cases]
    return Result(name, sum(result.seconds for result in results), cases, informative)


def write_junit(path: Path, results: Sequence[Result]) -> None:
    """Write the results that count as one JUnit XML file, a suite each."""
    document = JUnitXml('series')
    for result in results:
        if not result.informative:
            suite = TestSuite(result.name)
            suite.add_testcases(result.cases)
            suite.time = result.seconds
            document.add_testsuite(suite)
    document.update_statistics()  # type: ignore[no-untyped-call]
    path.parent.mkdir(parents=True, exist_ok=True)
    document.write(str(path), pretty=True)
