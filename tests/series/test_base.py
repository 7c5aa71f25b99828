"""Fetching the base: verified, cached, offline once cached."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from series import base
from series.model import Project, Series, SeriesError
from synthetic import BRANCH, SDIST, Index, Ran, sdist

UNREACHABLE = 'http://127.0.0.1:9/simple/'


def test_fetch_downloads_once_then_works_offline(
    run: Callable[..., Ran], index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run('fetch', BRANCH)
    assert first.status == 0
    assert Path(first.out.strip()).read_bytes() == index.archive
    assert index.requests == 2
    monkeypatch.setenv('PIP_INDEX_URL', UNREACHABLE)
    assert run('fetch', BRANCH).out == first.out
    assert index.requests == 2


def test_no_network_and_no_cache(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    monkeypatch.setenv('PIP_INDEX_URL', UNREACHABLE)
    said = refused('fetch', BRANCH)
    assert 'megatron-core==9.1.2 cannot be downloaded, and it is not in the cache' in said
    assert UNREACHABLE in said
    assert not list(project.cache.glob('*.tar.gz'))


@pytest.mark.parametrize('index_url', ['nonsense', 'http://[::1', 'http://127.0.0.1:port/simple/'])
def test_index_that_is_no_url(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, index_url: str
) -> None:
    monkeypatch.setenv('PIP_INDEX_URL', index_url)
    assert 'megatron-core==9.1.2 cannot be downloaded' in refused('fetch', BRANCH)


def test_cache_that_is_no_folder(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / 'file').touch()
    monkeypatch.setenv('SERIES_CACHE', str(tmp_path / 'file'))
    assert f'The cache, {tmp_path}/file, is not a folder' in refused('fetch', BRANCH)


def test_index_serves_another_file(
    refused: Callable[..., str], index: Index, project: Project, series: Series
) -> None:
    index.archive = sdist(SDIST | {'evil.py': ''})
    said = refused('verify')
    assert 'another megatron-core-9.1.2.tar.gz' in said
    assert f'expected sha256 {series.sha256}' in said
    assert base.cached(project, series) is None
    assert not project.work.exists()


def test_wrong_cached_file_is_replaced(
    project: Project, series: Series, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = base.fetch(project, series)
    path.write_bytes(b'rot')
    assert base.fetch(project, series).read_bytes() == index.archive
    path.write_bytes(b'rot')
    monkeypatch.setenv('PIP_INDEX_URL', UNREACHABLE)
    with pytest.raises(SeriesError, match='has the wrong sha256'):
        base.fetch(project, series)


def test_version_that_the_index_lacks(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, index: Index
) -> None:
    monkeypatch.setenv('UV_INDEX_URL', index.url.replace('simple', 'other'))
    assert 'has no source distribution of megatron-core==9.1.2' in refused('fetch', BRANCH)


def test_leftovers_of_a_killed_download_go(project: Project, series: Series) -> None:
    leftover = project.cache / '.scratch-killed'
    leftover.mkdir(parents=True)
    base.fetch(project, series)
    assert not leftover.exists()


def test_unpack_leaves_out_what_the_index_added(tmp_path: Path) -> None:
    archive = tmp_path / 'a.tar.gz'
    archive.write_bytes(sdist(SDIST | {'setup.cfg': '', 'megatron_core.egg-info/SOURCES.txt': ''}))
    base.unpack(archive, tmp_path / 'tree')
    files = {str(p.relative_to(tmp_path / 'tree')) for p in (tmp_path / 'tree').rglob('*.*')}
    assert files == set(SDIST)


def test_unpack_stays_in_its_folder(tmp_path: Path) -> None:
    archive = tmp_path / 'evil.tar.gz'
    with tarfile.open(archive, 'w:gz') as tar:
        tar.addfile(tarfile.TarInfo('top/../../evil'), io.BytesIO())
    with pytest.raises(SeriesError, match='not a sound source distribution'):
        base.unpack(archive, tmp_path / 'one' / 'two')
    assert not list(tmp_path.rglob('evil'))


def test_unpack_of_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / 'a.tar.gz').write_bytes(b'no')
    with pytest.raises(SeriesError, match='not a sound source distribution'):
        base.unpack(tmp_path / 'a.tar.gz', tmp_path / 'tree')
