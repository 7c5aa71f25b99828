"""Trees that the tool makes: the same every time, all or nothing, never over somebody's edits."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from series import base, tree
from series.git import Git
from series.model import Project, Series, SeriesError
from synthetic import BRANCH, Ran, changed, die_at_patch


def break_patch(series: Series, stage: int, number: int, old: str, new: str) -> None:
    """Change the text of a patch file."""
    path = series.patches(series.stage(stage))[number].path
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_commit_a_patch_with_authors_and_messages(
    run: Callable[..., Ran], series: Series
) -> None:
    ran = run('apply', BRANCH, '--stage', 2)
    assert ran.status == 0
    git = Git(Path(ran.out.split()[-1]))
    log = git.lines('log', '--reverse', '--format=%an|%ae|%aI|%s', 'base..')
    who = 'Ada Möbius|ada@example.org|2026-03-04T05:06:07+01:00|'
    subjects = ['Add the cache', '[Inference] Turn line 10', 'feat(core): Turn line 20']
    assert log == [who + subject for subject in subjects]
    body = 'Because it is needed.\n\nSigned-off-by: Ada Möbius <ada@example.org>'
    assert git.text('log', '-1', '--format=%b').strip() == body
    assert (git.path / 'megatron/core/engine.py').read_text() == changed(20)
    assert git.text('show', 'base:megatron/core/package_info.py').startswith('MAJOR = 9')
    assert [patch.subject for patch in tree.plan(series, 2)] == subjects


def test_same_commits_whatever_the_users_configuration(
    project: Project, series: Series, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = Git(tree.make(project, series, 2)).text('rev-parse', 'HEAD')
    home = tmp_path / 'home'
    home.mkdir()
    (home / 'ignored').write_text('*.py\n')
    (home / '.gitconfig').write_text(
        '[user]\nname = Else\nemail = else@example.org\n[am]\nthreeWay = true\n'
        f'[core]\nexcludesFile = {home}/ignored\nautocrlf = true\n[commit]\ngpgSign = true\n'
        '[apply]\nwhitespace = fix\n[diff]\nnoprefix = true\n'
    )
    monkeypatch.setenv('GIT_DIR', str(tmp_path))
    monkeypatch.setenv('GIT_AUTHOR_NAME', 'Else')
    again = tree.make(project, series, 2, fresh=True)
    assert Git(again).text('rev-parse', 'HEAD') == first


def test_tree_is_used_again_until_a_patch_changes(project: Project, series: Series) -> None:
    path = tree.make(project, series, 1)
    made = path.stat().st_ino
    assert tree.make(project, series, 1).stat().st_ino == made
    break_patch(series, 1, 1, '+LINE_10 = -10', '+LINE_10 = -11')
    assert tree.make(project, series, 1).stat().st_ino != made
    assert 'LINE_10 = -11' in (path / 'megatron/core/engine.py').read_text()


def test_parts_of_a_stage(project: Project, series: Series) -> None:
    subjects = Git(tree.make(project, series, 1, 1)).lines('log', '--format=%s')
    assert subjects == ['Add the cache', 'megatron-core 9.1.2']
    assert Git(tree.make(project, series, 0)).lines('log', '--format=%s') == subjects[1:]
    assert tree.make(project, series, 1, 2) == tree.make(project, series, 1)


def test_edited_tree_is_left_alone(
    project: Project, series: Series, refused: Callable[..., str]
) -> None:
    path = tree.make(project, series, 1)
    (path / 'megatron/core/kv.py').write_text('mine')
    assert f'{path} is not as `series` made it' in refused('apply', BRANCH, '--stage', 1)
    assert (path / 'megatron/core/kv.py').read_text() == 'mine'


def test_patch_that_does_not_apply(
    project: Project, series: Series, refused: Callable[..., str]
) -> None:
    before = tree.make(project, series, 1)
    head = Git(before).text('rev-parse', 'HEAD')
    break_patch(series, 1, 1, '-LINE_10 = 10', '-LINE_10 = 99')
    said = refused('apply', BRANCH, '--stage', 1)
    name = series.patches(series.stage(1))[1].name
    assert f'Error: stage1/{name} does not apply to megatron-core 9.1.2.' in said
    assert 'megatron/core/engine.py: hunk 1, at line 8, does not apply' in said
    assert Git(before).text('rev-parse', 'HEAD') == head
    assert {path.name for path in project.trees.iterdir()} == {'.lock', f'{BRANCH}-stage1'}


@pytest.mark.parametrize(
    ('old', 'new', 'said'),
    [
        ('megatron/core/engine.py', 'megatron/core/nothing.py', 'No such file'),
        ('@@ -8,7 +8,7 @@', '@@ -8,9 +8,9 @@', 'corrupt patch'),
    ],
)
def test_patch_that_cannot_even_be_tried(
    project: Project, series: Series, old: str, new: str, said: str
) -> None:
    break_patch(series, 1, 1, old, new)
    with pytest.raises(SeriesError, match='stage1/0002-.* does not apply') as error:
        tree.make(project, series, 1)
    assert any(said in detail for detail in error.value.details)


def test_fuzz_is_no_way_to_apply(project: Project, series: Series) -> None:
    break_patch(series, 1, 1, ' LINE_8 = 8', ' LINE_8 = 0')
    with pytest.raises(SeriesError, match='does not apply'):
        tree.make(project, series, 1)


def test_killed_run_leaves_nothing_that_stays(project: Project, series: Series) -> None:
    die_at_patch(project, '0002', 'tree.make(project, series, 2, on_patch=die)')
    assert list(project.trees.glob('.scratch-*'))
    assert not (project.trees / f'{BRANCH}-stage2').exists()
    tree.make(project, series, 2)
    assert not list(project.trees.glob('.scratch-*'))


def test_file_where_a_folder_should_be(project: Project, refused: Callable[..., str]) -> None:
    project.work.write_text('in the way')
    assert f'{project.work}' in refused('apply', BRANCH, '--stage', 1)
    assert project.work.read_text() == 'in the way'


@pytest.mark.parametrize('cached', [False, True])
def test_full_disk(project: Project, series: Series, cached: bool) -> None:
    def no_large_files() -> None:
        # The kernel then refuses to write past this size, much as on a full disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))

    if cached:
        base.fetch(project, series)
    command = [sys.executable, '-c', 'from series.cli import main; main()']
    limited = subprocess.run(
        [*command, '--root', project.root, 'apply', BRANCH, '--stage', '1'],
        env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
        preexec_fn=no_large_files,
        capture_output=True,
        text=True,
        check=False,
    )
    assert limited.returncode == 1
    assert 'Error: ' in limited.stderr
    assert 'File too large' in limited.stderr
    assert 'Traceback' not in limited.stderr
    assert not (project.trees / f'{BRANCH}-stage1').exists()
    assert not list(project.trees.glob('.scratch-*'))
    assert (base.cached(project, series) is not None) == cached


def test_git_is_not_installed(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv('PATH', str(tmp_path))
    assert 'git is not installed' in refused('apply', BRANCH, '--stage', 1)


def test_listed_patch_is_missing(series: Series, refused: Callable[..., str]) -> None:
    path = series.patches(series.stage(1))[0].path
    shutil.move(path, path.with_name('elsewhere'))
    assert f'lists {path.name}, which is not there' in refused('apply', BRANCH, '--stage', 1)
