"""What torch does around a call: torch.func, forward mode, autocast, checkpoints, copies, and the counter of FLOPs."""

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import BackendUnderTest
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint as checkpoints
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import mha_ext
from mha_ext import AttentionResult, MultiHeadAttention

CU_SEQLENS = torch.tensor([0, 2, 2, 5], dtype=torch.int32)


def tensors(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    shapes = ((2, 4, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4))
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


def short(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A call that may go the short way on the CPU."""
    output = mha_ext.attention(query, key, value, is_causal=True, softcap=2.0)
    assert isinstance(output, Tensor)
    return output


def with_lse(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    result = mha_ext.attention(query, key, value, window=(2, 1), return_lse=True)
    assert isinstance(result, AttentionResult)
    assert result.lse is not None
    return torch.cat((result.output, result.lse[..., None]), -1)


def packed_sequences(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    output = mha_ext.attention_varlen(*rows, *[CU_SEQLENS.to(query.device)] * 2, is_causal=True)
    assert isinstance(output, Tensor)
    return output


MODULE = MultiHeadAttention(8, 2)
MODULES = {torch.float32: MODULE, torch.float64: copy.deepcopy(MODULE).double()}


def module(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Self-attention, whose projection is read in place."""
    x = torch.cat((query[:, 0], key[:, 0] + value[:, 0]), -1)
    output: Tensor = MODULES[query.dtype](x, is_causal=True)
    return output


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "short": short, "lse": with_lse, "varlen": packed_sequences, "module": module,
}  # fmt: skip

PARTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "qkv_split": lambda q, k, v: torch.cat(mha_ext.qkv_split(q[:, 0], k[0, 0, 0], 2, 1), 1),
    "attention_scores": lambda q, k, v: mha_ext.attention_scores(q, k),
    "masked_softmax": lambda q, k, v: torch.cat(
        [x.reshape(-1) for x in mha_ext.masked_softmax(q, softcap=2.0, window=(2, 1), return_lse=True)]
    ),
    "attention_output": lambda q, k, v: mha_ext.attention_output(q, v[:, :, :4]),
}


# --- transforms that only the backward sees ----------------------------------------------------------------------


def of_plain_pytorch(call: Callable[..., Tensor], inputs: list[Tensor]) -> Tensor:
    with mha_ext.backends.use_backend("reference"):
        return call(*inputs)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_backward_inside_of_a_dual_level_keeps_the_tangent(call: Callable[..., Tensor]) -> None:
    inputs = tensors()
    output, expected = call(*inputs), of_plain_pytorch(call, inputs)
    grad, tangent = torch.randn_like(output), torch.randn_like(output)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(grad, tangent)
        results = [forward_ad.unpack_dual(torch.autograd.grad(x, inputs, dual)[0]) for x in (output, expected)]
    for ours, theirs in zip(*results, strict=True):
        assert not ours.requires_grad
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_batch_of_gradients_needs_no_slow_loop(call: Callable[..., Tensor]) -> None:
    inputs = tensors()
    output = call(*inputs)
    grads = torch.randn(3, *output.shape)
    expected = [torch.autograd.grad(output, inputs, grad, retain_graph=True) for grad in grads]
    backward = partial(torch.autograd.grad, output, inputs, retain_graph=True)
    for batched in (torch.func.vmap(backward)(grads), backward(grads, is_grads_batched=True)):
        for index, each in enumerate(zip(*batched, strict=True)):
            torch.testing.assert_close(each, expected[index])


@pytest.mark.parametrize("call", [*PARTS.values(), with_lse], ids=[*PARTS, "attention"])
def test_the_same_of_kernels_for_the_parts(kernels: str, call: Callable[..., Tensor]) -> None:
    inputs = [x.detach().requires_grad_() for x in tensors(torch.float64, kernels)]
    output, expected = call(*inputs), of_plain_pytorch(call, inputs)
    grads = torch.randn(2, *output.shape, dtype=torch.float64, device=kernels)

    def backward(x: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(x, inputs, grad, retain_graph=True, materialize_grads=True)

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(*grads)
        ours, theirs = ([forward_ad.unpack_dual(g)[:2] for g in backward(x, dual)] for x in (output, expected))
    for (primal, tangent), (expected_primal, expected_tangent) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(primal, expected_primal)
        assert (tangent is None) == (expected_tangent is None)
        if tangent is not None:
            torch.testing.assert_close(tangent, expected_tangent)
    torch.testing.assert_close(
        torch.func.vmap(partial(backward, output))(grads), torch.func.vmap(partial(backward, expected))(grads)
    )


# --- torch.func --------------------------------------------------------------------------------------------------


def doubles(call: Callable[..., Tensor]) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """The call as a function of its query, a point and a direction."""
    query, key, value = (x.detach() for x in tensors(torch.float64))
    return lambda x: call(x, key, value), query, torch.randn_like(query)


@pytest.mark.parametrize("call", [*CALLS.values(), *PARTS.values()], ids=[*CALLS, *PARTS])
def test_every_transform_agrees_in_fp64(call: Callable[..., Tensor]) -> None:
    """Jacobians forward and backward, products with them, the Hessian and the linear map."""
    function, point, direction = doubles(call)
    output, product = torch.func.jvp(function, (point,), (direction,))
    torch.testing.assert_close(output, function(point))
    jacobian = torch.func.jacrev(function)(point)
    torch.testing.assert_close(torch.func.jacfwd(function)(point), jacobian)
    axes = direction.dim()
    torch.testing.assert_close(product, torch.tensordot(jacobian, direction, axes))
    _, backward = torch.func.vjp(function, point)
    torch.testing.assert_close(backward(output)[0], torch.tensordot(output, jacobian, output.dim()))

    def squared(x: Tensor) -> Tensor:
        return function(x).square().sum()

    hessian = torch.func.hessian(squared)(point).reshape(point.numel(), -1)
    torch.testing.assert_close(hessian, hessian.T)
    _, second = torch.func.jvp(torch.func.grad(squared), (point,), (direction,))
    torch.testing.assert_close(second.reshape(-1), hessian @ direction.reshape(-1))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # of any function with constants
def test_linearize_is_the_product_with_the_jacobian() -> None:
    function, point, direction = doubles(short)
    output, product = torch.func.linearize(function, point)
    torch.testing.assert_close(output, function(point))
    torch.testing.assert_close(product(direction), torch.func.jvp(function, (point,), (direction,))[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["bool", "float", "double", "key_lengths", "q_offset", "alibi", "sinks", "nothing"])
def test_vmap_over_what_is_not_query(name: str, dtype: torch.dtype) -> None:
    query, key, value = (x.detach() for x in tensors(dtype))
    batches: dict[str, tuple[str, Tensor]] = {
        "bool": ("attn_mask", torch.rand(3, 2, 1, 5, 5) > 0.3),
        "float": ("attn_mask", torch.randn(3, 5, 5).masked_fill(torch.rand(3, 5, 5) > 0.7, -math.inf)),
        "double": ("attn_mask", torch.randn(3, 5, 5, dtype=torch.float64)),
        "key_lengths": ("key_lengths", torch.tensor([[5, 3], [0, 2], [1, 1]])),
        "q_offset": ("q_offset", torch.tensor([[0, 3], [-2, 2], [1, 1]])),
        "alibi": ("alibi_slopes", torch.randn(3, 4)),
        "sinks": ("sinks", torch.randn(3, 4)),
        "nothing": ("", torch.ones(3)),
    }
    argument, batch = batches[name]

    def call(x: Tensor) -> Tensor:
        output = mha_ext.attention(query, key, value, is_causal=True, **({argument: x} if argument else {}))
        assert isinstance(output, Tensor)
        return output if argument else output * x

    torch.testing.assert_close(torch.func.vmap(call)(batch), torch.stack([call(x) for x in batch]))


def test_vmap_along_any_axis() -> None:
    _, key, value = (x.detach() for x in tensors())
    many = torch.randn(2, 4, 3, 5, 4)
    batched = torch.func.vmap(short, in_dims=(2, None, None), out_dims=1)(many, key, value)
    torch.testing.assert_close(batched, torch.stack([short(x, key, value) for x in many.unbind(2)], 1))


def test_vmap_over_the_bounds_of_sequences_is_refused() -> None:
    rows = torch.randn(5, 4, 8)
    bounds = torch.stack((CU_SEQLENS, CU_SEQLENS))
    with pytest.raises(
        ValueError, match=r"cu_seqlens_q: expected the same sequences.*batch the key_lengths of mha_ext"
    ):
        torch.func.vmap(lambda x: mha_ext.attention_varlen(rows, rows, rows, x, x))(bounds)


@pytest.mark.parametrize("cross", [False, True])
def test_an_ensemble_of_modules(cross: bool) -> None:
    modules = [MultiHeadAttention(16, 4, num_kv_heads=2) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(modules)
    skeleton = copy.deepcopy(modules[0]).to("meta")
    inputs = (torch.randn(2, 5, 16), torch.randn(2, 3, 16))[: 1 + cross]
    options = {"key_mask": torch.rand(2, inputs[-1].shape[1]) > 0.3, "need_weights": True}

    def call(parameters: Any, buffers: Any) -> Any:
        return torch.func.functional_call(skeleton, (parameters, buffers), inputs, options)

    output, weights = torch.func.vmap(call)(parameters, buffers)
    for index, one in enumerate(modules):
        torch.testing.assert_close((output[index], weights[index]), one(*inputs, **options))


@pytest.mark.parametrize("cross", [False, True])
def test_the_gradient_of_every_example(cross: bool) -> None:
    mha = MultiHeadAttention(8, 2, dtype=torch.float64)
    parameters = {name: x.detach() for name, x in mha.named_parameters()}
    x, y = torch.randn(2, 3, 4, 8, dtype=torch.float64).unbind()

    def loss(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
        inputs = (x[None], y[None])[: 1 + cross]
        return torch.func.functional_call(mha, parameters, inputs).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    for index in range(3):
        expected = torch.autograd.grad(loss(dict(mha.named_parameters()), x[index], y[index]), list(mha.parameters()))
        torch.testing.assert_close([gradient[index] for gradient in each.values()], list(expected))


# --- a second backward -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_both_modes_twice_in_fp64(call: Callable[..., Tensor]) -> None:
    """The reference's, and what a backward inside of a dual level gives."""
    inputs = [x.detach().requires_grad_() for x in tensors(torch.float64)]
    assert gradcheck(call, inputs, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(call, inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_second_backward_of_the_cpu_kernels(call: Callable[..., Tensor]) -> None:
    """No further from fp64 than plain PyTorch in fp32 is, up to a few roundings."""
    inputs = tensors()

    def second(inputs: list[Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(call(*inputs).square().sum(), inputs, create_graph=True)
        return list(torch.autograd.grad(sum(x.square().sum() for x in first), inputs))

    exact = second([x.detach().double().requires_grad_() for x in inputs])
    ours = second(inputs)
    with mha_ext.backends.use_backend("reference"):
        theirs = second(inputs)
    for one, plain, true in zip(ours, theirs, exact, strict=True):
        floor = 16 * torch.finfo(torch.float32).eps * max(1.0, true.abs().max().item())
        assert (one - true).norm() <= 1.5 * (plain - true).norm() + floor


# --- autocast ----------------------------------------------------------------------------------------------------

HALVES = [torch.bfloat16, torch.float16]
LOOSE = {"rtol": 0.0, "atol": 3e-2}
MASKS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "bool": lambda: torch.rand(5, 5) > 0.3,
    "fp32": lambda: torch.randn(5, 5).masked_fill(torch.rand(5, 5) > 0.8, -math.inf),
    "fp64": lambda: torch.randn(5, 5, dtype=torch.float64),
    "grad": lambda: torch.randn(5, 5, requires_grad=True),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("backend_name", ["reference", "cpu"])
def test_autocast_casts_the_inputs_and_no_mask(backend_name: str, dtype: torch.dtype, mask: str) -> None:
    inputs = tensors()
    attn_mask = MASKS[mask]()
    wanted = [*inputs, *([attn_mask] if mask == "grad" else [])]

    def run() -> tuple[AttentionResult, tuple[Tensor, ...]]:
        result = mha_ext.attention(*inputs, attn_mask, return_lse=True, backend=backend_name)
        assert isinstance(result, AttentionResult)
        return result, torch.autograd.grad(result.output.float().square().sum(), wanted)

    expected, expected_gradients = run()
    with torch.autocast("cpu", dtype):
        result, gradients = run()
        with torch.autocast("cpu", enabled=False):
            torch.testing.assert_close(run(), (expected, expected_gradients))
    assert result.output.dtype == dtype
    assert result.lse is not None
    assert result.lse.dtype == torch.float32
    torch.testing.assert_close(result.output.float(), expected.output, **LOOSE)
    for gradient, exact, x in zip(gradients, expected_gradients, wanted, strict=True):
        assert gradient.dtype == x.dtype
        torch.testing.assert_close(gradient, exact, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_of_the_parts_and_of_packed_sequences(dtype: torch.dtype) -> None:
    query, key, value = (x.detach() for x in tensors())
    with torch.autocast("cpu", dtype):
        for bias in (torch.randn(4), None):
            assert {x.dtype for x in mha_ext.qkv_split(query[:, 0], bias, 2, 1)} == {dtype}
        scores = mha_ext.attention_scores(query, key)
        assert scores.dtype == torch.float32  # as every product that a softmax is taken of
        weights = mha_ext.masked_softmax(scores)
        assert weights.dtype == torch.float32
        assert mha_ext.attention_output(weights, value).dtype == dtype
        assert packed_sequences(query, key, value).dtype == dtype
        assert mha_ext.attention(query.double(), key.double(), value.double()).dtype == torch.float64  # as torch's own


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("cross", [False, True])
def test_autocast_of_the_module(dtype: torch.dtype, cross: bool) -> None:
    mha = MultiHeadAttention(16, 4)
    inputs = (torch.randn(2, 5, 16), torch.randn(2, 3, 16).to(dtype))[: 1 + cross]
    mask = torch.randn(5, inputs[-1].shape[1], requires_grad=True)
    casts: list[Tensor] = []

    class Casts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0].dim() == 2 and args[0].requires_grad:
                casts.append(args[0])
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", dtype), Casts():
        output = mha(*inputs, attn_mask=mask)
        assert output.dtype == dtype
        mha(*inputs, attn_mask=mask)
    # A second call takes the weights from autocast's cache, but for the two slices that cross-attention multiplies by.
    assert len(casts) == (1 + 2 * 2 if cross else 2)
    output.float().square().sum().backward()
    gradients = [x.grad.clone() for x in (*mha.parameters(), mask)]
    mha.zero_grad()
    mask.grad = None
    mha(*(x.float() for x in inputs), attn_mask=mask).square().sum().backward()
    for gradient, x in zip(gradients, (*mha.parameters(), mask), strict=True):
        torch.testing.assert_close(gradient, x.grad, rtol=0.1, atol=0.1)


# --- checkpoints -------------------------------------------------------------------------------------------------


def save_attention_alone(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> checkpoints.CheckpointPolicy:
    kept = operator is torch.ops.mha_ext.attention_forward_cpu.default
    policy = checkpoints.CheckpointPolicy
    return policy.MUST_SAVE if kept else policy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not_reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(checkpoints.create_selective_checkpoint_contexts, save_attention_alone),
    },
}


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("backend_name", ["reference", "cpu"])
def test_a_checkpoint_draws_the_same_dropout_again(backend_name: str, how: str, cross: bool) -> None:
    mha = MultiHeadAttention(16, 4, 0.5)
    inputs = tuple(torch.randn(2, 5, 16, requires_grad=True) for _ in range(1 + cross))

    def gradients(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(7)
        return torch.autograd.grad(run(*inputs).square().sum(), (*inputs, *mha.parameters()))

    with mha_ext.backends.use_backend(backend_name):
        expected = gradients(mha)
        if (
            how == "reentrant"
        ):  # which knows no torch.autograd.grad, and whose forward, without gradients, may round apart
            torch.manual_seed(7)
            checkpoints.checkpoint(mha, *inputs, **CHECKPOINTS[how]).square().sum().backward()
            result = tuple(x.grad for x in (*inputs, *mha.parameters()))
        else:
            result = gradients(lambda *x: checkpoints.checkpoint(mha, *x, **CHECKPOINTS[how]))
    equal = torch.testing.assert_close if how == "reentrant" else partial(torch.testing.assert_close, rtol=0, atol=0)
    equal(result, expected)


# --- copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_made_in_the_middle_of_training_goes_on_alike(how: str) -> None:
    def step(mha: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        mha(torch.randn(2, 5, 16), is_causal=True).square().mean().backward()
        optimizer.step()

    mha = MultiHeadAttention(16, 4, 0.2, num_kv_heads=2)
    mha.out_proj.requires_grad_(False)
    optimizer = torch.optim.Adam(mha.parameters(), 0.1)
    step(mha, optimizer, 1)
    mha(torch.randn(2, 5, 16)).sum().backward()  # gradients are there when it is copied
    twin = copy.deepcopy(mha) if how == "deepcopy" else pickle.loads(pickle.dumps(mha))
    assert twin.training
    assert [x.requires_grad for x in twin.parameters()] == [x.requires_grad for x in mha.parameters()]
    theirs = torch.optim.Adam(twin.parameters(), 0.1)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in (2, 3):
        step(mha, optimizer, seed)
        step(twin, theirs, seed)
    for (name, ours), other in zip(mha.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, other), name
        assert ours is not other


# --- the counter of FLOPs ----------------------------------------------------------------------------------------


def counted(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def test_flops_are_those_of_torch(any_backend: BackendUnderTest) -> None:
    device = any_backend.device
    query = torch.randn(2, 4, 5, 8, device=device, requires_grad=True)
    key, value = (torch.randn(2, 2, 7, size, device=device, requires_grad=True) for size in (8, 6))
    outputs: list[Tensor] = []
    forward = counted(lambda: outputs.append(mha_ext.attention(query, key, value, is_causal=True)))
    with sdpa_kernel(SDPBackend.MATH):
        theirs = counted(lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True))
    assert forward == theirs == sdpa_flop_count(query.shape, key.shape, value.shape)
    backward = counted(lambda: outputs[0].sum().backward())
    fused = any_backend.name in ("cpu", "fused")  # computes the scores again
    once_more = 2 * 2 * 4 * 5 * 7 * 8
    expected = sdpa_backward_flop_count(outputs[0].shape, query.shape, key.shape, value.shape)
    assert backward == (expected if fused else expected - once_more)


def test_flops_of_packed_sequences_are_those_of_each() -> None:
    query, key = (torch.randn(5, heads, 8, requires_grad=True) for heads in (4, 2))

    def train() -> None:
        output = mha_ext.attention_varlen(query, key, key, CU_SEQLENS, CU_SEQLENS)
        assert isinstance(output, Tensor)
        output.sum().backward()

    shapes = [((1, 4, n, 8), (1, 2, n, 8), (1, 2, n, 8)) for n in (2, 0, 3)]
    assert counted(train) == sum(sdpa_flop_count(*x) + sdpa_backward_flop_count(x[0], *x) for x in shapes)
