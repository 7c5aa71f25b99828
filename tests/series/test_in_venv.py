"""The script that prepares the environment, with a stand-in for Python 3.12 and its pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / 'scripts/in_venv.py'

# Tells its version, makes "environments" that hold itself and a `hello`, and notes pip's runs.
PYTHON = """#!/bin/sh
case "$*" in
*version_info*) [ "$1" = -c ] && echo "{version}" ;;
"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo made "$0" >> "{log}"
  printf '#!/bin/sh\\necho hello "$@"; exit 4\\n' > "$3/bin/hello"; chmod +x "$3/bin/hello" ;;
"-m pip"*) echo pip "$@" >> "{log}"; echo Collecting torch; {pip} ;;
esac
"""


class Place:
    """A copy of the script in a repository of its own, and the Pythons around it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / 'repo'
        self.home = folder / 'home'
        self.log = folder / 'log'
        self.bin = folder / 'bin'
        for path in (self.root / 'scripts', self.home, self.bin):
            path.mkdir(parents=True)
        shutil.copy(SCRIPT, self.root / 'scripts')
        (self.root / 'pyproject.toml').write_text('one')

    def add_python(self, path: Path, version: str, pip: str = ':') -> Path:
        """Put a Python of that version at a path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = PYTHON.format(version=version.replace('.', ' '), log=self.log, pip=pip)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run the script with this process' Python taken for an old one."""
        old = 'import sys; sys.executable = ""; sys.argv = sys.argv[1:]; '
        old += 'import runpy; runpy.run_path(sys.argv[0], run_name="__main__")'
        return subprocess.run(
            [sys.executable, '-c', old, self.root / 'scripts/in_venv.py', *args],
            env={'PATH': f'{self.bin}:/usr/bin:/bin', 'HOME': str(self.home)},
            capture_output=True,
            text=True,
            check=False,
        )

    def noted(self) -> list[str]:
        """What the stand-ins did so far: 'made PATH' and 'pip'."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return ['pip' if line.startswith('pip') else line for line in lines]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A repository whose machine has no Python yet."""
    return Place(tmp_path)


def test_makes_the_environment_once(place: Place) -> None:
    python = place.add_python(place.bin / 'python3.12', '3.12.4')
    first = place.run('hello', 'a b', '--c')
    assert (first.returncode, first.stdout) == (4, 'hello a b --c\n')
    assert 'making .venv with' in first.stderr
    assert place.noted() == [f'made {python}', 'pip']
    assert '--editable .[dev]' in place.log.read_text()
    start = time.monotonic()
    second = place.run('hello')
    assert time.monotonic() - start < 1
    assert (second.returncode, second.stderr) == (4, '')
    assert len(place.noted()) == 2


def test_installs_again_when_the_project_changes(place: Place) -> None:
    place.add_python(place.bin / 'python3.12', '3.12.4')
    place.run('hello')
    (place.root / 'pyproject.toml').write_text('two')
    assert 'pyproject.toml has changed' in place.run('hello').stderr
    assert place.noted()[1:] == ['pip', 'pip']
    assert place.run('hello').stderr == ''


def test_interrupted_installation_is_done_again(place: Place) -> None:
    python = place.add_python(place.bin / 'python3.12', '3.12.4', pip='kill -9 $PPID')
    place.run('hello')
    assert (place.root / '.venv/bin/hello').exists()
    place.add_python(python, '3.12.4')
    assert place.run('hello').returncode == 4
    assert place.noted() == [f'made {python}', 'pip', f'made {python}', 'pip']


def test_failed_installation(place: Place) -> None:
    place.add_python(place.bin / 'python3.12', '3.12.4', pip='echo no space left; exit 1')
    ran = place.run('hello')
    assert ran.returncode == 1
    assert 'no space left\nin_venv: the installation failed; see ' in ran.stderr
    assert ran.stdout == ''


def test_environment_whose_python_is_gone(place: Place) -> None:
    python = place.add_python(place.bin / 'python3.12', '3.12.4')
    place.run('hello')
    (place.root / '.venv/bin/python').unlink()
    assert place.run('hello').returncode == 4
    assert place.noted()[2:] == [f'made {python}', 'pip']


@pytest.mark.parametrize(
    ('pythons', 'chosen'),
    [
        ({'bin/python3.13': '3.13.1', 'home/.pyenv/versions/x/bin/python3': '3.12.1'}, '.pyenv'),
        ({'bin/python3': '3.11.2', 'bin/python3.14': '3.14.0'}, 'python3.14'),
        ({'bin/python3': '3.12.0', 'home/.pyenv/versions/x/bin/python3.12': '3.12.9'}, '.pyenv'),
        ({'bin/python3.12-config': '3.12.0', 'bin/python3.13': '3.13.0'}, 'python3.13'),
    ],
)
def test_choice_of_python(place: Place, pythons: dict[str, str], chosen: str) -> None:
    for path, version in pythons.items():
        place.add_python(place.root.parent / path, version)
    assert place.run('hello').returncode == 4
    assert chosen in place.noted()[0]


def test_python_that_only_uv_knows(place: Place) -> None:
    python = place.add_python(place.home / 'uv/python', '3.12.7')
    (place.bin / 'uv').write_text(f'#!/bin/sh\necho {python}\n')
    (place.bin / 'uv').chmod(0o755)
    assert place.run('hello').returncode == 4
    assert place.noted()[0] == f'made {python}'


@pytest.mark.skipif(
    any(
        Path(folder, f'python3.{n}').exists()
        for folder in ('/usr/bin', '/bin')
        for n in range(12, 20)
    )
    or os.access('/usr/bin/uv', os.X_OK),
    reason='the system has a Python that would do',
)
def test_no_python_that_would_do(place: Place) -> None:
    place.add_python(place.bin / 'python3', '3.11.2')
    ran = place.run('hello')
    assert ran.returncode == 1
    assert 'this project needs Python 3.12 or newer' in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert not (place.root / '.venv').exists()


def test_unknown_command_and_no_command(place: Place) -> None:
    place.add_python(place.bin / 'python3.12', '3.12.4')
    assert 'there is no command nothing' in place.run('nothing').stderr
    assert place.run().stderr.startswith('usage: ')
