"""`torch.nn.functional.scaled_dot_product_attention` by the kernels of mha_ext, in the whole process.

After `import mha_ext` the provider is in torch's registry of flash implementations (torch >= 2.11)::

    torch.nn.attention.activate_flash_attention_impl("MHA_EXT")
    ...
    torch.nn.attention.restore_flash_attention_impl()

(`handle = mha_ext.integrations.sdpa.activate()` and `handle.remove()` do it without the registry.) From then on every
call of torch's function, hence of what is built on it (`nn.MultiheadAttention` without weights, timm, diffusers, the
"sdpa" models of transformers), goes to one of our kernels where one takes it: on CUDA, and on the CPU.

Left to torch, and `decide` says why, are fp64, head dimensions over 256, `torch.func` and forward-mode derivatives,
nested tensors and other subclasses with operators of their own (DTensor), what torch itself refuses, and all calls
where flash attention is off (`sdpa_kernel(SDPBackend.MATH)`, `torch.backends.cuda.enable_flash_sdp(False)`). Torch's
fused layers (`nn.TransformerEncoderLayer` in evaluation) do not call the function unless they are told to be plain:
`torch.backends.mha.set_fastpath_enabled(False)`.

Results mean what they mean in torch (`is_causal` counts from the first key, a query that sees no key gets 0), but

- dropout has other draws: those of `mha_ext.attention`, from the state of the same generator;
- gradients are bitwise repeatable;
- the output lies in memory as query does, also where torch's plain PyTorch would make it contiguous;
- graphs hold `mha_ext::attention_forward` (`_cpu`), which lists of operators to be saved do not name, and exported ones
  `aten::scaled_dot_product_attention`, which `run_decompositions()` then leaves as it is;
- a compiled function keeps the attention that it was compiled with: activate first.

Activate before other threads call the function, as with every change of torch's dispatch.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .. import _extension, backends, functional
from ..call import AttentionCall, make_call

__all__ = ["activate", "decide"]

_operator = torch.ops.aten.scaled_dot_product_attention.default


# What a tensor is in a graph that is traced, besides a tensor.
_ORDINARY = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)

# window, q_offset, ... of `mha_ext.attention`
_NOTHING_ELSE = (None, 0, None, None, None, None, False, False, False, None)


class Handle(NamedTuple):
    """What an activation has changed."""

    library: torch.library.Library
    cache_key_tag: str

    def remove(self) -> None:
        """Bring torch's own attention back."""
        self.library._destroy()
        del _operator.py_kernels[DispatchKey.CompositeImplicitAutograd]
        _operator._dispatch_cache.clear()
        torch.compiler.config.cache_key_tag = self.cache_key_tag


def activate() -> Handle:
    """Replace torch's attention until the handle is removed.

    Raises
    ------
    RuntimeError
        Where mha_ext has no compiled kernels, or torch's attention is replaced already.
    """
    if _extension.extension is None:
        raise RuntimeError(f"mha_ext has no kernels to put in the place of torch's attention: {_extension.why_missing}")
    if DispatchKey.CompositeImplicitAutograd in _operator.py_kernels:
        raise RuntimeError(
            "scaled_dot_product_attention is replaced already: torch.nn.attention.restore_flash_attention_impl(), or "
            "remove() of the handle, brings torch's own back"
        )
    library = torch.library.Library("aten", "IMPL")
    on_cuda = torch.cuda.is_available() and backends.has_kernels(torch.device("cuda"))
    for device in ("CPU", "CUDA") if on_cuda else ("CPU",):
        library.impl("scaled_dot_product_attention", _attention, f"Autograd{device}")
        library.impl("scaled_dot_product_attention", _below_autograd, device)  # of tensors made in inference mode
    # What takes operators apart below autograd: fake tensors in inference mode, whose strides must be ours.
    _operator.py_kernels[DispatchKey.CompositeImplicitAutograd] = _below_autograd
    _operator._dispatch_cache.clear()
    # Compiled graphs on disk are found by what was traced, which does not show whose attention it is.
    tag = torch.compiler.config.cache_key_tag
    torch.compiler.config.cache_key_tag = f"{tag}MHA_EXT {_extension.build_info} {backends.requested()}"
    return Handle(library, tag)


def decide(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[AttentionCall, str] | str:
    """The call and the backend that takes it; or, where it is left to torch's own attention, why."""
    reason = _torchs(query, key, attn_mask, is_causal, enable_gqa)
    if reason is not None:
        return reason
    for x in (query, key, value, attn_mask):
        if type(x) not in _ORDINARY and isinstance(x, Tensor) and torch._C._dispatch_keys(x).has(DispatchKey.Python):
            return f"{type(x).__name__} has operators of its own"
    try:
        call = make_call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return call, backends.choose(call, backends.requested() or ("cpu" if query.is_cpu else "fused"))
    except (TypeError, ValueError) as error:
        return str(error)


def _torchs(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool) -> str | None:
    """What is switched off, and what `mha_ext.attention` takes but torch refuses."""
    if not torch.backends.cuda.flash_sdp_enabled():
        return "flash attention is off (torch.nn.attention.sdpa_kernel, torch.backends.cuda.enable_flash_sdp)"
    if attn_mask is not None:
        if is_causal:
            return "attn_mask and is_causal are given together, which most of torch's kernels refuse"
        if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
            return f"attn_mask is {attn_mask.dtype} and query {query.dtype}, which torch refuses"
    if not enable_gqa and query.dim() > 2 and key.dim() > 2 and query.size(-3) != key.size(-3):
        return "query and key differ in heads, and enable_gqa is False"
    return None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The operator's kernel."""
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if (
        functional._direct is not None
        and backends.undecided(None)
        and _torchs(query, key, attn_mask, is_causal, enable_gqa) is None
    ):
        output = functional._direct(*arguments, *_NOTHING_ELSE)
        if output is not None:
            return output
    decision = decide(*arguments)
    if isinstance(decision, str):
        backends.record(backends.Explanation("torch", {"mha_ext": decision, "torch": None}))
        return _operator._op_dk(
            DispatchKey.CompositeImplicitAutograd,
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
    output = functional.computed(*decision)
    assert isinstance(output, Tensor)
    return output


def _below_autograd(*arguments: Any, **named: Any) -> Tensor:
    """The same where autograd has had its turn, or does without: then nothing is recorded."""
    if torch.is_grad_enabled() and torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradFunctionality):
        with torch.no_grad():
            return _attention(*arguments, **named)
    return _attention(*arguments, **named)


if hasattr(nn.attention, "register_flash_attention_impl"):  # torch >= 2.11
    nn.attention.register_flash_attention_impl("MHA_EXT", register_fn=activate)
