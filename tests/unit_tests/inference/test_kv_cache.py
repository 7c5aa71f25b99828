# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

import dataclasses

import pytest
import torch

from megatron.core.inference import kv_cache
from megatron.core.inference.config import KVCacheLayout
from megatron.core.inference.contexts.fused_kv_append_kernel import triton_append_key_value_cache
from megatron.core.inference.kv_cache import AttentionKVCacheSpec, LatentKVCacheSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def attention_spec(**changes):
    """A spec of odd sizes; `changes` replace its fields."""
    sizes = dict(
        num_layers=3, block_size_tokens=7, dtype=torch.float32, num_kv_heads=5, head_dim=11
    )
    return AttentionKVCacheSpec(**{**sizes, **changes})


def latent_spec(**changes):
    """A latent spec of odd sizes; `changes` replace its fields."""
    sizes = dict(num_layers=3, block_size_tokens=7, dtype=torch.float32, latent_dim=13)
    return LatentKVCacheSpec(**{**sizes, **changes})


SPECS = [
    pytest.param(attention_spec(), id="gqa"),
    pytest.param(attention_spec(num_kv_heads=1), id="one-head"),
    pytest.param(attention_spec(num_layers=1, block_size_tokens=1), id="one-layer-one-token"),
    pytest.param(attention_spec(block_size_tokens=256, head_dim=128), id="usual-sizes"),
    pytest.param(attention_spec(layout=KVCacheLayout.HND), id="hnd"),
    pytest.param(attention_spec(layout=KVCacheLayout.HND, num_kv_heads=1), id="hnd-one-head"),
    pytest.param(latent_spec(), id="latent"),
    pytest.param(latent_spec(block_size_tokens=64, latent_dim=576), id="latent-usual-sizes"),
]


@pytest.fixture(autouse=True)
def seed():
    """The same numbers in every test, whatever ran before, and none taken from later tests."""
    with torch.random.fork_rng(devices=[DEVICE] if DEVICE.type == "cuda" else []):
        torch.manual_seed(1234)
        yield


class TestStorage:
    def test_attention_storage_keeps_keys_before_values_and_heads_inside_tokens(self):
        assert attention_spec().storage_shape(num_blocks=4) == (2, 3, 4, 7, 5, 11)

    def test_attention_storage_is_nhd_unless_told_otherwise(self):
        assert attention_spec() == attention_spec(layout=KVCacheLayout.NHD)

    def test_hnd_storage_keeps_tokens_inside_heads(self):
        spec = attention_spec(layout=KVCacheLayout.HND)
        assert spec.storage_shape(num_blocks=4) == (2, 3, 4, 5, 7, 11)

    def test_latent_storage_has_no_head_axis(self):
        assert latent_spec().storage_shape(num_blocks=4) == (3, 4, 7, 13)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("num_blocks", [1, 2, 9])
    @pytest.mark.parametrize("spec", SPECS)
    def test_block_bytes_are_the_bytes_that_a_block_takes(self, spec, num_blocks, dtype):
        spec = dataclasses.replace(spec, dtype=dtype)
        storage = spec.allocate(num_blocks, DEVICE)

        assert storage.dtype == dtype
        assert storage.device.type == DEVICE.type
        assert storage.is_contiguous()
        assert storage.untyped_storage().nbytes() == num_blocks * spec.block_bytes


class TestLayerViews:
    @pytest.mark.parametrize("num_blocks", [1, 4])
    @pytest.mark.parametrize("spec", SPECS)
    def test_views_of_all_layers_are_the_storage_and_do_not_overlap(self, spec, num_blocks):
        storage = spec.allocate(num_blocks, DEVICE).zero_()
        layers = [spec.layer_views(storage, layer) for layer in range(spec.num_layers)]
        views = [view for layer in layers for view in layer if view is not None]

        for mark, view in enumerate(views, start=1):
            assert view.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
            assert not view.any(), "a view overlaps one that was marked before"
            view.fill_(mark)

        assert storage.all(), "no view reaches some element of the storage"

    def test_attention_views_are_blocks_of_tokens_of_heads(self):
        spec = attention_spec()
        storage = spec.allocate(4, DEVICE).normal_()
        keys, values = spec.layer_views(storage, 2)

        assert keys.shape == values.shape == (4, 7, 5, 11)
        assert torch.equal(keys[1, 3, 4], storage[0, 2, 1, 3, 4])
        assert torch.equal(values[1, 3, 4], storage[1, 2, 1, 3, 4])

    def test_hnd_views_have_the_axes_of_nhd(self):
        spec = attention_spec(layout=KVCacheLayout.HND)
        storage = spec.allocate(4, DEVICE).normal_()
        keys, values = spec.layer_views(storage, 2)

        assert keys.shape == values.shape == (4, 7, 5, 11)
        assert torch.equal(keys[1, 3, 4], storage[0, 2, 1, 4, 3])
        assert torch.equal(values[1, 3, 4], storage[1, 2, 1, 4, 3])

    def test_latent_views_are_blocks_of_tokens_without_values(self):
        spec = latent_spec()
        storage = spec.allocate(4, DEVICE).normal_()
        latents, values = spec.layer_views(storage, 2)

        assert latents.shape == (4, 7, 13)
        assert values is None
        assert torch.equal(latents[1, 3], storage[2, 1, 3])


def draw_slots(spec, num_tokens, num_blocks):
    """A different (block, position) for each token, in the dtypes of the context's bookkeeping."""
    slots = torch.randperm(num_blocks * spec.block_size_tokens, device=DEVICE)[:num_tokens]
    return slots // spec.block_size_tokens, (slots % spec.block_size_tokens).int()


def draw_rows(spec, num_tokens):
    """Keys and values of a step; None for values that the spec does not store."""
    rows = torch.randn(2, num_tokens, *spec.token_shape, device=DEVICE)
    return rows[0], None if isinstance(spec, LatentKVCacheSpec) else rows[1]


class TestAppend:
    @pytest.mark.parametrize("num_tokens", [0, 1, 12])
    @pytest.mark.parametrize("layer", [0, 2])
    @pytest.mark.parametrize(
        "spec",
        [
            pytest.param(attention_spec(), id="gqa"),
            pytest.param(attention_spec(num_kv_heads=1), id="one-head"),
            pytest.param(attention_spec(layout=KVCacheLayout.HND), id="hnd"),
            pytest.param(latent_spec(), id="latent"),
        ],
    )
    def test_rows_go_to_their_slots_and_nowhere_else(self, spec, layer, num_tokens):
        storage = spec.allocate(2, DEVICE).normal_()
        expected = storage.clone()
        key, value = draw_rows(spec, num_tokens)
        block_idx, position = draw_slots(spec, num_tokens, 2)
        for token in range(num_tokens):
            for row, cache in zip((key, value), spec.layer_views(expected, layer)):
                if row is not None:
                    cache[block_idx[token], position[token]] = row[token]

        spec.append(storage, layer, key, value, block_idx, position, num_tokens)

        assert torch.equal(storage, expected)

    @pytest.mark.parametrize("spec", [attention_spec(), latent_spec()], ids=["gqa", "latent"])
    def test_what_lies_beyond_the_tokens_is_left_out(self, spec):
        storage, expected = spec.allocate(2, DEVICE).zero_(), spec.allocate(2, DEVICE).zero_()
        key, value = draw_rows(spec, 9)
        block_idx, position = draw_slots(spec, 8, 2)

        spec.append(storage, 1, key, value, block_idx, position, 6)

        first = [None if t is None else t[:6] for t in (key, value, block_idx, position)]
        spec.append(expected, 1, *first, 6)
        assert storage.any()

        assert torch.equal(storage, expected)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_rows_are_stored_in_the_dtype_of_the_storage(self, dtype):
        spec = attention_spec(dtype=dtype)
        storage = spec.allocate(2, DEVICE).zero_()
        key, value = draw_rows(spec, 6)
        block_idx, position = draw_slots(spec, 6, 2)

        spec.append(storage, 0, key, value, block_idx, position, 6)

        keys, values = spec.layer_views(storage, 0)
        assert torch.equal(keys[block_idx, position], key.to(dtype))
        assert torch.equal(values[block_idx, position], value.to(dtype))

    @pytest.mark.parametrize("have_triton", [True, False])
    def test_triton_writes_where_there_is_a_gpu_and_triton(self, monkeypatch, have_triton):
        launches = []
        monkeypatch.setattr(kv_cache, "HAVE_TRITON", have_triton)
        monkeypatch.setattr(
            kv_cache, "triton_append", lambda *step: launches.append(step), raising=False
        )
        spec = attention_spec()
        storage = spec.allocate(2, DEVICE).zero_()

        spec.append(storage, 0, *draw_rows(spec, 6), *draw_slots(spec, 6, 2), 6)

        by_triton = DEVICE.type == "cuda" and have_triton
        assert len(launches) == by_triton
        assert storage.any() != by_triton

    @pytest.mark.parametrize("spec", [attention_spec(), latent_spec()], ids=["gqa", "latent"])
    @pytest.mark.parametrize(
        "wrong, error, message",
        [
            (dict(key=lambda t: t[..., :-1]), ValueError, "key must hold at least 6 tokens"),
            (dict(key=lambda t: t[None]), ValueError, "key must hold at least 6 tokens"),
            (dict(key=lambda t: t[:5]), ValueError, "key must hold at least 6 tokens"),
            (dict(key=lambda t: t.to("meta")), ValueError, "key must .* not be .* on meta"),
            (dict(key=lambda t: t.int()), TypeError, "key must be floating point"),
            (dict(block_idx=lambda t: t[:, None]), ValueError, "block_idx must hold at least 6"),
            (dict(position=lambda t: t[:5]), ValueError, "position must hold at least 6"),
            (dict(position=lambda t: t.to("meta")), ValueError, "position must .* not .* on meta"),
            (dict(block_idx=lambda t: t.float()), TypeError, "block_idx must be int32 or int64"),
            (dict(position=lambda t: t.bool()), TypeError, "position must be int32 or int64"),
        ],
    )
    def test_wrong_shapes_dtypes_and_devices_are_refused(self, spec, wrong, error, message):
        storage = spec.allocate(2, DEVICE).zero_()
        key, value = draw_rows(spec, 6)
        block_idx, position = draw_slots(spec, 6, 2)
        step = dict(key=key, value=value, block_idx=block_idx, position=position)
        for name, change in wrong.items():
            step[name] = change(step[name])

        with pytest.raises(error, match=message):
            spec.append(storage, 0, **step, num_tokens=6)

        assert not storage.any(), "a refused append wrote something"

    def test_values_are_checked_as_keys_are(self):
        spec = attention_spec()
        storage = spec.allocate(2, DEVICE).zero_()
        key, value = draw_rows(spec, 6)

        with pytest.raises(ValueError, match="value must hold at least 6 tokens"):
            spec.append(storage, 0, key, value[:, :-1], *draw_slots(spec, 6, 2), 6)

        assert not storage.any()

    @pytest.mark.parametrize(
        "spec, message",
        [
            (attention_spec(), "stores keys and values, but was given no value"),
            (latent_spec(), "stores keys alone, but was given a value"),
        ],
        ids=["gqa", "latent"],
    )
    def test_values_are_given_where_they_are_stored_and_only_there(self, spec, message):
        key, value = draw_rows(spec, 6)
        value = key if value is None else None

        with pytest.raises(ValueError, match=message):
            spec.append(spec.allocate(2, DEVICE), 0, key, value, *draw_slots(spec, 6, 2), 6)

    @pytest.mark.parametrize(
        "other",
        [
            pytest.param(attention_spec(num_kv_heads=1), id="heads"),
            pytest.param(attention_spec(block_size_tokens=8), id="block-size"),
            pytest.param(attention_spec(dtype=torch.bfloat16), id="dtype"),
            pytest.param(attention_spec(layout=KVCacheLayout.HND), id="layout"),
        ],
    )
    def test_storage_of_another_spec_is_refused(self, other):
        storage = other.allocate(2, DEVICE).zero_()
        spec = attention_spec()

        with pytest.raises(ValueError, match="is not of AttentionKVCacheSpec"):
            spec.append(storage, 0, *draw_rows(spec, 6), *draw_slots(spec, 6, 2), 6)

        assert not storage.any()


class TestFormerEntryPoint:
    """`triton_append_key_value_cache`, kept for its callers."""

    def test_it_appends_the_first_tokens_to_the_layer(self):
        spec = attention_spec()
        storage, expected = spec.allocate(2, DEVICE).zero_(), spec.allocate(2, DEVICE).zero_()
        key, value = draw_rows(spec, 9)
        block_idx, position = draw_slots(spec, 9, 2)
        spec.append(expected, 2, key, value, block_idx, position, 6)

        triton_append_key_value_cache(
            layer_number=2,
            key=key.unsqueeze(1),
            value=value.unsqueeze(1),
            memory_buffer=storage,
            padded_active_token_count=6,
            token_to_block_idx=block_idx,
            token_to_local_position_within_kv_block=position,
        )

        assert torch.equal(storage, expected)

    def test_it_refuses_heads_that_do_not_fit(self):
        spec = attention_spec()
        key, value = draw_rows(attention_spec(num_kv_heads=6), 9)

        with pytest.raises(ValueError, match="key must hold at least 9 tokens"):
            triton_append_key_value_cache(
                0,
                key.unsqueeze(1),
                value.unsqueeze(1),
                spec.allocate(2, DEVICE),
                9,
                *draw_slots(spec, 9, 2),
            )


class TestSpec:
    @pytest.mark.parametrize(
        "field", ["num_layers", "block_size_tokens", "num_kv_heads", "head_dim"]
    )
    def test_sizes_below_one_are_refused_by_name(self, field):
        with pytest.raises(ValueError, match=f"{field} must be positive, not 0"):
            attention_spec(**{field: 0})

    def test_latent_dim_below_one_is_refused_by_name(self):
        with pytest.raises(ValueError, match="latent_dim must be positive, not -1"):
            latent_spec(latent_dim=-1)

    @pytest.mark.parametrize("spec", SPECS)
    def test_spec_is_frozen(self, spec):
        with pytest.raises(dataclasses.FrozenInstanceError):
            spec.num_layers = 2
