"""What a series is: `patches/<branch>/series.toml`, its stages and its patch files."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email import message_from_bytes, policy
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import filelock
import platformdirs
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator


class SeriesError(Exception):
    """A refusal or failure that the user can act on: one sentence, then optional detail lines."""

    def __init__(self, sentence: str, *details: str) -> None:
        super().__init__(sentence)
        self.details = details


@dataclass(frozen=True)
class Patch:
    """One mailbox patch file of a stage."""

    path: Path

    @cached_property
    def message(self) -> tuple[str, str, str]:
        """Subject (without `[PATCH]`), body and date of the patch's commit."""
        mail = message_from_bytes(self.path.read_bytes(), policy=policy.default)
        subject = str(mail['Subject'] or '').removeprefix('[PATCH] ')
        body = str(mail.get_content()).partition('\n---\n')[0]
        return subject, body.strip(), str(mail['Date'])

    @property
    def subject(self) -> str:
        """The commit's subject line."""
        return self.message[0]

    @property
    def name(self) -> str:
        """File name, `NNNN-title.patch`."""
        return self.path.name

    def files(self, *, added: bool = False) -> list[str]:
        """Paths that the patch changes, or only those that it adds."""
        text = self.path.read_text(encoding='utf-8', errors='replace')
        new = r'new file mode \d+\n' if added else ''
        return re.findall(rf'^diff --git a/.+ b/(.+)\n{new}', text, re.M)


class _Table(BaseModel):
    model_config = ConfigDict(
        alias_generator=lambda name: name.replace('_', '-'),
        extra='forbid',
        frozen=True,
        populate_by_name=True,
    )


class Stage(_Table):
    """A `[[stage]]` table: patches that go upstream as one pull request, and their gate."""

    number: int = Field(ge=1)
    title: str
    patches: tuple[str, ...]
    reference_patches: int = Field(default=0, ge=0)
    unit_tests: tuple[str, ...] = ()
    regression: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    """Plugins in tests/support that the unit tests of this stage and those above are run with."""


class Series(_Table):
    """A `series.toml`: the base that the patches apply to, and the stages in order."""

    branch: str
    package: str
    version: str
    sha256: str = Field(pattern='^[0-9a-f]{64}$')
    upstream_tests: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = Field(alias='stage')
    _folder: Path = PrivateAttr()

    @field_validator('version')
    @classmethod
    def _is_version(cls, value: str) -> str:
        Version(value)
        return value

    @field_validator('stages')
    @classmethod
    def _in_order(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        if [stage.number for stage in stages] != list(range(1, len(stages) + 1)):
            raise ValueError('stages must be numbered 1, 2, … in order')
        for stage in stages:
            if stage.reference_patches > len(stage.patches):
                raise ValueError(f'stage {stage.number} has fewer patches than reference-patches')
        return stages

    @classmethod
    def load(cls, file: Path) -> Series:
        """Read and validate `file`; raises what `parse` raises."""
        return cls.parse(file.read_text(encoding='utf-8'), file)

    @classmethod
    def parse(cls, text: str, file: Path) -> Series:
        """The series that `text`, which is or shall be the content of `file`, describes.

        Raises:
            SeriesError: it is not TOML, or a key is missing, unknown or of the wrong kind.
        """
        try:
            series = cls.model_validate(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise SeriesError(f'{file} is not valid TOML: {error}.') from error
        except ValidationError as error:
            faults = [f'{".".join(map(str, e["loc"]))}: {e["msg"]}' for e in error.errors()]
            raise SeriesError(f'{file} does not describe a series.', *faults) from error
        series._folder = file.parent
        if series.branch != file.parent.name:
            raise SeriesError(f'{file} names the branch {series.branch}, unlike its folder.')
        return series

    @property
    def file(self) -> Path:
        """The series.toml itself."""
        return self._folder / 'series.toml'

    @property
    def release(self) -> str:
        """MAJOR.MINOR of the base."""
        version = Version(self.version)
        return f'{version.major}.{version.minor}'

    def stage(self, number: int) -> Stage:
        """The stage of that number.

        Raises:
            SeriesError: there is none.
        """
        if not 1 <= number <= len(self.stages):
            known = ', '.join(str(stage.number) for stage in self.stages)
            raise SeriesError(f'{self.branch} has no stage {number}; its stages: {known}.')
        return self.stages[number - 1]

    def folder(self, stage: Stage) -> Path:
        """The folder of the stage's patches."""
        return self._folder / f'stage{stage.number}'

    def patches(self, stage: Stage) -> list[Patch]:
        """The stage's patches in order.

        Raises:
            SeriesError: a listed file is not there.
        """
        patches = [Patch(self.folder(stage) / name) for name in stage.patches]
        for patch in patches:
            if not patch.path.is_file():
                raise SeriesError(f'{self.file} lists {patch.name}, which is not there.')
        return patches


@dataclass(frozen=True)
class Project:
    """The repository that holds `patches/`, and where its working files go."""

    root: Path

    @property
    def work(self) -> Path:
        """The git-ignored folder of the trees that the tool makes."""
        return self.root / '.series'

    @property
    def cache(self) -> Path:
        """The folder of downloaded source distributions; `SERIES_CACHE` overrides it.

        Raises:
            SeriesError: there is something else in its place.
        """
        default = platformdirs.user_cache_dir('megatron-flashinfer', appauthor=False)
        path = Path(os.environ.get('SERIES_CACHE') or default)
        if path.exists() and not path.is_dir():
            raise SeriesError(f'The cache, {path}, is not a folder; SERIES_CACHE names another.')
        return path

    @property
    def trees(self) -> Path:
        """Where trees are made."""
        return self.work / 'trees'

    def edit_tree(self, series: Series) -> Path:
        """Where the series is edited."""
        return self.work / 'edit' / series.branch

    def all_series(self) -> list[Series]:
        """Every base's series, newest base first.

        Raises:
            SeriesError: there is none.
        """
        files = (self.root / 'patches').glob('*/series.toml')
        known = sorted(map(Series.load, files), key=lambda s: Version(s.version), reverse=True)
        if not known:
            raise SeriesError(f'There is no patches/<branch>/series.toml in {self.root}.')
        return known

    def series(self, branch: str | None = None) -> Series:
        """The series of `branch`, or of the newest base.

        Raises:
            SeriesError: there is no such base, or none at all.
        """
        known = self.all_series()
        for series in known:
            if branch in (None, series.branch):
                return series
        names = ', '.join(series.branch for series in known)
        raise SeriesError(f'Unknown base {branch}; there are: {names}.')


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A new folder in `folder`, to build what is then renamed into place there.

    `folder` is locked meanwhile. A killed run's lock is void, and what it left is removed here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / '.lock'):
        for leftover in folder.glob('.scratch-*'):
            shutil.rmtree(leftover)
        with TemporaryDirectory(dir=folder, prefix='.scratch-') as name:
            yield Path(name)


def write_all(changes: dict[Path, bytes | None]) -> None:
    """Write, or for None delete, files: every new content is on the disk before any is moved in."""
    staged: list[tuple[Path, Path]] = []
    try:
        for path, content in changes.items():
            if content is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                staged.append((path.with_name(f'.{path.name}.new'), path))
                staged[-1][0].write_bytes(content)
        for new, path in staged:
            new.replace(path)
    finally:
        for new, _ in staged:
            new.unlink(missing_ok=True)
    for path, content in changes.items():
        if content is None:
            path.unlink(missing_ok=True)
