# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""Which of FlashInfer's kernels computes which phase, and what none of them can."""

from dataclasses import dataclass
from importlib import metadata
from typing import Dict, List, Optional, Tuple

import torch
from packaging.version import Version

from megatron.core.inference.config import FlashInferKernel, KVCacheLayout

MIN_FLASHINFER_VERSION = "0.6.18"

XQA = FlashInferKernel.XQA
FA3 = FlashInferKernel.FA3
FA2 = FlashInferKernel.FA2
FMHA_V2 = FlashInferKernel.FMHA_V2
TRTLLM_GEN = FlashInferKernel.TRTLLM_GEN


@dataclass(frozen=True)
class Phases:
    """Kernels for the two kinds of query rows, the preferred one first."""

    decode: Tuple[FlashInferKernel, ...]
    prefill: Tuple[FlashInferKernel, ...]


# By major compute capability. Measured on SM 9.0; the other rows follow FlashInfer's own preference
# and were not run.
PREFERENCE: Dict[int, Phases] = {
    8: Phases(decode=(FA2,), prefill=(FA2,)),
    9: Phases(decode=(XQA, FA2), prefill=(FA3, FA2, FMHA_V2)),
    10: Phases(decode=(TRTLLM_GEN, FA2), prefill=(TRTLLM_GEN, FA2)),
    12: Phases(decode=(FA2,), prefill=(FA2,)),
}
# With multi-latent attention one kernel serves both phases. Tested on SM 9.0 only.
MLA_PREFERENCE: Dict[int, Phases] = {
    8: Phases(decode=(FA2,), prefill=(FA2,)),
    9: Phases(decode=(FA3, FA2), prefill=(FA3, FA2)),
    10: Phases(decode=(FA2,), prefill=(FA2,)),
    12: Phases(decode=(FA2,), prefill=(FA2,)),
}


@dataclass(frozen=True)
class Limits:
    """What a kernel was built for.

    Args:
        majors: Major compute capabilities.
        head_dims: Head dims.
        max_ratio: Most query heads that share a KV head; None: any number.
        page_sizes: Sizes of a page in tokens, the preferred one first. A block is cut into pages,
            which are contiguous in NHD only. None: a page is a block, whatever its size and layout.
        latent_dim: As of a problem.
        query_heads: Counts of query heads; None: any.
        dtypes: Of all that it reads and writes.
    """

    majors: Tuple[int, ...]
    head_dims: Tuple[int, ...]
    max_ratio: Optional[int] = None
    page_sizes: Optional[Tuple[int, ...]] = None
    latent_dim: Optional[int] = None
    query_heads: Optional[Tuple[int, ...]] = None
    dtypes: Tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)


# Rows, each a query token and one of its heads, that one of xqa's CTAs computes.
XQA_TILE = 32
LIMITS: Dict[FlashInferKernel, Limits] = {
    # Ratios beyond 16 are not tested by FlashInfer, and 32 does not compile at head dim 256. Pages
    # of 16 tokens cost more than larger ones.
    XQA: Limits(
        majors=(9,),
        head_dims=(64, 80, 96, 128, 192, 256),
        max_ratio=16,
        page_sizes=(64, 128, 32, 16),
    ),
    FA3: Limits(majors=(9,), head_dims=(64, 128, 256)),
    FA2: Limits(majors=(8, 9, 10, 12), head_dims=(64, 128, 256)),
    # In fp16 it also sums up in fp16, which is less exact than the others are.
    FMHA_V2: Limits(
        majors=(9,),
        head_dims=(64, 80, 96, 128, 192, 256),
        page_sizes=(128, 64, 32, 16),
        dtypes=(torch.bfloat16,),
    ),
    TRTLLM_GEN: Limits(majors=(10,), head_dims=(64, 128, 256), page_sizes=(64, 32, 16)),
}
# A tile is 64 or 128 pairs of query and head. Where one ends between two heads of a query, its
# causal bound falls short of that query's newest key, so heads must divide tiles. 128 heads meet
# none of 64, which FlashInfer takes where rows have no more than half a token on average.
MLA_QUERY_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
MLA_LIMITS: Dict[FlashInferKernel, Limits] = {
    FA3: Limits(majors=(9,), head_dims=(576,), latent_dim=512, query_heads=MLA_QUERY_HEADS),
    FA2: Limits(
        majors=(8, 9, 10, 12), head_dims=(576,), latent_dim=512, query_heads=MLA_QUERY_HEADS
    ),
}


@dataclass(frozen=True)
class AttentionProblem:
    """What the kernels have to compute, as far as it decides whether they can.

    Args:
        compute_capability: Of the GPU.
        dtype: Of queries, keys, values and output.
        num_query_heads: In this partition.
        num_kv_heads: In this partition.
        head_dim: Elements of one query head, and of one key.
        block_size_tokens: Tokens of one KV cache block.
        layout: Of a KV cache block.
        tokens_per_decode: Query tokens of a decode request.
        sinks_differ: Whether query heads have sinks of their own.
        latent_dim: Of absorbed multi-latent attention on cached latents: leading elements of a key
            that are its value. None: keys and values are apart.
        value_head_dim: Elements of one value that is apart; None: as many as of a key.
    """

    compute_capability: Tuple[int, int]
    dtype: torch.dtype
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    block_size_tokens: int
    layout: KVCacheLayout = KVCacheLayout.NHD
    latent_dim: Optional[int] = None
    tokens_per_decode: int = 1
    sinks_differ: bool = False
    value_head_dim: Optional[int] = None

    @property
    def value_dim(self) -> int:
        """Elements of one value, and of one head's output."""
        return self.latent_dim or self.value_head_dim or self.head_dim

    @property
    def dims(self) -> str:
        """What the elements of a head are, for messages."""
        if self.latent_dim is None:
            return f"head dim {self.head_dim}"
        rotary = self.head_dim - self.latent_dim
        return f"latents of {self.latent_dim} and {rotary} rotary elements"

    @property
    def ratio(self) -> int:
        """Query heads per KV head."""
        return self.num_query_heads // self.num_kv_heads

    def page_size(self, kernel: FlashInferKernel) -> Optional[int]:
        """Tokens of one of the kernel's pages; None where no page size divides a block."""
        if self.latent_dim is not None:
            return self.block_size_tokens
        page_sizes = LIMITS[kernel].page_sizes
        if page_sizes is None:
            return self.block_size_tokens
        return next((size for size in page_sizes if self.block_size_tokens % size == 0), None)


@dataclass(frozen=True)
class Selection:
    """The kernels chosen, and why not those that would have been preferred."""

    decode: FlashInferKernel
    prefill: FlashInferKernel
    reasons: Tuple[str, ...] = ()

    def __str__(self) -> str:
        chosen = f"decode {self.decode.value}, prefill {self.prefill.value}"
        return f"{chosen} ({'; '.join(self.reasons)})" if self.reasons else chosen


def why_not(kernel: FlashInferKernel, problem: AttentionProblem) -> Optional[str]:
    """Why a kernel cannot compute a problem; None if it can."""
    limits = (LIMITS if problem.latent_dim is None else MLA_LIMITS).get(kernel)
    if limits is None:
        return "does not do multi-latent attention"
    major, minor = problem.compute_capability
    if major not in limits.majors:
        return f"is not built for SM {major}.{minor}"
    if problem.head_dim not in limits.head_dims or problem.latent_dim != limits.latent_dim:
        return f"does not take {problem.dims}"
    if problem.dtype not in limits.dtypes:
        return f"does not take {problem.dtype}"
    if limits.query_heads is not None and problem.num_query_heads not in limits.query_heads:
        return f"does not take {problem.num_query_heads} query heads"
    if limits.max_ratio is not None and problem.ratio > limits.max_ratio:
        return f"does not take {problem.ratio} query heads per KV head"
    if kernel is XQA and problem.sinks_differ and problem.tokens_per_decode > 1:
        # It tells a row's head by the row's place in its tile.
        rows = problem.ratio * problem.tokens_per_decode
        if rows > XQA_TILE and XQA_TILE % problem.ratio:
            return (
                f"mixes up learnable sinks of {problem.ratio} query heads per KV head with "
                f"{problem.tokens_per_decode} tokens a decode"
            )
    if problem.page_size(kernel) is None:
        return f"has no page size that divides blocks of {problem.block_size_tokens} tokens"
    if limits.page_sizes is not None and problem.layout is not KVCacheLayout.NHD:
        return f"cannot cut blocks of layout {problem.layout.value} into pages"
    return None


def select(
    problem: AttentionProblem, pinned: FlashInferKernel = FlashInferKernel.AUTO
) -> Selection:
    """Choose the kernels of both phases.

    Args:
        problem: What to compute.
        pinned: Kernel to take for every phase that it can serve.

    Raises:
        ValueError: If no kernel, or not the pinned one, can compute the problem.
    """
    major, minor = problem.compute_capability
    phases = (PREFERENCE if problem.latent_dim is None else MLA_PREFERENCE).get(major)
    if phases is None:
        raise ValueError(
            f"FlashInfer attention needs a GPU of SM 8.0 or later that its kernels are built for, "
            f"not SM {major}.{minor}: set inference_attention_backend to flash."
        )
    if problem.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"FlashInfer attention computes in float16 or bfloat16, not {problem.dtype}: set "
            "params_dtype, or set inference_attention_backend to flash."
        )
    reasons: List[str] = []

    def choose(phase: str, preferred: Tuple[FlashInferKernel, ...]) -> FlashInferKernel:
        candidates = (pinned,) if pinned in SERVES[phase] else preferred
        refusals: List[str] = []
        for kernel in candidates:
            reason = why_not(kernel, problem)
            if reason is None:
                reasons.extend(refusals)
                return kernel
            refusals.append(f"{kernel.value} {reason}")
        advice = (
            "set another flashinfer_kernel"
            if pinned in candidates
            else "set inference_attention_backend to flash"
        )
        raise ValueError(
            f"FlashInfer has no kernel for {phase} here, as {', and '.join(refusals)}: {advice}."
        )

    return Selection(
        decode=choose("decode", phases.decode),
        prefill=choose("prefill", phases.prefill),
        reasons=tuple(dict.fromkeys(reasons)),
    )


# Phases that a kernel can be pinned for.
SERVES: Dict[str, Tuple[FlashInferKernel, ...]] = {
    "decode": (XQA, FA2, TRTLLM_GEN),
    "prefill": (FA3, FA2, FMHA_V2, TRTLLM_GEN),
}


def require_flashinfer() -> str:
    """The version of FlashInfer that is installed.

    Raises:
        ImportError: If there is none, or one too old.
    """
    install = f"pip install 'flashinfer-python>={MIN_FLASHINFER_VERSION}'"
    try:
        version = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        raise ImportError(f"FlashInfer attention needs FlashInfer: {install}") from None
    if Version(version) < Version(MIN_FLASHINFER_VERSION):
        raise ImportError(f"FlashInfer {version} is too old for attention: {install}")
    return version
