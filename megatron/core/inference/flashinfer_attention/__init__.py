# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""FlashInfer as the attention backend of dynamic inference."""

from .attention import FlashInferAttention

__all__ = ["FlashInferAttention"]
