"""The shapes, figures and formulas that this package was specified with."""

import math

import pytest
import torch
from torch import Tensor, nn

import mha_ext
from mha_ext import MultiHeadAttention


def by_the_formula(mha: MultiHeadAttention, x: Tensor) -> Tensor:
    """MHA(X) = Concat(head_1 .. head_h) W^O, head_i = softmax(Q_i K_i^T / sqrt(d_k)) V_i, in fp64, head by head."""
    x = x.double()
    weight, bias = mha.qkv_proj.weight.double(), mha.qkv_proj.bias.double()
    query, key, value = (x @ w.T + b for w, b in zip(weight.chunk(3), bias.chunk(3), strict=True))
    heads = []
    for i in range(mha.num_heads):
        columns = slice(i * mha.head_dim, (i + 1) * mha.head_dim)
        q, k, v = query[..., columns], key[..., columns], value[..., columns]
        scores = torch.einsum("...id,...jd->...ij", q, k) / math.sqrt(mha.head_dim)
        exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
        heads.append((exponentials / exponentials.sum(-1, keepdim=True)) @ v)
    return torch.cat(heads, -1) @ mha.out_proj.weight.double().T + mha.out_proj.bias.double()


@pytest.fixture(scope="module")
def bert_base() -> MultiHeadAttention:
    mha = MultiHeadAttention(768, 12)
    for parameter in mha.parameters():
        nn.init.normal_(parameter, std=0.05)
    return mha.eval()


# --- shapes ------------------------------------------------------------------------------------------------------


def test_unbatched_sequence_of_128_tokens(bert_base: MultiHeadAttention) -> None:
    x = torch.randn(128, 768)
    output, weights = bert_base(x, need_weights=True, average_attn_weights=False)
    assert output.shape == (128, 768)
    assert weights.shape == (12, 128, 128)  # (128, 128) per head
    torch.testing.assert_close(output.double(), by_the_formula(bert_base, x), rtol=1e-5, atol=1e-5)


def test_batch_of_two(bert_base: MultiHeadAttention) -> None:
    x = torch.randn(2, 128, 768)
    output = bert_base(x)
    assert output.shape == (2, 128, 768)
    torch.testing.assert_close(output.double(), by_the_formula(bert_base, x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output[1], bert_base(x[1]), rtol=1e-5, atol=1e-5)


def test_heads_of_64(bert_base: MultiHeadAttention) -> None:
    assert bert_base.head_dim == 64
    packed = bert_base.qkv_proj(torch.randn(1, 128, 768))
    assert packed.shape == (1, 128, 2304)
    query, key, value = mha_ext.qkv_split(packed, None, 12)
    assert query.shape == key.shape == value.shape == (1, 12, 128, 64)
    assert mha_ext.attention_scores(query, key).shape == (1, 12, 128, 128)
    assert mha_ext.attention(query, key, value).shape == (1, 12, 128, 64)


@pytest.mark.parametrize(
    ("name", "embed_dim", "num_heads", "head_dim"),
    [
        ("BERT base", 768, 12, 64),
        ("BERT large", 1024, 16, 64),
        ("GPT-2", 768, 12, 64),
        ("GPT-2 medium", 1024, 16, 64),
        ("LLaMA-7B", 4096, 32, 128),
        ("64 heads of 12", 768, 64, 12),
    ],
)
def test_models(name: str, embed_dim: int, num_heads: int, head_dim: int) -> None:
    mha = MultiHeadAttention(embed_dim, num_heads, device="meta")
    assert mha.head_dim == head_dim
    assert mha.qkv_proj.weight.shape == (3 * embed_dim, embed_dim)
    assert mha.out_proj.weight.shape == (embed_dim, embed_dim)
    x = torch.empty(1, 128, embed_dim, device="meta")
    output, weights = mha(x, is_causal=name.startswith("GPT"), need_weights=True, average_attn_weights=False)
    assert output.shape == x.shape
    assert weights.shape == (1, num_heads, 128, 128)


@pytest.mark.parametrize(
    ("name", "embed_dim", "num_heads", "num_kv_heads"),
    [("LLaMA-2-70B", 8192, 64, 8), ("Llama-3-8B", 4096, 32, 8)],
)
def test_models_with_grouped_queries(name: str, embed_dim: int, num_heads: int, num_kv_heads: int) -> None:
    mha = MultiHeadAttention(embed_dim, num_heads, num_kv_heads=num_kv_heads, bias=False, device="meta")
    assert mha.head_dim == 128
    assert mha.projection_sizes == (embed_dim, 1024, 1024)
    full = MultiHeadAttention(embed_dim, num_heads, bias=False, device="meta")
    assert sum(full.projection_sizes[1:]) == num_heads // num_kv_heads * sum(mha.projection_sizes[1:])
    x = torch.empty(1, 128, embed_dim, device="meta")
    assert mha(x, is_causal=True).shape == x.shape


# --- figures -----------------------------------------------------------------------------------------------------


def count_parameters(mha: MultiHeadAttention) -> int:
    return sum(parameter.numel() for parameter in mha.parameters())


def test_parameters() -> None:
    without_bias = count_parameters(MultiHeadAttention(768, 12, bias=False, device="meta"))
    assert without_bias == 768 * 3 * 768 + 768**2 == 4 * 768**2 == 2_359_296  # 2.36 M
    assert count_parameters(MultiHeadAttention(768, 12, device="meta")) == 2_359_296 + 4 * 768
    # One head or twelve: the number of parameters is the same.
    assert count_parameters(MultiHeadAttention(768, 1, bias=False, device="meta")) == without_bias


@pytest.mark.parametrize(
    ("batch", "length", "dtype", "megabytes"),
    [(1, 512, torch.float32, 12.6), (2, 512, torch.float16, 12.6), (2, 4096, torch.float16, 805)],
)
def test_bytes_of_the_weights(batch: int, length: int, dtype: torch.dtype, megabytes: float) -> None:
    query = torch.empty(batch, 12, length, 64, device="meta", dtype=dtype)
    weights = mha_ext.attention(query, query, query, return_weights=True).weights
    assert weights.shape == (batch, 12, length, length)
    assert weights.dtype == dtype
    assert weights.nbytes / 1e6 == pytest.approx(megabytes, rel=2e-3)


def test_number_of_scores() -> None:
    query = torch.empty(2, 12, 512, 64, device="meta", dtype=torch.float16)
    assert mha_ext.attention_scores(query, query).numel() == 6_291_456  # 6.29 M


# --- what goes wrong elsewhere -----------------------------------------------------------------------------------


def test_scores_are_scaled() -> None:
    query, key, value = torch.randn(3, 1, 12, 128, 64, dtype=torch.float64).unbind()
    raw = mha_ext.attention_scores(query, key, scale=1.0)
    assert raw.std().item() == pytest.approx(8, rel=0.05)  # sqrt(d_k)
    assert mha_ext.attention_scores(query, key).std().item() == pytest.approx(1, rel=0.05)
    scaled = mha_ext.attention(query, key, value, return_stats=True)
    saturated = mha_ext.attention(query, key, value, scale=1.0, return_stats=True)
    # Without the factor the softmax picks one key; with it, it spreads over many.
    assert math.exp(saturated.entropy.mean()) < 3
    assert math.exp(scaled.entropy.mean()) > 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_huge_scores_stay_finite(dtype: torch.dtype) -> None:
    query, key, value = (200 * torch.randn(3, 1, 2, 16, 64)).to(dtype).unbind()
    query.requires_grad_()
    output = mha_ext.attention(query, key, value)
    assert output.isfinite().all()
    assert torch.autograd.grad(output.float().sum(), query)[0].isfinite().all()


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_triangular_mask_is_causal(bert_base: MultiHeadAttention, axes: int) -> None:
    x = torch.randn(2, 32, 768)
    triangle = torch.ones(32, 32, dtype=torch.bool).tril()
    assert triangle[0].tolist() == [True] + 31 * [False]  # True takes part
    mask = triangle[(None,) * (axes - 2)]
    result = bert_base(x, attn_mask=mask, need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(result, bert_base(x, is_causal=True, need_weights=True, average_attn_weights=False))
    assert not result[1].triu(1).any()
    later = x.clone()
    later[:, 20:] += 1  # a token never sees those after it
    torch.testing.assert_close(bert_base(later, attn_mask=mask)[:, :20], result[0][:, :20])


def test_mask_of_the_full_shape(bert_base: MultiHeadAttention) -> None:
    x = torch.randn(2, 16, 768)
    mask = torch.rand(2, 12, 16, 16) > 0.5
    mask[1, 3, 5] = False  # this query sees nothing in this head
    output, weights = bert_base(x, attn_mask=mask, need_weights=True, average_attn_weights=False)
    assert output.isfinite().all()
    assert not weights[~mask].any()
    torch.testing.assert_close(weights.sum(-1), mask.any(-1).float())


def test_inputs_need_not_be_contiguous(bert_base: MultiHeadAttention) -> None:
    x = torch.randn(128, 2, 768)  # sequence first
    torch.testing.assert_close(bert_base(x.transpose(0, 1)), bert_base(x.transpose(0, 1).contiguous()))


def test_weights_are_probabilities(bert_base: MultiHeadAttention) -> None:
    weights = bert_base(torch.randn(128, 768), need_weights=True)[1]
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(128))


def test_sharing_keys_shrinks_the_cache() -> None:
    sizes = [sum(MultiHeadAttention(4096, 32, num_kv_heads=h, device="meta").projection_sizes[1:]) for h in (32, 8, 1)]
    assert sizes == [8192, 2048, 256]  # numbers kept per token: a quarter with 8 heads, a 32nd with one
