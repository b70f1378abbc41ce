"""Attention calls as data: odd shapes and every score rule, by name. `make_inputs` turns one into tensors."""

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor


class BackendUnderTest(NamedTuple):
    name: str
    device: str

    @property
    def simulated(self) -> bool:
        """CUDA kernels, and no GPU."""
        return self.name != "reference" and self.device == "cpu"


Count = Callable[[Callable[[], Any]], list[Any]]  # runs a call, and returns what each of its kernels did


class Shape(NamedTuple):
    """query (B, Hq, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv)."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    head_dim_v: int

    @property
    def scores(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.seqlen_q, self.seqlen_kv


class Case(NamedTuple):
    name: str
    shape: Shape
    rules: tuple[str, ...] = ()


SHAPES = {
    "one": Shape(1, 1, 1, 1, 1, 1, 1),
    "one_query": Shape(2, 3, 3, 1, 19, 8, 8),
    "one_key": Shape(2, 2, 2, 21, 1, 16, 8),
    "odd": Shape(2, 3, 3, 13, 17, 5, 7),
    "gqa": Shape(2, 6, 2, 9, 11, 16, 16),
    "mqa": Shape(1, 4, 1, 18, 33, 24, 40),
    "full_tile": Shape(1, 2, 2, 64, 64, 64, 64),
    "past_a_tile": Shape(1, 2, 1, 65, 66, 72, 64),
    "long_query": Shape(1, 1, 1, 130, 7, 32, 33),
    "long_key": Shape(1, 1, 1, 5, 129, 40, 32),
    "wide_head": Shape(1, 1, 1, 3, 6, 256, 256),
}

# --- rules: (shape, dtype, generator) -> keyword arguments -------------------------------------------

Rule = Callable[[Shape, torch.dtype, torch.Generator], dict[str, Any]]


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _causal(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    return {"is_causal": True}


def _causal_end(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    return {"is_causal": True, "q_offset": "end"}


def _causal_offsets(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    return {"is_causal": True, "q_offset": torch.arange(shape.batch) * 3 - 1}


def _offset(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    return {"q_offset": 2}


def _window(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    return {"window": (3, 1)}


def _window_left(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    return {"window": (4, None)}


def _lengths(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """The last item sees no key, where there is more than one."""
    lengths = [max(1, shape.seqlen_kv * (shape.batch - b) // shape.batch - b) for b in range(shape.batch)]
    return {"key_lengths": torch.tensor([*lengths[:-1], 0] if shape.batch > 1 else lengths)}


def _bool_mask(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """One in three hidden, and the last query of each head sees nothing."""
    mask = torch.rand(shape.scores, generator=generator) > 1 / 3
    mask[:, :, -1] = False
    return {"attn_mask": mask}


def _key_padding(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    mask = torch.rand((shape.batch, 1, 1, shape.seqlen_kv), generator=generator) > 1 / 3
    return {"attn_mask": mask}


def _bias(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    return {"attn_mask": torch.randn(shape.scores, generator=generator).to(dtype)}


def _bias_hides(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """A bias shared by the batch, with -inf in it."""
    bias = torch.randn(shape.scores[1:], generator=generator)
    return {"attn_mask": bias.masked_fill(bias > 0.7, -math.inf).to(dtype)}


def _bias_by_head(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    return {"attn_mask": torch.randn((shape.heads, 1, shape.seqlen_kv), generator=generator).to(dtype)}


def _alibi(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    slopes = 2.0 ** -torch.arange(1, shape.heads + 1)
    return {"alibi_slopes": slopes.to(statistics_dtype(dtype))}


def _alibi_by_batch(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    slopes = torch.rand((shape.batch, shape.heads), generator=generator) - 0.3
    return {"alibi_slopes": slopes.to(statistics_dtype(dtype))}


def _softcap(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    return {"softcap": 1.5}


def _sinks(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    return {"sinks": torch.randn(shape.heads, generator=generator).to(statistics_dtype(dtype))}


def _scale(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    return {"scale": -0.7}


RULES: dict[str, Rule] = {
    "causal": _causal,
    "causal_end": _causal_end,
    "causal_offsets": _causal_offsets,
    "offset": _offset,
    "window": _window,
    "window_left": _window_left,
    "lengths": _lengths,
    "bool_mask": _bool_mask,
    "key_padding": _key_padding,
    "bias": _bias,
    "bias_hides": _bias_hides,
    "bias_by_head": _bias_by_head,
    "alibi": _alibi,
    "alibi_by_batch": _alibi_by_batch,
    "softcap": _softcap,
    "sinks": _sinks,
    "scale": _scale,
}

SHAPE_CASES = [Case(name, shape) for name, shape in SHAPES.items()]
RULE_CASES = [Case(name, SHAPES["gqa"], (name,)) for name in RULES]
COMBINED_CASES = [
    Case(
        "everything_bool",
        Shape(2, 4, 2, 10, 14, 8, 12),
        ("bool_mask", "causal_offsets", "window_left", "lengths", "alibi_by_batch", "softcap", "sinks", "scale"),
    ),
    Case(
        "everything_bias",
        Shape(2, 4, 2, 14, 10, 12, 8),
        ("bias_hides", "causal_end", "window_left", "lengths", "alibi", "softcap", "sinks"),
    ),
    Case("bias_of_a_swin_window", Shape(3, 4, 4, 49, 49, 32, 32), ("bias_by_head",)),
    Case("decode", Shape(2, 4, 2, 1, 37, 16, 16), ("causal_end", "lengths", "alibi")),
    Case("more_queries_than_keys", Shape(1, 2, 2, 12, 5, 16, 16), ("causal_end", "sinks")),
]
CASES = SHAPE_CASES + RULE_CASES + COMBINED_CASES


def make_rule(case: Case, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name in case.rules:
        arguments.update(RULES[name](case.shape, dtype, generator))
    return arguments


def pairs_of_rules() -> list[Case]:
    """Every two rules that set different arguments."""
    shape, generator = Shape(2, 4, 2, 6, 8, 4, 3), torch.Generator()
    argument_names = {name: set(rule(shape, torch.float64, generator)) for name, rule in RULES.items()}
    return [
        Case(f"{a}-{b}", shape, (a, b)) for a, b in combinations(RULES, 2) if not argument_names[a] & argument_names[b]
    ]


def make_inputs(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of `mha_ext.attention`, the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    shape = case.shape
    inputs: dict[str, Any] = {
        "query": torch.randn((shape.batch, shape.heads, shape.seqlen_q, shape.head_dim), generator=generator),
        "key": torch.randn((shape.batch, shape.heads_kv, shape.seqlen_kv, shape.head_dim), generator=generator),
        "value": torch.randn((shape.batch, shape.heads_kv, shape.seqlen_kv, shape.head_dim_v), generator=generator),
    }
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    inputs.update(make_rule(case, dtype, generator))
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}


DIFFERENTIABLE = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")


def leaves(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The inputs that can have a gradient; from here on they require one."""
    found = {name: inputs[name] for name in DIFFERENTIABLE if name in inputs}
    return {name: x.requires_grad_() for name, x in found.items() if x.is_floating_point()}
