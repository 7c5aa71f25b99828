"""Runs one scenario on the engine of the tree that is on the path, and records it."""

from __future__ import annotations

import hashlib
import importlib.util
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import megatron_on_cpu
import reference_attention
import tiny_engine
import without_gpu_packages
from faults import FAULTS, Fault
from megatron.core import parallel_state
from megatron.core.inference import config as inference_config
from megatron.core.inference import unified_memory
from megatron.core.inference.contexts import dynamic_context
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.inference.utils import InferenceMode
from recording import Forward, Outcome, Recording
from reference_attention import gather_paged
from scenarios import SHARED_FAULTS, Scenario
from tiny_engine import Model

_ENUMS = {
    'prefix_caching_eviction_policy': inference_config.PrefixCachingEvictionPolicy,
    'kv_cache_management_mode': inference_config.KVCacheManagementMode,
    'async_sched_mode': inference_config.AsyncScheduleMode,
}


def prepare(device: torch.device) -> None:
    """Replace what the scenarios' models need and this machine may not have."""
    without_gpu_packages.mla_without_transformer_engine()
    if device.type == 'cpu':
        megatron_on_cpu.append_without_triton()
        megatron_on_cpu.stages_without_gpus()


def run(scenario: Scenario, device: torch.device, fault: str = '') -> Outcome:
    """Run a scenario, with one of `FAULTS` if named; what it raises is its outcome."""
    try:
        if reason := _missing(scenario, device):
            return Outcome(skipped=reason)
        model = _build_model(scenario, device)
        recording = _record(scenario, model, device, fault)
        comparable = not fault or fault in SHARED_FAULTS
        dense = _compare_with_dense(scenario, model, recording, device) if comparable else {}
        return Outcome(recording, dense=dense)
    except Exception:
        return Outcome(error=traceback.format_exc())
    finally:
        InferenceMode.unset_active()


def _missing(scenario: Scenario, device: torch.device) -> str:
    """What a machine with a GPU, or a tree with the first patches only, lacks for a scenario."""
    if 'kv_cache_layout' in scenario.inference:
        if not hasattr(inference_config.InferenceConfig, 'kv_cache_layout'):
            return 'a later patch of the stage lets the layout be chosen'
    if 'inference_attention_backend' in scenario.inference:
        if not hasattr(dynamic_context.DynamicInferenceContext, 'flashinfer_attention'):
            return 'a later patch of the stage lets FlashInfer compute attention'
        if scenario.model.get('multi_latent_attention'):
            if not importlib.util.find_spec('megatron.core.inference.flashinfer_attention.mla'):
                return 'a later patch of the stage lets FlashInfer do multi-latent attention'
        if importlib.util.find_spec('flashinfer') is None:
            return 'FlashInfer is not installed'
    if scenario.inference.get('unified_memory_level'):
        try:
            unified_memory.create_unified_mempool()
        except unified_memory.UnifiedMemoryUnsupportedError as error:
            return f'there is no unified memory: {error}'
    if scenario.inference.get('static_kv_memory_pointers'):
        if not dynamic_context.HAVE_TORCH_MEMORY_SAVER:
            return 'torch_memory_saver is not installed'
    if device.type == 'cuda' and torch.cuda.device_count() < scenario.ranks:
        return f'each of {scenario.ranks} ranks needs a GPU'
    return ''


def _build_model(scenario: Scenario, device: torch.device, **changes: Any) -> Model:
    options = {**scenario.model, **changes}
    dtype = getattr(torch, options.pop('dtype', 'float32'))
    return tiny_engine.build_model(device, dtype, **options)


@dataclass(frozen=True)
class _Request:
    prompt: list[int]
    new_tokens: int
    step: int
    """After which it arrives."""


def _random_requests(scenario: Scenario) -> list[_Request]:
    random = Random(scenario.seed)

    def tokens(length: int) -> list[int]:
        return random.choices(range(tiny_engine.VOCABULARY - 1), k=length)

    beginnings = [tokens(length) for length in (80, 48, 33)]
    requests, step = [], 0
    for _ in range(scenario.requests):
        shared = random.choice(beginnings)[: random.choice((0, 16, 48, 80))]
        prompt = shared + tokens(random.choice((1, random.randint(2, 20), random.randint(2, 90))))
        requests.append(_Request(prompt, random.randint(2, scenario.new_tokens), step))
        step += random.choice((0, 0, 1, random.randint(2, 12)))
    return requests


def _max_steps(scenario: Scenario) -> int:
    return 1000 + 20 * scenario.requests


def _prompts(scenario: Scenario) -> list[list[int]]:
    if scenario.requests:
        return [request.prompt for request in _random_requests(scenario)]
    return tiny_engine.make_prompts(scenario.lengths, scenario.shared)


def _record(scenario: Scenario, model: Model, device: torch.device, fault: str) -> Recording:
    options = {
        name: _ENUMS[name](value) if name in _ENUMS else value
        for name, value in scenario.inference.items()
    }
    sampling = {
        'num_tokens_to_generate': scenario.new_tokens,
        'termination_id': -1,
        **scenario.sampling,
    }
    recording, counters = Recording(), Counter[str]()
    with ExitStack() as stack:
        _replace(stack, scenario, model, device, fault)
        engine = tiny_engine.build_engine(model, **options)
        context = engine.context
        _poison(context)

        def after_forward(module: Any, inputs: Any, output: Tensor) -> None:
            del module, inputs
            if context.is_creating_cuda_graphs:  # again, after a suspension
                return
            by_graph = context.using_cuda_graph_this_step()
            counters['graph_steps'] += by_graph
            counters['graph_prefills'] += by_graph and not context.is_decode_only()
            counters['not_finite'] += not output.isfinite().all()  # padding included
            recording.forwards.append(_forward(context, output))
            contents = recording.contents if scenario.keeps_cache else None
            recording.cache.append(_valid_cache(context, model, contents))

        waiting = _random_requests(scenario) if scenario.requests else []

        def arrive(step: int) -> None:
            while waiting and (waiting[0].step <= step or not engine.has_unfinished_requests()):
                request = waiting.pop(0)
                number = scenario.requests - len(waiting) - 1
                own = {**sampling, 'num_tokens_to_generate': request.new_tokens}
                engine.add_request(number, request.prompt, SamplingParams(**own))

        def after_step(step: int) -> None:
            counters['paused'] += int(context.paused_request_count > 0)
            counters['chunks'] += int(context.chunked_prefill_request_id != -1)
            recording.free_blocks.append(int(context.kv_block_allocator.total_avail))
            if scenario.suspend_every and step % scenario.suspend_every == 0:
                _suspend(scenario, engine)
                counters['suspensions'] += 1
                if options.get('kv_cache_management_mode') == 'recompute':
                    _poison(context)
            arrive(step)

        if scenario.trained:
            tiny_engine.run_engine(engine, _prompts(scenario), sampling)
            _suspend(scenario, engine, lambda: _train(scenario, model, device))
            counters['suspensions'] += 1
            _poison(context)
        stack.callback(model.module.register_forward_hook(after_forward).remove)
        arrive(0)
        finished = tiny_engine.run_engine(
            engine,
            [] if scenario.requests else _prompts(scenario),
            sampling,
            steps_between=scenario.steps_between,
            after_step=after_step,
            max_steps=_max_steps(scenario),
        )
    recording.prompts = _prompts(scenario)
    recording.tokens, recording.log_probs = finished.tokens, finished.log_probs
    recording.steps = finished.steps
    recording.counters = {**counters, **_counters(engine)}
    _record_memory(recording, context)
    return recording


def _suspend(
    scenario: Scenario, engine: DynamicInferenceEngine, meanwhile: Callable[[], None] | None = None
) -> None:
    """Suspend and resume.

    Raises:
        RuntimeError: something has moved that has to stay where it is.
    """
    before = _addresses(engine.context)
    engine.suspend()
    if meanwhile:
        meanwhile()
    engine.resume()
    options = scenario.inference
    stays = options.get('static_kv_memory_pointers') or options.get('unified_memory_level')
    stays = stays or options.get('kv_cache_management_mode', 'persist') == 'persist'
    if stays and _addresses(engine.context) != before:
        raise RuntimeError('the cache, or what FlashInfer keeps beside it, has moved')


def _addresses(context: Any) -> list[int]:
    """Where the cache is, and what FlashInfer's kernels keep beside it."""
    found = [context.memory_buffer.data_ptr()]

    def add(owner: Any) -> None:
        for name, value in vars(owner).items():
            if isinstance(value, Tensor):
                found.append(value.data_ptr())
            elif hasattr(value, 'derive') or name == '_wrapper':
                add(value)
            elif name in ('_wrappers', '_ragged_wrappers'):
                for wrapper in value.values():
                    add(wrapper)

    attention = getattr(context, 'flashinfer_attention', None)
    for kernel in attention._kernels.values() if attention else ():
        add(kernel)
    return found


def _replace(
    stack: ExitStack, scenario: Scenario, model: Model, device: torch.device, fault: str
) -> None:
    """Put in place what a scenario replaces, until `stack` is closed."""
    if 'cuda_graph_impl' in scenario.model:
        without_sync = reference_attention.attend_paged_without_sync
        stack.enter_context(mock.patch.object(reference_attention, 'attend_paged', without_sync))
    if scenario.right_drafts is not None:
        stack.enter_context(_drafts(scenario, device, scenario.right_drafts))
    if fault:
        stack.enter_context(_fault(fault)(model))
    if scenario.interpreted_append and device.type == 'cpu':
        stack.enter_context(without_gpu_packages.append_by_interpreted_triton())


def _fault(name: str) -> Fault:
    if name in FAULTS:
        return FAULTS[name]
    # What it replaces is not in every tree.
    import flashinfer_faults

    return flashinfer_faults.FAULTS[name]


def _counters(engine: DynamicInferenceEngine) -> dict[str, int]:
    """What the engine counted of what scenarios are there for."""
    accepted = int(engine._spec_tokens_accepted_per_pos.sum())
    return {
        'evicted': engine.evicted_request_count,
        'prefix_hits': engine._prefix_cache_hits,
        'prefix_blocks': engine._prefix_cache_blocks_matched,
        'skipped_tokens': engine._prefill_tokens_skipped,
        'overlaps': engine.context.async_sched_step_count,
        'unified_memory': engine.context.unified_memory_level,
        'drafts_accepted': accepted,
        'drafts_rejected': int(engine._spec_tokens_proposed_per_pos.sum()) - accepted,
    }


def _record_memory(recording: Recording, context: Any) -> None:
    allocator, storage = context.kv_block_allocator, context.memory_buffer
    recording.blocks = {
        'total': allocator.total_count,
        'active': allocator.active_count,
        'paused': allocator.paused_count,
    }
    recording.block_bytes = context.block_size_bytes
    recording.storage = {
        'bytes': storage.untyped_storage().nbytes(),
        'shape': tuple(storage.shape),
        'strides': storage.stride(),
        'dtype': str(storage.dtype),
    }


def _poison(context: Any) -> None:
    """Make all of the cache NaN: what is read before it is written spoils what it reaches."""
    context.memory_buffer.fill_(torch.nan)


def _forward(context: Any, output: Tensor) -> Forward:
    """What a forward pass was given and gave, seen when the model returns.

    Of a pipeline stage that is not the last that is hidden states, in place of logits.
    """
    view, count = context.gpu_view, context.active_token_count
    ids = context.request_ids.tolist()
    tokens = [
        (ids[index], position, token)
        for index, position, token in zip(
            view.token_to_request_idx[:count].tolist(),
            view.token_to_pos_ids[:count].tolist(),
            view.token_to_input_ids[:count].tolist(),
            strict=True,
        )
    ]
    rows = tokens
    if context.config.materialize_only_last_token_logits:
        chosen = context.active_logit_idxs[: context.num_last_token_logits].tolist()
        rows = [tokens[index] for index in chosen]
    given = output[0] if parallel_state.is_pipeline_last_stage() else output[:, 0]
    return Forward(rows, tokens, given[: len(rows)].detach().cpu().clone())


def _valid_cache(
    context: Any, model: Model, contents: dict[tuple[int, int], list[Tensor]] | None
) -> dict[tuple[int, int], str]:
    """Hashes of what a forward pass found or put in the cache, by request and layer.

    What is hashed is put into `contents`.
    """
    hashes = {}
    requests = context.request_ids[context.paused_request_count : context.total_request_count]
    lengths = context.cu_kv_lengths()[1].tolist()
    for layer in model.attention_layers:
        *caches, table = context.key_value_cache(layer)
        for index, request in enumerate(requests.tolist()):
            digest, is_nan, found = hashlib.sha256(), False, []
            for cache in caches:
                if cache is not None:
                    valid = gather_paged(cache, table[index], lengths[index]).contiguous().cpu()
                    digest.update(valid.view(torch.uint8).numpy().tobytes())
                    is_nan |= bool(valid.isnan().any())
                    found.append(valid)
            if contents is not None:
                contents[request, layer] = found
            hashes[request, layer] = (
                f'{lengths[index]} tokens {digest.hexdigest()}{", not numbers" * is_nan}'
            )
    return hashes


_texts: dict[str, list[list[int]]] = {}


def _continued(scenario: Scenario, device: torch.device) -> list[list[int]]:
    """The prompts with what the model generates for them, by a plain engine."""
    eager = _eager(scenario)
    key = repr((eager.model, _prompts(scenario)))
    if key not in _texts:
        model = _build_model(eager, device)
        spare = scenario.new_tokens + model.config.mtp_num_layers
        finished = tiny_engine.run_engine(
            tiny_engine.build_engine(model, block_size_tokens=64),
            _prompts(scenario),
            {'num_tokens_to_generate': spare, 'termination_id': -1, 'top_k': 1},
            max_steps=_max_steps(scenario),
        )
        _texts[key] = [
            prompt + finished.tokens[request] for request, prompt in enumerate(_prompts(scenario))
        ]
    return _texts[key]


def _drafts(
    scenario: Scenario, device: torch.device, right: float
) -> AbstractContextManager[Callable[..., None]]:
    """Context in which drafts are what the model will say, with probability `right` each.

    Those of a random model hardly ever are, so that none would be accepted.
    """
    texts = _continued(scenario, device)
    random = torch.Generator().manual_seed(5)
    draft = TextGenerationController._compute_serial_mtp_and_sample

    def drafted(controller: Any, base_position: Tensor | None = None) -> None:
        draft(controller, base_position)
        context = controller.inference_wrapped_model.inference_context
        active = slice(context.paused_request_count, context.total_request_count)
        if base_position is None:
            base_position = context.request_kv_length_offsets + context.request_query_lengths
            base_position = base_position[active]
        drafts = controller._sampled_mtp_tokens_cuda
        for index, request in enumerate(context.request_ids[active].tolist()):
            for depth in range(controller.num_mtp_depths):
                said = texts[request][int(base_position[index]) + 1 + depth :][:1]
                if said and torch.rand((), generator=random) < right:
                    drafts[depth, index] = said[0]

    return mock.patch.object(TextGenerationController, '_compute_serial_mtp_and_sample', drafted)


def _eager(scenario: Scenario) -> Scenario:
    """The same without CUDA graphs."""
    model = {name: value for name, value in scenario.model.items() if 'cuda_graph' not in name}
    return replace(scenario, model=model)


def _dense_model(scenario: Scenario, model: Model, device: torch.device) -> Model:
    """The same model for forwards without a cache: none that captures, or caches MLA's latents."""
    if scenario.model.get('multi_latent_attention'):
        return _build_model(scenario, device, cache_mla_latents=False)
    if 'cuda_graph_impl' not in scenario.model:
        return model
    eager = _build_model(_eager(scenario), device)
    eager.module.load_state_dict(model.module.state_dict())
    return eager


def _train(scenario: Scenario, model: Model, device: torch.device) -> None:
    """Move all weights a long way down the gradient of the loss of the prompts, in place."""
    learner = _dense_model(scenario, model, device)
    learner.module.train()
    for prompt in _prompts(scenario):
        tiny_engine.dense_loss(learner, prompt).backward()
    with torch.no_grad():
        for parameter in learner.module.parameters():
            gradient = parameter.grad.float()
            parameter -= parameter.norm() / gradient.norm().clamp(min=1e-20) * gradient
            parameter.grad = None
    learner.module.eval()
    if learner is not model:
        model.module.load_state_dict(learner.module.state_dict())


def _compare_with_dense(
    scenario: Scenario, model: Model, recording: Recording, device: torch.device
) -> dict[str, float]:
    """How far all that the engine computed is from forwards without a cache.

    Of the rows, those are left out that follow a draft which the model rejected.

    Returns:
        Rows compared; the largest difference of logits; the most by which a generated token's
        logit fell short of the largest one; the largest difference of log-probs.
    """
    dense = _dense_model(scenario, model, device)
    texts = recording.texts
    logits = [tiny_engine.dense_logits(dense, text).cpu() for text in texts]
    result: dict[str, float] = {'rows': 0, 'logits': 0, 'tokens': 0, 'log_probs': 0}
    rows = recording.rows() if parallel_state.is_pipeline_last_stage() else ()
    for request, position, row in rows:
        difference = (row.float() - logits[request][position]).abs().max()
        # `max` would lose a NaN.
        result['logits'] = float(torch.tensor([result['logits'], difference]).max())
        result['rows'] += 1
    for request, text in enumerate(texts):
        first = len(text) - len(recording.tokens[request])
        if scenario.sampling.get('top_k') == 1:
            said = logits[request][first - 1 : -1]
            chosen = said.gather(-1, torch.tensor(text[first:])[:, None])[:, 0]
            short = float((said.max(-1).values - chosen).max())
            result['tokens'] = max(result['tokens'], short)
        if found := recording.log_probs[request]:
            wanted = logits[request][:-1].log_softmax(-1)
            wanted = wanted.gather(-1, torch.tensor(text[1:])[:, None])[:, 0]
            difference = (wanted - torch.tensor(found)).abs().max()
            result['log_probs'] = max(result['log_probs'], float(difference))
    return result
