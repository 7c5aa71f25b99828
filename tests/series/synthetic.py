"""A tiny Megatron and a series of two stages on it, to test the tool with."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import signal
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from series import edit
from series.git import Git
from series.model import Project

BRANCH = 'core_r9.1.0'
HEADER = '# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.\n'
ENGINE = ''.join(f'LINE_{n} = {n}\n' for n in range(40))
UPSTREAM_TEST = """from megatron.core import engine

def test_first():
    assert engine.LINE_1 == 1

def test_broken():
    assert False
"""
SDIST = {
    'megatron/core/__init__.py': '',
    'megatron/core/package_info.py': 'MAJOR = 9\nMINOR = 1\nPATCH = 2\n',
    'megatron/core/engine.py': ENGINE,
    'pyproject.toml': '[tool.black]\nline-length = 100\nskip-string-normalization = true\n',
}
AUTHOR = {
    'GIT_AUTHOR_NAME': 'Ada Möbius',
    'GIT_AUTHOR_EMAIL': 'ada@example.org',
    'GIT_AUTHOR_DATE': '2026-03-04T05:06:07+0100',
}


def sdist(files: dict[str, str], name: str = 'megatron_core-9.1.2') -> bytes:
    """A source distribution of these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w') as tar:
        for path, text in {**files, 'PKG-INFO': 'Metadata-Version: 2.4\n'}.items():
            member = tarfile.TarInfo(f'{name}/{path}')
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return gzip.compress(buffer.getvalue(), mtime=0)


def write(folder: Path, files: dict[str, str]) -> None:
    """Write files below a folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def commit(git: Git, message: str, files: dict[str, str]) -> str:
    """Commit files as somebody; the commit."""
    write(git.path, files)
    git.run('add', '--all')
    identity = [f'{AUTHOR["GIT_AUTHOR_NAME"]} <{AUTHOR["GIT_AUTHOR_EMAIL"]}>']
    identity.append(AUTHOR['GIT_AUTHOR_DATE'])
    git.run('commit', '-qm', message, f'--author={identity[0]}', f'--date={identity[1]}')
    return git.text('rev-parse', 'HEAD')


def message(subject: str) -> str:
    """A commit message as Megatron wants it."""
    return f'{subject}\n\nBecause it is needed.\n\nSigned-off-by: Ada Möbius <ada@example.org>'


def changed(line: int) -> str:
    """The engine with this and every earlier tenth line changed."""
    text = ENGINE
    for n in range(10, line + 1, 10):
        text = text.replace(f'LINE_{n} = {n}\n', f'LINE_{n} = -{n}\n')
    return text


UNIT_TEST = f"""{HEADER}from megatron.core import engine, kv


def test_kv():
    assert kv.SIZE > 0


def test_engine():
    assert engine.LINE_1 == 1
"""
REGRESSION = '''import subprocess
import sys


def line(tree, number):
    code = f"from megatron.core import engine; print(engine.LINE_{number})"
    return subprocess.check_output(
        [sys.executable, "-c", code], env={"PYTHONPATH": tree}, text=True
    )


def test_same(pytestconfig):
    trees = [pytestconfig.getoption(name) for name in ("reference", "candidate")]
    assert [line(tree, 1) for tree in trees] == ["1\\n", "1\\n"]
    # The reference has the first patch, which leaves the engine alone; the candidate has all.
    assert [line(tree, 10) for tree in trees] == ["10\\n", "-10\\n"]
'''
OPTIONS = """def pytest_addoption(parser):
    parser.addoption("--reference")
    parser.addoption("--candidate")
"""


def make_project(root: Path, cache: Path) -> None:
    """Make a project at `root` whose patches the tool itself exports."""
    digest = hashlib.sha256(sdist(SDIST)).hexdigest()
    write(
        root,
        {
            f'patches/{BRANCH}/series.toml': f"""# The series of the tests.
branch = "{BRANCH}"
package = "megatron-core"
version = "9.1.2"
sha256 = "{digest}"
upstream-tests = ["tests/unit_tests/old"]

[[stage]]
number = 1  # the first
title = "The first stage"
patches = []
unit-tests = ["tests/unit_tests/test_kv.py"]
regression = ["tests/regression/test_stage1.py"]

[[stage]]
number = 2
title = "The second stage"
patches = []
""",
            f'patches/{BRANCH}/stage1/COVER.md': 'The first pull request.\n',
            f'patches/{BRANCH}/stage2/COVER.md': 'The second pull request.\n',
            'tests/support/megatron_on_cpu.py': '"""Nothing to stand in for."""\n',
            'tests/regression/conftest.py': OPTIONS,
            'tests/regression/test_stage1.py': REGRESSION,
            '.gitignore': '/.series/\n__pycache__/\n',
        },
    )
    project = Project(root)
    cache.mkdir()
    (cache / 'megatron-core-9.1.2.tar.gz').write_bytes(sdist(SDIST))
    git = Git(edit.open_tree(project, project.series()))
    git.run('switch', '-q', 'stage1')
    kv = {'megatron/core/kv.py': f'{HEADER}"""Sizes."""\n\nSIZE = 1\n'}
    commit(git, message('Add the cache'), kv | {'tests/unit_tests/test_kv.py': UNIT_TEST})
    commit(git, message('[Inference] Turn line 10'), {'megatron/core/engine.py': changed(10)})
    git.run('switch', '-q', 'stage2')
    git.run('merge', '-q', '--ff-only', 'stage1')
    kv = {'megatron/core/kv.py': f'{HEADER}"""Sizes."""\n\nSIZE = 2\n'}
    commit(git, message('feat(core): Turn line 20'), {'megatron/core/engine.py': changed(20)} | kv)
    edit.export(project, project.series())
    file = project.series().file
    text = file.read_text().replace('unit-tests', 'reference-patches = 1\nunit-tests')
    file.write_text(text)
    Git(root).run('init', '-q')
    shutil.rmtree(project.work)


def die_at_patch(project: Project, number: str, call: str) -> None:
    """Run `call` in a process of its own that is killed when it has applied that patch.

    The call may use `project`, `series` and `die`, an OnPatch.
    """
    code = f"""
import os, signal
from pathlib import Path
from series import edit, tree
from series.checkout import Checkout
from series.model import Project
def die(patch, seconds):
    if patch.name.startswith({number!r}):
        os.kill(os.getpid(), signal.SIGKILL)
project = Project(Path({str(project.root)!r}))
series = project.series()
{call}
"""
    done = subprocess.run([sys.executable, '-c', code], check=False)
    assert done.returncode == -signal.SIGKILL


@dataclass
class Index:
    """A package index; what it serves can be changed, and it counts its requests."""

    url: str
    archive: bytes
    requests: int = 0


@dataclass
class Ran:
    """What a run of the command line came to."""

    status: int
    out: str
    err: str
