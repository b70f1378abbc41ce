"""The short way of small calls on the CPU (csrc/api/cpu/direct.cpp): what takes it, what does not, and that nobody can
tell which way a call went.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mha_ext
from mha_ext import functional
from mha_ext._extension import extension

pytestmark = pytest.mark.skipif(extension is None, reason="no extension was built")


class Ways:
    """Which way calls go, counted."""

    def __init__(self, direct: Callable[..., Any]) -> None:
        self.direct, self.tried, self.taken = direct, 0, 0

    def __call__(self, *arguments: Any) -> Any:
        output = self.direct(*arguments)
        self.tried += 1
        self.taken += output is not None
        return output


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    counted = Ways(functional._direct)
    monkeypatch.setattr(functional, "_direct", counted)
    monkeypatch.setattr(mha_ext.backends, "_environment", None)
    return counted


def tensors(
    dtype: torch.dtype = torch.float32, batch: int = 2, heads: int = 4, heads_kv: int = 2, seqlen: int = 9,
    seqlen_kv: int = 13, head_dim: int = 16, head_dim_v: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    shapes = ((heads, seqlen, head_dim), (heads_kv, seqlen_kv, head_dim), (heads_kv, seqlen_kv, head_dim_v))
    return tuple(torch.randn(batch, *shape, generator=generator).to(dtype) for shape in shapes)  # type: ignore[return-value]


def by_rows(x: Tensor) -> Tensor:
    """Rows outside of heads in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


LENGTHS = torch.tensor([13, 5])
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "scale, an int": {"scale": 2},
    "scale -1": {"scale": -1},
    "gqa": {"enable_gqa": True},
    "dropout 0, an int": {"dropout_p": 0},
    "deterministic": {"deterministic": True},
    "window": {"window": (3, 2)},
    "window, one side": {"window": (None, 1)},
    "window, causal": {"window": (4, 7), "is_causal": True},
    "wide window": {"window": (2**31, 0)},
    "q_offset": {"q_offset": 3, "is_causal": True},
    "negative q_offset": {"q_offset": -4, "is_causal": True},
    "end": {"q_offset": "end", "is_causal": True},
    "lengths": {"key_lengths": LENGTHS},
    "no keys": {"key_lengths": torch.tensor([0, 13])},
    "lengths, causal": {"key_lengths": LENGTHS, "is_causal": True, "q_offset": "end"},
    "softcap": {"softcap": 5.0},
    "softcap, an int": {"softcap": 5},
    "bool mask": {"attn_mask": torch.arange(13).repeat(9, 1) % 3 > 0},
    "padding mask": {"attn_mask": (torch.arange(13) < LENGTHS[:, None])[:, None, None]},
    "bias": {"attn_mask": torch.linspace(-2, 2, 4 * 9 * 13).view(4, 9, 13)},
    "bias of one row": {"attn_mask": torch.linspace(-2, 2, 13)},
    "one bias": {"attn_mask": torch.tensor(0.5)},
    "transposed bias": {"attn_mask": torch.linspace(-2, 2, 13 * 9).view(13, 9).mT},
    "expanded bias": {"attn_mask": torch.linspace(-2, 2, 13).expand(2, 4, 9, 13)},
    "half bias": {"attn_mask": torch.linspace(-2, 2, 9 * 13).view(9, 13).half()},
    "bfloat16 bias": {"attn_mask": torch.linspace(-2, 2, 9 * 13).view(9, 13).bfloat16(), "is_causal": True},
}


def both(ways: Ways, monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """A call by the short way, and by the ordinary one."""
    taken = ways.taken
    short = mha_ext.attention(*args, **kwargs)
    assert ways.taken == taken + 1
    with monkeypatch.context() as patch:
        patch.setattr(functional, "_direct", None)
        ordinary = mha_ext.attention(*args, **kwargs)
    assert isinstance(short, Tensor)
    assert isinstance(ordinary, Tensor)
    return short, ordinary


def check_same(short: Tensor, ordinary: Tensor) -> None:
    assert type(short) is Tensor
    for fact in (lambda x: x.dtype, Tensor.size, Tensor.stride, Tensor.is_inference, lambda x: x.requires_grad):
        assert fact(short) == fact(ordinary)
    assert torch.equal(short.contiguous().view(torch.uint8), ordinary.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_results_are_those_of_the_ordinary_way(
    form: str, dtype: torch.dtype, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_same(*both(ways, monkeypatch, *tensors(dtype), **FORMS[form]))


SHAPES: dict[str, dict[str, int]] = {
    "one element": {"batch": 1, "heads": 1, "heads_kv": 1, "seqlen": 1, "seqlen_kv": 1, "head_dim": 1, "head_dim_v": 1},
    "tiny": {"batch": 1, "heads": 1, "heads_kv": 1, "seqlen": 4, "seqlen_kv": 4, "head_dim": 8, "head_dim_v": 8},
    "two threads": {"batch": 1, "seqlen": 150, "seqlen_kv": 170, "head_dim": 64, "head_dim_v": 40},
    "splits of keys": {"batch": 1, "seqlen": 1, "seqlen_kv": 3000, "head_dim": 64, "head_dim_v": 64},
    "widest": {"batch": 1, "head_dim": 256, "head_dim_v": 256},
}


@pytest.mark.parametrize("layout", ["heads outside", "rows outside"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_and_layouts(shape: str, layout: str, ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors(**SHAPES[shape])
    inputs = tuple(map(by_rows, inputs)) if layout == "rows outside" else inputs  # type: ignore[assignment]
    short, ordinary = both(ways, monkeypatch, *inputs, is_causal=True, q_offset="end")
    check_same(short, ordinary)
    heads_are_outside = short.stride(1) >= short.stride(2)
    assert heads_are_outside == (inputs[0].stride(1) >= inputs[0].stride(2))


def test_expanded_keys(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    check_same(*both(ways, monkeypatch, q, k[:1].expand(2, -1, -1, -1), v[:, :1].expand(-1, 2, -1, -1)))


def test_parameters_without_gradient(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = map(nn.Parameter, tensors())
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            check_same(*both(ways, monkeypatch, q, k, v))
    with torch.no_grad():
        check_same(*both(ways, monkeypatch, q, k, v, attn_mask=nn.Parameter(torch.zeros(9, 13))))


# --- with a gradient ------------------------------------------------------------------------------


def gradients(q: Tensor, k: Tensor, v: Tensor, again: bool = False, **kwargs: Any) -> tuple[Tensor, ...]:
    """Output and gradients, and those of the gradients' squares where they are differentiated `again`."""
    inputs = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in (q, k, v)]
    output = mha_ext.attention(*inputs, **kwargs)
    assert isinstance(output, Tensor)
    assert output.requires_grad
    weights = torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype)
    first = torch.autograd.grad(output, inputs, weights, create_graph=again)
    second = torch.autograd.grad(sum(x.float().square().sum() for x in first), inputs) if again else ()
    return output.detach(), *(x.detach() for x in first), *second


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_ordinary_way(
    form: str, dtype: torch.dtype, again: bool, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = gradients(*tensors(dtype), again, **FORMS[form])
    assert ways.taken == 1
    monkeypatch.setattr(functional, "_direct", None)
    for x, y in zip(short, gradients(*tensors(dtype), again, **FORMS[form]), strict=True):
        check_same(x, y)


@pytest.mark.parametrize("layout", ["heads outside", "rows outside"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_shapes_and_layouts(shape: str, layout: str, ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors(**SHAPES[shape])
    inputs = tuple(map(by_rows, inputs)) if layout == "rows outside" else inputs  # type: ignore[assignment]
    short = gradients(*inputs, is_causal=True, q_offset="end")
    assert ways.taken == 1
    monkeypatch.setattr(functional, "_direct", None)
    for x, y in zip(short, gradients(*inputs, is_causal=True, q_offset="end"), strict=True):
        check_same(x, y)


def test_only_the_inputs_that_want_a_gradient_get_one(ways: Ways) -> None:
    expected = gradients(*tensors())[1:]
    for which in range(3):
        inputs = list(tensors())
        inputs[which].requires_grad_()
        output = mha_ext.attention(*inputs)
        assert isinstance(output, Tensor)
        output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
        for i, x in enumerate(inputs):
            if i == which:
                torch.testing.assert_close(x.grad, expected[i], atol=0, rtol=0)
            else:
                assert x.grad is None
    assert ways.taken == 4


def test_a_graph_is_freed_and_kept_as_any_other(ways: Ways) -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    output = mha_ext.attention(q, k, v)
    assert isinstance(output, Tensor)
    once = torch.autograd.grad(output.sum(), q, retain_graph=True)[0]  # sum's gradient is expanded: strides of 0
    twice = torch.autograd.grad(output.sum(), q)[0]
    assert torch.equal(once, twice)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.sum().backward()
    output = mha_ext.attention(q, k, v)
    assert isinstance(output, Tensor)
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    assert ways.taken == 2


def test_saved_tensors_that_are_hooked_go_the_ordinary_way(ways: Ways) -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        mha_ext.attention(q, k, v)
    assert (ways.tried, ways.taken) == (1, 0)
    output = torch.utils.checkpoint.checkpoint(mha_ext.attention, q, k, v, use_reentrant=False)
    assert isinstance(output, Tensor)
    output.sum().backward()
    assert ways.taken == 0


def test_the_profiler_sees_the_operator_of_the_backward(ways: Ways) -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    output = mha_ext.attention(q, k, v)
    assert isinstance(output, Tensor)
    assert ways.taken == 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        output.sum().backward()
    assert "mha_ext::attention_backward_cpu" in {event.key for event in profile.key_averages()}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_autograd_traces_the_backward(ways: Ways) -> None:
    from torch._dynamo import compiled_autograd

    q, k, v = (x.requires_grad_() for x in tensors())
    expected = torch.autograd.grad(mha_ext.attention(q, k, v, is_causal=True), (q, k, v), torch.ones_like(q))
    graphs = []

    def compiler(graph: torch.fx.GraphModule) -> Callable[..., Any]:
        graphs.append(str(graph.graph))
        return graph.forward

    output = mha_ext.attention(q, k, v, is_causal=True)
    assert isinstance(output, Tensor)
    assert ways.taken == 2
    with compiled_autograd._enable(compiler):
        output.backward(torch.ones_like(output))
    assert len(graphs) == 1
    for x, gradient in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(x.grad, gradient, atol=0, rtol=0)


# --- what is left to the ordinary way -------------------------------------------------------------

Q, K, V = tensors()


class Subclass(Tensor):
    pass


class Watching(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def call(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: mha_ext.attention(*args, **kwargs)


DECLINED: dict[str, Callable[[], Any]] = {
    "float64": call(Q.double(), K.double(), V.double()),
    "mixed dtypes": call(Q, K, V.half()),
    "integers": call(Q.long(), K.long(), V.long()),
    "three axes": call(Q[0], K[0, :1].expand(4, -1, -1), V[0, :1].expand(4, -1, -1)),
    "strided rows": call(Q.transpose(2, 3).contiguous().transpose(2, 3), K, V),
    "no batch": call(Q[:0], K[:0], V[:0]),
    "no queries": call(Q[:, :, :0], K, V),
    "no keys": call(Q, K[:, :, :0], V[:, :, :0]),
    "heads that do not divide": call(Q[:, :3], K, V),
    "another length of value": call(Q, K, V[:, :, 1:]),
    "another head dimension": call(Q, K[..., :8], V),
    "another batch": call(Q, K[:1], V[:1]),
    "head dimension over 256": call(*tensors(head_dim=257)),
    "meta": call(Q.to("meta"), K.to("meta"), V.to("meta")),
    "sparse": call(Q.to_sparse(), K, V),
    "negative bit": call(torch._neg_view(Q), K, V),
    "a subclass": call(Q.as_subclass(Subclass), K, V),
    "no tensor": call(Q.tolist(), K, V),
    "gradient of the mask": call(Q, K, V, torch.zeros(9, 13, requires_grad=True)),
    "mask of another shape": call(Q, K, V, torch.ones(9, 12, dtype=torch.bool)),
    "mask of five axes": call(Q, K, V, torch.ones(1, 2, 4, 9, 13, dtype=torch.bool)),
    "mask of integers": call(Q, K, V, torch.ones(9, 13, dtype=torch.int64)),
    "float64 mask": call(Q, K, V, torch.zeros(9, 13, dtype=torch.float64)),
    "mask that is no tensor": call(Q, K, V, [1]),
    "dropout": call(Q, K, V, dropout_p=0.1),
    "dropout_p False": call(Q, K, V, dropout_p=False),
    "dropout_p NaN": call(Q, K, V, dropout_p=float("nan")),
    "is_causal 1": call(Q, K, V, is_causal=1),
    "enable_gqa 1": call(Q, K, V, enable_gqa=1),
    "deterministic 1": call(Q, K, V, deterministic=1),
    "scale True": call(Q, K, V, scale=True),
    "scale inf": call(Q, K, V, scale=float("inf")),
    "scale beyond a double": call(Q, K, V, scale=10**400),
    "scale, a string": call(Q, K, V, scale="1"),
    "window, a list": call(Q, K, V, window=[1, 1]),
    "window of three": call(Q, K, V, window=(1, 1, 1)),
    "negative window": call(Q, K, V, window=(-1, 1)),
    "window of bools": call(Q, K, V, window=(True, 1)),
    "window beyond any position": call(Q, K, V, window=(2**62, 0)),
    "window beyond 64 bits": call(Q, K, V, window=(2**64, 1)),
    "q_offset beyond": call(Q, K, V, q_offset=2**31),
    "q_offset 1.0": call(Q, K, V, q_offset=1.0),
    "q_offset True": call(Q, K, V, q_offset=True),
    "q_offset, another word": call(Q, K, V, q_offset="start"),
    "q_offset, a tensor": call(Q, K, V, q_offset=torch.tensor([1, 2])),
    "lengths of int32": call(Q, K, V, key_lengths=LENGTHS.int()),
    "lengths of another batch": call(Q, K, V, key_lengths=LENGTHS[:1]),
    "lengths of floats": call(Q, K, V, key_lengths=LENGTHS.float()),
    "strided lengths": call(Q, K, V, key_lengths=torch.tensor([13, 0, 5, 0])[::2]),
    "lengths, a list": call(Q, K, V, key_lengths=[13, 5]),
    "softcap 0": call(Q, K, V, softcap=0.0),
    "softcap inf": call(Q, K, V, softcap=float("inf")),
    "slopes": call(Q, K, V, alibi_slopes=torch.ones(4)),
    "sinks": call(Q, K, V, sinks=torch.ones(4)),
    "return_lse": call(Q, K, V, return_lse=True),
    "return_weights": call(Q, K, V, return_weights=True),
    "return_stats": call(Q, K, V, return_stats=True),
    "return_lse None": call(Q, K, V, return_lse=None),
}


def outcome(function: Callable[[], Any]) -> Any:
    """What a call returns, or what it raises."""
    try:
        return function()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("form", DECLINED)
def test_other_forms_go_the_ordinary_way(form: str, ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    tried = outcome(DECLINED[form])
    assert (ways.tried, ways.taken) == (1, 0)
    monkeypatch.setattr(functional, "_direct", None)
    torch.manual_seed(5)
    ordinary = outcome(DECLINED[form])
    assert repr(tried) == repr(ordinary)


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        Watching,
        Dispatching,
        forward_ad.dual_level,
        lambda: torch.device("cpu"),
    ],
    ids=["autocast", "profiler", "function mode", "dispatch mode", "forward-mode derivatives", "default device"],
)
def test_whoever_listens_hears_the_operator(context: Callable[[], AbstractContextManager[Any]], ways: Ways) -> None:
    expected = mha_ext.attention(Q, K, V)
    assert ways.taken == 1
    with context():
        output = mha_ext.attention(Q, K, V)
    assert (ways.tried, ways.taken) == (2, 1)
    torch.testing.assert_close(output, expected, atol=2e-2, rtol=2e-2, check_dtype=False)
    assert mha_ext.attention(Q, K, V) is not None
    assert ways.taken == 2


def test_the_profiler_sees_the_operator() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        mha_ext.attention(Q, K, V)
    assert "mha_ext::attention_forward_cpu" in {event.key for event in profile.key_averages()}


def test_transforms_go_the_ordinary_way(ways: Ways) -> None:
    expected = mha_ext.attention(Q, K, V)
    torch.testing.assert_close(torch.vmap(mha_ext.attention)(Q[None], K[None], V[None])[0], expected)
    _, derivative = torch.func.jvp(lambda q: mha_ext.attention(q, K, V), (Q,), (torch.ones_like(Q),))
    assert derivative.shape == Q.shape
    assert ways.taken == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_a_graph_that_is_traced_holds_the_operator(ways: Ways) -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            output = mha_ext.attention(q, k, v, is_causal=True)
            assert isinstance(output, Tensor)
            return output

    for strict in (True, False):
        program = torch.export.export(Model(), (Q, K, V), strict=strict)
        assert "attention_forward_cpu" in str(program.graph)
    assert ways.taken == 0
    with torch.no_grad():
        traced = torch.jit.trace(Model(), (Q, K, V), check_trace=False)
    assert "attention_forward_cpu" in str(traced.inlined_graph)
    assert ways.taken == 0


def test_a_backend_that_is_asked_for_decides(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    mha_ext.attention(Q, K, V, backend="reference")
    with mha_ext.backends.use_backend("reference"):
        mha_ext.attention(Q, K, V)
    monkeypatch.setattr(mha_ext.backends, "_environment", "reference")
    mha_ext.attention(Q, K, V)
    assert ways.tried == 0
    monkeypatch.setattr(mha_ext.backends, "_environment", None)
    mha_ext.attention(Q, K, V)
    assert ways.taken == 1


def test_wrong_numbers_of_arguments_decline() -> None:
    assert extension is not None
    assert extension.attention_direct() is None
    assert extension.attention_direct(Q, K, V) is None
