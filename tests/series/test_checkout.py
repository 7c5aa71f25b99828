"""Applying to a Git checkout that the user names: ready or refused, all or nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from series.checkout import Checkout
from series.git import Git
from series.model import Patch, Project, Series
from synthetic import BRANCH, ENGINE, Ran, changed, commit, die_at_patch


def state(git: Git) -> tuple[str, ...]:
    """All of a checkout that a refused run might have changed."""
    commands = ('rev-parse HEAD', 'status --porcelain', 'for-each-ref', 'worktree list', 'reflog')
    files = sorted(str(path) for path in git.path.rglob('*') if '.git' not in path.parts)
    return *(git.text(*command.split()) for command in commands), *files


@pytest.fixture
def unchanged(refused: Callable[..., str], checkout: Git) -> Callable[..., str]:
    """Apply to the checkout, which must be refused and change nothing; what was said."""

    def unchanged(stage: int = 1) -> str:
        before = state(checkout)
        said = refused('apply', BRANCH, '--stage', stage, '--to', checkout.path)
        assert state(checkout) == before
        return said

    return unchanged


@pytest.fixture
def applied(run: Callable[..., Ran], checkout: Git) -> Callable[[int], None]:
    """Apply a stage to the checkout, which must work."""

    def applied(stage: int) -> None:
        ran = run('apply', BRANCH, '--stage', stage, '--to', checkout.path)
        assert ran.status == 0, ran.err

    return applied


def test_stage_after_stage(applied: Callable[[int], None], checkout: Git) -> None:
    commit(checkout, 'Add a line (#13)', {'megatron/core/engine.py': f'# New.\n{ENGINE}'})
    applied(1)
    applied(2)
    log = checkout.lines('log', '-3', '--format=%an|%cn|%s')
    assert log == [
        'Ada Möbius|Rita|feat(core): Turn line 20',
        'Ada Möbius|Rita|[Inference] Turn line 10',
        'Ada Möbius|Rita|Add the cache',
    ]
    # Three-way: the line above shifts every hunk.
    assert (checkout.path / 'megatron/core/engine.py').read_text() == f'# New.\n{changed(20)}'
    assert checkout.text('symbolic-ref', '--short', 'HEAD') == BRANCH
    assert not checkout.text('status', '--porcelain')
    assert len(checkout.lines('worktree', 'list')) == 1


def test_given_a_folder_inside_the_checkout(run: Callable[..., Ran], checkout: Git) -> None:
    ran = run('apply', BRANCH, '--stage', 1, '--to', checkout.path / 'megatron')
    assert ran.status == 0
    assert ran.out.strip().endswith(str(checkout.path))


def test_users_hooks_do_not_run(applied: Callable[[int], None], checkout: Git) -> None:
    for name in ('pre-applypatch', 'commit-msg', 'post-checkout', 'post-merge'):
        hook = checkout.path / '.git/hooks' / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f'#!/bin/sh\ntouch {checkout.path}/ran\nexit 1\n')
        hook.chmod(0o755)
    applied(1)
    assert not (checkout.path / 'ran').exists()


def test_no_folder(refused: Callable[..., str], tmp_path: Path) -> None:
    said = refused('apply', BRANCH, '--stage', 1, '--to', tmp_path / 'none')
    assert f'{tmp_path}/none is not a folder' in said


def test_no_name(run: Callable[..., Ran], checkout: Git, monkeypatch: pytest.MonkeyPatch) -> None:
    head = checkout.text('rev-parse', 'HEAD')
    monkeypatch.chdir(checkout.path)
    ran = run('apply', BRANCH, '--stage', 1, '--to', '')
    assert ran.status != 0
    assert 'it is empty' in ran.err
    assert checkout.text('rev-parse', 'HEAD') == head


def test_no_git_checkout(refused: Callable[..., str], tmp_path: Path) -> None:
    said = refused('apply', BRANCH, '--stage', 1, '--to', tmp_path)
    assert f'{tmp_path} is not a Git checkout' in said


def test_not_megatron(unchanged: Callable[..., str], checkout: Git) -> None:
    checkout.run('rm', '-rq', 'megatron')
    commit(checkout, 'Remove all', {})
    assert 'is not Megatron-LM' in unchanged()


def test_wrong_version(unchanged: Callable[..., str], checkout: Git) -> None:
    commit(checkout, 'Go on', {'megatron/core/package_info.py': 'MAJOR = 9\nMINOR = 2\n'})
    said = unchanged()
    assert f'is Megatron Core 9.2, but {BRANCH} is for 9.1' in said


def test_dirty_tree(unchanged: Callable[..., str], checkout: Git) -> None:
    (checkout.path / 'setup.py').write_text('changed')
    said = unchanged()
    assert 'has uncommitted changes' in said
    assert 'setup.py' in said


def test_untracked_file_in_the_way(unchanged: Callable[..., str], checkout: Git) -> None:
    (checkout.path / 'megatron/core/kv.py').write_text('mine')
    said = unchanged()
    assert 'cannot take the patched files' in said
    assert 'megatron/core/kv.py' in said
    assert (checkout.path / 'megatron/core/kv.py').read_text() == 'mine'


def test_other_untracked_files_do_not_matter(applied: Callable[[int], None], checkout: Git) -> None:
    (checkout.path / 'notes.txt').write_text('mine')
    applied(1)
    assert (checkout.path / 'notes.txt').read_text() == 'mine'


def test_merge_in_progress(unchanged: Callable[..., str], checkout: Git) -> None:
    checkout.run('switch', '-qc', 'other')
    commit(checkout, 'Other', {'setup.py': 'other'})
    checkout.run('switch', '-q', BRANCH)
    checkout.run('merge', '--no-ff', '--no-commit', 'other')
    assert 'A merge is in progress' in unchanged()


def test_no_identity(unchanged: Callable[..., str], checkout: Git) -> None:
    checkout.run('config', '--unset', 'user.email')
    said = unchanged()
    assert 'Git does not know who commits' in said
    assert 'user.email' in said


def test_stage_2_before_stage_1(unchanged: Callable[..., str], series: Series) -> None:
    said = unchanged(2)
    assert 'Stage 2 needs stage 1' in said
    for patch in series.patches(series.stage(1)):
        assert f'not there: {patch.name}' in said


def test_applied_already(
    applied: Callable[[int], None], unchanged: Callable[..., str], checkout: Git, series: Series
) -> None:
    applied(1)
    said = unchanged()
    assert f'Stage 1 is already applied to {checkout.path}' in said
    for patch, revision in zip(series.patches(series.stage(1)), ('HEAD^', 'HEAD'), strict=True):
        assert f'{checkout.text("rev-parse", revision)[:10]} {patch.name}' in said


def test_applied_in_part(
    applied: Callable[[int], None], unchanged: Callable[..., str], checkout: Git
) -> None:
    applied(1)
    checkout.run('reset', '-q', '--hard', 'HEAD^')
    said = unchanged()
    assert 'Stage 1 is already applied in part' in said
    assert 'not there: 0002-' in said
    assert 'take those commits off' in unchanged(2)


@pytest.mark.parametrize(
    'subject',
    [
        'Add the cache (#123)',
        'cp: `Add the cache (123)` into `core_r9.1.0` (#130)',
        'Found by what it changes',
    ],
)
def test_applied_under_another_subject(
    applied: Callable[[int], None], unchanged: Callable[..., str], checkout: Git, subject: str
) -> None:
    applied(1)
    checkout.run('reset', '-q', '--hard', 'HEAD^')
    if subject.startswith('Found'):
        checkout.run('commit', '-q', '--amend', '-m', subject)
    else:
        # Found by its subject: what it changes is not the same any more.
        (checkout.path / 'megatron/core/kv.py').write_text('SIZE = 3\n')
        checkout.run('commit', '-qa', '--amend', '-m', subject)
    commit(checkout, 'Go on', {'setup.py': 'later'})
    assert 'already applied in part' in unchanged()


def test_applied_squashed(
    applied: Callable[[int], None], unchanged: Callable[..., str], checkout: Git
) -> None:
    applied(1)
    checkout.run('reset', '-q', '--soft', 'HEAD^^')
    checkout.run('commit', '-q', '-m', 'The first stage (#77)')
    assert 'Stage 1 is already applied to' in unchanged()
    applied(2)


def test_reverted_is_not_applied(applied: Callable[[int], None], checkout: Git) -> None:
    applied(1)
    checkout.run('revert', '--no-edit', 'HEAD', 'HEAD^')
    applied(1)
    assert (checkout.path / 'megatron/core/engine.py').read_text() == changed(10)


def test_reverted_revert_is_applied(
    applied: Callable[[int], None], unchanged: Callable[..., str], checkout: Git
) -> None:
    applied(1)
    checkout.run('revert', '--no-edit', 'HEAD')
    checkout.run('revert', '--no-edit', 'HEAD')
    assert 'Stage 1 is already applied to' in unchanged()


def test_patch_that_does_not_apply(
    unchanged: Callable[..., str], checkout: Git, series: Series
) -> None:
    text = ENGINE.replace('LINE_9 = 9', 'LINE_9 = "taken"')
    commit(checkout, 'Take line 9', {'megatron/core/engine.py': text})
    said = unchanged()
    name = series.patches(series.stage(1))[1].name
    assert f'stage1/{name} does not apply to {checkout.path}' in said
    assert 'megatron/core/engine.py: hunk 1, at line 8, does not apply' in said


def test_killed_run_changes_nothing_and_the_next_starts_clean(
    checkout: Git, applied: Callable[[int], None], project: Project
) -> None:
    before = state(checkout)[:3]
    call = f'Checkout.at(Path({str(checkout.path)!r}), series).apply(1, die)'
    die_at_patch(project, '0002', call)
    assert state(checkout)[:3] == before
    assert len(checkout.lines('worktree', 'list')) == 2
    applied(1)
    assert len(checkout.lines('worktree', 'list')) == 1


def test_the_git_of_a_killed_run_is_still_at_work(
    checkout: Git, applied: Callable[[int], None]
) -> None:
    leftover = checkout.path / '.git/series/apply/tmpkilled'
    checkout.run('worktree', 'add', '--detach', '--lock', leftover)
    writes = f'while :; do mkdir -p {leftover}; : > {leftover}/$i; i=$((i + 1)); done'
    with subprocess.Popen(['sh', '-c', writes], stderr=subprocess.DEVNULL) as writer:
        try:
            applied(1)
        finally:
            writer.kill()
    assert len(checkout.lines('worktree', 'list')) == 1


def test_ctrl_c_changes_nothing(checkout: Git, series: Series) -> None:
    before = state(checkout)

    def interrupt(patch: Patch, seconds: float) -> None:
        del patch, seconds
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Checkout.at(checkout.path, series).apply(1, interrupt)
    assert state(checkout) == before
