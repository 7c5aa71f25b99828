# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""FlashInfer attention in the dynamic context: its life, its steps, and the layers that call it."""

import gc
import itertools
import logging
import math
import re
import sys
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("flashinfer")

from megatron.core import parallel_state
from megatron.core.inference.config import (
    FlashInferKernel,
    InferenceConfig,
    KVCacheLayout,
    KVCacheManagementMode,
)
from megatron.core.inference.contexts import dynamic_context as context_module
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.flashinfer_attention import FlashInferAttention, selection
from megatron.core.inference.flashinfer_attention.kernels import MIB, Fa2, Fa3, TrtllmGen, Xqa
from megatron.core.inference.flashinfer_attention.step import StepShape
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.transformer import attention as attention_module
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from .batch import DEVICE, HAVE_GPU, NAN
from .test_step import works_of

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 8, 2, 128, 128
MODEL = dict(
    params_dtype=torch.bfloat16,
    bf16=True,
    num_layers=2,
    hidden_size=64,
    num_attention_heads=HEADS,
    num_query_groups=KV_HEADS,
    kv_channels=HEAD_DIM,
)
INFERENCE = dict(
    inference_attention_backend="flashinfer",
    max_sequence_length=512,
    buffer_size_gb=0.02,
    block_size_tokens=BLOCK,
    max_requests=8,
    max_tokens=512,
    use_flashinfer_fused_rope=False,
)
BLOCK_GB = 2 * 2 * BLOCK * KV_HEADS * HEAD_DIM * 2 / 1024**3


@pytest.fixture
def make_context(monkeypatch):
    """Builds a context of one rank, without process groups."""
    if torch.cuda.device_count() == 0:
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)

    def make(model=None, **inference):
        if not isinstance(model, TransformerConfig):
            model = TransformerConfig(**{**MODEL, **(model or {})})
        return DynamicInferenceContext(model, InferenceConfig(**{**INFERENCE, **inference}))

    return make


@pytest.fixture
def hopper(make_context):
    """For what holds of the kernels of that GPU alone."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


def request(request_id, length, **options):
    """A request whose prompt is the same for equal lengths, and a prefix of longer ones."""
    return DynamicInferenceRequest(
        request_id=request_id,
        prompt_tokens=torch.arange(length),
        sampling_params=SamplingParams(num_tokens_to_generate=20),
        **options,
    )


def generate(context, finished=()):
    """Let each active request have a new token, but those that are finished by it."""
    ids = context.request_ids[context.paused_request_count : context.total_request_count].tolist()
    mask = torch.tensor([int(request_id not in finished) for request_id in ids])
    context.update_requests(mask, torch.ones(len(ids), dtype=torch.long))


class TestChoice:
    @pytest.mark.parametrize("backend", [AttnBackend.flashinfer, "flashinfer"])
    def test_inference_config(self, make_context, backend):
        context = make_context(inference_attention_backend=backend)
        assert isinstance(context.flashinfer_attention, FlashInferAttention)

    def test_none_follows_the_model(self, make_context):
        model = dict(attention_backend=AttnBackend.flashinfer)
        context = make_context(model, inference_attention_backend=None)
        assert isinstance(context.flashinfer_attention, FlashInferAttention)

    @pytest.mark.parametrize(
        "model_backend, backend",
        [(AttnBackend.auto, None), (AttnBackend.flash, None), (AttnBackend.flashinfer, "flash")],
    )
    def test_off_otherwise(self, make_context, monkeypatch, model_backend, backend):
        # None in this table makes an import fail.
        name = "megatron.core.inference.flashinfer_attention"
        monkeypatch.setitem(sys.modules, name, None)
        model = dict(attention_backend=model_backend)
        context = make_context(model, inference_attention_backend=backend)
        assert context.flashinfer_attention is None

        context.add_request(request(0, 5))
        context.initialize_attention_state()
        with pytest.raises(ImportError):
            make_context()

    def test_pinned_kernel(self, make_context):
        context = make_context(flashinfer_kernel="fa2")
        assert list(context.flashinfer_attention._kernels) == [FlashInferKernel.FA2]

    def test_one_kernel_for_each_phase(self, hopper, make_context):
        kernels = make_context().flashinfer_attention._kernels
        assert list(kernels) == [FlashInferKernel.XQA, FlashInferKernel.FA3]

    def test_layout_is_that_of_the_cache(self, hopper, make_context):
        context = make_context(kv_cache_layout=KVCacheLayout.HND)
        assert list(context.flashinfer_attention._kernels) == [
            FlashInferKernel.FA2,
            FlashInferKernel.FA3,
        ]


class TestRefusals:
    """All of them come before the cache is allocated."""

    @pytest.fixture(autouse=True)
    def nothing_allocated(self, make_context, monkeypatch):
        def allocate(context):
            raise AssertionError("tensors are allocated")

        monkeypatch.setattr(DynamicInferenceContext, "initialize_all_tensors", allocate)

    @pytest.fixture
    def refused(self, make_context):
        """The message with which a context is refused."""

        def build(error, *args, **kwargs):
            with pytest.raises(error) as raised:
                make_context(*args, **kwargs)
            return str(raised.value)

        return build

    def test_latents_that_are_not_cached(self, refused):
        model = MLATransformerConfig(
            **{**MODEL, "num_query_groups": None}, multi_latent_attention=True
        )
        assert refused(ValueError, model) == (
            "FlashInfer attention does not do multi-latent attention without cached latents: "
            "set cache_mla_latents."
        )

    @pytest.mark.parametrize("variant", ["gated_delta_net", "dsa"])
    def test_experimental_variants(self, refused, variant):
        model = TransformerConfig(**MODEL)
        model.experimental_attention_variant = variant
        assert refused(ValueError, model) == (
            f"FlashInfer attention does not do {variant}: "
            "set inference_attention_backend to flash."
        )

    def test_batch_invariant_mode(self, refused):
        model = TransformerConfig(**MODEL)
        model.batch_invariant_mode = True
        assert refused(ValueError, model) == (
            "FlashInfer attention is not batch-invariant: that mode ties training and inference to "
            "one FlashAttention version: set inference_attention_backend to flash."
        )

    def test_no_device(self, refused, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        message = "FlashInfer attention needs a CUDA device, and there is none."
        assert refused(ValueError) == message

    def test_no_package(self, refused, monkeypatch):
        def missing(name):
            raise selection.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(selection.metadata, "version", missing)
        assert refused(ImportError) == (
            "FlashInfer attention needs FlashInfer: pip install 'flashinfer-python>=0.6.18'"
        )

    def test_what_no_kernel_computes(self, refused):
        message = refused(ValueError, dict(kv_channels=80), flashinfer_kernel="fa2")
        assert message == (
            "FlashInfer has no kernel for decode here, as fa2 does not take head dim 80: "
            "set another flashinfer_kernel."
        )

    def test_dtype_of_the_model(self, refused):
        message = refused(ValueError, dict(params_dtype=torch.float32, bf16=False))
        assert message == (
            "FlashInfer attention computes in float16 or bfloat16, not torch.float32: "
            "set params_dtype, or set inference_attention_backend to flash."
        )


def tensors_of(value, seen=None):
    """Tensors that an object holds, directly or through others of this package or FlashInfer."""
    seen = {} if seen is None else seen
    if id(value) in seen or isinstance(value, type):
        return seen.values()
    if isinstance(value, torch.Tensor):
        seen[id(value)] = value
    elif isinstance(value, dict):
        for item in value.values():
            tensors_of(item, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            tensors_of(item, seen)
    elif "flashinfer" in type(value).__module__ and hasattr(value, "__dict__"):
        tensors_of(vars(value), seen)
    return seen.values()


def allocated(context):
    """Storages that `allocate` allocated, by address; without a GPU also those of the host."""
    theirs = [context._cpu_bookkeeping_buf, context.gpu_view._buf]
    theirs = {tensor.untyped_storage().data_ptr() for tensor in theirs}
    storages = {}
    for tensor in tensors_of(context.flashinfer_attention._kernels):
        storage = tensor.untyped_storage()
        if (tensor.is_cuda or not HAVE_GPU) and storage.data_ptr() not in theirs:
            storages[storage.data_ptr()] = storage
    return storages


@pytest.mark.parametrize("kernel", ["auto", "fa2"])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_workspaces_of_a_large_engine(make_context, kernel, kv_heads):
    """1024 requests of up to 131072 tokens, on two kinds of layers."""
    model = dict(
        num_attention_heads=64,
        num_query_groups=kv_heads,
        window_size=(4095, 0),
        window_attn_skip_freq=[1, 0],
    )
    context = make_context(
        model,
        flashinfer_kernel=kernel,
        max_requests=1024,
        max_tokens=16384,
        max_sequence_length=131072,
        block_size_tokens=256,
    )
    total = sum(storage.nbytes() for storage in allocated(context).values())
    assert 8 * MIB <= total <= 256 * MIB


class Step:
    """A step of the context, in a cache that is poisoned where no token is, and its attention.

    Args:
        context (DynamicInferenceContext): Ready for the step.
    """

    def __init__(self, context, layer_number=1) -> None:
        self.context, self.layer_number = context, layer_number
        active = slice(context.paused_request_count, context.total_request_count)
        self.queries = context.request_query_lengths[active].tolist()
        offsets = context.request_kv_length_offsets[active].tolist()
        self.kvs = [query + offset for query, offset in zip(self.queries, offsets)]
        self.blocks = context.request_to_kv_block_ids[active].tolist()
        context.memory_buffer.fill_(NAN)
        generator = torch.Generator(DEVICE).manual_seed(len(self.kvs))

        def draw(*shape):
            return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()

        caches = context.key_value_cache(layer_number)[:2]
        for kv, row in zip(self.kvs, self.blocks):
            for block in row[: -(-kv // context.block_size_tokens)]:
                tokens = context.block_size_tokens
                if block == row[(kv - 1) // context.block_size_tokens]:
                    tokens = (kv - 1) % context.block_size_tokens + 1
                for cache in caches:
                    # Blocks that requests share are filled once.
                    if cache[block, :tokens].isnan().any():
                        cache[block, :tokens] = draw(tokens, KV_HEADS, HEAD_DIM)
        self.query = draw(context.padded_active_token_count, 1, HEADS, HEAD_DIM)
        self.caches = caches

    def check(self, output=None):
        """The attention is right, and finite in padding."""
        if output is None:
            output = self.context.flashinfer_attention.run(
                self.query, *self.caches, self.layer_number
            )
        assert output.isfinite().all()
        start = 0
        for query_length, kv, row in zip(self.queries, self.kvs, self.blocks):
            blocks = torch.tensor(row[: -(-kv // self.context.block_size_tokens)], device=DEVICE)
            key, value = (
                cache[blocks].flatten(0, 1)[:kv].float().repeat_interleave(HEADS // KV_HEADS, 1)
                for cache in self.caches
            )
            query = self.query[start : start + query_length, 0].float()
            scores = torch.einsum("qhd,khd->hqk", query, key) * HEAD_DIM**-0.5
            position = torch.arange(kv - query_length, kv, device=DEVICE).unsqueeze(1)
            hidden = torch.arange(kv, device=DEVICE) > position
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            expected = torch.einsum("hqk,khd->qhd", weights, value)
            found = output[start : start + query_length].view_as(expected).float()
            assert (found - expected).norm() <= 1e-2 * expected.norm()
            start += query_length


def check_that_all_is_freed(context):
    """Suspended, nothing is left of what was allocated; resumed, it is there again."""
    storages = allocated(context)
    assert sum(storage.nbytes() for storage in storages.values()) >= MIB
    kept = [
        weakref.ref(tensor)
        for tensor in tensors_of(context.flashinfer_attention)
        if tensor.untyped_storage().data_ptr() in storages
    ]
    del storages
    context.deallocate_inference_state_buffers()
    gc.collect()
    assert not any(tensor() is not None for tensor in kept)
    context.reinitialize_inference_state_buffers()
    assert allocated(context)


class TestSuspendAndResume:
    @pytest.mark.parametrize("mode", KVCacheManagementMode)
    @pytest.mark.parametrize("kernel", ["auto", "fa2"])
    def test_works_again(self, make_context, mode, kernel):
        context = make_context(kv_cache_management_mode=mode, flashinfer_kernel=kernel)
        for turn in range(2):
            if context.total_request_count == 0:
                context.add_request(request(turn, 200))
                context.add_request(request(turn + 10, 3))
            context.initialize_attention_state()
            Step(context).check()
            generate(context)
            context.initialize_attention_state()
            Step(context).check()
            context.deallocate_inference_state_buffers()
            context.reinitialize_inference_state_buffers()
        context.initialize_attention_state()

    def test_recompute_frees_the_workspaces(self, make_context):
        context = make_context(kv_cache_management_mode=KVCacheManagementMode.RECOMPUTE)
        check_that_all_is_freed(context)

    @pytest.mark.parametrize("mode", ["persist", "offload"])
    def test_other_modes_keep_them(self, make_context, mode):
        context = make_context(kv_cache_management_mode=KVCacheManagementMode(mode))
        before = allocated(context)
        context.deallocate_inference_state_buffers()
        context.reinitialize_inference_state_buffers()
        assert allocated(context).keys() == before.keys()

    @pytest.mark.skipif(HAVE_GPU, reason="a GPU has the real memory pools")
    @pytest.mark.parametrize(
        "mode, unified", [("offload", False), ("recompute", False), ("recompute", True)]
    )
    def test_static_pointers(self, make_context, monkeypatch, mode, unified):
        """Only the cache is in memory that a pause takes; no address changes."""
        entered, allocated_in = [], []

        @contextmanager
        def region(*args, **kwargs):
            entered.append("region")
            yield
            entered.pop()

        saver = SimpleNamespace(region=region, pause=lambda tag: None, resume=lambda tag: None)
        monkeypatch.setattr(context_module, "HAVE_TORCH_MEMORY_SAVER", not unified)
        monkeypatch.setattr(context_module, "torch_memory_saver", saver, raising=False)
        monkeypatch.setattr(context_module, "create_unified_mempool", lambda: None)
        monkeypatch.setattr(context_module, "device_memory_summary", lambda: "")
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        monkeypatch.setattr(torch.cuda, "use_mem_pool", region, raising=False)
        for owner, name in (
            (DynamicInferenceContext, "_allocate_memory_buffer"),
            (FlashInferAttention, "allocate"),
        ):

            def allocate(*args, name=name, real=getattr(owner, name)):
                allocated_in.append((name, list(entered)))
                real(*args)

            monkeypatch.setattr(owner, name, allocate)
        context = make_context(
            kv_cache_management_mode=KVCacheManagementMode(mode),
            static_kv_memory_pointers=True,
            unified_memory_level=int(unified),
        )
        cache, before = context.memory_buffer.data_ptr(), allocated(context).keys()
        for turn in range(2):
            if context.total_request_count == 0:
                context.add_request(request(turn, 200))
            context.initialize_attention_state()
            Step(context).check()
            context.deallocate_inference_state_buffers()
            context.reinitialize_inference_state_buffers()
        assert allocated_in == [("_allocate_memory_buffer", ["region"]), ("allocate", [])]
        assert context.memory_buffer.data_ptr() == cache
        assert allocated(context).keys() == before

    def test_kernels_keep_no_view_of_the_cache(self, make_context):
        """So that it is freed whenever the context frees it."""
        context = make_context()
        context.add_request(request(0, 200))
        context.initialize_attention_state()
        Step(context).check()
        cache = context.memory_buffer.untyped_storage()
        kept = [tensor.untyped_storage() for tensor in tensors_of(context.flashinfer_attention)]
        assert cache.data_ptr() not in [storage.data_ptr() for storage in kept]


@pytest.fixture
def change_wrapper(monkeypatch):
    """Gives a wrapper's class, for another one to be put in its place."""
    import flashinfer  # type: ignore

    def change(make_class, kind="Paged"):
        name = f"BatchPrefillWith{kind}KVCacheWrapper"
        monkeypatch.setattr(flashinfer, name, make_class(getattr(flashinfer, name)))

    return change


class TestBuild:
    """What a later FlashInfer changes shows when the engine is built."""

    @pytest.mark.parametrize("kernel", ["auto", "fa2"])
    @pytest.mark.parametrize("windows, kinds", [(None, 1), (1, 1), ([1, 0], 2)])
    def test_every_kernel_is_launched(self, make_context, monkeypatch, kernel, windows, kinds):
        launched = []
        for kind in (Xqa, Fa3, Fa2, TrtllmGen):
            for phase in {"decode", "prefill"} & set(dir(kind)):

                def launch(self, call, phase=phase, real=getattr(kind, phase)):
                    launched.append((phase, call.layer, call.shape.num_tokens))
                    real(self, call)

                monkeypatch.setattr(kind, phase, launch)
        model = {}
        if windows is not None:
            model = dict(
                window_size=(9, 0), window_attn_skip_freq=None if windows == 1 else windows
            )
        make_context(model, flashinfer_kernel=kernel)
        once = [(phase, layer) for phase, layer, tokens in launched if tokens == 1]
        assert {phase for phase, _ in once} == {"decode", "prefill"}
        assert len({layer for phase, layer in once if phase == "prefill"}) == kinds
        assert len({layer for phase, layer in once if phase == "decode"}) == kinds

    @pytest.fixture
    def refused(self, hopper, make_context, change_wrapper):
        """Builds a context with another wrapper, which must be refused.

        Args:
            kernel (str): The kernel that the wrapper is of.
            make_class (Callable): Makes the other class from the real one.
            kind (str): The wrapper for pages, or for packed keys.
        """

        def build(kernel, make_class, kind="Paged"):
            change_wrapper(make_class, kind)
            message = f"^The {kernel} kernel of this FlashInfer is planned in another way"
            with pytest.raises(ImportError, match=message):
                make_context(flashinfer_kernel=kernel)

        return build

    @pytest.mark.parametrize(
        "kernel, kind, name",
        [
            *(("fa3", kind, name) for kind in ("Paged", "Ragged") for name in Fa3.ATTRIBUTES),
            *(("fa2", "Paged", name) for name in Fa2.ATTRIBUTES),
            *((kernel, "Paged", "_paged_kv_indices_buf") for kernel in ("fa2", "fa3")),
        ],
    )
    def test_wrapper_without_an_attribute(self, refused, kernel, kind, name):
        def without(wrapper):
            class Without(wrapper):
                def plan(self, *args, **kwargs):
                    super().plan(*args, **kwargs)
                    delattr(self, name)

            return Without

        refused(kernel, without, kind)

    @pytest.mark.skipif(HAVE_GPU, reason="a GPU's kernel would read memory that is not there")
    @pytest.mark.parametrize(
        "kernel, kind, pair",
        [
            *(("fa3", "Paged", pair) for pair in ((3, 4), (6, 7), (2, 7), (0, 2), (1, 2), (4, 5))),
            # Here places 1 and 2 have the same array, and 3 and 4 the same numbers.
            *(("fa3", "Ragged", pair) for pair in ((6, 7), (2, 7), (0, 2), (4, 5))),
            # Place 2 and the last but one are of use to graphs alone.
            *(("fa2", "Paged", pair) for pair in itertools.combinations((0, 3, *range(4, 10)), 2)),
        ],
    )
    def test_kernel_that_reads_other_lists(self, refused, kernel, kind, pair):
        def swapped(plan):
            plan = list(plan)
            plan[pair[0]], plan[pair[1]] = plan[pair[1]], plan[pair[0]]
            return plan

        def other(wrapper):
            class Other(wrapper):
                def plan(self, *args, **kwargs):
                    super().plan(*args, **kwargs)
                    self._plan_info = swapped(self._plan_info)

                def run(self, *args, **kwargs):
                    found, self._plan_info = self._plan_info, swapped(self._plan_info)
                    try:
                        return super().run(*args, **kwargs)
                    finally:
                        self._plan_info = found

            return Other

        refused(kernel, other, kind)

    @pytest.mark.parametrize(
        "kernel, kind", [("fa2", "Paged"), ("fa3", "Paged"), ("fa3", "Ragged")]
    )
    def test_plan_of_another_length(self, refused, kernel, kind):
        def longer(wrapper):
            class Longer(wrapper):
                def plan(self, *args, **kwargs):
                    super().plan(*args, **kwargs)
                    self._plan_info = [*self._plan_info, 0]

                def run(self, *args, **kwargs):
                    found = self._plan_info
                    self._plan_info = found[: 9 if kernel == "fa3" else 15]
                    try:
                        return super().run(*args, **kwargs)
                    finally:
                        self._plan_info = found

            return Longer

        refused(kernel, longer, kind)

    def test_random_numbers_are_left_alone(self, make_context):
        torch.manual_seed(5)
        drawn = torch.rand(3, device=DEVICE)
        torch.manual_seed(5)
        make_context()
        assert torch.equal(torch.rand(3, device=DEVICE), drawn)


class TestLog:
    @pytest.fixture
    def lines(self, make_context, caplog):
        """What is logged while a context is built."""

        def build(*args, **kwargs):
            caplog.clear()
            with caplog.at_level(logging.INFO):
                make_context(*args, **kwargs)
            prefix = "FlashInfer attention: "
            messages = [record.getMessage() for record in caplog.records]
            return [line.removeprefix(prefix) for line in messages if line.startswith(prefix)]

        return build

    def test_kernels_and_reasons_are_told_once(self, hopper, lines):
        version = selection.require_flashinfer()
        expected = {
            HEADS: f"decode xqa, prefill fa3, of version {version}",
            64: "decode fa2, prefill fa3 (xqa does not take 32 query heads per KV head), "
            f"of version {version}",
        }
        for heads, line in expected.items():
            assert [
                found for found in lines(dict(num_attention_heads=heads)) if "prefill" in found
            ] == [line]

    def test_kernels_are_built_with_progress(self, lines):
        found = lines(flashinfer_kernel="fa2")
        assert found[1] == "building its kernels; where they must be compiled, this takes minutes"
        assert re.fullmatch(r"built in \d+\.\d s; workspaces and tables take \d+ MiB", found[2])
        assert len(found) == 3

    def test_steps_log_nothing(self, make_context, caplog):
        context = make_context()
        caplog.clear()
        with caplog.at_level(logging.INFO):
            context.add_request(request(0, 5))
            context.initialize_attention_state()
        assert not [record for record in caplog.records if "FlashInfer" in record.getMessage()]


class TestHooks:
    """A step is planned before its bookkeeping is copied, and derived after, each once."""

    @pytest.fixture
    def make_hooked(self, make_context, monkeypatch):
        """Builds a context that notes when its hooks are called, and what was copied then."""

        def make(**inference):
            context = make_context(**inference)
            attention = context.flashinfer_attention
            plan, derive = attention.plan_step, attention.derive_step
            context.calls = []

            def copied():
                return torch.equal(context.gpu_view._buf.cpu(), context._cpu_bookkeeping_buf)

            def plan_step(*args):
                context.calls.append(("plan", copied()))
                plan(*args)

            def derive_step():
                torch.cuda.synchronize()
                context.calls.append(("derive", copied()))
                derive()

            monkeypatch.setattr(attention, "plan_step", plan_step)
            monkeypatch.setattr(attention, "derive_step", derive_step)
            return context

        return make

    @pytest.fixture
    def context(self, make_hooked):
        return make_hooked(num_cuda_graphs=4, cuda_graph_mixed_prefill_count=2)

    def check(self, context, **options):
        """Of a step, both hooks are called, in order."""
        context.calls.clear()
        context.gpu_view._buf.fill_(0xFF)
        context.initialize_attention_state(**options)
        assert context.calls == [("plan", False), ("derive", True)]

    def test_prefill_decode_and_mixed(self, context):
        context.add_request(request(0, 200))
        self.check(context)
        generate(context)
        self.check(context)
        generate(context)
        context.add_request(request(1, 7))
        self.check(context)

    def test_published_later(self, context):
        context.add_request(request(0, 200))
        context.initialize_attention_state(transfer_bookkeeping_to_gpu=False)
        assert context.calls == []
        context.gpu_view._buf.fill_(0xFF)

        assert context.transfer_bookkeeping_to_gpu(record_done_event=True) is not None

        assert context.calls == [("plan", False), ("derive", True)]
        Step(context).check()

    def test_captures(self, context):
        dimensions = context.cuda_graph_batch_dimensions_list
        kinds = {(graph.prefill_req_count > 0, graph.decode_req_count > 0) for graph in dimensions}
        assert kinds >= {(False, True), (True, True)}
        for graph in dimensions:
            self.check(context, construct_graph_dimensions=graph)
            shape = context.flashinfer_attention._shape
            assert (shape.num_requests, shape.padded_requests) == (graph.req_count,) * 2
            assert shape.num_tokens == graph.token_count
            assert shape.has_prefill is (graph.prefill_req_count > 0)
            context.reset()

    @pytest.mark.parametrize("graphs", [None, 4])
    @pytest.mark.parametrize("drafts", [0, 3])
    @pytest.mark.parametrize("kernel", ["auto", "fa2"])
    def test_expert_parallel_dummy(self, make_hooked, kernel, drafts, graphs):
        context = make_hooked(
            num_cuda_graphs=graphs, num_speculative_tokens=drafts, flashinfer_kernel=kernel
        )
        self.check(context, is_expert_parallel_dummy_cuda_graph_step=True)
        shape = context.flashinfer_attention._shape
        assert (shape.num_requests, shape.has_prefill) == (1, False)
        query = torch.zeros(
            (shape.num_tokens, 1, HEADS, HEAD_DIM), dtype=torch.bfloat16, device=DEVICE
        )
        # The model appends before it attends, to the dummy block. The rest of it may be anything.
        context.memory_buffer.fill_(NAN)
        keys = torch.ones_like(query)[:, :, :KV_HEADS]
        context.append_key_value_cache(1, keys, keys)
        output = context.flashinfer_attention.run(query, *context.key_value_cache(1)[:2], 1)
        assert output.isfinite().all()


class TestNewKeys:
    """Prompts of which nothing was in the cache are computed from what they append to it."""

    def append(self, context):
        """Append random keys and values to the first layer, as parts of one projection; queries."""
        tokens = context.padded_active_token_count
        both = torch.randn(tokens, 1, KV_HEADS, 2 * HEAD_DIM, device=DEVICE).bfloat16()
        context.append_key_value_cache(1, *both.split(HEAD_DIM, dim=-1))
        return torch.randn(tokens, 1, HEADS, HEAD_DIM, device=DEVICE).bfloat16()

    def test_cache_is_not_read(self, hopper, make_context):
        context = make_context()
        context.add_request(request(0, 200))
        context.add_request(request(1, 3))
        context.initialize_attention_state()
        query = self.append(context)
        attention, caches = context.flashinfer_attention, context.key_value_cache(1)[:2]
        appended = context.memory_buffer.clone()
        context.memory_buffer.fill_(NAN)
        found = attention.run(query, *caches, 1)
        assert attention._new is None
        context.memory_buffer.copy_(appended)
        from_cache = attention.run(query, *caches, 1)
        assert torch.allclose(found, from_cache, rtol=1e-2, atol=1e-2)

    @pytest.mark.parametrize("graphs", [None, 4])
    def test_cache_is_read_otherwise(self, hopper, make_context, graphs):
        """In graphs, which hold their capture, and where more of a prompt is in the cache."""
        context = make_context(
            num_cuda_graphs=graphs, cuda_graph_mixed_prefill_count=2, enable_prefix_caching=True
        )
        options = dict(block_size_tokens=BLOCK, enable_prefix_caching=True)
        context.add_request(request(0, 2 * BLOCK, **options))
        context.initialize_attention_state()
        assert context.flashinfer_attention._shape.num_new == (0 if graphs else 2 * BLOCK)
        self.append(context)  # and then, say, an error
        generate(context)
        context.add_request(request(1, 2 * BLOCK + 9, **options))
        context.initialize_attention_state()
        assert context.flashinfer_attention._new is None
        self.append(context)
        assert context.flashinfer_attention._shape.num_new == 0
        assert context.flashinfer_attention._new is None


def rows_of(context):
    """Query tokens, tokens in the cache and blocks of each request of the step, by plain Python."""
    rows = []
    for index in range(context.paused_request_count, context.total_request_count):
        query = int(context.request_query_lengths[index])
        kv = query + int(context.request_kv_length_offsets[index])
        blocks = context.request_to_kv_block_ids[index, : -(-kv // BLOCK)].tolist()
        assert min(blocks) >= 0
        rows.append((query, kv, blocks))
    return rows


def check_page_table(kernel, shape, rows):
    """Decode rows have their pages and lengths, all others in decode slots no length."""
    page = kernel._page_size
    per_block = BLOCK // page
    kernel.begin(shape)
    table, lengths = kernel._pages.table.tolist(), kernel._lengths_of(shape).tolist()
    for row, (_, kv, blocks) in enumerate(rows[: shape.num_decode]):
        pages = [block * per_block + part for block in blocks for part in range(per_block)]
        assert table[row][: -(-kv // page)] == pages[: -(-kv // page)]
        assert lengths[row] == kv
    assert not any(lengths[shape.num_decode : shape.decode_slots])


def check_work_list(kernel, shape, rows, max_blocks):
    """Every tile and head of the rows that are not left to decode, and of the padding, once."""
    tile = kernel._schedule.tile
    starts = [sum(query for query, _, _ in rows[:row]) for row in range(len(rows) + 1)]
    wanted = [
        (row, starts[row], query, kv)
        for row, (query, kv, _) in enumerate(rows)
        if row >= shape.num_decode
    ]
    wanted.append((len(rows), starts[-1], shape.num_tokens - starts[-1], 0))
    expected = sorted(
        (number, start, row * max_blocks, query, kv, head, row)
        for row, start, query, kv in wanted
        for number in range(-(-query // tile))
        for head in range(HEADS)
    )
    works = works_of(kernel._schedule)
    assert sorted(tuple(work.values()) for cta in works for work in cta) == expected


def check_split_list(schedule, shape, rows, max_blocks):
    """Chunks of all keys of every tile of the rows that are this kernel's, and the rows as they are."""
    if shape.decode_slots and shape.has_prefill:
        rows = rows[: shape.num_decode]
    starts = [sum(query for query, _, _ in rows[:row]) for row in range(len(rows) + 1)]
    end = schedule.num_tokens(shape)
    assert schedule.query_starts[: len(rows) + 2].tolist() == [*starts, end]
    info = schedule.plan_info(shape)
    tile, (request, number, chunk) = info[3], (offset // 4 for offset in info[4:7])
    numbers = schedule.works.tolist()
    chunk_keys = numbers[info[9] // 4]
    visible = schedule.window_left + tile if schedule.window_left >= 0 else math.inf
    expected = []
    for row, (query, kv) in enumerate([*((q, kv) for q, kv, _ in rows), (end - starts[-1], 0)]):
        if kv:
            last = int(schedule.last_page_lengths[row])
            assert kv == (max_blocks - 1) * BLOCK + last
        chunks = math.ceil(min(max(kv, 1), visible) / chunk_keys)
        tiles = math.ceil(query * HEADS // KV_HEADS / tile)
        expected += itertools.product([row], range(tiles), range(chunks))
    found = zip(*(numbers[array:][: len(expected)] for array in (request, number, chunk)))
    assert list(found) == expected
    flags = schedule.works.view(torch.int8)[info[12] : info[12] + info[0]]
    assert int(flags.sum()) == len(expected)


def check_step(context, expected):
    """Rows, extents, derived arrays and attention of a step, which is initialized first.

    Args:
        context (DynamicInferenceContext): The context, its requests added.
        expected (list): Query tokens and tokens in the cache of each request, in order.
    """
    context.initialize_attention_state()
    rows = rows_of(context)
    assert [(query, kv) for query, kv, _ in rows] == expected
    attention, padded = context.flashinfer_attention, context.padded_batch_dimensions
    decodes, prefills = context.num_decode_requests, context.num_prefill_requests
    assert decodes + prefills == len(expected)
    kernels = attention._kernels
    splits = list(kernels) != [FlashInferKernel.FA2]
    slots = padded.decode_req_count if splits or not prefills else 0
    is_graph = context.using_cuda_graph_this_step()
    if splits and not is_graph:
        slots = decodes
    shape = attention._shape
    assert shape == StepShape(
        num_decode=min(decodes, slots) if splits else 0,
        num_requests=len(expected),
        decode_slots=slots,
        padded_requests=padded.prefill_req_count + padded.decode_req_count,
        num_tokens=padded.token_count,
        has_prefill=prefills > 0,
        num_new=(
            sum(query for query, _ in expected)
            if FlashInferKernel.FA3 in kernels
            and prefills > 0
            and not is_graph
            and all(query == kv for query, kv in expected[decodes:])
            else 0
        ),
    )
    for kernel in kernels.values():
        if isinstance(kernel, Xqa) and slots:
            check_page_table(kernel, shape, rows)
        if isinstance(kernel, Fa3) and prefills:
            check_work_list(kernel, shape, rows, context.max_kv_block_count)
        if isinstance(kernel, Fa2):
            for schedule in kernel._schedules.values():
                check_split_list(schedule, shape, rows, context.max_kv_block_count)
    for layer in (1, 2):
        Step(context, layer).check()


@pytest.mark.parametrize("room, split", [(128 * MIB, True), (64 * 1024, False)])
def test_fa2_splits_keys_where_there_is_room(make_context, monkeypatch, room, split):
    monkeypatch.setattr(Fa2, "WORKSPACE_BYTES", room)
    context = make_context(flashinfer_kernel="fa2")
    kernel = context.flashinfer_attention._kernels[FlashInferKernel.FA2]
    context.add_request(request(0, 200))
    context.initialize_attention_state()
    assert [wrapper._plan_info[-1] for wrapper in kernel._wrappers.values()] == [split]
    for schedule in kernel._schedules.values():
        assert schedule.partial_bytes == kernel._workspace.numel() == room
    Step(context).check()


@pytest.mark.parametrize("kernel", ["auto", "fa2"])
class TestSteps:
    """Steps as an engine makes them."""

    def test_prefill_then_decode(self, make_context, kernel):
        context = make_context(flashinfer_kernel=kernel)
        for request_id, length in enumerate([5, 126, 300]):
            context.add_request(request(request_id, length))
        check_step(context, [(5, 5), (126, 126), (300, 300)])
        generate(context)
        check_step(context, [(1, 6), (1, 127), (1, 301)])
        generate(context)
        check_step(context, [(1, 7), (1, 128), (1, 302)])
        # The second has filled its block and comes first when it has got another.
        generate(context)
        check_step(context, [(1, 129), (1, 8), (1, 303)])

    def test_as_many_tokens_as_there_can_be(self, make_context, kernel):
        """The context pads to a multiple of 64 even where that is more; lists have no room for it."""
        context = make_context(flashinfer_kernel=kernel, max_tokens=100)
        context.add_request(request(0, 70))
        context.initialize_attention_state()
        assert context.padded_active_token_count == 128
        assert context.flashinfer_attention._shape.num_tokens == 100

    def test_mixed(self, make_context, kernel):
        context = make_context(flashinfer_kernel=kernel)
        context.add_request(request(0, 200))
        context.add_request(request(1, 9))
        context.initialize_attention_state()
        generate(context)
        context.add_request(request(2, 130))
        context.add_request(request(3, 1))
        check_step(context, [(1, 201), (1, 10), (130, 130), (1, 1)])

    def test_finished_requests_are_replaced(self, make_context, kernel):
        context = make_context(flashinfer_kernel=kernel)
        for request_id, length in enumerate([140, 20, 60]):
            context.add_request(request(request_id, length))
        context.initialize_attention_state()
        generate(context, finished=[0])
        check_step(context, [(1, 61), (1, 21)])
        generate(context, finished=[1, 2])
        context.add_request(request(3, 33))
        check_step(context, [(33, 33)])

    def test_padded_to_graphs(self, make_context, kernel):
        context = make_context(
            flashinfer_kernel=kernel, num_cuda_graphs=4, cuda_graph_mixed_prefill_count=2
        )
        context.add_request(request(0, 70))
        check_step(context, [(70, 70)])
        assert context.using_cuda_graph_this_step()
        generate(context)
        for request_id, length in ((1, 9), (2, 140)):
            context.add_request(request(request_id, length))
        check_step(context, [(1, 71), (9, 9), (140, 140)])
        assert context.using_cuda_graph_this_step()
        generate(context)
        check_step(context, [(1, 72), (1, 10), (1, 141)])
        assert context.using_cuda_graph_this_step()
        assert context.flashinfer_attention._shape.padded_requests > 3

    def test_slots_of_a_graph_count_requests(self, hopper, make_context, kernel):
        """More decode requests than a graph has decode slots lie in those of prefill."""
        context = make_context(flashinfer_kernel=kernel, num_cuda_graphs=1)
        graph = type(context.padded_batch_dimensions)(64, 4, 2)
        context.cuda_graph_batch_dimensions_list = [graph]
        for request_id, length in enumerate([5, 6, 7]):
            context.add_request(request(request_id, length))
        context.initialize_attention_state()
        generate(context)
        context.add_request(request(3, 40))
        check_step(context, [(1, 6), (1, 7), (1, 8), (40, 40)])
        assert context.padded_batch_dimensions == graph
        if kernel == "auto":
            assert context.flashinfer_attention._shape.num_decode == 2

    def test_prefix_hit(self, make_context, kernel):
        context = make_context(flashinfer_kernel=kernel, enable_prefix_caching=True)
        options = dict(block_size_tokens=BLOCK, enable_prefix_caching=True)
        context.add_request(request(0, 300, **options))
        check_step(context, [(300, 300)])
        generate(context)
        context.add_request(request(1, 310, **options))
        check_step(context, [(1, 301), (310 - 2 * BLOCK, 310)])
        (_, _, first), (_, _, second) = rows_of(context)
        assert first[:2] == second[:2] and first[2] != second[2]

    def test_chunks(self, make_context, kernel):
        context = make_context(flashinfer_kernel=kernel, enable_chunked_prefill=True)
        context.add_request(request(0, 10))
        context.initialize_attention_state()
        generate(context)
        chunked = request(1, 400)
        context.add_request(chunked, prefill_chunk_length=150)
        context.chunked_prefill_request_id = 1
        chunked.remaining_prompt_tokens = chunked.remaining_prompt_tokens[150:]
        chunked.finished_chunk_token_count = 150
        check_step(context, [(1, 11), (150, 150)])
        generate(context)
        context.chunked_prefill_request_id = -1
        context.add_request(chunked)
        check_step(context, [(1, 12), (250, 400)])
        generate(context)
        check_step(context, [(1, 13), (1, 401)])

    def test_paused_requests_are_no_rows(self, make_context, kernel):
        # Two blocks for active requests, two for paused ones, and the dummy block.
        context = make_context(
            flashinfer_kernel=kernel,
            buffer_size_gb=5.5 * BLOCK_GB,
            paused_buffer_size_gb=2.5 * BLOCK_GB,
        )
        for request_id, length in ((0, BLOCK), (1, 40)):
            context.add_request(request(request_id, length))
        check_step(context, [(BLOCK, BLOCK), (40, 40)])
        generate(context)
        assert context.paused_request_count == 1
        check_step(context, [(1, 41)])

    @pytest.mark.parametrize("speculative", [1, 3])
    def test_speculative_tokens(self, make_context, kernel, speculative):
        context = make_context(flashinfer_kernel=kernel, num_speculative_tokens=speculative)
        context.add_request(request(0, 100))
        context.add_request(request(1, 20))
        check_step(context, [(100, 100), (20, 20)])
        drafts = torch.ones((speculative, 2), dtype=torch.long)
        context.update_requests(torch.tensor([1, 1]), torch.tensor([1, 1]), drafts)
        tokens = speculative + 1
        check_step(context, [(tokens, 100 + tokens), (tokens, 20 + tokens)])


class NoProjection(torch.nn.Module):
    """An output projection that changes nothing and has no bias."""

    def forward(self, hidden):
        """What is given, and no bias."""
        return hidden, None


class Bare(Attention):
    """`Attention.forward` with queries, keys and values that are given.

    Args:
        projected (tuple): Query, key and value.
        sinks (Optional[Tensor]): What the layer has of them.
        layers_before (int): Layers of earlier pipeline stages.
    """

    def __init__(self, config, projected, sinks=None, layer_number=2, layers_before=0):
        torch.nn.Module.__init__(self)
        self.config, self.projected, self.sinks = config, projected, sinks
        self.layer_number, self.layers_before = layer_number + layers_before, layers_before
        self.attention_type = "self"
        self.attn_mask_type = self.q_layernorm = self.k_layernorm = None
        self.checkpoint_core_attention = False
        self.offload_qkv_linear = self.offload_core_attention = self.offload_attn_proj = False
        self.core_attention = SimpleNamespace(softmax_offset=sinks)
        self.linear_proj = NoProjection()
        self.eval()

    def get_query_key_value_tensors(self, *args, **kwargs):
        """What was given."""
        return self.projected

    def _get_pp_layer_offset_for_inference(self):
        return self.layers_before


class TestLayer:
    @pytest.fixture(autouse=True)
    def without_flash_attention(self, monkeypatch):
        """Nothing of FlashAttention is needed."""
        monkeypatch.setattr(attention_module, "HAVE_FA3", False)
        monkeypatch.setattr(attention_module, "HAVE_FA4", False)
        monkeypatch.setattr(attention_module, "is_fa_min_version", lambda version: False)

    @pytest.fixture
    def context(self, make_context):
        context = make_context()
        context.add_request(request(0, 150))
        context.initialize_attention_state()
        generate(context)
        context.add_request(request(1, 30))
        context.initialize_attention_state()
        return context

    def layer(self, step, **options):
        """A layer that projects to a step's queries, and keys and values that it appends anew."""
        context = step.context
        tokens = context.padded_active_token_count
        rows = [torch.zeros(tokens, 1, KV_HEADS, HEAD_DIM, device=DEVICE) for _ in range(2)]
        start = 0
        for query, kv, blocks in zip(step.queries, step.kvs, step.blocks):
            for position in range(kv - query, kv):
                place = blocks[position // BLOCK], position % BLOCK
                for row, cache in zip(rows, step.caches):
                    row[start, 0] = cache[place]
                    cache[place] = NAN
                start += 1
        config = TransformerConfig(**MODEL, **options.pop("config", {}))
        projected = step.query, *(row.bfloat16() for row in rows)
        return Bare(config, projected, layer_number=step.layer_number, **options)

    def forward(self, layer, context):
        """The layer's output, `(tokens, 1, heads * head_dim)`."""
        hidden = torch.zeros(context.padded_active_token_count, 1, 64, device=DEVICE)
        output, bias = layer(hidden, None, inference_context=context)
        assert bias is None
        assert output.shape == (*hidden.shape[:2], HEADS * HEAD_DIM)
        return output

    @pytest.mark.parametrize("layer_number", [1, 2])
    def test_appends_and_attends(self, context, layer_number):
        step = Step(context, layer_number)
        step.check(self.forward(self.layer(step), context))

    def test_windows_of_layers_that_the_config_does_not_count(self, make_context):
        """A hybrid model counts its layers by a pattern, not by `num_layers`."""
        context = make_context(dict(window_size=(9, 0), window_attn_skip_freq=2))
        context.add_request(request(0, 200))
        context.initialize_attention_state()
        step = Step(context)
        outputs = [
            context.flashinfer_attention.run(step.query, *step.caches, layer)
            for layer in (1, 2, 7, 8)
        ]
        assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])
        assert not torch.equal(outputs[0], outputs[1])

    @pytest.mark.parametrize("layers_before", [0, 3])
    @pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
    def test_hands_over(self, context, monkeypatch, softmax_type, layers_before):
        """The cache counts the layers of a pipeline stage, windows those of the model."""
        step = Step(context, 2)
        sinks = torch.linspace(-1, 1, HEADS, device=DEVICE)
        config = dict(softmax_type=softmax_type)
        layer = self.layer(step, sinks=sinks, config=config, layers_before=layers_before)
        given = []

        def run(query, keys, values, layer_number, sinks):
            given.append((query, keys, values, layer_number, sinks))
            return query

        monkeypatch.setattr(context.flashinfer_attention, "run", run)
        output = self.forward(layer, context)

        ((query, keys, values, layer_number, handed),) = given
        assert torch.equal(query, step.query)
        for cache, expected in zip((keys, values), step.caches):
            assert cache.data_ptr() == expected.data_ptr() and cache.shape == expected.shape
        assert layer_number == 2 + layers_before
        assert handed is None if softmax_type == "vanilla" else torch.equal(handed, sinks)
        assert torch.equal(output, step.query.flatten(2))

    @pytest.mark.parametrize("quantized", [False, True])
    def test_padding_is_zero_where_amax_is_taken(self, context, monkeypatch, quantized):
        monkeypatch.setattr(
            attention_module, "is_using_quantization_scales", lambda config: quantized
        )
        layer = self.layer(Step(context, 1))
        ones = torch.ones_like(layer.projected[0])
        monkeypatch.setattr(context.flashinfer_attention, "run", lambda *args: ones)
        output = self.forward(layer, context)
        real = context.active_token_count
        assert real < output.size(0)
        assert (output[:real] == 1).all()
        assert (output[real:] == (0 if quantized else 1)).all()

    def test_flash_attention_is_still_asked_for_otherwise(self, make_context):
        context = make_context(inference_attention_backend="flash")
        with pytest.raises(AssertionError, match="required for dynamic batching"):
            Bare(TransformerConfig(**MODEL), None)(None, None, inference_context=context)
