"""The gate: what it runs where, what it catches, what it reports."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from junitparser import JUnitXml

from series import edit, gates, tree
from series.git import Git
from series.model import Project, Series
from synthetic import BRANCH, ENGINE, UNIT_TEST, Ran, commit, message


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare each test the import of torch."""
    monkeypatch.setattr(gates, 'has_gpu', lambda: False)


def change_series(project: Project, series: Series, stage: str, files: dict[str, str]) -> None:
    """Add a commit with these files to a stage."""
    git = Git(edit.open_tree(project, series))
    git.run('switch', '-q', stage)
    commit(git, message('Change what it is'), files)
    if stage == 'stage1':
        git.run('rebase', '-q', 'stage1', 'stage2')
    edit.export(project, series)


def rows(ran: Ran) -> dict[str, list[str]]:
    """The rows of the printed table: name to the other cells."""
    cells = [[c.strip() for c in line.split('│')[1:-1]] for line in ran.out.splitlines()]
    return {row[0]: row[1:4] for row in cells if len(row) == 5}


def test_verify(run: Callable[..., Ran], tmp_path: Path) -> None:
    ran = run('verify', '--junit', tmp_path / 'out/junit.xml')
    assert ran.status == 0, ran.err
    assert rows(ran) == {
        'stage1/0001 Add the cache': ['applied', '', ''],
        'stage1/0002 [Inference] Turn line 10': ['applied', '', ''],
        'stage1/0002 imports': ['1', '0', '0'],
        'stage1/0002 unit tests': ['2', '0', '0'],
        'stage1/0002 tests/regression/test_stage1.py': ['1', '0', '0'],
        'stage2/0001 feat(core): Turn line 20': ['applied', '', ''],
        'stage2/0001 imports': ['1', '0', '0'],
        'stage2/0001 unit tests': ['2', '0', '0'],
    }
    assert 'All gates passed.' in ran.out
    junit = JUnitXml.fromfile(str(tmp_path / 'out/junit.xml'))
    assert (junit.tests, junit.failures, junit.errors) == (7, 0, 0)
    assert len(list(junit)) == 5


def test_failing_and_skipped_unit_tests(
    run: Callable[..., Ran], project: Project, series: Series, tmp_path: Path
) -> None:
    bad = f'{UNIT_TEST}\n\ndef test_bad():\n    assert kv.SIZE > 10, "too small"\n'
    bad += '\n\ndef test_gpu():\n    import pytest; pytest.skip("needs a GPU")\n'
    change_series(project, series, 'stage1', {'tests/unit_tests/test_kv.py': bad})
    ran = run('gate', BRANCH, '--stage', 1, '--junit', tmp_path / 'junit.xml')
    assert ran.status == 1
    assert rows(ran)['stage1/0003 unit tests'] == ['2', '1', '1']
    assert (
        'Failed: stage1/0003 unit tests: tests.unit_tests.test_kv::test_bad: AssertionError: too small'
        in ran.err
    )
    assert 'skipped 1: needs a GPU' in ran.out
    assert 'All gates passed' not in ran.out
    assert JUnitXml.fromfile(str(tmp_path / 'junit.xml')).failures == 1


def test_a_stage_brings_plugins_for_itself_and_not_for_those_below(
    project: Project, series: Series
) -> None:
    text = series.file.read_text()
    series.file.write_text(text.replace('number = 2\n', 'number = 2\nplugins = ["on_it"]\n'))
    series = project.series()
    folder = tree.make(project, series, 2)
    ran = [gates.at_patch(project, series, number, folder, 1)[-1].args for number in (1, 2)]
    assert ['on_it' in args for args in ran] == [False, True]


def test_regression_that_fails(run: Callable[..., Ran], project: Project, series: Series) -> None:
    # The unit tests do not see that the engine is as it was; the regression does.
    change_series(project, series, 'stage1', {'megatron/core/engine.py': ENGINE})
    ran = run('gate', BRANCH, '--stage', 1)
    assert ran.status == 1
    assert rows(ran)['stage1/0003 unit tests'] == ['2', '0', '0']
    assert 'Failed: stage1/0003 tests/regression/test_stage1.py: test_same: ' in ran.err


def test_every_patch_finds_a_break_in_the_middle(
    run: Callable[..., Ran], project: Project, series: Series
) -> None:
    git = Git(edit.open_tree(project, series))
    git.run('switch', '-q', 'stage1')
    engine = (git.path / 'megatron/core/engine.py').read_text()
    commit(git, message('Break it'), {'megatron/core/engine.py': f'{engine}import nothing\n'})
    commit(git, message('Mend it'), {'megatron/core/engine.py': engine})
    git.run('rebase', '-q', 'stage1', 'stage2')
    edit.export(project, series)
    assert run('gate', BRANCH, '--stage', 1).status == 0
    ran = run('gate', BRANCH, '--stage', 1, '--every-patch')
    assert ran.status == 1
    assert rows(ran)['stage1/0002 imports'] == ['1', '0', '0']
    assert rows(ran)['stage1/0003 imports'] == ['0', '1', '0']
    assert "ModuleNotFoundError: No module named 'nothing'" in ran.err
    assert rows(ran)['stage1/0004 imports'] == ['1', '0', '0']
    # The reference is the first patch.
    assert [name for name in rows(ran) if 'regression' in name] == [
        f'stage1/000{n} tests/regression/test_stage1.py' for n in (2, 3, 4)
    ]


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('import os\nos._exit(7)\n', 'exit status 7'),
        ('', 'exit status 5'),
        ('import nothing\n', 'collection failure'),
    ],
)
def test_unit_tests_that_do_not_run(project: Project, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / 'test_it.py').write_text(text)
    (result,) = gates.run([gates.unit_tests(project, tmp_path, ['test_it.py'], 'it')])
    assert not result.ok
    assert said in result.problems()[0]


def test_missing_unit_test(run: Callable[..., Ran], project: Project, series: Series) -> None:
    text = series.file.read_text().replace('test_kv.py"]', 'test_kv.py", "tests/test_none.py"]')
    series.file.write_text(text)
    ran = run('gate', BRANCH, '--stage', 1)
    assert ran.status == 1
    assert 'tests/test_none.py: file: is not in the patched tree' in ran.err
    del project


def test_checkout_with_upstream_tests(run: Callable[..., Ran], checkout: Git) -> None:
    for stage in (1, 2):
        assert run('apply', BRANCH, '--stage', stage, '--to', checkout.path).status == 0
    ran = run('gate', BRANCH, '--stage', 2, '--to', checkout.path, '--every-patch')
    assert ran.status == 0, ran.err
    table = rows(ran)
    # What fails without the series is not the series' fault.
    assert table['upstream tests, before'] == ['1', '1', '0']
    assert table['upstream tests, after'] == ['1', '0', '1']
    assert 'skipped 1: failed before the series, too' in ran.out
    assert len(checkout.lines('worktree', 'list')) == 1


def test_checkout_where_an_upstream_test_breaks(
    run: Callable[..., Ran], checkout: Git, project: Project, series: Series
) -> None:
    engine = ENGINE.replace('LINE_1 = 1\n', 'LINE_1 = 2\n')
    change_series(project, series, 'stage2', {'megatron/core/engine.py': engine})
    for stage in (1, 2):
        assert run('apply', BRANCH, '--stage', stage, '--to', checkout.path).status == 0
    ran = run('gate', BRANCH, '--stage', 2, '--to', checkout.path)
    assert ran.status == 1
    assert 'tests.unit_tests.old.test_old::test_first' in ran.err
    assert 'test_broken' not in ran.err


def test_upstream_test_that_vanishes(
    project: Project, series: Series, checkout: Git, tmp_path: Path
) -> None:
    after = tmp_path / 'after'
    Git(tmp_path).run('clone', '-q', checkout.path, after)
    test = after / 'tests/unit_tests/old/test_old.py'
    test.write_text('def test_other(): pass\n')
    _, new = gates.upstream(project, series, checkout.path, after, lambda n: lambda name: None)
    assert new.problems() == [
        'upstream tests, after: tests.unit_tests.old.test_old::test_first:'
        ' passed before the series, is gone after'
    ]


def test_gate_on_a_checkout_without_the_stage(
    refused: Callable[..., str], checkout: Git, run: Callable[..., Ran]
) -> None:
    assert run('apply', BRANCH, '--stage', 1, '--to', checkout.path).status == 0
    said = refused('gate', BRANCH, '--stage', 2, '--to', checkout.path)
    assert f'{checkout.path} does not have stage 2; run `series apply' in said
    assert 'not there: 0001-feat-core-Turn-line-20.patch' in said


def test_interrupted_gate_ends_its_processes(project: Project, tmp_path: Path) -> None:
    pid_file = tmp_path / 'pid'
    (tmp_path / 'test_it.py').write_text(
        'import os, subprocess, time\n'
        'def test_it():\n'
        '    child = subprocess.Popen(["sleep", "60"])\n'
        f'    open({str(pid_file)!r}, "w").write(str(child.pid))\n'
        '    child.wait()\n'
    )

    def interrupt() -> None:
        while not pid_file.exists() or not pid_file.read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    # What is started in the background may have been told to ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            gates.run([gates.unit_tests(project, tmp_path, ['test_it.py'], 'it')])
    finally:
        signal.signal(signal.SIGINT, before)
    status = Path(f'/proc/{pid_file.read_text()}/stat')
    # Gone, or a zombie that its new parent is about to bury.
    assert not status.exists() or status.read_text().rpartition(')')[2].split()[0] == 'Z'


def test_gpu_is_what_torch_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(sys, 'executable', f'{tmp_path}/python')
    for status, expected in ((0, True), (3, False)):
        Path(sys.executable).write_text(f'#!/bin/sh\nexit {status}\n')
        Path(sys.executable).chmod(0o755)
        gates.has_gpu.cache_clear()
        assert gates.has_gpu() is expected
    gates.has_gpu.cache_clear()
