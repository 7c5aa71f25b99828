"""The command line: `series --help`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from series import base, edit, tree
from series.checkout import Checkout
from series.model import Patch, Project, Series, SeriesError
from series.report import download, out, show_error, steps

app = typer.Typer(
    help='Apply, gate and edit the patch series for Megatron-LM under patches/.',
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={'help_option_names': ['-h', '--help']},
)

Base = Annotated[str, typer.Argument(metavar='BASE', help='The branch, as in `series list`.')]
StageNumber = Annotated[int, typer.Option('--stage', help='Number of the stage.')]
To = Annotated[Path | None, typer.Option(help='A Git checkout of Megatron-LM, of that branch.')]


@app.callback()
def _root(
    context: typer.Context,
    root: Annotated[
        Path, typer.Option(envvar='SERIES_ROOT', help='The repository that holds patches/.')
    ] = Path(__file__)
    .resolve()
    .parents[2],
) -> None:
    context.obj = Project(root.resolve())


def _fetched(project: Project, series: Series) -> Path:
    with download(f'Fetching {series.package} {series.version}') as progress:
        return base.fetch(project, series, progress)


def _count(series: Series, number: int) -> int:
    return len(tree.plan(series, number))


@app.command('list')
def list_(context: typer.Context) -> None:
    """Show the bases, their stages and the patches with their subjects."""
    for series in context.obj.all_series():
        out.print(f'[bold]{series.branch}[/]  {series.package} {series.version}')
        for stage in series.stages:
            out.print(f'  [bold]stage {stage.number}[/]  {escape(stage.title)}')
            for patch in series.patches(stage):
                out.print(f'    {patch.name[:4]}  {patch.subject}', markup=False, highlight=False)


@app.command()
def fetch(context: typer.Context, base_: Base) -> None:
    """Download the base's source distribution, or take it from the cache; print its path."""
    out.print(str(_fetched(context.obj, context.obj.series(base_))), soft_wrap=True)


@app.command()
def apply(context: typer.Context, base_: Base, number: StageNumber, to: To = None) -> None:
    """Apply a stage, a commit a patch: to a tree under .series/trees, or to a Git checkout.

    A new tree has the stages below too. A checkout needs them applied before; there all of the
    stage's patches are applied, or none.
    """
    project: Project = context.obj
    series = project.series(base_)
    stage = series.stage(number)
    done: list[tuple[Patch, float]] = []
    if to is not None:
        target = Checkout.at(to, series)
        with steps(f'Applying stage {number}', len(stage.patches)) as step:
            target.apply(number, lambda patch, s: (done.append((patch, s)), step(patch.name))[1])
        path = target.git.path
    else:
        _fetched(project, series)
        with steps(f'Applying stage {number}', _count(series, number)) as step:
            path = tree.make(
                project,
                series,
                number,
                fresh=True,
                on_patch=lambda patch, s: (done.append((patch, s)), step(patch.name))[1],
            )
    table = Table('Patch', 'Subject', 'Seconds')
    for patch, seconds in done:
        table.add_row(f'{patch.path.parent.name}/{patch.name[:4]}', patch.subject, f'{seconds:.1f}')
    out.print(table)
    out.print(f'Stage {number} is applied in {path}', soft_wrap=True)


@app.command('open')
def open_(
    context: typer.Context,
    base_: Base,
    force: Annotated[bool, typer.Option(help='Lose what was not exported.')] = False,
) -> None:
    """Make a work tree to edit the series in: a commit a patch, a branch a stage."""
    project: Project = context.obj
    series = project.series(base_)
    _fetched(project, series)
    with steps('Opening', _count(series, len(series.stages))) as step:
        path = edit.open_tree(
            project, series, force=force, on_patch=lambda patch, s: step(patch.name)
        )
    out.print(f'Edit {path}, then run `series export {series.branch}`.', soft_wrap=True)


@app.command()
def export(context: typer.Context, base_: Base) -> None:
    """Write the edited commits back to patches/, series.toml and the mirrors."""
    project: Project = context.obj
    changed = edit.export(project, project.series(base_))
    for path in changed:
        verb = 'wrote' if path.exists() else 'deleted'
        out.print(f'{verb} {path.relative_to(project.root)}', soft_wrap=True)
    if not changed:
        out.print('Nothing has changed.')


def main() -> None:
    """Run the command line; every failure is a sentence and a non-zero exit."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except SeriesError as error:
        show_error(error)
    except OSError as error:
        show_error(SeriesError(f'{error.filename or "Input or output"}: {error.strerror}.'))
    sys.exit(1)
