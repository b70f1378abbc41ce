"""Other layouts of multi-head attention's parameters, read into `mha_ext.MultiHeadAttention`."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .modules import MultiHeadAttention

# A name in another layout -> ours. Each entry of a packed weight or bias has the rows of all query heads first, then
# those of the key heads, then those of the value heads.
KNOWN_NAMES = {
    # torch.nn.MultiheadAttention; its out_proj has our name
    "in_proj_weight": "qkv_proj.weight",
    "in_proj_bias": "qkv_proj.bias",
    "q_proj_weight": "q_proj.weight",
    "k_proj_weight": "k_proj.weight",
    "v_proj_weight": "v_proj.weight",
    # one packed linear layer and an output layer
    "qkv.weight": "qkv_proj.weight",
    "qkv.bias": "qkv_proj.bias",
    "out.weight": "out_proj.weight",
    "out.bias": "out_proj.bias",
    # four linear layers
    "W_q.weight": "q_proj.weight",
    "W_q.bias": "q_proj.bias",
    "W_k.weight": "k_proj.weight",
    "W_k.bias": "k_proj.bias",
    "W_v.weight": "v_proj.weight",
    "W_v.bias": "v_proj.bias",
    "W_o.weight": "out_proj.weight",
    "W_o.bias": "out_proj.bias",
}


@torch.no_grad()
def adopt_known_layout(
    module: "MultiHeadAttention",
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Rename what has a known name, then pack or separate the input projections as the module has them.

    A hook before `load_state_dict`, which hands over its own copy of the dict. What is not recognised stays, for
    `load_state_dict` to complain of.
    """
    for known, ours in KNOWN_NAMES.items():
        owned = known.split(".")[0] in module._modules  # a subclass may have a child of that name
        if prefix + known in state_dict and prefix + ours not in state_dict and not owned:
            state_dict[prefix + ours] = state_dict.pop(prefix + known)

    for kind in ("weight", "bias"):
        packed = f"{prefix}qkv_proj.{kind}"
        separate = [f"{prefix}{name}_proj.{kind}" for name in "qkv"]
        if module.packed and packed not in state_dict and all(key in state_dict for key in separate):
            parts = [state_dict[key] for key in separate]
            if len({part.shape[1:] for part in parts}) > 1:
                shapes = ", ".join(str(tuple(part.shape)) for part in parts)
                error_msgs.append(f"q, k and v of different width do not fit into {packed}: {shapes}.")
            else:
                state_dict[packed] = torch.cat(parts)
            for key in separate:
                del state_dict[key]
        elif not module.packed and packed in state_dict and not any(key in state_dict for key in separate):
            rows = state_dict[packed]
            if rows.shape[0] != sum(module.projection_sizes):
                sizes = " + ".join(map(str, module.projection_sizes))
                error_msgs.append(f"{packed} of shape {tuple(rows.shape)} does not split into {sizes} rows.")
            else:
                state_dict.update(zip(separate, rows.split(module.projection_sizes), strict=True))
                del state_dict[packed]


def torch_state_dict(module: nn.MultiheadAttention) -> dict[str, Tensor]:
    """Copies of the parameters in force of a `torch.nn.MultiheadAttention`, pruning and parametrisations applied."""
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(f"module: expected a torch.nn.MultiheadAttention, got {type(module).__name__}")
    if module.bias_k is not None or module.bias_v is not None:
        raise ValueError("module: expected add_bias_kv=False, got a module whose bias_k and bias_v are one more key")
    if module.add_zero_attn:
        raise ValueError("module: expected add_zero_attn=False, got a module that adds a key of zeros")
    state = {
        "in_proj_weight": module.in_proj_weight,
        "q_proj_weight": module.q_proj_weight,
        "k_proj_weight": module.k_proj_weight,
        "v_proj_weight": module.v_proj_weight,
        "in_proj_bias": module.in_proj_bias,
        "out_proj.weight": module.out_proj.weight,
        "out_proj.bias": module.out_proj.bias,
    }
    return {name: value.detach().clone() for name, value in state.items() if value is not None}
