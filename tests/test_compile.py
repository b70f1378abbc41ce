"""torch.compile and torch.export see one graph, and every operator keeps its promises to them."""

from typing import Any

import pytest
import torch
from cases import BackendUnderTest
from torch import Tensor

import mha_ext


def inputs(device: str, dtype: torch.dtype = torch.float32, length: int = 5) -> list[Tensor]:
    shapes = ((2, 4, 3, 8), (2, 2, length, 8), (2, 2, length, 8))
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def assert_same(compiled: Any, function: Any, arguments: list[Tensor]) -> None:
    ours, eager = compiled(*arguments), function(*arguments)
    torch.testing.assert_close(ours, eager)
    for of_ours, of_eager in zip(
        torch.autograd.grad(ours.square().sum(), arguments),
        torch.autograd.grad(eager.square().sum(), arguments),
        strict=True,
    ):
        torch.testing.assert_close(of_ours, of_eager)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_one_graph(any_backend: BackendUnderTest, dtype: torch.dtype, dynamic: bool | None) -> None:
    torch.compiler.reset()
    lengths = torch.tensor([5, 3], device=any_backend.device)

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return mha_ext.attention(query, key, value, is_causal=True, key_lengths=lengths, softcap=3.0, q_offset="end")

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (5, 9):
        assert_same(compiled, function, inputs(any_backend.device, dtype, length))


def test_a_scale_that_changes_makes_no_new_break(any_backend: BackendUnderTest) -> None:
    torch.compiler.reset()
    arguments = inputs(any_backend.device)
    compiled = torch.compile(mha_ext.attention, fullgraph=True, backend="aot_eager")
    for scale in (0.5, 0.25, 0.125):
        torch.testing.assert_close(compiled(*arguments, scale=scale), mha_ext.attention(*arguments, scale=scale))


def test_packed_sequences_are_one_graph(fused_anywhere: str) -> None:
    torch.compiler.reset()
    cu_seqlens = torch.tensor([0, 4, 4, 9], dtype=torch.int32, device=fused_anywhere)
    arguments = [x[0].transpose(0, 1).detach().requires_grad_() for x in inputs(fused_anywhere, length=9)]
    arguments[0] = torch.randn(9, 4, 8, device=fused_anywhere, requires_grad=True)

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return mha_ext.attention_varlen(query, key, value, cu_seqlens, cu_seqlens, is_causal=True, q_offset="end")

    assert_same(torch.compile(function, fullgraph=True, backend="aot_eager"), function, arguments)


@pytest.mark.parametrize("part", ["qkv_split", "attention_scores", "masked_softmax", "attention_output"])
def test_the_parts_are_one_graph(backend: BackendUnderTest, part: str) -> None:
    torch.compiler.reset()
    query, key, value = inputs(backend.device)
    weights = torch.randn(2, 4, 3, 5, device=backend.device, requires_grad=True)
    packed, bias = (torch.randn(shape, device=backend.device, requires_grad=True) for shape in ((2, 5, 8), (8,)))
    calls: dict[str, tuple[Any, list[Tensor]]] = {
        "qkv_split": (lambda x, b: torch.cat(mha_ext.qkv_split(x, b, 2, 1), 1), [packed, bias]),
        "attention_scores": (mha_ext.attention_scores, [query, key]),
        "masked_softmax": (lambda s: mha_ext.masked_softmax(s, is_causal=True), [weights]),
        "attention_output": (mha_ext.attention_output, [weights, value]),
    }
    function, arguments = calls[part]
    assert_same(torch.compile(function, fullgraph=True, backend="aot_eager"), function, arguments)


def test_the_module_can_be_exported(any_backend: BackendUnderTest) -> None:
    module = mha_ext.MultiHeadAttention(16, 4, num_kv_heads=2).to(any_backend.device).eval()
    x = torch.randn(2, 6, 16, device=any_backend.device)
    program = torch.export.export(module, (x,), {"is_causal": True})
    torch.testing.assert_close(program.module()(x, is_causal=True), module(x, is_causal=True))


def test_a_compiled_call_follows_the_precision_of_products(any_backend: BackendUnderTest) -> None:
    torch.compiler.reset()
    arguments = [x.detach() for x in inputs(any_backend.device)]
    compiled = torch.compile(mha_ext.attention, fullgraph=True, backend="aot_eager")
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            assert torch.equal(compiled(*arguments), mha_ext.attention(*arguments)), precision
    finally:
        torch.set_float32_matmul_precision(before)


OPERATORS: dict[str, Any] = {
    "qkv_split": lambda x: (x[0, :, :, :8], x[0, 0, 0, :8], 2, 1),
    "qkv_merge": lambda x: (x, x[:, :2], x[:, :2], True),
    "matmul": lambda x: (x, x[:, :2], False, True, 0.5, 4, x.dtype, False, None),
    "masked_softmax": lambda x: (x, x > 0, None, None, None, None, None, 0, -1, 0, 2.0, 0.0, x.dtype, True),
    "masked_softmax_backward": lambda x: (
        x, None, None, x.softmax(-1), x, x.logsumexp(-1), None, None, None, 0, 2.0, 0.0, x.dtype, True, False, True
    ),
}  # fmt: skip


RULE: tuple[Any, ...] = (None, None, None, None, None, None, None, 0, -1, 0, 2.0, 0.0, 0.5, False)
OPERATORS["attention_forward"] = lambda x: (x, x[:, :2], x[:, :2], x[..., :1], *RULE, True, True)
OPERATORS["attention_backward"] = lambda x: (
    x, x[..., 0].contiguous(), x, x[:, :2], x[:, :2], x, x[..., 0].contiguous(), x[..., :2].contiguous(),
    x[..., :1], *RULE, False, True, False, False,
)  # fmt: skip


@pytest.mark.parametrize("length", [8, 5])
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(kernels: str, name: str, length: int) -> None:
    x = torch.randn(2, 4, 6, length, device=kernels)
    if name == "qkv_split":
        x = torch.randn(1, 2, 6, 8, device=kernels)
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.mha_ext, name).default, OPERATORS[name](x), test_utils=utilities)
