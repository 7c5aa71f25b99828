"""What the user sees: the console, progress, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from series.model import SeriesError

out = Console()
err = Console(stderr=True)


def show_error(error: SeriesError) -> None:
    """Print a refusal: its sentence, then its details."""
    err.print(f'[bold red]Error:[/] {escape(str(error))}', soft_wrap=True)
    for detail in error.details:
        err.print(f'  {detail}', markup=False, highlight=False, soft_wrap=True)


@contextmanager
def download(title: str) -> Iterator[Callable[[int, int | None], None]]:
    """A progress bar in bytes; yields what to call with the bytes done and in all."""
    columns = (TextColumn('{task.description}'), BarColumn(), DownloadColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(title, total=None, visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)


@contextmanager
def steps(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar over `total` steps; yields what to call with the name of a finished step."""
    columns = (
        TextColumn('{task.description}'),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn('{task.fields[step]}', style='dim', markup=False),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(title, total=total, step='')
        yield lambda name: progress.update(task, advance=1, step=name)
