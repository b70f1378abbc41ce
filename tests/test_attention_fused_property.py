"""Every feature of attention by the fused kernels, alone and in pairs, forward and backward, against fp64.

A feature is a draw of arguments; hypothesis draws its numbers, the shape, the layout in memory and the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import pytest
import torch
from cases import DIFFERENTIABLE, Shape
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mha_ext
from mha_ext import AttentionResult, reference

# Of the largest value expected: a few roundings of what is stored in between (weights, dS), and of the result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# On both sides of a tile, of a fragment, and of a pair.
LENGTHS = (1, 2, 7, 8, 16, 17, 31, 63, 64, 65, 130)
HEAD_DIMS = (1, 5, 16, 17, 40, 64, 72, 96, 128, 136, 192)


class Call(NamedTuple):
    """What a feature may look at, and draw from."""

    draw: st.DrawFn
    shape: Shape
    dtype: torch.dtype
    generator: torch.Generator
    inputs: dict[str, Any]

    def randn(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.generator)

    def chance(self, sizes: tuple[int, ...], p: float) -> Tensor:
        return torch.rand(sizes, generator=self.generator) < p

    def mask_sizes(self) -> tuple[int, ...]:
        """(B, Hq, Lq, Lk) with any of the axes broadcast."""
        return tuple(size if self.draw(st.booleans()) else 1 for size in self.shape.scores)


# --- features: each sets arguments of `attention`; two that set the same one do not go together ---------


def causal(call: Call) -> dict[str, Any]:
    return {"is_causal": True}


def window(call: Call) -> dict[str, Any]:
    side = st.one_of(st.none(), st.sampled_from((0, 1, 5, 20, 70)))
    return {"window": (call.draw(side), call.draw(side))}


def offset(call: Call) -> dict[str, Any]:
    away = st.integers(-call.shape.seqlen_q - 2, call.shape.seqlen_kv + 2)
    batch = call.shape.batch
    offsets = st.lists(away, min_size=batch, max_size=batch).map(torch.tensor)
    return {"q_offset": call.draw(st.one_of(st.just("end"), away, offsets))}


def lengths(call: Call) -> dict[str, Any]:
    """Keys beyond the length are NaN."""
    batch, seqlen_kv = call.shape.batch, call.shape.seqlen_kv
    drawn = call.draw(st.lists(st.integers(-1, seqlen_kv + 1), min_size=batch, max_size=batch))
    for b, length in enumerate(drawn):
        for name in ("key", "value"):
            call.inputs[name][b, :, max(length, 0) :] = math.nan
    return {"key_lengths": torch.tensor(drawn)}


def bool_mask(call: Call) -> dict[str, Any]:
    """Single scores are hidden, or whole blocks of 64 x 64."""
    sizes = call.mask_sizes()
    visible = call.draw(st.sampled_from((0.1, 0.5, 0.97, 1.0)))
    mask = call.chance(sizes, visible)
    if call.draw(st.booleans()):
        blocks = call.chance((*sizes[:2], *(-(-size // 64) for size in sizes[2:])), visible)
        mask = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, : sizes[2], : sizes[3]]
    return {"attn_mask": mask.mT.contiguous().mT if call.draw(st.booleans()) else mask}


def key_padding(call: Call) -> dict[str, Any]:
    """Keys that the mask hides from every query are NaN."""
    batch, seqlen_kv = call.shape.batch, call.shape.seqlen_kv
    mask = call.chance((batch, 1, 1, seqlen_kv), 0.6)
    for name in ("key", "value"):
        call.inputs[name].masked_fill_(~mask.mT, math.nan)
    return {"attn_mask": mask}


def bias(call: Call) -> dict[str, Any]:
    mask = call.randn(*call.mask_sizes())
    if call.draw(st.booleans()):
        mask = mask.masked_fill(call.chance(tuple(mask.shape), 0.3), -math.inf)
    return {"attn_mask": mask.to(call.draw(st.sampled_from((call.dtype, torch.float32))))}


def alibi(call: Call) -> dict[str, Any]:
    sizes = call.shape.scores[:2] if call.draw(st.booleans()) else (call.shape.heads,)
    return {"alibi_slopes": 0.3 * call.randn(*sizes)}


def softcap(call: Call) -> dict[str, Any]:
    return {"softcap": call.draw(st.sampled_from((0.5, 2.0, 30.0)))}


def sinks(call: Call) -> dict[str, Any]:
    return {"sinks": 2 * call.randn(call.shape.heads)}


def scale(call: Call) -> dict[str, Any]:
    return {"scale": call.draw(st.sampled_from((-0.4, 0.0, 1.0)))}


def dropout(call: Call) -> dict[str, Any]:
    return {"dropout_p": call.draw(st.sampled_from((0.1, 0.5, 1.0)))}


FEATURES: dict[str, Callable[[Call], dict[str, Any]]] = {
    feature.__name__: feature
    for feature in (
        causal, window, offset, lengths, bool_mask, key_padding, bias, alibi, softcap, sinks, scale, dropout
    )
}  # fmt: skip
SETS_THE_MASK = {"bool_mask", "key_padding", "bias"}
NEEDS_ONE_TENSOR = {"lengths", "bool_mask", "key_padding", "bias"}  # packed sequences have none of these
PAIRS = [
    (),
    *((name,) for name in FEATURES),
    *(pair for pair in combinations(FEATURES, 2) if not set(pair) <= SETS_THE_MASK),
]
PACKED_PAIRS = [pair for pair in PAIRS if not NEEDS_ONE_TENSOR.intersection(pair)]


# --- calls ---------------------------------------------------------------------------------------------


def stored(x: Tensor, order: str) -> Tensor:
    """The same numbers in another layout of memory: heads outside, rows outside, or rows that are not aligned."""
    if order == "rows":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if order == "padded":
        return torch.nn.functional.pad(x, (1, 2))[..., 1:-2]
    return x


@st.composite
def calls(draw: st.DrawFn, features: tuple[str, ...], dtype: torch.dtype) -> dict[str, Any]:
    group, heads_kv = draw(st.sampled_from((1, 1, 2, 3))), draw(st.integers(1, 2))
    shape = Shape(
        draw(st.integers(1, 3)), group * heads_kv, heads_kv, draw(st.sampled_from(LENGTHS)),
        draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(HEAD_DIMS)), draw(st.sampled_from(HEAD_DIMS)),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    inputs: dict[str, Any] = {
        "query": torch.randn((shape.batch, shape.heads, shape.seqlen_q, shape.head_dim), generator=generator),
        "key": torch.randn((shape.batch, heads_kv, shape.seqlen_kv, shape.head_dim), generator=generator),
        "value": torch.randn((shape.batch, heads_kv, shape.seqlen_kv, shape.head_dim_v), generator=generator),
    }
    call = Call(draw, shape, dtype, generator, inputs)
    for name in features:
        inputs.update(FEATURES[name](call))
    for name in ("query", "key", "value"):
        inputs[name] = stored(inputs[name].to(dtype), draw(st.sampled_from(("heads", "rows", "padded"))))
    return inputs


@st.composite
def packed_calls(draw: st.DrawFn, features: tuple[str, ...], dtype: torch.dtype) -> dict[str, Any]:
    """As `calls`, for sequences of different lengths, of which some are empty."""
    inputs = draw(calls(features, dtype))
    batch = inputs["query"].shape[0]
    for name, axes in (("q", ("query",)), ("k", ("key", "value"))):
        longest = inputs[axes[0]].shape[2]
        sizes = draw(st.lists(st.integers(0, longest), min_size=batch, max_size=batch))
        for axis in axes:
            rows = [x[:, :size].transpose(0, 1) for x, size in zip(inputs[axis], sizes, strict=True)]
            inputs[axis] = torch.cat(rows)
        ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
        inputs[f"cu_seqlens_{name}"] = torch.cat((ends.new_zeros(1), ends))
    return inputs


# --- what is asked of a call ---------------------------------------------------------------------------


def reference_arguments(inputs: dict[str, Any], packed: bool) -> dict[str, Any]:
    """The same call for `reference`, which checks nothing, in fp64."""
    arguments = {
        name: x.detach().double() if name in DIFFERENTIABLE and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    arguments.setdefault("is_causal", False)
    arguments["scale"] = inputs.get("scale", 1 / math.sqrt(inputs["query"].shape[-1]))
    if packed and arguments.get("q_offset") == "end":
        of_q, of_k = (inputs[f"cu_seqlens_{name}"].diff().long() for name in "qk")
        arguments["q_offset"] = of_k - of_q
    elif arguments.get("q_offset") == "end":
        arguments["q_offset"] = inputs["key"].shape[2] - inputs["query"].shape[2]
    return arguments


def wanted_of(inputs: dict[str, Any]) -> dict[str, Tensor]:
    found = {name: inputs[name] for name in DIFFERENTIABLE if name in inputs}
    return {name: x.detach().requires_grad_() for name, x in found.items() if x.is_floating_point()}


def run(function: Callable[..., Any], inputs: dict[str, Any], **more: Any) -> tuple[AttentionResult, dict[str, Tensor]]:
    """What it returns, and gradients of a sum with weights that are the same whatever computes it."""
    wanted = wanted_of(inputs)
    result = function(**{**inputs, **wanted}, **more)
    generator = torch.Generator().manual_seed(0)
    grad_output, grad_lse = (torch.randn(x.shape, generator=generator).to(x) for x in (result.output, result.lse))
    grad_lse = grad_lse.masked_fill(result.lse.detach() == -math.inf, 0)  # such a row has no derivative
    outputs = (result.output, result.lse)
    grads = torch.autograd.grad(outputs, list(wanted.values()), (grad_output, grad_lse), materialize_grads=True)
    return result, dict(zip(wanted, grads, strict=True))


def assert_close(ours: Tensor | None, exact: Tensor | None, tolerance: float, scale: float, name: str) -> None:
    assert ours is not None
    assert exact is not None
    ours, exact = ours.detach().cpu().double(), exact.detach().double()
    assert ours.shape == exact.shape, name
    finite = exact.isfinite()
    assert torch.equal(ours[~finite], exact[~finite]), f"{name}: not finite"
    error = (ours - exact)[finite].abs().max().item() if finite.any() else 0.0
    assert error <= tolerance * scale, f"{name}: largest error {error:.3g}, allowed {tolerance * scale:.3g}"


def largest(x: Tensor) -> float:
    """The largest finite number in it."""
    finite = x.detach()[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def check(inputs: dict[str, Any], device: str, packed: bool = False) -> None:
    ours_of, exact_of = (
        (mha_ext.attention_varlen, reference.attention_varlen) if packed else (mha_ext.attention, reference.attention)
    )
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    torch.manual_seed(3)
    rng_state = reference.draw_rng_state(torch.device(device)).cpu()
    torch.manual_seed(3)
    result, grads = run(ours_of, moved, return_lse=True, return_stats=True)
    arguments = reference_arguments(inputs, packed)
    expected, exact = run(exact_of, arguments, rng_state=rng_state, return_entropy=True)

    tolerance = TOLERANCE[inputs["query"].dtype]
    assert_close(result.output, expected.output, tolerance, max(1.0, largest(inputs["value"])), "output")
    for name in ("lse", "max_score", "entropy"):
        statistic = getattr(expected, name)
        assert_close(getattr(result, name), statistic, 4e-6, max(4.0, largest(statistic)), name)
    size = max(1.0, *map(largest, exact.values()))
    axis = 0 if packed else 2
    reach = math.sqrt(inputs["query"].shape[axis] + inputs["key"].shape[axis])  # errors times distances, summed
    for name, gradient in exact.items():
        allowed = 2 * tolerance * (reach if name == "alibi_slopes" else 1)
        assert_close(grads[name], gradient, allowed, size, f"gradient of {name}")


def dtypes(features: tuple[str, ...]) -> st.SearchStrategy[torch.dtype]:
    return st.sampled_from(list(TOLERANCE))


@pytest.mark.parametrize("features", PAIRS, ids="-".join)
@settings(max_examples=8)
@given(data=st.data())
def test_features_in_pairs(fused: str, features: tuple[str, ...], data: st.DataObject) -> None:
    dtype = data.draw(dtypes(features))
    check(data.draw(calls(features, dtype)), fused)


@pytest.mark.parametrize("features", PACKED_PAIRS, ids="-".join)
@settings(max_examples=6)
@given(data=st.data())
def test_features_of_packed_sequences_in_pairs(fused: str, features: tuple[str, ...], data: st.DataObject) -> None:
    dtype = data.draw(dtypes(features))
    check(data.draw(packed_calls(features, dtype)), fused, packed=True)


@pytest.mark.slow
@settings(max_examples=400)
@given(data=st.data())
def test_any_features_together(fused: str, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(list(FEATURES)), min_size=3, unique=True))
    masks = [name for name in chosen if name in SETS_THE_MASK]
    features = tuple(name for name in chosen if name not in masks[1:])
    dtype = data.draw(dtypes(features))
    check(data.draw(calls(features, dtype)), fused)
