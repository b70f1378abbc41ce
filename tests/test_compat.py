"""compat.MultiheadAttention against torch.nn.MultiheadAttention, and where it does better."""

import copy
import io
import math
import pickle
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import mha_ext
from mha_ext.compat import MultiheadAttention


@pytest.fixture
def slow_path() -> Iterator[None]:
    """torch's path that training takes, in evaluation too."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def randomise(module: nn.Module) -> None:
    """Biases start as zeros, which hides mistakes."""
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64).mul(0.4).to(parameter)


def pair(
    *args: Any, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    theirs = nn.MultiheadAttention(*args, dtype=dtype, **options)
    randomise(theirs)
    ours = MultiheadAttention(*args, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


# --- against torch -----------------------------------------------------------------------------------------------


class Case(NamedTuple):
    options: dict[str, Any]
    layout: str  # batch, sequence (first) or unbatched
    attends: str  # self, memory (key is value), three
    masks: str
    need_weights: bool
    average: bool

    @property
    def name(self) -> str:
        options = "+".join(self.options) or "plain"
        kind = f"{'mean' if self.average else 'heads'}" if self.need_weights else "no_weights"
        return f"{options}-{self.layout}-{self.attends}-{self.masks.replace(' ', '+') or 'no_mask'}-{kind}"


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    {"kdim": 6, "vdim": 10},
    {"vdim": 10, "bias": False, "add_bias_kv": True},
]
MASKS = ["", "pad", "pad_float", "bool", "float", "by_head", "by_head_float", "pad bool", "pad_float float", "pad by_head", "causal", "causal pad"]  # fmt: skip # noqa: E501


def sample() -> list[Case]:
    """Every option with every mask; layouts, inputs and weights take turns, so that all pairs occur."""
    layouts, attends, weights = ("batch", "sequence", "unbatched"), ("self", "memory", "three"), (True, False)
    cases = []
    for i, (options, masks) in enumerate(product(OPTIONS, MASKS)):
        different = "kdim" in options or "vdim" in options
        cases.append(
            Case(
                options,
                layouts[(i + i // len(MASKS)) % 3],
                "three" if different else attends[(i // 3 + i) % 3],
                masks,
                weights[(i // 2 + i // len(MASKS)) % 2],
                bool(i % 5 % 2),
            )
        )
    return cases


CASES = sample()


def inputs_of(case: Case, module: nn.MultiheadAttention, n: int = 3) -> list[Tensor]:
    length_q, length_k = 5, 5 if case.attends == "self" or "causal" in case.masks else 7

    def make(length: int, width: int) -> Tensor:
        shape = {"batch": (n, length, width), "sequence": (length, n, width), "unbatched": (length, width)}
        return torch.randn(shape[case.layout], dtype=torch.float64, requires_grad=True)

    query = make(length_q, module.embed_dim)
    if case.attends == "self":
        return [query]
    key = make(length_k, module.kdim)
    return [query, key] if case.attends == "memory" else [query, key, make(length_k, module.vdim)]


def masks_of(case: Case, length_q: int, length_k: int, n: int, heads: int) -> dict[str, Any]:
    """Masks as torch takes them; the first key is always seen."""
    masks: dict[str, Any] = {}
    batch = () if case.layout == "unbatched" else (n,)
    by_head = (math.prod(batch) * heads, length_q, length_k)
    for kind in case.masks.split():
        shape = (*batch, length_k) if kind.startswith("pad") else (length_q, length_k)
        shape = by_head if kind.startswith("by_head") else shape
        name = "key_padding_mask" if kind.startswith("pad") else "attn_mask"
        if kind == "causal":
            masks["is_causal"] = True
            masks["attn_mask"] = torch.ones(length_q, length_k, dtype=torch.bool).triu(1)
            continue
        hidden = torch.rand(shape) > 0.6
        hidden[..., 0] = False
        if kind in ("pad_float", "float", "by_head_float"):
            masks[name] = torch.randn(shape, dtype=torch.float64).masked_fill(hidden, -math.inf)
        else:
            masks[name] = hidden
    return masks


def three(inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return inputs[0], inputs[min(1, len(inputs) - 1)], inputs[-1]


@pytest.mark.usefixtures("slow_path")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_output_weights_and_gradients_equal_torch(case: Case) -> None:
    ours, theirs = pair(8, 2, batch_first=case.layout == "batch", **case.options)
    inputs = inputs_of(case, theirs)
    length_q, length_k = (x.shape[0 if case.layout == "sequence" else -2] for x in (inputs[0], three(inputs)[1]))
    masks = masks_of(case, length_q, length_k, 3, 2)
    results = []
    for module in (ours, theirs):
        if module is theirs:  # which without weights shows the keys that add_bias_kv adds to late queries only
            masks.pop("is_causal", None)
        output, weights = module(
            *three(inputs), need_weights=case.need_weights, average_attn_weights=case.average, **masks
        )
        loss = (output * torch.arange(output.numel()).view(output.shape).cos()).sum()
        if weights is not None:
            loss = loss + (weights * torch.arange(weights.numel()).view(weights.shape).sin()).sum()
        results.append([output, weights, *torch.autograd.grad(loss, [*inputs, *module.parameters()])])
    for mine, expected in zip(*results, strict=True):
        if expected is None:
            assert mine is None
        else:  # the gradient of the key's bias is 0 but for rounding
            torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_single_and_half_precision_are_as_exact_as_torch(dtype: torch.dtype, need_weights: bool) -> None:
    ours, theirs = pair(48, 4, dtype=dtype, batch_first=True)
    exact = copy.deepcopy(theirs).double()
    x = torch.randn(2, 19, 48).to(dtype)
    pad = torch.arange(19) >= torch.tensor([[19], [7]])
    truth, mine, torchs = (
        module(y, y, y, key_padding_mask=pad, need_weights=need_weights)[0]
        for module, y in ((exact, x.double()), (ours, x), (theirs, x))
    )
    errors = [(y.double() - truth).abs().max().item() for y in (mine, torchs)]
    floor = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]  # of the largest value
    assert errors[0] <= 1.5 * errors[1] + floor * truth.abs().max().item()


@pytest.mark.parametrize("options", [{}, {"kdim": 12, "vdim": 20}, {"bias": False, "add_bias_kv": True}], ids=str)
def test_the_same_seed_draws_the_same_parameters(options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    theirs = nn.MultiheadAttention(16, 4, **options)
    after = torch.rand(1)
    torch.manual_seed(5)
    ours = MultiheadAttention(16, 4, **options)
    assert torch.equal(torch.rand(1), after)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())
    assert repr(ours) == repr(theirs)
    for module in (ours, theirs):
        torch.manual_seed(6)
        module._reset_parameters()
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


# --- torch's faults ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masks", ["", "pad", "bool", "pad bool", "causal"])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"num_heads": 3}], ids=str)
def test_no_mode_changes_the_output(options: dict[str, Any], masks: str) -> None:
    """Reports 4, 10, 14: training or not, gradients or not, weights or not."""
    num_heads = options.get("num_heads", 2)
    mha = MultiheadAttention(12, num_heads, batch_first=True, bias=options.get("bias", True))
    randomise(mha)
    x = torch.randn(3, 5, 12)
    case = Case({}, "batch", "self", masks, True, True)
    arguments = masks_of(case, 5, 5, 3, num_heads)
    outputs = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for training, need_weights in product((True, False), repeat=2):
                outputs.append(mha.train(training)(x, x, x, need_weights=need_weights, **arguments)[0])
    assert all(torch.equal(output, outputs[0]) for output in outputs[:4])
    assert all(torch.equal(output, outputs[4]) for output in outputs[4:])
    torch.testing.assert_close(outputs[4], outputs[0], rtol=1e-6, atol=1e-6)  # by another instance of one kernel


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["pad", "pad_float", "attn", "both"])
def test_queries_that_see_no_key_get_the_bias(kind: str, batch_first: bool) -> None:
    """Reports 1, 3 and 4: in all modes, and with finite gradients."""
    mha = MultiheadAttention(20, 5, 0.1, batch_first=batch_first)
    randomise(mha)
    lengths = torch.tensor([5, 3, 1, 0])
    pad = torch.arange(5) >= lengths[:, None]
    masks: dict[str, Any] = {"key_padding_mask": pad}
    if kind == "pad_float":
        masks = {"key_padding_mask": torch.zeros(4, 5).masked_fill(pad, -math.inf)}
    elif kind == "attn":
        masks = {"attn_mask": pad[:, None].repeat_interleave(5, 0).expand(20, 5, 5)}
    elif kind == "both":
        masks["attn_mask"] = torch.randn(5, 5)
    for training, grad, need_weights in product((True, False), repeat=3):
        x = torch.randn((4, 5, 20) if batch_first else (5, 4, 20), requires_grad=True)
        with torch.set_grad_enabled(grad):
            output, weights = mha.train(training)(x, x, x, need_weights=need_weights, **masks)
        by_item = output if batch_first else output.transpose(0, 1)
        torch.testing.assert_close(by_item[3], mha.out_proj.bias.expand(5, 20), rtol=0, atol=0)
        assert output.isfinite().all()
        if need_weights:
            assert not weights[3].any()
            assert not weights[1, :, 3:].any()
            if not training:
                torch.testing.assert_close(weights[:3].sum(-1), torch.ones(3, 5))
        if grad:
            total = output.sum() if weights is None else output.sum() + weights.square().sum()
            assert all(g.isfinite().all() for g in torch.autograd.grad(total, [x, *mha.parameters()]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e10])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("with_attn_mask", [False, True])
@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True}], ids=str)
def test_padded_keys_may_hold_anything(options: dict[str, Any], with_attn_mask: bool, where: str, bad: float) -> None:
    """Report 6."""
    mha = MultiheadAttention(4, 1, batch_first=True, **options)
    randomise(mha)
    query, key, value = torch.randn(3, 2, 3, 4).unbind()
    pad = torch.tensor([[False, False, True]] * 2)
    masks = {"attn_mask": torch.randn(3, 3)} if with_attn_mask else {}
    (key if where == "key" else value)[:, 2] = bad
    query.requires_grad_()
    for training, need_weights in product((True, False), repeat=2):
        mha.dropout = 0.0
        output, weights = mha.train(training)(
            query, key, value, key_padding_mask=pad, need_weights=need_weights, **masks
        )
        shorter = {name: mask[:, :2] for name, mask in masks.items()}
        expected = mha(query, key[:, :2], value[:, :2], **shorter)[0]
        torch.testing.assert_close(output, expected)
        total = output.sum() if weights is None else output.sum() + weights.square().sum()
        assert torch.autograd.grad(total, query)[0].isfinite().all()
    mha.train().dropout = 0.5
    assert mha(query, key, value, key_padding_mask=pad)[0].isfinite().all()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_causal_means_one_thing(options: dict[str, Any], need_weights: bool) -> None:
    """Reports 11 and 12: with a mask or without, with padding or without, with weights or without."""
    mha = MultiheadAttention(8, 2, batch_first=True, **options)
    randomise(mha)
    x = torch.randn(4, 6, 8)
    triangle = torch.ones(6, 6, dtype=torch.bool).triu(1)
    hidden = torch.rand(6, 6) > 0.6
    pad = torch.rand(4, 6) > 0.7
    for masks in ({}, {"key_padding_mask": pad}):
        explicit = {**masks, "need_weights": need_weights}
        result = mha(x, x, x, is_causal=True, **explicit)
        torch.testing.assert_close(result, mha(x, x, x, attn_mask=triangle, **explicit))
        torch.testing.assert_close(mha(x, x, x, attn_mask=triangle, is_causal=True, **explicit), result)
        both = mha(x, x, x, attn_mask=hidden, is_causal=True, **explicit)
        torch.testing.assert_close(both, mha(x, x, x, attn_mask=hidden | triangle, **explicit))
        if need_weights:
            assert not result[1][:, :, :6].triu(1).any()
            assert bool(options) == bool(result[1][:, :, 6:].any())


def test_report_13_a_mask_by_head_in_evaluation_is_the_mask_of_training() -> None:
    ours, theirs = pair(64, 8, batch_first=True)
    x = torch.randn(2, 40, 64, dtype=torch.float64)
    hidden = torch.rand(2 * 8, 40, 40) > 0.7
    hidden[..., 0] = False
    pad = torch.arange(40) >= torch.tensor([[40], [20]])
    for masks in ({}, {"key_padding_mask": pad}):
        expected = theirs.train()(x, x, x, attn_mask=hidden, **masks)[0]
        with torch.no_grad():
            torch.testing.assert_close(ours.eval()(x, x, x, attn_mask=hidden, **masks)[0], expected)


@pytest.mark.parametrize(
    ("bias", "weights", "output"),
    [([0.0, 1.0], [0.0180, 0.9820], [7.9281, 7.9964]), ([1.0, 0.0], [0.1192, 0.8808], [7.5232, 7.9732])],
)
def test_report_16_a_float_padding_mask_moves_the_score(
    bias: list[float], weights: list[float], output: list[float]
) -> None:
    mha = MultiheadAttention(1, 1, bias=False)
    mha.load_state_dict(
        {"in_proj_weight": torch.tensor([[1.0], [3.0], [2.0]]), "out_proj.weight": torch.tensor([[2.0]])}
    )
    x = torch.tensor([[1.0], [2.0]])
    result, seen = mha(x, x, x, key_padding_mask=torch.tensor(bias))
    torch.testing.assert_close(seen[0], torch.tensor(weights), rtol=0, atol=5e-5)
    torch.testing.assert_close(result[:, 0], torch.tensor(output), rtol=0, atol=5e-5)


def test_report_39_the_output_projection_is_called() -> None:
    mha = MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 9, 16)
    plain = mha(x, x, x)[0]
    shapes = []
    handle = mha.out_proj.register_forward_hook(
        lambda module, inputs, output: shapes.append(output.shape) or output + 1
    )
    for need_weights in (True, False):
        torch.testing.assert_close(mha(x, x, x, need_weights=need_weights)[0], plain + 1)
    assert shapes == [(2, 9, 16)] * 2
    handle.remove()

    replaced = copy.deepcopy(mha)
    replaced.out_proj = nn.Sequential(replaced.out_proj, nn.Tanh())  # as a wrapper, it has no weight
    torch.testing.assert_close(replaced(x, x, x)[0], plain.tanh())
    prune.custom_from_mask(mha.out_proj, "weight", torch.zeros(16, 16))
    assert torch.equal(mha(x, x, x)[0], mha.out_proj.bias.expand(2, 9, 16))


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("how", ["prune", "parametrize"])
def test_what_is_attached_to_the_packed_weight_takes_effect(how: str) -> None:
    mha = MultiheadAttention(16, 4, batch_first=True, bias=False)
    changed = copy.deepcopy(mha)
    if how == "prune":
        mask = (torch.rand(48, 16) > 0.5).float()
        prune.custom_from_mask(mha, "in_proj_weight", mask)
        changed.in_proj_weight.data *= mask
    else:
        parametrize.register_parametrization(mha, "in_proj_weight", Double())
        changed.in_proj_weight.data *= 2
    x, y, z = torch.randn(2, 9, 16), torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    for inputs in ((x, x, x), (x, y, y), (x, y, z)):
        torch.testing.assert_close(mha(*inputs), changed(*inputs))


# --- dropout, autocast -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masks", ["", "pad", "pad bool", "causal"])
def test_weights_are_those_after_dropout(masks: str) -> None:
    mha = MultiheadAttention(8, 2, 0.5, batch_first=True, dtype=torch.float64)
    randomise(mha)
    x = torch.randn(3, 20, 8, dtype=torch.float64)
    arguments = masks_of(Case({}, "batch", "self", masks, True, True), 20, 20, 3, 2)
    output, weights = mha(x, x, x, average_attn_weights=False, **arguments)
    value = nn.functional.linear(x, mha.in_proj_weight[16:], mha.in_proj_bias[16:]).unflatten(-1, (2, 4))
    heads = torch.einsum("nhij,njhd->nihd", weights, value)
    torch.testing.assert_close(output, mha.out_proj(heads.flatten(2)))
    undropped = mha.eval()(x, x, x, average_attn_weights=False, **arguments)[1]
    kept = weights != 0
    torch.testing.assert_close(weights[kept], 2 * undropped[kept])
    share = kept.sum() / (undropped != 0).sum()
    assert 0.4 < share < 0.6


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_keeps_the_mean_and_stops_in_evaluation(need_weights: bool) -> None:
    """Report 35 as well: evaluation repeats itself bit for bit."""
    mha = MultiheadAttention(16, 4, 0.3, batch_first=True)
    randomise(mha)
    x = torch.randn(2, 9, 16)
    many = torch.stack([mha(x, x, x, need_weights=need_weights)[0] for _ in range(400)])
    assert not torch.equal(many[0], many[1])
    exact = mha.eval()(x, x, x, need_weights=need_weights)[0]
    error = (many.mean(0) - exact).abs()
    assert (error <= 5 * many.std(0) / math.sqrt(400)).all()
    assert torch.equal(mha(x, x, x, need_weights=need_weights)[0], exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"vdim": 20}, {"add_bias_kv": True, "dropout": 1e-9}], ids=str)
def test_report_40_autocast_with_masks_in_single_precision(
    options: dict[str, Any], need_weights: bool, dtype: torch.dtype
) -> None:
    mha = MultiheadAttention(16, 4, batch_first=True, **options)
    randomise(mha)
    x = torch.randn(2, 9, 16)
    value = torch.randn(2, 9, 20) if "vdim" in options else x
    masks = {"attn_mask": torch.randn(9, 9), "key_padding_mask": torch.tensor([[False] * 9, [False] * 4 + [True] * 5])}
    with torch.autocast("cpu", dtype):
        output, weights = mha(x, x, value, need_weights=need_weights, **masks)
    assert output.dtype == dtype
    expected, exact_weights = mha(x, x, value, need_weights=need_weights, **masks)
    tolerance = {"rtol": 0.0, "atol": (3e-2 if dtype == torch.bfloat16 else 4e-3) * expected.abs().max().item()}
    torch.testing.assert_close(output.float(), expected, **tolerance)
    if need_weights:
        torch.testing.assert_close(weights.float(), exact_weights, **tolerance)
    output.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in mha.parameters())


# --- copies, files, programs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"kdim": 12, "vdim": 20}, {"bias": False, "add_bias_kv": True}], ids=str)
def test_state_dicts_go_both_ways(options: dict[str, Any]) -> None:
    ours, theirs = pair(16, 4, **options)
    randomise(ours)
    theirs.load_state_dict(ours.state_dict())
    inputs = [torch.randn(5, 2, width, dtype=torch.float64) for width in (16, theirs.kdim, theirs.vdim)]
    torch.testing.assert_close(ours(*inputs), theirs(*inputs))


def test_copies_and_pickles_are_modules_of_their_own() -> None:
    mha = MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(2, 9, 16)
    with torch.no_grad():
        expected = mha(x, x, x)
    shallow, deep, pickled = copy.copy(mha), copy.deepcopy(mha), pickle.loads(pickle.dumps(mha))
    buffer = io.BytesIO()
    torch.save(mha, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert shallow.in_proj_weight is mha.in_proj_weight
    with torch.no_grad():
        for other in (shallow, deep, pickled, loaded):
            assert type(other) is MultiheadAttention
            assert torch.equal(other(x, x, x)[0], expected[0])
        mha.in_proj_weight.zero_()
        assert torch.equal(deep(x, x, x)[0], expected[0])


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")
@pytest.mark.parametrize("options", [{}, {"kdim": 12, "vdim": 20}, {"bias": False, "add_bias_kv": True}], ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_scripted_module_is_torchs_own_program(options: dict[str, Any], batch_first: bool) -> None:
    ours, theirs = pair(16, 4, batch_first=batch_first, **options)
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(ours), buffer)
    buffer.seek(0)
    program = torch.jit.load(buffer)
    inputs = [torch.randn(5, 2, width, dtype=torch.float64) for width in (16, theirs.kdim, theirs.vdim)]
    pad = torch.zeros(5 if batch_first else 2, 2 if batch_first else 5, dtype=torch.bool)
    pad[:, -1] = True
    for arguments in ({}, {"key_padding_mask": pad}, {"need_weights": False}):
        torch.testing.assert_close(program(*inputs, **arguments), ours(*inputs, **arguments))
    assert "mha_ext" not in program.code


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated", "ignore::torch.jit.TracerWarning")
def test_a_traced_module_computes_from_its_inputs() -> None:
    mha = MultiheadAttention(16, 4, batch_first=True).eval().requires_grad_(False)  # constants of a lambda
    x, y = torch.randn(2, 2, 9, 16).unbind()
    traced = torch.jit.trace(lambda x: mha(x, x, x, need_weights=False)[0], (x,))
    torch.testing.assert_close(traced(y), mha(y, y, y)[0])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_compile_sees_one_graph(need_weights: bool, batch_first: bool) -> None:
    mha = MultiheadAttention(16, 4, batch_first=batch_first)
    randomise(mha)
    torch._dynamo.reset()
    compiled = torch.compile(mha, fullgraph=True, backend="aot_eager")
    pad = torch.arange(9 if batch_first else 2) >= torch.tensor([[9], [5]] if batch_first else [[1]] * 9)
    for masks in ({}, {"key_padding_mask": pad, "is_causal": True}):
        x = torch.randn(2, 9, 16, requires_grad=True)
        results, gradients = [], []
        for module in (mha, compiled):
            results.append(module(x, x, x, need_weights=need_weights, **masks))
            gradients.append(torch.autograd.grad(results[-1][0].square().sum(), [x, *mha.parameters()]))
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_an_exported_program_gives_the_same() -> None:
    mha = MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(2, 9, 16)
    pad = torch.arange(9) >= torch.tensor([[9], [5]])
    arguments = {"key_padding_mask": pad, "need_weights": False}
    program = torch.export.export(mha, (x, x, x), arguments)
    torch.testing.assert_close(program.module()(x, x, x, **arguments)[0], mha(x, x, x, **arguments)[0])


# --- derivatives -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("need_weights", [True, False])
def test_gradients_of_each_example_by_vmap(need_weights: bool) -> None:
    mha = MultiheadAttention(8, 2, dtype=torch.float64)
    randomise(mha)
    parameters = dict(mha.named_parameters())
    x = torch.randn(3, 4, 8, dtype=torch.float64)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        output, _ = torch.func.functional_call(mha, parameters, (x, x, x), {"need_weights": need_weights})
        return output.square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(3):
        expected = torch.autograd.grad(loss(parameters, x[i]), list(parameters.values()))
        torch.testing.assert_close([grad[i] for grad in each.values()], list(expected))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_first_and_second_derivatives_with_an_item_that_sees_nothing(
    options: dict[str, Any], need_weights: bool
) -> None:
    mha = MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64, **options)
    randomise(mha)
    pad = torch.tensor([[False, True, False], [True, True, True]])

    def call(x: Tensor, attn_mask: Tensor) -> Any:
        output, weights = mha(x, x, x, key_padding_mask=pad, attn_mask=attn_mask, need_weights=need_weights)
        return (output, weights) if need_weights else output

    inputs = (
        torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 3, dtype=torch.float64, requires_grad=True),
    )
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


# --- nested tensors ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("attends", ["self", "memory", "three"])
def test_nested_tensors_are_their_sequences(attends: str, is_causal: bool, layout: torch.layout) -> None:
    mha = MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    randomise(mha)
    leaves = [
        [torch.randn(length, 8, dtype=torch.float64, requires_grad=True) for length in lengths]
        for lengths in ((3, 5, 1), (4, 2, 6), (4, 2, 6))
    ]
    sequences = {"self": leaves[:1] * 3, "memory": [leaves[0], leaves[1], leaves[1]], "three": leaves}[attends]
    made: dict[int, Tensor] = {}
    for xs in sequences:
        made.setdefault(id(xs), torch.nested.as_nested_tensor(xs, layout=layout))
    query, key, value = (made[id(xs)] for xs in sequences)
    if layout == torch.jagged and attends == "three":
        value = torch.nested.nested_tensor_from_jagged(value.values(), key.offsets())
    separate = [mha(*xs, is_causal=is_causal, average_attn_weights=False) for xs in zip(*sequences, strict=True)]
    unique = [x for xs in {id(xs): xs for xs in sequences}.values() for x in xs]
    expected_grads = torch.autograd.grad(sum(output.square().sum() for output, _ in separate), unique)
    for training, need_weights in product((True, False), repeat=2):
        output, weights = mha.train(training)(
            query, key, value, is_causal=is_causal, need_weights=need_weights, average_attn_weights=False
        )
        assert output.layout == layout
        assert (query + output).is_nested
        outputs = output.unbind()
        torch.testing.assert_close(list(outputs), [o for o, _ in separate])
        grads = torch.autograd.grad(sum(o.square().sum() for o in outputs), unique, retain_graph=True)
        torch.testing.assert_close(grads, expected_grads)
        if need_weights:
            padded = torch.zeros_like(weights)
            for i, (_, w) in enumerate(separate):
                padded[i, :, : w.shape[1], : w.shape[2]] = w
            torch.testing.assert_close(weights, padded)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("average", [True, False])
def test_what_torch_returns_for_nested_tensors(average: bool) -> None:
    """Its only path that takes them: strided, in evaluation, and there without a sequence of no length."""
    ours, theirs = pair(8, 2, dtype=torch.float32, batch_first=True)
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
    with torch.no_grad():
        output, weights = ours.eval()(x, x, x, average_attn_weights=average)
        expected, expected_weights = theirs.eval()(x, x, x, average_attn_weights=average)
    torch.testing.assert_close(list(output.unbind()), list(expected.unbind()))
    torch.testing.assert_close(weights, expected_weights)


# --- refusals ----------------------------------------------------------------------------------------------------

X = torch.zeros(2, 5, 8)  # batch first
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": 3}, TypeError, "query: expected a tensor"),
    ({"query": X[None]}, ValueError, "query: expected 2 or 3 dimensions"),
    ({"query": X[..., :4]}, ValueError, "query: expected 8 features"),
    ({"query": X.double()}, ValueError, "key: expected dtype torch.float64 as query"),
    ({"query": X.double(), "key": X.double(), "value": X.double()}, ValueError, "expected dtype torch.float32 as the"),
    ({"query": X.long()}, TypeError, "query: expected a dtype among"),
    ({"key": X[0]}, ValueError, "key: expected 3 dimensions"),
    ({"key": X[:1]}, ValueError, "key: expected the batch of query"),
    ({"value": X[:, :4]}, ValueError, "value: expected the length of key"),
    ({"key": X.to("meta")}, ValueError, "key: expected device cpu as query"),
    ({"key_padding_mask": X[..., 0].long()}, TypeError, "key_padding_mask: expected a dtype among bool"),
    ({"key_padding_mask": X[0, :, 0]}, ValueError, r"key_padding_mask: expected shape \(N, S\) = \(2, 5\)"),
    ({"attn_mask": torch.zeros(5, 4)}, ValueError, r"attn_mask: expected shape \(L, S\) or \(N num_heads, L, S\)"),
    ({"attn_mask": torch.zeros(2, 5, 5)}, ValueError, r"attn_mask.repeat_interleave\(num_heads, 0\)"),
    ({"attn_mask": torch.zeros(2, 4, 5, 5)}, ValueError, r"attn_mask.flatten\(0, 1\)"),
    ({"is_causal": 1}, TypeError, "is_causal: expected True or False"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    mha = MultiheadAttention(8, 4, batch_first=True)
    with pytest.raises(error, match=message):
        mha(**{"query": X, "key": X, "value": X, **arguments})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(
    ("options", "arguments", "error", "message"),
    [
        ({}, {"attn_mask": torch.zeros(5, 5)}, ValueError, "attn_mask: expected None with nested tensors"),
        ({}, {"key_padding_mask": torch.zeros(2, 5)}, ValueError, "key_padding_mask: expected None with nested"),
        ({"batch_first": False}, {}, ValueError, "query: expected a dense tensor where batch_first is False"),
        ({"add_zero_attn": True}, {}, ValueError, "query: expected a dense tensor with add_bias_kv or add_zero_attn"),
        ({}, {"key": X}, TypeError, "key: expected a nested tensor of layout torch.jagged"),
    ],
)
def test_what_nested_tensors_do_not_go_with_is_refused(
    options: dict[str, Any], arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    mha = MultiheadAttention(8, 4, **{"batch_first": True, **options})
    x = torch.nested.nested_tensor([X[0], X[1, :3]], layout=torch.jagged)
    with pytest.raises(error, match=message):
        mha(**{"query": x, "key": x, "value": x, **arguments})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 1), ValueError, "embed_dim: expected an int in"),
        ((8, 3), ValueError, "embed_dim: expected a multiple of num_heads = 3"),
        ((8, 2, 1.5), ValueError, "dropout: expected a finite number"),
        ((8.0, 2), TypeError, "embed_dim: expected an int"),
    ],
)
def test_bad_options_are_refused_by_name(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MultiheadAttention(*arguments)
    with pytest.raises(TypeError, match="dtype: expected float16"):
        MultiheadAttention(8, 2, dtype=torch.int32)
    assert mha_ext.compat.MultiheadAttention is MultiheadAttention
