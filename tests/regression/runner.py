"""Runs scenarios on one tree, in this process, and leaves an outcome file for each.

    python runner.py --tree TREE --out FOLDER [--set SET]... [--only SCENARIO]...

`TREE` is a folder that holds `megatron/`. Scenarios of two ranks run in two processes of their own
beside the others, of which there may be several. A scenario that raises is an outcome, too; this
ends with status 1 only when it cannot run scenarios at all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / 'support')]

from scenarios import SEED, SETS, Task, tasks  # noqa: E402


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--tree', type=Path, required=True, help='folder that holds megatron/')
    parser.add_argument('--out', type=Path, required=True, help='where outcomes go')
    parser.add_argument('--only', action='append', help='a scenario to run; may be repeated')
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    parser.add_argument('--set', action='append', choices=SETS, help='may be repeated')
    parser.add_argument('--seed', type=int, default=SEED, help='of what is drawn at random')
    parser.add_argument('--processes', type=int, default=1, help='that share the work')
    return parser.parse_args()


def _prepare(tree: Path, device: str, needs_flashinfer: bool) -> None:
    """Set up the process before torch and Megatron are imported, unless it was forked from one."""
    if 'megatron' in sys.modules:
        return
    os.environ |= {
        # One after the other, always in the same order.
        'OMP_NUM_THREADS': '1',
        'CUBLAS_WORKSPACE_CONFIG': ':4096:8',
        # Compiling takes longer than all scenarios, and is not what they are about.
        'TORCH_COMPILE_DISABLE': '1',
        # What shares the work has to start CUDA itself, so that it must not be to count the GPUs.
        'PYTORCH_NVML_BASED_CUDA_CHECK': '1',
    }
    if device == 'cpu':
        os.environ |= {'CUDA_VISIBLE_DEVICES': '', 'TRITON_INTERPRET': '1'}
    sys.path.insert(0, str(tree.resolve()))

    import torch

    import flashinfer_on_cpu
    import megatron_on_cpu

    if device == 'cpu':
        megatron_on_cpu.install()
        if needs_flashinfer:
            flashinfer_on_cpu.install()
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
    found = {
        task.name: task
        for name in arguments.set or ['all']
        for task in tasks(name, arguments.device, arguments.seed)
    }
    return [
        task
        for task in found.values()
        if not (arguments.device == 'cpu' and task.scenario.gpu_only)
        and (not arguments.only or task.scenario.name in arguments.only)
    ]


class _Shared:
    """Tasks of which each goes to the process that asks next.

    Args:
        work: The tasks.
        next_task: A number in memory that the processes share, 0 at first.
    """

    def __init__(self, work: list[Task], next_task: Any) -> None:
        self._work, self._next = work, next_task

    def __iter__(self) -> Iterator[Task]:
        while True:
            with self._next.get_lock():
                number = self._next.value
                self._next.value += 1
            if number >= len(self._work):
                return
            yield self._work[number]


def _run(
    prepared: tuple[Path, str, bool],
    work: Iterable[Task],
    out: Path,
    store: str,
    rank: int,
    ranks: int,
) -> None:
    """Run tasks as one of the ranks that meet at a store, and leave their outcomes."""
    _prepare(*prepared)
    import torch

    import scenario
    import tiny_engine

    is_gpu = prepared[1] == 'cuda'
    where = torch.device('cuda', rank) if is_gpu else torch.device('cpu')
    if is_gpu:
        torch.cuda.set_device(where)
    tiny_engine.join_ranks(rank, ranks, out / store)
    scenario.prepare(where)
    for task in work:
        tiny_engine.divide_model(min(task.scenario.stages, ranks))
        start = time.monotonic()
        outcome = scenario.run(task.scenario, where, task.fault)
        outcome.seconds = time.monotonic() - start
        outcome.save(out / f'{task.name}.rank{rank}.pt')
        if is_gpu:
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                # All that follows here would be an error of this one's making.
                traceback.print_exc()
                return


def main() -> int:
    """Run what the command line says; the exit status."""
    arguments = _arguments()
    out, device, parts = arguments.out.resolve(), arguments.device, arguments.processes
    out.mkdir(parents=True, exist_ok=True)
    (out / 'pair').unlink(missing_ok=True)  # an earlier run's store, at which nobody would come
    work = _tasks(arguments)
    flashinfer = any('inference_attention_backend' in task.scenario.inference for task in work)
    prepared = (arguments.tree, device, flashinfer)
    _prepare(*prepared)
    import torch

    import scenario  # noqa: F401  # so that it and all of Megatron are there for what is forked

    can_pair = device == 'cpu' or torch.cuda.device_count() > 1
    paired = [task for task in work if task.scenario.ranks == 2 and can_pair]
    alone = [task for task in work if task not in paired]
    # FlashInfer starts CUDA when it is imported, which no fork survives.
    context: Any = multiprocessing.get_context('fork' if device == 'cpu' else 'spawn')
    shared = _Shared(alone, context.Value('i', 0))
    jobs: list[Any] = [(paired, out, 'pair', rank, 2) for rank in range(2) if paired]
    jobs += [(shared, out, f'alone-{part}', 0, 1) for part in range(1, parts)]
    others = [context.Process(target=_run, args=(prepared, *job)) for job in jobs]
    for other in others:
        other.start()
    _run(prepared, shared, out, 'alone-0', 0, 1)
    for other in others:
        other.join()
    return int(any(other.exitcode for other in others))


if __name__ == '__main__':
    raise SystemExit(main())
