"""Runs a benchmark of `scripts/bench/` on a CPU, with stand-ins and tiny sizes; its report.

    python on_cpu.py NAME TREE

`TREE` is a folder that holds stage 2's `megatron/`. CUDA graphs, of which a CPU has none, are calls
here, and times mean nothing.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / 'scripts/bench'), str(_ROOT / 'tests/support'), sys.argv[2]]

import torch  # noqa: E402

import flashinfer_on_cpu  # noqa: E402
import megatron_on_cpu  # noqa: E402

megatron_on_cpu.install()
flashinfer_on_cpu.install()

import attention  # noqa: E402
import engine  # noqa: E402
import kernels  # noqa: E402
import latents  # noqa: E402
import megatron.core.inference.engines  # noqa: E402  # before torch is changed below
import megatron.core.inference.flashinfer_attention  # noqa: E402
import model  # noqa: E402
import parallel  # noqa: E402
import parity  # noqa: E402
import rollout  # noqa: E402
import timing  # noqa: E402
from megatron.core.inference import communication_utils  # noqa: E402

WHERE = {'GPU': 'none', 'date': 'today'}
SMALL = {'buffer_size_gb': 0.1, 'max_requests': 16, 'max_sequence_length': 512}
_build_engine = model.build_engine


def _small_engine(shape: Any, graphs: bool, **options: Any) -> Any:
    del graphs
    return _build_engine(shape, False, **{'max_tokens': 256, **options, **SMALL})


def _call_in_place_of_a_graph(call: timing.Call, layers: int) -> timing.Call:
    del layers
    return call


def _one_call_each(
    graphs: dict[str, Callable[[int], object]], layers: int, flush: bool = False
) -> dict[str, float]:
    del layers, flush
    times = {}
    for name, call in graphs.items():
        start = time.perf_counter()
        call(0)
        times[name] = (time.perf_counter() - start) * 1e6
    return times


@contextmanager
def _profile_of_a_millisecond_each(activities: Any) -> Iterator[Any]:
    """A profile of the device, which is none, in four steps."""
    del activities
    yield SimpleNamespace(key_averages=lambda: [SimpleNamespace(self_device_time_total=4000.0)])


def _kernels() -> str:
    batches = {
        'decode_batches': [('3 x 300', attention.Batch(decode=(300, 5, 256)))],
        'prefill_batches': [('2 x 100', attention.Batch(prefill=[(100, 100), (60, 300)]))],
        'mixed_batches': [
            ('2 x 100 + 1 x 60', attention.Batch(decode=(300, 5), prefill=[(60, 300)]))
        ],
    }
    for name, found in batches.items():
        setattr(attention, name, lambda found=found: iter(found))
    latents.decode_batches, latents.prefill_batches = (
        lambda found=batches[name]: iter(found) for name in ('decode_batches', 'prefill_batches')
    )
    latents.SHAPES = {'MLA, 16 heads': latents.LatentHeads(16)}
    attention.PADDED = ((4, 2, 300),)
    card = {'read': 1e12, 'copy': 1e12, 'matrix': 1e14}
    rows = {
        'append': [],
        'attention': attention.run(),
        'latents': latents.run(),
        'padding': attention.padding(),
    }
    result = {
        part: {'environment': WHERE, 'ceilings': card, 'rows': found}
        for part, found in rows.items()
    }
    return kernels.markdown(result)


def _engine() -> str:
    engine.PROMPT_TOKENS, engine.NEW_TOKENS = 40, 6
    engine.MODES = {
        'eager': engine.Mode(False, (1, 3)),
        'arriving': engine.Mode(False, (3,), arrivals=1, inference=(('max_tokens', 64),)),
        'drafts': engine.Mode(False, (2,), drafts=2),
    }
    modes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / 'out.json'
        for variant in engine.VARIANTS:
            engine.worker('8B', variant, list(engine.MODES), out)
            for mode, found in json.loads(out.read_text()).items():
                cases = modes.setdefault(mode, {'environment': WHERE, 'cases': {}})['cases']
                for case, values in found.items():
                    cases.setdefault(case, {})[variant] = values
    return engine.markdown({'shapes': {'8B': modes}})


def _rollout() -> str:
    rollout.PROMPTS, rollout.SAMPLES, rollout.LONGEST_PROMPT = 3, 2, 60
    rollout.MEDIAN_TOKENS, rollout.LONGEST, rollout.CHECKED = 8, 20, 3
    rollout.INFERENCE['max_tokens'] = 256
    variants: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / 'out.json'
        for variant in rollout.VARIANTS:
            rollout.worker('8B', variant, out)
            variants[variant] = [json.loads(out.read_text())]
            variants[variant][0]['given_back_gib'] = 1.0  # no memory of a GPU is counted here
    return rollout.markdown({'environment': WHERE, 'shape': '8B', 'variants': variants})


def _parity() -> str:
    parity.REQUESTS, parity.LONGEST_PROMPT, parity.NEW_TOKENS = 4, 60, 5
    parity.ENGINES = {name: value for name, value in parity.ENGINES.items() if not value[0]}
    distances = parity.measure()
    missed = parity.misses(distances)
    return parity.markdown({'environment': WHERE, 'distances': distances, 'missed': missed})


def _parallel() -> str:
    parity.REQUESTS, parity.LONGEST_PROMPT, parity.NEW_TOKENS = 3, 40, 4
    parallel.REQUESTS, parallel.PROMPT_TOKENS, parallel.NEW_TOKENS = 2, 20, 4
    parallel.SHAPE, parallel.GRAPHS = model.SHAPES['8B'], (False,)
    torch.cuda.set_device(0)
    torch.distributed.init_process_group('nccl')
    layouts = {name: parallel.measure(layout) for name, layout in parallel.LAYOUTS.items()}
    if torch.distributed.get_rank():
        return ''
    return parallel.markdown({'environment': WHERE, 'gpus': 2, 'layouts': layouts})


def main() -> None:
    """Run the benchmark that is named."""
    model.VOCABULARY = 500
    tiny = model.Shape(layers=2, hidden=128, ffn_hidden=256, query_heads=4, kv_heads=2, head_dim=64)
    model.SHAPES['8B'] = parity.SHAPE = tiny
    attention.SHAPES = {'GQA 4:1': attention.Heads(8, 2, 64)}
    attention.STORAGE_BYTES = 1 << 22
    generator = torch.Generator
    for owner, name, value in (
        (model, 'build_engine', _small_engine),
        (timing, 'graph_of', _call_in_place_of_a_graph),
        (timing, 'alternate', _one_call_each),
        (communication_utils, '_is_cuda', lambda tensor: None),
        (torch, 'Generator', lambda device='cpu': generator()),
        (torch.profiler, 'profile', _profile_of_a_millisecond_each),
        (torch.cuda, 'reset_peak_memory_stats', lambda: None),
        (torch.cuda, 'max_memory_allocated', lambda: 1 << 30),
    ):
        mock.patch.object(owner, name, value).start()
    print(globals()[f'_{sys.argv[1]}']())


if __name__ == '__main__':
    main()
