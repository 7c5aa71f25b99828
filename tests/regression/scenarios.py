"""The matrix of stage 1's regression: which models run in which modes of the engine.

Plain data, so that pytest can list it without importing torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

LENGTHS = (5, 16, 17, 40, 100, 3)
MIB = 1 / 1024


@dataclass(frozen=True)
class Scenario:
    """One run of an engine.

    What counts is the run in two trees being the same. `expects` keeps it honest: it names the
    counters that must not be zero, lest a scenario no longer reaches what it is there for.
    """

    name: str
    model: Mapping[str, Any] = field(default_factory=dict)
    """Options of `tiny_engine.build_model`; dtypes and enums by name."""
    inference: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `InferenceConfig`, likewise."""
    lengths: tuple[int, ...] = LENGTHS
    """Tokens of each request's prompt, after the shared ones."""
    shared: int = 0
    new_tokens: int = 12
    sampling: Mapping[str, Any] = field(default_factory=lambda: {'top_k': 1})
    steps_between: int = 0
    suspend_every: int = 0
    """Suspend and resume after every so many steps."""
    right_drafts: float | None = None
    """Probability that a draft is what the model will say; None: drafts are the model's own."""
    ranks: int = 1
    expects: tuple[str, ...] = ()
    interpreted_append: bool = False
    """Append through the tree's Triton kernel, interpreted on a CPU."""
    gpu_only: str = ''
    """Why a CPU cannot run it."""

    @property
    def hnd_twin(self) -> Scenario:
        """The same with the heads-first layout, which only the candidate has."""
        inference = {**self.inference, 'kv_cache_layout': 'HND'}
        return replace(self, name=f'{self.name}-hnd', inference=inference)


def _matrix() -> list[Scenario]:
    bf16 = {'dtype': 'bfloat16'}
    gqa = {'num_query_groups': 2}
    mla = {'multi_latent_attention': True}
    heads = {'mha': {'num_query_groups': 4}, 'gqa': gqa, 'mqa': {'num_query_groups': 1}}
    mla_blocks = {'block_size_tokens': 64}
    chunked = {'enable_chunked_prefill': True, 'max_tokens': 32}
    prefixes = {'enable_prefix_caching': True}
    lru = {**prefixes, 'prefix_caching_eviction_policy': 'lru'}
    drafting = {'mtp_num_layers': 2}
    two_drafts = {'num_speculative_tokens': 2}
    # Six requests of up to four blocks each share eleven, of which paused ones may keep three.
    tight = {'buffer_size_gb': 0.1 * MIB, 'paused_buffer_size_gb': 0.03 * MIB}
    short = (5, 16, 17, 14, 15, 3)

    scenarios = [
        Scenario(f'{name}-blocks-{size}', model, {'block_size_tokens': size})
        for (name, model), size in product(heads.items(), (16, 64, 256))
    ]
    scenarios += [
        Scenario('mla-latents', mla, mla_blocks),
        Scenario('mla-latents-low-rank-queries', {**mla, 'q_lora_rank': 16}, mla_blocks),
        Scenario('mla-latents-bf16', {**mla, **bf16}, mla_blocks),
        Scenario('mla-latents-chunked', mla, {**mla_blocks, **chunked}, expects=('chunks',)),
        Scenario(
            'mla-latents-prefixes',
            mla,
            {**mla_blocks, **lru},
            shared=70,
            steps_between=1,
            expects=('prefix_hits',),
        ),
        Scenario('bf16', {**gqa, **bf16}),
        Scenario('four-layers-eight-heads', {'num_layers': 4, 'num_attention_heads': 8, **gqa}),
        Scenario('last-logits-only', gqa, {'materialize_only_last_token_logits': True}),
        Scenario('arrivals', gqa, steps_between=2),
        Scenario('sampled', gqa, sampling={'temperature': 1.0, 'top_p': 0.9}),
        Scenario('log-probs', gqa, sampling={'top_k': 1, 'return_log_probs': True}),
        Scenario(
            'triton-append',
            {**gqa, **bf16},
            # An interpreted kernel takes a millisecond a program.
            lengths=(5, 16, 17),
            new_tokens=4,
            interpreted_append=True,
        ),
        Scenario('chunked-prefill', gqa, chunked, expects=('chunks',)),
        Scenario(
            'chunked-prefill-arrivals',
            gqa,
            {**chunked, 'max_tokens': 16, 'block_size_tokens': 64},
            steps_between=2,
            expects=('chunks',),
        ),
    ]
    for policy, chunks in product(('ref_zero', 'lru'), ({}, chunked)):
        scenarios.append(
            Scenario(
                f'prefixes-{policy}{"-chunked" if chunks else ""}',
                gqa,
                {**prefixes, 'prefix_caching_eviction_policy': policy, **chunks},
                lengths=(5, 16, 17, 40, 9, 3),
                shared=48,
                # Longer apart than a request lives, only the LRU policy still has its blocks.
                steps_between=14 if policy == 'lru' else 1,
                expects=('prefix_hits', 'chunks') if chunks else ('prefix_hits',),
            )
        )
    speculation = Scenario(
        'speculation-blocks-16',
        {**gqa, **drafting},
        two_drafts,
        new_tokens=30,
        right_drafts=0.6,
        expects=('drafts_accepted', 'drafts_rejected'),
    )
    scenarios += [
        speculation,
        replace(
            speculation,
            name='speculation-blocks-64',
            inference={**two_drafts, 'block_size_tokens': 64},
        ),
        replace(
            speculation,
            name='speculation-chunked',
            inference={**two_drafts, **chunked},
            expects=(*speculation.expects, 'chunks'),
        ),
        replace(
            speculation,
            name='speculation-async',
            inference={**two_drafts, 'async_sched_mode': 'async'},
            expects=(*speculation.expects, 'overlaps'),
        ),
        replace(
            speculation,
            name='speculation-tight',
            inference={**two_drafts, **tight},
            lengths=short,
            expects=(*speculation.expects, 'paused', 'evicted'),
        ),
        replace(
            speculation,
            name='mla-latents-speculation',
            model={**mla, **drafting},
            inference={**two_drafts, **mla_blocks},
        ),
        Scenario('speculation-own-drafts', {**gqa, **drafting}, two_drafts),
        Scenario('async', gqa, {'async_sched_mode': 'async'}, expects=('overlaps',)),
        Scenario('tight', gqa, tight, lengths=short, new_tokens=40, expects=('paused', 'evicted')),
        Scenario(
            'mla-latents-tight',
            mla,
            {**mla_blocks, 'buffer_size_gb': 0.16 * MIB, 'paused_buffer_size_gb': 0.04 * MIB},
            lengths=short,
            new_tokens=60,
            expects=('paused', 'evicted'),
        ),
        Scenario(
            'tight-prefixes',
            gqa,
            {**tight, **lru},
            lengths=short,
            new_tokens=40,
            expects=('paused', 'evicted'),
        ),
    ]
    for mode in ('persist', 'offload', 'recompute'):
        suspended: Any = {'suspend_every': 4, 'expects': ('suspensions',)}
        management = {'kv_cache_management_mode': mode}
        scenarios += [
            Scenario(f'suspend-{mode}', gqa, management, **suspended),
            Scenario(f'mla-latents-suspend-{mode}', mla, {**mla_blocks, **management}, **suspended),
        ]
    sinks = {
        'off-by-one': {'softmax_type': 'off-by-one'},
        'learnable': {'softmax_type': 'learnable'},
    }
    window = {'window_size': (8, 0)}
    scenarios += [
        Scenario('window', {**gqa, **window}),
        Scenario('window-every-second-layer', {**gqa, **window, 'window_attn_skip_freq': 2}),
        Scenario(
            'window-sinks-chunked',
            {**gqa, **window, 'window_attn_skip_freq': [1, 0], **sinks['learnable']},
            chunked,
            expects=('chunks',),
        ),
        *(Scenario(f'sink-{name}', {**gqa, **sink}) for name, sink in sinks.items()),
        Scenario('hybrid', {**gqa, 'hybrid_pattern': 'M*MM*M*'}),
        Scenario(
            'hybrid-chunked-blocks-64',
            {**gqa, 'hybrid_pattern': '*MM*'},
            {'block_size_tokens': 64, **chunked},
            expects=('chunks',),
        ),
        # KV heads more than ranks, as many, and fewer.
        *(
            Scenario(f'tp2-{name}', {'num_query_groups': groups}, ranks=2)
            for name, groups in (('mha', 4), ('gqa', 2), ('mqa', 1))
        ),
        Scenario('tp2-mqa-bf16', {'num_query_groups': 1, **bf16}, ranks=2),
        Scenario('tp2-mla-latents', mla, mla_blocks, ranks=2),
    ]
    graphs: Any = {
        'new_tokens': 20,
        'expects': ('graph_steps',),
        'gpu_only': 'only a GPU captures and replays CUDA graphs',
    }
    captured = {'cuda_graph_impl': 'local'}
    scenarios += [
        Scenario('graphs', {**gqa, **captured}, {'num_cuda_graphs': 4}, **graphs),
        Scenario(
            'graphs-bf16-mqa',
            {**heads['mqa'], **captured, **bf16},
            {'num_cuda_graphs': 4},
            **graphs,
        ),
        Scenario(
            'unified-memory',
            gqa,
            {'unified_memory_level': 1},
            expects=('unified_memory',),
            gpu_only='only a GPU has unified memory',
        ),
        Scenario(
            'static-pointers',
            gqa,
            {'kv_cache_management_mode': 'offload', 'static_kv_memory_pointers': True},
            suspend_every=4,
            expects=('suspensions',),
            gpu_only='torch_memory_saver, which keeps the pointers, is for GPUs',
        ),
    ]
    return scenarios


SCENARIOS = {scenario.name: scenario for scenario in _matrix()}

# Scenarios of every path through the cache, with the heads-first layout.
HND = {
    name: SCENARIOS[name].hnd_twin
    for name in (
        'gqa-blocks-16',
        'mqa-blocks-64',
        'bf16',
        'chunked-prefill-arrivals',
        'prefixes-lru',
        'speculation-blocks-16',
        'tight',
        'suspend-offload',
        'suspend-recompute',
        'window-sinks-chunked',
        'hybrid',
        'triton-append',
        'tp2-gqa',
    )
}

# Each deliberate fault, and the scenarios that must catch it.
FAULTS = {
    'keys_and_values_swapped': ('gqa-blocks-16', 'speculation-blocks-16'),
    'window_off_by_one': ('window-every-second-layer',),
    'sink_ignored': ('sink-off-by-one', 'sink-learnable'),
    'wrong_block_table': ('mha-blocks-16', 'mla-latents', 'prefixes-lru'),
    'layer_off_by_one': ('gqa-blocks-64', 'mla-latents', 'hybrid'),
    'nan_in_valid_region': ('bf16', 'suspend-offload'),
    'wrong_kv_heads': ('mqa-blocks-64',),
    'wrong_block_bytes': ('mha-blocks-256', 'tight'),
}
