"""mha_ext.convert: what it swaps, what it leaves and why, and that models give what they gave before."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import mha_ext
from mha_ext.compat import MultiheadAttention

DTYPE = torch.float64
PAD = torch.arange(7) >= torch.tensor([[7], [4]])


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, dtype=DTYPE, **{"batch_first": True, **options})
    return nn.TransformerEncoder(layer, 2)


def decoder(**options: Any) -> nn.Module:
    layer = nn.TransformerDecoderLayer(16, 4, 32, 0.0, dtype=DTYPE, **{"batch_first": True, **options})
    return nn.TransformerDecoder(layer, 2)


def transformer(**options: Any) -> nn.Module:
    return nn.Transformer(16, 4, 1, 1, 32, 0.0, dtype=DTYPE, **{"batch_first": True, **options})


def run(model: nn.Module, x: Tensor, pad: Tensor = PAD) -> Tensor:
    """With padding and a causal mask where the model has both."""
    causal = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.bool)
    if isinstance(model, nn.TransformerEncoder):
        return model(x, mask=causal, src_key_padding_mask=pad)
    masks = {"tgt_mask": causal, "tgt_key_padding_mask": pad, "memory_key_padding_mask": pad}
    if isinstance(model, nn.TransformerDecoder):
        return model(x, x.flip(-1), **masks)
    return model(x, x.flip(-1), src_key_padding_mask=pad, **masks)


MODELS: list[Callable[..., nn.Module]] = [encoder, decoder, transformer]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", [{}, {"batch_first": False}, {"norm_first": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("make", MODELS)
def test_outputs_and_gradients_are_those_before(make: Any, options: dict[str, Any], training: bool) -> None:
    model = make(**options).train(training)
    converted = copy.deepcopy(model)
    assert len(mha_ext.convert(converted).swapped) == {encoder: 2, decoder: 4, transformer: 3}[make]
    x = torch.randn(2, 7, 16, dtype=DTYPE)
    x = x if options.get("batch_first", True) else x.transpose(0, 1).contiguous()
    outputs = [run(m, x) for m in (model, converted)]
    torch.testing.assert_close(*outputs)
    grads = [
        torch.autograd.grad(output.square().sum(), list(m.parameters()))
        for output, m in zip(outputs, (model, converted), strict=True)
    ]
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("make", MODELS)
def test_no_mode_of_a_converted_model_gives_nan_or_another_output(make: Any) -> None:
    """An item of padding alone: torch gives NaN, or zeros where its encoder makes nested tensors of the others."""
    model = make()
    mha_ext.convert(model)
    x = torch.randn(2, 7, 16, dtype=DTYPE)
    pad = torch.arange(7) >= torch.tensor([[4], [0]])
    outputs = []
    for training, grad in product((True, False), repeat=2):
        with torch.set_grad_enabled(grad):
            model.train(training)
            outputs.append(run(model, x, pad))
            if make is encoder:
                outputs[-1] = outputs[-1] + model(x, src_key_padding_mask=pad)
    assert outputs[0].isfinite().all()
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])


def test_layers_call_the_module_in_evaluation() -> None:
    """torch's layers have a fused function of their own there, which would read the parameters past it."""
    model = encoder().eval()
    mha_ext.convert(model)
    calls = []
    forward = MultiheadAttention._attend
    x = torch.randn(2, 7, 16, dtype=DTYPE)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(MultiheadAttention, "_attend", lambda *args: calls.append(args) or forward(*args))
        model(x)
        model(x, src_key_padding_mask=PAD)
    assert len(calls) == 4


def test_the_module_stays_the_object_that_it_was() -> None:
    model = encoder().eval()
    module = model.layers[1].self_attn
    module.in_proj_weight.requires_grad_(False)
    calls: list[str] = []
    module.register_forward_hook(lambda *args: calls.append("module"))
    module.out_proj.register_forward_pre_hook(lambda *args: calls.append("projection"))
    parameters, state = dict(model.named_parameters()), model.state_dict()
    mha_ext.convert(model)
    assert model.layers[1].self_attn is module
    assert type(module) is MultiheadAttention
    assert not module.training
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == list(state)
    assert not module.in_proj_weight.requires_grad
    model(torch.randn(2, 7, 16, dtype=DTYPE))
    assert calls == ["projection", "module"]


def test_an_optimizer_made_before_goes_on() -> None:
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mha_ext.convert(model)
    before = model.layers[0].self_attn.in_proj_weight.detach().clone()
    model(torch.randn(2, 7, 16, dtype=DTYPE)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.layers[0].self_attn.in_proj_weight, before)


@pytest.mark.parametrize(
    "options",
    [{}, {"kdim": 6, "vdim": 10}, {"add_bias_kv": True, "add_zero_attn": True}, {"bias": False, "device": "meta"}],
    ids=str,
)
def test_a_module_alone_of_every_kind(options: dict[str, Any]) -> None:
    module = nn.MultiheadAttention(16, 4, dtype=torch.bfloat16, **options)
    expected = copy.deepcopy(module)
    report = mha_ext.convert(module)
    assert report.swapped == [""]
    assert str(report) == "swapped 1, left 0\n  swapped (the model itself)"
    widths = (16, options.get("kdim", 16), options.get("vdim", 16))
    inputs = [torch.randn(5, 2, width).to(options.get("device", "cpu"), torch.bfloat16) for width in widths]
    output, weights = module(*inputs)
    assert output.dtype == torch.bfloat16
    assert output.device.type == options.get("device", "cpu")
    if "device" not in options:
        exact, exact_weights = expected.double()(*[x.double() for x in inputs])
        torch.testing.assert_close(output.double(), exact, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(weights.double(), exact_weights, rtol=2e-2, atol=2e-2)


def test_a_shared_module_is_swapped_once() -> None:
    shared = nn.MultiheadAttention(16, 4)
    report = mha_ext.convert(nn.ModuleList([shared, nn.Sequential(shared)]))
    assert report == (["0"], {})
    assert type(shared) is MultiheadAttention


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_a_parametrised_module_is_swapped() -> None:
    module = nn.MultiheadAttention(16, 4, dtype=DTYPE)
    parametrize.register_parametrization(module, "in_proj_weight", Double())
    parametrize.register_parametrization(module.out_proj, "weight", Double())
    other = copy.deepcopy(module)  # of the same class, which torch made for the first
    expected = copy.deepcopy(module)
    x = torch.randn(5, 2, 16, dtype=DTYPE)
    assert mha_ext.convert(module).swapped == [""]
    torch.testing.assert_close(module(x, x, x), expected(x, x, x))
    assert isinstance(module, MultiheadAttention)
    assert not isinstance(other, MultiheadAttention)
    torch.testing.assert_close(copy.deepcopy(module)(x, x, x), expected(x, x, x))
    parametrize.remove_parametrizations(module, "in_proj_weight")
    assert type(module) is MultiheadAttention
    torch.testing.assert_close(module(x, x, x), expected(x, x, x))


def test_a_pruned_module_is_swapped() -> None:
    module = nn.MultiheadAttention(16, 4, dtype=DTYPE)
    prune.random_unstructured(module, "in_proj_weight", 0.5)
    prune.random_unstructured(module.out_proj, "weight", 0.5)
    x = torch.randn(5, 2, 16, dtype=DTYPE)
    expected = module(x, x, x)
    assert mha_ext.convert(module).swapped == [""]
    torch.testing.assert_close(module(x, x, x), expected)
    expected[0].sum().backward()
    assert module.in_proj_weight_orig.grad is not None


class Renamed(nn.MultiheadAttention):
    pass


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")
def test_what_is_left_is_named_with_the_reason() -> None:
    model = nn.ModuleDict(
        {
            "ours": MultiheadAttention(16, 4),
            "theirs": Renamed(16, 4),
            "scripted": torch.jit.script(nn.MultiheadAttention(16, 4)),
            "patched": nn.MultiheadAttention(16, 4),
            "quantisable": torch.ao.nn.quantizable.MultiheadAttention(16, 4),
            "swapped": nn.MultiheadAttention(16, 4),
            "other": nn.Linear(2, 2),
        }
    )
    model["patched"].forward = lambda *args: None
    classes = {name: type(module) for name, module in model.items()}
    report = mha_ext.convert(model)
    assert report.swapped == ["swapped"]
    assert list(report.left) == ["ours", "theirs", "scripted", "patched", "quantisable"]
    assert all(type(model[name]) is classes[name] for name in report.left)
    assert str(report).splitlines()[0] == "swapped 1, left 5"
    for name, reason in {
        "ours": "already", "theirs": "test_convert.Renamed, which", "scripted": "before that",
        "patched": "forward of its own", "quantisable": "quantizable",
    }.items():  # fmt: skip
        assert reason in report.left[name]
        assert f"  left    {name}: {report.left[name]}" in str(report)


def test_only_modules_are_converted() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got list"):
        mha_ext.convert([nn.MultiheadAttention(16, 4)])
