"""Multi-head attention for PyTorch as hand-written CUDA kernels.

`attention` is the call (`attention_varlen` that of packed sequences), `MultiHeadAttention` the module; `qkv_split`,
`attention_scores`, `masked_softmax` and `attention_output` are its parts; `reference` says in plain PyTorch what they
mean. `compat.MultiheadAttention` goes in torch's module's place, and `convert` puts it there in a whole model.
`backends.explain` says which implementation a call takes, and `show_config` what this installation has.
"""

from . import (
    backends,
    compat,
    derivatives,  # noqa: F401  registers them
    flops,  # noqa: F401
    reference,
)
from .config import show_config
from .conversion import convert
from .functional import (
    attention,
    attention_output,
    attention_scores,
    attention_varlen,
    masked_softmax,
    qkv_split,
)
from .integrations import sdpa as _sdpa  # noqa: F401  puts it into torch's registry
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
    "convert",
    "masked_softmax",
    "qkv_split",
    "reference",
    "show_config",
]
