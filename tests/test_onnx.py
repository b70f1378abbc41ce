"""The Attention cases that onnx publishes with expected values, through `mha_ext.attention`.

Those with a past (a cache) are covered as well: their past keys are put before the new ones, and the queries
stand after the past.
"""

import functools
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import BackendUnderTest
from torch import Tensor

import mha_ext
from mha_ext import AttentionResult

onnx = pytest.importorskip("onnx", reason="onnx holds the cases")


class Published(NamedTuple):
    attributes: dict[str, Any]
    inputs: dict[str, Any]  # NumPy arrays by the names of the operator
    outputs: dict[str, Any]
    rtol: float
    atol: float


INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")
PAST = {"past_key", "past_value"}


@functools.cache
def published() -> dict[str, Published]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # NumPy's, from other operators' cases
        cases = collect_testcases(None)
    found = {}
    for case in cases:
        if not case.name.startswith("test_attention_") or case.name.endswith("_expanded"):
            continue
        (node,) = case.model.graph.node
        ((inputs, outputs),) = case.data_sets
        given_inputs = [name for name, used in zip(INPUTS, node.input, strict=False) if used]
        given_outputs = [name for name, used in zip(OUTPUTS, node.output, strict=False) if used]
        found[case.name.removeprefix("test_attention_")] = Published(
            {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute},
            dict(zip(given_inputs, inputs, strict=True)),
            dict(zip(given_outputs, outputs, strict=True)),
            case.rtol,
            case.atol,
        )
    return found


def tensor_of(array: Any, device: str) -> Tensor:
    """In memory of torch's own; NumPy knows bf16 only through an extension type."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).to(device, torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, copy=True)


def heads_first(x: Tensor, num_heads: int) -> Tensor:
    """(B, L, H D) -> (B, H, L, D)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def attention_operator(case: Published, device: str) -> dict[str, Tensor]:
    """The Attention operator of onnx, opsets 23 to 25, by the functions of mha_ext."""
    attributes = case.attributes
    given = {name: tensor_of(x, device) for name, x in case.inputs.items()}
    query, key, value = (given[name] for name in ("Q", "K", "V"))
    if query.dim() == 3:
        query = heads_first(query, attributes["q_num_heads"])
        key, value = (heads_first(x, attributes["kv_num_heads"]) for x in (key, value))
    offset: int | Tensor = 0
    if "past_key" in given:
        offset = given["past_key"].shape[2]
        key, value = torch.cat((given["past_key"], key), 2), torch.cat((given["past_value"], value), 2)
    lengths = given.get("nonpad_kv_seqlen")
    if lengths is not None:
        offset = lengths - query.shape[2]
    mask = given.get("attn_mask")
    if mask is not None and mask.shape[-1] < key.shape[2]:  # a shorter mask hides the rest
        hidden = False if mask.dtype == torch.bool else -float("inf")
        mask = torch.nn.functional.pad(mask, (0, key.shape[2] - mask.shape[-1]), value=hidden)
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    rule: dict[str, Any] = {
        "is_causal": bool(attributes.get("is_causal", 0)),
        "window": (None if left < 0 else left, None if right < 0 else right),
        "q_offset": offset,
        "key_lengths": lengths,
    }
    scale, softcap = attributes.get("scale"), attributes.get("softcap") or None
    result = mha_ext.attention(
        query, key, value, mask, scale=scale, softcap=softcap, **rule, return_weights=True
    )  # fmt: skip
    assert isinstance(result, AttentionResult)
    assert result.weights is not None
    output = result.output if given["Q"].dim() == 4 else result.output.transpose(1, 2).flatten(2)
    outputs = {"Y": output, "present_key": key, "present_value": value}
    if "qk_matmul_output" in case.outputs:
        mode = attributes.get("qk_matmul_output_mode", 0)
        outputs["qk_matmul_output"] = (
            result.weights
            if mode == 3
            else score_output(mode, mha_ext.attention_scores(query, key, scale), mask, softcap, rule)
        )
    return outputs


def score_output(mode: int, scores: Tensor, mask: Tensor | None, softcap: float | None, rule: dict[str, Any]) -> Tensor:
    """Scores as they are (0), after the softcap (1), and with the mask (2)."""
    if mode >= 1 and softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mode == 2:
        assert mask is not None
        assert mask.is_floating_point()
        visible = mha_ext.masked_softmax(torch.zeros_like(scores), **rule) > 0
        scores = (scores + mask).masked_fill(~visible, -float("inf"))
    return scores


def names() -> list[str]:
    return sorted(published())


@pytest.mark.parametrize("name", names())
def test_published_case(backend: BackendUnderTest, name: str) -> None:
    case = published()[name]
    outputs = attention_operator(case, backend.device)
    for output, expected in case.outputs.items():
        wanted = tensor_of(expected, "cpu")
        ours = outputs[output].cpu()
        assert ours.shape == wanted.shape
        # half precision: their NumPy rounds at every step, so each may be off by a rounding of its own
        slack = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}.get(wanted.dtype, 0.0)
        torch.testing.assert_close(
            ours.float(), wanted.float(), rtol=case.rtol + slack, atol=case.atol + slack, msg=f"{output} differs"
        )


def test_every_published_case_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Not one is left out: 93 in onnx 1.23, 72 of them without a past, in all four modes of the score output."""
    every = published().values()
    without_past = [case for case in every if not PAST & set(case.inputs)]
    modes = [case.attributes.get("qk_matmul_output_mode", 0) for case in every if "qk_matmul_output" in case.outputs]
    with capsys.disabled():
        print(
            f"\nonnx attention cases: {len(every)}, without a past {len(without_past)}, with score output {len(modes)}"
        )
    assert set(modes) == {0, 1, 2, 3}
    assert len(without_past) >= 60
