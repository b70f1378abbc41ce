"""The benchmark: its formulas against hand numbers, its cases, its judgement, and one small run from end to end."""

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import mha_ext
from benchmarks import cli, harness, judgement, onnx_runtime, peak, report, roofline
from benchmarks.cases import GROUPS, MASKS, PLANS, PRESETS, Case, Plan, Sweep, cases_of
from benchmarks.contenders import Contender, Workload
from mha_ext import backends

CPU = torch.device("cpu")
HAS_KERNELS = backends.available()["cpu"] is None
PLAIN = "reference" if HAS_KERNELS else "ours-reference"  # one of ours only where there is no other


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(harness, "SAMPLE_SECONDS", {"cpu": 0.001, "cuda": 0.01})
    monkeypatch.setattr(peak, "SECONDS", 0.001)
    monkeypatch.setattr(peak, "LARGE_BYTES", 1 << 20)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads that wait for each other take most of the time
    yield
    torch.set_num_threads(threads)


def case_of(preset: str = "gpt2", **changes: object) -> Case:
    mask = "causal" if PRESETS[preset].is_causal else "full"
    made = Case("attention", PRESETS[preset], 2, 24, torch.float32, mask, training=False)
    return dataclasses.replace(made, **changes)


# Formulas ------------------------------------------------------------------------------------------------------------


def test_flops_of_attention_by_hand() -> None:
    llama = case_of("llama-2-70b", batch=1, length=8192, dtype=torch.bfloat16)
    assert roofline.case_flops(llama) == 1_099_511_627_776  # 1.10e12: causal counts half
    assert roofline.case_flops(dataclasses.replace(llama, mask="full")) == 2 * 1_099_511_627_776
    assert roofline.case_flops(dataclasses.replace(llama, training=True)) == 3.5 * 1_099_511_627_776
    # A published figure reads back: 1.708 ms are 644 TFLOP/s.
    assert roofline.case_flops(llama) / 1.708e-3 == pytest.approx(644e12, rel=1e-3)
    # 4 * 2 * 12 * 512 * 512 * 64
    assert roofline.case_flops(case_of("bert-base", batch=2, length=512)) == 1_610_612_736


def test_bytes_of_attention_by_hand() -> None:
    llama = case_of("llama-2-70b", batch=1, length=8192, dtype=torch.bfloat16)
    query, key, lse = 134_217_728, 16_777_216, 2_097_152
    assert roofline.case_bytes(llama) == 2 * query + 2 * key + lse == 304_087_040
    both = dataclasses.replace(llama, training=True)
    assert roofline.case_bytes(both) == 304_087_040 + (3 * query + 2 * key + lse) + (query + 2 * key)


def test_floor_is_the_larger_of_operations_and_bytes() -> None:
    ceilings = roofline.Ceilings(4.3e12, {torch.bfloat16: 790e12}, "as if")
    llama = case_of("llama-2-70b", batch=1, length=8192, dtype=torch.bfloat16)
    assert ceilings.floor_seconds(llama) == pytest.approx(1.39e-3, rel=2e-3)
    # 2 * 16384 * 3 * 768 numbers of 2 bytes once in and once out
    split = case_of(kind="qkv_split", batch=8, length=2048, dtype=torch.bfloat16)
    assert roofline.case_flops(split) == 0
    assert roofline.case_bytes(split) == 150_994_944
    assert ceilings.floor_seconds(split) == 150_994_944 / 4.3e12


@pytest.mark.parametrize(
    ("kind", "flops", "bytes_", "training_flops", "training_bytes"),
    [
        # gpt2, one sequence of 128 in fp32: 12 heads of 64; E = 768, x has 98 304 numbers, the scores 196 608
        ("module", 603_979_776 + 25_165_824, 4 * (2 * 98_304 + 4 * 589_824), 3 * 603_979_776 + 3.5 * 25_165_824,
         4 * (5 * 98_304 + 12 * 589_824)),
        ("qkv_split", 0, 4 * 2 * 3 * 98_304, 0, 4 * 4 * 3 * 98_304),
        ("attention_scores", 25_165_824, 4 * (2 * 98_304 + 196_608), 75_497_472, 4 * (6 * 98_304 + 2 * 196_608)),
        ("attention_output", 25_165_824, 4 * (2 * 98_304 + 196_608), 75_497_472, 4 * (5 * 98_304 + 3 * 196_608)),
        ("masked_softmax", 0, 4 * 2 * 196_608, 0, 4 * 5 * 196_608),
    ],
)  # fmt: skip
def test_work_of_module_and_parts_by_hand(
    kind: str, flops: float, bytes_: float, training_flops: float, training_bytes: float
) -> None:
    forward = case_of(kind=kind, batch=1, length=128)
    training = dataclasses.replace(forward, training=True)
    assert (roofline.case_flops(forward), roofline.case_bytes(forward)) == (flops, bytes_)
    assert (roofline.case_flops(training), roofline.case_bytes(training)) == (training_flops, training_bytes)


# Cases ---------------------------------------------------------------------------------------------------------------


def test_presets_are_the_published_models() -> None:
    widths = {name: (preset.num_heads, preset.num_kv_heads, preset.embed_dim) for name, preset in PRESETS.items()}
    assert widths == {
        "bert-base": (12, 12, 768),
        "bert-large": (16, 16, 1024),
        "gpt2": (12, 12, 768),
        "gpt2-medium": (16, 16, 1024),
        "llama-7b": (32, 32, 4096),
        "llama-7b-quarter": (8, 8, 1024),
        "llama-3-8b": (32, 8, 4096),
        "llama-2-70b": (64, 8, 8192),
        "tiny": (1, 1, 8),
    }
    assert [name for name, preset in PRESETS.items() if not preset.is_causal] == ["bert-base", "bert-large", "tiny"]


BOTH_WAYS = set(itertools.product(("attention", "module", *GROUPS["parts"]), (False, True)))
ON_CPU = BOTH_WAYS | {(kind, False) for kind in ("mask", "decode", "call")}


@pytest.mark.parametrize("key", PLANS, ids="-".join)
def test_every_plan_measures_attention_module_and_parts_both_ways(key: tuple[str, str]) -> None:
    cases = cases_of(PLANS[key])
    assert len(cases) == len(set(cases))
    kinds = ON_CPU if key[0] == "cpu" else BOTH_WAYS
    assert {(case.kind, case.training) for case in cases} == kinds
    assert all(case.preset.num_heads == case.preset.num_kv_heads for case in cases if case.kind == "module")
    assert len({(case.kind, case.training) for case in cases[: len(kinds)]}) == len(kinds), "a short run has them all"


def test_the_default_on_a_cpu_has_every_shape_that_the_kernels_are_judged_by() -> None:
    cases = cases_of(PLANS["cpu", "default"])
    of_attention = [case for case in cases if case.kind in ("attention", "mask", "decode")]
    for dtype in (torch.float32, torch.bfloat16):
        forward = [case for case in of_attention if case.dtype == dtype and not case.training]
        assert len(forward) >= 24
        assert {case.queries for case in forward} >= {1, 16, 64, 128, 512, 2048, 4096}
        assert {case.preset.head_dim for case in forward} == {64, 128}
        assert {case.mask for case in forward} == set(MASKS)
        assert {case.queries for case in forward if case.mask == "causal"} >= {16, 64, 128, 512, 2048, 4096}
        assert any(case.preset.num_heads > case.preset.num_kv_heads > 1 for case in forward)
        decoded = [case for case in forward if case.kind == "decode"]
        assert {(case.preset.num_heads, case.preset.num_kv_heads) for case in decoded} == {(32, 32), (32, 8)}
        assert all((case.length, case.preset.head_dim) == (4096, 128) for case in decoded)
    trained = {case.dtype for case in of_attention if case.training}
    assert trained == {torch.float32, torch.bfloat16, torch.float16}
    modules = {
        (case.batch, case.length, case.preset.embed_dim, case.training) for case in cases if case.kind == "module"
    }
    assert modules >= {(2, 128, 768, False), (2, 128, 768, True)}
    (call,) = [case for case in cases if case.kind == "call"]
    assert (call.batch, call.preset.num_heads, call.queries, call.preset.head_dim) == (1, 1, 4, 8)


def test_selection_by_hand() -> None:
    plan = Plan((Sweep("attention", ("gpt2",), ((4, 128), (1, 4096)), (torch.float32,)),), 512, 3, 1.0)
    assert [case.label for case in cases_of(plan, ["attention"], passes=(True,))] == [
        "gpt2 4x128 causal",
        "gpt2 1x4096 causal",
    ]
    assert cases_of(plan, ["module"]) == []


def test_the_command_line_overrules_a_plan() -> None:
    sizes = ["--presets", "gpt2", "--lengths", "128", "4096", "--tokens", "512"]
    arguments = cli.parser().parse_args([*sizes, "--dtypes", "bf16", "--passes", "training", "--mask", "full"])
    plan = cli.plan_of(arguments, "cpu")
    labels = [(case.label, case.dtype) for case in cases_of(plan, ["attention"], cli.PASSES[arguments.passes])]
    assert labels == [("gpt2 4x128 full", torch.bfloat16), ("gpt2 1x4096 full", torch.bfloat16)]
    (call,) = cases_of(plan, ["call"])
    assert (call.preset.name, call.length) == ("tiny", 4)


def test_visible_pairs_by_counting() -> None:
    for mask in MASKS:
        case = case_of("bert-base", kind="mask", mask=mask)
        rows = torch.arange(case.queries)
        hidden = judgement.Masking(case).hidden(rows)
        pairs = case.queries * case.length
        seen = pairs if hidden is None else pairs - int(hidden.expand(case.queries, -1).sum())
        assert case.visible == (pairs / 2 if mask == "causal" else seen)  # of causal, half: the usual convention


# Judgement -----------------------------------------------------------------------------------------------------------


Select = Callable[[Workload], list[Contender]]


def measured(
    case: Case, *extra: Contender, only: tuple[str, ...] = (), select: Select | None = None
) -> dict[str, harness.Result]:
    def all_and_extra(workload: Workload) -> list[Contender]:
        return [*workload.contenders(), *extra]

    select = select or all_and_extra
    results = harness.measure(case, CPU, repeats=3, case_seconds=0.1, only=only, select=select)
    return {result.contender: result for result in results}


def right(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def acausal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def heads_dealt_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    return right(query, key.repeat(1, repeats, 1, 1), value.repeat(1, repeats, 1, 1))


def last_row_unwritten(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([right(query, key, value)[:, :, :-1], query[:, :, -1:]], 2)


def one_head_unwritten(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = right(query, key, value)
    return torch.cat([out[:, :20], query[:, 20:21], out[:, 21:]], 1)


def one_nan(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = right(query, key, value).clone()
    out[1, 3, 7, 5] = torch.nan
    return out


def slightly_scaled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return right(query, key, value) * (1 + 1e-3)


@pytest.mark.parametrize(
    "forward",
    [acausal, heads_dealt_out, last_row_unwritten, one_head_unwritten, one_nan, slightly_scaled],
    ids=lambda forward: forward.__name__,
)
def test_a_wrong_contender_is_reported_and_not_timed(forward: Callable[..., Tensor]) -> None:
    results = measured(case_of("llama-2-70b"), Contender("made", True, forward), only=("made", "math"))
    assert results["made"].status == "wrong"
    assert results["made"].seconds is None
    assert "relative error" in results["made"].reason
    assert results["sdpa-math"].status == "timed"


def test_a_right_contender_passes_the_same_judgement() -> None:
    results = measured(case_of("llama-2-70b"), Contender("made", True, right), only=("made",))
    assert results["made"].status == "timed"
    assert results["made"].error < 1e-6


def test_a_wrong_gradient_is_refused() -> None:
    class Detached(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, query: Tensor) -> Tensor:
            return query.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return 1.01 * grad

    def made(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return right(Detached.apply(query), key, value)

    case = case_of("llama-2-70b", training=True)
    assert measured(case, Contender("made", True, made), only=("made",))["made"].status == "wrong"
    assert measured(case, Contender("made", True, right), only=("made",))["made"].status == "timed"


@pytest.mark.parametrize("kind", ["module", "qkv_split", "attention_scores", "masked_softmax", "attention_output"])
@pytest.mark.parametrize("training", [False, True])
def test_module_and_parts_are_judged_too(kind: str, training: bool) -> None:
    def right_and_doubled(workload: Workload) -> list[Contender]:
        torch_one = next(contender for contender in workload.contenders() if not contender.ours)

        def doubled(*tensors: Tensor) -> tuple[Tensor, ...]:
            outputs = torch_one.forward(*tensors)
            return tuple(2 * x for x in outputs) if isinstance(outputs, tuple) else 2 * outputs

        return [dataclasses.replace(torch_one, name="right"), Contender("doubled", False, doubled)]

    results = measured(case_of(kind=kind, training=training), select=right_and_doubled)
    assert {name: result.status for name, result in results.items()} == {"right": "timed", "doubled": "wrong"}


def test_long_sequences_are_judged_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judgement, "CHUNK", 7)
    results = measured(case_of("llama-2-70b", training=True), only=("math", "flash"))
    assert [result.status for result in results.values()] == ["timed", "timed"]
    assert max(result.error for result in results.values()) < 1e-6


def test_what_is_not_available_says_why() -> None:
    results = measured(case_of())
    assert results["sdpa-cudnn"].status == results["sdpa-efficient"].status == "unavailable"
    assert "CUDA" in results["sdpa-cudnn"].reason
    assert results["sdpa-flash"].status == results[PLAIN].status == "timed"

    def refuse(*_: Tensor) -> Tensor:
        raise ValueError("too small a head")

    refused = measured(case_of(), Contender("made", True, refuse), only=("made",))["made"]
    assert (refused.status, refused.reason) == ("unavailable", "too small a head")


def test_a_backend_that_appears_is_measured_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "mha_ext.backends.available", lambda: {"cpu": "not on Tuesdays", "fused": None, "reference": None}
    )
    results = measured(case_of(), only=("ours",))  # of those for CUDA tensors nothing is said on a CPU
    assert {name: result.status for name, result in results.items()} == {
        "ours-cpu": "unavailable",
        "ours-reference": "timed",
    }
    assert results["ours-cpu"].reason == "not on Tuesdays"


def test_the_first_backend_is_timed_as_it_is_called_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    attention = mha_ext.attention

    def watched(*tensors: Tensor, **options: object) -> Tensor:
        asked.append(backends.requested())
        return attention(*tensors, **options)

    monkeypatch.setattr("mha_ext.attention", watched)
    first = "cpu" if HAS_KERNELS else "reference"
    assert measured(case_of(), only=(f"ours-{first}",))[f"ours-{first}"].status == "timed"
    assert asked[0] == first
    assert set(asked[1:]) == {None}

    asked.clear()
    monkeypatch.setattr(backends, "_environment", first)
    measured(case_of(), only=(f"ours-{first}",))
    assert set(asked) == {first}


def test_score_matrices_that_do_not_fit_are_skipped_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "free_bytes", lambda _: 1000)
    results = measured(case_of())
    assert results[PLAIN].status == results["sdpa-math"].status == "no memory"
    assert "score matrices would need" in results["sdpa-math"].reason
    assert results["sdpa-flash"].status == "timed"
    whole = measured(case_of(kind="masked_softmax"))
    assert {result.status for result in whole.values()} <= {"no memory", "unavailable"}


def test_a_failing_contender_is_reported_and_a_lost_gpu_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    failed = measured(case_of(), Contender("made", True, lost), only=("made", "math"))
    assert failed["made"].status == "failed"
    assert "illegal memory access" in failed["made"].reason
    assert failed["sdpa-math"].status == "timed"

    monkeypatch.setattr(harness, "answers", lambda _: False)
    with pytest.raises(harness.DeviceLostError, match="made on gpt2"):
        measured(case_of(), Contender("made", True, lost), only=("made",))


def test_reasons_leave_out_that_the_others_are_switched_off() -> None:
    told = [
        "Flash attention kernel not used because: (Triggered internally at sdp_utils.cpp:1.)",
        "Flash attention has been runtime disabled. (Triggered internally at sdp_utils.cpp:2.)",
        "Both fused kernels require the last dimension to be 8. (Triggered internally at sdp_utils.cpp:3.)",
    ]
    assert harness.refusal(told) == "Both fused kernels require the last dimension to be 8."


# What there is on a CPU -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
def test_everyone_computes_every_mask(mask: str) -> None:
    results = measured(case_of("bert-base", kind="mask", mask=mask), only=("ours", "sdpa", "reference"))
    expected = {"sdpa-math", "sdpa-flash", PLAIN, "no mask, ours-cpu" if HAS_KERNELS else "no mask, ours-reference"}
    assert {name for name, result in results.items() if result.status == "timed"} >= expected
    assert not [result for result in results.values() if result.status in ("wrong", "failed")]
    assert [name for name, result in results.items() if result.yardstick] == [n for n in results if "no mask" in n]


def wrong_mask(workload: Workload) -> list[Contender]:
    chosen = [contender for contender in workload.contenders() if contender.name == "sdpa-math"]
    plain = torch.nn.functional.scaled_dot_product_attention
    return [dataclasses.replace(contender, forward=plain) for contender in chosen]


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "full"])
def test_a_mask_that_is_left_out_is_noticed(mask: str) -> None:
    results = measured(case_of("bert-base", kind="mask", mask=mask), select=wrong_mask)
    assert results["sdpa-math"].status == "wrong"


CACHED = [("llama-3-8b", "decode", "full"), ("llama-7b", "decode", "full"), ("llama-3-8b", "attention", "causal")]


@pytest.mark.parametrize(
    ("preset", "kind", "mask"), [*(("bert-base", "attention", mask) for mask in MASKS), *CACHED], ids=str
)
def test_onnx_runtime_computes_the_same(preset: str, kind: str, mask: str) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    result = measured(case_of(preset, kind=kind, mask=mask), only=("onnxruntime",))["onnxruntime"]
    assert (result.status, result.reason) == ("timed", "")
    assert result.error < 1e-5


def test_without_onnx_runtime_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    results = measured(case_of("bert-base"), only=("onnxruntime", "flash"))
    assert results["onnxruntime"].status == "unavailable"
    assert "onnxruntime is not installed" in results["onnxruntime"].reason
    assert results["sdpa-flash"].status == "timed"


def test_what_onnx_runtime_is_not_asked_for() -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    for changes in ({"dtype": torch.bfloat16}, {"training": True}):
        assert "float32, forward" in onnx_runtime.refusal(case_of(**changes), CPU)
    assert "always causal" in onnx_runtime.refusal(case_of("llama-3-8b", mask="bias"), CPU)


@pytest.fixture
def loops() -> peak.Loops:
    found, why_not = peak.load_loops()
    if found is None:
        pytest.skip(why_not)
    return found


def test_the_loops_do_what_they_say(loops: peak.Loops) -> None:
    numbers = torch.randint(-(2**63), 2**63 - 1, (1003,))
    for part in (numbers, numbers[:7], numbers[3:200], numbers[:0]):
        assert loops.read(part) == int(part.sum())
    torch.set_num_threads(3)  # more threads than divide the words
    assert loops.read(numbers) == int(numbers.sum())
    torch.set_num_threads(1)
    assert loops.flops_per_second(torch.float32) > 0
    if loops.has_bf16_dot():
        assert loops.flops_per_second(torch.bfloat16) > 0


def test_decoding_is_compared_with_a_loop_that_reads(loops: peak.Loops, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("llama-3-8b", kind="decode", mask="full", dtype=torch.bfloat16)
    results = measured(case, only=("ours", "read"))
    assert results["read loop"].status == "timed"
    assert results["read loop"].yardstick
    monkeypatch.setattr(peak.Loops, "read", lambda *_: 0)
    assert measured(case, only=("read",))["read loop"].status == "wrong"


def test_without_a_compiler_there_are_no_peaks_and_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    peak.load_loops.cache_clear()
    try:
        assert (
            tiny(tmp_path, "--groups", "attention", "decode", "--passes", "forward", "--contenders", "ours", "read")
            == 0
        )
    finally:
        peak.load_loops.cache_clear()
    said = capsys.readouterr().out
    assert "no peaks were measured: there is no C++ compiler (no-such-compiler is not on PATH)" in said
    assert "No shares of a peak" in said
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["ceilings"] is None
    assert {result["peak_share"] for result in kept["results"]} == {None}
    read = [result["status"] for result in kept["results"] if result["contender"] == "read loop"]
    assert set(read) == {"unavailable"}
    assert not (tmp_path / "roofline.png").exists()


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    peak.load_loops.cache_clear()
    try:
        assert peak.load_loops()[0] is None
        assert "false does not build peak.cpp" in peak.load_loops()[1]
    finally:
        peak.load_loops.cache_clear()


def test_a_short_call_asks_for_no_backend() -> None:
    results = measured(case_of("tiny", kind="call", batch=1, length=4))
    assert [result.status for result in results.values()] == ["timed", "timed"]
    assert results["sdpa"].launches > 1


def test_threads_are_those_asked_for_and_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--groups", "attention", "--passes", "forward", "--contenders", "flash")
    assert tiny(tmp_path, *sizes, "--threads", "2") == 0
    assert torch.get_num_threads() == 2
    assert "2 CPU threads" in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text())["environment"]["threads"] == 2


# A run ---------------------------------------------------------------------------------------------------------------


def tiny(out: Path, *more: str) -> int:
    sizes = (
        "--presets",
        "gpt2",
        "llama-3-8b",
        "--lengths",
        "16",
        "--tokens",
        "32",
        "--repeats",
        "3",
        "--dtypes",
        "fp32",
    )
    return cli.main(["--device", "cpu", *sizes, "--out", str(out), *more])


def test_a_small_run_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert tiny(tmp_path) == 0
    said = capsys.readouterr().out
    assert "### attention, forward+backward, float32" in said
    assert "### module, forward, float32" in said
    assert "gpt2 2x16 causal" in said
    assert "vs flash" in said
    assert "sdpa-cudnn" in said  # once, among those that were not timed

    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["environment"]["threads"] == torch.get_num_threads()
    assert kept["environment"]["torch"] == torch.__version__
    timed = [result for result in kept["results"] if result["status"] == "timed"]
    assert {result["status"] for result in kept["results"]} == {"timed", "unavailable"}
    assert {(result["kind"], result["training"]) for result in timed} == ON_CPU
    for result in timed:
        low, high = result["quartiles"]
        assert 0 < result["fastest"] <= low <= result["seconds"] <= high
        assert result["error"] < harness.tolerance(torch.float32)
    assert "### every contender" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    if peak.load_loops()[0]:
        assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")


def test_a_budget_ends_a_run_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny(tmp_path, "--budget", "0") == 0
    assert "35 of 35 cases left out" in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text())["results"] == []


def test_a_wrong_answer_of_ours_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mha_ext.attention", lambda query, *_, **__: 2 * query)
    assert tiny(tmp_path, "--groups", "attention", "--passes", "forward", "--contenders", "ours") == 1


def test_a_failure_of_the_benchmark_itself_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such layout")

    monkeypatch.setattr("mha_ext.MultiHeadAttention.from_torch", broken)
    assert tiny(tmp_path, "--groups", "module", "parts", "--passes", "forward") == 1
    report_text = (tmp_path / "report.md").read_text()
    assert "failed: no such layout" in report_text
    assert "qkv_split" in report_text


@pytest.mark.gpu
def test_a_small_run_on_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    sizes = ("--presets", "gpt2", "--lengths", "128", "--tokens", "512", "--repeats", "3", "--budget", "60")
    assert cli.main(["--device", "cuda", *sizes, "--out", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / "results.json").read_text())
    ours = [result for result in kept["results"] if result["status"] == "timed" and result["ours"]]
    assert ours
    assert all(0 < result["roofline_share"] <= 1.2 and result["peak_bytes"] > 0 for result in ours)


# Tables and the script -----------------------------------------------------------------------------------------------


def result_of(
    contender: str, seconds: float, spread: float = 0.0, case: Case | None = None, yardstick: bool = False
) -> harness.Result:
    quartiles = (seconds * (1 - spread), seconds * (1 + spread))
    return harness.Result(
        case or case_of(), contender, contender.startswith("ours"), "timed", error=1e-7, seconds=seconds,
        quartiles=quartiles, fastest=seconds, samples=3, launches=1, input_sets=1, yardstick=yardstick,
    )  # fmt: skip


def test_table_is_aligned_and_compares_with_the_best_and_with_each() -> None:
    results = tuple(itertools.starmap(result_of, [("ours-x", 2e-3), ("sdpa-math", 6e-3), ("sdpa-flash", 1e-3)]))
    lines = report.Report({}, None, results).summary_lines()
    table = lines[3 : lines.index("", 3)]
    assert len({len(line) for line in table}) == 1
    cells = [cell.strip() for cell in table[2].strip("|").split("|")]
    # 4 * 2 * 12 * 24 * 24 * 64 / 2 operations in 2 ms
    assert cells == [
        "gpt2 2x24 causal", "x", "2.00", "0%", "0.885", "-", "flash", "1.00", "0.50", "3.00", "0.50", "1.00",
    ]  # fmt: skip
    assert not any("UNRELIABLE" in line for line in lines)


def test_masks_decoding_and_the_peak_by_hand() -> None:
    ceilings = roofline.Ceilings(1e9, {torch.float32: 1e9}, "as if")
    window = case_of("bert-base", kind="mask", mask="window")  # 24 * 12 - 12 * 11 / 2 = 222 of 576 pairs
    decode = case_of("llama-7b", kind="decode", mask="full")
    results = (
        result_of("ours-x", 2e-3, case=window),
        result_of("sdpa-flash", 3e-3, case=window),
        result_of("no mask, ours-x", 4e-3, case=window, yardstick=True),
        result_of("ours-x", 2e-3, case=decode),
        result_of("sdpa-math", 1e-2, case=decode),
        result_of("read loop", 1e-3, case=decode, yardstick=True),
    )
    made = report.Report({"device_type": "cpu"}, ceilings, results)
    masks, decoding, together = (
        [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        for lines in (*(made.summary_table(names[0], rows) for names, rows in made.tables().items()), made.together())
    )
    flops = 4 * 2 * 12 * 222 * 64
    assert dict(zip(masks[0], masks[2], strict=True)) == {
        "case": "bert-base 2x24 window", "ours": "x", "ms": "3.00", "±": "0%", "GFLOP/s": f"{flops / 2e6:.3f}",
        "peak": f"{flops / 2e6:.0%}", "mask costs": f"{2 / 4 * 576 / 222 - 1:.0%}", "best other": "flash",
        "speed-up": "1.50", "error / torch's": "1.00",
    }  # fmt: skip
    assert dict(zip(decoding[0], decoding[2], strict=True))["of read loop"] == "50%"
    assert ["forward, float32", "sdpa-flash", "1", "1.50", "1.50", window.label] in together
    assert ["forward, float32", "sdpa-math", "1", "5.00", "5.00", decode.label] in together
    assert ["forward, float32", "error / torch's", "2", "-", "1.00", window.label] in together


def test_a_gpus_columns_by_hand() -> None:
    ceilings = roofline.Ceilings(1e12, {torch.float32: 1e12}, "as if")
    ours = dataclasses.replace(result_of("ours-x", 2e-3), peak_bytes=3 << 20)
    made = report.Report({"device_type": "cuda"}, ceilings, (ours, result_of("sdpa-math", 6e-3)))
    header, _, row = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in made.summary_table("attention", made.results)
    )
    cells = dict(zip(header, row, strict=True))
    floor = max(4 * 2 * 12 * 24 * 24 * 64 / 2, 4 * 2 * 12 * 24 * (4 * 64 + 1)) / 1e12
    assert (cells["roofline"], cells["MiB"], cells["TFLOP/s"]) == (f"{floor / 2e-3:.0%}", "3", "0.001")
    assert "peak" not in cells


def test_a_busy_machine_is_mentioned() -> None:
    lines = report.Report({}, None, (result_of("ours-x", 2e-3, spread=0.5),)).summary_lines()
    assert "UNRELIABLE: 1 of 1 times" in lines[-1]


@pytest.mark.skipif(os.name != "posix" or shutil.which("bash") is None, reason="needs bash")
def test_gpu_check_is_a_valid_script() -> None:
    script = Path(cli.__file__).with_name("gpu_check.sh")
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
