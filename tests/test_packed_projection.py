"""The module on the fused kernels: nothing is copied between its products, and no L x L matrix is in memory."""

from typing import Any

import pytest
import torch
from operators import Operators
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import mha_ext
from mha_ext import MultiHeadAttention


def module_and_input(
    fused_anywhere: str, dtype: torch.dtype = torch.float16, **options: Any
) -> tuple[MultiHeadAttention, Tensor]:
    mha = MultiHeadAttention(32, 4, device=fused_anywhere, dtype=dtype, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mha.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return mha, torch.randn(2, 20, 32, generator=generator).to(fused_anywhere, dtype)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_nothing_runs_between_the_products(fused_anywhere: str, num_kv_heads: int) -> None:
    mha, x = module_and_input(fused_anywhere, num_kv_heads=num_kv_heads)
    with torch.no_grad(), Operators() as forward:
        mha(x, is_causal=True)
    attention = next(name for name in forward.names if name.startswith("mha_ext::"))
    assert attention in ("mha_ext::attention_forward", "mha_ext::attention_forward_cpu")
    assert forward.names == ["aten::addmm", attention, "aten::addmm"]

    x.requires_grad_()
    output = mha(x, is_causal=True)
    grad = torch.ones_like(output)
    with Operators() as backward:
        output.backward(grad)
    attention = backward.names.index(attention.replace("forward", "backward"))
    copies = [name for name in backward.names if name in ("aten::copy_", "aten::clone", "aten::add", "aten::cat")]
    assert not copies, f"{copies} around operator {attention} of {backward.names}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_gradients_equal_those_of_the_reference(fused_anywhere: str, dtype: torch.dtype, num_kv_heads: int) -> None:
    mha, x = module_and_input(fused_anywhere, dtype, num_kv_heads=num_kv_heads)
    x.requires_grad_()
    wanted = (x, *mha.parameters())
    lengths = torch.tensor([20, 13], device=fused_anywhere)
    results = []
    for backend in (None, "reference"):
        output = mha(x, is_causal=True, key_lengths=lengths, backend=backend)
        results.append((output, *torch.autograd.grad(output.square().sum(), wanted)))
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance * float(expected.detach().abs().max()))


def test_the_backward_of_the_module_can_be_differentiated(fused_anywhere: str) -> None:
    mha, x = module_and_input(fused_anywhere, torch.float32)
    x.requires_grad_()
    results = []
    for backend in (None, "reference"):
        output = mha(x, backend=backend)
        (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), (x, mha.qkv_proj.weight)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3 * float(expected.detach().abs().max()))


def allocations(call: Any) -> list[int]:
    """Bytes of each block of memory that a call allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]


@pytest.mark.parametrize("mask", [None, "causal", "padding"])
def test_memory_grows_with_the_length_and_not_with_its_square(fused_anywhere: str, mask: str | None) -> None:
    """At L = 8192 the reference holds matrices of 256 MiB; all that a fused call allocates, forward and backward, is of
    the size of its inputs and of three numbers a row."""
    length, head_dim = 8192, 64
    query, key, value = (
        torch.randn(1, 1, length, head_dim, dtype=torch.float16, device=fused_anywhere) for _ in range(3)
    )
    query, key, value = (x.requires_grad_() for x in (query, key, value))
    window = {"window": (32, 32)}  # keeps the simulated GPU short; the kernels allocate the same without it
    options: dict[str, Any] = {"is_causal": True} if mask == "causal" else {}
    if mask == "padding":
        options["attn_mask"] = torch.arange(length, device=fused_anywhere) < length - 100

    def call() -> None:
        output = mha_ext.attention(query, key, value, **window, **options)
        output.backward(torch.ones_like(output))

    inputs = query.numel() * query.element_size()
    blocks = allocations(call)
    parts = 8 if mha_ext.backends.requested() == "cpu" else 1  # where there are fewer heads than threads could share
    assert max(blocks) <= 2.1 * parts * inputs  # the gradient of query adds up in fp32
    assert sum(blocks) <= (10 + 2 * parts) * inputs
    with torch.no_grad():
        held = allocations(lambda: mha_ext.attention(query, key, value, **window, **options, backend="reference"))
    assert max(held) >= 4 * length**2
