"""`mha_ext` as an attention implementation of Hugging Face transformers.

Importing this module registers it::

    import mha_ext.integrations.transformers
    model = AutoModel.from_pretrained(name, attn_implementation="mha_ext")
    model.set_attn_implementation("mha_ext")  # or later, of a model that is there

It computes what `attn_implementation="eager"` does, in training and in evaluation, also for models that "sdpa" does not
take (softcap, sinks), and with `output_attentions`; except that

- a query that sees no key gets output and weights 0 (eager: the mean of all values);
- the weights of `output_attentions` are those before dropout (eager: after); in evaluation they are the same.

Refused are keys chosen by index (DeepSeek V3.2), sinks that differ by query (Inkling 2), and without a mask a layer
that does not say whether it is causal (Splinter).
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..functional import attention, attention_varlen

_LEAST_VERSION = (5, 4)  # from here on masks are asked for by q_length and q_offset

try:
    from transformers import AttentionInterface, AttentionMaskInterface, __version__
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
    from transformers.utils import output_capturing

    _found = f"transformers {__version__}"
    _missing = tuple(int(part) for part in __version__.split(".")[:2]) < _LEAST_VERSION
except ImportError as error:
    _found, _missing = str(error), True
if _missing:
    raise ImportError(
        f"mha_ext.integrations.transformers: expected transformers 5.4 or newer, found {_found}; "
        "pip install 'transformers>=5.4' brings it"
    )

__all__ = ["attention_forward", "create_mask"]

NAME = "mha_ext"

# What single models pass to attention beside the common arguments, and eager knows in another form or as an argument.
_NOT_TAKEN = {
    "block_indices": "keys chosen by block",
    "indices": "keys chosen by index",
    "sinks": "sinks that differ by query (one a head is s_aux)",
}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a model of transformers calls for each of its attention layers.

    Parameters
    ----------
    module : nn.Module
        The layer: its `is_causal` counts where the argument is None and there is no mask, and dropout only while it
        is in training.
    query : Tensor (B, Hq, Lq, D)
    key : Tensor (B, Hkv, Lk, D)
    value : Tensor (B, Hkv, Lk, Dv)
        Never repeated where Hkv < Hq.
    attention_mask : Tensor, optional
        Broadcastable to (B, Hq, Lq, Lk), bool or added to the scores. It says everything: a sliding window as well,
        whose size is not looked at. None: all keys, or with `is_causal` those up to the query, of which the last
        stands at the last key.
    scaling, dropout, softcap
        As `scale`, `dropout_p` and `softcap` of `mha_ext.attention`.
    s_aux : Tensor (Hq,), optional
        Attention sinks.
    position_bias : Tensor, optional
        Added to the scores, broadcastable to (B, Hq, Lq, Lk); may have a gradient.
    output_attentions : bool, optional
        Return the weights as well. Also where the layer does not pass it on but the model was asked for them, unless
        it is compiled: then such models (GPT-2) return none.
    cu_seq_lens_q, cu_seq_lens_k : int tensor, optional
        Where packed sequences begin and end, of a batch of one without a mask.

    Returns
    -------
    (Tensor (B, Lq, Hq, Dv), weights (B, Hq, Lq, Lk) before dropout or None)

    Raises
    ------
    TypeError, ValueError
        Naming the argument, for what `mha_ext.attention` does not take.
    """
    for name, meaning in _NOT_TAKEN.items():
        if kwargs.get(name) is not None:
            raise ValueError(f'{name}: expected None, got {meaning}; attn_implementation="eager" takes them')
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None and attention_mask is None and query.shape[2] > 1:  # sdpa takes Splinter for a decoder
        raise ValueError(
            f"is_causal: expected an argument, or an attribute of the layer, where there is no mask, got neither from "
            f'{type(module).__name__}; attn_implementation="eager" needs none'
        )
    wants_weights = bool(output_attentions) or _weights_are_collected()
    causal = attention_mask is None and bool(is_causal)
    dropout_p = dropout if module.training else 0.0

    if attention_mask is None and cu_seq_lens_q is not None:
        if query.shape[0] != 1 or position_bias is not None or wants_weights:
            raise ValueError(
                "cu_seq_lens_q: expected a batch of one without position_bias or output_attentions, got batch "
                f"{query.shape[0]}, position_bias {position_bias is not None}, output_attentions {wants_weights}; "
                "position_ids that begin at 0 again tell packed sequences apart as well"
            )
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        cu_seqlens_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        packed = attention_varlen(
            q, k, v, cu_seq_lens_q, cu_seqlens_k, dropout_p, causal, scaling, q_offset="end", softcap=softcap,
            sinks=s_aux,
        )  # fmt: skip
        assert isinstance(packed, Tensor)  # no more was asked for
        return packed[None].contiguous(), None

    if query.shape[0] != key.shape[0]:  # learned queries come once for all sequences
        query = query.expand(key.shape[0], -1, -1, -1)
    result = attention(
        query, key, value, _biased(position_bias, attention_mask), dropout_p, causal, scaling,
        q_offset="end" if causal else 0, softcap=softcap, sinks=s_aux, return_weights=wants_weights,
    )  # fmt: skip
    if isinstance(result, Tensor):
        return result.transpose(1, 2).contiguous(), None
    return result.output.transpose(1, 2).contiguous(), result.weights


def _weights_are_collected() -> bool:
    """Whether hooks wait for them: GPT-2 and others drop `output_attentions` on its way to their layers."""
    collector = getattr(output_capturing, "_active_collector", None)
    if collector is None or torch.compiler.is_compiling():
        return False
    return any(name.endswith("attentions") for name in collector.get() or ())


def _biased(position_bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    if position_bias is None or mask is None:
        return mask if position_bias is None else position_bias
    if mask.dtype == torch.bool:
        return torch.where(mask, position_bias, -torch.inf)
    return position_bias + mask


def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask that goes with `attention_forward`, from what transformers knows of a model's tokens.

    None where causality alone says it: no padding, no window or chunk that the keys reach beyond, and the last query
    at the last key. Else bool (B, 1, Lq, Lk), True takes part; of memory (B, 1, 1, Lk) where it hides only padding.
    The arguments are those of `transformers.masking_utils.sdpa_mask`.
    """
    padding = attention_mask
    if (
        allow_is_causal_skip
        and isinstance(q_offset, int | torch.SymInt)  # a tensor, of static caches, would have to be waited for
        and q_offset + q_length == kv_offset + kv_length
        and (local_size is None or kv_offset + kv_length <= local_size)  # all in the first window or chunk
        and (padding is None or _all_true(padding, kv_offset, kv_length))
    ):
        return None
    only_padding = mask_function is bidirectional_mask_function
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=1 if only_padding else q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=padding,
        local_size=local_size,
        allow_is_causal_skip=False,
        **kwargs,
    )
    return mask.expand(-1, -1, q_length, -1) if mask is not None and only_padding else mask


def _all_true(padding: Tensor, offset: int, length: int) -> bool:
    """Whether all these keys take part; not where the values are unknown, while a graph is traced."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    if traced or padding.shape[-1] < offset + length:
        return False
    return bool(padding[:, offset : offset + length].all())


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, create_mask)
