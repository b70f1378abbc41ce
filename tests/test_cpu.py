"""Attention on the CPU kernels means what DESIGN says, on every instruction set that this machine runs."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from accuracy import FLOOR, assert_accurate, plain_attention
from cases import CASES, COMBINED_CASES, RULE_CASES, SHAPES, Case, Shape, make_inputs, pairs_of_rules
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mha_ext
from mha_ext._extension import extension

if extension is None:
    pytest.skip("no extension, and so no kernels for the CPU", allow_module_level=True)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

# Head dimensions on both sides of a vector and of a micro-kernel; lengths on both sides of a tile.
WIDTHS = [
    Case(f"d{head_dim}_{head_dim_v}", Shape(1, 2, 1, 9, 70, head_dim, head_dim_v), ("causal_end",))
    for head_dim, head_dim_v in (
        (1, 1), (15, 17), (16, 32), (31, 33), (40, 40), (64, 64), (80, 80), (96, 96), (100, 60), (128, 128),
        (192, 128), (256, 256), (250, 8),
    )
]  # fmt: skip
LENGTHS = [
    Case(f"lq{seqlen_q}_lk{seqlen_kv}", Shape(1, 3, 1, seqlen_q, seqlen_kv, 32, 32), ("causal_end",))
    for seqlen_q, seqlen_kv in (
        (1, 200), (2, 97), (5, 96), (9, 95), (17, 64), (63, 65), (64, 63), (65, 129), (129, 64), (129, 200), (200, 7),
    )
]  # fmt: skip
MASKS = [
    Case(name, Shape(2, 4, 2, 75, 110, 24, 20), rules)
    for name, rules in (
        ("long_bool", ("bool_mask", "causal_end")), ("long_padding", ("key_padding", "causal")),
        ("long_bias", ("bias_hides", "softcap")), ("long_window", ("window", "alibi", "sinks")),
        ("long_lengths", ("lengths", "alibi_by_batch")), ("long_head_bias", ("bias_by_head", "window_left")),
    )
]  # fmt: skip
GROUPS = [
    Case("decode_of_a_group", Shape(2, 8, 1, 1, 300, 64, 64), ("causal_end", "lengths")),
    Case("decode_of_heads", Shape(2, 3, 3, 1, 300, 128, 72), ("bias",)),
    Case("group_of_8", Shape(2, 8, 1, 5, 67, 64, 64), ("causal_end", "lengths")),
    Case("group_of_8_long", Shape(1, 8, 1, 33, 40, 64, 64), ("causal_end",)),
    Case("groups_of_3", Shape(1, 6, 2, 3, 130, 40, 24), ("window_left",)),
]
# A few rows of one key head: each count of them, keys on both sides of the four that are taken together and of a block,
# head dimensions with a kernel of their own and others.
FEW_ROWS = [
    Case(f"{heads}x{seqlen_q}_rows_{seqlen_kv}_keys_d{head_dim}_{head_dim_v}", Shape(1, 2 * heads, 2, *sizes), rules)
    for heads, *sizes, rules in (
        (1, 1, 261, 128, 128, ("causal_end",)), (1, 1, 515, 64, 64, ("alibi", "sinks")), (2, 1, 258, 128, 128, ()),
        (3, 1, 259, 128, 128, ("bias",)), (5, 1, 300, 128, 128, ("key_padding",)), (8, 1, 257, 64, 64, ("softcap",)),
        (9, 1, 70, 64, 64, ()), (1, 3, 513, 64, 64, ("causal_end", "bool_mask")), (2, 3, 260, 128, 128, ("window",)),
        (1, 7, 256, 100, 60, ("bias_hides",)), (3, 1, 33, 17, 127, ("lengths",)), (5, 1, 9, 33, 1, ()),
        (1, 1, 3, 128, 128, ()), (4, 2, 5, 250, 129, ("bias_by_head",)), (1, 1, 1, 64, 64, ("sinks",)),
    )
    for seqlen_q, seqlen_kv, head_dim, head_dim_v in (sizes,)
]  # fmt: skip
ALL_CASES = [*CASES, *WIDTHS, *LENGTHS, *MASKS, *GROUPS, *FEW_ROWS]


def identical(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; NaN would not be, and is expected nowhere."""
    return a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
@every_dtype
def test_values_follow_the_definition(target: str, case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    result = mha_ext.attention(**inputs, return_lse=True, return_stats=True)
    expected = oracle.attention(**inputs)
    assert result.output.dtype == dtype
    assert result.weights is None
    assert_accurate(result.output, expected.output, plain_attention(**inputs)[0], FLOOR[dtype], "output")
    for name in ("lse", "max_score", "entropy"):
        statistic = getattr(result, name)
        assert statistic.dtype == torch.float32
        finite = getattr(expected, name)[np.isfinite(getattr(expected, name))]
        scale = max(1.0, np.abs(finite).max(initial=0.0))
        assert_accurate(statistic / scale, getattr(expected, name) / scale, None, 4e-6, name)


@pytest.mark.parametrize("case", pairs_of_rules(), ids=lambda case: case.name)
def test_every_two_rules_go_together(target: str, case: Case) -> None:
    inputs = make_inputs(case, torch.float32)
    assert_accurate(mha_ext.attention(**inputs), oracle.attention(**inputs).output, None, 2e-6, "output")


@pytest.mark.parametrize("case", [*RULE_CASES, *COMBINED_CASES], ids=lambda case: case.name)
def test_a_row_that_sees_nothing_is_exactly_zero(target: str, case: Case) -> None:
    inputs = make_inputs(case, torch.float32)
    inputs["attn_mask"] = torch.ones(case.shape.scores, dtype=torch.bool)
    inputs["attn_mask"][0, 0, -1] = False
    result = mha_ext.attention(**inputs, return_lse=True, return_stats=True)
    assert not result.output[0, 0, -1].any()
    assert result.max_score[0, 0, -1] == -math.inf
    assert result.entropy[0, 0, -1] == 0
    assert result.lse[0, 0, -1] == (inputs["sinks"][0] if "sinks" in inputs else -math.inf)


@pytest.mark.parametrize("mask_dtype", ["same", torch.float32], ids=str)
@every_dtype
def test_a_row_of_the_dtypes_minimum_is_uniform(target: str, dtype: torch.dtype, mask_dtype: Any) -> None:
    mask_dtype = dtype if mask_dtype == "same" else mask_dtype
    shape = SHAPES["gqa"]
    inputs = make_inputs(Case("", shape), dtype)
    inputs["query"].zero_()
    mask = torch.zeros(shape.scores[2:], dtype=mask_dtype)
    mask[0] = torch.finfo(mask_dtype).min
    torch.testing.assert_close(mha_ext.attention(**inputs, attn_mask=mask), mha_ext.attention(**inputs))


@pytest.mark.parametrize("number", [math.nan, math.inf, "max"])
@every_dtype
@pytest.mark.parametrize("seqlen_q", [1, 9, 91])
@pytest.mark.parametrize("rule", ["lengths", "key_padding", "padding_bias", "padding_by_head", "causal"])
def test_hidden_keys_change_nothing(target: str, rule: str, seqlen_q: int, dtype: torch.dtype, number: Any) -> None:
    """Bit for bit, whatever number stands there."""
    shape = Shape(2, 6, 2, seqlen_q, 110, 16, 24)
    rules = (rule,) if rule in ("lengths", "key_padding", "causal") else ()
    inputs = make_inputs(Case("", shape, rules), dtype)
    hidden = torch.zeros((shape.batch, shape.heads_kv, shape.seqlen_kv), dtype=torch.bool)
    if rule == "lengths":
        hidden |= torch.arange(shape.seqlen_kv) >= inputs["key_lengths"][:, None, None]
    elif rule == "key_padding":
        hidden |= ~inputs["attn_mask"][:, 0, 0, None]
    elif rule == "padding_bias":
        hidden[0, :, 3:5] = hidden[1, :, 0] = True
        inputs["attn_mask"] = torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, -math.inf)[:, :1, None]
    elif rule == "causal":  # beyond every query
        hidden[:, :, shape.seqlen_q :] = True
    else:
        hidden[:, 0, 2] = hidden[1, 1, 4:] = True
        inputs["attn_mask"] = ~hidden.repeat_interleave(shape.heads // shape.heads_kv, 1)[:, :, None]
    results = []
    for x in (0.5, torch.finfo(dtype).max if number == "max" else number):
        changed = {name: inputs[name].masked_fill(hidden[..., None], x) for name in ("key", "value")}
        result = mha_ext.attention(**{**inputs, **changed}, return_lse=True, return_stats=True)
        results.append([x for x in result if x is not None])
    assert all(identical(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("seqlen", [1, 200])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@every_dtype
def test_a_number_that_is_not_finite_reaches_who_sees_it(
    target: str, dtype: torch.dtype, number: float, seqlen: int
) -> None:
    """Its row, where it is a query's; of a key or value every row that sees it, and none of another tile."""
    shape = Shape(1, 1, 1, seqlen, 200, 16, 16)
    for where in ("query", "key", "value"):
        inputs = make_inputs(Case("", shape), dtype)
        bad = min(150, inputs[where].shape[2] - 1)
        inputs[where][0, 0, bad] = number
        result = mha_ext.attention(**inputs, is_causal=True, q_offset="end", return_stats=True, return_lse=True)
        position = torch.arange(seqlen) + 200 - seqlen
        touched = torch.arange(seqlen) == bad if where == "query" else position >= bad
        spared = torch.arange(seqlen) != bad if where == "query" else position < 128
        assert result.output[0, 0, spared].isfinite().all()
        assert result.lse[0, 0, spared].isfinite().all()
        if where == "value" or math.isnan(number):  # a key of infinities has scores of both signs
            assert not result.output[0, 0, touched].isfinite().any()
        if where != "value" and math.isnan(number):
            for statistic in (result.lse, result.max_score, result.entropy):
                assert statistic[0, 0, touched].isnan().all()


@pytest.mark.parametrize("seqlen_q", [1, 40, 90])
def test_dropout_draws_what_the_reference_draws(target: str, seqlen_q: int) -> None:
    """With one value row a key, the output shows each weight."""
    inputs = make_inputs(Case("", Shape(2, 2, 1, seqlen_q, 110, 16, 110), ("window_left",)), torch.float32)
    inputs["value"] = torch.eye(110).expand(2, 1, 110, 110)
    results = []
    for backend in ("cpu", "reference"):
        torch.manual_seed(7)
        results.append(mha_ext.attention(**inputs, dropout_p=0.4, backend=backend))
    assert identical(results[0] == 0, results[1] == 0)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", COMBINED_CASES[:2], ids=lambda case: case.name)
@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
def test_dropout_with_everything_else(
    target: str, monkeypatch: pytest.MonkeyPatch, dropout_p: float, case: Case
) -> None:
    inputs = make_inputs(case, torch.float32)
    rng_state = torch.tensor([123456789012345, 987654321])
    monkeypatch.setattr(mha_ext.reference, "draw_rng_state", lambda device: rng_state)
    expected = oracle.attention(**inputs, dropout_p=dropout_p, rng_state=rng_state)
    result = mha_ext.attention(**inputs, dropout_p=dropout_p, return_lse=True)
    assert_accurate(result.output, expected.output, None, 4e-6, "output")
    assert_accurate(result.lse, expected.lse, None, 4e-6, "lse")


# --- layouts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlen_q", [1, 33, 80])
@every_dtype
def test_strides_change_no_bit(target: str, dtype: torch.dtype, seqlen_q: int) -> None:
    """Rows outside of heads, gaps, odd offsets, expanded axes, against contiguous tensors."""
    shape = Shape(2, 4, 2, seqlen_q, 100, 24, 24)
    inputs = make_inputs(Case("", shape, ("causal_end", "bias")), dtype)
    inputs["key"] = inputs["key"][:1].expand_as(inputs["key"])
    expected = mha_ext.attention(**{k: x.contiguous() if isinstance(x, Tensor) else x for k, x in inputs.items()})

    def rows_outside(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def unaligned(x: Tensor) -> Tensor:
        memory = x.new_full((*x.shape[:3], x.shape[3] + 3), math.nan)
        memory[..., 1:-2] = x
        return memory[..., 1:-2]

    def every_second(x: Tensor) -> Tensor:
        memory = x.new_full((*x.shape[:3], 2 * x.shape[3]), math.nan)
        memory[..., ::2] = x
        return memory[..., ::2]

    for layout in (rows_outside, unaligned, every_second):
        changed = {name: layout(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        assert identical(mha_ext.attention(**changed), expected)
    assert identical(mha_ext.attention(**inputs), expected)


def test_the_output_lies_in_memory_as_query_does(target: str) -> None:
    x = torch.randn(2, 5, 3, 8)
    assert mha_ext.attention(x, x, x).is_contiguous()
    assert mha_ext.attention(*[x.transpose(1, 2)] * 3).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "seqlen_kv"),
    [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (0, 0, 0, 0), (2, 2, 3, 0), (2, 2, 0, 0)],
)
@pytest.mark.parametrize("rule", ["plain", "causal_end", "bias", "alibi", "sinks"])
def test_empty_axes(target: str, batch: int, heads: int, seqlen_q: int, seqlen_kv: int, rule: str) -> None:
    shape = Shape(batch, heads, heads, seqlen_q, seqlen_kv, 8, 16)
    inputs = make_inputs(Case("", shape, () if rule == "plain" else (rule,)), torch.float32)
    result = mha_ext.attention(**inputs, return_lse=True, return_stats=True)
    assert result.output.shape == (batch, heads, seqlen_q, 16)
    assert result.lse.shape == result.max_score.shape == result.entropy.shape == shape.scores[:3]
    assert not result.output.any()
    if seqlen_kv == 0:
        nothing = inputs["sinks"][:, None].expand(result.lse.shape) if rule == "sinks" else -math.inf
        assert (result.lse == nothing).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2)])
def test_packed_sequences(target: str, heads: tuple[int, int], is_causal: bool) -> None:
    cu_q = torch.tensor([0, 1, 1, 71, 75, 76], dtype=torch.int32)
    cu_k = torch.tensor([0, 130, 140, 240, 240, 250], dtype=torch.int32)
    query = torch.randn(76, heads[0], 24)
    key, value = torch.randn(250, heads[1], 24), torch.randn(250, heads[1], 20)
    arguments = {"is_causal": is_causal, "q_offset": "end", "return_lse": True, "return_stats": True}
    ours = mha_ext.attention_varlen(query, key, value, cu_q, cu_k, **arguments)
    expected = mha_ext.attention_varlen(query, key, value, cu_q, cu_k, **arguments, backend="reference")
    for a, b in zip(ours, expected, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


# --- threads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [Shape(2, 8, 2, 150, 150, 64, 64), Shape(1, 4, 4, 200, 600, 32, 32)], ids=str)
@every_dtype
def test_threads_change_no_bit_where_tiles_suffice(target: str, threads: Any, shape: Shape, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case("", shape, ("causal_end",)), dtype)
    results = []
    for count in (1, 2):
        threads(count)
        results.append(mha_ext.attention(**inputs))
    assert identical(*results)


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("rules", [("causal_end", "lengths"), ("sinks", "softcap"), ("window_left",), ("key_padding",)])
@every_dtype
def test_few_tiles_are_split_over_keys(
    target: str, threads: Any, heads: tuple[int, int], rules: tuple[str, ...], dtype: torch.dtype
) -> None:
    case = Case("", Shape(2, *heads, 2, 1100, 64, 64 if heads == (4, 2) else 40), rules)
    inputs = make_inputs(case, dtype)
    threads(2)
    result = mha_ext.attention(**inputs, return_lse=True, return_stats=True)
    expected = oracle.attention(**inputs)
    assert_accurate(result.output, expected.output, plain_attention(**inputs)[0], FLOOR[dtype], "output")
    for name in ("lse", "max_score", "entropy"):
        assert_accurate(getattr(result, name), getattr(expected, name), None, 4e-6, name)


def test_every_run_gives_the_same_bits(target: str, threads: Any) -> None:
    threads(2)
    inputs = make_inputs(Case("", Shape(1, 2, 1, 3, 2000, 64, 64), ("alibi",)), torch.float32)
    first = mha_ext.attention(**inputs)
    assert all(identical(mha_ext.attention(**inputs), first) for _ in range(5))


def test_a_call_within_a_parallel_region_of_another_thread(target: str) -> None:
    """Threads of Python at the same time, each with its own memory to compute in."""
    from concurrent.futures import ThreadPoolExecutor

    inputs = make_inputs(Case("", Shape(1, 4, 2, 90, 90, 64, 64), ("causal",)), torch.float32)
    expected = mha_ext.attention(**inputs)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: mha_ext.attention(**inputs), range(16)))
    assert all(identical(result, expected) for result in results)


# --- any call ---------------------------------------------------------------------------------------------


@st.composite
def calls(draw: Any) -> tuple[Case, torch.dtype, int, int]:
    heads_kv = draw(st.integers(1, 3))
    shape = Shape(
        draw(st.integers(1, 2)), heads_kv * draw(st.integers(1, 4)), heads_kv, draw(st.integers(1, 140)),
        draw(st.integers(1, 230)), draw(st.integers(1, 70)), draw(st.integers(1, 70)),
    )  # fmt: skip
    position = draw(st.sampled_from(["causal", "causal_end", "causal_offsets", "offset", None]))
    window = draw(st.sampled_from(["window", "window_left", None]))
    mask = draw(st.sampled_from(["bool_mask", "key_padding", "bias", "bias_hides", "bias_by_head", None, None]))
    others = [name for name in ("lengths", "softcap", "sinks", "scale", "alibi_by_batch") if draw(st.booleans())]
    rules = [name for name in (position, window, mask) if name is not None] + others
    dtype = draw(st.sampled_from(DTYPES))
    return Case("", shape, tuple(rules)), dtype, draw(st.integers(1, 2)), draw(st.integers(0, 1000))


@pytest.mark.slow
@given(calls())
def test_any_call_agrees_with_the_reference(
    target: str, threads: Any, call: tuple[Case, torch.dtype, int, int]
) -> None:
    case, dtype, count, seed = call
    inputs = make_inputs(case, dtype, seed=seed)
    threads(count)
    result = mha_ext.attention(**inputs, return_lse=True, return_stats=True)
    wide = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in inputs.items()
    }  # fmt: skip
    expected = mha_ext.attention(**wide, return_lse=True, return_stats=True, backend="reference")
    tolerance = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for name in ("output", "lse", "max_score", "entropy"):
        allowed = tolerance if name == "output" else 1e-5
        torch.testing.assert_close(
            getattr(result, name).double(), getattr(expected, name), rtol=allowed, atol=allowed, msg=name
        )


# --- which backend, which target --------------------------------------------------------------------------


def test_the_cpu_takes_what_it_can_and_says_why_not() -> None:
    query = torch.randn(1, 2, 3, 4)
    assert mha_ext.backends.explain(query, query, query).backend == "cpu"
    wide = torch.randn(1, 1, 4, 257)
    wanting = query.clone().requires_grad_()
    for arguments, options, reason in (
        ((query.double(),) * 3, {}, "dtype: float64 has no kernel of this kind"),
        ((query,) * 3, {"return_weights": True}, "returned weights: return_weights asks for the weights"),
        ((wide,) * 3, {}, "head dimension: expected head dimensions from 1 to 256, got 257 (query)"),
        ((query.to("meta"),) * 3, {}, "device: query is on meta"),
    ):
        explanation = mha_ext.backends.explain(*arguments, **options)
        assert explanation.backend == "reference"
        said = explanation.reasons["cpu"]
        assert said is not None
        assert said.startswith(reason)
    assert mha_ext.backends.explain(query, wanting, query).backend == "cpu"
    with pytest.raises(ValueError, match="transforms"), mha_ext.backends.use_backend("cpu"):
        torch.func.vmap(lambda x: mha_ext.attention(x, x, x))(query[None])


def test_an_unknown_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=f"use_cpu_target: expected one of {', '.join(extension.cpu_targets())}, .* got 'sse9'"
    ):
        extension.use_cpu_target("sse9")
    code = (
        "import torch, mha_ext; q = torch.randn(1, 1, 2, 8); mha_ext.attention(q, q, q)\n"
        "print(mha_ext._extension.extension.cpu_target())"
    )

    def python(target: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "MHA_EXT_CPU_TARGET": target}
        return subprocess.run(  # outside the source tree, which would hide an installed package
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    assert python("portable").stdout.strip() == "portable"
    failed = python("sse9")
    assert failed.returncode != 0
    assert "environment variable MHA_EXT_CPU_TARGET: expected one of" in failed.stderr


@pytest.mark.parametrize("dynamic", [None, True])
def test_attention_is_one_graph(target: str, dynamic: bool | None) -> None:
    torch.compiler.reset()

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return mha_ext.attention(query, key, value, is_causal=True, softcap=3.0, q_offset="end")

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (5, 9):
        inputs = (torch.randn(2, 4, 3, 8), torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8))
        assert identical(compiled(*inputs), function(*inputs))


def test_the_operator_keeps_its_promises() -> None:
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    heads_inside = query.transpose(1, 2).contiguous().transpose(1, 2)
    for x, mask, stats in ((query, torch.randn(1, 1, 5, 7), True), (heads_inside, None, False)):
        arguments = (x, key, key, mask, *(None,) * 7, 0, -1, 0, 0.0, 0.0, 0.5, False, stats, stats)
        torch.library.opcheck(torch.ops.mha_ext.attention_forward_cpu, arguments)


def test_the_operator_checks_its_arguments() -> None:
    query = torch.randn(1, 2, 3, 8)

    def call(key: Tensor = query, mask: Tensor | None = None, lengths: Tensor | None = None) -> None:
        torch.ops.mha_ext.attention_forward_cpu(
            query, key, key, mask, lengths, *(None,) * 6, 0, -1, -1, 0.0, 0.0, 1.0, False, False, False
        )  # fmt: skip

    with pytest.raises(ValueError, match="key: expected shape"):
        call(torch.randn(1, 2, 3, 9))
    with pytest.raises(TypeError, match="key: expected dtype Float, got Double"):
        call(query.double())
    with pytest.raises(ValueError, match="key: expected a last axis of stride 1"):
        call(torch.randn(1, 2, 8, 3).mT)
    with pytest.raises(ValueError, match="attn_mask: expected a shape that broadcasts"):
        call(mask=torch.zeros(1, 1, 3, 4))
    with pytest.raises(ValueError, match="key_lengths: expected shape"):
        call(lengths=torch.zeros(2, dtype=torch.int64))
