"""The 16-bit backward kernel on each of its own paths: tiles, walks over queries, sums in turn, general scores.

What gradients mean is in test_fused.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from accuracy import FLOOR, assert_accurate, plain_attention
from cases import Count
from oracle import to_array
from torch import Tensor

import mha_ext

HALVES = (torch.float16, torch.bfloat16)
every_half = pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: str(dtype).removeprefix("torch."))
WIDTHS = (64, 128, 256)  # of attention_bwd_tile() in csrc/attention/tile_config.h


class Call(NamedTuple):
    """query (1, heads, seqlen_q, head_dim), and so on."""

    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    head_dim_v: int
    rule: dict[str, Any] = {}  # noqa: RUF012  read only


Rule = Callable[[Call, torch.dtype, torch.Generator], dict[str, Any]]


def tensors(call: Call, dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (1, call.heads, call.seqlen_q, call.head_dim),
        (1, call.heads_kv, call.seqlen_kv, call.head_dim),
        (1, call.heads_kv, call.seqlen_kv, call.head_dim_v),
    )
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def random_gradients(output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The same for every backend; a row that sees nothing has no derivative of its logsumexp."""
    generator = torch.Generator().manual_seed(1)
    grad_output, grad_lse = (torch.randn(x.shape, generator=generator).to(x) for x in (output, lse))
    return grad_output, grad_lse.masked_fill(lse == -math.inf, 0)


def gradients(wanted: dict[str, Tensor], backend: str | None = None, **rule: Any) -> dict[str, Tensor]:
    """Of query, key, value and whatever else is in `wanted`."""
    wanted = {name: x.detach().requires_grad_() for name, x in wanted.items()}
    result = mha_ext.attention(**wanted, **rule, return_lse=True, backend=backend)
    found = torch.autograd.grad((result.output, result.lse), list(wanted.values()), random_gradients(*result[:2]))
    return dict(zip(wanted, found, strict=True))


def plain_gradients(wanted: dict[str, Tensor], **rule: Any) -> dict[str, Tensor]:
    """The same by plain PyTorch in the dtype of the inputs."""
    wanted = {name: x.detach().requires_grad_() for name, x in wanted.items()}
    output, lse, _ = plain_attention(**wanted, **rule)
    found = torch.autograd.grad((output, lse), list(wanted.values()), random_gradients(output, lse))
    return {name: x.nan_to_num(0.0) for name, x in zip(wanted, found, strict=True)}


def slope_gradient(wanted: dict[str, Tensor], output: Tensor, **rule: Any) -> Tensor:
    """-sum dS |p - j| in fp64, where delta comes from the rounded output, as backward finds it: what is rounded there
    weighs on a whole row, and distances do not cancel it."""
    exact = mha_ext.attention(
        **{name: wide(x) for name, x in wanted.items()}, **rule, return_lse=True, return_weights=True,
        backend="reference",
    )  # fmt: skip
    weights, value = exact.weights, wide(wanted["value"])
    grad_output, grad_lse = (wide(x) for x in random_gradients(output, exact.lse))
    grad_weights = grad_output @ value.repeat_interleave(weights.shape[1] // value.shape[1], 1).mT
    delta = (grad_output * wide(output)).sum(-1) - grad_lse
    q_offset = rule.get("q_offset", 0)
    q_offset = weights.shape[3] - weights.shape[2] if q_offset == "end" else q_offset
    position = torch.arange(weights.shape[2], device=output.device)[:, None] + q_offset
    distance = (position - torch.arange(weights.shape[3], device=output.device)).abs()
    return -(weights * (grad_weights - delta[..., None]) * distance).sum((0, 2, 3))


def wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def assert_right(call: Call, dtype: torch.dtype, device: str, *more: str, **rule: Any) -> None:
    """more: what else wants a gradient, by its name in `rule`."""
    wanted = dict(zip(("query", "key", "value"), tensors(call, dtype, device), strict=True))
    wanted.update({name: rule.pop(name) for name in more})
    ours = gradients(wanted, **rule)
    widened = {name: wide(x) for name, x in rule.items()}
    exact = gradients({name: wide(x) for name, x in wanted.items()}, backend="reference", **widened)
    plain = plain_gradients(wanted, **rule)
    if "alibi_slopes" in wanted:
        slopes = ours.pop("alibi_slopes")
        expected = slope_gradient(wanted, mha_ext.attention(**wanted, **rule), **widened)
        assert_accurate(slopes, to_array(expected), None, 1e-3, "gradient of alibi_slopes")
    for name, grad in ours.items():
        assert_accurate(grad, to_array(exact[name]), plain[name], FLOOR[dtype], f"gradient of {name}")


def identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


# ---- tiles and walks ----

LENGTHS = [(1, 300), (129, 129), (200, 63), (64, 257), (300, 130)]
POSITIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal_end": {"is_causal": True, "q_offset": "end"},
    "window": {"window": (70, 5), "q_offset": 3},
    "lengths": {"key_lengths": [40]},
    "sinks": {"sinks": [0.5, -1.0], "is_causal": True, "q_offset": "end"},
}


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("width", WIDTHS)
def test_plain_scores(fused: str, width: int, position: str, lengths: tuple[int, int]) -> None:
    """On both sides of a tile, where one tile of keys and where several add to a tile of dQ."""
    dtype = HALVES[(LENGTHS.index(lengths) + width // 64) % 2]
    head_dim, head_dim_v = (width, width) if lengths[0] % 2 else (width - 8, width - 31)
    call = Call(2, 1, *lengths, head_dim, head_dim_v)
    rule = {
        name: torch.tensor(x, device=fused) if isinstance(x, list) else x for name, x in POSITIONS[position].items()
    }
    assert_right(call, dtype, fused, *(["sinks"] if "sinks" in rule else []), **rule)


def random_mask(call: Call, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    mask = torch.rand((1, call.heads, call.seqlen_q, call.seqlen_kv), generator=generator) > 0.3
    mask[:, :, 5] = False
    return {"attn_mask": mask}


def mask_of_blocks(call: Call, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """Blocks that are hidden, shown and mixed; the middle of the queries sees nothing."""
    blocks = torch.rand((1, call.heads, 7, 7), generator=generator) > 0.5
    mask = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, : call.seqlen_q, : call.seqlen_kv].clone()
    mask[:, :, :10, ::3] = False
    mask[:, :, 64:128] = False
    return {"attn_mask": mask}


def bias(bias_dtype: torch.dtype | None) -> Rule:
    def rule(call: Call, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        x = torch.randn((1, call.heads, call.seqlen_q, call.seqlen_kv), generator=generator)
        return {"attn_mask": x.masked_fill(x > 1.5, -math.inf).to(bias_dtype or dtype)}

    return rule


def alibi(call: Call, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    return {"alibi_slopes": torch.rand((call.heads,), generator=generator) / 4}


def softcap(call: Call, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    return {"softcap": 1.5}


RULES: dict[str, tuple[Rule, ...]] = {
    "random_mask": (random_mask,),
    "mask_of_blocks": (mask_of_blocks,),
    "bias_fp32": (bias(torch.float32),),
    "bias": (bias(None),),
    "alibi": (alibi,),
    "softcap": (softcap,),
    "all_with_a_mask": (random_mask, alibi, softcap),
    "all_with_a_bias": (bias(None), alibi, softcap),
}


@pytest.mark.parametrize("position", ["full", "causal_end", "window"])
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("width", WIDTHS)
def test_general_scores(fused: str, width: int, rules: str, position: str) -> None:
    dtype = HALVES[(width // 64 + len(rules)) % 2]
    call = Call(2, 1, 150, 200, width, width)
    generator = torch.Generator().manual_seed(2)
    rule = dict(POSITIONS[position])
    for make in RULES[rules]:
        rule.update({n: x.to(fused) if isinstance(x, Tensor) else x for n, x in make(call, dtype, generator).items()})
    assert_right(call, dtype, fused, *(["alibi_slopes"] if "alibi_slopes" in rule else []), **rule)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_bias_whose_exponential_overflows(fused: str, width: int) -> None:
    """The same everywhere, it changes nothing: neither where queries are nor where a tile is longer than they are."""
    wanted = dict(
        zip(("query", "key", "value"), tensors(Call(2, 1, 70, 100, width, width), torch.float16, fused), strict=True)
    )
    expected = gradients(wanted)
    found = gradients(wanted, attn_mask=torch.full((70, 100), 300.0, device=fused))
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_dropout(fused: str, monkeypatch: pytest.MonkeyPatch, width: int, dropout_p: float) -> None:
    """The weights that the reference drops, with the same numbers in every tile."""
    rng_state = torch.tensor([123456789012345, 987654321], device=fused)
    monkeypatch.setattr(mha_ext.reference, "draw_rng_state", lambda device: rng_state)
    call = Call(4, 2, 130, 150, width, 40)
    wanted = dict(zip(("query", "key", "value"), tensors(call, torch.float16, fused), strict=True))
    rule = {"dropout_p": dropout_p, "is_causal": True, "q_offset": "end"}
    ours = gradients(wanted, **rule)
    exact = gradients({name: wide(x) for name, x in wanted.items()}, backend="reference", **rule)
    for name, grad in ours.items():
        assert_accurate(grad, to_array(exact[name]), None, 2e-3, f"gradient of {name}")


@every_half
def test_groups_share_their_keys(fused: str, dtype: torch.dtype) -> None:
    """Three query heads a key head, whose gradients the block adds up itself."""
    assert_right(Call(6, 2, 70, 150, 40, 64), dtype, fused, is_causal=True, q_offset=60)


# ---- what nobody sees ----


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_not_seen_has_no_gradient(fused: str, width: int) -> None:
    """Tiles of queries that no key tile visits, and of keys that no query does; NaN in the latter changes nothing."""
    query, key, value = tensors(Call(2, 1, 300, 400, width, width), torch.float16, fused)
    rule = {"window": (20, 0), "q_offset": -150}  # queries 150 .. 299 see keys 0 .. 149
    clean = gradients({"query": query, "key": key, "value": value}, **rule)
    assert not clean["query"][:, :, :150].any()
    assert not clean["key"][:, :, 150:].any()
    assert not clean["value"][:, :, 150:].any()
    key[:, :, 150:], value[:, :, 150:] = math.nan, math.inf
    assert identical(gradients({"query": query, "key": key, "value": value}, **rule), clean)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_mask_that_hides_all(fused: str, width: int) -> None:
    query, key, value = tensors(Call(2, 1, 140, 150, width, width), torch.float16, fused)
    mask = torch.zeros((140, 150), dtype=torch.bool, device=fused)
    found = gradients({"query": query, "key": key, "value": value}, attn_mask=mask)
    assert not any(grad.any() for grad in found.values())


# ---- the same bits ----

SCHEDULED: dict[str, tuple[Call, dict[str, Any]]] = {
    "plain": (Call(2, 1, 200, 400, 64, 64, {"is_causal": True, "q_offset": "end"}), {}),
    "wide": (Call(1, 1, 100, 200, 200, 256), {}),
    "mask": (Call(2, 2, 150, 400, 128, 64), {"mask": True}),
}


@pytest.fixture
def schedules(simulator: Any) -> Iterator[int]:
    """20 ways to run: the order of warps, of copies and of blocks."""
    if simulator is None:
        return iter(range(20))

    def run() -> Iterator[int]:
        for seed in range(20):
            with simulator.using(seed=seed, threads=1 + seed % 2, arrival=("late", "at_once", "random")[seed % 3]):
                yield seed

    return run()


@pytest.mark.parametrize("case", SCHEDULED)
def test_every_schedule_gives_the_same_bits(fused: str, schedules: Iterator[int], case: str) -> None:
    call, options = SCHEDULED[case]
    wanted = dict(zip(("query", "key", "value"), tensors(call, torch.float16, fused), strict=True))
    rule = dict(call.rule)
    if options:
        generator = torch.Generator().manual_seed(3)
        rule.update({n: x.to(fused) for n, x in mask_of_blocks(call, torch.float16, generator).items()})
        wanted["alibi_slopes"] = torch.rand(call.heads, generator=generator).to(fused)
    results = [gradients(wanted, **rule) for _ in schedules]
    assert len(results) == 20
    assert all(identical(results[0], other) for other in results[1:])


# ---- packed sequences ----


def packed_gradients(tensors_: list[Tensor], cu_seqlens: list[Tensor], **rule: Any) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in tensors_]
    output = mha_ext.attention_varlen(*inputs, *cu_seqlens, **rule)
    grad = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(output)
    return list(torch.autograd.grad(output, inputs, grad))


@pytest.mark.parametrize("rule", ["full", "causal_end", "softcap"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_packed_sequence_has_the_bits_that_it_has_alone(fused: str, width: int, rule: str) -> None:
    lengths_q, lengths_kv = [5, 200, 0, 33, 64], [7, 130, 20, 0, 64]
    settings = {"softcap": 2.0} if rule == "softcap" else POSITIONS[rule]
    generator = torch.Generator().manual_seed(4)
    query, key, value = (
        torch.randn((sum(lengths), 2, width), generator=generator).to(fused, torch.float16)
        for lengths in (lengths_q, lengths_kv, lengths_kv)
    )
    cu_seqlens = [torch.tensor([0, *lengths]).cumsum(0).to(fused, torch.int32) for lengths in (lengths_q, lengths_kv)]
    together = packed_gradients([query, key, value], cu_seqlens, **settings)
    output_grad = torch.linspace(-1, 1, query.numel()).reshape(query.shape).to(query)
    for b in range(len(lengths_q)):
        rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in cu_seqlens)
        alone = [x.detach().requires_grad_() for x in (query[rows], key[keys], value[keys])]
        output = mha_ext.attention(*(x.transpose(0, 1)[None] for x in alone), **settings)
        grads = torch.autograd.grad(output, alone, output_grad[rows].transpose(0, 1)[None])
        for ours, expected, part in zip(together, grads, (rows, keys, keys), strict=True):
            assert torch.equal(ours[part], expected)


def test_sequences_that_overlap_do_not_wait_for_each_other(fused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cu_seqlens must not say, and what nobody checks on a GPU: the gradients mean nothing, but the call ends."""
    monkeypatch.setattr(mha_ext.call, "_check_sequences", lambda *_: None)
    inputs = [torch.randn((600, 1, 64), device=fused).half() for _ in range(3)]
    cu_seqlens = torch.tensor([0, 550, 20, 600], dtype=torch.int32, device=fused)
    packed_gradients(inputs, [cu_seqlens, cu_seqlens])


# ---- work ----


def test_blocks_that_a_mask_hides_are_not_computed(fused: str, count: Count) -> None:
    query, key, value = (x.requires_grad_() for x in tensors(Call(1, 1, 512, 512, 64, 64), torch.float16, fused))
    blocks = torch.arange(512) // 128
    output = mha_ext.attention(query, key, value, blocks[:, None] == blocks)
    records = count(lambda: torch.autograd.grad(output.sum(), (query, key, value)))
    (record,) = [record for record in records if "attention_bwd_sm80" in record.kernel]
    assert record.tensor_flops == 10 * 4 * 128 * 128 * 64  # a quarter of the scores
