# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

import io
import os
from argparse import ArgumentParser
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.models.bert import bert_model
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.safe_globals import SAFE_GLOBALS
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.training.arguments import add_megatron_arguments

TRANSFORMER_ENGINE_SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


class _TransformerEngineAttention:
    """Stands for a core attention that is not Megatron's own."""


def _bert_mask_dimensions(backend, core_attention):
    """What BERT makes of a backend: the mask's dimensions and the type that it sets."""
    attention = ModuleSpec(
        module=object,
        params={'attn_mask_type': AttnMaskType.padding},
        submodules=SelfAttentionSubmodules(
            linear_qkv=None, linear_proj=None, core_attention=core_attention
        ),
    )
    layer = ModuleSpec(
        module=TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=attention)
    )
    model = SimpleNamespace(
        config=SimpleNamespace(attention_backend=backend), transformer_layer_spec=layer
    )
    dimensions = BertModel._sanity_check_attention_and_get_attn_mask_dimension(model)
    return dimensions, attention.params['attn_mask_type']


def test_transformer_engine_chooses_among_all_its_backends():
    config = SimpleNamespace(attention_backend=AttnBackend.flashinfer, flash_attention_version=None)
    with mock.patch.dict(os.environ):
        for switch in TRANSFORMER_ENGINE_SWITCHES:
            os.environ.pop(switch, None)

        LanguageModule._set_attention_backend(SimpleNamespace(config=config))

        assert [os.environ.get(switch) for switch in TRANSFORMER_ENGINE_SWITCHES] == ["1"] * 3


def test_gpt_inference_leaves_the_mask_to_transformer_engine():
    config = SimpleNamespace(attention_backend=AttnBackend.flashinfer)
    wrapper = SimpleNamespace(model=SimpleNamespace(config=config))

    mask, positions = GPTInferenceWrapper._build_attention_mask_and_position_ids(
        wrapper, torch.zeros(2, 3, dtype=torch.long)
    )

    assert mask is None
    assert positions.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("core_attention", [DotProductAttention, _TransformerEngineAttention])
@pytest.mark.parametrize("te_version", [(1, 10, 0), (1, 7, 0), (1, 6, 0)])
def test_bert_masks_as_with_auto(monkeypatch, core_attention, te_version):
    def is_at_least(version):
        return te_version >= tuple(map(int, version.split('.')))

    monkeypatch.setattr(bert_model, "is_te_min_version", is_at_least)

    assert _bert_mask_dimensions(AttnBackend.flashinfer, core_attention) == _bert_mask_dimensions(
        AttnBackend.auto, core_attention
    )


def test_command_line_names_it():
    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(["--attention-backend", "flashinfer"])

    assert args.attention_backend is AttnBackend.flashinfer


def test_checkpointed_arguments_load_with_it():
    checkpoint = io.BytesIO()
    torch.save({"attention_backend": AttnBackend.flashinfer}, checkpoint)
    checkpoint.seek(0)

    with torch.serialization.safe_globals(SAFE_GLOBALS):
        loaded = torch.load(checkpoint, weights_only=True)

    assert loaded["attention_backend"] is AttnBackend.flashinfer


def test_checkpoints_keep_the_values_of_the_backends():
    assert {backend.name: backend.value for backend in AttnBackend} == {
        "flash": 1,
        "fused": 2,
        "unfused": 3,
        "local": 4,
        "auto": 5,
        "flashinfer": 6,
    }
