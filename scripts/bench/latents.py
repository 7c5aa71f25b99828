"""Device time of one layer of absorbed multi-latent attention (MLA) on cached latents.

As in `attention.py`, whose rows these are. FlashInfer's path computes from the latents, but for
steps of new prompts alone, whose latents fa3 has projected to keys and values. Upstream computes
from them in steps that only decode, by FlashMLA, which it needs for that; in all others it projects
every latent of the cache, used or not, for FlashAttention. To be fair to it, the cache here holds
no more than the step's own tokens. What a path has to project, queries and outputs or latents, is
part of a step with prefill.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

import timing
from attention import Batch, Case, Heads, even, measured

LATENT, ROTARY = 512, 64
QUERY, VALUE = 128, 128  # before absorption, rotary elements aside


@dataclass(frozen=True)
class LatentHeads(Heads):
    """Query heads on latents."""

    kv: int = 1
    dim: int = LATENT + ROTARY

    @property
    def value_dim(self) -> int:
        """Elements of one value."""
        return LATENT

    @property
    def token_bytes(self) -> int:
        """Of one token's latent in one layer, in bf16."""
        return 2 * self.dim


SHAPES = {"MLA, 16 heads": LatentHeads(16), "MLA, 128 heads": LatentHeads(128)}


def decode_batches() -> Iterator[tuple[str, Batch]]:
    """Decode steps."""
    for count in (1, 32, 128, 256):
        for tokens in (1024, 4096, 32768):
            if count * tokens <= 1 << 20:
                yield f"{count} x {tokens}", Batch(decode=even(count, tokens))


def prefill_batches() -> Iterator[tuple[str, Batch]]:
    """Prompts, and chunks on what is cached."""
    for count, tokens, cached in ((1, 1024, 0), (1, 8192, 0), (8, 512, 4096)):
        name = f"{count} x {tokens} on {cached}" if cached else f"{count} x {tokens}"
        yield name, Batch(prefill=[(tokens, cached + tokens)] * count)


class LatentCase(Case):
    """A batch on a cache of latents."""

    def __init__(self, heads: Heads, batch: Batch) -> None:
        self.block_size = 256 if batch.prefill else 64  # FlashMLA takes no other
        super().__init__(heads, batch)
        self.fa2 = self.attention_by("fa2")

    def _spec(self) -> Any:
        from megatron.core.inference.kv_cache import LatentKVCacheSpec

        return LatentKVCacheSpec(
            num_layers=self.layers,
            block_size_tokens=self.block_size,
            dtype=torch.bfloat16,
            latent_dim=LATENT + ROTARY,
        )

    def _config(self) -> Any:
        from megatron.core.transformer import MLATransformerConfig

        return MLATransformerConfig(
            num_layers=self.layers,
            hidden_size=4096,
            num_attention_heads=self.heads.query,
            multi_latent_attention=True,
            cache_mla_latents=True,
            kv_lora_rank=LATENT,
            qk_pos_emb_head_dim=ROTARY,
            qk_head_dim=QUERY,
            v_head_dim=VALUE,
            rope_type="rope",
            params_dtype=torch.bfloat16,
            bf16=True,
        )

    def _layer(self) -> Any:
        layer = super()._layer()
        layer.softmax_scale = (QUERY + ROTARY) ** -0.5
        layer.num_attention_heads_per_partition = self.heads.query
        return layer

    @cached_property
    def _up(self) -> Tensor:
        """From latents to keys and values, `(heads, QUERY + VALUE, LATENT)`."""
        return torch.randn(self.heads.query, QUERY + VALUE, LATENT, device="cuda").bfloat16() / 23

    @cached_property
    def _query_before(self) -> Tensor:
        tokens, heads = self.query.size(0), self.heads.query
        return torch.randn(tokens, 1, heads, QUERY + ROTARY, device="cuda").bfloat16()

    def absorbed(self, attention: Any, layer: int) -> Tensor:
        """A step with prefill by FlashInfer, its projections among it."""
        query, rotary = self._query_before.split((QUERY, ROTARY), dim=-1)
        query = torch.einsum("sbhd,hdc->sbhc", query, self._up[:, :QUERY])
        latents, _ = self.spec.layer_views(self.storage, layer)
        output = attention.run(torch.cat((query, rotary), dim=-1), latents, None, layer + 1)
        return torch.einsum("sbhc,hdc->sbhd", output, self._up[:, QUERY:])

    def _projected(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of latents, which keep their leading dimensions."""
        latents, rotary = latents.split((LATENT, ROTARY), dim=-1)
        both = latents @ self._up.flatten(0, 1).t()
        keys, values = both.unflatten(-1, (self.heads.query, -1)).split((QUERY, VALUE), dim=-1)
        rotary = rotary.unsqueeze(-2).expand(*keys.shape[:-1], -1)
        return torch.cat((keys, rotary), dim=-1), values

    def flash_projected(self, layer: int) -> Tensor:
        """A step with prefill by FlashAttention, from all latents of the cache."""
        latents, _ = self.spec.layer_views(self.storage, layer)
        keys, values = self._projected(latents)
        # Upstream pads values to the keys' dim.
        values = torch.nn.functional.pad(values, (0, QUERY + ROTARY - VALUE))
        return self._flash(self._query_before, keys, values)[..., :VALUE]

    def prefilled(self, attention: Any, layer: int) -> Tensor:
        """A step with prefill by FlashInfer, from what its path takes."""
        if not attention.projects_latents:
            return self.absorbed(attention, layer)
        assert self.new is not None
        keys, values = self._projected(self.new[layer, 0])
        return attention.run(self._query_before, keys, values, layer + 1)

    def decoded(self, attention: Any, layer: int) -> Tensor:
        """Decode by FlashInfer."""
        latents, _ = self.spec.layer_views(self.storage, layer)
        return attention.run(self.query, latents, None, layer + 1)

    def operations(self) -> int:
        """See base class; projections are not counted."""
        absorbed = self.batch.operations(self.heads)
        if not self.attention.projects_latents:
            return absorbed
        return absorbed * (QUERY + ROTARY + VALUE) // (2 * LATENT + ROTARY)

    def calls(self) -> dict[str, timing.Call]:
        """By the kernel that FlashInfer's path chooses, by fa2, and upstream's way if it has one."""
        from megatron.core.transformer import attention

        path = self.prefilled if self.batch.prefill else self.decoded
        calls: dict[str, timing.Call] = {
            "flashinfer": partial(path, self.attention),
            "fa2": partial(path, self.fa2),
        }
        if self.batch.prefill:
            calls["flash"] = self.flash_projected
        elif attention.HAVE_FMLA:
            calls["flash"] = self.flash
        return calls


def run() -> list[dict[str, Any]]:
    """Measure every shape and batch.

    Returns:
        A row per case, as of `attention.run`, with fa2's time beside, and FlashAttention's or
        FlashMLA's if there is one.
    """
    rows = []
    for shape, heads in SHAPES.items():
        for phase, batches in (("decode", decode_batches()), ("prefill", prefill_batches())):
            for name, batch in batches:
                rows.append(measured(shape, phase, name, LatentCase(heads, batch)))
                torch.cuda.empty_cache()
    return rows
