"""What the user sees: the console, progress, tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from rich.table import Column, Table

from series.checks import Verdict
from series.gates import OnJobs, Result
from series.model import Patch, SeriesError

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
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(title, total=None, visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)


@contextmanager
def steps(title: str) -> Iterator[OnJobs]:
    """A progress bar; yields what to call with a number of steps to come.

    That gives what to call with the name of each finished step. Where there is no terminal, as in
    CI, each is a line.
    """
    columns = (
        TextColumn('{task.description}'),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn('{task.fields[step]}', style='dim', markup=False),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(title, total=0, step='')

        def step(name: str) -> None:
            progress.update(task, advance=1, step=name)
            if not err.is_terminal:
                err.print(f'{title}: {name}', markup=False, highlight=False, soft_wrap=True)

        def expect(count: int) -> Callable[[str], None]:
            progress.update(task, total=(progress.tasks[task].total or 0) + count)
            return step

        yield expect


def patch_rows(table: Table, done: Sequence[tuple[Patch, float]]) -> None:
    """Add a row for each patch, with the seconds that applying it took."""
    for patch, seconds in done:
        name = f'{patch.path.parent.name}/{patch.name[:4]} {escape(patch.subject)}'
        table.add_row(name, '[green]applied[/]', '', '', f'{seconds:.1f}')


def result_rows(table: Table, results: Sequence[Result]) -> None:
    """Add a row for each result of a gate."""
    for result in results:
        failed = str(len(result.failures))
        table.add_row(
            escape(result.name),
            str(result.passed),
            failed if result.ok else f'[bold red]{failed}[/]',
            str(sum(result.skipped.values())),
            f'{result.seconds:.1f}',
        )


def results_table() -> Table:
    """An empty table for patches and tests."""
    table = Table()
    table.add_column('Patch or tests', overflow='fold')
    for name in ('Passed', 'Failed', 'Skipped', 'Seconds'):
        table.add_column(name, justify='right')
    return table


def explain(results: Sequence[Result]) -> bool:
    """Print why tests were skipped and what failed; tells whether nothing did."""
    counted = (result.skipped for result in results if not result.informative)
    skipped: Counter[str] = sum(counted, Counter())
    for reason, count in sorted(skipped.items()):
        out.print(f'skipped {count}: {reason}', style='dim', markup=False, soft_wrap=True)
    for result in results:
        for problem in result.problems():
            err.print(f'[bold red]Failed:[/] {escape(problem)}', highlight=False, soft_wrap=True)
    return all(result.ok for result in results)


def show_verdicts(verdicts: Sequence[Verdict]) -> bool:
    """Print a table of checks, then their complaints; tells whether there are none."""
    table = Table('Check', Column('Verdict'), Column('Seconds', justify='right'))
    for verdict in verdicts:
        word = '[bold red]fails[/]' if verdict.complaints else '[green]holds[/]'
        table.add_row(escape(verdict.name), word, f'{verdict.seconds:.1f}')
    out.print(table)
    for verdict in verdicts:
        for complaint in verdict.complaints:
            text = f'[bold red]{escape(verdict.name)}:[/] {escape(complaint)}'
            err.print(text, highlight=False, soft_wrap=True)
    return not any(verdict.complaints for verdict in verdicts)
