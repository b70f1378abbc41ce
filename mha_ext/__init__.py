"""Multi-head attention for PyTorch as hand-written CUDA kernels.

`attention` is the call (`attention_varlen` that of packed sequences), `MultiHeadAttention` the module; `qkv_split`,
`attention_scores`, `masked_softmax` and `attention_output` are its parts; `reference` says in plain PyTorch what they
mean; `backends.explain` says which implementation a call takes, and `show_config` what this installation has.
"""

from . import backends, compat, reference
from .config import show_config
from .functional import (
    attention,
    attention_output,
    attention_scores,
    attention_varlen,
    masked_softmax,
    qkv_split,
)
from .modules import MultiHeadAttention
from .reference import AttentionResult

__version__ = "0.1.0"

__all__ = [
    "AttentionResult",
    "MultiHeadAttention",
    "attention",
    "attention_output",
    "attention_scores",
    "attention_varlen",
    "backends",
    "compat",
    "masked_softmax",
    "qkv_split",
    "reference",
    "show_config",
]
