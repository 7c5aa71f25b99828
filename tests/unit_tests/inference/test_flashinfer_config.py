# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

import dataclasses

import pytest

from megatron.core.inference.config import FlashInferKernel, InferenceConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig


def field_names(config):
    """Names of a config's fields."""
    return {field.name for field in dataclasses.fields(config)}


def model_config(attention_backend):
    """A model's config with that backend."""
    return TransformerConfig(
        num_layers=1, num_attention_heads=1, hidden_size=8, attention_backend=attention_backend
    )


@pytest.mark.parametrize(
    "given, expected",
    [(None, None), *((backend, backend) for backend in AttnBackend)]
    + [(backend.name, backend) for backend in AttnBackend],
)
def test_inference_attention_backend_takes_members_and_names(given, expected):
    config = InferenceConfig(inference_attention_backend=given)
    assert config.inference_attention_backend is expected


@pytest.mark.parametrize(
    "kernel", ["auto", "xqa", "fa3", "fa2", "fmha-v2", "trtllm-gen", FlashInferKernel.TRTLLM_GEN]
)
def test_flashinfer_kernel_takes_members_and_names(kernel):
    config = InferenceConfig(flashinfer_kernel=kernel)
    assert config.flashinfer_kernel is FlashInferKernel(kernel)


def test_defaults_follow_the_model_and_pin_nothing():
    config = InferenceConfig()
    assert config.inference_attention_backend is None
    assert config.flashinfer_kernel is FlashInferKernel.AUTO


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"inference_attention_backend": "flash-infer"},
            "'flash-infer' is not a valid AttnBackend",
        ),
        ({"inference_attention_backend": ""}, "'' is not a valid AttnBackend"),
        ({"flashinfer_kernel": "fa4"}, "'fa4' is not a valid FlashInferKernel"),
        ({"flashinfer_kernel": None}, "None is not a valid FlashInferKernel"),
    ],
)
def test_unknown_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        InferenceConfig(**options)


def test_positional_arguments_mean_what_they_did():
    keyword_only = {
        field.name for field in dataclasses.fields(InferenceConfig) if field.kw_only is True
    }
    assert {"inference_attention_backend", "flashinfer_kernel"} <= keyword_only


def test_no_field_is_named_as_one_of_the_model_config():
    assert not field_names(InferenceConfig) & field_names(TransformerConfig)


@pytest.mark.parametrize("model_backend", [*AttnBackend, "flashinfer", "unfused"])
def test_model_decides_unless_told_otherwise(model_backend):
    model_takes_it = model_backend in (AttnBackend.flashinfer, "flashinfer")
    assert InferenceConfig().uses_flashinfer(model_config(model_backend)) is model_takes_it


@pytest.mark.parametrize("model_backend", AttnBackend)
@pytest.mark.parametrize("backend", AttnBackend)
def test_inference_config_overrides_the_model(model_backend, backend):
    config = InferenceConfig(inference_attention_backend=backend)
    overridden = config.uses_flashinfer(model_config(model_backend))
    assert overridden is (backend is AttnBackend.flashinfer)
