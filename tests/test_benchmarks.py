"""The benchmark: its formulas against hand numbers, its cases, its judgement, and one small run from end to end."""

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import cli, contenders, harness, report, roofline
from benchmarks.cases import GROUPS, PLANS, PRESETS, Case, cases_of
from benchmarks.contenders import Contender, Workload

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(harness, "SAMPLE_SECONDS", {"cpu": 0.001, "cuda": 0.01})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads that wait for each other take most of the time
    yield
    torch.set_num_threads(threads)


def case_of(preset: str = "gpt2", **changes: object) -> Case:
    made = Case("attention", PRESETS[preset], 2, 24, torch.float32, PRESETS[preset].is_causal, training=False)
    return dataclasses.replace(made, **changes)


# Formulas ------------------------------------------------------------------------------------------------------------


def test_flops_of_attention_by_hand() -> None:
    llama = case_of("llama-2-70b", batch=1, length=8192, dtype=torch.bfloat16)
    assert roofline.case_flops(llama) == 1_099_511_627_776  # 1.10e12: causal counts half
    assert roofline.case_flops(dataclasses.replace(llama, is_causal=False)) == 2 * 1_099_511_627_776
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
    ceilings = roofline.Ceilings(4.3e12, {torch.bfloat16: 790e12})
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
        "llama-2-70b": (64, 8, 8192),
    }
    assert [name for name, preset in PRESETS.items() if not preset.is_causal] == ["bert-base", "bert-large"]


@pytest.mark.parametrize("key", PLANS, ids="-".join)
def test_every_plan_measures_all_presets_and_all_parts_both_ways(key: tuple[str, str]) -> None:
    cases = cases_of(PLANS[key])
    assert len(cases) == len(set(cases))
    assert {(case.kind, case.training) for case in cases} == set(
        itertools.product(itertools.chain(*GROUPS.values()), (False, True))
    )
    assert {case.preset.name for case in cases if case.kind == "attention"} == set(PRESETS)
    assert all(case.preset.num_heads == case.preset.num_kv_heads for case in cases if case.kind == "module")
    assert all(case.is_causal == case.preset.is_causal for case in cases)
    first = cases[: 2 * sum(len(kinds) for kinds in GROUPS.values())]
    assert len({(case.kind, case.training) for case in first}) == len(first), "a short run has some of everything"


def test_selection_by_hand() -> None:
    plan = dataclasses.replace(PLANS["cpu", "quick"], presets=("gpt2",), lengths=(128, 4096), tokens=512)
    cases = cases_of(plan, ["attention"], passes=(True,), is_causal=False)
    assert [case.label for case in cases] == ["gpt2 4x128 full", "gpt2 1x4096 full"]


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
    monkeypatch.setattr(contenders, "CHUNK", 7)
    results = measured(case_of("llama-2-70b", training=True), only=("math", "flash"))
    assert [result.status for result in results.values()] == ["timed", "timed"]
    assert max(result.error for result in results.values()) < 1e-6


def test_what_is_not_available_says_why() -> None:
    results = measured(case_of())
    assert results["sdpa-cudnn"].status == results["sdpa-efficient"].status == "unavailable"
    assert "CUDA" in results["sdpa-cudnn"].reason
    assert results["sdpa-flash"].status == results["ours-reference"].status == "timed"

    def refuse(*_: Tensor) -> Tensor:
        raise ValueError("too small a head")

    refused = measured(case_of(), Contender("made", True, refuse), only=("made",))["made"]
    assert (refused.status, refused.reason) == ("unavailable", "too small a head")


def test_a_backend_that_appears_is_measured_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mha_ext.backends.available", lambda: {"fused": "not on Tuesdays", "reference": None})
    results = measured(case_of(), only=("ours",))
    assert {name: result.status for name, result in results.items()} == {
        "ours-fused": "unavailable",
        "ours-reference": "timed",
    }
    assert results["ours-fused"].reason == "not on Tuesdays"


def test_score_matrices_that_do_not_fit_are_skipped_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "free_bytes", lambda _: 1000)
    results = measured(case_of())
    assert results["ours-reference"].status == results["sdpa-math"].status == "no memory"
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


# A run ---------------------------------------------------------------------------------------------------------------


def tiny(out: Path, *more: str) -> int:
    sizes = ("--presets", "gpt2", "llama-2-70b", "--lengths", "16", "--tokens", "32", "--repeats", "3")
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
    assert {(result["kind"], result["training"]) for result in timed} == set(
        itertools.product(itertools.chain(*GROUPS.values()), (False, True))
    )
    for result in timed:
        low, high = result["quartiles"]
        assert 0 < result["fastest"] <= low <= result["seconds"] <= high
        assert result["error"] < harness.tolerance(torch.float32)
    assert "### every contender" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")


def test_a_budget_ends_a_run_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny(tmp_path, "--budget", "0") == 0
    assert "22 of 22 cases left out" in capsys.readouterr().out
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


def result_of(contender: str, seconds: float, spread: float = 0.0) -> harness.Result:
    quartiles = (seconds * (1 - spread), seconds * (1 + spread))
    return harness.Result(
        case_of(), contender, contender.startswith("ours"), "timed", error=1e-7, seconds=seconds, quartiles=quartiles,
        fastest=seconds, samples=3, launches=1, input_sets=1,
    )  # fmt: skip


def test_table_is_aligned_and_compares_with_the_best_and_with_each() -> None:
    results = tuple(itertools.starmap(result_of, [("ours-x", 2e-3), ("sdpa-math", 6e-3), ("sdpa-flash", 1e-3)]))
    lines = report.Report({}, None, results).summary_lines()
    table = [line for line in lines if line.startswith("|")]
    assert len({len(line) for line in table}) == 1
    cells = [cell.strip() for cell in table[2].strip("|").split("|")]
    # 4 * 2 * 12 * 24 * 24 * 64 / 2 operations in 2 ms
    assert cells == ["gpt2 2x24 causal", "x", "2.00", "0%", "0.885", "flash", "1.00", "0.50", "3.00", "0.50"]
    assert not any("UNRELIABLE" in line for line in lines)


def test_a_busy_machine_is_mentioned() -> None:
    lines = report.Report({}, None, (result_of("ours-x", 2e-3, spread=0.5),)).summary_lines()
    assert "UNRELIABLE: 1 of 1 times" in lines[-1]


@pytest.mark.skipif(os.name != "posix" or shutil.which("bash") is None, reason="needs bash")
def test_gpu_check_is_a_valid_script() -> None:
    script = Path(cli.__file__).with_name("gpu_check.sh")
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
