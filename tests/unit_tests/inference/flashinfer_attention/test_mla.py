# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""Absorbed multi-latent attention by FlashInfer against float32, in a poisoned cache of latents."""

import re
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("flashinfer")

from megatron.core.inference.config import InferenceConfig, KVCacheManagementMode
from megatron.core.inference.flashinfer_attention import FlashInferAttention
from megatron.core.inference.flashinfer_attention.kernels import MIB
from megatron.core.inference.flashinfer_attention.mla import Mla
from megatron.core.inference.flashinfer_attention.selection import AttentionProblem, select
from megatron.core.inference.kv_cache import LatentKVCacheSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from .batch import DEVICE, HAVE_GPU, NAN, Batch, tolerance
from .test_context import check_that_all_is_freed, make_context
from .test_graphs import Graph, needs_gpu, no_synchronization, numbers

LATENT, ROTARY = 512, 64
QUERY_DIM = 128 + ROTARY  # before absorption, by which scores are scaled
EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000]
SHORT = [(1, 1), (1, 300), (5, 5), (64, 64), (100, 356), (127, 127), (128, 130), (129, 129)]
LIMITS = dict(max_requests=32, max_tokens=512, max_length=1100, num_blocks=64)
SHAPES = {
    "heads16": dict(heads=16),
    "heads1": dict(heads=1),
    "heads64": dict(heads=64, block_size=128),
    "fp16": dict(heads=16, dtype=torch.float16),
    "block16": dict(heads=16, block_size=16),
    "block64": dict(heads=16, block_size=64),
}


class LatentBatch(Batch):
    """As `Batch`, of absorbed queries on a cache of latents."""

    def __init__(self, *args, heads=16, max_requests=None, model=None, **options) -> None:
        super().__init__(
            *args,
            heads=heads,
            kv_heads=1,
            head_dim=LATENT + ROTARY,
            max_requests=max_requests,
            **options,
        )
        self.spec = LatentKVCacheSpec(
            num_layers=2,
            block_size_tokens=self.block_size,
            dtype=self.dtype,
            latent_dim=LATENT + ROTARY,
        )
        # The keys of the cache that the base class has filled, as latents.
        self.storage = self.storage[0].squeeze(3).contiguous()
        self.context.kv_cache_spec, self.context.memory_buffer = self.spec, self.storage
        self.context.max_requests = len(self.table)
        self.config = latent_config(heads, self.dtype, **(model or {}))
        self.scale = QUERY_DIM**-0.5

    def new(self, layer):
        """Latents have no values beside them."""
        return self.query, None

    def expected(self, layer=1, scale=None):
        """What `run` should give for the tokens that are no padding, in float32."""
        latents = self.spec.layer_views(self.storage, layer - 1)[0]
        outputs, start = [], 0
        for row, (query_length, kv) in enumerate(zip(self.queries, self.kvs)):
            blocks = self.table[row, : -(-kv // self.block_size)].long().to(DEVICE)
            keys = latents[blocks].flatten(0, 1)[:kv].float()
            query = self.query[start : start + query_length, 0].float()
            start += query_length
            scores = torch.einsum("qhd,kd->hqk", query, keys) * (scale or self.scale)
            position = torch.arange(kv - query_length, kv, device=DEVICE).unsqueeze(1)
            hidden = torch.arange(kv, device=DEVICE) > position
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,kd->qhd", weights, keys[:, :LATENT]))
        return torch.cat(outputs)


def latent_config(heads=16, dtype=torch.bfloat16, **changes) -> MLATransformerConfig:
    """The configuration of a model whose latents FlashInfer has kernels for."""
    options = dict(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=heads,
        multi_latent_attention=True,
        cache_mla_latents=True,
        kv_lora_rank=LATENT,
        qk_pos_emb_head_dim=ROTARY,
        qk_head_dim=QUERY_DIM - ROTARY,
        v_head_dim=128,
        rope_type="rope",
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
    )
    return MLATransformerConfig(**{**options, **changes})


class TestProjected:
    """Prompts of which nothing is cached, with keys and values that are projected from latents."""

    PROMPTS = [(1, 1), (300, 300), (5, 5), (128, 128), (257, 257)]

    @pytest.fixture(autouse=True)
    def hopper(self):
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("only fa3 takes keys of 192 elements with values of 128")

    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_is_right(self, shape):
        batch = LatentBatch([], self.PROMPTS, dims=(700, 5, 0), **shape)
        self.check(batch, batch.attention())

    def test_every_step_derives_its_list(self):
        """Also one of the same extents as the one before."""
        batch = LatentBatch([], [(300, 300), (20, 20)], dims=(330, 2, 0), **LIMITS)
        attention = batch.attention()
        self.check(batch, attention)
        batch.become(LatentBatch([], [(20, 20), (300, 300)], dims=(330, 2, 0), **LIMITS))
        self.check(batch, attention)

    def check(self, batch, attention):
        """A step's attention is right, whatever the last step's list was."""
        attention.plan_step(batch.context)
        attention.derive_step()
        assert attention.projects_latents
        tokens, heads, real = batch.dims.token_count, batch.heads, sum(batch.queries)
        generator = torch.Generator(DEVICE).manual_seed(0)

        def draw(dim):
            drawn = torch.randn(tokens, 1, heads, dim, generator=generator, device=DEVICE)
            drawn[real:] = NAN
            return drawn.to(batch.dtype)

        query, key, value = draw(QUERY_DIM), draw(QUERY_DIM), draw(256)[..., :128]
        query[real:] = 1
        with mock.patch("torch.empty_like", lambda tensor: torch.full_like(tensor, NAN)):
            output = attention.run(query, key, value, 1)
        assert output.shape == (tokens, 1, heads, 128) and not output[real:].any()
        start = 0
        for length in batch.queries:
            rows = slice(start, start + length)
            start += length
            q, k, v = (each[rows, 0].float() for each in (query, key, value))
            scores = torch.einsum("qhd,khd->hqk", q, k) * batch.scale
            hidden = torch.ones(length, length, dtype=torch.bool, device=DEVICE).triu(1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            expected = torch.einsum("hqk,khd->qhd", weights, v)
            error = (output[rows, 0].float() - expected).norm() / expected.norm()
            assert error <= tolerance(batch.dtype)

    @pytest.mark.parametrize(
        "decode, prefill, options",
        [
            ([], [(5, 6), (7, 7)], {}),
            ([9], [(7, 7)], {}),
            ([], [(7, 7)], dict(graph=True)),
            ([], [(7, 7)], dict(model=dict(v_head_dim=64))),
            ([], [(7, 7)], dict(model=dict(qk_head_dim=64))),
        ],
    )
    def test_otherwise_absorbed(self, decode, prefill, options):
        batch = LatentBatch(decode, prefill, **options)
        attention = batch.attention()
        attention.plan_step(batch.context)
        assert not attention.projects_latents

    def test_not_by_fa2(self):
        batch = LatentBatch([], [(7, 7)])
        attention = batch.attention("fa2")
        batch.check(batch.run(attention))
        assert not attention.projects_latents


@pytest.fixture(params=["auto", "fa2"])
def kernel(request):
    """A kernel to pin."""
    return request.param


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
class TestShapes:
    def test_decode(self, shape, kernel):
        batch = LatentBatch(EDGES, [], **shape)
        batch.check(batch.run(batch.attention(kernel)))

    def test_prefill(self, shape, kernel):
        batch = LatentBatch([], SHORT, **shape)
        batch.check(batch.run(batch.attention(kernel)))

    def test_mixed_and_padded(self, shape, kernel):
        batch = LatentBatch(EDGES, SHORT, dims=(640, 12, 17), **shape)
        output = batch.run(batch.attention(kernel), layer=2)
        batch.check(output, layer=2)
        assert not output[sum(batch.queries) :].any()


@pytest.mark.parametrize("decode", [[65], [64, 65, 129]], ids=str)
def test_heads_that_fill_two_tiles(decode, kernel):
    """Of which the first would miss the newest key if a tile were that of one CTA."""
    batch = LatentBatch(decode, [], heads=128)
    batch.check(batch.run(batch.attention(kernel)))


class TestPadding:
    @pytest.mark.parametrize("graph", [False, True])
    @pytest.mark.parametrize("tokens", [1, 3])
    def test_decode_slots_without_request(self, kernel, tokens, graph):
        batch = LatentBatch([70, 300], [], dims=(8 * tokens, 0, 8), tokens=tokens, graph=graph)
        batch.check(batch.run(batch.attention(kernel)))

    def test_no_request(self, kernel):
        batch = LatentBatch([], [], dims=(8, 0, 8), num_blocks=1)
        assert not batch.run(batch.attention(kernel)).any()

    def test_padding_tokens_with_no_row_to_spare(self, kernel):
        batch = LatentBatch([], [(5, 70)], dims=(64, 1, 0))
        batch.check(batch.run(batch.attention(kernel)))

    def test_prefill_in_decode_slots(self, kernel):
        batch = LatentBatch([70, 9], [(40, 40), (3, 500), (200, 200)], dims=(384, 3, 5), graph=True)
        batch.check(batch.run(batch.attention(kernel)))


@pytest.mark.parametrize("tokens", [2, 4])
def test_speculative_tokens(tokens, kernel):
    batch = LatentBatch([tokens] + [edge + tokens for edge in EDGES], SHORT, tokens=tokens)
    batch.check(batch.run(batch.attention(kernel)))


def test_scale_is_that_of_the_layers(kernel):
    """Stretched by YaRN's `mscale`, whatever `softmax_scale` is."""
    model = dict(rotary_scaling_factor=40.0, mscale_all_dim=1.0, softmax_scale=5.0)
    batch = LatentBatch([70, 300], SHORT, model=model)
    scale = (0.1 * torch.tensor(40.0).log().item() + 1) ** 2 * QUERY_DIM**-0.5
    batch.check(batch.run(batch.attention(kernel)), scale=scale)


MIXED = (400, 4, 8)


def steps_of(dims):
    """Requests of several steps that are padded to the same dimensions."""
    if dims == MIXED:
        lengths = [70, 300, 9, 255, 512, 1, 64, 17, 40, 1000, 128]
        prefills = [(130, 130), (3, 500), (1, 257), (60, 188)]
        return [
            (lengths[:decodes], prefills[:count]) for decodes, count in [(8, 4), (3, 2), (0, 1)]
        ]
    lengths = [600, 3, 257, 90, 1, 16, 511, 33, 128, 700, 64, 5]
    return [(lengths[: dims[2]], []), (lengths[:1], []), ([length + 1 for length in lengths], [])]


class Steps:
    """An attention and its steps, whose tensors stay where they are, as an engine's do."""

    def __init__(self, kernel) -> None:
        self.batch = LatentBatch([5], [], graph=True, **LIMITS)
        self.attention = self.batch.attention(kernel)
        self.kernel = self.attention._kernels[self.attention._selection.prefill]
        self.query = torch.zeros(
            (512, 1, 16, LATENT + ROTARY), dtype=self.batch.dtype, device=DEVICE
        )

    def make(self, decode, prefill, dims, seed=0):
        """A batch of this attention's shape."""
        return LatentBatch(decode, prefill, dims, graph=True, seed=seed, **LIMITS)

    def load(self, batch):
        """Let a batch be the current one."""
        self.batch.become(batch)
        self.query[: batch.query.size(0)] = batch.query

    def poison(self):
        """Spoil all that is planned anew for each step."""
        if HAVE_GPU:
            torch.cuda.synchronize()
        for array in (self.kernel._schedule.works, self.kernel._schedule._cuts):
            numbers(array)

    def prepare(self):
        """Plan and derive."""
        self.attention.plan_step(self.batch.context)
        self.attention.derive_step()

    def run(self):
        """Both layers' attention."""
        query = self.query[: self.batch.dims.token_count]
        views = (self.batch.spec.layer_views(self.batch.storage, layer) for layer in range(2))
        return [
            self.attention.run(query, *caches, layer) for layer, caches in enumerate(views, start=1)
        ]

    def check(self, batch, outputs):
        """The outputs are right."""
        for layer, output in enumerate(outputs, start=1):
            batch.check(output.squeeze(1), layer=layer)


@pytest.mark.parametrize("dims", [MIXED, (12, 0, 12), (2, 0, 2)], ids=str)
def test_every_step_plans_all_it_needs(kernel, dims):
    """And the same grid for all steps of the same dimensions, for a graph keeps its grid."""
    steps, grids = Steps(kernel), set()
    for seed, (decode, prefill) in enumerate(steps_of(dims)):
        batch = steps.make(decode[: dims[2]] if dims != MIXED else decode, prefill, dims, seed)
        steps.load(batch)
        steps.poison()
        steps.prepare()
        steps.check(batch, steps.run())
        grids.add(tuple(steps.kernel._wrapper._plan_info[:2]))
    assert len(grids) == 1


@needs_gpu
@pytest.mark.parametrize("dims", [MIXED, (12, 0, 12), (2, 0, 2)], ids=str)
def test_graph(kernel, dims):
    """A replay is right, waits for nothing, and is bitwise the same padded batch eagerly."""
    steps = Steps(kernel)
    tokens, num_prefill, num_decode = dims
    prefill = [1] * max(num_prefill - 1, 0)
    if num_prefill:
        prefill.append(tokens - num_decode - sum(prefill))
    full = steps.make([1] * num_decode, [(query, query) for query in prefill], dims, seed=9)
    graph = Graph(steps, full)
    for seed, (decode, prefill) in enumerate(steps_of(dims)):
        batch = steps.make(decode[: dims[2]] if dims != MIXED else decode, prefill, dims, seed)
        steps.load(batch)
        steps.prepare()
        eager = [output.clone() for output in steps.run()]
        steps.poison()
        with no_synchronization():
            steps.prepare()
            replayed = graph.replay()
        steps.check(batch, replayed)
        for ours, theirs in zip(replayed, eager):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("block_size", [16, 64, 128, 256])
def test_a_context_of_any_block_size(make_context, block_size):
    """FlashMLA takes 64 alone. Suspended, the context keeps nothing."""
    context = make_context(
        latent_config(),
        block_size_tokens=block_size,
        kv_cache_management_mode=KVCacheManagementMode.RECOMPUTE,
    )
    check_that_all_is_freed(context)


def problem(capability=(9, 0), heads=16, latent=LATENT, rotary=ROTARY) -> AttentionProblem:
    """A problem of absorbed multi-latent attention."""
    return AttentionProblem(
        compute_capability=capability,
        dtype=torch.bfloat16,
        num_query_heads=heads,
        num_kv_heads=1,
        head_dim=latent + rotary,
        block_size_tokens=256,
        latent_dim=latent,
    )


class TestSelection:
    @pytest.mark.parametrize(
        "capability, chosen",
        [((8, 0), "fa2"), ((9, 0), "fa3"), ((10, 0), "fa2"), ((12, 0), "fa2")],
        ids=str,
    )
    @pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32, 64, 128])
    def test_one_kernel_for_both_phases(self, capability, chosen, heads):
        selected = select(problem(capability, heads))
        assert (selected.decode.value, selected.prefill.value) == (chosen, chosen)
        assert selected.reasons == ()

    @pytest.mark.parametrize(
        "changes, reason",
        [
            (dict(latent=256), "latents of 256 and 64 rotary elements"),
            (dict(rotary=32), "latents of 512 and 32 rotary elements"),
            (dict(latent=544, rotary=32), "latents of 544 and 32 rotary elements"),
            *((dict(heads=heads), f"{heads} query heads") for heads in (3, 12, 40, 96, 256)),
        ],
        ids=str,
    )
    def test_refused(self, changes, reason):
        message = (
            f"FlashInfer has no kernel for decode here, as fa3 does not take {reason}, and fa2 "
            f"does not take {reason}: set inference_attention_backend to flash."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            select(problem(**changes))

    @pytest.mark.parametrize("pinned", ["xqa", "trtllm-gen"])
    def test_pins_of_others_are_refused(self, pinned):
        message = f"{pinned} does not do multi-latent attention: set another flashinfer_kernel."
        with pytest.raises(ValueError, match=message):
            select(problem(), InferenceConfig(flashinfer_kernel=pinned).flashinfer_kernel)


class TestRefusals:
    @pytest.mark.parametrize(
        "model, reason",
        [
            (dict(cache_mla_latents=False), "without cached latents: set cache_mla_latents."),
            (dict(softmax_type="learnable"), "with sinks: set softmax_type to vanilla."),
            (dict(softmax_type="off-by-one"), "with sinks: set softmax_type to vanilla."),
            (dict(window_size=(8, 0)), "with a window: set window_size to None."),
        ],
        ids=str,
    )
    def test_features(self, model, reason):
        batch = LatentBatch([5], [], model=model)
        message = f"FlashInfer attention does not do multi-latent attention {reason}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            FlashInferAttention(batch.context, batch.config, InferenceConfig(**batch.inference))

    def test_more_tokens_than_are_counted(self):
        batch = LatentBatch([5], [], block_size=2**16, max_length=2**32 - 2**16, num_blocks=1)
        message = (
            "1 requests of 4294967296 tokens exceed: lower max_requests or max_sequence_length"
        )
        with pytest.raises(ValueError, match=message):
            batch.attention()

    def test_more_elements_than_are_counted(self):
        tokens = 2**32 // (128 * (LATENT + ROTARY)) + 1
        batch = LatentBatch([5], [], heads=128, max_tokens=tokens)
        message = f"which the queries of {tokens} tokens exceed: lower max_tokens, or set"
        with pytest.raises(ValueError, match=message):
            batch.attention()


@pytest.fixture
def change_wrapper(monkeypatch):
    """Put a class made of FlashInfer's wrapper in its place."""

    def change(make):
        import flashinfer.mla  # type: ignore

        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper
        monkeypatch.setattr(flashinfer.mla, "BatchMLAPagedAttentionWrapper", make(wrapper))

    return change


class TestOtherFlashInfers:
    def refused(self, kernel):
        pinned = "fa3" if kernel == "auto" else kernel
        message = f"^The {pinned} kernel for multi-latent attention of this FlashInfer is planned"
        with pytest.raises(ImportError, match=message):
            LatentBatch([5], []).attention(kernel)

    @pytest.fixture(autouse=True)
    def hopper(self):
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("fa3 is the kernel of SM 9.0")

    @pytest.mark.parametrize("name", Mla.ATTRIBUTES)
    def test_wrapper_without_an_attribute(self, kernel, change_wrapper, name):
        def without(wrapper):
            class Without(wrapper):
                def plan(self, **arguments):
                    super().plan(**arguments)
                    delattr(self, name)

            return Without

        change_wrapper(without)
        self.refused(kernel)

    @pytest.mark.skipif(HAVE_GPU, reason="a GPU's kernel would read memory that is not there")
    @pytest.mark.parametrize(
        "pair",
        [(0, 1), (2, 3), (2, 12), (3, 4), (4, 12), (5, 6), (5, 7), (7, 8), (8, 9), (10, 11)]
        + [(12, 13), (13, 14), (14, 15), (16, 17)],
        ids=str,
    )
    def test_kernel_that_reads_other_lists(self, kernel, change_wrapper, pair):
        def swapped(plan):
            plan = list(plan)
            plan[pair[0]], plan[pair[1]] = plan[pair[1]], plan[pair[0]]
            return plan

        def other(wrapper):
            class Other(wrapper):
                def plan(self, **arguments):
                    super().plan(**arguments)
                    self._plan_info = swapped(self._plan_info)

                def run(self, **arguments):
                    found, self._plan_info = self._plan_info, swapped(self._plan_info)
                    try:
                        return super().run(**arguments)
                    finally:
                        self._plan_info = found

            return Other

        change_wrapper(other)
        self.refused(kernel)

    def test_plan_of_another_length(self, kernel, change_wrapper):
        def longer(wrapper):
            class Longer(wrapper):
                def plan(self, **arguments):
                    super().plan(**arguments)
                    self._plan_info = [*self._plan_info, 0]

                def run(self, **arguments):
                    found, self._plan_info = self._plan_info, self._plan_info[:18]
                    try:
                        return super().run(**arguments)
                    finally:
                        self._plan_info = found

            return Longer

        change_wrapper(longer)
        self.refused(kernel)


def test_workspace():
    kernels = LatentBatch([5], []).attention()._kernels
    (kernel,) = (kernel for kernel in kernels.values() if isinstance(kernel, Mla))
    assert kernel._wrapper._float_workspace_buffer.nbytes <= 32 * MIB
