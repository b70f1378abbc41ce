"""Packed sequences and jagged nested tensors mean what each sequence alone means."""

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from cases import BackendUnderTest
from torch import Tensor

import mha_ext

LENGTHS = {
    "some": ((5, 70, 0, 33), (9, 66, 4, 0)),
    "one": ((40,), (17,)),
    "same": ((64, 64), (64, 64)),
    "all_empty": ((0, 0), (0, 0)),
    "none": ((), ()),
}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal_end": {"is_causal": True, "q_offset": "end"},
    "window": {"window": (9, 3), "q_offset": 2},
    "softcap": {"softcap": 1.5, "scale": -0.7},
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def running_sum(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0)], dtype=torch.int32, device=device)


def make(lengths: str, dtype: torch.dtype, device: str, head_dim: int = 16, head_dim_v: int = 24) -> tuple[Any, ...]:
    """query of 6 heads, key and value of 2; where their sequences begin and end."""
    generator = torch.Generator().manual_seed(0)
    (total_q, total_k), (of_q, of_k) = (tuple(sum(x) for x in LENGTHS[lengths]), LENGTHS[lengths])
    shapes = (total_q, 6, head_dim), (total_k, 2, head_dim), (total_k, 2, head_dim_v)
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return *(x.requires_grad_() for x in tensors), running_sum(of_q, device), running_sum(of_k, device)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lengths", LENGTHS)
@every_dtype
def test_each_sequence_as_if_alone(
    packing_backend: BackendUnderTest, lengths: str, rule: str, dtype: torch.dtype
) -> None:
    query, key, value, cu_q, cu_k = make(lengths, dtype, packing_backend.device)
    batch = len(LENGTHS[lengths][0])
    slopes = torch.rand(batch, 6, device=packing_backend.device).requires_grad_()
    sinks = torch.randn(6, device=packing_backend.device).requires_grad_()
    extra = {"return_lse": True, "return_stats": True, "sinks": sinks, **RULES[rule]}
    leaf = (query, key, value, slopes, sinks)
    result = mha_ext.attention_varlen(query, key, value, cu_q, cu_k, alibi_slopes=slopes, **extra)
    assert result.output.shape == (query.shape[0], 6, 24)
    assert result.lse.shape == result.max_score.shape == result.entropy.shape == query.shape[:2]
    generator = torch.Generator().manual_seed(1)
    grad_output, grad_lse = (torch.randn(x.shape, generator=generator).to(x) for x in (result.output, result.lse))
    grads = torch.autograd.grad((result.output, result.lse), leaf, (grad_output, grad_lse), allow_unused=True)

    loss = torch.zeros((), dtype=torch.float64, device=packing_backend.device)
    for b in range(batch):
        rows, keys = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b + 1]))
        one = [x[None].transpose(1, 2).double() for x in (query[rows], key[keys], value[keys])]
        exact = mha_ext.attention(
            *one, alibi_slopes=slopes[b].double(), **{**extra, "sinks": sinks.double()}, backend="reference"
        )
        for name in ("output", "lse", "max_score", "entropy"):
            expected = getattr(exact, name)[0].transpose(0, 1)
            tolerance = TOLERANCE[dtype] if name == "output" else 2e-5
            torch.testing.assert_close(
                getattr(result, name)[rows].double(), expected, rtol=tolerance, atol=tolerance, msg=f"{name} of {b}"
            )
        loss = loss + (exact.output[0].transpose(0, 1) * grad_output[rows]).sum()
        loss = loss + (exact.lse[0].transpose(0, 1) * grad_lse[rows]).sum()
    expected_grads = torch.autograd.grad(loss, leaf, allow_unused=True) if batch else [None] * 5
    for name, ours, expected in zip(("query", "key", "value", "slopes", "sinks"), grads, expected_grads, strict=True):
        if expected is None:
            assert ours is None or not ours.any()
            continue
        largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        torch.testing.assert_close(ours, expected.to(ours), rtol=0, atol=4 * TOLERANCE[dtype] * largest, msg=name)


def test_public_report_27_sequences_of_one_query(packing_backend: BackendUnderTest) -> None:
    """flash-attention 1537: two sequences of one query, one of none, grouped heads, causal from the end."""
    device = packing_backend.device
    query, key, value = (torch.randn(n, heads, 64, device=device) for n, heads in ((2, 9), (8, 3), (8, 3)))
    cu_q, cu_k = running_sum((1, 0, 1), device), running_sum((3, 0, 5), device)
    output = mha_ext.attention_varlen(query, key, value, cu_q, cu_k, is_causal=True, q_offset="end")
    assert output.shape == (2, 9, 64)
    for row, keys in ((0, slice(0, 3)), (1, slice(3, 8))):
        one = (query[row : row + 1], key[keys], value[keys])
        expected = mha_ext.attention(*(x.transpose(0, 1)[None] for x in one), backend="reference")
        torch.testing.assert_close(output[row], expected[0, :, 0], rtol=1e-5, atol=1e-5)


def test_public_report_28_keys_without_queries_and_queries_without_keys(packing_backend: BackendUnderTest) -> None:
    """flash-attention 2562 and 1713: zeros, exactly."""
    query, key, value, cu_q, cu_k = make("some", torch.float16, packing_backend.device)
    output = mha_ext.attention_varlen(query, key, value, cu_q, cu_k)
    grads = torch.autograd.grad(output.float().square().sum(), (query, key, value))
    lonely_queries, lonely_keys = slice(int(cu_q[3]), int(cu_q[4])), slice(int(cu_k[2]), int(cu_k[3]))
    assert not output[lonely_queries].any()
    assert not grads[0][lonely_queries].any()
    assert not grads[1][lonely_keys].any()
    assert not grads[2][lonely_keys].any()


def test_dropout_draws_by_sequence(packing_backend: BackendUnderTest) -> None:
    """The bits of a padded batch with the same lengths."""
    query, key, value, cu_q, cu_k = make("some", torch.float32, packing_backend.device)
    torch.manual_seed(3)
    packed = mha_ext.attention_varlen(query, key, value, cu_q, cu_k, dropout_p=0.5)
    padded = []
    for x, cu in ((query, cu_q), (key, cu_k), (value, cu_k)):
        rows = [x[int(a) : int(b)] for a, b in itertools.pairwise(cu)]
        padded.append(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).transpose(1, 2))
    torch.manual_seed(3)
    expected = mha_ext.attention(*padded, dropout_p=0.5, key_lengths=cu_k.diff(), backend="reference")
    for b, (start, end) in enumerate(zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True)):
        torch.testing.assert_close(
            packed[start:end], expected[b, :, : end - start].transpose(0, 1), rtol=1e-4, atol=1e-5
        )


def test_any_strides(packing_backend: BackendUnderTest) -> None:
    """A packed projection (total, 3, H, D), read in place."""
    packed = torch.randn(75, 3, 2, 8, device=packing_backend.device, dtype=torch.float16)
    cu_seqlens = running_sum((30, 0, 45), packing_backend.device)
    query, key, value = packed.unbind(1)
    output = mha_ext.attention_varlen(query, key, value, cu_seqlens, cu_seqlens.long(), is_causal=True)
    alone = [x.contiguous() for x in (query, key, value)]
    assert torch.equal(output, mha_ext.attention_varlen(*alone, cu_seqlens, cu_seqlens, is_causal=True))
    assert output.is_contiguous()


def operators() -> tuple[Any, Any]:
    """Forward and backward of the fused kernels in force."""
    suffix = "_cpu" if mha_ext.backends.requested() == "cpu" else ""
    names = (f"attention_forward{suffix}", f"attention_backward{suffix}")
    return tuple(getattr(torch.ops.mha_ext, name) for name in names)


@pytest.mark.parametrize(
    "bad", [[0, 30, 200], [5, 30, 75], [0, 60, 30, 75], [0, 30], [0, -1, 75], [0, 2**31 - 1, 75], [-(2**31), 75]]
)
def test_offsets_that_lie_are_refused_on_the_cpu(bad: list[int]) -> None:
    x = torch.randn(75, 2, 8)
    with pytest.raises(ValueError, match="cu_seqlens_q: expected the running sum of the lengths, from 0 to 75"):
        mha_ext.attention_varlen(x, x, x, torch.tensor(bad), running_sum((75,) * (len(bad) - 1), "cpu"))


@pytest.mark.parametrize(
    "bad", [[0, 30, 200], [5, 30, 75], [0, 60, 30, 75], [0, -1, 75], [0, 2**31 - 1, 75], [-(2**31), 2**31 - 1]]
)
def test_a_kernel_reads_and_writes_within_the_tensors_whatever_the_offsets(fused_anywhere: str, bad: list[int]) -> None:
    """Past the check, as on a GPU: the simulated one would report an access outside."""
    x = torch.randn(1, 2, 75, 8, device=fused_anywhere, dtype=torch.float16)
    cu_seqlens = torch.tensor(bad, dtype=torch.int32, device=fused_anywhere)
    good = running_sum((75,) + (0,) * (len(bad) - 2), fused_anywhere)
    rule = (None,) * 6
    forward, backward = operators()
    for of_q, of_k in ((cu_seqlens, good), (good, cu_seqlens), (cu_seqlens, cu_seqlens)):
        settings = (of_q, of_k, 0, -1, 0, 0.0, 0.0, 0.3, False)
        output, lse, row_stats, _, _ = forward(x, x, x, *rule, *settings, True, False)
        output, lse, row_stats = (torch.zeros_like(x) for x in (output, lse, row_stats))
        backward(output, None, x, x, x, output, lse, row_stats, *rule, *settings, False, False, False, False)


def test_refusals_name_the_argument() -> None:
    x, cu_seqlens = torch.randn(10, 2, 8), running_sum((4, 6), "cpu")
    refused = [
        ((x[0], x, x, cu_seqlens, cu_seqlens), {}, "query: expected 3 dimensions"),
        ((x, x[..., :4], x, cu_seqlens, cu_seqlens), {}, "key: expected shape"),
        ((x, x, x, cu_seqlens.float(), cu_seqlens), {}, "cu_seqlens_q: expected a dtype among int32, int64"),
        ((x, x, x, cu_seqlens, cu_seqlens[:2]), {}, "cu_seqlens_k: expected shape"),
        ((x, x, x, cu_seqlens[:0], cu_seqlens[:0]), {}, "cu_seqlens_q: expected B"),
        ((x, x, x, cu_seqlens, cu_seqlens), {"q_offset": torch.tensor([1])}, "q_offset: expected shape"),
        ((x, x, x, cu_seqlens, cu_seqlens), {"backend": "unfused"}, "backend: 'unfused' does not take this call"),
    ]
    for arguments, options, message in refused:
        with pytest.raises((TypeError, ValueError), match=message.replace("(", r"\(")):
            mha_ext.attention_varlen(*arguments, **options)


@pytest.mark.parametrize("axes", [3, 4])
def test_nested_tensors(packing_backend: BackendUnderTest, axes: int) -> None:
    """Jagged in, jagged out, forward and backward; sequences without a row included."""
    query, key, value, cu_q, cu_k = make("some", torch.float32, packing_backend.device)
    if axes == 3:
        query, key, value = (x.detach()[:, 0].contiguous().requires_grad_() for x in (query, key, value))

    def nested(x: Tensor, offsets: Tensor) -> Tensor:
        jagged = torch.nested.nested_tensor_from_jagged(x, offsets.long())
        return jagged if axes == 3 else jagged.transpose(1, 2)

    inputs = nested(query, cu_q), nested(key, cu_k), nested(value, cu_k)
    result = mha_ext.attention(*inputs, is_causal=True, q_offset="end", return_lse=True)
    assert result.output.is_nested
    assert result.lse.is_nested
    output = (result.output if axes == 3 else result.output.transpose(1, 2)).values()
    packed = [x if axes == 4 else x[:, None] for x in (query, key, value)]
    expected = mha_ext.attention_varlen(*packed, cu_q, cu_k, is_causal=True, q_offset="end")
    assert torch.equal(output, expected if axes == 4 else expected[:, 0])
    grads = torch.autograd.grad(output.square().sum(), (query, key, value))
    expected_grads = torch.autograd.grad(expected.square().sum(), (query, key, value))
    assert all(torch.equal(a, b) for a, b in zip(grads, expected_grads, strict=True))


def test_nested_tensors_that_do_not_fit_are_refused() -> None:
    x = torch.nested.nested_tensor_from_jagged(torch.randn(10, 2, 8), torch.tensor([0, 4, 10])).transpose(1, 2)
    dense = torch.randn(2, 2, 6, 8)
    with pytest.raises(
        TypeError, match=r"key: expected a nested tensor of layout torch\.jagged, as query, got a tensor"
    ):
        mha_ext.attention(x, dense, dense)
    with pytest.raises(ValueError, match="attn_mask: expected None with nested tensors"):
        mha_ext.attention(x, x, x, torch.ones(6, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="return_weights: expected False with nested tensors"):
        mha_ext.attention(x, x, x, return_weights=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this layout is about to go
        strided = torch.nested.nested_tensor([torch.randn(2, 4, 8), torch.randn(2, 6, 8)], layout=torch.strided)
    with pytest.raises(TypeError, match=r"query: expected a nested tensor of layout torch\.jagged"):
        mha_ext.attention(strided, strided, strided)


def test_nested_sequences_of_other_lengths_are_refused() -> None:
    rows = torch.randn(10, 2, 8)

    def nested(*offsets: int) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(rows, torch.tensor(offsets)).transpose(1, 2)

    query = nested(0, 4, 10)
    with pytest.raises(ValueError, match="value: expected sequences of the lengths of key's"):
        mha_ext.attention(query, nested(0, 4, 10), nested(0, 6, 10))
    with pytest.raises(ValueError, match="value: expected as many sequences as key, 2, got 3"):
        mha_ext.attention(query, query, nested(0, 4, 6, 10))
    with pytest.raises(ValueError, match="key: expected as many sequences as query, 2, got 3"):
        mha_ext.attention(query, nested(0, 4, 6, 10), nested(0, 4, 6, 10))
    assert mha_ext.attention(query, nested(0, 7, 10), nested(0, 7, 10)).is_nested  # equal, if not the same


@pytest.mark.parametrize("offsets", [(0, 30, 60), (10, 30, 75), (0, 60, 30, 75)])
@every_dtype
def test_rows_that_no_sequence_owns_are_zeros(
    fused_anywhere: str, offsets: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Past the check of offsets, as on a GPU, in memory full of NaN."""
    x = torch.randn(1, 2, 75, 8, device=fused_anywhere).to(dtype)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=fused_anywhere)
    sinks = torch.zeros(2, device=fused_anywhere)
    rule = (None, None, None, None, sinks, None, cu_seqlens, cu_seqlens, 0, -1, 0, 0.0, 0.0, 0.3, False)
    forward, backward = operators()
    torch.use_deterministic_algorithms(True)  # fills what is allocated with NaN
    try:
        output, lse, row_stats, max_score, entropy = forward(x, x, x, *rule, True, True)
        grads = backward(x, None, x, x, x, output, lse, row_stats, *rule, False, False, False, True)
    finally:
        torch.use_deterministic_algorithms(False)
    owned = torch.zeros(75, dtype=torch.bool, device=fused_anywhere)
    if list(offsets) == sorted(offsets):
        owned[offsets[0] : offsets[-1]] = True
        assert all(x[:, :, ~owned].eq(0).all() for x in (output, entropy, *grads[:3]))
        assert (lse[:, :, ~owned] == -math.inf).all()
        assert (max_score[:, :, ~owned] == -math.inf).all()
    assert all(x.isfinite().all() for x in (output, entropy, *grads[:3], grads[5]))


def test_the_backward_can_be_differentiated(packing_backend: BackendUnderTest) -> None:
    query, key, value, cu_q, cu_k = make("some", torch.float32, packing_backend.device)
    output = mha_ext.attention_varlen(query, key, value, cu_q, cu_k, is_causal=True)
    first = torch.autograd.grad(output.square().sum(), (query, key, value), create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), (query, key, value))
    assert all(x.isfinite().all() and x.any() for x in second)
    assert math.isfinite(float(output.detach().sum()))
