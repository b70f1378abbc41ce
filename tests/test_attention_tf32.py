"""Fused attention in fp32 on the TF32 tensor cores: three products as accurate as fp32, or one where torch allows."""

import math
from collections.abc import Iterator
from typing import Any

import oracle
import pytest
import torch
from accuracy import FLOOR, assert_accurate, plain_attention
from cases import Case, Count, Shape, leaves, make_inputs
from torch import Tensor

import mha_ext

# A chain of rounded sums is longest where rows or head dimensions are; a bucket of head dimensions each.
LONG = [
    Case("many_keys", Shape(1, 2, 1, 16, 1500, 64, 64)),
    Case("many_queries", Shape(1, 2, 1, 700, 40, 48, 24), ("causal_end",)),
    Case("d128", Shape(1, 2, 2, 65, 130, 128, 128), ("causal_end", "alibi")),
    Case("d256", Shape(1, 2, 1, 67, 35, 256, 256), ("window",)),
]
UNIT = 2.0**-10  # of the last place that TF32 keeps


@pytest.fixture
def tf32() -> Iterator[None]:
    """TF32 is allowed, as torch spells it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def gradients(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, its gradient, and what follows from that."""
    wanted = leaves(inputs)
    output = mha_ext.attention(**inputs)
    grad_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    grads = torch.autograd.grad(output, list(wanted.values()), grad_output)
    return output, grad_output, dict(zip(wanted, grads, strict=True))


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_three_products_are_as_accurate_as_fp32(fused: str, case: Case) -> None:
    inputs = make_inputs(case, torch.float32, fused)
    output, grad_output, grads = gradients(inputs)
    exact = oracle.gradients(**inputs, grad_output=grad_output)
    plain = plain_attention(**inputs)[0]
    assert_accurate(output, oracle.attention(**inputs).output, plain, FLOOR[torch.float32], "output")
    yardsticks = torch.autograd.grad(plain, [inputs[name] for name in grads], grad_output)
    for (name, ours), yardstick in zip(grads.items(), yardsticks, strict=True):
        assert_accurate(ours, exact[name], yardstick, FLOOR[torch.float32], f"gradient of {name}")


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("case", LONG[1:], ids=lambda case: case.name)
def test_one_product_errs_by_units_of_tf32(fused: str, case: Case) -> None:
    inputs = make_inputs(case, torch.float32, fused)
    output, grad_output, grads = gradients(inputs)
    exact = oracle.gradients(**inputs, grad_output=grad_output)
    assert assert_accurate(output, oracle.attention(**inputs).output, None, 2 * UNIT, "output") > UNIT / 100
    for name, ours in grads.items():
        assert_accurate(ours, exact[name], None, 2 * UNIT, f"gradient of {name}")


@pytest.mark.usefixtures("tf32")
def test_tf32_is_rounded_to_without_bias(fused: str) -> None:
    """With a single key the output is its value, rounded."""
    query, key = torch.ones(1, 1, 1, 1, device=fused), torch.ones(1, 1, 1, 1, device=fused)
    value = torch.randn(1, 64, 1, 256).to(fused)
    rounded = mha_ext.attention(query.expand(1, 64, 1, 1), key.expand(1, 64, 1, 1), value)
    errors = (rounded.double() - value) / value
    assert errors.abs().max() < 0.72 * UNIT
    assert errors.mean().abs() < UNIT / 50
    held = mha_ext.attention(query.expand(1, 64, 1, 1), key.expand(1, 64, 1, 1), rounded)
    assert torch.equal(held, rounded)  # what TF32 holds stays as it is


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF - 2**32, 0x7F800000], ids=hex)
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_what_is_not_finite_reaches_those_who_see_it(
    fused: str, tf32: None, where: str, bits: int, precision: str
) -> None:
    """Every NaN, whatever its bits; an infinity at least as a number that is not finite."""
    torch.set_float32_matmul_precision(precision)
    inputs = make_inputs(Case("", Shape(1, 2, 1, 40, 70, 40, 40), ("causal_end",)), torch.float32, fused)
    inputs["query"], inputs["key"] = inputs["query"].abs(), inputs["key"].abs()  # the infinity's score is not -inf
    clean = mha_ext.attention(**inputs)
    inputs[where][0, 0, 33, 7] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    output = mha_ext.attention(**inputs)
    sees = torch.zeros(clean.shape[:3], dtype=torch.bool, device=fused)
    if where == "query":
        sees[0, 0, 33] = True
    else:  # query i sees the keys up to i + 30
        sees[:, :, 3:] = True
    if where == "value":
        assert not output[sees][:, 7].isfinite().any()
    else:
        assert not output[sees].isfinite().any()
    untouched = ~sees.clone()
    untouched[:, :, :3] &= where != "value"  # a value of a visited tile may reach those who do not see it
    assert torch.equal(output[untouched], clean[untouched])


every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch.")
)


@pytest.mark.parametrize("return_stats", [False, True], ids=["plain", "stats"])
@pytest.mark.parametrize("sink", [math.nan, math.inf, -math.inf])
@every_dtype
def test_a_sink_that_is_not_finite(fused: str, dtype: torch.dtype, sink: float, return_stats: bool) -> None:
    """A row without a softmax is NaN; the other head is as it was."""
    inputs = make_inputs(Case("", Shape(1, 2, 1, 6, 9, 16, 16), ("causal_end", "sinks")), dtype, fused)
    inputs["sinks"] = torch.tensor([sink, 0.5], device=fused)
    wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    result = mha_ext.attention(**inputs, return_lse=True, return_stats=return_stats)
    expected = mha_ext.attention(**wide, return_lse=True, return_stats=return_stats, backend="reference")
    for ours, exact in zip(result, expected, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours.double(), exact, rtol=0, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("number", [math.nan, math.inf])
@every_dtype
def test_a_row_that_sees_nothing_is_zero_whatever_its_tile_holds(fused: str, dtype: torch.dtype, number: float) -> None:
    query, key, value = (torch.randn(1, 1, 3, 8).to(fused, dtype) for _ in range(3))
    value[0, 0, 0] = number  # seen by the queries 1 and 2
    output = mha_ext.attention(query.requires_grad_(), key, value, is_causal=True, q_offset=-1)
    (grad_query,) = torch.autograd.grad(output.sum(), query)
    for rows in (output, grad_query):
        assert not rows[0, 0, 0].any()
        assert not rows[0, 0, 1:].isfinite().any()


def test_gradients_do_not_depend_on_the_order_of_blocks(fused: str, simulator: Any) -> None:
    shape = Shape(2, 4, 2, 70, 100, 40, 64)
    inputs = make_inputs(Case("", shape, ("bias", "alibi_by_batch", "sinks", "window_left")), torch.float32, fused)

    def run() -> list[Tensor]:
        output, _, grads = gradients({**inputs})
        return [output.detach(), *grads.values()]

    first = run()
    if simulator is None:
        assert all(torch.equal(a, b) for _ in range(20) for a, b in zip(first, run(), strict=True))
        return
    for seed in range(1, 21):
        with simulator.using(seed=seed, arrival=("late", "random")[seed % 2], threads=1 + seed % 2):
            assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_the_slopes_of_packed_sequences(fused: str) -> None:
    """Sequences without queries or without keys among them: each adds what it would alone."""
    lengths_q, lengths_k = (70, 0, 3, 130), (40, 5, 0, 64)
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int().to(fused) for x in (lengths_q, lengths_k))
    query, key, value = (
        torch.randn(total, heads, 24).to(fused)
        for total, heads in ((sum(lengths_q), 4), (sum(lengths_k), 2), (sum(lengths_k), 2))
    )
    slopes = (torch.rand(4) + 0.1).to(fused).requires_grad_()
    grad_output = torch.randn(sum(lengths_q), 4, 24).to(fused)
    output = mha_ext.attention_varlen(query, key, value, cu_q, cu_k, alibi_slopes=slopes)
    (packed,) = torch.autograd.grad(output, slopes, grad_output)
    alone = torch.zeros(4, dtype=torch.float64)
    for b in (0, 3):
        rows, columns = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        inputs = {"query": query[rows], "key": key[columns], "value": value[columns]}
        inputs = {name: x.transpose(0, 1)[None] for name, x in inputs.items()}
        wanted = oracle.gradients(**inputs, alibi_slopes=slopes, grad_output=grad_output[rows].transpose(0, 1)[None])
        alone += torch.from_numpy(wanted["alibi_slopes"])
    torch.testing.assert_close(packed.double().cpu(), alone, rtol=1e-4, atol=1e-4)


# --- what the simulator counts -----------------------------------------------------------------------

LENGTH, HEADS = 1024, 2


@pytest.fixture(name="count")
def count_tf32(fused: str, count: Count) -> Count:
    """Of the kernels for fp32 alone."""
    return lambda call: [record for record in count(call) if "tf32" in record.kernel]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_product_in_vain_and_no_bank_met_twice(count: Count, head_dim: int, is_causal: bool) -> None:
    """Each product three times; two forward, seven backward."""
    inputs = [torch.randn(1, HEADS, LENGTH, head_dim, requires_grad=True) for _ in range(3)]
    (forward,) = count(lambda: inputs.append(mha_ext.attention(*inputs, is_causal=is_causal)))
    output = inputs.pop()
    backward = count(lambda: torch.autograd.grad(output, inputs, torch.randn_like(output)))
    product = 3 * 2 * HEADS * LENGTH**2 * head_dim / (2 if is_causal else 1)
    slack = 1.125 if is_causal else 1.0
    assert forward.tensor_flops <= 2 * product * slack
    assert sum(record.tensor_flops for record in backward) <= 7 * product * slack
    for record in (forward, *backward):
        assert record.wavefronts_per_load == 1
        assert record.wavefronts_per_store == 1


def test_columns_beyond_the_head_dimension_are_not_multiplied(count: Count) -> None:
    """In groups of 32."""

    def flops(head_dim: int) -> float:
        tensors = (torch.randn(1, 1, 64, head_dim) for _ in range(3))
        (record,) = count(lambda: mha_ext.attention(*tensors))
        return float(record.tensor_flops)

    assert flops(96) == 0.75 * flops(128)
    assert flops(160) == 0.625 * flops(256)
    assert flops(20) == 0.5 * flops(64)
    assert math.isfinite(flops(1))
