"""The round of who edits the series: open a work tree, export its commits and the mirrors."""

from __future__ import annotations

import itertools
from pathlib import Path
from tempfile import TemporaryDirectory

import tomlkit

from series import tree
from series.git import Git, GitError
from series.model import Project, Series, SeriesError, Stage, scratch, write_all

_FORMAT = (
    '--zero-commit',
    '--no-signature',
    '--no-numbered',
    '--full-index',
    '--binary',
    '--no-ext-diff',
    '--no-textconv',
    '--quiet',
)


def branch(stage: Stage) -> str:
    """The edit tree's branch whose tip is the stage's last patch."""
    return f'stage{stage.number}'


def spans(git: Git, series: Series) -> list[tuple[Stage, str]]:
    """Each stage with the range of its commits in an edit tree."""
    names = ['base', *map(branch, series.stages)]
    ranges = (f'{below}..{tip}' for below, tip in itertools.pairwise(names))
    return list(zip(series.stages, ranges, strict=True))


def open_tree(
    project: Project, series: Series, *, force: bool = False, on_patch: tree.OnPatch = tree.ignore
) -> Path:
    """Make the edit tree: a commit a patch, and a branch for each stage.

    Args:
        force: throw away what an earlier edit tree holds that was not exported.

    Raises:
        SeriesError: there is an edit tree with such changes, or a patch does not apply.
    """
    target = project.edit_tree(series)
    with scratch(target.parent) as folder:
        if target.exists() and not force and (changes := _unexported(Git(target), series)):
            raise SeriesError(
                f'{target} holds changes that were not exported;'
                f' run `series export {series.branch}`, or `series open --force` to lose them.',
                *changes,
            )
        git = build(project, series, folder / 'new', on_patch)
        git.run('config', 'core.autocrlf', 'false')
        git.run('config', 'rebase.updateRefs', 'true')
        _mark_exported(git, series)
        if target.exists():
            target.rename(folder / 'old')
        git.path.rename(target)
    return target


def build(project: Project, series: Series, folder: Path, on_patch: tree.OnPatch) -> Git:
    """Make `folder` a repository with every stage, a branch each, the last one checked out."""
    ends = itertools.accumulate(len(stage.patches) for stage in series.stages)
    branches = dict(zip(map(branch, series.stages), ends, strict=True))
    patches = tree.plan(series, len(series.stages))
    git = tree.build(project, series, folder, patches, branches=branches, on_patch=on_patch)
    git.run('switch', '--quiet', branch(series.stages[-1]))
    return git


def _mark_exported(git: Git, series: Series) -> None:
    for stage in series.stages:
        git.run('update-ref', f'refs/series/{branch(stage)}', f'refs/heads/{branch(stage)}')


def _unexported(git: Git, series: Series) -> list[str]:
    """What the edit tree holds that the last open or export did not see."""
    try:
        changes = git.lines('status', '--porcelain')
        for stage in series.stages:
            if git.ok('rev-parse', '--verify', f'refs/heads/{branch(stage)}'):
                new = git.lines('log', '--format=%h %s', branch(stage), '--not', '--glob=series/*')
                changes += [f'{branch(stage)}: {line}' for line in new]
    except GitError as error:
        return list(error.details)
    return changes


def formatted(git: Git, span: str) -> dict[str, bytes]:
    """The patch files of a commit range: name to content, in order."""
    with TemporaryDirectory() as folder:
        git.run('format-patch', *_FORMAT, '--output-directory', folder, span)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def mirrors(git: Git, tip: str) -> dict[str, bytes]:
    """The files that the series adds to the base: path to content."""
    added = git.paths('diff', '--name-only', '--diff-filter=A', '-z', 'base', tip)
    return {name: git.run('show', f'{tip}:{name}') for name in added}


def export(project: Project, series: Series) -> list[Path]:
    """Write the edit tree's commits back to patch files, `series.toml` and the mirrors.

    Mirrors are those of the newest base. What changes nothing is not written.

    Returns:
        The files written or deleted.

    Raises:
        SeriesError: nothing is open, or the tree is not ready to export.
    """
    git = Git(project.edit_tree(series))
    _refuse_unready(git, series)
    patches = {}
    for stage, span in spans(git, series):
        patches[stage] = formatted(git, span)
        if any(b'\ndiff --git ' not in patch for patch in patches[stage].values()):
            raise SeriesError(f'{branch(stage)} holds an empty commit, which no patch can be.')
    wanted: dict[Path, bytes | None] = {}
    for stage, files in patches.items():
        folder = series.folder(stage)
        wanted |= {path: None for path in folder.glob('*.patch')}
        wanted |= {folder / name: content for name, content in files.items()}
    if series.branch == project.series().branch:
        before = {
            project.root / name
            for patch in tree.plan(series, len(series.stages))
            for name in patch.files(added=True)
        }
        after = {
            project.root / name: content
            for name, content in mirrors(git, branch(series.stages[-1])).items()
        }
        for path, content in after.items():
            if path not in before and path.exists() and path.read_bytes() != content:
                raise SeriesError(f'The mirror {path} would overwrite a file of this repository.')
        wanted |= {path: None for path in before}
        wanted |= after
    wanted[series.file] = _series_toml(series, patches)
    changes = {
        path: content
        for path, content in wanted.items()
        if content != (path.read_bytes() if path.is_file() else None)
    }
    write_all(changes)
    _mark_exported(git, series)
    return list(changes)


def _refuse_unready(git: Git, series: Series) -> None:
    path = git.path
    if not (path / '.git').exists():
        raise SeriesError(f'Nothing is open; run `series open {series.branch}` first.')
    if changes := git.lines('status', '--porcelain'):
        raise SeriesError(f'{path} has uncommitted changes; commit them first.', *changes)
    if any((path / '.git' / name).exists() for name in ('rebase-merge', 'rebase-apply')):
        raise SeriesError(f'A rebase is in progress in {path}; end it first.')
    below = 'base'
    for stage in series.stages:
        tip = branch(stage)
        if not git.ok('rev-parse', '--verify', f'refs/heads/{tip}'):
            raise SeriesError(f'{path} has no branch {tip}; make it on top of {below}.')
        if not git.ok('merge-base', '--is-ancestor', below, tip):
            raise SeriesError(
                f'{tip} does not build on {below}; in {path} run `git rebase {below} {tip}`.'
            )
        if merges := git.lines('log', '--merges', '--format=%h %s', f'{below}..{tip}'):
            raise SeriesError(f'{tip} holds a merge, which no patch can be; rebase it.', *merges)
        below = tip
    if not git.ok('merge-base', '--is-ancestor', 'HEAD', below):
        raise SeriesError(f'HEAD of {path} holds commits that no stage branch holds.')


def _series_toml(series: Series, patches: dict[Stage, dict[str, bytes]]) -> bytes:
    text = series.file.read_text(encoding='utf-8')
    document = tomlkit.parse(text)
    for stage, files in patches.items():
        if list(files) != list(stage.patches):
            names = tomlkit.array()
            names.extend(files)
            document['stage'][stage.number - 1]['patches'] = names.multiline(True)
    text = tomlkit.dumps(document)
    Series.parse(text, series.file)
    return text.encode()
