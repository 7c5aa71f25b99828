"""A Git checkout of Megatron-LM that the user names: what of the series it has, and applying."""

from __future__ import annotations

import ast
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import filelock

from series import tree
from series.git import Git, GitError
from series.model import Patch, Series, SeriesError

_PACKAGE_INFO = 'megatron/core/package_info.py'
# The series lies near the top of a branch; older history is not searched.
_DEPTH = 2000
_SAME_FILES_DEPTH = 50
_IN_PROGRESS = {
    'rebase-apply': '`git am` or a rebase',
    'rebase-merge': 'a rebase',
    'MERGE_HEAD': 'a merge',
    'CHERRY_PICK_HEAD': 'a cherry-pick',
    'REVERT_HEAD': 'a revert',
    'BISECT_LOG': 'a bisection',
}


@dataclass(frozen=True)
class Checkout:
    """A checkout of the series' branch."""

    git: Git
    series: Series

    @classmethod
    def at(cls, path: Path, series: Series) -> Checkout:
        """The checkout at `path`.

        Raises:
            SeriesError: it is no Git checkout, not Megatron-LM, or of another version.
        """
        if not path.is_dir():
            raise SeriesError(
                f'{path} is not a folder; without --to, a tree is made under .series/trees.'
            )
        try:
            git = Git(
                Path(Git(path, alone=False).text('rev-parse', '--show-toplevel')), alone=False
            )
        except GitError as error:
            raise SeriesError(f'{path} is not a Git checkout.', *error.details) from error
        try:
            source = git.run('show', f'HEAD:{_PACKAGE_INFO}').decode()
        except GitError as error:
            raise SeriesError(f'{path} is not Megatron-LM: no {_PACKAGE_INFO} in HEAD.') from error
        numbers = {
            node.targets[0].id: str(node.value.value)
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        found = f'{numbers.get("MAJOR")}.{numbers.get("MINOR")}'
        if found != series.release:
            raise SeriesError(
                f'{path} is Megatron Core {found}, but {series.branch} is for {series.release};'
                f' check out {series.branch} there.'
            )
        return cls(git, series)

    def applied(self) -> dict[Patch, str]:
        """Which patches of the series HEAD has, each with its commit.

        A commit counts by its subject, also when a pull request's number was added or when a
        backport wrapped it, or by its patch id; one with a stage's title is the stage, squashed.
        Reverted commits do not count.
        """
        patches = tree.plan(self.series, len(self.series.stages))
        by_subject = {_title(s.title): self.series.patches(s) for s in self.series.stages}
        by_subject |= {_title(patch.subject): [patch] for patch in patches}
        found: dict[Patch, str] = {}
        reverted: set[str] = set()
        log = self.git.run('log', f'--max-count={_DEPTH}', '-z', '--format=%H%n%B')
        for entry in filter(None, log.decode(errors='replace').split('\0')):
            commit, _, message = entry.partition('\n')
            if commit in reverted:
                continue
            reverted.update(re.findall(r'^This reverts commit ([0-9a-f]{40})', message, re.M))
            for patch in by_subject.get(_title(message.partition('\n')[0]), []):
                found.setdefault(patch, commit)
        for patch, commit in self._same_diff([p for p in patches if p not in found]).items():
            if commit not in reverted:
                found[patch] = commit
        return {patch: found[patch] for patch in patches if patch in found}

    def _same_diff(self, patches: list[Patch]) -> dict[Patch, str]:
        ids = {self._patch_ids(patch.path.read_bytes()).popitem()[0]: patch for patch in patches}
        if not ids:
            return {}
        files = {name for patch in patches for name in patch.files()}
        limit = f'--max-count={_SAME_FILES_DEPTH}'
        log = self.git.run('log', '-p', '--full-diff', '--no-merges', limit, '--', *sorted(files))
        return {ids[key]: commit for key, commit in self._patch_ids(log).items() if key in ids}

    def _patch_ids(self, diffs: bytes) -> dict[str, str]:
        """Patch id to commit, of a log; the newest commit where two do the same."""
        lines = self.git.run('patch-id', '--stable', stdin=diffs).decode().splitlines()
        return dict(line.split(maxsplit=1) for line in reversed(lines))

    def commits(self, number: int) -> list[str]:
        """The commit below the series, then those of the patches up to stage `number`.

        Raises:
            SeriesError: not all of them are applied.
        """
        applied = self.applied()
        patches = tree.plan(self.series, number)
        if lack := [f'not there: {patch.name}' for patch in patches if patch not in applied]:
            raise SeriesError(
                f'{self.git.path} does not have stage {number}; run'
                f' `series apply {self.series.branch} --stage {number} --to {self.git.path}` first.',
                *lack,
            )
        commits = [applied[patch] for patch in patches]
        return [self.git.text('rev-parse', f'{commits[0]}^'), *commits]

    @contextmanager
    def worktree(self, commit: str, name: str) -> Iterator[Git]:
        """A detached work tree at `commit`, kept inside the checkout's git folder meanwhile."""
        place = Path(self.git.text('rev-parse', '--absolute-git-dir')) / 'series' / name
        place.parent.mkdir(exist_ok=True)
        with filelock.FileLock(place.with_suffix('.lock')):
            self._remove(place)
            place.mkdir(exist_ok=True)
            # A new name each time: the git of a killed run may live on and write to the old one.
            folder = Path(mkdtemp(dir=place))
            try:
                self.git.run('worktree', 'add', '--quiet', '--detach', folder, commit)
                yield Git(folder, alone=False)
            finally:
                self._remove(place)

    def _remove(self, place: Path) -> None:
        for folder in place.glob('*'):
            # Git locks a work tree until it has filled it.
            self.git.ok('worktree', 'unlock', folder)
        shutil.rmtree(place, ignore_errors=True)
        self.git.run('worktree', 'prune')

    def apply(self, number: int, on_patch: tree.OnPatch) -> None:
        """Commit the patches of stage `number` on HEAD, all or none.

        Raises:
            SeriesError: the checkout is not ready for it, or a patch does not apply.
        """
        stage = self.series.stage(number)
        self._refuse_unready()
        self._refuse_applied(number)
        with self.worktree('HEAD', 'apply') as scratch:
            for patch in self.series.patches(stage):
                tree.am(scratch, patch, str(self.git.path), on_patch, three_way=True)
            done = scratch.text('rev-parse', 'HEAD')
            try:
                with _uninterrupted():
                    self.git.run('merge', '--quiet', '--ff-only', done)
            except GitError as error:
                raise SeriesError(
                    f'{self.git.path} cannot take the patched files.', *error.details
                ) from error

    def _refuse_unready(self) -> None:
        path = self.git.path
        for name, what in _IN_PROGRESS.items():
            if (path / self.git.text('rev-parse', '--git-path', name)).exists():
                raise SeriesError(f'{what.capitalize()} is in progress in {path}; end it first.')
        if changes := self.git.lines('status', '--porcelain', '--untracked-files=no'):
            raise SeriesError(f'{path} has uncommitted changes; commit or stash them.', *changes)
        if not self.git.ok('-c', 'user.useConfigOnly=true', 'var', 'GIT_COMMITTER_IDENT'):
            raise SeriesError(
                f'Git does not know who commits in {path};'
                ' set user.name and user.email with `git config`.'
            )

    def _refuse_applied(self, number: int) -> None:
        applied = self.applied()
        for stage in self.series.stages[:number]:
            own = self.series.patches(stage)
            have = [f'{applied[p][:10]} {p.name}' for p in own if p in applied]
            lack = [f'not there: {p.name}' for p in own if p not in applied]
            if have and lack:
                raise SeriesError(
                    f'Stage {stage.number} is already applied in part to {self.git.path};'
                    ' take those commits off, then apply it as a whole.',
                    *have,
                    *lack,
                )
            if stage.number < number and lack:
                raise SeriesError(
                    f'Stage {number} needs stage {stage.number}, which {self.git.path} does not'
                    f' have; apply stage {stage.number} first.',
                    *lack,
                )
            if stage.number == number and have:
                raise SeriesError(f'Stage {number} is already applied to {self.git.path}.', *have)


def _title(subject: str) -> str:
    """A commit's own subject: "cp: `Title (12)` into `branch` (#34)" is "Title"."""
    if match := re.match(r'cp: `(.*)` into ', subject):
        subject = match[1]
    return re.sub(r'\s*\(#?\d+\)\s*$', '', subject)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold off Ctrl-C, also from the git that runs meanwhile: it must end what it began."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
