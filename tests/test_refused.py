"""Bad input is refused before anything is computed, by a message that names the argument, what was expected and
what came."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import mha_ext

B, HQ, HKV, LQ, LK, D, DV = 2, 6, 2, 4, 5, 8, 7


class Bad(NamedTuple):
    name: str
    changed: dict[str, Any]  # arguments in place of good ones
    error: type[Exception]
    says: tuple[str, ...]  # the argument is the first word; these follow, in this order


def z(*shape: int, dtype: torch.dtype = torch.float32, meta: bool = False) -> torch.Tensor:
    """Zeros, on another device if `meta`."""
    return torch.zeros(shape, dtype=dtype, device="meta" if meta else "cpu")


def good() -> dict[str, Any]:
    return {"query": z(B, HQ, LQ, D), "key": z(B, HKV, LK, D), "value": z(B, HKV, LK, DV)}


i64, i32, f16, f64 = torch.int64, torch.int32, torch.float16, torch.float64

BAD_TENSORS = [
    Bad("query_none", {"query": None}, TypeError, ("query: expected a tensor", "None")),
    Bad("query_list", {"query": [[1.0]]}, TypeError, ("query: expected a tensor", "list")),
    Bad("key_number", {"key": 3}, TypeError, ("key: expected a tensor", "3 (int)")),
    Bad("value_numpy", {"value": z(1).numpy()}, TypeError, ("value: expected a tensor", "ndarray")),
    Bad("query_int", {"query": z(B, HQ, LQ, D, dtype=i64)}, TypeError, ("query: expected a dtype", "float32", "int64")),
    Bad("key_bool", {"key": z(B, HKV, LK, D, dtype=torch.bool)}, TypeError, ("key: expected a dtype", "bool")),
    Bad("value_c64", {"value": z(B, HKV, LK, DV, dtype=torch.complex64)}, TypeError, ("value: expected", "complex64")),
    Bad("query_fp8", {"query": z(B, HQ, LQ, D).to(torch.float8_e5m2)}, TypeError, ("query: expected", "float8_e5m2")),
    Bad("query_sparse", {"query": z(B, HQ, LQ, D).to_sparse()}, TypeError, ("query: expected a dense", "sparse")),
    Bad("query_0d", {"query": z()}, ValueError, ("query: expected at least 2 dimensions", "()")),
    Bad("query_1d", {"query": z(8)}, ValueError, ("query: expected at least 2 dimensions", "(8,)")),
    Bad("key_1d", {"key": z(8)}, ValueError, ("key: expected at least 2 dimensions", "(8,)")),
    Bad("key_dtype", {"key": z(B, HKV, LK, D, dtype=f16)}, ValueError, ("key: expected dtype", "32", "float16")),
    Bad("value_dtype", {"value": z(B, HKV, LK, DV, dtype=f64)}, ValueError, ("value: expected dtype", "float64")),
    Bad("key_device", {"key": z(B, HKV, LK, D, meta=True)}, ValueError, ("key: expected device cpu", "meta")),
    Bad("value_device", {"value": z(B, HKV, LK, DV, meta=True)}, ValueError, ("value: expected device cpu", "meta")),
    Bad("key_batch", {"key": z(3, HKV, LK, D)}, ValueError, ("key: expected a batch that", "(2, 6,", "(3, 2, 5, 8)")),
    Bad("key_head_dim", {"key": z(B, HKV, LK, 9)}, ValueError, ("key: expected shape", f"{D})", "9)")),
    Bad("value_length", {"value": z(B, HKV, 6, DV)}, ValueError, ("value: expected shape", "(2, 2, 5, 7)", "6, 7)")),
    Bad("value_heads", {"value": z(B, 3, LK, DV)}, ValueError, ("value: expected shape", f"(2, 3, {LK}")),
    Bad("value_batch", {"value": z(3, HKV, LK, DV)}, ValueError, ("value: expected a batch that", f"(3, {HKV}")),
    Bad("heads_not_a_multiple", {"query": z(B, 5, LQ, D)}, ValueError, ("query: expected a number of heads", "2", "5")),
    Bad("fewer_query_heads", {"query": z(B, 1, LQ, D)}, ValueError, ("query: expected a number of heads", "2", "1")),
    Bad(
        "no_key_heads", {"key": z(B, 0, LK, D), "value": z(B, 0, LK, DV)}, ValueError,
        ("query: expected a number of heads", "0", "6"),
    ),
    Bad(
        "five_axes_batch",
        {"query": z(2, 3, HQ, LQ, D), "key": z(2, 4, HKV, LK, D), "value": z(2, 4, HKV, LK, DV)},
        ValueError, ("key: expected a batch that", "(2, 3,", "(2, 4,"),
    ),
    Bad(
        "three_axes_batch", {"query": z(2, LQ, D), "key": z(3, LK, D), "value": z(3, LK, DV)}, ValueError,
        ("key: expected a batch that", "(2,", "(3,"),
    ),
]  # fmt: skip

BAD_MASKS = [
    Bad("mask_list", {"attn_mask": [True]}, TypeError, ("attn_mask: expected a tensor", "list")),
    Bad("mask_int", {"attn_mask": z(LQ, LK, dtype=i64)}, TypeError, ("attn_mask: expected a dtype", "bool", "int64")),
    Bad("mask_uint8", {"attn_mask": z(LQ, LK, dtype=torch.uint8)}, TypeError, ("attn_mask: expected", "uint8")),
    Bad("mask_columns", {"attn_mask": z(LQ, 4)}, ValueError, ("attn_mask: expected a shape", "(2, 6, 4, 5)", "(4, 4)")),
    Bad("mask_rows", {"attn_mask": z(5, LK)}, ValueError, ("attn_mask: expected a shape", "(5, 5)")),
    Bad("mask_transposed", {"attn_mask": z(LK, LQ)}, ValueError, ("attn_mask: expected a shape", "(5, 4)")),
    Bad("mask_kv_heads", {"attn_mask": z(HKV, LQ, LK)}, ValueError, ("attn_mask: expected a shape", "(2, 4, 5)")),
    Bad("mask_batch", {"attn_mask": z(3, 1, 1, LK)}, ValueError, ("attn_mask: expected a shape", "(3, 1, 1, 5)")),
    Bad("mask_3d_mha", {"attn_mask": z(B * HQ, LQ, LK)}, ValueError, ("attn_mask: expected a shape", "(12, 4, 5)")),
    Bad("mask_5d", {"attn_mask": z(1, B, HQ, LQ, LK)}, ValueError, ("attn_mask: expected a shape", "(1, 2, 6, 4, 5)")),
    Bad("mask_empty", {"attn_mask": z(LQ, 0)}, ValueError, ("attn_mask: expected a shape", "(4, 0)")),
    Bad("mask_device", {"attn_mask": z(LQ, LK, meta=True)}, ValueError, ("attn_mask: expected device cpu", "meta")),
]  # fmt: skip

BAD_RULES = [
    Bad("p_negative", {"dropout_p": -0.1}, ValueError, ("dropout_p: expected", "[0, 1]", "-0.1")),
    Bad("p_above_one", {"dropout_p": 1.5}, ValueError, ("dropout_p: expected", "1.5")),
    Bad("p_nan", {"dropout_p": float("nan")}, ValueError, ("dropout_p: expected", "nan")),
    Bad("p_text", {"dropout_p": "0.1"}, TypeError, ("dropout_p: expected a number", "'0.1'")),
    Bad("p_none", {"dropout_p": None}, TypeError, ("dropout_p: expected a number", "None")),
    Bad("p_bool", {"dropout_p": True}, TypeError, ("dropout_p: expected a number", "True")),
    Bad("p_tensor", {"dropout_p": z()}, TypeError, ("dropout_p: expected a number", "tensor")),
    Bad("causal_int", {"is_causal": 1}, TypeError, ("is_causal: expected True or False", "1 (int)")),
    Bad("causal_none", {"is_causal": None}, TypeError, ("is_causal: expected True or False", "None")),
    Bad("causal_tensor", {"is_causal": z(LQ, LK)}, TypeError, ("is_causal: expected True or False", "tensor")),
    Bad("gqa_int", {"enable_gqa": 1}, TypeError, ("enable_gqa: expected True or False", "1 (int)")),
    Bad("scale_text", {"scale": "auto"}, TypeError, ("scale: expected a number", "'auto'")),
    Bad("scale_inf", {"scale": float("inf")}, ValueError, ("scale: expected a finite", "inf")),
    Bad("scale_nan", {"scale": float("nan")}, ValueError, ("scale: expected a finite", "nan")),
    Bad("window_int", {"window": 3}, TypeError, ("window: expected a pair", "3 (int)")),
    Bad("window_three", {"window": (1, 2, 3)}, TypeError, ("window: expected a pair", "(1, 2, 3)")),
    Bad("window_text", {"window": "12"}, TypeError, ("window: expected a pair", "'12'")),
    Bad("window_float", {"window": (1.0, None)}, TypeError, ("window: expected an int", "1.0 (float)")),
    Bad("window_bool", {"window": (True, None)}, TypeError, ("window: expected an int", "True")),
    Bad("window_negative", {"window": (-1, 2)}, ValueError, ("window: expected ints >= 0, or None", "-1")),
    Bad("window_right", {"window": (None, -2)}, ValueError, ("window: expected ints >= 0, or None", "-2")),
    Bad("window_beyond_64_bits", {"window": (2**70, None)}, ValueError, ("window: expected an int", str(2**70))),
    Bad("offset_beyond_64_bits", {"q_offset": -(2**70)}, ValueError, ("q_offset: expected an int", str(-(2**70)))),
    Bad("offset_that_wraps", {"q_offset": 2**63 - 1}, ValueError, ("q_offset: expected an int", str(2**63 - 1))),
    Bad("offset_text", {"q_offset": "start"}, ValueError, ("q_offset: expected", '"end"', "'start'")),
    Bad("offset_float", {"q_offset": 1.0}, TypeError, ("q_offset: expected an int", "1.0")),
    Bad("offset_bool", {"q_offset": True}, TypeError, ("q_offset: expected an int", "True")),
    Bad("offset_none", {"q_offset": None}, TypeError, ("q_offset: expected an int", "None")),
    Bad("offset_list", {"q_offset": [1, 2]}, TypeError, ("q_offset: expected an int", "list")),
    Bad("offset_float_tensor", {"q_offset": z(B)}, TypeError, ("q_offset: expected a dtype", "int64", "float32")),
    Bad("offset_shape", {"q_offset": z(3, dtype=i64)}, ValueError, ("q_offset: expected shape (B,) = (2,)", "(3,)")),
    Bad("offset_scalar", {"q_offset": z(dtype=i64)}, ValueError, ("q_offset: expected shape (B,) = (2,)", "()")),
    Bad("offset_meta", {"q_offset": z(B, dtype=i64, meta=True)}, ValueError, ("q_offset: expected device", "meta")),
    Bad("lengths_list", {"key_lengths": [5, 3]}, TypeError, ("key_lengths: expected a tensor", "list")),
    Bad("lengths_float", {"key_lengths": z(B)}, TypeError, ("key_lengths: expected a dtype", "float32")),
    Bad("lengths_bool", {"key_lengths": z(B, dtype=torch.bool)}, TypeError, ("key_lengths: expected a dtype", "bool")),
    Bad("lengths_2d", {"key_lengths": z(B, 1, dtype=i32)}, ValueError, ("key_lengths: expected shape (B,)", "2, 1)")),
    Bad("lengths_heads", {"key_lengths": z(HQ, dtype=i64)}, ValueError, ("key_lengths: expected shape (B,)", "(6,)")),
    Bad("lengths_meta", {"key_lengths": z(B, dtype=i64, meta=True)}, ValueError, ("key_lengths: expected device",)),
    Bad("slopes_list", {"alibi_slopes": [0.5] * HQ}, TypeError, ("alibi_slopes: expected a tensor", "list")),
    Bad("slopes_int", {"alibi_slopes": z(HQ, dtype=i64)}, TypeError, ("alibi_slopes: expected a dtype", "int64")),
    Bad("slopes_kv_heads", {"alibi_slopes": z(HKV)}, ValueError, ("alibi_slopes: expected shape (Hq,) = (6,)", "(2,)")),
    Bad("slopes_batch", {"alibi_slopes": z(1, HQ)}, ValueError, ("alibi_slopes: expected shape (B, Hq)", "6)")),
    Bad("slopes_3d", {"alibi_slopes": z(1, B, HQ)}, ValueError, ("alibi_slopes: expected 1 or 2", "2, 6)")),
    Bad("slopes_device", {"alibi_slopes": z(HQ, meta=True)}, ValueError, ("alibi_slopes: expected device cpu", "meta")),
    Bad("softcap_zero", {"softcap": 0.0}, ValueError, ("softcap: expected", "above 0", "0.0")),
    Bad("softcap_negative", {"softcap": -30.0}, ValueError, ("softcap: expected", "-30.0")),
    Bad("softcap_inf", {"softcap": float("inf")}, ValueError, ("softcap: expected", "inf")),
    Bad("softcap_text", {"softcap": "30"}, TypeError, ("softcap: expected a number", "'30'")),
    Bad("sinks_list", {"sinks": [0.0] * HQ}, TypeError, ("sinks: expected a tensor", "list")),
    Bad("sinks_int", {"sinks": z(HQ, dtype=i32)}, TypeError, ("sinks: expected a dtype", "int32")),
    Bad("sinks_shape", {"sinks": z(HKV)}, ValueError, ("sinks: expected shape (Hq,) = (6,)", "(2,)")),
    Bad("sinks_2d", {"sinks": z(1, HQ)}, ValueError, ("sinks: expected shape (Hq,) = (6,)", "(1, 6)")),
    Bad("sinks_device", {"sinks": z(HQ, meta=True)}, ValueError, ("sinks: expected device cpu", "meta")),
    Bad("return_lse", {"return_lse": 1}, TypeError, ("return_lse: expected True or False", "1 (int)")),
    Bad("return_weights", {"return_weights": "yes"}, TypeError, ("return_weights: expected True or False", "'yes'")),
    Bad("return_stats", {"return_stats": None}, TypeError, ("return_stats: expected True or False", "None")),
    Bad("deterministic", {"deterministic": 0}, TypeError, ("deterministic: expected True or False", "0 (int)")),
    Bad("backend_name", {"backend": "flash"}, ValueError, ("backend: expected one of fused, ", "'flash'")),
    Bad("backend_type", {"backend": 3}, ValueError, ("backend: expected one of", "3")),
]  # fmt: skip


def assert_refused(case: Bad, call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    pattern = "^" + ".*".join(re.escape(part) for part in case.says)
    with pytest.raises(case.error, match=pattern):
        call(**arguments)


def test_the_good_arguments_are_taken() -> None:
    """So that each refusal below is due to what was changed."""
    assert mha_ext.attention(**good()).shape == (B, HQ, LQ, DV)


@pytest.mark.parametrize("case", [*BAD_TENSORS, *BAD_MASKS, *BAD_RULES], ids=lambda case: case.name)
def test_attention_refuses(case: Bad) -> None:
    assert_refused(case, mha_ext.attention, {**good(), **case.changed})


def test_every_argument_is_refused_somewhere() -> None:
    import inspect

    refused = {case.says[0].split(":")[0] for case in (*BAD_TENSORS, *BAD_MASKS, *BAD_RULES)}
    assert refused == set(inspect.signature(mha_ext.attention).parameters)


RULES_OF_SOFTMAX = [
    case
    for case in (*BAD_MASKS, *BAD_RULES)
    if not set(case.changed)
    & {"scale", "enable_gqa", "return_lse", "return_weights", "return_stats", "deterministic", "backend"}
]


@pytest.mark.parametrize("case", RULES_OF_SOFTMAX, ids=lambda case: case.name)
def test_masked_softmax_refuses_the_same_rules(case: Bad) -> None:
    assert_refused(case, mha_ext.masked_softmax, {"scores": z(B, HQ, LQ, LK), **case.changed})


@pytest.mark.parametrize(
    "case",
    [
        Bad("none", {"scores": None}, TypeError, ("scores: expected a tensor", "None")),
        Bad("int", {"scores": z(B, HQ, LQ, LK, dtype=i64)}, TypeError, ("scores: expected a dtype", "int64")),
        Bad("3d", {"scores": z(HQ, LQ, LK)}, ValueError, ("scores: expected 4 dimensions", "(6, 4, 5)")),
        Bad("dtype_int", {"dtype": i64}, TypeError, ("dtype: expected", "int64")),
        Bad("dtype_fp64", {"dtype": f64}, TypeError, ("dtype: expected", "float64")),
        Bad("dtype_text", {"dtype": "half"}, TypeError, ("dtype: expected", "half")),
        Bad("return_lse", {"return_lse": 1}, TypeError, ("return_lse: expected True or False", "1 (int)")),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_masked_softmax_refuses(case: Bad) -> None:
    assert_refused(case, mha_ext.masked_softmax, {"scores": z(B, HQ, LQ, LK), **case.changed})


@pytest.mark.parametrize(
    "case",
    [
        Bad("query_none", {"query": None}, TypeError, ("query: expected a tensor", "None")),
        Bad("query_3d", {"query": z(HQ, LQ, D)}, ValueError, ("query: expected 4 dimensions", "(6, 4, 8)")),
        Bad("key_int", {"key": z(B, HKV, LK, D, dtype=i64)}, TypeError, ("key: expected a dtype", "int64")),
        Bad("key_dtype", {"key": z(B, HKV, LK, D, dtype=f16)}, ValueError, ("key: expected dtype", "float16")),
        Bad("key_device", {"key": z(B, HKV, LK, D, meta=True)}, ValueError, ("key: expected device", "meta")),
        Bad("key_batch", {"key": z(1, HKV, LK, D)}, ValueError, ("key: expected shape", "(1, 2, 5, 8)")),
        Bad("key_dim", {"key": z(B, HKV, LK, 9)}, ValueError, ("key: expected shape", "(2, 2, 5, 9)")),
        Bad("heads", {"key": z(B, 4, LK, D)}, ValueError, ("query: expected a number of heads", "4", "6")),
        Bad("scale", {"scale": "1"}, TypeError, ("scale: expected a number", "'1'")),
        Bad("scale_nan", {"scale": float("nan")}, ValueError, ("scale: expected a finite", "nan")),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_attention_scores_refuses(case: Bad) -> None:
    assert_refused(case, mha_ext.attention_scores, {"query": z(B, HQ, LQ, D), "key": z(B, HKV, LK, D), **case.changed})


@pytest.mark.parametrize(
    "case",
    [
        Bad("weights_list", {"weights": [1]}, TypeError, ("weights: expected a tensor", "list")),
        Bad("weights_3d", {"weights": z(HQ, LQ, LK)}, ValueError, ("weights: expected 4 dimensions", "(6, 4, 5)")),
        Bad("value_bool", {"value": z(B, HKV, LK, DV, dtype=torch.bool)}, TypeError, ("value: expected", "bool")),
        Bad("value_dtype", {"value": z(B, HKV, LK, DV, dtype=f16)}, ValueError, ("value: expected dtype", "float16")),
        Bad("value_device", {"value": z(B, HKV, LK, DV, meta=True)}, ValueError, ("value: expected device", "meta")),
        Bad("value_length", {"value": z(B, HKV, 6, DV)}, ValueError, ("value: expected shape", "(2, 2, 6, 7)")),
        Bad("heads", {"value": z(B, 4, LK, DV)}, ValueError, ("weights: expected", "value", "4", "6")),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_attention_output_refuses(case: Bad) -> None:
    arguments = {"weights": z(B, HQ, LQ, LK), "value": z(B, HKV, LK, DV), **case.changed}
    assert_refused(case, mha_ext.attention_output, arguments)


@pytest.mark.parametrize(
    "case",
    [
        Bad("packed_none", {"packed": None}, TypeError, ("packed: expected a tensor", "None")),
        Bad("packed_int", {"packed": z(B, LQ, 80, dtype=i64)}, TypeError, ("packed: expected a dtype", "int64")),
        Bad("packed_2d", {"packed": z(LQ, 80)}, ValueError, ("packed: expected 3 dimensions", "(4, 80)")),
        Bad("packed_columns", {"packed": z(B, LQ, 81)}, ValueError, ("packed: expected a last", "10", "(2, 4, 81)")),
        Bad("bias_list", {"bias": [0.0] * 80}, TypeError, ("bias: expected a tensor", "list")),
        Bad("bias_shape", {"bias": z(79)}, ValueError, ("bias: expected shape", "(80,)", "(79,)")),
        Bad("bias_2d", {"bias": z(1, 80)}, ValueError, ("bias: expected shape", "(80,)", "(1, 80)")),
        Bad("bias_dtype", {"bias": z(80, dtype=f16)}, ValueError, ("bias: expected dtype", "float16")),
        Bad("bias_device", {"bias": z(80, meta=True)}, ValueError, ("bias: expected device", "meta")),
        Bad("heads_zero", {"num_heads": 0}, ValueError, ("num_heads: expected an int in [1, ", "got 0")),
        Bad("heads_float", {"num_heads": 6.0}, TypeError, ("num_heads: expected an int", "6.0")),
        Bad("kv_heads_zero", {"num_kv_heads": 0}, ValueError, ("num_kv_heads: expected an int in [1, ", "got 0")),
        Bad("kv_heads_text", {"num_kv_heads": "2"}, TypeError, ("num_kv_heads: expected an int", "'2'")),
        Bad("kv_heads_no_divisor", {"num_kv_heads": 4}, ValueError, ("num_kv_heads: expected a divisor", "6", "4")),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_qkv_split_refuses(case: Bad) -> None:
    arguments = {"packed": z(B, LQ, 80), "bias": z(80), "num_heads": 6, "num_kv_heads": 2, **case.changed}
    assert_refused(case, mha_ext.qkv_split, arguments)


def test_explain_refuses_what_attention_refuses() -> None:
    for case in (*BAD_TENSORS, *BAD_MASKS, *BAD_RULES):
        assert_refused(case, mha_ext.backends.explain, {**good(), **case.changed})
