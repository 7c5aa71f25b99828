"""Trees that the tool makes: the base as one commit, tagged `base`, then one commit a patch."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from series import base
from series.git import Git, GitError
from series.model import Patch, Project, Series, SeriesError, Stage, scratch

_STAMP = '.git/series-stamp'

OnPatch = Callable[[Patch, float], None]


def ignore(patch: Patch, seconds: float) -> None:
    """Take no note of an applied patch."""


def plan(series: Series, number: int, patches: int | None = None) -> list[Patch]:
    """The patches of the stages below `number`, then the first `patches` (None: all) of its own."""
    wanted: list[Patch] = []
    for stage in series.stages[:number]:
        own = series.patches(stage)
        wanted += own[:patches] if stage.number == number else own
    return wanted


def make(
    project: Project,
    series: Series,
    number: int,
    patches: int | None = None,
    *,
    fresh: bool = False,
    on_patch: OnPatch = ignore,
) -> Path:
    """The tree of stage `number` (0: the base alone) under `.series/trees`.

    A tree that was made of the same base and patches is used again unless `fresh`.

    Args:
        patches: how many of the stage's own patches to apply; all by default.
        on_patch: called with each patch applied and the seconds that it took.

    Raises:
        SeriesError: the stage is unknown, a patch does not apply, or somebody edited the tree.
    """
    stage = series.stage(number) if number else None
    name = f'{series.branch}-stage{number}' if stage else f'{series.branch}-base'
    if stage and patches is not None and patches < len(stage.patches):
        name += f'-patch{patches}'
    target = project.trees / name
    wanted = plan(series, number, patches)
    key = hashlib.sha256(series.sha256.encode())
    for patch in wanted:
        key.update(patch.path.read_bytes())
    with scratch(target.parent) as folder:
        if (made := _made_of(target)) is not None and made == key.hexdigest() and not fresh:
            return target
        git = build(project, series, folder / name, wanted, on_patch=on_patch)
        (git.path / _STAMP).write_text(f'{key.hexdigest()} {git.text("rev-parse", "HEAD")}')
        if target.exists():
            target.rename(folder / 'old')
        git.path.rename(target)
    return target


def _made_of(tree: Path) -> str | None:
    """The key of what an untouched tree was made of; None: there is no tree."""
    if not tree.exists():
        return None
    git = Git(tree)
    try:
        key, head = (tree / _STAMP).read_text().split()
        untouched = git.text('rev-parse', 'HEAD') == head and not git.run('status', '--porcelain')
    except (OSError, ValueError, GitError):
        untouched = False
    if not untouched:
        raise SeriesError(
            f'{tree} is not as `series` made it; move your changes elsewhere and delete it.',
            'To edit the series, use `series open` and `series export`.',
        )
    return key


def build(
    project: Project,
    series: Series,
    folder: Path,
    patches: Sequence[Patch],
    *,
    branches: dict[str, int] | None = None,
    on_patch: OnPatch = ignore,
) -> Git:
    """Make `folder` a repository of the base and `patches`, the same commits every time.

    Args:
        branches: names of branches to leave at the base (0) or at the n-th patch.
    """
    archive = base.fetch(project, series)
    folder.mkdir()
    base.unpack(archive, folder)
    git = Git(folder)
    git.run('init', '--quiet', '--template=', '--initial-branch=series')
    (folder / '.git/info').mkdir(exist_ok=True)
    (folder / '.git/info/exclude').write_text('__pycache__/\n')
    git.run('add', '--all', '--force')
    git.run('commit', '--quiet', '--message', f'{series.package} {series.version}')
    git.run('tag', 'base')
    for patch in patches:
        am(git, patch, f'{series.package} {series.version}', on_patch)
    commits = ['base', *git.commits('base..')]
    for name, count in (branches or {}).items():
        git.run('branch', name, commits[count])
    return git


def am(git: Git, patch: Patch, target: str, on_patch: OnPatch, *, three_way: bool = False) -> None:
    """Commit one patch in a scratch tree, whose work tree is of no use after a failure.

    Raises:
        SeriesError: the patch does not apply to `target`; tells the files and hunks.
    """
    # `--keep-non-patch`: only "[PATCH]" is the mail's; a tag like "[Inference]" is the author's.
    options = ['--quiet', '--keep-non-patch', '--3way' if three_way else '--no-3way']
    if git.alone:
        options.append('--committer-date-is-author-date')
    start = time.monotonic()
    try:
        git.run('am', *options, patch.path)
    except GitError as error:
        git.ok('am', '--abort')
        rejects = _rejects(git, patch) or error.details
        stage = patch.path.parent.name
        raise SeriesError(f'{stage}/{patch.name} does not apply to {target}.', *rejects) from error
    on_patch(patch, time.monotonic() - start)


def _rejects(git: Git, patch: Patch) -> list[str]:
    """What of the patch `git apply` rejects, a line for each file and hunk."""
    try:
        git.run('apply', '--reject', '--verbose', patch.path)
    except GitError as error:
        output = error.output
    else:
        return []
    found = []
    lines: dict[str, list[str]] = {}
    path = ''
    for text in output.splitlines():
        if match := re.fullmatch(r'error: patch failed: (.+):(\d+)', text):
            lines.setdefault(match[1], []).append(match[2])
        elif match := re.fullmatch(r'Applying patch (.+) with \d+ rejects?\.\.\.', text):
            path = match[1]
        elif match := re.fullmatch(r'Rejected hunk #(\d+)\.', text):
            found.append(f'{path}: hunk {match[1]}, at line {lines[path].pop(0)}, does not apply')
        elif text.startswith('error: ') and not text.startswith('error: while searching for'):
            found.append(text.removeprefix('error: '))
    return found
