r"""The engine on a GPU: latency, throughput, memory and host time; base, stage 1, stage 2, FlashInfer.

    series apply core_r0.19.0 --stage 1
    series apply core_r0.19.0 --stage 2
    git -C .series/trees/core_r0.19.0-stage1 worktree add --detach /tmp/base base
    python scripts/bench/engine.py --base /tmp/base --stage1 .series/trees/core_r0.19.0-stage1 \
        --stage2 .series/trees/core_r0.19.0-stage2 --shape 8B --out docs/benchmarks

Needs a GPU, FlashInfer and a FlashAttention that Megatron's dynamic engine takes. `--shape` and
`--mode` may be repeated; what was measured before and is not named stays in the results. Writes engine.json, engine.md and
engine.png (with matplotlib) and exits with 1 where a goal is missed. With `--render` it measures
nothing and writes the others anew from the engine.json in the folder.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import environment
import model
import report

FLASHINFER: dict[str, Any] = {"inference_attention_backend": "flashinfer"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("base", {}),
    "stage 1": ("stage1", {}),
    "stage 2, off": ("stage2", {}),
    "FlashInfer": ("stage2", FLASHINFER),
}
BATCHES = (1, 8, 32, 64, 128, 256)
PROMPT_TOKENS, NEW_TOKENS = 1024, 48
PROFILED_STEPS = 4
MIN_GAIN, MIN_RATIO, MAX_HOST_US = 1.10, 0.99, 50
GAIN_AT = ("8B", "graphs", "256 requests")


@dataclass(frozen=True)
class Mode:
    """How the engine runs, and with which batches.

    Args:
        graphs: With CUDA graphs.
        batches: Requests, which all come at once.
        drafts: Speculative tokens. Random weights accept next to none.
        arrivals: Steps from one request to the next; 0: all come at once.
        inference: Fields of `InferenceConfig`.
    """

    graphs: bool
    batches: tuple[int, ...] = BATCHES
    drafts: int = 0
    arrivals: int = 0
    inference: tuple[tuple[str, Any], ...] = ()


MODES = {
    "eager": Mode(False),
    "graphs": Mode(True),
    "graphs, chunked prefill, arriving": Mode(
        True, (64,), arrivals=1, inference=(("enable_chunked_prefill", True), ("max_tokens", 2048))
    ),
    "graphs, 2 draft tokens": Mode(True, (32,), drafts=2),
}


class HostTime:
    """Microseconds that the host spends in the backend's preparation of each step."""

    def __init__(self, attention: Any) -> None:
        self.steps: list[float] = []
        self._attention = attention
        self._plan, self._derive = attention.plan_step, attention.derive_step
        attention.plan_step, attention.derive_step = self._timed_plan, self._timed_derive

    def _timed_plan(self, context: Any) -> None:
        start = time.perf_counter()
        self._plan(context)
        self.steps.append((time.perf_counter() - start) * 1e6)

    def _timed_derive(self) -> None:
        start = time.perf_counter()
        self._derive()
        self.steps[-1] += (time.perf_counter() - start) * 1e6


def serve(engine: Any, batch: int, arrivals: int) -> dict[str, float]:
    """Let requests come and be answered.

    Returns:
        Milliseconds to a request's first token in the mean, of a step that only decodes (the median)
        and of one that prefills; tokens a second over all, new ones only; microseconds of the host
        in the backend per decode step (the median), if FlashInfer's.
    """
    context = engine.context
    attention = getattr(context, "flashinfer_attention", None)
    host = HostTime(attention) if attention is not None else None
    arrived: dict[int, float] = {}
    first: dict[int, float] = {}
    decode_ms, prefill_ms, host_us = [], [], []
    waiting, steps = batch, 0
    torch.cuda.synchronize()
    begin = time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        while waiting and (not arrivals or steps % arrivals == 0):
            [request] = model.add_requests(engine, 1, PROMPT_TOKENS, NEW_TOKENS)
            arrived[request] = time.perf_counter()
            waiting -= 1
            if arrivals:
                break
        start = time.perf_counter()
        finished = engine.step_modern()["finished_request_records"]
        torch.cuda.synchronize()
        end = time.perf_counter()
        if context.batch_dimensions.prefill_req_count:
            prefill_ms.append((end - start) * 1e3)
        elif not finished:
            decode_ms.append((end - start) * 1e3)
            if host:
                host_us.append(host.steps[-1])
        for request in arrived.keys() - first.keys():
            if engine.requests[request].record[-1].generated_tokens:
                first[request] = end
        for record in finished:
            first.setdefault(record.merge().request_id, end)
        steps += 1
    seconds = time.perf_counter() - begin
    result = {
        "first_token_ms": 1e3 * statistics.mean(first[key] - arrived[key] for key in arrived),
        "tokens_per_second": batch * NEW_TOKENS / seconds,
    }
    for name, samples in (
        ("decode_ms", decode_ms),
        ("prefill_ms", prefill_ms),
        ("host_us", host_us),
    ):
        if samples:
            result[name] = statistics.median(samples)
    return result


def device_ms(engine: Any, batch: int) -> float:
    """Milliseconds that the device is busy in a step that only decodes, whatever the host does."""
    model.add_requests(engine, batch, PROMPT_TOKENS, NEW_TOKENS)
    while not engine.context.is_decode_only() or engine.context.total_request_count < batch:
        engine.step_modern()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED_STEPS):
            engine.step_modern()
        torch.cuda.synchronize()
    model.drain(engine)
    busy = sum(event.self_device_time_total for event in profile.key_averages())
    return float(busy) / PROFILED_STEPS / 1e3


@torch.inference_mode()
def worker(shape: str, variant: str, modes: list[str], out: Path) -> None:
    """Measure one variant in this process, on the tree that PYTHONPATH names."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    with model.one_rank():
        for name in modes:
            mode, found = MODES[name], results.setdefault(name, {})
            model.seed()
            torch.cuda.reset_peak_memory_stats()
            inference = {"buffer_size_gb": 50, **dict(mode.inference), **VARIANTS[variant][1]}
            engine = model.build_engine(
                model.SHAPES[shape], mode.graphs, drafts=mode.drafts, scope="block", **inference
            )
            serve(engine, 2, 0)  # what is compiled at first use
            for batch in mode.batches:
                case = found[f"{batch} requests"] = serve(engine, batch, mode.arrivals)
                case["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                if "decode_ms" in case:
                    case["device_ms"] = device_ms(engine, batch)
            del engine
            model.free_memory()
    out.write_text(json.dumps(results))


def run(
    trees: dict[str, Path], shape: str, modes: list[str], rounds: int
) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Measure all variants in turn, each in processes of its own.

    Returns:
        By mode, case and variant the best of `rounds` processes: least times, most tokens a second.
    """
    best: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        for turn in range(rounds):
            for variant, (tree, _) in VARIANTS.items():
                print(f"engine: {shape}, {variant}, {turn + 1} of {rounds}", file=sys.stderr)
                path = os.pathsep.join(
                    [str(trees[tree].resolve()), os.environ.get("PYTHONPATH", "")]
                )
                command = [sys.executable, "-W", "ignore", __file__]
                subprocess.run(
                    [*command, "--worker", shape, variant, json.dumps(modes), str(out)],
                    env={**os.environ, "PYTHONPATH": path},
                    check=True,
                )
                for mode, found in json.loads(out.read_text()).items():
                    for case, values in found.items():
                        kept = best.setdefault(mode, {}).setdefault(case, {})
                        kept[variant] = better(kept.get(variant, values), values)
    return best


def better(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    """The least times of two processes, and the most tokens a second."""
    return {
        what: (max if what == "tokens_per_second" else min)(value, second[what])
        for what, value in first.items()
    }


def cases(
    result: dict[str, Any],
) -> Iterator[tuple[tuple[str, str, str], dict[str, dict[str, float]]]]:
    """Shape, mode and case, and what each variant took."""
    for shape, modes in result["shapes"].items():
        for mode, found in modes.items():
            for case, variants in found["cases"].items():
                yield (shape, mode, case), variants


def misses(result: dict[str, Any]) -> list[str]:
    """The goals that were missed, in words."""
    missed = []
    for case, variants in cases(result):
        ours, flash = variants["FlashInfer"], variants["stage 1"]
        if "decode_ms" in ours and "decode_ms" in flash:
            gain = flash["decode_ms"] / ours["decode_ms"]
            wanted = MIN_GAIN if case == GAIN_AT else MIN_RATIO
            if gain < wanted:
                missed.append(f"{', '.join(case)}: {gain:.3f} times stage 1's decode rate")
        if ours.get("host_us", 0) > MAX_HOST_US and MODES[case[1]].graphs:
            missed.append(f"{', '.join(case)}: {ours['host_us']:.0f} µs of the host a decode step")
    return missed


def row_of(
    batch: str, variant: str, values: dict[str, float], flash: dict[str, float]
) -> list[str]:
    """A line of a table: what a variant took, beside stage 1."""
    times = []
    for what in ("decode_ms", "device_ms"):
        known = what in values and what in flash
        times.append(f"{values[what]:.3f}" if what in values else "")
        times.append(f"{flash[what] / values[what]:.3f}" if known else "")
    return [
        batch,
        variant,
        f"{values['first_token_ms']:.1f}",
        *times,
        f"{values['tokens_per_second']:.0f}",
        f"{values['peak_gib']:.1f}",
        f"{values['host_us']:.0f}" if "host_us" in values else "",
    ]


def markdown(result: dict[str, Any]) -> str:
    """The results as tables."""
    lines = [
        *report.head("The engine on a GPU", "engine.py", __doc__, {}),
        f"Random weights in bf16, prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new tokens each. All"
        " requests come at once,",
        "or one a step where they are said to be arriving. A graph is of all layers. `decode` is the median",
        "of steps that only decode, synchronised; `ratio` is stage 1's over the variant's. `busy` is how",
        "long the device computes in such a step, by a profile, whatever the host does beside. `host` is",
        "what the host spends in FlashInfer's preparation of it. Memory is that of the whole process,",
        "cache included.",
        "",
        "![Decode rate beside stage 1](engine.png)",
    ]
    head = ["requests", "variant", "first token ms", "decode ms", "ratio", "busy ms", "busy ratio"]
    head += ["tokens/s", "GiB", "host µs"]
    for shape, modes in result["shapes"].items():
        for mode, found in modes.items():
            where = found["environment"]
            rows = [
                row_of(case.split(" ")[0], variant, values, variants["stage 1"])
                for case, variants in found["cases"].items()
                for variant, values in variants.items()
            ]
            lines += ["", f"## {shape}, {mode}", ""]
            lines += report.table(list(where), [list(where.values())])
            lines += ["", *report.table(head, rows)]
    lines += ["", "## Goals", ""]
    lines += [f"- missed: {miss}" for miss in misses(result)] or ["All met."]
    return "\n".join([*lines, ""])


def plot(result: dict[str, Any], path: Path) -> None:
    """Decode rate under graphs by batch, over stage 1's."""
    from matplotlib import pyplot  # type: ignore

    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    where = {}
    for shape, modes in result["shapes"].items():
        if "graphs" not in modes:
            continue
        where = modes["graphs"]["environment"]
        gains = [
            variants["stage 1"]["decode_ms"] / variants["FlashInfer"]["decode_ms"]
            for batch in BATCHES
            for variants in [modes["graphs"]["cases"][f"{batch} requests"]]
        ]
        axis.plot([str(batch) for batch in BATCHES], gains, marker="o", label=shape)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xlabel(f"requests, each of {PROMPT_TOKENS} tokens and more")
    axis.set_ylabel("decode rate over FlashAttention's")
    axis.legend()
    axis.set_title(
        ", ".join(["CUDA graphs, bf16", *(where[key] for key in ("GPU", "date") if where)])
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Measure, write, and say which goals were missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for tree, what in (
        ("base", "the unpatched base"),
        ("stage1", "stage 1 applied"),
        ("stage2", "both stages applied"),
    ):
        parser.add_argument(f"--{tree}", type=Path, help=f"tree with {what}")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--shape", action="append", choices=list(model.SHAPES), help="repeatable")
    parser.add_argument("--mode", action="append", choices=list(MODES), help="repeatable; else all")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each variant")
    parser.add_argument("--render", action="store_true", help="write only engine.md and .png, anew")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        shape, variant, modes, out = args.worker
        worker(shape, variant, json.loads(modes), Path(out))
        return 0
    if args.out is None:
        parser.error("--out is required")
    trees = {name: getattr(args, name) for name in ("base", "stage1", "stage2")}
    results: Path = args.out / "engine.json"
    result: dict[str, Any] = {"shapes": {}}
    if results.exists():
        result = json.loads(results.read_text())
    if not args.render:
        if None in trees.values():
            parser.error("--base, --stage1 and --stage2 are required, unless with --render")
        if not torch.cuda.is_available():
            sys.exit("This benchmark needs a GPU, and torch finds none.")
        args.out.mkdir(parents=True, exist_ok=True)
        for shape in args.shape or ["8B"]:
            found = run(trees, shape, args.mode or list(MODES), args.rounds)
            where = environment.versions()
            for mode, of_mode in found.items():
                modes = result["shapes"].setdefault(shape, {})
                modes[mode] = {"environment": where, "cases": of_mode}
            results.write_text(json.dumps(result, indent=1) + "\n")
    report.publish(args.out / "engine.md", markdown(result), functools.partial(plot, result))
    return 1 if misses(result) else 0


if __name__ == "__main__":
    sys.exit(main())
