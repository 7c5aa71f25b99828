r"""Kernels on a GPU: append, decode, prefill and mixed attention of one layer.

    series apply core_r0.19.0 --stage 2
    git -C .series/trees/core_r0.19.0-stage2 worktree add --detach /tmp/base base
    python scripts/bench/kernels.py --base /tmp/base \
        --stage2 .series/trees/core_r0.19.0-stage2 --out docs/benchmarks

Needs a GPU, FlashInfer and a FlashAttention. `--part` may be repeated; parts that were measured
before and are not named stay in the results. Writes kernels.json, kernels.md and kernels.png (with
matplotlib) and exits with 1 where a goal is missed. With `--render` it measures nothing and writes
the others anew from the kernels.json in the folder.
"""

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import append
import attention
import environment
import latents
import model
import report
import timing

GIB = 1 << 30
MATRIX = 8192
LARGE_BYTES = GIB  # keys and values of a layer, from which on bandwidth is all that counts
DECODE_RATIO = {("GQA 4:1", "256 x 1024"): 1.15}
PREFILL_RATIO, MIXED_RATIO = 1.15, 1.25
OF_READ, OF_MATRIX, OF_COPY = 0.90, 0.60, 0.85
LARGE_APPEND_TOKENS = 16384
LATENT_PATHS = ("flashinfer", "fa2", "flash")
PARTS = ("append", "attention", "latents", "padding")


def ceilings() -> dict[str, float]:
    """What the card does in this run: bytes and operations a second."""
    source = torch.randn(GIB, device="cuda")
    target = torch.empty_like(source)
    left, right = (
        torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    product = torch.empty_like(left)
    calls: dict[str, timing.Call] = {
        "read": lambda _: source.sum(),
        "copy": lambda _: target.copy_(source),
        "matrix": lambda _: torch.mm(left, right, out=product),
    }
    work = {"read": 4 * GIB, "copy": 8 * GIB, "matrix": 2 * MATRIX**3}
    graphs = {name: timing.graph_of(call, 1) for name, call in calls.items()}
    us = timing.alternate(graphs, 1)
    return {name: work[name] / us[name] * 1e6 for name in calls}


def ratio(row: dict[str, Any]) -> float:
    """Time by FlashAttention over time by FlashInfer; not a number if it was not there."""
    return float(row["us"].get("flash", math.nan) / row["us"]["flashinfer"])


def of_ceiling(row: dict[str, Any], card: dict[str, float], path: str = "flashinfer") -> float:
    """Decode: share of the read bandwidth. Else, and if more where heads share latents: of matrix rate."""
    read, matrix = (
        float(row[work] / row["us"][path] * 1e6 / card[most])
        for work, most in (("bytes", "read"), ("operations", "matrix"))
    )
    if row["phase"] != "decode":
        return matrix
    return max(read, matrix) if row["shape"] in latents.SHAPES else read


def wanted_ratio(row: dict[str, Any]) -> float:
    """How many times as fast as FlashAttention FlashInfer should be."""
    if row["shape"] in latents.SHAPES:
        return 1.0
    if row["phase"] == "mixed":
        return MIXED_RATIO
    if row["phase"] == "decode":
        return DECODE_RATIO.get((row["shape"], row["batch"]), 1.0)
    count, _, tokens = row["batch"].split(" ")[:3]
    return PREFILL_RATIO if int(count) > 1 and int(tokens) <= 2048 else 1.0


def misses(result: dict[str, Any]) -> list[str]:
    """The goals that were missed, in words."""
    missed = []
    of_attention = [
        (row, result[part]["ceilings"])
        for part in ("attention", "latents")
        for row in result[part]["rows"]
    ]
    for row, card in of_attention:
        case = f"{row['phase']} {row['batch']}, {row['shape']}"
        if (found := ratio(row)) < (wanted := wanted_ratio(row)):
            missed.append(f"{case}: {found:.2f} times as fast as FlashAttention, not {wanted}")
        share = of_ceiling(row, card)
        if row["phase"] == "decode" and row["bytes"] >= LARGE_BYTES and share < OF_READ:
            missed.append(f"{case}: {share:.0%} of what the card does")
        if row["batch"] == "1 x 8192" and row["phase"] == "prefill" and share < OF_MATRIX:
            missed.append(f"{case}: {share:.0%} of the matrix rate")
    for row in result["append"]["rows"]:
        case = f"append of {row['tokens']} tokens, {row['shape']}"
        if row["tokens"] <= append.DECODE_TOKENS and (row["ratio"] or 0) > 1.01:
            missed.append(f"{case}: {row['ratio']:.2f} of the base's time")
        if row["tokens"] >= LARGE_APPEND_TOKENS and row["of_copy"] < OF_COPY:
            missed.append(f"{case}: {row['of_copy']:.0%} of the copy's bandwidth")
    return missed


def measured_on(part: dict[str, Any]) -> list[str]:
    """What a part was measured on, and what the card did in the same run."""
    card, where = part["ceilings"], part["environment"]
    return [
        *report.table(list(where), [list(where.values())]),
        "",
        f"In the same run the card reads {card['read'] / 1e12:.2f} TB/s (a sum over 4 GiB), copies"
        f" {card['copy'] / 1e12:.2f} TB/s (bytes read",
        f"and written) and multiplies {card['matrix'] / 1e12:.0f} TFLOP/s (bf16, {MATRIX} cubed).",
        "",
    ]


def markdown(result: dict[str, Any]) -> str:
    """The results as tables."""
    lines = [
        *report.head("Kernels on a GPU", "kernels.py", __doc__, {}),
        "Device time of one layer in bf16, blocks of 256 tokens, in CUDA graphs over many layers with the",
        "L2 cache flushed. `ratio` is FlashAttention's time over FlashInfer's. `step µs` is what deriving",
        "the step takes on the device, `host µs` what preparing it takes on the host, each once for all",
        "layers; `call µs` is what launching one layer takes on the host, outside of graphs.",
        "",
        *measured_on(result["attention"]),
        "![Decode and prefill beside FlashAttention](kernels.png)",
    ]
    for phase, share in (
        ("decode", "of read bandwidth"),
        ("prefill", "of matrix rate"),
        ("mixed", "of matrix rate"),
    ):
        rows = [
            [
                row["shape"],
                row["batch"],
                f"{row['us']['flashinfer']:.1f}",
                f"{row['us']['flash']:.1f}",
                f"{ratio(row):.2f}",
                f"{of_ceiling(row, result['attention']['ceilings']):.0%}",
                f"{of_ceiling(row, result['attention']['ceilings'], 'flash'):.0%}",
                f"{row['us']['derive']:.1f}",
                f"{row['us']['host']:.0f}",
                *(
                    f"{row['us'][call]:.0f}" if call in row["us"] else ""
                    for call in ("flashinfer call", "flash call")
                ),
            ]
            for row in result["attention"]["rows"]
            if row["phase"] == phase
        ]
        head = ["heads", "batch", "FlashInfer µs", "flash µs", "ratio", share, "flash's"]
        head += ["step µs", "host µs", "call µs", "flash's"]
        lines += ["", f"## {phase.capitalize()}", "", *report.table(head, rows)]
    rows = [
        [
            row["shape"],
            f"{row['phase']} {row['batch']}",
            *(f"{row['us'][name]:.1f}" if name in row["us"] else "" for name in LATENT_PATHS),
            f"{ratio(row):.2f}" if "flash" in row["us"] else "",
            f"{of_ceiling(row, result['latents']['ceilings']):.0%}",
            f"{row['us']['host']:.0f}",
        ]
        for row in result["latents"]["rows"]
    ]
    lines += [
        "",
        "## Cached latents",
        "",
        *measured_on(result["latents"]),
        "MLA with latents of 512 + 64, blocks of 64 tokens in decode, of 256 in prefill. Where there is",
        "prefill, a path projects queries and outputs to the latents' space, or latents to keys and",
        "values: fa2 the one, FlashAttention the other for all of the cache, which here holds the step's",
        "tokens alone, FlashInfer's path the other if nothing else is cached. That is timed, too. The",
        "share is of the matrix rate, projections not counted, or in decode of the read bandwidth,",
        "whichever is more.",
        "",
        *report.table(
            ["heads", "batch", "FlashInfer µs", "fa2 µs", "flash µs", "ratio", "share", "host µs"],
            rows,
        ),
    ]
    rows = [
        [
            f"{row['decodes']} of {row['slots']} x {row['tokens']}",
            *(f"{row[name]:.1f}" for name in ("us", "no_sink", "one_key", "exact")),
            f"{row['us'] / row['no_sink']:.3f}",
        ]
        for row in result["padding"]["rows"]
    ]
    head = ["slots in use", "µs", "no sink µs", "one key µs", "without padding µs", "over no sink"]
    lines += [
        "",
        "## Padding rows of a decode graph",
        "",
        *measured_on(result["padding"]),
        "A padding row has no keys, and a sink that keeps it from coming out as NaN. Beside that: the same",
        "without the sink, padding rows of one key each, and a graph without padding rows.",
        "",
        *report.table(head, rows),
        "",
        "## Append",
        "",
        *measured_on(result["append"]),
        "`ratio` is stage 2 over base; a byte read and a byte written both count.",
        "",
        *report.table(
            ["shape", "tokens", "µs", "ratio", "of copy"],
            [
                [
                    row["shape"],
                    str(row["tokens"]),
                    f"{row['us']['stage1']:.2f}",
                    "" if row["ratio"] is None else f"{row['ratio']:.2f}",
                    f"{row['of_copy']:.0%}",
                ]
                for row in result["append"]["rows"]
            ],
        ),
        "",
        "## Goals",
        "",
        *([f"- missed: {miss}" for miss in misses(result)] or ["All met."]),
        "",
    ]
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """How many times as fast as FlashAttention each batch of the first shape is."""
    from matplotlib import pyplot  # type: ignore

    phases = ("decode", "prefill", "mixed")
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 5), width_ratios=(5, 2, 1), sharey=True)
    shapes = list(dict.fromkeys(row["shape"] for row in result["attention"]["rows"]))
    for phase, axis in zip(phases, axes, strict=True):
        rows = [row for row in result["attention"]["rows"] if row["phase"] == phase]
        names = list(dict.fromkeys(row["batch"] for row in rows))
        for number, shape in enumerate(shapes):
            values = {row["batch"]: ratio(row) for row in rows if row["shape"] == shape}
            places = [place + (number - 1) * 0.27 for place in range(len(names))]
            above = [values.get(name, 1) - 1 for name in names]
            axis.bar(places, above, 0.25, bottom=1, label=shape)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(names)), names, rotation=60, ha="right")
        axis.set_title(phase)
    axes[0].set_yscale("log", base=2)
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("FlashAttention's time over FlashInfer's")
    axes[0].legend()
    where = result["attention"]["environment"]
    figure.suptitle(f"{where['GPU']}, {where['date']}, one layer in bf16")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Measure, write, and say which goals were missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, help="tree of the unpatched base")
    parser.add_argument("--stage2", type=Path, help="tree with stage 2 applied")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="repeatable; without it, all"
    )
    parser.add_argument(
        "--render", action="store_true", help="write only kernels.md and .png, anew"
    )
    args = parser.parse_args()
    results: Path = args.out / "kernels.json"
    result: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    if not args.render:
        if args.base is None or args.stage2 is None:
            parser.error("--base and --stage2 are required, unless with --render")
        if not torch.cuda.is_available():
            sys.exit("This benchmark needs a GPU, and torch finds none.")
        sys.path.insert(0, str(args.stage2.resolve()))
        model.one_split_on_hopper()
        args.out.mkdir(parents=True, exist_ok=True)
        measure: dict[str, Callable[[], Any]] = {
            "append": functools.partial(append.run, args.base, args.stage2),
            "attention": attention.run,
            "latents": latents.run,
            "padding": attention.padding,
        }
        with torch.inference_mode():
            same = {"environment": environment.versions(), "ceilings": ceilings()}
            for part in args.part or PARTS:
                result[part] = {**same, "rows": measure[part]()}
                results.write_text(json.dumps(result, indent=1) + "\n")
    report.publish(args.out / "kernels.md", markdown(result), functools.partial(plot, result))
    return 1 if misses(result) else 0


if __name__ == "__main__":
    sys.exit(main())
