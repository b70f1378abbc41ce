"""Dropout: one philox number per weight, the same on every backend, and nothing but a Bernoulli draw."""

import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from accuracy import FLOOR, assert_accurate
from cases import SHAPES, BackendUnderTest, Case, Shape, leaves, make_inputs
from torch import Tensor

import mha_ext
from mha_ext import reference


def rng_state(seed: int, offset: int) -> Tensor:
    return torch.tensor([seed, offset], dtype=torch.int64)


def words_allow(head: tuple[int, int], i: int, j: int, state: Tensor, word: int) -> bool:
    """Whether the 32 bits behind weight (i, j) are exactly `word`, asked through the keep mask alone."""
    batch, heads = 1, head[1] + 1
    shape = (batch + head[0], heads, i + 1, j + 1)
    kept = reference.dropout_keep(shape, word / 2**32, state)[head[0], head[1], i, j]
    next_kept = reference.dropout_keep(shape, (word + 1) / 2**32, state)[head[0], head[1], i, j]
    return bool(kept) and not bool(next_kept)


# --- the generator --------------------------------------------------------------------------------------


def test_the_oracles_philox_gives_the_published_vectors() -> None:
    """kat_vectors of Random123, philox4x32 with 7 rounds, and with the better known 10."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    published = {
        ((0, 0, 0, 0), (0, 0), 7): (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
        ((ones,) * 4, (ones,) * 2, 7): (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
        (*pi, 7): (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ((0, 0, 0, 0), (0, 0), 10): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    }
    for (counter, key, rounds), words in published.items():
        assert oracle.philox4x32(counter, key, rounds) == words


@pytest.mark.parametrize(
    ("i", "j", "word"), [(0, 0, 0x5F6FB709), (0, 8, 0x0D893F64), (8, 0, 0x4F121F81), (8, 8, 0x4F730A48)]
)
def test_the_first_four_words_serve_a_square_of_distance_eight(i: int, j: int, word: int) -> None:
    assert words_allow((0, 0), i, j, rng_state(0, 0), word)


@pytest.mark.parametrize(
    ("seed", "offset"),
    [(1, 0), (0, 1), (2**31, 2**31), (2**32 - 1, 2**32 - 1), (2**32, 0), (2**63 - 1, 2**63 - 1), (-1, -1)],
)
def test_every_bit_of_seed_and_position_counts(seed: int, offset: int) -> None:
    """The whole word, for places in every quarter of a 16 x 16 square and beyond, and heads beyond the first."""
    state = rng_state(seed, offset)
    for batch, head, i, j in [(0, 0, 3, 5), (0, 2, 9, 15), (1, 1, 23, 4), (2, 0, 16, 40), (0, 1, 7, 129)]:
        word = oracle.dropout_word(batch * (head + 1) + head, i, j, state)
        assert words_allow((batch, head), i, j, state, word)


def test_no_two_weights_share_a_word() -> None:
    """Counters and words are distinct over two heads of 48 x 48, so every weight has a draw of its own."""
    words = {oracle.dropout_word(h, i, j, (5, 7)) for h in range(2) for i in range(48) for j in range(48)}
    assert len(words) > 2 * 48 * 48 - 3  # a birthday collision among 2^32 is unlikely but allowed


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1 / 3, 2.0**-32, 1 - 2.0**-32])
def test_the_keep_mask_is_the_oracles(p: float) -> None:
    shape, state = (2, 3, 19, 37), rng_state(123456789012345678, 42)
    keep = reference.dropout_keep(shape, p, state)
    expected = [oracle.kept(b * 3 + h, i, j, p, state) for b, h, i, j in np.ndindex(*shape)]
    assert torch.equal(keep, torch.tensor(expected).reshape(shape))


def test_the_keep_mask_does_not_depend_on_the_size_around_it() -> None:
    """So tiles, splits and longer sequences draw the same numbers; heads count through b * H + h."""
    state = rng_state(9, 9)
    large = reference.dropout_keep((2, 4, 50, 70), 0.5, state)
    assert torch.equal(reference.dropout_keep((2, 4, 11, 13), 0.5, state), large[:, :, :11, :13])
    assert torch.equal(reference.dropout_keep((1, 8, 50, 70), 0.5, state)[0], large.flatten(0, 1))


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.8])
def test_the_rate_is_p(p: float) -> None:
    """Within five standard deviations, over all weights, by row, by column and by head."""
    keep = reference.dropout_keep((2, 4, 128, 128), p, rng_state(2024, 1)).double()
    for axes in [(0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (2, 3)]:
        n = keep.numel() / keep.mean(axes).numel()
        assert (keep.mean(axes) - (1 - p)).abs().max() < 5 * math.sqrt(p * (1 - p) / n)


def test_heads_rows_columns_seeds_and_offsets_are_independent() -> None:
    """Correlation of neighbours, and of whole masks, below five standard deviations of none."""
    masks = {
        (seed, offset): reference.dropout_keep((2, 2, 64, 64), 0.5, rng_state(seed, offset)).double() - 0.5
        for seed, offset in [(0, 0), (0, 1), (1, 0), (2**32, 0)]
    }
    first = masks[0, 0]
    n = first.numel()
    for other in (m for key, m in masks.items() if key != (0, 0)):
        assert abs((first * other).sum()) < 5 * math.sqrt(n) / 4
    for axis, distance in [(0, 1), (1, 1), (2, 1), (2, 8), (3, 1), (3, 8), (3, 16)]:
        a, b = (
            first.narrow(axis, 0, first.shape[axis] - distance),
            first.narrow(axis, distance, first.shape[axis] - distance),
        )
        assert abs((a * b).sum()) < 5 * math.sqrt(a.numel()) / 4


# --- in a call ------------------------------------------------------------------------------------------


def seeded(seed: int, **inputs: Any) -> Any:
    torch.manual_seed(seed)
    return mha_ext.attention(**inputs)


def state_of(seed: int, device: str) -> Tensor:
    """What a call right after torch.manual_seed(seed) draws."""
    torch.manual_seed(seed)
    return reference.draw_rng_state(torch.device(device)).cpu()


DROPOUT_CASES = [
    Case("gqa", SHAPES["gqa"]),
    Case("odd_bias", SHAPES["odd"], ("bias",)),
    Case("mqa_causal_softcap_sinks", SHAPES["mqa"], ("causal_end", "softcap", "sinks")),
    Case("gqa_mask_alibi", SHAPES["gqa"], ("bool_mask", "alibi")),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", DROPOUT_CASES, ids=lambda case: case.name)
def test_dropout_draws_the_definitions_mask_forward_and_backward(
    backend: BackendUnderTest, case: Case, dtype: torch.dtype
) -> None:
    """The returned weights and the logsumexp are those before dropout."""
    inputs = make_inputs(case, dtype, backend.device)
    wanted = leaves(inputs)
    result = seeded(3, **inputs, dropout_p=0.4, return_lse=True, return_weights=True)
    state = state_of(3, backend.device)
    expected = oracle.attention(**inputs, dropout_p=0.4, rng_state=state)
    floor = {torch.float64: 1e-13, torch.float32: 5e-6, torch.float16: 5e-3}[dtype]
    assert_accurate(result.output, expected.output, None, floor, "output")
    assert_accurate(result.weights, expected.weights, None, floor, "weights")
    outputs = (result.output, result.weights)
    grads = [torch.randn_like(x) for x in outputs]
    computed = torch.autograd.grad(outputs, list(wanted.values()), grads)
    exact = oracle.gradients(**inputs, dropout_p=0.4, rng_state=state, grad_output=grads[0], grad_weights=grads[1])
    for name, ours in zip(wanted, computed, strict=True):
        assert_accurate(ours, exact[name], None, 2 * floor, f"gradient of {name}")


def test_masked_softmax_drops_the_same_weights(backend: BackendUnderTest) -> None:
    scores = torch.randn(2, 3, 9, 20, dtype=torch.float64, device=backend.device)
    torch.manual_seed(5)
    weights = mha_ext.masked_softmax(scores, dropout_p=0.3)
    state = state_of(5, backend.device)
    keep = [oracle.kept(b * 3 + h, i, j, 0.3, state) for b, h, i, j in np.ndindex(2, 3, 9, 20)]
    expected = scores.softmax(-1).cpu() * torch.tensor(keep).reshape(scores.shape) / 0.7
    torch.testing.assert_close(weights.cpu(), expected)


def test_the_generators_seed_decides(backend: BackendUnderTest) -> None:
    inputs = make_inputs(Case("", SHAPES["gqa"]), torch.float32, backend.device)
    first, again, other = (seeded(seed, **inputs, dropout_p=0.5) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(1)
    mha_ext.attention(**inputs, dropout_p=0.5)
    assert not torch.equal(mha_ext.attention(**inputs, dropout_p=0.5), first), "the next call draws anew"


def test_no_dropout_leaves_the_generator_alone(backend: BackendUnderTest) -> None:
    inputs = make_inputs(Case("", SHAPES["gqa"]), torch.float32, backend.device)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    without = mha_ext.attention(**inputs, dropout_p=0.0)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(without, mha_ext.attention(**inputs))


@pytest.mark.parametrize("p", [1.0, 1])
def test_p_one_drops_everything(backend: BackendUnderTest, p: float) -> None:
    inputs = make_inputs(Case("", SHAPES["gqa"]), torch.float32, backend.device)
    wanted = leaves(inputs)
    result = mha_ext.attention(**inputs, dropout_p=p, return_weights=True)
    assert not result.output.any()
    torch.testing.assert_close(result.weights.sum(-1), torch.ones_like(result.weights[..., 0]))
    assert not any(grad.any() for grad in torch.autograd.grad(result.output.sum(), list(wanted.values())))


def test_kept_weights_are_scaled_so_that_the_mean_stays(backend: BackendUnderTest) -> None:
    query = torch.zeros(1, 8, 64, 4, device=backend.device)
    value = torch.ones(1, 8, 64, 4, device=backend.device)
    output = seeded(0, query=query, key=query, value=value, dropout_p=0.25)
    assert abs(output.mean() - 1) < 5 * math.sqrt(0.25 / 0.75 / (8 * 64 * 64))
    kept = (output * 64 * 0.75).round() / (64 * 0.75)
    torch.testing.assert_close(output, kept)  # a whole number of weights of 1 / 64 / (1 - p)


def test_empty_rows_stay_zero_under_dropout(backend: BackendUnderTest) -> None:
    inputs = make_inputs(Case("", Shape(2, 2, 2, 8, 9, 4, 4), ("bool_mask",)), torch.float32, backend.device)
    assert not mha_ext.attention(**inputs, dropout_p=0.5)[:, :, -1].any()


def test_the_draw_is_the_same_in_every_dtype(backend: BackendUnderTest) -> None:
    value = torch.eye(16, device=backend.device).expand(1, 2, 16, 16)
    zeros = torch.zeros(1, 2, 16, 16, device=backend.device)
    masks = [
        seeded(7, query=zeros.to(dtype), key=zeros.to(dtype), value=value.to(dtype), dropout_p=0.5) > 0
        for dtype in FLOOR
    ]
    assert masks[0].any()
    assert not masks[0].all()
    assert all(torch.equal(masks[0], mask) for mask in masks)
