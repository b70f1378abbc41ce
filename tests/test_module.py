"""MultiHeadAttention against torch.nn.MultiheadAttention, its loaders, what it refuses, what it lets others attach."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import mha_ext
from mha_ext import MultiHeadAttention


def assert_as_exact(ours: Tensor, theirs: Tensor, exact: Tensor, name: str) -> None:
    """No further from the fp64 result than twice torch is, plus a floor of a few units in the last place."""
    ours_error = (ours.double() - exact).abs().max().item()
    theirs_error = (theirs.double() - exact).abs().max().item()
    units = 64 if ours.dtype == torch.float64 else 8  # in fp64 the exact result is rounded too
    floor = units * torch.finfo(ours.dtype).eps * max(1.0, exact.abs().max().item())
    assert ours_error <= 2 * theirs_error + floor, f"{name}: {ours_error:.2e} against torch's {theirs_error:.2e}"


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Biases start as zeros, which hides mistakes."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.3).to(parameter)


# --- against torch.nn.MultiheadAttention -------------------------------------------------------------------------


class Case(NamedTuple):
    name: str
    embed_dim: int = 16
    num_heads: int = 2
    options: dict[str, Any] = {}  # noqa: RUF012
    query: tuple[int, ...] = (3, 7, 16)
    key: tuple[int, ...] | None = None  # None: self-attention
    value: tuple[int, ...] | None = None  # None: value is key
    mask: str = ""


CASES = [
    Case("self"),
    Case("self_no_bias", options={"bias": False}),
    Case("self_odd_heads", embed_dim=15, num_heads=3, query=(2, 5, 15)),
    Case("self_one_head_of_one", embed_dim=1, num_heads=1, query=(2, 3, 1)),
    Case("self_wide", embed_dim=192, num_heads=3, query=(2, 33, 192)),
    Case("self_unbatched", query=(7, 16)),
    Case("self_key_mask", mask="key"),
    Case("self_causal", mask="causal"),
    Case("self_bool_mask", mask="bool"),
    Case("self_float_mask", mask="float"),
    Case("self_per_head_mask", mask="per_head"),
    Case("self_per_head_and_key_mask", mask="per_head key"),
    Case("self_bool_and_key_mask", mask="bool key"),
    Case("self_float_and_key_mask", mask="float key_float"),
    Case("self_unbatched_key_mask", query=(7, 16), mask="key"),
    Case("cross", key=(3, 11, 16)),
    Case("cross_no_bias", options={"bias": False}, key=(3, 11, 16)),
    Case("cross_value_differs", key=(3, 11, 16), value=(3, 11, 16)),
    Case("cross_key_mask", key=(3, 11, 16), mask="key"),
    Case("cross_float_mask", key=(3, 11, 16), mask="float"),
    Case("cross_causal", key=(3, 11, 16), mask="causal"),
    Case("cross_unbatched", query=(7, 16), key=(4, 16)),
    Case("kdim", options={"kdim": 12}, key=(3, 11, 12), value=(3, 11, 16)),
    Case("kdim_vdim", options={"kdim": 12, "vdim": 20}, key=(3, 11, 12), value=(3, 11, 20)),
    Case("kdim_vdim_no_bias", options={"kdim": 12, "vdim": 12, "bias": False}, key=(3, 11, 12)),
]


def masks_for(case: Case, device: str, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """Equivalent keyword arguments for ours and for torch's; the first key is always seen."""
    batch = case.query[:-2]
    length_q, length_k = case.query[-2], (case.key or case.query)[-2]
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    def seen(*shape: int) -> Tensor:
        mask = (random(*shape) > 0).cpu()
        mask[..., 0] = True
        return mask.to(device)

    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for kind in case.mask.split():
        if kind == "key":
            ours["key_mask"] = seen(*batch, length_k)
            theirs["key_padding_mask"] = ~ours["key_mask"]
        elif kind == "key_float":
            ours["key_mask"] = theirs["key_padding_mask"] = random(*batch, length_k)
        elif kind == "bool":
            ours["attn_mask"] = seen(length_q, length_k)
            theirs["attn_mask"] = ~ours["attn_mask"]
        elif kind == "float":
            ours["attn_mask"] = theirs["attn_mask"] = random(length_q, length_k)
        elif kind == "per_head":
            ours["attn_mask"] = seen(*batch, case.num_heads, length_q, length_k)
            theirs["attn_mask"] = ~ours["attn_mask"].reshape(-1, length_q, length_k)
        else:
            ours["is_causal"] = True
            triangle = torch.ones(length_q, length_k, dtype=torch.bool, device=device).triu(1)
            theirs["attn_mask"] = triangle
    return ours, theirs


def run_and_differentiate(
    call: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor], parameters: dict[str, Tensor], seed: int
) -> dict[str, Tensor]:
    """Output, weights, and the gradients of a random functional of both."""
    output, weights = call(*inputs)
    generator = torch.Generator().manual_seed(seed)
    loss = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)).sum() for x in (output, weights)
    )
    names = [f"grad of input {i}" for i in range(len(inputs))] + [f"grad of {name}" for name in parameters]
    grads = torch.autograd.grad(loss, [*inputs, *parameters.values()])
    return {"output": output, "weights": weights, **dict(zip(names, grads, strict=True))}


def torch_named(module: MultiHeadAttention) -> dict[str, Tensor]:
    """Our parameters under torch's names and in its order."""
    parameters = dict(module.named_parameters())
    named = {}
    for ours, torchs in [("qkv_proj", "in_proj"), ("q_proj", "q_proj"), ("k_proj", "k_proj"), ("v_proj", "v_proj")]:
        if f"{ours}.weight" in parameters:
            named[f"{torchs}_weight"] = parameters[f"{ours}.weight"]
    named["out_proj.weight"] = parameters["out_proj.weight"]
    return named


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_equals_torch(case: Case, dtype: torch.dtype, device: str) -> None:
    theirs = nn.MultiheadAttention(case.embed_dim, case.num_heads, batch_first=True, **case.options)
    randomise(theirs)
    theirs = theirs.to(device, dtype)
    exact = copy.deepcopy(theirs).double()
    ours = MultiHeadAttention.from_torch(theirs)

    generator = torch.Generator().manual_seed(2)
    shapes = [shape for shape in (case.query, case.key, case.value) if shape is not None]
    inputs = [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]
    our_masks, their_masks = masks_for(case, device, dtype)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact_masks = {k: v.double() if v.is_floating_point() else v for k, v in their_masks.items()}

    def call_torch(module: nn.Module, masks: dict[str, Any]) -> Callable[..., tuple[Tensor, Tensor]]:
        def call(*xs: Tensor) -> tuple[Tensor, Tensor]:
            query, key, value = [*xs, *[xs[-1]] * (3 - len(xs))]
            return module(query, key, value, **masks, average_attn_weights=False)

        return call

    def call_ours(*xs: Tensor) -> tuple[Tensor, Tensor]:
        return ours(*xs, **our_masks, need_weights=True, average_attn_weights=False)

    named = dict(theirs.named_parameters())
    ours_named = torch_named(ours)
    result = run_and_differentiate(call_ours, inputs, ours_named, 3)
    expected = run_and_differentiate(
        call_torch(theirs, their_masks), inputs, {name: named[name] for name in ours_named}, 3
    )
    exact_parameters = dict(exact.named_parameters())
    truth = run_and_differentiate(
        call_torch(exact, exact_masks), exact_inputs, {name: exact_parameters[name] for name in ours_named}, 3
    )
    assert result.keys() == truth.keys()
    for name, value in result.items():
        assert value.shape == truth[name].shape, name
        assert value.dtype == dtype, name
        assert_as_exact(value, expected[name], truth[name], name)


def test_bias_gradients_equal_torch(device: str) -> None:
    theirs = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64, device=device)
    randomise(theirs)
    ours = MultiHeadAttention.from_torch(theirs)
    x = torch.randn(3, 7, 16, dtype=torch.float64, device=device)
    theirs(x, x, x)[0].square().sum().backward()
    ours(x).square().sum().backward()
    # The key bias moves every score of a row alike: its gradient is 0 up to rounding in both.
    torch.testing.assert_close(ours.qkv_proj.bias.grad, theirs.in_proj_bias.grad, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(ours.out_proj.bias.grad, theirs.out_proj.bias.grad, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("shape", [(3, 7, 16), (7, 16)], ids=["batched", "unbatched"])
def test_weights_average_as_in_torch(shape: tuple[int, ...], average: bool) -> None:
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    ours = MultiHeadAttention.from_torch(theirs)
    x = torch.randn(shape)
    expected = theirs(x, x, x, average_attn_weights=average)[1]
    weights = ours(x, need_weights=True, average_attn_weights=average)[1]
    assert weights.shape == expected.shape
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("options", [{}, {"kdim": 12, "vdim": 20}, {"bias": False}], ids=["packed", "kdim", "no_bias"])
def test_same_seed_same_parameters_as_torch(options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    theirs = nn.MultiheadAttention(16, 4, **options)
    after = torch.rand(1)
    torch.manual_seed(5)
    ours = MultiHeadAttention(16, 4, **options)
    assert torch.equal(torch.rand(1), after)
    converted = MultiHeadAttention.from_torch(theirs).state_dict()
    assert converted.keys() == ours.state_dict().keys()
    assert all(torch.equal(value, converted[name]) for name, value in ours.state_dict().items())


def test_from_torch_keeps_what_the_module_is() -> None:
    theirs = nn.MultiheadAttention(16, 4, dropout=0.25, kdim=12, vdim=20, dtype=torch.bfloat16).eval()
    theirs.requires_grad_(False)
    ours = MultiHeadAttention.from_torch(theirs)
    assert (ours.dropout, ours.kdim, ours.vdim, ours.training) == (0.25, 12, 20, False)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in ours.parameters())
    ours.out_proj.weight.zero_()
    assert theirs.out_proj.weight.abs().sum() > 0  # copied, not shared
    assert all(p.requires_grad for p in MultiHeadAttention.from_torch(nn.MultiheadAttention(16, 4)).parameters())
    meta = MultiHeadAttention.from_torch(nn.MultiheadAttention(16, 4, device="meta"))
    assert meta.out_proj.weight.is_meta


def test_from_torch_takes_a_sequence_first_module() -> None:
    theirs = nn.MultiheadAttention(16, 4)  # (L, B, E), torch's default
    x = torch.randn(3, 7, 16)
    expected = theirs(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1)
    torch.testing.assert_close(MultiHeadAttention.from_torch(theirs)(x), expected)


def test_from_torch_takes_the_pruned_weight() -> None:
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    prune.random_unstructured(theirs.out_proj, "weight", amount=0.5)
    x = torch.randn(3, 7, 16)
    torch.testing.assert_close(MultiHeadAttention.from_torch(theirs)(x), theirs(x, x, x)[0])


# --- public reports, by their number in the list of inputs that broke other implementations ----------------------


def test_report_3_lengths_down_to_zero(device: str) -> None:
    mha = MultiHeadAttention(20, 5, 0.1, device=device)
    randomise(mha)
    x = torch.randn(4, 5, 20, device=device)
    lengths = torch.tensor([5, 3, 1, 0], device=device)
    for training in (True, False):
        output, weights = mha.train(training)(x, key_lengths=lengths, need_weights=True, average_attn_weights=False)
        assert torch.equal(output[3], mha.out_proj.bias.expand(5, 20))
        assert not weights[3].any()
        torch.testing.assert_close(weights[:3].sum(-1), torch.ones(3, 5, 5, device=device))
        assert not weights[1, ..., 3:].any()


def test_report_4_all_keys_hidden_in_every_mode(device: str) -> None:
    mha = MultiHeadAttention(16, 2, device=device)
    randomise(mha)
    x = torch.randn(2, 5, 16, device=device)
    hidden = torch.zeros(2, 5, dtype=torch.bool, device=device)
    outputs = []
    for training in (True, False):
        for grad in (True, False):
            for need_weights in (True, False):
                with torch.set_grad_enabled(grad):
                    result = mha.train(training)(x, key_mask=hidden, need_weights=need_weights)
                outputs.append(result[0] if need_weights else result)
    assert all(torch.equal(output, mha.out_proj.bias.expand_as(x)) for output in outputs)


def test_report_5_band_whose_first_keys_are_hidden(device: str) -> None:
    mha = MultiHeadAttention(2, 1, device=device)
    randomise(mha)
    x = torch.ones(600, 2, device=device)
    infinite = torch.full((600, 600), -math.inf, device=device)
    band = infinite.triu(1).nan_to_num(0, neginf=-math.inf) + infinite.tril(-10).nan_to_num(0, neginf=-math.inf)
    output = mha(x, attn_mask=band)
    torch.testing.assert_close(output, mha(x[:1]).expand(600, 2))
    torch.testing.assert_close(output, mha(x, window=(9, 0)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e10])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("how", ["key_mask", "key_lengths"])
def test_report_6_hidden_rows_change_nothing(device: str, how: str, where: str, bad: float) -> None:
    masks = {"key_mask": torch.tensor([[True, False]], device=device), "key_lengths": torch.tensor([1], device=device)}
    check_hidden_row(device, {how: masks[how]}, where, bad)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e10])
@pytest.mark.parametrize("where", ["key", "value"])
def test_report_6_mask_by_query(where: str, bad: float) -> None:
    # For a mask that could differ by query the reference alone promises it.
    mask = torch.tensor([[True, False], [True, False]])
    with mha_ext.backends.use_backend("reference"):
        check_hidden_row("cpu", {"attn_mask": mask}, where, bad)


def check_hidden_row(device: str, mask: dict[str, Tensor], where: str, bad: float) -> None:
    mha = MultiHeadAttention(4, 1, device=device)
    randomise(mha)
    query, key, value = torch.randn(3, 1, 2, 4, device=device).unbind()
    (key if where == "key" else value)[0, 1] = bad
    query.requires_grad_()
    output = mha(query, key, value, **mask)
    torch.testing.assert_close(output, mha(query, key[:, :1], value[:, :1]))
    assert torch.autograd.grad(output.sum(), query)[0].isfinite().all()


def test_report_10_half_precision_with_a_head_of_six(device: str) -> None:
    mha = MultiHeadAttention(24, 4, device=device, dtype=torch.float16)
    x = torch.randn(2, 9, 24, device=device, dtype=torch.float16)
    trained = mha(x)
    with torch.no_grad():
        assert torch.equal(mha.eval()(x), trained)
    exact = copy.deepcopy(mha).double()(x.double())
    torch.testing.assert_close(trained.double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("need_weights", [True, False])
def test_report_11_causal_with_weights(device: str, need_weights: bool) -> None:
    mha = MultiHeadAttention(8, 2, device=device)
    x = torch.randn(4, 3, 8, device=device)
    triangle = torch.ones(3, 3, dtype=torch.bool, device=device).tril()
    result, expected = (
        mha(x, need_weights=need_weights, **how) for how in ({"is_causal": True}, {"attn_mask": triangle})
    )
    torch.testing.assert_close(result, expected)
    if need_weights:
        assert not result[1].triu(1).any()


def test_report_12_causal_and_a_mask_both_apply(device: str) -> None:
    mha = MultiHeadAttention(8, 2, device=device)
    x = torch.randn(4, 6, 8, device=device)
    mask = torch.rand(6, 6, device=device) > 0.4
    both = mha(x, attn_mask=mask & torch.ones_like(mask).tril())
    torch.testing.assert_close(mha(x, attn_mask=mask, is_causal=True), both)
    torch.testing.assert_close(mha(x, attn_mask=mask, is_causal=True, need_weights=True)[0], both)


@pytest.mark.parametrize("with_key_mask", [False, True])
def test_report_13_mask_by_head(with_key_mask: bool) -> None:
    theirs = nn.MultiheadAttention(512, 8, batch_first=True)
    ours = MultiHeadAttention.from_torch(theirs)
    x = torch.randn(2, 100, 512)
    hidden = torch.rand(2 * 8, 100, 100) > 0.7
    hidden[..., 0] = False
    key_mask = torch.arange(100) < torch.tensor([[100], [60]])
    mine, torchs = ({"key_mask": key_mask}, {"key_padding_mask": ~key_mask}) if with_key_mask else ({}, {})
    expected = theirs(x, x, x, attn_mask=hidden, **torchs)[0]
    mask = ~hidden.view(2, 8, 100, 100)
    trained = ours(x, attn_mask=mask, **mine)
    torch.testing.assert_close(trained, expected)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x, attn_mask=mask, **mine), trained)  # by another backend


def test_report_14_no_bias_and_odd_heads_in_eval(device: str) -> None:
    theirs = nn.MultiheadAttention(15, 3, bias=False, batch_first=True, device=device)
    ours = MultiHeadAttention.from_torch(theirs)
    x = torch.randn(2, 5, 15, device=device)
    key_mask = torch.tensor([[True] * 5, [True, True, False, False, False]], device=device)
    expected = theirs(x, x, x, key_padding_mask=~key_mask)[0]
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x, key_mask=key_mask), expected)


@pytest.mark.parametrize(
    ("bias", "weights", "output"),
    [
        ([0.0, 1.0], [0.0180, 0.9820], [7.9281, 7.9964]),
        ([1.0, 0.0], [0.1192, 0.8808], [7.5232, 7.9732]),
    ],
)
def test_report_16_float_key_mask_moves_the_score(bias: list[float], weights: list[float], output: list[float]) -> None:
    mha = MultiHeadAttention(1, 1, bias=False)
    mha.load_state_dict(
        {"in_proj_weight": torch.tensor([[1.0], [3.0], [2.0]]), "out_proj.weight": torch.tensor([[2.0]])}
    )
    result, seen = mha(torch.tensor([[1.0], [2.0]]), key_mask=torch.tensor(bias), need_weights=True)
    torch.testing.assert_close(seen[0], torch.tensor(weights), rtol=0, atol=5e-5)
    torch.testing.assert_close(result[:, 0], torch.tensor(output), rtol=0, atol=5e-5)


def test_report_35_evaluation_is_repeatable_and_without_dropout(device: str) -> None:
    mha = MultiHeadAttention(16, 4, 0.5, device=device)
    x = torch.randn(2, 9, 16, device=device)
    assert not torch.equal(mha(x), mha(x))
    once, twice = mha.eval()(x), mha(x)
    assert torch.equal(once, twice)
    without = MultiHeadAttention(16, 4, device=device)
    without.load_state_dict(mha.state_dict())
    assert torch.equal(without(x), once)


def test_report_39_hooks_on_the_output_projection() -> None:
    mha = MultiHeadAttention(16, 4)
    calls = []
    mha.out_proj.register_forward_hook(lambda module, inputs, output: calls.append(1) or output + 1)
    x = torch.randn(2, 9, 16)
    hooked = mha(x)
    assert len(calls) == 1
    mha.out_proj._forward_hooks.clear()
    torch.testing.assert_close(hooked, mha(x) + 1)


def test_report_39_pruned_output_projection() -> None:
    mha = MultiHeadAttention(16, 4)
    x = torch.randn(2, 9, 16)
    prune.custom_from_mask(mha.out_proj, "weight", torch.zeros(16, 16))
    assert torch.equal(mha(x), mha.out_proj.bias.expand(2, 9, 16))


class LowRank(nn.Module):
    """A LoRA wrapper as users write it: it has no `weight`."""

    def __init__(self, base: nn.Module, in_features: int, out_features: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(in_features, 2, bias=False), nn.Linear(2, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("cross", [False, True])
def test_report_39_low_rank_adapters_on_every_projection(cross: bool) -> None:
    mha = MultiHeadAttention(16, 4)
    merged = copy.deepcopy(mha)
    mha.qkv_proj, mha.out_proj = LowRank(mha.qkv_proj, 16, 48), LowRank(mha.out_proj, 16, 16)
    with torch.no_grad():
        for name in ("qkv_proj", "out_proj"):
            adapter = mha.get_submodule(name)
            merged.get_submodule(name).weight += adapter.up.weight @ adapter.down.weight
    x, y = torch.randn(2, 9, 16), torch.randn(2, 5, 16)
    inputs = (x, y) if cross else (x,)
    torch.testing.assert_close(mha(*inputs), merged(*inputs))
    mha(*inputs).sum().backward()
    assert mha.qkv_proj.up.weight.grad.abs().sum() > 0
    assert mha.qkv_proj.base.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"kdim": 16, "vdim": 20}], ids=["packed", "vdim"])
def test_report_40_autocast_with_a_float32_mask(device: str, dtype: torch.dtype, options: dict[str, int]) -> None:
    mha = MultiHeadAttention(16, 4, device=device, **options)
    x = torch.randn(2, 9, 16, device=device)
    inputs = (x, x, torch.randn(2, 9, 20, device=device)) if options else (x,)
    mask = torch.randn(9, 9, device=device).masked_fill(torch.rand(9, 9, device=device) > 0.8, -math.inf)
    key_mask = torch.ones(2, 9, dtype=torch.bool, device=device)
    with torch.autocast(device, dtype):
        output, weights = mha(*inputs, attn_mask=mask, key_mask=key_mask, need_weights=True)
    assert output.dtype == weights.dtype == dtype
    expected, exact_weights = mha(*inputs, attn_mask=mask, need_weights=True)
    tolerance = {"rtol": 0.0, "atol": 2e-2 if dtype == torch.bfloat16 else 2e-3}
    torch.testing.assert_close(output.float(), expected, **tolerance)
    torch.testing.assert_close(weights.float(), exact_weights, **tolerance)
    output.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in mha.parameters())


# --- masks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn_kind", ["bool", "float"])
@pytest.mark.parametrize("key_kind", ["bool", "float"])
def test_attn_mask_and_key_mask_together(attn_kind: str, key_kind: str) -> None:
    mha = MultiHeadAttention(16, 4, dtype=torch.float64)
    x = torch.randn(3, 7, 16, dtype=torch.float64)

    def mask(kind: str, *shape: int) -> Tensor:
        hidden = torch.rand(shape) > 0.6
        return ~hidden if kind == "bool" else torch.randn(shape, dtype=torch.float64).masked_fill(hidden, -math.inf)

    def as_float(mask: Tensor) -> Tensor:
        return (
            torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
            if mask.dtype == torch.bool
            else mask
        )

    attn_mask, key_mask = mask(attn_kind, 3, 7, 7), mask(key_kind, 3, 7)
    key_mask[2] = False if key_kind == "bool" else -math.inf  # an item that sees nothing
    result = mha(x, attn_mask=attn_mask, key_mask=key_mask, need_weights=True)
    expected = mha(x, attn_mask=as_float(attn_mask) + as_float(key_mask)[:, None], need_weights=True)
    torch.testing.assert_close(result, expected)
    assert not result[1][2].any()


def test_two_finite_masks_never_hide_a_key() -> None:
    mha = MultiHeadAttention(4, 1)
    x = torch.randn(1, 5, 4)
    lowest = torch.finfo(torch.float32).min
    weights = mha(x, attn_mask=torch.full((5, 5), lowest), key_mask=torch.full((1, 5), lowest), need_weights=True)[1]
    torch.testing.assert_close(weights, torch.full((1, 5, 5), 0.2))


def test_mask_forms() -> None:
    mha = MultiHeadAttention(16, 4)
    x = torch.randn(3, 7, 16)
    by_head = torch.rand(3, 4, 7, 7) > 0.3
    full = mha(x, attn_mask=by_head[:, :1].expand(3, 4, 7, 7))
    torch.testing.assert_close(mha(x, attn_mask=by_head[:, 0]), full)  # (B, Lq, Lk)
    torch.testing.assert_close(mha(x, attn_mask=by_head[:, :1]), full)  # (B, 1, Lq, Lk)
    torch.testing.assert_close(mha(x[:1], attn_mask=by_head[0, 0]), full[:1])  # (Lq, Lk)
    torch.testing.assert_close(mha(x[0], attn_mask=by_head[0, 0]), full[0])  # unbatched (Lq, Lk)
    torch.testing.assert_close(mha(x[0], attn_mask=by_head[0]), mha(x[:1], attn_mask=by_head[:1])[0])  # (Hq, Lq, Lk)
    row = torch.rand(1, 7) > 0.3
    torch.testing.assert_close(mha(x, attn_mask=row), mha(x, key_mask=row.expand(3, 7)))


def test_float_masks_have_gradients() -> None:
    mha = MultiHeadAttention(16, 4, dtype=torch.float64)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    attn_mask = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    key_mask = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, k: mha(x, attn_mask=a, key_mask=k), (attn_mask, key_mask))


def test_key_lengths_equal_a_key_mask() -> None:
    mha = MultiHeadAttention(16, 4)
    x = torch.randn(3, 7, 16)
    lengths = torch.tensor([7, 4, 0])
    mask = torch.arange(7) < lengths[:, None]
    torch.testing.assert_close(mha(x, key_lengths=lengths), mha(x, key_mask=mask))
    torch.testing.assert_close(mha(x[1], key_lengths=lengths[1]), mha(x[:2], key_lengths=lengths[:2])[1])
    torch.testing.assert_close(mha(x[1], key_lengths=lengths[1:2]), mha(x[:2], key_mask=mask[:2])[1])


def test_the_rules_of_attention_are_passed_on() -> None:
    mha = MultiHeadAttention(16, 4, dtype=torch.float64)
    x, y = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(2, 8, 16, dtype=torch.float64)
    rules: dict[str, Any] = {
        "is_causal": True, "window": (3, None), "q_offset": "end", "scale": 0.3, "softcap": 2.0,
        "alibi_slopes": torch.rand(4, dtype=torch.float64), "sinks": torch.randn(4, dtype=torch.float64),
    }  # fmt: skip
    q, k, v = (
        F.linear(source, weight, bias).unflatten(-1, (4, 4)).transpose(1, 2)
        for source, weight, bias in zip(
            (x, y, y), mha.qkv_proj.weight.chunk(3), mha.qkv_proj.bias.chunk(3), strict=True
        )
    )
    expected = mha_ext.attention(q, k, v, return_weights=True, **rules)
    output, weights = mha(x, y, need_weights=True, average_attn_weights=False, **rules)
    torch.testing.assert_close(weights, expected.weights)
    torch.testing.assert_close(output, mha.out_proj(expected.output.transpose(1, 2).flatten(2)))
    torch.testing.assert_close(mha(x, y, backend="reference", **rules), output)
    one = mha(x[0], y[0], is_causal=True, q_offset=torch.tensor(3))
    torch.testing.assert_close(one, mha(x, y, is_causal=True, q_offset=torch.tensor([3, 0]))[0])


def test_weights_are_those_before_dropout() -> None:
    mha = MultiHeadAttention(16, 4, 0.5)
    x = torch.randn(2, 9, 16)
    output, weights = mha(x, need_weights=True)
    exact_output, exact_weights = mha.eval()(x, need_weights=True)
    torch.testing.assert_close(weights, exact_weights)
    assert not torch.allclose(output, exact_output)


# --- projections -------------------------------------------------------------------------------------------------


def test_attention_reads_the_packed_projection_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    mha = MultiHeadAttention(16, 4, num_kv_heads=2)
    packed: list[Tensor] = []
    mha.qkv_proj.register_forward_hook(lambda module, inputs, output: packed.append(output))
    read: list[Any] = []
    attention = mha_ext.functional.packed_attention

    def spy(*args: Any, **kwargs: Any) -> Any:
        read.append(args)
        return attention(*args, **kwargs)

    monkeypatch.setattr(mha_ext.functional, "packed_attention", spy)
    mha(torch.randn(3, 7, 16))
    assert len(packed) == 1  # one projection for all three
    assert read[0][0] is packed[0]
    assert read[0][1:] == (4, 2)


def test_grouped_heads_equal_repeated_keys(device: str) -> None:
    grouped = MultiHeadAttention(32, 8, num_kv_heads=2, dtype=torch.float64, device=device)
    randomise(grouped)
    full = MultiHeadAttention(32, 8, dtype=torch.float64, device=device)
    state = {"out_proj.weight": grouped.out_proj.weight, "out_proj.bias": grouped.out_proj.bias}
    for kind in ("weight", "bias"):
        q, k, v = grouped.qkv_proj.get_parameter(kind).split(grouped.projection_sizes)
        repeated = [x.unflatten(0, (2, 4)).repeat_interleave(4, 0).flatten(0, 1) for x in (k, v)]
        state[f"qkv_proj.{kind}"] = torch.cat([q, *repeated])
    full.load_state_dict(state)
    x = torch.randn(2, 9, 32, dtype=torch.float64, device=device, requires_grad=True)
    result, expected = (m(x, is_causal=True, need_weights=True, average_attn_weights=False) for m in (grouped, full))
    torch.testing.assert_close(result, expected)
    grads = [torch.autograd.grad(output.square().sum(), x)[0] for output in (result[0], expected[0])]
    torch.testing.assert_close(*grads)
    y = torch.randn(2, 4, 32, dtype=torch.float64, device=device)
    torch.testing.assert_close(grouped(x, y), full(x, y))


def test_head_dim_apart_from_embed_dim() -> None:
    mha = MultiHeadAttention(10, 3, head_dim=8, num_kv_heads=1)
    assert tuple(mha.qkv_proj.weight.shape) == ((3 + 2) * 8, 10)
    assert tuple(mha.out_proj.weight.shape) == (10, 24)
    assert mha(torch.randn(2, 5, 10)).shape == (2, 5, 10)


@pytest.mark.parametrize("attach", ["hook", "pre_hook", "prune", "parametrize", "forward", "subclass", "global"])
def test_whatever_is_attached_to_the_packed_projection_takes_effect(
    attach: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mha = MultiHeadAttention(16, 4, dtype=torch.float64)
    doubled = copy.deepcopy(mha)
    with torch.no_grad():
        doubled.qkv_proj.weight *= 2
        doubled.qkv_proj.bias *= 2
    linear = mha.qkv_proj
    handle = None
    if attach == "hook":
        linear.register_forward_hook(lambda module, inputs, output: 2 * output)
    elif attach == "pre_hook":
        doubled.qkv_proj.bias.data /= 2
        linear.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    elif attach == "prune":
        mask = (torch.rand(48, 16) > 0.5).double()
        prune.custom_from_mask(linear, "weight", mask)
        doubled.qkv_proj.weight.data *= mask / 2
        doubled.qkv_proj.bias.data /= 2
    elif attach == "parametrize":
        doubled.qkv_proj.bias.data /= 2

        class Double(nn.Module):
            def forward(self, weight: Tensor) -> Tensor:
                return 2 * weight

        parametrize.register_parametrization(linear, "weight", Double())
    elif attach == "forward":
        original = linear.forward
        monkeypatch.setattr(linear, "forward", lambda x: 2 * original(x))
    elif attach == "subclass":

        class Doubling(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return 2 * super().forward(x)

        linear.__class__ = Doubling
    else:
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, inputs, output: 2 * output if module is linear else None
        )
    try:
        x, y, z = torch.randn(2, 9, 16), torch.randn(2, 5, 16), torch.randn(2, 5, 16)
        x, y, z = x.double(), y.double(), z.double()
        results = [mha(*inputs) for inputs in ((x,), (x, y), (x, y, z), (x, x, y[:, :1].expand_as(x)))]
    finally:
        if handle is not None:
            handle.remove()
    expected = [doubled(*inputs) for inputs in ((x,), (x, y), (x, y, z), (x, x, y[:, :1].expand_as(x)))]
    torch.testing.assert_close(results, expected)


def test_hook_on_the_packed_projection_is_called_once() -> None:
    mha = MultiHeadAttention(16, 4)
    shapes = []
    mha.qkv_proj.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    x = torch.randn(2, 9, 16)
    mha(x)
    mha(x, x, x)
    mha(x[0])
    assert shapes == [(2, 9, 48), (2, 9, 48), (9, 48)]


def test_value_defaults_to_key() -> None:
    mha = MultiHeadAttention(16, 4)
    x, y = torch.randn(2, 9, 16), torch.randn(2, 5, 16)
    assert torch.equal(mha(x, y), mha(x, y, y))
    torch.testing.assert_close(mha(x, x.clone(), x.clone()), mha(x))


# --- state dicts -------------------------------------------------------------------------------------------------


class PackedLayout(nn.Module):
    """One packed `qkv` and `out`."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)


class SeparateLayout(nn.Module):
    """Four linear layers."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(embed_dim, embed_dim) for _ in range(4))


class Model(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"attn": attention, "norm": nn.LayerNorm(16)})])
        self.out = nn.Linear(16, 2)  # a name that is known inside the attention, not here


LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "packed": lambda: PackedLayout(16),
    "separate": lambda: SeparateLayout(16),
    "torch": lambda: nn.MultiheadAttention(16, 4),
    "ours": lambda: MultiHeadAttention(16, 4),
}


def expected_parts(layout: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The packed weight and bias, and the output projection, that a layout means."""
    if layout == "separate":
        parts = {f"qkv_proj.{x}": torch.cat([state[f"W_{p}.{x}"] for p in "qkv"]) for x in ("weight", "bias")}
        return {**parts, "out_proj.weight": state["W_o.weight"], "out_proj.bias": state["W_o.bias"]}
    return dict(
        zip(("qkv_proj.weight", "qkv_proj.bias", "out_proj.weight", "out_proj.bias"), state.values(), strict=True)
    )


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_known_layouts_load(layout: str, nested: bool) -> None:
    source = LAYOUTS[layout]()
    randomise(source)
    mha = MultiHeadAttention(16, 4)
    whole_source, target = (Model(source), Model(mha)) if nested else (source, mha)
    state = whole_source.state_dict()
    names = list(state)
    assert str(target.load_state_dict(state)) == "<All keys matched successfully>"
    assert list(state) == names  # the caller's dict is as it was
    for name, value in expected_parts(layout, source.state_dict()).items():
        assert torch.equal(mha.get_parameter(name), value), name
    if nested:
        assert torch.equal(target.out.weight, whole_source.out.weight)


def test_separate_projections_load_each_layout() -> None:
    theirs = nn.MultiheadAttention(16, 4, kdim=12, vdim=20, batch_first=True)
    randomise(theirs)
    ours = MultiHeadAttention(16, 4, kdim=12, vdim=20)
    ours.load_state_dict(theirs.state_dict())
    x, y, z = torch.randn(2, 9, 16), torch.randn(2, 5, 12), torch.randn(2, 5, 20)
    torch.testing.assert_close(ours(x, y, z), theirs(x, y, z)[0])
    again = MultiHeadAttention(16, 4, kdim=12, vdim=20)
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again(x, y, z), ours(x, y, z))


def test_packed_module_takes_separate_grouped_projections() -> None:
    mha = MultiHeadAttention(16, 4, num_kv_heads=2, bias=False)
    state = {
        "q_proj.weight": torch.randn(16, 16), "k_proj.weight": torch.randn(8, 16),
        "v_proj.weight": torch.randn(8, 16), "W_o.weight": torch.randn(16, 16),
    }  # fmt: skip
    mha.load_state_dict(state)
    assert torch.equal(mha.qkv_proj.weight, torch.cat([state[f"{p}_proj.weight"] for p in "qkv"]))
    assert torch.equal(mha.out_proj.weight, state["W_o.weight"])


def test_loading_with_assign() -> None:
    source = SeparateLayout(16)
    mha = MultiHeadAttention(16, 4, device="meta")
    mha.load_state_dict(source.state_dict(keep_vars=True), assign=True)
    assert not any(p.is_meta for p in mha.parameters())
    assert all(p.is_leaf and p.requires_grad for p in mha.parameters())
    mha(torch.randn(2, 3, 16)).sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("in_proj_bias"), r'Missing key\(s\) in state_dict: "layers.0.attn.qkv_proj.bias"'),
        (
            lambda s: s.update(bias_k=torch.zeros(1, 1, 16)),
            r'Unexpected key\(s\) in state_dict: "layers.0.attn.bias_k"',
        ),
        (lambda s: s.update(in_proj_weight=torch.zeros(32, 16)), r"size mismatch for layers.0.attn.qkv_proj.weight"),
        (
            lambda s: s.update({"qkv_proj.weight": torch.zeros(48, 16)}),
            r'Unexpected key.*"layers.0.attn.in_proj_weight"',
        ),
    ],
    ids=["missing", "unexpected", "size", "twice"],
)
def test_strict_loading_says_what_does_not_fit(change: Callable[[dict[str, Tensor]], Any], message: str) -> None:
    state = dict(nn.MultiheadAttention(16, 4).state_dict())
    change(state)
    model = Model(MultiHeadAttention(16, 4))
    whole = {k: v for k, v in model.state_dict().items() if ".attn." not in k}
    whole.update({f"layers.0.attn.{k}": v for k, v in state.items()})
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(whole)


def test_projections_that_cannot_be_packed_or_split() -> None:
    widths = {"q_proj.weight": (16, 16), "k_proj.weight": (16, 12), "v_proj.weight": (16, 20)}
    state = {name: torch.zeros(shape) for name, shape in widths.items()}
    with pytest.raises(RuntimeError, match=r"different width .* qkv_proj.weight: \(16, 16\), \(16, 12\), \(16, 20\)"):
        MultiHeadAttention(16, 4).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"\(40, 16\) does not split into 16 \+ 16 \+ 16 rows"):
        MultiHeadAttention(16, 4, kdim=12).load_state_dict({"qkv.weight": torch.zeros(40, 16)})


def test_copies_and_pickles_load_too() -> None:
    mha = MultiHeadAttention(16, 4)
    x = torch.randn(2, 9, 16)
    for copied in (copy.deepcopy(mha), pickle.loads(pickle.dumps(mha))):
        assert torch.equal(copied(x), mha(x))
        source = SeparateLayout(16)
        copied.load_state_dict(source.state_dict())
        assert torch.equal(copied.out_proj.weight, source.W_o.weight)
        assert not torch.equal(mha.out_proj.weight, source.W_o.weight)


# --- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((10, 3), {}, ValueError, "embed_dim: expected a multiple of num_heads = 3.*got 10"),
        ((0, 1), {}, ValueError, "embed_dim: .*got 0"),
        ((16.0, 4), {}, TypeError, "embed_dim: expected an int"),
        ((16, -4), {}, ValueError, "num_heads: .*got -4"),
        ((16, 4), {"num_kv_heads": 3}, ValueError, "num_kv_heads: expected a divisor of num_heads = 4, got 3"),
        ((16, 4), {"num_kv_heads": 8}, ValueError, "num_kv_heads: .*got 8"),
        ((16, 4), {"num_kv_heads": 0}, ValueError, "num_kv_heads: .*got 0"),
        ((16, 4), {"head_dim": 0}, ValueError, "head_dim: .*got 0"),
        ((16, 4), {"kdim": 0}, ValueError, "kdim: .*got 0"),
        ((16, 4), {"vdim": "16"}, TypeError, "vdim: expected an int"),
        ((16, 4, 1.5), {}, ValueError, "dropout: .*got 1.5"),
        ((16, 4, -0.1), {}, ValueError, "dropout: .*got -0.1"),
        ((16, 4, math.nan), {}, ValueError, "dropout: .*got nan"),
        ((16, 4, "0.1"), {}, TypeError, "dropout: expected a number"),
        ((16, 4), {"bias": 1}, TypeError, "bias: expected True or False"),
        ((16, 4), {"dtype": torch.int64}, TypeError, "dtype: .*got torch.int64"),
    ],
)
def test_refused_construction(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        MultiHeadAttention(*arguments, **options)


X, Y = torch.ones(2, 5, 16), torch.ones(2, 7, 16)


@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        (([1.0],), {}, TypeError, "query: expected a tensor, got"),
        ((X.long(),), {}, TypeError, "query: expected a dtype"),
        ((X[None],), {}, ValueError, r"query: expected 2 or 3 dimensions, got shape \(1, 2, 5, 16\)"),
        ((X[..., :15],), {}, ValueError, r"query: expected 16 features .*got shape \(2, 5, 15\)"),
        ((X.double(),), {}, ValueError, "query: expected dtype torch.float32 .*got torch.float64"),
        ((X, Y.double()), {}, ValueError, "key: expected dtype torch.float32 as query, got torch.float64"),
        ((X, Y, Y.half()), {}, ValueError, "value: expected dtype torch.float32 as query, got torch.float16"),
        ((X, Y.to("meta")), {}, ValueError, "key: expected device cpu as query, got meta"),
        ((X, None, Y), {}, ValueError, "value: expected None where key is None"),
        ((X, Y[:1]), {}, ValueError, r"key: expected the batch of query \(2, 5, 16\), got \(1, 7, 16\)"),
        ((X, Y[0]), {}, ValueError, r"key: .*got \(7, 16\)"),
        ((X[0], Y), {}, ValueError, r"key: .*got \(2, 7, 16\)"),
        ((X, Y, Y[:, :6]), {}, ValueError, r"value: expected the length of key \(2, 7, 16\), got \(2, 6, 16\)"),
        ((X, Y[..., :8]), {}, ValueError, r"key: expected 16 features"),
        ((X, Y, Y[..., :8]), {}, ValueError, r"value: expected 16 features"),
        ((X,), {"attn_mask": torch.ones(5, 5, dtype=torch.int64)}, TypeError, "attn_mask: .*got torch.int64"),
        ((X,), {"attn_mask": torch.ones(5, 7)}, ValueError, r"attn_mask: .*Lq = 5, Lk = 5, got \(5, 7\)"),
        ((X,), {"attn_mask": torch.ones(5)}, ValueError, r"attn_mask: .*got \(5,\)"),
        ((X,), {"attn_mask": torch.ones(3, 5, 5)}, ValueError, r"attn_mask: .*got \(3, 5, 5\)"),
        ((X,), {"attn_mask": torch.ones(8, 5, 5)}, ValueError, r"attn_mask: .*attn_mask.view\(B, Hq, Lq, Lk\)"),
        ((X,), {"attn_mask": torch.ones(2, 3, 5, 5)}, ValueError, r"attn_mask: .*Hq = 4.*got \(2, 3, 5, 5\)"),
        ((X,), {"attn_mask": torch.ones(1, 2, 4, 5, 5)}, ValueError, r"attn_mask: .*got \(1, 2, 4, 5, 5\)"),
        ((X[0],), {"attn_mask": torch.ones(1, 4, 5, 5)}, ValueError, r"\(Hq, Lq, Lk\).*got \(1, 4, 5, 5\)"),
        ((X[0],), {"attn_mask": torch.ones(2, 5, 5)}, ValueError, r"attn_mask: .*got \(2, 5, 5\)"),
        ((X,), {"attn_mask": torch.ones(5, 5, device="meta")}, ValueError, "attn_mask: expected device cpu"),
        ((X,), {"key_mask": torch.ones(2, 5, dtype=torch.uint8)}, TypeError, "key_mask: .*got torch.uint8"),
        ((X,), {"key_mask": torch.ones(2, 4)}, ValueError, r"key_mask: .*\(B, Lk\) = \(2, 5\), got \(2, 4\)"),
        ((X, Y), {"key_mask": torch.ones(2, 5)}, ValueError, r"key_mask: .*\(2, 7\), got \(2, 5\)"),
        ((X,), {"key_mask": torch.ones(5)}, ValueError, r"key_mask: .*got \(5,\)"),
        ((X[0],), {"key_mask": torch.ones(1, 5)}, ValueError, r"key_mask: .*\(Lk,\) = \(5,\), got \(1, 5\)"),
        ((X,), {"key_mask": torch.ones(2, 5, device="meta")}, ValueError, "key_mask: expected device cpu"),
        ((X,), {"key_lengths": torch.tensor([5])}, ValueError, "key_lengths"),
        ((X[0],), {"key_lengths": [5]}, TypeError, "key_lengths"),
        ((X[0],), {"key_lengths": torch.tensor([5, 5])}, ValueError, "key_lengths"),
        ((X,), {"key_lengths": torch.tensor([5.0, 5.0])}, TypeError, "key_lengths"),
        ((X,), {"is_causal": 1}, TypeError, "is_causal"),
        ((X,), {"need_weights": 1}, TypeError, "need_weights"),
        ((X,), {"average_attn_weights": None}, TypeError, "average_attn_weights"),
        ((X,), {"window": 3}, TypeError, "window"),
        ((X,), {"alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes"),
        ((X,), {"softcap": -1.0}, ValueError, "softcap"),
        ((X,), {"backend": "none"}, ValueError, "backend"),
    ],
)  # fmt: skip
def test_refused_call(inputs: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MultiHeadAttention(16, 4)(*inputs, **options)


def test_refused_conversion() -> None:
    with pytest.raises(TypeError, match=r"module: expected a torch\.nn\.MultiheadAttention, got Linear"):
        MultiHeadAttention.from_torch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="add_bias_kv"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(16, 4, add_bias_kv=True))
    with pytest.raises(ValueError, match="add_zero_attn"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(16, 4, add_zero_attn=True))


# --- where it lives ----------------------------------------------------------------------------------------------


def test_empty_inputs() -> None:
    mha = MultiHeadAttention(16, 4)
    randomise(mha)
    x = torch.randn(2, 5, 16)
    assert mha(x[:0]).shape == (0, 5, 16)
    assert mha(x[:, :0]).shape == (2, 0, 16)
    assert mha(x[0, :0]).shape == (0, 16)
    output, weights = mha(x, x[:, :0], need_weights=True)
    assert weights.shape == (2, 5, 0)
    assert torch.equal(output, mha.out_proj.bias.expand(2, 5, 16))


def test_meta_device_gives_shapes_only() -> None:
    mha = MultiHeadAttention(768, 12, device="meta", dtype=torch.bfloat16)
    output, weights = mha(torch.empty(2, 128, 768, device="meta", dtype=torch.bfloat16), need_weights=True)
    assert (output.shape, output.dtype, output.device.type) == ((2, 128, 768), torch.bfloat16, "meta")
    assert weights.shape == (2, 128, 128)
    with torch.device("meta"):
        assert all(p.is_meta for p in MultiHeadAttention(16, 4).parameters())


@pytest.mark.parametrize("cross", [False, True])
def test_compiles_without_a_graph_break(cross: bool) -> None:
    mha = MultiHeadAttention(16, 4, num_kv_heads=2)
    compiled = torch.compile(mha, fullgraph=True, backend="aot_eager")
    x, y = torch.randn(2, 9, 16), torch.randn(2, 5, 16)
    inputs = (x, y) if cross else (x,)
    options = {"key_mask": torch.rand(2, inputs[-1].shape[1]) > 0.3, "is_causal": True, "need_weights": True}
    torch.testing.assert_close(compiled(*inputs, **options), mha(*inputs, **options))
    compiled(*inputs, **options)[0].sum().backward()
    assert mha.qkv_proj.weight.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_second_derivatives_and_forward_mode() -> None:
    mha = MultiHeadAttention(4, 2, dtype=torch.float64)
    randomise(mha)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = mha.qkv_proj.weight.detach().clone().requires_grad_()

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(mha, {"qkv_proj.weight": weight}, (x,), {"is_causal": True})

    assert torch.autograd.gradcheck(call, (x, weight), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, (x, weight))


def test_works_under_inference_mode_and_other_dtypes() -> None:
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    exact = MultiHeadAttention(16, 4, dtype=torch.float64)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)):
        with torch.inference_mode():
            output = copy.deepcopy(exact).to(dtype)(x.to(dtype))
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), exact(x), rtol=0, atol=tolerance)


def test_repr_says_what_it_is() -> None:
    text = repr(MultiHeadAttention(16, 4, 0.1, num_kv_heads=2, head_dim=8, kdim=12))
    assert "embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, kdim=12, vdim=16, dropout=0.1" in text
    assert "out_proj" in text


def test_two_masks_hide_padding_as_well_as_one(device: str) -> None:
    module = MultiHeadAttention(16, 4).to(device)
    query, memory = torch.randn(2, 3, 16, device=device), torch.randn(2, 5, 16, device=device)
    keys = torch.tensor([[True, True, True, False, False], [True] * 5], device=device)
    attn_mask = torch.ones(3, 5, dtype=torch.bool, device=device).tril(2)
    expected = module(query, memory, attn_mask=attn_mask, key_mask=keys)
    poisoned = memory.masked_fill(~keys[..., None], math.nan)
    for key_mask in (keys, torch.zeros(2, 5, device=device).masked_fill(~keys, -math.inf)):
        torch.testing.assert_close(module(query, poisoned, attn_mask=attn_mask, key_mask=key_mask), expected)
