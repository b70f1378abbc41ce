"""Any shape, stride, mask and rule that hypothesis thinks of follows the definition."""

import math
from typing import Any

import numpy as np
import oracle
import torch
from accuracy import assert_accurate
from cases import BackendUnderTest, leaves
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mha_ext

FLOORS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
sizes = st.integers(1, 9)


def view_of(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A tensor of this shape with any order of axes in memory, gaps, an offset, and axes of stride 0."""
    expanded = [draw(st.booleans()) and draw(st.booleans()) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.sampled_from((1, 1, 1, 2, 3))) for _ in shape]
    stored = [1 if one else size for size, one in zip(shape, expanded, strict=True)]
    memory = torch.randn([stored[axis] * gaps[axis] + 1 for axis in order], generator=generator).to(dtype)
    view = memory.permute([order.index(axis) for axis in range(len(shape))])
    for axis, (size, gap) in enumerate(zip(stored, gaps, strict=True)):
        view = view.narrow(axis, 1, size * gap)
        view = view[(slice(None),) * axis + (slice(None, None, gap),)]
    return view.expand(shape)


@st.composite
def calls(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...], largest: int = 9) -> dict[str, Any]:
    """Arguments of `attention`."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(dtypes))
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    batch, heads_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    seqlen_q, seqlen_kv = draw(st.integers(1, largest)), draw(st.integers(0, largest))
    head_dim, head_dim_v = draw(sizes), draw(sizes)
    scores = (batch, heads_kv * group, seqlen_q, seqlen_kv)
    inputs: dict[str, Any] = {
        "query": view_of(draw, (*scores[:3], head_dim), dtype, generator),
        "key": view_of(draw, (batch, heads_kv, seqlen_kv, head_dim), dtype, generator),
        "value": view_of(draw, (batch, heads_kv, seqlen_kv, head_dim_v), dtype, generator),
        "is_causal": draw(st.booleans()),
        "scale": draw(st.sampled_from((None, None, 0.3, -1.0, 0.0))),
        "softcap": draw(st.sampled_from((None, None, 0.5, 5.0))),
    }
    side = st.one_of(st.none(), st.integers(0, largest))
    inputs["window"] = draw(st.one_of(st.none(), st.tuples(side, side)))
    inputs["q_offset"] = draw(
        st.one_of(
            st.just(0),
            st.just("end"),
            st.integers(-largest, largest),
            st.lists(st.integers(-largest, largest), min_size=batch, max_size=batch).map(torch.tensor),
        )
    )
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(-1, largest + 1), min_size=batch, max_size=batch))
        inputs["key_lengths"] = torch.tensor(lengths, dtype=draw(st.sampled_from((torch.int32, torch.int64))))
    kind = draw(st.sampled_from((None, "bool", "bias", "hiding bias")))
    if kind is not None:
        axes = draw(st.integers(0, 4))
        shape = tuple(1 if draw(st.booleans()) else size for size in scores[4 - axes :])
        mask = view_of(draw, shape, draw(st.sampled_from((dtype, exact))), generator)
        inputs["attn_mask"] = mask > -0.3 if kind == "bool" else mask
        if kind == "hiding bias":
            inputs["attn_mask"] = mask.masked_fill(mask > 0.5, -math.inf)
    if draw(st.booleans()):
        slopes = (scores[1],) if draw(st.booleans()) else scores[:2]
        inputs["alibi_slopes"] = view_of(draw, slopes, exact, generator)
    if draw(st.booleans()):
        inputs["sinks"] = view_of(draw, (scores[1],), exact, generator)
    return inputs


def check(inputs: dict[str, Any], device: str) -> None:
    inputs = {
        name: x.to(device) if isinstance(x, Tensor) and x.device.type != device else x for name, x in inputs.items()
    }
    wanted = {
        name: x.detach().requires_grad_()
        for name, x in leaves({k: v.detach() for k, v in inputs.items() if isinstance(v, Tensor)}).items()
    }
    inputs = {**inputs, **wanted}
    dtype = inputs["query"].dtype
    result = mha_ext.attention(**inputs, return_lse=True, return_weights=True, return_stats=True)
    expected = oracle.attention(**inputs)
    floor = FLOORS[dtype]
    for name, ours in result._asdict().items():
        exact = getattr(expected, name)
        scale = max(1.0, np.abs(exact[np.isfinite(exact)]).max(initial=0.0))
        assert_accurate(ours / scale, exact / scale, None, floor, name)
    outputs = (result.output, result.weights)
    grads = [torch.ones_like(x).cumsum(-1) for x in outputs]
    computed = torch.autograd.grad(outputs, list(wanted.values()), grads)
    exact_grads = oracle.gradients(**inputs, grad_output=grads[0], grad_weights=grads[1])
    largest = max(1.0, *(np.abs(x).max(initial=0.0) for x in exact_grads.values()))
    for name, ours in zip(wanted, computed, strict=True):
        np.testing.assert_allclose(
            oracle.to_array(ours), exact_grads[name], rtol=0, atol=4 * floor * largest, err_msg=f"gradient of {name}"
        )


@settings(max_examples=200)
@given(inputs=calls(dtypes=(torch.float64,)))
def test_the_reference_follows_the_definition(inputs: dict[str, Any]) -> None:
    with mha_ext.backends.use_backend("reference"):
        check(inputs, "cpu")


@settings(max_examples=40)
@given(inputs=calls(dtypes=(torch.float32, torch.float16, torch.bfloat16)))
def test_lower_precision_follows_the_definition(inputs: dict[str, Any]) -> None:
    with mha_ext.backends.use_backend("reference"):
        check(inputs, "cpu")


@settings(max_examples=30)
@given(inputs=calls(dtypes=tuple(FLOORS), largest=33))
def test_every_backend_follows_the_definition(backend: BackendUnderTest, inputs: dict[str, Any]) -> None:
    check(inputs, backend.device)
