"""Signatures of a flashinfer-python that need not be installed: read from its source, not imported.

Importing FlashInfer takes a GPU's packages and many seconds; a wheel is a zip file of its source.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import subprocess
import sys
from importlib.resources.abc import Traversable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any
from zipfile import Path as ZipPath

from series.model import Project, scratch

MODULES = {'xqa': 'xqa.py', 'prefill': 'prefill.py', 'decode': 'decode.py', 'mla': 'mla/_core.py'}
"""The file that each is in."""
WHEELS = {
    '0.6.18.post1': 'adb6d2952b47131138e108bd2999b1fe18b71f1a4c0b2684f168753db9563991',
    '0.7.4': 'a051a62e09a2738e8b0de47a1944fd2f0f3eff01b728b662141ea660cb09dd32',
}
"""sha256 of each version's wheel on PyPI: the one that the stand-in imitates, the newest 0.7."""


class DownloadError(Exception):
    """A wheel is not in the cache and cannot be downloaded."""


def wheel(version: str) -> Path:
    """The wheel of a version in `WHEELS`, from the cache of the series or else from the index.

    Raises:
        DownloadError: it is not to be had.
        ValueError: the index has another file of that name.
    """
    cache = Project(Path(__file__).resolve().parents[2]).cache
    path = cache / f'flashinfer_python-{version}-py3-none-any.whl'
    if path.is_file() and _sha256(path) == WHEELS[version]:
        return path
    with scratch(cache) as folder:
        command = ('pip', 'download', '--quiet', '--no-deps', '--only-binary=:all:')
        wanted = ('--dest', str(folder), f'flashinfer-python=={version}')
        done = subprocess.run(
            [sys.executable, '-m', *command, *wanted], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise DownloadError(done.stderr.strip().rpartition('\n')[2])
        if (found := _sha256(folder / path.name)) != WHEELS[version]:
            raise ValueError(f'{path.name} has the sha256 {found}, not {WHEELS[version]}')
        (folder / path.name).replace(path)
    return path


def _sha256(path: Path) -> str:
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def of_wheel(path: Path) -> dict[str, Signature]:
    """`of_folder` of a wheel's content."""
    return of_folder(ZipPath(path))


def of_folder(folder: Traversable) -> dict[str, Signature]:
    """Signatures of the functions and methods of `MODULES`.

    Args:
        folder: Where the package's folder is, as site-packages, or a wheel's content.

    Returns:
        By name, as in `prefill.BatchPrefillWithPagedKVCacheWrapper.plan`, without annotations. A
        default that is no literal is its source.
    """
    found = {}
    for module, path in MODULES.items():
        file = folder.joinpath('flashinfer', *path.split('/'))
        if not file.is_file():
            continue
        tree = ast.parse(file.read_text(encoding='utf-8'))
        for node in tree.body:
            # Of several definitions of a name the last one holds, the others are overloads.
            if isinstance(node, ast.FunctionDef):
                found[f'{module}.{node.name}'] = _signature(node)
            elif isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        found[f'{module}.{node.name}.{method.name}'] = _signature(method)
    return found


def of_function(function: object) -> Signature:
    """The signature of what is imported, without annotations."""
    assert callable(function)
    parameters = inspect.signature(function).parameters.values()
    return Signature([parameter.replace(annotation=Parameter.empty) for parameter in parameters])


def _signature(function: ast.FunctionDef) -> Signature:
    arguments = function.args
    parameters: list[tuple[Any, str]] = [
        (Parameter.POSITIONAL_ONLY, argument.arg) for argument in arguments.posonlyargs
    ] + [(Parameter.POSITIONAL_OR_KEYWORD, argument.arg) for argument in arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(parameters) - len(arguments.defaults))
    defaults += arguments.defaults
    if arguments.vararg:
        parameters.append((Parameter.VAR_POSITIONAL, arguments.vararg.arg))
        defaults.append(None)
    parameters += [(Parameter.KEYWORD_ONLY, argument.arg) for argument in arguments.kwonlyargs]
    defaults += arguments.kw_defaults
    if arguments.kwarg:
        parameters.append((Parameter.VAR_KEYWORD, arguments.kwarg.arg))
        defaults.append(None)
    return Signature(
        [
            Parameter(name, kind, default=_value(default))
            for (kind, name), default in zip(parameters, defaults, strict=True)
        ]
    )


def _value(default: ast.expr | None) -> object:
    if default is None:
        return Parameter.empty
    try:
        return ast.literal_eval(default)
    except ValueError:
        return ast.unparse(default)
