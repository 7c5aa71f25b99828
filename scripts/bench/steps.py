"""Engine steps: time of decode and prefill steps, stage 1 over the base.

Megatron's real engine on one GPU, with whichever FlashAttention is installed and random weights.
Each tree runs in processes of its own, base and stage 1 in alternation; a step is timed on the host
from one synchronisation of the device to the next.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import model

SHAPE = model.SHAPES["8B slice"]
ALTERNATIONS = 2
DECODE_STEPS = 40
HOST_CALLS = 300
PREFILL_ROUNDS = 12
DECODE_BATCHES = (1, 32, 128, 256)
PROMPT_TOKENS = 256
# Requests times prompt tokens of one prefill step.
PREFILLS = ((1, 2048), (8, 512), (2, 8192))


def timed_step(engine: Any) -> float:
    """Milliseconds of one step."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.step_modern()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def host_append(engine: Any) -> float:
    """Microseconds on the host of appending the current step's tokens to one layer."""
    import torch

    context = engine.context
    rows = torch.randn(2, context.padded_active_token_count, 1, 8, 128, device="cuda").bfloat16()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        context.append_key_value_cache(1, rows[0], rows[1])
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed * 1e6 / HOST_CALLS


def fast(samples: list[float]) -> float:
    """The tenth percentile: what a shared host adds to a step is never negative."""
    return statistics.quantiles(samples, n=10)[0]


def worker(out: Path) -> None:
    """Time every case in this process, on the tree that PYTHONPATH names."""
    import torch

    results: dict[str, float] = {}
    with model.one_rank():
        for graphs in (False, True):
            mode = "graphs" if graphs else "eager"
            with torch.inference_mode():
                engine = model.build_engine(SHAPE, graphs)
                for batch in DECODE_BATCHES:
                    model.add_requests(engine, batch, PROMPT_TOKENS, DECODE_STEPS + 20)
                    while (
                        engine.context.num_prefill_requests or not engine.context.is_decode_only()
                    ):
                        engine.step_modern()
                    for _ in range(5):
                        engine.step_modern()
                    samples = [timed_step(engine) for _ in range(DECODE_STEPS)]
                    results[f"decode {batch}, {mode}, ms"] = fast(samples)
                    if not graphs:
                        calls = [host_append(engine) for _ in range(5)]
                        results[f"append call, {batch} tokens, host µs"] = min(calls)
                    model.drain(engine)
                if not graphs:
                    for count, tokens in PREFILLS:
                        samples = []
                        for _ in range(PREFILL_ROUNDS):
                            model.add_requests(engine, count, tokens, 1)
                            samples.append(timed_step(engine))
                            model.drain(engine)
                        case = f"prefill {count} x {tokens}, {mode}, ms"
                        results[case] = fast(samples[2:])
                del engine
                model.free_memory()
    out.write_text(json.dumps(results))


def run(base: Path, stage1: Path) -> list[dict[str, Any]]:
    """Time both trees in alternation.

    Returns:
        A row per case: the least of each tree's processes, stage 1 over base as `ratio`, and how
        far the base's own processes lie apart as `spread`.
    """
    samples: dict[str, list[dict[str, float]]] = {"base": [], "stage1": []}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        for turn in range(ALTERNATIONS):
            for name, tree in (("base", base), ("stage1", stage1)):
                print(
                    f"steps: {name}, run {turn + 1} of {ALTERNATIONS}", file=sys.stderr, flush=True
                )
                path = os.pathsep.join([str(tree.resolve()), os.environ.get("PYTHONPATH", "")])
                subprocess.run(
                    [sys.executable, "-W", "ignore", __file__, "--worker", str(out)],
                    env={**os.environ, "PYTHONPATH": path},
                    check=True,
                )
                samples[name].append(json.loads(out.read_text()))
    rows = []
    for case in samples["base"][0]:
        base_runs = [run[case] for run in samples["base"]]
        best = {name: min(run[case] for run in runs) for name, runs in samples.items()}
        rows.append(
            dict(
                case=case,
                **best,
                ratio=best["stage1"] / best["base"],
                spread=max(base_runs) / min(base_runs) - 1,
            )
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Worker of `run`; stage1.py is the benchmark.")
    parser.add_argument("--worker", type=Path, required=True, metavar="OUT")
    worker(parser.parse_args().worker)
