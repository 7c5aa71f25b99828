# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

import os

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.inference import kv_append_kernel
from megatron.core.inference.kv_append_kernel import triton_append

HAVE_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAVE_GPU else "cpu")

pytestmark = pytest.mark.skipif(
    not HAVE_GPU and os.environ.get("TRITON_INTERPRET") != "1",
    reason="Triton needs a GPU, or TRITON_INTERPRET=1 to interpret the kernel on the CPU",
)


def draw_slots(num_tokens, num_blocks, block_size):
    """A different (block, position) for each token, in the dtypes of the context's bookkeeping."""
    slots = torch.randperm(num_blocks * block_size, device=DEVICE)[:num_tokens]
    return slots // block_size, (slots % block_size).int()


def check_append(rows, caches, block_idx, position, num_tokens=None):
    """Append as many tokens as there are indices, or `num_tokens`, and compare the whole caches with plain indexing, untouched places included."""
    if num_tokens is None:
        num_tokens = block_idx.numel()
    slots = block_idx[:num_tokens].long(), position[:num_tokens].long()
    expected = [cache.clone() for cache in caches]
    for row, cache in zip(rows, expected, strict=True):
        cache[slots] = row[:num_tokens].to(cache.dtype)

    triton_append(rows, caches, block_idx, position, num_tokens)

    for cache, want in zip(caches, expected, strict=True):
        assert torch.equal(cache, want)


@pytest.fixture(autouse=True)
def seed():
    """The same numbers in every test, whatever ran before, and none taken from later tests."""
    with torch.random.fork_rng(devices=[DEVICE] if DEVICE.type == "cuda" else []):
        torch.manual_seed(1234)
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "num_tokens, num_blocks, block_size, num_heads, head_dim",
    [
        pytest.param(1, 1, 1, 1, 1, id="one-of-everything"),
        pytest.param(1, 4, 16, 8, 128, id="one-token"),
        pytest.param(37, 9, 7, 5, 11, id="odd-sizes"),
        pytest.param(64, 1, 64, 2, 64, id="one-full-block"),
        pytest.param(130, 5, 64, 1, 128, id="one-head"),
        pytest.param(50, 3, 256, 3, 80, id="head-dim-80"),
        pytest.param(5, 2, 16, 32, 192, id="rows-of-several-tiles"),
        pytest.param(5, 2, 16, 3, 400, id="rows-of-a-tile-and-a-part"),
    ],
)
def test_keys_and_values(num_tokens, num_blocks, block_size, num_heads, head_dim, dtype):
    rows = torch.randn(2, num_tokens, num_heads, head_dim, device=DEVICE, dtype=dtype)
    caches = torch.randn(2, num_blocks, block_size, num_heads, head_dim, device=DEVICE).to(dtype)

    check_append(list(rows), list(caches), *draw_slots(num_tokens, num_blocks, block_size))


@pytest.mark.parametrize("num_heads, head_dim", [(2, 20), (3, 400)], ids=["narrow", "wide"])
def test_many_tokens_share_programs(monkeypatch, num_heads, head_dim):
    monkeypatch.setattr(kv_append_kernel, "_FEW_TOKENS", 30)
    rows = torch.randn(2, 31, num_heads, head_dim, device=DEVICE)
    caches = torch.randn(2, 3, 16, num_heads, head_dim, device=DEVICE)

    check_append(list(rows), list(caches), *draw_slots(31, 3, 16))


@pytest.mark.parametrize("latent_dim", [13, 40, 576])
@pytest.mark.parametrize("num_tokens", [1, 100])
def test_latents_without_values(num_tokens, latent_dim):
    rows = torch.randn(num_tokens, latent_dim, device=DEVICE)
    cache = torch.randn(3, 64, latent_dim, device=DEVICE)

    check_append([rows], [cache], *draw_slots(num_tokens, 3, 64))


def test_cache_whose_heads_lie_outside_its_tokens():
    rows = torch.randn(2, 20, 4, 24, device=DEVICE)
    caches = torch.randn(2, 3, 4, 16, 24, device=DEVICE).transpose(2, 3)

    check_append(list(rows), list(caches), *draw_slots(20, 3, 16))


def test_rows_and_indices_of_any_strides():
    # Keys and values as slices of one fused projection, with unlike strides, and every other index.
    projection = torch.randn(20, 4, 3, 24, device=DEVICE)
    keys, values = projection[:, :, 1], torch.randn(24, 4, 20, device=DEVICE).permute(2, 1, 0)
    caches = torch.randn(2, 3, 16, 4, 24, device=DEVICE)
    block_idx, position = draw_slots(40, 3, 16)

    check_append([keys, values], list(caches), block_idx[::2], position[::2])


def test_rows_are_converted_to_the_dtype_of_the_cache():
    rows = torch.randn(2, 20, 4, 24, device=DEVICE)
    caches = torch.zeros(2, 3, 16, 4, 24, device=DEVICE, dtype=torch.float16)

    check_append(list(rows), list(caches), *draw_slots(20, 3, 16))


def test_no_tokens_write_nothing():
    rows = torch.randn(2, 0, 4, 24, device=DEVICE)
    caches = torch.randn(2, 3, 16, 4, 24, device=DEVICE)

    check_append(list(rows), list(caches), *draw_slots(0, 3, 16))


def test_what_lies_beyond_the_tokens_is_left_out():
    rows = torch.randn(2, 20, 4, 24, device=DEVICE)
    caches = torch.randn(2, 3, 16, 4, 24, device=DEVICE)

    check_append(list(rows), list(caches), *draw_slots(17, 3, 16), num_tokens=13)


def test_index_dtypes():
    rows = torch.randn(2, 20, 4, 24, device=DEVICE)
    caches = torch.randn(2, 3, 16, 4, 24, device=DEVICE)
    block_idx, position = draw_slots(20, 3, 16)

    check_append(list(rows), list(caches), block_idx.int(), position.long())


@pytest.fixture
def big_tensor():
    """A zeroed tensor of more than 2**31 elements: blocks of 256 tokens, 8 heads, head dim 128."""
    needed = (2**13 + 2) * 256 * 8 * 128 * 2
    if not HAVE_GPU:
        pytest.skip("more than 2**31 elements are for the memory of a GPU")
    if torch.cuda.mem_get_info()[0] < 1.1 * needed:
        pytest.skip(f"needs {1.1 * needed / 1024**3:.1f} GiB of free GPU memory")
    return torch.zeros(needed // 2, device=DEVICE, dtype=torch.bfloat16)


def count_nonzero(tensor):
    """Elements that are not zero, counted in pieces that fit in memory."""
    return sum(int(torch.count_nonzero(piece)) for piece in tensor.split(2**26))


@pytest.mark.parametrize("heads_first", [False, True], ids=["NHD", "HND"])
def test_cache_of_more_than_2_31_elements(big_tensor, heads_first):
    if heads_first:
        cache = big_tensor.view(-1, 8, 256, 128).transpose(1, 2)
    else:
        cache = big_tensor.view(-1, 256, 8, 128)
    last = len(cache) - 1
    rows = torch.randn(3, 8, 128, device=DEVICE).bfloat16()
    # The first slot, one below 2**31 elements in the default layout, and the last of all.
    block_idx = torch.tensor([0, 2**13 - 1, last], device=DEVICE, dtype=torch.int32)
    position = torch.tensor([0, 255, 255], device=DEVICE, dtype=torch.int32)

    triton_append([rows], [cache], block_idx, position, 3)

    assert torch.equal(cache[block_idx.long(), position.long()], rows)
    # Nothing else was written, a wrapped-around offset least of all.
    assert count_nonzero(big_tensor) == count_nonzero(rows.flatten())


def test_rows_that_lie_more_than_2_31_elements_apart(big_tensor):
    rows = big_tensor.as_strided((2, 8, 128), (2**31, 128, 1)).normal_()
    cache = torch.zeros(3, 16, 8, 128, device=DEVICE, dtype=torch.bfloat16)

    check_append([rows], [cache], *draw_slots(2, 3, 16))
