"""torch.ops.mha_ext.matmul against fp64, judged by the error of torch's own product in the same dtype."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

KINDS = {
    "fp16": (torch.float16, False),
    "bf16": (torch.bfloat16, False),
    "tf32": (torch.float32, True),
    "fp32": (torch.float32, False),
    "fp64": (torch.float64, False),
}
LAYOUTS = {"nn": (False, False), "nt": (False, True), "tn": (True, False)}
# Edges of the tiles (8, 64, 128) and of 16-byte rows, on every axis.
SIZES = [(1, 1, 1), (7, 64, 63), (64, 65, 129), (129, 7, 200), (200, 129, 65), (63, 200, 7), (65, 63, 64)]
SIZES += [(128, 128, 128)]

every_kind = pytest.mark.parametrize("kind", KINDS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str, row_pad: int = 0, shift: int = 0) -> Tensor:
    """Normal numbers in rows ``length + row_pad`` apart, from element ``shift`` on, in storage full of NaN."""
    strides = [1, shape[-1] + row_pad]
    for size in reversed(shape[1:-1]):
        strides.append(strides[-1] * size)
    storage = torch.full((shift + strides[-1] * shape[0] + 64,), torch.nan, dtype=dtype, device=device)
    view = storage.as_strided(shape, strides[::-1], shift)
    view.copy_(torch.randn(shape))
    return view


def round_to_tf32(x: Tensor) -> Tensor:
    """To 10 bits of mantissa, ties away from zero."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def product(a: Tensor, b: Tensor, layout: str, alpha: float, heads: int) -> Tensor:
    """The meaning of the operator, in the dtype of its arguments; a sum over heads is a longer k."""
    transpose_a, transpose_b = LAYOUTS[layout]
    a = a.transpose(2, 3) if transpose_a else a
    b = b.transpose(2, 3) if transpose_b else b
    if heads == max(a.size(1), b.size(1)):
        a = a.repeat_interleave(heads // a.size(1), 1)
        b = b.repeat_interleave(heads // b.size(1), 1)
    else:
        a = a.unflatten(1, (heads, -1)).transpose(2, 3).flatten(3)
        b = b.unflatten(1, (heads, -1)).flatten(2, 3)
    return alpha * (a @ b)


def within_lengths(x: Tensor, k_axis: int, k_lengths: Tensor) -> Tensor:
    """Zeros from each batch's length on."""
    length = x.size(k_axis)
    beyond = torch.arange(length) >= k_lengths.cpu().clamp(0, length)[:, None]
    return x.masked_fill(beyond[:, None, :, None] if k_axis == 2 else beyond[:, None, None], 0)


def check(
    a: Tensor,
    b: Tensor,
    layout: str,
    kind: str,
    heads: int | None = None,
    alpha: float = 0.125,
    half_out: bool = True,
    k_lengths: Tensor | None = None,
) -> Tensor:
    """Run the operator, compare, and return what it gave."""
    dtype, allow_tf32 = KINDS[kind]
    out_dtype = dtype if half_out or dtype.itemsize != 2 else torch.float32
    heads = max(a.size(1), b.size(1)) if heads is None else heads
    actual = torch.ops.mha_ext.matmul(a, b, *LAYOUTS[layout], alpha, heads, out_dtype, allow_tf32, k_lengths)
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    if k_lengths is not None:
        transpose_a, transpose_b = LAYOUTS[layout]
        a = within_lengths(a, 2 if transpose_a else 3, k_lengths)
        b = within_lengths(b, 3 if transpose_b else 2, k_lengths)
    if allow_tf32:
        a, b = round_to_tf32(a), round_to_tf32(b)
    exact = product(a.double(), b.double(), layout, alpha, heads)
    theirs = product(a.to(out_dtype), b.to(out_dtype), layout, alpha, heads)
    scale = product(a.double().abs(), b.double().abs(), layout, abs(alpha), heads)

    assert actual.dtype == out_dtype
    assert actual.shape == exact.shape
    assert actual.is_contiguous()
    if exact.numel():
        error = (actual.cpu().double() - exact).abs().max().item()
        their_error = (theirs.double() - exact).abs().max().item()
        # A chain of k sums, each of which the tensor cores may truncate; torch adds up in blocks.
        floor = 4 * torch.finfo(torch.float64 if kind == "fp64" else torch.float32).eps * scale.max().item()
        assert error <= 1.5 * their_error + floor, f"error {error:.2e}, torch's {their_error:.2e}, floor {floor:.2e}"
    return actual


def operands(
    layout: str,
    size: tuple[int, int, int],
    kind: str,
    device: str,
    heads: tuple[int, int] = (1, 1),
    batch: int = 1,
    **where: int,
) -> tuple[Tensor, Tensor]:
    """Poisoned a and b for a product of size (m, n, k); ``where`` goes to ``poisoned``."""
    m, n, k = size
    transpose_a, transpose_b = LAYOUTS[layout]
    dtype, _ = KINDS[kind]
    a = poisoned((batch, heads[0], *((k, m) if transpose_a else (m, k))), dtype, device, **where)
    b = poisoned((batch, heads[1], *((n, k) if transpose_b else (k, n))), dtype, device, **where)
    return a, b


@every_kind
@every_layout
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_sizes(kernels: str, size: tuple[int, int, int], layout: str, kind: str) -> None:
    """Rows as they come: an odd length leaves them unaligned."""
    check(*operands(layout, size, kind, kernels), layout, kind)


@every_kind
@every_layout
@pytest.mark.parametrize("size", SIZES[1:], ids=lambda size: "x".join(map(str, size)))
def test_aligned_rows(kernels: str, size: tuple[int, int, int], layout: str, kind: str) -> None:
    """Rows padded to 16 bytes, with NaN behind each: ragged edges inside an aligned copy."""
    m, n, k = size
    transpose_a, transpose_b = LAYOUTS[layout]
    dtype, _ = KINDS[kind]
    a_shape, b_shape = ((k, m) if transpose_a else (m, k)), ((n, k) if transpose_b else (k, n))
    a = poisoned((1, 1, *a_shape), dtype, kernels, row_pad=-a_shape[1] % 8 + 8)
    b = poisoned((1, 1, *b_shape), dtype, kernels, row_pad=-b_shape[1] % 8)
    check(a, b, layout, kind)


@every_kind
@every_layout
@pytest.mark.parametrize(
    ("heads_a", "heads_b", "heads_out"),
    [(4, 2, 4), (1, 3, 3), (3, 1, 3), (2, 6, 6), (6, 6, 2), (3, 3, 1), (4, 4, 2)],
)
def test_heads(kernels: str, heads_a: int, heads_b: int, heads_out: int, layout: str, kind: str) -> None:
    """Heads shared by a group, and sums over a group, through ragged k."""
    a, b = operands(layout, (17, 24, 40), kind, kernels, (heads_a, heads_b), batch=2)
    check(a, b, layout, kind, heads_out)


@every_layout
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("size", [(130, 72, 72), (8, 200, 33)], ids=lambda size: "x".join(map(str, size)))
def test_wide_tiles(kernels: str, size: tuple[int, int, int], layout: str, kind: str) -> None:
    """Enough work for the wider tile."""
    a, b = operands(layout, size, kind, kernels, (16, 4), batch=8)
    check(a, b, layout, kind)


@every_kind
@every_layout
@pytest.mark.parametrize(("row_pad", "shift"), [(3, 0), (0, 1), (8, 5), (5, 3)])
def test_unaligned(kernels: str, row_pad: int, shift: int, layout: str, kind: str) -> None:
    """Rows that start anywhere."""
    a, b = operands(layout, (40, 24, 72), kind, kernels, row_pad=row_pad, shift=shift)
    check(a, b, layout, kind)


@every_kind
@every_layout
def test_one_operand_unaligned(kernels: str, layout: str, kind: str) -> None:
    aligned = operands(layout, (64, 72, 48), kind, kernels, row_pad=8)
    unaligned = operands(layout, (64, 72, 48), kind, kernels, shift=1)
    check(aligned[0], unaligned[1], layout, kind)
    check(unaligned[0], aligned[1], layout, kind)


@every_kind
@every_layout
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_expanded(kernels: str, axis: int, layout: str, kind: str) -> None:
    """Stride 0 on the batch, head or row axis of each operand."""
    a, b = operands(layout, (33, 40, 24), kind, kernels, (3, 3), batch=2)
    check(a.narrow(axis, 0, 1).expand(a.shape), b, layout, kind)
    check(a, b.narrow(axis, 0, 1).expand(b.shape), layout, kind)
    check(a.narrow(axis, 0, 1).expand(a.shape), b, layout, kind, heads=1)


@every_kind
@every_layout
def test_permuted(kernels: str, layout: str, kind: str) -> None:
    """(batch, seqlen, heads, head_dim) seen as (batch, heads, seqlen, head_dim); a slice of a packed projection."""
    a, b = operands(layout, (24, 40, 32), kind, kernels, (3, 3), 2)
    a, b = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (a, b))
    check(a, b, layout, kind)
    packed = torch.cat([b, torch.full_like(b, torch.nan)], dim=-1)
    check(a, packed[..., : b.size(-1)], layout, kind)


@every_kind
@every_layout
def test_large_k(kernels: str, layout: str, kind: str) -> None:
    check(*operands(layout, (8, 16, 4104), kind, kernels), layout, kind)


@every_layout
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("size", [(65, 72, 72), (33, 65, 40)], ids=lambda size: "x".join(map(str, size)))
def test_float_out(kernels: str, size: tuple[int, int, int], layout: str, kind: str) -> None:
    """Half inputs, fp32 result: not rounded to half on the way."""
    check(*operands(layout, size, kind, kernels), layout, kind, alpha=0.3, half_out=False)


@every_kind
def test_alpha(kernels: str, kind: str) -> None:
    """A result beyond the range of the inputs' dtype, scaled back before it is rounded."""
    dtype, allow_tf32 = KINDS[kind]
    a = torch.full((1, 1, 8, 64), 200.0, dtype=dtype, device=kernels)
    actual = torch.ops.mha_ext.matmul(a, a, False, True, -(2.0**-10), 1, dtype, allow_tf32, None)
    torch.testing.assert_close(actual, torch.full_like(actual, -2500.0), rtol=0, atol=0)


@every_kind
@every_layout
def test_empty(kernels: str, layout: str, kind: str) -> None:
    dtype, allow_tf32 = KINDS[kind]
    for batch, heads, m, n, k in itertools.product((0, 2), repeat=5):
        a, b = operands(layout, (m, n, k), kind, kernels, (heads, heads), batch)
        actual = torch.ops.mha_ext.matmul(a, b, *LAYOUTS[layout], 1.0, heads, dtype, allow_tf32, None)
        assert actual.shape == (batch, heads, m, n)
        if k == 0:
            assert not actual.any()


@every_kind
@every_layout
@pytest.mark.parametrize(("heads_a", "heads_b", "heads_out"), [(0, 2, 0), (2, 0, 0), (0, 0, 0), (0, 0, 2)])
def test_no_heads(kernels: str, heads_a: int, heads_b: int, heads_out: int, layout: str, kind: str) -> None:
    """A query without heads beside keys with some; sums over a group of no heads are zeros."""
    dtype, allow_tf32 = KINDS[kind]
    a, b = operands(layout, (9, 8, 7), kind, kernels, (heads_a, heads_b), batch=2)
    for k_lengths in (None, torch.tensor([3, 7], device=kernels)):
        actual = torch.ops.mha_ext.matmul(a, b, *LAYOUTS[layout], 1.0, heads_out, dtype, allow_tf32, k_lengths)
        assert actual.shape == (2, heads_out, 9, 8)
        assert not actual.any()


# --- k_lengths ------------------------------------------------------------------------------------

# None, one, each side of a tile of k (8, 16, 32) and of a chunk of 16 bytes, all, more than all, less than none.
K_LENGTHS = (0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 70, 71, 72, 73, 2**32 + 5, 40 - 2**32, -1, -(2**40))


def poison_beyond(a: Tensor, b: Tensor, layout: str, k_lengths: Tensor) -> None:
    """NaN in both operands from each batch's length on."""
    transpose_a, transpose_b = LAYOUTS[layout]
    for x, k_axis in ((a, 2 if transpose_a else 3), (b, 3 if transpose_b else 2)):
        for batch, length in enumerate(k_lengths.clamp(0, x.size(k_axis)).tolist()):
            x[batch].narrow(k_axis - 1, length, x.size(k_axis) - length).fill_(torch.nan)


@every_kind
@every_layout
@pytest.mark.parametrize("k", [72, 71])
def test_k_lengths(kernels: str, k: int, layout: str, kind: str) -> None:
    """What lies beyond a batch's length is not used, in rows that are aligned and in rows that are not."""
    k_lengths = torch.tensor(K_LENGTHS, device=kernels)
    a, b = operands(layout, (9, 24, k), kind, kernels, batch=len(K_LENGTHS))
    poison_beyond(a, b, layout, k_lengths)
    actual = check(a, b, layout, kind, k_lengths=k_lengths)
    assert not actual[k_lengths <= 0].any()


@every_kind
@every_layout
@pytest.mark.parametrize(
    ("heads_a", "heads_b", "heads_out"), [(4, 2, 4), (1, 3, 3), (2, 6, 6), (6, 6, 2), (3, 3, 1), (4, 4, 2)]
)
def test_k_lengths_of_shared_and_summed_heads(
    kernels: str, heads_a: int, heads_b: int, heads_out: int, layout: str, kind: str
) -> None:
    """The next head of a group begins where it does, wherever k ends."""
    k_lengths = torch.tensor([0, 1, 8, 33, 40, 41, -3], device=kernels)
    a, b = operands(layout, (17, 24, 40), kind, kernels, (heads_a, heads_b), batch=7)
    poison_beyond(a, b, layout, k_lengths)
    check(a, b, layout, kind, heads_out, k_lengths=k_lengths)


@every_layout
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_k_lengths_in_wide_tiles(kernels: str, layout: str, kind: str) -> None:
    k_lengths = torch.tensor([72, 0, 31, 32, 33, 64, 65, 99], device=kernels)
    a, b = operands(layout, (130, 72, 72), kind, kernels, (16, 4), batch=8)
    poison_beyond(a, b, layout, k_lengths)
    check(a, b, layout, kind, k_lengths=k_lengths)


@every_kind
@every_layout
def test_k_lengths_of_expanded_operands(kernels: str, layout: str, kind: str) -> None:
    """One operand for all batches, each of which reads its own part."""
    k_lengths = torch.tensor([5, 40, 0, 33], device=kernels)
    a, b = operands(layout, (17, 24, 40), kind, kernels, batch=4)
    check(a[:1].expand(a.shape), b, layout, kind, k_lengths=k_lengths)
    check(a, b[:1].expand(b.shape), layout, kind, k_lengths=k_lengths)


@every_kind
@every_layout
def test_k_lengths_of_all_change_nothing(kernels: str, layout: str, kind: str) -> None:
    a, b = operands(layout, (9, 24, 72), kind, kernels, batch=2)
    whole = check(a, b, layout, kind, k_lengths=torch.tensor([72, 1000], device=kernels))
    assert torch.equal(whole, check(a, b, layout, kind))


@every_kind
@every_layout
def test_k_lengths_leave_tiles_out(kernels: str, layout: str, kind: str) -> None:
    """Work ends with k: counted where the kernels run on the simulated GPU."""
    if kernels != "cpu":
        pytest.skip("a GPU does not count")
    from tests.gpusim import load

    a, b = operands(layout, (9, 24, 512), kind, kernels, (2, 2))
    instructions, bytes_read = [], []
    for length in (512, 64, 0):
        load().take_records()
        check(a, b, layout, kind, heads=1, k_lengths=torch.tensor([length]))
        (record,) = load().take_records()
        instructions.append(record.warp_instructions)
        bytes_read.append(record.cp_async_bytes)
    assert instructions[0] > 2 * instructions[1] > 2 * instructions[2]
    assert bytes_read == [bytes_read[0], bytes_read[0] // 8, 0]
    assert bytes_read[0] > 0


@every_kind
@every_layout
@pytest.mark.parametrize("value", ["nan", "all bits", "inf"])
def test_not_finite(kernels: str, value: str, layout: str, kind: str) -> None:
    """One NaN or infinity reaches its row and nothing else; a NaN of all bits is what GPUs make."""
    dtype, allow_tf32 = KINDS[kind]
    transpose_a = LAYOUTS[layout][0]
    a, b = operands(layout, (40, 24, 72), kind, kernels)
    at = (0, 0, 70, 33) if transpose_a else (0, 0, 33, 70)
    if value == "all bits":
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        a.view(bits)[at] = torch.iinfo(bits).max
    else:
        a[at] = float(value)
    b.abs_()
    actual = torch.ops.mha_ext.matmul(a, b, *LAYOUTS[layout], 1.0, 1, dtype, allow_tf32, None)[0, 0]
    hit = actual.isinf() if value == "inf" else actual.isnan()
    assert hit[33].all()
    hit[33] = False
    assert not hit.any()
    assert actual[torch.arange(40) != 33].isfinite().all()


def test_more_tiles_than_a_grid(kernels: str) -> None:
    """Refused with the kernel's name and its grid; 4 GB of result are allocated and never touched."""
    one = torch.zeros(1, 1, 1, 1, dtype=torch.float16, device=kernels).expand(2**16, 2**15, 1, 1)
    with pytest.raises(RuntimeError, match=r"matmul_mma <<<2147483648, .* at most 2147483647 blocks"):
        torch.ops.mha_ext.matmul(one, one, False, False, 1.0, 2**15, torch.float16, False, None)


HALF, FLOAT = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("a", "b", "change", "error", "message"),
    [
        ((1, 1, 4, 8), (1, 1, 8), {}, ValueError, "b: expected 4 dimensions"),
        ((1, 1, 4, 8), (1, 1, 7, 4), {}, ValueError, "a, b: expected the same"),
        ((2, 1, 4, 8), (1, 1, 8, 4), {}, ValueError, "a, b: expected the same"),
        ((1, 3, 4, 8), (1, 2, 8, 4), {"heads": 3}, ValueError, "num_heads_out"),
        ((1, 4, 4, 8), (1, 2, 8, 4), {"heads": 2}, ValueError, "num_heads_out"),
        ((1, 4, 4, 8), (1, 4, 8, 4), {"heads": 3}, ValueError, "num_heads_out"),
        ((1, 4, 4, 8), (1, 4, 8, 4), {"heads": 8}, ValueError, "num_heads_out"),
        ((1, 4, 4, 8), (1, 4, 8, 4), {"heads": 0}, ValueError, "num_heads_out"),
        ((1, 1, 4, 8), (1, 1, 8, 4), {"transpose_a": True, "transpose_b": True}, ValueError, "transpose_a"),
        ((1, 1, 4, 8), (1, 1, 8, 4), {"b_dtype": HALF}, TypeError, "b: expected dtype Float, got Half"),
        ((1, 1, 4, 8), (1, 1, 8, 4), {"out": HALF}, TypeError, "out_dtype: expected dtype"),
        ((1, 1, 4, 8), (1, 1, 8, 4), {"b_transposed": True}, ValueError, "b: expected a last axis of stride 1"),
        ((1, 0, 4, 8), (1, 2, 8, 4), {"heads": 2}, ValueError, "num_heads_out"),
        ((1, 0, 4, 8), (1, 2, 7, 4), {"heads": 0}, ValueError, "a, b: expected the same"),
        (
            (1, 1, 4, 8),
            (1, 1, 8, 4),
            {"k_lengths": torch.zeros(2, dtype=torch.int64)},
            ValueError,
            "k_lengths: expected shape",
        ),
        (
            (1, 1, 4, 8),
            (1, 1, 8, 4),
            {"k_lengths": torch.zeros(1)},
            TypeError,
            "k_lengths: expected dtype Long, got Float",
        ),
        (
            (2, 1, 4, 8),
            (2, 1, 8, 4),
            {"k_lengths": torch.zeros(4, dtype=torch.int64)[::2]},
            ValueError,
            "k_lengths: expected a contiguous",
        ),
    ],
)
def test_refusals(
    kernels: str, a: tuple[int, ...], b: tuple[int, ...], change: dict[str, Any], error: type[Exception], message: str
) -> None:
    x = torch.zeros(a, device=kernels)
    y = torch.zeros(b, dtype=change.get("b_dtype", FLOAT), device=kernels)
    if change.get("b_transposed"):
        y = y.mT.contiguous().mT
    transposes = change.get("transpose_a", False), change.get("transpose_b", False)
    with pytest.raises(error, match=message):
        torch.ops.mha_ext.matmul(
            x, y, *transposes, 1.0, change.get("heads", 1), change.get("out", FLOAT), False, change.get("k_lengths")
        )
