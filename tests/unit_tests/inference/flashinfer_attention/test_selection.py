# Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.

"""Which kernels are chosen for a GPU and a model, why not others, and what is refused."""

import dataclasses
import re
from importlib import metadata

import pytest
import torch

from megatron.core.inference.config import FlashInferKernel, KVCacheLayout
from megatron.core.inference.flashinfer_attention import selection
from megatron.core.inference.flashinfer_attention.selection import (
    AttentionProblem,
    require_flashinfer,
    select,
    why_not,
)

AUTO, XQA, FA3, FA2, FMHA_V2, TRTLLM_GEN = (
    FlashInferKernel.AUTO,
    FlashInferKernel.XQA,
    FlashInferKernel.FA3,
    FlashInferKernel.FA2,
    FlashInferKernel.FMHA_V2,
    FlashInferKernel.TRTLLM_GEN,
)
HND = KVCacheLayout.HND


def problem(capability=(9, 0), ratio=4, **changes) -> AttentionProblem:
    """A problem that every kernel of the GPU can compute, but for `changes`."""
    usual = AttentionProblem(
        compute_capability=capability,
        dtype=torch.bfloat16,
        num_query_heads=2 * ratio,
        num_kv_heads=2,
        head_dim=128,
        block_size_tokens=256,
    )
    return dataclasses.replace(usual, **changes)


def chosen(*args, pinned=AUTO, **kwargs):
    """The kernels of decode and prefill, and the reasons."""
    selected = select(problem(*args, **kwargs), pinned)
    return selected.decode, selected.prefill, selected.reasons


def refusal(*args, pinned=AUTO, **kwargs) -> str:
    """What `select` says when it refuses."""
    with pytest.raises(ValueError) as raised:
        select(problem(*args, **kwargs), pinned)
    message = str(raised.value)
    assert message.endswith(".") and "\n" not in message
    return message


@pytest.mark.parametrize(
    "capability, decode, prefill",
    [
        ((8, 0), FA2, FA2),
        ((8, 6), FA2, FA2),
        ((8, 9), FA2, FA2),
        ((9, 0), XQA, FA3),
        ((10, 0), TRTLLM_GEN, TRTLLM_GEN),
        ((10, 3), TRTLLM_GEN, TRTLLM_GEN),
        ((12, 0), FA2, FA2),
    ],
    ids=str,
)
class TestEveryGpu:
    def test_preferred(self, capability, decode, prefill):
        for dtype in (torch.bfloat16, torch.float16):
            assert chosen(capability, dtype=dtype) == (decode, prefill, ())

    def test_fa2_can_be_pinned(self, capability, decode, prefill):
        assert chosen(capability, pinned=FA2) == (FA2, FA2, ())

    def test_heads_first_takes_what_needs_no_pages(self, capability, decode, prefill):
        decode, prefill, reasons = chosen(capability, layout=HND)
        expected = {
            9: (FA2, FA3, ("xqa cannot cut blocks of layout HND into pages",)),
            10: (FA2, FA2, ("trtllm-gen cannot cut blocks of layout HND into pages",)),
        }
        assert (decode, prefill, reasons) == expected.get(capability[0], (FA2, FA2, ()))


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (11, 0), (13, 0)], ids=str)
@pytest.mark.parametrize("pinned", [AUTO, FA2, XQA])
def test_other_gpus_are_refused(capability, pinned):
    major, minor = capability
    assert refusal(capability, pinned=pinned) == (
        "FlashInfer attention needs a GPU of SM 8.0 or later that its kernels are built for, "
        f"not SM {major}.{minor}: set inference_attention_backend to flash."
    )


class TestPins:
    @pytest.mark.parametrize(
        "capability, pinned, decode, prefill",
        [
            ((9, 0), XQA, XQA, FA3),
            ((9, 0), FA3, XQA, FA3),
            ((9, 0), FMHA_V2, XQA, FMHA_V2),
            ((9, 0), FA2, FA2, FA2),
            ((10, 0), TRTLLM_GEN, TRTLLM_GEN, TRTLLM_GEN),
            ((10, 3), FA2, FA2, FA2),
        ],
        ids=str,
    )
    def test_a_pin_holds_where_the_kernel_serves(self, capability, pinned, decode, prefill):
        assert chosen(capability, pinned=pinned) == (decode, prefill, ())

    def test_a_pin_leaves_the_other_phase_its_fallback(self):
        assert chosen(pinned=FA3, ratio=32) == (
            FA2,
            FA3,
            ("xqa does not take 32 query heads per KV head",),
        )

    @pytest.mark.parametrize(
        "pinned, phase, capability",
        [
            (XQA, "decode", (8, 0)),
            (XQA, "decode", (10, 0)),
            (XQA, "decode", (12, 0)),
            (FA3, "prefill", (8, 9)),
            (FMHA_V2, "prefill", (12, 0)),
            (FA3, "prefill", (10, 3)),
            (FA3, "prefill", (12, 0)),
            (TRTLLM_GEN, "decode", (8, 6)),
            (TRTLLM_GEN, "decode", (9, 0)),
            (TRTLLM_GEN, "decode", (12, 0)),
        ],
        ids=str,
    )
    def test_gpu_rules_the_pin_out(self, pinned, phase, capability):
        major, minor = capability
        assert refusal(capability, pinned=pinned) == (
            f"FlashInfer has no kernel for {phase} here, as {pinned.value} is not built for "
            f"SM {major}.{minor}: set another flashinfer_kernel."
        )

    def test_layout_rules_pinned_fmha_v2_out(self):
        assert refusal(pinned=FMHA_V2, layout=HND) == (
            "FlashInfer has no kernel for prefill here, as fmha-v2 cannot cut blocks of layout HND "
            "into pages: set another flashinfer_kernel."
        )

    @pytest.mark.parametrize("capability, pinned", [((9, 0), XQA), ((10, 0), TRTLLM_GEN)])
    def test_layout_rules_the_pin_out(self, capability, pinned):
        assert refusal(capability, pinned=pinned, layout=HND) == (
            f"FlashInfer has no kernel for decode here, as {pinned.value} cannot cut blocks of "
            "layout HND into pages: set another flashinfer_kernel."
        )

    @pytest.mark.parametrize("capability, pinned", [((9, 0), XQA), ((10, 0), TRTLLM_GEN)])
    def test_block_size_rules_the_pin_out(self, capability, pinned):
        assert refusal(capability, pinned=pinned, block_size_tokens=8) == (
            f"FlashInfer has no kernel for decode here, as {pinned.value} has no page size that "
            "divides blocks of 8 tokens: set another flashinfer_kernel."
        )

    @pytest.mark.parametrize("ratio, tokens", [(12, 3), (6, 6), (3, 11)])
    def test_learnable_sinks_rule_xqa_out_with_drafts(self, ratio, tokens):
        options = dict(ratio=ratio, tokens_per_decode=tokens)
        reason = (
            f"xqa mixes up learnable sinks of {ratio} query heads per KV head with {tokens} tokens "
            "a decode"
        )
        assert chosen(**options, sinks_differ=True) == (FA2, FA3, (reason,))
        assert chosen(**options) == (XQA, FA3, ())
        assert refusal(**options, sinks_differ=True, pinned=XQA) == (
            f"FlashInfer has no kernel for decode here, as {reason}: set another flashinfer_kernel."
        )

    @pytest.mark.parametrize("ratio, tokens", [(12, 1), (12, 2), (6, 5), (8, 5), (16, 5)])
    def test_other_sinks_do_not(self, ratio, tokens):
        options = dict(ratio=ratio, tokens_per_decode=tokens, sinks_differ=True)
        assert chosen(**options) == (XQA, FA3, ())

    @pytest.mark.parametrize("ratio", [17, 32, 64])
    def test_ratio_rules_pinned_xqa_out(self, ratio):
        assert refusal(pinned=XQA, ratio=ratio) == (
            f"FlashInfer has no kernel for decode here, as xqa does not take {ratio} query heads "
            "per KV head: set another flashinfer_kernel."
        )

    def test_head_dim_rules_pinned_fa3_out(self):
        assert refusal(pinned=FA3, head_dim=80) == (
            "FlashInfer has no kernel for prefill here, as fa3 does not take head dim 80: "
            "set another flashinfer_kernel."
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
def test_other_dtypes_are_refused(dtype, capability):
    assert refusal(capability, dtype=dtype) == (
        f"FlashInfer attention computes in float16 or bfloat16, not {dtype}: set params_dtype, "
        "or set inference_attention_backend to flash."
    )


class TestHeadDims:
    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    def test_supported(self, head_dim):
        assert chosen(head_dim=head_dim) == (XQA, FA3, ())
        assert chosen((10, 0), head_dim=head_dim) == (TRTLLM_GEN, TRTLLM_GEN, ())
        assert chosen((8, 0), head_dim=head_dim) == (FA2, FA2, ())

    @pytest.mark.parametrize("head_dim", [80, 96, 192])
    def test_hopper_has_another_kernel(self, head_dim):
        assert chosen(head_dim=head_dim) == (
            XQA,
            FMHA_V2,
            (f"fa3 does not take head dim {head_dim}", f"fa2 does not take head dim {head_dim}"),
        )

    @pytest.mark.parametrize("head_dim", [80, 96, 192])
    def test_but_not_in_fp16(self, head_dim):
        assert refusal(head_dim=head_dim, dtype=torch.float16) == (
            f"FlashInfer has no kernel for prefill here, as fa3 does not take head dim {head_dim}, "
            f"and fa2 does not take head dim {head_dim}, and fmha-v2 does not take torch.float16: "
            "set inference_attention_backend to flash."
        )

    @pytest.mark.parametrize(
        "changes, reason",
        [
            (dict(ratio=17), "xqa does not take 17 query heads per KV head"),
            (dict(layout=HND), "xqa cannot cut blocks of layout HND into pages"),
            (dict(block_size_tokens=8), "xqa has no page size that divides blocks of 8 tokens"),
            (
                dict(ratio=12, tokens_per_decode=3, sinks_differ=True),
                "xqa mixes up learnable sinks of 12 query heads per KV head with 3 tokens a decode",
            ),
        ],
    )
    def test_and_only_where_xqa_decodes(self, changes, reason):
        """At the three dims fa2 would do it otherwise."""
        assert chosen(**changes)[0] is FA2
        assert refusal(head_dim=96, **changes) == (
            f"FlashInfer has no kernel for decode here, as {reason}, and fa2 does not take head "
            "dim 96: set inference_attention_backend to flash."
        )

    @pytest.mark.parametrize("head_dim", [32, 72, 112, 160, 512])
    def test_other(self, head_dim):
        assert refusal(head_dim=head_dim) == (
            f"FlashInfer has no kernel for decode here, as xqa does not take head dim {head_dim}, "
            f"and fa2 does not take head dim {head_dim}: "
            "set inference_attention_backend to flash."
        )

    @pytest.mark.parametrize("head_dim", [80, 192])
    @pytest.mark.parametrize("capability", [(8, 0), (12, 0)], ids=str)
    def test_only_fa2_to_be_had(self, head_dim, capability):
        assert refusal(capability, head_dim=head_dim) == (
            f"FlashInfer has no kernel for decode here, as fa2 does not take head dim {head_dim}: "
            "set inference_attention_backend to flash."
        )

    @pytest.mark.parametrize("head_dim", [80, 192])
    def test_blackwell(self, head_dim):
        assert refusal((10, 0), head_dim=head_dim) == (
            "FlashInfer has no kernel for decode here, as trtllm-gen does not take head dim "
            f"{head_dim}, and fa2 does not take head dim {head_dim}: "
            "set inference_attention_backend to flash."
        )


class TestRatios:
    @pytest.mark.parametrize("ratio", range(1, 65))
    def test_hopper(self, ratio):
        if ratio <= 16:
            assert chosen(ratio=ratio) == (XQA, FA3, ())
        else:
            reason = f"xqa does not take {ratio} query heads per KV head"
            assert chosen(ratio=ratio) == (FA2, FA3, (reason,))

    @pytest.mark.parametrize("ratio", [1, 16, 17, 64])
    def test_other_kernels_take_any(self, ratio):
        assert chosen((8, 0), ratio=ratio) == (FA2, FA2, ())
        assert chosen((10, 0), ratio=ratio) == (TRTLLM_GEN, TRTLLM_GEN, ())


class TestBlockSizes:
    @pytest.mark.parametrize(
        "block_size, xqa_page, trtllm_page",
        [(16, 16, 16), (48, 16, 16), (64, 64, 64), (96, 32, 32), (128, 64, 64), (256, 64, 64)],
    )
    def test_blocks_are_cut_into_pages(self, block_size, xqa_page, trtllm_page):
        hopper = problem(block_size_tokens=block_size)
        assert hopper.page_size(XQA) == xqa_page
        assert hopper.page_size(FA3) == hopper.page_size(FA2) == block_size
        assert hopper.page_size(TRTLLM_GEN) == trtllm_page
        assert chosen(block_size_tokens=block_size) == (XQA, FA3, ())
        assert chosen((10, 0), block_size_tokens=block_size) == (TRTLLM_GEN, TRTLLM_GEN, ())

    @pytest.mark.parametrize("block_size", [1, 8, 24])
    def test_blocks_that_no_page_divides(self, block_size):
        assert problem(block_size_tokens=block_size).page_size(XQA) is None
        assert chosen(block_size_tokens=block_size) == (
            FA2,
            FA3,
            (f"xqa has no page size that divides blocks of {block_size} tokens",),
        )
        assert chosen((10, 0), block_size_tokens=block_size) == (
            FA2,
            FA2,
            (f"trtllm-gen has no page size that divides blocks of {block_size} tokens",),
        )


class TestDescription:
    def test_preferred_kernels(self):
        assert str(select(problem())) == "decode xqa, prefill fa3"

    def test_reasons(self):
        assert str(select(problem(ratio=32))) == (
            "decode fa2, prefill fa3 (xqa does not take 32 query heads per KV head)"
        )

    def test_a_reason_of_both_phases_is_told_once(self):
        assert str(select(problem((10, 0), layout=HND))) == (
            "decode fa2, prefill fa2 (trtllm-gen cannot cut blocks of layout HND into pages)"
        )


class TestVersion:
    """Only metadata is looked at: importing FlashInfer is left to the kernels."""

    @pytest.fixture
    def installed(self, monkeypatch):
        """Sets the version that is installed; None: none."""

        def install(version):
            def found(name):
                if name != "flashinfer-python" or version is None:
                    raise metadata.PackageNotFoundError(name)
                return version

            monkeypatch.setattr(selection.metadata, "version", found)

        return install

    @pytest.mark.parametrize("version", ["0.6.18", "0.6.18.post1", "0.6.19", "0.10.0", "1.0"])
    def test_new_enough(self, installed, version):
        installed(version)
        assert require_flashinfer() == version

    def test_missing(self, installed):
        installed(None)
        message = "FlashInfer attention needs FlashInfer: pip install 'flashinfer-python>=0.6.18'"
        with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
            require_flashinfer()

    @pytest.mark.parametrize("version", ["0.6.17", "0.6.9", "0.6.18rc1", "0.5.3"])
    def test_too_old(self, installed, version):
        installed(version)
        message = (
            f"FlashInfer {version} is too old for attention: "
            "pip install 'flashinfer-python>=0.6.18'"
        )
        with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
            require_flashinfer()
