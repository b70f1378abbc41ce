"""Models of Hugging Face transformers give with `attn_implementation="mha_ext"` what they give with "eager".

Small models of random weights; nothing is downloaded.
"""

import copy
import itertools
import os
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from accuracy import FACTOR, FLOOR
from torch import Tensor, nn

if os.environ.get("CI") != "true":
    pytest.importorskip("transformers", minversion="5.4")

import transformers
from transformers import masking_utils
from transformers.cache_utils import DynamicCache, StaticCache

import mha_ext
from mha_ext.integrations import transformers as integration

VOCABULARY = 61
BATCH, LENGTH, PADDED = 2, 12, 5

# fmt: off
LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 64,
    }),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", {  # chunks
        **LLAMA, "attention_chunk_size": 4, "num_local_experts": 1, "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48, "layer_types": ["chunked_attention", "full_attention"],
    }),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": 4}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {
        **LLAMA, "query_pre_attn_scalar": 16, "sliding_window": 4, "attn_logit_softcapping": 2.0,
    }),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {  # each token takes both experts: rounding chooses none
        **LLAMA, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 2,
    }),
    "vit": ("ViTForImageClassification", "ViTConfig", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "image_size": 12, "patch_size": 4, "num_labels": 7,
    }),
    "t5": ("T5ForConditionalGeneration", "T5Config", {  # a learned bias
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "decoder_start_token_id": 0,
    }),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {
        "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "max_source_positions": 10, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 3, "begin_suppress_tokens": None,
    }),
}
# fmt: on
GENERATING = [name for name in MODELS if name not in ("bert", "vit")]
PADDINGS = ("none", "left", "right")
CASES = [(name, padding) for name in MODELS for padding in (PADDINGS[:1] if name == "vit" else PADDINGS)]


def build(name: str) -> nn.Module:
    """A model in evaluation, of weights large enough for attention to be far from uniform."""
    model_class, config_class, settings = MODELS[name]
    config = getattr(transformers, config_class)(**settings)
    model: nn.Module = getattr(transformers, model_class)._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.eval()


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(4, VOCABULARY, (BATCH, length))


def padding_mask(padding: str, length: int = LENGTH) -> Tensor | None:
    """1 where a token is: the second sequence is shorter."""
    if padding == "none":
        return None
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[1, slice(PADDED) if padding == "left" else slice(length - PADDED, length)] = 0
    return mask


def inputs_of(name: str, padding: str) -> tuple[dict[str, Any], Tensor | None]:
    """Arguments of a model, and which rows of its logits are those of tokens."""
    mask = padding_mask(padding)
    if name == "vit":
        return {"pixel_values": torch.randn(BATCH, 3, 12, 12)}, None
    if name == "whisper":
        features = torch.randn(BATCH, 8, 20)
        return {"input_features": features, "decoder_input_ids": tokens(), "decoder_attention_mask": mask}, mask
    if name == "t5":
        decoder_mask = padding_mask(padding, 9)
        decoder = {"decoder_input_ids": tokens(9), "decoder_attention_mask": decoder_mask}
        return {"input_ids": tokens(), "attention_mask": mask, **decoder}, decoder_mask
    return {"input_ids": tokens(), "attention_mask": mask}, mask


class Results(NamedTuple):
    logits: Tensor  # of tokens alone, (number of them, vocabulary)
    grads: dict[str, Tensor]
    attentions: dict[str, tuple[Tensor, ...]]


def run(model: Any, implementation: str, name: str, padding: str, *, attentions: bool = False) -> Results:
    model.set_attn_implementation(implementation)
    model.zero_grad()
    torch.manual_seed(1)
    inputs, rows = inputs_of(name, padding)
    inputs = {key: x.to(model.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
              for key, x in inputs.items()}  # fmt: skip
    output = model(**inputs, output_attentions=attentions, use_cache=False)
    logits = output.logits if rows is None else output.logits[rows.bool()]
    (logits * torch.randn(logits.shape).to(logits)).sum().backward()
    grads = {key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None}
    return Results(logits.detach(), grads, {key: x for key, x in output.items() if key.endswith("attentions")})


def largest_differences(actual: Results, expected: Results) -> tuple[float, float]:
    """Of logits, and of the gradients of all parameters, each in parts of the largest value of its tensor.

    Of a thousandth of the model's largest gradient where that is more: some gradients are 0 but for rounding, as a
    key's bias has none.
    """
    assert actual.grads.keys() == expected.grads.keys()
    largest = max(grad.abs().max().item() for grad in expected.grads.values())

    def difference(ours: Tensor, theirs: Tensor, floor: float) -> float:
        return (ours.float() - theirs.float()).abs().max().item() / max(theirs.abs().max().item(), floor)

    grads = (difference(actual.grads[key], grad, 1e-3 * largest) for key, grad in expected.grads.items())
    return difference(actual.logits, expected.logits, 0), max(grads)


def relative_norms(actual: Results, expected: Results) -> tuple[float, float]:
    """Of the difference of logits, and of all gradients: unlike the largest of many, not a matter of luck."""

    def norm(ours: list[Tensor], theirs: list[Tensor]) -> float:
        differences = [x.float() - y.float() for x, y in zip(ours, theirs, strict=True)]
        return float(torch.cat([x.flatten() for x in differences]).norm() / torch.cat([y.flatten() for y in theirs]).norm())

    return norm([actual.logits], [expected.logits]), norm([*actual.grads.values()], [*expected.grads.values()])


# --- models against eager -------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_logits_and_gradients_are_those_of_eager(name: str, padding: str) -> None:
    model = build(name)
    logits, grads = largest_differences(run(model, "mha_ext", name, padding), run(model, "eager", name, padding))
    assert logits <= 5e-6
    assert grads <= 2e-5


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_as_close_to_float32_as_eager(name: str) -> None:
    padding = "none" if name == "vit" else "left"
    model = build(name).bfloat16()
    expected = run(copy.deepcopy(model).float(), "eager", name, padding)
    ours = relative_norms(run(model, "mha_ext", name, padding), expected)
    theirs = relative_norms(run(model, "eager", name, padding), expected)
    for actual, plain in zip(ours, theirs, strict=True):
        assert actual <= FACTOR * plain + FLOOR[torch.bfloat16]
