"""`F.scaled_dot_product_attention` after activation: ours where a kernel takes the call, torch's own otherwise, and
nothing else changes.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from accuracy import FLOOR, assert_accurate
from operators import Operators
from oracle import to_array
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

import mha_ext
from mha_ext import _extension, backends, functional
from mha_ext.integrations import sdpa as provider

pytestmark = pytest.mark.skipif(_extension.extension is None, reason="no extension was built")

REGISTRY = hasattr(nn.attention, "register_flash_attention_impl")  # torch >= 2.11
OURS = ("mha_ext.attention_forward_cpu.default", "mha_ext.attention_forward.default")  # as graphs name them


@pytest.fixture
def activated() -> Iterator[None]:
    """Torch's attention replaced until the end of the test."""
    if REGISTRY:
        nn.attention.activate_flash_attention_impl("MHA_EXT")
        yield
        nn.attention.restore_flash_attention_impl()
    else:
        handle = provider.activate()
        yield
        handle.remove()


def is_ours(function: Callable[[], Any]) -> bool:
    """Whether a call goes to a kernel of ours."""
    with Operators() as operators:
        function()
    return any(name.startswith("mha_ext::attention_forward") for name in operators.names)


def tensors(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu", grad: bool = False
) -> list[Tensor]:
    """Query, key and value; of one shape where there is only one."""
    generator = torch.Generator().manual_seed(3)
    shapes = shapes * 3 if len(shapes) == 1 else (*shapes, *shapes[-1:])[:3]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(grad) for shape in shapes]


Q, K, V = tensors((2, 4, 9, 16), (2, 4, 13, 16))


# --- on and off -----------------------------------------------------------------------------------


@pytest.mark.skipif(not REGISTRY, reason="this torch has no registry of flash implementations")
def test_the_registry_turns_it_on_and_off_again_and_again() -> None:
    assert "MHA_EXT" in nn.attention.list_flash_attention_impls()
    assert nn.attention.current_flash_attention_impl() is None  # by import alone nothing is activated
    assert not is_ours(lambda: sdpa(Q, K, V))
    before = sdpa(Q, K, V)
    for _ in range(3):
        nn.attention.activate_flash_attention_impl("MHA_EXT")
        nn.attention.activate_flash_attention_impl("MHA_EXT")  # in place of itself
        assert nn.attention.current_flash_attention_impl() == "MHA_EXT"
        assert is_ours(lambda: sdpa(Q, K, V))
        nn.attention.restore_flash_attention_impl()
        assert nn.attention.current_flash_attention_impl() is None
        assert not is_ours(lambda: sdpa(Q, K, V))
        assert torch.equal(sdpa(Q, K, V), before)


def test_a_handle_does_it_without_the_registry() -> None:
    handle = provider.activate()
    try:
        assert is_ours(lambda: sdpa(Q, K, V))
        with pytest.raises(RuntimeError, match="replaced already"):
            provider.activate()
        assert is_ours(lambda: sdpa(Q, K, V))
    finally:
        handle.remove()
    assert not is_ours(lambda: sdpa(Q, K, V))


def test_without_kernels_nothing_is_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_extension, "extension", None)
    monkeypatch.setattr(_extension, "why_missing", "no C++ compiler")
    with pytest.raises(RuntimeError, match=r"no kernels to put in the place of torch's attention: no C\+\+ compiler"):
        provider.activate()
    assert not is_ours(lambda: sdpa(Q, K, V))


def test_what_was_traced_before_does_not_decide_later() -> None:
    """While it traces, torch keeps for each operator where a call goes."""
    from torch._dispatch.python import enable_python_dispatcher

    def traced() -> bool:
        with enable_python_dispatcher():
            sdpa(Q.to("meta"), K.to("meta"), V.to("meta"))
            return is_ours(lambda: sdpa(Q, K, V))

    assert not traced()
    handle = provider.activate()
    assert traced()
    handle.remove()
    assert not traced()
    assert provider._below_autograd not in provider._operator._dispatch_cache.values()


def test_graphs_on_disk_are_told_apart() -> None:
    before = torch.compiler.config.cache_key_tag
    handle = provider.activate()
    assert "MHA_EXT" in torch.compiler.config.cache_key_tag
    handle.remove()
    assert torch.compiler.config.cache_key_tag == before


# --- values and gradients -------------------------------------------------------------------------

Arguments = tuple[list[tuple[int, ...]], dict[str, Any]]
BOOL = torch.rand(9, 13, generator=torch.Generator().manual_seed(1)) > 0.3
BIAS = torch.randn(2, 1, 9, 13, generator=torch.Generator().manual_seed(2))
FORMS: dict[str, Arguments] = {
    "plain": ([(2, 4, 9, 16)], {}),
    "more keys": ([(2, 4, 9, 16), (2, 4, 13, 16)], {}),
    "causal": ([(2, 4, 9, 16)], {"is_causal": True}),
    "causal, more keys": ([(2, 4, 9, 16), (2, 4, 13, 16)], {"is_causal": True}),
    "causal, more queries": ([(2, 4, 13, 16), (2, 4, 9, 16)], {"is_causal": True}),
    "bool mask": ([(2, 4, 9, 16), (2, 4, 13, 16)], {"attn_mask": BOOL}),
    "a row that sees nothing": ([(2, 4, 9, 16), (2, 4, 13, 16)], {"attn_mask": BOOL & (torch.arange(9) != 4)[:, None]}),
    "padding mask": ([(2, 4, 9, 16), (2, 4, 13, 16)], {"attn_mask": BOOL[:2, None, None]}),
    "bias": ([(2, 4, 9, 16), (2, 4, 13, 16)], {"attn_mask": BIAS}),
    "bias with -inf": ([(2, 4, 9, 16), (2, 4, 13, 16)], {"attn_mask": BIAS.masked_fill(~BOOL, -math.inf)}),
    "scale": ([(2, 4, 9, 16)], {"scale": 0.3}),
    "grouped heads": ([(2, 4, 9, 16), (2, 2, 13, 16)], {"enable_gqa": True}),
    "wider value": ([(2, 4, 9, 16), (2, 4, 13, 16), (2, 4, 13, 24)], {}),
    "three axes": ([(3, 9, 16), (3, 13, 16)], {"attn_mask": BOOL}),
    "two axes": ([(9, 16), (13, 16)], {}),
    "five axes": ([(2, 3, 4, 9, 16), (2, 3, 4, 13, 16)], {"attn_mask": BOOL}),
    "a batch that broadcasts": ([(2, 4, 9, 16), (1, 4, 13, 16)], {}),
    "axes that broadcast": ([(4, 9, 16), (2, 4, 13, 16)], {"is_causal": True}),
    "no keys": ([(2, 4, 9, 16), (2, 4, 0, 16)], {}),
    "no batch": ([(0, 4, 9, 16)], {}),
    "no queries": ([(2, 4, 0, 16), (2, 4, 13, 16)], {}),
}


def run(inputs: list[Tensor], arguments: dict[str, Any]) -> list[Tensor]:
    """Output and gradients, that of a bias as well."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    mask = arguments.get("attn_mask")
    if mask is not None:
        mask = mask.to(inputs[0].device, copy=True)  # the simulated GPU knows what was allocated since it began
        if mask.is_floating_point():
            mask = mask.to(inputs[0].dtype).requires_grad_()
            inputs.append(mask)
    output = sdpa(*inputs[:3], **{**arguments, "attn_mask": mask})
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, weights)]


def check_values(form: str, dtype: torch.dtype, device: str) -> None:
    shapes, arguments = FORMS[form]
    inputs = tensors(*shapes, dtype=dtype, device=device)
    assert is_ours(lambda: run(inputs, arguments)) or inputs[0].numel() == 0
    ours = run(inputs, arguments)
    with sdpa_kernel(SDPBackend.MATH):
        expected = run([x.double() for x in inputs], arguments)
        plain = run(inputs, arguments)
    names = ("output", "gradient of query", "gradient of key", "gradient of value", "gradient of the mask")
    for name, x, y, by_torch in zip(names, ours, expected, plain, strict=False):
        assert x.dtype == dtype
        if y.numel():
            assert_accurate(x, to_array(y), by_torch, FLOOR[dtype], name)
        else:
            assert x.shape == y.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_torchs(form: str, dtype: torch.dtype, activated: None) -> None:
    check_values(form, dtype, "cpu")


@pytest.mark.parametrize("form", ["causal, more keys", "bias with -inf", "grouped heads", "five axes"])
def test_the_kernels_in_force_compute_it(form: str, fused_anywhere: str, activated: None) -> None:
    check_values(form, torch.float32, fused_anywhere)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_on_a_gpu(form: str, dtype: torch.dtype, activated: None) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    check_values(form, dtype, "cuda")


@pytest.mark.parametrize("layout", ["rows outside", "strided rows", "expanded"])
def test_inputs_of_any_strides(layout: str, activated: None) -> None:
    change: dict[str, Callable[[Tensor], Tensor]] = {
        "rows outside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "strided rows": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
    }
    inputs = [change[layout](x) for x in (Q, K, V)]
    assert is_ours(lambda: sdpa(*inputs))
    torch.testing.assert_close(sdpa(*inputs), sdpa(*(x.contiguous() for x in inputs)))


def test_everyday_calls_go_the_short_way(monkeypatch: pytest.MonkeyPatch, activated: None) -> None:
    monkeypatch.setattr(backends, "_environment", None)
    direct, taken = functional._direct, []
    monkeypatch.setattr(functional, "_direct", lambda *x: taken.append(direct(*x)) or taken[-1])
    for context in (nullcontext, torch.no_grad, torch.inference_mode):
        with context():
            sdpa(Q, K, V, is_causal=True)
            sdpa(Q.clone(), K, V, BOOL, scale=0.1)
    sdpa(Q.clone().requires_grad_(), K, V)
    assert len(taken) == 7
    assert all(isinstance(output, Tensor) for output in taken)


def test_dropout_draws_are_those_of_attention(activated: None) -> None:
    inputs = tensors((2, 4, 33, 16), grad=True)
    assert is_ours(lambda: sdpa(*inputs, dropout_p=0.4))
    torch.manual_seed(7)
    by_torchs_name = sdpa(*inputs, dropout_p=0.4)
    torch.manual_seed(7)
    assert torch.equal(by_torchs_name, mha_ext.attention(*inputs, dropout_p=0.4))
    ones = sdpa(*inputs[:2], torch.ones(2, 4, 33, 16), dropout_p=0.4)  # the sum of the weights that are left
    assert abs(ones.mean().item() - 1) < 0.1
    assert ones.std() > 0.05


# --- what is left to torch ------------------------------------------------------------------------


class Wrapper(Tensor):
    """Computes with the tensor that it holds, as DTensor does."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Wrapper":
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.namespace == "aten", f"{function} is unknown here"
        results = function(*(x.held if isinstance(x, Wrapper) else x for x in args), **(kwargs or {}))
        return tuple(map(Wrapper, results)) if isinstance(results, tuple) else Wrapper(results)


WIDE = tensors((1, 2, 3, 257))
LEFT: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "float64": ("float64 has no kernel", (Q.double(), K.double(), V.double()), {}),
    "head dimension": ("expected head dimensions from 1 to 256, got 257", (*WIDE,), {}),
    "mask and is_causal": ("attn_mask and is_causal are given together", (Q, K, V, BOOL), {"is_causal": True}),
    "half mask": ("attn_mask is torch.float16 and query torch.float32", (Q, K, V, BIAS.half()), {}),
    "mask of integers": ("attn_mask is torch.int64", (Q, K, V, BOOL.long()), {}),
    "mask of another shape": ("attn_mask: expected a shape that", (Q, K, V, BOOL[:, 1:]), {}),
    "heads that differ": ("differ in heads, and enable_gqa is False", (Q, K[:, :2], V[:, :2]), {}),
    "one head of keys": ("differ in heads, and enable_gqa is False", (Q, K[:, :1], V[:, :1]), {}),
    "heads that do not divide": ("number of heads that is a multiple", (Q, K[:, :3], V[:, :3]), {"enable_gqa": True}),
    "dtypes that differ": ("value: expected dtype", (Q, K, V.half()), {}),
    "devices that differ": ("value: expected device", (Q, K, V.to("meta")), {}),
    "one axis": ("query: expected at least 2 dimensions", (Q[0, 0, 0], K[0, 0, 0], V[0, 0, 0]), {}),
    "head dimensions that differ": ("key: expected shape", (Q, K[..., :8], V), {}),
    "integers": ("query: expected a dtype among", (Q.long(), K.long(), V.long()), {}),
    "complex": ("query: expected a dtype among", (Q.cfloat(), K.cfloat(), V.cfloat()), {}),
    "dropout_p over 1": ("dropout_p: expected", (Q, K, V), {"dropout_p": 1.5}),
}


def outcome(function: Callable[[], Any]) -> Any:
    """What a call returns, as bytes, or what it raises."""
    try:
        result = function()
    except Exception as error:
        return type(error), str(error)
    return result.shape, result.dtype, result.detach().contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize("form", LEFT)
def test_what_no_kernel_takes_is_torchs_own(form: str) -> None:
    reason, tensors, named = LEFT[form]
    expected = outcome(lambda: sdpa(*tensors, **named))
    full: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    full.update(named, **({"attn_mask": tensors[3]} if len(tensors) > 3 else {}))
    decision = provider.decide(*tensors[:3], **full)
    assert isinstance(decision, str)
    assert reason in decision
    handle = provider.activate()
    try:
        assert outcome(lambda: sdpa(*tensors, **named)) == expected
    finally:
        handle.remove()


def switched_off() -> AbstractContextManager[Any]:
    return torch.nn.attention.sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


@pytest.mark.parametrize("context", [lambda: sdpa_kernel(SDPBackend.MATH), switched_off])
def test_where_flash_attention_is_off_torchs_choice_stands(
    context: Callable[[], AbstractContextManager[Any]], activated: None
) -> None:
    with context():
        assert not is_ours(lambda: sdpa(Q, K, V))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert is_ours(lambda: sdpa(Q, K, V))
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert not is_ours(lambda: sdpa(Q, K, V))
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert is_ours(lambda: sdpa(Q, K, V))


def test_a_backend_that_is_asked_for_takes_what_it_can(activated: None) -> None:
    with backends.use_backend("reference"):
        assert not is_ours(lambda: sdpa(Q, K, V))
        assert torch.equal(sdpa(Q, K, V), mha_ext.attention(Q, K, V))
        assert torch.equal(sdpa(Q, K, V.double()[..., :0].float()), Q[..., :0])
    with backends.use_backend("cpu"):
        assert is_ours(lambda: sdpa(Q, K, V))
        assert sdpa(Q.double(), K.double(), V.double()).dtype == torch.float64  # attention itself would refuse


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's vmap
def test_transforms_are_torchs_own(activated: None) -> None:
    expected = sdpa(Q, K, V)
    torch.testing.assert_close(torch.func.vmap(sdpa)(Q[None], K[None], V[None])[0], expected)
    torch.testing.assert_close(torch.func.vmap(sdpa)(Q, K, V), expected)
    q = Q.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad(sdpa(q, K, V).sum(), q)
    torch.testing.assert_close(torch.func.grad(lambda q: sdpa(q, K, V).sum())(Q), by_autograd)


def test_forward_mode_is_torchs_own(activated: None) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(Q, torch.ones_like(Q))
        with pytest.raises(NotImplementedError, match="forward AD with _scaled_dot_product_flash_attention"):
            sdpa(dual, K, V)
        with sdpa_kernel(SDPBackend.MATH):
            assert forward_ad.unpack_dual(sdpa(dual, K, V)).tangent is not None


def test_second_derivatives(activated: None) -> None:
    def second(dtype: torch.dtype) -> Tensor:
        q = Q.to(dtype, copy=True).requires_grad_()
        (first,) = torch.autograd.grad(sdpa(q, K.to(dtype), V.to(dtype)).square().sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), q)[0]

    ours = second(torch.float32)
    with sdpa_kernel(SDPBackend.MATH):
        expected, plain = second(torch.float64), second(torch.float32)
    assert_accurate(ours, to_array(expected), plain, FLOOR[torch.float32])


def test_subclasses_with_operators_of_their_own_are_torchs(activated: None) -> None:
    output = sdpa(Wrapper(Q), Wrapper(K), Wrapper(V))
    assert isinstance(output, Wrapper)
    torch.testing.assert_close(output.held, sdpa(Q, K, V))
    with torch.inference_mode():
        assert isinstance(sdpa(Wrapper(Q), Wrapper(K), Wrapper(V)), Wrapper)


def test_subclasses_without_are_ours(activated: None) -> None:
    class Named(Tensor):
        pass

    q, k, v = (x.as_subclass(Named) for x in (Q, K, V))
    output = sdpa(q, k, v)
    assert type(output) is Named
    assert is_ours(lambda: sdpa(q, k, v))
    assert is_ours(lambda: sdpa(nn.Parameter(Q), nn.Parameter(K), nn.Parameter(V)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_and_meta_tensors_are_torchs(activated: None) -> None:
    parts = [torch.randn(n, 4, 16) for n in (3, 5)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    with sdpa_kernel(SDPBackend.MATH):
        output = sdpa(x, x, x)
    for part, out in zip(parts, output.transpose(1, 2).unbind(), strict=True):
        by_heads = part.transpose(0, 1)[None]
        torch.testing.assert_close(out, sdpa(by_heads, by_heads, by_heads)[0].transpose(0, 1))
    assert sdpa(Q.to("meta"), K.to("meta"), V.to("meta")).shape == Q.shape


def test_a_causal_bias_of_torch(activated: None) -> None:
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    for bias in (causal_lower_right(9, 13), causal_upper_left(9, 13)):
        torch.testing.assert_close(sdpa(Q, K, V, bias), sdpa(Q, K, V, bias._materialize()))
        assert is_ours(lambda bias=bias: sdpa(Q, K, V, bias))


# --- whoever listens, traces or wraps -------------------------------------------------------------


def test_autocast_casts_first(activated: None) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = sdpa(Q, K, V, BIAS)
        assert is_ours(lambda: sdpa(Q, K, V, BIAS))
    assert torch.equal(output, sdpa(*(x.bfloat16() for x in (Q, K, V, BIAS))))


def test_the_profiler_sees_the_operators(activated: None) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sdpa(Q, K, V)
    seen = {event.key for event in profile.key_averages()}
    assert {"aten::scaled_dot_product_attention", "mha_ext::attention_forward_cpu"} <= seen


def test_below_autograd_nothing_is_recorded(activated: None) -> None:
    """As in the body of an operator that brings its own derivative."""
    q = Q.clone().requires_grad_()
    with torch._C._AutoDispatchBelowAutograd():
        assert not sdpa(q, K, V).requires_grad
        assert not torch.ops.aten.scaled_dot_product_attention.default.decompose(q, K, V).requires_grad
    assert sdpa(q, K, V).requires_grad
    assert torch.ops.aten.scaled_dot_product_attention.default.decompose(q, K, V).requires_grad


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool, activated: None) -> None:
    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, dropout_p=0.3, is_causal=True)

    def gradients(function: Callable[..., Any]) -> list[Tensor | None]:
        inputs = tensors((2, 4, 9, 16), grad=True)
        torch.manual_seed(5)
        function(*inputs).square().sum().backward()
        return [x.grad for x in inputs]

    checkpointed = gradients(lambda *inputs: checkpoint(block, *inputs, use_reentrant=use_reentrant))
    torch.testing.assert_close(checkpointed, gradients(block))


def layer() -> nn.TransformerEncoderLayer:
    torch.manual_seed(2)
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)


def test_a_transformer_layer_trains_the_same() -> None:
    x, target = torch.randn(2, 3, 7, 32).unbind()
    padding = torch.arange(7) >= torch.tensor([7, 5, 2])[:, None]

    def trained() -> tuple[list[float], Tensor]:
        model = layer()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = (model(x, src_key_padding_mask=padding) - target)[~padding].square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model.self_attn.in_proj_weight.detach()

    losses, weight = trained()
    handle = provider.activate()
    try:
        assert is_ours(lambda: layer()(x, src_key_padding_mask=padding))
        ours, our_weight = trained()
    finally:
        handle.remove()
    assert ours[-1] < ours[0]
    torch.testing.assert_close(ours, losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(our_weight, weight, rtol=1e-3, atol=1e-4)


def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True) * 2


def graphs_of(function: Callable[..., Tensor], dynamic: bool | None) -> tuple[Callable[..., Tensor], list[str]]:
    """Compiled without generated code, and the names of the operators in its graphs, to be filled by calls."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    names: list[str] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler)
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic), names


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_compiled_function_is_one_graph_of_ours(mode: Any, dynamic: bool | None, activated: None) -> None:
    torch.compiler.reset()
    compiled, names = graphs_of(model, dynamic)
    for length in (9, 12, 14):
        inputs = tensors((2, 4, length, 16), grad=True)
        with mode():
            ours, eager = compiled(*inputs), model(*inputs)
        torch.testing.assert_close(ours, eager)
        assert ours.stride() == eager.stride()
        if mode is torch.enable_grad:
            gradients = (torch.autograd.grad(x.square().sum(), inputs) for x in (ours, eager))
            for of_ours, of_eager in zip(*gradients, strict=True):
                torch.testing.assert_close(of_ours, of_eager)
    assert OURS[0] in names
    assert not any("scaled_dot_product" in name for name in names)
    assert ("mha_ext.attention_backward_cpu.default" in names) is (mode is torch.enable_grad)


def test_a_compiled_function_that_turns_flash_off(activated: None) -> None:
    torch.compiler.reset()

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return sdpa(q, k, v)

    compiled, names = graphs_of(plain, None)
    torch.testing.assert_close(compiled(Q, K, V), sdpa(Q, K, V))
    assert OURS[0] not in names


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_traced_graph_runs_ours(mode: str, pre_dispatch: bool, activated: None) -> None:
    traced = make_fx(model, tracing_mode=mode, pre_dispatch=pre_dispatch)(Q, K, V)
    assert any(str(node.target) in OURS for node in traced.graph.nodes) is not pre_dispatch
    assert is_ours(lambda: traced(Q, K, V))
    torch.testing.assert_close(traced(Q, K, V), model(Q, K, V))


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec")
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_runs_ours_where_active_and_anywhere(strict: bool) -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return model(q, k, v)

    handle = provider.activate()
    try:
        program = torch.export.export(Model(), (Q, K, V), strict=strict)
        expected = program.module()(Q, K, V)
        assert is_ours(lambda: program.module()(Q, K, V))
        decomposed = program.run_decompositions()
    finally:
        handle.remove()
    assert not is_ours(lambda: program.module()(Q, K, V))
    assert not is_ours(lambda: decomposed.module()(Q, K, V))
    torch.testing.assert_close(program.module()(Q, K, V), expected)
    torch.testing.assert_close(decomposed.module()(Q, K, V), expected)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_fake_tensors_lie_in_memory_as_real_ones(mode: Any, activated: None) -> None:
    from torch._subclasses import FakeTensorMode

    inputs = [torch.randn(2, 9, 4, head_dim).transpose(1, 2) for head_dim in (16, 16, 24)]
    with FakeTensorMode() as fakes, mode():
        fake = sdpa(*(fakes.from_tensor(x).clone() for x in inputs))
    with mode():
        real = sdpa(*inputs)
    assert fake.stride() == real.stride() == (9 * 4 * 24, 24, 4 * 24, 1)


def test_cuda_tensors_go_to_the_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake ones, for which no GPU is needed."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends, "has_kernels", lambda device: True)
    monkeypatch.setattr(backends, "_capability_refusal", lambda device: None)
    monkeypatch.setattr(backends, "_shared_memory_refusal", lambda device, needed: None)
    computed, taken = functional.computed, []
    monkeypatch.setattr(functional, "computed", lambda call, name: (taken.append(name), computed(call, name))[1])
    handle = provider.activate()
    try:
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with FakeTensorMode() as fakes, context():
                shape = torch.empty(2, 4, 9, 16, device="meta")
                query, key, value = (FakeTensor(fakes, shape, torch.device("cuda", 0)) for _ in range(3))
                assert sdpa(query, key, value, is_causal=True).device.type == "cuda"
                assert sdpa(query.double(), key.double(), value.double()).dtype == torch.float64
    finally:
        handle.remove()
    assert taken == ["fused"] * 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_function_runs_ours(activated: None) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    scripted = torch.jit.script(function)
    assert is_ours(lambda: scripted(Q, K, V))
    torch.testing.assert_close(scripted(Q, K, V), function(Q, K, V))


def test_threads_may_call_it_together(activated: None) -> None:
    expected = sdpa(Q, K, V)
    outputs: list[Tensor] = []

    def work() -> None:
        for _ in range(20):
            outputs.append(sdpa(Q, K, V))
            sdpa(Q.double(), K.double(), V.double())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 80
    assert all(torch.equal(output, expected) for output in outputs)


def test_what_is_left_to_torch_is_explained(activated: None) -> None:
    x = torch.randn(1, 2, 3, 4)

    def run() -> None:
        sdpa(x, x, x)
        sdpa(x.double(), x.double(), x.double())

    ours, torchs = mha_ext.backends.explain(run)
    assert (ours.backend, torchs.backend) == ("cpu", "torch")
    assert "float64 has no kernel of this kind" in str(torchs)
    assert str(torchs).endswith("-> torch: takes this call")
