"""The matrix of the stages' regressions: which models run in which modes of the engine.

Plain data, so that pytest can list it without importing torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

LENGTHS = (5, 16, 17, 40, 100, 3)
MIB = 1 / 1024
ONLY_GPUS_CAPTURE = 'only a GPU captures and replays CUDA graphs'


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
    stages: int = 1
    """Pipeline stages that the ranks are divided into; those of a stage are tensor-parallel."""
    trained: bool = False
    """Before the run that is recorded, roll out once, suspend, and train all weights a step."""
    expects: tuple[str, ...] = ()
    interpreted_append: bool = False
    """Append through the tree's Triton kernel, interpreted on a CPU."""
    gpu_only: str = ''
    """Why a CPU cannot run it."""
    keeps_cache: bool = False
    """Record what is in the cache beside hashes of it."""
    requests: int = 0
    """So many requests, drawn with `seed`: their prompts, which may begin alike, when each arrives,
    and up to `new_tokens` new ones. In place of `lengths` and `shared`."""
    seed: int = 0

    def varied(self, suffix: str, **inference: Any) -> Scenario:
        """The same with other fields of `InferenceConfig`."""
        inference = {**self.inference, **inference}
        return replace(self, name=f'{self.name}-{suffix}', inference=inference)

    @property
    def hnd_twin(self) -> Scenario:
        """The same with the heads-first layout, which only the candidate has."""
        return self.varied('hnd', kv_cache_layout='HND')

    @property
    def wide(self) -> Scenario:
        """The same with a head dim and a dtype that FlashInfer has kernels for.

        Buffers hold as many blocks as before: four times the elements of half the size.
        """
        buffers = {
            name: 2 * size
            for name, size in self.inference.items()
            if name.endswith('buffer_size_gb')
        }
        dims: dict[str, Any] = {'kv_channels': 64}
        if self.model.get('multi_latent_attention'):
            # 576 elements a token where there were 40, of half the size. As many more summands make
            # larger keys and values of the same weights, and larger rounding.
            dims = {
                'kv_lora_rank': 512,
                'qk_pos_emb_head_dim': 64,
                'qk_head_dim': 128,
                'v_head_dim': 128,
                'kv_channels': 128,
                'init_method_std': 0.15,
            }
            buffers = {name: size * 7.2 / 2 for name, size in buffers.items()}
        return replace(
            self.varied('wide', **buffers),
            model={**dims, 'dtype': 'bfloat16', **self.model},
            keeps_cache=True,
        )

    def graphed(self, scope: str, *expects: str) -> Scenario:
        """The same with CUDA graphs, which change no result."""
        graphs = {'cuda_graph_impl': 'local', 'inference_cuda_graph_scope': scope}
        return replace(
            self.varied(f'graphs-{scope}', num_cuda_graphs=4),
            model={**self.model, **graphs},
            expects=(*self.expects, 'graph_steps', *expects),
            gpu_only=ONLY_GPUS_CAPTURE,
        )


@dataclass(frozen=True)
class Task:
    """A scenario to run, with or without a deliberate fault."""

    scenario: Scenario
    fault: str = ''

    @property
    def name(self) -> str:
        """The name of its outcome."""
        return f'{self.fault}.{self.scenario.name}' if self.fault else self.scenario.name


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
        Scenario(
            'hybrid-prefixes',
            {**gqa, 'hybrid_pattern': 'M*MM*M*'},
            {**lru, 'prefix_caching_mamba_gb': MIB},
            # Mamba's state is kept where a prompt ends with a block.
            lengths=(0, 16, 17, 40, 9, 3),
            shared=48,
            steps_between=14,
            expects=('prefix_hits', 'skipped_tokens'),
        ),
        # KV heads more than ranks, as many, and fewer.
        *(
            Scenario(f'tp2-{name}', {'num_query_groups': groups}, ranks=2)
            for name, groups in (('mha', 4), ('gqa', 2), ('mqa', 1))
        ),
        Scenario('tp2-mqa-bf16', {'num_query_groups': 1, **bf16}, ranks=2),
        Scenario('tp2-mla-latents', mla, mla_blocks, ranks=2),
    ]
    graphs: Any = {'new_tokens': 20, 'expects': ('graph_steps',), 'gpu_only': ONLY_GPUS_CAPTURE}
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


def _more() -> list[Scenario]:
    """What else attention has to do with: for kernels alone, as the cache is the same in all."""
    gqa = {'num_query_groups': 2}
    windows = {'window_size': (8, 0), 'window_attn_skip_freq': 2}
    sinks = {'softmax_type': 'learnable'}
    learner = {**gqa, **windows, **sinks, 'hidden_dropout': 0.0, 'attention_dropout': 0.0}
    trained: Any = {'trained': True, 'expects': ('suspensions',)}
    speculation = SCENARIOS['speculation-blocks-16']
    chunked = SCENARIOS['window-sinks-chunked']
    return [
        Scenario('fp16', {**gqa, **windows, **sinks, 'dtype': 'float16'}),
        Scenario('head-dim-256', {**gqa, 'kv_channels': 256}),
        replace(chunked, name='head-dim-96-chunked', model={**chunked.model, 'kv_channels': 96}),
        Scenario(
            'gate-and-layer-without-rope',
            {**gqa, 'attention_output_gate': True, 'no_rope_freq': [0, 1]},
        ),
        *(
            replace(
                speculation,
                name=f'speculation-{drafts}-windows',
                model={**gqa, **windows, 'mtp_num_layers': drafts},
                inference={'num_speculative_tokens': drafts},
            )
            for drafts in (1, 4)
        ),
        Scenario('hybrid-windows-sinks', {**gqa, **windows, **sinks, 'hybrid_pattern': 'M*MM*M*'}),
        Scenario('tp2-windows-sinks', {**gqa, **windows, **sinks}, ranks=2),
        *(
            Scenario(f'trained-{mode}', learner, {'kv_cache_management_mode': mode}, **trained)
            for mode in ('persist', 'recompute')
        ),
        # Numbers of layers count over all stages: the second has a full layer and a window.
        Scenario(
            'pp2-unequal',
            {
                **gqa,
                **windows,
                'num_layers': 3,
                'window_attn_skip_freq': [1, 0, 1],
                'num_layers_in_first_pipeline_stage': 1,
            },
            ranks=2,
            stages=2,
        ),
    ]


MORE = {scenario.name: scenario for scenario in _more()}

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

# Of each way in which the engine prepares, appends and attends, one or two: stage 2 shares all of
# it with FlashInfer by a few hunks, and stage 1's regression has held the whole matrix already.
SAMPLE = {
    name: SCENARIOS[name]
    for name in (
        'gqa-blocks-16',
        'mla-latents-chunked',
        'bf16',
        'log-probs',
        'chunked-prefill-arrivals',
        'prefixes-lru-chunked',
        'speculation-async',
        'speculation-tight',
        'tight-prefixes',
        'suspend-recompute',
        'window-sinks-chunked',
        'hybrid',
        'tp2-gqa',
        'graphs',
    )
}

Twins = dict[str, tuple[Scenario, Scenario]]


def _flashinfer(base: Scenario, kernel: str = 'auto', layout: str = 'NHD') -> Scenario:
    suffix = {('auto', 'NHD'): 'flashinfer', ('fa2', 'NHD'): 'fa2', ('fa2', 'HND'): 'fa2-hnd'}
    return base.varied(
        suffix[kernel, layout],
        inference_attention_backend='flashinfer',
        flashinfer_kernel=kernel,
        kv_cache_layout=layout,
    )


def _twins() -> Iterator[tuple[Scenario, Scenario]]:
    """Scenarios by FlashAttention, each with one by FlashInfer that must come out the same."""
    for name in (
        'mha-blocks-16',
        'gqa-blocks-16',
        'gqa-blocks-64',
        'mqa-blocks-256',
        'four-layers-eight-heads',
        'last-logits-only',
        'arrivals',
        'log-probs',
        'chunked-prefill',
        'chunked-prefill-arrivals',
        'prefixes-lru',
        'prefixes-ref_zero-chunked',
        'speculation-blocks-16',
        'speculation-blocks-64',
        'speculation-chunked',
        'speculation-async',
        'speculation-tight',
        'speculation-own-drafts',
        'async',
        'tight',
        'tight-prefixes',
        'suspend-persist',
        'suspend-offload',
        'suspend-recompute',
        'window',
        'window-every-second-layer',
        'window-sinks-chunked',
        'sink-off-by-one',
        'sink-learnable',
        'hybrid',
        'hybrid-chunked-blocks-64',
        'hybrid-prefixes',
        'tp2-gqa',
        'tp2-mqa',
        'unified-memory',
        'static-pointers',
    ):
        base = SCENARIOS[name].wide
        yield base, _flashinfer(base)
    for base in MORE.values():
        yield base.wide, _flashinfer(base.wide)
    for name in ('mqa-blocks-256', 'async', 'speculation-async', 'window-sinks-chunked', 'tp2-gqa'):
        base = SCENARIOS[name].wide
        yield base, _flashinfer(base, 'fa2')
    for name in (
        'gqa-blocks-16',
        'chunked-prefill-arrivals',
        'prefixes-lru',
        'speculation-tight',
        'suspend-recompute',
        'window-sinks-chunked',
        'hybrid',
    ):
        base = SCENARIOS[name].wide
        yield base, _flashinfer(base, 'fa2', 'HND')
    yarn = {'rope_type': 'yarn', 'rotary_scaling_factor': 4.0, 'mscale_all_dim': 1.0}
    latents = SCENARIOS['mla-latents']
    stretched = replace(latents, name='mla-latents-yarn', model={**latents.model, **yarn}).wide
    for base in (
        stretched,
        *(
            SCENARIOS[name].wide
            for name in (
                'mla-latents-chunked',
                'mla-latents-prefixes',
                'mla-latents-speculation',
                'mla-latents-tight',
                'mla-latents-suspend-recompute',
                'tp2-mla-latents',
            )
        ),
    ):
        yield base, _flashinfer(base)
    yield stretched, _flashinfer(stretched, 'fa2')
    for name, kernel, scope in (
        ('mla-latents', 'auto', 'block'),
        ('mla-latents-chunked', 'auto', 'layer'),
        ('mla-latents-chunked', 'fa2', 'layer'),
        ('mla-latents-speculation', 'auto', 'block'),
        ('gqa-blocks-64', 'auto', 'layer'),
        ('gqa-blocks-64', 'auto', 'block'),
        ('mqa-blocks-256', 'fa2', 'block'),
        ('arrivals', 'auto', 'block'),
        ('arrivals', 'fa2', 'layer'),
        ('chunked-prefill-arrivals', 'auto', 'layer'),
        ('prefixes-lru', 'auto', 'block'),
        ('speculation-blocks-16', 'auto', 'block'),
        ('speculation-async', 'auto', 'layer'),
        ('speculation-tight', 'fa2', 'block'),
        ('speculation-4-windows', 'auto', 'block'),
        ('trained-persist', 'auto', 'layer'),
        ('window-sinks-chunked', 'auto', 'block'),
        ('window-sinks-chunked', 'fa2', 'layer'),
        ('head-dim-96-chunked', 'auto', 'block'),
        ('suspend-recompute', 'auto', 'block'),
        ('hybrid', 'auto', 'layer'),
        ('tp2-gqa', 'auto', 'block'),
    ):
        base = {**SCENARIOS, **MORE}[name].wide
        mixed = ('graph_prefills',) if 'arrivals' in name or 'chunks' in base.expects else ()
        yield base, _flashinfer(base, kernel).graphed(scope, *mixed)


TWINS: Twins = {twin.name: (base, twin) for base, twin in _twins()}


def _alone() -> Iterator[Scenario]:
    """Scenarios by FlashInfer alone, for which forwards without a cache are enough."""
    # A later patch of the stage gives FlashAttention the model's scale.
    scale = Scenario('softmax-scale', {'softmax_scale': 0.04}, steps_between=2)
    yield from (_flashinfer(scale.wide, kernel) for kernel in ('auto', 'fa2'))
    # FlashMLA takes blocks of 64 alone.
    latents, chunked, prefixes, speculation = (
        SCENARIOS[f'mla-latents{suffix}']
        for suffix in ('', '-chunked', '-prefixes', '-speculation')
    )
    for base, size, shared in ((chunked, 16, 0), (prefixes, 128, 140), (chunked, 256, 0)):
        inference = {**base.inference, 'block_size_tokens': size}
        name = f'{base.name}-blocks-{size}'
        yield _flashinfer(replace(base, name=name, inference=inference, shared=shared).wide)
    for mode in ('persist', 'offload'):
        yield _flashinfer(SCENARIOS[f'mla-latents-suspend-{mode}'].wide)
    overlapping = latents.varied('async', async_sched_mode='async')
    yield _flashinfer(replace(overlapping, expects=('overlaps',)).wide)
    for drafts in (1, 4):
        drafting = speculation.varied(f'{drafts}', num_speculative_tokens=drafts)
        yield _flashinfer(
            replace(drafting, model={**speculation.model, 'mtp_num_layers': drafts}).wide
        )


ALONE = {scenario.name: scenario for scenario in _alone()}

# Twins that must come out the same to the bit if all that a step's plan consists of is destroyed
# before the next step is planned.
REPLANNED = (
    'arrivals-wide-flashinfer',
    'speculation-chunked-wide-flashinfer',
    'tight-wide-flashinfer',
    'window-sinks-chunked-wide-fa2',
    'speculation-async-wide-fa2',
    'mla-latents-chunked-wide-flashinfer',
    'gqa-blocks-64-wide-flashinfer-graphs-block',
    'arrivals-wide-flashinfer-graphs-block',
    'arrivals-wide-fa2-graphs-layer',
    'speculation-async-wide-flashinfer-graphs-layer',
    'window-sinks-chunked-wide-flashinfer-graphs-block',
)

# Each deliberate fault of the FlashInfer backend, and the twins that must catch it.
FLASHINFER_FAULTS = {
    'plan_destroyed': ('gqa-blocks-16-wide-flashinfer', 'mqa-blocks-256-wide-fa2'),
    'previous_tables': ('gqa-blocks-16-wide-flashinfer', 'speculation-async-wide-flashinfer'),
    'previous_fa2_works': ('mqa-blocks-256-wide-fa2', 'speculation-tight-wide-fa2-hnd'),
    'window_of_another_layer': (
        'window-every-second-layer-wide-flashinfer',
        'window-sinks-chunked-wide-fa2',
        'window-sinks-chunked-wide-flashinfer-graphs-block',
    ),
    'begin_not_captured': (
        'gqa-blocks-64-wide-flashinfer-graphs-layer',
        'arrivals-wide-flashinfer-graphs-block',
    ),
    'pages_shifted': ('gqa-blocks-16-wide-flashinfer', 'mqa-blocks-256-wide-flashinfer'),
    'fa2_pages_shifted': ('gqa-blocks-16-wide-fa2-hnd',),
    'decode_length_off_by_one': ('gqa-blocks-64-wide-flashinfer', 'hybrid-wide-flashinfer'),
    'prefill_length_off_by_one': ('chunked-prefill-wide-flashinfer',),
    'sinks_dropped': (
        'sink-off-by-one-wide-flashinfer',
        'sink-learnable-wide-flashinfer',
        'window-sinks-chunked-wide-flashinfer-graphs-block',
    ),
    'sinks_twice': ('window-sinks-chunked-wide-flashinfer',),
    'decode_slots_off_by_one': ('gqa-blocks-16-wide-flashinfer', 'arrivals-wide-flashinfer'),
    'prefill_taken_for_decode': ('arrivals-wide-flashinfer',),
    'cached_keys_forgotten': ('chunked-prefill-wide-flashinfer', 'hybrid-prefixes-wide-flashinfer'),
    'padding_left_out': ('chunked-prefill-arrivals-wide-flashinfer',),
    'scale_ignored': (
        'gqa-blocks-16-wide-flashinfer',
        'async-wide-fa2',
        'mla-latents-yarn-wide-flashinfer',
    ),
    'previous_mla_works': (
        'mla-latents-yarn-wide-flashinfer',
        'mla-latents-tight-wide-flashinfer',
        'mla-latents-wide-flashinfer-graphs-block',
    ),
    'window_one_too_wide': (
        'window-wide-flashinfer',
        'window-sinks-chunked-wide-fa2',
        'speculation-4-windows-wide-flashinfer',
        'speculation-4-windows-wide-flashinfer-graphs-block',
    ),
    'sinks_of_the_first_step': ('trained-persist-wide-flashinfer',),
    'number_within_the_stage': ('pp2-unequal-wide-flashinfer',),
    'layer_off_by_one': ('hybrid-wide-flashinfer',),
}

# Faults of what both backends share: twins have the same, so that only forwards without a cache,
# which have none, tell. And the twins that must catch them.
SHARED_FAULTS = {
    'gate_left_out': ('gate-and-layer-without-rope-wide-flashinfer',),
    'rope_in_all_layers': ('gate-and-layer-without-rope-wide-flashinfer',),
}


SEED = 0
"""With these random requests the engine meets with all of `RANDOM_EVENTS`."""


def traces(device: str, seed: int) -> Twins:
    """Twins of random requests: 40 for a CPU; a thousand, with CUDA graphs, for a GPU."""
    on_gpu = device == 'cuda'
    crowded = {
        'enable_chunked_prefill': True,
        'max_tokens': 32,
        'enable_prefix_caching': True,
        'prefix_caching_eviction_policy': 'ref_zero',
        'buffer_size_gb': 0.17 * MIB,
        'paused_buffer_size_gb': 0.04 * MIB,
    }
    # Where memory runs out, upstream's allocator may fail to evict cached blocks from under chunks,
    # and with drafts and chunks keys may be read that were never written; by flash, too.
    roomy = {**crowded, 'prefix_caching_eviction_policy': 'lru', 'buffer_size_gb': 32 * MIB}
    # A mixed graph with fewer decode slots than there are decode requests has too few rows of
    # logits for their drafts; by flash, too.
    drafting = {**roomy, 'use_cuda_graphs_for_non_decode_steps': False}
    random = Scenario(
        'random',
        {'num_query_groups': 2},
        crowded,
        new_tokens=32,
        requests=350 if on_gpu else 14,
        seed=seed,
    )
    windows = {'window_size': (8, 0), 'window_attn_skip_freq': 2, 'softmax_type': 'learnable'}
    speculation = SCENARIOS['speculation-chunked']
    result = {}
    for kernel, base in (
        (
            'auto',
            replace(
                random,
                name='random-windows-sinks',
                model={**random.model, **windows},
                suspend_every=9,
            ),
        ),
        (
            'auto',
            replace(
                random,
                name='random-speculation',
                model=speculation.model,
                inference={**drafting, **speculation.inference},
                right_drafts=speculation.right_drafts,
            ),
        ),
        (
            'fa2',
            replace(
                random,
                name='random-async',
                inference={**roomy, 'async_sched_mode': 'async'},
                requests=300 if on_gpu else 12,
            ),
        ),
    ):
        base = replace(base.wide, keeps_cache=False)
        twin = _flashinfer(base, kernel)
        if on_gpu:
            twin = replace(twin.graphed('block'), name=twin.name)
        result[base.name] = base, twin
    return result


# What happens among random requests, in one trace or another.
RANDOM_EVENTS = (
    'chunks',
    'prefix_hits',
    'paused',
    'evicted',
    'suspensions',
    'overlaps',
    'drafts_accepted',
    'drafts_rejected',
)


def tasks(name: str, device: str, seed: int) -> list[Task]:
    """The runs that a set of this name consists of, each once."""
    if name == 'faults':
        return [Task(SCENARIOS[other], fault) for fault in FAULTS for other in FAULTS[fault]]
    if name == 'flashinfer-faults':
        faulty = [(fault, FLASHINFER_FAULTS[fault]) for fault in FLASHINFER_FAULTS]
        faulty.append(('replanned', REPLANNED))
        return [
            *(Task(TWINS[twin][1], fault) for fault, names in faulty for twin in names),
            *(
                Task(one, fault)
                for fault, names in SHARED_FAULTS.items()
                for twin in names
                for one in TWINS[twin]
            ),
        ]
    if name == 'alone':
        return [Task(one) for one in ALONE.values()]
    if name in ('twins', 'traces'):
        twins = TWINS if name == 'twins' else traces(device, seed)
        return list({one.name: Task(one) for pair in twins.values() for one in pair}.values())
    return [Task(one) for one in {'all': SCENARIOS, 'hnd': HND, 'sample': SAMPLE}[name].values()]


SETS = ('all', 'hnd', 'faults', 'sample', 'twins', 'alone', 'flashinfer-faults', 'traces')
