"""One way to call git, with what a user's configuration could change pinned down."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from series.model import SeriesError

# Whatever these are set to in a user's configuration, patches must read and write the same bytes.
_PINNED = {
    'advice.detachedHead': 'false',
    'am.keepcr': 'false',
    'am.messageid': 'false',
    'am.threeWay': 'false',
    'apply.ignoreWhitespace': 'no',
    'apply.whitespace': 'nowarn',
    'color.ui': 'false',
    'commit.gpgSign': 'false',
    'core.hooksPath': os.devnull,
    'core.quotePath': 'false',
    'diff.algorithm': 'myers',
    'diff.context': '3',
    'diff.indentHeuristic': 'true',
    'diff.interHunkContext': '0',
    'diff.mnemonicPrefix': 'false',
    'diff.noprefix': 'false',
    'diff.relative': 'false',
    'diff.renames': 'true',
    'diff.suppressBlankEmpty': 'false',
    'gc.auto': '0',
    'mailinfo.scissors': 'false',
    'maintenance.auto': 'false',
}
# Made trees: no user configuration, and one committer, so that equal input gives equal commits.
_ALONE = {
    'GIT_CONFIG_GLOBAL': os.devnull,
    'GIT_CONFIG_NOSYSTEM': '1',
    'GIT_AUTHOR_NAME': 'series',
    'GIT_AUTHOR_EMAIL': 'series@localhost',
    'GIT_AUTHOR_DATE': '2000-01-01T00:00:00+0000',
    'GIT_COMMITTER_NAME': 'series',
    'GIT_COMMITTER_EMAIL': 'series@localhost',
    'GIT_COMMITTER_DATE': '2000-01-01T00:00:00+0000',
}
# Of the caller's GIT_* variables (a hook sets GIT_DIR, say) only identity and configuration count.
_KEPT = ('GIT_AUTHOR_', 'GIT_COMMITTER_', 'GIT_CONFIG')


class GitError(SeriesError):
    """A git command failed; `output` is what it said."""

    def __init__(self, command: str, output: str) -> None:
        super().__init__(f'git {command} failed.', *output.splitlines())
        self.output = output


@dataclass(frozen=True)
class Git:
    """The git repository, or work tree, at `path`.

    `alone` leaves out the user's configuration and fixes the identity: for trees that we make.
    """

    path: Path
    alone: bool = True

    def run(self, *args: str | Path, stdin: bytes | None = None) -> bytes:
        """Standard output of `git args`.

        Raises:
            GitError: it exited non-zero.
        """
        pinned = [arg for item in _PINNED.items() for arg in ('-c', '='.join(item))]
        kept = {k: v for k, v in os.environ.items() if k[:4] != 'GIT_' or k.startswith(_KEPT)}
        env = kept | {'LC_ALL': 'C', 'GIT_TERMINAL_PROMPT': '0'} | (_ALONE if self.alone else {})
        command = ['git', *pinned, *map(str, args)]
        if stdin is None:
            stdin = b''
        try:
            done = subprocess.run(
                command, cwd=self.path, env=env, input=stdin, capture_output=True, check=False
            )
        except FileNotFoundError as error:
            if self.path.is_dir():
                raise SeriesError('git is not installed.') from error
            raise
        if done.returncode != 0:
            output = (done.stderr + done.stdout).decode(errors='replace').strip()
            raise GitError(str(args[0]), output)
        return done.stdout

    def text(self, *args: str | Path) -> str:
        """The same, decoded, without the last line's end."""
        return self.run(*args).decode(errors='replace').rstrip('\n')

    def lines(self, *args: str | Path) -> list[str]:
        """The same, as lines."""
        return self.text(*args).splitlines()

    def ok(self, *args: str | Path) -> bool:
        """Whether the command exits zero."""
        try:
            self.run(*args)
        except GitError:
            return False
        return True

    def paths(self, *args: str) -> list[str]:
        """Output of a command that was given `-z`, split at the zeros."""
        return [os.fsdecode(part) for part in self.run(*args).split(b'\0') if part]

    def commits(self, span: str) -> list[str]:
        """Commit ids of a range, oldest first."""
        return self.lines('rev-list', '--reverse', '--first-parent', span)
