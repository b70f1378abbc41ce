"""Multi-head attention as a module: projections around `mha_ext.attention`."""

from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from . import functional
from .autocast import autocasts
from .checks import FLOATING, check_alike, check_bool, check_int, check_real, check_shape, check_tensor, check_width
from .masks import both_masks, hidden_by
from .pruning import prune_heads
from .state_dicts import adopt_known_layout, torch_state_dict

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(nn.Module):
    """Multi-head attention with its input and output projections, for self- and cross-attention.

    `module(x)` is self-attention; `module(query, key, value)` is cross-attention, in which `value` defaults to `key`.
    Sequences are batch-first. What the masks, the window, the offset and the rest mean is the contract of
    `mha_ext.attention`, to which they are passed; here only what the module adds.

    Parameters
    ----------
    embed_dim : int
        Features of `query` and of the output.
    num_heads : int
        Query heads, Hq.
    dropout : float, default 0.0
        Probability that a weight is dropped; in training mode only.
    num_kv_heads : int, optional
        Key and value heads, Hkv, a divisor of `num_heads` (which is the default): grouped-query attention, in which
        query head h reads key head h // (Hq / Hkv) and nothing is repeated in memory.
    head_dim : int, optional
        Features of a head, D; by default `embed_dim / num_heads`, which must then be whole.
    kdim, vdim : int, optional
        Features of `key` and of `value`; `embed_dim` by default.
    bias : bool, default True
        Whether the projections add a bias.
    device, dtype : optional
        Of the parameters, as in every module of torch.

    Attributes
    ----------
    qkv_proj : nn.Module
        Where kdim == vdim == embed_dim: one packed projection to (Hq + 2 Hkv) D features, all query heads first, then
        all key heads, then all value heads. Self-attention calls it once and reads its output in place.
    q_proj, k_proj, v_proj : nn.Module
        Otherwise, in its place.
    out_proj : nn.Module
        From Hq D features to `embed_dim`.

    Notes
    -----
    Every projection is called as a module, so that hooks, pruning, parametrisations and replacements (LoRA, quantised
    layers) take effect. There is one exception: cross-attention multiplies by slices of the weight of a packed
    projection that is a bare `nn.Linear`; anything else is called whole and its output is sliced.

    A fresh module draws the same parameters from the same seed as `nn.MultiheadAttention`: Xavier-uniform input
    projections, zero biases.

    `load_state_dict` also takes other layouts, alone or inside a larger model, and leaves the given dict as it is:
    `nn.MultiheadAttention`'s (`in_proj_weight` or `q_proj_weight` ..., `in_proj_bias`); a packed `qkv` with `out`;
    and separate `W_q`, `W_k`, `W_v` with `W_o`. Separate projections are packed, or packed ones separated, as this
    module needs. `from_torch` converts a whole `nn.MultiheadAttention`.

    Keys that a mask hides are not read by the attention, but the projections see every row of their input: a NaN in a
    padded row of `x` reaches that row's own output, and the projections' weight gradients.

    Examples
    --------
    >>> import torch, mha_ext
    >>> mha = mha_ext.MultiHeadAttention(768, 12)
    >>> x = torch.randn(2, 128, 768)
    >>> mha(x, is_causal=True).shape
    torch.Size([2, 128, 768])
    >>> output, weights = mha(x, key_lengths=torch.tensor([128, 100]), need_weights=True)
    >>> weights.shape
    torch.Size([2, 128, 128])
    """

    qkv_proj: nn.Module
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = check_int("embed_dim", embed_dim, low=1)
        self.num_heads = check_int("num_heads", num_heads, low=1)
        self.num_kv_heads = num_heads if num_kv_heads is None else check_int("num_kv_heads", num_kv_heads, low=1)
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {num_heads}, got {num_kv_heads}")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim: expected a multiple of num_heads = {num_heads} (or a head_dim), got {embed_dim}"
            )
        self.head_dim = embed_dim // num_heads if head_dim is None else check_int("head_dim", head_dim, low=1)
        self.kdim = embed_dim if kdim is None else check_int("kdim", kdim, low=1)
        self.vdim = embed_dim if vdim is None else check_int("vdim", vdim, low=1)
        self.dropout = check_real("dropout", dropout, low=0, high=1)
        check_bool("bias", bias)
        if dtype is not None and dtype not in FLOATING:
            raise TypeError(f"dtype: expected float16, bfloat16, float32 or float64, got {dtype}")
        self.packed = self.kdim == self.vdim == embed_dim

        # Built without a first draw, so that the random numbers are spent as nn.MultiheadAttention spends them.
        device = torch.get_default_device() if device is None else device
        q_features, k_features, v_features = self.projection_sizes
        if self.packed:
            inputs = {"qkv_proj": (embed_dim, q_features + k_features + v_features)}
        else:
            inputs = {"q_proj": (embed_dim, q_features), "k_proj": (self.kdim, k_features)}
            inputs["v_proj"] = (self.vdim, v_features)
        for name, (in_features, out_features) in inputs.items():
            linear = nn.Linear(in_features, out_features, bias=bias, device="meta", dtype=dtype)
            for kind, parameter in list(linear.named_parameters()):
                linear.register_parameter(kind, nn.Parameter(torch.empty_like(parameter, device=device)))
            self.add_module(name, linear)
        self.out_proj = nn.Linear(q_features, embed_dim, bias=bias, device=device, dtype=dtype)
        for name in inputs:
            nn.init.xavier_uniform_(self.get_parameter(f"{name}.weight"))
        if bias:
            for name in (*inputs, "out_proj"):
                nn.init.zeros_(self.get_parameter(f"{name}.bias"))
        self.register_load_state_dict_pre_hook(adopt_known_layout)

    @property
    def projection_sizes(self) -> tuple[int, int, int]:
        """Features of the projected query, key and value: Hq D, Hkv D, Hkv D."""
        kv_features = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv_features, kv_features

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiHeadAttention":
        """Convert a `torch.nn.MultiheadAttention`, with copies of its parameters.

        Dtype, device, training mode and dropout are kept; a module that is frozen as a whole stays frozen. The result
        is batch-first whatever `module.batch_first` says, returns weights only when asked, and its masks say True
        where a key takes part (torch's say it where a key is hidden).

        Raises
        ------
        TypeError
            `module` is no `nn.MultiheadAttention`.
        ValueError
            It was built with `add_bias_kv` or `add_zero_attn`, which add a key that this module does not have.
        """
        state = torch_state_dict(module)
        weight = state["out_proj.weight"]
        converted = cls(
            module.embed_dim, module.num_heads, module.dropout, kdim=module.kdim, vdim=module.vdim,
            bias="out_proj.bias" in state, device="meta", dtype=weight.dtype,
        )  # fmt: skip
        converted.load_state_dict(state, assign=True)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            converted.requires_grad_(False)
        return converted.train(module.training)

    def extra_repr(self) -> str:
        """What the child modules do not show."""
        parts = [f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"num_kv_heads={self.num_kv_heads}")
        if self.head_dim * self.num_heads != self.embed_dim:
            parts.append(f"head_dim={self.head_dim}")
        if not self.packed:
            parts.append(f"kdim={self.kdim}, vdim={self.vdim}")
        if self.dropout:
            parts.append(f"dropout={self.dropout}")
        return ", ".join(parts)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        q_offset: int | str | Tensor = 0,
        scale: float | None = None,
        alibi_slopes: Tensor | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        head_gates: Tensor | None = None,
        need_weights: bool = False,
        average_attn_weights: bool = True,
        backend: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from `query` to `key`, or from `query` to itself.

        Parameters
        ----------
        query : Tensor
            (B, Lq, embed_dim), or (Lq, embed_dim) without a batch; then everything below is without a batch too.
        key, value : Tensor, optional
            (B, Lk, kdim) and (B, Lk, vdim). Without `key`: `query`; without `value`: `key`.
        attn_mask : Tensor, optional
            (Lq, Lk), (B, Lq, Lk) or (B, Hq, Lq, Lk), where a size may be 1; without a batch (Lq, Lk) or (Hq, Lq, Lk).
            bool: True takes part; floating: added to the scores, and may need a gradient.
        key_mask : Tensor, optional
            (B, Lk), of the same polarity: bool, True where this key takes part, or floating, added to its scores.
            (Lk,) without a batch. Every mask given applies: a key is seen where all of them let it.
        key_lengths : Tensor, optional
            (B,) int: the keys j < length take part. Without a batch a single one, () or (1,).
        is_causal, window, q_offset, scale, alibi_slopes, softcap, sinks, backend
            As in `mha_ext.attention`. `is_causal` and `attn_mask` together both apply.
        head_gates : Tensor, optional
            (Hq,) or (B, Hq): factors of the heads' outputs, before the output projection; 0 switches a head off. May
            need a gradient, which tells how much a head contributes (Michel et al., 2019). (Hq,) without a batch.
        need_weights : bool, default False
            Return the weights too.
        average_attn_weights : bool, default True
            Whether the returned weights are the mean over the heads.

        Returns
        -------
        output : Tensor
            Of `query`'s shape. A query that sees no key gets weights 0, and so `out_proj`'s bias.
        weights : Tensor
            Only with `need_weights`: (B, Lq, Lk), or (B, Hq, Lq, Lk) without the mean; before dropout.

        Raises
        ------
        ValueError
            A shape, a device, a dtype or a number does not fit; the message names the argument and what came.
        TypeError
            An argument is of another kind than described.
        """
        if key is None:
            if value is not None:
                raise ValueError("value: expected None where key is None, got a value without a key")
            key = query
        value = key if value is None else value
        self._check_inputs(query, key, value)
        check_bool("need_weights", need_weights)
        check_bool("average_attn_weights", average_attn_weights)
        batched = query.dim() == 3
        if head_gates is not None:
            check_tensor("head_gates", head_gates, dims=(1, 2) if batched else (1,))
            leading = query.shape[: head_gates.dim() - 1]
            check_shape("head_gates", head_gates, (*leading, self.num_heads), "(B, Hq)" if leading else "(Hq,)")
            check_alike("head_gates", head_gates, "query", query, dtype=False)

        arguments: dict[str, Any] = {
            "attn_mask": self._mask(query, key, attn_mask, key_mask),
            "dropout_p": self.dropout if self.training else 0.0,
            "is_causal": is_causal,
            "scale": scale,
            "window": window,
            "q_offset": q_offset if batched else _of_one_item(q_offset),
            "key_lengths": key_lengths if batched else _of_one_item(key_lengths),
            "alibi_slopes": alibi_slopes,
            "softcap": softcap,
            "sinks": sinks,
            "return_weights": need_weights,
            "backend": backend,
        }
        if self.packed and query is key and key is value and (attn_mask is None or key_mask is None):
            packed: Tensor = self.qkv_proj(query)
            if packed.shape[-1] != sum(self.projection_sizes):
                raise ValueError(
                    f"qkv_proj: expected {sum(self.projection_sizes)} features, got an output of {tuple(packed.shape)}"
                )
            packed = packed if batched else packed[None]
            result = functional.packed_attention(packed, self.num_heads, self.num_kv_heads, **arguments)
        else:
            q, k, v = self._project(query, key, value)
            if attn_mask is not None and key_mask is not None:  # one mask for both no longer says which keys are hidden
                hidden = hidden_by(key_mask)[..., None]
                k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
            result = functional.attention(
                self._split_heads(q, self.num_heads),
                self._split_heads(k, self.num_kv_heads),
                self._split_heads(v, self.num_kv_heads),
                **arguments,
            )
        if isinstance(result, Tensor):
            return self._merge_heads(result, query, head_gates)
        weights = result.weights
        assert weights is not None
        weights = weights.mean(1) if average_attn_weights else weights
        return self._merge_heads(result.output, query, head_gates), weights if query.dim() == 3 else weights[0]

    def prune_heads(self, heads: Iterable[int]) -> None:
        """Remove query heads for good, with their rows and columns of the projections.

        The module becomes one of fewer heads, and computes what it computed before with `head_gates` of 0 for the
        removed ones. A key head goes with the last query head that reads it. The projections get new, smaller
        parameters: make the optimizer afterwards. A saved state dict fits a fresh module after the same call.

        Parameters
        ----------
        heads : iterable of int
            As they are numbered now, from 0.

        Raises
        ------
        ValueError
            No head would be left; the key heads that are left would have different numbers of query heads; or a
            projection is wrapped, parametrised or replaced. Nothing is changed then.

        Source: Michel et al., Are sixteen heads really better than one?, 2019.
        """
        prune_heads(self, heads)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Shapes, dtypes and devices of what the projections read."""
        mixed = isinstance(query, Tensor) and autocasts(query)
        check_tensor("query", query, dims=(2, 3))
        check_width("query", query, self.embed_dim)
        projection = self.qkv_proj if self.packed else self.q_proj
        if not mixed and _is_bare_linear(projection) and projection.weight.dtype != query.dtype:
            raise ValueError(f"query: expected dtype {projection.weight.dtype} as the parameters, got {query.dtype}")
        if self.packed and query is key and key is value:
            return
        for name, x, width in (("key", key, self.kdim), ("value", value, self.vdim)):
            check_tensor(name, x, dims=(2, 3))
            check_width(name, x, width)
            if x.dim() != query.dim() or x.shape[:-2] != query.shape[:-2]:
                raise ValueError(f"{name}: expected the batch of query {tuple(query.shape)}, got {tuple(x.shape)}")
            check_alike(name, x, "query", query, dtype=not mixed)
        if key.shape[-2] != value.shape[-2]:
            raise ValueError(f"value: expected the length of key {tuple(key.shape)}, got {tuple(value.shape)}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """(..., L, features) each, as views of as few products as possible."""
        if not self.packed:
            return self.q_proj(query), self.k_proj(key), self.v_proj(value)
        sizes = self.projection_sizes
        if query is key and key is value:
            packed: Tensor = self.qkv_proj(query)
            return packed.split(sizes, -1)
        k_start, v_start, end = sizes[0], sizes[0] + sizes[1], sum(sizes)
        q = self._packed_slice(query, 0, k_start)
        if key is value:
            return q, *self._packed_slice(key, k_start, end).split(sizes[1:], -1)
        return q, self._packed_slice(key, k_start, v_start), self._packed_slice(value, v_start, end)

    def _packed_slice(self, x: Tensor, start: int, end: int) -> Tensor:
        """Columns start..end of what the packed projection yields for x."""
        linear = self.qkv_proj
        if _is_bare_linear(linear):
            return F.linear(x, linear.weight[start:end], None if linear.bias is None else linear.bias[start:end])
        packed: Tensor = linear(x)
        return packed[..., start:end]

    def _split_heads(self, x: Tensor, num_heads: int) -> Tensor:
        """(B, L, heads D) or (L, heads D) -> (B or 1, heads, L, D), a view."""
        x = x if x.dim() == 3 else x[None]
        return x.unflatten(-1, (num_heads, self.head_dim)).transpose(1, 2)

    def _merge_heads(self, heads: Tensor, query: Tensor, gates: Tensor | None) -> Tensor:
        """(B or 1, Hq, Lq, D) -> the output projection, of query's shape."""
        if gates is not None:
            heads = heads * gates.to(heads.dtype)[..., None, None]
        merged = heads.transpose(1, 2).flatten(2)
        output: Tensor = self.out_proj(merged if query.dim() == 3 else merged[0])
        return output

    def _mask(self, query: Tensor, key: Tensor, attn_mask: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
        """One mask of four dimensions for both; where only one is given, a view of it."""
        batched = query.dim() == 3
        batch, seqlen_q, seqlen_kv = query.shape[0] if batched else 1, query.shape[-2], key.shape[-2]
        if attn_mask is not None:
            check_tensor("attn_mask", attn_mask, dtypes=(torch.bool, *FLOATING))
            check_alike("attn_mask", attn_mask, "query", query, dtype=False)
            attn_mask = _four_axes(attn_mask, (batch, self.num_heads, seqlen_q, seqlen_kv), batched)
        if key_mask is None:
            return attn_mask
        check_tensor("key_mask", key_mask, dtypes=(torch.bool, *FLOATING))
        check_alike("key_mask", key_mask, "query", query, dtype=False)
        if batched:
            check_shape("key_mask", key_mask, (batch, seqlen_kv), "(B, Lk)")
        else:
            check_shape("key_mask", key_mask, (seqlen_kv,), "(Lk,)")
        key_mask = key_mask.reshape(batch, 1, 1, seqlen_kv)
        return key_mask if attn_mask is None else both_masks(attn_mask, key_mask)


def _of_one_item(x: Any) -> Any:
    """A number in a tensor without axes, as of a batch of one."""
    return x.reshape(1) if isinstance(x, Tensor) and x.dim() == 0 else x


def _four_axes(attn_mask: Tensor, wanted: tuple[int, int, int, int], batched: bool) -> Tensor:
    """View attn_mask with four axes, each of size 1 or as wanted: (B, Hq, Lq, Lk)."""
    mask = attn_mask
    if mask.dim() == 2:
        mask = mask[None, None]
    elif mask.dim() == 3:
        mask = mask[:, None] if batched else mask[None]
    fits = mask.dim() == 4 and all(have in (1, want) for have, want in zip(mask.shape, wanted, strict=True))
    if fits and (batched or attn_mask.dim() < 4):
        return mask
    batch, heads, seqlen_q, seqlen_kv = wanted
    forms = "(Lq, Lk), (B, Lq, Lk) or (B, Hq, Lq, Lk)" if batched else "(Lq, Lk) or (Hq, Lq, Lk)"
    sizes = f"B = {batch}, " if batched else ""
    sizes += f"Hq = {heads}, Lq = {seqlen_q}, Lk = {seqlen_kv}"
    of_torch = attn_mask.shape == (batch * heads, seqlen_q, seqlen_kv)
    hint = "; give torch's (B Hq, Lq, Lk) as attn_mask.view(B, Hq, Lq, Lk)" if of_torch else ""
    raise ValueError(f"attn_mask: expected shape {forms} with {sizes}, got {tuple(attn_mask.shape)}{hint}")


def _is_bare_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling this module is multiplying by its weight, and nothing anyone attached."""
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and not (module._forward_pre_hooks or module._forward_hooks)
        and not (module._backward_pre_hooks or module._backward_hooks)
        and not _has_any_global_hook()
    )
