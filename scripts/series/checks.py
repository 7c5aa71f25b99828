"""The checks of `series check`: each gives the list of its complaints, empty when all is well."""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from series import edit, tree
from series.git import Git
from series.model import Patch, Project, Series

_HEADER = '# Copyright (c) {} NVIDIA CORPORATION & AFFILIATES. All rights reserved.'
# Folders of this repository that hold mirrors and nothing else.
_MIRROR_FOLDERS = (
    'megatron/',
    'tests/unit_tests/',
    'tests/functional_tests/',
    'docs/user-guide/',
    'examples/',
    'tools/',
)
# What Megatron's formatter script passes to each tool; .pylintrc's settings as options, since the
# source distribution does not have that file.
_UPSTREAM_TOOLS = {
    'black': ('--skip-magic-trailing-comma', '--skip-string-normalization', '--check'),
    'isort': ('--check',),
    'pylint': (
        '--rcfile=',
        '--load-plugins=pylint.extensions.bad_builtin',
        '--disable=all',
        '--enable=C0115,C0116,W0611,C0301,E0606,W0141',
        '--bad-functions=print',
        '--max-line-length=100',
        '--score=no',
    ),
    'mypy': ('--explicit-package-bases', '--follow-imports=skip', '--no-error-summary'),
}
_OWN_TOOLS = {'black': ('--check',), 'isort': ('--check',), 'mypy': ('--no-error-summary',)}
_PREFIX = re.compile(r'(\[[^]]+\] |[a-z]+(\([^)]+\))?!?: |[A-Z][\w ]*: )')
_NOT_IMPERATIVE = re.compile(r'\w+(ed|ing|[^su]s)', re.ASCII)
_IMPERATIVE = {'bring', 'embed', 'exceed', 'feed', 'need', 'proceed', 'seed', 'shed', 'speed'}


@dataclass(frozen=True)
class Verdict:
    """What one check came to."""

    name: str
    seconds: float
    complaints: list[str]


Check = Callable[[], list[str]]


def named_checks(project: Project, series: Series) -> dict[str, Check]:
    """The checks of one base by name."""
    named: dict[str, Callable[[Project, Series], list[str]]] = {
        'patches apply exactly': exactness,
        'series.toml and its files': listing,
        'commit messages': messages,
        'copyright headers': headers,
        'nothing of upstream is committed': strangers,
    }
    if series.branch == project.series().branch:
        named['mirrors in step'] = mirrors
    for tool in _UPSTREAM_TOOLS:
        named[f'{tool}, as Megatron runs it'] = functools.partial(style, tool=tool)
    return {
        f'{series.branch}: {name}': functools.partial(check, project, series)
        for name, check in named.items()
    }


def run(
    project: Project,
    on_checks: Callable[[int], Callable[[str], None]] = lambda n: lambda name: None,
) -> list[Verdict]:
    """Run the checks of every base and of this repository's own code, side by side.

    Raises:
        SeriesError: a patch does not apply at all, so that nothing else can be checked.
    """
    named: dict[str, Check] = {}
    for series in project.all_series():
        named |= named_checks(project, series)
    for tool in _OWN_TOOLS:
        named[f'{tool} on scripts/ and tests/'] = functools.partial(own_style, project, tool)
    on_check = on_checks(len(named))

    def timed(name: str, check: Check) -> Verdict:
        start = time.monotonic()
        complaints = check()
        return Verdict(name, time.monotonic() - start, complaints)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(timed, name, check) for name, check in named.items()]
        for future in as_completed(futures):
            on_check(future.result().name)
    return [future.result() for future in futures]


def _files(project: Project) -> list[str]:
    """This repository's files: tracked, or new and not ignored."""
    git = Git(project.root, alone=False)
    return git.paths('ls-files', '-z', '--cached', '--others', '--exclude-standard')


def _mirrors(project: Project, series: Series) -> dict[str, bytes]:
    return edit.mirrors(Git(tree.make(project, series, len(series.stages))), 'HEAD')


def listing(project: Project, series: Series) -> list[str]:
    """Patch files and `series.toml` name each other; what a stage names is there."""
    complaints = []
    top = tree.make(project, series, len(series.stages))
    for stage in series.stages:
        folder = series.folder(stage)
        stray = {path.name for path in folder.glob('*.patch')} - set(stage.patches)
        complaints += [f'{folder / name} is not in series.toml' for name in sorted(stray)]
        wanted = [folder / 'COVER.md', *(top / path for path in stage.unit_tests)]
        wanted += [project.root / path for path in stage.regression]
        complaints += [f'{path} is missing' for path in wanted if not path.exists()]
    return complaints


def exactness(project: Project, series: Series) -> list[str]:
    """Patches apply in order; exported anew, with offsets and fuzz gone, they are the same files."""
    git = Git(tree.make(project, series, len(series.stages)))
    commits = [git.text('rev-parse', 'base'), *git.commits('base..')]
    ends = itertools.accumulate((len(stage.patches) for stage in series.stages), initial=0)
    complaints = []
    for stage, (start, end) in zip(series.stages, itertools.pairwise(ends), strict=True):
        files = edit.formatted(git, f'{commits[start]}..{commits[end]}')
        for patch in series.patches(stage):
            if files.get(patch.name) != patch.path.read_bytes():
                complaints.append(f'{patch.path} is not what `series export` writes')
    return complaints


def mirrors(project: Project, series: Series) -> list[str]:
    """Mirrors are the files that the series adds, neither more nor less."""
    wanted = _mirrors(project, series)
    complaints = [
        f'{name} is not the file of the series; run `series export {series.branch}`'
        for name, content in wanted.items()
        if not (path := project.root / name).is_file() or path.read_bytes() != content
    ]
    stray = {name for name in _files(project) if name.startswith(_MIRROR_FOLDERS)} - set(wanted)
    return complaints + [f'{name} is no file of the series' for name in sorted(stray)]


def strangers(project: Project, series: Series) -> list[str]:
    """No file of the base is in this repository, under whatever name."""
    git = Git(tree.make(project, series, 0))
    base = {line.split()[2] for line in git.lines('ls-tree', '-r', 'HEAD')}
    names = [name for name in _files(project) if (project.root / name).is_file()]
    hashes = git.lines('hash-object', '--no-filters', *(project.root / name for name in names))
    return [
        f"{name} is upstream's file"
        for name, blob in zip(names, hashes, strict=True)
        if blob in base and (project.root / name).stat().st_size
    ]


def messages(project: Project, series: Series) -> list[str]:
    """Commit messages are as Megatron's contribution guide wants them."""
    del project
    patches = tree.plan(series, len(series.stages))
    subjects = Counter(patch.subject for patch in patches)
    twice = [
        f'"{subject}" is the subject of {n} patches' for subject, n in subjects.items() if n > 1
    ]
    return twice + [
        f'{patch.path.parent.name}/{patch.name}: {fault}'
        for patch in patches
        for fault in message_faults(patch)
    ]


def message_faults(patch: Patch) -> list[str]:
    """What is wrong with a patch's message."""
    subject, body, _ = patch.message
    prefix = _PREFIX.match(subject)
    title = subject[prefix.end() :] if prefix else subject
    verb = title.partition(' ')[0]
    trailer = r'^Signed-off-by: .+ <.+@.+>$'
    faults = {
        'the subject has more than 72 characters': len(subject) > 72,
        'the subject ends with a period': subject.endswith('.'),
        'the subject starts with a small letter': not verb[:1].isupper() and not prefix,
        f'the subject is not in the imperative: "{verb}"': bool(
            _NOT_IMPERATIVE.fullmatch(verb) and verb.lower() not in _IMPERATIVE
        ),
        'the subject has a patch number': bool(re.search(r'\[PATCH|\b\d+/\d+\b', subject)),
        'there is no body': not re.sub(r'^[\w-]+: .+$', '', body, flags=re.M).strip(),
        'there is no Signed-off-by line': not re.search(trailer, body, re.M),
    }
    return [fault for fault, found in faults.items() if found]


def headers(project: Project, series: Series) -> list[str]:
    """Python files that the series adds begin with the copyright line of their patch's year."""
    top = tree.make(project, series, len(series.stages))
    complaints = []
    for patch in tree.plan(series, len(series.stages)):
        header = _HEADER.format(parsedate_to_datetime(patch.message[2]).year)
        for name in patch.files(added=True):
            path = top / name
            if name.endswith('.py') and path.exists():
                if not path.read_text(encoding='utf-8').startswith(header):
                    complaints.append(f'{name} does not begin with "{header}"')
    return complaints


def style(project: Project, series: Series, *, tool: str) -> list[str]:
    """After each stage, a tool has nothing to say about touched files that it did not say before.

    So files that the series adds are clean.
    """
    complaints = []
    before = tree.make(project, series, 0)
    for stage in series.stages:
        after = tree.make(project, series, stage.number)
        span = f'{Git(before).text("rev-parse", "HEAD")}..HEAD'
        names = Git(after).paths(
            'diff', '--name-only', '--diff-filter=d', '-z', span, 'megatron/core', 'tests'
        )
        # .pylintrc ignores the tests.
        python = [
            n for n in names if n.endswith('.py') and not (tool, n[:6]) == ('pylint', 'tests/')
        ]
        new = _said(project, tool, after, python)
        modified = [name for name in python if (before / name).exists()]
        # The tools are slow: what they said before matters only where they say something now.
        if not any(name in line for line in new for name in modified):
            modified = []
        known = Counter(map(_without_line, _said(project, tool, before, modified)))
        for line in new:
            known[_without_line(line)] -= 1
            if known[_without_line(line)] < 0:
                complaints.append(f'stage {stage.number}: {line}')
        before = after
    return complaints


def own_style(project: Project, tool: str) -> list[str]:
    """A tool has nothing to say about this repository's own Python files."""
    foreign = set().union(*(_mirrors(project, series) for series in project.all_series()[:1]))
    names = [
        name
        for name in _files(project)
        if name.endswith('.py') and name.startswith(('scripts/', 'tests/')) and name not in foreign
    ]
    groups: Iterable[tuple[str, ...]] = [tuple(names)]
    if tool == 'mypy':
        # Folder by folder, since each may have a conftest.py, and mypy takes one module of a name.
        by_folder = itertools.groupby(sorted(names), key=lambda name: Path(name).parts[:2])
        groups = [tuple(group) for _, group in by_folder]
    return [
        line
        for group in groups
        for line in _lines(project, tool, _OWN_TOOLS[tool], project.root, group)
    ]


def _said(project: Project, tool: str, folder: Path, names: Sequence[str]) -> list[str]:
    return _lines(project, tool, _UPSTREAM_TOOLS[tool], folder, names)


def _lines(
    project: Project, tool: str, options: Sequence[str], folder: Path, names: Sequence[str]
) -> list[str]:
    """A tool's complaints about files, a line each, with paths relative to `folder`."""
    if not names:
        return []
    command = [sys.executable, '-P', '-m', tool, *options]
    if tool == 'mypy':
        command.append(f'--cache-dir={project.work / "mypy" / folder.name}')
    done = subprocess.run(
        [*command, *names], cwd=folder, capture_output=True, text=True, check=False
    )
    output = (done.stdout + done.stderr).replace(f'{folder}/', '')
    lines = [
        line
        for line in output.splitlines()
        if line.startswith(('would reformat ', 'ERROR: ', 'error: ')) or re.match(r'\S+:\d+:', line)
    ]
    lines = [line for line in lines if ': note: ' not in line]
    if done.returncode != 0 and not lines:
        return [f'{tool} failed: {output.strip()[-2000:]}']
    return lines


def _without_line(complaint: str) -> str:
    return re.sub(r':\d+(:\d+)?:', ':', complaint, count=1)
