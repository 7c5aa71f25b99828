# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

import typing
from argparse import ArgumentParser
from types import SimpleNamespace

import pytest

from megatron.core.inference.config import FlashInferKernel
from megatron.core.transformer.enums import AttnBackend
from megatron.training.argument_utils import inference_cfg_from_args
from megatron.training.arguments import _add_inference_args
from megatron.training.config.inference_config import InferenceSetupConfig

BACKEND = "inference_dynamic_batching_attention_backend"
KERNEL = "inference_dynamic_batching_flashinfer_kernel"


def option(name):
    """The command-line option that argparse stores under a name."""
    return "--" + name.replace("_", "-")


def inference_config(*arguments):
    """The engine's config, made from a command line as Megatron's inference scripts do."""
    args = _add_inference_args(ArgumentParser(allow_abbrev=False)).parse_args(arguments)
    model = SimpleNamespace(
        position_embedding_type="rope",
        max_sequence_length=4096,
        pg_collection=None,
        decoder=SimpleNamespace(layer_type_list=None),
    )
    return inference_cfg_from_args(args).to_inference_config(model, verbose=False)


def test_by_default_the_model_decides():
    config = inference_config()
    assert config.inference_attention_backend is None
    assert config.flashinfer_kernel is FlashInferKernel.AUTO


@pytest.mark.parametrize("backend", [AttnBackend.flash, AttnBackend.flashinfer])
def test_backend_reaches_the_engine(backend):
    config = inference_config(option(BACKEND), backend.name)
    assert config.inference_attention_backend is backend


@pytest.mark.parametrize("kernel", FlashInferKernel)
def test_every_kernel_reaches_the_engine(kernel):
    assert inference_config(option(KERNEL), kernel.value).flashinfer_kernel is kernel


@pytest.mark.parametrize("name, value", [(BACKEND, "unfused"), (KERNEL, "fa4")])
def test_command_line_refuses_what_is_no_choice(name, value, capsys):
    with pytest.raises(SystemExit):
        inference_config(option(name), value)
    assert f"argument {option(name)}: invalid choice: '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize("name", [BACKEND, KERNEL])
def test_declarative_config_and_command_line_agree(name):
    parser = _add_inference_args(ArgumentParser(allow_abbrev=False))
    action = next(action for action in parser._actions if action.dest == name)
    declared = typing.get_type_hints(InferenceSetupConfig)[name]
    literals = [declared, *typing.get_args(declared)]
    choices = next(typing.get_args(t) for t in literals if typing.get_origin(t) is typing.Literal)

    assert list(choices) == action.choices
    assert getattr(InferenceSetupConfig(), name) == action.default
