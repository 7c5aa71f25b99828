"""The base: a source distribution, found on the package index, verified and cached."""

from __future__ import annotations

import hashlib
import os
import ssl
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

from series.model import Project, Series, SeriesError, scratch

# Packaging metadata that the index adds; the Git branch does not have it.
_GENERATED = ('PKG-INFO', 'setup.cfg')

Progress = Callable[[int, int | None], None]


def _sha256(path: Path) -> str:
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def cached(project: Project, series: Series) -> Path | None:
    """The cached source distribution, or None when it is missing or not the right one."""
    path = _cache_path(project, series)
    return path if path.is_file() and _sha256(path) == series.sha256 else None


def _cache_path(project: Project, series: Series) -> Path:
    return project.cache / f'{series.package}-{series.version}.tar.gz'


def fetch(project: Project, series: Series, progress: Progress = lambda done, total: None) -> Path:
    """The source distribution of `series`, from the cache or else from the package index.

    The index is UV_INDEX_URL's or PIP_INDEX_URL's, by default PyPI.

    Args:
        progress: called with the bytes downloaded so far and in all (None: not known).

    Raises:
        SeriesError: the index is out of reach, does not have it, or serves another file.
    """
    if (path := cached(project, series)) is not None:
        return path
    path = _cache_path(project, series)
    with scratch(project.cache) as folder:
        part = _download(project, series, folder, progress)
        if (found := _sha256(part)) != series.sha256:
            raise SeriesError(
                f'The package index serves another {path.name} than {series.file} names.',
                f'expected sha256 {series.sha256}',
                f'   found sha256 {found}',
            )
        part.replace(path)
    return path


def _download(project: Project, series: Series, folder: Path, progress: Progress) -> Path:
    # Only a download needs these; they would add a quarter of a second to every command.
    import httpx2
    import truststore
    from unearth import PackageFinder, UnpackError
    from unearth.auth import MultiDomainBasicAuth
    from unearth.fetchers import Fetcher, PyPIClient
    from unearth.preparer import download_link

    variables = ('UV_INDEX_URL', 'PIP_INDEX_URL')
    index = next(filter(None, map(os.environ.get, variables)), 'https://pypi.org/simple/')
    wanted = f'{series.package}=={series.version}'
    stale = _cache_path(project, series)
    has = f'{stale} has the wrong sha256' if stale.exists() else 'it is not in the cache'
    try:
        with PyPIClient(
            trusted_hosts=os.environ.get('PIP_TRUSTED_HOST', '').split(),
            verify=truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            auth=MultiDomainBasicAuth(index_urls=[index]),
            follow_redirects=True,
        ) as pypi:
            # unearth's own client does not quite fit unearth's protocol.
            client = cast(Fetcher, pypi)
            finder = PackageFinder(
                client, index_urls=[index], no_binary=[series.package], ignore_compatibility=True
            )
            match = finder.find_best_match(wanted).best
            if match is None:
                raise SeriesError(
                    f'The package index {index} has no source distribution of {wanted}, and {has}.'
                )
            return download_link(
                client,
                match.link,
                folder,
                download_reporter=lambda link, done, total: progress(done, total),
            )
    except (httpx2.HTTPError, httpx2.InvalidURL, UnpackError, ValueError) as error:
        raise SeriesError(
            f'The source of {wanted} cannot be downloaded, and {has}.', f'{index}: {error}'
        ) from error


def unpack(archive: Path, target: Path) -> None:
    """Unpack the files of a source distribution into the new folder `target`.

    Raises:
        SeriesError: it is not a source distribution, or names a path outside its folder.
    """
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                _, _, name = member.name.partition('/')
                first = name.partition('/')[0]
                if not name or first in _GENERATED or first.endswith('.egg-info'):
                    continue
                tar.extract(member.replace(name=name, deep=False), target, filter='data')
    except tarfile.TarError as error:
        raise SeriesError(f'{archive} is not a sound source distribution: {error}') from error
