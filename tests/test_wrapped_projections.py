"""What people attach to a projection, or put in its place, takes effect: on each one, in self- and cross-attention.

What is attached to the packed projection alone is in test_module.py.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from mha_ext import MultiHeadAttention


class LowRank(nn.Linear):
    """A LoRA layer of the other kind: a Linear with an adapter, so that it has a `weight`."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, dtype=base.weight.dtype)
        self.load_state_dict(base.state_dict())
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=base.weight.dtype))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


def gated(linear: nn.Linear) -> nn.Module:
    return nn.Sequential(linear, nn.Linear(linear.out_features, linear.out_features, dtype=linear.weight.dtype))


WRAPPERS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm": parametrizations.spectral_norm,
    "prune_unstructured": lambda linear: prune.l1_unstructured(linear, "weight", amount=0.5),
    "prune_structured": lambda linear: prune.ln_structured(linear, "weight", amount=0.5, n=2, dim=0),
    "prune_bias": lambda linear: prune.random_unstructured(linear, "bias", amount=0.5),
    "low_rank": LowRank,
    "sequential": gated,
}


class Attention(NamedTuple):
    """A kind of call, and its projections."""

    options: dict[str, Any]
    widths: tuple[int, ...]  # of the inputs
    projections: tuple[str, ...]


PACKED, SEPARATE = ("qkv_proj", "out_proj"), ("q_proj", "k_proj", "v_proj", "out_proj")
ATTENTIONS = {
    "self": Attention({"num_kv_heads": 2}, (16,), PACKED),
    "cross": Attention({"num_kv_heads": 2}, (16, 16), PACKED),
    "separate": Attention({"kdim": 12, "vdim": 20}, (16, 12, 20), SEPARATE),
}
PLACES = [(kind, projection) for kind, attention in ATTENTIONS.items() for projection in attention.projections]


def make(kind: str, dtype: torch.dtype = torch.float64) -> tuple[MultiHeadAttention, list[Tensor]]:
    attention = ATTENTIONS[kind]
    lengths = (5, 3, 3)
    inputs = [torch.randn(2, n, width, dtype=dtype) for n, width in zip(lengths, attention.widths, strict=False)]
    mha = MultiHeadAttention(16, 4, dtype=dtype, **attention.options).eval()
    with torch.no_grad():
        for name in attention.projections:
            mha.get_parameter(f"{name}.bias").normal_()
    return mha, [x.requires_grad_() for x in inputs]


def with_the_same_map(mha: MultiHeadAttention, kind: str) -> MultiHeadAttention:
    """Plain projections that yield what the wrapped ones yield."""
    plain, _ = make(kind)
    with torch.no_grad():
        for name in ATTENTIONS[kind].projections:
            projection, linear = mha.get_submodule(name), plain.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            bias = projection(torch.zeros(1, linear.in_features, dtype=torch.float64))
            weight = (projection(torch.eye(linear.in_features, dtype=torch.float64)) - bias).T
            linear.weight.copy_(weight)
            linear.bias.copy_(bias[0])
    return plain


@pytest.mark.parametrize(("kind", "projection"), PLACES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_projection_is_the_one_that_is_used(wrapper: str, kind: str, projection: str) -> None:
    mha, inputs = make(kind)
    before = mha(*inputs)
    wrapped = WRAPPERS[wrapper](getattr(mha, projection))
    setattr(mha, projection, wrapped)
    output, expected = mha(*inputs), with_the_same_map(mha, kind)(*inputs)
    torch.testing.assert_close(output, expected)
    # A weight norm starts as what it is given, and a bias of the keys moves every score of a row alike.
    unchanged = wrapper == "weight_norm" or (wrapper, projection) == ("prune_bias", "k_proj")
    assert bool((output - before).abs().max() > 1e-4) is not unchanged
    for ours, theirs in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (output, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)
    mha(*inputs).square().sum().backward()
    for name, parameter in wrapped.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0 or (projection, name[:4]) == ("k_proj", "bias"), name


@pytest.mark.parametrize(("kind", "projection"), PLACES)
def test_hooks_of_every_sort_are_called(kind: str, projection: str) -> None:
    mha, inputs = make(kind)
    called: list[str] = []
    linear = mha.get_submodule(projection)
    linear.register_forward_pre_hook(lambda *_: called.append("before"))
    linear.register_forward_hook(lambda *_: called.append("after"))
    linear.register_full_backward_pre_hook(lambda *_: called.append("backward before"))
    linear.register_full_backward_hook(lambda *_: called.append("backward after"))
    mha(*inputs).sum().backward()
    times = 2 if (kind, projection) == ("cross", "qkv_proj") else 1  # whole for query, and whole for key and value
    assert called == ["before", "after"] * times + ["backward before", "backward after"] * times


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="no engine for quantised layers")
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_projections_quantised_dynamically(kind: str) -> None:
    mha, inputs = make(kind, torch.float32)
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(mha), {nn.Linear}, dtype=torch.qint8)
    for name in ATTENTIONS[kind].projections:
        assert type(quantised.get_submodule(name)) is torch.ao.nn.quantized.dynamic.Linear
    with torch.no_grad():
        output, expected = quantised(*inputs), mha(*inputs)
    assert not torch.equal(output, expected)
    torch.testing.assert_close(output, expected, rtol=0, atol=0.1)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_adapters_of_peft_on_every_projection(kind: str) -> None:
    peft = pytest.importorskip("peft")
    mha, inputs = make(kind, torch.float32)
    expected = mha(*inputs)
    config = peft.LoraConfig(r=2, target_modules=list(ATTENTIONS[kind].projections), init_lora_weights=False)
    model = peft.get_peft_model(nn.ModuleDict({"attention": mha}), config)
    adapted = model.base_model.model["attention"]
    output = adapted(*inputs)
    assert (output - expected).abs().max() > 1e-3
    output.square().sum().backward()
    trained = {name: x for name, x in adapted.named_parameters() if x.requires_grad}
    assert len(trained) == 2 * len(ATTENTIONS[kind].projections)
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in trained.values())
    assert not any(x.grad is not None for name, x in adapted.named_parameters() if name not in trained)
    merged = model.merge_and_unload()["attention"]
    assert all(type(merged.get_submodule(name)) is nn.Linear for name in ATTENTIONS[kind].projections)
    torch.testing.assert_close(merged(*inputs), output)
