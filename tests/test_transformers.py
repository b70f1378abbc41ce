"""Models of Hugging Face transformers give with `attn_implementation="mha_ext"` what they give with "eager".

Small models of random weights; nothing is downloaded.
"""

import copy
import importlib
import inspect
import itertools
import os
import subprocess
import sys
import types
from typing import Any, NamedTuple

import pytest
import torch
from accuracy import FACTOR, FLOOR
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

if os.environ.get("CI") != "true":
    pytest.importorskip("transformers", minversion="5.4")

import transformers
from transformers import masking_utils
from transformers.cache_utils import DynamicCache, StaticCache

import mha_ext
from mha_ext.integrations import transformers as integration

# transformers 5.4 to 5.23 say past_key_values, later ones cache
PAST = "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"
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

    Of a hundredth of the model's largest gradient where that is more: some gradients are 0 but for rounding, as a
    key's bias has none.
    """
    assert actual.grads.keys() == expected.grads.keys()
    largest = max(grad.abs().max().item() for grad in expected.grads.values())

    def difference(ours: Tensor, theirs: Tensor, floor: float) -> float:
        return (ours.float() - theirs.float()).abs().max().item() / max(theirs.abs().max().item(), floor)

    grads = (difference(actual.grads[key], grad, 1e-2 * largest) for key, grad in expected.grads.items())
    return difference(actual.logits, expected.logits, 0), max(grads)


def relative_norms(actual: Results, expected: Results) -> tuple[float, float]:
    """Of the difference of logits, and of all gradients: unlike the largest of many, not a matter of luck."""

    def norm(ours: list[Tensor], theirs: list[Tensor]) -> float:
        differences = [x.float() - y.float() for x, y in zip(ours, theirs, strict=True)]
        return float(
            torch.cat([x.flatten() for x in differences]).norm() / torch.cat([y.flatten() for y in theirs]).norm()
        )

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


@pytest.mark.parametrize("name", MODELS)
def test_attentions_are_those_of_eager(name: str) -> None:
    model = build(name)
    padding = "none" if name == "vit" else "right"
    ours, theirs = (
        run(model, implementation, name, padding, attentions=True) for implementation in ("mha_ext", "eager")
    )
    assert ours.attentions.keys() == theirs.attentions.keys() != set()
    if name in ("t5", "whisper"):
        assert len(ours.attentions) == 3  # cross-attention as well
    for key, weights in theirs.attentions.items():
        assert len(weights) == (0 if (name, key) == ("gpt2", "cross_attentions") else 2)
        for actual, expected in zip(ours.attentions[key], weights, strict=True):
            rows = padding_mask(padding, expected.shape[2])
            kept = slice(None) if rows is None else rows.bool()  # one that sees no key is 0 here, uniform in eager
            torch.testing.assert_close(actual.transpose(1, 2)[kept], expected.transpose(1, 2)[kept], rtol=0, atol=5e-6)


def test_attentions_that_the_configuration_asks_for() -> None:
    model: Any = build("llama")
    model.config.output_attentions = True
    model.set_attn_implementation("mha_ext")
    attentions = model(tokens()).attentions
    assert [weights.shape for weights in attentions] == [(BATCH, 4, LENGTH, LENGTH)] * 2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATING)
def test_generates_the_tokens_of_eager(name: str, cache: str) -> None:
    model: Any = build(name)
    inputs, _ = inputs_of(name, "left")
    inputs = {key: x for key, x in inputs.items() if not key.startswith("decoder")}
    # Every token only once: small random models repeat themselves, whatever attention says.
    settings = {"max_new_tokens": 10, "no_repeat_ngram_size": 1, "do_sample": False, "cache_implementation": cache}
    generated = []
    for implementation in ("eager", "mha_ext"):
        model.set_attn_implementation(implementation)
        generated.append(model.generate(**inputs, **settings))
    assert generated[0].shape[1] >= 10
    torch.testing.assert_close(generated[1], generated[0], rtol=0, atol=0)


def test_beam_search_reorders_the_cache() -> None:
    model: Any = build("llama")
    inputs, _ = inputs_of("llama", "left")
    settings = {"max_new_tokens": 10, "num_beams": 4, "no_repeat_ngram_size": 1, "do_sample": False}
    generated = []
    for implementation in ("eager", "mha_ext"):
        model.set_attn_implementation(implementation)
        generated.append(model.generate(**inputs, **settings))
    torch.testing.assert_close(generated[1], generated[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_continues_from_a_cache_by_several_tokens(name: str) -> None:
    model: Any = build(name)
    ids = tokens()
    for padding in PADDINGS[:2]:
        mask = padding_mask(padding)
        logits = []
        for implementation in ("eager", "mha_ext"):
            model.set_attn_implementation(implementation)
            cache = DynamicCache(config=model.config)
            parts = [
                model(ids[:, a:b], attention_mask=None if mask is None else mask[:, :b], **{PAST: cache}).logits
                for a, b in ((0, 7), (7, 10), (10, 12))
            ]
            logits.append(torch.cat(parts, 1) if mask is None else torch.cat(parts, 1)[mask.bool()])
        torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=5e-6 * logits[0].abs().max().item())


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_packed_sequences_do_not_see_each_other(name: str) -> None:
    model: Any = build(name)
    model.set_attn_implementation("mha_ext")
    ids = tokens()[:1]
    lengths = (5, 1, 6)
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model(ids, position_ids=position_ids, use_cache=False).logits
    alone = torch.cat([model(part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=5e-6 * alone.abs().max().item())
    # Without position_ids that say so, their ends: the positions of rotary embeddings are relative.
    ends = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    varlen = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 6, "max_length_k": 6}
    if name == "llama":
        torch.testing.assert_close(
            model(ids, use_cache=False, **varlen).logits, alone, rtol=0, atol=2e-5 * alone.abs().max().item()
        )


def test_gradients_with_checkpointed_activations() -> None:
    model: Any = build("llama")
    expected = run(model, "mha_ext", "llama", "left")
    model.train()  # without dropout
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    assert max(largest_differences(run(model, "mha_ext", "llama", "left"), expected)) <= 1e-6


@pytest.mark.parametrize("padding", ["none", "left"])
def test_compiles_to_one_graph(padding: str) -> None:
    model: Any = build("llama")
    model.set_attn_implementation("mha_ext")
    inputs, _ = inputs_of("llama", padding)
    expected = model(**inputs, use_cache=False).logits
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs, use_cache=False).logits, expected)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_one_graph_serves_every_length(name: str) -> None:
    model: Any = build(name)
    model.set_attn_implementation("mha_ext")
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    for length in (9, 12, 17):
        inputs = {"input_ids": tokens(length), "attention_mask": padding_mask("left", length), "use_cache": False}
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)
    assert counter.frame_count == 1


def test_one_graph_serves_every_step_with_a_static_cache() -> None:
    model: Any = build("llama")
    model.set_attn_implementation("mha_ext")
    torch.compiler.reset()
    counter = CompileCounter()
    ids, slots, logits = tokens(9), 16, []
    for step in (model, torch.compile(model, fullgraph=True, backend=counter)):
        cache = StaticCache(config=model.config, max_cache_len=slots)
        with torch.no_grad():
            model(ids[:, :6], **{PAST: cache})
            for seen in range(6, 9):
                mask = (torch.arange(slots) <= seen).long().expand(BATCH, slots)
                position = torch.full((BATCH, 1), seen)
                now = {"input_ids": ids[:, seen : seen + 1], "attention_mask": mask, "position_ids": position}
                logits.append(step(**now, **{PAST: cache}).logits)
    torch.testing.assert_close(logits[3:], logits[:3])
    assert counter.frame_count == 1
    torch.testing.assert_close(torch.cat(logits[:3], 1), model(ids, use_cache=False).logits[:, 6:])


def test_is_chosen_when_a_model_is_loaded(tmp_path: Any) -> None:
    build("llama").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="mha_ext")
    assert model.config._attn_implementation == "mha_ext"
    inputs, _ = inputs_of("llama", "none")
    logits = model(**inputs).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits, model(**inputs).logits)


def test_a_sequence_of_padding_alone_is_finite() -> None:
    model: Any = build("llama")
    model.set_attn_implementation("mha_ext")
    inputs, _ = inputs_of("llama", "none")
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1] = 0
    output = model(inputs["input_ids"], attention_mask=mask, output_attentions=True, use_cache=False)
    output.logits.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert output.logits.isfinite().all()
    assert all((weights[1] == 0).all() for weights in output.attentions)
    alone = model(inputs["input_ids"][:1], use_cache=False).logits
    torch.testing.assert_close(output.logits[:1], alone)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What reaches `mha_ext.attention`, by the names of its arguments."""
    recorded: list[dict[str, Any]] = []
    signature = inspect.signature(mha_ext.attention)

    def attention(*args: Any, **kwargs: Any) -> Any:
        recorded.append(dict(signature.bind(*args, **kwargs).arguments))
        return mha_ext.attention(*args, **kwargs)

    monkeypatch.setattr(integration, "attention", attention)
    return recorded


def test_keys_are_not_repeated_and_causality_is_a_rule(calls: list[dict[str, Any]]) -> None:
    model: Any = build("llama")
    model.set_attn_implementation("mha_ext")
    model.generate(tokens(), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert len(calls) == 3 * 2
    for call in calls:
        assert call["query"].shape[1] == 4
        assert call["key"].shape[1] == call["value"].shape[1] == 2
        assert call["attn_mask"] is None
        assert call["is_causal"]


def test_padding_of_an_encoder_is_one_row_a_sequence(calls: list[dict[str, Any]]) -> None:
    model: Any = build("bert")
    run(model, "mha_ext", "bert", "right")
    mask = calls[0]["attn_mask"]
    assert mask.shape == (BATCH, 1, LENGTH, LENGTH)
    assert mask.untyped_storage().nbytes() == BATCH * LENGTH
    assert not calls[0]["is_causal"]


# --- masks ----------------------------------------------------------------------------------------


def config_of(implementation: str, **settings: Any) -> Any:
    config = transformers.MistralConfig(**LLAMA, sliding_window=5, attn_implementation=implementation)
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def cache_of(kind: str, config: Any, seen: int) -> Any:
    """A cache that has seen as many tokens; "sliding" ones keep those of a window."""
    if kind == "none":
        return None
    if "sliding" not in kind:
        config = copy.deepcopy(config)
        config.sliding_window = None
        config.layer_types = ["full_attention"] * 2
    cache = DynamicCache(config=config) if "dynamic" in kind else StaticCache(config=config, max_cache_len=20)
    for layer in range(2 if seen else 0):
        cache.update(torch.zeros(BATCH, 2, seen, 16), torch.zeros(BATCH, 2, seen, 16), layer)
    return cache


def seen_keys(mask: Tensor | None, causal: bool, shape: tuple[int, int]) -> Tensor:
    """What `attention_forward` and eager let a query see, (B, 1, Lq, Lk)."""
    queries, keys = shape
    if mask is None:
        rule = torch.ones(shape, dtype=torch.bool)
        return (rule.tril(keys - queries) if causal else rule).expand(BATCH, 1, *shape)
    assert mask.shape == (BATCH, 1, *shape)
    return mask if mask.dtype == torch.bool else mask == 0


CREATORS = {
    "create_causal_mask": {},
    "create_sliding_window_causal_mask": {},
    "create_chunked_causal_mask": {"attention_chunk_size": 6},
    "create_bidirectional_mask": {},
    "create_bidirectional_sliding_window_mask": {},
}


@pytest.mark.parametrize("creator", CREATORS)
@pytest.mark.parametrize("kind", ["none", "dynamic", "dynamic sliding", "static", "static sliding"])
def test_masks_let_see_what_those_of_eager_do(kind: str, creator: str) -> None:
    rules = 0
    for seen, queries, padding in itertools.product((0, 3, 9), (1, 4, 7), (None, "none", "left", "right")):
        if kind == "none" and seen:
            continue
        attention_mask = None
        if padding is not None:
            attention_mask = torch.ones(BATCH, seen + queries, dtype=torch.long)
            if padding != "none" and queries > 1:
                attention_mask[1, slice(2) if padding == "left" else slice(-2, None)] = 0
        visible = []
        for implementation in ("eager", "mha_ext"):
            config = config_of(implementation, **CREATORS[creator])
            cache = cache_of(kind, config, seen)
            sizes = (queries, queries) if cache is None else (queries, cache.get_mask_sizes(queries, 0)[0])
            mask = getattr(masking_utils, creator)(
                config, torch.zeros(BATCH, queries, 32), attention_mask, **{PAST: cache}
            )
            rules += implementation == "mha_ext" and mask is None
            visible.append(seen_keys(mask, "bidirectional" not in creator, sizes))
        torch.testing.assert_close(visible[1], visible[0], rtol=0, atol=0)
    if kind in ("none", "dynamic"):
        assert rules > 0
    elif kind == "static" and "bidirectional" not in creator:
        assert rules == 0  # most of its slots are empty


def test_masks_of_other_rules_are_those_of_eager() -> None:
    images = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, -1]] * BATCH)
    custom = torch.rand(BATCH, 1, 9, 9) > 0.5

    def even(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query + key) % 2 == 0

    def early(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key < 3

    arguments: list[dict[str, Any]] = [
        {"attention_mask": None, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]])},
        {"attention_mask": None, "block_sequence_ids": images},
        {"attention_mask": None, "or_mask_function": early},
        {"attention_mask": None, "and_mask_function": even},
        {"attention_mask": torch.tensor([[1] * 9, [0] * 3 + [1] * 6]), "or_mask_function": early},
        {"attention_mask": None, "allow_is_causal_skip": False},
        {"attention_mask": custom},
    ]
    for creator in ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"):
        for given in arguments:
            if not given.keys() <= inspect.signature(getattr(masking_utils, creator)).parameters.keys():
                continue  # transformers 5.4 does not know blocks
            masks = [
                getattr(masking_utils, creator)(
                    config_of(implementation, **CREATORS[creator]), torch.zeros(BATCH, 9, 32), **{PAST: None}, **given
                )
                for implementation in ("eager", "mha_ext")
            ]
            assert masks[1].dtype == torch.bool
            torch.testing.assert_close(masks[1], masks[0] if masks[0] is custom else masks[0] == 0, rtol=0, atol=0)


def test_keys_that_the_padding_mask_does_not_reach_are_hidden() -> None:
    sizes = {"batch_size": BATCH, "q_length": 2, "kv_length": 5, "q_offset": 3}
    short = torch.ones(BATCH, 4, dtype=torch.bool)
    mask = integration.create_mask(**sizes, attention_mask=short)
    expected = masking_utils.eager_mask(**sizes, attention_mask=short) == 0
    torch.testing.assert_close(mask, expected, rtol=0, atol=0)


def test_a_decoder_without_causality_sees_everything() -> None:
    model: Any = build("llama")
    ids = tokens()
    logits = []
    for implementation in ("eager", "mha_ext"):
        model.set_attn_implementation(implementation)
        logits.append(model(ids, is_causal=False, use_cache=False).logits)
    torch.testing.assert_close(logits[1], logits[0])
    causal = model(ids, use_cache=False).logits
    assert (causal - logits[1]).abs().max() > 0.1


# --- the function that models call ------------------------------------------------------------------


class Layer(nn.Module):
    """All that a layer of attention is asked for."""

    is_causal = False


def random_inputs(heads_kv: int = 2, batch: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(batch, 4, 5, 8), torch.randn(BATCH, heads_kv, 7, 8), torch.randn(BATCH, heads_kv, 7, 8)


def plain(query: Tensor, key: Tensor, value: Tensor, scores_mask: Tensor) -> Tensor:
    scores = query @ key.repeat_interleave(2, 1).mT * 8**-0.5 + scores_mask
    return (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)


def test_a_bias_is_added_under_any_mask() -> None:
    query, key, value = random_inputs()
    bias = torch.randn(1, 4, 5, 7, requires_grad=True)
    visible = torch.rand(BATCH, 1, 5, 7) > 0.3
    visible[..., 0] = True
    hidden = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    causal = torch.zeros(5, 7).masked_fill(torch.ones(5, 7).triu(3) == 1, -torch.inf)
    layer = Layer()
    for mask, is_causal, scores_mask in (
        (visible, None, hidden),
        (hidden, None, hidden),
        (None, True, causal),
        (None, None, 0 * causal.clamp(-1)),
    ):
        output, weights = integration.attention_forward(
            layer, query, key, value, mask, is_causal=is_causal, position_bias=bias
        )
        expected = plain(query, key, value, scores_mask + bias)
        assert weights is None
        torch.testing.assert_close(output, expected)
        weight = torch.randn(expected.shape)
        torch.testing.assert_close(
            torch.autograd.grad((output * weight).sum(), bias)[0],
            torch.autograd.grad((expected * weight).sum(), bias)[0],
        )


def test_queries_that_come_once_are_those_of_every_sequence() -> None:
    query, key, value = random_inputs(batch=1)
    output, _ = integration.attention_forward(Layer(), query, key, value, None)
    torch.testing.assert_close(output, plain(query, key, value, torch.zeros(5, 7)))


def test_drops_weights_in_training_alone() -> None:
    query, key, value = random_inputs()
    layer = Layer()
    expected, _ = integration.attention_forward(layer.eval(), query, key, value, None)
    output, weights = integration.attention_forward(
        layer.train(), query, key, value, None, dropout=1.0, output_attentions=True
    )
    assert (output == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(BATCH, 4, 5))  # before dropout
    output, _ = integration.attention_forward(layer.eval(), query, key, value, None, dropout=1.0)
    torch.testing.assert_close(output, expected)


def test_a_mask_says_everything() -> None:
    query, key, value = random_inputs()
    visible = torch.ones(1, 1, 5, 7, dtype=torch.bool)
    output, _ = integration.attention_forward(Layer(), query, key, value, visible, is_causal=True, sliding_window=2)
    torch.testing.assert_close(output, plain(query, key, value, torch.zeros(5, 7)))


@pytest.mark.parametrize("name", ["block_indices", "indices", "sinks"])
def test_what_is_not_taken_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f'^{name}: expected None, got .*; attn_implementation="eager" takes'):
        integration.attention_forward(Layer(), *random_inputs(), None, **{name: torch.zeros(1)})


def test_a_layer_without_mask_says_whether_it_is_causal() -> None:
    query, key, value = random_inputs()
    layer = nn.Module()
    with pytest.raises(
        ValueError, match=r'^is_causal: expected .*, got neither from Module; attn_implementation="eager"'
    ):
        integration.attention_forward(layer, query, key, value, None)
    one = query[:, :, :1]
    output, _ = integration.attention_forward(layer, one, key, value, None)
    torch.testing.assert_close(output, plain(one, key, value, torch.zeros(1, 7)))
    output, _ = integration.attention_forward(layer, query, key, value, None, is_causal=False)
    torch.testing.assert_close(output, plain(query, key, value, torch.zeros(5, 7)))


def test_packed_sequences_with_more_than_attention_varlen_takes_are_refused() -> None:
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^cu_seq_lens_q: expected a batch of one .*, got batch 2, .*; position_ids"):
        integration.attention_forward(Layer(), *random_inputs(), None, cu_seq_lens_q=ends)


# --- the import -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, "4.57.1", "5.3.0"])
def test_says_which_transformers_it_needs(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = None
    if version is not None:
        found = types.ModuleType("transformers")
        found.__version__ = version  # type: ignore[attr-defined]
        found.AttentionInterface = found.AttentionMaskInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", found)
    monkeypatch.delitem(sys.modules, "mha_ext.integrations.transformers")
    with pytest.raises(ImportError, match=r"expected transformers 5\.4 or newer, found .*; pip install") as raised:
        importlib.import_module("mha_ext.integrations.transformers")
    assert version is None or f"found transformers {version};" in str(raised.value)


def test_the_package_alone_does_not_import_transformers() -> None:
    code = "import sys, mha_ext; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
