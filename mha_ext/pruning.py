"""Removing heads from the parameters of `mha_ext.MultiHeadAttention`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .checks import check_int, describe

if TYPE_CHECKING:
    from .modules import MultiHeadAttention

GATES = "head_gates of 0 switch heads off without removing them"


@torch.no_grad()
def prune_heads(module: "MultiHeadAttention", heads: Iterable[int]) -> None:
    """`MultiHeadAttention.prune_heads`; nothing is changed before everything is checked."""
    num_heads, head_dim = module.num_heads, module.head_dim
    if isinstance(heads, Tensor) or not isinstance(heads, Iterable):
        raise TypeError(f"heads: expected an iterable of ints, got {describe(heads)}")
    removed = {check_int("heads", head, low=0, high=num_heads - 1) for head in heads}
    kept = [head for head in range(num_heads) if head not in removed]
    if not removed:
        return
    if not kept:
        raise ValueError(f"heads: expected at least one of {num_heads} heads to be left, got all of them")
    group = num_heads // module.num_kv_heads
    per_kv_head = [sum(head // group == kv_head for head in kept) for kv_head in range(module.num_kv_heads)]
    kept_kv = [kv_head for kv_head, count in enumerate(per_kv_head) if count]
    if len({per_kv_head[kv_head] for kv_head in kept_kv}) > 1:
        raise ValueError(
            f"heads: expected the same number of heads to be left for each key head that is left, got {per_kv_head} "
            f"for {module.num_kv_heads} key heads; {GATES}"
        )

    inputs = ("qkv_proj",) if module.packed else ("q_proj", "k_proj", "v_proj")
    linears = {name: _bare_linear(name, module.get_submodule(name)) for name in (*inputs, "out_proj")}
    q_rows, kv_rows = _rows(kept, head_dim), _rows(kept_kv, head_dim)
    if module.packed:
        q_features, kv_features, _ = module.projection_sizes
        k_start, v_start = q_features, q_features + kv_features
        rows = {"qkv_proj": torch.cat((q_rows, kv_rows + k_start, kv_rows + v_start))}
    else:
        rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    for name, indices in rows.items():
        linear = linears[name]
        linear.weight = _selected(linear.weight, 0, indices)
        linear.bias = None if linear.bias is None else _selected(linear.bias, 0, indices)
        linear.out_features = len(indices)
    out_proj = linears["out_proj"]
    out_proj.weight = _selected(out_proj.weight, 1, q_rows)
    out_proj.in_features = len(q_rows)
    module.num_heads, module.num_kv_heads = len(kept), len(kept_kv)


def _bare_linear(name: str, linear: nn.Module) -> nn.Linear:
    """A layer with parameters of its own, which can be replaced by smaller ones."""
    if type(linear) is not nn.Linear or not {"weight", "bias"} <= linear._parameters.keys():
        came = type(linear).__name__ if type(linear) is not nn.Linear else "one whose parameters are computed (pruned?)"
        raise ValueError(
            f"{name}: expected an nn.Linear with parameters of its own, got {came}; remove heads before wrapping, "
            f"or leave them: {GATES}"
        )
    return linear


def _rows(heads: list[int], head_dim: int) -> Tensor:
    """Features of these heads, in order."""
    return (torch.tensor(heads)[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _selected(parameter: Tensor, axis: int, indices: Tensor) -> nn.Parameter:
    chosen = parameter.index_select(axis, indices.to(parameter.device))
    return nn.Parameter(chosen, requires_grad=parameter.requires_grad)
