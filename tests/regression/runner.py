"""Runs scenarios on one tree, in this process, and leaves an outcome file for each.

    python runner.py --tree TREE --out FOLDER [--only SCENARIO]... [--hnd] [--faults]

`TREE` is a folder that holds `megatron/`. Scenarios of two ranks run in two processes of their own
beside the others. A scenario that raises is an outcome, too; this ends with status 1 only when it
cannot run scenarios at all.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / 'support')]

from scenarios import FAULTS, HND, SCENARIOS, Scenario  # noqa: E402


@dataclass(frozen=True)
class Task:
    """A scenario, with or without a deliberate fault."""

    scenario: Scenario
    fault: str = ''

    @property
    def name(self) -> str:
        """The name of its outcome."""
        return f'{self.fault}.{self.scenario.name}' if self.fault else self.scenario.name


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--tree', type=Path, required=True, help='folder that holds megatron/')
    parser.add_argument('--out', type=Path, required=True, help='where outcomes go')
    parser.add_argument('--only', action='append', help='a scenario to run; may be repeated')
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    parser.add_argument('--hnd', action='store_true', help='heads-first twins, too')
    parser.add_argument('--faults', action='store_true', help='deliberate faults, too')
    return parser.parse_args()


def _prepare(tree: Path, device: str) -> None:
    """Set up the process before torch and Megatron are imported."""
    os.environ |= {
        # One after the other, always in the same order.
        'OMP_NUM_THREADS': '1',
        'CUBLAS_WORKSPACE_CONFIG': ':4096:8',
        # Compiling takes longer than all scenarios, and is not what they are about.
        'TORCH_COMPILE_DISABLE': '1',
        # Ranks are forked, so that CUDA must not have been started to count the GPUs.
        'PYTORCH_NVML_BASED_CUDA_CHECK': '1',
    }
    if device == 'cpu':
        os.environ |= {'CUDA_VISIBLE_DEVICES': '', 'TRITON_INTERPRET': '1'}
    sys.path.insert(0, str(tree.resolve()))

    import torch

    import megatron_on_cpu

    if device == 'cpu':
        megatron_on_cpu.install()
    else:
        # Real kernels take no pages as small as these; and attention is the same on both sides.
        sys.path.insert(0, str(megatron_on_cpu.KERNELS))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    import megatron.core

    where = Path(megatron.core.__file__).resolve()
    if tree.resolve() not in where.parents:
        raise SystemExit(f'megatron was imported from {where}, not from {tree}')


def _tasks(arguments: argparse.Namespace) -> list[Task]:
    scenarios = list(SCENARIOS.values())
    if arguments.device == 'cpu':
        scenarios = [scenario for scenario in scenarios if not scenario.gpu_only]
    if arguments.hnd:
        scenarios += HND.values()
    if arguments.only:
        scenarios = [scenario for scenario in scenarios if scenario.name in arguments.only]
    tasks = [Task(scenario) for scenario in scenarios]
    if arguments.faults:
        tasks += [Task(SCENARIOS[name], fault) for fault in FAULTS for name in FAULTS[fault]]
    return tasks


def _run(tasks: Iterable[Task], out: Path, rank: int, ranks: int, device: str) -> None:
    """Run tasks as one of some ranks, and leave their outcomes."""
    import torch

    import scenario
    import tiny_engine

    where = torch.device('cuda', rank) if device == 'cuda' else torch.device('cpu')
    if device == 'cuda':
        torch.cuda.set_device(where)
    tiny_engine.join_ranks(rank, ranks, out / f'store-{ranks}')
    scenario.prepare(where)
    for task in tasks:
        start = time.monotonic()
        outcome = scenario.run(task.scenario, where, task.fault)
        outcome.seconds = time.monotonic() - start
        outcome.save(out / f'{task.name}.rank{rank}.pt')


def _fork(tasks: Iterable[Task], out: Path, rank: int, ranks: int, device: str) -> int:
    """Run tasks in a new process, which has what is imported here; its id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        _run(tasks, out, rank, ranks, device)
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def main() -> int:
    """Run what the command line says; the exit status."""
    arguments = _arguments()
    out, device = arguments.out, arguments.device
    out.mkdir(parents=True, exist_ok=True)
    _prepare(arguments.tree, device)
    import torch

    import scenario  # noqa: F401  # so that it and all of Megatron are there when ranks are forked

    can_pair = device == 'cpu' or torch.cuda.device_count() > 1
    tasks = _tasks(arguments)
    paired = [task for task in tasks if task.scenario.ranks == 2 and can_pair]
    alone = [task for task in tasks if task not in paired]
    others = [_fork(paired, out, rank, 2, device) for rank in range(2) if paired]
    _run(alone, out, 0, 1, device)
    return max([os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) for other in others], default=0)


if __name__ == '__main__':
    raise SystemExit(main())
