"""What `series check` catches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from series import checks, edit
from series.git import Git
from series.model import Patch, Project, Series
from synthetic import BRANCH, HEADER, SDIST, Ran, changed, commit, message


def add(project: Project, series: Series, files: dict[str, str], text: str = '') -> Series:
    """Add a commit with these files on top of the series; the series then."""
    git = Git(edit.open_tree(project, series))
    commit(git, text or message('Change what it is'), files)
    edit.export(project, series)
    return project.series()


def test_all_holds(run: Callable[..., Ran]) -> None:
    ran = run('check')
    assert ran.status == 0, ran.err
    rows = [line.split('│') for line in ran.out.splitlines() if line.startswith('│')]
    assert len(rows) == 13
    assert {row[2].strip() for row in rows} == {'holds'}


def test_complaints_are_printed_and_fail(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = [checks.Verdict('one', 1, []), checks.Verdict('two', 2, ['this is wrong', 'that'])]
    monkeypatch.setattr(checks, 'run', lambda project, on_checks: verdicts)
    ran = run('check')
    assert ran.status == 1
    assert [line for line in ran.err.splitlines() if line] == ['two: this is wrong', 'two: that']
    assert 'fails' in ran.out


@pytest.mark.parametrize(
    ('tool', 'said'),
    [
        ('black', 'would reformat scripts/mine.py'),
        ('isort', 'ERROR: scripts/mine.py Imports are incorrectly sorted and/or formatted.'),
        ('mypy', 'scripts/mine.py:3: error: Incompatible types in assignment'),
    ],
)
def test_style_of_this_repository(project: Project, tool: str, said: str) -> None:
    (project.root / 'scripts').mkdir()
    (project.root / 'scripts/mine.py').write_text('import sys\nimport os\nx: int = ""\n')
    # A mirror is held to Megatron's style, not to this repository's.
    (project.root / 'tests/unit_tests/test_kv.py').write_text('import sys\nimport os\n')
    (complaint,) = checks.own_style(project, tool)
    assert complaint.startswith(said)


def test_patch_that_export_would_write_otherwise(project: Project, series: Series) -> None:
    assert checks.exactness(project, series) == []
    path = series.patches(series.stage(2))[0].path
    # Still applies, with an offset of three lines.
    shifted = path.read_text().replace('@@ -18,7 +18,7 @@', '@@ -15,7 +15,7 @@')
    assert shifted != path.read_text()
    path.write_text(shifted)
    assert checks.exactness(project, series) == [f'{path} is not what `series export` writes']


def test_patch_that_does_not_apply(
    series: Series, run: Callable[..., Ran], project: Project
) -> None:
    path = series.patches(series.stage(1))[1].path
    path.write_text(path.read_text().replace('-LINE_10 = 10', '-LINE_10 = 99'))
    ran = run('check')
    assert ran.status == 1
    assert f'Error: stage1/{path.name} does not apply' in ran.err
    del project


def test_listing(project: Project, series: Series) -> None:
    stray = series.folder(series.stage(1)) / '0009-stray.patch'
    stray.write_text('')
    text = series.file.read_text()
    series.file.write_text(text.replace('test_kv.py"', 'none.py"').replace('stage1.py', 'none.py'))
    series = project.series()
    complaints = checks.listing(project, series)
    assert complaints[0] == f'{stray} is not in series.toml'
    assert [Path(c.split()[0]).name for c in complaints[1:]] == ['none.py', 'test_none.py']


def test_mirrors(project: Project, series: Series) -> None:
    assert checks.mirrors(project, series) == []
    (project.root / 'megatron/core/kv.py').write_text('changed')
    (project.root / 'tests/unit_tests/test_kv.py').unlink()
    (project.root / 'megatron/core/stray.py').write_text('')
    assert checks.mirrors(project, series) == [
        f'megatron/core/kv.py is not the file of the series; run `series export {BRANCH}`',
        f'tests/unit_tests/test_kv.py is not the file of the series; run `series export {BRANCH}`',
        'megatron/core/stray.py is no file of the series',
    ]


def test_upstream_file_in_the_repository(project: Project, series: Series) -> None:
    assert checks.strangers(project, series) == []
    (project.root / 'docs').mkdir()
    (project.root / 'docs/example.py').write_text(SDIST['megatron/core/engine.py'])
    assert checks.strangers(project, series) == ["docs/example.py is upstream's file"]


def test_headers(project: Project, series: Series) -> None:
    assert checks.headers(project, series) == []
    old = HEADER.replace('2026', '2025')
    series = add(project, series, {'megatron/core/a.py': old, 'megatron/core/b.txt': ''})
    year = HEADER.strip()
    assert checks.headers(project, series) == [f'megatron/core/a.py does not begin with "{year}"']


@pytest.mark.parametrize(
    'subject',
    [
        'Add the KV cache',
        '[Inference] Add the KV cache',
        'feat(inference): add the KV cache',
        'fix: stop it',
        'Inference: Address the cache',
        'Embed tokens',
        'Process one block at a time',
        'Focus on blocks',
        'Reach and/or pass 100%',
    ],
)
def test_good_subject(tmp_path: Path, subject: str) -> None:
    assert faults(tmp_path, message(subject)) == []


@pytest.mark.parametrize(
    ('text', 'fault'),
    [
        (message('Add ' + 'x' * 69), 'more than 72 characters'),
        (message('Add the cache.'), 'ends with a period'),
        (message('add the cache'), 'starts with a small letter'),
        (message('Added the cache'), 'not in the imperative: "Added"'),
        (message('fix: Adding the cache'), 'not in the imperative: "Adding"'),
        (message('Adds the cache'), 'not in the imperative: "Adds"'),
        (message('Add the cache 2/3'), 'has a patch number'),
        ('Add the cache\n\nSigned-off-by: A <a@example.org>', 'there is no body'),
        ('Add the cache\n\nIt is needed.', 'no Signed-off-by'),
    ],
)
def test_faulty_message(tmp_path: Path, text: str, fault: str) -> None:
    (found,) = faults(tmp_path, text)
    assert fault in found


def faults(folder: Path, text: str) -> list[str]:
    """The faults of a commit with this message, as git writes it to a patch file."""
    git = Git(folder)
    git.run('init', '-q')
    commit(git, 'Begin', {'a': ''})
    commit(git, text, {'a': 'b'})
    ((name, content),) = edit.formatted(git, 'HEAD^..HEAD').items()
    (folder / name).write_bytes(content)
    return checks.message_faults(Patch(folder / name))


def test_subject_twice(project: Project, series: Series) -> None:
    files = {'megatron/core/engine.py': changed(30)}
    series = add(project, series, files, message('Add the cache'))
    assert checks.messages(project, series) == ['"Add the cache" is the subject of 2 patches']


UNTIDY = f"""{HEADER}import sys
import os
class Cache:
    size: int = "no"
    def f(self):
        print( self )
"""


@pytest.mark.parametrize(
    ('tool', 'said'),
    [
        ('black', ['would reformat megatron/core/untidy.py']),
        ('isort', ['Imports are incorrectly sorted']),
        ('pylint', ['C0115', 'C0116', 'W0141', 'W0611', 'W0611']),
        ('mypy', ['Incompatible types in assignment']),
    ],
)
def test_style_of_added_files(project: Project, series: Series, tool: str, said: list[str]) -> None:
    assert checks.style(project, series, tool=tool) == []
    series = add(project, series, {'megatron/core/untidy.py': UNTIDY})
    complaints = checks.style(project, series, tool=tool)
    assert len(complaints) == len(said)
    for text in said:
        assert any(text in complaint and 'untidy.py' in complaint for complaint in complaints)


def test_style_of_changed_files_is_held_to_the_base(
    project: Project, series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(
        project: Project, tool: str, options: tuple[str, ...], folder: Path, names: list[str]
    ) -> list[str]:
        del project, tool, options
        old = ['megatron/core/engine.py:7: old'] if names else []
        new = ['megatron/core/engine.py:9: old', 'megatron/core/engine.py:9: new']
        return new if folder.name.endswith('stage1') else old

    monkeypatch.setattr(checks, '_lines', said)
    assert checks.style(project, series, tool='mypy') == ['stage 1: megatron/core/engine.py:9: new']


def test_tests_are_spared_by_pylint_alone(project: Project, series: Series) -> None:
    series = add(project, series, {'tests/unit_tests/test_untidy.py': UNTIDY})
    assert checks.style(project, series, tool='pylint') == []
    assert len(checks.style(project, series, tool='black')) == 1


def test_tool_that_crashes(project: Project, series: Series) -> None:
    series = add(project, series, {'pyproject.toml': '[tool.black]\nrequired-version = "1"\n'})
    complaint, *_ = checks.style(project, series, tool='black')
    assert 'required version' in complaint
