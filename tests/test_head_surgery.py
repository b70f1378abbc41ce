"""Heads switched off by gates, and removed from the parameters for good."""

import copy
from typing import Any

import pytest
import torch
from cases import BackendUnderTest
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from mha_ext import MultiHeadAttention


def module_and_inputs(device: str = "cpu", dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, ...]:
    module = MultiHeadAttention(24, 6, **options).to(device, dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    widths = (24, module.kdim, module.vdim)
    return module, [
        torch.randn(2, length, width, device=device, dtype=dtype)
        for length, width in zip((3, 5, 5), widths, strict=True)
    ]


def gates_without(heads: list[int], like: Tensor) -> Tensor:
    gates = like.new_ones(6)
    gates[heads] = 0
    return gates


FORMS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "one": ({}, [4]),
    "many": ({}, [0, 2, 3, 5]),
    "no bias": ({"bias": False}, [1, 1]),
    "other widths": ({"kdim": 7, "vdim": 9}, [0, 5]),
    "one of each group": ({"num_kv_heads": 2}, [2, 3]),
    "a whole group": ({"num_kv_heads": 3}, [2, 3]),
    "multi-query": ({"num_kv_heads": 1, "head_dim": 5}, [0, 1, 4]),
}


@pytest.mark.parametrize("form", FORMS)
def test_removed_heads_are_heads_with_gates_of_zero(backend: BackendUnderTest, form: str) -> None:
    options, heads = FORMS[form]
    module, (query, key, value) = module_and_inputs(backend.device, **options)
    gates = gates_without(heads, query)
    expected, weights = module(query, key, value, head_gates=gates, need_weights=True, average_attn_weights=False)
    alone = module(query, head_gates=gates) if module.packed else None
    module.prune_heads(heads)
    assert module.num_heads == 6 - len(set(heads))
    output, left = module(query, key, value, need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(left, weights[:, gates.bool()])
    if alone is not None:
        torch.testing.assert_close(module(query), alone)


def test_the_key_head_of_a_removed_group_goes_too() -> None:
    module, _ = module_and_inputs(num_kv_heads=3)
    before = sum(parameter.numel() for parameter in module.parameters())
    module.prune_heads([0, 1])
    assert (module.num_heads, module.num_kv_heads) == (4, 2)
    assert module.qkv_proj.weight.shape == (8 * 4, 24)
    assert (module.qkv_proj.out_features, module.out_proj.in_features) == (32, 16)
    assert sum(parameter.numel() for parameter in module.parameters()) < before
    assert "num_heads=4, num_kv_heads=2" in repr(module)


def test_a_pruned_module_trains_and_is_saved() -> None:
    module, (x, _, _) = module_and_inputs()
    fresh = copy.deepcopy(module)
    module.out_proj.bias.requires_grad_(False)
    module.prune_heads(iter([1, 2]))
    module.prune_heads([0])  # what was head 0 then
    assert not module.out_proj.bias.requires_grad
    assert module.out_proj.weight.requires_grad
    module(x).square().sum().backward()
    torch.optim.SGD(module.parameters(), 0.1).step()
    fresh.prune_heads([1, 2])
    fresh.prune_heads([0])
    fresh.load_state_dict(module.state_dict())
    torch.testing.assert_close(fresh(x), module(x), rtol=0, atol=0)


def test_gates_have_gradients_and_may_differ_by_batch(backend: BackendUnderTest) -> None:
    module, (x, _, _) = module_and_inputs(backend.device)
    gates = torch.rand(2, 6, device=backend.device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda g: module(x, head_gates=g), (gates,))
    both = module(x, head_gates=gates)
    for item in range(2):
        torch.testing.assert_close(module(x[item], head_gates=gates[item]), both[item])
    torch.testing.assert_close(module(x, head_gates=torch.ones(6, device=backend.device)), module(x))


def test_gates_of_another_dtype_change_none(backend: BackendUnderTest) -> None:
    module, (x, _, _) = module_and_inputs(backend.device, torch.bfloat16)
    assert module(x, head_gates=torch.rand(6, device=backend.device)).dtype == torch.bfloat16


def test_what_cannot_be_removed_is_refused_and_nothing_is_changed() -> None:
    module, (x, _, _) = module_and_inputs(num_kv_heads=2)
    expected = module(x)
    for heads, message in (
        (range(6), "heads: expected at least one of 6 heads to be left, got all"),
        ([0], r"heads: expected the same number .* got \[2, 3\] for 2 key heads; head_gates of 0"),
        ([6], r"heads: expected an int in \[0, 5\], got 6"),
        ([-1], r"heads: expected an int in \[0, 5\], got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            module.prune_heads(heads)
    with pytest.raises(TypeError, match="heads: expected an int, got True"):
        module.prune_heads([True])
    for heads in (1, None, torch.tensor([0])):
        with pytest.raises(TypeError, match="heads: expected an iterable of ints, got"):
            module.prune_heads(heads)
    module.prune_heads([])
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("name", ["qkv_proj", "out_proj"])
def test_wrapped_projections_are_not_cut(name: str) -> None:
    def replaced(module: Any) -> None:
        setattr(module, name, nn.Sequential(getattr(module, name)))

    wrappings: dict[str, Any] = {
        "Sequential": replaced,
        "ParametrizedLinear": lambda module: parametrizations.weight_norm(getattr(module, name)),
        "parameters are computed": lambda module: prune.l1_unstructured(getattr(module, name), "weight", 0.5),
        "are computed": lambda module: prune.l1_unstructured(getattr(module, name), "bias", 0.5),
    }
    for came, wrap in wrappings.items():
        module, (x, _, _) = module_and_inputs()
        wrap(module)
        expected = module(x)
        with pytest.raises(ValueError, match=f"{name}: expected an nn.Linear with parameters of its own, got .*{came}"):
            module.prune_heads([0])
        assert module.num_heads == 6
        assert torch.equal(module(x), expected)


def test_gates_that_do_not_fit_are_refused() -> None:
    module, (x, _, _) = module_and_inputs()
    for gates, message in (
        (torch.ones(5), r"head_gates: expected shape \(Hq,\) = \(6,\), got \(5,\)"),
        (torch.ones(3, 6), r"head_gates: expected shape \(B, Hq\) = \(2, 6\), got \(3, 6\)"),
        (torch.ones(2, 6, 1), "head_gates: expected 1 or 2 dimensions"),
        (torch.ones(6, device="meta"), "head_gates: expected device cpu as query, got meta"),
    ):
        with pytest.raises(ValueError, match=message):
            module(x, head_gates=gates)
    with pytest.raises(TypeError, match="head_gates: expected a dtype among"):
        module(x, head_gates=torch.ones(6, dtype=torch.bool))
    with pytest.raises(ValueError, match="head_gates: expected 1 dimensions"):
        module(x[0], head_gates=torch.ones(1, 6))


def test_a_replaced_projection_of_another_width_is_named() -> None:
    module, (x, _, _) = module_and_inputs()
    module.qkv_proj = nn.Linear(24, 24).double()
    with pytest.raises(ValueError, match=r"qkv_proj: expected 72 features, got an output of \(2, 3, 24\)"):
        module(x)
