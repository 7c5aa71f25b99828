"""Models of real ones' shapes with random weights on Megatron's dynamic engine, on one GPU."""

import contextlib
import functools
import gc
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

VOCABULARY = 32000
MAX_SEQUENCE = 16384


@dataclass(frozen=True)
class Shape:
    """A dense model with grouped queries and a gated feed-forward layer."""

    layers: int
    hidden: int
    ffn_hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int = 128


SHAPES = {
    "1B": Shape(16, 2048, 8192, 32, 8, 64),
    "8B": Shape(32, 4096, 14336, 32, 8),
    "8B slice": Shape(8, 4096, 14336, 32, 8),
    "70B slice": Shape(8, 8192, 28672, 64, 8),
}


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """What Megatron needs of a process before a model is built."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            with partitioned():
                yield
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def partitioned(tensor: int = 1, pipeline: int = 1) -> Iterator[None]:
    """Split models over that many of the process group's ranks."""
    from megatron.core import parallel_state

    one_split_on_hopper()
    parallel_state.initialize_model_parallel(tensor, pipeline)
    seed()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def one_split_on_hopper() -> None:
    """Give FlashAttention-4 what it takes: Megatron asks it to split keys, which it has not there."""
    import torch

    from megatron.core.transformer import attention

    on_hopper = torch.cuda.get_device_capability()[0] == 9
    if on_hopper and getattr(attention, "HAVE_FA4", False):
        attention.flash_attn4_varlen_func = functools.partial(
            _one_split, attention.flash_attn4_varlen_func
        )


def _one_split(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **{**kwargs, "num_splits": 1})


def seed() -> None:
    """Make the next model's weights those of the last."""
    import torch

    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
    torch.manual_seed(1)


def build_engine(
    shape: Shape, graphs: bool, drafts: int = 0, scope: str = "layer", **inference: Any
) -> Any:
    """An engine on a new model in bf16, split over ranks as `partitioned` says.

    Args:
        shape: The model's.
        graphs: Capture and replay CUDA graphs.
        drafts: Speculative tokens, each by a layer of multi-token prediction.
        scope: What a graph holds, a `layer` or the whole `block` of them.
        inference: Fields of `InferenceConfig` to add or change.
    """
    import torch

    from megatron.core import parallel_state
    from megatron.core.inference.config import InferenceConfig
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.inference.engines import DynamicInferenceEngine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )
    from megatron.core.inference.text_generation_controllers import text_generation_controller
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn_hidden,
        num_attention_heads=shape.query_heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        mtp_num_layers=drafts or None,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        inference_rng_tracker=True,
        cuda_graph_impl="local" if graphs else "none",
        inference_cuda_graph_scope=scope if graphs else "none",
    )
    layer = get_gpt_layer_local_spec()
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=VOCABULARY,
        max_sequence_length=MAX_SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        position_embedding_type="rope",
        mtp_block_spec=(
            get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False) if drafts else None
        ),
    )
    model = model.cuda().bfloat16().eval()
    context = DynamicInferenceContext(
        config,
        InferenceConfig(
            **{
                "max_sequence_length": MAX_SEQUENCE,
                "buffer_size_gb": 16,
                "max_requests": 256,
                "max_tokens": 16384,
                "num_cuda_graphs": 16 if graphs else None,
                "num_speculative_tokens": drafts,
                **inference,
            }
        ),
    )
    wrapper = GPTInferenceWrapper(model, context)
    tokenizer = SimpleNamespace(vocab_size=VOCABULARY, detokenize=lambda tokens, **_: "")
    controller = text_generation_controller.TextGenerationController(wrapper, tokenizer)
    engine = DynamicInferenceEngine(controller, context)
    engine.bench_ids = itertools.count()
    return engine


def free_memory() -> None:
    """Free what engines held, CUDA graphs among it, that nothing refers to any more but themselves."""
    import torch

    from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

    delete_cuda_graphs()
    gc.collect()
    torch.cuda.empty_cache()


def add_requests(engine: Any, count: int, prompt_tokens: int, new_tokens: int) -> list[int]:
    """Add requests of one length with random prompts; their ids."""
    import torch

    from megatron.core.inference.sampling_params import SamplingParams

    ids = [next(engine.bench_ids) for _ in range(count)]
    for request in ids:
        engine.add_request(
            request,
            torch.randint(VOCABULARY, (prompt_tokens,)).tolist(),
            SamplingParams(num_tokens_to_generate=new_tokens, termination_id=-1, top_k=1),
        )
    return ids


def drain(engine: Any) -> None:
    """Step until no request is left."""
    while engine.has_unfinished_requests():
        engine.step_modern()
