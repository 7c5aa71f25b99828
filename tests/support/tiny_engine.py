"""Tiny models on Megatron's real dynamic engine, small enough to run anywhere in seconds.

Import this once Megatron is on the path and, where there is no GPU, `megatron_on_cpu.install()` was
called. Everything is seeded: the same options give the same weights and the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.inference.communication_utils import (
    broadcast_from_last_pipeline_stage,
    recv_from_prev_pipeline_rank_,
    send_to_next_pipeline_rank,
)
from megatron.core.inference.config import InferenceConfig, MambaInferenceStateConfig
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

VOCABULARY = 100
MAX_SEQUENCE = 256
MIB_IN_GIB = 1 / 1024

# Heads, sizes and depth of every model unless a scenario says otherwise. With weights this large
# the logits of a random model are far apart, so that a wrong cache shows in the tokens, too.
MODEL = {
    'num_layers': 2,
    'hidden_size': 64,
    'num_attention_heads': 4,
    'num_query_groups': 2,
    'init_method_std': 0.3,
}
MLA = {
    'multi_latent_attention': True,
    'cache_mla_latents': True,
    'q_lora_rank': None,
    'kv_lora_rank': 32,
    'qk_head_dim': 16,
    'qk_pos_emb_head_dim': 8,
    'v_head_dim': 16,
    'rope_type': 'rope',
}
INFERENCE = {
    'max_sequence_length': MAX_SEQUENCE,
    'block_size_tokens': 16,
    'buffer_size_gb': 10 * MIB_IN_GIB,
    'paused_buffer_size_gb': 2 * MIB_IN_GIB,
    'max_requests': 8,
    'materialize_only_last_token_logits': False,
}


def join_ranks(rank: int, ranks: int, store: Path) -> None:
    """Become one of `ranks` ranks, which meet through the file `store`."""
    # Padding as coarse as on a GPU would need more tokens than these engines have.
    for name in ('ROUNDER', 'TOKEN_ROUNDER', 'REQUEST_ROUNDER'):
        setattr(DynamicInferenceContext, name, 4)
    dist.init_process_group('nccl', init_method=f'file://{store}', rank=rank, world_size=ranks)


def divide_model(stages: int = 1) -> None:
    """Divide models among all ranks: into pipeline stages, and the rest tensor-parallel."""
    tensor = dist.get_world_size() // stages
    if parallel_state.is_initialized():
        if parallel_state.get_tensor_model_parallel_world_size() == tensor:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, stages)
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)


class TokenwiseLayer(nn.Module):
    """Takes the place of a Mamba layer, whose kernels need a GPU and packages of their own.

    The engine learns from a hybrid model which layers have what kind of state and how large it is;
    what a layer computes is the layer's own affair. This one maps each token for itself.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, **kwargs: object) -> None:
        super().__init__()
        del kwargs
        self.layer_number = layer_number
        self.linear = nn.Linear(config.hidden_size, config.hidden_size, dtype=config.params_dtype)

    def mamba_state_shapes_per_request(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the convolution's and of the state space's state of one request."""
        return (8, 4), (2, 4, 4)

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Map `(tokens, batch, hidden)` to the same shape."""
        del args, kwargs
        return hidden_states + torch.tanh(self.linear(hidden_states))


@dataclass(frozen=True)
class Model:
    """A model and what its engine has to know of it."""

    module: nn.Module
    config: TransformerConfig
    attention_layers: tuple[int, ...]
    """Numbers, from 1 in each pipeline stage, of the layers that have a KV cache."""


def build_model(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    hybrid_pattern: str | None = None,
    **options: Any,
) -> Model:
    """A model with random weights, in evaluation mode.

    Args:
        hybrid_pattern: Layer symbols of a hybrid model, `*` attention and `M` Mamba; None: a GPT.
        options: Fields of the transformer's configuration, on top of `MODEL`; with
            `multi_latent_attention` on top of `MLA`, too.
    """
    torch.manual_seed(0)
    is_mla = options.get('multi_latent_attention', False)
    if hybrid_pattern:
        options['num_layers'] = len(hybrid_pattern)
    fields = {
        **MODEL,
        **(MLA if is_mla else {}),
        'params_dtype': dtype,
        'pipeline_dtype': dtype,
        'bf16': dtype is torch.bfloat16,
        'fp16': dtype is torch.float16,
        'tensor_model_parallel_size': parallel_state.get_tensor_model_parallel_world_size(),
        'pipeline_model_parallel_size': parallel_state.get_pipeline_model_parallel_world_size(),
        'use_cpu_initialization': True,
        'inference_rng_tracker': True,
        'flash_attention_version': 2,
        **options,
    }
    if is_mla:
        fields.pop('num_query_groups')
    config = (MLATransformerConfig if is_mla else TransformerConfig)(**fields)
    layer = get_gpt_layer_local_spec(multi_latent_attention=is_mla)
    common = {
        'vocab_size': VOCABULARY,
        'max_sequence_length': MAX_SEQUENCE,
        'parallel_output': True,
        'position_embedding_type': 'rope',
        'pre_process': parallel_state.is_pipeline_first_stage(),
        'post_process': parallel_state.is_pipeline_last_stage(),
    }
    module: nn.Module
    if hybrid_pattern:
        stack = ModuleSpec(
            HybridStack,
            # Its last norm is Transformer Engine's.
            params={'post_layer_norm': False},
            submodules=HybridStackSubmodules(
                mamba_layer=ModuleSpec(TokenwiseLayer), attention_layer=layer
            ),
        )
        module = HybridModel(config, stack, hybrid_layer_pattern=hybrid_pattern, **common)
        layers = [number for number, kind in enumerate(hybrid_pattern, start=1) if kind == '*']
    else:
        drafts = None
        if config.mtp_num_layers:
            drafts = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
        module = GPTModel(config, layer, mtp_block_spec=drafts, **common)
        if drafts:
            # Drafting layers have no cache, but those of MLA insist on one if latents are cached.
            for part in module.mtp.modules():
                if isinstance(part, MLASelfAttention):
                    part.config = copy(config)
                    part.config.cache_mla_latents = part.cache_mla_latents = False
        layers = list(range(1, len(module.decoder.layers) + 1))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith('softmax_offset'):
                parameter.normal_(0, 2)
    return Model(module.to(device=device, dtype=dtype).eval(), config, tuple(layers))


def build_engine(model: Model, **options: Any) -> DynamicInferenceEngine:
    """The real engine on `model`.

    Args:
        options: Fields of `InferenceConfig`, on top of `INFERENCE`.
    """
    config = InferenceConfig(
        **{**INFERENCE, **options},
        mamba_inference_state_config=MambaInferenceStateConfig.from_model(model.module),
    )
    context = DynamicInferenceContext(model.config, config)
    tokenizer = SimpleNamespace(vocab_size=VOCABULARY, detokenize=lambda tokens, **_: '')
    wrapper = GPTInferenceWrapper(model.module, context)
    return DynamicInferenceEngine(TextGenerationController(wrapper, tokenizer), context)


def make_prompts(lengths: Sequence[int], shared: int = 0) -> list[list[int]]:
    """Random prompts of `lengths`, each after the same `shared` tokens."""
    random = torch.Generator().manual_seed(1)
    prefix = torch.randint(VOCABULARY - 1, (shared,), generator=random).tolist()
    return [
        prefix + torch.randint(VOCABULARY - 1, (length,), generator=random).tolist()
        for length in lengths
    ]


@dataclass
class Finished:
    """What the engine made of its requests, by request id."""

    steps: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    log_probs: dict[int, list[float]] = field(default_factory=dict)
    """Of the prompt's tokens but the first, then of the generated ones; empty if not asked for."""

    def add(self, request: DynamicInferenceRequest) -> None:
        """Take note of a finished request."""
        self.tokens[request.request_id] = list(request.generated_tokens)
        self.log_probs[request.request_id] = [
            *(request.prompt_log_probs or ()),
            *(request.generated_log_probs or ()),
        ]


@torch.inference_mode()
def run_engine(
    engine: DynamicInferenceEngine,
    prompts: Sequence[Sequence[int]],
    sampling: Mapping[str, Any],
    *,
    steps_between: int = 0,
    after_step: Callable[[int], None] = lambda step: None,
    max_steps: int = 1000,
) -> Finished:
    """Step the engine until all requests are finished.

    Args:
        sampling: Fields of `SamplingParams`.
        steps_between: Steps from one request's arrival to the next one's; all arrive at once by
            default.
        after_step: Called with the number of the step, from 1.

    Raises:
        RuntimeError: the engine is not done after `max_steps`.
    """
    finished = Finished()

    def step() -> None:
        result: Any = engine.step_modern()
        for record in result['finished_request_records']:
            finished.add(record.merge())
        finished.steps += 1
        if finished.steps == max_steps:
            raise RuntimeError(f'requests are unfinished after {max_steps} steps')
        after_step(finished.steps)

    for number, prompt in enumerate(prompts):
        engine.add_request(number, list(prompt), SamplingParams(**sampling))
        for _ in range(steps_between):
            step()
    while engine.has_unfinished_requests():
        step()
    return finished


def _dense(model: Model, tokens: Sequence[int], **options: Any) -> Tensor:
    """One forward without engine or cache, of one pipeline stage."""
    InferenceMode.unset_active()
    device = next(model.module.parameters()).device
    size = len(tokens)
    output: Tensor = model.module(
        torch.tensor([tokens], device=device),
        torch.arange(size, device=device)[None],
        torch.ones(size, size, dtype=torch.bool, device=device).triu(1)[None, None],
        **options,
    )
    return output


@torch.inference_mode()
def dense_logits(model: Model, tokens: Sequence[int]) -> Tensor:
    """Logits after each token, by one forward without engine or cache.

    Returns:
        Float32 `(tokens, VOCABULARY)`, gathered over tensor-parallel ranks; the same in all
        pipeline stages.
    """
    size, dtype = len(tokens), model.config.params_dtype
    stages = parallel_state.get_pipeline_model_parallel_group()
    if not parallel_state.is_pipeline_first_stage():
        device = next(model.module.parameters()).device
        hidden = torch.empty(size, 1, model.config.hidden_size, dtype=dtype, device=device)
        recv_from_prev_pipeline_rank_(hidden, stages)
        model.module.set_input_tensor(hidden)
    output = _dense(model, tokens, runtime_gather_output=True)
    if not parallel_state.is_pipeline_last_stage():
        send_to_next_pipeline_rank(output, stages)
    if stages.size() > 1:
        output = broadcast_from_last_pipeline_stage([1, size, VOCABULARY], dtype, output, stages)
    return output[0].float()


def dense_loss(model: Model, tokens: Sequence[int]) -> Tensor:
    """Mean loss of each token after the first, with a graph for gradients; as training has it."""
    logits = _dense(model, tokens[:-1])
    target = torch.tensor(tokens[1:], device=logits.device)
    return nn.functional.cross_entropy(logits[0].float(), target)
