"""Engine steps: time of decode and prefill steps, stage 1 over the base.

Megatron's real engine on one GPU, with whichever FlashAttention is installed and random weights.
Each tree runs in processes of its own, base and stage 1 in alternation; a step is timed on the host
from one synchronisation of the device to the next.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LAYERS = 8
ALTERNATIONS = 2
DECODE_STEPS = 40
HOST_CALLS = 300
PREFILL_ROUNDS = 12
DECODE_BATCHES = (1, 32, 128, 256)
PROMPT_TOKENS = 256
# Requests times prompt tokens of one prefill step.
PREFILLS = ((1, 2048), (8, 512), (2, 8192))
VOCABULARY = 32000


def build_engine(graphs: bool, **inference: Any) -> Any:
    """An engine on a model of an 8B's layer shape: 32 query heads, 8 KV heads, head dim 128.

    Args:
        graphs: Capture and replay CUDA graphs.
        inference: Fields of `InferenceConfig` to add or change.
    """
    import torch

    from megatron.core.inference.config import InferenceConfig
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.inference.engines import DynamicInferenceEngine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )
    from megatron.core.inference.text_generation_controllers import text_generation_controller
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        inference_rng_tracker=True,
        cuda_graph_impl="local" if graphs else "none",
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=16384,
        parallel_output=True,
        position_embedding_type="rope",
    )
    model = model.cuda().bfloat16().eval()
    context = DynamicInferenceContext(
        config,
        InferenceConfig(
            **{
                "max_sequence_length": 16384,
                "buffer_size_gb": 16,
                "max_requests": 256,
                "max_tokens": 16384,
                "num_cuda_graphs": 16 if graphs else None,
                **inference,
            }
        ),
    )
    wrapper = GPTInferenceWrapper(model, context)
    tokenizer = SimpleNamespace(vocab_size=VOCABULARY, detokenize=lambda tokens, **_: "")
    controller = text_generation_controller.TextGenerationController(wrapper, tokenizer)
    return DynamicInferenceEngine(controller, context)


def add_requests(engine: Any, count: int, prompt_tokens: int, new_tokens: int) -> None:
    """Add requests of one length with random prompts."""
    import torch

    from megatron.core.inference.sampling_params import SamplingParams

    for _ in range(count):
        engine.add_request(
            next(engine.bench_ids),
            torch.randint(VOCABULARY, (prompt_tokens,)).tolist(),
            SamplingParams(num_tokens_to_generate=new_tokens, termination_id=-1, top_k=1),
        )


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


def drain(engine: Any) -> None:
    """Step until no request is left."""
    while engine.has_unfinished_requests():
        engine.step_modern()


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """What Megatron needs of a process before a model is built."""
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.core.transformer import attention

    if getattr(attention, "HAVE_FA4", False):
        # FlashAttention-4 has no split-KV on Hopper, and Megatron asks it to choose.
        attention.flash_attn4_varlen_func = functools.partial(
            _one_split, attention.flash_attn4_varlen_func
        )
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        seed()
        try:
            yield
        finally:
            dist.destroy_process_group()


def seed() -> None:
    """Make the next model's weights those of the last."""
    import torch

    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
    torch.manual_seed(1)


def worker(out: Path) -> None:
    """Time every case in this process, on the tree that PYTHONPATH names."""
    import itertools

    import torch

    results: dict[str, float] = {}
    with one_rank():
        for graphs in (False, True):
            mode = "graphs" if graphs else "eager"
            with torch.inference_mode():
                engine = build_engine(graphs)
                engine.bench_ids = itertools.count()
                for batch in DECODE_BATCHES:
                    add_requests(engine, batch, PROMPT_TOKENS, DECODE_STEPS + 20)
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
                    drain(engine)
                if not graphs:
                    for count, tokens in PREFILLS:
                        samples = []
                        for _ in range(PREFILL_ROUNDS):
                            add_requests(engine, count, tokens, 1)
                            samples.append(timed_step(engine))
                            drain(engine)
                        case = f"prefill {count} x {tokens}, {mode}, ms"
                        results[case] = fast(samples[2:])
                del engine
                torch.cuda.empty_cache()
    out.write_text(json.dumps(results))


def _one_split(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **{**kwargs, "num_splits": 1})


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
