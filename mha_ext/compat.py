"""`torch.nn.MultiheadAttention` by signature and meaning, computed by `mha_ext.attention`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import functional, nested
from .autocast import autocasts
from .call import from_heads
from .checks import FLOATING, check_alike, check_int, check_real, check_shape, check_tensor, check_width
from .masks import both_masks, hidden_by

__all__ = ["MultiheadAttention"]


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`, in place of which it goes: constructor, `forward`, parameters and state dict.

    It is a subclass, so that parameters, their names, their first values and the random numbers spent on them are
    torch's. `mha_ext.convert` turns the ones in a model into this. New code does better with
    `mha_ext.MultiHeadAttention`, which has grouped heads, windows and gates.

    Parameters
    ----------
    embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        As in torch. `batch_first` is False by default: (L, N, E).

    Notes
    -----
    What differs from torch's:

    - One path. Without dropout the output is bit for bit the same in training and evaluation, with and without
      `need_weights`, and up to rounding the same with and without gradients.
    - A query that sees no key gets weights 0 and `out_proj`'s bias, not NaN.
    - What `key_padding_mask` hides changes no output and no gradient of another input, be it NaN. (The gradients of the
      projections' weights see every row of their input.)
    - `out_proj` is called as a module: hooks, pruning, parametrisations and replacements of it take effect.
    - `is_causal` is a rule, not a hint: query i sees the keys j <= i that the masks show it, with or without
      `attn_mask` (which torch demands, and then may ignore).
    - Masks may be of different kinds and of any floating dtype.
    - Nested tensors work in training too, with different query, key and value, and in layout `torch.jagged` too.
    - What is refused is a `ValueError` or `TypeError` that names the argument.

    As in torch, and unlike `mha_ext.MultiHeadAttention`: masks say True where a key is hidden, weights are returned by
    default, and they are those after dropout.

    `nn.TransformerEncoder` and its layers call this module in evaluation too, never a fused function of torch's on its
    parameters. An encoder made of layers that have it already says that it makes no nested tensors, unless it is made
    with `enable_nested_tensor=False`.

    `torch.jit.script` compiles torch's own function instead, with the differences above undone: a saved program runs
    where this package is not installed.

    Examples
    --------
    >>> import torch, mha_ext
    >>> mha = mha_ext.compat.MultiheadAttention(16, 4, batch_first=True)
    >>> x = torch.randn(2, 5, 16)
    >>> output, weights = mha(x, x, x, key_padding_mask=torch.tensor([[False] * 5, [True] * 5]))
    >>> output.shape, weights.shape, bool(weights[1].any())
    (torch.Size([2, 5, 16]), torch.Size([2, 5, 5]), False)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_int("embed_dim", embed_dim, low=1)
        check_int("num_heads", num_heads, low=1)
        if embed_dim % num_heads:
            raise ValueError(
                f"embed_dim: expected a multiple of num_heads = {num_heads}, got {embed_dim} "
                f"(mha_ext.MultiHeadAttention takes a head_dim)"
            )
        check_real("dropout", dropout, low=0, high=1)
        if dtype is not None and dtype not in FLOATING:
            raise TypeError(f"dtype: expected float16, bfloat16, float32 or float64, got {dtype}")
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )

    def _reset_parameters(self) -> None:
        """Draw the first values, as torch does, and keep torch's layers from reading the parameters themselves."""
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self.keep_from_fast_path()

    def keep_from_fast_path(self) -> None:
        """Have `nn.TransformerEncoderLayer` call this module.

        In evaluation it calls a fused function of torch's on this module's parameters instead, unless they are separate
        ones. So this says they are; whether they are is what `in_proj_weight` tells.
        """
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` to `key`.

        Parameters
        ----------
        query, key, value : Tensor
            (L, N, embed_dim), (S, N, kdim), (S, N, vdim); with `batch_first` (N, L, embed_dim) and so on; without a
            batch (L, embed_dim) and so on. Or nested tensors of N sequences, of layout `torch.strided` or
            `torch.jagged`, with `batch_first` and without masks.
        key_padding_mask : Tensor, optional
            (N, S), without a batch (S,). bool: True hides the key; floating: added to its scores.
        need_weights : bool, default True
            Return the weights too.
        attn_mask : Tensor, optional
            (L, S), (N num_heads, L, S), without a batch (num_heads, L, S). bool: True hides; floating: added to the
            scores, and may need a gradient. A key is seen where both masks and `is_causal` let it.
        average_attn_weights : bool, default True
            Whether the returned weights are the mean over the heads.
        is_causal : bool, default False
            Query i sees the keys j <= i. The keys of `add_bias_kv` and `add_zero_attn` are always seen.

        Returns
        -------
        output : Tensor
            Of `query`'s shape and layout.
        weights : Tensor or None
            With `need_weights` (N, L, S), or (N, num_heads, L, S) without the mean, after dropout; without a batch
            without N. `add_bias_kv` and `add_zero_attn` add a column each. Of nested tensors: padded with zeros.

        Raises
        ------
        ValueError
            A shape, a device or a dtype does not fit; the message names the argument and what came.
        TypeError
            An argument is of another kind than described.
        """
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return self._by_torch(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        return self._attend(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )

    def _by_torch(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        swap = self.batch_first and query.dim() == 3
        if swap:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        output, weights = F.multi_head_attention_forward(
            query, key, value, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias, self.bias_k,
            self.bias_v, self.add_zero_attn, self.dropout, self.out_proj.weight, self.out_proj.bias,
            training=self.training, key_padding_mask=key_padding_mask, need_weights=need_weights, attn_mask=attn_mask,
            use_separate_proj_weight=self.in_proj_weight is None, q_proj_weight=self.q_proj_weight,
            k_proj_weight=self.k_proj_weight, v_proj_weight=self.v_proj_weight,
            average_attn_weights=average_attn_weights, is_causal=is_causal,
        )  # fmt: skip
        return output.transpose(0, 1) if swap else output, weights

    @torch.jit.unused
    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(query, Tensor) and query.is_nested:
            self._check_nested(key_padding_mask, attn_mask)
            return self._attend_nested(query, key, value, need_weights, average_attn_weights, is_causal)
        self._check_inputs(query, key, value)
        batched = query.dim() == 3
        by_sequence = batched and not self.batch_first  # (L, N, E)
        mask = hidden = None
        if attn_mask is not None or key_padding_mask is not None:
            n = query.shape[1 if by_sequence else 0] if batched else 1
            length_q, length_k = (x.shape[0 if by_sequence else -2] for x in (query, key))
            mask = self._mask(query, attn_mask, key_padding_mask, (n, length_q, length_k), batched)
            # 0 * NaN is NaN: padding leaves the products where the mask no longer says that no query sees it.
            extended = self.bias_k is not None or self.add_zero_attn
            if key_padding_mask is not None and (attn_mask is not None or need_weights or extended):
                hidden = hidden_by(_shown(key_padding_mask)).view(n, length_k)
        heads, weights = self._attend_dense(query, key, value, mask, hidden, None, need_weights, is_causal)
        merged = (heads.permute(2, 0, 1, 3) if by_sequence else heads.transpose(1, 2)).flatten(2)
        output: Tensor = self.out_proj(merged if batched else merged[0])
        if weights is None:
            return output, None
        weights = weights.mean(1) if average_attn_weights else weights
        return output, weights if batched else weights[0]

    def _attend_dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        hidden: Tensor | None,
        key_lengths: Tensor | None,
        need_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and weights of the heads, (N, H, L, D) and (N, H, L, S).

        `mask` and `key_lengths` as `mha_ext.attention` takes them; `hidden` (N, S), the keys that need to be zeros.
        """
        dropout_p = self.dropout if self.training else 0.0
        extended = self.bias_k is not None or self.add_zero_attn
        whole = query is key and key is value and self.in_proj_weight is not None
        output: Any
        if whole and hidden is None and not (need_weights or extended):
            packed = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            if packed.dim() == 2:
                packed = packed[None]
            elif not self.batch_first:
                packed = packed.transpose(0, 1)
            output = functional.packed_attention(
                packed, self.num_heads, self.num_heads, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal
            )
            return output, None

        q, k, v = self._project(query, key, value)
        if hidden is not None:
            hidden = hidden[:, None, :, None]
            k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
        if extended:
            if is_causal:
                triangle = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
                mask = triangle if mask is None else both_masks(mask, triangle)
                is_causal = False
            k, v, mask = self._extend(k, v, mask)
        weights = None
        if need_weights:
            weights = functional.attention_weights(q, k, mask, dropout_p, is_causal, key_lengths)
            if dropout_p > 0:  # one draw for both
                return functional.attention_output(weights, v), weights
        # Once more of the scores: faster than a product with weights in memory, and the same with and without them.
        output = functional.attention(q, k, v, mask, dropout_p, is_causal, key_lengths=key_lengths)
        return output, weights

    def _attend_nested(
        self, query: Any, key: Any, value: Any, need_weights: bool, average_attn_weights: bool, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The same of nested tensors, which are padded only where weights are wanted."""
        layout = query.layout
        of_one = key is query, value is key
        query = nested.as_jagged("query", query, layout)
        key = query if of_one[0] else nested.as_jagged("key", key, layout)
        value = key if of_one[1] else nested.as_jagged("value", value, layout)
        values, _, _, offsets_q, offsets_k = nested.packed(query, key, value)
        rows_q = query.values()
        rows_k = rows_q if of_one[0] else key.values()
        rows_v = rows_k if of_one[1] else value.values()
        self._check_inputs(rows_q, rows_k, rows_v)
        weights = None
        if need_weights:
            padded_q = _padded(query, offsets_q)
            padded_k = padded_q if of_one[0] else _padded(key, offsets_k)
            padded_v = padded_k if of_one[1] else _padded(value, offsets_k)
            heads, weights = self._attend_dense(
                padded_q, padded_k, padded_v, None, None, offsets_k.diff(), True, is_causal
            )
            beyond = torch.arange(padded_q.shape[1], device=values.device) >= offsets_q.diff()[:, None]
            merged = heads.transpose(1, 2)[~beyond].flatten(1)
            assert weights is not None
            weights = weights.masked_fill(beyond[:, None, :, None], 0)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            q, k, v = map(from_heads, self._project(rows_q, rows_k, rows_v))
            dropout_p = self.dropout if self.training else 0.0
            result = functional.attention_varlen(q, k, v, offsets_q, offsets_k, dropout_p, is_causal)
            assert isinstance(result, Tensor)
            merged = result.flatten(1)
        output = torch.nested.nested_tensor_from_jagged(self.out_proj(merged), offsets_q)
        if layout == torch.strided:
            output = torch.nested.as_nested_tensor(list(output.unbind()), layout=torch.strided)
        return output, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projected query, key and value (N, H, L, D), as views of as few products as possible."""
        weight, bias, width, heads = self.in_proj_weight, self.in_proj_bias, self.embed_dim, self.num_heads
        if weight is not None and key is value:
            if query is key:
                q, k, v = self._heads(F.linear(query, weight, bias)).split_with_sizes((heads,) * 3, 1)
                return q, k, v
            sizes = (width, 2 * width)
            biases = (None, None) if bias is None else bias.split(sizes)
            q, kv = map(F.linear, (query, key), weight.split(sizes), biases)
            k, v = self._heads(kv).split_with_sizes((heads, heads), 1)
            return self._heads(q), k, v
        weights = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weight is None else weight.split(width)
        )
        biases = (None, None, None) if bias is None else bias.split(width)
        q, k, v = map(F.linear, (query, key, value), weights, biases)
        return self._heads(q), self._heads(k), self._heads(v)

    def _heads(self, x: Tensor) -> Tensor:
        """(N, L, heads D), (L, N, heads D) or (L, heads D) -> (N or 1, heads, L, D), a view."""
        x = x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)
        if x.dim() == 3:
            x = x[None]
        elif not self.batch_first:
            return x.permute(1, 2, 0, 3)
        return x.transpose(1, 2)

    def _extend(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the keys of `add_bias_kv` and `add_zero_attn`, which every query sees."""
        added = 0
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat((x, bias.view(1, self.num_heads, 1, -1).expand(x.shape[0], -1, -1, -1).to(x.dtype)), 2)
                for x, bias in ((k, self.bias_k), (v, self.bias_v))
            )
            added += 1
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            added += 1
        return k, v, None if mask is None else F.pad(mask, (0, added), value=float(mask.dtype == torch.bool))

    def _mask(
        self,
        query: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        sizes: tuple[int, int, int],
        batched: bool,
    ) -> Tensor | None:
        """One mask for both, as `mha_ext.attention` takes it: (N or 1, H or 1, L or 1, S)."""
        n, length_q, length_k = sizes
        mask = None
        if key_padding_mask is not None:
            check_tensor("key_padding_mask", key_padding_mask, dtypes=(torch.bool, *FLOATING))
            check_alike("key_padding_mask", key_padding_mask, "query", query, dtype=False)
            shape, meaning = ((n, length_k), "(N, S)") if batched else ((length_k,), "(S,)")
            check_shape("key_padding_mask", key_padding_mask, shape, meaning)
            mask = _shown(key_padding_mask).view(n, 1, 1, length_k)
        if attn_mask is not None:
            check_tensor("attn_mask", attn_mask, dtypes=(torch.bool, *FLOATING))
            check_alike("attn_mask", attn_mask, "query", query, dtype=False)
            by_head = (n * self.num_heads, length_q, length_k)
            if attn_mask.shape == by_head[1:]:
                scores = _shown(attn_mask)[None, None]
            elif attn_mask.shape == by_head:
                scores = _shown(attn_mask).unflatten(0, (n, self.num_heads))
            else:
                forms = "(L, S) or (N num_heads, L, S)" if batched else "(L, S) or (num_heads, L, S)"
                hint = ""
                if attn_mask.shape == (n, length_q, length_k):
                    hint = "; give one mask an item as attn_mask.repeat_interleave(num_heads, 0)"
                elif attn_mask.shape == (n, self.num_heads, length_q, length_k):
                    hint = "; give one mask a head as attn_mask.flatten(0, 1)"
                raise ValueError(
                    f"attn_mask: expected shape {forms} = {by_head[1:]} or {by_head}, "
                    f"got {tuple(attn_mask.shape)}{hint}"
                )
            mask = scores if mask is None else both_masks(scores, mask)
        return mask

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Shapes, dtypes and devices of what the projections read."""
        check_tensor("query", query, dims=(2, 3))
        check_width("query", query, self.embed_dim)
        weight = self.in_proj_weight
        if key is not query or value is not query or weight is None:
            batch = slice(0, 0) if query.dim() == 2 else slice(0, 1) if self.batch_first else slice(1, 2)
            for name, x, width in (("key", key, self.kdim), ("value", value, self.vdim)):
                check_tensor(name, x, dims=(query.dim(),))
                check_width(name, x, width)
                if x.shape[batch] != query.shape[batch]:
                    raise ValueError(f"{name}: expected the batch of query {tuple(query.shape)}, got {tuple(x.shape)}")
                check_alike(name, x, "query", query, dtype=not autocasts(query))
            if key.shape[:-1] != value.shape[:-1]:
                raise ValueError(f"value: expected the length of key {tuple(key.shape)}, got {tuple(value.shape)}")
            weight = self.q_proj_weight if weight is None else weight
        if query.dtype != weight.dtype and not autocasts(query):
            raise ValueError(f"query: expected dtype {weight.dtype} as the parameters, got {query.dtype}")

    def _check_nested(self, key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> None:
        """What torch refuses with nested tensors, or has no meaning with them."""
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None:
                raise ValueError(f"{name}: expected None with nested tensors (is_causal goes), got a mask; pad them")
        if not self.batch_first:
            raise ValueError("query: expected a dense tensor where batch_first is False, got a nested one, (N, L, E)")
        if self.bias_k is not None or self.add_zero_attn:
            raise ValueError(
                "query: expected a dense tensor with add_bias_kv or add_zero_attn, got a nested one; pad it and "
                "give a key_padding_mask"
            )


def _shown(mask: Tensor) -> Tensor:
    """torch's mask, whose True hides, as `mha_ext.attention` takes it."""
    return ~mask if mask.dtype == torch.bool else mask


def _padded(x: Tensor, offsets: Tensor) -> Tensor:
    """(N, longest, E); by itself torch pads to the total length where it does not know the longest."""
    longest = int(offsets.diff().max()) if len(offsets) > 1 else 0
    return torch.nested.to_padded_tensor(x, 0.0, (len(offsets) - 1, longest, x.shape[-1]))
