"""The CPU kernels of every target, under sanitizers, and on processors that this machine is not."""

import functools
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from accuracy import FLOOR, assert_accurate, plain_attention
from cases import CASES, Case, Shape, leaves, make_inputs
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.cpu_kernels import build
from tests.cpu_kernels.kernels import Kernels, Result
from tests.cpu_kernels.mutations import MUTATIONS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

# On both sides of a vector, of a micro-kernel, of a tile and of a block of keys; the last rows and columns of a tensor
# are where a read too far leaves it.
EDGES = [
    Case(f"q{seqlen_q}_k{seqlen_kv}_d{head_dim}_{head_dim_v}", Shape(1, heads, 1, seqlen_q, seqlen_kv, *widths), rules)
    for (heads, seqlen_q, seqlen_kv, *widths), rules in (
        ((1, 1, 97, 15, 17), ()), ((2, 1, 200, 64, 64), ("causal_end",)), ((8, 1, 130, 33, 31), ("lengths",)),
        ((3, 5, 96, 16, 48), ("causal_end",)), ((1, 8, 95, 80, 96), ()), ((1, 9, 70, 128, 128), ("causal_end",)),
        ((1, 17, 31, 1, 1), ()), ((1, 33, 100, 250, 8), ("window",)), ((1, 63, 65, 31, 33), ("causal",)),
        ((2, 65, 64, 40, 40), ("causal",)), ((1, 70, 197, 64, 63), ("causal_end", "bias")),
        ((2, 75, 110, 24, 20), ("bool_mask", "causal_end")), ((1, 80, 100, 32, 65), ("key_padding", "alibi")),
        ((1, 130, 97, 18, 96), ("bias_by_head", "window_left", "sinks")),
        ((1, 2, 99, 24, 24), ("causal_end",)), ((4, 67, 203, 31, 33), ("causal_end",)),
    )
    for head_dim, head_dim_v in [widths]
]  # fmt: skip
# Enough tiles of a head that bf16 values are packed once for all of them.
PACKED_VALUES = Case("many_tiles", Shape(3, 4, 1, 64, 99, 24, 33), ("lengths", "causal_end"))
ALL_CASES = [*CASES, *EDGES, PACKED_VALUES]
SPLIT_CASES = [
    Case("one_query", Shape(2, 4, 2, 1, 600, 40, 24), ("lengths", "softcap")),
    Case("few_queries", Shape(1, 2, 1, 3, 500, 64, 33), ("causal_end", "sinks")),
    Case("a_tile", Shape(1, 1, 1, 40, 400, 24, 64), ("window_left", "alibi")),
    Case("hidden", Shape(2, 2, 2, 2, 390, 16, 16), ("key_padding", "lengths")),
]


@pytest.fixture(scope="session")
def executables(request: pytest.FixtureRequest) -> Any:
    """What the collected tests need, built at the same time."""
    names = {item.callspec.params["kernels"] for item in request.session.items if "kernels" in _parameters(item)}
    return build.start([name for name in build.BUILDS if name in names])


def _parameters(item: Any) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") and item.fspath == __file__ else {}


@pytest.fixture(params=list(build.BUILDS), scope="module")
def kernels(request: pytest.FixtureRequest, executables: Any) -> Iterator[Kernels]:
    """Each build in turn; what it finds at its end, a leak, fails as well."""
    chosen = build.BUILDS[request.param]
    try:
        executable = executables[request.param].result()
    except build.MissingError as error:
        if os.environ.get("CI") and not chosen.emulated and build.on_x86():
            raise
        pytest.skip(str(error))
    found = Kernels(chosen, executable)
    yield found
    found.close()


@functools.cache
def expected_of(case: Case, dtype: torch.dtype) -> tuple[dict[str, Any], oracle.Expected, Tensor]:
    """Inputs, the answer, and that of plain PyTorch: the same for every build."""
    inputs = make_inputs(case, dtype)
    return inputs, oracle.attention(**inputs), plain_attention(**inputs)[0]


def assert_right(result: Result, case: Case, dtype: torch.dtype) -> None:
    _, expected, plain = expected_of(case, dtype)
    assert_accurate(result.output, expected.output, plain, FLOOR[dtype], "output")
    for name in ("lse", "max_score", "entropy"):
        right = getattr(expected, name)
        scale = max(1.0, np.abs(right[np.isfinite(right)]).max(initial=0.0))
        assert_accurate(getattr(result, name) / scale, right / scale, None, 4e-6, name)
    shift, log2_sum = result.row_stats.double().unbind(-1)
    sees = result.lse > -math.inf
    torch.testing.assert_close((shift + log2_sum * math.log(2))[sees], result.lse.double()[sees], rtol=1e-5, atol=1e-5)
    assert not result.row_stats[~sees].any()


def identical(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; NaN would not be, and is expected nowhere."""
    return a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
@every_dtype
def test_values_follow_the_definition(kernels: Kernels, case: Case, dtype: torch.dtype) -> None:
    inputs = expected_of(case, dtype)[0]
    result = kernels.attention(inputs)
    assert_right(result, case, dtype)
    plain = kernels.attention(inputs, statistics=False, threads=1)
    assert identical(plain.output, result.output)
    assert identical(plain.lse, result.lse)


@pytest.mark.parametrize("case", SPLIT_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("splits", [2, 5])
@every_dtype
def test_splits_are_put_together(kernels: Kernels, case: Case, dtype: torch.dtype, splits: int) -> None:
    inputs = expected_of(case, dtype)[0]
    result = kernels.attention(inputs, splits=splits)
    assert_right(result, case, dtype)
    assert identical(kernels.attention(inputs, splits=splits, threads=1).output, result.output)


@pytest.mark.parametrize("rule", ["lengths", "key_padding", "causal", "window"])
@pytest.mark.parametrize("seqlen_q", [1, 9, 91])
@every_dtype
def test_hidden_keys_change_nothing(kernels: Kernels, rule: str, seqlen_q: int, dtype: torch.dtype) -> None:
    shape = Shape(2, 6, 2, seqlen_q, 110, 16, 24)
    inputs = make_inputs(Case("", shape, (rule,)), dtype)
    hidden = torch.zeros((shape.batch, shape.heads_kv, shape.seqlen_kv), dtype=torch.bool)
    if rule == "lengths":
        hidden |= torch.arange(shape.seqlen_kv) >= inputs["key_lengths"][:, None, None]
    elif rule == "key_padding":
        hidden |= ~inputs["attn_mask"][:, 0, 0, None]
    else:  # beyond the last query, and what its window leaves
        hidden[:, :, seqlen_q + (1 if rule == "window" else 0) :] = True
    results = []
    for number in (0.5, math.nan):
        changed = {name: inputs[name].masked_fill(hidden[..., None], number) for name in ("key", "value")}
        results.append(kernels.attention(inputs | changed))
    assert all(identical(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
@pytest.mark.parametrize("seqlen_q", [1, 21])
def test_dropout_draws_what_the_definition_draws(kernels: Kernels, seqlen_q: int, dropout_p: float) -> None:
    inputs = make_inputs(Case("", Shape(2, 2, 1, seqlen_q, 110, 16, 24), ("causal_end",)), torch.float32)
    inputs |= {"dropout_p": dropout_p, "rng_state": torch.tensor([123456789012345, 987654321])}
    assert_accurate(kernels.attention(inputs).output, oracle.attention(**inputs).output, None, 4e-6, "output")


# --- memory ----------------------------------------------------------------------------------------------


def rows_outside(x: Tensor) -> Tensor:
    """Heads within rows."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def with_gaps(x: Tensor) -> Tensor:
    """NaN between rows, which start anywhere."""
    memory = x.new_full((*x.shape[:3], x.shape[3] + 3), math.nan)
    memory[..., 1:-2] = x
    return memory[..., 1:-2]


@pytest.mark.parametrize("layout", [rows_outside, with_gaps], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("seqlen_q", [1, 20, 70])
@every_dtype
def test_strides_change_no_bit_and_gaps_stay_as_they_are(
    kernels: Kernels, dtype: torch.dtype, seqlen_q: int, layout: Any
) -> None:
    inputs = make_inputs(Case("", Shape(2, 4, 2, seqlen_q, 100, 24, 24), ("causal_end", "bias")), dtype)
    expected = kernels.attention(inputs)
    model = layout(torch.zeros_like(expected.output))
    changed = {name: layout(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    result = kernels.attention(changed, output_strides=model.stride())
    assert identical(result.output, expected.output)
    written = torch.zeros(result.output_memory.numel() // dtype.itemsize, dtype=torch.bool)
    written.as_strided(model.shape, model.stride()).fill_(True)
    assert (result.output_memory.view(-1, dtype.itemsize)[~written] == 0xFF).all()


PACKED_Q, PACKED_K = (0, 1, 1, 71, 75, 76), (0, 130, 140, 240, 240, 250)


def packed_inputs(dtype: torch.dtype, heads: int, heads_kv: int) -> dict[str, Any]:
    inputs = make_inputs(Case("", Shape(1, heads, heads_kv, 76, 250, 24, 20), ("causal",)), dtype)
    ends = torch.tensor(PACKED_Q, dtype=torch.int32), torch.tensor(PACKED_K, dtype=torch.int32)
    return inputs | {"q_offset": "end", "cu_seqlens": ends}


def sequences(inputs: dict[str, Any]) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    for b in range(len(PACKED_Q) - 1):
        queries, keys = slice(*PACKED_Q[b : b + 2]), slice(*PACKED_K[b : b + 2])
        alone = {name: inputs[name][:, :, keys] for name in ("key", "value")} | {
            "query": inputs["query"][:, :, queries]
        }
        yield queries, keys, alone | {"is_causal": True, "q_offset": "end"}


@pytest.mark.parametrize("heads", [(2, 2), (8, 2)], ids=str)
@every_dtype
def test_packed_sequences(kernels: Kernels, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    inputs = packed_inputs(dtype, *heads)
    result = kernels.attention(inputs)
    for queries, _, alone in sequences(inputs):
        expected, plain = oracle.attention(**alone), plain_attention(**alone)
        assert_accurate(result.output[:, :, queries], expected.output, plain[0], FLOOR[dtype], "output")
        assert_accurate(result.lse[:, :, queries], expected.lse, None, 4e-6, "lse")


# --- gradients -------------------------------------------------------------------------------------------


@functools.cache
def expected_gradients_of(case: Case, dtype: torch.dtype, with_lse: bool) -> Any:
    inputs = make_inputs(case, dtype)
    shape, generator = case.shape, torch.Generator().manual_seed(1)
    grad_output = torch.randn((*shape.scores[:3], shape.head_dim_v), generator=generator).to(dtype)
    grad_lse = torch.randn(shape.scores[:3], generator=generator) if with_lse else None
    right = oracle.gradients(**inputs, grad_output=grad_output, grad_lse=grad_lse)
    tracked = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    wanted = leaves(tracked)
    output, lse, _ = plain_attention(**tracked)
    total = (output * grad_output).sum()
    if grad_lse is not None:
        total = total + (lse.float() * grad_lse)[lse.isfinite()].sum()
    plain = dict(zip(wanted, torch.autograd.grad(total, list(wanted.values()), allow_unused=True), strict=True))
    return inputs, grad_output, grad_lse, right, plain


GRADIENT_CASES = [case for case in ALL_CASES if case.name != "wide_head"]


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=lambda case: case.name)
@every_dtype
def test_gradients_follow_the_definition(kernels: Kernels, case: Case, dtype: torch.dtype) -> None:
    with_lse = case.name != "everything_bool"
    inputs, grad_output, grad_lse, right, plain = expected_gradients_of(case, dtype, with_lse)
    ours = kernels.gradients(inputs, grad_output, grad_lse)
    assert set(ours) == set(right)
    for name, gradient in ours.items():
        of_plain = plain.get(name)
        floor = 2 * FLOOR[dtype] if name == "alibi_slopes" else FLOOR[dtype]  # delta comes from the rounded output
        assert_accurate(gradient, right[name], None if of_plain is None else of_plain.nan_to_num(0.0), floor, name)
    again = kernels.gradients(inputs, grad_output, grad_lse, threads=1)
    assert all(identical(again[name], ours[name]) for name in ours)


@pytest.mark.parametrize("heads", [(2, 2), (8, 2)], ids=str)
@every_dtype
def test_gradients_of_packed_sequences(kernels: Kernels, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    inputs = packed_inputs(dtype, *heads)
    grad_output = torch.randn(*inputs["query"].shape[:3], 20).to(dtype)
    ours = kernels.gradients(inputs, grad_output)
    for queries, keys, alone in sequences(inputs):
        right = oracle.gradients(**alone, grad_output=grad_output[:, :, queries])
        for name, rows in (("query", queries), ("key", keys), ("value", keys)):
            if rows.stop > rows.start:
                assert_accurate(ours[name][:, :, rows], right[name], None, 2 * FLOOR[dtype], name)


# --- the tools themselves --------------------------------------------------------------------------------


def run_intrinsics(native: bool) -> str:
    try:
        executable = build.build_intrinsics(native)
    except build.MissingError as error:
        if os.environ.get("CI") and build.on_x86():
            raise
        pytest.skip(str(error))
    return subprocess.run([executable], capture_output=True, text=True, check=False).stdout


@pytest.mark.skipif(not build.on_x86(), reason="intrinsics of x86-64")
def test_intrinsics_of_simde_do_what_they_are_defined_to_do() -> None:
    assert re.fullmatch(r"\d{5,} compared, 0 wrong\n", run_intrinsics(native=False))


def has_avx512() -> bool:
    path = Path("/proc/cpuinfo")
    return path.exists() and "avx512_bf16" in path.read_text()


@pytest.mark.skipif(not has_avx512(), reason="this processor has no avx512_bf16")
def test_the_definitions_are_those_of_the_processor() -> None:
    assert re.fullmatch(r"\d{5,} compared, 0 wrong\n", run_intrinsics(native=True))


def test_every_intrinsic_in_use_is_compared() -> None:
    text = "".join(path.read_text() for path in (build.CSRC / "cpu").rglob("*") if path.is_file())
    compared = (build.HERE / "intrinsics.cpp").read_text()
    used = set(re.findall(r"\b_mm512_\w+", text))
    assert used
    assert not {name for name in used if f'"{name}"' not in compared}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_fault_fits_the_sources(name: str) -> None:
    mutation = MUTATIONS[name]
    assert (build.CSRC / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old
    assert mutation.build in build.BUILDS
