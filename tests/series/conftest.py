"""A tiny Megatron, a package index that serves it, and a series of two stages on it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from series import cli
from series.git import Git
from series.model import Project, Series
from synthetic import BRANCH, SDIST, UPSTREAM_TEST, Index, Ran, commit, make_project, sdist


@pytest.fixture(scope='session')
def _index() -> Iterator[Index]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.requests += 1
            if self.path.endswith('.tar.gz'):
                kind, body = 'application/gzip', served.archive
            elif self.path == '/simple/megatron-core/':
                name = 'megatron_core-9.1.2.tar.gz'
                page = {'files': [{'filename': name, 'url': f'/{name}', 'hashes': {}}]}
                kind = 'application/vnd.pypi.simple.v1+json'
                body = json.dumps({'name': 'megatron-core', **page}).encode()
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header('Content-Type', kind)
            self.send_header('Content-Length', str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    with ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        served = Index(f'http://127.0.0.1:{server.server_port}/simple/', b'')
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield served
        server.shutdown()


@pytest.fixture(autouse=True)
def index(_index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Index:
    """The index as every test finds it; no other one, no user configuration, no other cache."""
    _index.archive = sdist(SDIST)
    _index.requests = 0
    for name in list(os.environ):
        if name.startswith(('GIT_', 'UV_', 'PIP_')) or name.lower().endswith('_proxy'):
            monkeypatch.delenv(name)
    monkeypatch.setenv('PIP_INDEX_URL', _index.url)
    monkeypatch.setenv('SERIES_CACHE', str(tmp_path / 'cache'))
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    monkeypatch.setenv('XDG_CONFIG_HOME', str(tmp_path / 'home'))
    monkeypatch.setenv('GIT_CONFIG_NOSYSTEM', '1')
    return _index


@pytest.fixture(scope='session')
def _template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project of the tests, its series written by `series export` itself."""
    folder = tmp_path_factory.mktemp('template')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('SERIES_CACHE', str(folder / 'cache'))
        make_project(folder / 'project', folder / 'cache')
    return folder / 'project'


@pytest.fixture
def project(_template: Path, index: Index, tmp_path: Path) -> Project:
    """A project with a series of two stages, whose source the index has."""
    del index
    return Project(Path(shutil.copytree(_template, tmp_path / 'project')))


@pytest.fixture
def series(project: Project) -> Series:
    """Its series."""
    return project.series()


@pytest.fixture
def checkout(tmp_path: Path) -> Git:
    """A Git checkout of the same Megatron, with more files, history and an identity."""
    folder = tmp_path / 'Megatron-LM'
    folder.mkdir()
    git = Git(folder, alone=False)
    git.run('init', '-q', '-b', BRANCH)
    git.run('config', 'user.name', 'Rita')
    git.run('config', 'user.email', 'rita@example.org')
    commit(git, 'Begin', {'README.md': 'Megatron\n', 'setup.py': ''})
    tests = {'tests/unit_tests/old/test_old.py': UPSTREAM_TEST, 'tests/unit_tests/__init__.py': ''}
    commit(git, 'Add all (#12)', SDIST | tests)
    return git


@pytest.fixture
def run(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """Run the command line on the project."""

    def run(*args: object) -> Ran:
        monkeypatch.setattr(sys, 'argv', ['series', '--root', str(project.root), *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        code = exit_.value.code
        text = capsys.readouterr()
        # One line for each sentence, however narrow the terminal is.
        return Ran(code if isinstance(code, int) else 0, text.out, text.err)

    monkeypatch.setenv('COLUMNS', '200')
    return run


@pytest.fixture
def refused(run: Callable[..., Ran]) -> Callable[..., str]:
    """Run a command that must be refused in a sentence; the sentence and its details."""

    def refused(*args: object) -> str:
        ran = run(*args)
        assert ran.status == 1
        assert 'Traceback' not in ran.err
        return ran.err[ran.err.index('Error: ') :]

    return refused
