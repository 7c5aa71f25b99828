r"""Teacher forcing on a GPU: log-probs of the engine by FlashInfer beside those by FlashAttention.

    series apply core_r0.19.0 --stage 2
    PYTHONPATH=.series/trees/core_r0.19.0-stage2 python scripts/bench/parity.py --out docs/benchmarks

Needs a GPU, FlashInfer, a FlashAttention that Megatron's dynamic engine takes, and what the engine
imports. Writes parity.json and parity.md, and exits with 1 where FlashInfer's log-probs are farther
from those of a float32 forward than FlashAttention's are. With `--render` it measures nothing and writes
parity.md anew from the parity.json in the folder.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import environment
import model
import report

SHAPE = model.SHAPES["8B slice"]
REQUESTS = 96
LONGEST_PROMPT = 3000
NEW_TOKENS = 64
# Prompts longer than a step's tokens come in chunks, beside requests that decode.
INFERENCE: dict[str, Any] = {
    "max_tokens": 2048,
    "enable_chunked_prefill": True,
    "max_sequence_length": 4096,
}
FLASHINFER: dict[str, Any] = {"inference_attention_backend": "flashinfer"}
ENGINES: dict[str, tuple[bool, dict[str, Any]]] = {
    "flash": (False, {}),
    "flash, graphs": (True, {}),
    "FlashInfer": (False, FLASHINFER),
    "FlashInfer, graphs": (True, FLASHINFER),
    "FlashInfer fa2": (False, {**FLASHINFER, "flashinfer_kernel": "fa2"}),
    "FlashInfer fa2, graphs": (True, {**FLASHINFER, "flashinfer_kernel": "fa2"}),
}
# FlashInfer's mean distance from the float32 forward, over FlashAttention's.
MAX_RATIO = 1.05
FORCED = 1e4
TITLES = {
    "float32": "From a float32 forward without a cache",
    "training": "From the bf16 forward of training",
    "flash": "From the engine by FlashAttention",
}


def make_texts() -> tuple[list[list[int]], list[int]]:
    """Random texts, and how many tokens of each are its prompt."""
    generator = random.Random(0)
    prompts = [generator.randint(1, LONGEST_PROMPT) for _ in range(REQUESTS)]
    return [
        [generator.randrange(model.VOCABULARY) for _ in range(prompt + NEW_TOKENS)]
        for prompt in prompts
    ], prompts


def forced(engine: Any, graphs: bool, texts: list[list[int]], prompts: list[int]) -> Tensor:
    """Let an engine say these texts, whatever it would say.

    Args:
        graphs: Whether it has CUDA graphs, and then must use them.

    Returns:
        Log-probs that the new tokens were chosen by, float32 `(requests, new tokens, vocabulary)` on
        the CPU; NaN on ranks that hold no output layer.
    """
    from megatron.core.inference.sampling_params import SamplingParams

    context = engine.context
    found = torch.full((len(texts), NEW_TOKENS, model.VOCABULARY), torch.nan)
    by_graph = 0

    def force(module: Any, inputs: Any, logits: Tensor) -> Tensor:
        nonlocal by_graph
        del inputs
        by_graph += context.using_cuda_graph_this_step()
        if not module.post_process:
            return logits
        active = slice(context.paused_request_count, context.total_request_count)
        ends = context.request_kv_length_offsets[active] + context.request_query_lengths[active]
        for row, (request, end) in enumerate(
            zip(context.request_ids[active].tolist(), ends.tolist(), strict=True)
        ):
            if end >= prompts[request]:  # else a chunk of the prompt follows
                found[request, end - prompts[request]] = (
                    logits[0, row].float().log_softmax(-1).cpu()
                )
                logits[0, row, texts[request][end]] = FORCED
        return logits

    hook = engine.controller.inference_wrapped_model.model.register_forward_hook(force)
    for request, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        sampling = SamplingParams(num_tokens_to_generate=NEW_TOKENS, termination_id=-1, top_k=1)
        engine.add_request(request, text[:prompt], sampling)
    said = {}
    while engine.has_unfinished_requests():
        for record in engine.step_modern()["finished_request_records"]:
            request = record.merge()
            said[request.request_id] = list(request.generated_tokens)
    hook.remove()
    assert [said[request] for request in range(len(texts))] == [
        text[prompt:] for text, prompt in zip(texts, prompts, strict=True)
    ]
    assert bool(by_graph) == graphs
    return found


def without_cache(engine: Any, texts: list[list[int]], prompts: list[int]) -> Tensor:
    """The same by the model's forward of training."""
    from megatron.core.inference.utils import InferenceMode

    InferenceMode.unset_active()
    module = engine.controller.inference_wrapped_model.model
    device = next(module.parameters()).device
    found = []
    for text, prompt in zip(texts, prompts, strict=True):
        tokens = torch.tensor([text], device=device)
        size = len(text)
        mask = torch.ones(size, size, dtype=torch.bool, device=device).triu(1)[None, None]
        logits = module(tokens, torch.arange(size, device=device)[None], mask)
        found.append(logits[0, prompt - 1 : -1].float().log_softmax(-1).cpu())
    return torch.stack(found)


def to_float32(engine: Any) -> None:
    """Let the model's forward of training compute in float32, with the same weights."""
    whole = engine.controller.inference_wrapped_model.model.float()
    for module in whole.modules():
        if hasattr(module, "input_in_float16"):  # a softmax that would give the model's dtype
            module.input_in_fp16 = module.input_in_bf16 = module.input_in_float16 = False


def distance(reference: Tensor, other: Tensor, said: Tensor) -> dict[str, list[float]]:
    """How far log-probs of each text's tokens are from each other, in nats.

    Args:
        reference: Float32 `(requests, new tokens, vocabulary)`, as `other`.
        said: The new tokens, int64 `(requests, new tokens)`.
    """
    apart = (other - reference).gather(-1, said[..., None]).abs().squeeze(-1)
    divergence = (reference.exp() * (reference - other)).sum(-1).double()
    return {
        "mean": apart.mean(1).tolist(),
        "max": apart.amax(1).tolist(),
        "KL": divergence.mean(1).tolist(),
    }


@torch.inference_mode()
def measure() -> dict[str, Any]:
    """Distances of all engines from forwards without a cache and from the engine by flash."""
    texts, prompts = make_texts()
    said = torch.tensor([text[-NEW_TOKENS:] for text in texts])
    found: dict[str, Tensor] = {}
    with model.one_rank():
        for name, (graphs, inference) in ENGINES.items():
            print(f"parity: {name}", file=sys.stderr, flush=True)
            model.seed()
            engine = model.build_engine(SHAPE, graphs, **INFERENCE, **inference)
            found[name] = forced(engine, graphs, texts, prompts)
            assert not found[name].isnan().any()
            if name == "flash":
                found["training"] = without_cache(engine, texts, prompts)
                to_float32(engine)
                found["float32"] = without_cache(engine, texts, prompts)
            del engine
            model.free_memory()
    return {
        from_: {
            name: distance(found[from_], found[name], said)
            for name in ("training", *ENGINES)
            if name != from_
        }
        for from_ in TITLES
    }


def misses(distances: dict[str, Any]) -> list[str]:
    """Where FlashInfer is farther from the float32 forward than flash is, in words."""
    missed = []
    for name, (graphs, inference) in ENGINES.items():
        flash = "flash, graphs" if graphs else "flash"
        for what in ("mean", "KL"):
            own, other = (
                torch.tensor(distances["float32"][engine][what]) for engine in (name, flash)
            )
            excess = own - MAX_RATIO * other
            # Twice the standard error of a mean over texts.
            if inference and excess.mean() > 2 * excess.std() / len(excess) ** 0.5:
                missed.append(f"{name}: {what} {own.mean():.3g}, by {flash} {other.mean():.3g}")
    return missed


def markdown(result: dict[str, Any]) -> str:
    """The results as tables."""
    lines = [
        *report.head(
            "Log-probs under teacher forcing", "parity.py", __doc__, result["environment"]
        ),
        f"{REQUESTS} random texts with prompts of 1 to {LONGEST_PROMPT} tokens, prefilled in chunks"
        f" of up to {INFERENCE['max_tokens']}",
        f"tokens a step beside requests that decode, then {NEW_TOKENS} new tokens each, which are"
        f" forced. {SHAPE.layers} layers of an",
        "8B's shape in bf16 with random weights. Absolute differences of the forced tokens' log-probs",
        "and the Kullback-Leibler divergence of the whole distributions, in nats.",
    ]
    for from_, title in TITLES.items():
        rows = []
        for name, row in result["distances"][from_].items():
            mean, most, divergence = (torch.tensor(row[what]) for what in ("mean", "max", "KL"))
            rows.append(
                [name, f"{mean.mean():.2e}", f"{most.max():.2e}", f"{divergence.mean():.2e}"]
            )
        lines += ["", f"## {title}", "", *report.table(["by", "mean", "max", "KL"], rows)]
    goal = (
        f"mean and KL from the float32 forward at most {MAX_RATIO} of FlashAttention's, up to twice "
        "the standard error over texts"
    )
    lines += ["", "## Goal", ""]
    lines += [f"- missed: {miss}" for miss in result["missed"]] or [f"Met: {goal}."]
    return "\n".join([*lines, ""])


def main() -> int:
    """Measure, write, and say where FlashInfer drifts more than flash does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--render", action="store_true", help="write only parity.md, anew")
    args = parser.parse_args()
    results: Path = args.out / "parity.json"
    if args.render:
        result: dict[str, Any] = json.loads(results.read_text())
    else:
        if not torch.cuda.is_available():
            sys.exit("This benchmark needs a GPU, and torch finds none.")
        distances = measure()
        result = {
            "environment": environment.versions(),
            "distances": distances,
            "missed": misses(distances),
        }
        args.out.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(result, indent=1) + "\n")
    text = markdown(result)
    (args.out / "parity.md").write_text(text)
    print(text)
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
