"""torch.ops.mha_ext.masked_softmax and its backward, against the reference in fp64."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mha_ext import reference

HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (HALF, BF16, FP32, FP64)
# Each side of every bound between kernels (256, 1024, 4096, 8192 keys), odd and even, packs whole and broken.
LENGTHS = (1, 7, 63, 65, 129, 200, 256, 257, 1000, 1024, 1025, 2050, 4097, 5000, 8192, 9001, 9004)


@dataclass(frozen=True)
class Rule:
    """Everything that decides a score beside the score itself, in the operator's words."""

    attn_mask: Tensor | None = None
    key_lengths: Tensor | None = None
    q_offset: int | Tensor = 0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0

    def reference(self) -> dict[str, Any]:
        sides = [None if side < 0 else side for side in self.window]
        return {
            "attn_mask": self.attn_mask,
            "key_lengths": self.key_lengths,
            "q_offset": self.q_offset,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
            "window": tuple(sides),
            "softcap": self.softcap or None,
        }


@dataclass(frozen=True)
class Result:
    weights: Tensor
    dropped: Tensor
    lse: Tensor
    max_score: Tensor
    entropy: Tensor


def forward(
    scores: Tensor,
    rule: Rule,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_stats: bool = True,
) -> Result:
    row_dtype = reference.accumulate_dtype_of(scores.dtype)
    batch, heads = scores.shape[:2]
    per_batch = isinstance(rule.q_offset, Tensor)
    results = torch.ops.mha_ext.masked_softmax(
        scores,
        None if rule.attn_mask is None else rule.attn_mask.expand(scores.shape),
        rule.key_lengths,
        rule.q_offset if per_batch else None,
        None if rule.alibi_slopes is None else rule.alibi_slopes.to(row_dtype).expand(batch, heads),
        None if rule.sinks is None else rule.sinks.to(row_dtype),
        rng_state,
        0 if per_batch else rule.q_offset,
        *rule.window,
        rule.softcap,
        dropout_p,
        out_dtype or scores.dtype,
        return_stats,
    )
    return Result(*results)


def in_double(x: Tensor | None) -> Tensor | None:
    return x.double() if x is not None and x.is_floating_point() else x


def expected(scores: Tensor, rule: Rule, compute: torch.dtype = FP64, **more: Any) -> reference.SoftmaxResult:
    arguments = rule.reference()
    if compute == FP64:
        arguments = {name: in_double(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    return reference.masked_softmax(scores.to(compute), **arguments, **more)


def assert_as_good(ours: Tensor, exact: Tensor, theirs: Tensor, floor: float, what: str) -> None:
    """NaN and infinity where they belong, and at most 1.5 times the error of PyTorch's own result, plus a floor."""
    ours, theirs = ours.double(), theirs.double()
    special = ~exact.isfinite()
    torch.testing.assert_close(
        ours[special], exact[special], rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )
    assert ours[~special].isfinite().all(), what
    if special.all():
        return
    error = (ours - exact)[~special].abs().max().item()
    budget = 1.5 * (theirs - exact)[~special].abs().max().item() + floor
    assert error <= budget, f"{what}: error {error:.3g}, budget {budget:.3g}"


def backward(
    grad_weights: Tensor | None,
    weights: Tensor,
    lse: Tensor,
    *,
    grad_dropped: Tensor | None = None,
    grad_lse: Tensor | None = None,
    scores: Tensor | None = None,
    q_offset: int | Tensor = 0,
    sinks: Tensor | None = None,
    rng_state: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    grad_dtype: torch.dtype | None = None,
    bias_grad: bool = True,
    sink_grad: bool = False,
    slope_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """grad_scores, grad_bias, grad_sink_rows, grad_slope_rows"""
    per_batch = isinstance(q_offset, Tensor)
    return torch.ops.mha_ext.masked_softmax_backward(
        grad_weights,
        grad_dropped,
        grad_lse,
        weights,
        scores,
        lse,
        q_offset if per_batch else None,
        sinks,
        rng_state,
        0 if per_batch else q_offset,
        softcap,
        dropout_p,
        grad_dtype or weights.dtype,
        bias_grad,
        sink_grad,
        slope_grad,
    )


def check_forward(scores: Tensor, rule: Rule, **more: Any) -> Result:
    ours = forward(scores, rule, **more)
    exact = expected(scores, rule)
    compute = reference.accumulate_dtype_of(scores.dtype)
    theirs = expected(scores, rule, compute)
    epsilon = torch.finfo(compute).eps
    out_dtype = more.get("out_dtype") or scores.dtype
    rounded = theirs.weights.to(out_dtype)
    assert ours.weights.dtype == out_dtype
    assert ours.weights.stride(-2) % 8 == 0  # rows start on 16 bytes, for the products that read them
    # `exact` is no better than fp64 itself.
    assert_as_good(ours.weights, exact.weights, rounded, (16 if compute == FP64 else 2) * epsilon, "weights")
    for name in ("lse", "max_score", "entropy"):
        value = getattr(ours, name)
        assert value.dtype == compute
        scale = exact.__getattribute__(name).nan_to_num(0, 0, 0).abs()
        floor = 4 * epsilon * max(1.0, scale.max().item() if scale.numel() else 0.0)
        assert_as_good(value, getattr(exact, name), getattr(theirs, name), floor, name)
    return ours


def random_scores(shape: tuple[int, ...], dtype: torch.dtype, device: str, scale: float = 3.0) -> Tensor:
    return (torch.randn(shape, dtype=FP64) * scale).to(device, dtype)


RULES: dict[str, Callable[[tuple[int, int, int, int], str], Rule]] = {
    "none": lambda shape, device: Rule(),
    "causal": lambda shape, device: Rule(window=(-1, 0)),
    "causal at the end": lambda shape, device: Rule(window=(-1, 0), q_offset=shape[3] - shape[2]),
    "window": lambda shape, device: Rule(window=(9, 5), q_offset=shape[3] // 2),
    "window to the left": lambda shape, device: Rule(window=(3, -1), q_offset=11),
    "offsets": lambda shape, device: Rule(
        window=(40, 2), q_offset=torch.tensor([shape[3] // 3, -2], device=device)[: shape[0]]
    ),
    "far offsets": lambda shape, device: Rule(
        window=(-1, 0), q_offset=torch.tensor([2**62, -(2**62)], device=device)[: shape[0]]
    ),
    "endless window": lambda shape, device: Rule(
        window=(2**63 - 1, 2**63 - 1), q_offset=torch.tensor([2**62, -(2**62)], device=device)[: shape[0]]
    ),
    "lengths": lambda shape, device: Rule(key_lengths=torch.tensor([shape[3] * 2 // 3, 0], device=device)[: shape[0]]),
    "long lengths": lambda shape, device: Rule(key_lengths=torch.tensor([shape[3] + 9, -1], device=device)[: shape[0]]),
    "bool mask": lambda shape, device: Rule(attn_mask=torch.rand(shape, device=device) > 0.4),
    "key mask": lambda shape, device: Rule(attn_mask=torch.rand((shape[0], 1, 1, shape[3]), device=device) > 0.4),
    "row mask": lambda shape, device: Rule(attn_mask=torch.rand((1, 1, shape[2], 1), device=device) > 0.5),
    "transposed mask": lambda shape, device: Rule(
        attn_mask=(torch.rand((shape[0], 1, shape[3], shape[2]), device=device) > 0.4).transpose(2, 3)
    ),
    "bias": lambda shape, device: Rule(attn_mask=torch.randn(shape, device=device)),
    "fp16 bias": lambda shape, device: Rule(attn_mask=torch.randn(shape[1:], device=device).half()),
    "bf16 bias": lambda shape, device: Rule(attn_mask=torch.randn(shape[2:], device=device).bfloat16()),
    "fp64 bias": lambda shape, device: Rule(attn_mask=torch.randn(shape[2:], device=device).double()),
    "bias with -inf": lambda shape, device: Rule(
        attn_mask=torch.randn(shape, device=device).masked_fill(torch.rand(shape, device=device) > 0.6, -math.inf)
    ),
    "bias of finfo.min": lambda shape, device: Rule(
        attn_mask=torch.full((shape[2], shape[3]), torch.finfo(FP32).min, device=device)
    ),
    "alibi": lambda shape, device: Rule(alibi_slopes=torch.rand(shape[1], device=device), q_offset=7),
    "alibi by batch": lambda shape, device: Rule(alibi_slopes=torch.rand(shape[:2], device=device), window=(-1, 0)),
    "softcap": lambda shape, device: Rule(softcap=5.0),
    "sinks": lambda shape, device: Rule(sinks=torch.randn(shape[1], device=device), window=(-1, 0), q_offset=-2),
    "all": lambda shape, device: Rule(
        attn_mask=torch.randn((shape[0], 1, *shape[2:]), device=device).masked_fill(
            torch.rand((shape[0], 1, *shape[2:]), device=device) > 0.8, -math.inf
        ),
        key_lengths=torch.tensor([shape[3] - 3, shape[3] // 2], device=device)[: shape[0]],
        q_offset=torch.tensor([shape[3] // 2, shape[3] // 4], device=device)[: shape[0]],
        alibi_slopes=torch.rand(shape[:2], device=device),
        sinks=torch.randn(shape[1], device=device),
        window=(shape[3] // 3, 6),
        softcap=8.0,
    ),
}  # fmt: skip


def visible_keys(scores: Tensor, rule: Rule) -> Tensor:
    probe = replace(rule, alibi_slopes=None, softcap=0.0, sinks=None)
    bias = rule.attn_mask
    if bias is not None and bias.is_floating_point():
        probe = replace(probe, attn_mask=bias != -math.inf)
    return expected(torch.zeros_like(scores, dtype=FP64), probe).weights > 0


# --- forward --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_rows(kernels: str, dtype: torch.dtype, length: int) -> None:
    shape = (1, 2, 3, length) if length <= 1024 else (1, 1, 2, length)
    check_forward(random_scores(shape, dtype, kernels), Rule())


@pytest.mark.parametrize("length", [13, 160, 517, 1028, 9001])
@pytest.mark.parametrize("name", RULES)
def test_rules(kernels: str, name: str, length: int) -> None:
    shape = (2, 2, 6, length) if length < 1000 else (2, 1, 2, length)
    rule = RULES[name](shape, kernels)
    scores = random_scores(shape, HALF if length == 160 else FP32, kernels)
    ours = check_forward(scores, rule)
    assert (ours.weights[~visible_keys(scores, rule)] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["all", "bias of finfo.min"])
def test_rules_by_dtype(kernels: str, name: str, dtype: torch.dtype) -> None:
    shape = (2, 3, 5, 120)
    check_forward(random_scores(shape, dtype, kernels), RULES[name](shape, kernels))


@pytest.mark.parametrize("length", [40, 700, 2052, 8200])
@pytest.mark.parametrize("name", ["causal", "window", "lengths", "bool mask", "bias with -inf", "all"])
def test_hidden_scores_change_nothing(kernels: str, name: str, length: int) -> None:
    shape = (2, 1, 4, length)
    rule = RULES[name](shape, kernels)
    scores = random_scores(shape, FP32, kernels)
    hidden = ~visible_keys(scores, rule)
    clean = forward(scores, rule)
    for poison in (math.nan, math.inf, -math.inf):
        poisoned = forward(scores.masked_fill(hidden, poison), rule)
        for field_name in ("weights", "lse", "max_score", "entropy"):
            torch.testing.assert_close(getattr(poisoned, field_name), getattr(clean, field_name), rtol=0, atol=0)


@pytest.mark.parametrize("length", [40, 1030, 8200])
def test_a_visible_nan_makes_its_row_nan(kernels: str, length: int) -> None:
    scores = random_scores((1, 1, 4, length), FP32, kernels)
    scores[..., 1, 3] = math.nan
    scores[..., 2, 5] = math.inf
    ours = forward(scores, Rule(key_lengths=torch.tensor([length - 7], device=kernels)))
    for row in (1, 2):
        assert ours.weights[0, 0, row, : length - 7].isnan().all()
        assert (ours.weights[0, 0, row, length - 7 :] == 0).all()  # hidden keys stay hidden
        assert ours.lse[0, 0, row].isnan()
        assert ours.entropy[0, 0, row].isnan()
    assert ours.max_score[0, 0, 1].isnan()
    assert ours.max_score[0, 0, 2] == math.inf
    assert ours.weights[0, 0, [0, 3]].isfinite().all()


def test_a_nan_hidden_in_a_nan_row_stays_hidden(kernels: str) -> None:
    scores = torch.zeros(1, 1, 1, 50, device=kernels)
    scores[..., 4] = math.nan
    mask = torch.ones(50, dtype=torch.bool, device=kernels)
    mask[10:20] = False
    weights = forward(scores, Rule(attn_mask=mask)).weights[0, 0, 0]
    assert weights[mask].isnan().all()
    assert (weights[~mask] == 0).all()


def test_rows_that_see_nothing(kernels: str) -> None:
    scores = random_scores((1, 2, 3, 33), FP32, kernels)
    mask = torch.zeros(33, dtype=torch.bool, device=kernels)
    for rule in (Rule(attn_mask=mask), Rule(attn_mask=torch.full((33,), -math.inf, device=kernels))):
        ours = forward(scores, rule)
        assert (ours.weights == 0).all()
        assert (ours.entropy == 0).all()
        assert (ours.lse == -math.inf).all()
        assert (ours.max_score == -math.inf).all()
    sinks = torch.tensor([1.5, -math.inf], device=kernels)
    ours = forward(scores, Rule(attn_mask=mask, sinks=sinks))
    assert (ours.weights == 0).all()
    torch.testing.assert_close(ours.lse, sinks[None, :, None].expand(1, 2, 3))


@pytest.mark.parametrize("length", [3, 300, 9000])
def test_a_row_of_the_smallest_number_is_uniform(kernels: str, length: int) -> None:
    for dtype in (HALF, BF16, FP32):
        bias = torch.full((length,), torch.finfo(dtype).min, dtype=dtype, device=kernels)
        # Scores that vanish beside such a bias.
        weights = forward(torch.zeros(1, 1, 2, length, dtype=dtype, device=kernels), Rule(attn_mask=bias)).weights
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / length))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [24, 25, 1100])
def test_strides(kernels: str, length: int, dtype: torch.dtype) -> None:
    shape = (2, 3, 4, length)
    contiguous = random_scores(shape, dtype, kernels)
    exact = forward(contiguous, Rule()).weights
    permuted = contiguous.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    padded = torch.full((2, 3, 4, length + 8), math.nan, dtype=dtype, device=kernels)[..., :length].copy_(contiguous)
    shifted = torch.full((2, 3, 4, length + 3), math.nan, dtype=dtype, device=kernels)[..., 3:].copy_(contiguous)
    for view in (permuted, padded, shifted):
        torch.testing.assert_close(forward(view, Rule()).weights, exact)
    expanded = contiguous[:1, :, :1].expand(shape)
    torch.testing.assert_close(forward(expanded, Rule()).weights, forward(expanded.contiguous(), Rule()).weights)


@pytest.mark.parametrize("scores_dtype", [HALF, BF16, FP32], ids=str)
@pytest.mark.parametrize("out_dtype", [HALF, BF16, FP32], ids=str)
def test_out_dtypes(kernels: str, scores_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    check_forward(random_scores((1, 2, 3, 100), scores_dtype, kernels), Rule(), out_dtype=out_dtype)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_empty(kernels: str, shape: tuple[int, ...]) -> None:
    ours = forward(torch.zeros(shape, device=kernels), Rule())
    assert ours.weights.shape == shape
    assert (ours.lse == -math.inf).all()
    assert ours.lse.shape == shape[:3]
    grads = backward(ours.weights, ours.weights, ours.lse)
    assert grads[0].shape == shape
    assert (grads[3] == 0).all()


@pytest.mark.slow
def test_a_very_long_row(kernels: str) -> None:
    scores = random_scores((1, 1, 1, 131_072), BF16, kernels)
    check_forward(scores, Rule(window=(100_000, 0), q_offset=131_000))
    check_backward(scores, BackwardCase(Rule(), 0.1), kernels)


@pytest.mark.parametrize(("length", "pitch"), [(24, 24), (25, 32)])
def test_results_can_be_changed_in_place(kernels: str, length: int, pitch: int) -> None:
    """Padded rows, and no views."""
    scores = random_scores((2, 3, 4, length), FP32, kernels)
    rng_state = torch.tensor([1, 2], device=kernels)
    ours = forward(scores, Rule(), 0.5, rng_state)
    grads = backward(ours.weights, ours.weights, ours.lse, scores=scores, softcap=1.0)
    for each in (ours.weights, ours.dropped, *grads[:2]):
        assert each.shape == scores.shape
        assert not each._is_view()
        assert each.stride() == (12 * pitch, 4 * pitch, pitch, 1)


def test_a_pack_of_any_dtype_is_whole_sectors(kernels: str) -> None:
    """What is read and written in packs fills sectors: counted where the kernels run on the simulated GPU."""
    if kernels != "cpu":
        pytest.skip("a GPU does not count")
    from tests.gpusim import load

    for dtype, length in itertools.product(DTYPES, (256, 1024, 4096, 16384)):
        scores = random_scores((1, 1, 2, length), dtype, kernels)
        load().take_records()
        ours = forward(scores, Rule(), return_stats=False)
        backward(scores, ours.weights, ours.lse)
        for record in load().take_records():
            # the rows' results are single elements
            for kind in ("load", "store"):
                sectors, used = (getattr(record, f"global_{kind}_{what}") for what in ("sectors", "bytes"))
                assert 32 * sectors <= 1.05 * used + 1024, (dtype, length, record.kernel, kind)


def test_more_rows_than_a_grid_axis(kernels: str) -> None:
    scores = random_scores((70000, 1, 1, 3), FP32, kernels)
    torch.testing.assert_close(forward(scores, Rule(), return_stats=False).weights, scores.softmax(-1))


def test_statistics_only_when_asked(kernels: str) -> None:
    ours = forward(torch.zeros(1, 1, 1, 8, device=kernels), Rule(), return_stats=False)
    assert ours.max_score.shape == ours.entropy.shape == ours.dropped.shape == (0,)


# --- dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [9, 20, 260, 1028, 1029, 8200, 8201])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_dropout_draws_the_bits_of_the_reference(
    kernels: str, length: int, dropout_p: float, dtype: torch.dtype
) -> None:
    shape = (2, 3, 18, length) if length < 300 else (1, 2, 10, length)
    if length > 8000:
        shape = (1, 1, 2, length)
    rng_state = torch.tensor([0x1234_5678_9ABC_DEF0, 4 * 2**32 + 77], device=kernels)
    scores = random_scores(shape, dtype, kernels)
    ours = forward(scores, Rule(), dropout_p, rng_state)
    keep = reference.dropout_keep(scores.shape, dropout_p, rng_state)
    scale = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0
    torch.testing.assert_close(ours.dropped, ours.weights * keep * scale)
    assert ((ours.dropped == 0) == ~keep.bool()).all()


def test_dropout_of_a_nan_row_keeps_dropped_keys_zero(kernels: str) -> None:
    rng_state = torch.tensor([3, 5], device=kernels)
    scores = torch.full((1, 1, 1, 64), math.nan, device=kernels)
    dropped = forward(scores, Rule(), 0.5, rng_state).dropped
    keep = reference.dropout_keep(scores.shape, 0.5, rng_state).bool()
    assert dropped[keep].isnan().all()
    assert (dropped[~keep] == 0).all()


# --- backward -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackwardCase:
    rule: Rule = field(default_factory=Rule)
    dropout_p: float = 0.0
    grad_weights: bool = True
    grad_lse: bool = False


def check_backward(scores: Tensor, case: BackwardCase, device: str) -> None:
    """All gradients at once: the operator's, from its own rounded weights, against autograd of a softmax in fp64."""
    rule, dtype = case.rule, scores.dtype
    row_dtype = reference.accumulate_dtype_of(dtype)
    rng_state = torch.tensor([11, 22], device=device) if case.dropout_p else None
    ours = forward(scores, rule, case.dropout_p, rng_state)
    grad_weights = random_scores(scores.shape, dtype, device, 1.0) if case.grad_weights else None
    grad_dropped = random_scores(scores.shape, dtype, device, 1.0) if case.dropout_p else None
    grad_lse = random_scores(scores.shape[:3], row_dtype, device, 1.0) if case.grad_lse else None
    if grad_lse is not None:
        grad_lse = grad_lse.masked_fill(ours.lse == -math.inf, 0)
    sinks = None if rule.sinks is None else rule.sinks.to(row_dtype)
    grad_scores, grad_bias, grad_sink_rows, grad_slope_rows = backward(
        grad_weights,
        ours.weights,
        ours.lse,
        grad_dropped=grad_dropped,
        grad_lse=grad_lse,
        scores=scores if rule.softcap else None,
        q_offset=rule.q_offset,
        sinks=sinks,
        rng_state=rng_state,
        softcap=rule.softcap,
        dropout_p=case.dropout_p,
        sink_grad=sinks is not None,
    )

    def reference_grads(compute: torch.dtype) -> list[Tensor]:
        leaves = {
            "scores": scores.to(compute),
            "bias": torch.zeros(scores.shape, dtype=compute, device=device),
            "sinks": torch.zeros(scores.shape[:3], dtype=compute, device=device),
            "slopes": torch.zeros(scores.shape[:3], dtype=compute, device=device),
        }
        for leaf in leaves.values():
            leaf.requires_grad_()
        arguments = rule.reference()
        mask = arguments.pop("attn_mask")
        visible = visible_keys(scores, rule)
        bias = leaves["bias"] if mask is None or mask.dtype == torch.bool else mask.to(compute) + leaves["bias"]
        # sinks and slopes by row: rows become heads
        batch, heads, seqlen_q, seqlen_kv = scores.shape
        distance = reference.relative_position(seqlen_q, seqlen_kv, scores.device, rule.q_offset).abs()
        slopes = leaves["slopes"]
        if rule.alibi_slopes is not None:
            slopes = slopes + rule.alibi_slopes.to(compute).expand(batch, heads)[..., None]
        bias = (bias - slopes[..., None] * distance).masked_fill(~visible, -math.inf)
        raw = leaves["scores"].masked_fill(~visible, 0)
        capped = rule.softcap * torch.tanh(raw / rule.softcap) if rule.softcap else raw
        logits = capped + bias
        if rule.sinks is not None:
            row_sinks = rule.sinks.to(compute)[:, None] + leaves["sinks"]
            logits = torch.cat([logits, row_sinks[..., None]], -1)
        empty = (logits == -math.inf).all(-1, keepdim=True)
        logits = logits.masked_fill(empty, 0)
        weights = logits.softmax(-1)[..., :seqlen_kv].masked_fill(empty | ~visible, 0)
        # torch.logsumexp loses the logarithm of n in a row of n finfo.min, and with it the gradient.
        largest = logits.detach().amax(-1, keepdim=True)
        lse = largest[..., 0] + (logits - largest).exp().sum(-1).log()
        total = 0 * sum(leaf.sum() for leaf in leaves.values())
        if grad_weights is not None:
            total = total + (weights * grad_weights).sum()
        if grad_dropped is not None:
            keep = reference.dropout_keep(scores.shape, case.dropout_p, rng_state)
            total = total + (weights * keep / (1 - case.dropout_p) * grad_dropped).sum()
        if grad_lse is not None:
            total = total + (lse * grad_lse).sum()
        return list(torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True))

    exact = reference_grads(FP64)
    theirs = reference_grads(row_dtype)
    epsilon = torch.finfo(dtype).eps
    # Half weights were rounded before the gradient was taken from them: the floor allows for that.
    for name, mine, right, other in zip(
        ("scores", "bias", "sinks", "slopes"),
        (grad_scores, grad_bias if rule.softcap else grad_scores, grad_sink_rows, grad_slope_rows),
        exact,
        theirs,
        strict=True,
    ):
        if name == "sinks" and rule.sinks is None:
            assert mine.shape == (0,)
            continue
        if name in ("scores", "bias"):
            other = other.to(dtype)
            assert (mine[ours.weights == 0] == 0).all(), name
        # `exact` is no better than fp64 itself.
        floor = {FP64: 16, FP32: 2}.get(dtype, 1) * epsilon * max(1.0, right.abs().max().item())
        if name == "slopes":
            floor *= scores.shape[3]
        assert_as_good(mine, right, other, floor, f"grad of {name}")


@pytest.mark.parametrize("length", [1, 7, 63, 65, 200, 256, 257, 1000, 1024, 1025, 4097, 8190, 8192, 9001, 9004])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_plain(kernels: str, dtype: torch.dtype, length: int) -> None:
    shape = (1, 2, 3, length) if length <= 1024 else (1, 1, 2, length)
    check_backward(random_scores(shape, dtype, kernels), BackwardCase(), kernels)


@pytest.mark.parametrize("length", [24, 77, 1034, 8300])
@pytest.mark.parametrize("name", [name for name in RULES if "far" not in name and "endless" not in name])
def test_backward_rules(kernels: str, name: str, length: int) -> None:
    shape = (2, 2, 5, length) if length < 100 else (1, 1, 2, length)
    rule = RULES[name](shape, kernels)
    check_backward(
        random_scores(shape, FP64 if length == 24 else FP32, kernels), BackwardCase(rule, 0.2, True, True), kernels
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_by_dtype(kernels: str, dtype: torch.dtype) -> None:
    shape = (2, 2, 5, 40)
    check_backward(
        random_scores(shape, dtype, kernels), BackwardCase(RULES["all"](shape, kernels), 0.3, True, True), kernels
    )


@pytest.mark.parametrize("grad_weights", [False, True])
@pytest.mark.parametrize("grad_lse", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_backward_of_any_subset(kernels: str, grad_weights: bool, grad_lse: bool, dropout_p: float) -> None:
    scores = random_scores((1, 2, 3, 50), FP32, kernels)
    check_backward(scores, BackwardCase(Rule(), dropout_p, grad_weights, grad_lse), kernels)


@pytest.mark.parametrize("length", [40, 1030, 8200])
def test_backward_ignores_what_is_hidden(kernels: str, length: int) -> None:
    scores = random_scores((1, 1, 2, length), FP32, kernels)
    rule = Rule(key_lengths=torch.tensor([length - 9], device=kernels), softcap=4.0)
    ours = forward(scores, rule)

    grad_weights = torch.randn_like(scores)
    hidden = torch.arange(length, device=kernels) >= length - 9
    clean = backward(grad_weights, ours.weights, ours.lse, scores=scores, softcap=4.0)
    poisoned = backward(
        grad_weights.masked_fill(hidden, math.nan),
        ours.weights,
        ours.lse,
        scores=scores.masked_fill(hidden, math.nan),
        softcap=4.0,
    )
    for a, b in zip(clean, poisoned, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert (clean[0][..., hidden] == 0).all()
    assert (clean[1][..., hidden] == 0).all()


def test_backward_takes_any_strides_and_mixed_dtypes(kernels: str) -> None:
    shape = (2, 3, 4, 24)
    weights = random_scores(shape, FP32, kernels).softmax(-1).half()
    lse = torch.zeros(shape[:3], device=kernels)
    grad = random_scores((1, 1, 1, 24), BF16, kernels)
    exact = weights.double() * (grad.double() - (weights.double() * grad.double()).sum(-1, keepdim=True))
    permuted = weights.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    for each in (weights, permuted):
        ours = backward(grad.expand(shape), each, lse, grad_dtype=FP32)[0]
        assert ours.dtype == FP32
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


# --- refusals -------------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rank": ({"scores": torch.zeros(2, 3)}, ValueError, "scores: expected 4 dimensions, got 2"),
    "dtype": ({"scores": torch.zeros(1, 1, 1, 4, dtype=torch.int32)}, TypeError, "scores: expected dtype .* got Int"),
    "stride": ({"scores": torch.zeros(1, 1, 4, 6).mT}, ValueError, "scores: expected a last axis of stride 1"),
    "out_dtype": ({"out_dtype": FP64}, TypeError, "out_dtype: expected dtype .* got Double"),
    "mask shape": ({"attn_mask": torch.zeros(1, 1, 1, 5)}, ValueError, r"attn_mask: expected shape \[1, 1, 2, 4\]"),
    "mask dtype": ({"attn_mask": torch.zeros(1, 1, 2, 4, dtype=torch.int64)}, TypeError, "attn_mask: expected dtype"),
    "lengths": ({"key_lengths": torch.zeros(1)}, TypeError, "key_lengths: expected dtype Long, got Float"),
    "offsets": ({"q_offsets": torch.zeros(2, dtype=torch.int64)}, ValueError, r"q_offsets: expected shape \[1\]"),
    "slopes": ({"alibi_slopes": torch.zeros(1, 1, dtype=FP64)}, TypeError, "alibi_slopes: expected dtype Float"),
    "sinks": ({"sinks": torch.zeros(3)}, ValueError, r"sinks: expected shape \[1\], got \[3\]"),
    "window": ({"window_left": -2}, ValueError, r"window_left: expected -1 \(unlimited\) or more, got -2"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap: expected a finite number >= 0, got -1"),
    "dropout": ({"dropout_p": 1.5}, ValueError, "dropout_p: expected a number from 0 to 1, got 1.5"),
    "no state": ({"dropout_p": 0.5}, ValueError, "rng_state: expected a tensor when dropout_p is 0.5, got None"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(kernels: str, name: str) -> None:
    wrong, error, message = REFUSALS[name]
    arguments: dict[str, Any] = {
        "scores": torch.zeros(1, 1, 2, 4),
        "attn_mask": None,
        "key_lengths": None,
        "q_offsets": None,
        "alibi_slopes": None,
        "sinks": None,
        "rng_state": None,
        "q_offset": 0,
        "window_left": -1,
        "window_right": -1,
        "softcap": 0.0,
        "dropout_p": 0.0,
        "out_dtype": FP32,
        "return_stats": False,
    } | wrong
    arguments = {name: x.to(kernels) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    with pytest.raises(error, match=message):
        torch.ops.mha_ext.masked_softmax(*arguments.values())


def test_backward_refuses(kernels: str) -> None:
    weights, lse = torch.zeros(1, 1, 2, 4, device=kernels), torch.zeros(1, 1, 2, device=kernels)
    with pytest.raises(ValueError, match=r"grad_weights: expected shape \[1, 1, 2, 4\], got \[1, 1, 2, 5\]"):
        backward(torch.zeros(1, 1, 2, 5, device=kernels), weights, lse)
    with pytest.raises(TypeError, match=r"grad_weights: expected dtype .* got Double"):
        backward(weights.double(), weights, lse)
    with pytest.raises(ValueError, match="scores: expected a tensor exactly when softcap is not 0, got None"):
        backward(weights, weights, lse, softcap=1.0)
    with pytest.raises(ValueError, match="grad_dropped: expected None when dropout_p is 0"):
        backward(weights, weights, lse, grad_dropped=weights)
    with pytest.raises(ValueError, match="sinks: expected a tensor when sink_grad is true"):
        backward(weights, weights, lse, sink_grad=True)
    with pytest.raises(TypeError, match=r"grad_dtype: expected dtype .* got Double"):
        backward(weights, weights, lse, grad_dtype=FP64)
