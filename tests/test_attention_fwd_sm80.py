"""The 16-bit forward kernel on each of its own paths: tiles, walks over keys, packed groups, the running maximum.

What attention means is in test_fused.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from accuracy import FLOOR, assert_accurate, plain_attention
from cases import Count
from torch import Tensor

import mha_ext

HALVES = (torch.float16, torch.bfloat16)
every_half = pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: str(dtype).removeprefix("torch."))
TILE_M, TILE_N = 128, 64  # of attention_fwd_tile() in csrc/attention/tile_config.h


class Call(NamedTuple):
    """query (batch, heads, seqlen_q, head_dim), and so on."""

    name: str
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    head_dim_v: int
    rule: dict[str, Any] = {}  # noqa: RUF012  read only
    batch: int = 1


def named(calls: list[Call]) -> Any:
    return pytest.mark.parametrize("call", calls, ids=lambda call: call.name)


def tensors(call: Call, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (call.batch, call.heads, call.seqlen_q, call.head_dim),
        (call.batch, call.heads_kv, call.seqlen_kv, call.head_dim),
        (call.batch, call.heads_kv, call.seqlen_kv, call.head_dim_v),
    )
    query, key, value = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return query, key, value


def exact(query: Tensor, key: Tensor, value: Tensor, **rule: Any) -> Any:
    """By the reference, in fp64."""
    wide = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in rule.items()}
    return mha_ext.attention(query.double(), key.double(), value.double(), **wide, backend="reference")


def assert_right(query: Tensor, key: Tensor, value: Tensor, **rule: Any) -> None:
    result = mha_ext.attention(query, key, value, **rule, return_lse=True)
    expected = exact(query, key, value, **rule, return_lse=True)
    plain, _, _ = plain_attention(query, key, value, **rule)
    assert_accurate(result.output, expected.output.numpy(force=True), plain, FLOOR[query.dtype], "output")
    assert_accurate(result.lse, expected.lse.numpy(force=True), None, 4e-6, "lse")


# ---- every instantiation ----

# Interior tiles, both edges of the band, warps without work, a last tile of keys and of queries that is cut.
PLAIN = {"window": (150, 20), "q_offset": 40, "key_lengths": [260]}
GENERAL = {**PLAIN, "softcap": 3.0, "alibi_slopes": [0.5, -0.1]}
WIDTHS = (
    (64, 64),
    (40, 56),
    (128, 128),
    (100, 72),
    (17, 128),
    (256, 256),
    (192, 128),
    (250, 64),
    (131, 192),
    (24, 255),
)


@named(
    [
        Call(f"{kind}_d{head_dim}_{head_dim_v}", 2, 1, 150, 270, head_dim, head_dim_v, rule)
        for kind, rule in (("plain", PLAIN), ("general", GENERAL))
        for head_dim, head_dim_v in WIDTHS
    ]
)
@every_half
def test_every_width(fused: str, call: Call, dtype: torch.dtype) -> None:
    rule = {name: torch.tensor(x, device=fused) if isinstance(x, list) else x for name, x in call.rule.items()}
    assert_right(*tensors(call, dtype, fused), **rule)


@pytest.mark.parametrize("arrival", ["late", "at_once", "random"])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_no_schedule_changes_a_bit(fused: str, simulator: Any, head_dim: int, seed: int, arrival: str) -> None:
    """Warps in any order, copies as late as can be or at once: nothing is read too soon, or written too soon."""
    if simulator is None:
        pytest.skip("a real GPU has the schedule that it has")
    inputs = tensors(Call("", 1, 1, 140, 200, head_dim, head_dim), torch.float16, fused)
    mask = torch.rand(1, 1, 1, 200, generator=torch.Generator().manual_seed(1)) < 0.7
    for rule in ({}, {"attn_mask": mask, "return_stats": True}):
        expected = mha_ext.attention(*inputs, is_causal=True, q_offset=60, return_lse=True, **rule)
        with simulator.using(seed=seed, arrival=arrival, threads=2):
            result = mha_ext.attention(*inputs, is_causal=True, q_offset=60, return_lse=True, **rule)
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True) if a is not None)


# ---- which key tiles are visited ----


def test_a_walk_over_many_blocks_of_a_mask(fused: str) -> None:
    """The map of a mask is read 32 tiles at a time: blocks on both sides of each such window, some whole, some not."""
    call = Call("", 2, 1, 20, 70 * TILE_N, 8, 8)
    mask = torch.zeros(1, 2, call.seqlen_q, call.seqlen_kv, dtype=torch.bool)
    for tile in (0, 5, 6, 37, 38, 39, 69):
        mask[:, :, :, tile * TILE_N : (tile + 1) * TILE_N] = True
    mask[:, 0, 3:9, 6 * TILE_N : 37 * TILE_N : 5] = True
    mask[:, 1, :, 38 * TILE_N :] = False
    mask[:, 1, 7] = False
    assert_right(*tensors(call, torch.float16, fused), attn_mask=mask.to(fused))


@named(
    [
        Call("no_key_for_most", 1, 1, 300, 40, 16, 16, {"is_causal": True, "q_offset": -200}),
        Call("one_key_each", 1, 1, 200, 200, 16, 16, {"window": (0, 0)}),
        Call("beside_the_keys", 1, 1, 130, 130, 16, 16, {"window": (5, 5), "q_offset": 10**6}),
        Call("far_before", 1, 1, 130, 130, 16, 16, {"is_causal": True, "q_offset": -(2**30)}),
        Call("far_behind", 1, 1, 130, 130, 16, 16, {"is_causal": True, "q_offset": 2**30}),
        Call("ahead_only", 1, 1, 130, 200, 16, 16, {"window": (0, 70)}),
    ]
)
def test_bands(fused: str, call: Call) -> None:
    assert_right(*tensors(call, torch.float16, fused), **call.rule)


def test_a_warp_computes_what_its_queries_see(fused: str, count: Count) -> None:
    """Causal: of the two tiles on the diagonal, the upper half of the queries leaves one alone."""
    inputs = tensors(Call("", 1, 1, 512, 512, 64, 64), torch.float16, fused)
    (record,) = count(lambda: mha_ext.attention(*inputs, is_causal=True))
    warp_tiles = sum(-(-(row + 32) // TILE_N) for row in range(0, 512, 32))
    assert record.tensor_flops == 4 * 64 * warp_tiles * 32 * TILE_N


# ---- packed groups ----

GROUPS = [
    Call(f"group_{group}_lq{seqlen_q}", 2 * group, 2, seqlen_q, 150, 64, 64, batch=2)
    for group, seqlen_q in ((3, 1), (3, 43), (5, 26), (8, 1), (8, 16), (8, 17), (64, 2), (65, 1), (128, 2), (130, 1))
]


@named(GROUPS)
@pytest.mark.parametrize("kind", ["plain", "masked", "biased"])
def test_a_group_shares_its_tile(fused: str, call: Call, kind: str) -> None:
    """Rows of several heads beside each other, each with its own mask, bias, slope and sink."""
    generator = torch.Generator().manual_seed(2)
    rule: dict[str, Any] = {"is_causal": True, "q_offset": 150 - call.seqlen_q - 3}
    scores = (call.batch, call.heads, call.seqlen_q, call.seqlen_kv)
    if kind == "masked":
        mask = torch.rand(scores, generator=generator) < 0.5
        mask[:, 1::2, :, 64:128] = False
        rule["attn_mask"] = mask.to(fused)
    elif kind == "biased":
        rule["attn_mask"] = torch.randn(scores[1:], generator=generator).to(fused)
        rule["alibi_slopes"] = torch.rand(scores[:2], generator=generator).to(fused)
        rule["sinks"] = torch.randn(call.heads, generator=generator).to(fused)
    assert_right(*tensors(call, torch.float16, fused), **rule)


# ---- the running maximum ----


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("general", [False, True], ids=["plain", "general"])
@pytest.mark.parametrize("step", [-40.0, -3.0, 0.0, 0.4, 3.0, 40.0])
def test_scores_that_grow_along_the_walk(fused: str, step: float, general: bool, head_dim: int) -> None:
    """Tiles come from the last key to the first, their scores larger each time: by less than the slack, or by more."""
    call = Call("", 1, 1, 40, 5 * TILE_N, head_dim, head_dim)
    query, key, value = tensors(call, torch.float16, fused)
    tile = torch.arange(call.seqlen_kv, device=fused) // TILE_N
    query[..., 0], key[..., 0] = 8.0, (-step * tile).half()
    query[:, :, 20:] *= -1  # some rows of a warp grow, others shrink
    rule = {"alibi_slopes": torch.zeros(1, device=fused)} if general else {}
    assert_right(query, key, value, scale=0.125, **rule)


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 3.0, 40.0, 0.0, -2.0])
def test_scales(fused: str, scale: float) -> None:
    """The plain path compares raw products; a scale that is not positive takes the general one."""
    assert_right(*tensors(Call("", 1, 1, 33, 150, 64, 64), torch.float16, fused), scale=scale)


@every_half
def test_large_scores_that_are_equal_have_equal_weights(fused: str, dtype: torch.dtype) -> None:
    """The exponent is what is left of two numbers of seven digits."""
    query = torch.full((1, 1, 3, 8), 1000.0, dtype=dtype, device=fused)
    key = torch.full((1, 1, 70, 8), -2000.0, dtype=dtype, device=fused)
    value = torch.randn(1, 1, 70, 8, generator=torch.Generator().manual_seed(0)).to(key)
    assert_right(query, key, value, scale=0.3)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_statistics_of_a_row_that_sees_a_nan(fused: str, head_dim: int) -> None:
    query, key, value = tensors(Call("", 1, 1, 70, 130, head_dim, head_dim), torch.float16, fused)
    key[0, 0, 100] = math.nan
    result = mha_ext.attention(query, key, value, is_causal=True, q_offset=50, return_lse=True, return_stats=True)
    for statistic in (result.lse, result.max_score, result.entropy):
        assert statistic[0, 0, 50:].isnan().all()
        assert statistic[0, 0, :50].isfinite().all()


# ---- memory ----


@named(
    [
        Call("odd_rows", 2, 1, 5, 70, 7, 9),
        Call("pairs", 2, 1, 5, 70, 16, 30),
        Call("quads", 2, 1, 5, 70, 16, 36),
        Call("wide_odd", 2, 1, 5, 70, 200, 181),
    ]
)
@every_half
def test_output_rows_of_any_alignment(fused: str, call: Call, dtype: torch.dtype) -> None:
    assert_right(*tensors(call, dtype, fused))


def test_heads_beyond_a_section(fused: str) -> None:
    """Keys and values of so many heads do not fit in L2 together: blocks take them in sections, the last one cut."""
    call = Call("", 5, 5, 1, 90_000, 64, 64)
    query, key, value = tensors(call, torch.float16, fused)
    lengths = torch.tensor([70], device=fused)
    result = mha_ext.attention(query, key, value, key_lengths=lengths)
    expected = exact(query, key[:, :, :70], value[:, :, :70])
    torch.testing.assert_close(result.double(), expected, rtol=2e-3, atol=2e-3)
