"""`convert`: the `nn.MultiheadAttention`s in a model become `mha_ext.compat.MultiheadAttention`s."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from .compat import MultiheadAttention

__all__ = ["Conversion", "convert"]


class Conversion(NamedTuple):
    """What `convert` did, by qualified names within the model ("" is the model itself)."""

    swapped: list[str]
    left: dict[str, str]  # each with the reason

    def __str__(self) -> str:
        lines = [f"swapped {len(self.swapped)}, left {len(self.left)}"]
        lines += [f"  swapped {_shown(name)}" for name in self.swapped]
        lines += [f"  left    {_shown(name)}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def convert(model: nn.Module) -> Conversion:
    """Turn every `nn.MultiheadAttention` in a model into `mha_ext.compat.MultiheadAttention`, in place.

    Each stays the same object with the same parameters, hooks, parametrisations, mode and state dict, so that
    optimizers, references and checkpoints stay valid: only what its `forward` does is ours, with the differences that
    the class names. A module that stands in several places is swapped once, under its first name.

    `nn.TransformerEncoder`s around them stop making nested tensors in evaluation, which would set the outputs of
    padded queries to 0 there and not in training.

    Parameters
    ----------
    model : nn.Module
        Also an `nn.MultiheadAttention` itself. Convert before `torch.jit.script` and before sharding (`fully_shard`),
        and after what asks for an `nn.MultiheadAttention` itself: peft's adapters, `torch.ao.quantization.prepare`.

    Returns
    -------
    Conversion
        `swapped`, a list of names, and `left`, a dict of names with the reason. Its `str` says both.

    Raises
    ------
    TypeError
        `model` is no module.

    Examples
    --------
    >>> import torch, mha_ext
    >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    >>> print(mha_ext.convert(model))
    swapped 1, left 0
      swapped self_attn
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    report = Conversion([], {})
    for name, module in model.named_modules():
        scripted = isinstance(module, torch.jit.ScriptModule) and module.original_name == "MultiheadAttention"
        if not scripted and not isinstance(module, nn.MultiheadAttention):
            continue
        reason = _why_not(module)
        if reason is None:
            _swap(module)
            report.swapped.append(name)
        else:
            report.left[name] = reason
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(
            isinstance(m, MultiheadAttention) for m in module.modules()
        ):
            module.use_nested_tensor = False
    return report


def _why_not(module: nn.Module) -> str | None:
    """Why this module is left as it is."""
    if isinstance(module, MultiheadAttention):
        return "it is an mha_ext.compat.MultiheadAttention already"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by torch.jit.script; convert before that"
    kind: type = parametrize.type_before_parametrizations(module)
    if kind is not nn.MultiheadAttention:
        return (
            f"its class is {kind.__module__}.{kind.__qualname__}, which may do more than nn.MultiheadAttention; "
            "derive that from mha_ext.compat.MultiheadAttention, or convert before the class is changed"
        )
    if "forward" in vars(module):
        return "it has a forward of its own on the instance; convert before that is set"
    return None


def _swap(module: nn.Module) -> None:
    kind = type(module)
    if kind is nn.MultiheadAttention:
        module.__class__ = MultiheadAttention
    else:  # parametrised: a class of its own, whose properties are the parametrised tensors
        own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        module.__class__ = type(kind.__name__, (MultiheadAttention,), own)
    assert isinstance(module, MultiheadAttention)
    module.keep_from_fast_path()


def _shown(name: str) -> str:
    return name or "(the model itself)"
