"""Which implementation computes a call: an ordered list of backends, each with named checks that say why not.

The first backend that accepts a call takes it. A name given by the `backend` argument, by `use_backend` or by
the environment variable MHA_EXT_BACKEND (in this order) is binding: where that backend refuses, the call
fails with its reason.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from . import _extension
from .call import AttentionCall, make_call, make_varlen_call
from .fused import MAX_HEAD_DIM, wants_grad
from .transforms import active_transform

__all__ = [
    "BACKENDS",
    "Backend",
    "Explanation",
    "Explanations",
    "available",
    "choose",
    "explain",
    "has_kernels",
    "use_backend",
]

Check = Callable[[AttentionCall, bool], str | None]  # (call, asked for by name) -> None, or why not


class Backend(NamedTuple):
    """A way to compute attention, and the checks that a call must pass to go there."""

    name: str
    description: str
    checks: tuple[tuple[str, Check], ...]

    def refusal(self, call: AttentionCall, by_name: bool) -> str | None:
        """None if this backend takes the call, else the failed check and its reason."""
        for name, check in self.checks:
            reason = check(call, by_name)
            if reason is not None:
                return f"{name}: {reason}"
        return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_kernels(device: torch.device) -> bool:
    """Whether the compiled extension has kernels for tensors on this kind of device."""
    if _extension.extension is None or device.type not in ("cuda", "cpu"):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key("mha_ext::matmul", device.type.upper())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_cpu_kernels() -> bool:
    """Whether there is a compiled extension: each one has the kernels for the CPU."""
    return _extension.extension is not None


def cpu_target() -> str:
    """The instruction set whose kernels compute on the CPU; empty where there are none.

    The fastest that this CPU runs, or the one named by the environment variable MHA_EXT_CPU_TARGET: ValueError where
    that is none of them.
    """
    return "" if _extension.extension is None else str(_extension.extension.cpu_target())


def _kernels(x: Tensor, by_name: bool) -> str | None:
    if x.device.type == "cpu" and not by_name:
        return "query is on the CPU, and these kernels take CUDA tensors"
    if not has_kernels(x.device):
        return f"this build has no kernels for {x.device.type} tensors ({_build()})"
    return None


def _capability(x: Tensor, by_name: bool) -> str | None:
    return _capability_refusal(x.device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _capability_refusal(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    extension = _extension.extension
    architectures = extension.build_info()["architectures"].split() if extension else []
    major, minor = torch.cuda.get_device_capability(device)
    if any(runs_on(architecture, major, minor) for architecture in architectures):
        return None
    return (
        f"this GPU has compute capability {major}.{minor}, built for {', '.join(architectures) or 'none'} (8.0 is the "
        f"least; TORCH_CUDA_ARCH_LIST={major}.{minor} builds for this one)"
    )


def runs_on(architecture: str, major: int, minor: int) -> bool:
    """Whether code for "sm_80", "sm_90a" (machine code) or "compute_80" (PTX) runs on a GPU of this capability."""
    kind, _, number = architecture.partition("_")
    digits = number.rstrip("af")
    built = (int(digits[:-1]), int(digits[-1]))
    if digits != number:  # what is specific to an architecture runs on no later one
        return built == (major, minor)
    return built <= (major, minor) and (kind == "compute" or built[0] == major)


def _transforms(x: Tensor, by_name: bool) -> str | None:
    return active_transform()


def _build() -> str:
    if _extension.extension is None:
        return _extension.why_missing
    return "built with CUDA" if _extension.extension.build_info()["cuda"] else "built without CUDA"


_KERNEL_CHECKS: tuple[tuple[str, Callable[[Tensor, bool], str | None]], ...] = (
    ("kernels", _kernels),
    ("compute capability", _capability),
    ("transforms", _transforms),
)


def _of_query(check: Callable[[Tensor, bool], str | None]) -> Check:
    return lambda call, by_name: check(call.query, by_name)


def _dtype(call: AttentionCall, by_name: bool) -> str | None:
    if call.query.dtype == torch.float64:
        return "float64 has no kernel of this kind"
    return None


def _head_dim(call: AttentionCall, by_name: bool) -> str | None:
    for name, x in (("query", call.query), ("value", call.value)):
        if not 1 <= x.shape[3] <= MAX_HEAD_DIM:
            return f"expected head dimensions from 1 to {MAX_HEAD_DIM}, got {x.shape[3]} ({name})"
    return None


def _shared_memory(call: AttentionCall, by_name: bool) -> str | None:
    """All kernels fit sm_80 and sm_90; sm_86, sm_89 and sm_120 offer 99 KB a block (csrc/attention/tile_config.h)."""
    if call.query.dtype == torch.float32:
        return None
    width = max(call.query.shape[3], call.value.shape[3])
    needed = 163 if _wants_grad(call) or width > 128 else 99
    return _shared_memory_refusal(call.query.device, needed * 1024)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _shared_memory_refusal(device: torch.device, needed: int) -> str | None:
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    offered = getattr(properties, "shared_memory_per_block_optin", needed)
    return None if offered >= needed else f"{needed} bytes a block are needed, this GPU offers {offered}"


def _wants_grad(call: AttentionCall) -> bool:
    rule = call.rule
    return wants_grad(call.query, call.key, call.value, rule.attn_mask, rule.alibi_slopes, rule.sinks)


def _weights(call: AttentionCall, by_name: bool) -> str | None:
    return "return_weights asks for the weights, which are never in memory" if call.return_weights else None


def _sequences(call: AttentionCall, by_name: bool) -> str | None:
    return (
        None
        if call.sequences is None
        else "packed sequences are taken by the kernels that never write the scores, and by plain PyTorch"
    )


def _cpu(call: AttentionCall, by_name: bool) -> str | None:
    if not call.query.is_cpu:
        return f"query is on {call.query.device.type}, and these kernels take CPU tensors"
    return None if has_cpu_kernels() else f"this build has no kernels for the CPU ({_build()})"


def _cpu_title() -> str:
    """The backend's name with the instructions that it uses, where there are any."""
    try:
        return f"cpu ({cpu_target()})" if has_cpu_kernels() else "cpu"
    except ValueError as error:  # MHA_EXT_CPU_TARGET names what this CPU does not run
        return f"cpu ({error})"


_CALL_KERNEL_CHECKS = tuple((name, _of_query(check)) for name, check in _KERNEL_CHECKS)

BACKENDS: tuple[Backend, ...] = (
    Backend(
        "fused",
        "one CUDA kernel that never writes the scores",
        (
            ("dtype", _dtype),
            ("head dimension", _head_dim),
            ("returned weights", _weights),
            *_CALL_KERNEL_CHECKS,
            ("shared memory", _shared_memory),
        ),
    ),
    Backend(
        "unfused",
        "CUDA kernels for scores, masked softmax and output",
        (("sequences", _sequences), *_CALL_KERNEL_CHECKS),
    ),
    # Ahead of plain PyTorch at every size: one query and one key take a tenth of the time of two bare products and a
    # softmax, so that no threshold is needed.
    Backend(
        "cpu",
        "one pass over the keys on the CPU that never writes the scores",
        (
            ("device", _cpu),
            ("dtype", _dtype),
            ("head dimension", _head_dim),
            ("returned weights", _weights),
            ("transforms", _of_query(_transforms)),
        ),
    ),
    Backend("reference", "plain PyTorch, on every device", ()),
)
_BY_NAME = {backend.name: backend for backend in BACKENDS}
_OF_CPU_TENSORS = (_BY_NAME["cpu"], _BY_NAME["reference"])  # the others take them only by name


def _known(name: Any, source: str) -> str:
    if name not in _BY_NAME:
        raise ValueError(f"{source}: expected one of {', '.join(_BY_NAME)}, got {name!r}")
    return str(name)


_environment: str | None = os.environ.get("MHA_EXT_BACKEND") or None
if _environment is not None:
    _known(_environment, "environment variable MHA_EXT_BACKEND")


_requests: list[list[str]] = []  # of the contexts entered and not yet left, each its name


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Compute everything within this context by the named backend, in all threads (as `sdpa_kernel`)."""
    request = [_known(name, "use_backend")]
    _requests.append(request)
    try:
        yield
    finally:  # the own request, which need not be the last where contexts of two threads overlap
        _requests[:] = [other for other in _requests if other is not request]


def undecided(argument: str | None) -> bool:
    """Whether nobody asks for a backend, nor how one is chosen: then a call may go the short way."""
    return argument is None and not _requests and not _records and _environment is None


def requested(argument: str | None = None) -> str | None:
    """The name asked for by argument, context or environment."""
    if argument is not None:
        return _known(argument, "backend")
    return _requests[-1][0] if _requests else _environment


def choose(call: AttentionCall, backend: str | None = None) -> str:
    """The name of the backend that takes this call; ValueError where the requested one refuses."""
    name = requested(backend)
    if name is not None:
        refusal = _BY_NAME[name].refusal(call, True)
        if refusal is not None:
            raise ValueError(f"backend: {name!r} does not take this call: {refusal}")
    if being_explained():
        record(_explanation(call, name))
    if name is not None:
        return name
    candidates = _OF_CPU_TENSORS if call.query.is_cpu else BACKENDS
    return next(candidate.name for candidate in candidates if candidate.refusal(call, False) is None)


def parts_use_kernels(x: Tensor) -> bool:
    """Whether the parts run as kernels on this tensor, here and now."""
    name = requested()
    if name in ("cpu", "reference"):  # the parts have no kernels for the CPU
        return False
    refusals = (check(x, name is not None) for _, check in _KERNEL_CHECKS)
    refusal = next((reason for reason in refusals if reason is not None), None)
    if name is not None and refusal is not None:
        raise ValueError(f"backend: {name!r} does not take this call: {refusal}")
    return refusal is None


class Explanation(NamedTuple):
    """Which backend a call takes (None: the requested one refuses), and why each other one does not.

    "torch" is that of a call of torch's function which stays there (`mha_ext.integrations.sdpa`).
    """

    backend: str | None
    reasons: dict[str, str | None]  # None: would take it

    def __str__(self) -> str:
        lines = []
        for name, reason in self.reasons.items():
            mark = "->" if name == self.backend else "  "
            state = "takes this call" if name == self.backend else reason or "would take this call, but is not chosen"
            title = _cpu_title() if name == "cpu" else name
            lines.append(f"{mark} {title}: {state}")
        return "\n".join(lines)


class Explanations(list[Explanation]):
    """One for each call that a run made, in order; equal ones are printed once."""

    def __str__(self) -> str:
        if not self:
            return (
                "no call of mha_ext was made. What brings it in: mha_ext.convert (nn.MultiheadAttention and encoders), "
                '"MHA_EXT" activated (scaled_dot_product_attention), or attn_implementation="mha_ext" (transformers). '
                "A compiled model decides while it is traced: explain the model itself"
            )
        texts = [str(explanation) for explanation in self]
        parts = []
        for text in dict.fromkeys(texts):
            count = texts.count(text)
            parts.append(f"{count} {'call' if count == 1 else 'calls'}\n{text}")
        return "\n".join(parts)


_records: list[Explanations] = []  # of the runs that are being explained


def being_explained() -> bool:
    """Whether a run is."""
    return bool(_records) and not torch.compiler.is_compiling()


def record(explanation: Explanation) -> None:
    """Add to the runs that are being explained."""
    for calls in _records:
        calls.append(explanation)


def _explanation(call: AttentionCall, name: str | None) -> Explanation:
    reasons = {candidate.name: candidate.refusal(call, candidate.name == name) for candidate in BACKENDS}
    chosen = name or next(key for key, reason in reasons.items() if reason is None)
    return Explanation(chosen if reasons[chosen] is None else None, reasons)


@overload
def explain(
    run: Callable[..., Any], /, *args: Any, backend: str | None = None, **kwargs: Any
) -> Explanations: ...  # fmt: skip
@overload
def explain(*args: Any, backend: str | None = None, **kwargs: Any) -> Explanation: ...


def explain(*args: Any, backend: str | None = None, **kwargs: Any) -> Explanation | Explanations:
    """Say which backend a call takes, and why each other one refused.

    Of tensors: of `mha_ext.attention` with these arguments, or with `cu_seqlens_q=` and `cu_seqlens_k=` of
    `mha_ext.attention_varlen`; nothing is computed.

    Of a module or a function, followed by its arguments: it is run once, as it is, and every attention call is
    explained that it makes through this package, be it by `mha_ext.MultiHeadAttention`, `mha_ext.compat`, the
    integrations or torch's function while "MHA_EXT" is active. What it raises is raised here.

    Returns
    -------
    Explanation, or of a run the list of them, Explanations. Both are made to be printed.

    Examples
    --------
    >>> import torch, mha_ext
    >>> q = torch.randn(1, 2, 4, 8)
    >>> mha_ext.backends.explain(q, q, q, is_causal=True, return_weights=True).backend
    'reference'
    >>> mha = mha_ext.MultiHeadAttention(16, 2)
    >>> [call.backend for call in mha_ext.backends.explain(mha, torch.randn(1, 4, 16), need_weights=True)]
    ['reference']
    """
    if args and not isinstance(args[0], Tensor) and callable(args[0]):
        calls = Explanations()
        _records.append(calls)
        try:
            with use_backend(backend) if backend is not None else nullcontext():
                args[0](*args[1:], **kwargs)
        finally:
            _records[:] = [other for other in _records if other is not calls]
        return calls
    call = (make_varlen_call if "cu_seqlens_q" in kwargs else make_call)(*args, **kwargs)
    return _explanation(call, requested(backend))


def available() -> dict[str, str | None]:
    """Per backend None if it can run on this machine, else why not."""
    reason: str | None = None
    if not torch.cuda.is_available():
        reason = f"torch sees no CUDA GPU ({_build()})"
    elif not has_kernels(torch.device("cuda")):
        reason = f"no CUDA kernels ({_build()})"
    else:
        reason = _capability_refusal(torch.device("cuda", torch.cuda.current_device()))
    return {"fused": reason, "unfused": reason, "cpu": _why_no_cpu_kernels(), "reference": None}


def _why_no_cpu_kernels() -> str | None:
    if not has_cpu_kernels():
        return f"no kernels for the CPU ({_build()})"
    try:
        cpu_target()
    except ValueError as error:
        return str(error)
    return None
