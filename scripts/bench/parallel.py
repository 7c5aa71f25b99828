r"""Several GPUs: FlashInfer beside FlashAttention with tensor and pipeline parallel ranks.

    series apply core_r0.19.0 --stage 2
    PYTHONPATH=.series/trees/core_r0.19.0-stage2 NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 \
        scripts/bench/parallel.py --out docs/benchmarks

Takes any number of GPUs of one host; layouts that need another number are left out. Needs FlashInfer
and a FlashAttention that Megatron's dynamic engine takes. Writes parallel.json and parallel.md and
exits with 1 where a rank holds other heads than its share, or where FlashInfer's log-probs are farther
from FlashAttention's than two kernels are on one GPU.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import environment
import model
import parity
import report

SHAPE = model.SHAPES["8B"]
REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 64, 512, 64
INFERENCE: dict[str, Any] = {"max_tokens": 4096, "max_sequence_length": 4096}
BACKENDS: dict[str, dict[str, Any]] = {"flash": {}, "FlashInfer": parity.FLASHINFER}
GRAPHS: tuple[bool, ...] = (False, True)
# Mean distance of log-probs, in nats. On one GPU and eight layers it is 0.011.
MAX_DISTANCE = 0.03


@dataclass(frozen=True)
class Layout:
    """How a model is split.

    Args:
        tensor: Tensor parallel ranks.
        pipeline: Pipeline stages.
        kv_heads: Of the whole model; None: the shape's.
    """

    tensor: int = 1
    pipeline: int = 1
    kv_heads: int | None = None

    @property
    def shape(self) -> model.Shape:
        """The model's shape."""
        return SHAPE if self.kv_heads is None else replace(SHAPE, kv_heads=self.kv_heads)

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and KV heads that each rank should hold."""
        shape = self.shape
        return shape.query_heads // self.tensor, max(shape.kv_heads // self.tensor, 1)


LAYOUTS = {
    "TP 1": Layout(),
    "TP 2": Layout(tensor=2),
    "PP 2": Layout(pipeline=2),
    "TP 2, one KV head": Layout(tensor=2, kv_heads=1),
}


def throughput(engine: Any) -> float:
    """New tokens a second."""
    model.add_requests(engine, REQUESTS, PROMPT_TOKENS, NEW_TOKENS)
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.drain(engine)
    torch.cuda.synchronize()
    return REQUESTS * NEW_TOKENS / (time.perf_counter() - start)


@torch.inference_mode()
def measure(layout: Layout) -> list[dict[str, Any]]:
    """One layout, with and without graphs, by both backends.

    Returns:
        A row for each pair of engines, complete on rank 0: tokens a second of each, GiB and heads of
        each rank, and the distance of log-probs from the ranks that have them.
    """
    texts, prompts = parity.make_texts()
    said = torch.tensor([text[-parity.NEW_TOKENS :] for text in texts])
    rows = []
    with model.partitioned(layout.tensor, layout.pipeline):
        for graphs in GRAPHS:
            row: dict[str, Any] = {"graphs": graphs, "tokens_per_second": {}, "ranks": {}}
            found = []
            for name, inference in BACKENDS.items():
                model.seed()
                torch.cuda.reset_peak_memory_stats()
                engine = model.build_engine(layout.shape, graphs, **INFERENCE, **inference)
                found.append(parity.forced(engine, graphs, texts, prompts))
                row["tokens_per_second"][name] = throughput(engine)
                context = engine.context
                own = {
                    "gib": torch.cuda.max_memory_allocated() / 2**30,
                    "query_heads": context.num_query_heads_per_partition,
                    "kv_heads": context.num_kv_heads_per_partition,
                }
                row["ranks"][name] = [None] * dist.get_world_size()
                dist.all_gather_object(row["ranks"][name], own)
                del engine, context
                model.free_memory()
            apart: list[Any] = [None] * dist.get_world_size()
            mine = None
            if not found[0].isnan().any():
                distance = parity.distance(found[0], found[1], said)
                mine = {what: sum(values) / len(values) for what, values in distance.items()}
            dist.all_gather_object(apart, mine)
            row["distance"] = next(one for one in apart if one is not None)
            rows.append(row)
    return rows


def misses(layouts: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What is not as it should be, in words."""
    missed = []
    for name, rows in layouts.items():
        for row in rows:
            case = f"{name}, {'graphs' if row['graphs'] else 'eager'}"
            if not row["distance"]["mean"] <= MAX_DISTANCE:
                missed.append(f"{case}: log-probs {row['distance']['mean']:.3g} apart")
            for backend, ranks in row["ranks"].items():
                held = {(rank["query_heads"], rank["kv_heads"]) for rank in ranks}
                if held != {LAYOUTS[name].heads}:
                    missed.append(f"{case}, {backend}: ranks hold {sorted(held)} heads")
    return missed


def markdown(result: dict[str, Any]) -> str:
    """The results as tables."""
    rows = []
    for name, of_layout in result["layouts"].items():
        for row in of_layout:
            ranks = row["ranks"]["FlashInfer"]
            rows.append(
                [
                    name,
                    "graphs" if row["graphs"] else "eager",
                    *(f"{value:.0f}" for value in row["tokens_per_second"].values()),
                    ", ".join(f"{rank['gib']:.1f}" for rank in ranks),
                    ", ".join(f"{rank['query_heads']}/{rank['kv_heads']}" for rank in ranks),
                    f"{row['distance']['mean']:.2e}",
                    f"{row['distance']['KL']:.2e}",
                ]
            )
    head = [
        "layout",
        "",
        "flash tokens/s",
        "FlashInfer tokens/s",
        "GiB a rank",
        "heads",
        "mean",
        "KL",
    ]
    where, missed = result["environment"], misses(result["layouts"])
    return "\n".join(
        [
            *report.head(
                "Several GPUs", "parallel.py", __doc__, {**where, "GPUs": str(result["gpus"])}
            ),
            f"An 8B's shape in bf16 with random weights. Tokens a second over {REQUESTS} requests of"
            f" {PROMPT_TOKENS} tokens with",
            f"{NEW_TOKENS} new ones. Heads are query heads and KV heads of each rank. `mean` and `KL` are"
            " how far FlashInfer's",
            "log-probs are from FlashAttention's under teacher forcing, in nats.",
            "",
            *report.table(head, rows),
            "",
            *([f"- missed: {miss}" for miss in missed] or ["Nothing was missed."]),
            "",
        ]
    )


def main() -> int:
    """Measure, and on rank 0 write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs GPUs, and torch finds none.")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    layouts = {}
    for name, layout in LAYOUTS.items():
        if dist.get_world_size() % (layout.tensor * layout.pipeline):
            continue
        if dist.get_rank() == 0:
            print(f"parallel: {name}", file=sys.stderr, flush=True)
        layouts[name] = measure(layout)
    if dist.get_rank() == 0:
        result = {
            "environment": environment.versions(),
            "gpus": dist.get_world_size(),
            "layouts": layouts,
        }
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "parallel.json").write_text(json.dumps(result, indent=1) + "\n")
        text = markdown(result)
        (args.out / "parallel.md").write_text(text)
        print(text)
    dist.destroy_process_group()
    return 1 if misses(layouts) else 0


if __name__ == "__main__":
    sys.exit(main())
