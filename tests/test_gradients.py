"""First and second derivatives, forward mode and torch.func, by finite differences in fp64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BackendUnderTest, Case, Shape, leaves, make_inputs
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import mha_ext
from mha_ext import AttentionResult

SMALL = Shape(1, 2, 1, 3, 4, 3, 2)
RULES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "causal_window": ("causal", "window_left"),
    "causal_end": ("causal_end",),
    "lengths": ("lengths",),
    "bool_mask": ("bool_mask",),
    "bias": ("bias",),
    "bias_hides": ("bias_hides",),
    "bias_by_head": ("bias_by_head",),
    "alibi": ("alibi_by_batch", "offset"),
    "softcap": ("softcap",),
    "sinks": ("sinks",),
    "everything": ("bias_hides", "causal_end", "lengths", "alibi", "softcap", "sinks", "scale"),
}


def differentiable_call(rules: tuple[str, ...], device: str = "cpu", dropout_p: float = 0.0) -> tuple[Any, ...]:
    """A function of tensors alone that returns output, weights and the logsumexp of rows that see a key."""
    inputs = make_inputs(Case("", SMALL, rules), torch.float64, device)
    wanted = leaves(inputs)
    rest = {name: x for name, x in inputs.items() if name not in wanted}

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(0)  # the same draw in every call
        named = dict(zip(wanted, tensors, strict=True))
        result = mha_ext.attention(**named, **rest, dropout_p=dropout_p, return_lse=True, return_weights=True)
        assert isinstance(result, AttentionResult)
        assert result.lse is not None
        assert result.weights is not None
        finite = result.lse.masked_fill(result.lse == -math.inf, 0)
        return result.output, result.weights, finite

    return call, tuple(wanted.values())


def checks_for(backend: BackendUnderTest) -> dict[str, Any]:
    """Every entry of the Jacobian on the reference; a random projection of it on the (simulated) kernels."""
    return {"fast_mode": backend.name != "reference", "check_batched_grad": False}


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_first_derivatives(backend: BackendUnderTest, rules: tuple[str, ...], dropout_p: float) -> None:
    call, tensors = differentiable_call(rules, backend.device, dropout_p)
    assert gradcheck(call, tensors, **checks_for(backend))


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_second_derivatives(backend: BackendUnderTest, rules: tuple[str, ...], dropout_p: float) -> None:
    call, tensors = differentiable_call(rules, backend.device, dropout_p)
    assert gradgradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_forward_mode_of_the_reference(rules: tuple[str, ...]) -> None:
    call, tensors = differentiable_call(rules)
    with mha_ext.backends.use_backend("reference"):
        assert gradcheck(call, tensors, check_forward_ad=True, check_backward_ad=False, check_batched_forward_grad=True)
        assert gradgradcheck(
            call, tensors, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False, fast_mode=True
        )


@pytest.mark.parametrize("shape", [(2, 1, 1, 1), (1, 2, 1, 4), (3, 1), (4,), (1, 1), ()])
def test_the_gradient_of_a_broadcast_bias(backend: BackendUnderTest, shape: tuple[int, ...]) -> None:
    query, key, value = (
        torch.randn(2, heads, n, 2, dtype=torch.float64, device=backend.device) for heads, n in ((2, 3), (1, 4), (1, 4))
    )
    bias = torch.randn(shape, dtype=torch.float64, device=backend.device, requires_grad=True)
    assert gradcheck(lambda b: mha_ext.attention(query, key, value, b), (bias,), **checks_for(backend))
    assert gradgradcheck(lambda b: mha_ext.attention(query, key, value, b), (bias,), fast_mode=True)


@pytest.mark.parametrize("which", range(4), ids=["query", "key", "value", "attn_mask"])
def test_each_input_alone_may_ask_for_a_gradient(backend: BackendUnderTest, which: int) -> None:
    """And gets the one that it gets when all ask."""
    inputs = make_inputs(Case("", SMALL, ("bias",)), torch.float64, backend.device)
    every = [x.clone().requires_grad_() for x in inputs.values()]
    all_grads = torch.autograd.grad(mha_ext.attention(*every).square().sum(), every)
    one = [x.clone().requires_grad_(index == which) for index, x in enumerate(inputs.values())]
    (grad,) = torch.autograd.grad(mha_ext.attention(*one).square().sum(), one[which])
    torch.testing.assert_close(grad, all_grads[which])


@pytest.mark.parametrize("outputs", [(0,), (1,), (2,), (0, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_any_of_the_outputs_may_be_used(backend: BackendUnderTest, outputs: tuple[int, ...], dropout_p: float) -> None:
    call, tensors = differentiable_call(("bias", "softcap", "sinks"), backend.device, dropout_p)
    leaf = tuple(x for index, x in enumerate(tensors) if index != 2 or 0 in outputs)  # the value enters the output only

    def chosen(*wanted: Tensor) -> tuple[Tensor, ...]:
        every = wanted if len(wanted) == len(tensors) else (*wanted[:2], tensors[2].detach(), *wanted[2:])
        results = call(*every)
        return tuple(results[index] for index in outputs)

    assert gradcheck(chosen, leaf, **checks_for(backend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_grad_outputs_of_any_layout(backend: BackendUnderTest, dtype: torch.dtype) -> None:
    call_inputs = make_inputs(Case("", Shape(2, 4, 2, 5, 6, 8, 8)), dtype, backend.device)
    wanted = leaves(call_inputs)
    output = mha_ext.attention(**call_inputs)
    grad = torch.randn(output.shape, device=backend.device).to(dtype)
    layouts = (
        grad,
        grad.mT.contiguous().mT,
        grad.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack((grad, torch.full_like(grad, math.nan)), -1)[..., 0],
    )
    results = [torch.autograd.grad(output, list(wanted.values()), g, retain_graph=True) for g in layouts]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b)


# --- the parts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [True, False])
def test_derivatives_of_qkv_split(backend: BackendUnderTest, with_bias: bool) -> None:
    packed = torch.randn(2, 3, 8, dtype=torch.float64, device=backend.device, requires_grad=True)
    bias = torch.randn(8, dtype=torch.float64, device=backend.device, requires_grad=True)
    tensors = (packed, bias) if with_bias else (packed,)

    def call(packed: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        return mha_ext.qkv_split(packed, bias, 2, 1)

    assert gradcheck(call, tensors, **checks_for(backend))
    assert gradgradcheck(lambda *x: tuple(part**2 for part in call(*x)), tensors, fast_mode=True)


@pytest.mark.parametrize(("heads", "heads_kv"), [(2, 2), (4, 2), (3, 1)])
def test_derivatives_of_the_products(backend: BackendUnderTest, heads: int, heads_kv: int) -> None:
    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device=backend.device, requires_grad=True)

    query, key = tensor(2, heads, 3, 2), tensor(2, heads_kv, 4, 2)
    weights, value = tensor(2, heads, 3, 4), tensor(2, heads_kv, 4, 2)
    for call, tensors in (
        (lambda q, k: mha_ext.attention_scores(q, k, -0.3), (query, key)),
        (mha_ext.attention_output, (weights, value)),
    ):
        assert gradcheck(call, tensors, **checks_for(backend))
        assert gradgradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_derivatives_of_masked_softmax(backend: BackendUnderTest, rules: tuple[str, ...], dropout_p: float) -> None:
    inputs = make_inputs(Case("", SMALL, tuple(r for r in rules if r != "scale")), torch.float64, backend.device)
    for name in ("query", "key", "value"):
        del inputs[name]
    wanted = leaves(inputs)
    scores = torch.randn(SMALL.scores, dtype=torch.float64, device=backend.device, requires_grad=True)

    def call(scores: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        arguments = {**inputs, **dict(zip(wanted, tensors, strict=True))}
        weights, lse = mha_ext.masked_softmax(scores, **arguments, dropout_p=dropout_p, return_lse=True)
        return weights, lse.masked_fill(lse == -math.inf, 0)

    tensors = (scores, *wanted.values())
    assert gradcheck(call, tensors, **checks_for(backend))
    assert gradgradcheck(call, tensors, fast_mode=True)


# --- torch.func -----------------------------------------------------------------------------------------


def squared(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    output = mha_ext.attention(query, key, value, bias, is_causal=True, softcap=2.0)
    assert isinstance(output, Tensor)
    return output.square().sum()


@pytest.fixture
def examples() -> list[Tensor]:
    """Five independent calls: (5, B, H, L, D), and a bias of each."""
    shapes = ((5, 1, 4, 3, 2), (5, 1, 2, 4, 2), (5, 1, 2, 4, 2), (5, 4, 3, 4))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def test_vmap_computes_every_example(examples: list[Tensor]) -> None:
    def call(*tensors: Tensor) -> AttentionResult:
        result = mha_ext.attention(*tensors, return_lse=True, return_weights=True, return_stats=True)
        assert isinstance(result, AttentionResult)
        return result

    batched = torch.func.vmap(call)(*examples)
    for index in range(5):
        for ours, expected in zip(batched, call(*(x[index] for x in examples)), strict=True):
            torch.testing.assert_close(ours[index], expected)


def test_vmap_over_the_query_alone(examples: list[Tensor]) -> None:
    query, *rest = examples
    fixed = [x[0] for x in rest]
    batched = torch.func.vmap(squared, in_dims=(0, None, None, None))(query, *fixed)
    torch.testing.assert_close(batched, torch.stack([squared(q, *fixed) for q in query]))


def test_vmap_of_grad_gives_the_gradient_of_each_example(examples: list[Tensor]) -> None:
    gradient: Callable[..., Any] = torch.func.grad(squared, argnums=(0, 1, 2, 3))
    batched = torch.func.vmap(gradient)(*examples)
    for index in range(5):
        wanted = [x[index].clone().requires_grad_() for x in examples]
        expected = torch.autograd.grad(squared(*wanted), wanted)
        for ours, theirs in zip(batched, expected, strict=True):
            torch.testing.assert_close(ours[index], theirs)


def test_jvp_and_vjp_agree(examples: list[Tensor]) -> None:
    point = tuple(x[0] for x in examples)
    tangents = tuple(torch.randn_like(x) for x in point)
    value, directional = torch.func.jvp(squared, point, tangents)
    gradient = torch.func.grad(squared, argnums=(0, 1, 2, 3))(*point)
    torch.testing.assert_close(value, squared(*point))
    torch.testing.assert_close(directional, sum((g * t).sum() for g, t in zip(gradient, tangents, strict=True)))


def test_the_hessian_is_symmetric(examples: list[Tensor]) -> None:
    point = tuple(x[0] for x in examples)
    hessian = torch.func.hessian(squared, argnums=0)(*point).reshape(24, 24)
    torch.testing.assert_close(hessian, hessian.T)
    assert hessian.abs().max() > 1e-3


def test_vmap_with_dropout_draws_as_it_is_told(examples: list[Tensor]) -> None:
    query, key, value, _ = (x[:1].expand(5, *x.shape[1:]) for x in examples)

    def call(*tensors: Tensor) -> Tensor:
        return mha_ext.attention(*tensors, dropout_p=0.5)

    different = torch.func.vmap(call, randomness="different")(query, key, value)
    same = torch.func.vmap(call, randomness="same")(query, key, value)
    assert not torch.equal(different[0], different[1])
    assert torch.equal(same[0], same[1])
