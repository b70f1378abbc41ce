"""Vision transformers of torchvision and timm give what they gave, with their attention replaced by one line."""

import copy
import importlib
import os
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from accuracy import FACTOR, FLOOR
from operators import Operators
from torch import Tensor, nn

import mha_ext

SETTINGS = {"num_classes": 7}
TORCHVISION = {"image_size": 16, "patch_size": 4, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48}
TIMM = {"img_size": 16, "patch_size": 4, "depth": 2, "num_heads": 4, "embed_dim": 32, "mlp_ratio": 1.5}


def library(name: str) -> ModuleType:
    """Torchvision works beside the torch that it was built for alone; in CI nothing is left out."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"{name} cannot be imported: {error}")


def build(name: str) -> nn.Module:
    """Of weights large enough for attention to be far from uniform; without dropout."""
    module = library(f"{name}.models.vision_transformer")
    model: nn.Module = module.VisionTransformer(**SETTINGS, **(TORCHVISION if name == "torchvision" else TIMM))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model


def run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and the gradients of all parameters, whose names stay."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    logits = model(torch.randn(2, 3, 16, 16, generator=generator).to(dtype))
    (logits * torch.randn(logits.shape, generator=generator).to(dtype)).sum().backward()
    return logits.detach(), {key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None}


class Results(NamedTuple):
    float32: tuple[Tensor, dict[str, Tensor]]
    bfloat16: tuple[Tensor, dict[str, Tensor]]
    inference: Tensor  # fp32, without gradients, where torch's modules may take another path
    kernels: int  # calls of ours in one run


def results_of(model: nn.Module) -> Results:
    model.eval()
    with torch.no_grad():
        inference = model(torch.ones(1, 3, 16, 16))
    model.train()
    with Operators() as operators:
        float32 = run(model)
    kernels = sum(name.startswith("mha_ext::attention_forward") for name in operators.names)
    return Results(float32, run(copy.deepcopy(model).bfloat16()), inference, kernels)


def check_same(ours: Results, before: Results) -> None:
    """Fp32 as before, bf16 as close to fp32 as before; each of two layers by a kernel of ours."""
    assert (ours.kernels, before.kernels) == (2, 0)
    torch.testing.assert_close(ours.inference, before.inference)
    assert max(relative_norms(ours.float32, before.float32)) <= 2e-6
    errors = (relative_norms(results.bfloat16, before.float32) for results in (ours, before))
    for actual, plain in zip(*errors, strict=True):
        assert actual <= FACTOR * plain + FLOOR[torch.bfloat16]


def relative_norms(actual: Any, expected: Any) -> tuple[float, float]:
    """Of the difference of logits, and of all gradients."""
    assert actual[1].keys() == expected[1].keys()

    def norm(ours: list[Tensor], theirs: list[Tensor]) -> float:
        difference = torch.cat([(x.float() - y.float()).flatten() for x, y in zip(ours, theirs, strict=True)])
        return float(difference.norm() / torch.cat([y.float().flatten() for y in theirs]).norm())

    return norm([actual[0]], [expected[0]]), norm([*actual[1].values()], [*expected[1].values()])


@pytest.mark.parametrize("name", ["torchvision", "timm"])
def test_torchs_attention_replaced(name: str) -> None:
    if not hasattr(nn.attention, "activate_flash_attention_impl"):
        pytest.skip("torch has no registry of attention before 2.11")
    model = build(name)
    before = results_of(model)
    nn.attention.activate_flash_attention_impl("MHA_EXT")
    try:
        ours = results_of(model)
    finally:
        nn.attention.restore_flash_attention_impl()
    check_same(ours, before)
    assert results_of(model).kernels == 0


def test_converted() -> None:
    model = build("torchvision")
    before = results_of(model)
    mha_ext.convert(model)
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    assert len(attentions) == 2
    assert all(type(module) is mha_ext.compat.MultiheadAttention for module in attentions)
    check_same(results_of(model), before)
