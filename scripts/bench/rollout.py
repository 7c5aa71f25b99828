r"""A reinforcement-learning step on a GPU: roll-out, suspend, training forward, new weights, resume.

    series apply core_r0.19.0 --stage 2
    python scripts/bench/rollout.py --stage2 .series/trees/core_r0.19.0-stage2 --out docs/benchmarks

Needs a GPU, FlashInfer and a FlashAttention that Megatron's dynamic engine takes. Writes rollout.json,
rollout.md and rollout.png (with matplotlib) and exits with 1 where a goal is missed. With `--render`
it measures nothing and writes the others anew from the rollout.json in the folder.
"""

import argparse
import functools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import environment
import model
import report

PROMPTS, SAMPLES = 64, 8
LONGEST_PROMPT = 512
# Log-normal output lengths, as answers of models are: half of them below 200 tokens, few near 1500.
MEDIAN_TOKENS, SPREAD, LONGEST = 200, 0.8, 1500
CHECKED = 64
FLASHINFER: dict[str, Any] = {"inference_attention_backend": "flashinfer"}
VARIANTS: dict[str, dict[str, Any]] = {"flash": {}, "FlashInfer": FLASHINFER}
INFERENCE: dict[str, Any] = {
    "max_sequence_length": 4096,
    "buffer_size_gb": 20,
    "max_tokens": 8192,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
}
MIN_GAIN, MAX_DRIFT = 1.10, 1.05
NEW_WEIGHTS = 0.02  # standard deviation of what is added, over that of the weights


def make_requests() -> list[tuple[list[int], int]]:
    """Prompts, each several times, and how many tokens each answer has."""
    generator = random.Random(0)
    requests = []
    for _ in range(PROMPTS):
        length = generator.randint(32, LONGEST_PROMPT)
        prompt = [generator.randrange(model.VOCABULARY) for _ in range(length)]
        for _ in range(SAMPLES):
            tokens = round(generator.lognormvariate(math.log(MEDIAN_TOKENS), SPREAD))
            requests.append((prompt, min(max(tokens, 1), LONGEST)))
    return requests


def roll_out(
    engine: Any, requests: list[tuple[list[int], int]]
) -> tuple[dict[str, Any], list[Any]]:
    """Let the engine answer.

    Returns:
        Seconds, tokens a second, and the share of the time from when nine of ten requests are done;
        and for each request its tokens and their log-probs.
    """
    from megatron.core.inference.sampling_params import SamplingParams

    ids = []
    for prompt, tokens in requests:
        ids.append(next(engine.bench_ids))
        sampling = SamplingParams(
            num_tokens_to_generate=tokens,
            termination_id=-1,
            return_log_probs=True,
            skip_prompt_log_probs=True,
        )
        engine.add_request(ids[-1], prompt, sampling)
    done: dict[int, tuple[list[int], list[float]]] = {}
    torch.cuda.synchronize()
    start, tail = time.perf_counter(), 0.0
    while engine.has_unfinished_requests():
        for record in engine.step_modern()["finished_request_records"]:
            request = record.merge()
            done[request.request_id] = (
                list(request.generated_tokens),
                list(request.generated_log_probs),
            )
        if not tail and len(done) >= 0.9 * len(requests):
            tail = time.perf_counter()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    figures = {
        "seconds": seconds,
        "tokens_per_second": sum(tokens for _, tokens in requests) / seconds,
        "tail": (start + seconds - tail) / seconds,
    }
    return figures, [done[request] for request in ids]


def trained(engine: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """Log-probs of an answer's tokens by the model's forward of training."""
    module = engine.controller.inference_wrapped_model.model
    device = next(module.parameters()).device
    text = torch.tensor([prompt + tokens], device=device)
    size = text.size(1)
    mask = torch.ones(size, size, dtype=torch.bool, device=device).triu(1)[None, None]
    logits = module(text, torch.arange(size, device=device)[None], mask)
    found = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return found.gather(-1, text[0, len(prompt) :, None]).squeeze(-1).cpu()


def drift(
    engine: Any, requests: list[tuple[list[int], int]], answers: list[Any]
) -> dict[str, float]:
    """How far roll-out's log-probs are from training's, over some requests, in nats."""
    apart = []
    for (prompt, _), (tokens, log_probs) in list(zip(requests, answers, strict=True))[
        :: len(requests) // CHECKED
    ]:
        apart.append(trained(engine, prompt, tokens) - torch.tensor(log_probs))
    gap = torch.cat(apart)
    return {
        "mean": float(gap.abs().mean()),
        "max": float(gap.abs().max()),
        # Of roll-out from training, estimated from the sampled tokens; its variance is small.
        "KL": float((gap.exp() - 1 - gap).double().mean()),
    }


def timed(call: Any) -> float:
    """Milliseconds of a call, the device's work included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


@torch.inference_mode()
def worker(shape: str, variant: str, out: Path) -> None:
    """One step of training by one variant, in this process."""
    from megatron.core.inference.config import KVCacheManagementMode
    from megatron.core.inference.utils import InferenceMode

    requests = make_requests()
    with model.one_rank():
        engine = model.build_engine(
            model.SHAPES[shape],
            True,
            scope="block",
            kv_cache_management_mode=KVCacheManagementMode.RECOMPUTE,
            **INFERENCE,
            **VARIANTS[variant],
        )
        roll_out(engine, requests[: SAMPLES * 2])  # what is compiled at first use
        result, answers = roll_out(engine, requests)
        held = torch.cuda.memory_allocated()
        result["suspend_ms"] = timed(engine.suspend)
        result["given_back_gib"] = (held - torch.cuda.memory_allocated()) / 2**30
        result["drift"] = drift(engine, requests, answers)
        generator = torch.Generator("cuda").manual_seed(2)
        for parameter in engine.controller.inference_wrapped_model.model.parameters():
            noise = torch.randn(
                parameter.shape, device="cuda", generator=generator, dtype=parameter.dtype
            )
            parameter.add_(noise * (NEW_WEIGHTS * parameter.float().std().to(parameter.dtype)))
        result["resume_ms"] = timed(engine.resume)
        few = requests[:: len(requests) // CHECKED]
        _, answers = roll_out(engine, few)
        InferenceMode.unset_active()
        result["drift_after"] = drift(engine, few, answers)
    out.write_text(json.dumps(result))


def run(stage2: Path, shape: str, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """All variants in turn, each in processes of its own."""
    found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    path = os.pathsep.join([str(stage2.resolve()), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        for turn in range(rounds):
            for variant in VARIANTS:
                print(f"rollout: {variant}, {turn + 1} of {rounds}", file=sys.stderr, flush=True)
                subprocess.run(
                    [
                        sys.executable,
                        "-W",
                        "ignore",
                        __file__,
                        "--worker",
                        shape,
                        variant,
                        str(out),
                    ],
                    env={**os.environ, "PYTHONPATH": path},
                    check=True,
                )
                found[variant].append(json.loads(out.read_text()))
    return found


def of(result: dict[str, Any], variant: str, what: str) -> float:
    """A figure's median over a variant's processes; `drift.mean` is one within another."""
    values = []
    for process in result["variants"][variant]:
        value = process
        for key in what.split("."):
            value = value[key]
        values.append(value)
    return float(statistics.median(values))


def misses(result: dict[str, Any]) -> list[str]:
    """The goals that were missed, in words."""
    missed = []
    flash, ours = (of(result, variant, "tokens_per_second") for variant in VARIANTS)
    if ours < MIN_GAIN * flash:
        missed.append(f"roll-out: {ours / flash:.3f} times flash's tokens a second")
    for when in ("drift", "drift_after"):
        for what in ("mean", "KL"):
            flash, ours = (of(result, variant, f"{when}.{what}") for variant in VARIANTS)
            if ours > MAX_DRIFT * flash:
                missed.append(f"{when}, {what}: {ours:.3g}, by flash {flash:.3g}")
    return missed


def markdown(result: dict[str, Any]) -> str:
    """The results as a table."""
    figures = {
        "roll-out, tokens/s": ("tokens_per_second", "{:.0f}"),
        "roll-out, s": ("seconds", "{:.2f}"),
        "of it with less than a tenth of the requests left": ("tail", "{:.0%}"),
        "suspend, ms": ("suspend_ms", "{:.1f}"),
        "memory given back, GiB": ("given_back_gib", "{:.2f}"),
        "resume, ms": ("resume_ms", "{:.1f}"),
        "log-probs apart from training's, mean": ("drift.mean", "{:.2e}"),
        "the same, most": ("drift.max", "{:.2e}"),
        "divergence from training": ("drift.KL", "{:.2e}"),
        "mean with the new weights": ("drift_after.mean", "{:.2e}"),
        "divergence with the new weights": ("drift_after.KL", "{:.2e}"),
    }
    rows = []
    for name, (what, form) in figures.items():
        flash, ours = (of(result, variant, what) for variant in VARIANTS)
        rows.append([name, form.format(flash), form.format(ours), f"{ours / flash:.3f}"])
    where = result["environment"]
    missed = misses(result)
    return "\n".join(
        [
            *report.head("A reinforcement-learning step on a GPU", "rollout.py", __doc__, where),
            f"{result['shape']} shape in bf16 with random weights, CUDA graphs of all layers, prefix caching, recompute"
            " mode. ",
            f"{PROMPTS} prompts with {SAMPLES} samples each, lengths of answers drawn from a log-normal"
            f" distribution (median",
            f"{MEDIAN_TOKENS}, at most {LONGEST}), sampled at temperature 1. Resuming captures the graphs"
            " anew. Log-probs are compared",
            f"with the bf16 forward of training over {CHECKED} answers, in nats. Medians of"
            f" {len(result['variants']['flash'])} processes.",
            "",
            *report.table(["", "flash", "FlashInfer", "ratio"], rows),
            "",
            "![Tokens a second and drift](rollout.png)",
            "",
            "## Goals",
            "",
            *([f"- missed: {miss}" for miss in missed] or ["All met."]),
            "",
        ]
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """Tokens a second, and the distance from training."""
    from matplotlib import pyplot  # type: ignore

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 4))
    for axis, what, title in (
        (axes[0], "tokens_per_second", "roll-out, tokens/s"),
        (axes[1], "drift.mean", "mean distance from training's log-probs"),
    ):
        axis.bar(list(VARIANTS), [of(result, variant, what) for variant in VARIANTS])
        axis.set_title(title)
    where = result["environment"]
    figure.suptitle(f"{result['shape']} shape, {where['GPU']}, {where['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Measure, write, and say which goals were missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage2", type=Path, help="tree with both stages applied")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--shape", default="8B", choices=list(model.SHAPES))
    parser.add_argument("--rounds", type=int, default=1, help="processes of each variant")
    parser.add_argument(
        "--render", action="store_true", help="write only rollout.md and .png, anew"
    )
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker[0], args.worker[1], Path(args.worker[2]))
        return 0
    if args.out is None:
        parser.error("--out is required")
    results: Path = args.out / "rollout.json"
    if args.render:
        result: dict[str, Any] = json.loads(results.read_text())
    else:
        if args.stage2 is None:
            parser.error("--stage2 is required, unless with --render")
        if not torch.cuda.is_available():
            sys.exit("This benchmark needs a GPU, and torch finds none.")
        result = {
            "environment": environment.versions(),
            "shape": args.shape,
            "variants": run(args.stage2, args.shape, args.rounds),
        }
        args.out.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(result, indent=1) + "\n")
    report.publish(args.out / "rollout.md", markdown(result), functools.partial(plot, result))
    return 1 if misses(result) else 0


if __name__ == "__main__":
    sys.exit(main())
