"""torch.compile and torch.export see one graph, and every operator keeps its promises to them."""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cases import BackendUnderTest
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mha_ext
from mha_ext import MultiHeadAttention
from mha_ext._extension import extension
from mha_ext.compat import MultiheadAttention


def inputs(device: str, dtype: torch.dtype = torch.float32, length: int = 5) -> list[Tensor]:
    shapes = ((2, 4, 3, 8), (2, 2, length, 8), (2, 2, length, 8))
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def assert_same(compiled: Any, function: Any, arguments: list[Tensor]) -> None:
    ours, eager = compiled(*arguments), function(*arguments)
    torch.testing.assert_close(ours, eager)
    for of_ours, of_eager in zip(
        torch.autograd.grad(ours.square().sum(), arguments),
        torch.autograd.grad(eager.square().sum(), arguments),
        strict=True,
    ):
        torch.testing.assert_close(of_ours, of_eager)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_one_graph(any_backend: BackendUnderTest, dtype: torch.dtype, dynamic: bool | None) -> None:
    torch.compiler.reset()
    lengths = torch.tensor([5, 3], device=any_backend.device)

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return mha_ext.attention(query, key, value, is_causal=True, key_lengths=lengths, softcap=3.0, q_offset="end")

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (5, 9):
        assert_same(compiled, function, inputs(any_backend.device, dtype, length))


def test_a_scale_that_changes_makes_no_new_break(any_backend: BackendUnderTest) -> None:
    torch.compiler.reset()
    arguments = inputs(any_backend.device)
    compiled = torch.compile(mha_ext.attention, fullgraph=True, backend="aot_eager")
    for scale in (0.5, 0.25, 0.125):
        torch.testing.assert_close(compiled(*arguments, scale=scale), mha_ext.attention(*arguments, scale=scale))


def test_packed_sequences_are_one_graph(fused_anywhere: str) -> None:
    torch.compiler.reset()
    cu_seqlens = torch.tensor([0, 4, 4, 9], dtype=torch.int32, device=fused_anywhere)
    arguments = [x[0].transpose(0, 1).detach().requires_grad_() for x in inputs(fused_anywhere, length=9)]
    arguments[0] = torch.randn(9, 4, 8, device=fused_anywhere, requires_grad=True)

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return mha_ext.attention_varlen(query, key, value, cu_seqlens, cu_seqlens, is_causal=True, q_offset="end")

    assert_same(torch.compile(function, fullgraph=True, backend="aot_eager"), function, arguments)


@pytest.mark.parametrize("part", ["qkv_split", "attention_scores", "masked_softmax", "attention_output"])
def test_the_parts_are_one_graph(backend: BackendUnderTest, part: str) -> None:
    torch.compiler.reset()
    query, key, value = inputs(backend.device)
    weights = torch.randn(2, 4, 3, 5, device=backend.device, requires_grad=True)
    packed, bias = (torch.randn(shape, device=backend.device, requires_grad=True) for shape in ((2, 5, 8), (8,)))
    calls: dict[str, tuple[Any, list[Tensor]]] = {
        "qkv_split": (lambda x, b: torch.cat(mha_ext.qkv_split(x, b, 2, 1), 1), [packed, bias]),
        "attention_scores": (mha_ext.attention_scores, [query, key]),
        "masked_softmax": (lambda s: mha_ext.masked_softmax(s, is_causal=True), [weights]),
        "attention_output": (mha_ext.attention_output, [weights, value]),
    }
    function, arguments = calls[part]
    assert_same(torch.compile(function, fullgraph=True, backend="aot_eager"), function, arguments)


def test_the_module_can_be_exported(any_backend: BackendUnderTest) -> None:
    module = mha_ext.MultiHeadAttention(16, 4, num_kv_heads=2).to(any_backend.device).eval()
    x = torch.randn(2, 6, 16, device=any_backend.device)
    program = torch.export.export(module, (x,), {"is_causal": True})
    torch.testing.assert_close(program.module()(x, is_causal=True), module(x, is_causal=True))


def test_a_compiled_call_follows_the_precision_of_products(any_backend: BackendUnderTest) -> None:
    torch.compiler.reset()
    arguments = [x.detach() for x in inputs(any_backend.device)]
    compiled = torch.compile(mha_ext.attention, fullgraph=True, backend="aot_eager")
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            assert torch.equal(compiled(*arguments), mha_ext.attention(*arguments)), precision
    finally:
        torch.set_float32_matmul_precision(before)


# --- no length is compiled twice ---------------------------------------------------------------------------------


class Compiled(NamedTuple):
    """A call, and what it takes besides query, key and value for sizes B, Lq and Lk."""

    call: Callable[..., Any]
    rest: Callable[[int, int, int], tuple[Tensor, ...]] = lambda b, q, k: ()


def several(result: mha_ext.AttentionResult) -> tuple[Tensor, ...]:
    return tuple(x for x in result if x is not None)


ATTENTION = mha_ext.attention
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
CALLS: dict[str, Compiled] = {
    "bool_mask_and_lse": Compiled(
        lambda q, k, v, mask: several(ATTENTION(q, k, v, mask, return_lse=True)),
        lambda b, q, k: (torch.rand(b, 1, q, k) > 0.3,),
    ),
    "bias_and_stats": Compiled(
        lambda q, k, v, bias: several(ATTENTION(q, k, v, bias, return_stats=True)),
        lambda b, q, k: (torch.randn(4, q, k).requires_grad_(),),
    ),
    "padding_and_window": Compiled(
        lambda q, k, v, keys: ATTENTION(q, k, v, keys[:, None, None], window=(2, 1), q_offset=1),
        lambda b, q, k: (torch.rand(b, k) > 0.3,),
    ),
    "dropout_and_end": Compiled(
        lambda q, k, v: ATTENTION(q, k, v, dropout_p=0.5, is_causal=True, q_offset="end", softcap=3.0)
    ),
    "offsets_and_lengths": Compiled(
        lambda q, k, v, offsets, lengths, slopes, sinks: ATTENTION(
            q, k, v, is_causal=True, q_offset=offsets, key_lengths=lengths, alibi_slopes=slopes, sinks=sinks
        ),
        lambda b, q, k: (torch.arange(b), torch.arange(b) + 1, torch.rand(4), torch.randn(4).requires_grad_()),
    ),
    "weights": Compiled(
        lambda q, k, v: several(ATTENTION(q, k, v, is_causal=True, q_offset="end", return_weights=True))
    ),
}  # fmt: skip
MODULES = {device: MultiHeadAttention(32, 4, num_kv_heads=2, device=device) for device in DEVICES}
CALLS["self_attention"] = Compiled(lambda q, k, v: MODULES[q.device.type](q.transpose(1, 2).flatten(2), is_causal=True))
CALLS["cross_attention"] = Compiled(
    lambda q, k, v, keys: MODULES[q.device.type](
        q.transpose(1, 2).flatten(2), torch.cat((k, v), 1).transpose(1, 2).flatten(2), key_mask=keys
    ),
    lambda b, q, k: (torch.rand(b, k) > 0.3,),
)


def arguments_of(compiled: Compiled, batch: int, length_q: int, length_k: int, device: str = "cpu") -> list[Tensor]:
    shapes = ((batch, 4, length_q, 8), (batch, 2, length_k, 8), (batch, 2, length_k, 8))
    tensors = [torch.randn(shape).requires_grad_() for shape in shapes] + list(compiled.rest(batch, length_q, length_k))
    return [x.detach().to(device).requires_grad_(x.requires_grad) for x in tensors]


def results_of(call: Callable[..., Any], arguments: list[Tensor]) -> tuple[Any, tuple[Tensor, ...]]:
    torch.manual_seed(1)
    result = call(*arguments)
    wanted = [x for x in arguments if x.requires_grad]
    output = result if isinstance(result, Tensor) else result[0]
    return result, torch.autograd.grad(output.square().sum(), wanted, materialize_grads=True)


@pytest.mark.parametrize("name", CALLS)
def test_new_lengths_compile_nothing_again(name: str) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS[name].call, fullgraph=True, backend=counter)
    for batch, length_q, length_k in ((2, 3, 5), (3, 7, 6), (5, 2, 9)):
        arguments = arguments_of(CALLS[name], batch, length_q, length_k)
        for x in arguments:
            for axis, size in enumerate(x.shape):
                if size in (batch, length_q, length_k) and (x.dim() < 4 or axis != 1):
                    torch._dynamo.mark_dynamic(x, axis)
        torch.testing.assert_close(results_of(compiled, arguments), results_of(CALLS[name].call, arguments))
    assert counter.frame_count == 1


def test_there_is_no_graph_break(packing_backend: BackendUnderTest) -> None:
    breaks = {}
    for name, compiled in CALLS.items():
        if name != "weights" or packing_backend.name == "reference":
            torch.compiler.reset()
            explained = torch._dynamo.explain(compiled.call)(*arguments_of(compiled, 2, 3, 5, packing_backend.device))
            breaks[name] = explained.graph_break_count
    assert not any(breaks.values()), breaks


def test_a_window_that_changes_is_compiled_once_more_at_most() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, left: mha_ext.attention(*x, window=(left, 0)), fullgraph=True, backend=counter)
    arguments = [x.detach() for x in inputs("cpu")]
    for left in (2, 3, 4, 5):
        torch.testing.assert_close(compiled(arguments, left), mha_ext.attention(*arguments, window=(left, 0)))
    assert counter.frame_count <= 2


def test_a_checkpoint_inside_of_a_compiled_function() -> None:
    torch.compiler.reset()
    mha, x = MultiHeadAttention(16, 4, 0.5), torch.randn(2, 5, 16, requires_grad=True)

    def function(x: Tensor) -> Any:
        return checkpoint(mha, x, use_reentrant=False)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results_of(compiled, [x]), results_of(mha, [x]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of inductor's own
def test_inductor_compiles_the_module() -> None:
    torch.compiler.reset()
    mha, x = MultiHeadAttention(16, 4, num_kv_heads=2), torch.randn(2, 5, 16, requires_grad=True)
    compiled = torch.compile(mha, fullgraph=True, dynamic=True)
    torch.testing.assert_close(results_of(compiled, [x]), results_of(mha, [x]))
    more = torch.randn(3, 8, 16, requires_grad=True)
    torch.testing.assert_close(results_of(compiled, [more]), results_of(mha, [more]))


# --- export ------------------------------------------------------------------------------------------------------

BATCH, LENGTH = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=512)


def gradients_of(module: nn.Module, *arguments: Any, **options: Any) -> list[Tensor | None]:
    module.zero_grad()
    module(*arguments, **options).square().sum().backward()
    return [x.grad for x in module.parameters()]


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_saved_loaded_and_trained(strict: bool) -> None:
    """For every length; the gradients are those of the module."""
    mha = MultiHeadAttention(16, 4, num_kv_heads=2)
    shapes = {"query": {0: BATCH, 1: LENGTH}, "is_causal": None}
    x = torch.randn(2, 6, 16)
    program = torch.export.export(mha, (x,), {"is_causal": True}, dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for size in ((3, 9, 16), (1, 1, 16)):
        x = torch.randn(size)
        torch.testing.assert_close(loaded(x, is_causal=True), mha(x, is_causal=True))
        expected = gradients_of(mha, x, is_causal=True)
        torch.testing.assert_close(gradients_of(loaded, x, is_causal=True), expected)


class Decoder(nn.Module):
    """Cross-attention with what a decoder gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(16, 4)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        output: Tensor = self.attention(
            x, memory, attn_mask=mask, key_lengths=lengths, is_causal=True, q_offset="end"
        )  # fmt: skip
        return output


def test_cross_attention_is_exported_for_every_length() -> None:
    def arguments(batch: int, length_q: int, length_k: int) -> tuple[Tensor, ...]:
        lengths = torch.arange(batch) + 2
        mask = torch.randn(length_q, length_k)
        return torch.randn(batch, length_q, 16), torch.randn(batch, length_k, 16), mask, lengths

    model, keys = Decoder(), torch.export.Dim("keys", min=1, max=512)
    shapes = ({0: BATCH, 1: LENGTH}, {0: BATCH, 1: keys}, {0: LENGTH, 1: keys}, {0: BATCH})
    program = torch.export.export(model, arguments(2, 6, 5), dynamic_shapes=shapes)
    more = arguments(4, 3, 8)
    torch.testing.assert_close(program.module()(*more), model(*more))


def test_a_program_exported_without_gradients_says_so() -> None:
    if extension is None:
        pytest.skip("no extension, and so no operators")
    mha, x = MultiHeadAttention(16, 4), torch.randn(2, 6, 16)
    with torch.no_grad():
        program = torch.export.export(mha, (x,)).module()
        torch.testing.assert_close(program(x), mha(x))
    output = program(x)
    torch.testing.assert_close(output, mha(x))
    with pytest.raises(RuntimeError, match="exported or traced without gradients"):
        output.sum().backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of inductor's own
def test_a_package_of_aot_inductor_calls_the_operator(tmp_path: Path) -> None:
    mha, x = MultiHeadAttention(16, 4, num_kv_heads=2).eval(), torch.randn(2, 6, 16)
    shapes = {"query": {0: BATCH, 1: LENGTH}, "is_causal": None}
    with torch.no_grad():
        program = torch.export.export(mha, (x,), {"is_causal": True}, dynamic_shapes=shapes)
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "mha.pt2"))
        model = torch._inductor.aoti_load_package(package)
        more = torch.randn(3, 9, 16)
        torch.testing.assert_close(model(more, is_causal=True), mha(more, is_causal=True))


def test_modules_are_made_and_called_on_fake_tensors() -> None:
    with FakeTensorMode():
        for options in ({}, {"kdim": 16, "vdim": 16, "bias": False}):
            mha, x = MultiHeadAttention(16, 4, **options), torch.randn(2, 5, 16)
            assert mha(x, is_causal=True).shape == (2, 5, 16)
            assert mha(x, x[:, :3]).shape == (2, 5, 16)


# --- a call never waits for the GPU -------------------------------------------------------------------------------


class NoSynchronisation(TorchDispatchMode):
    """Refuses what copies a value of a tensor into Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        assert name not in ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero"), name
        copies = name in ("aten::_to_copy", "aten::copy_") and (kwargs or {}).get("device") is not None
        assert not copies, f"{name} to {kwargs}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend_name", ["fused", "unfused"])
def test_kernels_are_launched_without_a_value_of_a_tensor(kernels: str, backend_name: str) -> None:
    """So that a CUDA graph can be captured; on the simulated GPU, whose tensors are the CPU's."""
    mha = MultiHeadAttention(32, 4, 0.5, num_kv_heads=2).to(kernels)
    lengths = torch.tensor([5, 3], device=kernels)
    with mha_ext.backends.use_backend(backend_name), NoSynchronisation():
        for call in CALLS.values():
            if backend_name == "unfused" or call is not CALLS["weights"]:
                results_of(call.call, arguments_of(call, 2, 3, 5, kernels))
        x = torch.randn(2, 5, 32, device=kernels, requires_grad=True)
        results_of(lambda x: mha(x, is_causal=True, key_lengths=lengths, q_offset=lengths - 5), [x])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("backend_name", ["fused", "unfused"])
def test_a_cuda_graph_draws_anew_at_every_replay(backend_name: str) -> None:
    torch.manual_seed(0)
    mha = MultiHeadAttention(64, 4, 0.5, device="cuda", dtype=torch.float16)
    x = torch.randn(2, 33, 64, device="cuda", dtype=torch.float16, requires_grad=True)

    def step() -> tuple[Tensor, Tensor]:
        output = mha(x, is_causal=True, backend=backend_name)
        return output, torch.autograd.grad(output.float().square().sum(), x)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, gradient = step()

    torch.cuda.manual_seed(5)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append((output.clone(), gradient.clone()))
    assert not torch.equal(seen[0][0], seen[1][0])
    torch.cuda.manual_seed(5)
    for replayed in seen:
        torch.testing.assert_close(step(), replayed)  # the same draws as outside of a graph


# --- every operator ----------------------------------------------------------------------------------------------

OPERATORS: dict[str, Any] = {
    "qkv_split": lambda x: (x[0, :, :, :8], x[0, 0, 0, :8], 2, 1),
    "qkv_merge": lambda x: (x, x[:, :2], x[:, :2], True),
    "matmul": lambda x: (x, x[:, :2], False, True, 0.5, 4, x.dtype, False, None),
    "masked_softmax": lambda x: (x, x > 0, None, None, None, None, None, 0, -1, 0, 2.0, 0.0, x.dtype, True),
    "masked_softmax_backward": lambda x: (
        x, None, None, x.softmax(-1), x, x.logsumexp(-1), None, None, None, 0, 2.0, 0.0, x.dtype, True, False, True
    ),
}  # fmt: skip


RULE: tuple[Any, ...] = (None, None, None, None, None, None, None, 0, -1, 0, 2.0, 0.0, 0.5, False)
RULE_BY_NAME = {"is_causal": True, "softcap": 2.0, "scale": 0.5}
OPERATORS["attention_forward"] = lambda x: (x, x[:, :2], x[:, :2], x[..., :1], *RULE, True, True)
OPERATORS["attention_backward"] = lambda x: (
    x, x[..., 0].contiguous(), x, x[:, :2], x[:, :2], x, x[..., 0].contiguous(), x[..., :2].contiguous(),
    x[..., :1], *RULE, False, True, False, False,
)  # fmt: skip


for name in ("attention_forward", "attention_backward"):
    OPERATORS[f"{name}_cpu"] = OPERATORS[name]
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def test_no_operator_is_forgotten() -> None:
    if extension is None:
        pytest.skip("no extension, and so no operators")
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("mha_ext::")}
    assert registered == {f"mha_ext::{name}" for name in OPERATORS}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.14's opcheck asks it
@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("length", [8, 5])
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(request: pytest.FixtureRequest, name: str, length: int, with_gradient: bool) -> None:
    if name.endswith("_cpu") and extension is None:
        pytest.skip("no extension, and so no operators")
    device = "cpu" if name.endswith("_cpu") else request.getfixturevalue("kernels")
    x = torch.randn(*((1, 2, 6, 8) if name == "qkv_split" else (2, 4, 6, length)), device=device)
    arguments = OPERATORS[name](x)
    if with_gradient and "backward" not in name:  # those of a backward have none
        arguments = tuple(
            arg.detach().clone().requires_grad_() if isinstance(arg, Tensor) and arg.is_floating_point() else arg
            for arg in arguments
        )
    torch.library.opcheck(getattr(torch.ops.mha_ext, name).default, arguments, test_utils=UTILITIES)


@pytest.mark.parametrize("suffix", ["", "_cpu"])
def test_the_operator_of_attention_has_the_derivative_of_the_function(
    request: pytest.FixtureRequest, suffix: str
) -> None:
    if suffix and extension is None:
        pytest.skip("no extension, and so no operators")
    device = "cpu" if suffix else request.getfixturevalue("fused")
    operator = getattr(torch.ops.mha_ext, f"attention_forward{suffix}")
    tensors = [*inputs(device), torch.randn(2, 4, 3, 5, device=device, requires_grad=True)]
    output, expected = operator(*tensors, *RULE, True, False)[0], mha_ext.attention(*tensors, **RULE_BY_NAME)
    torch.testing.assert_close(output, expected)
    first, theirs = (torch.autograd.grad(x.square().sum(), tensors, create_graph=True) for x in (output, expected))
    torch.testing.assert_close(first, theirs)
    torch.testing.assert_close(
        *(torch.autograd.grad(sum(g.square().sum() for g in grads), tensors) for grads in (first, theirs))
    )


@pytest.mark.parametrize("name", ["qkv_split", "qkv_merge", "matmul", "masked_softmax"])
def test_the_operators_of_the_parts_have_derivatives(kernels: str, name: str) -> None:
    x = torch.randn(*((1, 2, 6, 8) if name == "qkv_split" else (2, 4, 3, 4)), dtype=torch.float64, device=kernels)
    arguments = [
        arg.detach().clone().requires_grad_() if isinstance(arg, Tensor) and arg.is_floating_point() else arg
        for arg in OPERATORS[name](x)
    ]
    operator = getattr(torch.ops.mha_ext, name)
    places = [place for place, arg in enumerate(arguments) if isinstance(arg, Tensor) and arg.requires_grad]

    def call(*tensors: Tensor) -> Any:
        every = list(arguments)
        for place, tensor in zip(places, tensors, strict=True):
            every[place] = tensor
        outputs = operator(*every)
        if name != "masked_softmax":
            return outputs
        weights, _, lse, _, _ = outputs
        return weights, lse.masked_fill(lse == -math.inf, 0)

    assert gradcheck(call, [arguments[place] for place in places], fast_mode=True)
    assert gradgradcheck(call, [arguments[place] for place in places], fast_mode=True)


@pytest.mark.parametrize("name", ["attention_backward_cpu", "masked_softmax_backward"])
def test_the_operators_of_a_backward_say_that_they_have_no_derivative(
    request: pytest.FixtureRequest, name: str
) -> None:
    device = "cpu" if name.endswith("_cpu") else request.getfixturevalue("kernels")
    if extension is None:
        pytest.skip("no extension, and so no operators")
    x = torch.randn(2, 4, 6, 8, device=device, requires_grad=True)
    output = getattr(torch.ops.mha_ext, name)(*OPERATORS[name](x))[0]
    with pytest.raises(RuntimeError, match="have no derivative"):
        output.sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [MultiHeadAttention, MultiheadAttention])
def test_a_traced_module_can_be_trained(kind: type[torch.nn.Module], training: bool) -> None:
    module = kind(16, 4).train(training)
    inputs = [torch.randn(2, 6, 16)] * (1 if kind is MultiHeadAttention else 3)
    others = [torch.randn(2, 6, 16)] * len(inputs)

    def run(function: Any) -> tuple[Tensor, ...]:
        output = function(*others)
        output = output if isinstance(output, Tensor) else output[0]
        return output, *torch.autograd.grad(output.square().sum(), list(module.parameters()))

    for traced, eager in zip(run(torch.jit.trace(module, inputs)), run(module), strict=True):
        torch.testing.assert_close(traced, eager)
