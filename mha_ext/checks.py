"""Argument checks: every refusal names the argument, what was expected and what came."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def describe(x: Any) -> str:
    """What came, in a few words."""
    if isinstance(x, Tensor):
        return f"a {x.dtype} tensor of shape {tuple(x.shape)} on {x.device}"
    text = repr(x)
    return f"{text} ({type(x).__name__})" if len(text) <= 60 and "\n" not in text else f"a {type(x).__name__}"


def check_tensor(
    name: str, x: Any, *, dtypes: Sequence[torch.dtype] = FLOATING, dims: Sequence[int] | None = None
) -> None:
    """A dense tensor of one of these dtypes and numbers of dimensions."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {describe(x)}")
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense (strided) tensor, got layout {x.layout}, nested: {x.is_nested}")
    if x.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: expected a dtype among {names}, got {x.dtype}")
    if dims is not None and x.dim() not in dims:
        raise ValueError(f"{name}: expected {' or '.join(map(str, dims))} dimensions, got shape {tuple(x.shape)}")


def check_shape(name: str, x: Tensor, shape: Sequence[int], meaning: str) -> None:
    """Exactly this shape; `meaning` spells it with names, as in (B, Hq)."""
    if x.shape != tuple(shape):
        raise ValueError(f"{name}: expected shape {meaning} = {tuple(shape)}, got {tuple(x.shape)}")


def check_width(name: str, x: Tensor, width: int) -> None:
    """So many features in the last dimension."""
    if x.shape[-1] != width:
        raise ValueError(f"{name}: expected {width} features (last dimension), got shape {tuple(x.shape)}")


def check_alike(name: str, x: Tensor, other_name: str, other: Tensor, *, dtype: bool = True) -> None:
    """On the same device as another argument, and of its dtype."""
    if x.device != other.device:
        raise ValueError(f"{name}: expected device {other.device} as {other_name}, got {x.device}")
    if dtype and x.dtype != other.dtype:
        raise ValueError(f"{name}: expected dtype {other.dtype} as {other_name}, got {x.dtype}")


def check_heads(num_heads: int, num_heads_kv: int, name: str = "query", name_kv: str = "key") -> None:
    """Query heads are a multiple of key/value heads."""
    if num_heads_kv == 0 and num_heads == 0:
        return
    if num_heads_kv == 0 or num_heads % num_heads_kv:
        raise ValueError(
            f"{name}: expected a number of heads that is a multiple of {name_kv}'s {num_heads_kv}, got {num_heads}"
        )


def check_real(
    name: str, x: Any, *, low: float = -math.inf, high: float = math.inf, above: float | None = None
) -> float:
    """A finite number within [low, high], or above a bound."""
    if type(x) is float and above is None and -math.inf < x < math.inf and low <= x <= high:
        return x
    symbolic = isinstance(x, (torch.SymFloat, torch.SymInt))  # of a graph that is being traced
    if isinstance(x, bool) or not (symbolic or isinstance(x, (int, float, Real))):
        raise TypeError(f"{name}: expected a number, got {describe(x)}")
    value: float = x if symbolic or isinstance(x, float) else float(x)
    if not -math.inf < value < math.inf or not low <= value <= high or (above is not None and value <= above):
        bounds = f"above {above}" if above is not None else f"in [{low}, {high}]"
        raise ValueError(f"{name}: expected a finite number {bounds}, got {x!r}")
    return value


FAR = 2**30  # beyond any position


def check_int(name: str, x: Any, *, low: int = -FAR, high: int = FAR) -> int:
    """An int, not a bool, within [low, high]."""
    if type(x) is int and low <= x <= high:
        return x
    if isinstance(x, bool) or not isinstance(x, (int, Integral, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {describe(x)}")
    number: int = x if isinstance(x, torch.SymInt) else int(x)  # type: ignore[assignment]
    if not low <= number <= high:
        raise ValueError(f"{name}: expected an int in [{low}, {high}], got {x}")
    return number


def check_bool(name: str, x: Any) -> bool:
    """True or False, nothing that merely behaves so."""
    if not isinstance(x, bool):
        raise TypeError(f"{name}: expected True or False, got {describe(x)}")
    return x
