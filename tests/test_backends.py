"""Which backend takes a call, who decides, and what is said about those that do not."""

import os
import subprocess
import sys
import tempfile
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

import mha_ext
from mha_ext import backends


@pytest.fixture
def query() -> torch.Tensor:
    return torch.randn(1, 2, 3, 4)


def test_what_no_kernel_takes_goes_to_the_reference_and_the_reason_is_given(query: torch.Tensor) -> None:
    explanation = backends.explain(query, query, query, return_weights=True)
    assert explanation.backend == "reference"
    assert list(explanation.reasons) == [backend.name for backend in backends.BACKENDS]
    assert explanation.reasons["reference"] is None
    reason = explanation.reasons["unfused"]
    assert reason is not None
    assert reason.startswith("kernels: ")
    assert "CPU" in reason


def test_the_explanation_can_be_read(query: torch.Tensor) -> None:
    lines = str(backends.explain(*[query.double()] * 3, is_causal=True)).splitlines()
    assert lines[-1] == "-> reference: takes this call"
    target = backends.cpu_target()
    assert lines[2].startswith(f"   cpu ({target}): dtype: " if target else "   cpu: device: ")
    lines = str(backends.explain(query, query, query)).splitlines()
    assert lines[0].startswith("   fused: kernels: ")
    assert lines[1].startswith("   unfused: kernels: ")


def test_the_fused_kernels_say_what_they_do_not_take() -> None:
    query, wide = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 257)
    for call, reason in (
        (((query.double(),) * 3, {}), "dtype: float64 has no kernel of this kind"),
        (((query,) * 3, {"return_weights": True}), "returned weights: return_weights asks for the weights"),
        (((wide, wide, query), {}), "head dimension: expected head dimensions from 1 to 256, got 257 (query)"),
        (((query, query, wide), {}), "head dimension: expected head dimensions from 1 to 256, got 257 (value)"),
    ):
        arguments, options = call
        said = backends.explain(*arguments, **options).reasons["fused"]
        assert said is not None
        assert said.startswith(reason)


def test_what_a_gpu_with_little_shared_memory_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = SimpleNamespace(shared_memory_per_block_optin=99 * 1024)  # sm_86, sm_89
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: offered)
    gpu = torch.device("cuda")
    assert backends._shared_memory_refusal(gpu, 99 * 1024) is None
    assert backends._shared_memory_refusal(gpu, 163 * 1024) == (
        "166912 bytes a block are needed, this GPU offers 101376"
    )
    needed: list[int] = []
    monkeypatch.setattr(backends, "_shared_memory_refusal", lambda device, size: needed.append(size // 1024))
    call = backends.make_call(*[torch.randn(1, 1, 2, 128, dtype=torch.float16)] * 3)
    backends._shared_memory(call, False)
    backends._shared_memory(call._replace(key=call.key.requires_grad_()), False)
    backends._shared_memory(backends.make_call(*[torch.randn(1, 1, 2, 136, dtype=torch.float16)] * 3), False)
    backends._shared_memory(backends.make_call(*[torch.randn(1, 1, 2, 256)] * 3), False)
    assert needed == [99, 163, 163]


def test_packed_and_nested_calls_are_explained(query: torch.Tensor) -> None:
    rows = torch.randn(10, 2, 8)
    offsets = torch.tensor([0, 4, 10])
    explanation = backends.explain(rows, rows, rows, cu_seqlens_q=offsets, cu_seqlens_k=offsets, is_causal=True)
    assert explanation.backend == ("cpu" if backends.has_cpu_kernels() else "reference")
    assert str(explanation.reasons["unfused"]).startswith("sequences: ")
    jagged = torch.nested.nested_tensor_from_jagged(rows, offsets).transpose(1, 2)
    assert backends.explain(jagged, jagged, jagged, is_causal=True).reasons == explanation.reasons


def test_every_backend_has_a_name_a_description_and_named_checks() -> None:
    names = [backend.name for backend in backends.BACKENDS]
    assert len(set(names)) == len(names)
    assert names[-1] == "reference", "the last resort takes everything"
    assert not backends.BACKENDS[-1].checks
    for backend in backends.BACKENDS[:-1]:
        assert backend.description
        checks = [name for name, _ in backend.checks]
        assert len(set(checks)) == len(checks) > 0


def test_a_backend_asked_for_by_name_says_why_it_does_not_compute(query: torch.Tensor) -> None:
    query = query.to("meta")  # a device that no build has kernels for, whether or not the simulated GPU is loaded
    with pytest.raises(ValueError, match=r"^backend: 'unfused' does not take this call: kernels: .* meta tensors"):
        mha_ext.attention(query, query, query, backend="unfused")
    explanation = backends.explain(query, query, query, backend="unfused")
    assert explanation.backend is None
    assert "would take this call, but is not chosen" in str(explanation)
    with backends.use_backend("unfused"):
        for part in (
            lambda: mha_ext.attention_scores(query, query),
            lambda: mha_ext.masked_softmax(query),
            lambda: mha_ext.attention_output(query[..., :3], query),
            lambda: mha_ext.qkv_split(query[0, :, :, 1:], None, 1),
        ):
            with pytest.raises(
                ValueError,
                match=r"^backend: 'unfused' does not take this call: this build has no kernels for meta tensors",
            ):
                part()


def test_the_context_decides_nests_and_ends(query: torch.Tensor) -> None:
    before = backends.requested()
    with backends.use_backend("reference"):
        assert backends.requested() == "reference"
        with backends.use_backend("unfused"):
            assert backends.requested() == "unfused"
        assert backends.requested() == "reference"
        assert mha_ext.attention(query, query, query).shape == query.shape
    assert backends.requested() == before


def test_the_context_ends_with_an_error_too() -> None:
    before = backends.requested()
    with pytest.raises(RuntimeError, match="inside"), backends.use_backend("reference"):
        raise RuntimeError("inside")
    assert backends.requested() == before


def test_the_context_reaches_other_threads() -> None:
    """The backward runs in another thread on a GPU."""
    seen: list[str | None] = []
    with backends.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(backends.requested()))
        thread.start()
        thread.join()
    assert seen == ["reference"]


def test_the_argument_overrules_the_context(query: torch.Tensor) -> None:
    with backends.use_backend("unfused"):
        assert backends.requested("reference") == "reference"
        output = mha_ext.attention(query, query, query, backend="reference")
        assert backends.explain(query, query, query, backend="reference").backend == "reference"
    torch.testing.assert_close(output, mha_ext.attention(query, query, query, backend="reference"))


@pytest.mark.parametrize("name", ["flash", "", "Reference", None])
def test_an_unknown_name_is_refused(name: object) -> None:
    context = backends.use_backend(name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^use_backend: expected one of fused, unfused, cpu, reference"), context:
        pass


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own, outside the source tree, which would hide an installed package."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=tempfile.gettempdir(),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_environment_decides_where_nothing_else_does() -> None:
    code = (
        "import mha_ext\n"
        "print(mha_ext.backends.requested(), mha_ext.backends.requested('unfused'))\n"
        "with mha_ext.backends.use_backend('unfused'): print(mha_ext.backends.requested())"
    )
    assert python(code, MHA_EXT_BACKEND="reference").stdout.split() == ["reference", "unfused", "unfused"]


def test_an_unknown_name_in_the_environment_is_refused_at_import() -> None:
    failed = python("import mha_ext", MHA_EXT_BACKEND="flash")
    assert failed.returncode != 0
    assert "MHA_EXT_BACKEND: expected one of fused, unfused, cpu, reference, got 'flash'" in failed.stderr


def test_available_says_what_this_machine_can_run() -> None:
    available = backends.available()
    assert list(available) == [backend.name for backend in backends.BACKENDS]
    assert available["reference"] is None
    if not torch.cuda.is_available():
        assert "no CUDA GPU" in (available["unfused"] or "")


def test_the_calls_that_need_plain_pytorch_are_recognised(kernels: str) -> None:
    """Under the kernels, transforms and forward mode are refused by name and taken by the reference otherwise."""
    query = torch.randn(1, 2, 3, 4, device=kernels)
    with pytest.raises(ValueError, match=r"transforms: torch\.func"):
        torch.func.vmap(lambda x: mha_ext.attention(x, x, x))(query[None])
    with forward_ad.dual_level(), pytest.raises(ValueError, match="transforms: forward-mode"):
        mha_ext.attention(query, query, query)
    with backends.use_backend("reference"):
        assert torch.func.vmap(lambda x: mha_ext.attention(x, x, x))(query[None]).shape == (1, 1, 2, 3, 4)


def test_both_backends_agree_on_the_whole_result(kernels: str) -> None:
    query = torch.randn(2, 4, 9, 16, device=kernels)
    arguments = {"is_causal": True, "softcap": 2.0, "return_lse": True, "return_weights": True, "return_stats": True}
    by_kernels = mha_ext.attention(query, query, query, **arguments)
    by_reference = mha_ext.attention(query, query, query, **arguments, backend="reference")
    for a, b in zip(by_kernels, by_reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_contexts_that_overlap_leave_nothing_behind() -> None:
    first, second = mha_ext.backends.use_backend("reference"), mha_ext.backends.use_backend("reference")
    before = mha_ext.backends.requested()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert mha_ext.backends.requested() == "reference"
    second.__exit__(None, None, None)
    assert mha_ext.backends.requested() == before


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("compute_80", (7, 5), False),
        ("compute_80", (12, 0), True),
        ("sm_120", (12, 0), True),
    ],
)
def test_which_gpu_runs_which_code(architecture: str, capability: tuple[int, int], runs: bool) -> None:
    assert mha_ext.backends.runs_on(architecture, *capability) is runs


def test_parts_under_a_transform_take_the_reference(kernels: str) -> None:
    query = torch.randn(1, 2, 3, 4, device=kernels)
    with pytest.raises(ValueError, match=r"transforms|forward-mode"):
        torch.func.jvp(mha_ext.attention_scores, (query, query), (query, query))


SHOW_TARGET = """
import torch, mha_ext
mha_ext.show_config()
q = torch.randn(1, 2, 4, 8)
print(mha_ext.backends.explain(q, q, q))
"""


@pytest.mark.skipif(not backends.has_cpu_kernels(), reason="no kernels for the CPU")
def test_the_instruction_set_in_force_is_named() -> None:
    shown = python(SHOW_TARGET, MHA_EXT_CPU_TARGET="portable", MHA_EXT_BACKEND="").stdout
    assert "\nCPU target     portable\n" in shown
    assert "\n-> cpu (portable): takes this call\n" in shown


@pytest.mark.skipif(not backends.has_cpu_kernels(), reason="no kernels for the CPU")
def test_an_instruction_set_that_is_not_there_is_no_crash() -> None:
    failed = python(SHOW_TARGET, MHA_EXT_CPU_TARGET="mmx", MHA_EXT_BACKEND="")
    why_not = "environment variable MHA_EXT_CPU_TARGET: expected one of"
    assert f"  cpu          not available: {why_not}" in failed.stdout
    assert "\nCPU target     none\n" in failed.stdout
    assert f"cpu ({why_not}" in failed.stdout  # explained, and refused by the call itself
    called = python(
        "import torch, mha_ext; q = torch.randn(1, 2, 4, 8); mha_ext.attention(q, q, q)", MHA_EXT_CPU_TARGET="mmx"
    )
    assert f"ValueError: {why_not}" in called.stderr


def test_every_call_of_a_run_is_explained(query: torch.Tensor) -> None:
    layers = torch.nn.ModuleList(mha_ext.MultiHeadAttention(8, 2) for _ in range(3))

    def run(x: torch.Tensor, last_needs_weights: bool) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return layers[0](x, need_weights=last_needs_weights)[0]

    x = torch.randn(2, 4, 8)
    calls = backends.explain(run, x, last_needs_weights=True)
    first = "cpu" if backends.has_cpu_kernels() else "reference"
    assert [call.backend for call in calls] == [first] * 3 + ["reference"]
    text = str(calls)
    assert text.startswith("3 calls\n   fused: ")
    assert "1 call\n   fused: " in text
    assert text.count("-> ") == 2
    assert [call.backend for call in backends.explain(run, x, False, backend="reference")] == ["reference"] * 4
    run(x, True)
    assert len(calls) == 4, "the run is over"


def test_runs_within_runs_and_runs_that_fail_are_explained(query: torch.Tensor) -> None:
    inner: list[backends.Explanations] = []

    def attend() -> None:
        mha_ext.attention(query, query, query)

    def outer() -> None:
        attend()
        inner.append(backends.explain(attend))

    assert len(backends.explain(outer)) == 2
    assert len(inner[0]) == 1
    with pytest.raises(ValueError, match="'unfused' does not take"):
        backends.explain(lambda: mha_ext.attention(*[query.to("meta")] * 3, backend="unfused"))
    assert backends.undecided(None)
    assert "no call of mha_ext" in str(backends.explain(torch.nn.Linear(4, 4), query))


def test_calls_that_return_weights_are_explained_too() -> None:
    x = torch.randn(2, 4, 8)
    for training in (True, False):
        mha = mha_ext.compat.MultiheadAttention(8, 2, dropout=0.1, batch_first=True).train(training)
        calls = [call.backend for call in backends.explain(mha, x, x, x)]
        assert calls[0] == "reference"
        assert len(calls) == (1 if training else 2)  # in training one draw makes both weights and output
