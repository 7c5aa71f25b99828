"""The edit round: open, change, export; patches, series.toml and mirrors stay in step."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from series import edit
from series.git import Git
from series.model import Project, Series, SeriesError
from synthetic import BRANCH, HEADER, Ran, changed, commit, die_at_patch, message


def snapshot(project: Project) -> dict[str, bytes]:
    """Every file of the project outside .git and .series."""
    return {
        str(path.relative_to(project.root)): path.read_bytes()
        for path in project.root.rglob('*')
        if path.is_file() and not {'.git', '.series'} & set(path.relative_to(project.root).parts)
    }


@pytest.fixture
def tree(project: Project, series: Series) -> Git:
    """The opened edit tree."""
    git = Git(edit.open_tree(project, series))
    git.run('config', 'user.name', 'Eve')
    return git


def test_export_after_open_changes_nothing(run: Callable[..., Ran], project: Project) -> None:
    before = snapshot(project)
    assert run('open', BRANCH).status == 0
    ran = run('export', BRANCH)
    assert (ran.status, ran.out) == (0, 'Nothing has changed.\n')
    assert snapshot(project) == before


def test_mirrors_are_the_files_that_the_series_adds(project: Project) -> None:
    kv = (project.root / 'megatron/core/kv.py').read_text()
    assert kv == f'{HEADER}"""Sizes."""\n\nSIZE = 2\n'
    names = {name for name in snapshot(project) if name.startswith(('megatron', 'tests/unit'))}
    assert names == {'megatron/core/kv.py', 'tests/unit_tests/test_kv.py'}


def test_changing_a_patch_below_moves_the_stages(
    project: Project, tree: Git, run: Callable[..., Ran]
) -> None:
    # A plain `git rebase -i`: the first patch gets a new subject, `stage1` follows by itself.
    editor = 'sed -i "1s/pick/reword/"'
    message_editor = 'sed -i "1s/.*/Add a cache/"'
    subprocess.run(
        ['git', 'rebase', '-i', 'base'],
        cwd=tree.path,
        env=dict(
            PATH='/usr/bin:/bin',
            GIT_SEQUENCE_EDITOR=editor,
            GIT_EDITOR=message_editor,
            GIT_COMMITTER_NAME='Eve',
            GIT_COMMITTER_EMAIL='eve@example.org',
        ),
        check=True,
        capture_output=True,
    )
    ran = run('export', BRANCH)
    assert ran.status == 0, ran.err
    folder = f'patches/{BRANCH}/stage1'
    assert f'deleted {folder}/0001-Add-the-cache.patch' in ran.out
    assert f'wrote {folder}/0001-Add-a-cache.patch' in ran.out
    text = (project.root / f'patches/{BRANCH}/series.toml').read_text()
    assert '"0001-Add-a-cache.patch",\n' in text
    assert 'number = 1  # the first\n' in text
    assert len(ran.out.splitlines()) == 3


def test_dropped_files_lose_their_mirrors(project: Project, tree: Git, series: Series) -> None:
    tree.run('rm', '-q', 'tests/unit_tests/test_kv.py')
    new = {'docs/user-guide/kv.md': 'How.\n', 'tests/unit_tests/test_new.py': f'{HEADER}'}
    commit(tree, message('Test anew'), new)
    edit.export(project, series)
    assert not (project.root / 'tests/unit_tests/test_kv.py').exists()
    assert (project.root / 'docs/user-guide/kv.md').read_text() == 'How.\n'
    assert (project.root / 'tests/support/megatron_on_cpu.py').exists()
    assert [patch.name[:4] for patch in series.patches(project.series().stage(2))] == [
        '0001',
        '0002',
    ]


def test_file_that_is_no_mirror_is_not_overwritten(
    project: Project, tree: Git, refused: Callable[..., str]
) -> None:
    commit(tree, message('Take a name'), {'tests/support/megatron_on_cpu.py': 'theirs\n'})
    before = snapshot(project)
    assert 'would overwrite a file of this repository' in refused('export', BRANCH)
    assert snapshot(project) == before


def test_moved_upstream_file_is_no_mirror(project: Project, tree: Git, series: Series) -> None:
    tree.run('mv', 'megatron/core/engine.py', 'megatron/core/motor.py')
    commit(tree, message('Call the engine motor'), {})
    edit.export(project, series)
    assert not (project.root / 'megatron/core/motor.py').exists()
    patch = series.patches(project.series().stage(2))[1].path.read_text()
    assert 'rename to megatron/core/motor.py' in patch
    assert 'LINE_1 = 1\n' not in patch


def test_mirrors_are_those_of_the_newest_base(project: Project, series: Series) -> None:
    older = project.root / 'patches/core_r9.0.0'
    text = series.file.read_text().replace(BRANCH, older.name).replace('9.1.2', '9.0.2')
    (older / 'stage1').mkdir(parents=True)
    (older / 'series.toml').write_text(text)
    assert [s.branch for s in project.all_series()] == [BRANCH, older.name]
    assert project.series() == series


@pytest.mark.parametrize('change', ['edited', 'new'])
def test_uncommitted_changes(
    project: Project, tree: Git, refused: Callable[..., str], change: str
) -> None:
    before = snapshot(project)
    name = {'edited': 'megatron/core/kv.py', 'new': 'megatron/core/new.py'}[change]
    (tree.path / name).write_text('changed')
    for verb in ('export', 'open'):
        assert name in refused(verb, BRANCH)
    assert snapshot(project) == before
    assert (tree.path / name).read_text() == 'changed'


def test_open_keeps_commits_that_were_not_exported(
    tree: Git, refused: Callable[..., str], run: Callable[..., Ran]
) -> None:
    new = commit(tree, message('Turn line 30'), {'megatron/core/engine.py': changed(30)})
    said = refused('open', BRANCH)
    assert 'holds changes that were not exported' in said
    assert 'stage2: ' in said
    assert 'Turn line 30' in said
    assert tree.text('rev-parse', 'HEAD') == new
    assert run('open', BRANCH, '--force').status == 0
    assert tree.text('log', '-1', '--format=%s') == 'feat(core): Turn line 20'


def test_open_again_after_export(tree: Git, run: Callable[..., Ran]) -> None:
    commit(tree, message('Turn line 30'), {'megatron/core/engine.py': changed(30)})
    assert run('export', BRANCH).status == 0
    assert run('open', BRANCH).status == 0
    assert tree.text('log', '-1', '--format=%s') == 'Turn line 30'


def test_killed_open_leaves_the_old_tree(tree: Git, project: Project) -> None:
    head = tree.text('rev-parse', 'HEAD')
    die_at_patch(project, '0002', 'edit.open_tree(project, series, on_patch=die)')
    assert tree.text('rev-parse', 'HEAD') == head
    edit.open_tree(project, project.series())
    assert not list(tree.path.parent.glob('.scratch-*'))


def test_stages_that_do_not_stack(tree: Git, refused: Callable[..., str]) -> None:
    tree.run('switch', '-q', 'stage1')
    commit(tree, message('Turn line 30'), {'megatron/core/kv.py': f'{HEADER}'})
    said = refused('export', BRANCH)
    assert 'stage2 does not build on stage1' in said
    assert 'git rebase stage1 stage2' in said


def test_merge_in_a_stage(tree: Git, refused: Callable[..., str]) -> None:
    tree.run('switch', '-qc', 'side', 'base')
    commit(tree, 'Side', {'side.py': ''})
    tree.run('switch', '-q', 'stage2')
    tree.run('merge', '-q', '--no-edit', 'side')
    assert 'stage2 holds a merge' in refused('export', BRANCH)


def test_empty_commit_in_a_stage(tree: Git, refused: Callable[..., str]) -> None:
    tree.run('commit', '-q', '--allow-empty', '-m', 'Nothing')
    assert 'stage2 holds an empty commit' in refused('export', BRANCH)


def test_commits_on_no_stage(tree: Git, refused: Callable[..., str]) -> None:
    tree.run('switch', '-q', '--detach')
    commit(tree, message('Turn line 30'), {'megatron/core/engine.py': changed(30)})
    assert 'holds commits that no stage branch holds' in refused('export', BRANCH)


def test_export_with_nothing_open(refused: Callable[..., str]) -> None:
    assert 'Nothing is open; run `series open' in refused('export', BRANCH)


def test_new_stage_needs_its_branch(project: Project, tree: Git, series: Series) -> None:
    text = '\n[[stage]]\nnumber = 3\ntitle = "More"\npatches = []\n'
    series.file.write_text(series.file.read_text() + text)
    with pytest.raises(SeriesError, match='has no branch stage3; make it on top of stage2'):
        edit.export(project, project.series())
    tree.run('switch', '-qc', 'stage3')
    commit(tree, message('Turn line 30'), {'megatron/core/engine.py': changed(30)})
    edit.export(project, project.series())
    assert project.series().stage(3).patches == ('0001-Turn-line-30.patch',)


def test_full_disk_on_export(
    project: Project, tree: Git, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tree, message('Turn line 30'), {'megatron/core/new.py': HEADER})
    before = snapshot(project)
    write_bytes = Path.write_bytes

    def no_space(path: Path, data: bytes) -> int:
        if path.name == '.new.py.new':
            raise OSError(28, 'No space left on device', str(path))
        return write_bytes(path, data)

    monkeypatch.setattr(Path, 'write_bytes', no_space)
    assert 'No space left on device' in refused('export', BRANCH)
    assert snapshot(project) == before
