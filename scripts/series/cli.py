"""The command line: `series --help`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from series import base, checks, edit, gates, tree
from series.checkout import Checkout
from series.model import Patch, Project, Series, SeriesError
from series.report import (
    download,
    explain,
    out,
    patch_rows,
    result_rows,
    results_table,
    show_error,
    show_verdicts,
    steps,
)

app = typer.Typer(
    help='Apply, gate and edit the patch series for Megatron-LM under patches/.',
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={'help_option_names': ['-h', '--help']},
)

Base = Annotated[str, typer.Argument(metavar='BASE', help='The branch, as in `series list`.')]
StageNumber = Annotated[int, typer.Option('--stage', help='Number of the stage.')]
Junit = Annotated[Path | None, typer.Option(help='Write the results as JUnit XML.')]


def _named(path: str) -> Path:
    if not path:  # An unset variable, say; as a path it would be the current folder.
        raise typer.BadParameter('it is empty.')
    return Path(path)


To = Annotated[
    Path | None,
    typer.Option(
        parser=_named, metavar='PATH', help='A Git checkout of Megatron-LM, of that branch.'
    ),
]
Root = Annotated[
    Path,
    typer.Option(
        envvar='SERIES_ROOT', show_default=False, help='The repository that holds patches/.'
    ),
]
_HERE = Path(__file__).resolve().parents[2]


@app.callback()
def _root(context: typer.Context, root: Root = _HERE) -> None:
    context.obj = Project(root.resolve())


def _fetched(project: Project, series: Series) -> Path:
    with download(f'Fetching {series.package} {series.version}') as progress:
        return base.fetch(project, series, progress)


def _applied(
    project: Project, series: Series, number: int, to: Path | None = None
) -> tuple[Path, list[tuple[Patch, float]]]:
    """Apply a stage with progress; where, and which patches in how many seconds."""
    done: list[tuple[Patch, float]] = []
    with steps(f'Applying stage {number}') as expect:

        def on_patch(patch: Patch, seconds: float) -> None:
            done.append((patch, seconds))
            step(patch.name)

        if to is None:
            step = expect(len(tree.plan(series, number)))
            return tree.make(project, series, number, fresh=True, on_patch=on_patch), done
        step = expect(len(series.stage(number).patches))
        checkout = Checkout.at(to, series)
        checkout.apply(number, on_patch)
        return checkout.git.path, done


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
    series.stage(number)
    if to is None:
        _fetched(project, series)
    path, done = _applied(project, series, number, to)
    table = results_table()
    patch_rows(table, done)
    out.print(table)
    out.print(f'Stage {number} is applied in {path}', soft_wrap=True)


@app.command()
def gate(
    context: typer.Context,
    base_: Base,
    number: StageNumber,
    to: To = None,
    every_patch: Annotated[bool, typer.Option(help='After every single patch, too.')] = False,
    junit: Junit = None,
) -> None:
    """Run a stage's unit tests and regression; on a checkout upstream's own tests as well."""
    project: Project = context.obj
    series = project.series(base_)
    series.stage(number)
    if to is None:
        _fetched(project, series)
    with steps('Testing') as expect:
        results = gates.gate(
            project, series, number, to=to, every_patch=every_patch, on_jobs=expect
        )
    table = results_table()
    result_rows(table, results)
    _conclude(table, results, junit)


@app.command()
def verify(
    context: typer.Context,
    base_: Annotated[
        str | None, typer.Argument(metavar='[BASE]', help='By default the newest.')
    ] = None,
    junit: Junit = None,
) -> None:
    """Fetch the base, then apply and gate stage after stage: the main job."""
    project: Project = context.obj
    series = project.series(base_)
    _fetched(project, series)
    table = results_table()
    results: list[gates.Result] = []
    for stage in series.stages:
        _, done = _applied(project, series, stage.number)
        with steps(f'Testing stage {stage.number}') as expect:
            own = gates.gate(project, series, stage.number, on_jobs=expect)
        patch_rows(table, done[len(done) - len(stage.patches) :])
        result_rows(table, own)
        table.add_section()
        results += own
    _conclude(table, results, junit)


def _conclude(table: Table, results: list[gates.Result], junit: Path | None) -> None:
    out.print(table)
    passed = explain(results)
    if junit is not None:
        gates.write_junit(junit, results)
    if not passed:
        raise typer.Exit(1)
    out.print('[bold green]All gates passed.[/]')


@app.command()
def check(context: typer.Context) -> None:
    """Check patches, mirrors, messages and style; of every base, and of this repository's code."""
    project: Project = context.obj
    for series in project.all_series():
        _fetched(project, series)
    with steps('Checking') as expect:
        verdicts = checks.run(project, expect)
    if not show_verdicts(verdicts):
        raise typer.Exit(1)


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
    with steps('Opening') as expect:
        step = expect(len(tree.plan(series, len(series.stages))))
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
        show_error(
            SeriesError(
                f'{error.filename or "A file cannot be read or written"}: {error.strerror}.'
            )
        )
    sys.exit(1)
