"""Inputs that broke other implementations of attention, by the numbers of the public reports they came from.

The kind of fault is tested, not just the line. Reports on modules are in test_module.py. Those on packed
sequences of different lengths, 27 and 28, are in test_varlen.py.
"""

import math
import re
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from accuracy import FLOOR, assert_accurate, plain_attention
from cases import BackendUnderTest, Case, Shape, leaves, make_inputs
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import mha_ext

CSRC = Path(__file__).resolve().parent.parent / "csrc"


def randn(backend: BackendUnderTest, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(backend.device).requires_grad_(grad)


def check(backend: BackendUnderTest, **inputs: Any) -> Tensor:
    """The output of the call, as accurate as plain PyTorch."""
    output = mha_ext.attention(**inputs)
    assert isinstance(output, Tensor)
    dtype = inputs["query"].dtype
    assert_accurate(output, oracle.attention(**inputs).output, plain_attention(**inputs)[0], FLOOR[dtype])
    return output


def test_001_rows_of_a_bool_mask_that_hide_everything(any_backend: BackendUnderTest) -> None:
    query, key, value = (randn(any_backend, 1, 1, 8, 8, grad=True) for _ in range(3))
    mask = (torch.arange(8, device=any_backend.device) < 4)[:, None].expand(8, 8)
    output = mha_ext.attention(query, key, value, mask)
    grads = torch.autograd.grad(output.sum(), (query, key, value))
    assert not output[0, 0, 4:].any()
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][0, 0, 4:].any()
    assert output[0, 0, :4].all()


def test_005_whole_tiles_of_keys_hidden_before_the_first_seen(any_backend: BackendUnderTest) -> None:
    """A band of width 10: late rows find only hidden keys in the first tiles that they meet."""
    length = 150 if any_backend.simulated else 600
    ones = torch.ones(length, length, device=any_backend.device)
    hidden = (ones.triu(1) + ones.tril(-10)).bool()
    mask = torch.zeros_like(ones).masked_fill(hidden, -math.inf)
    x = torch.ones(length, 2, device=any_backend.device)
    torch.testing.assert_close(mha_ext.attention(x, x, x, mask), x)
    x = randn(any_backend, length, 2)
    banded = mha_ext.attention(x, x, x, mask)
    torch.testing.assert_close(banded, mha_ext.attention(x, x, x, is_causal=True, window=(9, None)))
    for row in (0, 9, 10, length - 1):
        seen = x[max(0, row - 9) : row + 1].double()
        weights = (seen @ x[row].double() / math.sqrt(2)).softmax(0)
        torch.testing.assert_close(banded[row].double(), weights @ seen, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e10])
@pytest.mark.parametrize("where", ["key", "value"])
def test_006_a_hidden_key_or_value_may_hold_anything(any_backend: BackendUnderTest, where: str, number: float) -> None:
    tensors = {name: randn(any_backend, 1, 2, 4) for name in ("query", "key", "value")}
    if where == "key":
        tensors["key"][0, 1, 0] = number
    else:
        tensors["value"][0, 1] = number
    masks = [torch.tensor([[True, False]], device=any_backend.device)]
    if any_backend.name == "reference":  # a mask with an axis of queries is promised nothing more by the kernels
        masks.append(masks[0].repeat(2, 1))
    for mask in masks:
        wanted = leaves({name: x.clone() for name, x in tensors.items()})
        output = mha_ext.attention(**wanted, attn_mask=mask)
        expected = tensors["value"][:, :1].expand(1, 2, 4)
        rounding = 1e-6 if any_backend.name == "fused" else 0.0  # three TF32 products lose the last bit of a value
        torch.testing.assert_close(output, expected, rtol=rounding, atol=0)
        grads = torch.autograd.grad(output.sum(), list(wanted.values()))
        assert all(grad.isfinite().all() for grad in grads)
        assert not grads[2][0, 1].any()


def test_007_a_row_of_the_minimum_is_the_mean(any_backend: BackendUnderTest) -> None:
    query, key, value = (randn(any_backend, 1, 1, 3, 4) for _ in range(3))
    mask = torch.ones(1, 1, 3, 3, device=any_backend.device)
    mask[:, :, 0] = torch.finfo(torch.float32).min
    output = mha_ext.attention(query, key, value, mask)
    torch.testing.assert_close(output[0, 0, 0], value.mean((0, 1, 2)))
    torch.testing.assert_close(output[:, :, 1:], mha_ext.attention(query, key, value)[:, :, 1:])


def test_009_half_inputs_whose_scores_pass_65504(any_backend: BackendUnderTest) -> None:
    value = randn(any_backend, 1, 1, 8, 64, dtype=torch.float16)
    x = torch.full_like(value, 200)
    torch.testing.assert_close(mha_ext.attention(x, x, value), value.mean(2, keepdim=True).expand_as(value))
    query = randn(any_backend, 1, 1, 8, 64, dtype=torch.float16) * 150
    key = randn(any_backend, 1, 1, 8, 64, dtype=torch.float16) * 100
    query[0, 0, 0], key[0, 0, 0] = 576, 382
    inputs = {"query": query, "key": key, "value": value}
    wanted = leaves(inputs)
    output = mha_ext.attention(**wanted)
    assert_accurate(output, oracle.attention(**inputs).output, None, 2**-10)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), list(wanted.values())))


@pytest.mark.parametrize("head_dim", [6, 7, 1, 12])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_010_half_precision_with_a_head_dim_not_a_multiple_of_eight(
    any_backend: BackendUnderTest, dtype: torch.dtype, head_dim: int
) -> None:
    check(any_backend, **make_inputs(Case("", Shape(2, 2, 2, 9, 10, head_dim, head_dim)), dtype, any_backend.device))


@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_012_causal_together_with_a_mask_means_both(any_backend: BackendUnderTest, kind: str) -> None:
    inputs = make_inputs(Case("", Shape(2, 2, 2, 7, 7, 8, 8)), torch.float32, any_backend.device)
    allowed = torch.rand(7, 7, device=any_backend.device) > 0.4
    causal = torch.ones_like(allowed).tril()

    def as_mask(seen: Tensor) -> Tensor:
        return seen if kind == "bool" else torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -math.inf)

    both = mha_ext.attention(**inputs, attn_mask=as_mask(allowed), is_causal=True)
    explicit = mha_ext.attention(**inputs, attn_mask=as_mask(allowed & causal))
    torch.testing.assert_close(both, explicit)
    if any_backend.name in ("reference", "unfused"):  # the others return no weights
        with_weights = mha_ext.attention(**inputs, attn_mask=as_mask(allowed), is_causal=True, return_weights=True)
        assert not with_weights.weights.triu(1).any()
        assert torch.equal(both, with_weights.output)


def test_017_keys_and_values_cut_out_of_one_projection(any_backend: BackendUnderTest) -> None:
    heads, head_dim, length = 4, 128, 16
    projected = (
        randn(any_backend, 2, length, (heads + 2) * head_dim).unflatten(-1, (heads + 2, head_dim)).transpose(1, 2)
    )
    query, key, value = projected.split((heads, 1, 1), 1)
    expected = mha_ext.attention(query.contiguous(), key.contiguous(), value.contiguous())
    torch.testing.assert_close(mha_ext.attention(query, key, value), expected)
    expanded = [x.expand(-1, heads, -1, -1) for x in (key, value)]
    torch.testing.assert_close(mha_ext.attention(query, *expanded), expected)
    exact = oracle.attention(query, key, value).output
    assert_accurate(expected, exact, plain_attention(query, key, value)[0], FLOOR[torch.float32])


@pytest.mark.parametrize("seqlen_kv", [33, 1])
def test_018_expanded_heads_a_ragged_key_tile_a_mask_and_a_wide_head(backend: BackendUnderTest, seqlen_kv: int) -> None:
    query = randn(backend, 1, 4, 5, 512, dtype=torch.bfloat16)
    key, value = (randn(backend, 1, 1, seqlen_kv, 512, dtype=torch.bfloat16).expand(1, 4, -1, -1) for _ in range(2))
    mask = torch.rand(1, 4, 5, seqlen_kv, device=backend.device) > 0.2
    check(backend, query=query, key=key, value=value, attn_mask=mask)


def test_020_a_gradient_of_any_layout(any_backend: BackendUnderTest) -> None:
    """Stride 0 from sum(), and a permuted one, equal the contiguous one; 32 heads share one key head."""
    inputs = make_inputs(Case("", Shape(2, 32, 1, 4, 4, 128, 128)), torch.float32, any_backend.device)
    wanted = leaves(inputs)
    output = mha_ext.attention(**inputs)
    ones = torch.autograd.grad(output, list(wanted.values()), torch.ones_like(output), retain_graph=True)
    summed = torch.autograd.grad(output.sum(), list(wanted.values()), retain_graph=True)
    random = torch.randn_like(output)
    permuted = random.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert not permuted.is_contiguous()
    contiguous, strided = (
        torch.autograd.grad(output, list(wanted.values()), grad, retain_graph=True) for grad in (random, permuted)
    )
    exact = oracle.gradients(**inputs, grad_output=random)
    for a, b in zip((*ones, *contiguous), (*summed, *strided), strict=True):
        torch.testing.assert_close(a, b)
    for name, grad in zip(wanted, strided, strict=True):
        assert_accurate(grad, exact[name], None, 5e-6, name)


@pytest.mark.parametrize("shape", [(1, 1, 64, 64), (1, 1, 1, 64), (64, 1), (64, 64)])
def test_021_a_bias_alone_wants_a_gradient(any_backend: BackendUnderTest, shape: tuple[int, ...]) -> None:
    query, key, value = (randn(any_backend, 1, 1, 64, 16) for _ in range(3))
    bias = randn(any_backend, *shape, grad=True)
    output = mha_ext.attention(query, key, value, bias)
    grad_output = torch.randn_like(output)
    (grad,) = torch.autograd.grad(output, bias, grad_output)
    weights = mha_ext.attention(query, key, value, bias, return_weights=True, backend="reference").weights.detach()
    grad_weights = grad_output @ value.mT
    expected = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True))
    torch.testing.assert_close(grad, expected.sum_to_size(shape), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "heads"), [(100_000, 1), (1, 71_280)])
def test_022_more_batches_or_heads_than_a_grid_axis_has_blocks(
    any_backend: BackendUnderTest, batch: int, heads: int
) -> None:
    """On the simulated GPU forward only, just past the limit of 65535, and smaller: it would take minutes."""
    length, head_dim = (2, 4) if any_backend.simulated else (10, 16)
    batch = min(batch, 65_536) if any_backend.simulated else batch
    x = torch.randn(batch, heads, length, head_dim, device=any_backend.device, requires_grad=not any_backend.simulated)
    output = mha_ext.attention(x, x, x)
    rows = [0, 1, 65_534, 65_535, -1]
    some = x.detach().flatten(0, 1)[rows].double().requires_grad_()
    expected = (some @ some.mT / math.sqrt(head_dim)).softmax(-1) @ some
    torch.testing.assert_close(output.flatten(0, 1)[rows].double(), expected, rtol=1e-4, atol=1e-5)
    if not any_backend.simulated:
        (grad,) = torch.autograd.grad(output.square().sum(), x)
        (expected_grad,) = torch.autograd.grad(expected.square().sum(), some)
        torch.testing.assert_close(grad.flatten(0, 1)[rows].double(), expected_grad, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16], ids=str)
def test_023_offsets_past_two_to_the_32(any_backend: BackendUnderTest, dtype: torch.dtype) -> None:
    """Reduced: the rows of mask, query, key and value lie so far apart that 32-bit offsets wrap. On a CPU the
    memory between them is never touched, so it costs nothing."""
    far, rows, columns = 2**31 + 24, 3, 40

    def far_apart(x: Tensor) -> Tensor:
        storage = torch.empty(far * (x.shape[2] - 1) + x.shape[3], dtype=x.dtype, device=any_backend.device)
        view = storage.as_strided(x.shape, (0, 0, far, 1))
        view.copy_(x)
        return view

    inputs = make_inputs(Case("", Shape(1, 1, 1, rows, columns, 8, 8)), torch.float16, any_backend.device)
    mask = torch.randn(1, 1, rows, columns, device=any_backend.device)
    mask = mask > 0 if dtype == torch.bool else mask.to(dtype)
    expected = mha_ext.attention(**inputs, attn_mask=mask)
    assert torch.equal(mha_ext.attention(**inputs, attn_mask=far_apart(mask)), expected)
    assert torch.equal(mha_ext.attention(**{**inputs, "query": far_apart(inputs["query"])}, attn_mask=mask), expected)
    short = {name: x[:, :, :rows] for name, x in inputs.items()}
    expected = mha_ext.attention(**short)
    assert torch.equal(mha_ext.attention(**{name: far_apart(x) for name, x in short.items()}), expected)


@pytest.mark.gpu
@pytest.mark.slow
def test_023_more_than_two_to_the_32_scores(kernels: str) -> None:
    """The report as it stands; the scores alone take 17 GB."""
    if kernels != "cuda" or torch.cuda.mem_get_info()[0] < 64 * 2**30:
        pytest.skip("needs a GPU with 64 GB free")
    length = 65_537
    query, key, value = torch.randn(3, 1, 1, length, 8, device="cuda", dtype=torch.float16).unbind()
    bias = torch.randn(length, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        output = mha_ext.attention(query, key, value, bias)
    rows = [0, 1, 2**32 // length - 1, 2**32 // length, length - 1]
    scores = query[0, 0, rows].double() @ key[0, 0].double().T / math.sqrt(8) + bias.double()
    torch.testing.assert_close(
        output[0, 0, rows].double(), scores.softmax(-1) @ value[0, 0].double(), rtol=1e-2, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("query_shape", "kv_shape"),
    [
        ((0, 0, 2, 0), (0, 0, 2, 0)),
        ((0, 4, 5, 8), (0, 2, 6, 8)),
        ((2, 4, 5, 8), (2, 2, 0, 8)),
        ((2, 4, 0, 8), (2, 2, 6, 8)),
        ((1, 2, 3, 0), (1, 2, 4, 0)),
    ],
    ids=str,
)
def test_029_empty_tensors(
    backend: BackendUnderTest, query_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    query, key, value = (randn(backend, *s, dtype=dtype, grad=True) for s in (query_shape, kv_shape, kv_shape))
    result = mha_ext.attention(query, key, value, return_lse=True, return_weights=True)
    assert result.output.shape == (*query_shape[:3], kv_shape[3])
    assert result.weights.shape == (*query_shape[:3], kv_shape[2])
    assert not result.output.any()
    grads = torch.autograd.grad(result.output.sum() + result.weights.sum(), (query, key, value))
    assert [grad.shape for grad in grads] == [query_shape, kv_shape, kv_shape]
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("length", [9, 12])
@pytest.mark.parametrize("dtype", FLOOR, ids=str)
def test_031_sequences_shorter_than_a_tile(backend: BackendUnderTest, length: int, dtype: torch.dtype) -> None:
    check(backend, **make_inputs(Case("", Shape(1, 2, 2, length, length, 128, 128)), dtype, backend.device))


def test_037_every_operator_guards_its_device() -> None:
    """Two GPUs would show it; one can read it: each implementation registered sets the device of its tensors."""
    schemas = (CSRC / "bindings.cpp").read_text().partition("TORCH_LIBRARY(")[2]
    operators = re.findall(r'm\.def\(\(?\s*"(\w+)', schemas)
    assert len(operators) >= 7
    source = "\n".join(path.read_text() for path in sorted((CSRC / "api").glob("*.cpp")))
    implementations = dict(
        re.findall(r'\.impl\(\s*"(?:mha_ext::)?(\w+)"\s*,\s*(?:TORCH_FN\()?&?(?:\w+::)*(\w+)', source)
    )
    assert set(operators) <= set(implementations), "an operator without an implementation"
    for operator, function in implementations.items():
        found = re.search(rf"\b{function}\s*\([^;{{]*\)\s*\{{(.*?)^\}}", source, re.DOTALL | re.MULTILINE)
        assert found, f"{operator}: {function} not found in csrc/api"
        assert "DeviceGuard" in found[1], f"{operator}: {function} sets no device guard"


def test_038_derivatives_of_every_kind_on_one_example(backend: BackendUnderTest) -> None:
    tensors = tuple(randn(backend, 1, 1, 3, 2, dtype=torch.float64, grad=True) for _ in range(3))
    assert gradcheck(mha_ext.attention, tensors, fast_mode=backend.name != "reference")
    assert gradgradcheck(mha_ext.attention, tensors, fast_mode=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_038_function_transforms_take_the_reference_by_themselves() -> None:
    query, key, value = torch.randn(3, 4, 1, 2, 3, 2, dtype=torch.float64).unbind()

    def loss(q: Tensor) -> Tensor:
        return mha_ext.attention(q, key[0], value[0]).square().sum()

    expected = torch.stack([torch.autograd.functional.jacobian(loss, q) for q in query])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(query), expected)
    _, directional = torch.func.jvp(loss, (query[0],), (query[1],))
    torch.testing.assert_close(directional, (expected[0] * query[1]).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_040_autocast_with_a_mask_in_single_precision(any_backend: BackendUnderTest, dtype: torch.dtype) -> None:
    inputs = make_inputs(
        Case("", Shape(2, 4, 2, 9, 11, 16, 16), ("bias", "alibi", "sinks")), torch.float32, any_backend.device
    )
    wanted = leaves(inputs)
    expected = mha_ext.attention(**inputs)
    expected_grads = torch.autograd.grad(expected.sum(), list(wanted.values()))
    with torch.autocast(any_backend.device, dtype=dtype):
        result = mha_ext.attention(**inputs, return_lse=True)
        mixed = mha_ext.attention(inputs["query"], inputs["key"].to(dtype), inputs["value"])
    assert result.output.dtype == mixed.dtype == dtype
    assert result.lse.dtype == torch.float32
    grads = torch.autograd.grad(result.output.float().sum(), list(wanted.values()))
    assert all(grad.dtype == torch.float32 for grad in grads)
    tolerance = {torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(result.output.float(), expected, rtol=tolerance, atol=tolerance)
    for grad, other in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, other, rtol=tolerance, atol=tolerance * other.abs().max().item())
