"""How results are written down, the same for all benchmarks."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def head(title: str, script: str, doc: str | None, where: Mapping[str, str]) -> list[str]:
    """A report's first lines: what made it, by which command, and on what.

    Args:
        title: Of the report.
        script: The benchmark's file name.
        doc: Its docstring, in which commands are indented.
        where: As of `environment.versions`; empty if it differs within the report.
    """
    return [
        f"# {title}",
        "",
        f"Made by `scripts/bench/{script}`, at the root of the repository:",
        "",
        *(line for line in (doc or "").splitlines() if line.startswith("    ")),
        "",
        *([*table(list(where), [list(where.values())]), ""] if where else []),
    ]


def publish(path: Path, text: str, plot: Callable[[Path], None]) -> None:
    """Print a report and write it to a file, with matplotlib its plot beside it.

    Args:
        path: The report's, with the suffix `.md`.
    """
    path.write_text(text)
    if importlib.util.find_spec("matplotlib"):
        plot(path.with_suffix(".png"))
    print(text)
