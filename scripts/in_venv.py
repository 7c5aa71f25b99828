#!/usr/bin/env python3
"""Run a command in this repository's virtual environment, made first where need be.

    python3 scripts/in_venv.py COMMAND [ARGUMENT ...]

Any Python from 3.8 on runs this script. It finds a Python from 3.12 on (3.12 itself if there is
one) on PATH, in pyenv or in uv, makes `.venv` with it, installs this project for development, and
then becomes `.venv/bin/COMMAND`. The installation is done again when pyproject.toml changes or
when it was interrupted.
"""

import fcntl
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from typing import Dict, Iterator, List, Tuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "installed")
LOG = os.path.join(VENV, "install.log")
NEEDED = (3, 12)
REPORT_SECONDS = 15


def say(text: str) -> None:
    """Print a line of progress, apart from the command's own output."""
    print("in_venv: " + text, file=sys.stderr, flush=True)


def output(*command: str) -> str:
    """The last line that a command prints; empty when it fails or is not there."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return ""
    lines = done.stdout.decode(errors="replace").split("\n") if done.returncode == 0 else []
    return lines[-2].strip() if len(lines) > 1 else ""


def candidates() -> Iterator[str]:
    """Paths of Python executables that may do: this one, PATH's, pyenv's, uv's."""
    yield sys.executable
    folders = os.environ.get("PATH", "").split(os.pathsep)
    pyenvs = {os.environ.get("PYENV_ROOT", ""), os.path.expanduser("~/.pyenv")}
    pyenvs.add(output("pyenv", "root"))
    for root in filter(None, pyenvs):
        folders += glob.glob(os.path.join(root, "versions", "*", "bin"))
    for folder in filter(None, folders):
        for path in glob.glob(os.path.join(folder, "python3*")):
            if re.match(r"python3(\.\d+)?$", os.path.basename(path)):
                yield path
    yield output("uv", "python", "find", ">=%d.%d" % NEEDED)


def find_python() -> str:
    """The candidate with the lowest version that is high enough and that can make environments."""
    test = "import sys, venv, ensurepip; print('%d %d %d' % sys.version_info[:3])"
    found = {}  # type: Dict[Tuple[int, ...], str]
    for path in candidates():
        version = tuple(map(int, output(path, "-c", test).split())) if path else ()
        if version >= NEEDED:
            found.setdefault(version, path)
    if not found:
        sys.exit(
            "in_venv: this project needs Python %d.%d or newer with its venv module, and there is"
            " none on PATH, in pyenv or in uv; install one, for example with"
            " `uv python install %d.%d`." % (NEEDED + NEEDED)
        )
    # Of the lowest minor version, the newest release.
    return found[max(version for version in found if version[:2] == min(found)[:2])]


def current() -> str:
    """What a finished installation's stamp says when nothing has changed since."""
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def installed() -> str:
    """The stamp of the finished installation; empty when there is none, or its Python is gone."""
    try:
        with open(STAMP) as file:
            return file.read() if os.path.exists(PYTHON) else ""
    except OSError:
        return ""


def run_logged(command: List[str]) -> None:
    """Run a long command with its output in LOG, and tell now and then how it is doing."""
    start = time.time()
    with open(LOG, "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            while True:
                try:
                    status = process.wait(REPORT_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    say(
                        "installing for %d s; %.90s"
                        % (time.time() - start, log_lines()[-1].strip())
                    )
        except BaseException:
            process.kill()
            raise
    if status != 0:
        sys.exit("\n".join(log_lines()[-15:] + ["in_venv: the installation failed; see " + LOG]))


def log_lines() -> List[str]:
    """The lines of LOG so far, at least one."""
    with open(LOG, errors="replace") as log:
        return log.read().splitlines() or [""]


def install() -> None:
    """Make VENV, or bring it up to date, and leave the stamp as the last thing."""
    if installed():
        # Whatever goes wrong from here on, the next run begins afresh.
        os.remove(STAMP)
        say("pyproject.toml has changed; updating .venv")
    else:
        python = find_python()
        say("making .venv with %s; PyTorch comes along, so this takes minutes" % python)
        if os.path.exists(VENV):
            shutil.rmtree(VENV)
        subprocess.run([python, "-m", "venv", VENV], check=True)
    pip = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"]
    run_logged(pip + ["--editable", ".[dev]"])
    with open(STAMP, "w") as file:
        file.write(current())


def main() -> None:
    """Install if need be, then become the command."""
    if len(sys.argv) < 2:
        sys.exit("usage: python3 scripts/in_venv.py COMMAND [ARGUMENT ...]")
    if installed() != current():
        lock = os.open(ROOT, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)  # A second run waits here, then finds all installed.
        if installed() != current():
            install()
        os.close(lock)
    folder = os.path.join(VENV, "bin")
    command = os.path.join(folder, sys.argv[1])
    if not os.path.exists(command):
        sys.exit("in_venv: there is no command %s in %s" % (sys.argv[1], folder))
    os.environ["VIRTUAL_ENV"] = VENV
    os.environ["PATH"] = folder + os.pathsep + os.environ.get("PATH", "")
    os.execv(command, [command] + sys.argv[2:])


if __name__ == "__main__":
    main()
