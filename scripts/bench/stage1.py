r"""Stage 1 on a GPU: the append kernel's bandwidth and the engine's step times, over the base.

    series apply core_r0.19.0 --stage 1
    git -C .series/trees/core_r0.19.0-stage1 worktree add --detach /tmp/base base
    python scripts/bench/stage1.py --base /tmp/base \
        --stage1 .series/trees/core_r0.19.0-stage1 --out docs/benchmarks

Needs a GPU, a FlashAttention that Megatron's dynamic engine takes, and what the engine imports.
Writes stage1.json and stage1.md and exits with 1 where a goal is missed. With `--render` it measures
nothing and writes stage1.md anew from the stage1.json in the folder.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import append
import environment
import report
import steps

MAX_RATIO = 1.01
MIN_OF_COPY = 0.85
LARGE_APPEND_TOKENS = 16384
APPEND_HEAD = ["shape", "tokens", "stage 1 µs", "base µs", "ratio", "TB/s", "of copy"]


def misses(appends: list[dict[str, Any]], steps_: list[dict[str, Any]]) -> list[str]:
    """The goals that were missed, in words."""
    missed = []
    for row in appends:
        case = f"append of {row['tokens']} tokens, {row['shape']}"
        if row["ratio"] is not None and row["ratio"] > MAX_RATIO:
            missed.append(f"{case}: {row['ratio']:.3f} of the base's time")
        if row["tokens"] >= LARGE_APPEND_TOKENS and row["of_copy"] < MIN_OF_COPY:
            missed.append(f"{case}: {row['of_copy']:.0%} of the copy's bandwidth")
    for row in steps_:
        if row["ratio"] > MAX_RATIO:
            missed.append(f"{row['case']}: {row['ratio']:.3f} of the base's time")
    return missed


def unclear(steps_: list[dict[str, Any]]) -> int:
    """How many cases' trees differ by no more than the base's own processes do."""
    return sum(max(row["ratio"], 1 / row["ratio"]) - 1 <= row["spread"] for row in steps_)


def markdown(result: dict[str, Any]) -> str:
    """The results as tables."""
    appends = []
    for row in result["append"]:
        us, ratio = row["us"], row["ratio"]
        appends.append(
            [
                row["shape"],
                str(row["tokens"]),
                f"{us['stage1']:.2f}",
                "" if ratio is None else f"{us['base']:.2f}",
                "" if ratio is None else f"{ratio:.2f}",
                f"{row['terabytes_per_second']:.2f}",
                f"{row['of_copy']:.0%}",
            ]
        )
    step_rows = [
        [
            row["case"],
            f"{row['base']:.3f}",
            f"{row['stage1']:.3f}",
            f"{row['ratio']:.3f}",
            f"{row['spread']:.0%}",
        ]
        for row in result["steps"]
    ]
    goals = f"ratios at most {MAX_RATIO}, large appends at least {MIN_OF_COPY:.0%} of a copy"
    return "\n".join(
        [
            *report.head("Stage 1 on a GPU", "stage1.py", __doc__, result["environment"]),
            *(line for note in result.get("notes", []) for line in (note, "")),
            "## Append",
            "",
            "Device time of one layer's append in bf16, in CUDA graphs, inputs and targets larger",
            "than the L2 cache. A byte read and a byte written both count, in the copy as well.",
            "`ratio` is stage 1 over base.",
            "",
            *report.table(APPEND_HEAD, appends),
            "",
            "## Engine steps",
            "",
            f"Whole steps of the engine on {steps.SHAPE.layers} layers of an 8B's shape in bf16, as wall",
            "time with the device synchronised, and host time of calls of the context's append.",
            "A figure is the tenth percentile of a process's steps, or its least call, and of that",
            f"the least of {steps.ALTERNATIONS} processes of each tree, run in alternation; `spread`",
            "is how far the base's own processes lie apart. FlashAttention-4, where it is installed,",
            "attends with one split.",
            "",
            f"In {unclear(result['steps'])} of {len(result['steps'])} cases the two trees differ by no"
            " more than `spread`: there no difference was",
            "found, which is not to say that there is none of 1%.",
            "",
            *report.table(["case", "base", "stage 1", "ratio", "spread"], step_rows),
            "",
            "## Goals",
            "",
            *([f"- missed: {miss}" for miss in result["missed"]] or [f"All met: {goals}."]),
            "",
        ]
    )


def main() -> int:
    """Measure, write, and say which goals were missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, help="tree of the unpatched base")
    parser.add_argument("--stage1", type=Path, help="tree with stage 1 applied")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--render", action="store_true", help="write only stage1.md, anew")
    args = parser.parse_args()
    results: Path = args.out / "stage1.json"
    if args.render:
        result: dict[str, Any] = json.loads(results.read_text())
    else:
        if args.base is None or args.stage1 is None:
            parser.error("--base and --stage1 are required, unless with --render")
        if not torch.cuda.is_available():
            sys.exit("This benchmark needs a GPU, and torch finds none.")
        appends = append.run(args.base, args.stage1)
        step_rows = steps.run(args.base, args.stage1)
        result = {
            "environment": environment.versions(),
            "append": appends,
            "steps": step_rows,
            "missed": misses(appends, step_rows),
        }
        args.out.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(result, indent=1) + "\n")
    text = markdown(result)
    (args.out / "stage1.md").write_text(text)
    print(text)
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
