"""Stand-in for FlashInfer: what Megatron's FlashInfer backend calls, with the real signatures.

Other parts of FlashInfer are missing, so that importing them fails as without the package.
"""

from __future__ import annotations

from importlib.metadata import version

from . import decode as decode
from . import mla as mla
from . import prefill as prefill
from .prefill import BatchPrefillWithPagedKVCacheWrapper as BatchPrefillWithPagedKVCacheWrapper
from .prefill import BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper
from .xqa import xqa as xqa

__version__ = version('flashinfer-python')
