"""torch's own samples of nn.MultiheadAttention, put through what torch's test_modules.py does, on the compat module.

Of those tests three do not apply: in-place (it has none), memory format (torch skips it), and parity of two devices
(test_module.py compares with fp64 instead). No sample is left out.
"""

import copy
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from mha_ext.compat import MultiheadAttention

pytest.importorskip("expecttest", reason="torch.testing._internal imports it")
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_utils import freeze_rng_state

settings.load_profile("mha_ext")  # these imports have put torch's in force

INFO = next(info for info in module_db if info.module_cls is nn.MultiheadAttention)


def samples(dtype: torch.dtype, training: bool, requires_grad: bool = False) -> list[Any]:
    """Constructor and forward arguments, and a function that gives what is expected."""
    return INFO.module_inputs_func(INFO, device="cpu", dtype=dtype, requires_grad=requires_grad, training=training)


def module_of(sample: Any, dtype: torch.dtype, training: bool, kind: type[nn.Module] = MultiheadAttention) -> nn.Module:
    torch.manual_seed(0)
    constructor = sample.constructor_input
    return kind(*constructor.args, **constructor.kwargs, device="cpu", dtype=dtype).train(training)


def run(module: nn.Module, sample: Any) -> tuple[Tensor, Tensor]:
    return module(*sample.forward_input.args, **sample.forward_input.kwargs)


COUNT = 64  # every test below runs all of them
modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@modes
@dtypes
def test_forward_is_as_expected_and_as_torch(dtype: torch.dtype, training: bool) -> None:
    run_samples = samples(dtype, training)
    assert len(run_samples) == COUNT
    for sample in run_samples:
        module = module_of(sample, dtype, training)
        output = run(module, sample)
        forward_input = sample.forward_input
        expected = sample.reference_fn(module, *forward_input.args, **forward_input.kwargs)
        torch.testing.assert_close(output, expected)
        torchs = module_of(sample, dtype, training, nn.MultiheadAttention)
        assert torchs.state_dict().keys() == module.state_dict().keys()
        torch.testing.assert_close(output, run(torchs, sample))
        assert repr(module) == repr(torchs)
        assert str(module)


@modes
@dtypes
def test_pickles_and_saved_modules_give_the_same(dtype: torch.dtype, training: bool) -> None:
    for sample in samples(dtype, training):
        module = module_of(sample, dtype, training)
        output = run(module, sample)
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        for again in (
            torch.load(buffer, weights_only=False),
            pickle.loads(pickle.dumps(module)),
            copy.deepcopy(module),
        ):
            assert all(map(torch.equal, run(again, sample), output))


def strided(x: Tensor, requires_grad: bool) -> Tensor:
    """The same values, two apart in memory."""
    apart = torch.stack([x.detach(), torch.full_like(x, torch.nan)], -1)[..., 0]
    assert not apart.is_contiguous()
    return apart.requires_grad_(requires_grad)


@modes
@dtypes
def test_non_contiguous_inputs_parameters_and_gradients_change_nothing(dtype: torch.dtype, training: bool) -> None:
    for sample in samples(dtype, training, requires_grad=True):
        module = module_of(sample, dtype, training)
        inputs = sample.forward_input.args
        results = []
        for apart in (False, True):
            if apart:
                for parameter in module.parameters():
                    parameter.data = strided(parameter, False)
            xs = [strided(x, True) if apart else x.detach().clone().requires_grad_() for x in inputs]
            output, _ = module(*xs, **sample.forward_input.kwargs)
            grad = torch.linspace(-1, 1, output.numel(), dtype=dtype).view_as(output)
            grad = strided(grad, False) if apart else grad
            results.append((output, torch.autograd.grad(output, [*xs, *module.parameters()], grad)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
@modes
def test_gradients_of_inputs_and_parameters(training: bool, check: Any) -> None:
    """In fast mode, as torch checks them by default in its fast runs."""
    check = partial(check, nondet_tol=INFO.gradcheck_nondet_tol, fast_mode=True)
    for sample in samples(torch.float64, training, requires_grad=True):
        module = module_of(sample, torch.float64, training)
        parameters = dict(module.named_parameters())
        kwargs = sample.forward_input.kwargs

        def call(
            *tensors: Tensor, module: nn.Module = module, kwargs: Any = kwargs, names: Any = tuple(parameters)
        ) -> Any:
            replaced = dict(zip(names, tensors[3:], strict=True))
            return torch.func.functional_call(module, replaced, tensors[:3], kwargs)

        assert check(call, (*sample.forward_input.args, *parameters.values()))


def test_factory_arguments_reach_every_parameter() -> None:
    for dtype in (torch.float16, torch.float32, torch.float64):
        for sample in samples(torch.float32, True)[:: COUNT // 16]:
            constructor = sample.constructor_input
            for device in ("cpu", "meta"):
                module = MultiheadAttention(**constructor.kwargs, device=device, dtype=dtype)
                assert {(p.device.type, p.dtype) for p in module.parameters()} == {(device, dtype)}
            with torch.device("meta"):
                assert all(p.is_meta for p in MultiheadAttention(**constructor.kwargs).parameters())
            empty = module.to_empty(device="cpu")
            assert all(p.device.type == "cpu" for p in empty.parameters())
            assert {p.dtype for p in empty.to(torch.bfloat16).parameters()} == {torch.bfloat16}


def test_training_and_evaluation_differ_by_dropout_alone() -> None:
    assert INFO.train_and_eval_differ
    for sample in samples(torch.float32, True):
        with freeze_rng_state():
            trained = run(module_of(sample, torch.float32, True), sample)
            evaluated = run(module_of(sample, torch.float32, False), sample)
        assert all(map(torch.equal, trained, evaluated))
