"""What is measured: model presets, the cases made from them, and how much of it one run does."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["GROUPS", "PLANS", "PRESETS", "Case", "Plan", "Preset", "cases_of"]


@dataclass(frozen=True)
class Preset:
    """The attention layer of a published model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_causal: bool

    @property
    def embed_dim(self) -> int:
        """Width of the model: all query heads side by side."""
        return self.num_heads * self.head_dim


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("bert-base", 12, 12, 64, is_causal=False),
        Preset("bert-large", 16, 16, 64, is_causal=False),
        Preset("gpt2", 12, 12, 64, is_causal=True),
        Preset("gpt2-medium", 16, 16, 64, is_causal=True),
        Preset("llama-7b", 32, 32, 128, is_causal=True),
        Preset("llama-2-70b", 64, 8, 128, is_causal=True),
    )
}

# Group on the command line -> kinds of case. Each kind has its own table.
GROUPS = {
    "attention": ("attention",),
    "module": ("module",),
    "parts": ("qkv_split", "attention_scores", "masked_softmax", "attention_output"),
}


@dataclass(frozen=True)
class Case:
    """One thing to time: self-attention of `batch` sequences of `length` tokens, or a part of it."""

    kind: str  # a value of GROUPS
    preset: Preset
    batch: int
    length: int
    dtype: torch.dtype
    is_causal: bool
    training: bool  # forward and backward, not the forward alone

    @property
    def label(self) -> str:
        """Preset, batch and length, mask: `gpt2 2x512 causal`."""
        return f"{self.preset.name} {self.batch}x{self.length} {'causal' if self.is_causal else 'full'}"

    @property
    def pass_name(self) -> str:
        """`forward` or `forward+backward`."""
        return "forward+backward" if self.training else "forward"

    @property
    def dtype_name(self) -> str:
        """`bfloat16`, without the `torch.`"""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Plan:
    """How much one run measures. The module and the parts get fewer cases than attention itself."""

    presets: tuple[str, ...]
    lengths: tuple[int, ...]
    module_presets: tuple[str, ...]
    module_lengths: tuple[int, ...]
    part_presets: tuple[str, ...]
    part_lengths: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    tokens: int  # batch = tokens / length, at least 1
    repeats: int  # samples per contender
    case_seconds: float  # fewer samples (three at least) where a case would take longer
    budget: float | None  # seconds after which no further case is started


ALL = tuple(PRESETS)
PLANS = {
    ("cpu", "quick"): Plan(
        ALL, (128, 512), ("bert-base", "gpt2"), (128, 512), ("gpt2",), (512,),
        (torch.float32,), tokens=512, repeats=7, case_seconds=2.0, budget=90.0,
    ),
    ("cpu", "full"): Plan(
        ALL, (128, 512, 2048), ("bert-base", "gpt2", "llama-7b"), (128, 512), ("gpt2", "llama-7b"), (512, 1024),
        (torch.float32, torch.bfloat16), tokens=1024, repeats=15, case_seconds=15.0, budget=None,
    ),
    ("cuda", "quick"): Plan(
        ALL, (512, 2048), ("gpt2", "llama-7b"), (512, 2048), ("gpt2", "llama-7b"), (2048,),
        (torch.bfloat16,), tokens=16384, repeats=11, case_seconds=2.0, budget=120.0,
    ),
    ("cuda", "full"): Plan(
        ALL, (512, 2048, 8192, 16384),
        ("bert-base", "gpt2", "llama-7b"), (512, 2048), ("gpt2", "llama-7b"), (512, 2048),
        (torch.bfloat16, torch.float16, torch.float32), tokens=16384, repeats=21, case_seconds=5.0, budget=None,
    ),
}  # fmt: skip


def cases_of(
    plan: Plan,
    groups: Iterable[str] = tuple(GROUPS),
    passes: Sequence[bool] = (False, True),
    is_causal: bool | None = None,
) -> list[Case]:
    """All cases of a plan, one dtype after the other.

    The kinds and passes take turns, so that a run that is cut short has some of everything.
    `is_causal` None: causal exactly where the preset's model is.
    """
    sizes = {
        "attention": (plan.presets, plan.lengths),
        "module": (plan.module_presets, plan.module_lengths),
        "parts": (plan.part_presets, plan.part_lengths),
    }
    cases: list[Case] = []
    for dtype in plan.dtypes:
        tables = []
        for group in (name for name in GROUPS if name in set(groups)):
            for kind, training in itertools.product(GROUPS[group], passes):
                table = []
                for name, length in itertools.product(*sizes[group]):
                    preset = PRESETS[name]
                    if kind == "module" and preset.num_heads != preset.num_kv_heads:
                        continue  # nn.MultiheadAttention has no grouped heads: nothing to compare with
                    causal = preset.is_causal if is_causal is None else is_causal
                    batch = max(1, plan.tokens // length)
                    table.append(Case(kind, preset, batch, length, dtype, causal, training))
                tables.append(table)
        cases += [case for turn in itertools.zip_longest(*tables) for case in turn if case is not None]
    return cases
